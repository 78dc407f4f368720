"""Point-to-point and object collectives on rank threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import tensorplay as tp
import tensorplay.distributed as dist
from tensorplay.testing import ranks

DTYPES = [tp.bool, tp.int64, tp.bfloat16, tp.float32, tp.float64, tp.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ranks(2)
def test_send_and_recv(rank: int, dtype: tp.dtype) -> None:
    for shape in ((), (2, 3), (0, 2)):
        sent = tp.ones(shape, dtype=dtype)
        if rank == 0:
            dist.send(sent, dst=1)
        else:
            x = tp.zeros(shape, dtype=dtype)
            assert dist.recv(x, src=0) == 0
            assert x.tolist() == sent.tolist()


@ranks(1, 2, 4)
def test_a_ring_of_isend_and_irecv(rank: int) -> None:
    size = dist.get_world_size()
    x, base = tp.tensor([float(rank), 1.0]), tp.zeros(2, 2)
    send = dist.isend(x, (rank + 1) % size)
    receive = dist.irecv(base.t()[1], (rank - 1) % size)
    assert send is not None and receive is not None
    x.fill_(-1.0)
    assert send.wait() and receive.wait() and receive.is_completed()
    assert base.tolist() == [[0.0, float((rank - 1) % size)], [0.0, 1.0]]


@ranks(2)
def test_tags_and_order(rank: int) -> None:
    if rank == 0:
        works = [dist.isend(tp.tensor(float(i)), 1, tag=i % 2) for i in range(4)]
        assert all(work is not None and work.wait() for work in works)
    else:
        got = [tp.zeros(()) for _ in range(4)]
        order = [dist.irecv(got[i], 0, tag=tag) for i, tag in enumerate((1, 0, 1, 0))]
        for work in reversed(order):
            assert work is not None and work.wait()
        assert [x.item() for x in got] == [1.0, 0.0, 3.0, 2.0]


@ranks(3)
def test_receive_from_anyone(rank: int) -> None:
    if rank:
        dist.send(tp.tensor(rank), dst=0)
        return
    x, seen = tp.tensor(0), []
    for _ in range(2):
        seen.append((dist.recv(x), x.item()))
    assert sorted(seen) == [(1, 1), (2, 2)]


@ranks(3)
def test_batches_and_groups(rank: int) -> None:
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    other = 2 - rank
    a, b, got = tp.tensor([rank]), tp.tensor([rank + 10]), [tp.tensor([0]), tp.tensor([0])]
    place = 1 - dist.get_rank(group)
    ops = [
        dist.P2POp(dist.irecv, got[0], other, group),
        dist.P2POp(dist.isend, a, other, group),
        dist.P2POp(dist.isend, b, group=group, group_peer=place),
        dist.P2POp(dist.irecv, got[1], group=group, group_peer=place),
    ]
    assert "isend pg=" in repr(ops[1]) and f"group_dst={place}" in repr(ops[1])
    works = dist.batch_isend_irecv(ops)
    assert len(works) == 4 and all(work.wait() for work in works)
    assert [x.item() for x in got] == [other, other + 10]


@ranks(2)
def test_what_is_refused(rank: int) -> None:
    x = tp.zeros(2)
    refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: dist.send(x, rank), ValueError, "destination rank should not be the same"),
        (lambda: dist.recv(x, rank), ValueError, "source rank should not be the same"),
        (lambda: dist.send(x), ValueError, "Must specify global_rank or group_rank"),
        (lambda: dist.send(x, 0, group_dst=0), ValueError, "Can't specify both"),
        (lambda: dist.isend(x, 5), ValueError, "Global rank 5 is not part of group"),
        (lambda: dist.isend([x], 0), TypeError, "Expected parameter `tensor`"),
        (lambda: dist.P2POp(dist.send, x, 0), ValueError, "to be of type ``tensorplay.distributed"),
        (lambda: dist.batch_isend_irecv([x]), ValueError, "Each op is expected"),
    ]
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            call()
    if rank == 0:
        dist.send(tp.zeros(3), 1)
    else:
        with pytest.raises(dist.DistBackendError, match=r"rank 0 sent float32\[3\], but rank 1 re"):
            dist.recv(x, 0)


@ranks(2)
def test_waiting_for_so_long(rank: int) -> None:
    x = tp.zeros(1)
    if rank == 0:
        work = dist.irecv(x, 1)
        assert work is not None and not work.is_completed()
        with pytest.raises(TimeoutError, match=r"recv\(src=1, tag=0\) did not end within 0.05 s"):
            work.wait(timedelta(seconds=0.05))
        dist.barrier()
        work.wait()
        assert x.item() == 1.0 and work.exception() is None
    else:
        dist.barrier()
        dist.send(tp.ones(1), 0)


def both_receive(rank: int) -> None:
    dist.recv(tp.zeros(1), 1 - rank)


def one_returns(rank: int) -> None:
    dist.send(tp.zeros(1), 1) if rank == 0 else None


def one_raises(rank: int) -> None:
    if rank:
        raise OSError("boom")
    dist.recv(tp.zeros(1), 1)


def another_collective(rank: int) -> None:
    dist.recv(tp.zeros(1)) if rank == 0 else dist.all_reduce(tp.zeros(1))


@pytest.mark.parametrize(
    ("fn", "error", "message"),
    [
        (both_receive, dist.DistBackendError, r"waits in recv\(src=1.*waits in recv\(src=0"),
        (one_returns, dist.DistBackendError, "rank 1 returned while others wait for it"),
        (one_raises, OSError, "boom"),
        (another_collective, dist.DistBackendError, r"waits in recv\(src=any.*in all_reduce\(SUM"),
    ],
)
def test_no_hang(fn: Callable[[int], None], error: type[Exception], message: str) -> None:
    started = time.monotonic()
    with pytest.raises(error, match=message):
        dist.run_ranks(fn, 2)
    assert time.monotonic() - started < 10


@ranks(1, 3)
def test_objects(rank: int) -> None:
    size, last = dist.get_world_size(), dist.get_world_size() - 1
    mine = {"rank": rank, "tensor": tp.ones(rank)}
    everyones: list[Any] = [None] * size
    for _ in range(2):
        dist.all_gather_object(everyones, mine)
    assert [each["rank"] for each in everyones] == list(range(size))
    assert everyones[rank] is not mine and everyones[last]["tensor"].tolist() == [1.0] * last
    gathered: list[Any] | None = [None] * size if rank == last else None
    dist.gather_object("x" * rank, gathered, dst=last)
    assert gathered == (["x" * r for r in range(size)] if rank == last else None)
    told = [rank, None] if rank else [0, "from 0"]
    dist.broadcast_object_list(told)
    assert told == [0, "from 0"]
    own: list[Any] = [None, "kept"]
    dist.scatter_object_list(own, [r * r for r in range(size)] if rank == last else None, src=last)
    assert own == [rank * rank, "kept"]


@ranks(3)
def test_objects_in_groups(rank: int) -> None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    everyones: list[Any] = [None, None]
    dist.all_gather_object(everyones, rank, group=group)
    assert everyones == [1, 2]
    dist.broadcast_object_list(everyones, group_src=1, group=group)


@ranks(2)
def test_objects_refused(rank: int) -> None:
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: dist.gather_object(1, [None] * 2, dst=1 - rank), "must NOT be specified"),
        (lambda: dist.gather_object(1, dst=rank), "must be specified"),
        (lambda: dist.scatter_object_list([], [1, 2], src=rank), "a list of size at least 1"),
        (lambda: dist.scatter_object_list([0], src=rank), "must provide non-None"),
        (lambda: dist.scatter_object_list([0], [1], src=rank), "expected 2, got 1"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()


@ranks(1, 3)
def test_monitored_barrier(rank: int) -> None:
    dist.monitored_barrier()
    if dist.get_world_size() == 1:
        return
    if rank == 1:
        time.sleep(0.3)
        return
    message = "Rank 1 failed to pass monitoredBarrier in 100 ms"
    with pytest.raises(RuntimeError, match=message if rank == 0 else "successfully reached moni"):
        dist.monitored_barrier(timeout=timedelta(seconds=0.1), wait_all_ranks=True)


def test_a_world_of_one() -> None:
    dist.init_process_group("gloo", "tcp://127.0.0.1:1", rank=0, world_size=1)
    try:
        x, got = tp.ones(2), tp.zeros(2)
        dist.all_reduce(x)
        send, receive = dist.isend(x, 0), dist.irecv(got, 0)
        assert send is not None and send.wait() and receive is not None and receive.wait()
        everyones = [None]
        dist.all_gather_object(everyones, "me")
        assert got.tolist() == [1.0, 1.0] and everyones == ["me"]
        stuck = dist.irecv(got, 0)
        assert stuck is not None
        with pytest.raises(dist.DistBackendError, match="the only rank waits for itself"):
            stuck.wait()
    finally:
        dist.destroy_process_group()
