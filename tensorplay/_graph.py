"""The autograd engine: nodes, edges and the backward pass. It knows no op.

A gradient flows along *edges*. An edge is a pair ``(node, index)``: the gradient of the value that
``node`` produced as its output number ``index``. ``node.next_edges`` lists the edges of the node's
own inputs (None where an input needs no gradient). Following PyTorch's engine, nodes run in the
reverse of the order in which they were made, each once, when all gradients of its outputs are in.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Edge = tuple["Node", int]
Gradients = list[Any]

_sequence = itertools.count()
_hook_ids = itertools.count()


class RemovableHandle:
    """Takes a hook back: ``remove()``, or leaving it as a context manager."""

    def __init__(self, hooks: dict[int, Any], on_change: Callable[[], None] | None = None) -> None:
        self.id = next(_hook_ids)
        self._hooks = hooks
        self._on_change = on_change

    def remove(self) -> None:
        """Removes the hook; a second call does nothing."""
        if self._hooks.pop(self.id, None) is not None and self._on_change:
            self._on_change()

    def __enter__(self) -> RemovableHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


class Node:
    """One step of the recorded graph.

    Subclasses implement ``backward``: a list of gradients, one per output of the step (None where
    none arrived), to a list of gradients, one per entry of ``next_edges``.

    Attributes:
        saved: names of the attributes that hold what forward saved.
        restore: fills them again, where activation checkpointing has dropped them.
        recorded: a step that the function it belongs to records at each run.
    """

    saved: tuple[str, ...] = ()
    restore: Callable[[], None] | None = None
    recorded = True

    __slots__ = (
        "__dict__",
        "__weakref__",
        "_hooks",
        "_output_hooks",
        "_pre_hooks",
        "next_edges",
        "num_outputs",
        "retained",
        "sequence",
    )

    def __init__(self, next_edges: Sequence[Edge | None], num_outputs: int = 1) -> None:
        self.next_edges = next_edges
        self.sequence = next(_sequence)
        self.num_outputs = num_outputs
        self._pre_hooks: dict[int, Callable] | None = None
        self._hooks: dict[int, Callable] | None = None
        self._output_hooks: dict[int, dict[int, Callable]] | None = None
        self.retained: dict[int, Any] | None = None

    def backward(self, grads: Gradients) -> Gradients:
        raise NotImplementedError

    def release(self) -> None:
        """Frees what the node saved for ``backward``."""

    def name(self) -> str:
        """The class name of the step, such as ``AddBackward0``."""
        return type(self).__name__

    @property
    def next_functions(self) -> tuple[tuple[Node | None, int], ...]:
        return tuple((None, 0) if e is None else e for e in self.next_edges)

    def register_hook(self, fn: Callable) -> RemovableHandle:
        """``fn(grad_inputs, grad_outputs)`` runs after the step; may replace ``grad_inputs``."""
        if self._hooks is None:
            self._hooks = {}
        return add_hook(self._hooks, fn)

    def register_prehook(self, fn: Callable) -> RemovableHandle:
        """``fn(grad_outputs)`` runs before the step's backward; may return their replacement."""
        if self._pre_hooks is None:
            self._pre_hooks = {}
        return add_hook(self._pre_hooks, fn)

    def hooks_of_output(self, index: int) -> dict[int, Callable]:
        """Hooks on the gradient of output ``index``: what ``Tensor.register_hook`` fills."""
        if self._output_hooks is None:
            self._output_hooks = {}
        return self._output_hooks.setdefault(index, {})

    def __repr__(self) -> str:
        return f"<{self.name()} object at {id(self):#x}>"


def add_hook(
    hooks: dict[int, Any], fn: Any, on_change: Callable[[], None] | None = None
) -> RemovableHandle:
    """Adds ``fn`` to ``hooks``; the handle removes it and then calls ``on_change``."""
    handle = RemovableHandle(hooks, on_change)
    hooks[handle.id] = fn
    return handle


def run_gradient_hooks(hooks: dict[int, Callable], grad: Any) -> Any:
    """Runs hooks on one gradient in order; each may return a replacement."""
    for hook in list(hooks.values()):
        replaced = hook(grad)
        if replaced is not None:
            grad = replaced
    return grad


class _Running(threading.local):
    callbacks: list[Callable[[], None]] | None = None


_running = _Running()


def queue_callback(fn: Callable[[], None]) -> None:
    """Calls ``fn()`` when the backward pass in progress ends.

    Raises:
        RuntimeError: no backward pass is in progress in this thread.
    """
    if _running.callbacks is None:
        raise RuntimeError("Final callbacks can only be installed during backward pass.")
    _running.callbacks.append(fn)


def run_backward(
    roots: Sequence[Edge],
    grads: Sequence[Any],
    *,
    keep_graph: bool,
    add: Callable[[Any, Any], Any],
    capture: Sequence[Edge] | None = None,
    accumulate_captured: bool = False,
) -> list[Any]:
    """Runs the graph backward from ``roots``.

    Args:
        roots: edges that the initial gradients ``grads`` belong to.
        keep_graph: do not free what nodes saved.
        add: sums two gradients.
        capture: if given, only what leads to these edges runs, and their gradients are returned.
        accumulate_captured: the nodes at captured edges run too, so that leaves accumulate.
    """
    task = _Task(add, keep_graph, capture, accumulate_captured)
    outer, _running.callbacks = _running.callbacks, []
    try:
        task.run(roots, grads)
        while _running.callbacks:
            _running.callbacks.pop(0)()
    finally:
        _running.callbacks = outer
    return task.captured


