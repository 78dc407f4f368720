"""Joining tensors, and ops that rearrange elements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .. import _dtypes
from .._dtypes import dtype as Dtype
from .._tensor import Tensor, wrap_dim
from .creation import DeviceLike, from_values
from .primitive import primitive
from .promotion import promoted
from .views import as_sizes, atleast_1d, atleast_2d, atleast_3d, expand, reshape


@primitive("cat")
def _cat(*tensors, dim):
    return jnp.concatenate(promoted(*tensors), axis=dim)


@primitive("stack")
def _stack(*tensors, dim):
    return jnp.stack(promoted(*tensors), axis=dim)


@primitive("repeat")
def _repeat(x, *, sizes):
    return jnp.tile(x, sizes)


@primitive("repeat_interleave")
def _repeat_interleave(x, *, repeats, dim):
    return jnp.repeat(x, repeats, axis=dim)


@primitive("repeat_interleave")
def _repeat_each(x, repeats, *, total, dim):
    return jnp.repeat(x, repeats, axis=dim, total_repeat_length=total)


@primitive("flip")
def _flip(x, *, dims):
    return jnp.flip(x, dims)


@primitive("roll")
def _roll(x, *, shifts, dims):
    return jnp.roll(x, shifts, dims)


@primitive("rot90")
def _rot90(x, *, k, dims):
    return jnp.rot90(x, k, dims)


@primitive("tril")
def _tril(x, *, diagonal):
    return jnp.tril(x, diagonal)


@primitive("triu")
def _triu(x, *, diagonal):
    return jnp.triu(x, diagonal)


@primitive("diag")
def _diag(x, *, diagonal):
    return jnp.diag(x, diagonal)


@primitive("diag_embed")
def _diag_embed(x, *, offset):
    size = x.shape[-1] + abs(offset)
    rows = jnp.arange(x.shape[-1]) + max(-offset, 0)
    columns = jnp.arange(x.shape[-1]) + max(offset, 0)
    return jnp.zeros((*x.shape[:-1], size, size), x.dtype).at[..., rows, columns].set(x)


@primitive("unfold")
def _unfold(x, *, dim, size, step):
    starts = jnp.arange(0, x.shape[dim] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + jnp.arange(size), axis=dim)
    return jnp.moveaxis(windows, dim + 1, -1)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors one after another along ``dim``."""
    if not tensors:
        raise RuntimeError("torch.cat(): expected a non-empty list of Tensors")
    kept = [t for t in tensors if t._array_shape() != (0,)] or [tensors[0]]
    if any(t.dim() == 0 for t in kept):
        raise RuntimeError("zero-dimensional tensor (at position 0) cannot be concatenated")
    d = wrap_dim(dim, kept[0].dim())
    _check_joined(kept, d)
    return _cat(*kept, dim=d)


def _check_joined(tensors: Sequence[Tensor], dim: int) -> None:
    first = tensors[0]._array_shape()
    for position, tensor in enumerate(tensors):
        shape = tensor._array_shape()
        if len(shape) != len(first):
            raise RuntimeError(
                f"Tensors must have same number of dimensions: got {len(first)} and {len(shape)}"
            )
        for d, (a, b) in enumerate(zip(first, shape, strict=True)):
            if d != dim and a != b:
                raise RuntimeError(
                    f"Sizes of tensors must match except in dimension {dim}. Expected size {a} but "
                    f"got size {b} for tensor number {position} in the list."
                )


concat = cat
concatenate = cat


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one shape along a new dim ``dim``."""
    if not tensors:
        raise RuntimeError("stack expects a non-empty TensorList")
    first = tensors[0].shape
    for position, other in enumerate(tensors):
        if other.shape != first:
            raise RuntimeError(
                f"stack expects each tensor to be equal size, but got {list(first)} at entry 0 and "
                f"{list(other.shape)} at entry {position}"
            )
    return _stack(*tensors, dim=wrap_dim(dim, len(first) + 1))


def hstack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors side by side: along dim 1 (dim 0 where they are 1-D)."""
    found = [atleast_1d(t) for t in tensors]
    return cat(found, 0 if found[0].dim() == 1 else 1)


def vstack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as rows, along dim 0."""
    return cat([atleast_2d(t) for t in tensors], 0)


row_stack = vstack


def dstack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors along dim 2."""
    return cat([atleast_3d(t) for t in tensors], 2)


def column_stack(tensors: Sequence[Tensor]) -> Tensor:
    """1-D tensors as columns, others along dim 1."""
    return hstack([reshape(t, t.numel(), 1) if t.dim() <= 1 else t for t in tensors])


def block_diag(*tensors: Tensor) -> Tensor:
    """A matrix with ``tensors`` along its diagonal, zero elsewhere."""
    blocks = [atleast_2d(t) for t in tensors]
    rows = []
    for i, block in enumerate(blocks):
        row = [
            block if i == j else block.new_zeros(block.shape[0], other.shape[1])
            for j, other in enumerate(blocks)
        ]
        rows.append(cat(row, 1))
    return cat(rows, 0)


