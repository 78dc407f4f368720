"""Views: how a tensor reads and writes a part of another tensor's storage.

jax arrays are immutable, so an alias is a *chain* of steps from the storage's array to the view's
value. Reading applies the chain; writing rebuilds the storage's array with the view's new value in
place. A chain also tells torch's strides, which decide what ``view`` accepts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Step = tuple[str, Any]
Chain = tuple[Step, ...]


def reshape_step(shape: tuple[int, ...]) -> Step:
    return ("reshape", shape)


def permute_step(dims: tuple[int, ...]) -> Step:
    return ("permute", dims)


def expand_step(shape: tuple[int, ...]) -> Step:
    return ("expand", shape)


def slice_step(bounds: tuple[tuple[int, int, int], ...]) -> Step:
    """``bounds``: (start, stop, step) for each dim."""
    return ("slice", bounds)


def diagonal_step(offset: int, dim1: int, dim2: int) -> Step:
    return ("diagonal", (offset, dim1, dim2))


def _forward(step: Step, array: Any) -> Any:
    kind, arg = step
    if kind == "reshape":
        return jnp.reshape(array, arg)
    if kind == "permute":
        return jnp.transpose(array, arg)
    if kind == "expand":
        return jnp.broadcast_to(array, arg)
    if kind == "diagonal":
        return jnp.diagonal(array, *arg)
    if kind == "window":
        window = lax.dynamic_slice(array, arg.starts, arg.spans)
        return window[arg.strides] if arg.strided else window
    starts, stops, steps = zip(*arg, strict=True)
    return lax.slice(array, starts, stops, steps)


def _back(step: Step, array: Any, value: Any) -> Any:
    """``array`` with ``value`` where ``step`` reads."""
    kind, arg = step
    if kind == "reshape":
        return jnp.reshape(value, array.shape)
    if kind == "permute":
        return jnp.transpose(value, tuple(arg.index(i) for i in range(len(arg))))
    if kind == "diagonal":
        positions = jnp.diagonal(jnp.arange(array.size).reshape(array.shape), *arg)
        return array.reshape(-1).at[positions].set(value).reshape(array.shape)
    if kind == "slice":
        return array.at[tuple(slice(*bounds) for bounds in arg)].set(value)
    if kind == "window":
        if arg.strided:
            window = lax.dynamic_slice(array, arg.starts, arg.spans)
            value = window.at[arg.strides].set(value)
        return lax.dynamic_update_slice(array, value, arg.starts)
    raise RuntimeError(
        "unsupported operation: more than one element of the written-to tensor refers to a single "
        "memory location. Please clone() the tensor before performing the operation."
    )


def read(array: Any, chain: Chain) -> Any:
    """The view's value."""
    for step in chain:
        array = _forward(step, array)
    return array


def write(array: Any, value: Any, chain: Chain) -> Any:
    """``array`` with ``value`` in place of the view's."""
    if not chain:
        return value
    inner = _forward(chain[0], array) if len(chain) > 1 else array
    if len(chain) > 1:
        value = write(inner, value, chain[1:])
    return _back(chain[0], array, value)


class _Window:
    """A slice whose starts are known at run time only.

    ``form``: (span, step) of each dim.
    """

    def __init__(self, form: tuple[tuple[int, int], ...], starts: Sequence[Any]) -> None:
        self.starts, self.spans = tuple(starts), tuple(span for span, _ in form)
        self.strides = tuple(slice(None, None, step) for _, step in form)
        self.strided = any(step != 1 for _, step in form)


def split_starts(chain: Chain) -> tuple[Chain, tuple[int, ...]]:
    """The chain without the starts of its slices, and those: so all ``x[i]`` share a program."""
    form: list[Step] = []
    starts: list[int] = []
    for kind, arg in chain:
        if kind == "slice":
            starts += [start for start, _, _ in arg]
            form.append(("window", tuple((stop - start, step) for start, stop, step in arg)))
        else:
            form.append((kind, arg))
    return tuple(form), tuple(starts)


def join_starts(form: Chain, starts: Sequence[Any]) -> Chain:
    """The inverse of `split_starts`, for starts that may be traced."""
    rest = iter(starts)
    return tuple(
        (kind, _Window(arg, [next(rest) for _ in arg]) if kind == "window" else arg)  # type: ignore[misc]
        for kind, arg in form
    )


