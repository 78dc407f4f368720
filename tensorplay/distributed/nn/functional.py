"""Collectives that return new tensors and have gradients, in eager and in compiled code.

Source: torch.distributed.nn.functional, and torch.distributed._functional_collectives for the forms
on one tensor. The gradient is that of the sum of all ranks' losses: what a rank's input contributed
to on other ranks comes back from there, so every rank has to run backward. Inside the forward of a
sharded module a collective becomes part of its program, where its group is all of the module's mesh
or the ranks along some of its axes; with other groups the module runs eagerly.

Shapes and dtypes are equal on all ranks. ``group`` is by default all ranks; with one controller,
inside a forward, all of the module's mesh. All raise ``ValueError`` before ``init_process_group``,
and `DistBackendError` where a member is gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._graph import Node
from ..._ops.primitive import primitive
from ..._state import state
from ..._tensor import Tensor, wrap
from .. import _lax_collectives as per_rank
from .._group_call import check_length, check_tensor, describe, group_of, root_of, run
from .._process_group import Group, ProcessGroup, group_or_default
from .._reduce_op import ReduceOp, checked_op
from .._spmd import controlled, ranks_of

Axis = Any  # the name of a mesh axis, or a tuple of names
Build = Callable[[Axis, int, bool], Callable[..., Sequence[Any]]]


def all_reduce(tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: Group = None) -> Tensor:
    """All ranks' ``tensor`` combined elementwise, on every rank."""
    name = _checked("all_reduce", tensor, op)
    return _one(f"all_reduce({name})", group, _all_reduced(name), tensor)


def reduce(tensor: Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, group: Group = None) -> Tensor:
    """As `all_reduce` on rank ``dst``; the other ranks get zeros."""
    name = _checked("reduce", tensor, op)
    root = _root(group, dst)

    def build(axis: Axis, ranks: int, gloo: bool) -> Any:
        whole = _all_reduced(name)(axis, ranks, gloo)

        def reduced(x: Any) -> list[Any]:
            (found,) = whole(x)
            return [jnp.where(lax.axis_index(axis) == root, found, jnp.zeros_like(found))]

        return reduced

    return _one(f"reduce({name}, dst={dst})", group, build, tensor)


def broadcast(tensor: Tensor, src: int, group: Group = None) -> Tensor:
    """Rank ``src``'s ``tensor``, on every rank; the gradients are summed there."""
    root = _root(group, src)

    def build(axis: Axis, ranks: int, gloo: bool) -> Any:
        return lambda x: [per_rank.broadcast(x, axis, ranks, root)]

    return _one(f"broadcast(src={src})", group, build, tensor)


def all_gather_tensor(tensor: Tensor, gather_dim: int = 0, group: Group = None) -> Tensor:
    """All ranks' ``tensor``, joined along ``gather_dim``, on every rank."""
    _need_dims("all_gather_tensor", tensor, gather_dim)

    def build(axis: Axis, ranks: int, gloo: bool) -> Any:
        return lambda x: [lax.all_gather(x, axis, axis=gather_dim % x.ndim, tiled=True)]

    return _one(f"all_gather_tensor(gather_dim={gather_dim})", group, build, tensor)


def all_gather(tensor: Tensor, group: Group = None) -> tuple[Tensor, ...]:
    """All ranks' ``tensor``, one by one in rank order, on every rank."""

    def build(axis: Axis, ranks: int, gloo: bool) -> Any:
        return lambda x: list(lax.all_gather(x, axis))

    return _many("all_gather", group, build, [tensor])


def gather(tensor: Tensor, dst: int = 0, group: Group = None) -> tuple[Tensor, ...]:
    """All ranks' ``tensor``, in rank order, on rank ``dst``; the other ranks get zeros."""
    root = _root(group, dst)

    def build(axis: Axis, ranks: int, gloo: bool) -> Any:
        def gathered(x: Any) -> list[Any]:
            rows = lax.all_gather(x, axis)
            return list(jnp.where(lax.axis_index(axis) == root, rows, jnp.zeros_like(rows)))

        return gathered

    return _many(f"gather(dst={dst})", group, build, [tensor])


