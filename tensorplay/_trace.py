"""The trace of one call: what tensor code does differently while a program is being traced.

``state.trace`` holds a ``Trace`` meanwhile. Storages made during the trace are its own; every other
storage is *outside*: reading one lifts it to an input of the program, writing one makes its new
value an output. What cannot be expressed in a program stops the trace with ``Untraceable``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ._device import device
from ._graph import Node
from ._state import state
from ._tensor import Storage, Tensor


class Untraceable(BaseException):
    """Stops a trace; the call runs eagerly instead. Never reaches the user."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _TracedNode(Node):
    """The ``grad_fn`` of every traced tensor that requires grad."""

    def __init__(self) -> None:
        super().__init__(())

    def name(self) -> str:
        return "CompiledBackward"


class Scope:
    """A part of a trace that jax traces apart.

    Attributes:
        own: the storages made inside.
        written: storages from outside of it that were written to.
    """

    def __init__(self) -> None:
        self.own: set[Storage] = set()
        self.written: dict[Storage, None] = {}


class Trace:
    """One trace; see the module's docstring.

    Attributes:
        node: the ``grad_fn`` of traced tensors that require grad.
        lifted: the outside storages that are inputs of the program; their arrays are tracers
            meanwhile.
        missing: outside tensors read although they are not lifted yet: trace again with them.
        writes: outside storages written to.
        draws: random draws made so far.
        reason: why the trace was stopped, or None.
    """

    def __init__(self, generator: Any, place: device) -> None:
        self.node = _TracedNode()
        self.device = place
        self.lifted: set[Storage] = set()
        self.missing: dict[Storage, Tensor] = {}
        self.writes: dict[Storage, Any] = {}
        self.draws = 0
        self.reason: str | None = None
        self.owner: Any = None
        self.random_inputs: tuple[Any, Any, Any] | None = None
        self._generator = generator
        self._own: set[Storage] = set()
        self._scope: Scope | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[Trace]:
        """Makes this the trace of the current thread."""
        state.trace = self
        try:
            yield self
        finally:
            state.trace = None

    def abort(self, reason: str) -> Any:
        """Stops the trace."""
        self.reason = self.reason or reason
        raise Untraceable(reason)

    def own(self, storage: Storage) -> None:
        """A storage made during the trace."""
        self._own.add(storage)
        if self._scope is not None:
            self._scope.own.add(storage)

    @contextlib.contextmanager
    def scope(self) -> Iterator[Scope]:
        """A part of the trace that jax traces apart, for activation checkpointing."""
        outer, self._scope = self._scope, Scope()
        try:
            yield self._scope
        finally:
            self._scope = outer

    def in_scope(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage may hold values of the part that is traced now."""
        if self._scope is None:
            return not self.is_outside(tensor)
        return tensor._storage in self._scope.own

    def is_outside(self, tensor: Tensor) -> bool:
        """Whether the tensor existed before the trace."""
        return tensor._storage not in self._own

    def on_read(self, tensor: Tensor) -> None:
        storage = tensor._storage
        if storage not in self._own and storage not in self.lifted and not tensor.is_meta:
            if tensor._layout is not None:
                self.abort("uses a sharded tensor outside the module it belongs to")
            self.missing.setdefault(storage, tensor)

    def on_write(self, tensor: Tensor) -> None:
        storage = tensor._storage
        if self._scope is not None and storage not in self._scope.own:
            self._scope.written.setdefault(storage)
        if storage in self._own:
            return
        if tensor._requires_grad or storage not in self.lifted:
            self.abort("writes in place to a tensor from outside")
        self.writes.setdefault(storage, None)

    def on_flag(self, tensor: Tensor) -> None:
        if self.is_outside(tensor):
            self.abort("sets requires_grad of a tensor from outside")

    def on_setattr(self, module: Any, name: str) -> None:
        self.abort(f"sets the attribute {name!r} of a {type(module).__name__}")

    def draw(self, generator: Any) -> tuple[Any, Any, Any]:
        """The inputs of the next random draw."""
        if generator is not self._generator:
            self.abort("draws from a generator of its own")
        assert self.random_inputs is not None
        words, offset, stream = self.random_inputs
        offset = offset + self.draws
        self.draws += 1
        return words, offset, stream
