"""Ranks as threads: what they share, how they meet, and how one's failure ends the others."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import tensorplay.distributed as dist
from tensorplay.distributed import run_ranks
from tensorplay.distributed._spmd import Spread, launch, shared_program
from tensorplay.distributed._world import current_world


def world_mesh() -> Mesh:
    return dist.init_device_mesh("cpu", (dist.get_world_size(),)).jax_mesh


def program(mesh: Mesh, body: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., Any]:
    """``body``, per rank, as one program for all ranks."""
    spec = PartitionSpec(mesh.axis_names)

    def build() -> Callable[..., Any]:
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))

    return shared_program((body, mesh), build)


def add_up(x: jax.Array) -> tuple[jax.Array, ...]:
    return (jax.lax.psum(x, "dim_0"),)


def subtract_up(x: jax.Array) -> tuple[jax.Array, ...]:
    return (-jax.lax.psum(x, "dim_0"),)


def summed(values: jax.Array) -> Any:
    mesh = world_mesh()
    (out,) = launch(mesh, program(mesh, add_up), [values])
    return np.asarray(out.local)


# ---- what a rank has ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_results_in_rank_order(size: int) -> None:
    def fn(rank: int, offset: int) -> tuple[Any, ...]:
        dist.barrier()
        default = next(iter(jnp.zeros(1).devices()))
        assert default == current_world().device
        return dist.get_rank(), dist.get_world_size(), offset + rank, default

    results = run_ranks(fn, size, args=(10,))
    assert [result[:3] for result in results] == [(r, size, 10 + r) for r in range(size)]
    assert len({result[3] for result in results}) == size
    assert not dist.is_initialized()
    assert [t.name for t in threading.enumerate() if t.name.startswith("rank")] == []


def test_the_group_inside() -> None:
    def fn(rank: int) -> None:
        dist.destroy_process_group()
        assert not dist.is_initialized()
        dist.init_process_group("gloo", rank=rank, world_size=2)
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("gloo")
        dist.destroy_process_group()
        with pytest.raises(ValueError, match=r"world_size=3\) inside run_ranks, where .* is 2"):
            dist.init_process_group("gloo", world_size=3)
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29500")
        assert dist.get_backend() == "gloo"
        own = dist.new_group([1])
        assert dist.get_rank(own) == (0 if rank == 1 else -1)
        with pytest.raises(RuntimeError, match="run_ranks inside a rank"):
            run_ranks(fn, 2)

    run_ranks(fn, 2)


def test_a_bad_world_size() -> None:
    with pytest.raises(ValueError, match="world_size >= 1, got 0"):
        run_ranks(lambda rank: None, 0)


# ---- launching together ------------------------------------------------------------------------


def test_launch_takes_and_gives_each_rank_its_piece() -> None:
    def fn(rank: int) -> Any:
        return summed(jnp.full((2, 3), float(rank)))

    for result in run_ranks(fn, 4):
        np.testing.assert_array_equal(result, np.full((2, 3), 6.0))


def test_a_program_is_traced_once_and_its_outputs_are_inputs_as_they_are() -> None:
    traces = []

    def step(x: jax.Array) -> tuple[jax.Array, ...]:
        traces.append(threading.current_thread().name)
        return (x + jax.lax.axis_index("dim_0").astype(x.dtype),)

    def fn(rank: int) -> Any:
        mesh = world_mesh()
        value = Spread.of_local(mesh, jnp.zeros(1))
        for _ in range(3):
            (value,) = launch(mesh, program(mesh, step), [value])
        whole = np.asarray(value.global_array).tolist()
        return float(value.local[0]), whole, next(iter(value.local.devices()))

    results = run_ranks(fn, 3)
    assert [result[:2] for result in results] == [(3.0 * r, [0.0, 3.0, 6.0]) for r in range(3)]
    assert len({result[2] for result in results}) == 3
    assert len(traces) == 1


def unchanged(x: jax.Array) -> tuple[jax.Array, ...]:
    return (x,)


def test_global_arrays_need_all_ranks() -> None:
    def fn(rank: int) -> Any:
        value = Spread.of_local(world_mesh(), jnp.full(2, float(rank)))
        with pytest.raises(RuntimeError, match="one rank thread alone cannot assemble"):
            _ = value.global_array
        (value,) = launch(world_mesh(), program(world_mesh(), unchanged), [value])
        return np.asarray(value.global_array).tolist()

    assert run_ranks(fn, 2) == [[0.0, 0.0, 1.0, 1.0]] * 2


def test_sub_meshes_work_at_the_same_time() -> None:
    def fn(rank: int) -> float:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"].jax_mesh

        def add_pair(x: jax.Array) -> tuple[jax.Array, ...]:
            return (jax.lax.psum(x, "tp"),)

        spec = PartitionSpec("tp")
        built = shared_program(
            ("pair", mesh),
            lambda: jax.jit(jax.shard_map(add_pair, mesh=mesh, in_specs=spec, out_specs=spec)),
        )
        total = 0.0
        for _ in range(10):
            (out,) = launch(mesh, built, [jnp.full(1, float(rank))])
            total = float(out.local[0])
        return total

    assert run_ranks(fn, 4) == [1.0, 1.0, 5.0, 5.0]


# ---- failures ----------------------------------------------------------------------------------


def test_the_first_failure_is_raised_with_its_rank() -> None:
    class MyError(KeyError):
        pass

    def fn(rank: int) -> None:
        if rank == 1:
            raise MyError("boom")
        dist.barrier()

    with pytest.raises(MyError, match="boom") as caught:
        run_ranks(fn, 3)
    assert caught.value.__notes__ == ["raised by rank 1 of 3 in run_ranks"]


def test_the_others_learn_who_raised_and_where_they_waited() -> None:
    told: dict[int, str] = {}

    def fn(rank: int) -> None:
        if rank == 1:
            time.sleep(0.2)
            raise ValueError("boom")
        try:
            dist.barrier() if rank == 0 else summed(jnp.zeros(1))
        except RuntimeError as error:
            told[rank] = str(error)
            raise

    with pytest.raises(ValueError, match="boom"):
        run_ranks(fn, 3)
    for message in told.values():
        assert "rank 1 raised ValueError: boom" in message
    assert "rank 0 waits in barrier()" in told[0]
    assert set(told) == {0, 2}


def test_an_early_return() -> None:
    def fn(rank: int) -> None:
        if rank != 2:
            dist.barrier()

    with pytest.raises(dist.DistBackendError, match="rank 2 returned while others wait for it"):
        run_ranks(fn, 3)


def test_different_collectives() -> None:
    def fn(rank: int) -> None:
        mesh = world_mesh()
        body = add_up if rank == 0 else subtract_up
        launch(mesh, program(mesh, body), [jnp.zeros(1)])

    with pytest.raises(dist.DistBackendError, match="must call the same collective") as caught:
        run_ranks(fn, 2)
    assert "rank 0 waits in add_up over ranks [0, 1]" in str(caught.value)
    assert "rank 1 waits in subtract_up over ranks [0, 1]" in str(caught.value)


def test_a_barrier_and_a_launch_do_not_meet() -> None:
    def fn(rank: int) -> None:
        dist.barrier() if rank == 0 else summed(jnp.zeros(1))

    with pytest.raises(dist.DistBackendError, match="same collective"):
        run_ranks(fn, 2)


def test_ranks_that_wait_in_a_circle() -> None:
    def fn(rank: int) -> None:
        pairs = [dist.new_group(pair) for pair in ([0, 1], [1, 2], [0, 2])]
        dist.barrier(pairs[rank])

    with pytest.raises(dist.DistBackendError, match="wait for one another in different"):
        run_ranks(fn, 3)


def test_different_shapes_are_listed() -> None:
    def fn(rank: int) -> None:
        summed(jnp.zeros(1 + rank, jnp.float32 if rank else jnp.int32))

    with pytest.raises(dist.DistBackendError) as caught:
        run_ranks(fn, 2)
    assert "rank 0 passed int32[1]; rank 1 passed float32[2]" in str(caught.value)


def test_an_error_in_the_program_reaches_every_rank() -> None:
    def broken(x: jax.Array) -> tuple[jax.Array, ...]:
        raise LookupError("while tracing")

    def fn(rank: int) -> bool:
        mesh = world_mesh()
        with pytest.raises(LookupError, match="while tracing"):
            launch(mesh, program(mesh, broken), [jnp.zeros(1)])
        return float(summed(jnp.ones(1))[0]) == 2.0

    assert run_ranks(fn, 2) == [True, True]


def test_the_timeout() -> None:
    def fn(rank: int) -> None:
        if rank == 1:
            time.sleep(1.0)
        dist.barrier()

    with pytest.raises(dist.DistBackendError, match=r"did not meet within 0\.2 s") as caught:
        run_ranks(fn, 2, timeout=0.2)
    assert "rank 0 waits in barrier(); rank 1 is running" in str(caught.value)


# ---- devices, in a fresh process ---------------------------------------------------------------


def in_fresh_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "", **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


def test_too_few_devices_by_flag() -> None:
    output = in_fresh_process(
        "from tensorplay.distributed import run_ranks; run_ranks(print, 4)",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    assert "4 ranks need 4 devices, and this process has 2" in output
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=4" in output


def test_a_running_backend_is_restarted_with_more_devices() -> None:
    output = in_fresh_process(
        "import jax\n"
        "early = jax.numpy.arange(3.0)\n"
        "assert jax.device_count() == 1\n"
        "from tensorplay.distributed import run_ranks\n"
        "print(run_ranks(lambda rank: rank, 3), early.tolist(), jax.numpy.ones(2).sum())\n"
    )
    assert output.strip() == "[0, 1, 2] [0.0, 1.0, 2.0] 2.0"
