"""Where the tensors of a call cross from the caller to the ranks, and back.

A rank's call has the rank's own tensors. With one controller the caller has the whole batch: it is
split over the ranks, their outputs are joined, and each rank's loss counts as its share of the
mean. Gradients of the ranks are those of their own losses, as with other ranks; the boundary scales
what crosses it by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._state import state
from ..._tensor import Tensor
from .._replicate import is_replicated
from .._spmd import Spread, sharding_of
from ._mesh import DataParallelMesh

Shape = tuple[int, ...]


class RankBoundary:
    """Of a rank's call: nothing changes but that scalars get a dim, which carries the mesh axes.

    Attributes:
        key: what of the arguments' way to the ranks a trace depends on.
        joins: whether outputs are joined over the ranks.
    """

    key: Any = ()
    joins = False

    def __init__(self, mesh: DataParallelMesh) -> None:
        self.mesh = mesh

    def shapes(self, tensors: Sequence[Tensor]) -> list[Shape]:
        """The arguments' shapes on a rank."""
        return [t._array_shape() for t in tensors]

    def argument(self, index: int, array: Any) -> Spread:
        """An argument on its way in."""
        return self.same(array)

    def same(self, array: Any) -> Spread:
        """A value that is the same on all ranks, as far as the caller knows."""
        return Spread.of_local(self.mesh.jax_mesh, _with_dim(array) if array.ndim == 0 else array)

    def random(self, numbers: list[int]) -> Spread:
        """The random state: seed words, offset; then the rank, which is added here."""
        return self.same(jnp.asarray(np.array([*numbers, self.mesh.rank], np.uint32)))

    def output(self, spread: Spread, aval: Any) -> Any:
        """An output on its way back."""
        return _without_dim(spread.local) if len(aval.shape) == 0 else spread.local

    def gradient_of_output(self, grad: Any) -> Spread:
        """The gradient of an output on its way in."""
        return self.same(grad)

    def gradient_of_argument(self, spread: Spread, aval: Any, index: int) -> Any:
        """The gradient of argument ``index`` (negative: of another input) on its way back."""
        return self.output(spread, aval)


class ControllerBoundary(RankBoundary):
    """Of one controller's call.

    Raises:
        ValueError: the batch does not divide over the ranks.
    """

    joins = True

    def __init__(self, mesh: DataParallelMesh, tensors: Sequence[Tensor]) -> None:
        super().__init__(mesh)
        self.size = mesh.size
        self.splits = _splits(tensors, mesh.size)
        self.key = ("split", self.splits)

    def shapes(self, tensors: Sequence[Tensor]) -> list[Shape]:
        return [
            (shape[0] // self.size, *shape[1:]) if split else shape
            for shape, split in zip((t._array_shape() for t in tensors), self.splits, strict=True)
        ]

    def argument(self, index: int, array: Any) -> Spread:
        return self._split(array) if self.splits[index] else self.same(array)

    def _split(self, array: Any) -> Spread:
        mesh = self.mesh.jax_mesh
        return Spread.of_global(mesh, jax.device_put(array, sharding_of(mesh)))

    def random(self, numbers: list[int]) -> Spread:
        return self._split(
            np.array([[*numbers, rank] for rank in range(self.size)], np.uint32).reshape(-1)
        )

    def output(self, spread: Spread, aval: Any) -> Any:
        array = spread.global_array if aval.shape else _mean(spread.global_array)
        return self._back(array)

    def _back(self, array: Any) -> Any:
        return jax.device_put(array, self.mesh.jax_mesh.devices.flat[0])

    def gradient_of_output(self, grad: Any) -> Spread:
        return self._split(_times(grad, self.size)) if grad.ndim else self.same(grad)

    def gradient_of_argument(self, spread: Spread, aval: Any, index: int) -> Any:
        grads = spread.global_array
        if index >= 0 and self.splits[index]:
            return self._back(_times(grads, 1 / self.size))
        return self._back(_mean_over_ranks(grads, self.size, tuple(aval.shape)))


def boundary_of(mesh: DataParallelMesh, tensors: Sequence[Tensor]) -> RankBoundary:
    """The boundary of a call with these tensors among its arguments."""
    if mesh.controlled and not state.one_rank:
        return ControllerBoundary(mesh, tensors)
    return RankBoundary(mesh)


def _splits(tensors: Sequence[Tensor], ranks: int) -> tuple[bool, ...]:
    """Which tensors are split: those whose dim 0 is that of the first, the batch."""
    own = [t for t in tensors if t.dim() and not is_replicated(t)]
    if not own:
        return (False,) * len(tensors)
    batch = own[0].shape[0]
    if batch % ranks:
        raise ValueError(
            f"the batch has {batch} rows (dim 0 of the first tensor argument, of shape "
            f"{tuple(own[0].shape)}), which do not divide over the mesh's {ranks} ranks: take a "
            "batch that does, or keep the tensor whole with tensorplay.distributed.replicate(t)"
        )
    return tuple(bool(t.dim()) and t.shape[0] == batch and not is_replicated(t) for t in tensors)


@jax.jit
def _mean(values: Any) -> Any:
    if not jnp.issubdtype(values.dtype, np.inexact):
        values = values.astype(np.float32)
    return jnp.mean(values)


@jax.jit
def _times(array: Any, factor: Any) -> Any:
    return array * jnp.asarray(factor, array.dtype)


def _mean_of_copies(grads: Any, ranks: int, shape: Shape) -> Any:
    return jnp.mean(grads.reshape(ranks, *shape), axis=0)


_mean_over_ranks = jax.jit(_mean_of_copies, static_argnums=(1, 2))
_with_dim = jax.jit(lambda a: a.reshape(1))
_without_dim = jax.jit(lambda a: a.reshape(()))
