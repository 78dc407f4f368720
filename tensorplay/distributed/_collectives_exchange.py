"""Collectives in which every rank has something for every other; see also ``_collectives``."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._tensor import Tensor, to_host
from . import _lax_collectives as per_rank
from ._flat import first, stacked
from ._group_call import (
    check_length,
    check_pair,
    check_same_dtype,
    check_tensors,
    finish,
    group_of,
    read,
    run,
    write,
)
from ._process_group import Group, ProcessGroup
from ._work import Work

Sizes = np.ndarray[Any, Any]


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Put rank s's ``input_tensor_list[r]`` into rank r's ``output_tensor_list[s]``.

    The ranks tell each other the sizes first, so the call waits for all of them.

    Args:
        output_tensor_list: one per rank, each of as many elements as that rank has for this one.
        input_tensor_list: one per rank, any shapes.

    Raises:
        ValueError: not one tensor per rank, another dtype, or, on all ranks, sizes that differ
            between sender and receiver.
    """
    check_tensors(output_tensor_list, "output_tensor_list")
    check_tensors(input_tensor_list, "input_tensor_list")
    check_same_dtype(*output_tensor_list, *input_tensor_list)
    chosen = group_of("all_to_all", group)
    if chosen is None:
        return None
    check_length(output_tensor_list, "output_tensor_list", chosen)
    check_length(input_tensor_list, "input_tensor_list", chosen)
    wanted = [t.numel() for t in output_tensor_list]
    sent = _agreed_sizes(
        chosen, "all_to_all", [t.numel() for t in input_tensor_list], wanted, "elements"
    )
    with jax.enable_x64(True):
        rows = _rows_of([read(t) for t in input_tensor_list], _row_size(sent))
        received = _exchanged(chosen, "all_to_all", rows)
        values = [first(row, size) for row, size in zip(_split(received), wanted, strict=True)]
    for output, value in zip(output_tensor_list, values, strict=True):
        write(output, value)
    return finish(values, async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Cut ``input`` along dim 0 into one part per rank; ``output`` is the received parts, joined.

    With split sizes, which then all ranks must pass, the ranks tell each other the sizes first, so
    the call waits for all of them.

    Args:
        output, input: at least one dim, the same dims but dim 0.
        output_split_sizes: rows that come from each rank; default equally many.
        input_split_sizes: rows that go to each rank; default equally many.

    Raises:
        RuntimeError: the split sizes do not add up to dim 0, or dim 0 does not divide.
        ValueError: the dims but dim 0 differ, or, on all ranks, sizes that differ between sender
            and receiver.
        TypeError: ``output`` has another dtype.
    """
    check_pair(output, input, ("output", "input"))
    chosen = group_of("all_to_all_single", group)
    if chosen is None:
        return None
    if output.shape[1:] != input.shape[1:] or not input.dim() or not output.dim():
        raise ValueError(
            "all_to_all_single: output and input must have the same dims but dim 0; got shapes "
            f"{list(output.shape)} and {list(input.shape)}"
        )
    wanted = _splits(output_split_sizes, output, chosen)
    given = _splits(input_split_sizes, input, chosen)
    with jax.enable_x64(True):
        if output_split_sizes or input_split_sizes:
            value = _exchange_parts(chosen, _as_matrix(read(input)), given, wanted)
        else:
            _check_equal_parts(output, input)
            value = _exchanged(chosen, "all_to_all_single", _in_parts(read(input), chosen.size()))
    write(output, value)
    return finish([value], async_op)


def _check_equal_parts(output: Tensor, input: Tensor) -> None:
    if output.shape != input.shape:
        raise ValueError(
            "all_to_all_single without split sizes: output and input must have one shape; got "
            f"{list(output.shape)} and {list(input.shape)}"
        )


def _splits(sizes: Sequence[int] | None, tensor: Tensor, group: ProcessGroup) -> list[int]:
    rows = tensor.shape[0]
    if not sizes:
        if rows % group.size():
            raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
        return [rows // group.size()] * group.size()
    if len(sizes) != group.size():
        raise RuntimeError("Number of tensor splits not equal to group size")
    if sum(sizes) != rows or min(sizes) < 0:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")
    return [int(size) for size in sizes]


def _exchange_parts(
    group: ProcessGroup, rows: Any, given: Sequence[int], wanted: Sequence[int]
) -> Any:
    """``rows`` in parts of ``given`` sizes to the ranks; returns the rows that came.

    The compiled exchange knows only the largest part, so that it need not be compiled anew for
    every choice of sizes.
    """
    sent = _agreed_sizes(group, "all_to_all_single", given, wanted, "rows")
    longest = _row_size(sent)
    out = _taken(rows, _places(given, longest, into_padded=True))
    received = _exchanged(
        group, "all_to_all_single", out.reshape(group.size(), longest, rows.shape[1])
    )
    flat = received.reshape(group.size() * longest, rows.shape[1])
    return _taken(flat, _places(wanted, longest, into_padded=False))


def _places(sizes: Sequence[int], longest: int, into_padded: bool) -> Sizes:
    """Where the rows of a padded exchange come from, or (not ``into_padded``) lie in it."""
    column = np.arange(longest)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    used = column < np.asarray(sizes)[:, None]
    if into_padded:
        return np.where(used, starts[:, None] + column, 0).reshape(-1)
    return np.flatnonzero(used)


def _agreed_sizes(
    group: ProcessGroup, name: str, given: Sequence[int], wanted: Sequence[int], unit: str
) -> Sizes:
    """Element [s, r]: how much rank s sends to rank r.

    Raises:
        ValueError: on all ranks, where one does not expect what another sends.
    """

    def build(axis: str, ranks: int, gloo: bool) -> Any:
        return lambda x: [lax.all_gather(x, axis)]

    own = jnp.asarray(np.array([given, wanted], np.int64))
    (everyones,) = run(group, f"{name} (sizes)", build, [own])
    sizes = to_host(everyones)
    sent, expected = sizes[:, 0], sizes[:, 1].T
    for source, target in np.argwhere(sent != expected):
        raise ValueError(
            f"{name}: rank {group.ranks[source]} sends {sent[source, target]} {unit} to rank "
            f"{group.ranks[target]}, which expects {expected[source, target]}"
        )
    return sent  # type: ignore[no-any-return]


def _row_size(sent: Sizes) -> int:
    """Room for any part: the largest, rounded up unless all are equal."""
    largest = int(sent.max())
    if (sent == largest).all() or largest == 0:
        return largest
    return 1 << (largest - 1).bit_length()


def _exchanged(group: ProcessGroup, name: str, rows: Any) -> jax.Array:
    def build(axis: str, ranks: int, gloo: bool) -> Any:
        return lambda x: [per_rank.all_to_all(x, axis)]

    (received,) = run(group, name, build, [rows])
    return received


@functools.partial(jax.jit, static_argnums=1)
def _rows_of(parts: Sequence[Any], size: int) -> Any:
    return stacked(parts, size)


@functools.partial(jax.jit, static_argnums=1)
def _in_parts(x: Any, ranks: int) -> Any:
    return x.reshape(ranks, x.shape[0] // ranks, *x.shape[1:])


@jax.jit
def _as_matrix(x: Any) -> Any:
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


@jax.jit
def _split(rows: Any) -> list[Any]:
    return list(rows)


@jax.jit
def _taken(rows: Any, places: Any) -> Any:
    """Rows at ``places``; any zeros where there are no rows at all."""
    if rows.shape[0] == 0:
        return jnp.zeros((places.shape[0], *rows.shape[1:]), rows.dtype)
    return jnp.take(rows, places, axis=0)
