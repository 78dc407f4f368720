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

    def piece_shape(self, index: int) -> tuple[int, ...]:
        """The shape of a parameter's padded piece."""
        p = self.params[index]
        return piece_shape(p.shape, p.dim, self.shard_size)

    def flat(self, index: int, piece: Any) -> Any:
        """A parameter's padded piece, flat."""
        return flatten_piece(piece, self.params[index].dim)


def gather(spec: GroupSpec, pieces: Sequence[Any], within: int = 0) -> list[Any]:
    """The whole parameters, in their compute dtype, from this rank's padded pieces.

    Args:
        within: the pieces are those that `part` made for that many ranks; 0 for those of all.
    """
    if not pieces:
        return []
    among = _neighbours(spec, within) if within else None
    flat = flat_pieces(spec, pieces)
    return wholes_of(spec, lax.all_gather(flat, spec.shard_axis, axis_index_groups=among))


def flat_pieces(spec: GroupSpec, pieces: Sequence[Any]) -> Any:
    """Padded pieces one behind the other, in their compute dtypes; as bytes where those differ."""
    flats = [
        flatten_piece(piece, p.dim).astype(np.dtype(p.compute_dtype))
        for p, piece in zip(spec.params, pieces, strict=True)
    ]
    if _mixes_dtypes(spec):
        flats = [_as_bytes(flat) for flat in flats]
    return _joined(flats)


def wholes_of(spec: GroupSpec, rows: Any) -> list[Any]:
    """The whole parameters, from a row of `flat_pieces` for each rank."""
    wholes, start = [], 0
    for p in spec.params:
        dtype, size = np.dtype(p.compute_dtype), math.prod(piece_shape(p.shape, p.dim, len(rows)))
        if _mixes_dtypes(spec):
            size *= dtype.itemsize
        chunks = lax.slice_in_dim(rows, start, start + size, axis=1)
        start += size
        if _mixes_dtypes(spec):
            chunks = _from_bytes(chunks, dtype)
        wholes.append(from_chunks(chunks, p.shape, p.dim))
    return wholes


def _mixes_dtypes(spec: GroupSpec) -> bool:
    return len({p.compute_dtype for p in spec.params}) > 1


def part(spec: GroupSpec, wholes: Sequence[Any], within: int) -> list[Any]:
    """This rank's padded pieces where every ``within`` neighbours on the shard axis share them."""
    place = lax.axis_index(spec.shard_axis) % within
    return [
        unflatten_piece(to_chunks(whole, p.dim, within)[place], p.shape, p.dim, within)
        for p, whole in zip(spec.params, wholes, strict=True)
    ]


def _neighbours(spec: GroupSpec, within: int) -> list[list[int]]:
    ranks = list(range(spec.shard_size))
    return [ranks[start : start + within] for start in range(0, spec.shard_size, within)]


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
    chunks = chunks_of(spec, indices, grads, partial)
    before, after = divide_factors(spec, chunks.dtype)
    row = _reduce_scatter(spec, divided(chunks, before))
    if partial:
        row = row + partial_row(spec, indices, partial, row.dtype)
    if all_reduce:
        row = divided(_all_reduce(spec, row), after)
    return pieces_of(spec, indices, row, all_reduce)


def pieces_of(spec: GroupSpec, indices: Sequence[int], row: Any, final: bool) -> dict[int, Any]:
    """A reduced row as padded pieces; ``final`` ones in the parameters' own dtype."""
    pieces, start = {}, 0
    for i in indices:
        p = spec.params[i]
        size = math.prod(spec.piece_shape(i))
        part = lax.slice_in_dim(row, start, start + size, axis=0)
        start += size
        piece = unflatten_piece(part, p.shape, p.dim, spec.shard_size)
        pieces[i] = piece.astype(np.dtype(p.dtype)) if final else piece
    return pieces


def chunks_of(spec: GroupSpec, indices: list[int], grads: dict[int, Any], partial: Any) -> Any:
    """The whole gradients, chunk-major; zeros for parameters that have earlier pieces only."""
    dtype = next(iter(grads.values()) if grads else iter(partial.values())).dtype
    wholes = [grads[i] if i in grads else jnp.zeros(spec.params[i].shape, dtype) for i in indices]
    chunks = [
        to_chunks(_for_reduction(spec, g), spec.params[i].dim, spec.shard_size)
        for i, g in zip(indices, wholes, strict=True)
    ]
    return chunks[0] if len(chunks) == 1 else jnp.concatenate(chunks, axis=1)


def partial_row(spec: GroupSpec, indices: Sequence[int], partial: Any, dtype: Any) -> Any:
    """Earlier pieces as a row of a reduction; zeros where there are none."""
    return _joined([_partial_of(spec, i, partial, dtype) for i in indices])


def _partial_of(spec: GroupSpec, index: int, partial: dict[int, Any], dtype: Any) -> Any:
    if index in partial:
        return spec.flat(index, partial[index]).astype(dtype)
    return jnp.zeros(math.prod(spec.piece_shape(index)), dtype)


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


def divide_factors(spec: GroupSpec, dtype: Any) -> tuple[float, float]:
    """What gradients are divided by before and after they are summed.

    float16 is divided by about the root before, so that sums neither overflow nor vanish.
    """
    factor = spec.divide_factor
    if factor is None:
        factor = spec.shard_size * spec.replicate_size
    before = 1
    if dtype == np.float16:
        while factor % before == 0 and factor / before > before:
            before *= 2
    return before, factor / before


def divided(x: Any, factor: float) -> Any:
    """``x / factor`` in the dtype of ``x``."""
    return x if factor == 1 else x / jnp.asarray(factor, x.dtype)
