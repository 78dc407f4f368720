"""One jitted update for all parameters of an optimizer.

An optimizer of this kind is a *rule*: a pure function for a single parameter,
``rule(p, g, state, hyper, options) -> (p, state)``. ``p``, ``g`` and the state are real arrays in
the dtype of the arithmetic (float64 for float64 parameters, else float32), ``hyper`` a named tuple
of scalars that may change at every step, ``options`` a named tuple of what selects the program.
Parameters on the same devices are updated by one call of one program; their arrays and those of
their state are donated to it, so that the update happens in place.

The storage of a sharded parameter holds rows of padding, which are zero in the parameter, the
gradient and the state. A rule must leave them so: it gets zeros there, and must return zeros.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._tensor import Tensor
from ..autograd import enable_grad
from ._donation import alike, array_of, sole, store
from ._optimizer import Optimizer, ParamGroup, state_like
from ._step_counts import StepCounts

Arrays = dict[str, Any]
Rule = Callable[[Any, Any, Arrays, Any, Any], tuple[Any, Arrays]]


class RuleOptimizer(Optimizer):
    """An optimizer given by a rule; see the module's docstring.

    Subclasses set ``rule``, and say for a group what the rule is to be given.
    """

    rule: ClassVar[staticmethod[..., tuple[Any, Arrays]]]
    counts_steps: ClassVar[bool] = True

    def _options(self, group: ParamGroup) -> Any:
        """The hashable named tuple of what selects the program."""
        raise NotImplementedError

    def _hyper(self, group: ParamGroup, step: int) -> Any:
        """The named tuple of scalars (Python floats) for a parameter's step number ``step``.

        Steps count from 1. Without ``counts_steps``, every step after the first is number 2.
        """
        raise NotImplementedError

    def _initial_state(self, group: ParamGroup) -> dict[str, float]:
        """The state tensors, in the rule's order, with the value that they start from."""
        raise NotImplementedError

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient.

        Args:
            closure: computes the loss and its gradients anew; what it returns is returned.

        Raises:
            RuntimeError: a parameter is not to be stepped on now; nothing was changed.
        """
        loss = None
        if closure is not None:
            with enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p._refusal is not None:
                    raise RuntimeError(f"optimizer.step(): {p._refusal}")
        for batch in _batches(self.param_groups):
            self._step_batch(batch)
        return loss

    def _step_batch(self, batch: list[tuple[Tensor, ParamGroup]]) -> None:
        counts = StepCounts()
        runs: list[_Run] = []
        group = None
        for p, own_group in batch:
            if own_group is not group:
                group = own_group
                initial = self._initial_state(group)
                runs.append(_Run(self._options(group), tuple(initial)))
                hypers: dict[int, Any] = {}
            step, state = self._prepare(p, initial, counts)
            if step not in hypers:
                hypers[step] = self._hyper(group, step)
            runs[-1].add(p, [state[name] for name in initial], hypers[step])
        _run_program(type(self).rule, runs)
        if self.counts_steps:
            for p, _ in batch:
                counts.advance(self.state[p])

    def _prepare(
        self, p: Tensor, initial: dict[str, float], counts: StepCounts
    ) -> tuple[int, dict[str, Any]]:
        """The number of the step that ``p`` is to take, and its state, made where missing."""
        if not initial and not self.counts_steps:
            return 2, {}
        state = self.state[p]
        step = counts.read(state) + 1 if self.counts_steps else 2
        for name, value in initial.items():
            if state.get(name) is None:
                start = complex(value, value) if p.is_complex() else value
                state[name] = state_like(p, start)
                step = step if self.counts_steps else 1
        return step, state


def _batches(groups: Iterable[ParamGroup]) -> Iterable[list[tuple[Tensor, ParamGroup]]]:
    """Parameters with gradients, by what one program can hold.

    That is: arrays on the same devices, one dtype of arithmetic, and each storage once. The second
    of two parameters that share a storage is updated after the first. Of parameters that are kept
    in host memory only some at a time are on the devices.
    """
    batches: dict[Any, list[tuple[Tensor, ParamGroup]]] = {}
    seen: Counter[int] = Counter()
    moved = 0
    for group in groups:
        for p in group["params"]:
            if p.grad is None:
                continue
            array = p._storage.stored
            turn = seen[id(p._storage)]
            seen[id(p._storage)] += 1
            portion = 0
            if p._layout is not None and p._layout.memory is not None:
                portion = moved // _PORTION
                moved += array.nbytes
            key = (turn, _place(array.sharding), array.dtype in _WIDE, portion)
            batches.setdefault(key, []).append((p, group))
    return batches.values()


_PORTION = 256 << 20  # bytes of parameters that move to the devices together


@functools.lru_cache(maxsize=1024)
def _place(sharding: Any) -> tuple[Any, Any]:
    return frozenset(sharding.device_set), sharding.memory_kind


_WIDE = (np.dtype(np.float64), np.dtype(np.complex128))


class _Run:
    """Parameters that share options: one after the other in a group."""

    def __init__(self, options: Any, names: tuple[str, ...]) -> None:
        self.options, self.names = options, names
        self.cells: list[list[Tensor]] = []
        self.grads: list[Any] = []
        self.hypers: list[Any] = []

    def add(self, p: Tensor, state: list[Tensor], hyper: Any) -> None:
        self.cells.append([p, *state])
        self.grads.append(array_of(p.grad))  # type: ignore[arg-type]
        self.hypers.append(hyper)

    def rows(self, dtype: Any) -> list[np.ndarray]:
        """The scalars: one row for all parameters where they are equal, else one for each."""
        first = self.hypers[0]
        hypers = [first] if all(h is first for h in self.hypers) else self.hypers
        return [np.array(hyper, dtype) for hyper in hypers]


class _Plan(NamedTuple):
    """What selects a program: the rule, and the options and names of state of each run."""

    rule: Rule
    hyper: type
    runs: tuple[tuple[Any, tuple[str, ...]], ...]


def _run_program(rule: Rule, runs: list[_Run]) -> None:
    wide = runs[0].cells[0][0]._storage.array.dtype in _WIDE
    rows = [run.rows(np.float64 if wide else np.float32) for run in runs]
    plan = _Plan(rule, type(runs[0].hypers[0]), tuple((run.options, run.names) for run in runs))
    with jax.enable_x64(True):
        owned = [[tuple([sole(t) for t in cell]) for cell in run.cells] for run in runs]
        owned, grads = alike(owned, [run.grads for run in runs])
        results = _update(plan, owned, grads, rows)
    for run, arrays_of_run in zip(runs, results, strict=True):
        for cell, arrays in zip(run.cells, arrays_of_run, strict=True):
            for t, array in zip(cell, arrays, strict=True):
                store(t, array)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _update(plan: _Plan, owned: Any, grads: Any, rows: Any) -> Any:
    """New arrays in place of ``owned``: for each run and parameter (itself, state, ...).

    Every parameter's kernels read their scalars from the start of a row of their own: kernels of
    parameters of one shape are then equal, and XLA compiles them once.
    """
    return [
        [
            _updated(plan, run, cell, grad, rows_of_run[index if len(rows_of_run) > 1 else 0])
            for index, (cell, grad) in enumerate(zip(cells, grads_of_run, strict=True))
        ]
        for run, cells, grads_of_run, rows_of_run in zip(plan.runs, owned, grads, rows, strict=True)
    ]


def _updated(plan: _Plan, run: Any, cell: Any, grad: Any, row: Any) -> tuple[Any, ...]:
    options, names = run
    hyper = plan.hyper(*(lax.index_in_dim(row, j, keepdims=False) for j in range(row.shape[0])))
    p, *values = (_widened(a, row.dtype) for a in cell)
    state = dict(zip(names, values, strict=True))
    p, state = plan.rule(p, _widened(grad, row.dtype), state, hyper, options)
    out = (p, *(state[name] for name in names))
    return tuple(_narrowed(a, like) for a, like in zip(out, cell, strict=True))


def _widened(array: Any, dtype: Any) -> Any:
    """In the dtype of the arithmetic; complex numbers as pairs of reals."""
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag], axis=-1)
    return array.astype(dtype)


def _narrowed(array: Any, like: Any) -> Any:
    if jnp.iscomplexobj(like):
        array = lax.complex(array[..., 0], array[..., 1])
    return array.astype(like.dtype)
