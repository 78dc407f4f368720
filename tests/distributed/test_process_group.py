"""Process groups: arguments and errors, jobs of real processes, and how their failures show."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.clusters import cloud_tpu_cluster
from jax._src.clusters.k8s_cluster import K8sCluster
from jax.sharding import Mesh, PartitionSpec

import tensorplay.distributed as dist
from tensorplay.distributed import _failures
from tensorplay.distributed._control import Hub, Link, free_port
from tensorplay.distributed._spmd import Spread, launch, shared_program
from tensorplay.distributed._world import current_world, on_backend_reset

HOST = "127.0.0.1"
LIMIT = 60.0  # seconds in which every job here must be over


# ---- jobs of real processes --------------------------------------------------------------------


def join_job(rank: int, size: int, port: int, timeout: float = 30.0) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{HOST}:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )


def child(job: Callable[..., Any], rank: int, size: int, port: int, log: str, queue: Any) -> None:
    """The main function of every process: reports its result, or the error that ended it."""
    descriptor = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 2)
    try:
        result = job(rank, size, port)
    except Exception as error:
        traceback.print_exc()
        queue.put((rank, f"{type(error).__name__}: {error}"))
        raise
    queue.put((rank, result))


class Outcome:
    """What a job's processes returned or raised (in words), exited with, and wrote to stderr."""

    def __init__(self, job: Callable[..., Any], size: int, folder: Path) -> None:
        context = mp.get_context("spawn")
        queue = context.SimpleQueue()
        port, log = free_port(HOST), str(folder / "stderr")
        processes = [
            context.Process(target=child, args=(job, rank, size, port, log, queue))
            for rank in range(size)
        ]
        started = time.monotonic()
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, started + LIMIT - time.monotonic()))
            if process.is_alive():
                process.kill()
        self.exitcodes = [process.exitcode for process in processes]
        self.results: dict[int, Any] = {}
        while not queue.empty():
            rank, result = queue.get()
            self.results[rank] = result
        self.stderr = [Path(f"{log}.{rank}").read_text() for rank in range(size)]


def add_up(mesh: Mesh) -> Callable[..., Any]:
    spec = PartitionSpec(mesh.axis_names)

    def build() -> Callable[..., Any]:
        def body(x: jax.Array) -> tuple[jax.Array]:
            return (jax.lax.psum(x, mesh.axis_names),)

        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=(spec,)))

    return shared_program(("add_up", mesh), build)


def summed(value: float, mesh: Mesh | None = None) -> float:
    """All ranks' values added up by a collective."""
    mesh = mesh or dist.init_device_mesh("cpu", (dist.get_world_size(),)).jax_mesh
    local = jax.device_put(np.full(1, value, np.float32), current_world().device)
    (out,) = launch(mesh, add_up(mesh), [Spread.of_local(mesh, local)])
    return float(np.asarray(out.local)[0])


def sum_until_it_breaks() -> None:
    """What the Tensor layer does when reading an array fails."""
    try:
        while True:
            summed(1.0)
    except Exception as error:
        raise _failures.translate(error) or error from None


def lifecycle(rank: int, size: int, port: int) -> dict[str, Any]:
    resets: list[str] = []
    on_backend_reset(lambda: resets.append("before"), lambda: resets.append("after"))
    early = jax.numpy.arange(3.0)
    seen: dict[str, Any] = {"sums": [], "descriptors": []}
    for _ in range(3):
        join_job(rank, size, port)
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, size, "gloo")
        with pytest.raises(ValueError, match="initialize the default process group twice"):
            join_job(rank, size, port)
        dist.barrier()
        work = dist.barrier(async_op=True)
        assert work is not None and work.wait() and work.is_completed()
        seen["sums"].append(summed(rank + 1.0))
        evens = dist.new_group([0])
        assert (dist.get_rank(evens) == 0) == (rank == 0)
        dist.barrier(evens) if rank == 0 else None
        dist.destroy_process_group()
        assert not dist.is_initialized()
        seen["descriptors"].append(len(os.listdir("/proc/self/fd")))
    seen["resets"] = resets
    seen["early"] = np.asarray(early).tolist()
    seen["again"] = float(jax.numpy.ones(4).sum())
    seen["threads"] = [thread.name for thread in threading.enumerate()]
    return seen


