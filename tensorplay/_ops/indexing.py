"""Indexing: basic indices are views, tensors as indices gather and scatter."""

from __future__ import annotations

import builtins
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _views
from .._dtypes import finfo, iinfo
from .._state import state
from .._tensor import Tensor, wrap_dim
from . import math
from .creation import as_tensor
from .inplace import assign, copy_
from .primitive import primitive
from .views import broadcast_tensors, expand, reshape, select, view_through


def getitem(x: Tensor, index: Any) -> Tensor:
    """``x[index]``: a view for ints, slices, None and ...; a copy for tensors and lists."""
    items = _expanded(x, _as_tuple(index))
    if not any(isinstance(i, Tensor) for i in items):
        return view_through(x, _basic_chain(x, items))
    viewed, places = _basic_part(x, items)
    return _gather(viewed, *(t for _, t in places), dims=tuple(d for d, _ in places))


def setitem(x: Tensor, index: Any, value: Any) -> None:
    """``x[index] = value``, broadcast and cast to the dtype of ``x``."""
    if not isinstance(value, Tensor):
        value = as_tensor(value, dtype=x.dtype, device=x.device)
    items = _expanded(x, _as_tuple(index))
    if not any(isinstance(i, Tensor) for i in items):
        target = view_through(x, _basic_chain(x, items))
        copy_(target, _without_lead(value, target.dim()))
        return
    mask = items[0]
    if _is_mask(mask) and value.numel() == 1 and all(_is_whole(i) for i in items[1:]):
        shape = mask._array_shape() + (1,) * (x.dim() - mask.dim())
        assign(x, math.masked_fill(x, reshape(mask, shape), reshape(value, ())))
        return
    _put(x, items, value, accumulate=False)


def _put(x: Tensor, items: list[Any], value: Tensor, accumulate: bool) -> Tensor:
    viewed, places = _basic_part(x, items)
    dims, arrays = tuple(d for d, _ in places), [t for _, t in places]
    value = math.to_dtype(value, x.dtype)
    return assign(viewed, _scatter(viewed, value, *arrays, dims=dims, accumulate=accumulate))


def _without_lead(value: Tensor, dims: int) -> Tensor:
    """``value`` without leading dims of size 1 beyond ``dims``, as torch assigns it."""
    shape = value._array_shape()
    while len(shape) > dims and shape[0] == 1:
        shape = shape[1:]
    return reshape(value, shape) if len(shape) != value.dim() else value


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype.name == "bool"


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
            rest = [i for i in found[position + 1 :] if i is not Ellipsis]
            return found[:position] + whole + rest
    return found + whole


def _normal(item: Any) -> Any:
    if isinstance(item, (list, range, np.ndarray, bool)):
        item = as_tensor(list(item) if isinstance(item, range) else item)
        if item.numel() == 0 and item.dtype.is_floating_point:
            item = item.long()
    if isinstance(item, Tensor):
        if item.dtype.is_floating_point or item.dtype.is_complex:
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        if item.dtype.name == "uint8":
            return item.bool()
        if item.dim() == 0 and item.dtype.name != "bool" and state.trace is None:
            return int(item)
        return item
    if isinstance(item, np.integer):
        return int(item)
    if isinstance(item, builtins.slice):
        return builtins.slice(*(_bound(b) for b in (item.start, item.stop, item.step)))
    return item


def _bound(value: Any) -> Any:
    return value if value is None else value.__index__()


