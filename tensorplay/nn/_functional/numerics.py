"""Arithmetic as torch's kernels do it, where jax's own differs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_HALF = (np.dtype(np.float16), np.dtype(jnp.bfloat16))


def wide(x: Any) -> Any:
    """``x`` in float32 where it is float16 or bfloat16."""
    return x.astype(np.float32) if x.dtype in _HALF else x


def saving_inputs(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, of which the backward keeps its inputs alone, as they came.

    For functions whose inside is cheap to compute again. Left to itself jax would keep what is
    inside: masks, zeros, reshaped or widened copies of the inputs.
    """

    @functools.wraps(fn)
    def run(*arrays: Any, **options: Any) -> Any:
        return jax.checkpoint(functools.partial(fn, **options), prevent_cse=False)(*arrays)

    return run


@jax.custom_jvp
def magnitude(x: Any) -> Any:
    """|x| whose derivative at 0 is 0 (that of ``jnp.abs`` is 1)."""
    return jnp.abs(x)


@magnitude.defjvp
def _magnitude_jvp(primals: Any, tangents: Any) -> Any:
    return magnitude(primals[0]), jnp.sign(primals[0]) * tangents[0]
