"""Sharded tensors: how one dim of a tensor is cut into pieces, one per rank of a mesh axis.

The one place that owns padding. A dim of n rows over W ranks is cut into chunks of ceil(n / W)
rows, as ``torch.chunk`` does: the last ranks may have fewer rows, or none. Every rank stores a
*padded piece* of the same shape, with zeros behind its own rows, so that all pieces together are
one ``jax.Array``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from .. import _views
from .._tensor import Meta, Storage, Tensor, wrap
from ._placements import Replicate, Shard
from ._spmd import Spread, launch, on_device, shared_program
from .device_mesh import DeviceMesh

Shape = tuple[int, ...]


def rows_per_rank(size: int, ranks: int) -> int:
    """Rows of a padded piece: ceil(size / ranks)."""
    return -(-size // ranks)


def piece_shape(shape: Shape, dim: int, ranks: int) -> Shape:
    """The shape of a padded piece."""
    return (*shape[:dim], rows_per_rank(shape[dim], ranks), *shape[dim + 1 :])


def own_rows(size: int, ranks: int, index: int) -> tuple[int, int]:
    """First row and number of rows of rank ``index``."""
    rows = rows_per_rank(size, ranks)
    start = min(index * rows, size)
    return start, min(rows, size - start)


def to_chunks(full: Any, dim: int, ranks: int) -> Any:
    """The whole as (ranks, elements of a padded piece): row r is rank r's piece."""
    rows = rows_per_rank(full.shape[dim], ranks)
    moved = jnp.moveaxis(full, dim, 0)
    missing = rows * ranks - full.shape[dim]
    if missing:
        moved = jnp.pad(moved, [(0, missing)] + [(0, 0)] * (full.ndim - 1))
    return moved.reshape(ranks, math.prod((rows, *moved.shape[1:])))


def from_chunks(chunks: Any, shape: Shape, dim: int) -> Any:
    """The inverse of `to_chunks`."""
    ranks = chunks.shape[0]
    rest = (*shape[:dim], *shape[dim + 1 :])
    moved = chunks.reshape(ranks * rows_per_rank(shape[dim], ranks), *rest)
    return jnp.moveaxis(moved[: shape[dim]], 0, dim)


def flatten_piece(piece: Any, dim: int) -> Any:
    """A padded piece as one row of `to_chunks`."""
    return jnp.moveaxis(piece, dim, 0).reshape(-1)


def unflatten_piece(row: Any, shape: Shape, dim: int, ranks: int) -> Any:
    """The padded piece, from one row of `to_chunks`."""
    rows = rows_per_rank(shape[dim], ranks)
    rest = (*shape[:dim], *shape[dim + 1 :])
    return jnp.moveaxis(row.reshape(rows, *rest), 0, dim)


