"""The data-parallel mesh of a ``fully_shard`` call."""

from __future__ import annotations

import dataclasses

import jax

from .._process_group import get_world_size, is_initialized
from .._spmd import controlled
from .._world import current_world
from ..device_mesh import DeviceMesh, init_device_mesh


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

    @property
    def reduces_by_ring(self) -> bool:
        """Over gloo a ring of permutes is the faster reduce-scatter (tests/benchmarks)."""
        return current_world().kind == "processes" and self.mesh.device_type == "cpu"


def default_mesh() -> DeviceMesh:
    """All ranks of the process group, or one rank on this process's device without one."""
    size = get_world_size() if is_initialized() else 1
    platform = current_world().device.platform
    return init_device_mesh({"gpu": "cuda"}.get(platform, platform), (size,))


def data_parallel_mesh(mesh: DeviceMesh | None) -> DataParallelMesh:
    """The mesh to shard over.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        ValueError: the mesh has more than two dims.
    """
    mesh = default_mesh() if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            'mesh should be a DeviceMesh, such as init_device_mesh("cpu", (world_size,)), got '
            f"{mesh!r}"
        )
    if mesh.ndim == 1:
        return DataParallelMesh(mesh, mesh.axis_names[0], None)
    if mesh.ndim == 2:
        return DataParallelMesh(mesh, mesh.axis_names[1], mesh.axis_names[0])
    raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