def _dims_used(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if _is_mask(item) else 1


def _basic_chain(x: Tensor, items: list[Any]) -> _views.Chain:
    bounds, sizes, dim = [], [], 0
    shape = x._array_shape()
    for item in items:
        if item is None:
            sizes.append(1)
            continue
        size = shape[dim]
        if isinstance(item, builtins.slice):
            if item.step is not None and item.step <= 0:
                raise ValueError("step must be greater than zero")
            start, stop, step = item.indices(size)
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
        raise (TypeError if isinstance(item, str) else IndexError)(
            "only integers, slices (`:`), ellipsis (`...`), None and long or byte Variables are "
            f"valid indices (got {type(item).__name__})"
        )
    value = item.__index__()
    if not -size <= value < size:
        raise IndexError(f"index {value} is out of bounds for dimension {dim} with size {size}")
    return value % size


def _basic_part(x: Tensor, items: list[Any]) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """The view that ints, slices and None make of ``x``, and its dims that tensors index."""
    basic: list[Any] = []
    places: list[tuple[int, Tensor]] = []
    dim = source = 0
    for item in items:
        if isinstance(item, Tensor):
            if _is_mask(item) and item.dim() == 0:
                basic.append(None)
            parts = _mask_indices(x, item, source) if _is_mask(item) else [item]
            for part in parts:
                if not _is_mask(item):
                    check_bounds(part, x._array_shape()[source], source)
                places.append((dim, part))
                dim += 1
            basic.extend([builtins.slice(None)] * _dims_used(item))
        else:
            basic.append(item)
            dim += item is None or isinstance(item, builtins.slice)
        source += _dims_used(item)
    chain = _basic_chain(x, basic)
    return (view_through(x, chain) if chain else x), places


def _mask_indices(x: Tensor, mask: Tensor, dim: int) -> list[Tensor]:
    """The places where ``mask``, which covers the dims of ``x`` from ``dim`` on, is true."""
    for d, size in enumerate(mask._array_shape()):
        if x._array_shape()[dim + d] != size:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {d} does not match the shape "
                f"of the indexed tensor {list(x.shape)} at index {dim + d}"
            )
    return list(nonzero(mask if mask.dim() else reshape(mask, 1), as_tuple=True))


def check_bounds(index: Tensor, size: int, dim: int, error: type[Exception] = IndexError) -> None:
    """Refuses indices out of range with ``error``, as jax would clamp them silently.

    Inside a traced call the values are not known; there jax's own rule for gathers holds.
    """
    if state.trace is not None or index.is_meta or index.numel() == 0:
        return
    values = index._host()
    low, high = int(values.min()), int(values.max())
    if low < -size or high >= size:
        bad = low if low < -size else high
        raise error(f"index {bad} is out of bounds for dimension {dim} with size {size}")


def _index_of(x: Any, dims: tuple[int, ...], arrays: Any) -> Any:
    index: list[Any] = [builtins.slice(None)] * x.ndim
    for dim, array in zip(dims, arrays, strict=True):
        index[dim] = array
    return tuple(index)


def _check_indices(arrays: Any) -> None:
    try:
        np.broadcast_shapes(*(a.shape for a in arrays))
    except ValueError:
        shapes = ", ".join(str(list(a.shape)) for a in arrays)
        raise IndexError(
            f"shape mismatch: indexing tensors could not be broadcast together with shapes {shapes}"
        ) from None


@primitive("index")
def _gather(x, *arrays, dims):
    _check_indices(arrays)
    return x[_index_of(x, dims, arrays)]


@primitive("index_put")
def _scatter(x, value, *arrays, dims, accumulate):
    _check_indices(arrays)
    place = x.at[_index_of(x, dims, arrays)]
    shape = jax.eval_shape(place.get).shape
    while value.ndim > len(shape) and value.shape[0] == 1:
        value = value[0]
    if value.ndim > len(shape) or any(
        v not in (1, n) for v, n in zip(reversed(value.shape), reversed(shape))
    ):
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(value.shape)} cannot be broadcast to "
            f"indexing result of shape {list(shape)}"
        )
    return place.add(value) if accumulate else place.set(value)


def nonzero(input: Tensor, *, as_tuple: bool = False) -> Any:
    """Indices of the elements that are not zero, int64, shape (count, ndim)."""
    value = input.detach()._host()
    if as_tuple:
        return tuple(as_tensor(f.astype(np.int64)) for f in np.nonzero(np.atleast_1d(value)))
    return as_tensor(np.argwhere(value).astype(np.int64))


