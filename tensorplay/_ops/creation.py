"""Making tensors from data and from sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _dtypes
from .._device import device as Device
from .._device import get_default_device, jax_device
from .._dtypes import dtype as Dtype
from .._dtypes import from_numpy_dtype, get_default_dtype
from .._state import state
from .._tensor import Meta, Size, Tensor, wrap
from .primitive import Primitive
from .views import as_sizes

DeviceLike = Device | str | int | None


def _place(target: DeviceLike) -> tuple[bool, Any]:
    """(is it meta, the jax device to commit to or None for this thread's own)."""
    found = state.default_device if target is None else Device(target)
    if found is None:
        return False, None
    if found.type == "meta":
        return True, None
    own = get_default_device() if state.default_device is None else None
    return False, None if own == found else jax_device(found)


def _finish(array: Any, target: Any, requires_grad: bool) -> Tensor:
    out = wrap(array if target is None else jax.device_put(array, target))
    if requires_grad:
        out.requires_grad = True
    return out


def from_values(value: Any, dtype: Any, device: DeviceLike, requires_grad: bool = False) -> Tensor:
    """A tensor over a copy of a numpy array, in ``dtype`` (a numpy dtype)."""
    meta, target = _place(device)
    if meta:
        return _finish(Meta(np.shape(value), np.dtype(dtype)), None, requires_grad)
    with jax.enable_x64(True):
        return _finish(jnp.array(np.asarray(value), dtype=dtype), target, requires_grad)


def _numpy_of(data: Any) -> np.ndarray:
    if isinstance(data, (list, tuple)) and any(isinstance(d, (Tensor, list, tuple)) for d in data):
        data = [_plain(d) for d in data]
    value = np.asarray(data)
    if value.dtype.kind in "US":
        raise TypeError("new(): invalid data type 'str'")
    if value.dtype.kind == "O":
        raise RuntimeError(f"Could not infer dtype of {type(_innermost(data)).__name__}")
    return value


def _innermost(data: Any) -> Any:
    while isinstance(data, (list, tuple)) and data:
        data = data[0]
    return data


def _plain(data: Any) -> Any:
    if isinstance(data, Tensor):
        return data.detach().numpy() if data.dim() else data.item()
    return [_plain(d) for d in data] if isinstance(data, (list, tuple)) else data


def _inferred(data: Any, value: np.ndarray) -> Any:
    """torch's rule: Python floats take the default dtype; numpy data keeps its own."""
    if isinstance(_innermost(data), (np.ndarray, np.generic)):
        return from_numpy_dtype(value.dtype).numpy
    if value.dtype == np.float64:
        return get_default_dtype().numpy
    if value.dtype == np.complex128:
        return np.dtype(np.complex128 if get_default_dtype() is _dtypes.float64 else np.complex64)
    if value.size == 0:
        return get_default_dtype().numpy
    return from_numpy_dtype(value.dtype).numpy


def tensor(
    data: Any,
    *,
    dtype: Dtype | None = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """A new leaf tensor that holds a copy of ``data``.

    Args:
        data: numbers, nested sequences of them, numpy arrays or tensors.
        dtype: default: from the data; Python floats take the default dtype.
    """
    if isinstance(data, Tensor):
        out = data.detach()
        with _no_grad():
            out = out.clone() if dtype is None else out.to(dtype, copy=True)
        if device is not None:
            out = out.to(device)
        out._detached = False
        return out.requires_grad_(requires_grad)
    value = _numpy_of(data)
    return from_values(
        value, _inferred(data, value) if dtype is None else dtype.numpy, device, requires_grad
    )


class _no_grad:
    def __enter__(self) -> None:
        self.outer, state.grad_enabled = state.grad_enabled, False

    def __exit__(self, *exc: object) -> None:
        state.grad_enabled = self.outer


def as_tensor(data: Any, dtype: Dtype | None = None, device: DeviceLike = None) -> Tensor:
    """``data`` itself where it is a tensor of that dtype and device, else a new tensor."""
    if isinstance(data, Tensor):
        out = data if dtype is None else data.to(dtype)
        return out if device is None else out.to(device)
    return tensor(data, dtype=dtype, device=device)


asarray = as_tensor


def from_numpy(ndarray: np.ndarray) -> Tensor:
    """A tensor with the values of a numpy array (copied: jax arrays are immutable)."""
    if not isinstance(ndarray, np.ndarray):
        raise TypeError(f"expected np.ndarray (got {type(ndarray).__name__})")
    return from_values(ndarray, from_numpy_dtype(ndarray.dtype).numpy, None)


def _sized(value: Any, sizes: Sequence[int], dtype: Any, device: DeviceLike, grad: bool) -> Tensor:
    meta, target = _place(device)
    if any(s < 0 for s in sizes):
        raise RuntimeError(f"Trying to create tensor with negative dimension: {list(sizes)}")
    if meta:
        return _finish(Meta(tuple(sizes), np.dtype(dtype)), None, grad)
    with jax.enable_x64(True):
        return _finish(_filled(tuple(sizes), value, np.dtype(dtype)), target, grad)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _filled(sizes: tuple[int, ...], value: Any, dtype: Any) -> Any:
    return jnp.full(sizes, value, dtype)


def _or_default(dtype: Dtype | None) -> Any:
    return (dtype or get_default_dtype()).numpy


def zeros(
    *size: Any, dtype: Dtype | None = None, device: DeviceLike = None, requires_grad: bool = False
) -> Tensor:
    """Zeros of shape ``size``."""
    return _sized(0, as_sizes(size), _or_default(dtype), device, requires_grad)


def ones(
    *size: Any, dtype: Dtype | None = None, device: DeviceLike = None, requires_grad: bool = False
) -> Tensor:
    """Ones of shape ``size``."""
    return _sized(1, as_sizes(size), _or_default(dtype), device, requires_grad)


def empty(
    *size: Any, dtype: Dtype | None = None, device: DeviceLike = None, requires_grad: bool = False
) -> Tensor:
    """A tensor of shape ``size``; its values (zeros) are not to be relied on."""
    return _sized(0, as_sizes(size), _or_default(dtype), device, requires_grad)


def full(
    size: Sequence[int],
    fill_value: Any,
    *,
    dtype: Dtype | None = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """``fill_value`` everywhere; its kind gives the dtype unless ``dtype`` does."""
    if isinstance(fill_value, Tensor):
        fill_value = fill_value.item()
    found = _inferred(fill_value, np.asarray(fill_value)) if dtype is None else dtype.numpy
    return _sized(fill_value, as_sizes((size,)), found, device, requires_grad)


def _like(x: Tensor, value: Any, dtype: Dtype | None, device: DeviceLike, grad: bool) -> Tensor:
    place = Device("meta") if x.is_meta and device is None else device
    if x._layout is not None:
        on_meta = place is not None and Device(place).type == "meta"
        out = x._layout.full(value, (dtype or x.dtype).numpy, on_meta)
        return out.requires_grad_() if grad else out
    return _sized(value, x._array_shape(), (dtype or x.dtype).numpy, place, grad)


def zeros_like(
    input: Tensor,
    *,
    dtype: Dtype | None = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
    memory_format: Any = None,
) -> Tensor:
    """Zeros in the shape and dtype of ``input``."""
    return _like(input, 0, dtype, device, requires_grad)


def ones_like(
    input: Tensor,
    *,
    dtype: Dtype | None = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
    memory_format: Any = None,
) -> Tensor:
    """Ones in the shape and dtype of ``input``."""
    return _like(input, 1, dtype, device, requires_grad)


def full_like(
    input: Tensor,
    fill_value: Any,
    *,
    dtype: Dtype | None = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
    memory_format: Any = None,
) -> Tensor:
    """``fill_value`` in the shape and dtype of ``input``."""
    return _like(input, fill_value, dtype, device, requires_grad)


def empty_like(
    input: Tensor,
    *,
    dtype: Dtype | None = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
    memory_format: Any = None,
) -> Tensor:
    """As ``zeros_like``; the values are not to be relied on."""
    return _like(input, 0, dtype, device, requires_grad)


def arange(
    start: Any,
    end: Any = None,
    step: Any = 1,
    *,
    dtype: Dtype | None = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """Values from ``start`` (0 if left out) to ``end``, exclusive; int64 for ints."""
    if end is None:
        start, end = 0, start
    start, end, step = (v.item() if isinstance(v, Tensor) else v for v in (start, end, step))
    if step == 0:
        raise RuntimeError("step must be nonzero")
    if (end - start) * step < 0:
        raise RuntimeError("upper bound and lower bound inconsistent with step sign")
    if dtype is None:
        whole = all(isinstance(v, (int, np.integer)) for v in (start, end, step))
        dtype = _dtypes.int64 if whole else get_default_dtype()
    values = np.arange(start, end, step)
    return from_values(values.astype(dtype.numpy), dtype.numpy, device, requires_grad)


def linspace(
    start: float,
    end: float,
    steps: int,
    *,
    dtype: Dtype | None = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """``steps`` values evenly spaced from ``start`` to ``end``, inclusive."""
    found = _or_default(dtype)
    return from_values(np.linspace(start, end, steps).astype(found), found, device, requires_grad)


def logspace(
    start: float,
    end: float,
    steps: int,
    base: float = 10.0,
    *,
    dtype: Dtype | None = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """``base`` to the power of ``steps`` values evenly spaced from ``start`` to ``end``."""
    found = _or_default(dtype)
    values = base ** np.linspace(start, end, steps)
    return from_values(values.astype(found), found, device, requires_grad)


def eye(
    n: int,
    m: int | None = None,
    *,
    dtype: Dtype | None = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """Ones on the diagonal, zeros elsewhere."""
    found = _or_default(dtype)
    return from_values(np.eye(n, m).astype(found), found, device, requires_grad)


def construct(*data: Any, dtype: Dtype | None = None) -> Tensor:
    """What ``Tensor(data)`` or ``Tensor(*sizes)`` holds: a float tensor, as torch makes it."""
    if len(data) == 1 and isinstance(data[0], Tensor):
        return data[0]
    if (all(isinstance(d, int) for d in data) and data) or (
        len(data) == 1 and type(data[0]) is Size
    ):
        return zeros(*data, dtype=dtype)
    return from_values(_numpy_of(data[0] if data else ()), _or_default(dtype), None)


def _constructor(dtype: Dtype) -> Callable[..., Tensor]:
    def make(*data: Any) -> Tensor:
        return construct(*data, dtype=dtype)

    make.__name__ = dtype.tensor_type
    make.__doc__ = f"A {dtype} tensor from nested sequences, or of the given sizes."
    return make


FloatTensor = _constructor(_dtypes.float32)
DoubleTensor = _constructor(_dtypes.float64)
HalfTensor = _constructor(_dtypes.float16)
BFloat16Tensor = _constructor(_dtypes.bfloat16)
LongTensor = _constructor(_dtypes.int64)
IntTensor = _constructor(_dtypes.int32)
ShortTensor = _constructor(_dtypes.int16)
CharTensor = _constructor(_dtypes.int8)
ByteTensor = _constructor(_dtypes.uint8)
BoolTensor = _constructor(_dtypes.bool_)


move = Primitive(lambda x: x, "to_device", elementwise=True)


def to_device(x: Tensor, target: Device) -> Tensor:
    """``x`` on ``target``; ``x`` itself where it is there. Gradients flow back."""
    if x.is_meta and target.type != "meta":
        raise NotImplementedError(
            "Cannot copy out of meta tensor; no data! Please use Module.to_empty() instead of "
            "Module.to() when moving module from meta to a different device."
        )
    here = x.device
    if here == target or (here.type == target.type and target.index is None):
        return x
    if target.type == "meta":
        return wrap(Meta(x._array_shape(), x._storage.array.dtype))
    if state.trace is not None:
        state.trace.abort("moves a tensor to another device")
    if x._layout is not None:
        x._layout.refuse(x, "to(device)", "shard the model over a mesh of that device type")
    if x.requires_grad and state.grad_enabled:
        raise RuntimeError(
            f"a tensor that requires grad cannot move from {here} to {target} inside the graph; "
            "move the leaf (module.to(device)) before the forward"
        )
    return wrap(jax.device_put(x._read(), jax_device(target)))
