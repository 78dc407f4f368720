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
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._device import device, jax_device
from .._ops.creation import full_like
from .._tensor import Storage, Tensor, wrap
from ..autograd import enable_grad
from ._optimizer import Optimizer, ParamGroup

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
        counts, work = StepCounts(), _Work()
        group = None
        for p, own_group in batch:
            if own_group is not group:
                group = own_group
                initial = self._initial_state(group)
                work.start_run(self._options(group), tuple(initial))
                hypers: dict[int, Any] = {}
            step, state = self._prepare(p, initial, counts)
            if step not in hypers:
                hypers[step] = self._hyper(group, step)
            work.add(p, [state[name] for name in initial], hypers[step])
        work.run(type(self).rule)
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
                state[name] = full_like(p, start, device=p.device)
                step = step if self.counts_steps else 1
        return step, state


def _batches(groups: Iterable[ParamGroup]) -> Iterable[list[tuple[Tensor, ParamGroup]]]:
    """Parameters with gradients, by what one program can hold.

    That is: arrays on the same devices, one dtype of arithmetic, and each storage once. The second
    of two parameters that share a storage is updated after the first.
    """
    batches: dict[Any, list[tuple[Tensor, ParamGroup]]] = {}
    seen: Counter[int] = Counter()
    for group in groups:
        for p in group["params"]:
            if p.grad is None:
                continue
            array = p._storage.array
            turn = seen[id(p._storage)]
            seen[id(p._storage)] += 1
            key = (turn, _place(array.sharding), array.dtype in _WIDE)
            batches.setdefault(key, []).append((p, group))
    return batches.values()


@functools.lru_cache(maxsize=1024)
def _place(sharding: Any) -> tuple[Any, Any]:
    return frozenset(sharding.device_set), sharding.memory_kind


_WIDE = (np.dtype(np.float64), np.dtype(np.complex128))


class StepCounts:
    """Reads and advances ``state["step"]``: a float32 tensor of its own for each parameter.

    Equal counts share one array, so that a step costs one host read and one new array, however
    many parameters there are.
    """

    def __init__(self) -> None:
        self._read: dict[int, tuple[Any, int]] = {}
        self._arrays: dict[int, Any] = {}

    def read(self, state: dict[str, Any]) -> int:
        step = state.get("step")
        if not isinstance(step, Tensor):
            step = state["step"] = wrap(_host_scalar(step or 0))
        array = step._storage.array
        known = self._read.get(id(array))
        if known is None:
            known = self._read[id(array)] = (array, int(step._host()))
        return known[1]

    def advance(self, state: dict[str, Any]) -> None:
        count = self.read(state) + 1
        if count not in self._arrays:
            self._arrays[count] = _host_scalar(count)
        _store(state["step"], self._arrays[count])


def _host_scalar(value: float) -> Any:
    try:
        place = jax_device(device("cpu"))
    except RuntimeError:
        place = None
    return jax.device_put(np.float32(value), place)


class _Plan(NamedTuple):
    """What selects a program: the rule, and (options, names of state, how many) of each run."""

    rule: Rule
    hyper: type
    runs: tuple[tuple[Any, tuple[str, ...], int], ...]


class _Work:
    """The arrays of one call of the program, and where its results go."""

    def __init__(self) -> None:
        self.cells: list[list[Tensor]] = []
        self.grads: list[Any] = []
        self.hypers: list[Any] = []
        self.runs: list[tuple[Any, tuple[str, ...]]] = []
        self.starts: list[int] = []

    def start_run(self, options: Any, names: tuple[str, ...]) -> None:
        """What is added from here on has these options and state."""
        self.runs.append((options, names))
        self.starts.append(len(self.cells))

    def add(self, p: Tensor, state: list[Tensor], hyper: Any) -> None:
        self.cells.append([p, *state])
        self.grads.append(_array_of(p.grad))  # type: ignore[arg-type]
        self.hypers.append(hyper)

    def run(self, rule: Rule) -> None:
        ends = [*self.starts[1:], len(self.cells)]
        runs = tuple(
            (*run, end - start)
            for run, start, end in zip(self.runs, self.starts, ends, strict=True)
        )
        wide = self.cells[0][0]._storage.array.dtype in _WIDE
        rows = np.array(self.hypers, np.float64 if wide else np.float32)
        with jax.enable_x64(True):
            owned = [tuple([_sole(t) for t in cell]) for cell in self.cells]
            results = _update(_Plan(rule, type(self.hypers[0]), runs), owned, self.grads, rows)
        for cell, arrays in zip(self.cells, results, strict=True):
            for t, array in zip(cell, arrays, strict=True):
                _store(t, array)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _update(plan: _Plan, owned: Any, grads: Any, rows: Any) -> Any:
    """New arrays in place of ``owned``: for each parameter (itself, state, ...).

    ``rows`` holds the scalars: one row for each parameter, in the dtype of the arithmetic.
    """
    results: list[tuple[Any, ...]] = []
    for options, names, count in plan.runs:
        for _ in range(count):
            index = len(results)
            hyper = plan.hyper(*_scalars(rows, index))
            p, *state = (_widened(a, rows.dtype) for a in owned[index])
            g = _widened(grads[index], rows.dtype)
            p, new = plan.rule(p, g, dict(zip(names, state, strict=True)), hyper, options)
            out = (p, *(new[name] for name in names))
            results.append(tuple(_narrowed(a, o) for a, o in zip(out, owned[index], strict=True)))
    return results


def _scalars(rows: Any, index: int) -> list[Any]:
    row = lax.index_in_dim(rows, index, keepdims=False)
    return [lax.index_in_dim(row, j, keepdims=False) for j in range(row.shape[0])]


def _widened(array: Any, dtype: Any) -> Any:
    """In the dtype of the arithmetic; complex numbers as pairs of reals."""
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag], axis=-1)
    return array.astype(dtype)


def _narrowed(array: Any, like: Any) -> Any:
    if jnp.iscomplexobj(like):
        array = lax.complex(array[..., 0], array[..., 1])
    return array.astype(like.dtype)


def _whole(t: Tensor) -> bool:
    """Whether the update concerns all of the storage: padding of sharded tensors belongs to it."""
    return t._chain is None or t._layout is not None


def _array_of(t: Tensor) -> Any:
    return t._storage.array if _whole(t) else t._read()


def _sole(t: Tensor) -> Any:
    """The array of ``t`` to donate: a copy where something else than its storage holds it.

    Storages may share an array (arrays are immutable), and donation takes it away from all. Held
    means: by a Python reference. Two Array objects over one buffer (``device_put`` to where the
    array is, ``addressable_data``) are not seen here; who makes such a pair has to keep it in step.
    """
    if not _whole(t):
        return jnp.copy(t._read())
    t._cached = None
    if _holders(t._storage) > _STORAGE_ALONE:
        t._storage.array = jnp.copy(t._storage.array)
    return t._storage.array


def _holders(storage: Storage) -> int:
    return sys.getrefcount(storage.array)


_STORAGE_ALONE = _holders(Storage(object()))


def _store(t: Tensor, array: Any) -> None:
    if _whole(t):
        t._storage.array = array
        t._storage.version += 1
    else:
        t._write(array)
