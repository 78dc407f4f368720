"""Functions in several processes, which end together. Source: torch.multiprocessing.spawn."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_END_DELAY = 30.0  # seconds between asking a process to end and killing it


class ProcessException(Exception):
    """A process of `spawn` has failed.

    Attributes:
        msg: the message.
        error_index: which one, counted from 0.
        error_pid: its process id.
    """

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        super().__init__(msg)
        self.msg, self.error_index, self.error_pid = msg, error_index, error_pid

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return type(self), (self.msg, self.error_index, self.error_pid)


class ProcessRaisedException(ProcessException):
    """It raised; the message holds its traceback."""


class ProcessExitedException(ProcessException):
    """It was killed, or ended with an exit code other than 0.

    Attributes:
        exit_code: negative for a signal.
        signal_name: "SIGKILL" and so on, None where it was no signal.
    """

    def __init__(
        self,
        msg: str,
        error_index: int,
        error_pid: int,
        exit_code: int,
        signal_name: str | None = None,
    ) -> None:
        super().__init__(msg, error_index, error_pid)
        self.exit_code, self.signal_name = exit_code, signal_name

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return type(self), (
            self.msg, self.error_index, self.error_pid, self.exit_code, self.signal_name,
        )  # fmt: skip


class ProcessContext:
    """The processes of one `spawn`.

    Attributes:
        processes: in order.
    """

    def __init__(self, processes: Sequence[Any], error_files: Sequence[str]) -> None:
        self.processes = list(processes)
        self.error_files = list(error_files)
        self.sentinels = {p.sentinel: index for index, p in enumerate(self.processes)}

    def pids(self) -> list[int]:
        """The process ids."""
        return [int(process.pid) for process in self.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until a process ends; if it failed, end the others and raise.

        Args:
            timeout: seconds to wait at most.
            grace_period: seconds for the others to end by themselves after a failure, and again
                between asking them to and killing them.

        Returns:
            Whether all have ended.

        Raises:
            ProcessRaisedException, ProcessExitedException: a process failed.
        """
        ready = multiprocessing.connection.wait(self.sentinels, timeout) if self.sentinels else []
        for sentinel in ready:
            index = self.sentinels.pop(sentinel)  # type: ignore[arg-type]
            self.processes[index].join()
            if self.processes[index].exitcode != 0:
                self._end_all(grace_period)
                failure = self._failure(index)
                for file in self.error_files:
                    Path(file).unlink(missing_ok=True)
                raise failure
        return not self.sentinels

    def _end_all(self, grace_period: float | None) -> None:
        if grace_period is not None:
            self._wait(grace_period)
        for process in self.processes:
            if process.is_alive():
                process.terminate()
        self._wait(_END_DELAY if grace_period is None else grace_period)
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))

    def _failure(self, index: int) -> ProcessException:
        process, file = self.processes[index], Path(self.error_files[index])
        if file.exists():
            message = (
                f"\n\n-- Process {index:d} terminated with the following error:\n{file.read_text()}"
            )
            return ProcessRaisedException(message, index, process.pid)
        code = process.exitcode
        if code >= 0:
            message = f"process {index:d} terminated with exit code {code:d}"
            return ProcessExitedException(message, index, process.pid, code)
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"<Unknown signal {-code}>"
        message = f"process {index:d} terminated with signal {name}"
        return ProcessExitedException(message, index, process.pid, code, name)


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Run ``fn(i, *args)`` in ``nprocs`` new processes, i counting from 0.

    Source: torch.multiprocessing.spawn.

    Args:
        fn: a function at the top level of a module; it and ``args`` are pickled.
        join: wait for all; otherwise return a `ProcessContext` to join later.
        daemon: as of ``multiprocessing.Process``.
        start_method: only "spawn"; `start_processes` takes others.

    Raises:
        ProcessRaisedException: a process raised; its traceback is in the message. The others have
            been ended.
        ProcessExitedException: a process was killed, or exited with a code other than 0.
    """
    if start_method != "spawn":
        warnings.warn(
            f"This method only supports start_method=spawn (got: {start_method}). To use a "
            "different start_method use tensorplay.multiprocessing.start_processes(...)",
            FutureWarning,
            stacklevel=2,
        )
    return start_processes(fn, args, nprocs, join, daemon, "spawn")


def start_processes(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """As `spawn`, with any start method of ``multiprocessing``."""
    made: Any = multiprocessing.get_context(start_method)
    processes, error_files = [], []
    for index in range(nprocs):
        descriptor, file = tempfile.mkstemp(prefix="tensorplay-error-", suffix=".txt")
        os.close(descriptor)
        os.unlink(file)  # it is there only if the process raised
        process = made.Process(target=_run, args=(fn, index, args, file), daemon=daemon)
        process.start()
        processes.append(process)
        error_files.append(file)
    context = ProcessContext(processes, error_files)
    if not join:
        return context
    while not context.join():
        pass
    return None


def _run(fn: Callable[..., Any], index: int, args: tuple[Any, ...], error_file: str) -> None:
    """The main function of each process."""
    _end_with_parent()
    try:
        fn(index, *args)
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(130)  # the parent, interrupted too, says so; no rank is waited for any more
    except Exception as error:
        Path(error_file).write_text(traceback.format_exc())
        raise SystemExit(1) from error


def _end_with_parent() -> None:
    """On Linux, be interrupted when the parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
