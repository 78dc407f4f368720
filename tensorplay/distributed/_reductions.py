"""Reductions of tensors that are cut over ranks: what one rank computes.

A rank reduces its own rows (padding becomes neutral), then the ranks combine what they found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from . import _lax_collectives as per_rank


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How a reduction is done in two parts.

    Attributes:
        neutral: from (dtype, options) to the value that padding gets.
        combine: from options to the name of the ``ReduceOp`` among ranks.
    """

    neutral: Callable[[Any, dict[str, Any]], Any]
    combine: Callable[[dict[str, Any]], str]


def _lowest(dtype: Any, options: Any = None) -> Any:
    return _limit(dtype, -math.inf, 0)


def _highest(dtype: Any, options: Any = None) -> Any:
    return _limit(dtype, math.inf, 1)


def _limit(dtype: Any, infinite: float, end: int) -> Any:
    if dtype == np.bool_:
        return bool(end)
    if jnp.issubdtype(dtype, np.integer):
        info = jnp.iinfo(dtype)
        return (info.min, info.max)[end]
    return infinite


def _fixed(neutral: Any, op: str) -> Reduction:
    return Reduction(lambda dtype, options: neutral, lambda options: op)


def _norm_neutral(dtype: Any, options: dict[str, Any]) -> Any:
    return math.inf if options["p"] == -math.inf else 0


def _norm_op(options: dict[str, Any]) -> str:
    return {math.inf: "MAX", -math.inf: "MIN"}.get(options["p"], "SUM")


_REDUCTIONS = {
    "sum": _fixed(0, "SUM"),
    "nansum": _fixed(0, "SUM"),
    "mean": _fixed(0, "SUM"),
    "prod": _fixed(1, "PRODUCT"),
    "amax": Reduction(_lowest, lambda options: "MAX"),
    "amin": Reduction(_highest, lambda options: "MIN"),
    "all": _fixed(True, "MIN"),
    "any": _fixed(False, "MAX"),
    "norm": Reduction(_norm_neutral, _norm_op),
}


def reduction_of(name: str) -> Reduction | None:
    """How the primitive ``name`` reduces over ranks; None if it is no reduction that can."""
    return _REDUCTIONS.get(name)


def reduced(op: Any, options: dict[str, Any], piece: Any, layout: Any, axes: Any) -> Any:
    """What ``op`` makes of the whole, from this rank's padded piece; inside a ``shard_map``.

    Args:
        axes: the mesh axes that cut a reduced dim.
    """
    how = _REDUCTIONS[op.name]
    neutral = jnp.asarray(how.neutral(piece.dtype, options), piece.dtype)
    piece = jnp.where(layout.own_rows_mask(piece), piece, neutral)
    found = _summed(piece, **options) if op.name == "mean" else op.fn(piece, **options)
    power = options["p"] if op.name == "norm" and how.combine(options) == "SUM" else 1
    rooted = power not in (0, 1)
    found = found**power if rooted else found
    for axis in axes:
        size = layout.mesh.shape[layout.mesh.axis_names.index(axis)]
        found = per_rank.all_reduce(found, how.combine(options), axis, size)
    if op.name == "mean":
        dims = range(piece.ndim) if options["dim"] is None else options["dim"]
        found = found / np.array(math.prod(layout.global_shape[d] for d in dims), found.dtype)
    return found ** (1 / power) if rooted else found


def _summed(x: Any, *, dim: Any, keepdim: bool, dtype: Any) -> Any:
    return jnp.sum(x, axis=dim, keepdims=keepdim, dtype=None if dtype is None else dtype.numpy)