def scatter(tensors: Sequence[Tensor], src: int = 0, group: Group = None) -> Tensor:
    """Tensor number r of rank ``src``, on rank r; every rank passes tensors of that shape."""
    root = _root(group, src)
    _check_count("scatter", tensors, group)

    def build(axis: Axis, ranks: int, gloo: bool) -> Any:
        def scattered(*parts: Any) -> list[Any]:
            received = lax.all_to_all(jnp.stack(parts), axis, split_axis=0, concat_axis=0)
            return [received[root]]

        return scattered

    return _many(f"scatter(src={src})", group, build, tensors)[0]


def reduce_scatter_tensor(
    tensor: Tensor, op: ReduceOp = ReduceOp.SUM, scatter_dim: int = 0, group: Group = None
) -> Tensor:
    """This rank's part, along ``scatter_dim``, of all ranks' ``tensor`` combined.

    Raises:
        ValueError: the dim does not divide over the ranks.
    """
    name = _checked("reduce_scatter_tensor", tensor, op)
    _need_dims("reduce_scatter_tensor", tensor, scatter_dim)

    def build(axis: Axis, ranks: int, gloo: bool) -> Any:
        def reduced(x: Any) -> list[Any]:
            dim = scatter_dim % x.ndim
            if x.shape[dim] % ranks:
                raise ValueError(
                    f"reduce_scatter_tensor: dim {dim} of {x.shape[dim]} does not divide over "
                    f"{ranks} ranks"
                )
            parts = jnp.stack(jnp.split(x, ranks, axis=dim))
            return [_reduced_rows(parts, name, axis, ranks, gloo)]

        return reduced

    what = f"reduce_scatter_tensor({name}, scatter_dim={scatter_dim})"
    return _one(what, group, build, tensor)


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
) -> Tensor:
    """Tensor number r of all ranks' lists combined, on rank r.

    Args:
        output: gives the shape in PyTorch; nothing is written to it.
    """
    for tensor in input_list:
        name = _checked("reduce_scatter", tensor, op)
    _check_count("reduce_scatter", input_list, group)

    def build(axis: Axis, ranks: int, gloo: bool) -> Any:
        return lambda *parts: [_reduced_rows(jnp.stack(parts), name, axis, ranks, gloo)]

    return _many(f"reduce_scatter({name})", group, build, input_list)[0]


