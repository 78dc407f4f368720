"""``explain``: what a sharded model's step communicates and holds, without running it.

The figures are read off the programs that a call would run, traced against an abstract mesh. So the
number of ranks may be any; neither devices nor memory are needed for them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from ..._staged import Fingerprint, StagedCall
from ..._structure import flatten
from .._chunks import own_rows, piece_shape
from ._boundary import boundary_of
from ._collectives import GroupSpec
from ._module import FSDPModule
from ._param_group import FSDPParamGroup
from ._programs import GroupUse, Plan
from ._request import Eagerly, Request, tracing_lock
from ._state import FSDPState, states_below

_LAYOUT_OPS = frozenset(
    {"slice", "dynamic_slice", "reshape", "transpose", "squeeze", "broadcast_in_dim", "pad",
     "bitcast_convert_type", "concatenate", "gather", "copy"}
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ParameterReport:
    """One parameter.

    Attributes:
        name: full name.
        shape: of the whole.
        first_shape, last_shape: of the first and the last rank's rows.
        dtype, compute_dtype: of the shard (and its gradient and optimizer state), and of the whole
            while it computes.
        trainable: requires grad.
    """

    name: str
    shape: tuple[int, ...]
    first_shape: tuple[int, ...]
    last_shape: tuple[int, ...]
    dtype: str
    compute_dtype: str
    trainable: bool


@dataclasses.dataclass(frozen=True)
class GroupReport:
    """One group.

    Attributes:
        modules: class names.
        parameters: in the order of its buffer.
        shard_bytes: of one rank's (padded) rows, in their own dtype.
        whole_bytes: of the unsharded parameters, in their compute dtype.
        reduce_dtype: of the gradient reduction.
        gathers_forward, gathers_backward, reductions: how often, in one step.
    """

    modules: tuple[str, ...]
    parameters: tuple[ParameterReport, ...]
    shard_bytes: int
    whole_bytes: int
    reduce_dtype: str
    gathers_forward: int
    gathers_backward: int
    reductions: int


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """One program, as one rank runs it.

    Attributes:
        gathers, reductions, all_reduces: number of collectives; a reduction is a reduce-scatter.
        gathered_bytes: received in all-gathers: (W - 1) / W of the buffers' bytes.
        reduced_bytes: sent in reduce-scatters: (W - 1) / W of the buffers' bytes.
        all_reduced_bytes: of the buffers summed over replicas.
        peak_unsharded_bytes: of gathered parameters that are live at once.
        text: the program in StableHLO.
    """

    gathers: int
    gathered_bytes: int
    reductions: int
    reduced_bytes: int
    all_reduces: int
    all_reduced_bytes: int
    peak_unsharded_bytes: int
    text: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Report:
    """What `explain` finds; ``str(report)`` is the readable form.

    Attributes:
        shard_ranks, replicate_ranks: sizes of the mesh's axes.
        groups: in the order of the module tree.
        forward, backward: the programs of a step; ``backward`` is None where nothing is trained.
        kept_bytes: of activations and other residuals that forward keeps on each rank.
    """

    shard_ranks: int
    replicate_ranks: int
    groups: tuple[GroupReport, ...]
    forward: ProgramReport
    backward: ProgramReport | None
    kept_bytes: int

    @property
    def peak_unsharded_bytes(self) -> int:
        """The larger of the two programs'."""
        return max(p.peak_unsharded_bytes for p in (self.forward, self.backward) if p is not None)

    @property
    def shard_bytes(self) -> int:
        """Of all groups' rows on one rank."""
        return sum(group.shard_bytes for group in self.groups)

    def __str__(self) -> str:
        ranks = f"{self.shard_ranks} ranks"
        if self.replicate_ranks > 1:
            ranks = f"{self.replicate_ranks} replicas of {ranks}"
        lines = [
            f"{len(self.groups)} groups over {ranks}; each rank holds {_size(self.shard_bytes)}"
        ]
        for number, group in enumerate(self.groups):
            lines += _group_lines(number, group)
        lines.append("one step, on each rank:")
        for name, program in (("forward", self.forward), ("backward", self.backward)):
            if program is not None:
                lines.append(_program_line(name, program))
        lines.append(f"  kept between them: {_size(self.kept_bytes)} of activations")
        return "\n".join(lines)