@primitive("gather")
def _take_along(x, index, *, dim):
    region = tuple(
        builtins.slice(0, n) if d != dim else builtins.slice(None)
        for d, n in enumerate(index.shape)
    )
    return jnp.take_along_axis(x[region], index, axis=dim)


@primitive("index_select")
def _index_select(x, index, *, dim):
    return jnp.take(x, jnp.atleast_1d(index), axis=dim)


_REDUCE = {
    "add": "add", "sum": "add", "multiply": "multiply", "prod": "multiply", "amax": "max",
    "amin": "min", None: "set",
}  # fmt: skip


@primitive("scatter")
def _scatter_along(x, index, src, *, dim, reduce):
    grid = list(jnp.indices(index.shape, sparse=True))
    grid[dim] = index
    if jnp.ndim(src) == 0:
        src = jnp.broadcast_to(jnp.asarray(src), index.shape)
    src = src[tuple(builtins.slice(0, n) for n in index.shape)].astype(x.dtype)
    return getattr(x.at[tuple(grid)], _REDUCE[reduce])(src)


@primitive("index_add")
def _index_add(x, index, source, *, dim, alpha):
    return x.at[_at(dim, index)].add((source * alpha).astype(x.dtype))


@primitive("index_copy")
def _index_copy(x, index, source, *, dim):
    return x.at[_at(dim, index)].set(source.astype(x.dtype))


@primitive("index_fill")
def _index_fill(x, index, value, *, dim):
    return x.at[_at(dim, index)].set(jnp.asarray(value).astype(x.dtype))


def _at(dim: int, index: Any) -> Any:
    return (builtins.slice(None),) * dim + (index,)


@primitive("masked_scatter")
def _masked_scatter(x, mask, source):
    mask = jnp.broadcast_to(mask, x.shape).reshape(-1)
    order = jnp.clip(jnp.cumsum(mask) - 1, 0, source.size - 1)
    picked = jnp.where(mask, source.reshape(-1)[order].astype(x.dtype), x.reshape(-1))
    return picked.reshape(x.shape)


def _along(input: Tensor, dim: int, index: Tensor, name: str, wide: bool = True) -> int:
    """The checked dim of an op that takes indices along one dim."""
    if index.dtype.name not in ("int64", "int32"):
        raise RuntimeError(f"{name}(): Expected dtype int32/int64 for index, got {index.dtype}")
    if wide and max(index.dim(), 1) != max(input.dim(), 1):
        raise RuntimeError(f"Index tensor must have the same number of dimensions as {name} tensor")
    if not wide and index.dim() > 1:
        raise IndexError(f"{name}(): Index is supposed to be a vector")
    d = wrap_dim(dim, input.dim())
    size = input.shape[d] if input.dim() else 1
    check_bounds(index, size, d, RuntimeError if wide else IndexError)
    return d


