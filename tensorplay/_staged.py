"""Staging a module call: what identifies it, and tracing it into programs.

A call is identified by its *signature* (structure, shapes and dtypes of the arguments, grad mode)
and its *fingerprint* (what the Python could read of the module tree, compared by value). A
*staged call* is what one trace yields: a forward program, for each set of output gradients a
backward program, and how to put the results together. It refers to parameters and buffers by
position only, so that all ranks of a process can share it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from ._freeze import Freezer, Snapshot
from ._guards import Reads, Watch
from ._ops.precision import get_float32_matmul_precision
from ._ops.random import default_generator
from ._ops.views import view_through
from ._program import dependencies, depends, per_rank_program
from ._state import state
from ._structure import (
    Constant,
    Container,
    Leaf,
    constants,
    containers,
    flatten,
    unflatten,
)
from ._tensor import Storage, Tensor
from ._trace import Trace, Untraceable
from .nn._module import Module, global_call_hooks

# --- what identifies a call ----------------------------------------------------------------------


def signature(tensors: Sequence[Tensor], structure: Any) -> Any:
    """What of a call's arguments and modes a trace depends on; hashable.

    Raises:
        Unfrozen: an argument cannot be compared by value.
    """
    return (
        tuple(
            (
                f"argument {i}",
                ("shape", t._array_shape()),
                ("dtype", t._storage.array.dtype),
                ("requires_grad", t.requires_grad),
                ("is_leaf", t._grad_fn is None),
                type(t),
            )
            for i, t in enumerate(tensors)
        ),
        ("arguments", _frozen_structure(structure, Freezer())),
        ("grad mode", state.grad_enabled),
        ("inference mode", state.inference),
        ("default dtype", state.default_dtype),
        ("float32 matmul precision", get_float32_matmul_precision()),
    )


def _frozen_structure(spec: Any, freezer: Freezer) -> Any:
    if isinstance(spec, Leaf):
        return spec.index
    if isinstance(spec, Constant):
        return ("constant", freezer.freeze(spec.value))
    assert isinstance(spec, Container)
    return (spec.kind, spec.keys, tuple(_frozen_structure(c, freezer) for c in spec.children))


class Fingerprint:
    """What a forward could read of a module tree, by value.

    Attributes:
        key: hashable; equal where the trees are equal.
        tensors: the tensors of the tree that are not sharded, one per storage: outside tensors.
        snapshot: the mutable objects met, to see changes.

    Raises:
        Unfrozen: an attribute cannot be compared by value; the message names it.
    """

    def __init__(self, root: Module) -> None:
        self.freezer = Freezer()
        self.key = (self.freezer.freeze(root), self.freezer.freeze(global_call_hooks()))
        self.snapshot = Snapshot(self.freezer)
        self.tensors = distinct(t for t in self.freezer.tensors if t._gradient_edge is None)


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The plain tensors with values, the first of each storage."""
    found: dict[Storage, Tensor] = {}
    for t in tensors:
        if t._layout is None and not t.is_meta:
            found.setdefault(t._storage, t)
    return list(found.values())


def first_difference(old: Any, new: Any) -> str:
    """Words for the first place where two signatures or fingerprints differ."""
    if isinstance(old, tuple) and isinstance(new, tuple):
        if len(old) == len(new) > 0:
            name = old[0] if isinstance(old[0], str) and old[0] == new[0] else ""
            for a, b in zip(old, new, strict=True):
                if a != b:
                    below = first_difference(a, b)
                    return f"{name}: {below}" if name and name not in _NOT_NAMES else below
        if len(old) == len(new):
            return ""
    return f"{_short(old)} became {_short(new)}"


_NOT_NAMES = frozenset({"constant", "class", "function", "module", "guard", "tensor"})


