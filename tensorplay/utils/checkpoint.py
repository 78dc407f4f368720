"""Activation checkpointing: activations are computed again in backward rather than kept.

Source: torch.utils.checkpoint. In eager code a checkpointed call is recorded as usual, then what
its nodes saved is dropped; the first of them that backward reaches runs the function again and
takes over what that run saved. Inside a traced call the function becomes a ``jax.checkpoint``:
backward recomputes from the function's inputs and the parameters that it uses, which are gathered
once for both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from .._graph import Node
from .._ops.random import default_generator
from .._state import state
from .._structure import flatten, unflatten
from .._tensor import Storage, Tensor, wrap


class CheckpointError(RuntimeError):
    """The function did not do the same when it was run again."""


def noop_context_fn() -> tuple[Any, Any]:
    """Two contexts that do nothing."""
    return contextlib.nullcontext(), contextlib.nullcontext()


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """``function(*args, **kwargs)``, whose activations are computed again in backward.

    Args:
        use_reentrant: accepted as in PyTorch; there is one way to run, which does all that
            PyTorch's two ways do.
        context_fn: returns the contexts to run the function in, first and again.
        determinism_check: "default" compares what the two runs recorded, "none" does not.
        debug: accepted as in PyTorch, where it prints both runs' operators.
        preserve_rng_state: run again with the random numbers of the first run.

    Raises:
        ValueError: an unknown ``determinism_check``.
        CheckpointError: in backward, where the second run recorded other operations.
    """
    if determinism_check not in ("default", "none"):
        raise ValueError(
            f"determinism_check should be 'default' or 'none', got {determinism_check!r}"
        )
    if state.trace is not None:
        return _traced(function, args, kwargs, context_fn)
    first, again = context_fn()
    if not state.grad_enabled:
        with first:
            return function(*args, **kwargs)
    start, modes = Node(()).sequence, _Modes(preserve_rng_state)
    with first:
        out = function(*args, **kwargs)
    nodes = _nodes_since(start, out)
    if nodes:
        frame = _Frame(nodes, function, args, kwargs, again, modes, determinism_check)
        frame.drop()
    return out


def checkpoint_sequential(
    functions: Any,
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Runs modules one after the other, in ``segments`` checkpointed parts; the last is not.

    Args:
        functions: a ``Sequential``, or a list of modules or functions.
    """
    children = getattr(functions, "children", None)
    steps = list(children()) if children is not None else list(functions)
    size = len(steps) // segments
    end = -1
    for start in range(0, size * (segments - 1), size):
        end = start + size - 1
        input = checkpoint(_in_a_row(steps[start : end + 1]), input, **kwargs)
    return _in_a_row(steps[end + 1 :])(input)


def _in_a_row(steps: Sequence[Callable[..., Any]]) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        for step in steps:
            value = step(value)
        return value

    return run


# --- eager ---------------------------------------------------------------------------------------


