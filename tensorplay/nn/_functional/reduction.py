"""How losses are reduced, and torch's older words for it."""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp


def legacy_reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """``reduction``, unless the deprecated arguments say otherwise.

    Raises:
        ValueError: it is none of "none", "mean", "sum".
    """
    if size_average is not None or reduce is not None:
        whole = reduce is None or reduce
        mean = size_average is None or size_average
        reduction = ("mean" if mean else "sum") if whole else "none"
        warnings.warn(
            "size_average and reduce args will be deprecated, please use "
            f"reduction='{reduction}' instead.",
            stacklevel=3,
        )
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return reduction


def reduced(loss: Any, reduction: str) -> Any:
    """An array of losses as they are, as their mean or as their sum."""
    if reduction == "none":
        return loss
    return jnp.mean(loss) if reduction == "mean" else jnp.sum(loss)