def _short(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
        value = np.frombuffer(value[1])[0] if value[0] is float else value[1]
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."


# --- what a trace yields -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OutputTensor:
    """How one tensor of the result is made.

    Attributes:
        kind: "value" (from an output array of the program), "argument" (the caller's own tensor) or
            "outside" (a tensor of the module).
        index: of the array, the argument or the outside tensor.
        chain: views to take of the value.
        requires_grad: whether the tensor is part of the graph.
    """

    kind: str
    index: int
    chain: Any = ()
    requires_grad: bool = False


@dataclasses.dataclass
class StagedCall:
    """One traced call; see the module's docstring.

    Inputs of ``forward``: the whole parameters of all groups, the outside tensors, the arguments,
    the random state, the constants. Its outputs: ``num_values`` output arrays, the new values of
    ``written`` outside tensors, then what backward needs (its *residuals*).

    Attributes:
        differentiated: positions of forward inputs that gradients are computed for.
        differentiable: positions of output arrays that gradients may arrive for.
        draws: random draws made.
        result: structure of the result.
        tensors: how to make the tensors of the result.
        reads: globals read.
        pull_back: the vjp's tree, to trace backward programs from.
        extra: where outside tensors beyond those of the module tree are among the globals.
        key: what its compiled programs are shared by.
    """

    forward: Jaxpr
    num_outside: int
    num_values: int
    written: tuple[int, ...]
    differentiated: tuple[int, ...]
    differentiable: tuple[int, ...]
    draws: int
    result: Any
    tensors: list[OutputTensor]
    reads: Reads
    mesh: Any
    pull_back: Any
    value_avals: list[Any]
    constants: list[np.ndarray] = dataclasses.field(default_factory=list)
    extra: tuple[Any, ...] = ()
    key: Any = None
    traced_backward: dict[Any, Jaxpr] = dataclasses.field(default_factory=dict)
    _digest: Any = None

    @property
    def digest(self) -> Any:
        """Equal for calls with the same programs and results, whoever traced them."""
        if self._digest is None:
            self._digest = (
                str(self.forward), str(self.result), tuple(self.tensors), self.differentiated,
                self.written, tuple(c.tobytes() for c in self.constants),
            )  # fmt: skip
        return self._digest

    @property
    def residuals(self) -> list[Any]:
        """Variables of ``forward`` that backward needs."""
        return self.forward.outvars[self.num_values + len(self.written) :]

    def backward(self, present: tuple[int, ...]) -> Jaxpr:
        """From the residuals and the gradients of output arrays ``present`` to those of
        ``differentiated``."""
        found = self.traced_backward.get(present)
        if found is None:
            found = self.traced_backward[present] = self._trace_backward(present)
        return found

    def _trace_backward(self, present: tuple[int, ...]) -> Jaxpr:
        count = len(self.residuals)

        def run(*args: Any) -> Any:
            given = dict(zip(present, args[count:], strict=True))
            cotangents = tuple(
                given[i] if i in given else jnp.zeros(aval.shape, aval.dtype)
                for i, aval in ((i, self.value_avals[i]) for i in self.differentiable)
            )
            return list(jax.tree.unflatten(self.pull_back, args[:count])(cotangents))

        avals = [_aval(v) for v in self.residuals] + [self.value_avals[i] for i in present]
        program, constants = per_rank_program(run, avals, self.mesh)
        assert not constants, "a backward program has no constants of its own"
        return program

    def unused(self, present: tuple[int, ...]) -> set[int]:
        """Positions in ``differentiated`` that no gradient reaches."""
        program = self.backward(present)
        found = dependencies(program)
        first = len(self.residuals)
        return {
            i
            for i, v in enumerate(program.outvars)
            if not any(d >= first for d in depends(found, v))
        }


def _aval(v: Any) -> Any:
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


# --- tracing -------------------------------------------------------------------------------------


class Tracing:
    """Traces one call.

    Args:
        run: what to call.
        arguments, structure: of ``(args, kwargs)``; see ``_structure``.
        outside: tensors from outside that are inputs, each the first of its storage.
        groups: the groups of whole parameters, with the avals of each.
        mesh: the jax mesh whose axes are bound; an abstract one will do.
        place: the device that tensors appear to be on.
        shapes: of the arguments, as the Python is to see them.
        apart: outputs are no views of each other, since the caller changes them.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        arguments: list[Tensor],
        structure: Any,
        outside: list[Tensor],
        groups: dict[Any, Any],
        mesh: Any,
        place: Any,
        shapes: Sequence[tuple[int, ...]],
        apart: bool,
    ) -> None:
        self.shapes, self.apart = shapes, apart
        self.run, self.arguments, self.structure = run, arguments, structure
        self.outside, self.groups, self.mesh = outside, groups, mesh
        self.trace = Trace(default_generator(), place)
        self.trace.owner = self
        self.watch = Watch()
        self._shown: dict[Any, int] = {}

    def show(self, group: Any) -> None:
        """The modules of ``group`` show its whole parameters."""
        if group not in self._wholes:
            self.trace.abort("calls an FSDP module outside its module tree")
        self._shown[group] = self._shown.get(group, 0) + 1
        if self._shown[group] == 1:
            group.show_traced(self._wholes[group])

    def number_of(self, group: Any) -> int:
        """The position of ``group`` among the groups of the call."""
        return list(self.groups).index(group)

    def hide(self, group: Any) -> None:
        """The modules of ``group`` show its shards again."""
        self._shown[group] -= 1
        if self._shown[group] == 0:
            group.hide_traced()

    def stage(self) -> StagedCall:
        """Runs the Python once and returns the programs.

        Raises:
            Untraceable: the call has to run eagerly; or, with ``trace.missing`` filled, it has to
                be traced again with more outside tensors.
            Exception: whatever the Python raised.
        """
        before = [t._storage.array for t in self.outside]
        try:
            forward, constants = per_rank_program(self._per_rank, self._avals(), self.mesh)
        finally:
            for tensor, array in zip(self.outside, before, strict=True):
                tensor._storage.array = array
        if self.trace.reason is not None:
            raise Untraceable(self.trace.reason)
        if self.trace.missing:
            raise Untraceable("reads tensors from outside")
        self._staged.forward = forward
        self._staged.constants = [np.asarray(c) for c in constants]
        return self._staged

    def _avals(self) -> list[Any]:
        wholes = [a for avals in self.groups.values() for a in avals]
        outside = [_struct(t._storage.array) for t in self.outside]
        arguments = [
            jax.ShapeDtypeStruct(shape, t._storage.array.dtype)
            for t, shape in zip(self.arguments, self.shapes, strict=True)
        ]
        return [*wholes, *outside, *arguments, jax.ShapeDtypeStruct((4,), np.uint32)]

    def _per_rank(self, *inputs: Any) -> Any:
        differentiated = self._differentiated()

        def run(*values: Any) -> Any:
            full = list(inputs)
            for i, v in zip(differentiated, values, strict=True):
                full[i] = v
            return self._run_python(full)

        leaves: list[Any] = []
        tree = None
        if not differentiated:
            _, aux = run()
            values, writes = aux["values"], aux["writes"]
        else:
            outs, vjp, aux = jax.vjp(run, *(inputs[i] for i in differentiated), has_aux=True)
            leaves, tree = jax.tree.flatten(vjp)
            values, writes = list(aux["values"]), aux["writes"]
            for i, out in zip(self._differentiable, outs, strict=True):
                values[i] = out
        self._staged = StagedCall(
            forward=None,  # type: ignore[arg-type]
            num_outside=len(self.outside),
            num_values=len(values),
            written=self._written,
            differentiated=differentiated,
            differentiable=self._differentiable if differentiated else (),
            draws=self.trace.draws,
            result=self._result,
            tensors=self._tensors,
            reads=Reads(self.watch),
            mesh=self.mesh,
            pull_back=tree,
            value_avals=[_struct(v) for v in values],
        )
        return [*values, *writes, *leaves]

    def _differentiated(self) -> tuple[int, ...]:
        if not state.grad_enabled:
            return ()
        flags = [
            *(p for group in self.groups for p in group.trainable_flags()),
            *(t._requires_grad for t in self.outside),
            *(t.requires_grad for t in self.arguments),
        ]
        return tuple(i for i, wanted in enumerate(flags) if wanted)

    def _run_python(self, inputs: list[Any]) -> Any:
        with self.trace.active():
            arguments = self._set_up(inputs)
            handed = unflatten(self.structure, arguments)
            self._containers = containers(handed)
            before = self._content(handed)
            args, kwargs = handed
            with self.watch.watching():
                result = self.run(*args, **kwargs)
            if self.trace.reason is not None:
                raise Untraceable(self.trace.reason)
            if self._content(handed) != before:
                self.trace.abort("changes a container among its arguments")
            return self._collect(result, arguments)

    def _content(self, handed: Any) -> Any:
        tensors, structure = flatten(handed)
        return [id(t) for t in tensors], _frozen_structure(structure, Freezer())

    def _set_up(self, inputs: list[Any]) -> list[Tensor]:
        rest = iter(inputs)
        self._wholes = {g: [next(rest) for _ in avals] for g, avals in self.groups.items()}
        for tensor in self.outside:
            self.trace.lifted.add(tensor._storage)
            tensor._storage.array = next(rest)
        arguments = [self._argument(t, next(rest)) for t in self.arguments]
        random = next(rest)
        self.trace.random_inputs = (random[:2], random[2], random[3])
        return arguments

    def _argument(self, tensor: Tensor, value: Any) -> Tensor:
        out = type(tensor).__new__(type(tensor))
        out._storage = Storage(value)
        out._requires_grad = tensor.requires_grad
        if tensor._grad_fn is not None:
            out._grad_fn = self.trace.node
        return out

    def _collect(self, result: Any, arguments: list[Tensor]) -> Any:
        found, self._result = flatten(result, self._containers)
        if any(hasattr(value, "__next__") for value in constants(self._result)):
            self.trace.abort("returns an iterator")
        storages = _Storages(self.trace, arguments, self.outside)
        self._tensors = storages.describe(found, self.apart)
        self._written = tuple(
            i for i, t in enumerate(self.outside) if t._storage in self.trace.writes
        )
        if any(a._storage.version for a in arguments):
            self.trace.abort("writes in place to one of its arguments")
        values = storages.values
        self._differentiable = tuple(
            i
            for i in sorted(storages.differentiable)
            if jnp.issubdtype(values[i].dtype, np.inexact)
        )
        writes = [self.outside[i]._storage.array for i in self._written]
        aux = {"values": values, "writes": writes}
        return tuple(values[i] for i in self._differentiable), aux


class _Storages:
    """The distinct arrays behind the tensors of a result."""

    def __init__(self, trace: Trace, arguments: list[Tensor], outside: list[Tensor]) -> None:
        self.trace = trace
        self.arguments = {id(t): i for i, t in enumerate(arguments)}
        self.argument_storages = {t._storage for t in arguments}
        self.outside = {id(t): i for i, t in enumerate(outside)}
        self.values: list[Any] = []
        self.differentiable: set[int] = set()
        self._numbers: dict[Storage, int] = {}

    def describe(self, tensors: list[Tensor], apart: bool) -> list[OutputTensor]:
        counts: dict[Storage, int] = {}
        for t in tensors:
            counts[t._storage] = counts.get(t._storage, 0) + 1
        return [self._one(t, counts[t._storage] > 1 and not apart) for t in tensors]

    def _one(self, t: Tensor, shared: bool) -> OutputTensor:
        if id(t) in self.arguments:
            return OutputTensor("argument", self.arguments[id(t)])
        if id(t) in self.outside:
            return OutputTensor("outside", self.outside[id(t)])
        if t._storage in self.argument_storages or self.trace.is_outside(t):
            self.trace.abort("returns a view of a tensor from outside")
        requires_grad = t.requires_grad
        if not shared or t._chain is None:
            index = self._number(t, t._read(), keep=shared)
            chain: Any = ()
        else:
            index, chain = self._number(t, t._storage.array, keep=True), t._chain
        if requires_grad:
            self.differentiable.add(index)
        return OutputTensor("value", index, chain, requires_grad)

    def _number(self, t: Tensor, value: Any, keep: bool) -> int:
        if keep and t._storage in self._numbers:
            return self._numbers[t._storage]
        self.values.append(value)
        self._numbers[t._storage] = len(self.values) - 1
        return len(self.values) - 1


def _struct(array: Any) -> Any:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def make_result(
    staged: StagedCall,
    arrays: Sequence[Any],
    arguments: Sequence[Tensor],
    handed: Any,
    outside: Sequence[Tensor],
    node: Any,
) -> Any:
    """The call's result: tensors over ``arrays``, part of the graph through ``node``.

    Args:
        arguments: the tensors among the arguments.
        handed: (args, kwargs).
    """
    bases: dict[int, Tensor] = {}
    made = []
    for t in staged.tensors:
        if t.kind == "argument":
            made.append(arguments[t.index])
        elif t.kind == "outside":
            made.append(outside[t.index])
        else:
            if t.index not in bases:
                bases[t.index] = _base(staged, t.index, arrays[t.index], node)
            made.append(_through(bases[t.index], t))
    return unflatten(staged.result, made, handed)


def _base(staged: StagedCall, index: int, array: Any, node: Any) -> Tensor:
    out = Tensor.__new__(Tensor)
    out._storage = Storage(array)
    out._inference = state.inference
    if node is not None and index in staged.differentiable:
        out._requires_grad, out._grad_fn = True, node
        out._output_nr = staged.differentiable.index(index)
    return out


def _through(base: Tensor, t: OutputTensor) -> Tensor:
    if not t.requires_grad and base._requires_grad:
        base = base.detach()
    return view_through(base, t.chain) if t.chain else base
