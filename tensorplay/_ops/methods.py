"""Attaches ops to ``Tensor``: operators, methods, and their in-place forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .. import _dtypes
from .._device import device as Device
from .._dtypes import dtype as Dtype
from .._tensor import Tensor, install
from . import (
    compare,
    creation,
    indexing,
    inplace,
    join,
    linalg,
    math,
    random,
    reduce,
    sorting,
    views,
)
from .inplace import assign, reshaped_

_SAME_NAME: dict[Any, tuple[str, ...]] = {
    math: (
        "add", "sub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "atan2", "maximum",
        "minimum", "fmax", "fmin", "hypot", "copysign", "logaddexp", "xlogy", "float_power", "eq",
        "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not",
        "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift",
        "bitwise_right_shift", "neg", "positive", "abs", "sign", "sgn", "signbit", "ceil", "floor",
        "trunc", "frac", "round", "square", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p",
        "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
        "tanh", "asinh", "acosh", "atanh", "sigmoid", "logit", "sinc", "erf", "erfc", "erfinv",
        "lgamma", "digamma", "deg2rad", "rad2deg", "relu", "isnan", "isinf", "isposinf", "isneginf",
        "isfinite", "isreal", "conj", "angle", "lerp", "addcmul", "addcdiv", "clamp", "clamp_min",
        "clamp_max", "masked_fill", "nan_to_num",
    ),
    compare: ("isclose", "allclose", "equal"),
    reduce: (
        "sum", "mean", "prod", "var", "std", "amax", "amin", "max", "min", "argmax", "argmin",
        "all", "any", "cumsum", "cumprod", "logsumexp", "norm", "aminmax", "count_nonzero",
        "nansum", "nanmean", "cummax", "cummin", "logcumsumexp", "diff", "dist", "quantile",
    ),
    sorting: (
        "sort", "argsort", "msort", "topk", "kthvalue", "median", "bincount", "unique",
        "unique_consecutive",
    ),
    views: (
        "view", "reshape", "permute", "transpose", "t", "movedim", "moveaxis", "swapaxes",
        "swapdims", "adjoint", "unsqueeze", "squeeze", "flatten", "ravel", "unflatten", "expand",
        "expand_as", "broadcast_to", "view_as", "reshape_as", "diagonal", "narrow", "select",
        "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit", "chunk", "unbind",
        "contiguous",
    ),
    join: (
        "repeat", "tile", "repeat_interleave", "flip", "fliplr", "flipud", "rot90", "roll",
        "unfold", "tril", "triu", "diag", "diagflat", "diag_embed",
    ),
    linalg: (
        "matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "addmm", "addmv", "baddbmm",
        "kron", "cross", "trace", "matrix_power",
    ),
    indexing: (
        "gather", "take_along_dim", "take", "index_select", "scatter", "scatter_add",
        "scatter_reduce", "index_add", "index_copy", "index_fill", "index_put", "index_put_",
        "masked_select", "masked_scatter", "nonzero", "argwhere", "select_scatter", "slice_scatter",
    ),
    inplace: ("copy_", "fill_", "zero_", "fill_diagonal_"),
    random: (
        "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "multinomial", "bernoulli",
    ),
}  # fmt: skip

_WITH_INPLACE = (
    "add", "sub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "atan2", "hypot",
    "copysign", "xlogy", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or",
    "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not",
    "bitwise_left_shift", "bitwise_right_shift", "neg", "abs", "sign", "sgn", "ceil", "floor",
    "trunc", "frac", "round", "square", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p",
    "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
    "tanh", "asinh", "acosh", "atanh", "sigmoid", "logit", "erf", "erfc", "erfinv", "lgamma",
    "digamma", "relu", "lerp", "addcmul", "addcdiv", "clamp", "clamp_min", "clamp_max",
    "masked_fill", "masked_scatter", "nan_to_num", "tril", "triu", "scatter", "scatter_add",
    "scatter_reduce", "index_add", "index_copy", "index_fill", "addmm", "addmv", "baddbmm",
    "cumsum", "cumprod",
)  # fmt: skip

_INPLACE_VIEWS = ("squeeze", "unsqueeze", "t", "transpose", "swapaxes", "swapdims")

_ALIASES = {
    "absolute": "abs", "absolute_": "abs_", "subtract": "sub", "subtract_": "sub_",
    "multiply": "mul", "multiply_": "mul_", "divide": "div", "divide_": "div_",
    "true_divide": "div", "true_divide_": "div_", "negative": "neg", "negative_": "neg_",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
    "clip": "clamp", "clip_": "clamp_", "arctan2": "atan2", "fix": "trunc", "ger": "outer",
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arcsinh": "asinh", "arccosh": "acosh",
    "arctanh": "atanh",
}  # fmt: skip


def _inplace(op: Callable[..., Any]) -> Callable[..., Tensor]:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return assign(self, op(self, *args, **kwargs))

    method.__doc__ = f"In-place form of ``{op.__name__}``."
    return method


def _method(op: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return op(self, *args, **kwargs)

    method.__doc__ = op.__doc__
    return method


def _inplace_view(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return reshaped_(self, op(self, *args, **kwargs))

    method.__doc__ = f"In-place form of ``{op.__name__}``."
    return method


def _operator(op: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Tensor, other: Any) -> Any:
        if other is None:
            return NotImplemented
        try:
            return op(self, other)
        except TypeError as error:
            if "expected a Tensor or a Python number" not in str(error):
                raise
        return op(self, creation.as_tensor(other)) if _is_array(other) else NotImplemented

    return method


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "biufc"


def _reflected(op: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Tensor, other: Any) -> Any:
        try:
            return op(other, self)
        except TypeError as error:
            if "expected a Tensor or a Python number" in str(error):
                return NotImplemented
            raise

    return method


_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": math.add_, "sub": math.sub_, "mul": math.mul, "truediv": math.true_divide,
    "floordiv": math.floor_divide, "mod": math.remainder, "pow": math.pow,
    "matmul": linalg.matmul, "and": math.bitwise_and, "or": math.bitwise_or,
    "xor": math.bitwise_xor, "lshift": math.bitwise_left_shift,
    "rshift": math.bitwise_right_shift,
}  # fmt: skip
_COMPARISONS = {
    "eq": math.eq, "ne": math.ne, "lt": math.lt, "le": math.le, "gt": math.gt, "ge": math.ge,
}  # fmt: skip


def _transposed(self: Tensor) -> Tensor:
    return views.permute(self, tuple(reversed(range(self.dim()))))


def _matrix_transposed(self: Tensor) -> Tensor:
    if self.dim() < 2:
        raise RuntimeError("tensor.mT is only supported on matrices or batches of matrices")
    return views.transpose(self, -2, -1)


def _conjugate_transposed(self: Tensor) -> Tensor:
    return views.adjoint(self)


def _iterate(self: Tensor) -> Iterator[Tensor]:
    if self.dim() == 0:
        raise TypeError("iteration over a 0-d tensor")
    return iter(views.unbind(self, 0))


def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``to(dtype)``, ``to(device)``, ``to(device, dtype)`` or ``to(other)``, as torch's.

    Returns the tensor itself where nothing changes, unless ``copy=True``.
    """
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if "other" in kwargs:
        args = (*args, kwargs["other"])
    for arg in args:
        if isinstance(arg, Dtype):
            dtype = arg
        elif isinstance(arg, Tensor):
            dtype, device = arg.dtype, arg.device
        elif isinstance(arg, (str, Device, int)) and not isinstance(arg, bool):
            device = arg
    out = self if dtype is None else math.to_dtype(self, dtype)
    if device is not None:
        out = creation.to_device(out, Device(device))
    return math.clone_(out) if kwargs.get("copy") and out is self else out