class _Modes:
    """The modes in which a function ran, to run it in them again."""

    def __init__(self, random: bool) -> None:
        generator = default_generator()
        self.random = (generator.get_state(), generator.stream) if random else None
        self.one_rank = state.one_rank

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, Python runs as it did then, and knows that it computes again."""
        generator = default_generator()
        random = generator.get_state(), generator.stream
        modes = state.grad_enabled, state.one_rank, state.recomputing
        if self.random is not None:
            generator.set_state(self.random[0])
            generator.stream = self.random[1]
        state.grad_enabled, state.one_rank, state.recomputing = True, self.one_rank, True
        try:
            yield
        finally:
            state.grad_enabled, state.one_rank, state.recomputing = modes
            if self.random is not None:
                generator.set_state(random[0])
                generator.stream = random[1]


class _Frame:
    """One checkpointed call: its nodes, and how to fill them again."""

    def __init__(
        self,
        nodes: list[Node],
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        context: Any,
        modes: _Modes,
        determinism_check: str,
    ) -> None:
        self.nodes, self.modes, self.context = nodes, modes, context
        self.function, self.args, self.kwargs = function, args, kwargs
        self.checked = determinism_check == "default"
        self.expected = [_description(node) for node in nodes]

    def drop(self) -> None:
        """Frees what the nodes saved."""
        for node in self.nodes:
            if node.restore is None:
                for name in node.saved:
                    setattr(node, name, None)
            node.restore = self.restore

    def restore(self) -> None:
        """Runs the function again and gives its nodes what this run saved."""
        start = Node(()).sequence
        with self.modes.again(), self.context:
            out = self.function(*self.args, **self.kwargs)
        fresh = _nodes_since(start, out)
        found = [_description(node) for node in fresh]
        if len(found) != len(self.nodes) or (self.checked and found != self.expected):
            raise CheckpointError(
                "tensorplay.utils.checkpoint: the function recorded other operations when it was "
                f"run again in backward. First: {_summary(self.expected)}. Then: "
                f"{_summary(found)}. It must depend on its arguments and on nothing that changes "
                "between forward and backward"
            )
        for node, again in zip(self.nodes, fresh, strict=True):
            node.restore = None
            for name in node.saved:
                setattr(node, name, getattr(again, name))
            if again.restore is not None:  # of a checkpoint inside
                _frame_of(again).take_over(again, node)

    def take_over(self, old: Node, node: Node) -> None:
        """``node`` stands for ``old`` from here on."""
        self.nodes[self.nodes.index(old)] = node
        node.restore = self.restore


def _frame_of(node: Node) -> _Frame:
    return node.restore.__self__  # type: ignore[union-attr]


def _nodes_since(start: int, out: Any) -> list[Node]:
    """The nodes made since number ``start`` that lead to tensors in ``out``, in order."""
    found: dict[Node, None] = {}
    stack = [t.grad_fn for t in flatten(out)[0] if t.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in found or node.sequence <= start or not node.recorded:
            continue
        found[node] = None
        stack += [edge[0] for edge in node.next_edges if edge is not None]
    return sorted(found, key=lambda node: node.sequence)


def _description(node: Node) -> tuple[Any, ...]:
    """What two runs of the same function have in common."""
    return (node.name(), node.num_outputs, len(node.next_edges))


def _summary(descriptions: list[tuple[Any, ...]]) -> str:
    names = [name for name, *_ in descriptions]
    shown = ", ".join(names[:8])
    return f"{len(names)} operations ({shown}{', ...' if len(names) > 8 else ''})"


# --- inside a traced call ------------------------------------------------------------------------


def _traced(
    function: Callable[..., Any], args: Any, kwargs: Any, context_fn: Callable[[], Any]
) -> Any:
    trace = state.trace
    if context_fn is not noop_context_fn:
        trace.abort("checkpoints with contexts of its own")
    tensors, structure = flatten((args, kwargs))
    made: dict[str, Any] = {}

    def run(*arrays: Any) -> Any:
        with trace.scope() as scope:
            own = [_argument(t, a) for t, a in zip(tensors, arrays, strict=True)]
            inner_args, inner_kwargs = unflatten(structure, own, (args, kwargs))
            out = function(*inner_args, **inner_kwargs)
            if any(t._storage.version for t in own):
                trace.abort("writes in place to an argument of a checkpointed function")
            made["tensors"], made["structure"] = flatten(out)
            made["arguments"] = {id(o): t for o, t in zip(own, tensors, strict=True)}
            made["written"] = list(scope.written)
            values = [t._read() for t in made["tensors"]]
            return values, [storage.array for storage in made["written"]]

    values, written = jax.checkpoint(run)(*[t._read() for t in tensors])
    for storage, array in zip(made["written"], written, strict=True):
        storage.array = array
    results = [
        made["arguments"].get(id(t), None) or _result(t, value)
        for t, value in zip(made["tensors"], values, strict=True)
    ]
    return unflatten(made["structure"], results)


def _argument(tensor: Tensor, array: Any) -> Tensor:
    out = type(tensor).__new__(type(tensor))
    out._storage = Storage(array)
    out._requires_grad, out._grad_fn = tensor.requires_grad, tensor._grad_fn
    return out


def _result(inner: Tensor, value: Any) -> Tensor:
    out = wrap(value)
    if inner.requires_grad:
        out._requires_grad, out._grad_fn = True, state.trace.node
    return out
