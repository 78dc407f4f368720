"""``linear``."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._ops.precision import dot_precision
from ..._ops.primitive import primitive
from ..._tensor import Tensor
from .checks import c_type, scalar_type
from .numerics import saving_inputs


@jax.custom_vjp
def _weight(weight: Any) -> Any:
    """``weight``; its gradient is computed as the transpose of ``x.T @ dy``.

    XLA:CPU runs that product faster than ``dy.T @ x`` where there are more output than input
    features, and would undo the transposition without the barrier.
    """
    return weight


def _weight_gradient(_: None, gradient: Any) -> tuple[Any]:
    if gradient.shape[0] <= gradient.shape[1]:
        return (gradient,)
    return (lax.optimization_barrier(gradient.T).T,)


_weight.defvjp(lambda weight: (weight, None), _weight_gradient)


@primitive("linear")
@saving_inputs
def _linear(x, weight, bias):
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if weight.ndim == 1:
        out = jnp.matmul(rows, weight, precision=dot_precision(rows, weight))
    else:
        out = lax.dot_general(
            rows, _weight(weight), (((1,), (1,)), ((), ())), dot_precision(rows, weight)
        )
    if bias is not None:
        out = out + bias
    return out.reshape(x.shape[:-1] + weight.shape[:-1])


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ weight.T + bias``, as ``torch.nn.functional.linear``.

    Args:
        input: (*, in_features).
        weight: (out_features, in_features), or (in_features,).
        bias: (out_features,), or () for a weight of one dim.

    Raises:
        RuntimeError: sizes or dtypes do not fit.
    """
    _check(input, weight, bias)
    return _linear(input, weight, bias)


def _check(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    shape, features = input.shape, weight.shape[-1]
    if not shape or shape[-1] != features:
        rows, own = math.prod(shape[:-1]), shape[-1] if shape else 1
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({rows}x{own} and {features}x"
            f"{weight.shape[0] if weight.dim() == 2 else 1})"
        )
    if input.dtype is not weight.dtype:
        raise RuntimeError(
            "expected m1 and m2 to have the same dtype, but got: "
            f"{c_type(input.dtype)} != {c_type(weight.dtype)}"
        )
    if bias is None:
        return
    if bias.dtype is not weight.dtype:
        raise RuntimeError(
            "self and mat2 must have the same dtype, but got "
            f"{scalar_type(bias.dtype)} and {scalar_type(weight.dtype)}"
        )
    if bias.dim() and weight.dim() == 2 and bias.shape[-1] not in (1, weight.shape[0]):
        raise RuntimeError(
            f"The expanded size of the tensor ({weight.shape[0]}) must match the existing size "
            f"({bias.shape[-1]}) at non-singleton dimension 1.  Target sizes: "
            f"[{math.prod(shape[:-1])}, {weight.shape[0]}].  Tensor sizes: {list(bias.shape)}"
        )