def _to_named(dtype: Dtype) -> Callable[..., Tensor]:
    def method(self: Tensor, memory_format: Any = None) -> Tensor:
        return math.to_dtype(self, dtype)

    method.__doc__ = f"The tensor in {dtype}; itself where it has that dtype."
    return method


def type_(self: Tensor, dtype: Any = None) -> Any:
    """The name of the tensor's type (``tensorplay.FloatTensor``), or the tensor in ``dtype``."""
    if dtype is None:
        return f"tensorplay.{self.dtype.tensor_type}"
    if isinstance(dtype, str):
        name = dtype.rpartition(".")[2]
        dtype = next(d for d in _dtypes.ALL if d.tensor_type == name)
    return math.to_dtype(self, dtype)


def cpu(self: Tensor) -> Tensor:
    """The tensor in host memory."""
    return creation.to_device(self, Device("cpu"))


def cuda(self: Tensor, device: Any = None, non_blocking: bool = False) -> Tensor:
    """The tensor on a CUDA GPU."""
    return creation.to_device(self, Device("cuda" if device is None else device))


def clone(self: Tensor, *, memory_format: Any = None) -> Tensor:
    """A copy with a storage of its own; gradients flow back."""
    return math.clone_(self)


def pin_memory(self: Tensor) -> Tensor:
    """The tensor itself: jax stages transfers on its own."""
    return self


