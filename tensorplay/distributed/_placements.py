"""Placements: how a tensor lies along one axis of a mesh. Source: torch.distributed.tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


class Placement:
    """How a tensor lies along one mesh axis."""

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether ranks hold pieces (cut along ``dim``)."""
        return False

    def is_replicate(self) -> bool:
        """Whether every rank holds the whole."""
        return False

    def is_partial(self) -> bool:
        """Whether every rank holds a summand of the whole."""
        return False


@dataclasses.dataclass(frozen=True)
class Shard(Placement):
    """Cut along ``dim``, one piece per rank."""

    dim: int

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim


@dataclasses.dataclass(frozen=True)
class Replicate(Placement):
    """Whole on every rank."""

    def is_replicate(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class Partial(Placement):
    """The whole is what ``reduce_op`` makes of the ranks' values.

    Attributes:
        reduce_op: "sum", "avg", "product", "min" or "max".
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in PARTIAL_OPS:
            raise ValueError(f"reduce_op must be one of {PARTIAL_OPS}, got {self.reduce_op!r}")

    def is_partial(self) -> bool:
        return True


PARTIAL_OPS = ("sum", "avg", "product", "min", "max")


def normalized(
    placements: Sequence[Placement] | None, axes: Sequence[str], ndim: int
) -> tuple[Placement, ...]:
    """One placement for each mesh axis, with dims counted from the front; None replicates.

    Raises:
        ValueError: another number of placements than of axes.
        RuntimeError: a placement of no known kind, or a dim that the tensor does not have.
    """
    given: Sequence[Any] = [Replicate()] * len(axes) if placements is None else list(placements)
    if len(given) != len(axes):
        raise ValueError(
            "`placements` must have the same length as `device_mesh.ndim`! Found placements "
            f"length: {len(given)}, and device_mesh.ndim: {len(axes)}."
        )
    return tuple(_checked(p, ndim) for p in given)


def _checked(placement: Any, ndim: int) -> Placement:
    if not isinstance(placement, Placement):
        raise RuntimeError(f"placements hold Shard, Replicate and Partial; got {placement!r}")
    if not isinstance(placement, Shard):
        return placement
    if not -ndim <= placement.dim < ndim:
        raise RuntimeError(f"{placement} does not fit a tensor of {ndim} dims")
    return Shard(placement.dim % ndim)
