"""Elementwise math: one row per op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._dtypes import dtype as Dtype
from .._tensor import Tensor
from .primitive import Primitive, primitive
from .promotion import as_float, promoted, promoted_float, strong


def _binary(name: str, fn: Callable[..., Any], **flags: bool) -> Primitive:
    return Primitive(lambda a, b: fn(*promoted(a, b)), name, elementwise=True, **flags)


def _binary_float(name: str, fn: Callable[..., Any]) -> Primitive:
    return Primitive(lambda a, b: fn(*promoted_float(a, b)), name, elementwise=True)


def _unary(name: str, fn: Callable[..., Any], **flags: bool) -> Primitive:
    return Primitive(fn, name, elementwise=True, **flags)


def _unary_float(name: str, fn: Callable[..., Any]) -> Primitive:
    return Primitive(lambda x: fn(as_float(x)), name, elementwise=True)


def _sum_of(a: Any, b: Any) -> Any:
    a, b = promoted(a, b)
    return a | b if a.dtype == np.bool_ else a + b


def _difference(a: Any, b: Any) -> Any:
    a, b = promoted(a, b)
    if a.dtype == np.bool_:
        raise TypeError(
            "Subtraction, the `-` operator, with a bool tensor is not supported. If you are trying "
            "to invert a mask, use the `~` or `logical_not()` operator instead."
        )
    return a - b


add_ = Primitive(_sum_of, "add", elementwise=True)
sub_ = Primitive(_difference, "sub", elementwise=True)
mul = _binary("mul", lambda a, b: a & b if a.dtype == np.bool_ else a * b)
true_divide = _binary_float("div", lambda a, b: a / b)
floor_divide = _binary("floor_divide", jnp.floor_divide, differentiable=False)
remainder = _binary("remainder", jnp.remainder)
fmod = _binary("fmod", jnp.fmod)
atan2 = _binary_float("atan2", jnp.arctan2)
maximum = _binary("maximum", jnp.maximum)
minimum = _binary("minimum", jnp.minimum)
eq = _binary("eq", lambda a, b: a == b, differentiable=False)
ne = _binary("ne", lambda a, b: a != b, differentiable=False)
lt = _binary("lt", lambda a, b: a < b, differentiable=False)
le = _binary("le", lambda a, b: a <= b, differentiable=False)
gt = _binary("gt", lambda a, b: a > b, differentiable=False)
ge = _binary("ge", lambda a, b: a >= b, differentiable=False)
logical_and = _binary("logical_and", jnp.logical_and, differentiable=False)
logical_or = _binary("logical_or", jnp.logical_or, differentiable=False)
logical_xor = _binary("logical_xor", jnp.logical_xor, differentiable=False)
bitwise_and = _binary("bitwise_and", jnp.bitwise_and, differentiable=False)
bitwise_or = _binary("bitwise_or", jnp.bitwise_or, differentiable=False)
bitwise_xor = _binary("bitwise_xor", jnp.bitwise_xor, differentiable=False)
bitwise_left_shift = _binary("bitwise_left_shift", jnp.left_shift, differentiable=False)
bitwise_right_shift = _binary("bitwise_right_shift", jnp.right_shift, differentiable=False)


@primitive("pow", elementwise=True)
def pow(a, b):  # type: ignore[no-untyped-def]  # noqa: A001 (torch's name)
    if isinstance(b, int) or (jnp.ndim(b) == 0 and getattr(b, "weak_type", False)):
        base = strong(a, promoted(a, b)[0].dtype)
        return _power_by_number(base, b)
    return jnp.power(*promoted(a, b))


def _power_by_number(base: Any, exponent: Any) -> Any:
    """x**n with a derivative that is finite at x = 0 for every n >= 1, as torch's."""
    exponent = jnp.asarray(exponent).astype(base.dtype)
    if not jnp.issubdtype(base.dtype, np.inexact):
        return jnp.power(base, exponent)
    return _float_power(base, exponent)


@jax.custom_jvp
def _float_power(base: Any, exponent: Any) -> Any:
    squared = jnp.where(exponent == 3, base * base * base, jnp.power(base, exponent))
    return jnp.where(exponent == 2, base * base, squared)