def test_a_group_can_be_made_and_destroyed_again_and_again(tmp_path: Path) -> None:
    outcome = Outcome(lifecycle, 2, tmp_path)
    assert outcome.exitcodes == [0, 0], outcome.stderr
    for rank in range(2):
        seen = outcome.results[rank]
        assert seen["sums"] == [3.0] * 3
        assert seen["resets"] == ["before", "after"] * 6
        assert seen["early"] == [0.0, 1.0, 2.0]
        assert seen["again"] == 4.0
        assert seen["threads"] == ["MainThread"]
        assert seen["descriptors"][2] <= seen["descriptors"][0]
        assert outcome.stderr[rank] == ""


def end_without_destroy(rank: int, size: int, port: int) -> float:
    join_job(rank, size, port)
    total = summed(1.0)
    if rank == 1:
        time.sleep(1.5)  # rank 0, which hosts the service, is done long before
    return total


def test_a_script_may_end_without_destroy(tmp_path: Path) -> None:
    outcome = Outcome(end_without_destroy, 2, tmp_path)
    assert outcome.exitcodes == [0, 0], outcome.stderr
    assert outcome.results == {0: 2.0, 1: 2.0}
    assert outcome.stderr == ["", ""]


def kill_rank_0(rank: int, size: int, port: int) -> None:
    kill_one(rank, size, port, victim=0)


def kill_rank_1(rank: int, size: int, port: int) -> None:
    kill_one(rank, size, port, victim=1)


def kill_one(rank: int, size: int, port: int, victim: int) -> None:
    join_job(rank, size, port)
    summed(1.0)
    if rank == victim:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    sum_until_it_breaks()


@pytest.mark.parametrize(("victim", "job"), [(0, kill_rank_0), (1, kill_rank_1)])
def test_kill_9_in_the_middle_of_collectives(
    victim: int, job: Callable[..., Any], tmp_path: Path
) -> None:
    outcome = Outcome(job, 3, tmp_path)
    for rank in range(3):
        if rank == victim:
            assert outcome.exitcodes[rank] == -signal.SIGKILL
        else:
            assert outcome.exitcodes[rank] == 1
            assert f"rank {victim} is gone" in outcome.results[rank]
            assert "DistBackendError" in outcome.results[rank]


def raise_on_rank_1(rank: int, size: int, port: int) -> None:
    join_job(rank, size, port)
    summed(1.0)
    if rank == 1:
        raise ValueError("boom")
    dist.barrier() if rank == 2 else sum_until_it_breaks()


def test_a_rank_that_raises_is_named_with_its_error(tmp_path: Path) -> None:
    outcome = Outcome(raise_on_rank_1, 3, tmp_path)
    assert outcome.exitcodes == [1, 1, 1]
    assert outcome.results[1] == "ValueError: boom"
    for rank in (0, 2):
        assert "rank 1 is gone (it raised ValueError: boom)" in outcome.results[rank]


def leave_early(rank: int, size: int, port: int) -> None:
    join_job(rank, size, port)
    summed(1.0)
    if rank == 0:
        dist.destroy_process_group()
    sum_until_it_breaks()


def test_a_rank_that_leaves_while_others_need_it(tmp_path: Path) -> None:
    outcome = Outcome(leave_early, 2, tmp_path)
    assert outcome.exitcodes == [1, 1]
    assert "rank 0 left too early: rank 1 waits for it" in outcome.results[0]
    assert "rank 0" in outcome.results[1] and "destroy_process_group" in outcome.results[1]


def blocked_when_rank_1_dies(rank: int, size: int, port: int) -> None:
    _failures.GRACE = 0.5
    join_job(rank, size, port)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LIMIT)


def test_the_watchdog_ends_a_process_that_cannot_raise(tmp_path: Path) -> None:
    outcome = Outcome(blocked_when_rank_1_dies, 2, tmp_path)
    assert outcome.exitcodes == [1, -signal.SIGKILL]
    assert "tensorplay: rank 0 ends: rank 1 is gone" in outcome.stderr[0]


def die_after_the_others_left(rank: int, size: int, port: int) -> None:
    join_job(rank, size, port)
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


def test_destroy_names_a_rank_that_never_came(tmp_path: Path) -> None:
    outcome = Outcome(die_after_the_others_left, 2, tmp_path)
    assert outcome.exitcodes == [1, -signal.SIGKILL]
    assert "rank 1 is gone" in outcome.results[0]


# ---- the control channel, in one process -------------------------------------------------------


