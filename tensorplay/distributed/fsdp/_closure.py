"""Calls of an FSDP module from eager code: found again and run compiled, or run eagerly.

``CompiledCalls`` belongs to one module. A call whose signature, fingerprint and globals equal those
of an earlier one runs its programs; else the Python is traced. What cannot be traced runs eagerly,
with one warning that says why; FSDP modules below it then compile on their own.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from ..._freeze import Unfrozen
from ..._staged import Fingerprint, StagedCall, first_difference, signature
from ..._state import state as thread
from ..._structure import flatten
from ..._tensor import Tensor, state_changes
from .._agreement import COMPILED, EAGERLY, Agreement
from .._spmd import shared_program
from .._world import current_world
from ._boundary import RankBoundary, boundary_of
from ._call import Call
from ._param_group import FSDPParamGroup, ShardedState
from ._programs import GroupUse, Plan
from ._request import Eagerly, Request, shared_staged_call
from ._state import FSDPState, states_below

_WARN_AFTER_TRACES = 8


@dataclasses.dataclass(eq=False)
class Entry:
    """One known call of this module.

    Attributes:
        staged: its programs, or the decision to run eagerly.
        extra: where outside tensors beyond those of the module tree are among the globals.
        count: of ``state_changes`` when the fingerprint was taken.
    """

    signature: Any
    fingerprint: Fingerprint | None
    staged: StagedCall | Eagerly
    extra: tuple[Any, ...]
    count: int

    def outside(self) -> list[Tensor]:
        """The outside tensors as they are now."""
        assert self.fingerprint is not None
        if not self.extra:
            return self.fingerprint.tensors
        reads = self.staged.reads  # type: ignore[union-attr]
        return [*self.fingerprint.tensors, *map(reads.tensor_at, self.extra)]

    def holds(self) -> bool:
        """Whether the globals are what they were."""
        return isinstance(self.staged, Eagerly) or self.staged.reads.hold()


class CompiledCalls:
    """See the module's docstring.

    Attributes:
        traces: how often the module's Python was traced.
    """

    def __init__(self, fsdp_state: FSDPState) -> None:
        self.state = fsdp_state
        self.traces = 0
        self._entries: dict[Any, list[Entry]] = {}
        self._last: Entry | None = None
        self._warned: set[str] = set()
        self._agreement = Agreement(
            fsdp_state.mesh.jax_mesh, f"the forward of {type(fsdp_state.module).__name__}"
        )
        self._tree: tuple[int, list[FSDPState], list[FSDPParamGroup], str | None] | None = None

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any, method: str = "") -> Any:
        """Calls ``call(*args, **kwargs)``: the module, or one of its methods."""
        if thread.one_rank:
            return self.state.run_eagerly(call, args, kwargs)
        tensors, structure = flatten((args, kwargs))
        boundary = boundary_of(self.state.mesh, tensors)
        groups = self._of_tree()[1]
        for group in groups:
            group.adopt_replacements()
            group.refuse_meta()
        entry, new = self._entry(call, tensors, structure, method, boundary)
        reason = self._reason_to_run_eagerly(entry, new, tensors)
        if reason is None:
            return self._run_compiled(entry, groups, tensors, (args, kwargs), boundary)
        for group in groups:
            group.hide_traced()
        try:
            out = self.state.run_eagerly(call, args, kwargs, boundary)
        except BaseException:
            self._forget(entry)
            raise
        self._warn_eager(reason)
        return out

    def _reason_to_run_eagerly(self, entry: Entry, new: bool, tensors: list[Tensor]) -> str | None:
        """Why this call runs eagerly, here or on another rank; None if it runs compiled."""
        reason = key = None
        if isinstance(entry.staged, Eagerly):
            reason = entry.staged.reason
        elif _writes_argument(entry, tensors):
            reason = "writes a buffer that is also an argument"
        else:
            key = entry.staged.key
        choice = self._agreement.choose(COMPILED if reason is None else EAGERLY, key, new)
        if choice == COMPILED or reason is not None:
            return reason
        reason = "is not the same on all ranks"
        if current_world().spans_processes:
            entry.staged = Eagerly(reason)
        return reason

    # --- finding -----------------------------------------------------------------------------

    def _of_tree(self) -> tuple[list[FSDPState], list[FSDPParamGroup], str | None]:
        """The FSDP states and the groups of the module tree, and why it runs eagerly, if so."""
        if self._tree is None or self._tree[0] != state_changes.count:
            states = states_below(self.state.module)
            reason = (
                "contains FSDP modules over another mesh" if self.state.mixes_meshes() else None
            )
            self._tree = (state_changes.count, states, self.state.groups(), reason)
        return self._tree[1:]

    def _entry(
        self,
        call: Callable[..., Any],
        tensors: list[Tensor],
        structure: Any,
        method: str,
        boundary: RankBoundary,
    ) -> tuple[Entry, bool]:
        """What is known of this call, tracing it if nothing is; and whether nothing was."""
        reason = _unfit_argument(tensors) or self._of_tree()[2]
        if reason is None:
            try:
                key = (method, signature(tensors, structure), boundary.key)
                return self._find(call, tensors, structure, key, boundary)
            except Unfrozen as error:
                reason = f"reads something that {error}"
        return Entry(None, None, Eagerly(reason), (), -1), True

    def _find(
        self,
        call: Callable[..., Any],
        tensors: list[Tensor],
        structure: Any,
        key: Any,
        boundary: RankBoundary,
    ) -> tuple[Entry, bool]:
        last = self._last
        if (
            last is not None
            and last.count == state_changes.count
            and last.signature == key
            and self._still_holds(last)
        ):
            return last, False
        fingerprint = Fingerprint(self.state.module)
        found = self._entries.setdefault((key, fingerprint.key), [])
        for entry in found:
            if entry.holds():
                entry.fingerprint, entry.count = fingerprint, state_changes.count
                self._last = entry
                return entry, False
        request = Request(
            self.state, call, tensors, structure, fingerprint, boundary, self.state.mesh.jax_mesh
        )
        entry = self._last = self._trace(request, key)
        found.append(entry)
        return entry, True

    def _forget(self, entry: Entry) -> None:
        """Drops the decision to run eagerly where the Python itself raised."""
        self._last = None
        for found in self._entries.values():
            if entry in found:
                found.remove(entry)

    def _still_holds(self, entry: Entry) -> bool:
        return (
            entry.fingerprint is not None
            and entry.fingerprint.snapshot.unchanged()
            and entry.holds()
        )

    # --- tracing -----------------------------------------------------------------------------

    def _trace(self, request: Request, key: Any) -> Entry:
        """Traces the call; where that fails, the entry says to run it eagerly."""
        fingerprint = request.fingerprint
        staged = shared_staged_call(
            ("staged", self.state.mesh.jax_mesh, key, fingerprint.key), request
        )
        self._count_trace(key, fingerprint)
        fresh = Fingerprint(self.state.module)
        extra = () if isinstance(staged, Eagerly) else staged.extra
        return Entry(key, fresh, staged, extra, state_changes.count)

    def _count_trace(self, key: Any, fingerprint: Fingerprint) -> None:
        self.traces += 1
        previous = [(k, f) for k, f in self._entries if (k, f) != (key, fingerprint.key)]
        if self.traces >= _WARN_AFTER_TRACES and previous and "retrace" not in self._warned:
            self._warned.add("retrace")
            what = first_difference(previous[-1], (key, fingerprint.key))
            warnings.warn(
                f"{self._name()} was traced {self.traces} times, since something that its forward "
                f"may read was new each time; last: {what}. Pass what changes at every call as a "
                "tensor.",
                stacklevel=5,
            )

    def _warn_eager(self, reason: str) -> None:
        if reason and reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(
                f"{self._name()} runs eagerly, as its forward {reason}. Results are the same; only "
                "the FSDP modules inside it compile.",
                stacklevel=4,
            )

    def _name(self) -> str:
        return type(self.state.module).__name__

    # --- running -----------------------------------------------------------------------------

    def _run_compiled(
        self,
        entry: Entry,
        groups: list[FSDPParamGroup],
        arguments: list[Tensor],
        handed: Any,
        boundary: RankBoundary,
    ) -> Any:
        staged: StagedCall = entry.staged  # type: ignore[assignment]
        states = [s for s in self._of_tree()[0] if s.group is not None]
        keeps = {s.group for s in states if thread.recomputing or not s.reshards()}
        within = {s.group: 0 if s.group in keeps else s.within for s in states}
        uses = []
        for group in groups:
            if group.comms.all_gather is not None:
                group.to_unsharded()
            elif group.state is not ShardedState.UNSHARDED or not group.is_current():
                group.to_sharded()
            given = group.state is ShardedState.UNSHARDED
            uses.append(
                GroupUse(
                    group.spec,
                    given,
                    group in keeps or group.comms.all_gather is not None,
                    within[group] if group.comms.all_gather is None else 0,
                    tuple(group.trainable()),
                    _positions(group.forward_prefetch, groups),
                    _positions(group.backward_prefetch, groups),
                )
            )
        plan = self._plan(staged, tuple(uses))
        frees = [group not in keeps for group in groups]
        call = Call(boundary, staged, plan, frees, groups, arguments, entry.outside())
        return call.forward(handed)

    def _plan(self, staged: StagedCall, uses: tuple[GroupUse, ...]) -> Plan:
        jax_mesh = self.state.mesh.jax_mesh
        return shared_program(
            ("plan", jax_mesh, staged.key, uses), lambda: Plan(staged, uses, jax_mesh)
        )


def _positions(
    chosen: list[FSDPParamGroup] | None, groups: list[FSDPParamGroup]
) -> tuple[int, ...] | None:
    """Where the chosen groups are among those of a call."""
    return None if chosen is None else tuple(groups.index(g) for g in chosen if g in groups)


def _writes_argument(entry: Entry, tensors: list[Tensor]) -> bool:
    """Whether an argument shares storage with a module's tensor that the program writes."""
    written = entry.staged.written  # type: ignore[union-attr]
    if not written:
        return False
    outside = entry.outside()
    storages = {outside[i]._storage for i in written}
    return any(t._storage in storages for t in tensors)


def _unfit_argument(tensors: list[Tensor]) -> str | None:
    """Why a call with these arguments runs eagerly, if it does."""
    for t in tensors:
        if t._layout is not None:
            return "takes a sharded tensor"
        if t.is_meta:
            return "takes a meta tensor"
    return None
