"""Several tensors for one program: what this thread holds of each, by the devices it lies on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..._tensor import Tensor


def held(x: Tensor) -> Any:
    """The value; of a sharded tensor, what this thread holds of it, with padding."""
    return x._read() if x._layout is None else x._storage.held


def by_devices(tensors: list[Tensor]) -> Iterable[list[Tensor]]:
    """The tensors that one program can hold together."""
    found: dict[Any, list[Tensor]] = {}
    for x in tensors:
        found.setdefault(frozenset(held(x).sharding.device_set), []).append(x)
    return found.values()


def beside(scalar: Any, array: Any) -> Any:
    """``scalar`` on all devices of ``array``."""
    if scalar.sharding.device_set == array.sharding.device_set:
        return scalar
    if len(array.sharding.device_set) == 1:
        return jax.device_put(scalar, array.sharding)
    return jax.device_put(scalar, NamedSharding(array.sharding.mesh, PartitionSpec()))


def replace(tensors: list[Tensor], arrays: list[Any]) -> None:
    """Makes ``arrays`` the values, in place."""
    for x, array in zip(tensors, arrays, strict=True):
        if x._layout is None:
            x._write(array)
        else:
            x._write_pieces(array)
