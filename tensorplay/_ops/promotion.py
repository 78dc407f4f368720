"""Operands of one op, cast to the dtype that torch gives its result."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from .._dtypes import category, get_default_dtype, result_dtype


def promoted(*operands: Any) -> list[Any]:
    """The operands as arrays of their common dtype."""
    arrays = [jnp.asarray(o) for o in operands]
    common = result_dtype(arrays)
    return [strong(a, common) for a in arrays]


def promoted_float(*operands: Any) -> list[Any]:
    """As ``promoted``; integers and bools become the default float dtype."""
    arrays = [jnp.asarray(o) for o in operands]
    common = result_dtype(arrays)
    if category(common) < 2:
        common = get_default_dtype().numpy
    return [strong(a, common) for a in arrays]


def strong(array: Any, dtype: Any) -> Any:
    """``array`` in ``dtype``, without jax's weak typing."""
    return jnp.asarray(array).astype(np.dtype(dtype))


def as_float(x: Any) -> Any:
    """``x``, or its value in the default float dtype where it is not floating."""
    return x if category(x.dtype) >= 2 else x.astype(get_default_dtype().numpy)


def as_sum(x: Any, dtype: Any = None) -> Any:
    """``x`` in the dtype in which torch sums it: int64 for bools and integers."""
    if dtype is not None:
        return x.astype(dtype.numpy)
    return x if category(x.dtype) >= 2 else x.astype(np.int64)
