"""How one dim of a tensor is cut into pieces; the one place that knows of padding.

A dim of n rows over W ranks is cut into chunks of ceil(n / W) rows, as ``torch.chunk`` does: the
last ranks may have fewer rows, or none. Every rank stores a *padded piece* of the same shape, with
zeros behind its own rows, so that all pieces together are one ``jax.Array``.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

Shape = tuple[int, ...]


def rows_per_rank(size: int, ranks: int) -> int:
    """Rows of a padded piece: ceil(size / ranks)."""
    return -(-size // ranks)


def piece_shape(shape: Shape, dim: int, ranks: int) -> Shape:
    """The shape of a padded piece."""
    return (*shape[:dim], rows_per_rank(shape[dim], ranks), *shape[dim + 1 :])


def own_rows(size: int, ranks: int, index: int) -> int:
    """How many rows rank ``index`` has of its own."""
    rows = rows_per_rank(size, ranks)
    return min(rows, size - min(index * rows, size))


def to_chunks(full: Any, dim: int, ranks: int) -> Any:
    """The whole as (ranks, elements of a padded piece): row r is rank r's piece."""
    rows = rows_per_rank(full.shape[dim], ranks)
    moved = jnp.moveaxis(full, dim, 0)
    missing = rows * ranks - full.shape[dim]
    if missing:
        moved = jnp.pad(moved, [(0, missing)] + [(0, 0)] * (full.ndim - 1))
    return moved.reshape(ranks, math.prod((rows, *moved.shape[1:])))


def from_chunks(chunks: Any, shape: Shape, dim: int) -> Any:
    """The inverse of `to_chunks`."""
    ranks = chunks.shape[0]
    rest = (*shape[:dim], *shape[dim + 1 :])
    moved = chunks.reshape(ranks * rows_per_rank(shape[dim], ranks), *rest)
    return jnp.moveaxis(moved[: shape[dim]], 0, dim)


def flatten_piece(piece: Any, dim: int) -> Any:
    """A padded piece as one row of `to_chunks`."""
    return jnp.moveaxis(piece, dim, 0).reshape(-1)


def unflatten_piece(row: Any, shape: Shape, dim: int, ranks: int) -> Any:
    """The padded piece, from one row of `to_chunks`."""
    rows = rows_per_rank(shape[dim], ranks)
    rest = (*shape[:dim], *shape[dim + 1 :])
    return jnp.moveaxis(row.reshape(rows, *rest), 0, dim)
