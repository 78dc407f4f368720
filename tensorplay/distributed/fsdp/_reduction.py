"""GroupReduction: what one backward does with the gradients of one group."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ._collectives import GroupSpec, reduce


@dataclasses.dataclass(frozen=True)
class GroupReduction:
    """See the module's docstring.

    Attributes:
        sync: reduce over the ranks; otherwise return the gradients whole.
        all_reduce: reduce over the replicas too; otherwise return partial pieces.
        waiting: parameters with whole gradients from earlier backwards to add.
        partial: parameters with partial pieces from earlier backwards to add.
        unused: give parameters without a gradient a gradient of zeros.
    """

    sync: bool
    all_reduce: bool
    waiting: tuple[int, ...]
    partial: tuple[int, ...]
    unused: bool

    def indices(self, present: Iterable[int], trainable: Iterable[int]) -> list[int]:
        """The parameters that get a result, where ``present`` have new gradients."""
        found = {*present, *self.waiting, *self.partial}
        if self.unused and self.sync:
            found.update(trainable)
        return sorted(found)

    def run(
        self,
        spec: GroupSpec,
        grads: dict[int, Any],
        earlier: Sequence[Any],
        trainable: Sequence[int],
    ) -> list[Any]:
        """The results for `indices`, computed by one rank.

        Args:
            grads: new whole gradients.
            earlier: those of ``waiting``, then the pieces of ``partial``.
        """
        count = len(self.waiting)
        total = dict(grads)
        for i, kept in zip(self.waiting, earlier[:count], strict=True):
            total[i] = total[i] + kept if i in total else kept
        indices = self.indices(grads, trainable)
        if not self.sync:
            return [self._whole(spec, total[i]) for i in indices]
        partial = dict(zip(self.partial, earlier[count:], strict=True))
        for i in indices:
            if i not in total and i not in partial:
                total[i] = jnp.zeros(spec.params[i].shape, spec.params[i].compute_dtype)
        pieces = reduce(spec, total, partial, self.all_reduce)
        return [pieces[i] for i in indices]

    def _whole(self, spec: GroupSpec, grad: Any) -> Any:
        """Kept gradients add up in the reduction's dtype."""
        return grad if spec.reduce_dtype is None else grad.astype(np.dtype(spec.reduce_dtype))
