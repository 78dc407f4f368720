"""Elementwise math: one row per op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._dtypes import category, complex128, float64
from .._dtypes import dtype as Dtype
from .._tensor import Tensor
from .primitive import Primitive, primitive
from .promotion import as_float, as_sum, promoted, promoted_float, strong


def _binary(name: str, fn: Callable[..., Any], **flags: Any) -> Primitive:
    return Primitive(lambda a, b: fn(*promoted(a, b)), name, elementwise=True, **flags)


def _binary_float(name: str, fn: Callable[..., Any]) -> Primitive:
    return Primitive(lambda a, b: fn(*promoted_float(a, b)), name, elementwise=True)


def _unary(name: str, fn: Callable[..., Any], **flags: Any) -> Primitive:
    return Primitive(fn, name, elementwise=True, **flags)


def _unary_float(name: str, fn: Callable[..., Any], **flags: Any) -> Primitive:
    return Primitive(lambda x: fn(as_float(x)), name, elementwise=True, **flags)


def _rounding(name: str, fn: Callable[..., Any]) -> Primitive:
    """A row whose integers are whole already."""
    return _unary(name, lambda x: fn(x) if jnp.issubdtype(x.dtype, np.inexact) else x)


def _sum_of(a: Any, b: Any) -> Any:
    a, b = promoted(a, b)
    return a | b if a.dtype == np.bool_ else a + b


def _difference(a: Any, b: Any) -> Any:
    bools = [jnp.asarray(x).dtype == np.bool_ for x in (a, b)]
    if all(bools):
        raise RuntimeError(
            "Subtraction, the `-` operator, with two bool tensors is not supported. Use the `^` or "
            "`logical_xor()` operator instead."
        )
    if any(bools):
        raise RuntimeError(
            "Subtraction, the `-` operator, with a bool tensor is not supported. If you are trying "
            "to invert a mask, use the `~` or `logical_not()` operator instead."
        )
    a, b = promoted(a, b)
    return a - b


add_ = Primitive(_sum_of, "add", elementwise=True)
sub_ = Primitive(_difference, "sub", elementwise=True)
mul = _binary("mul", lambda a, b: a & b if a.dtype == np.bool_ else a * b)
true_divide = _binary_float("div", lambda a, b: a / b)
floor_divide = _binary("floor_divide", jnp.floor_divide, differentiable=False)
remainder = _binary("remainder", jnp.remainder)
fmod = _binary("fmod", jnp.fmod)
atan2 = _binary_float("atan2", jnp.arctan2)
hypot = _binary_float("hypot", jnp.hypot)
copysign = _binary_float("copysign", jnp.copysign)
logaddexp = _binary_float("logaddexp", jnp.logaddexp)
xlogy = _binary_float("xlogy", lambda a, b: jax.scipy.special.xlogy(a, b))
maximum = _binary("maximum", jnp.maximum)
minimum = _binary("minimum", jnp.minimum)
fmax = _binary("fmax", jnp.fmax)
fmin = _binary("fmin", jnp.fmin)
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

neg = _unary("neg", jnp.negative)
positive = _unary("positive", jnp.positive)
abs = _unary("abs", jnp.abs, saves="input")
sign = _unary("sign", jnp.sign)
sgn = _unary("sgn", jnp.sign)
signbit = _unary(
    "signbit", lambda x: x < 0 if x.dtype.kind in "iu" else jnp.signbit(x), differentiable=False
)
ceil = _rounding("ceil", jnp.ceil)
floor = _rounding("floor", jnp.floor)
trunc = _rounding("trunc", jnp.trunc)
frac = _unary("frac", lambda x: x - jnp.trunc(x))
square = _unary(
    "square", lambda x: jnp.square(as_sum(x)) if x.dtype == np.bool_ else x * x, saves="input"
)
exp = _unary_float("exp", jnp.exp, saves="result")
exp2 = _unary_float("exp2", jnp.exp2, saves="result")
expm1 = _unary_float("expm1", jnp.expm1, saves="result")
log = _unary_float("log", jnp.log, saves="input")
log2 = _unary_float("log2", jnp.log2, saves="input")
log10 = _unary_float("log10", jnp.log10, saves="input")
log1p = _unary_float("log1p", jnp.log1p, saves="input")
sqrt = _unary_float("sqrt", jnp.sqrt, saves="result")
rsqrt = _unary_float("rsqrt", lax.rsqrt, saves="result")
reciprocal = _unary_float("reciprocal", jnp.reciprocal, saves="result")
sin = _unary_float("sin", jnp.sin, saves="input")
cos = _unary_float("cos", jnp.cos, saves="input")
tan = _unary_float("tan", jnp.tan, saves="result")
asin = _unary_float("asin", jnp.arcsin, saves="input")
acos = _unary_float("acos", jnp.arccos, saves="input")
atan = _unary_float("atan", jnp.arctan, saves="input")
sinh = _unary_float("sinh", jnp.sinh, saves="input")
cosh = _unary_float("cosh", jnp.cosh, saves="input")
tanh = _unary_float("tanh", jnp.tanh, saves="result")
asinh = _unary_float("asinh", jnp.arcsinh, saves="input")
acosh = _unary_float("acosh", jnp.arccosh, saves="input")
atanh = _unary_float("atanh", jnp.arctanh, saves="input")
sigmoid = _unary_float("sigmoid", jax.nn.sigmoid, saves="result")
logit_ = _unary_float("logit", lambda x: jnp.log(x / (1 - x)), saves="input")
sinc = _unary_float("sinc", jnp.sinc, saves="input")
erf = _unary_float("erf", lax.erf, saves="input")
erfc = _unary_float("erfc", lax.erfc, saves="input")
erfinv = _unary_float("erfinv", lax.erf_inv, saves="result")
lgamma = _unary_float("lgamma", lax.lgamma, saves="input")
digamma = _unary_float("digamma", lax.digamma, saves="input")
deg2rad = _unary_float("deg2rad", jnp.deg2rad)
rad2deg = _unary_float("rad2deg", jnp.rad2deg)
isnan = _unary("isnan", jnp.isnan, differentiable=False)
isinf = _unary("isinf", jnp.isinf, differentiable=False)
isposinf = _unary("isposinf", lambda x: jnp.isinf(x) & (x > 0), differentiable=False)
isneginf = _unary("isneginf", lambda x: jnp.isinf(x) & (x < 0), differentiable=False)
isfinite = _unary("isfinite", jnp.isfinite, differentiable=False)
isreal = _unary("isreal", jnp.isreal, differentiable=False)
logical_not = _unary("logical_not", jnp.logical_not, differentiable=False)
bitwise_not = _unary("bitwise_not", jnp.invert, differentiable=False)
real = _unary("real", jnp.real)
imag = _unary("imag", jnp.imag)
conj = _unary("conj", jnp.conj)
angle = _unary_float("angle", jnp.angle)
polar = _binary_float("polar", lambda r, t: lax.complex(r * jnp.cos(t), r * jnp.sin(t)))
complex = _binary("complex", lax.complex)


@primitive("view_as_real")
def view_as_real(x):
    """The real and imaginary parts of ``x`` along a new last dim of size 2 (a copy)."""
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)


@primitive("view_as_complex")
def view_as_complex(x):
    """Complex numbers from the real and imaginary parts along the last dim (a copy)."""
    if x.shape[-1:] != (2,):
        raise RuntimeError("Tensor must have a last dimension of size 2")
    return lax.complex(x[..., 0], x[..., 1])


@primitive("lerp", elementwise=True)
def lerp(start, end, weight):
    """``start + weight * (end - start)``, as ``torch.lerp``."""
    a, b, w = promoted(start, end, weight)
    return jnp.where(jnp.abs(w) < 0.5, a + w * (b - a), b - (b - a) * (1 - w))


@primitive("addcmul", elementwise=True)
def addcmul_(x, a, b, value):
    x, a, b = promoted(x, a, b)
    return x + strong(value, x.dtype) * a * b


@primitive("addcdiv", elementwise=True)
def addcdiv_(x, a, b, value):
    x, a, b = promoted(x, a, b)
    return x + strong(value, x.dtype) * (a / b)


@primitive("pow", elementwise=True)
def _pow(a, b):
    if jnp.ndim(b) == 0 and getattr(b, "weak_type", False):
        return _power_by_number(strong(a, promoted(a, b)[0].dtype), b)
    return jnp.power(*promoted(a, b))


@primitive("pow", elementwise=True, saves="input")
def _pow_static(x, *, exponent):
    x = strong(x, promoted(x, exponent)[0].dtype)
    if exponent == 0.5:
        return jnp.sqrt(x)
    return x**exponent if exponent == int(exponent) else jnp.power(x, exponent)


_COMMON_EXPONENTS = (2, 3, 4, 0.5, -1, 1)


def pow(input: Any, exponent: Any) -> Tensor:
    """``input ** exponent``; one of them may be a number."""
    common = type(exponent) in (int, float) and exponent in _COMMON_EXPONENTS
    if common and isinstance(input, Tensor) and (exponent >= 0 or _inexact(input)):
        return _pow_static(input, exponent=exponent)
    if (
        isinstance(exponent, int)
        and exponent < 0
        and isinstance(input, Tensor)
        and not _inexact(input)
    ):
        raise RuntimeError("Integers to negative integer powers are not allowed.")
    return _pow(input, exponent)


def _inexact(x: Tensor) -> bool:
    return category(x._storage.array.dtype) >= 2


def _power_by_number(base: Any, exponent: Any) -> Any:
    """x**n with a derivative that is finite at x = 0 for every n >= 1, as torch's."""
    exponent = jnp.asarray(exponent).astype(base.dtype)
    if not jnp.issubdtype(base.dtype, np.inexact):
        return jnp.power(base, exponent)
    return _float_power(base, exponent)


