"""The compiled programs of a staged call: where groups are gathered and their gradients reduced.

``Plan`` says, for one set of circumstances, which groups are gathered and which residuals are kept:

- a group is gathered in forward unless its whole parameters are there already;
- a residual that is computed from whole parameters (and tensors of the module) alone is never kept.
  Backward computes it again, from a second gather of the groups that resharded and from the kept
  wholes of the groups that did not;
- a residual that is itself an input or an output of forward is not kept twice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from ..._program import Evaluation, Handler, Thunk, dependencies, depends
from ..._staged import StagedCall
from .._spmd import per_rank_jit
from ._collectives import GroupSpec, gather, part
from ._reduction import GroupReduction
from ._schedule import (
    ENTER,
    ENTER_BACKWARD,
    MARK,
    depending_on,
    gathers_at_entry,
    without_marks,
)


@dataclasses.dataclass(frozen=True)
class GroupUse:
    """How one group takes part in one call.

    Attributes:
        spec: for the collectives.
        given: forward takes the whole parameters as inputs, in place of the pieces.
        kept: the whole parameters stay after forward; backward takes them as inputs.
        within: pieces shared by so many neighbouring ranks stay after forward, and backward gathers
            from those; 0 for the sharded parameters themselves.
        trainable: positions of the parameters that require grad.
        forward_prefetch, backward_prefetch: groups to gather ahead when this one is entered; None
            for the next one.
    """

    spec: GroupSpec
    given: bool
    kept: bool
    within: int
    trainable: tuple[int, ...]
    forward_prefetch: tuple[int, ...] | None = None
    backward_prefetch: tuple[int, ...] | None = None


class Plan:
    """The forward program of a staged call and what its backward programs need.

    Attributes:
        gathered: the groups in the order in which forward gathers them, once it was compiled.
    """

    def __init__(self, staged: StagedCall, uses: tuple[GroupUse, ...], jax_mesh: Any) -> None:
        self.staged, self.uses, self.jax_mesh = staged, uses, jax_mesh
        self.sizes = [len(u.spec.params) for u in uses]
        self.num_wholes = sum(self.sizes)
        self.gathered: list[int] = []
        self._classify()
        self.forward = per_rank_jit(_packed(self._forward, "fsdp_forward"), jax_mesh)

    def _classify(self) -> None:
        """Sorts the residuals: recomputed, an input of forward, or kept (each once)."""
        program = self.staged.forward
        found = dependencies(program, len(self.staged.constants))
        wholes = frozenset(range(self.num_wholes))
        free = frozenset(range(self.num_wholes + self.staged.num_outside))
        varying = len(program.invars) - len(self.staged.constants)
        inputs = {v: i for i, v in enumerate(program.invars[:varying])}
        self.residuals = without_marks(program, self.staged.residuals)
        returned = without_marks(program, program.outvars[: self.staged.num_values])
        outputs = {v: i for i, v in enumerate(returned) if not isinstance(v, Literal)}
        self.kept: list[Any] = []
        self.returned: dict[Any, int] = {}
        self.reused: list[int] = []
        needed: set[int] = set()
        for v in self.residuals:
            on = depends(found, v)
            if isinstance(v, Literal):
                continue
            if inputs.get(v, -1) >= self.num_wholes:
                self.reused.append(inputs[v])
            elif not on or (on & wholes and on <= free):
                needed |= on
            elif v in outputs:
                self.returned[v] = outputs[v]
            elif v not in self.kept:
                self.kept.append(v)
        self.reused = sorted({*self.reused, *(i for i in needed if i >= self.num_wholes)})
        self.needed_groups = [
            g for g, span in enumerate(self._spans()) if any(i in needed for i in range(*span))
        ]

    def _spans(self) -> list[tuple[int, int]]:
        """Positions of each group's whole parameters among the inputs of forward."""
        spans, start = [], 0
        for size in self.sizes:
            spans.append((start, start + size))
            start += size
        return spans

    def _wholes(
        self, arrays: list[list[Any]], have: Callable[[int], bool], within: list[int], zero: Any
    ) -> _Wholes:
        """The whole parameters, from the arrays of each group: wholes where ``have``, or pieces."""
        return _Wholes(self.uses, self._spans(), arrays, have, within, zero)

    def _entries(self) -> list[int]:
        """Groups in the order in which forward enters them."""
        marks = (e for e in self.staged.forward.eqns if e.primitive.name == MARK)
        return list(dict.fromkeys(e.params["group"] for e in marks if e.params["place"] == ENTER))

    def _forward(self, *inputs: Any) -> list[Any]:
        """(pieces or wholes of each group, the other inputs of forward) to (output values, written
        values, kept residuals, then what groups keep: wholes that were not given, or pieces).

        The random state is left out where nothing is drawn. Last comes the zero that
        ``depending_on`` needs."""
        *rest, zero = inputs
        arrays = [[rest.pop(0) for _ in range(size)] for size in self.sizes]
        wholes = self._wholes(arrays, lambda g: self.uses[g].given, [0] * len(arrays), zero)
        others = self.staged.forward.invars[self.num_wholes :]
        if not self.staged.draws:
            rest.append(jnp.zeros(4, jnp.uint32))
        rest += self.staged.constants
        rest = [_unpacked(x, v) for x, v in zip(rest, others, strict=True)]
        explicit = {g: u.forward_prefetch for g, u in enumerate(self.uses)}
        self.gathered = wholes.order
        handlers = wholes.issue_at(ENTER, self._entries(), explicit)
        evaluation = Evaluation(self.staged.forward, [*wholes.values, *rest], wholes.lazy, handlers)
        outputs = evaluation.run()
        results = outputs[: self.staged.num_values + len(self.staged.written)]
        results += [evaluation.value(v) for v in self.kept]
        program = self.staged.forward
        for g, (start, stop) in enumerate(self._spans()):
            use = self.uses[g]
            if use.within or (use.kept and not use.given):
                values = [evaluation.value(v) for v in program.invars[start:stop]]
                results += part(use.spec, values, use.within) if use.within else values
        return results

    # --- backward ----------------------------------------------------------------------------

    def backward(
        self,
        present: tuple[int, ...],
        reductions: tuple[GroupReduction, ...],
        shown: tuple[int, ...],
    ) -> Backward:
        """The backward program for gradients of output arrays ``present``."""
        return Backward(self, present, reductions, shown)