def type_as(self: Tensor, other: Tensor) -> Tensor:
    """The tensor in the dtype of ``other``."""
    return math.to_dtype(self, other.dtype)


def _new_factory(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.setdefault("dtype", self.dtype)
        kwargs.setdefault("device", self.device)
        return make(*args, **kwargs)

    method.__doc__ = f"As ``{make.__name__}``, in this tensor's dtype and on its device."
    return method


def attach() -> None:
    """Gives ``Tensor`` its methods."""
    for module, names in _SAME_NAME.items():
        for name in names:
            setattr(Tensor, name, _method(getattr(module, name)))
    for name in _WITH_INPLACE:
        op = next(getattr(m, name) for m, names in _SAME_NAME.items() if name in names)
        setattr(Tensor, name + "_", _inplace(op))
    for name in _INPLACE_VIEWS:
        setattr(Tensor, name + "_", _inplace_view(getattr(views, name)))
    for alias, name in _ALIASES.items():
        setattr(Tensor, alias, getattr(Tensor, name))
    for name, op in _OPERATORS.items():
        setattr(Tensor, f"__{name}__", _operator(op))
        setattr(Tensor, f"__r{name}__", _reflected(op))
        setattr(Tensor, f"__i{name}__", _inplace(op))
    for name, op in _COMPARISONS.items():
        setattr(Tensor, f"__{name}__", _operator(op))
    for dtype, name in _DTYPE_METHODS.items():
        setattr(Tensor, name, _to_named(dtype))
    _attach_special()


_DTYPE_METHODS = {
    _dtypes.float32: "float", _dtypes.float64: "double", _dtypes.float16: "half",
    _dtypes.bfloat16: "bfloat16", _dtypes.int64: "long", _dtypes.int32: "int",
    _dtypes.int16: "short", _dtypes.int8: "char", _dtypes.uint8: "byte", _dtypes.bool_: "bool",
    _dtypes.complex64: "cfloat", _dtypes.complex128: "cdouble",
}  # fmt: skip


def _where(self: Tensor, condition: Tensor, other: Any) -> Tensor:
    """The tensor's elements where ``condition`` holds, those of ``other`` elsewhere."""
    return math.where(condition, self, other)


def _attach_special() -> None:
    special: dict[str, Any] = {
        "__neg__": _method(math.neg),
        "__pos__": _method(math.positive),
        "__abs__": _method(math.abs),
        "__invert__": _method(math.bitwise_not),
        "__getitem__": indexing.getitem,
        "__setitem__": indexing.setitem,
        "__iter__": _iterate,
        "T": property(_transposed),
        "mT": property(_matrix_transposed),
        "H": property(_conjugate_transposed),
        "mH": property(_conjugate_transposed),
        "real": property(math.real),
        "imag": property(math.imag),
        "type": type_,
        "where": _where,
    }
    for name, value in special.items():
        setattr(Tensor, name, value)
    for fn in (to, cpu, cuda, clone, type_as, pin_memory):
        setattr(Tensor, fn.__name__, fn)
    for name in ("zeros", "ones", "empty", "full", "tensor"):
        setattr(Tensor, f"new_{name}", _new_factory(getattr(creation, name)))
    install(creation.construct, views.view_through)


attach()