@jax.custom_jvp
def _float_power(base: Any, exponent: Any) -> Any:
    return jnp.power(base, exponent)


@_float_power.defjvp
def _float_power_jvp(primals: Any, tangents: Any) -> Any:
    base, exponent = primals
    out = _float_power(base, exponent)
    slope = jnp.where(exponent == 0, 0, exponent * _float_power(base, exponent - 1))
    return out, slope * tangents[0]


@jax.custom_jvp
def _relu(x: Any) -> Any:
    return jnp.maximum(x, 0)


@_relu.defjvp
def _relu_jvp(primals: Any, tangents: Any) -> Any:
    out = _relu(primals[0])
    return out, jnp.where(out > 0, tangents[0], 0)


relu = _unary("relu", _relu, saves="result")


@primitive("where", elementwise=True)
def where_(condition, a, b):
    return jnp.where(condition, *promoted(a, b))


@primitive("masked_fill", elementwise=True)
def masked_fill(x, mask, value):
    return jnp.where(mask, strong(value, x.dtype), x)


@primitive("clamp", elementwise=True)
def clamp_(x, low, high):
    if low is not None:
        x, low = promoted(x, low)
        x = jnp.where(x < low, low, x)
    if high is not None:
        x, high = promoted(x, high)
        x = jnp.where(x > high, high, x)
    return x


