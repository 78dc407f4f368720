"""Primitives: a jax function becomes an op on tensors, compiled and recorded.

``primitive(fn)`` is called with tensors and Python numbers as positional arguments (``None`` where
an optional tensor is left out) and with hashable options as keyword arguments. Each combination of
options and shapes compiles once. When an argument requires grad, a second compiled form runs that
also returns what ``jax.vjp`` saves; the graph node keeps it for the compiled backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._dtypes import from_numpy_dtype
from .._graph import Node
from .._profile import paused_profile
from .._state import state
from .._tensor import Meta, Storage, Tensor, wrap

_PLAIN = (float, int, bool, type(None), complex)


class Primitive:
    """An op; see the module's docstring.

    Args:
        fn: ``fn(*arrays, **options)`` to an array or a tuple of arrays.
        name: used in messages and for the graph node (``<Name>Backward0``).
        elementwise: acts on each element by itself, so that it may run on equally sharded tensors.
        differentiable: whether the result can require grad.
        saves: ``"input"`` or ``"result"`` where PyTorch keeps that for backward though jax keeps
            something derived from it: in-place writes to it are then refused as PyTorch does.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        *,
        elementwise: bool = False,
        differentiable: bool = True,
        saves: str | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.__name__ = name
        self.__doc__ = fn.__doc__ or f"As ``torch.{name}``."
        self.fn, self.name = fn, name
        self.elementwise, self.differentiable, self.saves = elementwise, differentiable, saves
        self.node_name = "".join(part.capitalize() for part in name.split("_")) + "Backward0"
        self._compiled: dict[Any, Any] = {}
        self._recording: dict[Any, Any] = {}
        self._plain = jax.jit(fn)

    def __call__(self, *args: Any, **options: Any) -> Any:
        arrays, mask, bit, special = [], 0, 1, state.trace is not None
        for a in args:
            if isinstance(a, Tensor):
                if a._base is not None:
                    a._sync()
                if a._requires_grad:
                    mask |= bit
                if a._layout is not None:
                    special = True
                arrays.append(a._storage.array if a._chain is None else a._read())
            else:
                arrays.append(a if type(a) in _PLAIN else _number(a, self.name))
            bit <<= 1
        if special:
            return self._special(args, mask, options)
        record = mask and state.grad_enabled and self.differentiable
        try:
            with jax.enable_x64(True):
                if record:
                    return self._record(args, arrays, mask, options)
                if options or state.default_dtype is not None:
                    out = self.compiled(options)(*arrays)
                else:
                    out = self._plain(*arrays)
        except (TypeError, ValueError) as error:
            if any(type(a) is Meta for a in arrays):
                return self._meta(arrays, bool(record), options)
            raise self._explained(error, arrays) from error
        return _wrap_all(out)

    def compiled(self, options: dict[str, Any]) -> Callable[..., Any]:
        """The compiled function of arrays."""
        key = (state.default_dtype, *options.items())
        found = self._compiled.get(key)
        if found is None:
            found = self._compiled[key] = jax.jit(functools.partial(self.fn, **options))
        return found

    def _record(self, args: Any, arrays: list[Any], mask: int, options: dict[str, Any]) -> Any:
        key = (mask, state.default_dtype, *options.items())
        run = self._recording.get(key)
        if run is None:
            fn = functools.partial(self.fn, **options) if options else self.fn
            run = self._recording[key] = jax.jit(_with_vjp(fn, mask, self.saves))
        out, saved = run(*arrays)
        info = saved.info
        edges = [args[i]._edge() for i in info.positions]
        leaves = info.all_leaves(saved.leaves, arrays, _as_tuple(out))
        node = PrimitiveNode(self, options, info, leaves, edges)
        results = _wrap_all(out)
        outputs = results if isinstance(results, tuple) else (results,)
        for index, result in enumerate(outputs):
            if info.outputs[index] is not None:
                result._requires_grad, result._grad_fn, result._output_nr = True, node, index
        if leaves:
            node.inputs = tuple(zip(arrays, (_edge_or_none(a) for a in args), strict=True))
            node.guards = [
                *(_Guard(args[i], i) for i in info.saved_inputs if isinstance(args[i], Tensor)),
                *(_Guard(outputs[i]) for i in info.saved_outputs),
            ]
        return results

    def _special(self, args: Any, mask: int, options: dict[str, Any]) -> Any:
        """Sharded tensors, and ops inside a traced call."""
        layout: Any = next(
            (a._layout for a in args if getattr(a, "_layout", None) is not None), None
        )
        if layout is not None:
            layout.check(self, args)
        if state.trace is not None:
            return self._traced(args, mask, options)
        record = bool(mask and state.grad_enabled and self.differentiable)
        if record:
            layout.refuse_recording(self.name, args)
        return layout.run(self, args, options)

    @paused_profile
    def _traced(self, args: Any, mask: int, options: dict[str, Any]) -> Any:
        record = bool(mask and state.grad_enabled and self.differentiable)
        with jax.enable_x64(True):
            arrays = [_traced_value(a) for a in args]
            if any(type(a) is Meta for a in arrays):
                return self._meta(arrays, record, options)
            try:
                out = self.fn(*arrays, **options)
            except (TypeError, ValueError) as error:
                raise self._explained(error, arrays) from error
            if mask and not record:
                out = jax.tree.map(lax.stop_gradient, out)
        results = _wrap_all(out)
        if record:
            for result in results if isinstance(results, tuple) else (results,):
                if jnp.issubdtype(result._storage.array.dtype, np.inexact):
                    result._requires_grad, result._grad_fn = True, state.trace.node
        return results

    def _meta(self, arrays: list[Any], record: bool, options: dict[str, Any]) -> Any:
        structs = [a.struct() if type(a) is Meta else a for a in arrays]
        try:
            with jax.enable_x64(True):
                out = jax.eval_shape(functools.partial(self.fn, **options), *structs)
        except (TypeError, ValueError) as error:
            raise self._explained(error, arrays) from error
        results = _wrap_all(jax.tree.map(lambda o: Meta(o.shape, o.dtype), out))
        if record:
            for result in results if isinstance(results, tuple) else (results,):
                result._requires_grad, result._grad_fn = True, _MetaNode()
        return results

    def _explained(self, error: Exception, arrays: list[Any]) -> Exception:
        """torch raises RuntimeError where shapes do not fit; say which op and which shapes."""
        shapes = [tuple(a.shape) for a in arrays if hasattr(a, "shape")]
        message = broadcast_mismatch(shapes) if self.elementwise else None
        if message is not None:
            return RuntimeError(message)
        dtypes = [str(a.dtype) for a in arrays if hasattr(a, "dtype")]
        of_shapes = not isinstance(error, TypeError) or "shape" in str(error)
        kind = RuntimeError if of_shapes else TypeError
        return kind(f"{self.name}(): {_first_line(error)} [shapes {shapes}, dtypes {dtypes}]")


