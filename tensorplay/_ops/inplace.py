"""In-place ops: a result takes its place in an existing tensor's storage and graph."""

from __future__ import annotations

from typing import Any

from .. import _views
from .._dtypes import category
from .._state import state
from .._tensor import Tensor
from . import math
from .primitive import PrimitiveNode, primitive
from .views import expand


@primitive("copy_slices")
def _written(base, value, *, chain):  # type: ignore[no-untyped-def]
    return _views.write(base, value.astype(base.dtype), chain)


def assign(x: Tensor, value: Tensor) -> Tensor:
    """Writes ``value`` into ``x``, and its history too where gradients are recorded.

    Raises:
        RuntimeError: what torch refuses: a leaf that requires grad, a view of one, a shape that
            would have to grow, a dtype that can't hold the result.
    """
    if state.grad_enabled:
        _refuse_leaf(x)
    value = _fitted(x, value)
    recorded = state.grad_enabled and (value.requires_grad or x.requires_grad)
    if not recorded:
        x._write(value._read())
        return x
    if x._base is not None:
        base = x._base
        whole = _written(base, value, chain=x._base_chain)
        base._write(whole._read())
        _follow_storage(value, x)
        _follow_storage(whole, x)
        base._set_history(whole.grad_fn, whole._output_nr, whole.requires_grad)
        x._sync()
    else:
        x._write(value._read())
        _follow_storage(value, x)
        x._set_history(value.grad_fn, value._output_nr, value.requires_grad)
    return x


def _follow_storage(value: Tensor, x: Tensor) -> None:
    """Lets the op that made ``value`` watch the storage that its result moved to.

    What that op itself read from there is safe: it holds the array from before.
    """
    node = value.grad_fn
    if isinstance(node, PrimitiveNode):
        node.guards = [
            (i, x._storage, x._storage.version) if storage is value._storage else (i, storage, v)
            for i, storage, v in node.guards
            if storage is not x._storage
        ]


def _refuse_leaf(x: Tensor) -> None:
    if x._base is not None and x._base.requires_grad and x._base.is_leaf:
        raise RuntimeError(
            "a view of a leaf Variable that requires grad is being used in an in-place operation."
        )
    if x.requires_grad and x.is_leaf:
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation."
        )


def _fitted(x: Tensor, value: Tensor) -> Tensor:
    """``value`` in the dtype and shape of ``x``."""
    own, new = x._storage.array.dtype, value._storage.array.dtype
    if own != new:
        if category(new) > category(own):
            raise RuntimeError(
                f"result type {value.dtype} can't be cast to the desired output type {x.dtype}"
            )
        value = math.to_dtype(value, x.dtype)
    if value._array_shape() != x._array_shape():
        if x._layout is not None or len(value._array_shape()) > len(x._array_shape()):
            raise RuntimeError(_shape_message(x, value))
        try:
            value = expand(value, x.shape)
        except RuntimeError:
            raise RuntimeError(_shape_message(x, value)) from None
    return value


def _shape_message(x: Tensor, value: Tensor) -> str:
    return (
        f"output with shape {list(x.shape)} doesn't match the broadcast shape {list(value.shape)}"
    )


def copy_(x: Tensor, src: Any, non_blocking: bool = False) -> Tensor:
    """Copies ``src`` (broadcast, cast to the dtype of ``x``) into ``x``."""
    if not isinstance(src, Tensor):
        raise TypeError(f"copy_(): argument 'other' must be Tensor, not {type(src).__name__}")
    if x.is_meta:
        return x
    value = math.to_dtype(src, x.dtype)
    if x._layout is not None or value._layout is not None:
        value = math.add_(math.mul(x.detach(), 0), value) if value is not x else value
    elif value is src or value._storage is x._storage:
        value = math.clone_(value)
    return assign(x, value)


def fill_(x: Tensor, value: Any) -> Tensor:
    """Every element becomes ``value`` (a number or a 0-d tensor)."""
    return assign(x, math.masked_fill(x.detach(), True, value))


def zero_(x: Tensor) -> Tensor:
    """Every element becomes zero."""
    return fill_(x, 0)
