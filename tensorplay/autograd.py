"""Grad modes and gradients, as ``torch.autograd``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Sequence
from typing import Any

from . import _function as function
from ._function import Function as Function
from ._gradcheck import GradcheckError as GradcheckError
from ._gradcheck import gradcheck as gradcheck
from ._graph import Node as Node
from ._graph import queue_callback
from ._state import state
from ._tensor import Tensor, gradients_of
from ._tensor import backward as _backward

__all__ = [
    "Function",
    "GradcheckError",
    "Node",
    "Variable",
    "backward",
    "enable_grad",
    "function",
    "grad",
    "gradcheck",
    "inference_mode",
    "is_grad_enabled",
    "is_inference_mode_enabled",
    "no_grad",
    "set_grad_enabled",
]


class _GradMode:
    """A grad mode as a context manager and as a decorator."""

    enabled = True

    def __init__(self) -> None:
        self._outer: list[bool] = []

    def __enter__(self) -> None:
        self._outer.append(state.grad_enabled)
        state.grad_enabled = self.enabled

    def __exit__(self, *exc: object) -> None:
        state.grad_enabled = self._outer.pop()

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(fn):
            return _in_mode(fn, self._fresh)

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._fresh():
                return fn(*args, **kwargs)

        return run

    def _fresh(self) -> Any:
        return type(self)()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and callable(args[0]):
            return cls()(args[0])
        return super().__new__(cls)


def _in_mode(fn: Callable[..., Any], mode: Callable[[], Any]) -> Callable[..., Any]:
    """A generator function whose body runs in ``mode`` while its caller keeps its own."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with mode():
            generator = fn(*args, **kwargs)
        resume, value = generator.send, None
        while True:
            try:
                with mode():
                    produced = resume(value)
            except StopIteration as end:
                return end.value
            try:
                resume, value = generator.send, (yield produced)
            except GeneratorExit:
                with mode():
                    generator.close()
                raise
            except BaseException as error:
                resume, value = generator.throw, error  # type: ignore[assignment]

    return run


class no_grad(_GradMode):
    """Ops inside are not recorded."""

    enabled = False


class enable_grad(_GradMode):
    """Ops inside are recorded."""

    enabled = True


class set_grad_enabled(_GradMode):
    """Sets the grad mode to ``mode``, at once; as a context manager, until its end."""

    def __new__(cls, mode: bool) -> set_grad_enabled:
        return object.__new__(cls)

    def __init__(self, mode: bool) -> None:
        super().__init__()
        self._outer.append(state.grad_enabled)
        self.enabled = state.grad_enabled = bool(mode)

    def __enter__(self) -> None:
        state.grad_enabled = self.enabled

    def __exit__(self, *exc: object) -> None:
        state.grad_enabled = self._outer[-1]

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        state.grad_enabled = self._outer[-1]
        return super().__call__(fn)

    def _fresh(self) -> Any:
        return type(self)(self.enabled)


class inference_mode(_GradMode):
    """As ``no_grad``; besides, tensors made inside can never take part in autograd."""

    def __new__(cls, mode: Any = True) -> Any:
        if callable(mode):
            return cls()(mode)
        return object.__new__(cls)

    def __init__(self, mode: bool = True) -> None:
        super().__init__()
        self.mode = bool(mode)
        self._inference: list[bool] = []

    def __enter__(self) -> None:
        self._outer.append(state.grad_enabled)
        self._inference.append(state.inference)
        state.inference = self.mode
        state.grad_enabled = not self.mode

    def __exit__(self, *exc: object) -> None:
        state.grad_enabled = self._outer.pop()
        state.inference = self._inference.pop()

    def _fresh(self) -> Any:
        return type(self)(self.mode)


def is_grad_enabled() -> bool:
    """Whether ops are recorded in this thread."""
    return state.grad_enabled


def is_inference_mode_enabled() -> bool:
    """Whether this thread is in inference mode."""
    return state.inference


def _sequence(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) or value is None else list(value)


def _matched(tensors: list[Any], gradients: Any) -> list[Any]:
    grads = _sequence(gradients)
    if gradients is None:
        return [None] * len(tensors)
    if len(grads) != len(tensors):
        raise RuntimeError(f"got {len(tensors)} tensors and {len(grads)} gradients")
    return grads


def backward(
    tensors: Tensor | Sequence[Tensor],
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Accumulates the gradients of ``tensors`` into leaves; see ``Tensor.backward``."""
    found = _sequence(tensors)
    _backward(
        found,
        _matched(found, grad_tensors),
        retain_graph,
        create_graph,
        None if inputs is None else _sequence(inputs),
    )


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients of the sum of ``outputs`` with respect to ``inputs``.

    Raises:
        RuntimeError: an input that requires no grad, or that the outputs do not depend on and
            ``allow_unused`` is false.
    """
    outs, ins = _sequence(outputs), _sequence(inputs)
    for tensor in ins:
        if not tensor.requires_grad:
            raise RuntimeError("One of the differentiated Tensors does not require grad")
    found = gradients_of(outs, ins, _matched(outs, grad_outputs), retain_graph, create_graph)
    if materialize_grads:
        return tuple(
            tensor.new_zeros(tensor.shape) if g is None else g
            for g, tensor in zip(found, ins, strict=True)
        )
    if not allow_unused and None in found:
        raise RuntimeError(
            f"The differentiated Tensor at index {found.index(None)} appears to not have been used "
            "in the graph. Set allow_unused=True if this is the desired behavior."
        )
    return tuple(found)


class _Engine:
    """What ``Variable._execution_engine`` offers: a callback at the end of a backward pass."""

    @staticmethod
    def queue_callback(callback: Callable[[], None]) -> None:
        queue_callback(callback)


class Variable(Tensor):
    """Kept for code that reaches the engine through ``torch.autograd.Variable``."""

    _execution_engine = _Engine()

    def __new__(cls, data: Any = (), requires_grad: bool = False) -> Any:
        return data.requires_grad_(requires_grad) if isinstance(data, Tensor) else Tensor(data)
