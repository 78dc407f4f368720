"""Indexing: basic indices are views, tensors as indices gather and scatter."""

from __future__ import annotations

import builtins
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import _views
from .._state import state
from .._tensor import Tensor, wrap_dim
from . import math
from .creation import as_tensor
from .inplace import assign, copy_
from .primitive import primitive
from .views import view_through


def getitem(x: Tensor, index: Any) -> Tensor:
    """``x[index]``: a view for ints, slices, None and ...; a copy for tensors and lists."""
    items = _expanded(x, _as_tuple(index))
    if any(isinstance(i, Tensor) for i in items):
        spec, arrays = _advanced(x, items)
        return _gather(x, *arrays, spec=spec)
    return view_through(x, _basic_chain(x, items))


def setitem(x: Tensor, index: Any, value: Any) -> None:
    """``x[index] = value``, broadcast and cast to the dtype of ``x``."""
    value = value if isinstance(value, Tensor) else as_tensor(value)
    items = _expanded(x, _as_tuple(index))
    if not any(isinstance(i, Tensor) for i in items):
        copy_(view_through(x, _basic_chain(x, items)), value)
        return
    mask = items[0]
    if isinstance(mask, Tensor) and mask.dtype.name == "bool" and value.numel() == 1:
        if all(_is_whole(i) for i in items[1:]):
            shape = mask._array_shape() + (1,) * (x.dim() - mask.dim())
            assign(x, math.where_(mask.reshape(shape), value.reshape(()), x))
            return
    spec, arrays = _advanced(x, items)
    assign(x, _scatter(x, math.to_dtype(value, x.dtype), *arrays, spec=spec, accumulate=False))


