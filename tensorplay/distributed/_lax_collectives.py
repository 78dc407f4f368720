"""What one rank computes in a collective: pure functions of arrays, for use inside ``shard_map``.

``axis`` is the name of the mesh axis and ``ranks`` its size everywhere. Of several ways to write a
collective the fastest on each backend was chosen with ``tests/benchmarks/collectives.py``; ``gloo``
says that the ranks are processes that drive CPU devices.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

Combine = Callable[[Any, Any], Any]

_COMBINE: dict[str, Combine] = {
    "SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": jnp.minimum,
    "MAX": jnp.maximum,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}
_ON_BOOL = {"SUM": "MAX", "PRODUCT": "MIN", "BAND": "MIN", "BOR": "MAX"}
_WHOLE = {"SUM": lax.psum, "MIN": lax.pmin, "MAX": lax.pmax}


def _over_all_dtypes(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Adds bool, as bytes, and AVG, as a scaled sum, to a reduction of numbers."""

    @functools.wraps(reduce)
    def wrapped(x: Any, op: str, axis: str, ranks: int, *rest: Any) -> Any:
        if x.dtype == np.bool_:
            as_bytes = reduce(x.astype(np.uint8), _ON_BOOL.get(op, op), axis, ranks, *rest)
            return as_bytes.astype(np.bool_)
        if op == "AVG":
            return reduce(x, "SUM", axis, ranks, *rest) / np.array(ranks, x.dtype)
        return reduce(x, op, axis, ranks, *rest)

    return wrapped


@_over_all_dtypes
def all_reduce(x: Any, op: str, axis: str, ranks: int) -> Any:
    """All ranks' ``x`` combined, on every rank, bit for bit the same.

    Args:
        op: a name of `ReduceOp`, but PREMUL_SUM.
    """
    if op in _WHOLE:
        return _WHOLE[op](x, axis)
    flat = x.reshape(-1)
    rows = jnp.pad(flat, (0, -flat.size % ranks)).reshape(ranks, -(-flat.size // ranks))
    row = ring_reduce_scatter(rows, axis, ranks, _COMBINE[op])
    return lax.all_gather(row, axis).reshape(-1)[: flat.size].reshape(x.shape)


@_over_all_dtypes
def reduce_scatter(rows: Any, op: str, axis: str, ranks: int, gloo: bool) -> Any:
    """Row r of all ranks' ``rows`` combined, on rank r.

    Args:
        rows: of shape (ranks, ...).
        op: a name of `ReduceOp`, but PREMUL_SUM.
    """
    if op == "SUM" and not gloo:
        return lax.psum_scatter(rows, axis, scatter_dimension=0, tiled=False)
    return ring_reduce_scatter(rows, axis, ranks, _COMBINE[op])


def ring_reduce_scatter(rows: Any, axis: str, ranks: int, combine: Combine) -> Any:
    """Row r of all ranks' ``rows`` combined, on rank r; rows travel once around the ring."""
    own = lax.axis_index(axis)
    to_next = [(r, (r + 1) % ranks) for r in range(ranks)]
    row = jnp.take(rows, (own - 1) % ranks, axis=0)
    for step in range(2, ranks + 1):
        row = lax.ppermute(row, axis, to_next)
        row = combine(row, jnp.take(rows, (own - step) % ranks, axis=0))
    return row


def broadcast(x: Any, axis: str, ranks: int, source: int) -> Any:
    """``x`` of rank ``source`` on every rank, bit for bit; the ranks that have it double."""
    place = (lax.axis_index(axis) - source) % ranks
    have = 1
    while have < ranks:
        pairs = [
            ((source + r) % ranks, (source + r + have) % ranks)
            for r in range(min(have, ranks - have))
        ]
        received = lax.ppermute(x, axis, pairs)
        x = jnp.where((place >= have) & (place < 2 * have), received, x)
        have *= 2
    return x


def gather(x: Any, axis: str, ranks: int, target: int, gloo: bool) -> Any:
    """All ranks' ``x``, stacked, on rank ``target``; on the others something of that shape."""
    if not gloo:
        return lax.all_gather(x, axis)
    return jnp.stack(
        [x if r == target else lax.ppermute(x, axis, [(r, target)]) for r in range(ranks)]
    )


def scatter(parts: Sequence[Any], axis: str, ranks: int, source: int) -> Any:
    """``parts[r]`` of rank ``source``, on rank r."""
    own, result = lax.axis_index(axis), parts[source]
    for r, part in enumerate(parts):
        if r != source:
            received = lax.ppermute(part, axis, [(source, r)])
            result = jnp.where(own == r, received, result)
    return result


def all_to_all(rows: Any, axis: str) -> Any:
    """Row r of rank s becomes row s of rank r; ``rows`` is of shape (ranks, ...)."""
    return lax.all_to_all(rows, axis, split_axis=0, concat_axis=0)
