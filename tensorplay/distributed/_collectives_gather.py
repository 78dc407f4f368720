"""Collectives that gather and scatter tensors; see ``_collectives`` for what all have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from .._tensor import Tensor
from . import _lax_collectives as per_rank
from ._flat import first, padded
from ._group_call import (
    check_length,
    check_list_of_root,
    check_pair,
    check_same_dtype,
    check_size,
    check_tensor,
    check_tensors,
    finish,
    group_of,
    read,
    root_of,
    run,
    write,
)
from ._process_group import Group, ProcessGroup
from ._work import Work


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Put rank r's ``tensor`` into every rank's ``tensor_list[r]``.

    Args:
        tensor_list: outputs, one per rank, each of as many elements as that rank's ``tensor``.
        tensor: any shape; it may differ between ranks.

    Raises:
        ValueError: not one tensor per rank, another dtype, or ``tensor_list[own rank]`` has
            another number of elements than ``tensor``.
    """
    check_tensors(tensor_list, "tensor_list")
    check_tensor(tensor, "tensor")
    check_same_dtype(tensor, *tensor_list)
    chosen = group_of("all_gather", group)
    if chosen is None:
        return None
    check_length(tensor_list, "tensor_list", chosen)
    own = tensor_list[chosen.rank()]
    check_size("all_gather", "tensor", tensor, own.numel(), "tensor_list has room for this rank's")
    values = _gathered(chosen, "all_gather", tensor, [t.numel() for t in tensor_list])
    for output, value in zip(tensor_list, values, strict=True):
        write(output, value)
    return finish(values, async_op)


def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Put all ranks' ``input_tensor``, one behind the other, into every rank's ``output_tensor``.

    Args:
        output_tensor: the inputs concatenated along dim 0, or stacked.
        input_tensor: any shape, equal on all ranks.

    Raises:
        ValueError: ``output_tensor`` does not have world size times the input's elements.
        TypeError: it has another dtype.
    """
    check_pair(output_tensor, input_tensor, ("output_tensor", "input_tensor"))
    chosen = group_of("all_gather_single", group)
    if chosen is None:
        return None
    check_size(
        "all_gather_single", "output_tensor", output_tensor, chosen.size() * input_tensor.numel(),
        "output tensor size must be equal to world_size times input tensor size",
    )  # fmt: skip

    def build(axis: str, ranks: int, gloo: bool) -> Any:
        return lambda x: [lax.all_gather(x, axis)]

    (value,) = run(chosen, "all_gather_single", build, [read(input_tensor)])
    write(output_tensor, value)
    return finish([value], async_op)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """The older name of `all_gather_single`."""
    return all_gather_single(output_tensor, input_tensor, group, async_op)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Put rank r's ``tensor`` into ``gather_list[r]`` on rank ``dst``.

    Args:
        tensor: any shape, equal on all ranks.
        gather_list: on rank ``dst`` the outputs, one per rank, of as many elements as ``tensor``;
            None or empty on the others.
        dst: global rank (default 0); or ``group_dst``, its place in ``group``.

    Raises:
        ValueError: ``gather_list`` is missing or too much, its tensors do not fit, or ``dst`` is
            not a member.
    """
    check_tensor(tensor, "tensor")
    outputs = gather_list or []
    check_tensors(outputs, "gather_list")
    check_same_dtype(tensor, *outputs)
    chosen = group_of("gather", group)
    if chosen is None:
        return None
    root = root_of(chosen, dst, group_dst, default=0)
    check_list_of_root(chosen, root, outputs, "gather_list", "destination")
    for output in outputs:
        check_size("gather", "gather_list", output, tensor.numel(), "all tensors have one size")

    def build(axis: str, ranks: int, gloo: bool) -> Any:
        return lambda x: list(per_rank.gather(x, axis, ranks, root, gloo))

    values = run(chosen, f"gather(dst={chosen.ranks[root]})", build, [read(tensor)])
    for output, value in zip(outputs, values, strict=False):
        write(output, value)
    return finish(values, async_op)


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Put rank ``src``'s ``scatter_list[r]`` into rank r's ``tensor``.

    Args:
        tensor: output; any shape, equal on all ranks.
        scatter_list: on rank ``src`` the inputs, one per rank, of as many elements as ``tensor``;
            None or empty on the others.
        src: global rank (default 0); or ``group_src``, its place in ``group``.

    Raises:
        ValueError: ``scatter_list`` is missing or too much, its tensors do not fit, or ``src`` is
            not a member.
    """
    check_tensor(tensor, "tensor")
    inputs = scatter_list or []
    check_tensors(inputs, "scatter_list")
    check_same_dtype(tensor, *inputs)
    chosen = group_of("scatter", group)
    if chosen is None:
        return None
    root = root_of(chosen, src, group_src, default=0)
    check_list_of_root(chosen, root, inputs, "scatter_list", "source")
    for part in inputs:
        check_size("scatter", "scatter_list", part, tensor.numel(), "all tensors have one size")

    def build(axis: str, ranks: int, gloo: bool) -> Any:
        return lambda *parts: [per_rank.scatter(parts, axis, ranks, root)]

    own = padded(read(tensor), tensor.numel())
    parts = [padded(read(part), tensor.numel()) for part in inputs] or [own] * chosen.size()
    (value,) = run(chosen, f"scatter(src={chosen.ranks[root]})", build, parts)
    write(tensor, value)
    return finish([value], async_op)


def _gathered(
    group: ProcessGroup, call: str, tensor: Tensor, sizes: Sequence[int]
) -> list[jax.Array]:
    """Each rank's tensor, of ``sizes[r]`` elements; they travel as flat as the largest."""
    value = read(tensor)
    if len(set(sizes)) > 1:
        call = f"{call} of {', '.join(map(str, sizes))} elements"
        value = padded(value, max(sizes))

    def build(axis: str, ranks: int, gloo: bool) -> Callable[..., list[Any]]:
        def body(x: Any) -> list[Any]:
            return list(lax.all_gather(x, axis))

        return body

    rows = run(group, call, build, [value])
    return [first(row, size) for row, size in zip(rows, sizes, strict=True)]
