"""Attaches ops to ``Tensor``: operators, methods, and their in-place forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .. import _dtypes
from .._device import device as Device
from .._dtypes import dtype as Dtype
from .._tensor import Tensor, install
from . import creation, indexing, inplace, join, linalg, math, random, reduce, sorting, views
from .inplace import assign

_SAME_NAME: dict[Any, tuple[str, ...]] = {
    math: (
        "add", "sub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "atan2", "maximum",
        "minimum", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor",
        "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "neg", "abs",
        "sign", "ceil", "floor", "trunc", "frac", "round", "square", "exp", "exp2", "expm1", "log",
        "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan", "asin",
        "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf",
        "erfinv", "relu", "isnan", "isinf", "isfinite", "conj", "angle", "lerp", "addcmul",
        "addcdiv", "clamp", "masked_fill", "nan_to_num",
    ),
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
        "view", "reshape", "permute", "transpose", "t", "movedim", "unsqueeze", "squeeze",
        "flatten", "unflatten", "expand", "expand_as", "view_as", "reshape_as", "diagonal",
        "narrow", "select", "split", "chunk", "unbind", "contiguous",
    ),
    join: ("repeat", "repeat_interleave", "flip", "roll", "tril", "triu", "diag"),
    linalg: ("matmul", "mm", "bmm", "mv", "dot", "outer", "addmm"),
    indexing: (
        "gather", "index_select", "scatter", "scatter_add", "index_add", "masked_select", "nonzero",
    ),
    inplace: ("copy_", "fill_", "zero_"),
    random: ("normal_", "uniform_", "bernoulli_", "random_", "multinomial", "bernoulli"),
}  # fmt: skip

_WITH_INPLACE = (
    "add", "sub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "neg", "abs", "sign",
    "ceil", "floor", "trunc", "round", "square", "exp", "log", "log1p", "sqrt", "rsqrt",
    "reciprocal", "sin", "cos", "tanh", "sigmoid", "relu", "lerp", "addcmul", "addcdiv", "clamp",
    "masked_fill", "nan_to_num", "tril", "triu", "scatter", "scatter_add", "index_add", "erfinv",
    "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "addmm", "cumsum",
)  # fmt: skip

_ALIASES = {
    "absolute": "abs", "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div",
    "negative": "neg", "greater": "gt", "less": "lt", "not_equal": "ne", "clip": "clamp",
    "swapaxes": "transpose", "arctan2": "atan2",
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


def _operator(op: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Tensor, other: Any) -> Any:
        try:
            return op(self, other)
        except TypeError as error:
            if "expected a Tensor or a Python number" in str(error):
                return NotImplemented
            raise

    return method


def _reflected(op: Callable[..., Any]) -> Callable[..., Any]:
    return _operator(lambda self, other: op(other, self))


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


def _iterate(self: Tensor) -> Iterator[Tensor]:
    if self.dim() == 0:
        raise TypeError("iteration over a 0-d tensor")
    return iter(views.unbind(self, 0))


def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``to(dtype)``, ``to(device)``, ``to(device, dtype)`` or ``to(other)``, as ``torch.Tensor.to``.

    Returns the tensor itself where nothing changes, unless ``copy=True``.
    """
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
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


def _to_named(dtype: Dtype) -> Callable[[Tensor], Tensor]:
    return lambda self: math.to_dtype(self, dtype)


def cpu(self: Tensor) -> Tensor:
    """The tensor in host memory."""
    return creation.to_device(self, Device("cpu"))


def cuda(self: Tensor, device: Any = None, non_blocking: bool = False) -> Tensor:
    """The tensor on a CUDA GPU."""
    return creation.to_device(self, Device("cuda" if device is None else device))


def clone(self: Tensor) -> Tensor:
    """A copy with a storage of its own; gradients flow back."""
    return math.clone_(self)


def type_as(self: Tensor, other: Tensor) -> Tensor:
    """The tensor in the dtype of ``other``."""
    return math.to_dtype(self, other.dtype)


def _new_factory(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.setdefault("dtype", self.dtype)
        kwargs.setdefault("device", self.device)
        return make(*args, **kwargs)

    return method


def attach() -> None:
    """Gives ``Tensor`` its methods."""
    for module, names in _SAME_NAME.items():
        for name in names:
            setattr(Tensor, name, _method(getattr(module, name)))
    for name in _WITH_INPLACE:
        op = next(getattr(m, name) for m, names in _SAME_NAME.items() if name in names)
        setattr(Tensor, name + "_", _inplace(op))
    for alias, name in _ALIASES.items():
        setattr(Tensor, alias, getattr(Tensor, name))
    for name, op in _OPERATORS.items():
        setattr(Tensor, f"__{name}__", _operator(op))
        setattr(Tensor, f"__r{name}__", _reflected(op))
        setattr(Tensor, f"__i{name}__", _inplace(op))
    for name, op in _COMPARISONS.items():
        setattr(Tensor, f"__{name}__", _operator(op))
    for dtype, names in _DTYPE_METHODS.items():
        setattr(Tensor, names, _to_named(dtype))
    _attach_special()


_DTYPE_METHODS = {
    _dtypes.float32: "float", _dtypes.float64: "double", _dtypes.float16: "half",
    _dtypes.bfloat16: "bfloat16", _dtypes.int64: "long", _dtypes.int32: "int",
    _dtypes.int16: "short", _dtypes.int8: "char", _dtypes.uint8: "byte", _dtypes.bool_: "bool",
}  # fmt: skip


def _attach_special() -> None:
    Tensor.__neg__ = _method(math.neg)  # type: ignore[attr-defined]
    Tensor.__abs__ = _method(math.abs)  # type: ignore[attr-defined]
    Tensor.__invert__ = _method(math.bitwise_not)  # type: ignore[attr-defined]
    Tensor.__getitem__ = _method(indexing.getitem)  # type: ignore[attr-defined]
    Tensor.__setitem__ = _method(indexing.setitem)  # type: ignore[attr-defined]
    Tensor.__iter__ = _iterate  # type: ignore[attr-defined]
    Tensor.T = property(_transposed)  # type: ignore[attr-defined]
    Tensor.mT = property(_matrix_transposed)  # type: ignore[attr-defined]
    Tensor.real = property(math.real)  # type: ignore[attr-defined]
    Tensor.imag = property(math.imag)  # type: ignore[attr-defined]
    for fn in (to, cpu, cuda, clone, type_as):
        setattr(Tensor, fn.__name__, fn)
    for name in ("zeros", "ones", "empty", "full", "tensor"):
        setattr(Tensor, f"new_{name}", _new_factory(getattr(creation, name)))
    Tensor.where = lambda self, condition, other: math.where(condition, self, other)  # type: ignore[attr-defined]
    install(creation.construct, views.view_through)


attach()