def linked(size: int, count: int | None = None) -> tuple[Hub, list[Link]]:
    """A hub for ``size`` ranks and the links of the first ``count`` of them, all joined."""
    hub = Hub(HOST, 0, size, {"start": 1})
    links = [Link(rank, size, lambda: None) for rank in range(size if count is None else count)]
    threads = [threading.Thread(target=link.join, args=(HOST, hub.port, 5)) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return hub, links


def close_all(hub: Hub, links: list[Link]) -> None:
    for link in links:
        link.close()
    hub.close()


def test_a_meeting_names_the_ranks_that_do_not_come() -> None:
    hub, links = linked(2)
    with pytest.raises(dist.DistBackendError, match=r"ranks 0, 1 did not all come within 0\.1 s"):
        links[0].meet("barrier 1", (0, 1), 0.1)
    close_all(hub, links)


def test_a_closed_connection_is_a_lost_rank_and_a_goodbye_is_not() -> None:
    hub, links = linked(3)
    links[1].bye()
    links[1].close()
    assert not links[0].wait_for_loss(0.1)
    links[2].close()
    assert links[0].wait_for_loss(5)
    assert list(links[0].lost) == [2]
    with pytest.raises(dist.DistBackendError, match="rank 2 is gone"):
        links[0].meet("barrier 1", (0, 1), 5)
    close_all(hub, links)


def test_a_rank_number_taken_and_another_world_size_are_refused() -> None:
    hub = Hub(HOST, 0, 2, {"start": 1})
    first = Link(1, 2, lambda: None)
    waiting = threading.Thread(target=first.join, args=(HOST, hub.port, 5))
    waiting.start()
    time.sleep(0.1)
    with pytest.raises(dist.DistNetworkError, match="another process is rank 1 already"):
        Link(1, 2, lambda: None).join(HOST, hub.port, 5)
    with pytest.raises(dist.DistNetworkError, match="rank 0 was started with world_size=2, rank 2"):
        Link(2, 3, lambda: None).join(HOST, hub.port, 5)
    last = Link(0, 2, lambda: None)
    assert last.join(HOST, hub.port, 5) == {"start": 1}
    waiting.join()
    close_all(hub, [first, last])


def test_strangers_on_the_port_are_ignored() -> None:
    import socket

    hub = Hub(HOST, 0, 1, {"start": 1})
    with socket.create_connection((HOST, hub.port)) as stranger:
        stranger.sendall(b'GET / HTTP/1.1\r\n\r\n5\n{"meet": "x", "ranks": [0]}\n')
        link = Link(0, 1, lambda: None)
        assert link.join(HOST, hub.port, 5) == {"start": 1}
    close_all(hub, [link])


def test_a_taken_port_is_named() -> None:
    hub = Hub(HOST, 0, 1, {"start": 1})
    with pytest.raises(dist.DistNetworkError, match=f"cannot listen on {HOST}:{hub.port}"):
        join_job(0, 2, hub.port)
    hub.close()
    assert not dist.is_initialized()


def test_nobody_at_the_address() -> None:
    with pytest.raises(dist.DistNetworkError, match="rank 0 does not answer"):
        join_job(1, 2, free_port(HOST), timeout=0.2)


def test_not_all_ranks_came() -> None:
    with pytest.raises(dist.DistNetworkError, match="not all 2 ranks came"):
        join_job(0, 2, free_port(HOST), timeout=0.2)
    assert [thread.name for thread in threading.enumerate() if "tensorplay" in thread.name] == []


# ---- arguments and errors ----------------------------------------------------------------------


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_before_init() -> None:
    message = "Default process group has not been initialized, please make sure to call init_proc"
    assert dist.is_available() and not dist.is_initialized()
    assert dist.group.WORLD is None and dist.GroupMember.WORLD is None
    for ask in (dist.get_rank, dist.get_world_size, dist.get_backend, dist.barrier, dist.new_group):
        with pytest.raises(ValueError, match=message):
            ask()
    with pytest.raises(AssertionError, match="Process group cannot be None"):
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"init_method": "tcp://127.0.0.1:29500"}, ValueError, "tcp:// rendezvous: rank parameter"),
        ({"init_method": "tcp://127.0.0.1", "rank": 0, "world_size": 2}, ValueError, "port number"),
        ({"init_method": "tcp://127.0.0.1:1", "rank": 2, "world_size": 2}, ValueError, "rank=2"),
        ({"init_method": "file:///tmp/x"}, RuntimeError, "No rendezvous handler for file://"),
        ({"backend": "smoke"}, ValueError, "one of gloo, nccl, xla; got 'smoke'"),
        ({"timeout": 5}, TypeError, "Expected timeout argument to be of type datetime.timedelta"),
        ({"store": object()}, ValueError, "takes no store"),
        ({}, ValueError, "environment variable RANK expected, but not set"),
        ({"rank": 0, "world_size": 2}, ValueError, "environment variable MASTER_ADDR expected"),
    ],
)
def test_bad_arguments(
    arguments: dict[str, Any],
    error: type[Exception],
    message: str,
    no_environment: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(error, match=message):
        dist.init_process_group(**arguments)
    assert not dist.is_initialized()


def test_a_world_of_one_needs_no_network(no_environment: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", HOST),
        ("MASTER_PORT", "1"),
    ):
        no_environment.setenv(name, value)
    threads = threading.active_count()
    dist.init_process_group()
    try:
        assert threading.active_count() == threads
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        dist.barrier()
        assert summed(5.0) == 5.0
        group = dist.new_group([0])
        assert isinstance(group, dist.ProcessGroup)
        assert dist.get_process_group_ranks(group) == [0]
        assert dist.get_group_rank(group, 0) == dist.get_global_rank(group, 0) == 0
        with pytest.raises(ValueError, match="Global rank 1 is not part of group"):
            dist.get_group_rank(group, 1)
        with pytest.raises(ValueError, match="Group rank 1 is not part of group"):
            dist.get_global_rank(group, 1)
        with pytest.raises(ValueError, match=r"Rank 1 is out of range\. Valid ranks are 0 to 0"):
            dist.new_group([1])
        with pytest.raises(ValueError, match="must not contain duplicate entries"):
            dist.new_group([0, 0])
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="Invalid process group specified"):
            dist.destroy_process_group(group)
        dist.destroy_process_group(dist.GroupMember.NON_GROUP_MEMBER)
        assert dist.get_rank(dist.GroupMember.NON_GROUP_MEMBER) == -1
    finally:
        dist.destroy_process_group()
    assert not dist.is_initialized()


