"""One controller's call as plain Python: once for each rank, one after the other.

Ranks of processes and threads run the Python of ``forward`` each for themselves. Where a call
cannot be compiled, one controller does the same for all of them, on the first device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..._dtypes import float32
from ..._ops.join import cat, stack
from ..._ops.math import to_dtype
from ..._ops.random import Generator
from ..._state import state
from ..._structure import flatten, unflatten
from ..._tensor import Tensor
from ._boundary import ControllerBoundary


@contextlib.contextmanager
def _as_one_rank() -> Iterator[None]:
    state.one_rank = True
    try:
        yield
    finally:
        state.one_rank = False


def run_for_each_rank(
    boundary: ControllerBoundary,
    call: Callable[..., Any],
    handed: Any,
    buffers: Sequence[Tensor],
    generator: Generator,
) -> Any:
    """Runs ``call`` as plain Python once for each rank, one after the other, and joins the outputs.

    Random draws, and buffers, start from the same state for each; buffers keep what the first rank
    wrote.

    Args:
        handed: (args, kwargs) of the whole batch.
    """
    tensors, structure = flatten(handed)
    before, start = [b._storage.array for b in buffers], generator.get_state()
    outputs, after = [], before
    for rank in range(boundary.size):
        for buffer, array in zip(buffers, before, strict=True):
            buffer._storage.array = array
        generator.set_state(start)
        generator.stream = rank
        own = [
            _rows(t, rank, boundary.size) if split else t
            for t, split in zip(tensors, boundary.splits, strict=True)
        ]
        args, kwargs = unflatten(structure, own, handed)
        with _as_one_rank():
            outputs.append(call(*args, **kwargs))
        if rank == 0:
            after = [b._storage.array for b in buffers]
    for buffer, array in zip(buffers, after, strict=True):
        buffer._storage.array = array
    return _joined(outputs)


def _rows(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    rows = tensor.shape[0] // ranks
    return tensor[rank * rows : (rank + 1) * rows]


def _joined(outputs: list[Any]) -> Any:
    parts = [flatten(out) for out in outputs]
    tensors, structure = parts[0]
    if any(len(other) != len(tensors) for other, _ in parts):
        raise RuntimeError("forward returned other numbers of tensors for the rows of other ranks")
    joined = [_join(list(pieces)) for pieces in zip(*(found for found, _ in parts), strict=True)]
    return unflatten(structure, joined)


def _join(pieces: list[Tensor]) -> Tensor:
    if pieces[0].dim():
        return cat(pieces)
    together = stack(pieces)
    return to_dtype(together, _averaged(together)).mean()  # type: ignore[no-any-return]


def _averaged(values: Tensor) -> Any:
    """The dtype of a mean: counts get a fraction."""
    inexact = values.is_floating_point() or values.is_complex()
    return values.dtype if inexact else float32