class _Wholes:
    """The whole parameters inside one program: given, or gathered once per group.

    Attributes:
        values: for each whole parameter its array, where it is given.
        lazy: for each of the others a function that gathers its group at first use.
        order: the groups gathered so far.
    """

    def __init__(
        self,
        uses: Sequence[GroupUse],
        spans: list[tuple[int, int]],
        arrays: list[list[Any]],
        have: Callable[[int], bool],
        within: list[int],
        zero: Any,
    ) -> None:
        self._uses, self._arrays, self._within, self._zero = uses, arrays, within, zero
        self._gathered: dict[int, list[Any]] = {}
        self.order: list[int] = []
        self.values: list[Any] = [None] * (spans[-1][1] if spans else 0)
        self.lazy: dict[int, Thunk] = {}
        self._missing: set[int] = set()
        for g, (start, stop) in enumerate(spans):
            if not arrays[g]:
                continue
            if have(g):
                self.values[start:stop] = arrays[g]
                continue
            self._missing.add(g)
            for i in range(start, stop):
                self.lazy[i] = functools.partial(self._whole, g, i - start)

    def _whole(self, group: int, index: int) -> Any:
        self._gather(group, None)
        return self._gathered[group][index]

    def _gather(self, group: int, token: Any) -> None:
        if group in self._gathered or group not in self._missing:
            return
        self.order.append(group)
        pieces = list(self._arrays[group])
        if token is not None:
            smallest = min(range(len(pieces)), key=lambda i: pieces[i].size or float("inf"))
            pieces[smallest] = depending_on(pieces[smallest], token, self._zero)
        self._gathered[group] = gather(self._uses[group].spec, pieces, self._within[group])

    def issue_at(
        self, place: str, entries: Sequence[int], explicit: Mapping[int, Any]
    ) -> Mapping[str, Handler]:
        """What to do at marks: at ``place`` of a group, gather what the schedule lists there."""
        listed = {g: ahead for g, ahead in explicit.items() if ahead is not None}
        order = gathers_at_entry(entries, listed)

        def on_mark(equation: Any, values: list[Any]) -> None:
            if equation.params["place"] == place:
                for group in order.get(equation.params["group"], ()):
                    self._gather(group, values[0])

        return {MARK: on_mark}


