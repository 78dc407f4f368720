"""Calls of an FSDP module from eager code: found again and run compiled, or run eagerly.

``CompiledCalls`` belongs to one module. A call whose signature, fingerprint and globals equal those
of an earlier one runs its programs; else the Python is traced. What cannot be traced runs eagerly,
with one warning that says why; FSDP modules below it then compile on their own.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..._freeze import Unfrozen
from ..._graph import Node
from ..._guards import Reads
from ..._ops.random import default_generator
from ..._staged import (
    Fingerprint,
    StagedCall,
    Tracing,
    distinct,
    first_difference,
    make_result,
    signature,
)
from ..._state import state as thread
from ..._structure import flatten
from ..._tensor import Tensor, state_changes, wrap
from ..._trace import Untraceable
from .._agreement import COMPILED, EAGERLY, Agreement
from .._spmd import Spread, launch, shared_program
from .._world import current_world
from ._param_group import FSDPParamGroup, ShardedState
from ._programs import Backward, GroupUse, Plan
from ._state import states_below

_WARN_AFTER_TRACES = 8
_MAX_OUTSIDE_ROUNDS = 8


@dataclasses.dataclass
class Eagerly:
    """The decision that a call runs eagerly, and why."""

    reason: str


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

    def __init__(self, fsdp_state: Any) -> None:
        self.state = fsdp_state
        self.traces = 0
        self._entries: dict[Any, list[Entry]] = {}
        self._last: Entry | None = None
        self._warned: set[str] = set()
        self._agreement = Agreement(
            fsdp_state.mesh.jax_mesh, f"the forward of {type(fsdp_state.module).__name__}"
        )
        self._tree: tuple[int, list[FSDPParamGroup]] | None = None

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any, method: str = "") -> Any:
        """Calls ``call(*args, **kwargs)``: the module, or one of its methods."""
        tensors, structure = flatten((args, kwargs))
        groups = self._groups()
        for group in groups:
            group.adopt_replacements()
            group.refuse_meta()
        entry = self._entry(call, tensors, structure, method)
        if isinstance(entry.staged, StagedCall) and not _writes_argument(entry, tensors):
            return self._run_compiled(entry, groups, tensors, (args, kwargs))
        for group in groups:
            group.hide_traced()
        try:
            out = self.state.run_eagerly(call, args, kwargs)
        except BaseException:
            self._forget(entry)
            raise
        if isinstance(entry.staged, Eagerly):
            self._warn_eager(entry.staged.reason)
        return out

    # --- finding -----------------------------------------------------------------------------

    def _groups(self) -> list[FSDPParamGroup]:
        """The groups of the module tree."""
        if self._tree is None or self._tree[0] != state_changes.count:
            self._tree = (state_changes.count, self.state.groups())
        return self._tree[1]

    def _entry(
        self, call: Callable[..., Any], tensors: list[Tensor], structure: Any, method: str
    ) -> Entry:
        """What is known of this call, tracing it if nothing is."""
        reason = _unfit_argument(tensors)
        if reason is None:
            try:
                key = (method, signature(tensors, structure))
                return self._find(call, tensors, structure, key)
            except Unfrozen as error:
                reason = f"reads something that {error}"
        self._agreement.new(EAGERLY, None)
        return Entry(None, None, Eagerly(reason), (), -1)

    def _find(
        self, call: Callable[..., Any], tensors: list[Tensor], structure: Any, key: Any
    ) -> Entry:
        last = self._last
        if (
            last is not None
            and last.count == state_changes.count
            and last.signature == key
            and self._still_holds(last)
        ):
            self._note_known(last)
            return last
        fingerprint = Fingerprint(self.state.module)
        found = self._entries.setdefault((key, fingerprint.key), [])
        for entry in found:
            if entry.holds():
                entry.fingerprint, entry.count = fingerprint, state_changes.count
                self._last = entry
                self._note_known(entry)
                return entry
        entry = self._last = self._trace(call, tensors, structure, key, fingerprint)
        found.append(entry)
        return entry

    def _note_known(self, entry: Entry) -> None:
        self._agreement.known(EAGERLY if isinstance(entry.staged, Eagerly) else COMPILED)

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

    def _trace(
        self,
        call: Callable[..., Any],
        tensors: list[Tensor],
        structure: Any,
        key: Any,
        fingerprint: Fingerprint,
    ) -> Entry:
        """Traces the call; where that fails, the entry says to run it eagerly."""
        request = _Request(self.state, call, tensors, structure, fingerprint)
        staged = _shared(("staged", self.state.mesh.jax_mesh, key, fingerprint.key), request)
        self._count_trace(key, fingerprint)
        staged = self._agreed(staged)
        fresh = Fingerprint(self.state.module)
        extra = () if isinstance(staged, Eagerly) else staged.extra
        return Entry(key, fresh, staged, extra, state_changes.count)

    def _agreed(self, staged: StagedCall | Eagerly) -> StagedCall | Eagerly:
        """``staged``, unless another rank has to run the call eagerly."""
        if isinstance(staged, Eagerly):
            self._agreement.new(EAGERLY, None)
            return staged
        if self._agreement.new(COMPILED, staged.key) == EAGERLY:
            return Eagerly("is not the same on all ranks")
        return staged

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
    ) -> Any:
        staged: StagedCall = entry.staged  # type: ignore[assignment]
        keeps = self._groups_that_keep()
        uses = []
        for group in groups:
            if group.state is ShardedState.UNSHARDED and not group.is_current():
                group.to_sharded()
            given = group.state is ShardedState.UNSHARDED
            uses.append(
                GroupUse(
                    group.spec,
                    given,
                    group in keeps,
                    tuple(group.trainable()),
                    _positions(group.forward_prefetch, groups),
                    _positions(group.backward_prefetch, groups),
                )
            )
        plan = self._plan(staged, tuple(uses))
        call = _Call(self, staged, plan, groups, arguments, entry.outside())
        return call.forward(handed)

    def _groups_that_keep(self) -> set[FSDPParamGroup]:
        """The groups that stay unsharded after forward."""
        states = states_below(self.state.module)
        return {s.group for s in states if s.group is not None and not s.reshards()}

    def _plan(self, staged: StagedCall, uses: tuple[GroupUse, ...]) -> Plan:
        jax_mesh = self.state.mesh.jax_mesh
        return shared_program(
            ("plan", jax_mesh, staged.key, uses), lambda: Plan(staged, uses, jax_mesh)
        )


@dataclasses.dataclass
class _Request:
    """What to trace."""

    state: Any
    call: Callable[..., Any]
    tensors: list[Tensor]
    structure: Any
    fingerprint: Fingerprint

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
            self.state.mesh.jax_mesh,
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


def _shared(key: Any, request: _Request) -> StagedCall | Eagerly:
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


class _Call:
    """One run of a staged call's forward, and what its backward will need."""

    def __init__(
        self,
        calls: CompiledCalls,
        staged: StagedCall,
        plan: Plan,
        groups: list[FSDPParamGroup],
        arguments: list[Tensor],
        outside: list[Tensor],
    ) -> None:
        self.calls, self.staged, self.plan, self.groups = calls, staged, plan, groups
        self.arguments, self.outside = arguments, outside
        self.mesh = calls.state.mesh.jax_mesh

    def forward(self, handed: Any) -> Any:
        """Runs the forward program and makes the result; ``handed`` is (args, kwargs)."""
        inputs = [_input(t._storage.array) for t in self.outside]
        inputs += [_input(t._read()) for t in self.arguments]
        if self.staged.draws:
            inputs.append(self._random_input())
        self.inputs = [Spread.of_local(self.mesh, a) for a in inputs]
        self.pieces = [g.pieces() for g in self.groups]
        self.versions = [g.versions() for g in self.groups]
        parameters = [
            x
            for g, use, pieces in zip(self.groups, self.plan.uses, self.pieces, strict=True)
            for x in (_wholes(g) if use.given else pieces)
        ]
        inputs = [*parameters, *self.inputs, _zero()]
        outputs = launch(self.mesh, self.plan.forward, inputs)
        return self._take(outputs, handed)

    def _random_input(self) -> Any:
        generator = default_generator()
        high, low = generator.words()
        numbers = [high, low, generator.offset, self.calls.state.mesh.rank]
        generator.skip(self.staged.draws)
        return jax.numpy.asarray(np.array(numbers, np.uint32))

    def _take(self, outputs: list[Spread], handed: Any) -> Any:
        staged, plan = self.staged, self.plan
        rest = iter(outputs)
        values = [next(rest) for _ in range(staged.num_values)]
        for i in staged.written:
            self._write_back(self.outside[i], next(rest).local)
        self.kept = [next(rest) for _ in plan.kept]
        self.kept += [values[i] for i in plan.returned.values()]
        self.wholes: list[list[Any]] = [
            _wholes(g) if use.given else [] for g, use in zip(self.groups, plan.uses, strict=True)
        ]
        for n, (group, use) in enumerate(zip(self.groups, plan.uses, strict=True)):
            if use.kept and not use.given:
                self.wholes[n] = [next(rest) for _ in group.params]
                group.to_unsharded([w.local for w in self.wholes[n]])
            elif use.given and not use.kept:
                group.to_sharded()
        node = CompiledNode(self) if staged.differentiated else None
        arrays = [
            _output(v.local, aval) for v, aval in zip(values, staged.value_avals, strict=True)
        ]
        return make_result(staged, arrays, self.arguments, handed, self.outside, node)

    def _write_back(self, tensor: Tensor, array: Any) -> None:
        tensor._storage.array = _output(array, tensor._storage.array)
        tensor._storage.version += 1

    # --- backward ----------------------------------------------------------------------------

    def backward(self, grads: list[Any]) -> list[Any]:
        """Gradients of the output arrays to gradients of what ``edges`` lists."""
        self._refuse_changed_shards()
        present = tuple(
            i for i, g in zip(self.staged.differentiable, grads, strict=True) if g is not None
        )
        reductions = tuple(g.reduction() for g in self.groups)
        shown = tuple(
            n
            for n in self.plan.needed_groups
            if not (self.groups[n].reshard_after_backward or self.plan.uses[n].kept)
        )
        program = self._backward_program(present, reductions, shown)
        arguments: list[Any] = []
        for n in self.plan.needed_groups:
            arguments += self.wholes[n] if self.plan.uses[n].kept else self.pieces[n]
        arguments += [self.inputs[i - self.plan.num_wholes] for i in self.plan.reused]
        arguments += self.kept
        arguments += [_input(g._read()) for g in grads if g is not None]
        for group, how in zip(self.groups, reductions, strict=True):
            arguments += group.take_waiting(how)
        arguments.append(_zero())
        outputs = launch(self.mesh, program.program, arguments)
        for group in self.groups:
            if group.reshard_after_backward:
                group.to_sharded()
        return self._gradients(program, outputs)

    def _refuse_changed_shards(self) -> None:
        """Raises RuntimeError if shards that have to be gathered again changed since forward."""
        for n in self.plan.needed_groups:
            group = self.groups[n]
            if self.plan.uses[n].kept or group.versions() == self.versions[n]:
                continue
            changed = [
                p.name
                for p, then in zip(group.params, self.versions[n], strict=True)
                if p.version() != then
            ]
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: the sharded parameters {changed} changed between forward and "
                "backward, for instance by an optimizer step. Run backward first"
            )

    def _backward_program(self, present: Any, reductions: Any, shown: Any) -> Backward:
        plan = self.plan
        return shared_program(
            ("backward", id(plan), present, reductions, shown),
            lambda: plan.backward(present, reductions, shown),
        )

    def _gradients(self, program: Backward, outputs: list[Spread]) -> list[Any]:
        by_place: dict[Any, Any] = {}
        parameters: dict[int, list[Any]] = {}
        for place, spread in zip(program.outputs, outputs, strict=True):
            if place[0] == "piece":
                by_place[place[1:]] = self.groups[place[1]].params[place[2]].layout.tensor(spread)
            elif place[0] == "whole":
                self.groups[place[1]].keep_unreduced(place[2], spread)
            elif place[0] == "partial":
                self.groups[place[1]].keep_partial(place[2], spread)
            elif place[0] == "parameter":
                parameters.setdefault(place[1], []).append(spread.local)
            else:
                aval = self.staged.forward.invars[place[1]].aval
                by_place[place[1]] = wrap(_output(spread.local, aval))
        for n, wholes in parameters.items():
            self.groups[n].to_unsharded(wholes)
        return [by_place.get(place) for place in self._places()]

    def _places(self) -> list[Any]:
        """For each edge: (group, parameter), or the position of another forward input."""
        places: list[Any] = [
            (n, i) for n, g in enumerate(self.groups) for i in range(len(g.params))
        ]
        first = self.plan.num_wholes
        places += [i for i in self.staged.differentiated if i >= first]
        return places

    def edges(self) -> list[Any]:
        """Where each gradient goes."""
        edges = [edge for g in self.groups for edge in g.accumulator_edges()]
        others = [*self.outside, *self.arguments]
        first = self.plan.num_wholes
        return edges + [others[i - first]._edge() for i in self.staged.differentiated if i >= first]

    def release(self) -> None:
        """Frees what backward needed."""
        self.kept, self.inputs, self.wholes, self.pieces = [], [], [], []


