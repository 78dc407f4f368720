"""Arrays on their way into the update program and back: what may be donated, and how."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp

from .._tensor import Storage, Tensor


def _whole(t: Tensor) -> bool:
    """Whether the update concerns all of the storage: padding of sharded tensors belongs to it."""
    return t._chain is None or t._layout is not None


def array_of(t: Tensor) -> Any:
    """The array of ``t``; of a sharded tensor, what this thread holds of it, with padding."""
    return t._storage.held if _whole(t) else t._read()


def sole(t: Tensor) -> Any:
    """The array of ``t`` to donate: a copy where something else than its storage holds it.

    Storages may share an array (arrays are immutable), and donation takes it away from all. Held
    means: by a Python reference. Two Array objects over one buffer (``device_put`` to where the
    array is, ``addressable_data``) are not seen here; who makes such a pair has to keep it in step.
    """
    if not _whole(t):
        return jnp.copy(t._read())
    t._cached = None
    if _holders(t._storage) > _STORAGE_ALONE:
        t._storage.held = jnp.copy(t._storage.held)
    return t._storage.held


def alike(*trees: Any) -> tuple[Any, ...]:
    """The same trees with all arrays committed to their devices, where some are.

    Results of committed and uncommitted arrays are committed, and jax compiles anew for those: the
    second step would.
    """
    if len({array.committed for array in jax.tree.leaves(trees)}) == 1:
        return trees
    return jax.tree.map(_committed, trees)  # type: ignore[no-any-return]


def _committed(array: Any) -> Any:
    return array if array.committed else jax.device_put(array, array.sharding)


def _holders(storage: Storage) -> int:
    return sys.getrefcount(storage.held)


_STORAGE_ALONE = _holders(Storage(object()))


def store(t: Tensor, array: Any) -> None:
    """Makes ``array`` the value of ``t``; autograd sees a new version."""
    if _whole(t):
        t._storage.held = array
        t._storage.version += 1
    else:
        t._write(array)