@partial(jax.jit, static_argnums=1)
def _read_form(array: Any, form: Chain, starts: Sequence[Any]) -> Any:
    return read(array, join_starts(form, starts))


@partial(jax.jit, static_argnums=2)
def _write_form(array: Any, value: Any, form: Chain, starts: Sequence[Any]) -> Any:
    return write(array, value, join_starts(form, starts))


def read_compiled(array: Any, chain: Chain) -> Any:
    """As `read`, by one compiled program for all slices of the same sizes."""
    return _read_form(array, *split_starts(chain))


def write_compiled(array: Any, value: Any, chain: Chain) -> Any:
    """As `write`, by one compiled program for all slices of the same sizes."""
    return _write_form(array, value, *split_starts(chain))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides, running = [], 1
    for size in reversed(shape):
        strides.append(running)
        running *= max(size, 1)
    return tuple(reversed(strides))


Layout = tuple[tuple[int, ...], tuple[int, ...], int]


@lru_cache(maxsize=8192)
def layout(shape: tuple[int, ...], chain: Chain) -> Layout:
    """Shape, strides and offset (in elements) after ``chain`` over a row-major storage."""
    strides, offset = contiguous_strides(shape), 0
    for kind, arg in chain:
        if kind == "reshape":
            found = strides_of_view(shape, strides, arg)
            assert found is not None, "a view is only made where its strides exist"
            shape, strides = arg, found
        elif kind == "permute":
            shape, strides = tuple(shape[d] for d in arg), tuple(strides[d] for d in arg)
        elif kind == "expand":
            shape, strides = _expanded_layout(shape, strides, arg)
        elif kind == "diagonal":
            offset += _diagonal_start(strides, *arg)
            shape, strides = _diagonal_layout(shape, strides, *arg)
        else:
            offset += sum(s * start for s, (start, _, _) in zip(strides, arg, strict=True))
            strides = tuple(s * step for s, (_, _, step) in zip(strides, arg, strict=True))
            shape = tuple(max(0, -(-(stop - start) // step)) for start, stop, step in arg)
    return shape, strides, offset


def _expanded_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    lead = len(new) - len(shape)
    old = (None,) * lead + shape
    return new, tuple(
        0 if o is None or o != n else s
        for o, n, s in zip(old, new, (0,) * lead + strides, strict=True)
    )


def _diagonal_start(strides: tuple[int, ...], offset: int, dim1: int, dim2: int) -> int:
    return offset * strides[dim2] if offset >= 0 else -offset * strides[dim1]


def _diagonal_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, dim1: int, dim2: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rows, cols = shape[dim1], shape[dim2]
    length = max(0, min(rows, cols - offset) if offset >= 0 else min(rows + offset, cols))
    rest = [d for d in range(len(shape)) if d not in (dim1, dim2)]
    return (
        (*(shape[d] for d in rest), length),
        (*(strides[d] for d in rest), strides[dim1] + strides[dim2]),
    )


def strides_of_view(
    shape: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Strides of a view as shape ``new``, or None where only a copy can have that shape.

    Follows ATen's ``computeStride``: a run of dims that is contiguous in itself may be split and
    merged freely, and nothing may cross from one run to the next.
    """
    if math.prod(shape) == 0:
        return strides if shape == new else contiguous_strides(new)
    if not shape:
        return (1,) * len(new)
    result = [0] * len(new)
    view_d = len(new) - 1
    base, numel, view_numel = strides[-1], 1, 1
    for d in range(len(shape) - 1, -1, -1):
        numel *= shape[d]
        run_ends = d == 0 or (shape[d - 1] != 1 and strides[d - 1] != numel * base)
        if not run_ends:
            continue
        while view_d >= 0 and (view_numel < numel or new[view_d] == 1):
            result[view_d] = view_numel * base
            view_numel *= new[view_d]
            view_d -= 1
        if view_numel != numel:
            return None
        if d > 0:
            base, numel, view_numel = strides[d - 1], 1, 1
    return tuple(result) if view_d == -1 else None


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements lie in row-major order without gaps (dims of size 1 do not matter)."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
