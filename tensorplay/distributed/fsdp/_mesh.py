"""The data-parallel mesh of a ``fully_shard`` call."""

from __future__ import annotations

import dataclasses
import math

import jax

from .._process_group import get_world_size, is_initialized
from .._spmd import controlled
from .._world import current_world
from ..device_mesh import DeviceMesh, init_device_mesh
from ._api import DataParallelMeshDims


@dataclasses.dataclass(frozen=True)
class DataParallelMesh:
    """A mesh with the roles of its axes.

    Attributes:
        mesh: 1-D (shard), or 2-D (replicate, shard) for hybrid sharding.
        shard_axis: over which parameters are cut.
        replicate_axis: over which pieces are replicated, or None.
    """

    mesh: DeviceMesh
    shard_axis: str
    replicate_axis: str | None

    @property
    def jax_mesh(self) -> jax.sharding.Mesh:
        return self.mesh.jax_mesh

    @property
    def controlled(self) -> bool:
        """Whether one controller drives all ranks."""
        return controlled(self.jax_mesh)

    @property
    def size(self) -> int:
        """Ranks that the data is split over."""
        return self.mesh.size()

    @property
    def shard_size(self) -> int:
        return self.mesh.shape[self.mesh.axis_names.index(self.shard_axis)]

    @property
    def replicate_size(self) -> int:
        return self.size // self.shard_size

    @property
    def rank(self) -> int:
        """This rank's number among those that the data is split over."""
        return self.mesh.mesh.flatten().tolist().index(self.mesh.get_rank())

    def post_forward(self, within: int) -> DeviceMesh:
        """A 2-D mesh whose rows are the neighbours that share pieces after forward."""
        ranks = self.mesh.mesh.reshape(-1, within)
        return DeviceMesh(self.mesh.device_type, ranks)

    @property
    def reduces_by_ring(self) -> bool:
        """Over gloo a ring of permutes is the faster reduce-scatter (tests/benchmarks)."""
        return current_world().spans_processes and self.mesh.device_type == "cpu"


def default_mesh() -> DeviceMesh:
    """All ranks of the process group, or one rank on this process's device without one."""
    size = get_world_size() if is_initialized() else 1
    platform = current_world().device.platform
    return init_device_mesh({"gpu": "cuda"}.get(platform, platform), (size,))


def data_parallel_mesh(
    mesh: DeviceMesh | None, dims: DataParallelMeshDims | None
) -> DataParallelMesh:
    """The mesh to shard over.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        RuntimeError: this rank is not in it.
        ValueError: the mesh has more than two dims, or lacks one that ``dims`` names.
    """
    mesh = default_mesh() if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            'mesh should be a DeviceMesh, such as init_device_mesh("cpu", (world_size,)), got '
            f"{mesh!r}"
        )
    if mesh.get_coordinate() is None:
        raise RuntimeError(
            f"rank {mesh.get_rank()} is not in {mesh!r} and takes no part: call fully_shard on its "
            f"ranks {mesh.mesh.flatten().tolist()} only"
        )
    if dims is not None:
        return _of_named_dims(mesh, dims)
    if mesh.ndim == 1:
        return DataParallelMesh(mesh, mesh.axis_names[0], None)
    if mesh.ndim == 2:
        return DataParallelMesh(mesh, mesh.axis_names[1], mesh.axis_names[0])
    raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")


def _of_named_dims(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataParallelMesh:
    """The ranks that differ from this one along the named dims only, as (replicate, shard)."""
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    for name in (*dims.replicate_names, *dims.shard_names):
        if name not in names:
            raise ValueError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {names}")
    replicate = [names.index(name) for name in dims.replicate_names]
    shard = [names.index(name) for name in dims.shard_names]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    own = tuple(slice(None) if d in (*replicate, *shard) else at for d, at in enumerate(coordinate))
    kept = sorted((*replicate, *shard))
    order = [kept.index(d) for d in (*replicate, *shard)]
    sizes = [math.prod(mesh.shape[d] for d in several) for several in (replicate, shard)]
    ranks = mesh.mesh[own].transpose(order).reshape(sizes)
    roles = ["_".join(dims.replicate_names) or "replicate", "_".join(dims.shard_names) or "shard"]
    if not replicate:
        made = DeviceMesh(mesh.device_type, ranks[0], mesh_dim_names=roles[1:])
        return DataParallelMesh(made, roles[1], None)
    made = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=roles)
    return DataParallelMesh(made, roles[1], roles[0])