def _group_lines(number: int, group: GroupReport) -> list[str]:
    lines = [
        f"group {number}: {', '.join(group.modules)}; {_size(group.whole_bytes)} unsharded, "
        f"{_size(group.shard_bytes)} on each rank; gathered {group.gathers_forward}x in forward, "
        f"{group.gathers_backward}x in backward, reduced {group.reductions}x"
    ]
    for p in group.parameters:
        rows = f"{p.first_shape}"
        if p.last_shape != p.first_shape:
            rows += f" to {p.last_shape}"
        dtypes = f"{p.dtype}, computes in {p.compute_dtype}"
        dtypes += f", reduced in {group.reduce_dtype}" if p.trainable else ", frozen"
        lines.append(f"  {p.name}: {p.shape} -> {rows}; {dtypes}")
    return lines


def _program_line(name: str, program: ProgramReport) -> str:
    text = f"  {name}: {program.gathers} all-gathers receive {_size(program.gathered_bytes)}"
    if program.reductions:
        text += f", {program.reductions} reduce-scatters send {_size(program.reduced_bytes)}"
    if program.all_reduces:
        text += f", {program.all_reduces} all-reduces of {_size(program.all_reduced_bytes)}"
    return f"{text}; at most {_size(program.peak_unsharded_bytes)} unsharded at once"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def explain(
    model: Any, *example_inputs: Any, world_size: int | tuple[int, int] | None = None, **kwargs: Any
) -> Report:
    """Reports what one training step of a sharded model communicates and holds.

    Nothing runs and nothing is communicated, so one rank may call it alone.

    Args:
        model: the root, to which ``fully_shard`` was applied.
        example_inputs, kwargs: as for a call of the model, with one rank's batch.
        world_size: report for so many ranks in place of those of the model's mesh; (replicas,
            shards) for hybrid sharding.

    Returns:
        A `Report`: ``print`` it, or read its fields.

    Raises:
        TypeError: ``model`` is not an FSDP module.
        RuntimeError: its forward cannot be compiled, and why.
    """
    if not isinstance(model, FSDPModule):
        raise TypeError(f"explain takes a model that fully_shard was applied to, got {type(model)}")
    state = model._fsdp_state
    state.lazy_init()
    groups = state.groups()
    if state.mixes_meshes():
        raise RuntimeError(
            f"{type(model).__name__} has no compiled programs to explain: it contains FSDP modules "
            "over another mesh, and runs eagerly; explain those modules"
        )
    mesh, uses = _as_if(state, groups, world_size)
    staged = _staged(model, state, example_inputs, kwargs, mesh)
    plan = Plan(staged, uses, mesh)
    backward = None
    if staged.differentiated:
        backward = plan.backward(staged.differentiable, tuple(g.reduction() for g in groups), ())
    forward_report = _program_report(plan.forward, _avals(mesh, _forward_inputs(plan)), uses)
    backward_report = None
    if backward is not None:
        inputs = _avals(mesh, _backward_inputs(plan, staged))
        backward_report = _program_report(backward.program, inputs, uses)
    kept = [v.aval for v in (*plan.kept, *plan.returned)]
    return Report(
        uses[0].spec.shard_size if uses else 1,
        uses[0].spec.replicate_size if uses else 1,
        tuple(
            _group_report(group, use, n, plan, backward)
            for n, (group, use) in enumerate(zip(groups, uses, strict=True))
        ),
        forward_report,
        backward_report,
        sum(a.size * a.dtype.itemsize for a in kept),
    )


def _staged(model: Any, state: FSDPState, args: Any, kwargs: Any, mesh: AbstractMesh) -> StagedCall:
    tensors, structure = flatten((args, kwargs))
    call = super(FSDPModule, model).__call__  # type: ignore[misc]
    boundary = boundary_of(state.mesh, tensors)
    with tracing_lock:
        fingerprint = Fingerprint(model)
        staged = Request(state, call, tensors, structure, fingerprint, boundary, mesh).stage()
    if isinstance(staged, Eagerly):
        raise RuntimeError(
            f"{type(model).__name__} has no compiled programs to explain: it runs eagerly, as its "
            f"forward {staged.reason}"
        )
    return staged


