"""Gathers and reductions of a group by the user's own Python.

``set_custom_all_gather``, ``set_custom_reduce_scatter`` and ``set_all_reduce_hook`` give a group
functions to run on real tensors. They cannot be part of a compiled program, so a group that has
some is gathered before its program and reduced after it. The buffers and the order of the steps are
those of PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..._device import device as Device
from ..._dtypes import dtype as Dtype
from ..._ops.creation import empty
from ..._tensor import Tensor, wrap
from .._collectives import all_reduce, reduce_scatter_tensor
from .._process_group import ProcessGroup
from .._reduce_op import ReduceOp, _make_nccl_premul_sum
from .._work import Work
from ._api import AllGather, ReduceScatter
from ._collectives import (
    GroupSpec,
    chunks_of,
    divide_factors,
    divided,
    flat_pieces,
    partial_row,
    pieces_of,
    wholes_of,
)
from ._mesh import DataParallelMesh


@dataclasses.dataclass
class CustomComms:
    """What the user has set for one group.

    Attributes:
        all_gather, reduce_scatter: in the place of the built-in collectives.
        all_reduce_hook: called with each reduced row before it becomes gradients.
        force_sum: reductions sum, and are divided in a step of its own.
    """

    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    all_reduce_hook: Callable[[Tensor], None] | None = None
    force_sum: bool = False

    @property
    def reduces(self) -> bool:
        """Whether Python takes part in the reduction."""
        return self.reduce_scatter is not None or self.all_reduce_hook is not None


def _axis_group(mesh: DataParallelMesh, axis: str) -> ProcessGroup:
    return mesh.mesh.get_group(mesh.mesh.axis_names.index(axis))


def gather_in_python(
    comm: AllGather, spec: GroupSpec, mesh: DataParallelMesh, pieces: Sequence[Any]
) -> list[Any]:
    """The whole parameters, in their compute dtype, from this rank's padded pieces."""
    group = _axis_group(mesh, spec.shard_axis)
    with jax.enable_x64(True):
        flat = wrap(_flat_pieces(spec, tuple(pieces)))
    size = flat.numel()
    output = comm.allocate((size * group.size(),), dtype=flat.dtype, device=flat.device)
    own = output[group.rank() * size : (group.rank() + 1) * size]
    own.copy_(flat)
    _wait(comm(output_tensor=output, input_tensor=own, group=group, async_op=False))
    with jax.enable_x64(True):
        return list(_wholes_of(spec, output._read()))


def reduce_in_python(
    comms: CustomComms,
    spec: GroupSpec,
    mesh: DataParallelMesh,
    grads: dict[int, Any],
    partial: dict[int, Any],
    over_replicas: bool,
) -> dict[int, Any]:
    """This rank's padded pieces of the gradients; as ``_collectives.reduce``."""
    indices = tuple(sorted({*grads, *partial}))
    if not indices:
        return {}
    with jax.enable_x64(True):
        chunks = _chunks_of(spec, indices, grads, partial)
    scatter_op, reduce_op, before, after = _operations(comms, spec, chunks.dtype)
    row = _scattered(comms.reduce_scatter, mesh, spec, _divided(chunks, before), scatter_op)
    with jax.enable_x64(True):
        if partial:
            row = wrap(_plus_partial(spec, indices, row._read(), partial))
    if not over_replicas:
        return _final(spec, indices, row, 1, False)
    if spec.replicate_axis is not None and spec.replicate_size > 1:
        all_reduce(row, reduce_op, _axis_group(mesh, spec.replicate_axis))
    if comms.all_reduce_hook is not None:
        comms.all_reduce_hook(row)
    return _final(spec, indices, row, after, True)


def _scattered(
    comm: ReduceScatter | None, mesh: DataParallelMesh, spec: GroupSpec, chunks: Any, op: ReduceOp
) -> Tensor:
    flat = wrap(chunks).reshape(-1)
    if spec.shard_size == 1 and comm is None:
        return flat  # type: ignore[no-any-return]
    group = _axis_group(mesh, spec.shard_axis)
    comm = _BuiltIn() if comm is None else comm
    sizes = (flat.numel(), flat.numel() // spec.shard_size)
    given, output = (comm.allocate((size,), dtype=flat.dtype, device=flat.device) for size in sizes)
    given.copy_(flat)
    _wait(comm(output_tensor=output, input_tensor=given, group=group, op=op, async_op=False))
    return output


class _BuiltIn(ReduceScatter):
    """The collective of ``torch.distributed``'s name."""

    def allocate(self, size: Sequence[int], *, dtype: Dtype, device: Device) -> Tensor:
        return empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> Work | None:
        return reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def _operations(
    comms: CustomComms, spec: GroupSpec, dtype: Any
) -> tuple[ReduceOp, ReduceOp, float, float]:
    """The ops of reduce-scatter and all-reduce, and what to divide by before and after."""
    before, after = divide_factors(spec, dtype)
    if before != 1 or comms.force_sum:
        return ReduceOp.SUM, ReduceOp.SUM, before, after
    if spec.divide_factor is None:
        op = ReduceOp.AVG if spec.shard_size * spec.replicate_size > 1 else ReduceOp.SUM
        return op, op, 1, 1
    if spec.divide_factor == spec.shard_size:
        return ReduceOp.AVG, ReduceOp.SUM, 1, 1
    return _make_nccl_premul_sum(1 / spec.divide_factor), ReduceOp.SUM, 1, 1


def _final(
    spec: GroupSpec, indices: tuple[int, ...], row: Tensor, factor: float, final: bool
) -> dict[int, Any]:
    with jax.enable_x64(True):
        return _pieces_of(spec, indices, row._read(), factor, final)  # type: ignore[no-any-return]


def _wait(work: Work | None) -> None:
    if work is not None:
        work.wait()


@functools.partial(jax.jit, static_argnums=0)
def _flat_pieces(spec: GroupSpec, pieces: tuple[Any, ...]) -> Any:
    return flat_pieces(spec, pieces)


@functools.partial(jax.jit, static_argnums=0)
def _wholes_of(spec: GroupSpec, flat: Any) -> list[Any]:
    return wholes_of(spec, flat.reshape(spec.shard_size, flat.size // spec.shard_size))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _chunks_of(spec: GroupSpec, indices: tuple[int, ...], grads: Any, partial: Any) -> Any:
    return chunks_of(spec, list(indices), grads, partial)


@functools.partial(jax.jit, static_argnums=1)
def _divided(x: Any, factor: float) -> Any:
    return divided(x, factor)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _plus_partial(spec: GroupSpec, indices: tuple[int, ...], row: Any, partial: Any) -> Any:
    return row + partial_row(spec, indices, partial, row.dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 3, 4))
def _pieces_of(
    spec: GroupSpec, indices: tuple[int, ...], row: Any, factor: float, final: bool
) -> Any:
    return pieces_of(spec, indices, divided(row, factor), final)
