"""Tensors as flat rows of one length, padded with zeros."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def padded(value: Any, size: int) -> Any:
    """``value`` flat, with zeros behind it."""
    with jax.enable_x64(True):
        return _padded(value, size)


def first(row: Any, size: int) -> Any:
    """The first ``size`` elements, flat; ``row`` itself where that is all."""
    if row.size == size:
        return row
    with jax.enable_x64(True):
        return _first(row, size)


def stacked(parts: Sequence[Any], size: int) -> Any:
    """One row per part; for use in compiled code."""
    return jnp.stack([jnp.pad(part.reshape(-1), (0, size - part.size)) for part in parts])


@functools.partial(jax.jit, static_argnums=1)
def _padded(value: Any, size: int) -> Any:
    return stacked([value], size)[0]


@functools.partial(jax.jit, static_argnums=1)
def _first(row: Any, size: int) -> Any:
    return row.reshape(-1)[:size]
