"""Collectives that reduce and broadcast tensors. Source: torch.distributed.

Results are written into the tensors that are given. Nothing is recorded for autograd. With
``async_op`` a call returns a `Work` as soon as every member has made it; without, None. A rank
outside ``group`` gets a warning and None. All raise ``ValueError`` before ``init_process_group``,
``TypeError`` where an argument is no tensor (or list of tensors), and `DistBackendError` where
a member is gone or the members' calls, shapes or dtypes differ: with rank threads always, with
processes if TORCH_DISTRIBUTED_DEBUG is DETAIL.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._tensor import Tensor
from . import _lax_collectives as per_rank
from ._flat import first, stacked
from ._group_call import (
    check_length,
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
from ._reduce_op import ReduceOp, checked_op
from ._work import Work


def all_reduce(
    tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Combine the ranks' ``tensor`` elementwise, on every rank, bit for bit the same.

    Args:
        tensor: input and output; any shape, equal on all ranks.
        op: see `ReduceOp` for the dtypes it takes.

    Raises:
        RuntimeError, ValueError: the dtype is none that ``op`` takes.
    """
    check_tensor(tensor, "tensor")
    checked_op(op).check("all_reduce", tensor.dtype)
    chosen = group_of("all_reduce", group)
    if chosen is None:
        return None
    value = _all_reduced(chosen, f"all_reduce({op.name})", tensor, op)
    write(tensor, value)
    return finish([value], async_op)


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """As `all_reduce`, but only rank ``dst`` gets the result; the others keep their ``tensor``.

    Args:
        tensor: input, and on rank ``dst`` output; any shape, equal on all ranks.
        dst: global rank; or ``group_dst``, its place in ``group``.

    Raises:
        RuntimeError, ValueError: the dtype is none that ``op`` takes; ``dst`` is not a member.
    """
    check_tensor(tensor, "tensor")
    checked_op(op).check("reduce", tensor.dtype)
    chosen = group_of("reduce", group)
    if chosen is None:
        return None
    root = root_of(chosen, dst, group_dst)
    value = _all_reduced(chosen, f"reduce({op.name}, dst={chosen.ranks[root]})", tensor, op)
    if chosen.rank() == root:
        write(tensor, value)
    return finish([value], async_op)


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy rank ``src``'s ``tensor`` into every rank's.

    Args:
        tensor: input on rank ``src``, output on the others; any shape, equal on all ranks.
        src: global rank; or ``group_src``, its place in ``group``.

    Raises:
        ValueError: ``src`` is not a member.
    """
    check_tensor(tensor, "tensor")
    chosen = group_of("broadcast", group)
    if chosen is None:
        return None
    root = root_of(chosen, src, group_src)

    def build(axis: str, ranks: int, gloo: bool) -> Any:
        return lambda x: [per_rank.broadcast(x, axis, ranks, root)]

    (value,) = run(chosen, f"broadcast(src={chosen.ranks[root]})", build, [read(tensor)])
    if chosen.rank() != root:
        write(tensor, value)
    return finish([value], async_op)


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Combine the ranks' ``input_list[r]`` elementwise and put the result into rank r's ``output``.

    Args:
        output: of as many elements as ``input_list[own rank]``.
        input_list: one tensor per rank; shapes may differ within the list, but not between ranks.
        op: see `ReduceOp` for the dtypes it takes.

    Raises:
        ValueError: not one tensor per rank, another dtype, or ``output`` has another size.
        RuntimeError, ValueError: the dtype is none that ``op`` takes.
    """
    check_tensor(output, "output")
    check_tensors(input_list, "input_list")
    check_same_dtype(output, *input_list)
    checked_op(op).check("reduce_scatter", output.dtype)
    chosen = group_of("reduce_scatter", group)
    if chosen is None:
        return None
    check_length(input_list, "input_list", chosen)
    own = input_list[chosen.rank()].numel()
    check_size("reduce_scatter", "output", output, own, "input_list[own rank] has another size")

    def build(axis: str, ranks: int, gloo: bool) -> Any:
        def body(*parts: Any) -> list[Any]:
            rows = stacked(parts, max(part.size for part in parts))
            return [per_rank.reduce_scatter(rows, _kind(op), axis, ranks, gloo)]

        return body

    inputs = [_premultiplied(read(t), op) for t in input_list]
    (row,) = run(chosen, f"reduce_scatter({op.name})", build, inputs)
    value = first(row, own)
    write(output, value)
    return finish([value], async_op)


def reduce_scatter_single(
    output: Tensor,
    input: Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Combine the ranks' ``input`` elementwise and put its r-th part into rank r's ``output``.

    Args:
        output: any shape, equal on all ranks.
        input: the parts concatenated along dim 0, or stacked.
        op: see `ReduceOp` for the dtypes it takes.

    Raises:
        ValueError: ``input`` does not have world size times the output's elements.
        TypeError: it has another dtype.
        RuntimeError, ValueError: the dtype is none that ``op`` takes.
    """
    check_pair(output, input, ("output", "input"))
    checked_op(op).check("reduce_scatter_single", output.dtype)
    chosen = group_of("reduce_scatter_single", group)
    if chosen is None:
        return None
    check_size(
        "reduce_scatter_single", "input", input, chosen.size() * output.numel(),
        "input tensor must be the same size as output size times world size",
    )  # fmt: skip

    def build(axis: str, ranks: int, gloo: bool) -> Any:
        def body(x: Any) -> list[Any]:
            rows = x.reshape(ranks, x.size // ranks)
            return [per_rank.reduce_scatter(rows, _kind(op), axis, ranks, gloo)]

        return body

    value_in = _premultiplied(read(input), op)
    (value,) = run(chosen, f"reduce_scatter_single({op.name})", build, [value_in])
    write(output, value)
    return finish([value], async_op)


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """The older name of `reduce_scatter_single`."""
    return reduce_scatter_single(output, input, op, group, async_op)


def _all_reduced(group: ProcessGroup, call: str, tensor: Tensor, op: ReduceOp) -> jax.Array:
    def build(axis: str, ranks: int, gloo: bool) -> Any:
        return lambda x: [per_rank.all_reduce(x, _kind(op), axis, ranks)]

    (value,) = run(group, call, build, [_premultiplied(read(tensor), op)])
    return value


def _kind(op: ReduceOp) -> str:
    """What remains to be done when each rank has applied its own factor."""
    return "SUM" if op.name == "PREMUL_SUM" else op.name


def _premultiplied(value: Any, op: ReduceOp) -> Any:
    if op.name != "PREMUL_SUM":
        return value
    factor = op.factor._read() if isinstance(op.factor, Tensor) else op.factor
    with jax.enable_x64(True):
        return _scaled(value, factor)


@jax.jit
def _scaled(value: Any, factor: Any) -> Any:
    return value * jnp.asarray(factor).reshape(()).astype(value.dtype)