def meshgrid(*tensors: Any, indexing: str = "ij") -> tuple[Tensor, ...]:
    """Grids of coordinates from 1-D tensors; ``indexing`` is ``"ij"`` or ``"xy"``."""
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        tensors = tuple(tensors[0])
    if indexing not in ("ij", "xy"):
        raise RuntimeError(
            f'torch.meshgrid: indexing must be one of "xy" or "ij", but received: {indexing}'
        )
    swap = indexing == "xy" and len(tensors) >= 2
    order = [1, 0, *range(2, len(tensors))] if swap else list(range(len(tensors)))
    flat = [reshape(tensors[i], -1) for i in order]
    sizes = [t.numel() for t in flat]
    grids = [
        expand(reshape(t, [n if d == i else 1 for d, n in enumerate(sizes)]), sizes)
        for i, t in enumerate(flat)
    ]
    return tuple(grids[order.index(i)] for i in range(len(tensors)))


def cartesian_prod(*tensors: Tensor) -> Tensor:
    """All combinations of entries of 1-D tensors, one a row."""
    if len(tensors) == 1:
        return tensors[0]
    return stack([reshape(g, -1) for g in meshgrid(*tensors)], 1)


def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """Combinations of ``r`` entries of a 1-D tensor, one a row."""
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    rows = list(choose(range(input.numel()), r))
    index = from_values(rows, _dtypes.int64.numpy, None)
    return input[index] if rows else input.new_zeros(0, r)


def repeat(x: Tensor, *sizes: Any) -> Tensor:
    """``x`` copied ``sizes[d]`` times along each dim ``d``."""
    found = as_sizes(sizes)
    if len(found) < x.dim():
        raise RuntimeError(
            "Number of dimensions of repeat dims can not be smaller than number of dimensions of "
            "tensor"
        )
    return _repeat(x, sizes=found)


def tile(input: Tensor, *dims: Any) -> Tensor:
    """As ``repeat``; missing counts are 1."""
    found = as_sizes(dims)
    return _repeat(input, sizes=(1,) * (input.dim() - len(found)) + found)


def repeat_interleave(
    x: Tensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """Each entry ``repeats`` times in a row; a tensor of counts gives each entry its own."""
    if dim is None:
        x, dim = reshape(x, -1), 0
    dim = wrap_dim(dim, x.dim())
    if isinstance(repeats, Tensor):
        counts = expand(repeats, x.shape[dim]) if repeats.numel() == 1 else repeats
        total = int(counts.sum()) if output_size is None else output_size
        return _repeat_each(x, counts, total=total, dim=dim)
    return _repeat_interleave(x, repeats=int(repeats), dim=dim)


def flip(x: Tensor, *dims: Any) -> Tensor:
    """The order of entries reversed along ``dims``."""
    wrapped = tuple(wrap_dim(d, x.dim()) for d in as_sizes(dims))
    return _flip(x, dims=wrapped if x.dim() else ())


def fliplr(input: Tensor) -> Tensor:
    """The order reversed along dim 1."""
    return flip(input, 1)


def flipud(input: Tensor) -> Tensor:
    """The order reversed along dim 0."""
    return flip(input, 0)


def rot90(input: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """``input`` turned ``k`` times by 90 degrees in the plane of ``dims``."""
    return _rot90(input, k=k, dims=tuple(dims))


def roll(x: Tensor, shifts: Any, dims: Any = None) -> Tensor:
    """Entries moved around cyclically."""
    return _roll(
        x,
        shifts=shifts if isinstance(shifts, int) else tuple(shifts),
        dims=dims if dims is None or isinstance(dims, int) else tuple(dims),
    )


def unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Windows of ``size`` entries of ``dimension``, every ``step``, as a new last dim (a copy)."""
    dim = wrap_dim(dimension, x.dim())
    if size > x.shape[dim]:
        raise RuntimeError(
            f"maximum size for tensor at dimension {dim} is {x.shape[dim]} but size is {size}"
        )
    return _unfold(x, dim=dim, size=size, step=step)


def tril(input: Tensor, diagonal: int = 0) -> Tensor:
    """The lower triangle; zero above ``diagonal``."""
    return _tril(input, diagonal=diagonal)


def triu(input: Tensor, diagonal: int = 0) -> Tensor:
    """The upper triangle; zero below ``diagonal``."""
    return _triu(input, diagonal=diagonal)


def diag(input: Tensor, diagonal: int = 0) -> Tensor:
    """A matrix from its diagonal (1-D input), or the diagonal of a matrix."""
    return _diag(input, diagonal=diagonal)


def diagflat(input: Tensor, offset: int = 0) -> Tensor:
    """A matrix with the elements of ``input`` on a diagonal."""
    return _diag(reshape(input, -1), diagonal=offset)


def diag_embed(input: Tensor, offset: int = 0) -> Tensor:
    """Matrices with the last dim of ``input`` on their diagonals."""
    return _diag_embed(input, offset=offset)


def _triangle(name: str, inside: Any) -> Any:
    def op(
        row: int,
        col: int,
        offset: int = 0,
        *,
        dtype: Dtype = _dtypes.int64,
        device: DeviceLike = None,
    ) -> Tensor:
        cells = [(r, c) for r in range(row) for c in range(col) if inside(c - r, offset)]
        rows, columns = [r for r, _ in cells], [c for _, c in cells]
        return from_values([rows, columns], dtype.numpy, device)

    op.__name__ = name
    op.__doc__ = "Rows and columns of a triangle of a (row, col) matrix, shape (2, count)."
    return op


tril_indices = _triangle("tril_indices", lambda place, offset: place <= offset)
triu_indices = _triangle("triu_indices", lambda place, offset: place >= offset)
