"""Losses of classification."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._ops.primitive import primitive
from ..._state import state
from ..._tensor import Tensor
from .checks import require_floating, scalar_type
from .numerics import wide
from .reduction import legacy_reduction, reduced
from .softmax import log_softmax_along


@jax.custom_vjp
def _log_probability(logits: Any, target: Any) -> Any:
    """The log-softmax of ``logits`` (N, C) at class ``target`` (N,), in float32 or wider.

    Saves the logits and the N values log(sum(exp(logits))); nan for a target out of range.
    """
    return _log_probability_forward(logits, target)[0]


def _log_probability_forward(logits: Any, target: Any) -> tuple[Any, Any]:
    x = wide(logits)
    top = lax.stop_gradient(jnp.max(x, axis=1, initial=-jnp.inf))
    total = top + jnp.log(jnp.sum(jnp.exp(x - top[:, None]), axis=1))
    return _picked(x, target) - total, (logits, target, total)


def _log_probability_backward(saved: Any, gradient: Any) -> tuple[Any, None]:
    logits, target, total = saved
    probability = jnp.exp(wide(logits) - total[:, None])
    classes = lax.broadcasted_iota(target.dtype, logits.shape, 1)
    hit = (classes == target[:, None]).astype(probability.dtype)
    return ((hit - probability) * gradient[:, None]).astype(logits.dtype), None


_log_probability.defvjp(_log_probability_forward, _log_probability_backward)


def _picked(x: Any, target: Any) -> Any:
    inside = (target >= 0) & (target < x.shape[1])
    index = jnp.where(inside, target, 0)
    values = jnp.take_along_axis(x, index[:, None], axis=1, mode="clip")[:, 0]
    return jnp.where(inside, values, jnp.nan)


def _by_class(x: Any) -> Any:
    """(N, C, *) or (C,) as rows (positions, C)."""
    return x[None] if x.ndim == 1 else jnp.moveaxis(x, 1, -1).reshape(-1, x.shape[1])


def _share(target: Any, counted: Any, weight: Any, dtype: Any) -> Any:
    """The weight of each row: its class's, 0 where ignored."""
    of_class = jnp.ones((), dtype) if weight is None else wide(weight)[target]
    return jnp.where(counted, of_class, jnp.zeros((), dtype))


def _by_share(loss: Any, share: Any, reduction: str, shape: tuple[int, ...]) -> Any:
    if reduction == "mean":
        return jnp.sum(loss) / jnp.sum(share)
    return jnp.sum(loss) if reduction == "sum" else loss.reshape(shape)


@primitive("cross_entropy_loss", saves="nothing")
def _cross_entropy(x, target, weight, *, ignore_index, smoothing, reduction):
    rows, flat = _by_class(x), target.reshape(-1).astype(np.int64)
    counted = flat != ignore_index
    safe = jnp.where(counted, flat, 0)
    share = _share(safe, counted, weight, wide(x).dtype)
    if smoothing == 0:
        loss = -_log_probability(rows, safe) * share
    else:
        log_p = log_softmax_along(wide(rows), 1)
        spread = jnp.sum(log_p if weight is None else log_p * wide(weight), axis=1)
        spread = jnp.where(counted, spread, 0) * (smoothing / rows.shape[1])
        loss = -_picked(log_p, safe) * share * (1 - smoothing) - spread
    return _by_share(loss, share, reduction, target.shape).astype(x.dtype)


@primitive("cross_entropy_loss", saves="nothing")
def _soft_cross_entropy(x, target, weight, *, smoothing, reduction):
    rows, wanted = _by_class(x), wide(_by_class(target))
    if smoothing:
        wanted = wanted * (1 - smoothing) + smoothing / rows.shape[1]
    wanted = wanted if weight is None else wanted * wide(weight)
    loss = -jnp.sum(log_softmax_along(wide(rows), 1) * wanted, axis=1)
    loss = loss.reshape(x.shape[:1] + x.shape[2:] if x.ndim > 1 else ())
    return reduced(loss, reduction).astype(jnp.promote_types(x.dtype, target.dtype))