def _as_if(
    state: FSDPState, groups: list[FSDPParamGroup], world_size: int | tuple[int, int] | None
) -> tuple[AbstractMesh, tuple[GroupUse, ...]]:
    """The mesh and the groups' uses with other numbers of ranks."""
    mesh = state.mesh
    if world_size is None:
        sizes = (mesh.replicate_size, mesh.shard_size)
    else:
        sizes = (1, world_size) if isinstance(world_size, int) else world_size
    replicate_axis = mesh.replicate_axis or ("replicate" if sizes[0] > 1 else None)
    keeps = {s.group: s for s in _states(state)}
    uses = []
    for group in groups:
        spec = dataclasses.replace(
            group.spec,
            replicate_axis=replicate_axis,
            replicate_size=sizes[0],
            shard_size=sizes[1],
            ring=False,
        )
        own = keeps[group]
        within = own.within if own.within and sizes[1] % own.within == 0 else 0
        uses.append(GroupUse(spec, False, not own.reshards(), within, tuple(group.trainable())))
    if replicate_axis is None:
        return AbstractMesh(sizes[1:], (mesh.shard_axis,)), tuple(uses)
    return AbstractMesh(sizes, (replicate_axis, mesh.shard_axis)), tuple(uses)


def _states(state: FSDPState) -> list[FSDPState]:
    return [s for s in states_below(state.module) if s.group is not None]


def _avals(mesh: AbstractMesh, shapes: Sequence[Any]) -> list[Any]:
    """Global shapes of per-rank ones; scalars have a dim."""
    ranks = math.prod(mesh.axis_sizes)
    return [
        jax.ShapeDtypeStruct(((s.shape or (1,))[0] * ranks, *s.shape[1:]), s.dtype) for s in shapes
    ]


def _pieces(spec: GroupSpec) -> list[Any]:
    return [
        jax.ShapeDtypeStruct(spec.piece_shape(i), np.dtype(p.dtype))
        for i, p in enumerate(spec.params)
    ]


def _wholes(spec: GroupSpec) -> list[Any]:
    return [jax.ShapeDtypeStruct(p.shape, np.dtype(p.compute_dtype)) for p in spec.params]


_ZERO = jax.ShapeDtypeStruct((1,), np.uint32)


def _other_inputs(plan: Plan) -> list[Any]:
    """Of forward, but for the parameters; the random state is left out where nothing is drawn."""
    staged = plan.staged
    varying = len(staged.forward.invars) - len(staged.constants)
    others = [v.aval for v in staged.forward.invars[plan.num_wholes : varying]]
    return others if staged.draws else others[:-1]


def _forward_inputs(plan: Plan) -> list[Any]:
    parameters = [piece for use in plan.uses for piece in _pieces(use.spec)]
    return [*parameters, *_other_inputs(plan), _ZERO]


def _backward_inputs(plan: Plan, staged: StagedCall) -> list[Any]:
    found: list[Any] = []
    for g in plan.needed_groups:
        use = plan.uses[g]
        if use.within:
            shapes = [piece_shape(p.shape, p.dim, use.within) for p in use.spec.params]
            found += [
                jax.ShapeDtypeStruct(shape, np.dtype(p.compute_dtype))
                for shape, p in zip(shapes, use.spec.params, strict=True)
            ]
        else:
            found += _wholes(use.spec) if use.kept else _pieces(use.spec)
    others = _other_inputs(plan)
    found += [others[i - plan.num_wholes] for i in plan.reused]
    found += [v.aval for v in (*plan.kept, *plan.returned)]
    found += [staged.value_avals[i] for i in staged.differentiable]
    return [*found, _ZERO]


