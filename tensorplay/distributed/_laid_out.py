"""The cell of a tensor that lies over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .._tensor import Meta, Storage
from ._spmd import Spread


def _in_memory(spread: Spread, kind: str) -> Spread:
    """The same values in another kind of memory of the same devices."""
    held = spread.held
    return Spread.of_held(spread.mesh, jax.device_put(held, held.sharding.with_memory_kind(kind)))


class LaidOutStorage(Storage):
    """The cell of a tensor with a layout; ``array`` is this rank's padded piece.

    Attributes:
        value: the ``Spread`` over all ranks (or a meta array), in the layout's kind of memory, as
            is ``array``. `held` and `spread` are on the devices.
        on_write: called after each write.
    """

    __slots__ = ("layout", "on_write", "value")

    def __init__(self, layout: Any, value: Any, kept: bool = False) -> None:
        self.layout, self.version = layout, 0
        self.value = value if kept else self._kept(value)
        self.on_write: Callable[[], None] | None = None

    def _kept(self, value: Any) -> Any:
        if self.layout.memory is None or isinstance(value, Meta):
            return value
        return _in_memory(value, self.layout.memory)

    @property
    def spread(self) -> Any:
        """The ``Spread`` on the devices; a copy where ``value`` is kept in other memory."""
        if self.layout.memory is None or isinstance(self.value, Meta):
            return self.value
        return _in_memory(self.value, self.layout.device.default_memory().kind)

    @property
    def array(self) -> Any:  # type: ignore[override]
        return self.value if isinstance(self.value, Meta) else self.value.local

    @array.setter
    def array(self, piece: Any) -> None:
        if not isinstance(piece, Meta):
            assert not self.layout.controlled, "one piece cannot replace those of all ranks"
            piece = Spread.of_local(self.layout.jax_mesh, piece)
        self._put(piece)

    @property
    def stored(self) -> Any:
        return self.value if isinstance(self.value, Meta) else self.value.held

    @property
    def held(self) -> Any:
        """What this thread computes with; see ``Spread.held``."""
        return self.value if isinstance(self.value, Meta) else self.spread.held

    @held.setter
    def held(self, pieces: Any) -> None:
        self._put(Spread.of_held(self.layout.jax_mesh, pieces))

    def _put(self, value: Any) -> None:
        self.value = self._kept(value)
        if self.on_write is not None:
            self.on_write()
