"""python -m tensorplay.distributed.run"""

from __future__ import annotations

import argparse
import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tensorplay.distributed import run as launcher
from tensorplay.distributed._control import free_port

ROOT = Path(__file__).parents[2]
RUN = (sys.executable, "-m", "tensorplay.distributed.run")
QUICK = (sys.executable, launcher.__file__)  # the same without importing the package
LIMIT = 100.0

JOB = """
import os, sys, time
import tensorplay as tp, tensorplay.distributed as dist
dist.init_process_group("gloo")
x = tp.tensor(2 ** dist.get_rank())
dist.all_reduce(x)
print("sum", x.item(), sys.argv[1:], os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"])
if "fail" in sys.argv and dist.get_rank() == 1:
    raise ValueError("boom")
if "kill" in sys.argv and dist.get_rank() == 1:
    os.kill(os.getpid(), 9)
dist.barrier()
dist.destroy_process_group()
"""


def environment() -> dict[str, str]:
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"PYTHONPATH": str(ROOT)}


def start(*args: object, command: tuple[str, ...] = QUICK) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, *map(str, args)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*args: object, command: tuple[str, ...] = QUICK) -> tuple[int, str, str]:
    process = start(*args, command=command)
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


@pytest.fixture
def job(tmp_path: Path) -> Path:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    return script


@pytest.fixture
def show(tmp_path: Path) -> Path:
    """A script that does not need tensorplay, and is quick."""
    script = tmp_path / "show.py"
    script.write_text(
        "import os, sys, time\n"
        "print(*sorted(f'{k}={v}' for k, v in os.environ.items() if k in sys.argv[1].split(',')))\n"
        "print('to stderr', file=sys.stderr)\n"
        "if 'flaky' in sys.argv and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': sys.exit(5)\n"
        "if 'hang' in sys.argv: print('ready', os.getpid()); time.sleep(100)\n"
        "if 'stubborn' in sys.argv:\n"
        "    import signal\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    print('ready', os.getpid()); time.sleep(100)\n"
    )
    return script


@pytest.mark.processes
def test_two_nodes_of_two_ranks(job: Path) -> None:
    port = free_port("127.0.0.1")
    nodes = [
        start(
            "--nnodes", 2, "--node-rank", node, "--nproc-per-node", 2,
            "--master-addr", "127.0.0.1", "--master-port", port, job, "--lr", "0.1", command=RUN,
        )
        for node in range(2)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=LIMIT) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    for node, (out, _) in enumerate(outputs):
        assert sorted(out.splitlines()) == [
            f"[rank{2 * node + local}]: sum 15 ['--lr', '0.1'] {local} {node}" for local in range(2)
        ]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "ended", "last"),
    [("fail", "exit code 1", "ValueError: boom"), ("kill", "signal SIGKILL", "")],
)
def test_a_failing_rank_is_named(job: Path, how: str, ended: str, last: str) -> None:
    code, _, err = run("--standalone", "--nproc-per-node", 3, job, how, command=RUN)
    assert code == 1
    report = err[err.index("tensorplay.distributed.run: rank 1 (local rank 1, pid ") :]
    assert f"failed with {ended}" in report
    assert report.rstrip().endswith(last or "The end of its stderr:")
    assert "[rank0]: tensorplay.distributed._errors.DistBackendError: rank 1 is gone" in err


def test_environment_and_output(show: Path) -> None:
    names = (
        "RANK,LOCAL_RANK,WORLD_SIZE,LOCAL_WORLD_SIZE,GROUP_RANK,GROUP_WORLD_SIZE,ROLE_NAME,"
        "MASTER_ADDR,MASTER_PORT,TORCHELASTIC_RUN_ID"
    )
    code, out, err = run(
        "--nproc_per_node=2", "--nnodes=3", "--node_rank=1", "--rdzv_id", "me", show, names
    )
    assert code == 0
    assert sorted(out.splitlines()) == [
        f"[rank{rank}]: GROUP_RANK=1 GROUP_WORLD_SIZE=3 LOCAL_RANK={rank - 2} LOCAL_WORLD_SIZE=2 "
        f"MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 RANK={rank} ROLE_NAME=default "
        "TORCHELASTIC_RUN_ID=me WORLD_SIZE=6"
        for rank in (2, 3)
    ]
    assert sorted(err.splitlines()) == ["[rank2]: to stderr", "[rank3]: to stderr"]