@primitive("nll_loss")
def _nll_loss(x, target, weight, *, ignore_index, reduction):
    flat = target.reshape(-1).astype(np.int64)
    counted = flat != ignore_index
    safe = jnp.where(counted, flat, 0)
    share = _share(safe, counted, weight, wide(x).dtype)
    loss = jnp.where(counted, -wide(_picked(_by_class(x), safe)), 0) * share
    return _by_share(loss, share, reduction, target.shape).astype(x.dtype)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The cross entropy of logits, as ``torch.nn.functional.cross_entropy``.

    Args:
        input: (C,), (N, C) or (N, C, d1, ...).
        target: classes, int64 or uint8, in the shape of ``input`` without C; or probabilities,
            floating, in the shape of ``input``.
        weight: (C,), a weight for each class; "mean" divides by the weights of the targets.
        ignore_index: targets of this value count nothing.
        label_smoothing: in [0, 1], the share of the uniform distribution in the target.

    Raises:
        IndexError: a class is not in [0, C). Inside a compiled call, where values are not known,
            its loss is nan instead.
        ValueError: batch sizes differ, or an unknown ``reduction``.
        RuntimeError: other shapes or dtypes do not fit.
    """
    reduction = legacy_reduction(size_average, reduce, reduction)
    if not 0 <= label_smoothing <= 1:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    smoothing = float(label_smoothing)
    if target.shape == input.shape:
        _check_probabilities(input, target, ignore_index)
        _check_logits(input, weight)
        return _soft_cross_entropy(input, target, weight, smoothing=smoothing, reduction=reduction)
    _check_classes(input, target)
    _check_logits(input, weight)
    _check_bounds(target, input.shape[min(1, input.dim() - 1)], ignore_index)
    return _cross_entropy(
        input,
        target,
        weight,
        ignore_index=ignore_index,
        smoothing=smoothing,
        reduction=reduction,
    )


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """The negative log-probability of the target class; ``input`` holds log-probabilities.

    Arguments and errors as for ``cross_entropy``.
    """
    reduction = legacy_reduction(size_average, reduce, reduction)
    _check_classes(input, target)
    require_floating(input, "nll_loss_out_frame")
    _check_weight(input, weight)
    _check_bounds(target, input.shape[min(1, input.dim() - 1)], ignore_index)
    return _nll_loss(input, target, weight, ignore_index=ignore_index, reduction=reduction)


def _check_probabilities(input: Tensor, target: Tensor, ignore_index: int) -> None:
    if not target.is_floating_point():
        raise RuntimeError(
            "Expected floating point type for target with class probabilities, got "
            f"{scalar_type(target.dtype)}"
        )
    if ignore_index >= 0:
        raise RuntimeError("ignore_index is not supported for floating point target")


def _check_logits(input: Tensor, weight: Tensor | None) -> None:
    require_floating(input, "log_softmax_lastdim_kernel_impl")
    _check_weight(input, weight)


def _check_weight(input: Tensor, weight: Tensor | None) -> None:
    if weight is None:
        return
    classes = input.shape[min(1, input.dim() - 1)]
    if tuple(weight.shape) != (classes,):
        raise RuntimeError(
            f"weight tensor should be defined either for all {classes} classes or no classes but "
            f"got weight tensor of shape: {list(weight.shape)}"
        )
    if weight.dtype is not input.dtype:
        raise RuntimeError(
            f"expected scalar type {scalar_type(input.dtype)} but found {scalar_type(weight.dtype)}"
        )


def _check_classes(input: Tensor, target: Tensor) -> None:
    """Shapes and dtype of a target of classes."""
    if input.dim() == 0:
        raise ValueError("Expected 1 or more dimensions (got 0)")
    batch = target.shape[0] if target.dim() else 1
    if input.dim() != 1 and input.shape[0] != batch:
        raise ValueError(
            f"Expected input batch_size ({input.shape[0]}) to match target batch_size ({batch})."
        )
    wanted = tuple(input.shape[:1] + input.shape[2:]) if input.dim() > 1 else ()
    if input.dim() <= 2 and target.dim() > 1:
        raise RuntimeError("0D or 1D target tensor expected, multi-target not supported")
    if target.dtype.name not in ("int64", "uint8"):
        raise RuntimeError(
            f"expected target dtype to be Long or Byte, but got {scalar_type(target.dtype)}"
        )
    if tuple(target.shape) != wanted:
        raise RuntimeError(f"Expected target size {list(wanted)}, got {list(target.shape)}")


def _check_bounds(target: Tensor, classes: int, ignore_index: int) -> None:
    if state.trace is not None or target.is_meta or target.numel() == 0:
        return
    values = target._host()
    if values.min() >= 0 and values.max() < classes:
        return
    bad = values[((values < 0) | (values >= classes)) & (values != ignore_index)]
    if bad.size:
        raise IndexError(f"Target {bad.flat[0]} is out of bounds.")