@_float_power.defjvp
def _float_power_jvp(primals: Any, tangents: Any) -> Any:
    base, exponent = primals
    out = _float_power(base, exponent)
    slope = jnp.where(exponent == 0, 0, exponent * _float_power(base, exponent - 1))
    return out, slope * tangents[0]


neg = _unary("neg", jnp.negative)
abs = _unary("abs", jnp.abs)  # noqa: A001 (torch's name)
sign = _unary("sign", jnp.sign)
ceil = _unary("ceil", jnp.ceil)
floor = _unary("floor", jnp.floor)
trunc = _unary("trunc", jnp.trunc)
frac = _unary("frac", lambda x: x - jnp.trunc(x))
square = _unary("square", jnp.square)
exp = _unary_float("exp", jnp.exp)
exp2 = _unary_float("exp2", jnp.exp2)
expm1 = _unary_float("expm1", jnp.expm1)
log = _unary_float("log", jnp.log)
log2 = _unary_float("log2", jnp.log2)
log10 = _unary_float("log10", jnp.log10)
log1p = _unary_float("log1p", jnp.log1p)
sqrt = _unary_float("sqrt", jnp.sqrt)
rsqrt = _unary_float("rsqrt", lax.rsqrt)
reciprocal = _unary_float("reciprocal", jnp.reciprocal)
sin = _unary_float("sin", jnp.sin)
cos = _unary_float("cos", jnp.cos)
tan = _unary_float("tan", jnp.tan)
asin = _unary_float("asin", jnp.arcsin)
acos = _unary_float("acos", jnp.arccos)
atan = _unary_float("atan", jnp.arctan)
sinh = _unary_float("sinh", jnp.sinh)
cosh = _unary_float("cosh", jnp.cosh)
tanh = _unary_float("tanh", jnp.tanh)
asinh = _unary_float("asinh", jnp.arcsinh)
acosh = _unary_float("acosh", jnp.arccosh)
atanh = _unary_float("atanh", jnp.arctanh)
sigmoid = _unary_float("sigmoid", jax.nn.sigmoid)
erf = _unary_float("erf", lax.erf)
erfinv = _unary_float("erfinv", lax.erf_inv)
isnan = _unary("isnan", jnp.isnan, differentiable=False)
isinf = _unary("isinf", jnp.isinf, differentiable=False)
isfinite = _unary("isfinite", jnp.isfinite, differentiable=False)
logical_not = _unary("logical_not", jnp.logical_not, differentiable=False)
bitwise_not = _unary("bitwise_not", jnp.invert, differentiable=False)
real = _unary("real", jnp.real)
imag = _unary("imag", jnp.imag)
conj = _unary("conj", jnp.conj)
angle = _unary("angle", jnp.angle)
polar = _binary_float("polar", lambda r, t: lax.complex(r * jnp.cos(t), r * jnp.sin(t)))
lerp = Primitive(
    lambda a, b, w: (lambda x, y, z: x + z * (y - x))(*promoted(a, b, w)), "lerp", elementwise=True
)
addcmul_ = Primitive(
    lambda x, a, b, v: (lambda p, q, r: p + strong(v, p.dtype) * q * r)(*promoted(x, a, b)),
    "addcmul",
    elementwise=True,
)
addcdiv_ = Primitive(
    lambda x, a, b, v: (lambda p, q, r: p + strong(v, p.dtype) * q / r)(*promoted(x, a, b)),
    "addcdiv",
    elementwise=True,
)


@jax.custom_jvp
def _relu(x: Any) -> Any:
    return jnp.maximum(x, 0)


@_relu.defjvp
def _relu_jvp(primals: Any, tangents: Any) -> Any:
    out = _relu(primals[0])
    return out, jnp.where(out > 0, tangents[0], 0)


relu = _unary("relu", _relu)


@primitive("where", elementwise=True)
def where_(condition, a, b):  # type: ignore[no-untyped-def]
    return jnp.where(condition, *promoted(a, b))