def test_files_and_filters(show: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    code, out, err = run(
        "--nproc-per-node", 2, "--log-dir", logs, "-r", "0:1", "--tee", "2",
        "--local-ranks-filter", "0", show, "RANK",
    )  # fmt: skip
    assert (code, out, err) == (0, "", "[rank0]: to stderr\n")
    found = {str(p.relative_to(logs / "attempt_0")): p.read_text() for p in logs.rglob("*.log")}
    assert found == {
        "0/stdout.log": "RANK=0\n",
        "0/stderr.log": "to stderr\n",
        "1/stderr.log": "to stderr\n",
    }


def test_modules_and_programs(show: Path) -> None:
    code, out, _ = run("--no-python", "sh", "-c", "echo $RANK; printf half")
    assert (code, out) == (0, "[rank0]: 0\n[rank0]: half\n")
    code, out, _ = run("-m", "platform")
    assert code == 0 and out.startswith("[rank0]: ")


def test_restarts(show: Path) -> None:
    code, out, err = run("--max-restarts", 1, show, "TORCHELASTIC_RESTART_COUNT", "flaky")
    assert code == 0 and "RESTART_COUNT=1" in out and "failed with exit code 5" in err


@pytest.mark.parametrize(
    ("number", "how", "code"),
    [
        (signal.SIGINT, "hang", 130),
        (signal.SIGTERM, "hang", 143),
        (signal.SIGTERM, "stubborn", 143),
    ],
)
def test_signals_end_all(show: Path, number: int, how: str, code: int) -> None:
    launched = start("--nproc-per-node", 2, "--shutdown-timeout", 1, show, "RANK", how)
    assert launched.stdout is not None
    pids: list[int] = []
    while len(pids) < 2:
        line = launched.stdout.readline()
        if "ready" in line:
            pids.append(int(line.split()[-1]))
    launched.send_signal(number)
    started = time.monotonic()
    _, err = launched.communicate(timeout=LIMIT)
    assert time.monotonic() - started < 15
    assert launched.returncode == code
    assert f"{signal.Signals(number).name}: ending 2 ranks" in err
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_program_that_does_not_exist() -> None:
    code, _, err = run("--no-python", "/nowhere/program")
    assert code == 1 and "cannot start /nowhere/program" in err
    code, _, err = run("/nowhere/script.py")
    assert code == 1 and "rank 0" in err and "/nowhere/script.py" in err


# ---- options -----------------------------------------------------------------------------------


class Refused(Exception):
    pass


def refuse(message: str) -> NoReturn:
    raise Refused(message)


def job_of(*args: str) -> launcher.Job:
    return launcher.job_of(launcher.make_parser().parse_args([*args, "script.py"]), refuse)


def test_where_the_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(*args: str) -> tuple[Any, ...]:
        made = job_of(*args)
        return made.host, made.port

    assert place() == place("--standalone") == ("127.0.0.1", 0)
    assert place("--nnodes", "2") == ("127.0.0.1", 29500)
    assert place("--master-addr", "a", "--master-port", "7") == ("a", 7)
    assert place("--rdzv-backend", "c10d", "--rdzv-endpoint", "b:8") == ("b", 8)
    assert place("--rdzv-endpoint", "b") == ("b", 29500)
    monkeypatch.setenv("PET_MASTER_ADDR", "c")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_STANDALONE", "0")
    assert place() == ("c", 0) and job_of().nproc == 3
    assert job_of("--nproc-per-node", "cpu").nproc == os.cpu_count()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--nnodes", "1:4"], "no elastic range"),
        (["--nnodes", "0"], "must be one positive number"),
        (["--nnodes", "2", "--standalone"], "is for one host"),
        (["--nnodes", "2", "--node-rank", "2"], r"must be in \[0, 2\), got 2"),
        (["--nnodes", "2", "--max-restarts", "1"], "and works with one host only"),
        (["--nproc-per-node", "many"], "positive number, auto, cpu or gpu, got many"),
    ],
)
def test_refused(args: list[str], message: str) -> None:
    with pytest.raises(Refused, match=message):
        job_of(*args)


def test_it_needs_the_standard_library_only() -> None:
    tree = ast.parse(Path(launcher.__file__).read_text())
    names = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
    assert isinstance(launcher.make_parser(), argparse.ArgumentParser)
