"""FSDPParamGroup: the parameters that one ``fully_shard`` call owns, and their common state."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._graph import Node
from ..._state import state as thread
from ..._tensor import Tensor
from ...nn._module import Module
from ...nn._parameter import Parameter
from .._layout import Layout
from .._spmd import Spread, launch, per_rank_jit, shared_program
from ..device_mesh import DeviceMesh
from ._api import MixedPrecisionPolicy
from ._collectives import GroupSpec, gather, part
from ._comms import CustomComms, gather_in_python, reduce_in_python
from ._mesh import DataParallelMesh
from ._param import FSDPParam
from ._reduction import GroupReduction


class ShardedState(enum.Enum):
    """What the modules' attributes show.

    SHARDED: the sharded parameters; only the pieces take memory.
    UNSHARDED: the unsharded parameters; the gathered wholes take memory too.
    POST_FORWARD: parameters over larger pieces, which a few neighbouring ranks share; they take
        memory too, until backward.
    """

    SHARDED = enum.auto()
    POST_FORWARD = enum.auto()
    UNSHARDED = enum.auto()


class FSDPParamGroup:
    """The unit of communication: one all-gather, one reduction.

    Attributes:
        params: in the order of the flat buffer.
        modules: the modules of the ``fully_shard`` call.
        mesh: the data-parallel mesh.
        policy: the mixed-precision policy.
        state: what the modules show.
        requires_gradient_sync: reduce in backward; otherwise whole gradients are kept on each rank.
        unreduced: whole gradients kept that way, by position in ``params``.
        requires_all_reduce: sum over the replicas of a hybrid mesh too; otherwise pieces that are
            summed over the shard axis only are kept.
        partial: pieces kept that way, by position in ``params``.
        reshard_after_backward: show the shards again when backward is through.
        unshard_in_backward: backward may gather the parameters again.
        reduce_unused: give parameters that no gradient reached a gradient of zeros.
        forward_prefetch, backward_prefetch: groups to gather ahead when this one is entered; None
            for the next one.
        divide_factor: the ranks' summed gradients are divided by it; None is their number.
        comms: collectives and hooks of the user's own.
    """

    def __init__(
        self,
        params: list[FSDPParam],
        modules: Sequence[Module],
        mesh: DataParallelMesh,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.params, self.modules, self.mesh, self.policy = params, list(modules), mesh, policy
        self.state = ShardedState.SHARDED
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.reshard_after_backward = True
        self.reduce_unused = False
        self.unshard_in_backward = True
        self.forward_prefetch: list[FSDPParamGroup] | None = None
        self.backward_prefetch: list[FSDPParamGroup] | None = None
        self.divide_factor: float | None = None
        self.unreduced: dict[int, Spread] = {}
        self.partial: dict[int, Spread] = {}
        self.comms = CustomComms()
        self._post_forward_meshes: dict[int, DeviceMesh] = {}
        self._sources: list[Any] = []
        self._traced: list[Parameter] = []
        self._spec: tuple[Any, GroupSpec] | None = None

    @property
    def spec(self) -> GroupSpec:
        """What the collectives need to know, from the parameters as they are now."""
        params = tuple(p.spec(self.policy) for p in self.params)
        key = (params, self.divide_factor)
        if self._spec is None or self._spec[0] != key:
            dtype = self.policy.reduce_dtype
            mesh = self.mesh
            self._spec = (
                key,
                GroupSpec(
                    params,
                    mesh.shard_axis,
                    mesh.shard_size,
                    mesh.replicate_axis,
                    mesh.replicate_size,
                    None if dtype is None else dtype.name,
                    self.divide_factor,
                    mesh.reduces_by_ring,
                ),
            )
        return self._spec[1]

    @property
    def names(self) -> list[str]:
        return [p.name for p in self.params]

    def trainable(self) -> list[int]:
        """Positions of the parameters that require grad."""
        return [i for i, p in enumerate(self.params) if p.trainable]

    def pieces(self) -> list[Any]:
        """The ``Spread`` of each sharded parameter."""
        return [p.sharded._storage.spread for p in self.params]  # type: ignore[attr-defined]

    def _values(self) -> list[Any]:
        """Other objects than before once shards were written to."""
        return [p.sharded._storage.value for p in self.params]  # type: ignore[attr-defined]

    def versions(self) -> list[Any]:
        """Equal to an earlier answer as long as no sharded parameter was written to."""
        return [p.version() for p in self.params]

    def adopt_replacements(self) -> None:
        """Takes up parameters that the user put in the place of sharded ones."""
        for p in self.params:
            module, name = p.owners[0]
            if module._parameters.get(name) is not self._shown(p):
                p.adopt_replacement()

    def _shown(self, p: FSDPParam) -> Parameter:
        """What the modules show of a parameter."""
        shown = {
            ShardedState.SHARDED: p.sharded,
            ShardedState.UNSHARDED: p.unsharded,
            ShardedState.POST_FORWARD: p.post_forward,
        }[self.state]
        assert shown is not None
        return shown

    def refuse_meta(self) -> None:
        """Raises RuntimeError if parameters have no values yet."""
        names = [p.name for p in self.params if p.sharded.is_meta]
        if names:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the "
                f"following were still on meta device: {names}. Call model.to_empty(device=...) "
                "and initialise the values, or load a state dict, before the forward."
            )

    # --- transitions -------------------------------------------------------------------------

    def to_unsharded(self, wholes: Sequence[Any] | None = None) -> None:
        """Shows the unsharded parameters, gathering them unless ``wholes`` has them."""
        if wholes is None and self.is_current():
            return
        self.to_sharded()
        self.adopt_replacements()
        self.refuse_meta()
        found = self.gathered(self.pieces()) if wholes is None else wholes
        edges = UnshardedNode(self).edges()
        for i, (p, whole) in enumerate(zip(self.params, found, strict=True)):
            p.unsharded = p.make_unsharded(whole, edges.get(i))
            p.show(p.unsharded)
        self._sources = self._values()
        self.state = ShardedState.UNSHARDED
        self._on_write(self._wholes_are_stale)

    def to_sharded(self) -> None:
        """Shows the sharded parameters and frees the wholes."""
        if self.state is ShardedState.SHARDED:
            return
        self.adopt_replacements()
        for p in self.params:
            p.show(p.sharded)
            p.unsharded = p.post_forward = None
        self._sources = []
        self.state = ShardedState.SHARDED
        self._on_write(None)

    def to_post_forward(self, within: int, pieces: Sequence[Spread] | None = None) -> None:
        """Shows the pieces that every ``within`` neighbouring ranks share, and frees the wholes.

        Args:
            pieces: as a program made them; by default they are cut from the wholes that are shown.
        """
        if pieces is None:
            pieces = self._cut_wholes(within)
        self.to_sharded()
        if within not in self._post_forward_meshes:
            self._post_forward_meshes[within] = self.mesh.post_forward(within)
        mesh = self._post_forward_meshes[within]
        axis = mesh.axis_names[1]
        for p, piece in zip(self.params, pieces, strict=True):
            layout = Layout.over_axis(mesh, axis, p.layout.global_shape, p.layout.dim)
            same = Spread.of_held(layout.jax_mesh, piece.held)
            p.post_forward = p.make_post_forward(layout, same)
            p.show(p.post_forward)
        self._sources = self._values()
        self.state = ShardedState.POST_FORWARD
        self._on_write(self._wholes_are_stale)

    def _cut_wholes(self, within: int) -> list[Spread]:
        spec, mesh = self.spec, self.mesh.jax_mesh

        def build() -> Any:
            return per_rank_jit(lambda *wholes: part(spec, wholes, within), mesh)

        wholes = [p.unsharded._storage.array for p in self.params]  # type: ignore[union-attr]
        return launch(mesh, shared_program(("part", mesh, spec, within), build), wholes)

    def _on_write(self, action: Callable[[], None] | None) -> None:
        for p in self.params:
            p.sharded._storage.on_write = action  # type: ignore[attr-defined]

    def _wholes_are_stale(self) -> None:
        """A step changed the shards: the wholes that modules show are of no use any more."""
        if any(a is not b for a, b in zip(self._sources, self._values(), strict=True)):
            self.to_sharded()

    def trainable_flags(self) -> list[bool]:
        """For each parameter whether it requires grad."""
        return [p.trainable for p in self.params]

    def whole_avals(self) -> list[Any]:
        """Shape and dtype of each unsharded parameter."""
        return [jax.ShapeDtypeStruct(p.shape, np.dtype(p.compute_dtype)) for p in self.spec.params]

    def show_traced(self, wholes: Sequence[Any]) -> None:
        """Shows unsharded parameters over tracers while a call is traced."""
        if not self._traced:
            node = thread.trace.node
            self._traced = [
                p.make_unsharded(whole, (node, 0))
                for p, whole in zip(self.params, wholes, strict=True)
            ]
        for p, param in zip(self.params, self._traced, strict=True):
            p.show(param)

    def hide_traced(self) -> None:
        """Shows what was shown before ``show_traced``."""
        for p in self.params:
            p.show(self._shown(p))

    def end_trace(self) -> None:
        """Drops the tracers of a trace that ended."""
        self._traced = []

    def is_current(self) -> bool:
        """Whether the unsharded parameters were gathered from the shards as they are now."""
        return self.state is ShardedState.UNSHARDED and all(
            a is b for a, b in zip(self._sources, self._values(), strict=True)
        )

    def gathered(self, pieces: list[Any]) -> list[Any]:
        """This rank's whole parameters, from the ``Spread`` of each sharded parameter."""
        spec = self.spec
        if self.comms.all_gather is not None:
            own = [piece.local for piece in pieces]
            return gather_in_python(self.comms.all_gather, spec, self.mesh, own)

        def build() -> Any:
            def fsdp_all_gather(*arrays: Any) -> Any:
                return gather(spec, arrays)

            return per_rank_jit(fsdp_all_gather, self.mesh.jax_mesh)

        program = shared_program(("gather", self.mesh.jax_mesh, spec), build)
        return [s.local for s in launch(self.mesh.jax_mesh, program, pieces)] if pieces else []

    # --- gradients ---------------------------------------------------------------------------

    def reduction(self) -> GroupReduction:
        """What the programs of the backward that starts now do with this group's gradients."""
        if not self.requires_gradient_sync or self.comms.reduces:
            return GroupReduction(False, False, (), (), False)
        return GroupReduction(
            True,
            self.requires_all_reduce,
            tuple(sorted(self.unreduced)),
            tuple(sorted(self.partial)),
            self.reduce_unused,
        )

    def take_waiting(self, how: GroupReduction) -> list[Spread]:
        """What earlier backwards left for ``how``, in its order; it is left no more."""
        if not how.sync:
            return []
        unreduced, self.unreduced = self.unreduced, {}
        partial, self.partial = self.partial, {}
        return [unreduced[i] for i in how.waiting] + [partial[i] for i in how.partial]

    def keep_partial(self, index: int, piece: Spread) -> None:
        """Keeps a piece for the next reduction over the replicas."""
        self.partial[index] = piece

    def reduce_eagerly(self, grads: list[Any]) -> list[Tensor | None]:
        """Gradients of the shards from whole gradients (arrays, None where there is none).

        Returns None for every parameter while synchronisation is off.
        """
        how, out = self.reduction(), [None] * len(grads)
        present = tuple(i for i, g in enumerate(grads) if g is not None)
        if not how.sync:
            for i in present:
                self.keep_unreduced(i, Spread.of_local(self.mesh.jax_mesh, grads[i]))
            return self.reduce_kept()
        arrays = [*(grads[i] for i in present), *self.take_waiting(how)]
        indices = how.indices(present, self.trainable())
        if not indices:
            return list(out)
        return self._placed(how, indices, self._launch_reduce(how, present, arrays))

    def reduce_kept(self) -> list[Tensor | None]:
        """Gradients of the shards from the whole gradients that are kept, by the user's Python."""
        out: list[Tensor | None] = [None] * len(self.params)
        if not (self.requires_gradient_sync and self.comms.reduces):
            return out
        spec = self.spec
        kept, self.unreduced = self.unreduced, {}
        partial, self.partial = self.partial, {}
        grads = {i: spread.local for i, spread in kept.items()}
        if self.reduce_unused:
            for i in self.trainable():
                if i not in grads and i not in partial:
                    p = spec.params[i]
                    grads[i] = jnp.zeros(p.shape, p.compute_dtype)
        pieces = reduce_in_python(
            self.comms,
            spec,
            self.mesh,
            grads,
            {i: spread.local for i, spread in partial.items()},
            self.requires_all_reduce,
        )
        spreads = {i: Spread.of_local(self.mesh.jax_mesh, p) for i, p in pieces.items()}
        how = dataclasses.replace(self.reduction(), all_reduce=self.requires_all_reduce)
        return self._placed(how, list(spreads), list(spreads.values()))

    def _placed(
        self, how: GroupReduction, indices: list[int], pieces: list[Spread]
    ) -> list[Tensor | None]:
        out: list[Tensor | None] = [None] * len(self.params)
        for i, piece in zip(indices, pieces, strict=True):
            if how.all_reduce:
                out[i] = self.params[i].layout.tensor(piece)
            else:
                self.keep_partial(i, piece)
        return out

    def _launch_reduce(
        self, how: GroupReduction, present: tuple[int, ...], arrays: list[Any]
    ) -> list[Spread]:
        spec, trainable = self.spec, tuple(self.trainable())

        def build() -> Any:
            def fsdp_reduce_scatter(*inputs: Any) -> Any:
                grads = dict(zip(present, inputs[: len(present)], strict=True))
                return how.run(spec, grads, list(inputs[len(present) :]), trainable)

            return per_rank_jit(fsdp_reduce_scatter, self.mesh.jax_mesh)

        key = ("reduce", self.mesh.jax_mesh, spec, how, present, trainable)
        return launch(self.mesh.jax_mesh, shared_program(key, build), arrays)

    def keep_unreduced(self, index: int, grad: Spread) -> None:
        """Adds a whole gradient to those that wait for the next reduction."""
        kept = self.unreduced.get(index)
        if kept is not None:
            grad = Spread.of_held(self.mesh.jax_mesh, _add(kept.held, grad.held))
        self.unreduced[index] = grad

    def accumulator_edges(self) -> list[Any]:
        """Where the gradient of each sharded parameter goes; None for frozen ones."""
        return [p.sharded._edge() for p in self.params]


class UnshardedNode(Node):
    """The step from whole gradients to the shards' gradients of a group unsharded eagerly."""

    recorded = False  # a module that runs again may find its parameters unsharded

    def __init__(self, group: FSDPParamGroup) -> None:
        super().__init__(group.accumulator_edges(), len(group.params))
        self.group = group

    def name(self) -> str:
        return "FSDPUnshardBackward"

    def edges(self) -> dict[int, Any]:
        """Position of each trainable parameter to the edge of its unsharded form."""
        return {i: (self, i) for i in self.group.trainable()}

    def backward(self, grads: list[Any]) -> list[Any]:
        wholes = [None if g is None else g._read() for g in grads]
        reduced = self.group.reduce_eagerly(wholes)
        if self.group.reshard_after_backward:
            self.group.to_sharded()
        return list(reduced)


_add = jax.jit(lambda a, b: a + b)
