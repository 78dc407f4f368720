"""What one rank computes in a collective: pure functions of arrays, for use inside ``shard_map``.

``axis`` is the name of the mesh axis and ``ranks`` its size everywhere. Of several ways to write a
collective the fastest on each backend was chosen with ``tests/benchmarks/collectives.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

Combine = Callable[[Any, Any], Any]


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


def gather(x: Any, axis: str, ranks: int, target: int) -> Any:
    """All ranks' ``x``, stacked, on rank ``target``; on the others something of that shape."""
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


def all_to_all_permutes(rows: Any, axis: str, ranks: int) -> Any:
    """Row r of rank s becomes row s of rank r."""
    own = lax.axis_index(axis)
    result = rows
    for step in range(1, ranks):
        pairs = [(r, (r + step) % ranks) for r in range(ranks)]
        received = lax.ppermute(jnp.take(rows, (own + step) % ranks, axis=0), axis, pairs)
        result = result.at[(own - step) % ranks].set(received)
    return result
