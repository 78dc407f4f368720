"""fully_shard over real processes that talk through gloo."""

from __future__ import annotations

import multiprocessing as mp
import queue
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from helpers import (
    Job,
    Lm,
    Mlp,
    adamw,
    close,
    compare,
    lm_loss,
    local,
    mlp_loss,
    own_slice,
    random,
    seeded,
    shard_nested,
    train_rank,
    train_twin,
    whole,
)

import tensorplay as tp
import tensorplay.distributed as dist
import tensorplay.nn as nn
from tensorplay.distributed.fsdp import fully_shard

pytestmark = pytest.mark.processes
LIMIT = 120.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def child(work: Callable[..., Any], rank: int, world: int, port: int, results: Any) -> None:
    """The main function of each process."""
    try:
        results.put((rank, work(rank, world, port), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def join(rank: int, world: int, port: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )


def in_processes(work: Callable[..., Any], world: int) -> list[Any]:
    """``work(rank, world, port)`` in ``world`` processes; results in rank order."""
    context = mp.get_context("spawn")
    results = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=child, args=(work, rank, world, port, results), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        for _ in range(world):
            rank, value, error = results.get(timeout=LIMIT)
            assert error is None, f"rank {rank}: {error}"
            found[rank] = value
    except queue.Empty:
        pytest.fail(f"only ranks {sorted(found)} answered in {LIMIT} s")
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    return [found[rank] for rank in range(world)]


def seed_script(rank: int, world: int, port: int) -> Any:
    """The page's second script; the model and its data exist before the process group does."""
    tp.manual_seed(42)
    model = nn.Linear(8, 8)
    x = tp.randn(4, 8)
    join(rank, world, port)
    model = fully_shard(model)
    shards = {n: tuple(p.shape) for n, p in model.named_parameters()}
    model(x).sum().backward()
    grads = {n: local(p.grad) for n, p in model.named_parameters()}
    tp.optim.SGD(model.parameters(), lr=0.1).step()
    model.unshard()
    params = {n: local(p) for n, p in model.named_parameters()}
    dist.destroy_process_group()
    return shards, grads, params


def test_the_seed_script_with_tensors_made_before_the_group() -> None:
    tp.manual_seed(42)
    twin = nn.Linear(8, 8)
    twin(tp.randn(4, 8)).sum().backward()
    wanted = {n: local(p.grad) for n, p in twin.named_parameters()}
    tp.optim.SGD(twin.parameters(), lr=0.1).step()
    for rank, (shards, grads, params) in enumerate(in_processes(seed_script, 2)):
        assert shards == {"weight": (4, 8), "bias": (4,)}
        for name, p in twin.named_parameters():
            close(grads[name], own_slice(wanted[name], 2, rank))
            close(params[name], local(p))


JOB = Job(Lm, lm_loss, shard_nested, adamw, steps=3)


class Prints(Mlp):
    """Only rank 0 prints, so only its Python cannot be traced."""

    rank = 0

    def forward(self, x: Any) -> Any:
        if self.rank == 0:
            print("rank 0 was here")
        return super().forward(x)


def several_jobs(rank: int, world: int, port: int) -> Any:
    """Parity on uneven rows; accumulation; ranks that differ in Python and in batch size."""
    join(rank, world, port)
    warnings.simplefilter("ignore")
    record = train_rank(rank, JOB)

    model = fully_shard(seeded(Mlp))
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        mlp_loss(model, rank, micro).backward()
    accumulated = whole(model.inner.weight.grad)

    printing = seeded(Prints)
    printing.rank = rank
    fully_shard(printing)
    for step in range(2):
        mlp_loss(printing, rank, step).backward()
    printed = whole(printing.inner.weight.grad)

    uneven = fully_shard(seeded(Mlp))
    for step in range(2):
        uneven(random(2 + rank + step, 5, seed=rank)).sum().backward()
    for step in range(3):  # the last rank's second batch is smaller; the others know their call
        rows = 1 if rank == world - 1 and step == 1 else 2
        uneven(random(rows, 5, seed=rank)).sum().backward()
    batches = whole(uneven.outer.bias.grad)

    saved = {n: v.clone() for n, v in model.state_dict().items()}
    other = fully_shard(Mlp())
    other.load_state_dict(saved)
    loaded = local(other(random(2, 5)))
    dist.barrier()
    dist.destroy_process_group()
    return record, accumulated, printed, batches, loaded


def training(rank: int, world: int, port: int) -> Any:
    join(rank, world, port)
    record = train_rank(rank, JOB)
    dist.destroy_process_group()
    return record


def test_training_in_two_processes() -> None:
    twin = train_twin(JOB, 2)
    for rank, record in enumerate(in_processes(training, 2)):
        compare(record, twin, 2, rank)


def test_uneven_rows_different_data_batches_and_python_in_three_processes() -> None:
    world = 3
    twin = train_twin(JOB, world)

    def loss(model: Any, rank: int, step: int) -> Any:
        return mlp_loss(model, rank, 0) + mlp_loss(model, rank, 1)

    summed = train_twin(Job(Mlp, loss, steps=1), world).grads[0]["inner.weight"]
    rows = [2 + rank + step for rank in range(world) for step in range(2)]
    expected = (sum(rows) + 3 * 2 * world - 1) / world
    for rank, found in enumerate(in_processes(several_jobs, world)):
        record, accumulated, printed, batches, loaded = found
        compare(record, twin, world, rank)
        close(accumulated, summed)
        close(printed, summed)
        close(batches, [expected] * 3)
        close(loaded, local(seeded(Mlp)(random(2, 5))))


def skewed(rank: int, world: int, port: int) -> Any:
    join(rank, world, port)
    model = fully_shard(seeded(Mlp))
    for late in (0.0, 33.0):  # the second one finds its programs compiled
        model.zero_grad()
        loss = mlp_loss(model, rank, 0)
        loss.item()
        time.sleep(late if rank == 1 else 0.0)
        loss.backward()
    found = whole(model.inner.weight.grad)
    dist.destroy_process_group()
    return found


def test_j1_a_rank_that_is_half_a_minute_late_for_the_reduction() -> None:
    """XLA's own reduce-scatter over gloo gives up after 30 seconds."""
    wanted = train_twin(Job(Mlp, mlp_loss, steps=1), 2).grads[0]["inner.weight"]
    for found in in_processes(skewed, 2):
        close(found, wanted)
