"""Reductions and scans."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._dtypes import dtype as Dtype
from .._dtypes import scalar_name
from .._tensor import Tensor, wrap_dim
from .math import maximum, minimum, to_dtype
from .primitive import primitive
from .promotion import as_float, as_sum

Dims = int | Sequence[int] | None
ValuesIndices = namedtuple("ValuesIndices", ["values", "indices"])
MinMax = namedtuple("MinMax", ["min", "max"])


def _dims(x: Tensor, dim: Dims) -> Any:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return None
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    wrapped = tuple(wrap_dim(d, x.dim()) for d in dims) if x.dim() else ()
    if len(set(wrapped)) != len(wrapped):
        raise RuntimeError(f"dim appears multiple times in the list of dims {list(dims)}")
    return wrapped


@primitive("sum")
def _sum(x, *, dim, keepdim, dtype):
    return jnp.sum(as_sum(x, dtype), axis=dim, keepdims=keepdim)


@primitive("mean")
def _mean(x, *, dim, keepdim, dtype):
    return jnp.mean(x if dtype is None else x.astype(dtype.numpy), axis=dim, keepdims=keepdim)


@primitive("prod")
def _prod(x, *, dim, keepdim, dtype):
    return jnp.prod(as_sum(x, dtype), axis=dim, keepdims=keepdim)


@primitive("var")
def _var(x, *, dim, correction, keepdim):
    return jnp.var(x, axis=dim, ddof=correction, keepdims=keepdim)


@primitive("std")
def _std(x, *, dim, correction, keepdim):
    return jnp.sqrt(jnp.var(x, axis=dim, ddof=correction, keepdims=keepdim))


@primitive("amax")
def _amax(x, *, dim, keepdim):
    return jnp.max(x, axis=dim, keepdims=keepdim)


@primitive("amin")
def _amin(x, *, dim, keepdim):
    return jnp.min(x, axis=dim, keepdims=keepdim)


@primitive("argmax", differentiable=False)
def _argmax(x, *, dim, keepdim):
    return jnp.argmax(x, axis=dim, keepdims=keepdim).astype(np.int64)


@primitive("argmin", differentiable=False)
def _argmin(x, *, dim, keepdim):
    return jnp.argmin(x, axis=dim, keepdims=keepdim).astype(np.int64)


def picked(x: Any, index: Any, dim: int, keepdim: bool) -> Any:
    """The entries of ``x`` at ``index`` along ``dim`` (which is gone in ``index``), and these."""
    if x.ndim == 0:
        return x, index.astype(np.int64)
    index = jnp.expand_dims(index, dim)
    values = jnp.take_along_axis(x, index, axis=dim)
    if not keepdim:
        values, index = jnp.squeeze(values, dim), jnp.squeeze(index, dim)
    return values, index.astype(np.int64)


@primitive("max_dim")
def _max_dim(x, *, dim, keepdim):
    return picked(x, jnp.argmax(x, axis=dim if x.ndim else None), dim, keepdim)


@primitive("min_dim")
def _min_dim(x, *, dim, keepdim):
    return picked(x, jnp.argmin(x, axis=dim if x.ndim else None), dim, keepdim)


@primitive("all", differentiable=False)
def _all(x, *, dim, keepdim):
    return _truth(jnp.all(x, axis=dim, keepdims=keepdim), x)


@primitive("any", differentiable=False)
def _any(x, *, dim, keepdim):
    return _truth(jnp.any(x, axis=dim, keepdims=keepdim), x)


def _truth(found: Any, x: Any) -> Any:
    """bool, but uint8 for uint8, as torch has it."""
    return found.astype(x.dtype) if x.dtype == np.uint8 else found


@primitive("count_nonzero", differentiable=False)
def _count_nonzero(x, *, dim):
    return jnp.sum((x != 0).astype(np.int64), axis=dim)


@primitive("nansum")
def _nansum(x, *, dim, keepdim):
    return jnp.sum(jnp.where(jnp.isnan(x), 0, as_sum(x)), axis=dim, keepdims=keepdim)


@primitive("nanmean")
def _nanmean(x, *, dim, keepdim):
    kept = ~jnp.isnan(x)
    total = jnp.sum(jnp.where(kept, x, 0), axis=dim, keepdims=keepdim)
    return total / jnp.sum(kept, axis=dim, keepdims=keepdim).astype(x.dtype)


@primitive("cummax")
def _cummax(x, *, dim):
    return _running(x, jax.lax.cummax(x, dim), dim)


@primitive("cummin")
def _cummin(x, *, dim):
    return _running(x, jax.lax.cummin(x, dim), dim)


def _running(x: Any, best: Any, dim: int) -> Any:
    places = jax.lax.broadcasted_iota(np.int64, x.shape, dim)
    index = jax.lax.cummax(jnp.where(x == best, places, 0), dim)
    return jnp.take_along_axis(x, index, axis=dim), index


@primitive("logcumsumexp")
def _logcumsumexp(x, *, dim):
    return jax.lax.cumlogsumexp(x, dim)


@primitive("diff")
def _diff(x, *, n, dim):
    return jnp.diff(x, n, axis=dim)


@primitive("quantile")
def _quantile(x, q, *, dim, keepdim, method):
    return jnp.quantile(x, q, axis=dim, keepdims=keepdim, method=method)


@primitive("cumsum")
def _cumsum(x, *, dim, dtype):
    return jnp.cumsum(as_sum(x, dtype), axis=dim)


@primitive("cumprod")
def _cumprod(x, *, dim, dtype):
    return jnp.cumprod(as_sum(x, dtype), axis=dim)


@primitive("logsumexp")
def _logsumexp(x, *, dim, keepdim):
    return jax.nn.logsumexp(as_float(x), axis=dim, keepdims=keepdim)


def _root_of_squares(x: Any, dim: Any, keepdim: bool) -> Any:
    """The 2-norm, with gradient 0 where it is 0."""
    total = jnp.sum(x * x, axis=dim, keepdims=keepdim)
    zero = total == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, total)))


@primitive("norm")
def _norm(x, *, p, dim, keepdim):
    magnitude = jnp.abs(x)
    if p == float("inf"):
        return jnp.max(magnitude, axis=dim, keepdims=keepdim, initial=0)
    if p == 2 and not jnp.issubdtype(x.dtype, np.complexfloating):
        return _root_of_squares(x, dim, keepdim)
    if p == float("-inf"):
        return jnp.min(magnitude, axis=dim, keepdims=keepdim)
    if p == 0:
        return jnp.sum((magnitude != 0).astype(magnitude.dtype), axis=dim, keepdims=keepdim)
    if p == 1:
        return jnp.sum(magnitude, axis=dim, keepdims=keepdim)
    total = jnp.sum(magnitude**p, axis=dim, keepdims=keepdim)
    zero = total == 0
    root = jnp.where(zero, 1, total) ** (1 / p)
    return jnp.where(zero, jnp.zeros((), root.dtype), root)


def named_axes(op: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a function take numpy's ``axis`` and ``keepdims`` for ``dim`` and ``keepdim``."""

    @functools.wraps(op)
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            for theirs, ours in (("axis", "dim"), ("keepdims", "keepdim")):
                if theirs in kwargs:
                    kwargs[ours] = kwargs.pop(theirs)
        return op(*args, **kwargs)

    return run


