"""``softmax`` and its kin."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._dtypes import dtype as Dtype
from ..._ops import math
from ..._ops.primitive import primitive
from ..._tensor import Tensor, wrap_dim
from .checks import require_floating
from .numerics import wide


def _minus_max(x: Any, axis: int) -> Any:
    return x - lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True, initial=-jnp.inf))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def softmax_along(x: Any, axis: int) -> Any:
    """Softmax of an array along ``axis``."""
    e = jnp.exp(_minus_max(wide(x), axis))
    return (e / jnp.sum(e, axis=axis, keepdims=True)).astype(x.dtype)


def _softmax_forward(x: Any, axis: int) -> tuple[Any, Any]:
    out = softmax_along(x, axis)
    return out, out


def _softmax_backward(axis: int, out: Any, gradient: Any) -> tuple[Any]:
    p, g = wide(out), wide(gradient)
    return (((g - jnp.sum(g * p, axis=axis, keepdims=True)) * p).astype(out.dtype),)


softmax_along.defvjp(_softmax_forward, _softmax_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def log_softmax_along(x: Any, axis: int) -> Any:
    """log of ``softmax_along``, computed without overflow."""
    low = _minus_max(wide(x), axis)
    return (low - jnp.log(jnp.sum(jnp.exp(low), axis=axis, keepdims=True))).astype(x.dtype)


def _log_softmax_forward(x: Any, axis: int) -> tuple[Any, Any]:
    out = log_softmax_along(x, axis)
    return out, out


def _log_softmax_backward(axis: int, out: Any, gradient: Any) -> tuple[Any]:
    g = wide(gradient)
    total = jnp.sum(g, axis=axis, keepdims=True)
    return ((g - jnp.exp(wide(out)) * total).astype(out.dtype),)


log_softmax_along.defvjp(_log_softmax_forward, _log_softmax_backward)


@primitive("softmax")
def _softmax(x, *, dim):
    return softmax_along(jnp.atleast_1d(x), dim).reshape(x.shape)


@primitive("log_softmax")
def _log_softmax(x, *, dim):
    return log_softmax_along(jnp.atleast_1d(x), dim).reshape(x.shape)


def _implicit_dim(name: str, ndim: int, stacklevel: int) -> int:
    warnings.warn(
        f"Implicit dimension choice for {name} has been deprecated. "
        "Change the call to include dim=X as an argument.",
        stacklevel=stacklevel + 1,
    )
    return 0 if ndim in (0, 1, 3) else 1


def softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Dtype | None = None
) -> Tensor:
    """exp(x) / sum(exp(x)) along ``dim``; ``dtype`` casts first.

    Raises:
        NotImplementedError: the dtype is not floating.
        IndexError: ``dim`` is out of range.
    """
    if dim is None:
        dim = _implicit_dim("softmax", input.dim(), _stacklevel)
    x = input if dtype is None else math.to_dtype(input, dtype)
    require_floating(x, "softmax_lastdim_kernel_impl")
    return _softmax(x, dim=wrap_dim(dim, x.dim()))


def log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Dtype | None = None
) -> Tensor:
    """log(softmax(x)) along ``dim``, computed without overflow; ``dtype`` casts first.

    Raises:
        NotImplementedError: the dtype is not floating.
        IndexError: ``dim`` is out of range.
    """
    if dim is None:
        dim = _implicit_dim("log_softmax", input.dim(), _stacklevel)
    x = input if dtype is None else math.to_dtype(input, dtype)
    require_floating(x, "log_softmax_lastdim_kernel_impl")
    return _log_softmax(x, dim=wrap_dim(dim, x.dim()))


def softmin(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Dtype | None = None
) -> Tensor:
    """``softmax(-input)``."""
    if dim is None:
        dim = _implicit_dim("softmin", input.dim(), _stacklevel)
    return softmax(math.neg(input), dim, dtype=dtype)
