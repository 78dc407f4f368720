"""DeviceMesh: layout, slicing, groups and errors, as in torch.distributed.device_mesh."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import tensorplay.distributed as dist
from tensorplay.distributed import DeviceMesh, init_device_mesh, run_ranks


def test_one_rank_without_a_group() -> None:
    mesh = init_device_mesh("cpu", (1,))
    assert (mesh.shape, mesh.ndim, mesh.size(), mesh.kind) == ((1,), 1, 1, "single")
    assert mesh.get_coordinate() == (0,) and mesh.get_local_rank() == 0 and mesh.get_rank() == 0
    assert mesh.jax_mesh.axis_names == ("dim_0",)
    assert mesh.get_group().ranks == (0,)


def test_two_dimensions_seen_from_every_rank() -> None:
    def fn(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        row, column = divmod(rank, 3)
        assert mesh.shape == (2, 3) and mesh.size() == 6 and mesh.size(1) == 3
        assert mesh.get_coordinate() == (row, column)
        assert (mesh.get_local_rank("dp"), mesh.get_local_rank(1)) == (row, column)
        assert mesh["tp"].mesh.tolist() == [3 * row, 3 * row + 1, 3 * row + 2]
        assert mesh["dp"].mesh.tolist() == [column, column + 3]
        assert mesh["dp"].get_local_rank() == row
        assert mesh["dp"].root is mesh and mesh.root is mesh
        assert mesh["dp", "tp"] is mesh
        assert mesh.get_group("dp").ranks == (column, column + 3)
        assert dist.get_rank(mesh.get_group("tp")) == column
        assert [group.size() for group in mesh.get_all_groups()] == [2, 3]
        devices = mesh["tp"].jax_mesh.devices.tolist()
        assert devices == list(jax.devices("cpu")[3 * row : 3 * row + 3])
        assert mesh["tp"].jax_mesh.axis_names == ("tp",)
        dist.barrier(mesh.get_group("tp"))

    run_ranks(fn, 6)


def test_three_dimensions_and_flatten() -> None:
    def fn(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        both = mesh["dp", "tp"]
        assert both.mesh.tolist() == (np.array([[0, 1], [4, 5]]) + (rank & 2)).tolist()
        assert both["tp"] == mesh["tp"]
        flat = mesh["dp", "cp"]._flatten()
        assert flat.mesh.tolist() == [r + (rank & 1) for r in (0, 2, 4, 6)]
        assert flat.mesh_dim_names == ("dp_cp",) and mesh["dp_cp"] == flat
        assert mesh["dp", "cp"]._flatten("dp_cp") is flat
        assert mesh["dp_cp", "tp"].shape == (4, 2)
        assert mesh.get_group("dp_cp").ranks == flat.get_group().ranks
        assert flat.jax_mesh.shape == {"dp_cp": 4}
        assert flat._flatten("dp_cp") is flat
        with pytest.raises(ValueError, match="dp_cp has been created before"):
            mesh["cp", "tp"]._flatten("dp_cp")
        with pytest.raises(ValueError, match="dp already exists"):
            mesh["cp", "tp"]._flatten("dp")
        with pytest.raises(RuntimeError, match="Slicing overlapping dim_names"):
            _ = mesh["dp_cp", "cp"]
        assert repr(mesh) == "DeviceMesh((dp=2, cp=2, tp=2), 'cpu', stride=(4, 2, 1))"
        assert repr(flat) == "DeviceMesh((dp_cp=4), 'cpu', stride=(2,))"

    run_ranks(fn, 8)


def test_slicing_errors() -> None:
    def fn(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        with pytest.raises(KeyError, match="Invalid mesh_dim_names"):
            _ = mesh["pp"]
        with pytest.raises(KeyError, match="should be in ascending order"):
            _ = mesh["tp", "dp"]
        with pytest.raises(RuntimeError, match="Cannot slice a DeviceMesh without mesh_dim_names"):
            _ = init_device_mesh("cpu", (2,))["dp"]
        with pytest.raises(RuntimeError, match="Cannot flatten a DeviceMesh without"):
            init_device_mesh("cpu", (2,))._flatten()
        with pytest.raises(RuntimeError, match="mesh_dim` needs to be specified"):
            mesh.get_local_rank()
        with pytest.raises(KeyError, match="'pp' does not exist"):
            mesh.get_group("pp")

    run_ranks(fn, 2)


def test_ranks_outside_the_mesh() -> None:
    def fn(rank: int) -> Any:
        mesh = DeviceMesh("cpu", [2, 0])
        if rank == 1:
            assert mesh.get_coordinate() is None
            with pytest.raises(RuntimeError, match="rank 1 is not in DeviceMesh"):
                _ = mesh.jax_mesh
            with pytest.raises(RuntimeError, match="rank 1 is not in DeviceMesh"):
                mesh.get_local_rank()
            return None
        assert mesh.jax_mesh.devices.tolist() == [jax.devices("cpu")[2], jax.devices("cpu")[0]]
        return mesh.get_local_rank()

    assert run_ranks(fn, 3) == [1, None, 0]


def test_from_group() -> None:
    def fn(rank: int) -> None:
        pair = dist.new_group([0, 1])
        rest = dist.new_group([2, 3])
        own = pair if rank < 2 else rest
        assert isinstance(own, dist.ProcessGroup)
        mesh = DeviceMesh.from_group(own, "cpu", mesh_dim_names=("dp",))
        assert mesh.mesh.tolist() == list(own.ranks) and mesh.get_group() is own
        with pytest.raises(ValueError, match="Invalid mesh"):
            DeviceMesh.from_group(own, "cpu", [0])
        with pytest.raises(ValueError, match="Must pass mesh if"):
            DeviceMesh.from_group([own, own], "cpu")
        with pytest.raises(ValueError, match="at least one ProcessGroup"):
            DeviceMesh.from_group([], "cpu")
        two = DeviceMesh.from_group([own, own], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
        assert two.get_group("b") is own

    run_ranks(fn, 4)


def test_equality_is_by_value() -> None:
    def fn(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        same = DeviceMesh("cpu", [0, 1], mesh_dim_names=["dp"])
        assert mesh == same and hash(mesh) == hash(same) and mesh.jax_mesh == same.jax_mesh
        assert mesh != init_device_mesh("cpu", (2,))
        assert mesh != DeviceMesh("cpu", [1, 0], mesh_dim_names=("dp",))
        assert mesh != "dp"

    run_ranks(fn, 2)


@pytest.mark.parametrize(
    ("arguments", "names", "message"),
    [
        (("cpu", (2, 2)), None, "bigger than default world size 2, but found 4 ranks"),
        (("cpu", (1, 2)), ("dp", "dp"), "Each mesh_dim_name must be unique"),
        (("cpu", (2,)), ("dp", "tp"), "should have same length"),
        (("cuda:0", (2,)), None, "Device type with index is not supported but got cuda:0"),
        (("tpu", (2,)), None, "drive 'cpu' devices, but a mesh of 'tpu' was asked for"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], names: Any, message: str) -> None:
    def fn(rank: int) -> None:
        with pytest.raises(RuntimeError, match=message):
            _ = init_device_mesh(*arguments, mesh_dim_names=names).jax_mesh
        with pytest.raises(RuntimeError, match="may be in a mesh once"):
            DeviceMesh("cpu", [0, 0])

    run_ranks(fn, 2)


def test_one_controller() -> None:
    run_ranks(lambda rank: None, 4)  # makes sure that there are devices
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh.kind == "controller" and mesh.jax_mesh.size == 4
    have = len(jax.local_devices(backend="cpu"))
    with pytest.raises(RuntimeError, match=f"this process's {have} cpu device.*found {have + 1}"):
        init_device_mesh("cpu", (have + 1,))
