"""Layer, RMS, batch and group normalisation.

All four normalise ``x`` over some axes: ``(x - mean) * rstd * weight + bias``. What is saved for
the backward is ``x``, ``mean``, ``rstd`` and ``weight``; left to autodiff, XLA:CPU would recompute
the chain of residual gradients in every weight gradient.
"""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class _Rule:
    """How to normalise: over ``axes`` of the input seen in ``shape``, to mean 0 if ``centered``.

    The weight is seen in ``weight_shape``, which broadcasts to ``shape``. Views are taken inside of
    the custom derivative, so that what is saved are the input and the weight as they came.
    """

    shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    axes: tuple[int, ...]
    eps: float
    centered: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalized(rule: _Rule, x: Any, weight: Any) -> Any:
    """(normalised ``x`` times ``weight``, mean, variance), in float32 for half precision.

    ``weight`` may be None. No gradient flows through mean and variance.
    """
    return _forward(rule, x, weight)[0]


def _forward(rule: _Rule, x: Any, weight: Any) -> tuple[Any, Any]:
    value = wide(x).reshape(rule.shape)
    mean = jnp.mean(value, axis=rule.axes, keepdims=True) if rule.centered else None
    value = value if mean is None else value - mean
    variance = jnp.mean(value * value, axis=rule.axes, keepdims=True)
    rstd = lax.rsqrt(variance + rule.eps)
    out = value * rstd
    out = out if weight is None else out * wide(weight).reshape(rule.weight_shape)
    return (out.reshape(x.shape), mean, variance), (x, weight, mean, rstd)


def _backward(rule: _Rule, saved: Any, gradients: Any) -> Any:
    x, weight, mean, rstd = saved
    value, of_out = wide(x).reshape(rule.shape), gradients[0].reshape(rule.shape)
    unit = (value if mean is None else value - mean) * rstd
    gradient = of_out if weight is None else of_out * wide(weight).reshape(rule.weight_shape)
    inner = unit * jnp.mean(gradient * unit, axis=rule.axes, keepdims=True)
    if rule.centered:
        inner = inner + jnp.mean(gradient, axis=rule.axes, keepdims=True)
    d_x = ((gradient - inner) * rstd).astype(x.dtype).reshape(x.shape)
    if weight is None:
        return d_x, None
    summed = tuple(i for i, n in enumerate(rule.weight_shape) if n == 1)
    d_weight = jnp.sum(of_out * unit, axis=summed)
    return d_x, d_weight.astype(weight.dtype).reshape(weight.shape)


_normalized.defvjp(_forward, _backward)


def _affine(out: Any, bias: Any, dtype: Any) -> Any:
    return (out if bias is None else out + wide(bias)).astype(dtype)


@primitive("native_layer_norm")
def _layer_norm(x, weight, bias, *, dims, eps):
    return _affine(_normalized(_over_last(x, dims, eps, True), x, weight)[0], bias, x.dtype)


@primitive("fused_rms_norm")
def _rms_norm(x, weight, *, dims, eps):
    return _affine(_normalized(_over_last(x, dims, eps, False), x, weight)[0], None, x.dtype)


def _over_last(x: Any, dims: int, eps: float, centered: bool) -> _Rule:
    lead, width = math.prod(x.shape[:-dims]), math.prod(x.shape[-dims:])
    return _Rule((lead, width), (1, width), (1,), eps, centered)


@primitive("native_group_norm")
def _group_norm(x, weight, bias, *, groups, eps):
    batch, channels = x.shape[:2]
    size = channels // groups
    shape = (batch, groups, size, math.prod(x.shape[2:]))
    out, _, _ = _normalized(_Rule(shape, (1, groups, size, 1), (2, 3), eps, True), x, weight)
    return _affine(out, _per_channel(bias, x.ndim), x.dtype)


def _per_channel(p: Any, ndim: int) -> Any:
    return None if p is None else p.reshape((1, -1) + (1,) * (ndim - 2))


@primitive("native_batch_norm")
def _batch_norm_train(x, weight, bias, *, eps):
    shape = x.shape[:2] + (math.prod(x.shape[2:]),)
    rule = _Rule(shape, (1, x.shape[1], 1), (0, 2), eps, True)
    out, mean, variance = _normalized(rule, x, weight)
    count = x.size // x.shape[1]
    unbiased = variance * (count / max(count - 1, 1))
    mean, unbiased = lax.stop_gradient((mean.reshape(-1), unbiased.reshape(-1)))
    return _affine(out, _per_channel(bias, x.ndim), x.dtype), mean, unbiased


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
