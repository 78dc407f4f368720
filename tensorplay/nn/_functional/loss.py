"""Losses on values and on probabilities."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._ops import math
from ..._ops import reduce as reductions
from ..._ops.primitive import Primitive, primitive
from ..._ops.promotion import promoted
from ..._state import state
from ..._tensor import Tensor
from .checks import broadcast_shape, require_floating, scalar_type
from .numerics import magnitude, saving_inputs, wide
from .reduction import legacy_reduction, reduced


def _pointwise(name: str, fn: Callable[..., Any]) -> Primitive:
    """``(input, target, weight, reduction=...)`` for a loss of each pair of elements."""

    @saving_inputs
    def run(
        a: Any, b: Any, weight: Any, *, reduction: str, weighted_mean: bool, **options: Any
    ) -> Any:
        x, y = promoted(a, b)
        loss = fn(wide(x), wide(y), **options)
        dtype = x.dtype
        if weight is not None:
            loss, dtype = loss * wide(weight), jnp.promote_types(dtype, weight.dtype)
            if weighted_mean and reduction == "mean":
                return (jnp.sum(loss) / jnp.sum(wide(weight))).astype(dtype)
        return reduced(loss, reduction).astype(dtype)

    return Primitive(run, name)


def _smooth_l1(x: Any, y: Any, *, beta: float) -> Any:
    d = x - y
    if beta == 0:
        return magnitude(d)
    return jnp.where(jnp.abs(d) < beta, 0.5 * d * d / beta, jnp.abs(d) - 0.5 * beta)


def _huber(x: Any, y: Any, *, delta: float) -> Any:
    d = x - y
    return jnp.where(jnp.abs(d) <= delta, 0.5 * d * d, delta * (jnp.abs(d) - 0.5 * delta))


def _kl(x: Any, y: Any, *, log_target: bool) -> Any:
    if log_target:
        return jnp.exp(y) * (y - x)
    return jax.scipy.special.xlogy(y, y) - y * x


_SMALLEST_VARIANCE = float(np.float32(1e-12))


@jax.custom_vjp
def _bce(x: Any, y: Any) -> Any:
    return -(y * _clamped_log(x) + (1 - y) * _clamped_log(1 - x))


def _clamped_log(x: Any) -> Any:
    return jnp.maximum(jnp.log(jnp.maximum(x, np.exp(-100.0).astype(x.dtype))), -100)


def _bce_backward(saved: Any, gradient: Any) -> tuple[Any, Any]:
    x, y = saved
    d_x = gradient * (x - y) / jnp.maximum((1 - x) * x, _SMALLEST_VARIANCE)
    return d_x, gradient * (_clamped_log(1 - x) - _clamped_log(x))


_bce.defvjp(lambda x, y: (_bce(x, y), (x, y)), _bce_backward)

_mse_loss = _pointwise("mse_loss", lambda x, y: (x - y) * (x - y))
_l1_loss = _pointwise("l1_loss", lambda x, y: magnitude(x - y))
_smooth_l1_loss = _pointwise("smooth_l1_loss", _smooth_l1)
_huber_loss = _pointwise("huber_loss", _huber)
_kl_div = _pointwise("kl_div", _kl)
_binary_cross_entropy = _pointwise("binary_cross_entropy", _bce)


@primitive("binary_cross_entropy_with_logits")
@saving_inputs
def _bce_with_logits(a, b, weight, pos_weight, *, reduction):
    x, y = promoted(a, b)
    scale = 1 if pos_weight is None else (wide(pos_weight) - 1) * wide(y) + 1
    loss = (1 - wide(y)) * wide(x) - scale * jax.nn.log_sigmoid(wide(x))
    loss = loss if weight is None else loss * wide(weight)
    return reduced(loss, reduction).astype(x.dtype)


def _check_pair(input: Tensor, target: Tensor, weight: Tensor | None, kernel: str) -> None:
    if target.shape != input.shape:
        warnings.warn(
            f"Using a target size ({target.shape}) that is different to the input size "
            f"({input.shape}). This will likely lead to incorrect results due to broadcasting. "
            "Please ensure they have the same size.",
            stacklevel=3,
        )
        broadcast_shape(input.shape, target.shape)
    if not target.is_floating_point():
        require_floating(input, kernel)
    if weight is not None and weight.shape != input.shape:
        raise ValueError("Weights and input must have the same size.")


def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Squared differences; with ``weight``, "mean" divides by the sum of the weights.

    Raises:
        ValueError: an unknown ``reduction``, or a weight of another shape.
    """
    reduction = legacy_reduction(size_average, reduce, reduction)
    _check_pair(input, target, weight, "mse_cpu")
    return _mse_loss(input, target, weight, reduction=reduction, weighted_mean=True)


