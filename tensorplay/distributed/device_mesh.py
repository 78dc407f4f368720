"""DeviceMesh: the ranks of a job as an n-dimensional array, as in torch.distributed.device_mesh."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from ._process_group import (
    ProcessGroup,
    default_backend,
    get_process_group_ranks,
    init_process_group,
    is_initialized,
)
from ._world import World, current_world, rank_asked

Names = tuple[str, ...]


class DeviceMesh:
    """Ranks laid out in n dimensions. Source: torch.distributed.device_mesh.DeviceMesh.

    A slice of a mesh ("dp" of a ("dp", "tp") mesh) is a mesh too: the row that holds this rank.

    Args:
        device_type: "cpu", "cuda", "tpu", or "xla" for whichever the ranks drive.
        mesh: array of global ranks, each at most once.
        mesh_dim_names: one name per dimension.

    Attributes:
        device_type, mesh_dim_names: as given.
        mesh: the ranks, an int array of shape `shape`.
        kind: "processes", "threads", "single" (one rank), or "controller": no job, one thread
            drives all devices, and "rank" i is this process's device i.

    Raises:
        RuntimeError: the mesh is larger than the job (or, without one, than this process has
            devices), or the names do not fit.
    """

    def __init__(
        self, device_type: str, mesh: ArrayLike, *, mesh_dim_names: Sequence[str] | None = None
    ) -> None:
        ranks = np.array(mesh, dtype=np.int64)
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        _check_names(ranks.shape, names)
        _check_device_type(device_type)
        self._setup(device_type, ranks, tuple((i,) for i in range(ranks.ndim)), names, None)
        _check_fits(ranks, self.kind, device_type)

    def _setup(
        self,
        device_type: str,
        root_ranks: np.ndarray[Any, Any],
        axes: tuple[tuple[int, ...], ...],
        names: Names | None,
        root: DeviceMesh | None,
    ) -> None:
        """``axes``: for each dimension of this mesh the root's dimensions it runs over."""
        if not is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            init_process_group()
        world = current_world()
        self.device_type = device_type
        self.mesh_dim_names = names
        self.kind = world.kind
        if world.kind == "single" and root_ranks.size > 1:
            self.kind = "controller"  # type: ignore[assignment]
        self._root = root
        self._axes = axes
        self._root_ranks = root_ranks
        self._flattened: dict[str, DeviceMesh] = {}
        self._groups: dict[int, ProcessGroup] = {}
        self.mesh = _own_slice(root_ranks, axes, world.rank)
        self._coordinate = _find(self.mesh, world.rank)
        self._jax_mesh: tuple[World, Mesh] | None = None  # for the world it was made in
        self._key = (device_type, names, self.mesh.shape, tuple(self.mesh.flat))

    @property
    def root(self) -> DeviceMesh:
        """The mesh this one was sliced or flattened from; itself if it was not."""
        return self._root or self

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks along each dimension."""
        return tuple(self.mesh.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return int(self.mesh.ndim)

    def size(self, mesh_dim: int | None = None) -> int:
        """Number of ranks, in all or along one dimension."""
        return int(self.mesh.size if mesh_dim is None else self.mesh.shape[mesh_dim])

    @property
    def axis_names(self) -> Names:
        """The axes of `jax_mesh`: the dimensions' names, ("dim_0", ...) where they have none."""
        return self.mesh_dim_names or tuple(f"dim_{i}" for i in range(self.ndim))

    @property
    def jax_mesh(self) -> Mesh:
        """The ``jax.sharding.Mesh`` over the devices of these ranks.

        Raises:
            RuntimeError: this rank is not in the mesh.
        """
        world = current_world()
        if self._jax_mesh is None or self._jax_mesh[0] is not world:
            self._jax_mesh = (world, self._make_jax_mesh())
        return self._jax_mesh[1]

    def _make_jax_mesh(self) -> Mesh:
        if self._coordinate is None:
            raise RuntimeError(
                f"rank {self.get_rank()} is not in {self!r}: only its ranks "
                f"{self.mesh.flatten().tolist()} may use it"
            )
        devices = np.array(_devices(self.kind, self.device_type), dtype=object)
        return Mesh(devices[self.mesh], self.axis_names)

    def get_rank(self) -> int:
        """This rank's global number."""
        rank_asked()
        return current_world().rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This rank's place along each dimension; None if it is not in the mesh."""
        rank_asked()
        return self._coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's place along one dimension, which a 1-D mesh need not name.

        Raises:
            RuntimeError: a dimension must be named, or this rank is not in the mesh.
            KeyError: no dimension has this name.
        """
        rank_asked()
        dim = self._dim(mesh_dim)
        if self._coordinate is None:
            raise RuntimeError(f"rank {self.get_rank()} is not in {self!r}")
        return self._coordinate[dim]

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """The ranks that differ from this one along one dimension only.

        Raises:
            RuntimeError: a dimension must be named, or this rank is not in the mesh.
            KeyError: no dimension has this name.
        """
        if isinstance(mesh_dim, str) and mesh_dim in self.root._flattened:
            return self.root._flattened[mesh_dim].get_group()
        dim = self._dim(mesh_dim)
        if dim not in self._groups:
            place = list(self._coordinate or ())
            if not place:
                raise RuntimeError(f"rank {self.get_rank()} is not in {self!r}")
            place[dim] = slice(None)  # type: ignore[call-overload]
            ranks = self.mesh[tuple(place)].tolist()
            world = current_world()
            self._groups[dim] = ProcessGroup(
                ranks, f"mesh {ranks}", default_backend(world), world.timeout
            )
        return self._groups[dim]

    def get_all_groups(self) -> list[ProcessGroup]:
        """`get_group` of each dimension."""
        return [self.get_group(dim) for dim in range(self.ndim)]

    def __getitem__(self, mesh_dim_names: str | Names) -> DeviceMesh:
        """The sub-mesh over some dimensions, the one that holds this rank.

        Args:
            mesh_dim_names: a name or several, in the mesh's order; on a root mesh also the names of
                flattened dimensions.

        Raises:
            RuntimeError: the mesh has no names, or the dimensions overlap.
            KeyError: an unknown name, or not in the mesh's order.
        """
        if not self.mesh_dim_names:
            raise RuntimeError("Cannot slice a DeviceMesh without mesh_dim_names!")
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if names == self.mesh_dim_names:
            return self
        known = dict(zip(self.mesh_dim_names, self._axes, strict=True))
        if self._root is None:
            known.update({name: mesh._axes[0] for name, mesh in self._flattened.items()})
        if unknown := [name for name in names if name not in known]:
            raise KeyError(
                f"Invalid mesh_dim_names {names} specified: {unknown} not among {list(known)}."
            )
        return self._sub_mesh(tuple(known[name] for name in names), names)

    def _sub_mesh(self, axes: tuple[tuple[int, ...], ...], names: Names) -> DeviceMesh:
        order = [axis for several in axes for axis in several]
        if len(set(order)) != len(order):
            raise RuntimeError(f"Slicing overlapping dim_names {names} is not allowed.")
        if order != sorted(order):
            raise KeyError(
                f"Invalid mesh_dim_names {names} specified. "
                "Mesh dim indices should be in ascending order."
            )
        return self._derived(axes, names)

    def _derived(self, axes: tuple[tuple[int, ...], ...], names: Names) -> DeviceMesh:
        derived = object.__new__(DeviceMesh)
        derived._setup(self.device_type, self._root_ranks, axes, names, self.root)
        return derived

    def _flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """A 1-D mesh over all of this mesh's ranks, which the root mesh remembers by its name.

        Args:
            mesh_dim_name: default the dimensions' names joined by "_".

        Raises:
            RuntimeError: the mesh has no names.
            ValueError: the root mesh uses the name for something else.
        """
        if not self.mesh_dim_names:
            raise RuntimeError("Cannot flatten a DeviceMesh without mesh_dim_names!")
        name = mesh_dim_name or "_".join(self.mesh_dim_names)
        if self.mesh_dim_names == (name,):
            return self
        axes = (tuple(axis for several in self._axes for axis in several),)
        root = self.root
        if name in (root.mesh_dim_names or ()):
            raise ValueError(
                f"{name} already exists for submesh of the {root}. "
                "Please specify another valid mesh_dim_name."
            )
        known = root._flattened.setdefault(name, self._derived(axes, (name,)))
        if known._axes != axes:
            raise ValueError(
                f"Flatten mesh with mesh_dim_name {name} has been created before, "
                "Please specify another valid mesh_dim_name."
            )
        return known

    @staticmethod
    def from_group(
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: ArrayLike | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """A mesh with one dimension per group. Source: DeviceMesh.from_group.

        Args:
            group: a group, or several, one per dimension.
            mesh: the ranks; required with several groups.
            mesh_dim_names: required with several groups.

        Raises:
            ValueError: ``mesh`` is missing or does not agree with the groups.
        """
        if isinstance(group, ProcessGroup):
            ranks = get_process_group_ranks(group)
            if mesh is not None and np.asarray(mesh).tolist() != ranks:
                raise ValueError(f"Invalid mesh {mesh} for ProcessGroup with ranks {ranks}")
            groups, mesh = [group], ranks
        else:
            groups = list(group)
            _check_groups(groups, mesh, mesh_dim_names)
        assert mesh is not None
        made = DeviceMesh(device_type, mesh, mesh_dim_names=mesh_dim_names)
        made._groups = dict(enumerate(groups))
        return made

    def __repr__(self) -> str:
        if self.mesh_dim_names:
            pairs = zip(self.mesh_dim_names, self.shape, strict=True)
            layout = f"({', '.join(f'{name}={size}' for name, size in pairs)})"
        else:
            layout = str(self.shape)
        text = f"DeviceMesh({layout}, {self.device_type!r}, stride={self._strides()}"
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "") == "DETAIL":
            text += f", Mesh: {self.mesh.tolist()}"
        return f"{text})"

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, DeviceMesh) and self._key == other._key)

    def _dim(self, mesh_dim: int | str | None) -> int:
        """The index of a dimension given by index, name, or not at all in a 1-D mesh."""
        if mesh_dim is None:
            if self.ndim > 1:
                raise RuntimeError(
                    f"Found the DeviceMesh have {self.ndim} dimensions. Optional kwarg `mesh_dim` "
                    "needs to be specified when device_mesh.ndim > 1."
                )
            return 0
        if isinstance(mesh_dim, int):
            return range(self.ndim)[mesh_dim]
        if mesh_dim not in (self.mesh_dim_names or ()):
            raise KeyError(
                f"Mesh dimension '{mesh_dim}' does not exist. "
                f"Available mesh dimensions are: mesh_dim_names={self.mesh_dim_names}"
            )
        return (self.mesh_dim_names or ()).index(mesh_dim)

    def _strides(self) -> tuple[Any, ...]:
        """How far apart neighbours along each dimension are in the flat root mesh."""
        sizes = self._root_ranks.shape
        steps = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        return tuple(_joint_stride(axes, sizes, steps) for axes in self._axes)


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """The first ``prod(mesh_shape)`` ranks as a mesh. Source: torch.distributed.device_mesh.

    Args:
        device_type: "cpu", "cuda", "tpu", or "xla" for whichever the ranks drive.
        mesh_shape: ranks along each dimension.
        mesh_dim_names: one name per dimension.

    Raises:
        RuntimeError: the names do not fit ``mesh_shape``, ``device_type`` has an index, or the mesh
            is larger than the job (without one: than this process has devices).
    """
    shape = tuple(mesh_shape)
    ranks = np.arange(math.prod(shape)).reshape(shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names)


def _own_slice(
    root_ranks: np.ndarray[Any, Any], axes: tuple[tuple[int, ...], ...], rank: int
) -> np.ndarray[Any, Any]:
    """The part of the root over ``axes`` that holds ``rank`` (the first part if none does)."""
    kept = [axis for several in axes for axis in several]
    place = _find(root_ranks, rank) or (0,) * root_ranks.ndim
    picked = root_ranks[tuple(slice(None) if axis in kept else at for axis, at in enumerate(place))]
    sizes = [math.prod(root_ranks.shape[axis] for axis in several) for several in axes]
    return picked.reshape(sizes)


def _find(ranks: np.ndarray[Any, Any], rank: int) -> tuple[int, ...] | None:
    places = np.argwhere(ranks == rank)
    return tuple(places[0].tolist()) if len(places) else None


def _joint_stride(axes: tuple[int, ...], sizes: tuple[int, ...], steps: list[int]) -> Any:
    """The stride of a dimension over one root dimension, or over several, joined where they can."""
    strides: list[int] = []
    for axis in axes:
        if strides and strides[-1] == steps[axis] * sizes[axis]:
            strides.pop()
        strides.append(steps[axis])
    return strides[0] if len(strides) == 1 else tuple(strides)


def _devices(kind: str, device_type: str) -> Sequence[jax.Device]:
    if kind != "controller":
        return current_world().devices_of(device_type)
    platform = {"cuda": "gpu", "xla": None}.get(device_type, device_type)
    return jax.local_devices(backend=platform)


def _check_names(shape: tuple[int, ...], names: Names | None) -> None:
    if names is None:
        return
    if len(set(names)) != len(names):
        raise RuntimeError(
            "Each mesh_dim_name must be unique. "
            f"Found repeated mesh_dim_name in mesh_dim_names {names}"
        )
    if len(shape) != len(names):
        raise RuntimeError(
            "mesh_shape and mesh_dim_names should have same length! "
            f"Found len(mesh_dim_names): {len(names)} and len(mesh_shape):{len(shape)}."
        )


def _check_device_type(device_type: str) -> None:
    if not device_type.isalpha():
        raise RuntimeError(
            f"Device type with index is not supported but got {device_type}. If you maintained a "
            "'device' object, it's recommended to pass in 'device.type'."
        )


def _check_fits(ranks: np.ndarray[Any, Any], kind: str, device_type: str) -> None:
    if len(np.unique(ranks)) != ranks.size:
        raise RuntimeError(f"each rank may be in a mesh once; got {ranks.tolist()}")
    needed = int(ranks.max(initial=0)) + 1
    if kind == "controller":
        have = len(_devices(kind, device_type))
        if needed > have:
            raise RuntimeError(
                f"Mesh should not be bigger than this process's {have} {device_type} device(s), "
                f"but found {ranks.size} ranks! Start {needed} ranks (init_process_group or "
                f"run_ranks), or set XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
            )
        return
    world_size = current_world().world_size
    if needed > world_size:
        raise RuntimeError(
            f"Mesh should not be bigger than default world size {world_size}, but found "
            f"{ranks.size} ranks! Make a smaller mesh or start the job with {needed} ranks"
        )


def _check_groups(
    groups: list[ProcessGroup], mesh: ArrayLike | None, names: Sequence[str] | None
) -> None:
    if not groups:
        raise ValueError("Expects at least one ProcessGroup to be passed")
    if mesh is None:
        raise ValueError("Must pass mesh if passing multiple ProcessGroups")
    if names is None:
        raise ValueError("Must pass mesh_dim_names if passing multiple ProcessGroups")
    if np.ndim(mesh) != len(groups):
        raise ValueError(
            "Expects mesh with ndim equal to number of ProcessGroups but got "
            f"mesh {np.asarray(mesh).tolist()} and {len(groups)} ProcessGroups"
        )
