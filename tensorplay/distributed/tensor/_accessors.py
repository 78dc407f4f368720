"""What tensors with a layout have beyond other tensors: the whole, the rows, the placements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._graph import Node
from ..._state import state
from ..._tensor import Meta, Tensor, wrap
from .._layout import Layout
from .._placements import Partial, Placement, Replicate, normalized
from ..device_mesh import DeviceMesh


class _MovedNode(Node):
    """The step from a gradient to that of a tensor with a layout that was moved elsewhere."""

    def __init__(self, source: Tensor) -> None:
        super().__init__([source._edge()])
        assert source._layout is not None
        self.layout = _of_gradients(source._layout)


class FullTensorNode(_MovedNode):
    def name(self) -> str:
        return "FullTensorBackward"

    def backward(self, grads: list[Any]) -> list[Any]:
        return [self.layout.tensor(self.layout.cut(grads[0]._read()))]


class ToLocalNode(_MovedNode):
    def name(self) -> str:
        return "ToTorchTensorBackward"

    def backward(self, grads: list[Any]) -> list[Any]:
        return [self.layout.wrap_rows(grads[0]._read())]


class RedistributeNode(_MovedNode):
    def name(self) -> str:
        return "RedistributeBackward"

    def backward(self, grads: list[Any]) -> list[Any]:
        return [redistribute(grads[0], placements=self.layout.placements)]


class FromLocalNode(Node):
    """The step from the gradient of a tensor with a layout to that of the rows it was made from."""

    def __init__(self, local: Tensor) -> None:
        super().__init__([local._edge()])

    def name(self) -> str:
        return "FromTorchTensorBackward"

    def backward(self, grads: list[Any]) -> list[Any]:
        return [to_local(grads[0])]


def _of_gradients(layout: Layout) -> Layout:
    """The layout of gradients: every rank has the whole gradient of a summand."""
    placements = [Replicate() if isinstance(p, Partial) else p for p in layout.placements]
    return Layout(layout.mesh, placements, layout.global_shape)


def recorded(out: Tensor, source: Tensor, node: type[Node]) -> Tensor:
    """``out``, whose gradient flows to ``source`` through a node of that type, where recorded."""
    if state.grad_enabled and source.requires_grad:
        out._requires_grad, out._grad_fn = True, node(source)  # type: ignore[arg-type]
    return out


def _refuse_in_trace(what: str) -> None:
    if state.trace is not None:
        state.trace.abort(what)


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank; every rank of the mesh must call it."""
    layout = tensor._layout
    if layout is None:
        return tensor
    _refuse_in_trace("gathers a sharded tensor")
    if tensor.is_meta:
        return wrap(Meta(layout.global_shape, tensor._storage.array.dtype))
    whole = wrap(layout.gather(tensor._storage.spread))  # type: ignore[attr-defined]
    return recorded(whole, tensor, FullTensorNode)


def to_local(tensor: Tensor) -> Tensor:
    """This rank's rows as a plain tensor that shares the storage.

    Raises:
        RuntimeError: one controller drives the mesh, so that no rank is this one.
    """
    layout = tensor._layout
    if layout is None:
        return tensor.detach()
    if layout.controlled:
        layout.refuse(
            tensor,
            "to_local()",
            "one thread drives all ranks: .shards gives each rank's rows, .full_tensor() the whole",
        )
    out = tensor.detach()
    out._layout = None
    return recorded(out, tensor, ToLocalNode)


def redistribute(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    async_op: bool = False,
) -> Tensor:
    """The same tensor under other placements; every rank of the mesh must call it.

    Args:
        device_mesh: the tensor's own, or None.
        placements: one per mesh axis, `Shard` or `Replicate`.
        async_op: accepted as in PyTorch; a program's results are waited for where they are read.

    Raises:
        RuntimeError: no placements, another mesh, or a new `Partial`.
    """
    layout = layout_of(tensor)
    if placements is None:
        raise RuntimeError("placements is needed for redistribute!")
    if device_mesh is not None and device_mesh != layout.mesh:
        raise RuntimeError("Cross device mesh comm not supported yet!")
    found = normalized(placements, layout.mesh.axis_names, len(layout.global_shape))
    for old, new in zip(layout.placements, found, strict=True):
        if isinstance(new, Partial) and new != old:
            raise RuntimeError(
                f"Can not redistribute from {old} to {new}, redistributing to Partial is for "
                "internal use only!"
            )
    _refuse_in_trace("redistributes a tensor")
    target = checked_layout(layout.mesh, found, layout.global_shape)
    if target == layout:
        return tensor
    if tensor.is_meta:
        moved: Any = Meta(target.padded_shape, tensor._storage.array.dtype)
    else:
        moved = layout.moved(tensor._storage.spread, target)  # type: ignore[attr-defined]
    return recorded(target.tensor(moved), tensor, RedistributeNode)


def checked_layout(
    mesh: DeviceMesh, placements: Sequence[Placement], global_shape: tuple[int, ...]
) -> Layout:
    """A layout.

    Raises:
        RuntimeError: this rank is not in the mesh.
        ValueError: two axes cut one dim that they do not divide.
    """
    if mesh.get_coordinate() is None:
        raise RuntimeError(f"rank {mesh.get_rank()} is not in {mesh!r}: only its ranks have pieces")
    layout = Layout(mesh, placements, global_shape)
    for dim in {dim for _, dim in layout.cuts}:
        ranks = [n for n, p in zip(mesh.shape, placements, strict=True) if p.is_shard(dim)]
        pieces = 1
        for n in ranks:
            pieces *= n
        if len(ranks) > 1 and global_shape[dim] % pieces:
            raise ValueError(
                f"{len(ranks)} mesh axes cut dim {dim} of {global_shape[dim]} rows, which their "
                f"{pieces} ranks do not divide: shard it over one axis, or pad it"
            )
    return layout


def layout_of(tensor: Tensor) -> Layout:
    """The layout of a tensor.

    Raises:
        AttributeError: it is a plain tensor.
    """
    if tensor._layout is None:
        raise AttributeError("a plain tensor has no device_mesh and no placements")
    return tensor._layout  # type: ignore[no-any-return]


def _shards(tensor: Tensor) -> list[Tensor]:
    layout = layout_of(tensor)
    if not layout.controlled:
        raise AttributeError(
            ".shards is for one controller that drives all ranks; a rank has .to_local()"
        )
    return [wrap(rows) for rows in layout.rows_of_each(tensor._storage.spread)]  # type: ignore[attr-defined]


def attach() -> None:
    """Gives ``Tensor`` the accessors of sharded tensors."""
    for fn in (full_tensor, to_local, redistribute):
        setattr(Tensor, fn.__name__, fn)
    properties = {
        "global_shape": lambda t: tuple(t.shape) if t._layout is None else t._layout.global_shape,
        "device_mesh": lambda t: layout_of(t).mesh,
        "placements": lambda t: layout_of(t).placements,
        "shards": _shards,
    }
    for name, read in properties.items():
        setattr(Tensor, name, property(read))


attach()