class ShardLayout:
    """How a tensor of ``global_shape`` is cut along ``dim`` over axis ``axis`` of a mesh.

    Tensors with a layout hold this rank's rows: ``tensor.shape`` is the piece's shape, without
    padding. Elementwise math among equally sharded tensors (and numbers) works on the pieces.

    Attributes:
        mesh: the ``DeviceMesh`` of the ranks that hold pieces.
        axis: the mesh axis that cuts; along the other axes pieces are replicas of each other.
    """

    def __init__(self, mesh: DeviceMesh, axis: str, global_shape: Shape, dim: int) -> None:
        self.mesh, self.axis, self.dim = mesh, axis, dim
        self.global_shape = tuple(global_shape)
        position = mesh.axis_names.index(axis)
        self.ranks = mesh.shape[position]
        coordinate = self._coordinate = mesh.get_coordinate()
        assert coordinate is not None, "only members of the mesh hold pieces"
        self.index = coordinate[position]
        self.padded_shape = piece_shape(self.global_shape, dim, self.ranks)
        _, self.rows = own_rows(self.global_shape[dim], self.ranks, self.index)
        self.shape = (*self.global_shape[:dim], self.rows, *self.global_shape[dim + 1 :])
        self.chain = self._chain_to_own_rows()
        self._key = (mesh, axis, self.global_shape, dim)

    def _chain_to_own_rows(self) -> _views.Chain | None:
        if self.shape == self.padded_shape:
            return None
        return (_views.slice_step(tuple((0, size, 1) for size in self.shape)),)

    @property
    def jax_mesh(self) -> Mesh:
        return self.mesh.jax_mesh

    @property
    def group_key(self) -> Any:
        """Equal for tensors whose pieces lie on the same ranks."""
        return (self.mesh, self.axis)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardLayout) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return (
            f"Shard(dim={self.dim}) of shape {self.global_shape} over {self.ranks} ranks of "
            f"axis {self.axis!r}"
        )

    # --- making sharded tensors --------------------------------------------------------------

    def storage(self, piece: Any) -> ShardedStorage:
        """A storage over a padded piece: this rank's array, a ``Spread``, or a meta array."""
        if isinstance(piece, (Spread, Meta)):
            return ShardedStorage(self, piece)
        return ShardedStorage(self, Spread.of_local(self.jax_mesh, piece))

    def copy_storage(self, storage: ShardedStorage) -> ShardedStorage:
        """Another storage with the same (immutable) array, as far as this rank is concerned."""
        return self.storage(storage.array)

    def tensor(self, piece: Any) -> Tensor:
        """A sharded tensor over a padded piece."""
        return self.fill(Tensor.__new__(Tensor), piece)

    def fill(self, target: Tensor, piece: Any) -> Tensor:
        """Makes ``target`` a sharded tensor over a padded piece."""
        target._storage, target._chain = self.storage(piece), self.chain
        target._layout = self
        return target

    def wrap(self, rows: Any) -> Tensor:
        """A sharded tensor over this rank's own rows."""
        return self.tensor(self._padded(rows))

    def _padded(self, rows: Any) -> Any:
        missing = self.padded_shape[self.dim] - self.rows
        if not missing:
            return rows
        return _pad(rows, self.dim, missing)

    def full_like(self, like: Tensor, value: Any, dtype: Any) -> Tensor:
        """A tensor laid out as ``like``, with ``value`` in every row (and zero padding)."""
        with jax.enable_x64(True):
            return self.wrap(jnp.full(self.shape, value, dtype))

    def cut(self, whole: Any) -> Any:
        """This rank's padded piece of a whole that every rank has."""
        if isinstance(whole, Meta):
            return Meta(self.padded_shape, whole.dtype)
        with jax.enable_x64(True):
            piece = _cut(whole, self.dim, self.ranks, self.index)
        return on_device(piece, self.jax_mesh.devices[self._coordinate])

    # --- what ops may do ---------------------------------------------------------------------

    def check(self, name: str, elementwise: bool, args: tuple[Any, ...]) -> None:
        """Refuses ops other than elementwise math among equally sharded tensors and numbers."""
        plain = [a for a in args if isinstance(a, Tensor) and a._layout is None and a.dim() > 0]
        others = [a for a in args if isinstance(a, Tensor) and a._layout not in (None, self)]
        if elementwise and not plain and not others:
            return
        if plain:
            got = f"got it together with a plain tensor of shape {tuple(plain[0].shape)}"
        elif others:
            got = f"got it together with one laid out as {others[0]._layout}"
        else:
            got = f"{name}() is not elementwise"
        raise RuntimeError(f"{name}(): {self._who(args)} {_RULE}; {got}. {_WAYS_OUT}")

    def _who(self, args: tuple[Any, ...]) -> str:
        names = [getattr(a, "_fsdp_name", None) for a in args if isinstance(a, Tensor)]
        found = next((n for n in names if n), None)
        return f"the sharded parameter {found!r}" if found else f"a sharded tensor ({self})"

    def refuse(self, tensor: Tensor, what: str, instead: str) -> None:
        """Raises: ``what`` does not work on a sharded tensor."""
        raise RuntimeError(
            f"{what} does not work on {self._who((tensor,))}, of which this rank holds rows of "
            f"shape {self.shape}: {instead}"
        )

    def refuse_recording(self, name: str, args: tuple[Any, ...]) -> None:
        """Raises: sharded tensors take part in autograd through their module's forward only."""
        raise RuntimeError(
            f"{name}(): {self._who(args)} requires grad, and gradients flow to shards only through "
            "the forward of the module they belong to. Compute under tensorplay.no_grad(), or on "
            ".detach(). " + _WAYS_OUT
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
        program = shared_program(("full_tensor", self._program_key()), self._gather_program)
        return launch(self.jax_mesh, program, [spread])[0].local.reshape(self.global_shape)

    def _program_key(self) -> Any:
        return (self.jax_mesh, self.axis, self.global_shape, self.dim)

    def _gather_program(self) -> Any:
        def gather(piece: Any) -> Any:
            rows = jax.lax.all_gather(flatten_piece(piece, self.dim), self.axis)
            whole = from_chunks(rows, self.global_shape, self.dim)
            return [whole.reshape(1, *whole.shape)]

        return per_rank_jit(gather, self.jax_mesh)

    def sum_over_ranks(self, value: Any) -> Any:
        """A scalar array summed over the ranks that hold different pieces."""
        return self._reduced(value, jax.lax.psum)

    def max_over_ranks(self, value: Any) -> Any:
        """The largest of a scalar array over the ranks that hold different pieces."""
        return self._reduced(value, jax.lax.pmax)

    def _reduced(self, value: Any, reduce: Any) -> Any:
        if self.ranks == 1:
            return value

        def build() -> Any:
            return per_rank_jit(lambda x: [reduce(x, self.axis)], self.jax_mesh)

        program = shared_program((reduce.__name__, self.jax_mesh, self.axis), build)
        return launch(self.jax_mesh, program, [value.reshape(1)])[0].local.reshape(())


_RULE = "takes part in elementwise math with equally sharded tensors and numbers only"
_WAYS_OUT = (
    "If this is a forward: call the module itself, model(input) instead of model.forward(input); "
    "or register_fsdp_forward_method(model, name) for another method; or model.unshard() first. "
    "Otherwise: .to_local() gives this rank's rows, .full_tensor() the whole."
)


def per_rank_jit(fn: Any, mesh: Mesh) -> Any:
    """``fn``, of one rank's arrays (ndim >= 1), compiled for all ranks of ``mesh``."""
    spec = PartitionSpec(mesh.axis_names)

    def traced(*args: Any) -> Any:
        with jax.enable_x64(True):
            return fn(*args)

    traced.__name__ = getattr(fn, "__name__", "per_rank")
    return jax.jit(jax.shard_map(traced, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


class ShardedStorage(Storage):
    """The cell of a sharded tensor; ``array`` is this rank's padded piece.

    ``value`` is the ``Spread`` over all ranks (or a meta array): its global array is kept from one
    use to the next. ``on_write`` is called after each write.
    """

    __slots__ = ("layout", "on_write", "value")

    def __init__(self, layout: ShardLayout, value: Any) -> None:
        self.layout, self.value, self.version = layout, value, 0
        self.on_write: Callable[[], None] | None = None

    @property
    def array(self) -> Any:  # type: ignore[override]
        return self.value if isinstance(self.value, Meta) else self.value.local

    @array.setter
    def array(self, piece: Any) -> None:
        if isinstance(piece, Meta):
            self.value = piece
        else:
            self.value = Spread.of_local(self.layout.jax_mesh, piece)
        if self.on_write is not None:
            self.on_write()


def _pad_rows(rows: Any, dim: int, missing: int) -> Any:
    return jnp.pad(rows, [(0, missing if d == dim else 0) for d in range(rows.ndim)])


def _cut_rows(whole: Any, dim: int, ranks: int, index: int) -> Any:
    return unflatten_piece(to_chunks(whole, dim, ranks)[index], whole.shape, dim, ranks)


_pad = jax.jit(_pad_rows, static_argnums=(1, 2))
_cut = jax.jit(_cut_rows, static_argnums=(1, 2, 3))


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank; every rank of the mesh must call it."""
    if tensor._layout is None:
        return tensor
    if tensor.is_meta:
        return wrap(Meta(tensor._layout.global_shape, tensor._storage.array.dtype))
    return wrap(tensor._layout.gather(tensor._storage.value))  # type: ignore[attr-defined]


def to_local(tensor: Tensor) -> Tensor:
    """This rank's rows as a plain tensor that shares the storage."""
    out = tensor.detach()
    out._layout = None
    return out


def global_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of the whole."""
    return tuple(tensor.shape) if tensor._layout is None else tensor._layout.global_shape


def attach() -> None:
    """Gives ``Tensor`` the accessors of sharded tensors."""
    for fn in (full_tensor, to_local):
        setattr(Tensor, fn.__name__, fn)
    Tensor.global_shape = property(global_shape)  # type: ignore[attr-defined]
    Tensor.device_mesh = property(_device_mesh)  # type: ignore[attr-defined]
    Tensor.placements = property(_placements)  # type: ignore[attr-defined]


def _device_mesh(tensor: Tensor) -> DeviceMesh:
    return _layout_of(tensor).mesh


def _placements(tensor: Tensor) -> tuple[Any, ...]:
    layout = _layout_of(tensor)
    return tuple(
        Shard(layout.dim) if name == layout.axis else Replicate() for name in layout.mesh.axis_names
    )


def _layout_of(tensor: Tensor) -> ShardLayout:
    if tensor._layout is None:
        raise AttributeError("a plain tensor has no device_mesh and no placements")
    return tensor._layout  # type: ignore[no-any-return]


attach()