def l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Absolute differences; with ``weight``, "mean" divides by the sum of the weights.

    Raises:
        ValueError: an unknown ``reduction``, or a weight of another shape.
    """
    reduction = legacy_reduction(size_average, reduce, reduction)
    _check_pair(input, target, weight, "l1_cpu")
    return _l1_loss(input, target, weight, reduction=reduction, weighted_mean=True)


def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Tensor:
    """Squared differences over ``2 * beta`` where below ``beta``, else absolute ones less beta / 2.

    Raises:
        RuntimeError: ``beta`` is negative.
        ValueError: an unknown ``reduction``.
    """
    reduction = legacy_reduction(size_average, reduce, reduction)
    _check_pair(input, target, None, "smooth_l1_cpu")
    if beta < 0:
        raise RuntimeError("smooth_l1_loss does not support negative values for beta.")
    return _smooth_l1_loss(
        input, target, None, reduction=reduction, weighted_mean=False, beta=float(beta)
    )


def huber_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    """Half the squared difference up to ``delta``, linear beyond it.

    Raises:
        RuntimeError: ``delta`` is not positive.
        ValueError: an unknown ``reduction``, or a weight of another shape.
    """
    reduction = legacy_reduction(None, None, reduction)
    _check_pair(input, target, weight, "huber_cpu")
    if delta <= 0:
        raise RuntimeError("huber_loss does not support non-positive values for delta.")
    return _huber_loss(
        input, target, weight, reduction=reduction, weighted_mean=False, delta=float(delta)
    )


def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    """target * (log target - input), ``input`` log-probabilities.

    Args:
        reduction: also ``"batchmean"``, the sum divided by ``input.shape[0]``.
        log_target: ``target`` holds log-probabilities too.

    Raises:
        ValueError: an unknown ``reduction``.
    """
    legacy = size_average is not None or reduce is not None
    if reduction == "mean" and not legacy:
        warnings.warn(
            "reduction: 'mean' divides the total loss by both the batch size and the support size."
            "'batchmean' divides only by the batch size, and aligns with the KL div math "
            "definition.'mean' will be changed to behave the same as 'batchmean' in the next major "
            "release.",
            stacklevel=2,
        )
    batchmean = reduction == "batchmean" and not legacy
    reduction = legacy_reduction(size_average, reduce, "sum" if batchmean else reduction)
    out = _kl_div(
        input, target, None, reduction=reduction, weighted_mean=False, log_target=bool(log_target)
    )
    return math.true_divide(out, input.shape[0]) if batchmean and input.dim() else out


def binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """-(target * log(input) + (1 - target) * log(1 - input)), logarithms at least -100.

    Raises:
        ValueError: sizes differ, or an unknown ``reduction``.
        RuntimeError: values outside [0, 1] (not seen inside a compiled call), or dtypes differ.
    """
    reduction = legacy_reduction(size_average, reduce, reduction)
    if target.shape != input.shape:
        raise ValueError(
            f"Using a target size ({target.shape}) that is different to the input size "
            f"({input.shape}) is deprecated. Please ensure they have the same size."
        )
    require_floating(input, "binary_cross_entropy")
    if target.dtype is not input.dtype:
        raise RuntimeError(
            f"Found dtype {scalar_type(target.dtype)} but expected {scalar_type(input.dtype)}"
        )
    _require_unit_interval(input, "input")
    _require_unit_interval(target, "target")
    return _binary_cross_entropy(input, target, weight, reduction=reduction, weighted_mean=False)


def _require_unit_interval(x: Tensor, name: str) -> None:
    if state.trace is not None or x.is_meta or x.numel() == 0:
        return
    x = x.detach()
    if float(reductions.amin(x)) < 0 or float(reductions.amax(x)) > 1:
        raise RuntimeError(f"all elements of {name} should be between 0 and 1")


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """``binary_cross_entropy(sigmoid(input), target)``, computed without overflow.

    Args:
        weight: broadcasts to the losses.
        pos_weight: weight of positive examples, broadcasts to ``target``.

    Raises:
        ValueError: sizes differ, or an unknown ``reduction``.
        NotImplementedError: the dtype is not floating.
    """
    reduction = legacy_reduction(size_average, reduce, reduction)
    if target.shape != input.shape:
        raise ValueError(
            f"Target size ({target.shape}) must be the same as input size ({input.shape})"
        )
    require_floating(input, "log_sigmoid_cpu")
    return _bce_with_logits(input, target, weight, pos_weight, reduction=reduction)
