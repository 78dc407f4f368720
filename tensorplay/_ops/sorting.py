"""Sorting, selecting by rank, counting and searching."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _dtypes
from .._tensor import Tensor, wrap_dim
from .creation import as_tensor, from_values
from .primitive import primitive
from .reduce import ValuesIndices, named_axes, picked
from .views import reshape


@primitive("sort")
def _sort(x, *, dim, descending):
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    order = jnp.argsort(x, axis=dim, descending=descending, stable=True)
    return jnp.take_along_axis(x, order, axis=dim), order.astype(np.int64)


@primitive("topk")
def _topk(x, *, k, dim, largest):
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    order = jnp.argsort(x, axis=dim, descending=largest, stable=True)
    order = jax.lax.slice_in_dim(order, 0, k, axis=dim)
    return jnp.take_along_axis(x, order, axis=dim), order.astype(np.int64)


@primitive("kthvalue")
def _kth(x, *, k, dim, keepdim):
    if x.ndim == 0:
        return x, jnp.zeros((), np.int64)
    order = jnp.argsort(x, axis=dim, stable=True)
    return picked(x, jnp.take(order, k, axis=dim), dim, keepdim)


@primitive("bincount", differentiable=False)
def _bincount(x, weights, *, length):
    ones = jnp.ones(x.shape, np.int64) if weights is None else weights
    return jnp.zeros(length, ones.dtype).at[x].add(ones)


@primitive("searchsorted", differentiable=False)
def _searchsorted(edges, values, *, side):
    if edges.ndim == 1:
        return jnp.searchsorted(edges, values, side=side).astype(np.int64)
    find = jax.vmap(functools.partial(jnp.searchsorted, side=side))
    rows = find(edges.reshape(-1, edges.shape[-1]), values.reshape(-1, values.shape[-1]))
    return rows.reshape(values.shape).astype(np.int64)


@primitive("isin", differentiable=False)
def _isin(elements, test):
    return jnp.isin(elements, test)


@named_axes
def sort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """(values, indices) in order along ``dim``; always stable."""
    return ValuesIndices(*_sort(input, dim=wrap_dim(dim, input.dim()), descending=descending))


@named_axes
def argsort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Tensor:
    """Indices that sort along ``dim``; always stable."""
    return sort(input, dim, descending).indices


def msort(input: Tensor) -> Tensor:
    """Values in order along dim 0."""
    return sort(input, 0).values


def topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """(values, indices) of the ``k`` largest (or smallest), in order."""
    wrapped = wrap_dim(dim, input.dim())
    if not 0 <= k <= (input.shape[wrapped] if input.dim() else 1):
        raise RuntimeError("selected index k out of range")
    return ValuesIndices(*_topk(input, k=int(k), dim=wrapped, largest=largest))


def kthvalue(input: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """(values, indices) of the ``k``-th smallest along ``dim``, counted from 1."""
    wrapped = wrap_dim(dim, input.dim())
    if not 1 <= k <= (input.shape[wrapped] if input.dim() else 1):
        raise RuntimeError(f"kthvalue(): selected number k out of range for dimension {wrapped}")
    return ValuesIndices(*_kth(input, k=k - 1, dim=wrapped, keepdim=keepdim))


def median(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The lower median of all elements; with ``dim``, (values, indices) along it."""
    if dim is None:
        return kthvalue(reshape(input, -1), (input.numel() + 1) // 2).values
    size = input.shape[wrap_dim(dim, input.dim())] if input.dim() else 1
    return kthvalue(input, (size + 1) // 2, dim, keepdim)


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """How often each of 0, 1, ... occurs in a 1-D tensor of integers (or the sums of weights)."""
    if input.dim() != 1 or input.is_floating_point():
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if input.numel() and int(input.min()) < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    length = int(input.max()) + 1 if input.numel() else 0
    if weights is not None and not weights.is_floating_point():
        weights = weights.to(_dtypes.float64)
    return _bincount(input, weights, length=max(length, minlength))


def searchsorted(
    sorted_sequence: Tensor,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
) -> Tensor:
    """The places at which ``input`` would be inserted to keep ``sorted_sequence`` in order."""
    values = as_tensor(input, dtype=None if isinstance(input, Tensor) else sorted_sequence.dtype)
    found = _searchsorted(sorted_sequence, values, side=side or ("right" if right else "left"))
    return found.to(_dtypes.int32) if out_int32 else found


def bucketize(
    input: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    """The bucket between sorted ``boundaries`` that each element of ``input`` falls into."""
    return searchsorted(boundaries, input, out_int32=out_int32, right=right)


def isin(elements: Any, test_elements: Any) -> Tensor:
    """Whether each of ``elements`` is one of ``test_elements``."""
    return _isin(as_tensor(elements), as_tensor(test_elements))


def unique(
    input: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """The different values in order, and where asked each element's place there and the counts.

    Reads the values, as the result's shape depends on them.
    """
    value = input.detach()._host()
    axis = None if dim is None else wrap_dim(dim, input.dim())
    values, inverse, counts = np.unique(value, return_inverse=True, return_counts=True, axis=axis)
    shape = value.shape if axis is None else (value.shape[axis],)
    return _unique_result(
        input, values, inverse.reshape(shape), counts, return_inverse, return_counts
    )


def unique_consecutive(
    input: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """As ``unique``, but only equal neighbours are merged (1-D, or entries along ``dim``)."""
    value = input.detach()._host()
    rows = value.reshape(-1) if dim is None else np.moveaxis(value, wrap_dim(dim, value.ndim), 0)
    differs = (rows[1:] != rows[:-1]).reshape(max(len(rows) - 1, 0), -1).any(axis=1)
    starts = np.flatnonzero(np.concatenate([[True], differs])) if len(rows) else np.zeros(0, int)
    counts = np.diff(np.append(starts, len(rows)))
    inverse: Any = np.repeat(np.arange(len(starts)), counts)
    values = rows[starts]
    if dim is not None:
        values = np.moveaxis(values, 0, wrap_dim(dim, value.ndim))
    elif value.ndim != 1:
        inverse = inverse.reshape(value.shape)
    return _unique_result(input, values, inverse, counts, return_inverse, return_counts)


def _unique_result(
    input: Tensor, values: Any, inverse: Any, counts: Any, with_inverse: bool, with_counts: bool
) -> Any:
    found = [from_values(values, input.dtype.numpy, input.device)]
    if with_inverse:
        found.append(from_values(inverse, np.int64, input.device))
    if with_counts:
        found.append(from_values(counts, np.int64, input.device))
    return found[0] if len(found) == 1 else tuple(found)
