"""Functions with a gradient of their own, as ``torch.autograd.Function``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ._graph import Edge, Node
from ._ops.creation import zeros
from ._ops.primitive import FREED, changed_message
from ._ops.reduce import sum_to_shape
from ._state import state
from ._tensor import Tensor


class FunctionCtx:
    """What ``forward`` hands to ``backward``: saved tensors, flags, and any attribute set on it.

    ``needs_input_grad`` tells, for each argument of ``apply``, whether its gradient is wanted.
    """

    needs_input_grad: tuple[bool, ...] = ()

    def __init__(self) -> None:
        self._to_save: tuple[Tensor | None, ...] = ()
        self._saved: list[_Saved | None] | None = []
        self._dirty: tuple[Tensor, ...] = ()
        self._without_grad: tuple[Tensor, ...] = ()
        self._materialize = True

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keeps tensors for ``backward``, which raises if they change in place meanwhile."""
        self._to_save = tensors

    def mark_dirty(self, *args: Tensor) -> None:
        """Names the inputs that ``forward`` changed in place; it must return them."""
        self._dirty = args

    def mark_non_differentiable(self, *args: Tensor) -> None:
        """Names the outputs that carry no gradient."""
        self._without_grad = args

    def set_materialize_grads(self, value: bool) -> None:
        """Whether ``backward`` gets zeros (the default) or None where no gradient arrived."""
        self._materialize = value

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors given to ``save_for_backward``.

        Raises:
            RuntimeError: one was changed in place since, or the graph was freed.
        """
        if self._saved is None:
            raise RuntimeError(FREED)
        return tuple(None if s is None else s.unpack() for s in self._saved)


class _Saved:
    """A saved tensor; an output of the function itself is kept without its history."""

    def __init__(self, tensor: Tensor, edge: Edge | None) -> None:
        self.tensor, self.edge = (tensor if edge is None else tensor._alias()), edge
        self.version = tensor._storage.version

    def unpack(self) -> Tensor:
        storage = self.tensor._storage
        if storage.version != self.version:
            raise RuntimeError(changed_message(storage, self.version))
        if self.edge is None:
            return self.tensor
        out = self.tensor._alias()
        out._requires_grad, (out._grad_fn, out._output_nr) = True, self.edge
        return out


class FunctionNode(Node):
    """The backward step of one call of a ``Function``."""

    saved = ("ctx",)

    def __init__(self, function: type[Function], ctx: FunctionCtx, args: tuple[Any, ...]) -> None:
        super().__init__([a._edge() if isinstance(a, Tensor) else None for a in args])
        self.function, self.ctx = function, ctx
        self.shapes = [(tuple(a.shape), a.dtype) if isinstance(a, Tensor) else None for a in args]
        self.outputs: list[Any] = []

    def name(self) -> str:
        return f"{self.function.__name__}Backward"

    def backward(self, grads: list[Any]) -> list[Any]:
        if self.ctx._materialize:
            grads = [
                zeros(meta[0], dtype=meta[1]) if g is None and meta is not None else g
                for g, meta in zip(grads, self.outputs, strict=True)
            ]
        returned = self.function.backward(self.ctx, *grads)
        results = list(returned) if isinstance(returned, tuple) else [returned]
        while len(results) > len(self.shapes) and results[-1] is None:
            results.pop()
        if len(results) != len(self.shapes):
            raise RuntimeError(
                f"function {self.name()} returned an incorrect number of gradients (expected "
                f"{len(self.shapes)}, got {len(results)})"
            )
        return [self._fitted(i, grad) for i, grad in enumerate(results)]

    def _fitted(self, index: int, grad: Any) -> Any:
        meta = self.shapes[index]
        if grad is None or self.next_edges[index] is None or meta is None:
            return None
        shape, dtype = meta
        if tuple(grad.shape) != shape:
            grad = sum_to_shape(grad, shape)
        if grad is None:
            raise RuntimeError(
                f"Function {self.name()} returned an invalid gradient at index {index} - expected "
                f"shape compatible with {list(shape)}"
            )
        return grad.to(dtype)

    def release(self) -> None:
        if self.ctx._saved:
            self.ctx._saved = None


class Function:
    """Base class of ops with a gradient of their own; call them through ``apply``.

    Subclasses define static methods ``forward(ctx, *args)`` (or ``forward(*args)`` together with
    ``setup_context(ctx, inputs, output)``) and ``backward(ctx, *grad_outputs)``, which returns one
    gradient per argument of ``forward`` (None where there is none).
    """

    @staticmethod
    def forward(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "You must implement the forward function for custom autograd.Function."
        )

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        raise NotImplementedError("setup_context is not implemented.")

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise NotImplementedError(
            "You must implement the backward method for your custom autograd.Function to use it "
            "with backward mode AD."
        )

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Runs ``forward`` and records ``backward`` where an argument requires grad."""
        if state.trace is not None:
            state.trace.abort("uses autograd.Function")
        ctx = FunctionCtx()
        ctx.needs_input_grad = tuple(isinstance(a, Tensor) and a.requires_grad for a in args)
        record = state.grad_enabled and any(ctx.needs_input_grad)
        node = FunctionNode(cls, ctx, args) if record else None
        output = cls._forward(ctx, args)
        outputs = output if isinstance(output, tuple) else (output,)
        results = [_result(ctx, node, args, o, i) for i, o in enumerate(outputs)]
        if node is not None:
            node.num_outputs = len(results)
            node.outputs = [
                (tuple(r.shape), r.dtype) if isinstance(r, Tensor) else None for r in results
            ]
        ctx._saved = [_saved(t, outputs, results) for t in ctx._to_save]
        ctx._to_save = ()
        return tuple(results) if isinstance(output, tuple) else results[0]

    @classmethod
    def _forward(cls, ctx: FunctionCtx, args: tuple[Any, ...]) -> Any:
        outer, state.grad_enabled = state.grad_enabled, False
        try:
            if cls.setup_context is Function.setup_context:
                return cls.forward(ctx, *args)
            output = cls.forward(*args)
            cls.setup_context(ctx, args, output)
            return output
        finally:
            state.grad_enabled = outer


