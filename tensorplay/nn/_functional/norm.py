"""Layer, RMS, batch and group normalisation.

All four normalise ``x`` over some axes: ``(x - mean) * rstd * weight + bias``. What is saved for
the backward is ``x``, ``mean``, ``rstd`` and ``weight``; left to autodiff, XLA:CPU would recompute
the chain of residual gradients in every weight gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._ops.inplace import assign
from ..._ops.primitive import primitive
from ..._ops.promotion import strong
from ..._tensor import Tensor
from ...autograd import no_grad
from .checks import require_floating
from .numerics import wide

Axes = tuple[int, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _normalized(axes: Axes, eps: float, centered: bool, x: Any, weight: Any) -> Any:
    """(normalised ``x`` times ``weight``, mean, variance), in float32 for half precision.

    ``weight`` broadcasts to ``x`` or is None. No gradient flows through mean and variance.
    """
    return _forward(axes, eps, centered, x, weight)[0]


def _forward(axes: Axes, eps: float, centered: bool, x: Any, weight: Any) -> tuple[Any, Any]:
    value = wide(x)
    mean = jnp.mean(value, axis=axes, keepdims=True) if centered else None
    value = value if mean is None else value - mean
    variance = jnp.mean(value * value, axis=axes, keepdims=True)
    rstd = lax.rsqrt(variance + eps)
    out = value * rstd
    out = out if weight is None else out * wide(weight)
    return (out, mean, variance), (x, weight, mean, rstd)


def _backward(axes: Axes, eps: float, centered: bool, saved: Any, gradients: Any) -> Any:
    x, weight, mean, rstd = saved
    value = wide(x)
    unit = (value if mean is None else value - mean) * rstd
    gradient = gradients[0] if weight is None else gradients[0] * wide(weight)
    inner = unit * jnp.mean(gradient * unit, axis=axes, keepdims=True)
    if centered:
        inner = inner + jnp.mean(gradient, axis=axes, keepdims=True)
    d_x = ((gradient - inner) * rstd).astype(x.dtype)
    d_weight = None if weight is None else _summed_to(gradients[0] * unit, weight)
    return d_x, d_weight


def _summed_to(value: Any, like: Any) -> Any:
    axes = tuple(i for i, n in enumerate(like.shape) if n == 1)
    return jnp.sum(value, axis=axes, keepdims=True).astype(like.dtype)


_normalized.defvjp(_forward, _backward)


def _affine(out: Any, bias: Any, dtype: Any) -> Any:
    return (out if bias is None else out + wide(bias)).astype(dtype)


@primitive("native_layer_norm")
def _layer_norm(x, weight, bias, *, dims, eps):
    return _over_last(x, weight, bias, dims, eps, True)


@primitive("fused_rms_norm")
def _rms_norm(x, weight, *, dims, eps):
    return _over_last(x, weight, None, dims, eps, False)


def _over_last(x: Any, weight: Any, bias: Any, dims: int, eps: float, centered: bool) -> Any:
    lead, width = math.prod(x.shape[:-dims]), math.prod(x.shape[-dims:])
    weight, bias = (None if p is None else p.reshape(1, width) for p in (weight, bias))
    out, _, _ = _normalized((1,), eps, centered, x.reshape(lead, width), weight)
    return _affine(out, bias, x.dtype).reshape(x.shape)


@primitive("native_group_norm")
def _group_norm(x, weight, bias, *, groups, eps):
    batch, channels = x.shape[:2]
    split = (batch, groups, channels // groups, math.prod(x.shape[2:]))
    weight, bias = (
        None if p is None else p.reshape(1, groups, channels // groups, 1) for p in (weight, bias)
    )
    out, _, _ = _normalized((2, 3), eps, True, x.reshape(split), weight)
    return _affine(out, bias, x.dtype).reshape(x.shape)


def _per_channel(p: Any, ndim: int) -> Any:
    return None if p is None else p.reshape((1, -1) + (1,) * (ndim - 2))


@primitive("native_batch_norm")
def _batch_norm_train(x, weight, bias, *, eps):
    axes = (0, *range(2, x.ndim))
    weight, bias = _per_channel(weight, x.ndim), _per_channel(bias, x.ndim)
    out, mean, variance = _normalized(axes, eps, True, x, weight)
    count = x.size // x.shape[1]
    unbiased = variance * (count / max(count - 1, 1))
    mean, unbiased = lax.stop_gradient((mean.reshape(-1), unbiased.reshape(-1)))
    return _affine(out, bias, x.dtype), mean, unbiased


@primitive("native_batch_norm")
def _batch_norm_eval(x, mean, variance, weight, bias, *, eps):
    mean, variance, weight = (_per_channel(p, x.ndim) for p in (mean, variance, weight))
    scale = lax.rsqrt(wide(variance) + eps)
    out = (wide(x) - wide(mean)) * (scale if weight is None else scale * wide(weight))
    return _affine(out, _per_channel(bias, x.ndim), x.dtype)


@primitive("running_average", differentiable=False)
def _running_average(running, new, momentum):
    momentum = strong(momentum, running.dtype)
    return running * (1 - momentum) + new.astype(running.dtype) * momentum


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalises over the last dims to mean 0 and variance 1 (Ba et al., 2016).

    Args:
        input: (*, *normalized_shape).
        weight, bias: of ``normalized_shape``; the dtype of ``input``, or float32 where that is
            float16 or bfloat16.

    Raises:
        RuntimeError: shapes or dtypes do not fit.
        NotImplementedError: the dtype is not floating.
    """
    shape = _checked_shape(input, normalized_shape, weight, bias, ", ")
    require_floating(input, "LayerNormKernelImpl")
    _check_mixed(input, (weight, bias), "expect parameter to have scalar type of Float")
    return _layer_norm(input, weight, bias, dims=len(shape), eps=float(eps))


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Divides by the root mean square over the last dims (Zhang and Sennrich, 2019).

    Args:
        input: (*, *normalized_shape).
        weight: of ``normalized_shape``.
        eps: default: the machine epsilon of the dtype computed in (float32 for half precision).

    Raises:
        RuntimeError: shapes do not fit.
        NotImplementedError: the dtype is not floating.
    """
    shape = _checked_shape(input, normalized_shape, weight, None, "")
    require_floating(input, "rms_norm")
    if eps is None:
        eps = float(np.finfo(np.float64 if input.dtype.itemsize == 8 else np.float32).eps)
    return _rms_norm(input, weight, dims=len(shape), eps=float(eps))


def _checked_shape(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    separator: str,
) -> tuple[int, ...]:
    shape = tuple(normalized_shape)
    if not shape:
        raise RuntimeError(
            "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one "
            "element, but got normalized_shape = []"
        )
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None and tuple(p.shape) != shape:
            raise RuntimeError(
                f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape "
                f"{list(p.shape)} and normalized_shape = {list(shape)}"
            )
    if tuple(input.shape[-len(shape) :]) != shape:
        sizes = ", ".join(str(s) for s in shape)
        raise RuntimeError(
            f"Given normalized_shape={list(shape)}, expected input with shape "
            f"[*{separator}{sizes}], but got input of size{list(input.shape)}"
        )
    return shape


def _check_mixed(input: Tensor, parameters: Sequence[Tensor | None], rule: str) -> None:
    """Parameters share the dtype of ``input``; all float32 beside half precision is allowed."""
    dtypes = {p.dtype for p in parameters if p is not None}
    half = input.dtype.itemsize == 2
    if dtypes <= {input.dtype} or (half and {d.name for d in dtypes} == {"float32"}):
        return
    raise RuntimeError(f"mixed dtype (CPU): {rule}")


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalises each channel over the batch and the positions (Ioffe and Szegedy, 2015).

    Args:
        input: (N, C, *).
        running_mean, running_var: (C,); in training, moved in place by ``momentum`` towards the
            batch's mean and unbiased variance; else what is normalised with.
        weight, bias: (C,).

    Raises:
        ValueError: training with one value a channel, or a bad ``eps``.
        RuntimeError: sizes or dtypes do not fit; no running statistics in evaluation.
    """
    _check_batch_norm(input, running_mean, running_var, (weight, bias), training, eps)
    if not training:
        return _batch_norm_eval(input, running_mean, running_var, weight, bias, eps=float(eps))
    out, mean, variance = _batch_norm_train(input, weight, bias, eps=float(eps))
    with no_grad():
        for running, new in ((running_mean, mean), (running_var, variance)):
            if running is not None:
                assign(running, _running_average(running, new, momentum))
    return out


