"""Devices: torch's names over jax's devices."""

from __future__ import annotations

import os
from typing import Any

import jax

from ._state import state

_PLATFORM_NAMES = {"gpu": "cuda", "cuda": "cuda", "rocm": "cuda", "cpu": "cpu", "tpu": "tpu"}
_TYPES = ("cpu", "cuda", "tpu", "meta")


class device:
    """Where a tensor lives, as ``torch.device``: ``cpu``, ``cuda``, ``tpu`` or ``meta``.

    As a context manager it is where tensors made inside are placed.

    Raises:
        RuntimeError: the type is none of the above.
    """

    __slots__ = ("_outer", "index", "type")
    type: str
    index: int | None

    def __init__(self, type: str | device | int, index: int | None = None) -> None:
        kind: str
        if isinstance(type, device):
            kind, index = type.type, type.index
        elif isinstance(type, int):
            kind, index = "cuda", type
        else:
            kind, colon, suffix = type.partition(":")
            index = int(suffix) if colon else index
        if kind not in _TYPES:
            raise RuntimeError(
                f"Expected one of {', '.join(_TYPES)} device type at start of device string: {kind}"
            )
        self.type, self.index = kind, index
        self._outer: list[Any] = []

    def __repr__(self) -> str:
        return f"device(type={self.type!r}" + (
            ")" if self.index is None else f", index={self.index})"
        )

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, device) and (self.type, self.index) == (other.type, other.index)

    def __hash__(self) -> int:
        return hash((self.type, self.index))

    def __reduce__(self) -> tuple[Any, tuple[str, int | None]]:
        return (device, (self.type, self.index))

    def __enter__(self) -> device:
        self._outer.append(state.default_device)
        state.default_device = self
        return self

    def __exit__(self, *exc: object) -> None:
        state.default_device = self._outer.pop()


def set_default_device(target: device | str | None) -> None:
    """Places new tensors of this thread on ``target``; None takes that back."""
    state.default_device = None if target is None else device(target)


def get_default_device() -> device:
    """Where a new tensor of this thread is placed."""
    return state.default_device or device_of(_default_jax_device())


def device_of(jax_device: Any) -> device:
    """The device that a jax device is; CPUs carry no index, as in torch."""
    kind = _PLATFORM_NAMES.get(jax_device.platform, "cpu")
    return device(kind, None if kind == "cpu" else jax_device.local_hardware_id)


def jax_device(target: device) -> Any:
    """The jax device for ``target``; without an index, this thread's own of that type.

    Raises:
        RuntimeError: the process has no such device.
    """
    own = _default_jax_device()
    if _PLATFORM_NAMES.get(own.platform) == target.type and target.index is None:
        return own
    try:
        found = [d for d in jax.local_devices(backend=target.type) if _matches(d, target)]
    except RuntimeError:
        found = []
    if not found:
        raise RuntimeError(f"no device {target} in this process; there is {own.platform}")
    return found[0]


def _matches(candidate: Any, target: device) -> bool:
    if target.type == "cpu" or target.index is None:
        return True
    return bool(candidate.local_hardware_id == target.index)


def _default_jax_device() -> Any:
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    return jax.local_devices()[0] if chosen is None or isinstance(chosen, str) else chosen


_threads = {"intra": os.cpu_count() or 1}


def get_num_threads() -> int:
    """The number given to ``set_num_threads``, or the machine's number of CPUs."""
    return _threads["intra"]


def set_num_threads(count: int) -> None:
    """Remembers ``count``. XLA sizes its thread pool when it starts; this does not change it."""
    if count <= 0:
        raise RuntimeError("set_num_threads expects a positive integer")
    _threads["intra"] = int(count)
