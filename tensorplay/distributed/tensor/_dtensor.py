"""DTensor: tensors that lie over the ranks of a mesh. Source: torch.distributed.tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._ops.creation import full as full_plain
from ..._tensor import Tensor
from ...nn._parameter import Parameter
from .._collectives import broadcast
from .._layout import Layout
from .._placements import Placement, Replicate, Shard, normalized
from .._process_group import is_initialized
from ..device_mesh import DeviceMesh
from ._accessors import FromLocalNode, checked_layout, recorded


class _HasLayout(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor) and instance._layout is not None


class DTensor(Tensor, metaclass=_HasLayout):
    """A tensor over the ranks of a mesh; every tensor with placements is an instance.

    ``shape`` is that of this rank's rows, ``global_shape`` that of the whole. Elementwise math
    among equally placed tensors works on the rows; reductions over a dim that is cut communicate,
    and give every rank the result. Make one with `distribute_tensor` or `from_local`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("make a DTensor with distribute_tensor() or DTensor.from_local()")

    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
    ) -> Tensor:
        """A tensor from every rank's rows.

        Args:
            local_tensor: this rank's rows; differentiable.
            placements: one per mesh axis; default replicated.
            run_check: replicas take the values of the first rank.
            shape: of the whole; by default that of the rows times the ranks, for rows of equal
                size on all ranks.
            stride: accepted as in PyTorch; arrays are row-major.

        Raises:
            RuntimeError: this rank is not in the mesh, or one controller drives it.
            ValueError: the rows do not fit ``shape``.
        """
        found = normalized(placements, device_mesh.axis_names, local_tensor.dim())
        whole = (
            tuple(shape) if shape is not None else _whole_shape(local_tensor, device_mesh, found)
        )
        layout = checked_layout(device_mesh, found, whole)
        if layout.controlled:
            raise RuntimeError(
                "from_local() takes one rank's rows, but this thread drives all ranks of "
                f"{device_mesh!r}: use distribute_tensor() on the whole"
            )
        if layout.shape != tuple(local_tensor.shape):
            raise ValueError(
                f"rows of shape {tuple(local_tensor.shape)} do not fit: of a whole of shape "
                f"{whole}, placed as {list(found)}, this rank has rows of shape {layout.shape}"
            )
        rows = _checked_replicas(local_tensor, device_mesh, found) if run_check else local_tensor
        return recorded(layout.wrap_rows(rows._read()), local_tensor, FromLocalNode)


def _whole_shape(
    rows: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[int, ...]:
    shape = list(rows.shape)
    for ranks, placement in zip(mesh.shape, placements, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] *= ranks
    return tuple(shape)


def _checked_replicas(rows: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    out = rows.detach().clone()
    for dim, placement in enumerate(placements):
        if isinstance(placement, Replicate) and mesh.shape[dim] > 1:
            broadcast(out, group=mesh.get_group(dim), group_src=0)
    return out


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Tensor:
    """A leaf tensor that lies over the mesh as ``placements`` say; all of its ranks must call it.

    Args:
        tensor: the whole; a `Parameter` gives a `Parameter`.
        placements: one per mesh axis, `Shard` or `Replicate`; default replicated.
        src_data_rank: the rank along each axis whose values are taken; None takes each rank's own
            and does not communicate.

    Raises:
        RuntimeError: not a leaf, a `Partial` placement, or this rank is not in the mesh.
        ValueError: already distributed in another way.
    """
    found = normalized(placements, device_mesh.axis_names, tensor.dim())
    if any(p.is_partial() for p in found):
        raise RuntimeError("distribute_tensor places as Shard or Replicate, not as Partial")
    if not tensor.is_leaf:
        raise RuntimeError(
            "`distribute_tensor` should be used to distribute leaf tensors! but found non-leaf "
            "tensor!"
        )
    if tensor._layout is not None:
        return _already_distributed(tensor, device_mesh, found)
    layout = checked_layout(device_mesh, found, tuple(tensor.shape))
    whole = tensor.detach()
    if src_data_rank is not None and not layout.controlled and is_initialized():
        whole = _from_rank(whole, device_mesh, src_data_rank)
    out = Parameter.__new__(Parameter) if isinstance(tensor, Parameter) else Tensor.__new__(Tensor)
    layout.fill(out, layout.cut(whole._storage.array if whole.is_meta else whole._read()))
    return out.requires_grad_(tensor.requires_grad)


def _already_distributed(
    tensor: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> Tensor:
    layout: Layout = tensor._layout
    if layout.mesh != mesh:
        raise ValueError(
            f"Cannot distribute a DTensor with device mesh {layout.mesh} to a different device "
            f"mesh {mesh}."
        )
    if layout.placements != placements:
        raise ValueError(
            f"Cannot distribute a DTensor with placements {list(layout.placements)} to a different "
            f"placements {list(placements)}. do you want to call `redistribute` instead?"
        )
    return tensor


def _from_rank(whole: Tensor, mesh: DeviceMesh, source: int) -> Tensor:
    """The values of one rank along each axis, on all ranks of the mesh."""
    if whole.is_meta:
        return whole
    out = whole.clone()
    for dim, ranks in enumerate(mesh.shape):
        if ranks > 1:
            broadcast(out, group=mesh.get_group(dim), group_src=source)
    return out


def full(
    size: Sequence[int],
    fill_value: Any,
    *,
    dtype: Any = None,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor of global shape ``size`` full of ``fill_value``; no rank makes the whole."""
    like = full_plain((), fill_value, dtype=dtype)
    found = normalized(placements, device_mesh.axis_names, len(size))
    layout = checked_layout(device_mesh, found, tuple(size))
    return layout.full(fill_value, like.dtype.numpy).requires_grad_(requires_grad)


def zeros(*size: Any, **options: Any) -> Tensor:
    """As `full`, of zeros."""
    return full(_sizes(size), 0.0, **options)


def ones(*size: Any, **options: Any) -> Tensor:
    """As `full`, of ones."""
    return full(_sizes(size), 1.0, **options)


def _sizes(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
