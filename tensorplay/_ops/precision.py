"""How exactly products of float32 matrices are computed, as ``torch.set_float32_matmul_precision``.

Accelerators multiply faster in fewer bits, and JAX lets them by default: GPUs in TensorFloat-32,
TPUs in bfloat16. As in PyTorch the default here is the full precision of float32.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax

from .._tensor import state_changes

_LEVELS = {
    "highest": lax.Precision.HIGHEST,
    "high": lax.Precision.HIGH,
    "medium": lax.Precision.DEFAULT,
}


class _Chosen:
    level = "highest"


_chosen = _Chosen()


def get_float32_matmul_precision() -> str:
    """ "highest", "high" or "medium"."""
    return _chosen.level


def set_float32_matmul_precision(precision: str) -> None:
    """Chooses how products of float32 matrices are computed, in this process.

    Programs that were compiled before are dropped. CPUs always compute in float32.

    Args:
        precision: "highest": float32; "high": TensorFloat-32, or three products of bfloat16;
            "medium": whatever is fastest.

    Raises:
        ValueError: another word.
    """
    if precision not in _LEVELS:
        raise ValueError(
            f"float32 matmul precision must be one of {list(_LEVELS)}, got {precision!r}"
        )
    if precision != _chosen.level:
        _chosen.level = precision
        state_changes.bump()
        jax.clear_caches()


def dot_precision(*operands: Any) -> lax.Precision | None:
    """What to pass to a product of matrices; None where the choice does not concern it."""
    wide = any(a.dtype in (np.float32, np.complex64) for a in operands)
    return _LEVELS[_chosen.level] if wide else None
