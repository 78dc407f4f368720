"""Tracing a call of an FSDP module: what to trace, again where that is needed, and once for all."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from ..._device import device_of
from ..._guards import Reads
from ..._staged import Fingerprint, StagedCall, Tracing, distinct
from ..._tensor import Tensor
from ..._trace import Untraceable
from .._spmd import shared_program
from .._world import current_world
from ._boundary import RankBoundary

_MAX_OUTSIDE_ROUNDS = 8


@dataclasses.dataclass
class Eagerly:
    """The decision that a call runs eagerly, and why."""

    reason: str


@dataclasses.dataclass
class Request:
    """What to trace.

    Attributes:
        mesh: to trace it over; an abstract one will do.
    """

    state: Any
    call: Callable[..., Any]
    tensors: list[Tensor]
    structure: Any
    fingerprint: Fingerprint
    boundary: RankBoundary
    mesh: Any

    def stage(self) -> StagedCall | Eagerly:
        """Traces, again with more outside tensors where that is needed."""
        extra: dict[Any, Tensor] = {}
        for _ in range(_MAX_OUTSIDE_ROUNDS):
            tracing = self._tracing([*self.fingerprint.tensors, *extra.values()])
            try:
                staged = self._stage_once(tracing)
            except Untraceable as stop:
                if not tracing.trace.missing or stop.reason != "reads tensors from outside":
                    return Eagerly(stop.reason)
                reads = Reads(tracing.watch)
                for tensor in tracing.trace.missing.values():
                    place = reads.locate(tensor)
                    if place is None:
                        return Eagerly("reads a tensor that cannot be found again")
                    extra[place] = tensor
                continue
            except Exception as error:
                return Eagerly(f"raised {type(error).__name__} while traced: {error}")
            staged.extra = tuple(extra)
            return staged
        return Eagerly("reads ever new tensors from outside")

    def _tracing(self, outside: list[Tensor]) -> Tracing:
        groups = {g: g.whole_avals() for g in self.state.groups()}
        tracing = Tracing(
            lambda *args, **kwargs: self.state.run_traced(self.call, args, kwargs),
            self.tensors,
            self.structure,
            distinct(outside),
            groups,
            self.mesh,
            device_of(next(iter(self.state.mesh.jax_mesh.devices.flat))),
            self.boundary.shapes(self.tensors),
            self.boundary.joins,
        )
        tracing.watch.expect(self.fingerprint.freezer)
        return tracing

    def _stage_once(self, tracing: Tracing) -> StagedCall:
        """One trace, after which everything that it changed is put back.

        Raises:
            Untraceable: the Python changed its surroundings, or as ``Tracing.stage``.
        """
        try:
            staged = tracing.stage()
        finally:
            for group in tracing.groups:
                group.hide_traced()
                group.end_trace()
            names = tracing.watch.undo()
            changed = not self.fingerprint.snapshot.unchanged()
            self.fingerprint.snapshot.undo()
        if names or changed:
            what = f"the global {names[0]!r}" if names else "an object from outside"
            raise Untraceable(f"changes {what}")
        return staged


tracing_lock = threading.RLock()


def shared_staged_call(key: Any, request: Request) -> StagedCall | Eagerly:
    """A staged call whose globals hold, traced once for all ranks of this process."""
    with tracing_lock:
        known: list[StagedCall] = shared_program(key, list)
        for staged in known:
            if staged.reads.hold():
                return staged
        found = request.stage()
        if isinstance(found, StagedCall):
            found.key = (key, len(known))
            if current_world().kind == "threads":
                found.key = found.digest
            known.append(found)
        return found
