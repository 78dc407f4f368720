"""Padding, normalisation of vectors and similarity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._ops import math
from ..._ops import reduce as reductions
from ..._ops.primitive import primitive
from ..._ops.promotion import promoted_float, strong
from ..._tensor import Tensor, wrap_dim
from .numerics import saving_inputs

_JAX_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@primitive("constant_pad_nd")
def _pad_constant(x, value, *, widths):
    return lax.pad(x, strong(value, x.dtype), [(low, high, 0) for low, high in widths])


@primitive("pad")
def _pad_with_values(x, *, widths, mode):
    grown = jnp.pad(x, [(max(low, 0), max(high, 0)) for low, high in widths], _JAX_MODES[mode])
    return grown[
        tuple(
            slice(max(-low, 0), size - max(-high, 0))
            for (low, high), size in zip(widths, grown.shape, strict=True)
        )
    ]


def pad(
    input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor:
    """Pads the last dims; negative widths crop.

    Args:
        pad: (low, high) of the last dim, then of the one before, and so on.
        mode: ``"constant"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        value: what constant padding fills with (default 0).

    Raises:
        RuntimeError: the widths do not fit the dims.
        NotImplementedError: another mode.
    """
    if len(pad) % 2:
        raise RuntimeError("Padding length must be divisible by 2")
    if len(pad) // 2 > input.dim():
        raise RuntimeError(
            "Padding length should be less than or equal to two times the input dimension but got "
            f"padding length {len(pad)} and input of dimension {input.dim()}"
        )
    pairs = [(int(pad[i]), int(pad[i + 1])) for i in range(0, len(pad), 2)]
    widths = ((0, 0),) * (input.dim() - len(pairs)) + tuple(reversed(pairs))
    for size, (low, high) in zip(input.shape, widths, strict=True):
        _check_width(size, low, high, mode)
    if mode == "constant":
        return _pad_constant(input, 0 if value is None else value, widths=widths)
    if mode not in _JAX_MODES:
        raise NotImplementedError(f"Unrecognised padding mode {mode}")
    return _pad_with_values(input, widths=widths, mode=mode)


def _check_width(size: int, low: int, high: int, mode: str) -> None:
    if size + low + high < 0:
        raise RuntimeError(
            f"The input size {size}, plus negative padding {low} and {high}, resulted in a "
            "negative output size"
        )
    if mode == "reflect" and max(low, high) >= size:
        raise RuntimeError(
            "Padding size should be less than the corresponding input dimension, but got: padding "
            f"({low}, {high}) at a dimension of size {size}"
        )
    if mode == "circular" and max(low, high) > size:
        raise RuntimeError("Padding value causes wrapping around more than once.")


def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """``input`` divided by its p-norm along ``dim``, which counts at least ``eps``."""
    norm = reductions.norm(input, p, dim, keepdim=True)
    return math.true_divide(input, math.clamp(norm, min=eps))


@primitive("cosine_similarity")
@saving_inputs
def _cosine(a, b, *, dim, eps):
    x, y = promoted_float(*jnp.broadcast_arrays(a, b))
    return jnp.sum(_unit(x, dim, eps) * _unit(y, dim, eps), axis=dim)


def _unit(x: Any, dim: int, eps: float) -> Any:
    squared = jnp.sum(x * x, axis=dim, keepdims=True)
    safe = jnp.where(squared > eps * eps, squared, 1)
    return x / jnp.where(squared > eps * eps, jnp.sqrt(safe), eps)


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The cosine of the angle between vectors along ``dim``; norms count at least ``eps``."""
    return _cosine(x1, x2, dim=wrap_dim(dim, max(x1.dim(), x2.dim())), eps=float(eps))