def _among(tensor: Any, tensors: Any) -> bool:
    return any(t is tensor for t in tensors)


def _result(ctx: FunctionCtx, node: Node | None, args: Any, output: Any, index: int) -> Any:
    """``output`` with its place in the graph."""
    if not isinstance(output, Tensor):
        return output
    if _among(output, ctx._dirty):
        return output if node is None else _written(node, output, index)
    if _among(output, args) or output._base is not None or output._requires_grad:
        output = output._alias()
        output._detached = False
    inexact = output.dtype.is_floating_point or output.dtype.is_complex
    if node is not None and inexact and not _among(output, ctx._without_grad):
        output._requires_grad, output._grad_fn, output._output_nr = True, node, index
    return output


def _written(node: Node, tensor: Tensor, index: int) -> Tensor:
    if tensor.requires_grad and tensor.is_leaf:
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation."
        )
    if tensor._base is not None:
        raise RuntimeError(
            "mark_dirty() got a view: a custom Function can change whole tensors in place only"
        )
    tensor._set_history(node, index, True)
    return tensor


def _saved(tensor: Tensor | None, outputs: Any, results: list[Any]) -> _Saved | None:
    if tensor is None:
        return None
    for output, result in zip(outputs, results, strict=True):
        if tensor is output and result._grad_fn is not None:
            return _Saved(tensor, (result._grad_fn, result._output_nr))
    return _Saved(tensor, None)


def once_differentiable(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a ``backward`` whose own gradient is not defined: differentiating it raises."""

    @functools.wraps(fn)
    def run(ctx: Any, *grads: Any) -> Any:
        wanted = state.grad_enabled and any(
            isinstance(g, Tensor) and g.requires_grad for g in grads
        )
        outer, state.grad_enabled = state.grad_enabled, False
        try:
            returned = fn(ctx, *grads)
        finally:
            state.grad_enabled = outer
        if not wanted:
            return returned
        results = returned if isinstance(returned, tuple) else (returned,)
        return tuple(r if r is None else _at_end(r) for r in results)

    return run


class _OnceNode(Node):
    def backward(self, grads: list[Any]) -> list[Any]:
        raise RuntimeError(
            "trying to differentiate twice a function that was marked with @once_differentiable"
        )


def _at_end(tensor: Tensor) -> Tensor:
    out = tensor._alias()
    out._requires_grad, out._grad_fn = True, _OnceNode(())
    return out
