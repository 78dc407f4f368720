"""Reductions, scans and sorting."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._dtypes import dtype as Dtype
from .._tensor import Tensor, wrap_dim
from .math import maximum, minimum
from .primitive import primitive
from .promotion import as_float, as_sum

Dims = int | Sequence[int] | None
ValuesIndices = namedtuple("ValuesIndices", ["values", "indices"])


def _dims(x: Tensor, dim: Dims) -> Any:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return None
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    wrapped = tuple(wrap_dim(d, x.dim()) for d in dims) if x.dim() else ()
    if len(set(wrapped)) != len(wrapped):
        raise RuntimeError(f"dim appears multiple times in the list of dims {list(dims)}")
    return wrapped


@primitive("sum")
def _sum(x, *, dim, keepdim, dtype):  # type: ignore[no-untyped-def]
    return jnp.sum(as_sum(x, dtype), axis=dim, keepdims=keepdim)


@primitive("mean")
def _mean(x, *, dim, keepdim, dtype):  # type: ignore[no-untyped-def]
    return jnp.mean(x if dtype is None else x.astype(dtype.numpy), axis=dim, keepdims=keepdim)


@primitive("prod")
def _prod(x, *, dim, keepdim, dtype):  # type: ignore[no-untyped-def]
    return jnp.prod(as_sum(x, dtype), axis=dim, keepdims=keepdim)


@primitive("var")
def _var(x, *, dim, correction, keepdim):  # type: ignore[no-untyped-def]
    return jnp.var(x, axis=dim, ddof=correction, keepdims=keepdim)


@primitive("std")
def _std(x, *, dim, correction, keepdim):  # type: ignore[no-untyped-def]
    return jnp.sqrt(jnp.var(x, axis=dim, ddof=correction, keepdims=keepdim))


@primitive("amax")
def _amax(x, *, dim, keepdim):  # type: ignore[no-untyped-def]
    return jnp.max(x, axis=dim, keepdims=keepdim)


@primitive("amin")
def _amin(x, *, dim, keepdim):  # type: ignore[no-untyped-def]
    return jnp.min(x, axis=dim, keepdims=keepdim)


@primitive("argmax", differentiable=False)
def _argmax(x, *, dim, keepdim):  # type: ignore[no-untyped-def]
    return jnp.argmax(x, axis=dim, keepdims=keepdim).astype(np.int64)


@primitive("argmin", differentiable=False)
def _argmin(x, *, dim, keepdim):  # type: ignore[no-untyped-def]
    return jnp.argmin(x, axis=dim, keepdims=keepdim).astype(np.int64)


def _picked(x: Any, index: Any, dim: int, keepdim: bool) -> Any:
    if x.ndim == 0:
        return x, index.astype(np.int64)
    index = jnp.expand_dims(index, dim)
    values = jnp.take_along_axis(x, index, axis=dim)
    if not keepdim:
        values, index = jnp.squeeze(values, dim), jnp.squeeze(index, dim)
    return values, index.astype(np.int64)


@primitive("max_dim")
def _max_dim(x, *, dim, keepdim):  # type: ignore[no-untyped-def]
    return _picked(x, jnp.argmax(x, axis=dim if x.ndim else None), dim, keepdim)


@primitive("min_dim")
def _min_dim(x, *, dim, keepdim):  # type: ignore[no-untyped-def]
    return _picked(x, jnp.argmin(x, axis=dim if x.ndim else None), dim, keepdim)


@primitive("all", differentiable=False)
def _all(x, *, dim, keepdim):  # type: ignore[no-untyped-def]
    return jnp.all(x, axis=dim, keepdims=keepdim)


@primitive("any", differentiable=False)
def _any(x, *, dim, keepdim):  # type: ignore[no-untyped-def]
    return jnp.any(x, axis=dim, keepdims=keepdim)


@primitive("cumsum")
def _cumsum(x, *, dim, dtype):  # type: ignore[no-untyped-def]
    return jnp.cumsum(as_sum(x, dtype), axis=dim)


@primitive("cumprod")
def _cumprod(x, *, dim, dtype):  # type: ignore[no-untyped-def]
    return jnp.cumprod(as_sum(x, dtype), axis=dim)


@primitive("logsumexp")
def _logsumexp(x, *, dim, keepdim):  # type: ignore[no-untyped-def]
    return jax.nn.logsumexp(as_float(x), axis=dim, keepdims=keepdim)


@primitive("norm")
def _norm(x, *, p, dim, keepdim):  # type: ignore[no-untyped-def]
    magnitude = jnp.abs(x)
    if p == float("inf"):
        return jnp.max(magnitude, axis=dim, keepdims=keepdim, initial=0)
    if p == float("-inf"):
        return jnp.min(magnitude, axis=dim, keepdims=keepdim)
    if p == 0:
        return jnp.sum((magnitude != 0).astype(x.dtype), axis=dim, keepdims=keepdim)
    if p == 1:
        return jnp.sum(magnitude, axis=dim, keepdims=keepdim)
    total = jnp.sum(magnitude**p, axis=dim, keepdims=keepdim)
    zero = total == 0
    root = jnp.where(zero, 1, total) ** (1 / p)
    return jnp.where(zero, jnp.zeros((), x.dtype), root)


@primitive("sort")
def _sort(x, *, dim, descending):  # type: ignore[no-untyped-def]
    order = jnp.argsort(x, axis=dim, descending=descending, stable=True)
    return jnp.take_along_axis(x, order, axis=dim), order.astype(np.int64)


@primitive("topk")
def _topk(x, *, k, dim, largest):  # type: ignore[no-untyped-def]
    order = jnp.argsort(x, axis=dim, descending=largest, stable=True)
    order = jax.lax.slice_in_dim(order, 0, k, axis=dim)
    return jnp.take_along_axis(x, order, axis=dim), order.astype(np.int64)


def sum(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Dtype | None = None) -> Tensor:  # noqa: A001, A002, E501
    """Sum over ``dim`` (all dims if None); integers and bools sum in int64."""
    return _sum(input, dim=_dims(input, dim), keepdim=keepdim, dtype=dtype)


def mean(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Dtype | None = None) -> Tensor:  # noqa: A002, E501
    """Mean over ``dim``; RuntimeError for dtypes that are not floating."""
    if dtype is None and not (input.is_floating_point() or input.is_complex()):
        raise RuntimeError(
            "mean(): could not infer output dtype. Input dtype must be either a floating point or "
            f"complex dtype. Got: {input.dtype}"
        )
    return _mean(input, dim=_dims(input, dim), keepdim=keepdim, dtype=dtype)


def prod(input: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: Dtype | None = None) -> Tensor:  # noqa: A002, E501
    """Product over ``dim`` (all dims if None)."""
    return _prod(input, dim=_dims(input, dim), keepdim=keepdim, dtype=dtype)


def _correction(dim: Any, unbiased: Any, correction: int) -> tuple[Dims, int]:
    if isinstance(dim, bool):
        return None, int(dim)
    return dim, correction if unbiased is None else int(unbiased)


def var(input: Tensor, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *, correction: int = 1) -> Tensor:  # noqa: A002, E501
    """Variance over ``dim``, with Bessel's correction unless ``correction=0``."""
    dim, ddof = _correction(dim, unbiased, correction)
    return _var(input, dim=_dims(input, dim), correction=ddof, keepdim=keepdim)