class CompiledNode(Node):
    """The backward step of a compiled call."""

    def __init__(self, call: _Call) -> None:
        super().__init__(call.edges(), len(call.staged.differentiable))
        self.call: _Call | None = call

    def name(self) -> str:
        return "CompiledBackward"

    def backward(self, grads: list[Any]) -> list[Any]:
        if self.call is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved "
                "tensors after they have already been freed). Specify retain_graph=True if you "
                "need to backward through the graph a second time."
            )
        if thread.grad_enabled:
            raise RuntimeError(
                "create_graph=True does not reach through a compiled FSDP call. Compute the "
                "second derivative on the module without fully_shard"
            )
        return self.call.backward(grads)

    def release(self) -> None:
        if self.call is not None:
            self.call.release()
            self.call = None


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


def _wholes(group: FSDPParamGroup) -> list[Any]:
    return [p.unsharded._storage.array for p in group.params]  # type: ignore[union-attr]


def _input(array: Any) -> Any:
    """Scalars get a dim, which carries the mesh axes."""
    return _with_dim(array) if array.ndim == 0 else array


def _output(array: Any, aval: Any) -> Any:
    """Takes that dim away again."""
    return _without_dim(array) if len(aval.shape) == 0 else array


def _zero() -> Any:
    """The zero that XLA does not know of; see ``depending_on``."""
    device = current_world().device
    return shared_program(("zero", device), lambda: jax.device_put(np.zeros(1, np.uint32), device))


_with_dim = jax.jit(lambda a: a.reshape(1))
_without_dim = jax.jit(lambda a: a.reshape(()))
