"""Activation functions."""

from __future__ import annotations

import math as pymath
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._ops import math
from ..._ops.inplace import assign
from ..._ops.primitive import Primitive, primitive
from ..._ops.promotion import as_float, strong
from ..._tensor import Tensor, wrap_dim
from .checks import require_floating
from .numerics import magnitude, saving_inputs, wide


def _curve(name: str, fn: Callable[[Any], Any], slope: Callable[[Any], Any]) -> Primitive:
    """An elementwise op that saves its input alone; ``slope`` is the derivative of ``fn``."""

    @jax.custom_vjp
    def run(x: Any) -> Any:
        return fn(wide(x)).astype(x.dtype)

    def backward(x: Any, gradient: Any) -> tuple[Any]:
        return ((wide(gradient) * slope(wide(x))).astype(x.dtype),)

    run.defvjp(lambda x: (run(x), x), backward)
    return Primitive(run, name, elementwise=True)


_ROOT_HALF = pymath.sqrt(0.5)
_ROOT_2_OVER_PI = pymath.sqrt(2 / pymath.pi)
_CUBIC = 0.044715


def _gelu_slope(x: Any) -> Any:
    density = jnp.exp(-0.5 * x * x) * pymath.sqrt(0.5 / pymath.pi)
    return 0.5 * (1 + lax.erf(x * _ROOT_HALF)) + x * density


def _gelu_tanh_slope(x: Any) -> Any:
    inner = jnp.tanh(_ROOT_2_OVER_PI * (x + _CUBIC * x * x * x))
    outer = _ROOT_2_OVER_PI * (1 + 3 * _CUBIC * x * x)
    return 0.5 * (1 + inner) + 0.5 * x * (1 - inner * inner) * outer


def _silu_slope(x: Any) -> Any:
    s = lax.logistic(x)
    return s * (1 + x * (1 - s))


def _mish_slope(x: Any) -> Any:
    t = jnp.tanh(jax.nn.softplus(x))
    return t + x * lax.logistic(x) * (1 - t * t)


_gelu = _curve("gelu", lambda x: 0.5 * x * (1 + lax.erf(x * _ROOT_HALF)), _gelu_slope)
_gelu_tanh = _curve(
    "gelu_tanh",
    lambda x: 0.5 * x * (1 + jnp.tanh(_ROOT_2_OVER_PI * (x + _CUBIC * x * x * x))),
    _gelu_tanh_slope,
)
_silu = _curve("silu", lambda x: x * lax.logistic(x), _silu_slope)
_mish = _curve("mish", lambda x: x * jnp.tanh(jax.nn.softplus(x)), _mish_slope)
_logsigmoid = _curve("log_sigmoid", jax.nn.log_sigmoid, lambda x: lax.logistic(-x))


@primitive("softsign", elementwise=True)
@saving_inputs
def _softsign(x):
    x = as_float(x)
    return x / (1 + magnitude(x))


@primitive("leaky_relu", elementwise=True)
@saving_inputs
def _leaky_relu(x, negative_slope):
    return jnp.where(x > 0, x, x * strong(negative_slope, x.dtype))


@primitive("elu", elementwise=True)
@saving_inputs
def _elu(x, alpha, scale, input_scale):
    a = wide(x)
    below = jnp.where(a > 0, 0, a)
    out = jnp.where(a > 0, a, alpha * jnp.expm1(below * input_scale)) * scale
    return out.astype(x.dtype)


@primitive("softplus", elementwise=True)
@saving_inputs
def _softplus(x, beta, threshold):
    a = wide(x)
    linear = a * beta > threshold
    below = jnp.where(linear, 0, a)
    return jnp.where(linear, a, jnp.log1p(jnp.exp(below * beta)) / beta).astype(x.dtype)


@primitive("hardtanh", elementwise=True)
@saving_inputs
def _hardtanh(x, low, high):
    low, high = strong(low, x.dtype), strong(high, x.dtype)
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x))


@primitive("hardsigmoid", elementwise=True)
@saving_inputs
def _hardsigmoid(x):
    a = wide(x)
    inside = jnp.where(a <= -3, 0, jnp.where(a >= 3, 1, a / 6 + 0.5))
    return inside.astype(x.dtype)


@primitive("hardswish", elementwise=True)
@saving_inputs
def _hardswish(x):
    a = wide(x)
    return jnp.where(a <= -3, 0, jnp.where(a >= 3, a, a * (a / 6 + 0.5))).astype(x.dtype)


@primitive("threshold", elementwise=True)
@saving_inputs
def _threshold(x, threshold, value):
    return jnp.where(x > threshold, x, strong(value, x.dtype))


@primitive("prelu")
@saving_inputs
def _prelu(x, weight):
    if weight.size > 1:
        weight = weight.reshape((-1,) + (1,) * (x.ndim - 2))
    return jnp.where(x > 0, x, x * weight.reshape(weight.shape if weight.size > 1 else ()))


