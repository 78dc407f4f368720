"""Comparing tensors, and what is known of them without values."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import _dtypes
from .._dtypes import dtype as Dtype
from .._dtypes import from_numpy_dtype, result_dtype
from .._tensor import Tensor
from .primitive import primitive
from .promotion import promoted


@primitive("isclose", elementwise=True, differentiable=False)
def _isclose(a, b, *, rtol, atol, equal_nan):
    a, b = promoted(a, b)
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        a, b = a.astype(jnp.float64), b.astype(jnp.float64)
    return jnp.isclose(a, b, rtol, atol, equal_nan)


def isclose(
    input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> Tensor:
    """Where ``|input - other| <= atol + rtol * |other|``."""
    if input.dtype is not other.dtype:
        raise RuntimeError(
            f"{_dtypes.scalar_name(input.dtype)} did not match {_dtypes.scalar_name(other.dtype)}"
        )
    return _isclose(input, other, rtol=rtol, atol=atol, equal_nan=equal_nan)


def allclose(
    input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """Whether ``isclose`` holds everywhere."""
    return bool(isclose(input, other, rtol, atol, equal_nan).all())


def equal(input: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape and elements."""
    return input.shape == other.shape and bool((input == other).all())


def is_tensor(obj: Any) -> bool:
    """Whether ``obj`` is a tensor."""
    return isinstance(obj, Tensor)


def numel(input: Tensor) -> int:
    """The number of elements."""
    return input.numel()


def is_floating_point(input: Tensor) -> bool:
    """Whether the dtype is floating."""
    return input.is_floating_point()


def is_complex(input: Tensor) -> bool:
    """Whether the dtype is complex."""
    return input.is_complex()


def is_nonzero(input: Tensor) -> bool:
    """Whether the only element is not zero."""
    return input.is_nonzero()


def detach(input: Tensor) -> Tensor:
    """The same storage, outside the graph."""
    return input.detach()


def result_type(tensor1: Any, tensor2: Any) -> Dtype:
    """The dtype of an operation on two tensors or numbers."""
    return from_numpy_dtype(result_dtype([_Kind(x) for x in (tensor1, tensor2)]))


class _Kind:
    """A tensor or a number as ``result_dtype`` sees it."""

    def __init__(self, x: Any) -> None:
        self.weak_type = not isinstance(x, Tensor)
        self.dtype = np.asarray(x).dtype if self.weak_type else x.dtype.numpy
        self.ndim = 0 if self.weak_type else x.dim()


def can_cast(from_: Dtype, to: Dtype) -> bool:
    """Whether torch's promotion allows a result of ``from_`` to be stored in ``to``."""
    return _dtypes.category(from_.numpy) <= _dtypes.category(to.numpy)