def primitive(name: str, **flags: Any) -> Callable[[Callable[..., Any]], Primitive]:
    """Decorator: ``@primitive("add", elementwise=True)``; the flags are ``Primitive``'s."""
    return lambda fn: Primitive(fn, name, **flags)


class _Info:
    """What is known, once traced, of a recorded call: static, shared by all calls of that shape."""

    def __init__(self) -> None:
        self.tree: Any = None
        self.positions: tuple[int, ...] = ()
        self.outputs: tuple[Any, ...] = ()
        self.saved_inputs: tuple[int, ...] = ()
        self.saved_outputs: tuple[int, ...] = ()
        self.sources: list[int] = []
        self.backward = jax.jit(self._backward)
        self.higher: dict[Any, Primitive] = {}

    def own_leaves(self, leaves: list[Any], arrays: Any, outputs: Any) -> list[Any]:
        """The saved leaves that are neither an input nor an output nor a repetition.

        A compiled function copies what it passes through, so only these are returned from it.
        """
        own: list[Any] = []
        for leaf in leaves:
            shared = () if getattr(leaf, "weak_type", False) else (*arrays, *outputs)
            position = _position_of(leaf, (*shared, *own))
            if position is None or not shared:
                own.append(leaf)
                position = len(arrays) + len(outputs) + len(own) - 1
            self.sources.append(position)
        return own

    def all_leaves(self, own: list[Any], arrays: Any, outputs: Any) -> list[Any]:
        """The inverse of `own_leaves`, for the arrays of one call."""
        found = (*arrays, *outputs, *own)
        return [found[position] for position in self.sources]

    def _backward(self, leaves: Any, grads: Any) -> Any:
        with jax.enable_x64(True):
            cotangents = tuple(
                jnp.zeros(aval.shape, aval.dtype) if grad is None else grad.astype(aval.dtype)
                for aval, grad in zip(self.outputs, grads, strict=True)
                if aval is not None
            )
            return jax.tree.unflatten(self.tree, leaves)(cotangents)


@jax.tree_util.register_pytree_node_class
class _Saved:
    """The arrays that a recorded call saves, with the static ``info`` of its trace."""

    def __init__(self, leaves: Any, info: _Info) -> None:
        self.leaves, self.info = leaves, info

    def tree_flatten(self) -> Any:
        return self.leaves, self.info

    @classmethod
    def tree_unflatten(cls, info: _Info, leaves: Any) -> _Saved:
        return cls(leaves, info)