def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: Group = None
) -> tuple[Tensor, ...]:
    """Tensor number r goes to rank r; returns those that came, in rank order.

    Args:
        output_tensor_list: gives the shapes in PyTorch; nothing is written to it.
    """
    _check_count("all_to_all", input_tensor_list, group)

    def build(axis: Axis, ranks: int, gloo: bool) -> Any:
        return lambda *parts: list(per_rank.all_to_all(jnp.stack(parts), axis))

    return _many("all_to_all", group, build, input_tensor_list)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
) -> Tensor:
    """Parts of ``input`` along dim 0, one for each rank; returns those that came, joined.

    Args:
        output: gives the shape in PyTorch; nothing is written to it.
        output_split_sizes, input_split_sizes: all equal, or None.

    Raises:
        ValueError: dim 0 does not divide, or split sizes that differ: use
            ``tensorplay.distributed.all_to_all_single`` for those.
    """
    for sizes in (output_split_sizes, input_split_sizes):
        if sizes and len(set(sizes)) > 1:
            raise ValueError(
                f"the differentiable all_to_all_single takes parts of equal size, got {list(sizes)}"
            )
    _need_dims("all_to_all_single", input, 0)

    def build(axis: Axis, ranks: int, gloo: bool) -> Any:
        def exchanged(x: Any) -> list[Any]:
            if x.shape[0] % ranks:
                raise ValueError(
                    f"all_to_all_single: {x.shape[0]} rows do not divide over {ranks} ranks"
                )
            rows = x.reshape(ranks, x.shape[0] // ranks, *x.shape[1:])
            return [per_rank.all_to_all(rows, axis).reshape(x.shape)]

        return exchanged

    return _one("all_to_all_single", group, build, input)


def permute_tensor(tensor: Tensor, src_dst: Sequence[int], group: Group = None) -> Tensor:
    """Rank r's ``tensor`` on rank ``src_dst[r]``.

    Raises:
        ValueError: ``src_dst`` is no permutation of the group's ranks.
    """
    pairs = tuple(enumerate(src_dst))

    def build(axis: Axis, ranks: int, gloo: bool) -> Any:
        if sorted(src_dst) != list(range(ranks)):
            raise ValueError(f"src_dst must be a permutation of {ranks} ranks, got {src_dst}")
        return lambda x: [lax.ppermute(x, axis, pairs)]

    return _one(f"permute_tensor({list(src_dst)})", group, build, tensor)


# --- what one rank computes ----------------------------------------------------------------------


def _all_reduced(name: str) -> Build:
    def build(axis: Axis, ranks: int, gloo: bool) -> Any:
        def reduced(x: Any) -> list[Any]:
            if name in _BY_ROWS and jnp.issubdtype(x.dtype, np.inexact):
                return [_BY_ROWS[name](lax.all_gather(x, axis))]
            return [per_rank.all_reduce(x, name, axis, ranks)]

        return reduced

    return build


def _reduced_rows(rows: Any, name: str, axis: Axis, ranks: int, gloo: bool) -> Any:
    """Row r of all ranks' rows combined, on rank r."""
    if name in _BY_ROWS and jnp.issubdtype(rows.dtype, np.inexact):
        return _BY_ROWS[name](per_rank.all_to_all(rows, axis))
    return per_rank.reduce_scatter(rows, name, axis, ranks, gloo)


# Written so that jax knows their gradients.
_BY_ROWS: dict[str, Callable[[Any], Any]] = {
    "MAX": lambda rows: jnp.max(rows, axis=0),
    "MIN": lambda rows: jnp.min(rows, axis=0),
    "PRODUCT": lambda rows: jnp.prod(rows, axis=0),
}


# --- running -------------------------------------------------------------------------------------


def _checked(collective: str, tensor: Tensor, op: ReduceOp) -> str:
    check_tensor(tensor, "tensor")
    checked_op(op).check(collective, tensor.dtype)
    if op.name == "PREMUL_SUM":
        raise ValueError(f"{collective} with PREMUL_SUM: multiply the tensor, then use SUM")
    return op.name


def _need_dims(name: str, tensor: Tensor, dim: int) -> None:
    check_tensor(tensor, "tensor")
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{name}: a tensor of shape {tuple(tensor.shape)} has no dim {dim}")


def _root(group: Group, rank: int) -> int:
    """The place of a global rank in the group; of the mesh for one controller."""
    if _controller_mesh() is not None:
        return rank
    return root_of(group_or_default(group), rank, None)


def _check_count(name: str, tensors: Sequence[Tensor], group: Group) -> None:
    mesh = _controller_mesh()
    if mesh is None:
        check_length(tensors, name, group_or_default(group))
    elif len(tensors) != mesh.size:
        raise ValueError(f"{name}: expected one tensor for each of {mesh.size} ranks")


def _controller_mesh() -> Any:
    """The mesh of the call that is traced, where one controller drives it."""
    if state.trace is None:
        return None
    mesh = state.trace.owner.mesh
    return mesh if controlled(mesh) else None


def _one(what: str, group: Group, build: Build, tensor: Tensor) -> Tensor:
    return _many(what, group, build, [tensor])[0]


def _many(what: str, group: Group, build: Build, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    for tensor in tensors:
        check_tensor(tensor, "tensor")
    if state.trace is not None:
        return _in_program(what, group, build, tensors)
    chosen = group_of(what, group)
    if chosen is None:
        return tuple(tensors)
    return _eagerly(chosen, what, build, tensors)


def _in_program(
    what: str, group: Group, build: Build, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """As part of the program that is traced."""
    mesh = state.trace.owner.mesh
    axes = _axes_of(mesh, group)
    if axes is None:
        state.trace.abort(f"calls {what} over ranks that are not along axes of its mesh")
    assert axes is not None
    ranks = _size(mesh, axes)
    gloo = not controlled(mesh) and mesh.devices.flat[0].platform == "cpu"
    fn = build(axes, ranks, gloo)

    @primitive(what.partition("(")[0])
    def collective(*arrays: Any) -> Any:
        out = tuple(fn(*arrays))
        return out if len(out) > 1 else out[0]

    found = collective(*tensors)
    return found if isinstance(found, tuple) else (found,)


def _axes_of(mesh: Any, group: Group) -> tuple[str, ...] | None:
    """The axes of ``mesh`` along which the group's ranks lie."""
    names = mesh.axis_names
    if controlled(mesh):
        return names if group is None else None
    chosen = group_or_default(group)
    numbers = np.array(ranks_of(mesh)).reshape(mesh.devices.shape)
    for count in range(1, len(names) + 1):
        for picked in itertools.combinations(range(len(names)), count):
            if list(chosen.ranks) in _lines(numbers, picked):
                return tuple(names[i] for i in picked)
    return None


def _lines(numbers: Any, axes: tuple[int, ...]) -> list[list[int]]:
    """The ranks along ``axes``, for each place along the others."""
    rest = [i for i in range(numbers.ndim) if i not in axes]
    size = int(np.prod([numbers.shape[i] for i in axes]))
    return numbers.transpose(*rest, *axes).reshape(-1, size).tolist()  # type: ignore[no-any-return]


def _size(mesh: Any, axes: tuple[str, ...]) -> int:
    return int(np.prod([mesh.shape[axis] for axis in axes]))


def _eagerly(
    group: ProcessGroup, what: str, build: Build, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    shapes = [tuple(t.shape) for t in tensors]
    what = f"functional {what} of {describe([t._read() for t in tensors])}"
    arrays = [t._read() for t in tensors]
    outputs = run(group, what, _with_scalars(build, shapes), arrays)
    made = [wrap(o.reshape(()) if not shapes[0] else o) for o in outputs]
    if state.grad_enabled and any(t.requires_grad for t in tensors):
        node = CollectiveNode(group, what, build, tensors, len(made))
        for index, out in enumerate(made):
            if out.is_floating_point() or out.is_complex():
                out._requires_grad, out._grad_fn, out._output_nr = True, node, index
    return tuple(made)


def _with_scalars(build: Build, shapes: Sequence[tuple[int, ...]]) -> Any:
    """Scalars travel with a dim; the collective itself sees them without."""

    def built(axis: Axis, ranks: int, gloo: bool) -> Any:
        fn = build(axis, ranks, gloo)

        def call(*arrays: Any) -> list[Any]:
            given = [a.reshape(shape) for a, shape in zip(arrays, shapes, strict=True)]
            return [o.reshape(1) if o.ndim == 0 else o for o in fn(*given)]

        return call

    return built


class CollectiveNode(Node):
    """The backward step of a collective: its transpose, over the same ranks."""

    saved = ("arrays",)

    def __init__(
        self,
        group: ProcessGroup,
        what: str,
        build: Build,
        tensors: Sequence[Tensor],
        num_outputs: int,
    ) -> None:
        edges = [t._edge() if t.requires_grad else None for t in tensors]
        super().__init__(edges, num_outputs)
        self.group, self.what, self.build = group, what, build
        self.arrays: list[Any] | None = [t._read() for t in tensors]

    def name(self) -> str:
        words = self.what.split()[1].partition("(")[0].split("_")
        return "".join(word.capitalize() for word in words) + "Backward"

    def backward(self, grads: list[Any]) -> list[Any]:
        if self.arrays is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved "
                "tensors after they have already been freed). Specify retain_graph=True if you "
                "need to backward through the graph a second time."
            )
        if state.grad_enabled:
            raise RuntimeError(
                f"create_graph=True does not reach through {self.what}: collectives have first "
                "derivatives only"
            )
        present = tuple(i for i, g in enumerate(grads) if g is not None)
        count, shapes = len(self.arrays), [a.shape for a in self.arrays]
        build = self.build

        def build_backward(axis: Axis, ranks: int, gloo: bool) -> Any:
            fn = build(axis, ranks, gloo)

            def pull_back(*given: Any) -> list[Any]:
                inputs = [a.reshape(s) for a, s in zip(given[:count], shapes, strict=True)]
                outputs, vjp = jax.vjp(lambda *xs: tuple(fn(*xs)), *inputs)
                known = dict(zip(present, given[count:], strict=True))
                cotangents = tuple(
                    known[i].reshape(o.shape) if i in known else jnp.zeros_like(o)
                    for i, o in enumerate(outputs)
                )
                return [g.reshape(1) if g.ndim == 0 else g for g in vjp(cotangents)]

            return pull_back

        values = [*self.arrays, *(grads[i]._read() for i in present)]
        name = f"{self.what} backward of {present}"
        found = run(self.group, name, build_backward, values)
        return [wrap(g.reshape(s)) for g, s in zip(found, shapes, strict=True)]

    def release(self) -> None:
        self.arrays = None