def _group_report(
    group: FSDPParamGroup, use: GroupUse, number: int, plan: Plan, backward: Any
) -> GroupReport:
    spec = use.spec
    parameters = tuple(
        ParameterReport(
            param.name,
            p.shape,
            _rows(p.shape, p.dim, spec.shard_size, 0),
            _rows(p.shape, p.dim, spec.shard_size, spec.shard_size - 1),
            p.dtype,
            p.compute_dtype,
            param.trainable,
        )
        for param, p in zip(group.params, spec.params, strict=True)
    )
    outputs = [] if backward is None else backward.outputs
    return GroupReport(
        tuple(type(m).__name__ for m in group.modules),
        parameters,
        sum(s.size * s.dtype.itemsize for s in _pieces(spec)),
        sum(s.size * s.dtype.itemsize for s in _wholes(spec)),
        spec.reduce_dtype or spec.params[0].compute_dtype,
        plan.gathered.count(number),
        0 if backward is None else backward.gathered.count(number),
        int(("piece", number) in {place[:2] for place in outputs}),
    )


def _rows(shape: tuple[int, ...], dim: int, ranks: int, index: int) -> tuple[int, ...]:
    return (*shape[:dim], own_rows(shape[dim], ranks, index), *shape[dim + 1 :])


# --- reading programs ----------------------------------------------------------------------------


def _program_report(jitted: Any, inputs: list[Any], uses: Sequence[GroupUse]) -> ProgramReport:
    with jax.enable_x64(True):
        traced = jitted.trace(*inputs)
        text = traced.lower(lowering_platforms=("cpu",)).as_text()
    axis = uses[0].spec.shard_axis if uses else ""
    program = _per_rank(traced.jaxpr)
    gathers = [e for e in program.eqns if e.primitive.name == "all_gather" and _along(e, axis)]
    scatters = [e for e in program.eqns if e.primitive.name == "reduce_scatter" and _along(e, axis)]
    sums = [e for e in program.eqns if e.primitive.name.startswith("psum") and not _along(e, axis)]
    received = sum(_bytes(e.outvars[0]) - _bytes(e.invars[0]) for e in gathers)
    return ProgramReport(
        len(gathers),
        received,
        len(scatters),
        sum(_bytes(e.invars[0]) - _bytes(e.outvars[0]) for e in scatters),
        len(sums),
        sum(_bytes(v) for e in sums for v in e.invars),
        _peak(program, gathers),
        text,
    )


def _per_rank(closed: Any) -> Any:
    """What one rank runs: the program inside the ``shard_map``."""
    program = getattr(closed, "jaxpr", closed)
    while len(program.eqns) == 1 and program.eqns[0].primitive.name in ("shard_map", "jit", "pjit"):
        inner = program.eqns[0].params["jaxpr"]
        program = getattr(inner, "jaxpr", inner)
    return program


def _along(equation: Any, axis: str) -> bool:
    names = equation.params.get("axis_name", equation.params.get("axes"))
    return axis in (names if isinstance(names, (tuple, list)) else (names,))


def _bytes(v: Any) -> int:
    return int(v.aval.size) * v.aval.dtype.itemsize


def _peak(program: Any, gathers: Sequence[Any]) -> int:
    """Bytes of gathered buffers that are live at once, in the order of the program."""
    owner = {e.outvars[0]: n for n, e in enumerate(gathers)}
    first = {n: i for i, e in enumerate(program.eqns) for n, g in enumerate(gathers) if e is g}
    last = dict(first)
    for i, eqn in enumerate(program.eqns):
        used = {owner[v] for v in eqn.invars if not hasattr(v, "val") and v in owner}
        for n in used:
            last[n] = i
        if len(used) == 1 and eqn.primitive.name in _LAYOUT_OPS:
            owner.update(dict.fromkeys(eqn.outvars, *used))
    for v in program.outvars:
        if not hasattr(v, "val") and v in owner:
            last[owner[v]] = len(program.eqns)
    sizes = [_bytes(e.outvars[0]) for e in gathers]
    live = [
        sum(size for n, size in enumerate(sizes) if first[n] <= i <= last[n])
        for i in first.values()
    ]
    return max(live, default=0)
