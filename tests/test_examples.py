"""The examples run, print what they should, and train_gpt goes on where it stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tensorplay

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = {"steps": 6, "log-every": 1, "batch": 2, "length": 16, "width": 16, "layers": 1, "heads": 2}
TINY |= {"eval-batches": 2, "sample": 3}

SEED_SINGLE = """\
import tensorplay as tp
import tensorplay.nn as nn
from tensorplay.distributed.fsdp import fully_shard

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
model = fully_shard(model)
print(type(model).__name__)            # SequentialFSDPModule

out = model(tp.randn(2, 4))            # hooks all-gather for the forward
print(tuple(out.shape))                # (2, 4)

opt = tp.optim.SGD(model.parameters(), lr=0.1)
out.sum().backward()
opt.step()

try:
    fully_shard(model)
except RuntimeError as e:
    print(e)                           # fully_shard has already been applied
"""

SEED_TWO_PROCESSES = """\
import multiprocessing as mp

import tensorplay as tp
import tensorplay.distributed as dist
import tensorplay.nn as nn
from tensorplay.distributed.fsdp import fully_shard


def worker(rank, world_size):
    dist.init_process_group(
        "gloo", init_method="tcp://127.0.0.1:29571",
        rank=rank, world_size=world_size,
    )
    tp.manual_seed(42)                    # identical init and data per rank
    model = nn.Linear(8, 8)
    x = tp.randn(4, 8)

    model = fully_shard(model)
    shards = {n: tuple(p.shape) for n, p in model.named_parameters()}
    print(rank, shards)                   # {'weight': (4, 8), 'bias': (4,)}

    out = model(x)                        # all-gather inside the forward
    out.sum().backward()                  # reduce-scatter after backward
    grads = {n: tuple(p.grad.shape) for n, p in model.named_parameters()}
    print(rank, grads)                    # shard shapes again

    tp.optim.SGD(model.parameters(), lr=0.1).step()
    model.unshard()                       # gather to check the result
    print(rank, tuple(next(model.parameters()).shape))   # (8, 8)
    dist.destroy_process_group()


if __name__ == "__main__":
    ctx = mp.get_context("spawn")
    procs = [ctx.Process(target=worker, args=(r, 2)) for r in range(2)]
    for p in procs:
        p.start()
    for p in procs:
        p.join()
"""


def environment() -> dict[str, str]:
    """Buffered, so that the lines of several processes do not mix."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return own | {"PYTHONPATH": str(Path(tensorplay.__file__).parents[1])}


def run(name: str, *arguments: str) -> str:
    """What an example prints; it must succeed, and print nothing to stderr."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_seed_scripts_are_as_printed() -> None:
    assert (EXAMPLES / "seed_single.py").read_text() == SEED_SINGLE
    assert (EXAMPLES / "seed_two_processes.py").read_text() == SEED_TWO_PROCESSES


def test_seed_single() -> None:
    assert run("seed_single.py").splitlines() == [
        "SequentialFSDPModule",
        "(2, 4)",
        "fully_shard has already been applied",
    ]


@pytest.mark.processes
def test_seed_two_processes() -> None:
    shards = "{'weight': (4, 8), 'bias': (4,)}"
    lines = run("seed_two_processes.py").splitlines()
    for rank in "01":
        own = [line[2:] for line in lines if line.startswith(rank)]
        assert own == [shards, shards, "(8, 8)"]
    assert len(lines) == 6


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("To be, or not to be, that is the question.\n" * 40)
    return path


def tiny(text: Path, **other: object) -> list[str]:
    """Arguments of train_gpt.py for a run of seconds."""
    chosen = TINY | {"data": text} | {name.replace("_", "-"): v for name, v in other.items()}
    return [word for name, value in chosen.items() for word in (f"--{name}", str(value))]


def figures(output: str) -> list[tuple[str, ...]]:
    """(step, loss, held-out loss) of each progress line, then the final figure."""
    found = re.findall(r"step +(\d+)/\d+  loss (\S+)  held-out (\S+)  .* left", output)
    return [*found, *re.findall(r"held-out text: (\S+) bits per byte", output)]


def train(text: Path, **other: object) -> list[tuple[str, ...]]:
    return figures(run("train_gpt.py", *tiny(text, **other)))


@pytest.mark.processes
def test_train_gpt_goes_on_from_its_checkpoint(text: Path, tmp_path: Path) -> None:
    whole_run = train(text)
    assert [line[0] for line in whole_run[:-1]] == list("123456")
    stopped = train(text, out=tmp_path / "out", stop_at=3)
    resumed = train(text, out=tmp_path / "out")
    assert stopped[:-1] + resumed == whole_run


@pytest.mark.processes
def test_train_gpt_gives_the_same_numbers_with_every_kind_of_ranks(text: Path) -> None:
    """Two processes, two threads, one controller over two and over eight devices; batches of 16."""
    wanted = train(text, steps=3, batch=8)
    assert len(wanted) == 4
    others = [
        train(text, steps=3, batch=8, ranks="threads"),
        train(text, steps=3, batch=8, ranks="controller"),
        train(text, steps=3, batch=2, nproc=8, ranks="controller"),
    ]
    numbers = [[float(x) for line in run_[:-1] for x in line] for run_ in (wanted, *others)]
    for found, run_ in zip(numbers[1:], others, strict=True):
        np.testing.assert_allclose(found, numbers[0], atol=2e-3)
        assert abs(float(run_[-1]) - float(wanted[-1])) < 2e-3  # type: ignore[arg-type]


def test_train_gpt_learns_in_one_process(text: Path) -> None:
    *_, bits = train(text, nproc=1, steps=120, log_every=60, lr=1e-2)
    assert float(bits) < 2.6


@pytest.mark.processes
def test_ctrl_c_ends_all_ranks(text: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "train_gpt.py"), *tiny(text, steps=1_000_000)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    while not parent.stdout.readline().startswith("step"):
        assert parent.poll() is None
    os.killpg(parent.pid, signal.SIGINT)
    _, errors = parent.communicate(timeout=60)  # returns when no rank holds the pipes any more
    assert parent.returncode == 130
    assert errors == ""


@pytest.mark.processes
def test_a_failing_rank_ends_all(text: Path) -> None:
    """Rank 0 cannot make the folder of the checkpoint, which is a file."""
    arguments = tiny(text, steps=1_000_000, save_every=1, out=text)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_gpt.py"), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "FileExistsError" in done.stderr
