"""In-place ops: a result takes its place in an existing tensor's storage and graph."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import _views
from .._dtypes import category, scalar_name
from .._state import state
from .._tensor import Tensor, wrap
from . import math
from .primitive import PrimitiveNode, primitive
from .views import diagonal, expand


@primitive("copy_slices")
def _written(base, value, *starts, form):
    return _views.write(base, value.astype(base.dtype), _views.join_starts(form, starts))


def assign(x: Tensor, value: Tensor) -> Tensor:
    """Writes ``value`` into ``x``, and its history too where gradients are recorded.

    Raises:
        RuntimeError: what torch refuses: a leaf that requires grad, a view of one, a shape that
            would have to grow, a dtype that can't hold the result.
    """
    if state.grad_enabled:
        _refuse_leaf(x)
    value = _fitted(x, value)
    recorded = state.grad_enabled and (value.requires_grad or _in_graph(x))
    if recorded and x._view_kind is not None:
        raise RuntimeError(_REFUSED_VIEWS[x._view_kind])
    if not recorded:
        _store(x, value)
        return x
    if x._base is not None:
        base = x._base
        form, starts = _views.split_starts(x._base_chain)
        whole = _written(base, value, *starts, form=form)
        base._write(whole._read())
        _follow_storage(value, x)
        _follow_storage(whole, x)
        base._set_history(whole.grad_fn, whole._output_nr, whole.requires_grad)
        x._sync()
    else:
        _store(x, value)
        _follow_storage(value, x)
        x._set_history(value.grad_fn, value._output_nr, value.requires_grad)
    return x


def _store(x: Tensor, value: Tensor) -> None:
    if x._layout is None:
        x._write(value._read())
    else:
        x._write_pieces(value._storage.held)


def _follow_storage(value: Tensor, x: Tensor) -> None:
    if isinstance(value.grad_fn, PrimitiveNode):
        value.grad_fn.follow(value, x)


def _in_graph(x: Tensor) -> bool:
    return x.requires_grad or (x._base is not None and x._base.requires_grad)


_REFUSED_VIEWS = {
    "no_grad": (
        "A view was created in no_grad mode and is being modified inplace with grad mode enabled. "
        "Given that this use case is ambiguous and error-prone, it is forbidden. You can clarify "
        "your code by moving both the view and the inplace either both inside the no_grad block "
        "(if you don't want the inplace to be tracked) or both outside (if you want the inplace to "
        "be tracked)."
    ),
    "several": (
        "Output of a function that returns multiple views is being modified inplace. Such "
        "functions do not allow the output views to be modified inplace. You should replace the "
        "inplace operation by an out-of-place one."
    ),
}


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
                f"result type {scalar_name(value.dtype)} can't be cast to the desired output type "
                f"{scalar_name(x.dtype)}"
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


@primitive("copy", elementwise=True)
def _copied(x, src):
    return jnp.copy(jnp.broadcast_to(src.astype(x.dtype), x.shape))


def copy_(x: Tensor, src: Any, non_blocking: bool = False) -> Tensor:
    """Copies ``src`` (broadcast, cast to the dtype of ``x``) into ``x``."""
    if not isinstance(src, Tensor):
        raise TypeError(f"copy_(): argument 'other' must be Tensor, not {type(src).__name__}")
    if x.is_meta:
        return x
    return assign(x, _copied(x, _beside(x, src)))


def _beside(x: Tensor, src: Tensor) -> Tensor:
    """``src`` on the device of ``x``."""
    if state.trace is not None or src.is_meta or (src.requires_grad and state.grad_enabled):
        return src
    devices = x._storage.array.devices()
    if src._storage.array.devices() == devices:
        return src
    moved = wrap(jax.device_put(src._storage.array, next(iter(devices))))
    moved._chain, moved._layout = src._chain, src._layout
    return moved


def fill_(x: Tensor, value: Any) -> Tensor:
    """Every element becomes ``value`` (a number or a 0-d tensor)."""
    return assign(x, math.masked_fill(x, True, value))


def zero_(x: Tensor) -> Tensor:
    """Every element becomes zero."""
    return fill_(x, 0)


def reshaped_(x: Tensor, view: Tensor) -> Tensor:
    """Makes ``x`` itself the view ``view`` of it, as ``unsqueeze_`` and the like do."""
    if x.requires_grad and x.is_leaf and state.grad_enabled:
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation."
        )
    x._chain, x._cached = view._chain, view._cached
    if x._base is not None:
        x._base_chain, x._base_epoch = view._base_chain, view._base_epoch
    if view._grad_fn is not None:
        x._set_history(view._grad_fn, view._output_nr, True)
    return x


def fill_diagonal_(x: Tensor, fill_value: float) -> Tensor:
    """The diagonal becomes ``fill_value``."""
    fill_(diagonal(x), fill_value)
    return x