def gather(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """``out[i][j] = input[index[i][j]][j]`` for dim 0, and so on."""
    return _take_along(input, index, dim=_along(input, dim, index, "input"))


def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """As ``gather``, with broadcasting; over the flattened tensor if ``dim`` is None."""
    if dim is None:
        return gather(reshape(input, -1), 0, reshape(indices, -1))
    d = wrap_dim(dim, input.dim())
    shape = [
        builtins.max(a, b) if i != d else None
        for i, (a, b) in enumerate(zip(input.shape, indices.shape))
    ]
    wide = [n if s is None else s for s, n in zip(shape, input.shape)]
    index_shape = [n if s is None else s for s, n in zip(shape, indices.shape)]
    return gather(expand(input, wide), d, expand(indices, index_shape))


def take(input: Tensor, index: Tensor) -> Tensor:
    """The elements at ``index`` of the flattened tensor, in the shape of ``index``."""
    return getitem(reshape(input, -1), index)


def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Entries ``index`` of ``dim``."""
    return _index_select(input, index, dim=_along(input, dim, index, "index_select", wide=False))


def scatter(
    input: Tensor,
    dim: int,
    index: Tensor,
    src: Any = None,
    value: Any = None,
    *,
    reduce: str | None = None,
) -> Tensor:
    """``input`` with ``src`` (or the number ``value``) written at ``index`` along ``dim``.

    ``reduce`` is None, ``"add"`` or ``"multiply"``.
    """
    d = _along(input, dim, index, "self")
    return _scatter_along(input, index, value if src is None else src, dim=d, reduce=reduce)


def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """``input`` with ``src`` added at ``index`` along ``dim``."""
    d = _along(input, dim, index, "self")
    return _scatter_along(input, index, src, dim=d, reduce="add")


def scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """``input`` with ``src`` reduced into it at ``index`` along ``dim``.

    ``reduce`` is ``"sum"``, ``"prod"``, ``"amax"``, ``"amin"`` or ``"mean"``. Without
    ``include_self``, the entries written to start from nothing.
    """
    if reduce not in ("sum", "prod", "amax", "amin", "mean"):
        raise RuntimeError(
            f"reduce argument must be either sum, prod, mean, amax or amin, got {reduce}"
        )
    d = _along(input, dim, index, "self")
    start = input
    if not include_self:
        start = _scatter_along(input, index, _neutral(input, reduce), dim=d, reduce=None)
    if reduce != "mean":
        return _scatter_along(start, index, src, dim=d, reduce=reduce)
    total = _scatter_along(start, index, src, dim=d, reduce="sum")
    counts = input.new_zeros(input.shape) if not include_self else input.new_ones(input.shape)
    counts = _scatter_along(counts, index, 1, dim=d, reduce="sum")
    return total / math.clamp_min(counts, 1)


def _neutral(x: Tensor, reduce: str) -> Any:
    if reduce in ("sum", "mean", "prod"):
        return 1 if reduce == "prod" else 0
    info: Any = finfo(x.dtype) if x.is_floating_point() else iinfo(x.dtype)
    low, high = (-float("inf"), float("inf")) if x.is_floating_point() else (info.min, info.max)
    return low if reduce == "amax" else high


def index_add(
    input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Tensor:
    """``input`` with ``alpha * source`` added at entries ``index`` of ``dim``."""
    d = _along(input, dim, index, "index_add", wide=False)
    return _index_add(input, index, source, dim=d, alpha=alpha)


def index_copy(input: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """``input`` with the entries ``index`` of ``dim`` taken from ``source``."""
    d = _along(input, dim, index, "index_copy", wide=False)
    return _index_copy(input, index, source, dim=d)


def index_fill(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """``input`` with ``value`` at entries ``index`` of ``dim``."""
    d = _along(input, dim, index, "index_fill", wide=False)
    return _index_fill(input, index, value, dim=d)


def index_put_(input: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    """Writes (or adds) ``values`` at a tuple of index tensors, in place."""
    items = _expanded(input, tuple(builtins.slice(None) if i is None else i for i in indices))
    _put(input, items, values, accumulate)
    return input


def index_put(input: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
    """``input`` with ``values`` written (or added) at a tuple of index tensors."""
    return index_put_(math.clone_(input), indices, values, accumulate)


def masked_select(input: Tensor, mask: Tensor) -> Tensor:
    """The elements where ``mask`` holds, 1-D."""
    return getitem(*broadcast_tensors(input, mask))


def masked_scatter(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """``input`` with the elements where ``mask`` holds taken from ``source`` in order."""
    return _masked_scatter(input, mask, source)


def argwhere(input: Tensor) -> Tensor:
    """As ``nonzero``."""
    return nonzero(input)


def select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """``input`` with ``src`` as entry ``index`` of ``dim``."""
    out = math.clone_(input)
    copy_(select(out, dim, index), src)
    return out


def slice_scatter(
    input: Tensor,
    src: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    """``input`` with ``src`` in place of ``start:end:step`` of ``dim``."""
    out = math.clone_(input)
    d = wrap_dim(dim, input.dim())
    setitem(out, (builtins.slice(None),) * d + (builtins.slice(start, end, step),), src)
    return out