def test_backend_names() -> None:
    assert dist.Backend("GLOO") == dist.Backend.GLOO == "gloo"
    with pytest.raises(ValueError, match="string-ish"):
        dist.Backend(3)  # type: ignore[arg-type]


def test_cluster_detection(no_environment: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("SLURM_JOB_ID", "1234"),
        ("SLURM_STEP_NODELIST", "localhost"),
        ("SLURM_NTASKS", "1"),
        ("SLURM_PROCID", "0"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_STEP_NUM_NODES", "1"),
    ):
        no_environment.setenv(name, value)
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    dist.destroy_process_group()


def test_a_tpu_pod_is_detected(no_environment: pytest.MonkeyPatch) -> None:
    no_environment.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    no_environment.setenv("TPU_WORKER_HOSTNAMES", HOST)
    no_environment.setenv("TPU_WORKER_ID", "0")
    no_environment.setenv("TPU_SKIP_MDS_QUERY", "1")
    no_environment.setenv("MEGASCALE_NUM_SLICES", "1")
    no_environment.setenv("MEGASCALE_COORDINATOR_ADDRESS", HOST)
    no_environment.setenv("MEGASCALE_SLICE_ID", "0")
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    dist.destroy_process_group()


def test_kubernetes_is_detected(no_environment: pytest.MonkeyPatch) -> None:
    """What its pods answer; the client that asks them is not installed here."""
    answers = {
        "is_env_present": True,
        "get_coordinator_address": f"{HOST}:{free_port(HOST)}",
        "get_process_count": 1,
        "get_process_id": 0,
        "get_local_process_id": None,
    }
    for name, answer in answers.items():
        no_environment.setattr(K8sCluster, name, lambda *args, answer=answer, **kwargs: answer)
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    dist.destroy_process_group()


def of_slurm(rank: int, size: int, port: int) -> float:
    """As srun starts it: nothing of ours is set."""
    os.environ |= {
        "SLURM_JOB_ID": str(port),  # the coordinator's port is made from it
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(size),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": "1",
    }
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    total = summed(rank + 1.0)
    dist.destroy_process_group()
    return total


def test_two_tasks_of_slurm(tmp_path: Path) -> None:
    outcome = Outcome(of_slurm, 2, tmp_path)
    assert outcome.results == {0: 3.0, 1: 3.0}, outcome.stderr


def test_import_does_not_start_the_backend() -> None:
    import subprocess

    code = (
        "import tensorplay.distributed\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