class _Task:
    """One backward pass: gradients waiting at nodes, and how many are still to come."""

    def __init__(
        self, add: Callable, keep_graph: bool, capture: Sequence[Edge] | None, accumulate: bool
    ) -> None:
        self.add, self.keep_graph, self.accumulate = add, keep_graph, accumulate
        self.capture = None if capture is None else list(capture)
        self.captured: list[Any] = [None] * len(capture or ())
        self.waiting: dict[Node, Gradients] = {}
        self.ready: list[tuple[int, int, Node]] = []
        self.arrivals = itertools.count()

    def run(self, roots: Sequence[Edge], grads: Sequence[Any]) -> None:
        self.pending = _count_dependencies(node for node, _ in roots)
        self.needed = self._needed()
        for (node, index), grad in zip(roots, grads, strict=True):
            self._deposit(node, index, grad)
        for node in dict.fromkeys(node for node, _ in roots):
            if self.pending[node] == 0:
                self._push(node)
        while self.ready:
            self._step(heapq.heappop(self.ready)[2])

    def _needed(self) -> set[Node] | None:
        """The nodes that must run; None where all must."""
        if self.capture is None:
            return None
        found = _leading_to(self.pending, self.capture)
        return found | {node for node, _ in self.capture} if self.accumulate else found

    def _push(self, node: Node) -> None:
        heapq.heappush(self.ready, (-node.sequence, next(self.arrivals), node))

    def _deposit(self, node: Node, index: int, grad: Any) -> None:
        slots = self.waiting.get(node)
        if slots is None:
            slots = self.waiting[node] = [None] * node.num_outputs
        if grad is not None:
            slots[index] = grad if slots[index] is None else self.add(slots[index], grad)

    def _step(self, node: Node) -> None:
        grads = self.waiting.pop(node, None)
        results: Gradients | None = None
        if grads is not None and any(g is not None for g in grads):
            if self.needed is None or node in self.needed:
                self._store_captured(node, grads)
                results = _apply(node, _before(node, _tensor_hooks(node, grads)))
                if not self.keep_graph:
                    node.release()
            elif any(target is node for target, _ in self.capture or ()):
                self._store_captured(node, _tensor_hooks(node, grads))
        for position, edge in enumerate(node.next_edges):
            if edge is None:
                continue
            target, index = edge
            if results is not None:
                self._deposit(target, index, results[position])
            self.pending[target] -= 1
            if self.pending[target] == 0:
                self._push(target)

    def _store_captured(self, node: Node, grads: Gradients) -> None:
        for position, (target, index) in enumerate(self.capture or ()):
            if target is node:
                self.captured[position] = grads[index]


def _tensor_hooks(node: Node, grads: Gradients) -> Gradients:
    """Runs the hooks on single outputs of ``node``, then fills the ``grad`` they retain."""
    if not node._output_hooks and not node.retained:
        return grads
    grads = list(grads)
    for index, hooks in (node._output_hooks or {}).items():
        if grads[index] is not None and hooks:
            grads[index] = run_gradient_hooks(hooks, grads[index])
    for index, keep in (node.retained or {}).items():
        if grads[index] is not None:
            keep(grads[index])
    return grads


def _before(node: Node, grads: Gradients) -> Gradients:
    for hook in list((node._pre_hooks or {}).values()):
        grads = _replaced(hook(tuple(grads)), grads)
    return grads


def _apply(node: Node, grads: Gradients) -> Gradients:
    while node.restore is not None:  # once for each checkpoint around it
        node.restore()
    results = node.backward(grads)
    for hook in list((node._hooks or {}).values()):
        results = _replaced(hook(tuple(results), tuple(grads)), results)
    return results


def _replaced(returned: Any, grads: Gradients) -> Gradients:
    """What a node's hook returned, in place of ``grads``; None keeps them."""
    if returned is None:
        return grads
    replaced = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if len(replaced) != len(grads):
        raise RuntimeError(
            f"hook has changed the number of gradients: it got {len(grads)}, and returned "
            f"{len(replaced)}"
        )
    return replaced


def _count_dependencies(roots: Iterable[Node]) -> dict[Node, int]:
    """For every node reachable from ``roots``: the number of edges that lead to it."""
    pending: dict[Node, int] = {}
    stack = []
    for node in roots:
        if node not in pending:
            pending[node] = 0
            stack.append(node)
    while stack:
        for edge in stack.pop().next_edges:
            if edge is None:
                continue
            if edge[0] not in pending:
                pending[edge[0]] = 0
                stack.append(edge[0])
            pending[edge[0]] += 1
    return pending


def _leading_to(nodes: Iterable[Node], targets: Sequence[Edge]) -> set[Node]:
    """The nodes from which one of ``targets`` can be reached by at least one edge."""
    wanted = {node for node, _ in targets}
    inverse: dict[Node, list[Node]] = {}
    for node in nodes:
        for edge in node.next_edges:
            if edge is not None:
                inverse.setdefault(edge[0], []).append(node)
    found: set[Node] = set()
    stack = list(wanted)
    while stack:
        for parent in inverse.get(stack.pop(), ()):
            if parent not in found:
                found.add(parent)
                stack.append(parent)
    return found
