"""What one rank computes to gather a group's parameters and to reduce its gradients.

Pure functions of arrays, called inside a ``shard_map`` over the mesh. A group travels in one
collective: its padded pieces one behind the other in a flat buffer, chunk-major on the whole side.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._chunks import flatten_piece, from_chunks, piece_shape, to_chunks, unflatten_piece
from .._lax_collectives import ring_reduce_scatter


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """What the collectives need to know of one parameter.

    Attributes:
        shape: of the whole.
        dim: that is cut.
        dtype: of the sharded parameter and its gradient (numpy name).
        compute_dtype: of the unsharded parameter.
    """

    shape: tuple[int, ...]
    dim: int
    dtype: str
    compute_dtype: str


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """What the collectives need to know of one group.

    Attributes:
        params: in the order of the flat buffer.
        shard_axis, shard_size, replicate_axis, replicate_size: see ``DataParallelMesh``.
        reduce_dtype: of the reduction, or None for the gradients' own.
        divide_factor: the summed gradients are divided by it; None averages over all ranks.
        ring: reduce by a ring of permutes.
    """

    params: tuple[ParamSpec, ...]
    shard_axis: str
    shard_size: int
    replicate_axis: str | None
    replicate_size: int
    reduce_dtype: str | None
    divide_factor: float | None
    ring: bool


def gather(spec: GroupSpec, pieces: Sequence[Any]) -> list[Any]:
    """The whole parameters, in their compute dtype, from this rank's padded pieces."""
    if not pieces:
        return []
    flats = [
        flatten_piece(piece, p.dim).astype(np.dtype(p.compute_dtype))
        for p, piece in zip(spec.params, pieces, strict=True)
    ]
    dtypes = [flat.dtype for flat in flats]
    if len(set(dtypes)) > 1:
        flats = [_as_bytes(flat) for flat in flats]
    rows = lax.all_gather(_joined(flats), spec.shard_axis)
    whole, start = [], 0
    for p, flat, dtype in zip(spec.params, flats, dtypes, strict=True):
        chunks = lax.slice_in_dim(rows, start, start + flat.size, axis=1)
        start += flat.size
        if flat.dtype != dtype:
            chunks = _from_bytes(chunks, dtype)
        whole.append(from_chunks(chunks, p.shape, p.dim))
    return whole


def reduce(
    spec: GroupSpec,
    grads: dict[int, Any],
    partial: dict[int, Any],
    all_reduce: bool = True,
) -> dict[int, Any]:
    """This rank's padded pieces of the averaged gradients, in the parameters' own dtype.

    Args:
        grads: this rank's whole gradients, by position in ``spec.params``.
        partial: pieces from earlier calls without ``all_reduce``, to be added.
        all_reduce: sum over the replicas and average. Otherwise the result is summed over the shard
            axis only, in the reduction's dtype, to be given as ``partial`` later.
    """
    indices = sorted({*grads, *partial})
    if not indices:
        return {}
    row = _reduce_scatter(spec, _chunks(spec, indices, grads, partial))
    if partial:
        row = row + _joined([_partial_row(spec, i, partial, row.dtype) for i in indices])
    if all_reduce:
        row = _scaled(spec, _all_reduce(spec, row))
    pieces, start = {}, 0
    for i in indices:
        p = spec.params[i]
        size = math.prod(piece_shape(p.shape, p.dim, spec.shard_size))
        part = lax.slice_in_dim(row, start, start + size, axis=0)
        start += size
        piece = unflatten_piece(part, p.shape, p.dim, spec.shard_size)
        pieces[i] = piece.astype(np.dtype(p.dtype)) if all_reduce else piece
    return pieces


def _chunks(spec: GroupSpec, indices: list[int], grads: dict[int, Any], partial: Any) -> Any:
    """The whole gradients, chunk-major; zeros for parameters that have earlier pieces only."""
    dtype = next(iter(grads.values()) if grads else iter(partial.values())).dtype
    wholes = [grads[i] if i in grads else jnp.zeros(spec.params[i].shape, dtype) for i in indices]
    chunks = [
        to_chunks(_for_reduction(spec, g), spec.params[i].dim, spec.shard_size)
        for i, g in zip(indices, wholes, strict=True)
    ]
    return chunks[0] if len(chunks) == 1 else jnp.concatenate(chunks, axis=1)


def _partial_row(spec: GroupSpec, index: int, partial: dict[int, Any], dtype: Any) -> Any:
    p = spec.params[index]
    if index in partial:
        return flatten_piece(partial[index], p.dim).astype(dtype)
    return jnp.zeros(math.prod(piece_shape(p.shape, p.dim, spec.shard_size)), dtype)


def _joined(flats: list[Any]) -> Any:
    return flats[0] if len(flats) == 1 else jnp.concatenate(flats)


def _as_bytes(flat: Any) -> Any:
    if flat.dtype == np.bool_:
        return flat.astype(np.uint8)
    return lax.bitcast_convert_type(flat, np.uint8).reshape(-1)


def _from_bytes(chunks: Any, dtype: Any) -> Any:
    if dtype == np.bool_:
        return chunks.astype(np.bool_)
    width = np.dtype(dtype).itemsize
    shape = chunks.shape if width == 1 else (*chunks.shape[:-1], chunks.shape[-1] // width, width)
    return lax.bitcast_convert_type(chunks.reshape(shape), dtype)


def _for_reduction(spec: GroupSpec, grad: Any) -> Any:
    return grad if spec.reduce_dtype is None else grad.astype(np.dtype(spec.reduce_dtype))


def _reduce_scatter(spec: GroupSpec, flat: Any) -> Any:
    """Sum of row r of ``flat`` over the shard axis, on its rank r."""
    if spec.shard_size == 1:
        return flat[0]
    if spec.ring:
        return ring_reduce_scatter(flat, spec.shard_axis, spec.shard_size, operator.add)
    return lax.psum_scatter(flat, spec.shard_axis, scatter_dimension=0, tiled=False)


def _all_reduce(spec: GroupSpec, row: Any) -> Any:
    """Sum over the replicas."""
    if spec.replicate_axis is None or spec.replicate_size == 1:
        return row
    return lax.psum(row, spec.replicate_axis)


def _scaled(spec: GroupSpec, row: Any) -> Any:
    factor = spec.divide_factor
    if factor is None:
        factor = spec.shard_size * spec.replicate_size
    return row if factor == 1 else row / jnp.asarray(factor, row.dtype)