def _as_tuple(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_whole(item: Any) -> bool:
    return isinstance(item, builtins.slice) and item == builtins.slice(None)


def _expanded(x: Tensor, items: tuple[Any, ...]) -> list[Any]:
    """Lists and arrays as tensors, ``...`` and missing dims as full slices."""
    found = [_normal(i) for i in items]
    used = sum(_dims_used(i) for i in found)
    if used > x.dim():
        raise IndexError(f"too many indices for tensor of dimension {x.dim()}")
    whole = [builtins.slice(None)] * (x.dim() - used)
    for position, item in enumerate(found):
        if item is Ellipsis:
            return found[:position] + whole + found[position + 1 :]
    return found + whole


def _normal(item: Any) -> Any:
    if isinstance(item, (list, np.ndarray)) or (isinstance(item, bool)):
        item = as_tensor(item)
    if isinstance(item, Tensor):
        if item.dtype.is_floating_point:
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        if item.dim() == 0 and item.dtype.name != "bool" and state.trace is None:
            return int(item)
        return item
    if isinstance(item, np.integer):
        return int(item)
    return item


def _dims_used(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, Tensor) and item.dtype.name == "bool":
        return item.dim()
    return 1


def _basic_chain(x: Tensor, items: list[Any]) -> _views.Chain:
    bounds, sizes, dim = [], [], 0
    shape = x._array_shape()
    for item in items:
        if item is None:
            sizes.append(1)
            continue
        size = shape[dim]
        if isinstance(item, builtins.slice):
            start, stop, step = item.indices(size)
            if step <= 0:
                raise ValueError("step must be greater than zero")
            stop = max(start, stop)
            bounds.append((start, stop, step))
            sizes.append(-(-(stop - start) // step))
        else:
            item = _int_index(item, dim, size)
            bounds.append((item, item + 1, 1))
        dim += 1
    chain: list[_views.Step] = []
    if any(b != (0, n, 1) for b, n in zip(bounds, shape, strict=True)):
        chain.append(_views.slice_step(tuple(bounds)))
    if len(sizes) != len(shape) or None in items:
        chain.append(_views.reshape_step(tuple(sizes)))
    return tuple(chain)


def _int_index(item: Any, dim: int, size: int) -> int:
    if not hasattr(item, "__index__"):
        raise TypeError(
            "only integers, slices (`:`), ellipsis (`...`), None and long or byte Variables are "
            f"valid indices (got {type(item).__name__})"
        )
    value = item.__index__()
    if not -size <= value < size:
        raise IndexError(f"index {value} is out of bounds for dimension {dim} with size {size}")
    return value % size


def _advanced(x: Tensor, items: list[Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """A static description of the index and the index tensors that fill its places."""
    spec: list[Any] = []
    arrays: list[Any] = []
    dim = 0
    for item in items:
        if isinstance(item, Tensor):
            if item.dtype.name == "bool":
                for part in nonzero(item, as_tuple=True):
                    spec.append("tensor")
                    arrays.append(part)
            else:
                check_bounds(item, x._array_shape()[dim], dim)
                spec.append("tensor")
                arrays.append(item)
        elif isinstance(item, builtins.slice):
            spec.append(("slice", item.start, item.stop, item.step))
        else:
            spec.append(item)
        dim += _dims_used(item)
    return tuple(spec), arrays


def check_bounds(index: Tensor, size: int, dim: int) -> None:
    """Refuses indices out of range, as jax would clamp them silently.

    Inside a traced call the values are not known; there jax's own rule for gathers holds.
    """
    if state.trace is not None or index.is_meta or index.numel() == 0:
        return
    values = index._host()
    low, high = int(values.min()), int(values.max())
    if low < -size or high >= size:
        bad = low if low < -size else high
        raise IndexError(f"index {bad} is out of bounds for dimension {dim} with size {size}")


def _index_of(spec: Any, arrays: Any) -> Any:
    rest = iter(arrays)
    return tuple(
        next(rest) if s == "tensor" else builtins.slice(*s[1:]) if isinstance(s, tuple) else s
        for s in spec
    )


@primitive("index")
def _gather(x, *arrays, spec):  # type: ignore[no-untyped-def]
    return x[_index_of(spec, arrays)]


@primitive("index_put")
def _scatter(x, value, *arrays, spec, accumulate):  # type: ignore[no-untyped-def]
    place = x.at[_index_of(spec, arrays)]
    return place.add(value) if accumulate else place.set(value)


def nonzero(input: Tensor, *, as_tuple: bool = False) -> Any:  # noqa: A002
    """Indices of the elements that are not zero, int64, shape (count, ndim)."""
    found = np.nonzero(input.detach()._host())
    if as_tuple:
        return tuple(as_tensor(f.astype(np.int64)) for f in found)
    return as_tensor(np.stack(found, axis=-1).astype(np.int64))


@primitive("gather")
def _take_along(x, index, *, dim):  # type: ignore[no-untyped-def]
    region = tuple(
        builtins.slice(0, n) if d != dim else builtins.slice(None)
        for d, n in enumerate(index.shape)
    )
    return jnp.take_along_axis(x[region], index, axis=dim)


@primitive("index_select")
def _index_select(x, index, *, dim):  # type: ignore[no-untyped-def]
    return jnp.take(x, index, axis=dim)


@primitive("scatter")
def _scatter_along(x, index, src, *, dim, accumulate):  # type: ignore[no-untyped-def]
    grid = list(jnp.indices(index.shape, sparse=True))
    grid[dim] = index
    src = jnp.broadcast_to(jnp.asarray(src).astype(x.dtype), index.shape) if jnp.ndim(src) == 0 else src
    src = src[tuple(builtins.slice(0, n) for n in index.shape)].astype(x.dtype)
    return x.at[tuple(grid)].add(src) if accumulate else x.at[tuple(grid)].set(src)


@primitive("index_add")
def _index_add(x, index, source, *, dim, alpha):  # type: ignore[no-untyped-def]
    place = (builtins.slice(None),) * dim + (index,)
    return x.at[place].add((source * alpha).astype(x.dtype))


def gather(input: Tensor, dim: int, index: Tensor) -> Tensor:  # noqa: A002
    """``out[i][j] = input[index[i][j]][j]`` for dim 0, and so on."""
    d = wrap_dim(dim, input.dim())
    check_bounds(index, input.shape[d], d)
    return _take_along(input, index, dim=d)


def take_along_dim(input: Tensor, indices: Tensor, dim: int) -> Tensor:  # noqa: A002
    """As ``gather``."""
    return gather(input, dim, indices)


def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:  # noqa: A002
    """Entries ``index`` of ``dim``."""
    d = wrap_dim(dim, input.dim())
    check_bounds(index, input.shape[d], d)
    return _index_select(input, index, dim=d)


def scatter(input: Tensor, dim: int, index: Tensor, src: Any) -> Tensor:  # noqa: A002
    """``input`` with ``src`` written at ``index`` along ``dim``."""
    d = wrap_dim(dim, input.dim())
    check_bounds(index, input.shape[d], d)
    return _scatter_along(input, index, src, dim=d, accumulate=False)


def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:  # noqa: A002
    """``input`` with ``src`` added at ``index`` along ``dim``."""
    d = wrap_dim(dim, input.dim())
    check_bounds(index, input.shape[d], d)
    return _scatter_along(input, index, src, dim=d, accumulate=True)


def index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:  # noqa: A002, E501
    """``input`` with ``alpha * source`` added at entries ``index`` of ``dim``."""
    d = wrap_dim(dim, input.dim())
    check_bounds(index, input.shape[d], d)
    return _index_add(input, index, source, dim=d, alpha=alpha)


def masked_select(input: Tensor, mask: Tensor) -> Tensor:  # noqa: A002
    """The elements where ``mask`` holds, 1-D."""
    return getitem(input, mask)
