"""Collectives between real processes over gloo: what is theirs alone, and a part of the rest."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import test_collectives
import test_collectives_gather
import test_collectives_p2p

import tensorplay as tp
import tensorplay.distributed as dist
from tensorplay.distributed._control import free_port
from tensorplay.multiprocessing import ProcessExitedException, ProcessRaisedException, spawn

pytestmark = pytest.mark.processes
HOST = "127.0.0.1"


def join_job(rank: int, size: int, port: int) -> None:
    dist.init_process_group(
        "gloo", f"tcp://{HOST}:{port}", timedelta(seconds=30), world_size=size, rank=rank
    )


def shared_with_rank_threads(rank: int) -> None:
    """Tests of the other files, as they run on one rank of two."""
    for module, names in (
        (test_collectives, ["test_world_sizes", "test_async_op", "test_nothing_is_recorded"]),
        (
            test_collectives_gather,
            [
                "test_gathering_of_two",
                "test_all_to_all_of_nothing_and_of_vectors",
                "test_sizes_that_sender_and_receiver_see_differently",
            ],
        ),
        (
            test_collectives_p2p,
            ["test_a_ring_of_isend_and_irecv", "test_tags_and_order", "test_what_is_refused",
             "test_waiting_for_so_long", "test_objects", "test_objects_refused"],
        ),
    ):  # fmt: skip
        for name in names:
            getattr(module, name).__wrapped__(rank)


def dtypes(rank: int) -> None:
    for op, dtype in [
        ("SUM", tp.bool), ("SUM", tp.bfloat16), ("AVG", tp.float16), ("SUM", tp.complex64),
        ("PRODUCT", tp.int64), ("BXOR", tp.uint8), ("MAX", tp.bool), ("MIN", tp.float64),
        ("PREMUL_SUM", tp.float32),
    ]:  # fmt: skip
        for shape in ((), (3, 2), (0, 3)):
            x = test_collectives.tensor(test_collectives.sample(rank, shape, dtype), dtype)
            dist.all_reduce(x, test_collectives.op_of(op))
            everyones = [test_collectives.sample(r, shape, dtype) for r in range(2)]
            expected = test_collectives.combined(op, everyones)
            test_collectives.same(x, expected.reshape(shape))


def checked_in_detail(rank: int, variable: str) -> None:
    os.environ[variable] = "detail"
    x = tp.zeros(2)
    dist.all_reduce(x)
    with pytest.raises(
        dist.DistBackendError,
        match=r"rank 0 called all_reduce\(SUM\) of float32\[2\]; rank 1 .* of float32\[3\]",
    ):
        dist.all_reduce(tp.zeros(2 + rank))
    with pytest.raises(
        dist.DistBackendError,
        match=r"rank 0 called broadcast\(src=0\) of float32\[2\]; rank 1 called all_gather_single",
    ):
        dist.all_gather_single(tp.zeros(4), x) if rank else dist.broadcast(x, 0)
    del os.environ[variable]


def all_in_one(rank: int, size: int, port: int) -> None:
    join_job(rank, size, port)
    shared_with_rank_threads(rank)
    dtypes(rank)
    for variable in ("TORCH_DISTRIBUTED_DEBUG", "TENSORPLAY_DISTRIBUTED_DEBUG"):
        checked_in_detail(rank, variable)
    dist.destroy_process_group()
    join_job(rank, size, port)
    told = [rank]
    dist.broadcast_object_list(told, src=1)
    assert told == [1]
    dist.destroy_process_group()
    assert [t.name for t in threading.enumerate()] == ["MainThread"]


def test_two_processes() -> None:
    spawn(all_in_one, (2, free_port(HOST)), nprocs=2)


def sub_groups(rank: int, size: int, port: int, folder: Path) -> None:
    join_job(rank, size, port)
    group = dist.new_group([0, 2])
    if rank != 1:
        x = tp.tensor([float(rank)])
        dist.all_reduce(x, group=group)
        assert x.item() == 2.0
        everyones: list[Any] = [None, None]
        dist.all_gather_object(everyones, rank, group=group)
        assert everyones == [0, 2]
    if rank == 2:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(dist.DistBackendError) as caught:
        dist.recv(tp.zeros(1), src=2 if rank < 2 else 0)
    (folder / str(rank)).write_text(str(caught.value))


def test_a_killed_rank_is_named_where_others_receive_from_it(tmp_path: Path) -> None:
    context = spawn(sub_groups, (3, free_port(HOST), tmp_path), nprocs=3, join=False)
    assert context is not None
    with pytest.raises(ProcessExitedException, match="process 2 terminated with signal SIGKILL"):
        while not context.join(grace_period=20):
            pass
    for rank in (0, 1):
        said = (tmp_path / str(rank)).read_text()
        assert said.startswith("rank 2 is gone (its connection closed")


def raises_on_one(rank: int, size: int, port: int) -> None:
    join_job(rank, size, port)
    if rank == 1:
        raise ValueError("boom")
    dist.all_gather_object([None, None], rank)


def test_a_rank_that_raises_is_named() -> None:
    with pytest.raises(ProcessRaisedException) as caught:
        spawn(raises_on_one, (2, free_port(HOST)), nprocs=2)
    assert "boom" in str(caught.value)
