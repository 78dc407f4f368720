"""Layout: how a tensor lies over the ranks of a mesh, and what may be computed on it.

A tensor with a layout holds this rank's *padded piece* (see ``_chunks``); all ranks' pieces are one
``jax.Array``. Where one controller drives the mesh, it computes with that global array, and the
tensor looks like the piece of the mesh's first rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import _views
from .._tensor import Meta, Tensor, wrap
from . import _lax_collectives as per_rank
from ._chunks import (
    Shape,
    flatten_piece,
    from_chunks,
    own_rows,
    piece_shape,
    rows_per_rank,
    to_chunks,
    unflatten_piece,
)
from ._laid_out import LaidOutStorage
from ._placements import Partial, Placement, Replicate, Shard
from ._reductions import reduced, reduction_of
from ._spmd import Spread, controlled, launch, on_device, per_rank_jit, sharding_of, shared_program
from .device_mesh import DeviceMesh


class Layout:
    """How a tensor of ``global_shape`` lies over the ranks of a mesh.

    ``tensor.shape`` is the shape of this rank's piece, without padding.

    Attributes:
        mesh: the ``DeviceMesh`` of the ranks that hold pieces.
        placements: one for each axis of the mesh.
        cuts: (axis, dim) for each axis that cuts a dim, in mesh order.
        partial: (axis, reduce_op) for each axis whose ranks hold summands of the whole.
        padded_shape: of every rank's piece.
        shape: of this rank's own rows.
        chain: from the stored piece to them.
        memory: the kind of memory that pieces are kept in between uses, "pinned_host" for instance;
            None for the device's own.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        global_shape: Shape,
        memory: str | None = None,
    ) -> None:
        self.memory = memory
        self.mesh, self.placements = mesh, tuple(placements)
        self.global_shape = tuple(global_shape)
        named = list(zip(mesh.axis_names, self.placements, strict=True))
        self.cuts = tuple((axis, p.dim) for axis, p in named if isinstance(p, Shard))
        self.partial = tuple((axis, p.reduce_op) for axis, p in named if isinstance(p, Partial))
        self._sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "only members of the mesh hold pieces"
        self._coordinate = coordinate
        self.padded_shape = self.global_shape
        for axis, dim in self.cuts:
            self.padded_shape = piece_shape(self.padded_shape, dim, self._sizes[axis])
        self.shape = self.shape_at(coordinate)
        self.chain = self._chain_to_own_rows()
        self._key = (mesh, self.placements, self.global_shape, memory)

    @classmethod
    def over_axis(
        cls, mesh: DeviceMesh, axis: str, global_shape: Shape, dim: int, memory: str | None = None
    ) -> Layout:
        """Cut along ``dim`` over ``axis``; along the other axes pieces are replicas."""
        placements = [Shard(dim) if name == axis else Replicate() for name in mesh.axis_names]
        return cls(mesh, placements, global_shape, memory)

    def shape_at(self, coordinate: Sequence[int]) -> Shape:
        """The shape, without padding, of the piece at a place in the mesh."""
        places = dict(zip(self.mesh.axis_names, coordinate, strict=True))
        shape = list(self.global_shape)
        for axis, dim in self.cuts:
            shape[dim] = own_rows(shape[dim], self._sizes[axis], places[axis])
        return tuple(shape)

    def _chain_to_own_rows(self) -> _views.Chain | None:
        if not self.padded_shape:
            return (_views.reshape_step(()),)
        if self.shape == self.padded_shape:
            return None
        return (_views.slice_step(tuple((0, size, 1) for size in self.shape)),)

    @property
    def dim(self) -> int:
        """The dim that is cut first."""
        return self.cuts[0][1]

    @property
    def jax_mesh(self) -> Mesh:
        return self.mesh.jax_mesh

    @property
    def controlled(self) -> bool:
        """Whether this thread holds every rank's piece."""
        return controlled(self.jax_mesh)

    @property
    def group_key(self) -> Any:
        """Equal for tensors whose pieces lie on the same ranks."""
        return (self.mesh, self.axes)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold different pieces."""
        return tuple(axis for axis, _ in self.cuts)

    @property
    def stored_shape(self) -> Shape:
        """Of the array that holds the piece: scalars have a dim, which carries the mesh axes."""
        return self.padded_shape or (1,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"{list(self.placements)} of shape {self.global_shape} over {self.mesh!r}"

    # --- making tensors ----------------------------------------------------------------------

    def storage(self, piece: Any) -> LaidOutStorage:
        """A storage over padded pieces: a ``Spread``, what this thread holds, or a meta array."""
        if isinstance(piece, (Spread, Meta)):
            return LaidOutStorage(self, piece)
        return LaidOutStorage(self, Spread.of_held(self.jax_mesh, piece))

    def copy_storage(self, storage: LaidOutStorage) -> LaidOutStorage:
        """Another storage with the same (immutable) array, as far as this rank is concerned."""
        if isinstance(storage.value, Meta) or self.memory is not None:
            return LaidOutStorage(self, storage.value, kept=True)
        return self.storage(storage.held)

    def tensor(self, piece: Any) -> Tensor:
        """A tensor over padded pieces, as `storage` takes them."""
        return self.fill(Tensor.__new__(Tensor), piece)

    def fill(self, target: Tensor, piece: Any) -> Tensor:
        """Makes ``target`` a tensor over padded pieces."""
        target._storage, target._chain = self.storage(piece), self.chain
        target._layout = self
        return target

    def wrap(self, held: Any) -> Tensor:
        """A tensor over padded pieces whose padding may hold anything."""
        limits = self._limits
        return self.tensor(_without_padding(held, self.padded_shape, limits) if limits else held)

    def wrap_rows(self, rows: Any) -> Tensor:
        """A tensor over this rank's own rows."""
        with jax.enable_x64(True):
            missing = tuple(p - n for p, n in zip(self.padded_shape, self.shape, strict=True))
            piece = _padded(rows, missing) if any(missing) else rows.reshape(self.stored_shape)
        return self.tensor(Spread.of_local(self.jax_mesh, self._on_own_device(piece)))

    def full(self, value: Any, dtype: Any, on_meta: bool = False) -> Tensor:
        """A tensor of this layout with ``value`` in every row (and zero padding)."""
        if on_meta:
            return self.tensor(Meta(self.padded_shape, dtype))
        with jax.enable_x64(True):
            return self.wrap(self._full(value, np.dtype(dtype)))

    def _full(self, value: Any, dtype: Any) -> Any:
        if not self.controlled:
            return jnp.full(self.stored_shape, value, dtype, device=self.device)
        shape = (self.stored_shape[0] * self.mesh.size(), *self.stored_shape[1:])
        return jnp.full(shape, value, dtype, device=sharding_of(self.jax_mesh))

    def cut(self, whole: Any) -> Any:
        """The padded pieces of a whole that every rank has, as `tensor` takes them."""
        if isinstance(whole, Meta):
            return Meta(self.padded_shape, whole.dtype)
        with jax.enable_x64(True):
            if not self.controlled:
                return self._on_own_device(self._cut_at(whole, self._coordinate))
            mesh = self.jax_mesh
            pieces = [
                jax.device_put(self._cut_at(whole, place), mesh.devices[place])
                for place in np.ndindex(mesh.devices.shape)
            ]
            shape = (self.stored_shape[0] * mesh.size, *self.stored_shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding_of(mesh), pieces)

    def _cut_at(self, whole: Any, coordinate: Sequence[int]) -> Any:
        places = dict(zip(self.mesh.axis_names, coordinate, strict=True))
        for axis, dim in self.cuts:
            whole = _cut(whole, dim, self._sizes[axis], places[axis])
        return whole.reshape(self.stored_shape)

    @property
    def device(self) -> jax.Device:
        """This rank's; with one controller the first rank's."""
        return self.jax_mesh.devices[self._coordinate]

    def _on_own_device(self, piece: Any) -> Any:
        return on_device(piece, self.device)

    @functools.cached_property
    def _limits(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """For each padded dim: how many of the rows that this thread holds are no padding."""
        places = np.ndindex(self.mesh.shape) if self.controlled else [self._coordinate]
        shapes = [self.shape_at(place) for place in places]
        found = [(dim, tuple(shape[dim] for shape in shapes)) for _, dim in self.cuts]
        return tuple(
            (dim, rows) for dim, rows in found if any(n < self.padded_shape[dim] for n in rows)
        )

    def readable(self, tensor: Tensor) -> Any:
        """This rank's padded piece, in memory that can be computed with."""
        spread = tensor._storage.spread  # type: ignore[attr-defined]
        return spread if isinstance(spread, Meta) else spread.local

    # --- what ops may do ---------------------------------------------------------------------

    def run(self, op: Any, args: Sequence[Any], options: dict[str, Any]) -> Tensor:
        """Runs a primitive, elementwise or a reduction, on tensors of this layout."""
        if not op.elementwise:
            return self._run_reduction(op, args[0], options)
        with jax.enable_x64(True):
            return self.wrap(op.compiled(options)(*[self._operand(a) for a in args]))

    def _operand(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value._layout is not None:
            return value._storage.held
        array = value._read()
        if self.controlled:
            return jax.device_put(array, NamedSharding(self.jax_mesh, PartitionSpec()))
        return array

    def check(self, op: Any, args: Sequence[Any]) -> None:
        """Refuses what is neither elementwise among equally laid out tensors nor a reduction."""
        plain = [a for a in args if isinstance(a, Tensor) and a._layout is None and a.dim() > 0]
        others = [a for a in args if isinstance(a, Tensor) and a._layout not in (None, self)]
        fits = (op.elementwise or reduction_of(op.name) is not None) and not plain and not others
        if fits and (not self.partial or _is_linear(op.name, args)):
            return
        if fits:
            got = f"{op.name}() of a Partial tensor: call redistribute() or full_tensor() first"
        elif plain:
            got = f"got it together with a plain tensor of shape {tuple(plain[0].shape)}"
        elif others:
            got = f"got it together with one laid out as {others[0]._layout}"
        else:
            got = f"{op.name}() is not elementwise"
        raise RuntimeError(f"{op.name}(): {self._who(args)} {_RULE}; {got}. {self._ways_out()}")

    def refuse_view(self, tensor: Tensor) -> None:
        """Raises: rows of several ranks have no common view."""
        raise RuntimeError(
            f"view(): {self._who((tensor,))} {_RULE}; view() is not elementwise. {self._ways_out()}"
        )

    def _ways_out(self) -> str:
        return _WAYS_OUT + (_CONTROLLER_VALUES if self.controlled else _RANK_VALUES)

    def _who(self, args: Sequence[Any]) -> str:
        names = [getattr(a, "_fsdp_name", None) for a in args if isinstance(a, Tensor)]
        found = next((n for n in names if n), None)
        return f"the sharded parameter {found!r}" if found else f"a sharded tensor ({self})"

    def refuse(self, tensor: Tensor, what: str, instead: str) -> None:
        """Raises: ``what`` does not work on a tensor with a layout."""
        raise RuntimeError(
            f"{what} does not work on {self._who((tensor,))}, of which this rank holds rows of "
            f"shape {self.shape}: {instead}"
        )

    def refuse_read(self, tensor: Tensor) -> None:
        """Raises where one piece alone would be taken for the value of all."""
        if self.controlled:
            raise RuntimeError(
                f"{self._who((tensor,))} lies on {self.mesh.size()} ranks that this thread drives "
                "together: .full_tensor() gives the whole, .shards each rank's rows"
            )
        if self.partial:
            self.refuse(tensor, "reading values", "take .full_tensor(), which reduces it, first")

    def refuse_recording(self, name: str, args: tuple[Any, ...]) -> None:
        """Raises: sharded tensors take part in autograd through their module's forward only."""
        raise RuntimeError(
            f"{name}(): {self._who(args)} requires grad, and gradients flow to shards only through "
            "the forward of the module they belong to, full_tensor() or to_local(). Compute on one "
            "of those, under tensorplay.no_grad(), or on .detach(). " + self._ways_out()
        )

    def load_mismatch(self, key: str, own: Tensor, given: Tensor) -> str:
        """What to say when a state dict's entry is laid out differently."""
        if own._layout is None:
            return (
                f"{key}: the checkpoint holds a sharded tensor ({given._layout}), the model a "
                f"plain one of shape {tuple(own.shape)}: pass its .full_tensor(), or apply "
                "fully_shard before loading"
            )
        got = (
            f"one laid out as {given._layout}"
            if given._layout is not None
            else f"a plain tensor of shape {tuple(given.shape)}"
        )
        return (
            f"{key}: the parameter is sharded ({own._layout}; rows of shape {tuple(own.shape)} on "
            f"this rank), but the state dict has {got}. Load full state dicts with "
            "tensorplay.distributed.checkpoint.state_dict.set_model_state_dict(model, state_dict, "
            "options=StateDictOptions(full_state_dict=True)), or before fully_shard."
        )

    # --- values across ranks -----------------------------------------------------------------

    def gather(self, spread: Spread) -> Any:
        """The whole, on every rank; every rank of the mesh must call it."""

        def full_tensor(piece: Any) -> Any:
            whole = self.whole_of(piece)
            return [whole.reshape(1, *whole.shape)]

        (whole,) = self._launch("full_tensor", full_tensor, [spread])
        return whole.local.reshape(self.global_shape)

    def moved(self, spread: Spread, target: Layout) -> Spread:
        """The pieces under another layout of the same tensor over the same mesh."""

        def redistribute(piece: Any) -> Any:
            return [target.piece_of(self.whole_of(piece))]

        return self._launch(("redistribute", target.placements), redistribute, [spread])[0]

    def _launch(self, what: Any, fn: Callable[..., Any], values: Sequence[Any]) -> list[Spread]:
        mesh = self.jax_mesh
        key = ("layout", what, mesh, self.placements, self.global_shape)
        return launch(mesh, shared_program(key, lambda: per_rank_jit(fn, mesh)), values)

    def whole_of(self, piece: Any) -> Any:
        """The whole, from this rank's padded piece; inside a ``shard_map`` over the mesh."""
        for axis, op in self.partial:
            piece = per_rank.all_reduce(piece, _REDUCE_OPS[op], axis, self._sizes[axis])
        shapes = [self.global_shape]
        for axis, dim in self.cuts:
            shapes.append(piece_shape(shapes[-1], dim, self._sizes[axis]))
        piece = piece.reshape(self.padded_shape)
        for (axis, dim), shape in zip(reversed(self.cuts), reversed(shapes[:-1]), strict=True):
            rows = jax.lax.all_gather(flatten_piece(piece, dim), axis)
            piece = from_chunks(rows, shape, dim)
        return piece

    def piece_of(self, whole: Any) -> Any:
        """The inverse of `whole_of`."""
        for axis, dim in self.cuts:
            chunks = to_chunks(whole, dim, self._sizes[axis])
            row = jnp.take(chunks, jax.lax.axis_index(axis), axis=0)
            whole = unflatten_piece(row, whole.shape, dim, self._sizes[axis])
        return whole.reshape(self.stored_shape)

    def _run_reduction(self, op: Any, x: Tensor, options: dict[str, Any]) -> Tensor:
        dims = options["dim"]
        over = range(len(self.global_shape)) if dims is None else dims
        axes = tuple(axis for axis, dim in self.cuts if dim in over)
        kept = self._reduced_layout(tuple(over), options["keepdim"])
        spread = x._storage.spread  # type: ignore[attr-defined]

        def reduction(piece: Any) -> Any:
            out = reduced(op, options, piece, self, axes)
            return [out.reshape(1) if out.ndim == 0 else out]

        key = (op.name, tuple(sorted((k, str(v)) for k, v in options.items())))
        (out,) = self._launch(key, reduction, [spread])
        if kept.cuts:
            return kept.tensor(out)
        return wrap(out.local.reshape(kept.global_shape))

    def _reduced_layout(self, over: Shape, keepdim: bool) -> Layout:
        """The layout of the result of a reduction over dims ``over``."""
        gone = set() if keepdim else set(over)
        shape = tuple(
            1 if d in over else n for d, n in enumerate(self.global_shape) if d not in gone
        )
        placements = [
            Shard(p.dim - sum(d < p.dim for d in gone))
            if isinstance(p, Shard) and p.dim not in over
            else Replicate()
            for p in self.placements
        ]
        return Layout(self.mesh, placements, shape)

    def own_rows_mask(self, piece: Any) -> Any:
        """Where a padded piece is no padding; inside a ``shard_map`` over the mesh."""
        mask = jnp.ones(piece.shape, bool)
        place = jax.lax.axis_index(self.mesh.axis_names)
        shapes = [self.shape_at(p) for p in np.ndindex(self.mesh.shape)]
        for _, dim in self.cuts:
            rows = jnp.asarray([shape[dim] for shape in shapes])[place]
            mask &= jax.lax.broadcasted_iota(rows.dtype, piece.shape, dim) < rows
        return mask

    def sum_over_ranks(self, value: Any) -> Any:
        """The sum, over ranks with different pieces, of a scalar computed from what each holds.

        One controller computes it from all pieces, each as often as it is replicated.
        """
        if self.controlled:
            value = value.addressable_data(0)
            return value / (self.mesh.size() // math.prod(self._sizes[a] for a in self.axes))
        return self._reduced_scalar(value, jax.lax.psum)

    def max_over_ranks(self, value: Any) -> Any:
        """The largest, over ranks with different pieces, of a scalar from what each holds."""
        if self.controlled:
            return value.addressable_data(0)
        return self._reduced_scalar(value, jax.lax.pmax)

    def _reduced_scalar(self, value: Any, reduce: Any) -> Any:
        if math.prod(self._sizes[axis] for axis in self.axes) == 1:
            return value
        axes, mesh = self.axes, self.jax_mesh

        def build() -> Any:
            return per_rank_jit(lambda x: [reduce(x, axes)], mesh)

        program = shared_program((reduce.__name__, mesh, axes), build)
        return launch(mesh, program, [value.reshape(1)])[0].local.reshape(())

    def rows_of_each(self, spread: Spread) -> list[Any]:
        """Every rank's own rows, in mesh order, where one controller drives them."""
        places = list(np.ndindex(self.mesh.shape))
        pieces = {shard.device: shard.data for shard in spread.global_array.addressable_shards}
        devices = self.jax_mesh.devices
        shapes = [self.shape_at(place) for place in places]
        return [
            pieces[devices[place]].reshape(self.padded_shape)[tuple(slice(n) for n in shape)]
            for place, shape in zip(places, shapes, strict=True)
        ]


_RULE = "takes part in elementwise math with equally sharded tensors and numbers only"
_WAYS_OUT = (
    "If this is a forward: call the module itself, model(input) instead of model.forward(input); "
    "or register_fsdp_forward_method(model, name) for another method; or model.unshard() first. "
)
_RANK_VALUES = "Otherwise: .to_local() gives this rank's rows, .full_tensor() the whole."
_CONTROLLER_VALUES = "Otherwise: .full_tensor() gives the whole, .shards each rank's rows."
_REDUCE_OPS = {"sum": "SUM", "avg": "AVG", "product": "PRODUCT", "min": "MIN", "max": "MAX"}


def _is_linear(name: str, args: Sequence[Any]) -> bool:
    """Whether summands may be computed with as if they were the sum."""
    numbers = [a for a in args if isinstance(a, (int, float, complex))]
    if name in ("mul", "div", "true_divide"):
        return len(numbers) == len(args) - 1
    return name in ("add", "sub", "neg", "copy") and not numbers


@functools.partial(jax.jit, static_argnums=(1, 2))
def _without_padding(held: Any, padded: Shape, limits: Any) -> Any:
    ranks = len(limits[0][1])
    pieces = held.reshape(ranks, *padded)
    for dim, rows in limits:
        shape = [1] * pieces.ndim
        shape[0], shape[dim + 1] = ranks, padded[dim]
        own = np.arange(padded[dim])[None, :] < np.array(rows)[:, None]
        pieces = jnp.where(own.reshape(shape), pieces, jnp.zeros((), pieces.dtype))
    return pieces.reshape(held.shape)


def _pad_rows(rows: Any, missing: Shape) -> Any:
    return jnp.pad(rows, [(0, n) for n in missing])


def _cut_rows(whole: Any, dim: int, ranks: int, index: int) -> Any:
    rows = rows_per_rank(whole.shape[dim], ranks)
    own = whole[(slice(None),) * dim + (slice(index * rows, (index + 1) * rows),)]
    missing = [(0, rows - own.shape[dim] if d == dim else 0) for d in range(own.ndim)]
    return jnp.pad(own, missing)


_padded = jax.jit(_pad_rows, static_argnums=1)
_cut = jax.jit(_cut_rows, static_argnums=(1, 2, 3))