@named_axes
def sum(
    input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Dtype | None = None
) -> Tensor:
    """Sum over ``dim`` (all dims if None); integers and bools sum in int64."""
    return _sum(input, dim=_dims(input, dim), keepdim=keepdim, dtype=dtype)


def sum_to_shape(x: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """``x`` summed over the dims that broadcasting ``shape`` to it made; None if it does not."""
    lead = x.dim() - len(shape)
    if lead < 0 or any(n not in (1, m) for n, m in zip(shape, x.shape[lead:])):
        return None
    dims = [d for d in range(x.dim()) if d < lead or shape[d - lead] != x.shape[d]]
    return sum(x, dims).reshape(shape) if dims else x


@named_axes
def mean(
    input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Dtype | None = None
) -> Tensor:
    """Mean over ``dim``; RuntimeError for dtypes that are not floating."""
    if dtype is None and not (input.is_floating_point() or input.is_complex()):
        raise RuntimeError(
            "mean(): could not infer output dtype. Input dtype must be either a floating point or "
            f"complex dtype. Got: {scalar_name(input.dtype)}"
        )
    return _mean(input, dim=_dims(input, dim), keepdim=keepdim, dtype=dtype)


@named_axes
def prod(
    input: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: Dtype | None = None
) -> Tensor:
    """Product over ``dim`` (all dims if None)."""
    return _prod(input, dim=_dims(input, dim), keepdim=keepdim, dtype=dtype)


def _correction(dim: Any, unbiased: Any, correction: int) -> tuple[Dims, int]:
    if isinstance(dim, bool):
        return None, int(dim)
    return dim, correction if unbiased is None else int(unbiased)


@named_axes
def var(
    input: Tensor,
    dim: Any = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: int = 1,
) -> Tensor:
    """Variance over ``dim``, with Bessel's correction unless ``correction=0``."""
    dim, ddof = _correction(dim, unbiased, correction)
    return _var(input, dim=_dims(input, dim), correction=ddof, keepdim=keepdim)


@named_axes
def std(
    input: Tensor,
    dim: Any = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: int = 1,
) -> Tensor:
    """Standard deviation over ``dim``, with Bessel's correction unless ``correction=0``."""
    dim, ddof = _correction(dim, unbiased, correction)
    return _std(input, dim=_dims(input, dim), correction=ddof, keepdim=keepdim)


@named_axes
def amax(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Largest value; ties share the gradient."""
    return _amax(input, dim=_dims(input, dim), keepdim=keepdim)


@named_axes
def amin(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Smallest value; ties share the gradient."""
    return _amin(input, dim=_dims(input, dim), keepdim=keepdim)


def _nonempty(input: Tensor, name: str) -> None:
    shape = input._array_shape() if input._layout is None else input._layout.global_shape
    if 0 in shape:
        raise RuntimeError(
            f"{name}(): Expected reduction dim to be specified for input.numel() == 0. Specify the "
            "reduction dim with the 'dim' argument."
        )


@named_axes
def max(input: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    """Largest value; with an int ``dim`` (values, indices); with a tensor, ``maximum``."""
    if isinstance(dim, Tensor):
        return maximum(input, dim)
    if dim is None:
        _nonempty(input, "max")
        return _amax(input, dim=None, keepdim=False)
    return ValuesIndices(*_max_dim(input, dim=wrap_dim(dim, input.dim()), keepdim=keepdim))


@named_axes
def min(input: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    """Smallest value; with an int ``dim`` (values, indices); with a tensor, ``minimum``."""
    if isinstance(dim, Tensor):
        return minimum(input, dim)
    if dim is None:
        _nonempty(input, "min")
        return _amin(input, dim=None, keepdim=False)
    return ValuesIndices(*_min_dim(input, dim=wrap_dim(dim, input.dim()), keepdim=keepdim))


@named_axes
def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Index of the first largest value, int64; over the flattened tensor if ``dim`` is None."""
    return _argmax(input, dim=None if dim is None else wrap_dim(dim, input.dim()), keepdim=keepdim)


@named_axes
def argmin(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Index of the first smallest value, int64; over the flattened tensor if ``dim`` is None."""
    return _argmin(input, dim=None if dim is None else wrap_dim(dim, input.dim()), keepdim=keepdim)


@named_axes
def all(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Whether all elements are true."""
    return _all(input, dim=_dims(input, dim), keepdim=keepdim)


@named_axes
def any(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Whether some element is true."""
    return _any(input, dim=_dims(input, dim), keepdim=keepdim)


@named_axes
def cumsum(input: Tensor, dim: int, *, dtype: Dtype | None = None) -> Tensor:
    """Running sum along ``dim``."""
    return _cumsum(input, dim=wrap_dim(dim, input.dim()), dtype=dtype)


@named_axes
def cumprod(input: Tensor, dim: int, *, dtype: Dtype | None = None) -> Tensor:
    """Running product along ``dim``."""
    return _cumprod(input, dim=wrap_dim(dim, input.dim()), dtype=dtype)


@named_axes
def logsumexp(input: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """log(sum(exp(input))), computed without overflow."""
    return _logsumexp(input, dim=_dims(input, dim), keepdim=keepdim)


@named_axes
def norm(
    input: Tensor,
    p: Any = "fro",
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Dtype | None = None,
) -> Tensor:
    """The vector p-norm over ``dim`` (all elements if None); ``"fro"`` is p = 2."""
    if dtype is not None:
        input = to_dtype(input, dtype)
    if not (input.is_floating_point() or input.is_complex()):
        raise RuntimeError(
            "linalg.vector_norm: Expected a floating point or complex tensor as input. Got "
            f"{scalar_name(input.dtype)}"
        )
    order = 2.0 if p in ("fro", None) else float(p)
    return _norm(input, p=order, dim=_dims(input, dim), keepdim=keepdim)


def var_mean(
    input: Tensor,
    dim: Any = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: int = 1,
) -> tuple[Tensor, Tensor]:
    """(variance, mean) over ``dim``."""
    dims = None if isinstance(dim, bool) else dim
    found = var(input, dim, unbiased, keepdim, correction=correction)
    return found, mean(input, dims, keepdim)


def std_mean(
    input: Tensor,
    dim: Any = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: int = 1,
) -> tuple[Tensor, Tensor]:
    """(standard deviation, mean) over ``dim``."""
    dims = None if isinstance(dim, bool) else dim
    found = std(input, dim, unbiased, keepdim, correction=correction)
    return found, mean(input, dims, keepdim)


def aminmax(input: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """(smallest, largest) value."""
    return MinMax(amin(input, dim, keepdim), amax(input, dim, keepdim))


def count_nonzero(input: Tensor, dim: Dims = None) -> Tensor:
    """How many elements are not zero, int64."""
    return _count_nonzero(input, dim=_dims(input, dim))


def nansum(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Sum without nans."""
    return _nansum(input, dim=_dims(input, dim), keepdim=keepdim)


def nanmean(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Mean without nans."""
    return _nanmean(input, dim=_dims(input, dim), keepdim=keepdim)


def cummax(input: Tensor, dim: int) -> Any:
    """(largest value so far, its last index) along ``dim``."""
    return ValuesIndices(*_cummax(input, dim=wrap_dim(dim, input.dim())))


def cummin(input: Tensor, dim: int) -> Any:
    """(smallest value so far, its last index) along ``dim``."""
    return ValuesIndices(*_cummin(input, dim=wrap_dim(dim, input.dim())))


def logcumsumexp(input: Tensor, dim: int) -> Tensor:
    """Running ``logsumexp`` along ``dim``."""
    return _logcumsumexp(input, dim=wrap_dim(dim, input.dim()))


def diff(input: Tensor, n: int = 1, dim: int = -1) -> Tensor:
    """Differences of neighbours along ``dim``, ``n`` times."""
    return _diff(input, n=n, dim=wrap_dim(dim, input.dim()))


def dist(input: Tensor, other: Tensor, p: float = 2) -> Tensor:
    """The p-norm of ``input - other``."""
    return norm(input - other, p)


def quantile(
    input: Tensor,
    q: Any,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Tensor:
    """Quantiles ``q`` (numbers in [0, 1]) along ``dim`` (of all elements if None)."""
    if not isinstance(q, Tensor):
        q = input.new_tensor(q)
    d = None if dim is None else wrap_dim(dim, input.dim())
    return _quantile(input, q, dim=d, keepdim=keepdim, method=interpolation)