class Backward:
    """One backward program.

    Attributes:
        program: takes pieces (or kept wholes) of ``plan.needed_groups``, forward inputs
            ``plan.reused``, the kept and the returned residuals, the gradients, what earlier
            backwards left waiting, and a zero; returns what ``outputs`` lists.
        outputs: ("piece", group, i) for a reduced gradient, ("partial", group, i) for one not yet
            summed over the replicas, ("whole", group, i) for one kept on this rank, ("input",
            position) for the gradient of another input of forward, ("parameter", group, i) for a
            whole parameter of the groups ``shown``, which stay unsharded.
        gathered: the groups in the order in which they are gathered, once it was compiled.
    """

    def __init__(
        self,
        plan: Plan,
        present: tuple[int, ...],
        reductions: tuple[GroupReduction, ...],
        shown: tuple[int, ...],
    ) -> None:
        self.plan, self.present, self.reductions = plan, present, reductions
        self.shown = shown
        self.gathered: list[int] = []
        self.pull_back = plan.staged.backward(present)
        self._sort_gradients()
        self.program = per_rank_jit(_packed(self._run, "fsdp_backward"), plan.jax_mesh)

    def _sort_gradients(self) -> None:
        """Which gradient outputs belong to which group; unused parameters have none."""
        staged, plan = self.plan.staged, self.plan
        unused = staged.unused(self.present)
        owner = {
            start + i: (g, i)
            for g, (start, _) in enumerate(plan._spans())
            for i in range(plan.sizes[g])
        }
        self.of_group: dict[int, dict[int, int]] = {g: {} for g in range(len(plan.uses))}
        self.of_input: list[tuple[int, int]] = []
        for output, position in enumerate(staged.differentiated):
            if output in unused:
                continue
            if position in owner:
                group, index = owner[position]
                self.of_group[group][index] = output
            else:
                self.of_input.append((position, output))
        self.outputs: list[tuple[Any, ...]] = []
        for g, reduction in enumerate(self.reductions):
            kind = "piece" if reduction.all_reduce else "partial" if reduction.sync else "whole"
            self.outputs += [(kind, g, i) for i in self._indices(g)]
        self.outputs += [("input", position) for position, _ in self.of_input]
        self.outputs += [("parameter", g, i) for g in self.shown for i in range(self.plan.sizes[g])]

    def _indices(self, group: int) -> list[int]:
        """Parameters of ``group`` that have a gradient to return."""
        trainable = self.plan.uses[group].trainable
        return self.reductions[group].indices(self.of_group[group], trainable)

    def _run(self, *inputs: Any) -> list[Any]:
        plan, staged = self.plan, self.plan.staged
        *rest, zero = inputs
        arrays: list[list[Any]] = [[] for _ in plan.uses]
        for g in plan.needed_groups:
            arrays[g] = [rest.pop(0) for _ in range(plan.sizes[g])]
        varying = len(staged.forward.invars) - len(staged.constants)
        others: list[Any] = [None] * varying + staged.constants
        for i in plan.reused:
            others[i] = _unpacked(rest.pop(0), staged.forward.invars[i])
        kept = {v: _unpacked(rest.pop(0), v) for v in (*plan.kept, *plan.returned)}
        given = self.pull_back.invars[len(plan.residuals) :]
        cotangents = [_unpacked(rest.pop(0), v) for v in given]
        waiting = [[rest.pop(0) for _ in (*r.waiting, *r.partial)] for r in self.reductions]
        within = [use.within for use in plan.uses]
        wholes = plan._wholes(arrays, lambda g: plan.uses[g].kept, within, zero)
        forward = Evaluation(
            staged.forward,
            [*wholes.values, *others[plan.num_wholes :]],
            wholes.lazy,
            {MARK: lambda equation, values: None},
        )
        explicit = {g: u.backward_prefetch for g, u in enumerate(plan.uses)}
        entries = [g for g in reversed(plan._entries()) if g in plan.needed_groups]
        self.gathered = wholes.order
        handlers = wholes.issue_at(ENTER_BACKWARD, entries, explicit)
        return self._pull_back(forward, kept, cotangents, waiting, handlers)

    def _pull_back(
        self,
        forward: Evaluation,
        kept: Any,
        cotangents: list[Any],
        waiting: list[list[Any]],
        handlers: Mapping[str, Handler],
    ) -> list[Any]:
        residuals = self.plan.residuals
        values = [kept.get(v) if not isinstance(v, Literal) else v.val for v in residuals]
        lazy: dict[int, Thunk] = {
            i: functools.partial(forward.demand, v)
            for i, v in enumerate(residuals)
            if not isinstance(v, Literal) and v not in kept
        }
        evaluation = Evaluation(self.pull_back, [*values, *cotangents], lazy, handlers)
        reduced: dict[int, list[Any]] = {}
        todo = self._gradients_to_come()

        def on_value(v: Any) -> None:
            for g in todo.pop(v, ()):
                self._pending[g] -= 1
                if self._pending[g] == 0:
                    reduced[g] = self._reduce(g, evaluation, waiting[g])

        evaluation.run(on_value)
        results: list[Any] = []
        for g in range(len(self.reductions)):
            results += reduced[g] if g in reduced else self._reduce(g, evaluation, waiting[g])
        results += [evaluation.value(self.pull_back.outvars[output]) for _, output in self.of_input]
        spans = self.plan._spans()
        inputs = self.plan.staged.forward.invars
        return results + [forward.value(inputs[i]) for g in self.shown for i in range(*spans[g])]

    def _gradients_to_come(self) -> dict[Any, list[int]]:
        """Which groups wait for which variable; a group is reduced when none is left."""
        made = {v for eqn in self.pull_back.eqns for v in eqn.outvars}
        todo: dict[Any, list[int]] = {}
        self._pending = {}
        for g, outputs in self.of_group.items():
            variables = {self.pull_back.outvars[o] for o in outputs.values()} & made
            self._pending[g] = len(variables)
            for v in variables:
                todo.setdefault(v, []).append(g)
        return todo

    def _reduce(self, group: int, evaluation: Evaluation, waiting: list[Any]) -> list[Any]:
        grads = {
            i: evaluation.value(self.pull_back.outvars[output])
            for i, output in self.of_group[group].items()
        }
        use = self.plan.uses[group]
        return self.reductions[group].run(use.spec, grads, waiting, use.trainable)


def _unpacked(x: Any, v: Any) -> Any:
    """Takes away the dim that `_packed` gave to a scalar."""
    return x.reshape(()) if v.aval.ndim == 0 else x


def _packed(fn: Callable[..., Sequence[Any]], name: str) -> Callable[..., list[Any]]:
    """``fn``, named, with scalars in its results given a dim, which carries the mesh axes."""

    def run(*inputs: Any) -> list[Any]:
        return [jnp.asarray(x).reshape(1) if jnp.ndim(x) == 0 else x for x in fn(*inputs)]

    run.__name__ = name
    return run
