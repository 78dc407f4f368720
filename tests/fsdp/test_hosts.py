"""Processes with several rank threads each, as on hosts with several accelerators."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import Job, Lm, adamw, compare, lm_loss, shard_nested, train_rank, train_twin
from test_processes import in_processes, join

import tensorplay as tp
import tensorplay.distributed as dist
from tensorplay.distributed._world import current_world
from tensorplay.distributed.device_mesh import init_device_mesh

pytestmark = pytest.mark.processes
THREADS, PROCESSES = 2, 2
WORLD = THREADS * PROCESSES
JOB = Job(Lm, lm_loss, shard_nested, adamw, steps=3)


@pytest.fixture(autouse=True)
def several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={THREADS}")


def communicate(rank: int) -> Any:
    """What a rank sees of the others; in every kind of communication."""
    assert (dist.get_rank(), dist.get_world_size()) == (rank, WORLD)
    total = tp.tensor([float(rank)])
    dist.all_reduce(total)
    across = tp.zeros(1)  # 0 <-> 2 and 1 <-> 3, each in another process
    other = (rank + 2) % WORLD
    ops = [dist.P2POp(dist.isend, tp.full((1,), rank * 10.0), other),
           dist.P2POp(dist.irecv, across, other)]  # fmt: skip
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    inside = tp.zeros(1)
    neighbour = rank ^ 1
    if rank < neighbour:
        dist.send(tp.full((1,), float(rank)), neighbour)
    else:
        dist.recv(inside, neighbour)
    objects: list[Any] = [None] * WORLD
    dist.all_gather_object(objects, {"rank": rank})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "local"))
    sums = []
    for axis in ("host", "local"):
        value = tp.tensor([float(rank)])
        dist.all_reduce(value, group=mesh.get_group(axis))
        sums.append(value.item())
    outer = dist.new_group([0, 3])
    dist.barrier()
    dist.monitored_barrier()
    if rank in (0, 3):
        value = tp.tensor([float(rank)])
        dist.broadcast(value, src=3, group=outer)
        assert value.item() == 3
    return total.item(), across.item(), inside.item(), objects, sums


def both(rank: int) -> Any:
    return communicate(rank), train_rank(rank, JOB)


def hosts(process: int, processes: int, port: int) -> Any:
    join(process, processes, port)
    assert current_world().world_size == processes
    found = dist.run_ranks(both, THREADS, timeout=60)
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_threads_of_two_processes_are_ranks_of_one_job() -> None:
    twin = train_twin(JOB, WORLD)
    for process, results in enumerate(in_processes(hosts, PROCESSES)):
        for thread, (seen, record) in enumerate(results):
            rank = process * THREADS + thread
            total, across, inside, objects, sums = seen
            assert total == 6 and across == 10.0 * ((rank + 2) % WORLD)
            assert inside == (rank - 1 if rank % 2 else 0)
            assert objects == [{"rank": r} for r in range(WORLD)]
            assert sums == [[2, 4, 2, 4][rank], [1, 1, 5, 5][rank]]
            compare(record, twin, WORLD, rank)


def other_numbers(process: int, processes: int, port: int) -> str:
    join(process, processes, port)
    with pytest.raises(RuntimeError) as caught:
        dist.run_ranks(communicate, 1 + process)
    dist.destroy_process_group()
    return str(caught.value)


def test_other_numbers_of_threads_are_refused_everywhere() -> None:
    for message in in_processes(other_numbers, PROCESSES):
        assert "process 0 asks for 1 of its 2 devices; process 1 asks for 2" in message


def fails(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        raise ValueError("no data")
    for _ in range(1000):
        dist.all_reduce(tp.ones(1))


def failing_host(process: int, processes: int, port: int) -> str:
    join(process, processes, port)
    try:
        dist.run_ranks(fails, THREADS, timeout=30)
    except Exception as error:
        if process == 0:
            raise
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_rank_that_raises_ends_those_of_the_other_process() -> None:
    with pytest.raises(AssertionError, match="no data"):
        in_processes(failing_host, PROCESSES)
