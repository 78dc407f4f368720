"""The ``step`` entries of optimizer state."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .._device import device, jax_device
from .._tensor import Tensor, wrap
from ._donation import store


class StepCounts:
    """Reads and advances ``state["step"]``: a float32 tensor of its own for each parameter.

    Equal counts share one array, so that a step costs one host read and one new array, however
    many parameters there are.
    """

    def __init__(self) -> None:
        self._read: dict[int, tuple[Any, int]] = {}
        self._arrays: dict[int, Any] = {}

    def read(self, state: dict[str, Any]) -> int:
        """How many steps were taken; a missing entry is made, with 0."""
        step = state.get("step")
        if not isinstance(step, Tensor):
            step = state["step"] = wrap(_host_scalar(step or 0))
        array = step._storage.array
        known = self._read.get(id(array))
        if known is None:
            known = self._read[id(array)] = (array, int(step._host()))
        return known[1]

    def advance(self, state: dict[str, Any]) -> None:
        """Counts one step more."""
        count = self.read(state) + 1
        if count not in self._arrays:
            self._arrays[count] = _host_scalar(count)
        store(state["step"], self._arrays[count])


def _host_scalar(value: float) -> Any:
    try:
        place = jax_device(device("cpu"))
    except RuntimeError:
        place = None
    return jax.device_put(np.float32(value), place)
