"""Dropout."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ..._ops import math
from ..._ops.inplace import assign
from ..._ops.primitive import primitive
from ..._ops.promotion import strong
from ..._ops.random import dropout_mask
from ..._tensor import Tensor
from .checks import scalar_type
from .numerics import saving_inputs


@primitive("dropout", elementwise=True)
@saving_inputs
def _dropout(x, mask, scale):
    return jnp.where(mask, x * strong(scale, x.dtype), 0)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zeroes elements with probability ``p`` and divides the others by ``1 - p``.

    ``input`` itself where not training or ``p`` is 0. While an FSDP module runs, ranks that were
    seeded alike draw different masks.

    Raises:
        ValueError: ``p`` is not a probability.
        RuntimeError: the dtype is not floating.
    """
    if p < 0.0 or p > 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not training or input.numel() == 0:
        return input
    if not input.is_floating_point():
        raise RuntimeError(
            f"result type Float can't be cast to the desired output type {scalar_type(input.dtype)}"
        )
    if p == 1:
        out = math.mul(input, 0.0)
    else:
        mask = dropout_mask(tuple(input.shape), 1 - p, np.dtype(bool))
        out = _dropout(input, mask, 1 / (1 - p))
    return assign(input, out) if inplace else out