def _with_vjp(fn: Callable[..., Any], mask: int, saves: str | None) -> Callable[..., Any]:
    def run(*arrays: Any) -> Any:
        info = _Info()
        with jax.enable_x64(True):
            info.positions = tuple(i for i in range(len(arrays)) if mask >> i & 1)
            out, leaves = _trace_vjp(fn, arrays, info)
        leaves = info.own_leaves(leaves, arrays, _as_tuple(out))
        if saves is not None:
            info.saved_inputs = (0,) if saves == "input" else ()
            info.saved_outputs = (0,) if saves == "result" else ()
        return out, _Saved(leaves, info)

    return run


def _trace_vjp(fn: Callable[..., Any], arrays: Any, info: _Info) -> tuple[Any, list[Any]]:
    def of_differentiated(*differentiated: Any) -> Any:
        full = list(arrays)
        for i, a in zip(info.positions, differentiated, strict=True):
            full[i] = a
        out = fn(*full)
        outs = out if isinstance(out, tuple) else (out,)
        inexact = [jnp.issubdtype(o.dtype, np.inexact) for o in outs]
        info.outputs = tuple(
            jax.ShapeDtypeStruct(o.shape, o.dtype) if ok else None
            for o, ok in zip(outs, inexact, strict=True)
        )
        return tuple(o for o, ok in zip(outs, inexact, strict=True) if ok), out

    outs, vjp, out = jax.vjp(of_differentiated, *(arrays[i] for i in info.positions), has_aux=True)
    leaves, info.tree = jax.tree.flatten(vjp)
    of_output = iter(outs)
    placed = [None if aval is None else next(of_output) for aval in info.outputs]
    info.saved_inputs = tuple(i for i, a in enumerate(arrays) if any(leaf is a for leaf in leaves))
    info.saved_outputs = tuple(
        i for i, o in enumerate(placed) if o is not None and any(leaf is o for leaf in leaves)
    )
    return (tuple if isinstance(out, tuple) else lambda o: o[0])(
        [o if p is None else p for o, p in zip(_as_tuple(out), placed, strict=True)]
    ), leaves


def _position_of(leaf: Any, candidates: Any) -> int | None:
    return next((i for i, c in enumerate(candidates) if c is leaf), None)


def _as_tuple(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else (out,)


class _Guard:
    """The version that a saved tensor had; backward refuses if it has changed in place since."""

    __slots__ = ("position", "storage", "version")

    def __init__(self, saved: Tensor, position: int | None = None) -> None:
        if saved._inference:
            raise RuntimeError(
                "Inference tensors cannot be saved for backward. Please do not use Tensors created "
                "in inference mode in computation tracked by autograd. To work around this, you "
                "can make a clone to get a normal tensor and use it in autograd, or use "
                "`tensorplay.no_grad()` instead of `tensorplay.inference_mode()`."
            )
        self.storage, self.version = saved._storage, saved._storage.version
        self.position = position


class PrimitiveNode(Node):
    """The backward step of a recorded primitive."""

    __slots__ = ("guards", "info", "inputs", "leaves", "op", "options")
    saved = ("leaves", "inputs", "guards")

    def __init__(
        self, op: Primitive, options: dict[str, Any], info: _Info, leaves: Any, edges: Any
    ) -> None:
        super().__init__(edges, len(info.outputs))
        self.op, self.options, self.info, self.leaves = op, options, info, leaves
        self.inputs: Any = ()
        self.guards: list[_Guard] = []

    def name(self) -> str:
        return self.op.node_name

    def backward(self, grads: list[Any]) -> list[Any]:
        if self.leaves is None:
            raise RuntimeError(FREED)
        for guard in self.guards:
            if guard.storage.version != guard.version:
                self._refuse_changed(guard)
        if state.grad_enabled:
            return self._differentiable_backward(grads)
        values = tuple(None if g is None else g._read() for g in grads)
        with jax.enable_x64(True):
            return [wrap(a) for a in self.info.backward(self.leaves, values)]

    def _differentiable_backward(self, grads: list[Any]) -> list[Any]:
        """The backward step as an op of its own, recorded for higher derivatives."""
        present = tuple(i for i, g in enumerate(grads) if g is not None)
        op = self.info.higher.get(present)
        if op is None:
            fn = functools.partial(self.op.fn, **self.options)
            op = Primitive(
                _gradient_function(fn, self.info, len(self.inputs), present),
                self.op.name + "_backward",
            )
            self.info.higher[present] = op
        inputs = [a if edge is None else _at_edge(a, edge) for a, edge in self.inputs]
        inputs = [wrap(a) if isinstance(a, jax.Array) else a for a in inputs]
        return list(_as_tuple(op(*inputs, *(grads[i] for i in present))))

    def _refuse_changed(self, guard: _Guard) -> None:
        if guard.position is None:
            made_by = f", which is output 0 of {self.name()}"
        else:
            edge = self.inputs[guard.position][1]
            made_by = "" if edge is None else f", which is output {edge[1]} of {edge[0].name()}"
        raise RuntimeError(changed_message(guard.storage, guard.version, made_by))

    def follow(self, result: Tensor, moved_to: Tensor) -> None:
        """Watches the storage that ``result`` of this step moved to in an in-place op.

        What the step itself read from there is safe: it holds the array from before.
        """
        kept = []
        for guard in self.guards:
            if guard.storage is result._storage:
                kept.append(_Guard(moved_to, guard.position))
            elif guard.storage is not moved_to._storage:
                kept.append(guard)
        self.guards = kept

    def release(self) -> None:
        if self.leaves:
            self.leaves, self.inputs, self.guards = None, (), []


FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after "
    "they have already been freed). Saved intermediate values of the graph are freed when you call "
    ".backward() or autograd.grad(). Specify retain_graph=True if you need to backward through the "
    "graph a second time or if you need to access saved tensors after calling backward."
)


