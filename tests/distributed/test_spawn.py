"""tensorplay.multiprocessing: functions in several processes."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import tensorplay as tp
import tensorplay.multiprocessing as mp

pytestmark = pytest.mark.processes


def write_down(index: int, folder: Path, word: str) -> None:
    (folder / str(index)).write_text(word)


def raise_in_one(index: int) -> None:
    if index == 1:
        raise ValueError("boom")
    time.sleep(60)


def exit_with_3(index: int) -> None:
    sys.exit(3)


def be_killed(index: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def answer(queue: Any) -> None:
    queue.put(tp.arange(3) + queue.get())


def error_files() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("tensorplay-error-*"))


def test_every_process_gets_its_number_and_the_arguments(tmp_path: Path) -> None:
    assert mp.spawn(write_down, (tmp_path, "hello"), nprocs=2) is None
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys(
        "01", "hello"
    )


def test_joining_later(tmp_path: Path) -> None:
    context = mp.spawn(write_down, (tmp_path, "hello"), join=False, daemon=True)
    assert context is not None and len(context.pids()) == 1 and context.processes[0].daemon
    while not context.join(timeout=0.1):
        pass
    assert context.join()


def test_a_raising_process_ends_the_others() -> None:
    started, files = time.monotonic(), error_files()
    with pytest.raises(mp.ProcessRaisedException, match="-- Process 1 terminated with") as caught:
        mp.spawn(raise_in_one, nprocs=2)
    assert 'raise ValueError("boom")' in str(caught.value)
    assert caught.value.error_index == 1 and caught.value.error_pid > 0
    assert time.monotonic() - started < 30
    assert error_files() == files


def test_exit_codes_and_signals() -> None:
    with pytest.raises(
        mp.ProcessExitedException, match="process 0 terminated with exit code 3"
    ) as e:
        mp.spawn(exit_with_3)
    assert e.value.exit_code == 3 and e.value.signal_name is None
    with pytest.raises(mp.ProcessExitedException, match="terminated with signal SIGKILL") as e:
        mp.spawn(be_killed)
    again = pickle.loads(pickle.dumps(e.value))
    assert (again.exit_code, again.signal_name) == (-signal.SIGKILL, "SIGKILL")


def test_other_start_methods(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="only supports start_method=spawn"):
        mp.spawn(write_down, (tmp_path, "x"), start_method="fork")
    mp.start_processes(write_down, (tmp_path, "y"), start_method="forkserver")
    assert (tmp_path / "0").read_text() == "y"


def test_the_standard_library_is_there() -> None:
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    queue.put(tp.tensor(10))
    process = context.Process(target=answer, args=(queue,))
    process.start()
    process.join()
    assert queue.get().tolist() == [10, 11, 12]
    assert {"Process", "Queue", "Pool", "set_start_method", "cpu_count"} <= set(dir(mp))
