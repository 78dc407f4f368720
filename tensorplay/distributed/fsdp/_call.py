"""One run of a staged call: forward now, and backward when the gradients come."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ..._graph import Node
from ..._ops.random import default_generator
from ..._staged import StagedCall, make_result
from ..._state import state as thread
from ..._tensor import Tensor, wrap
from .._spmd import Spread, controlled, launch, shared_program
from .._world import current_world
from ._boundary import RankBoundary
from ._param_group import FSDPParamGroup
from ._programs import Backward, Plan


class Call:
    """One run of a staged call's forward, and what its backward will need."""

    def __init__(
        self,
        boundary: RankBoundary,
        staged: StagedCall,
        plan: Plan,
        frees: list[bool],
        groups: list[FSDPParamGroup],
        arguments: list[Tensor],
        outside: list[Tensor],
    ) -> None:
        self.staged, self.plan, self.groups = staged, plan, groups
        self.frees = frees
        self.arguments, self.outside = arguments, outside
        self.boundary, self.mesh = boundary, boundary.mesh.jax_mesh

    def forward(self, handed: Any) -> Any:
        """Runs the forward program and makes the result; ``handed`` is (args, kwargs)."""
        boundary = self.boundary
        self.inputs = [boundary.same(t._storage.array) for t in self.outside]
        self.inputs += [boundary.argument(i, t._read()) for i, t in enumerate(self.arguments)]
        if self.staged.draws:
            self.inputs.append(self._random_input())
        self.versions = [g.versions() for g in self.groups]
        parameters = [
            x
            for g, use in zip(self.groups, self.plan.uses, strict=True)
            for x in (_wholes(g) if use.given else g.pieces())
        ]
        inputs = [*parameters, *self.inputs, _zero(self.mesh)]
        outputs = launch(self.mesh, self.plan.forward, inputs)
        return self._take(outputs, handed)

    def _random_input(self) -> Spread:
        generator = default_generator()
        high, low = generator.words()
        numbers = [high, low, generator.offset]
        generator.skip(self.staged.draws)
        return self.boundary.random(numbers)

    def _take(self, outputs: list[Spread], handed: Any) -> Any:
        staged, plan = self.staged, self.plan
        rest = iter(outputs)
        values = [next(rest) for _ in range(staged.num_values)]
        for i in staged.written:
            self._write_back(self.outside[i], next(rest).local)
        self.kept = [next(rest) for _ in plan.kept]
        self.kept += [values[i] for i in plan.returned.values()]
        self.stay: list[list[Any]] = [[] for _ in self.groups]
        for n, (group, use) in enumerate(zip(self.groups, plan.uses, strict=True)):
            if use.within:
                self.stay[n] = [next(rest) for _ in group.params]
                group.to_post_forward(use.within, self.stay[n])
            elif use.given and use.kept and not self.frees[n]:
                self.stay[n] = _wholes(group)
            elif use.kept and not use.given:
                self.stay[n] = [next(rest) for _ in group.params]
                group.to_unsharded([w.local for w in self.stay[n]])
            elif use.given:
                group.to_sharded()
        node = CompiledNode(self) if staged.differentiated else None
        arrays = [
            self.boundary.output(v, aval)
            for v, aval in zip(values, staged.value_avals, strict=True)
        ]
        return make_result(staged, arrays, self.arguments, handed, self.outside, node)

    def _write_back(self, tensor: Tensor, array: Any) -> None:
        tensor._storage.array = array.reshape(tensor._storage.array.shape)
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
            arguments += self._gatherable(n)
        arguments += [self.inputs[i - self.plan.num_wholes] for i in self.plan.reused]
        arguments += self.kept
        arguments += [self.boundary.gradient_of_output(g._read()) for g in grads if g is not None]
        for group, how in zip(self.groups, reductions, strict=True):
            arguments += group.take_waiting(how)
        arguments.append(_zero(self.mesh))
        outputs = launch(self.mesh, program.program, arguments)
        for group in self.groups:
            if group.reshard_after_backward:
                group.to_sharded()
        return self._gradients(program, outputs)

    def _gatherable(self, n: int) -> list[Any]:
        """What backward gets of a group: what stayed, or the pieces to gather from."""
        use = self.plan.uses[n]
        if self.stay[n]:
            return self.stay[n]
        pieces = self.groups[n].pieces()  # those of forward: changed ones were refused
        return self.groups[n].gathered(pieces) if use.kept else pieces

    def _refuse_changed_shards(self) -> None:
        """Raises RuntimeError if shards that have to be gathered again changed since forward."""
        for n in self.plan.needed_groups:
            group = self.groups[n]
            stays = bool(self.stay[n])
            if not (group.unshard_in_backward or (stays and self.plan.uses[n].kept)):
                raise RuntimeError(
                    f"backward needs the parameters {group.names}, but "
                    "set_unshard_in_backward(False) forbids to gather them: set it to True"
                )
            if stays or group.versions() == self.versions[n]:
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
                by_place[place[1]] = wrap(self._gradient_of_input(place[1], spread))
        for n, wholes in parameters.items():
            self.groups[n].to_unsharded(wholes)
        for n, group in enumerate(self.groups):
            for i, grad in enumerate(group.reduce_kept()):
                if grad is not None:
                    by_place[n, i] = grad
        return [by_place.get(place) for place in self._places()]

    def _gradient_of_input(self, position: int, spread: Spread) -> Any:
        aval = self.staged.forward.invars[position].aval
        first = self.plan.num_wholes + self.staged.num_outside
        return self.boundary.gradient_of_argument(spread, aval, position - first)

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
        self.kept, self.inputs, self.stay = [], [], []


class CompiledNode(Node):
    """The backward step of a compiled call."""

    saved = ("call",)

    def __init__(self, call: Call) -> None:
        super().__init__(call.edges(), len(call.staged.differentiable))
        self.call: Call | None = call

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


def _wholes(group: FSDPParamGroup) -> list[Any]:
    return [p.unsharded._storage.array for p in group.params]  # type: ignore[union-attr]


def _zero(mesh: Any) -> Any:
    """The zero that XLA does not know of; see ``depending_on``."""
    device = current_world().device
    zero = shared_program(("zero", device), lambda: jax.device_put(np.zeros(1, np.uint32), device))
    if not controlled(mesh):
        return zero
    return shared_program(("zero", mesh), lambda: Spread.of_local(mesh, zero))