def changed_message(storage: Storage, version: int, made_by: str = "") -> str:
    """torch's words for a saved tensor that was changed in place."""
    kind = from_numpy_dtype(storage.array.dtype).tensor_type
    return (
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [tensorplay.{kind} {list(storage.array.shape)}]{made_by}, is at version "
        f"{storage.version}; expected version {version} instead. Hint: clone() the tensor before "
        "the inplace operation."
    )


def _gradient_function(
    fn: Callable[..., Any], info: _Info, num_inputs: int, present: tuple[int, ...]
) -> Callable[..., Any]:
    """``(*inputs, *gradients)`` to the gradients of the differentiated inputs."""

    def run(*args: Any) -> Any:
        grads: list[Any] = [None] * len(info.outputs)
        for i, g in zip(present, args[num_inputs:], strict=True):
            grads[i] = g
        if num_inputs == 0:
            return info._backward([], tuple(grads))
        fresh = _Info()
        fresh.positions = info.positions
        _, leaves = _trace_vjp(fn, args[:num_inputs], fresh)
        return fresh._backward(leaves, tuple(grads))

    return run


class _MetaNode(Node):
    """The place in the graph of a tensor without values."""

    def __init__(self) -> None:
        super().__init__(())

    def backward(self, grads: list[Any]) -> list[Any]:
        raise RuntimeError("backward() needs values; meta tensors have shapes only")


def _at_edge(array: Any, edge: Any) -> Tensor:
    out = wrap(array)
    out._requires_grad, (out._grad_fn, out._output_nr) = True, edge
    return out


def _edge_or_none(a: Any) -> Any:
    return a._edge() if isinstance(a, Tensor) and a._requires_grad else None


def _traced_value(a: Any) -> Any:
    if not isinstance(a, Tensor):
        return a if type(a) in _PLAIN else _number(a, "op")
    value = a._read()
    return lax.stop_gradient(value) if a._detached and not a._requires_grad else value


def _number(a: Any, name: str) -> Any:
    if isinstance(a, np.generic):
        return a.item()
    if isinstance(a, (int, float, complex)):
        return a.real if isinstance(a, (bool, int, float)) else a
    raise TypeError(f"{name}(): expected a Tensor or a Python number, but got {type(a).__name__}")


def _wrap_all(out: Any) -> Any:
    if isinstance(out, tuple):
        return tuple([wrap(o) for o in out])
    return wrap(out)


def broadcast_mismatch(shapes: list[tuple[int, ...]]) -> str | None:
    """torch's words for the first dim in which shapes do not broadcast; None if they do."""
    result: tuple[int, ...] = ()
    for shape in shapes:
        dims = max(len(result), len(shape))
        a, b = ((1,) * (dims - len(s)) + s for s in (result, shape))
        for d in reversed(range(dims)):
            if a[d] != b[d] and 1 not in (a[d], b[d]):
                return (
                    f"The size of tensor a ({a[d]}) must match the size of tensor b ({b[d]}) at "
                    f"non-singleton dimension {d}"
                )
        result = tuple(n if m == 1 else m for m, n in zip(a, b, strict=True))
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