@primitive("glu")
@saving_inputs
def _glu(x, *, dim):
    value, gate = jnp.split(x, 2, axis=dim)
    return (wide(value) * lax.logistic(wide(gate))).astype(x.dtype)


def _placed(input: Tensor, output: Tensor, inplace: bool) -> Tensor:
    return assign(input, output) if inplace else output


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """max(x, 0)."""
    return _placed(input, math.relu(input), inplace)


def relu_(input: Tensor) -> Tensor:
    """In-place form of ``relu``."""
    return relu(input, inplace=True)


def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """x * Phi(x), Phi the normal distribution function (Hendrycks and Gimpel, 2016).

    Args:
        approximate: ``"none"``, or ``"tanh"`` for the paper's tanh formula.

    Raises:
        RuntimeError: another value of ``approximate``.
        NotImplementedError: the dtype is not floating.
    """
    if approximate not in ("none", "tanh"):
        raise RuntimeError("approximate argument must be either none or tanh.")
    require_floating(input, "GeluKernelImpl")
    return _gelu(input) if approximate == "none" else _gelu_tanh(input)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """x * sigmoid(x)."""
    require_floating(input, "silu_cpu")
    return _placed(input, _silu(input), inplace)


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    """x * tanh(softplus(x))."""
    require_floating(input, "mish_cpu")
    return _placed(input, _mish(input), inplace)


def sigmoid(input: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return math.sigmoid(input)


def tanh(input: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return math.tanh(input)


def logsigmoid(input: Tensor) -> Tensor:
    """log(sigmoid(x)), computed without overflow."""
    require_floating(input, "log_sigmoid_cpu")
    return _logsigmoid(input)


def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """x where positive, else ``negative_slope * x``."""
    require_floating(input, "leaky_relu_cpu")
    return _placed(input, _leaky_relu(input, negative_slope), inplace)


def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """x where positive, else ``alpha * (exp(x) - 1)``."""
    require_floating(input, "elu_cpu")
    return _placed(input, _elu(input, alpha, 1.0, 1.0), inplace)


def selu(input: Tensor, inplace: bool = False) -> Tensor:
    """Scaled ELU with the constants of Klambauer et al., 2017."""
    require_floating(input, "elu_cpu")
    out = _elu(input, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1.0)
    return _placed(input, out, inplace)


def celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """x where positive, else ``alpha * (exp(x / alpha) - 1)``."""
    require_floating(input, "elu_cpu")
    if alpha == 0:
        raise RuntimeError("ZeroDivisionError: alpha cannot be 0 for CELU")
    return _placed(input, _elu(input, alpha, 1.0, 1.0 / alpha), inplace)


def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + exp(beta * x)) / beta; x itself where beta * x is above ``threshold``."""
    require_floating(input, "softplus_cpu")
    return _softplus(input, beta, threshold)


def hardtanh(
    input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Tensor:
    """x limited to [min_val, max_val].

    Raises:
        ValueError: ``min_val`` is greater than ``max_val``.
    """
    if min_val > max_val:
        raise ValueError("min_val cannot be greater than max_val")
    return _placed(input, _hardtanh(input, min_val, max_val), inplace)


def relu6(input: Tensor, inplace: bool = False) -> Tensor:
    """x limited to [0, 6]."""
    return hardtanh(input, 0.0, 6.0, inplace)


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """x / 6 + 1/2 limited to [0, 1]."""
    require_floating(input, "hardsigmoid_cpu")
    return _placed(input, _hardsigmoid(input), inplace)


def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    """x * hardsigmoid(x)."""
    require_floating(input, "hardswish_cpu")
    return _placed(input, _hardswish(input), inplace)


def softsign(input: Tensor) -> Tensor:
    """x / (1 + |x|)."""
    return _softsign(input)


def tanhshrink(input: Tensor) -> Tensor:
    """x - tanh(x)."""
    return math.sub_(input, math.tanh(input))


def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """x where above ``threshold``, else ``value``."""
    return _placed(input, _threshold(input, threshold, value), inplace)


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """x where positive, else ``weight * x``; ``weight`` has one element or one a channel (dim 1).

    Raises:
        RuntimeError: the number of weights is neither 1 nor the number of channels.
    """
    if weight.numel() != 1:
        channels = input.shape[1] if input.dim() > 1 else 1
        if channels != weight.numel():
            raise RuntimeError(
                "Mismatch of parameter numbers and input channel size. Found parameter numbers = "
                f"{weight.numel()} and channel size = {channels}."
            )
    return _prelu(input, weight)


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """First half of ``dim`` times the sigmoid of the second half (Dauphin et al., 2016).

    Raises:
        RuntimeError: the size of ``dim`` is odd.
    """
    if input.dim() == 0:
        raise RuntimeError("glu does not support scalars because halving size must be even")
    require_floating(input, "glu_cpu")
    d = wrap_dim(dim, input.dim())
    if input.shape[d] % 2:
        raise RuntimeError(
            f"Halving dimension must be even, but dimension {d} is size {input.shape[d]}"
        )
    return _glu(input, dim=d)
