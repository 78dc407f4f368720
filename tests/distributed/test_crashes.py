"""kill -9 of any rank at any moment of a training run: the others end soon, and say who is gone.

python tests/distributed/test_crashes.py 10      each case ten times, with the slowest end
"""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tensorplay as tp
import tensorplay.distributed as dist
import tensorplay.nn as nn
from tensorplay.distributed._control import free_port
from tensorplay.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from tensorplay.distributed.fsdp import fully_shard

SIZE = 3
LIMIT = 60.0  # seconds
MOMENTS = ("init", "first compile", "mid-step", "checkpoint", "exit")


def train(rank: int, port: int, moment: str, victim: int) -> None:
    """Trains until ``victim`` is killed at ``moment``."""

    def now(reached: str, delay: float = 0.0) -> None:
        if rank == victim and reached == moment:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            time.sleep(0.0 if delay else LIMIT)

    if moment == "init":
        now("init", 0.3)
        time.sleep(0.28 if rank == victim else 0.0)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=20),
    )
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = tp.optim.AdamW(model.parameters())
    now("first compile", 0.2)
    steps = 0
    started = time.monotonic()
    while time.monotonic() < started + LIMIT:
        loss = model(tp.randn(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps == 3:
            now("mid-step", 0.05)
        if moment == "checkpoint" and steps == 3:
            now("checkpoint", 0.02)
            while time.monotonic() < started + LIMIT:
                get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if moment == "exit" and steps == 3:
            break
        loss.item()
    now("exit")
    dist.barrier()
    dist.destroy_process_group()


def child(rank: int, port: int, moment: str, victim: int, log: str) -> None:
    descriptor = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 2)
    try:
        train(rank, port, moment, victim)
    except Exception:
        traceback.print_exc()
        raise


def crash(moment: str, victim: int, folder: Path) -> tuple[float, list[Any], list[str]]:
    """Seconds from the victim's death to the last rank's end; exit codes; what ranks wrote."""
    context = mp.get_context("spawn")
    port, log = free_port("127.0.0.1"), str(folder / "stderr")
    processes = [
        context.Process(target=child, args=(rank, port, moment, victim, log))
        for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    processes[victim].join(2 * LIMIT)
    died = time.monotonic()
    for process in processes:
        process.join(max(0.0, died + LIMIT - time.monotonic()))
    seconds = time.monotonic() - died
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return seconds, codes, [Path(f"{log}.{rank}").read_text() for rank in range(SIZE)]


def check(moment: str, victim: int, folder: Path) -> float:
    seconds, codes, written = crash(moment, victim, folder)
    assert codes[victim] == -signal.SIGKILL, (codes, written)
    for rank in set(range(SIZE)) - {victim}:
        assert codes[rank] not in (None, 0), (codes, written)
        told = [f"rank {victim} is gone", f"rank {victim} does not answer"]
        if moment == "init":  # it may not have come yet
            told.append("not all 3 ranks came")
        assert any(words in written[rank] for words in told), written[rank]
    assert seconds < LIMIT
    return seconds


@pytest.mark.processes
@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_9(moment: str, tmp_path: Path) -> None:
    check(moment, MOMENTS.index(moment) % SIZE, tmp_path)


def campaign(times: int) -> None:
    """Prints, for each moment and victim, how often all was as it should be, and the slowest."""
    for moment, victim in itertools.product(MOMENTS, range(SIZE)):
        good, slowest = 0, 0.0
        for _ in range(times):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    slowest = max(slowest, check(moment, victim, Path(folder)))
                    good += 1
                except AssertionError as error:
                    print(error, file=sys.stderr)
        print(f"{moment:14} rank {victim}: {good}/{times}, slowest {slowest:.1f} s", flush=True)


if __name__ == "__main__":
    campaign(int(sys.argv[1]))