def std(input: Tensor, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *, correction: int = 1) -> Tensor:  # noqa: A002, E501
    """Standard deviation over ``dim``, with Bessel's correction unless ``correction=0``."""
    dim, ddof = _correction(dim, unbiased, correction)
    return _std(input, dim=_dims(input, dim), correction=ddof, keepdim=keepdim)


def amax(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:  # noqa: A002
    """Largest value; ties share the gradient."""
    return _amax(input, dim=_dims(input, dim), keepdim=keepdim)


def amin(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:  # noqa: A002
    """Smallest value; ties share the gradient."""
    return _amin(input, dim=_dims(input, dim), keepdim=keepdim)


def _nonempty(input: Tensor, name: str) -> None:  # noqa: A002
    if input.numel() == 0:
        raise RuntimeError(
            f"{name}(): Expected reduction dim to be specified for input.numel() == 0. Specify the "
            "reduction dim with the 'dim' argument."
        )


def max(input: Tensor, dim: Any = None, keepdim: bool = False) -> Any:  # noqa: A001, A002
    """Largest value; with an int ``dim`` (values, indices); with a tensor, ``maximum``."""
    if isinstance(dim, Tensor):
        return maximum(input, dim)
    if dim is None:
        _nonempty(input, "max")
        return _amax(input, dim=None, keepdim=False)
    return ValuesIndices(*_max_dim(input, dim=wrap_dim(dim, input.dim()), keepdim=keepdim))


def min(input: Tensor, dim: Any = None, keepdim: bool = False) -> Any:  # noqa: A001, A002
    """Smallest value; with an int ``dim`` (values, indices); with a tensor, ``minimum``."""
    if isinstance(dim, Tensor):
        return minimum(input, dim)
    if dim is None:
        _nonempty(input, "min")
        return _amin(input, dim=None, keepdim=False)
    return ValuesIndices(*_min_dim(input, dim=wrap_dim(dim, input.dim()), keepdim=keepdim))


def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:  # noqa: A002
    """Index of the first largest value, int64; over the flattened tensor if ``dim`` is None."""
    return _argmax(input, dim=None if dim is None else wrap_dim(dim, input.dim()), keepdim=keepdim)


def argmin(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:  # noqa: A002
    """Index of the first smallest value, int64; over the flattened tensor if ``dim`` is None."""
    return _argmin(input, dim=None if dim is None else wrap_dim(dim, input.dim()), keepdim=keepdim)


def all(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:  # noqa: A001, A002
    """Whether all elements are true."""
    return _all(input, dim=_dims(input, dim), keepdim=keepdim)


def any(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:  # noqa: A001, A002
    """Whether some element is true."""
    return _any(input, dim=_dims(input, dim), keepdim=keepdim)


def cumsum(input: Tensor, dim: int, *, dtype: Dtype | None = None) -> Tensor:  # noqa: A002
    """Running sum along ``dim``."""
    return _cumsum(input, dim=wrap_dim(dim, input.dim()), dtype=dtype)


def cumprod(input: Tensor, dim: int, *, dtype: Dtype | None = None) -> Tensor:  # noqa: A002
    """Running product along ``dim``."""
    return _cumprod(input, dim=wrap_dim(dim, input.dim()), dtype=dtype)


def logsumexp(input: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:  # noqa: A002
    """log(sum(exp(input))), computed without overflow."""
    return _logsumexp(input, dim=_dims(input, dim), keepdim=keepdim)


def norm(input: Tensor, p: Any = "fro", dim: Dims = None, keepdim: bool = False) -> Tensor:  # noqa: A002
    """The vector p-norm over ``dim`` (all elements if None); ``"fro"`` is p = 2."""
    order = 2.0 if p in ("fro", None) else float(p)
    return _norm(input, p=order, dim=_dims(input, dim), keepdim=keepdim)


def sort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:  # noqa: A002
    """(values, indices) in order along ``dim``; always stable."""
    return ValuesIndices(*_sort(input, dim=wrap_dim(dim, input.dim()), descending=descending))


def argsort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Tensor:  # noqa: A002
    """Indices that sort along ``dim``; always stable."""
    return sort(input, dim, descending).indices


def topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002
    """(values, indices) of the ``k`` largest (or smallest), in order."""
    wrapped = wrap_dim(dim, input.dim())
    if not 0 <= k <= (input.shape[wrapped] if input.dim() else 1):
        raise RuntimeError("selected index k out of range")
    return ValuesIndices(*_topk(input, k=k, dim=wrapped, largest=largest))