def _check_batch_norm(
    input: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    parameters: tuple[Tensor | None, Tensor | None],
    training: bool,
    eps: float,
) -> None:
    if training:
        _require_values(input.shape)
    if training and eps <= 0:
        raise ValueError(f"batch_norm eps must be positive during training, but got {eps}")
    if eps < 0:
        raise ValueError(f"batch_norm eps must be non-negative, but got {eps}")
    require_floating(input, "batch_norm")
    named = zip(
        ("running_mean", "running_var", "weight", "bias"),
        (mean, variance, *parameters),
        strict=True,
    )
    for name, p in named:
        if p is None and name.startswith("running") and not training:
            raise RuntimeError(f"{name} must be defined in evaluation mode")
        if p is not None and p.numel() != input.shape[1]:
            raise RuntimeError(f"{name} should contain {input.shape[1]} elements not {p.numel()}")
    _check_mixed(input, (mean, variance, *parameters), "all inputs must share same datatype.")


def _require_values(shape: Sequence[int]) -> None:
    """Refuses (N, C, *) with one value for each channel."""
    if shape[0] * math.prod(shape[2:]) == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {shape}"
        )


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalises each of ``num_groups`` groups of channels of a sample (Wu and He, 2018).

    Args:
        input: (N, C, *), C a multiple of ``num_groups``.
        weight, bias: (C,).

    Raises:
        RuntimeError: shapes do not fit.
        ValueError: a single value to normalise over.
    """
    if input.dim() < 2:
        raise RuntimeError(
            f"Expected at least 2 dimensions for input tensor but received {input.dim()}"
        )
    shape = list(input.shape)
    _require_values([shape[0] * shape[1] // num_groups, num_groups, *shape[2:]])
    if shape[1] % num_groups:
        raise RuntimeError(
            "Expected number of channels in input to be divisible by num_groups, but got input of "
            f"shape {shape} and num_groups={num_groups}"
        )
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None and tuple(p.shape) != (shape[1],):
            raise RuntimeError(
                f"Expected {name} to be a vector of size equal to the number of channels in input, "
                f"but got {name} of shape {list(p.shape)} and input of shape {shape}"
            )
    require_floating(input, "GroupNormKernelImpl")
    _check_mixed(input, (weight, bias), "expect parameter to have scalar type of Float")
    return _group_norm(input, weight, bias, groups=num_groups, eps=float(eps))
