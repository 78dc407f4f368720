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

from .._graph import Node
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
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        *,
        elementwise: bool = False,
        differentiable: bool = True,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.name = fn, name
        self.elementwise, self.differentiable = elementwise, differentiable
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
                if a._layout is not None or a._refusal is not None:
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
                    out = self._compile(options)(*arrays)
                else:
                    out = self._plain(*arrays)
        except (TypeError, ValueError) as error:
            if any(type(a) is Meta for a in arrays):
                return self._meta(arrays, bool(record), options)
            raise _explained(error, self.name, arrays) from error
        return _wrap_all(out)

    def _compile(self, options: dict[str, Any]) -> Callable[..., Any]:
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
            run = self._recording[key] = jax.jit(_with_vjp(fn, mask))
        out, saved = run(*arrays)
        info = saved.info
        edges = [args[i]._edge() for i in info.positions]
        node = PrimitiveNode(self, options, info, saved.leaves, edges)
        results = _wrap_all(out)
        outputs = results if isinstance(results, tuple) else (results,)
        for index, result in enumerate(outputs):
            if info.outputs[index] is not None:
                result._requires_grad, result._grad_fn, result._output_nr = True, node, index
        if saved.leaves:
            node.inputs = tuple(zip(arrays, (_edge_or_none(a) for a in args), strict=True))
            node.guards = [
                (index, storage, storage.version)
                for index, storage in (
                    *((i, args[i]._storage) for i in info.saved_inputs),
                    *((i, outputs[i]._storage) for i in info.saved_outputs),
                )
            ]
        return results

    def _special(self, args: Any, mask: int, options: dict[str, Any]) -> Any:
        """Sharded tensors, refused tensors, and ops inside a traced call."""
        layout = None
        for a in args:
            if isinstance(a, Tensor):
                if a._refusal is not None:
                    raise RuntimeError(f"{self.name}: {a._refusal}")
                layout = layout or a._layout
        if layout is not None:
            layout.check(self.name, self.elementwise, args)
        if state.trace is not None:
            return self._traced(args, mask, options)
        record = bool(mask and state.grad_enabled and self.differentiable)
        if record:
            layout.refuse_recording(self.name, args)
        with jax.enable_x64(True):
            out = self._compile(options)(*[_value(a) for a in args])
        return layout.wrap(out)

    def _traced(self, args: Any, mask: int, options: dict[str, Any]) -> Any:
        record = bool(mask and state.grad_enabled and self.differentiable)
        with jax.enable_x64(True):
            arrays = [_traced_value(a) for a in args]
            if any(type(a) is Meta for a in arrays):
                return self._meta(arrays, record, options)
            try:
                out = self.fn(*arrays, **options)
            except (TypeError, ValueError) as error:
                raise _explained(error, self.name, arrays) from error
            if mask and not record:
                out = jax.tree.map(lax.stop_gradient, out)
        results = _wrap_all(out)
        if record:
            for result in results if isinstance(results, tuple) else (results,):
                if jnp.issubdtype(result._storage.array.dtype, np.inexact):
                    result._requires_grad, result._grad_fn = True, state.trace.node
        return results

    def _meta(self, arrays: list[Any], record: bool, options: dict[str, Any]) -> Any:
        with jax.enable_x64(True):
            out = jax.eval_shape(functools.partial(self.fn, **options), *arrays)
        results = _wrap_all(jax.tree.map(lambda o: Meta(o.shape, o.dtype), out))
        if record:
            for result in results if isinstance(results, tuple) else (results,):
                result._requires_grad, result._grad_fn = True, _MetaNode()
        return results


def primitive(
    name: str, *, elementwise: bool = False, differentiable: bool = True
) -> Callable[[Callable[..., Any]], Primitive]:
    """Decorator: ``@primitive("add", elementwise=True)``."""
    return lambda fn: Primitive(
        fn, name, elementwise=elementwise, differentiable=differentiable
    )


class _Info:
    """What is known, once traced, of a recorded call: static, shared by all calls of that shape."""

    def __init__(self) -> None:
        self.tree: Any = None
        self.positions: tuple[int, ...] = ()
        self.outputs: tuple[Any, ...] = ()
        self.saved_inputs: tuple[int, ...] = ()
        self.saved_outputs: tuple[int, ...] = ()
        self.backward = jax.jit(self._backward)
        self.higher: dict[Any, Primitive] = {}

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


def _with_vjp(fn: Callable[..., Any], mask: int) -> Callable[..., Any]:
    def run(*arrays: Any) -> Any:
        info = _Info()
        with jax.enable_x64(True):
            info.positions = tuple(i for i in range(len(arrays)) if mask >> i & 1)
            out, leaves = _trace_vjp(fn, arrays, info)
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
    info.saved_inputs = tuple(
        i for i, a in enumerate(arrays) if any(leaf is a for leaf in leaves)
    )
    info.saved_outputs = tuple(
        i for i, o in enumerate(placed) if o is not None and any(leaf is o for leaf in leaves)
    )
    return (tuple if isinstance(out, tuple) else lambda o: o[0])(
        [o if p is None else p for o, p in zip(_as_tuple(out), placed, strict=True)]
    ), leaves


def _as_tuple(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else (out,)


class PrimitiveNode(Node):
    """The backward step of a recorded primitive."""

    __slots__ = ("op", "options", "info", "leaves", "inputs", "guards")

    def __init__(
        self, op: Primitive, options: dict[str, Any], info: _Info, leaves: Any, edges: Any
    ) -> None:
        super().__init__(edges, len(info.outputs))
        self.op, self.options, self.info, self.leaves = op, options, info, leaves
        self.inputs: Any = ()
        self.guards: list[tuple[int, Storage, int]] = []

    def name(self) -> str:
        return self.op.node_name

    def backward(self, grads: list[Any]) -> list[Any]:
        if self.leaves is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved "
                "tensors after they have already been freed). Saved intermediate values of the "
                "graph are freed when you call .backward() or autograd.grad(). Specify "
                "retain_graph=True if you need to backward through the graph a second time or if "
                "you need to access saved tensors after calling backward."
            )
        for index, storage, version in self.guards:
            if storage.version != version:
                self._refuse_changed(index, storage, version)
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

    def _refuse_changed(self, index: int, storage: Storage, version: int) -> None:
        array = storage.array
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{array.dtype} {list(array.shape)}], saved by {self.name()} (number "
            f"{index} there), is at version {storage.version}; expected version {version} instead. "
            "Hint: clone() the tensor before the inplace operation."
        )

    def release(self) -> None:
        if self.leaves:
            self.leaves, self.inputs, self.guards = None, (), []


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


def _value(a: Any) -> Any:
    return a._read() if isinstance(a, Tensor) else a


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
    raise TypeError(
        f"{name}(): expected a Tensor or a Python number, but got {type(a).__name__}"
    )


def _wrap_all(out: Any) -> Any:
    if isinstance(out, tuple):
        return tuple([wrap(o) for o in out])
    return wrap(out)


def _explained(error: Exception, name: str, arrays: list[Any]) -> Exception:
    """torch raises RuntimeError where shapes do not fit; say which op and which shapes."""
    shapes = [tuple(a.shape) for a in arrays if hasattr(a, "shape")]
    dtypes = [str(a.dtype) for a in arrays if hasattr(a, "dtype")]
    kind = TypeError if isinstance(error, TypeError) and "shape" not in str(error) else RuntimeError
    return kind(f"{name}(): {_first_line(error)} [shapes {shapes}, dtypes {dtypes}]")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
