"""Half-precision values are computed in float32, as torch's kernels do."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

_HALF = (np.dtype(np.float16), np.dtype(jnp.bfloat16))


def wide(x: Any) -> Any:
    """``x`` in float32 where it is float16 or bfloat16."""
    return x.astype(np.float32) if x.dtype in _HALF else x