@primitive("to_copy", elementwise=True)
def cast(x, *, dtype):
    return x.astype(dtype.numpy)


@primitive("clone", elementwise=True)
def clone_(x):
    return jnp.copy(x)


@primitive("round", elementwise=True)
def _round(x, *, decimals):
    return jnp.round(x, decimals) if jnp.issubdtype(x.dtype, np.inexact) else x


@primitive("nan_to_num", elementwise=True)
def _nan_to_num(x, *, nan, posinf, neginf):
    return jnp.nan_to_num(x, nan=nan, posinf=posinf, neginf=neginf)


def add(input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """``input + alpha * other``, as ``torch.add``."""
    return add_(input, other if alpha == 1 else mul(other, alpha))


def sub(input: Any, other: Any, *, alpha: float = 1) -> Tensor:
    """``input - alpha * other``, as ``torch.sub``."""
    return sub_(input, other if alpha == 1 else mul(other, alpha))


def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:
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
def _divide_trunc(a, b):
    a, b = promoted(a, b)
    if jnp.issubdtype(a.dtype, np.integer):
        return lax.div(*jnp.broadcast_arrays(a, b))
    return jnp.trunc(a / b)


def round(input: Tensor, *, decimals: int = 0) -> Tensor:
    """Rounds half to even, as ``torch.round``."""
    return _round(input, decimals=decimals)


def nan_to_num(
    input: Tensor,
    nan: float = 0.0,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Tensor:
    """Replaces nan and infinities, as ``torch.nan_to_num``."""
    return _nan_to_num(input, nan=nan, posinf=posinf, neginf=neginf)


def clamp(input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """Limits values to [min, max]; either may be left out, not both."""
    if min is None and max is None:
        raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")
    return clamp_(input, min, max)


def clamp_min(input: Tensor, min: Any) -> Tensor:
    """Values below ``min`` become ``min``."""
    return clamp_(input, min, None)


def clamp_max(input: Tensor, max: Any) -> Tensor:
    """Values above ``max`` become ``max``."""
    return clamp_(input, None, max)


def logit(input: Tensor, eps: float | None = None) -> Tensor:
    """``log(input / (1 - input))``, with ``input`` limited to [eps, 1 - eps] if given."""
    return logit_(input if eps is None else clamp_(input, eps, 1 - eps))


def float_power(input: Any, exponent: Any) -> Tensor:
    """``input ** exponent`` in double precision."""
    double = [
        to_dtype(v, complex128 if v.is_complex() else float64) if isinstance(v, Tensor) else v
        for v in (input, exponent)
    ]
    return _pow(*double)


def where(condition: Tensor, input: Any = None, other: Any = None) -> Any:
    """``input`` where ``condition`` holds, ``other`` elsewhere; alone, the indices of true."""
    if input is None and other is None:
        return condition.nonzero(as_tuple=True)
    return where_(condition, input, other)


def addcmul(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    """``input + value * tensor1 * tensor2``."""
    return addcmul_(input, tensor1, tensor2, value)


def addcdiv(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    """``input + value * tensor1 / tensor2``."""
    return addcdiv_(input, tensor1, tensor2, value)


def to_dtype(x: Tensor, target: Dtype) -> Tensor:
    """``x`` in ``target``; ``x`` itself where it has that dtype."""
    return x if x._storage.array.dtype == target.numpy else cast(x, dtype=target)