@primitive("masked_fill", elementwise=True)
def masked_fill(x, mask, value):  # type: ignore[no-untyped-def]
    return jnp.where(mask, strong(value, x.dtype), x)


@primitive("clamp", elementwise=True)
def clamp_(x, low, high):  # type: ignore[no-untyped-def]
    if low is not None:
        x, low = promoted(x, low)
        x = jnp.where(x < low, low, x)
    if high is not None:
        x, high = promoted(x, high)
        x = jnp.where(x > high, high, x)
    return x


@primitive("to_copy", elementwise=True)
def cast(x, *, dtype):  # type: ignore[no-untyped-def]
    return x.astype(dtype.numpy)


@primitive("clone", elementwise=True)
def clone_(x):  # type: ignore[no-untyped-def]
    return x + jnp.zeros((), x.dtype) if x.dtype != np.bool_ else x | False


@primitive("round", elementwise=True)
def _round(x, *, decimals):  # type: ignore[no-untyped-def]
    return jnp.round(x, decimals)


@primitive("nan_to_num", elementwise=True)
def _nan_to_num(x, *, nan, posinf, neginf):  # type: ignore[no-untyped-def]
    return jnp.nan_to_num(x, nan=nan, posinf=posinf, neginf=neginf)


def add(input: Any, other: Any, *, alpha: float = 1) -> Tensor:  # noqa: A002
    """``input + alpha * other``, as ``torch.add``."""
    return add_(input, other if alpha == 1 else mul(other, alpha))


def sub(input: Any, other: Any, *, alpha: float = 1) -> Tensor:  # noqa: A002
    """``input - alpha * other``, as ``torch.sub``."""
    return sub_(input, other if alpha == 1 else mul(other, alpha))


def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:  # noqa: A002
    """``input / other``; ``rounding_mode`` is None, ``"trunc"`` or ``"floor"``."""
    if rounding_mode is None:
        return true_divide(input, other)
    if rounding_mode == "floor":
        return floor_divide(input, other)
    if rounding_mode != "trunc":
        raise RuntimeError(
            "div expected rounding_mode to be one of None, 'trunc', or 'floor' but found "
            f"'{rounding_mode}'"
        )
    return _divide_trunc(input, other)


@primitive("div_trunc", elementwise=True, differentiable=False)
def _divide_trunc(a, b):  # type: ignore[no-untyped-def]
    a, b = promoted(a, b)
    if jnp.issubdtype(a.dtype, np.integer):
        return lax.div(*jnp.broadcast_arrays(a, b))
    return jnp.trunc(a / b)


def round(input: Tensor, *, decimals: int = 0) -> Tensor:  # noqa: A001, A002
    """Rounds half to even, as ``torch.round``."""
    return _round(input, decimals=decimals)


def nan_to_num(
    input: Tensor,  # noqa: A002
    nan: float = 0.0,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Tensor:
    """Replaces nan and infinities, as ``torch.nan_to_num``."""
    return _nan_to_num(input, nan=nan, posinf=posinf, neginf=neginf)


def clamp(input: Tensor, min: Any = None, max: Any = None) -> Tensor:  # noqa: A002
    """Limits values to [min, max]; either may be left out, not both."""
    if min is None and max is None:
        raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")
    return clamp_(input, min, max)


def where(condition: Tensor, input: Any = None, other: Any = None) -> Any:  # noqa: A002
    """``input`` where ``condition`` holds, ``other`` elsewhere; alone, the indices of true."""
    if input is None and other is None:
        return condition.nonzero(as_tuple=True)
    return where_(condition, input, other)


def addcmul(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:  # noqa: A002
    """``input + value * tensor1 * tensor2``."""
    return addcmul_(input, tensor1, tensor2, value)


def addcdiv(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:  # noqa: A002
    """``input + value * tensor1 / tensor2``."""
    return addcdiv_(input, tensor1, tensor2, value)


def to_dtype(x: Tensor, target: Dtype) -> Tensor:
    """``x`` in ``target``; ``x`` itself where it has that dtype."""
    return x if x._storage.array.dtype == target.numpy else cast(x, dtype=target)
