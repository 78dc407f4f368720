"""Tensors outlive a restart of the JAX backend, which ``init_process_group`` may need."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._tensor import Storage
from ._laid_out import LaidOutStorage
from ._spmd import Spread
from ._world import on_backend_reset

_values: list[tuple[Storage, Any]] = []


def _pull() -> None:
    """Values of all live tensors to host memory."""
    gc.collect()
    for cell in gc.get_objects():
        if isinstance(cell, Storage) and _has_values(cell.array):
            _values.append((cell, np.asarray(cell.array)))


def _has_values(array: Any) -> bool:
    return isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)


def _push() -> None:
    """The values back, on the new devices."""
    with jax.enable_x64(True):
        while _values:
            cell, value = _values.pop()
            array = jnp.asarray(value)
            if isinstance(cell, LaidOutStorage):
                cell.value = Spread(cell.value.mesh, array)
            else:
                cell.array = array


def register() -> None:
    """From now on tensors survive restarts."""
    on_backend_reset(_pull, _push)
