"""The launcher: starts one process per rank of this host, and watches over them. As torchrun.

    python -m tensorplay.distributed.run --nproc-per-node 4 script.py --its arguments
    python -m tensorplay.distributed.run --nnodes 2 --node-rank 0 --master-addr host0 \\
        --nproc-per-node 4 script.py

Every rank finds its place in RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK,
MASTER_ADDR and MASTER_PORT, from which ``init_process_group()`` joins the job. Each line that
a rank prints gets the rank in front. When a rank fails, the others get a moment to say what they
saw, then they are ended; the launcher names the rank that failed, shows the end of its traceback
and returns 1. SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGQUIT end all ranks.

Each option may also be given in the environment, --nproc-per-node as PET_NPROC_PER_NODE.
This file uses the standard library only.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

_POLL = 0.05
_OTHERS_DELAY = 3.0  # seconds for the other ranks to say what they saw when one fails
_INTERRUPT_DELAY = 5.0  # seconds for ranks to end by KeyboardInterrupt
_TAIL = 60
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_BY_ANOTHER = (b"DistBackendError", b" ends: rank ")  # of ranks that fail because another has
_DEFAULT_PORT = 29500


def make_parser() -> argparse.ArgumentParser:
    """torchrun's options."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m tensorplay.distributed.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_nodes(parser)
    _add_output(parser)
    add = parser.add_argument
    add("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    add("--no-python", "--no_python", action="store_true", help="the script is any program")
    add("--max-restarts", "--max_restarts", type=int, default=0, help="one node only")
    add("--shutdown-timeout", "--shutdown_timeout", type=float, default=30.0,
        help="seconds between asking a rank to end and killing it")  # fmt: skip
    for name in ("role", "run-path", "start-method", "monitor-interval", "rdzv-conf", "local-addr"):
        add(f"--{name}", f"--{name.replace('-', '_')}", help="accepted for compatibility")
    add("script", help="a Python file, or see -m and --no-python")
    add("args", nargs=argparse.REMAINDER, help="the script's own arguments")
    for action in parser._actions:
        if (value := os.environ.get(f"PET_{action.dest.upper()}")) is not None:
            parser.set_defaults(**{action.dest: value if action.nargs != 0 else value != "0"})
    return parser


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nproc-per-node", "--nproc_per_node", default="1",
        help="ranks on this host: a number, cpu, gpu (as many as there are) or auto")  # fmt: skip
    add("--nnodes", default="1", help="number of hosts, each with its own launcher")
    add("--node-rank", "--node_rank", type=int, default=0, help="of this host")
    add("--master-addr", "--master_addr", default="127.0.0.1", help="address of host 0")
    add("--master-port", "--master_port", type=int, default=None,
        help=f"a free port of host 0; default {_DEFAULT_PORT}, with one host any")  # fmt: skip
    add("--standalone", action="store_true", help="one host, any free port")
    add("--rdzv-backend", "--rdzv_backend", default="static", choices=("static", "c10d"))
    add("--rdzv-endpoint", "--rdzv_endpoint", default="", help="host:port in place of --master-*")
    add("--rdzv-id", "--rdzv_id", default="none", help="the ranks see it in TORCHELASTIC_RUN_ID")


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    streams = "0 none, 1 stdout, 2 stderr, 3 both; or per local rank, as in 0:3,1:2"
    add("--log-dir", "--log_dir", default=None, help="where --redirects and --tee write")
    add("-r", "--redirects", default="0", help=f"to files only: {streams}")
    add("-t", "--tee", default="0", help=f"to files too: {streams}")
    add("--local-ranks-filter", "--local_ranks_filter", default="",
        help="show the output of these local ranks only, as in 0,1")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """What this launcher runs.

    Attributes:
        command: of every rank.
        nproc: ranks on this host.
        nnodes, node_rank: hosts, and this one's number.
        host, port: where the ranks meet; port 0 stands for any free one.
        options: all of the command line.
    """

    command: tuple[str, ...]
    nproc: int
    nnodes: int
    node_rank: int
    host: str
    port: int
    options: argparse.Namespace

    def environment(self, local_rank: int, port: int, restarts: int) -> dict[str, str]:
        """torchrun's variables, of one rank."""
        rank, size = self.node_rank * self.nproc + local_rank, self.nnodes * self.nproc
        own: dict[str, Any] = {
            "LOCAL_RANK": local_rank, "RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": self.node_rank,
            "LOCAL_WORLD_SIZE": self.nproc, "WORLD_SIZE": size, "ROLE_WORLD_SIZE": size,
            "GROUP_WORLD_SIZE": self.nnodes, "ROLE_NAME": self.options.role or "default",
            "MASTER_ADDR": self.host, "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": restarts,
            "TORCHELASTIC_MAX_RESTARTS": self.options.max_restarts,
            "TORCHELASTIC_RUN_ID": self.options.rdzv_id,
        }  # fmt: skip
        env = os.environ | {name: str(value) for name, value in own.items()}
        if self.nproc > 1:
            env.setdefault("OMP_NUM_THREADS", "1")
        return env


def job_of(options: argparse.Namespace, refuse: Callable[[str], NoReturn]) -> Job:
    """Work out what to run; ``refuse`` is called with what is wrong with the options."""
    nnodes = _node_count(str(options.nnodes), refuse)
    host, port = options.master_addr, options.master_port
    if options.rdzv_endpoint:
        host, _, text = options.rdzv_endpoint.rpartition(":")
        if not host:
            host, text = text, str(_DEFAULT_PORT)
        port = int(text)
    if options.standalone:
        if nnodes > 1:
            refuse("--standalone is for one host; leave --nnodes out")
        host, port = "127.0.0.1", 0
    if not 0 <= int(options.node_rank) < nnodes:
        refuse(f"--node-rank must be in [0, {nnodes}), got {options.node_rank}")
    if int(options.max_restarts) < 0 or (nnodes > 1 and int(options.max_restarts)):
        refuse("--max-restarts must not be negative, and works with one host only")
    if port is None:
        port = 0 if nnodes == 1 else _DEFAULT_PORT
    nproc = _rank_count(str(options.nproc_per_node), refuse)
    return Job(_command(options), nproc, nnodes, int(options.node_rank), host, int(port), options)


def _command(options: argparse.Namespace) -> tuple[str, ...]:
    if options.no_python:
        return (options.script, *options.args)
    python = (sys.executable, "-u", *(("-m",) if options.module else ()))
    return (*python, options.script, *options.args)


def _node_count(text: str, refuse: Callable[[str], NoReturn]) -> int:
    low, _, high = text.partition(":")
    if (high and high != low) or not low.isdigit() or int(low) < 1:
        refuse(f"--nnodes must be one positive number (no elastic range), got {text}")
    return int(low)


def _rank_count(text: str, refuse: Callable[[str], NoReturn]) -> int:
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if text == "auto":
        return gpus or os.cpu_count() or 1
    if text == "gpu" and gpus:
        return gpus
    if text == "cpu":
        return os.cpu_count() or 1
    if not text.isdigit() or int(text) < 1:
        refuse(f"--nproc-per-node must be a positive number, auto, cpu or gpu, got {text}")
    return int(text)


class Rank:
    """One rank's process, the threads that pass on its output, and the end of its stderr."""

    def __init__(
        self, local_rank: int, env: dict[str, str], command: Sequence[str], output: Output
    ) -> None:
        self.local_rank, self.rank = local_rank, int(env["RANK"])
        self.tail: collections.deque[bytes] = collections.deque(maxlen=_TAIL)
        self.process = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the launcher, which passes it on
        )
        self._threads = [
            threading.Thread(target=self._pass_on, args=(stream, sink), daemon=True)
            for stream, sink in zip(
                (self.process.stdout, self.process.stderr),
                output.sinks(self.rank, local_rank),
                strict=True,
            )
        ]
        for thread in self._threads:
            thread.start()

    def _pass_on(self, stream: IO[bytes], sink: Callable[[bytes], None]) -> None:
        for line in iter(stream.readline, b""):
            if stream is self.process.stderr:
                self.tail.append(line)
            sink(line)

    def drain(self) -> None:
        """Wait until the output of the ended process is passed on."""
        for thread in self._threads:
            thread.join(1.0)  # a grandchild may hold the stream open

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    @property
    def failed(self) -> bool:
        return self.process.poll() not in (None, 0)

    def how_it_ended(self) -> str:
        code = self.process.returncode
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
        return f"signal {-code}"

    def blames_another(self) -> bool:
        """Whether it seems to have failed only because another rank is gone."""
        return any(words in line for line in self.tail for words in _BY_ANOTHER)

    def traceback(self) -> bytes:
        """Its last traceback, else its last lines."""
        lines = list(self.tail)
        starts = [i for i, line in enumerate(lines) if line.startswith(b"Traceback (most recent")]
        return b"".join(lines[starts[-1] if starts else -15 :])


class Output:
    """Where the ranks' lines go: the console, with the rank in front, and files."""

    def __init__(self, options: argparse.Namespace, restarts: int) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._shown = {int(r) for r in options.local_ranks_filter.split(",") if r}
        if options.redirects != "0" or options.tee != "0":
            folder = options.log_dir or tempfile.mkdtemp(prefix="tensorplay-")
            self._folder = Path(folder) / f"attempt_{restarts}"

    def sinks(self, rank: int, local_rank: int) -> list[Callable[[bytes], None]]:
        """What to do with a line of the rank's stdout and of its stderr."""
        redirect = _streams(self._options.redirects, local_rank)
        tee = _streams(self._options.tee, local_rank)
        prefix = f"[rank{rank}]: ".encode()
        sinks = []
        for bit, name, console in ((1, "stdout", sys.stdout), (2, "stderr", sys.stderr)):
            shown = not redirect & bit and (not self._shown or local_rank in self._shown)
            file = self._file(local_rank, name) if (redirect | tee) & bit else None
            sinks.append(self._sink(prefix, console.buffer if shown else None, file))
        return sinks

    def _file(self, local_rank: int, name: str) -> IO[bytes]:
        assert self._folder is not None
        folder = self._folder / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        return open(folder / f"{name}.log", "wb", buffering=0)

    def _sink(self, prefix: bytes, console: Any, file: IO[bytes] | None) -> Callable[[bytes], None]:
        def write(line: bytes) -> None:
            whole = line if line.endswith(b"\n") else line + b"\n"
            with self._lock, contextlib.suppress(OSError, ValueError):
                if file is not None:
                    file.write(line)
                if console is not None:
                    console.write(prefix + whole)
                    console.flush()

        return write


def _streams(text: str, local_rank: int) -> int:
    """torchrun's "3", or "0:3,1:2"."""
    if ":" not in text:
        return int(text)
    chosen = dict(part.split(":") for part in text.split(","))
    return int(chosen.get(str(local_rank), 0))


class Launcher:
    """Runs a job once, or again after failures."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._signal: int | None = None

    def run(self) -> int:
        """Start the ranks and wait for them; returns the launcher's exit code."""
        before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        try:
            for restarts in range(int(self._job.options.max_restarts) + 1):
                code = self._attempt(restarts)
                if code == 0 or self._signal is not None:
                    break
            return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self._signal = number

    def _attempt(self, restarts: int) -> int:
        job, output = self._job, Output(self._job.options, restarts)
        port = job.port or _free_port()
        ranks: list[Rank] = []
        try:
            for local_rank in range(job.nproc):
                env = job.environment(local_rank, port, restarts)
                ranks.append(Rank(local_rank, env, job.command, output))
            return self._watch(ranks)
        except OSError as error:
            _say(f"cannot start {job.command[0]}: {error}")
            return 1
        finally:
            self._end(ranks, signal.SIGTERM)
            for rank in ranks:
                rank.drain()

    def _watch(self, ranks: list[Rank]) -> int:
        while self._signal is None:
            if any(rank.failed for rank in ranks):
                return self._fail(ranks)
            if all(rank.process.poll() == 0 for rank in ranks):
                return 0
            time.sleep(_POLL)
        name = signal.Signals(self._signal).name
        _say(f"{name}: ending {len(ranks)} ranks")
        if self._signal == signal.SIGINT:
            _signal_all(ranks, signal.SIGINT)
            self._wait(ranks, _INTERRUPT_DELAY)
        self._end(ranks, signal.SIGTERM if self._signal == signal.SIGINT else self._signal)
        return 128 + self._signal

    def _fail(self, ranks: list[Rank]) -> int:
        """A rank has failed: end the others and say which it was."""
        order = [rank for rank in ranks if rank.failed]
        deadline = time.monotonic() + _OTHERS_DELAY
        while time.monotonic() < deadline and len(order) < len(ranks) and self._signal is None:
            time.sleep(_POLL)
            order += [rank for rank in ranks if rank.failed and rank not in order]
        running = [rank.rank for rank in ranks if rank.process.poll() is None]
        self._end(ranks, signal.SIGTERM)
        for rank in ranks:
            rank.drain()
        first = min(order, key=Rank.blames_another)
        _report(first, running)
        return 1

    def _end(self, ranks: list[Rank], number: int) -> None:
        """Ask the ranks that run to end, and kill those that do not."""
        if all(rank.process.poll() is not None for rank in ranks):
            return
        _signal_all(ranks, number)
        self._wait(ranks, float(self._job.options.shutdown_timeout))
        _signal_all(ranks, signal.SIGKILL)
        for rank in ranks:
            rank.process.wait()

    def _wait(self, ranks: list[Rank], seconds: float) -> None:
        """Wait for all to end, at most so long; a further signal cuts it short."""
        seen, self._signal = self._signal, None
        deadline = time.monotonic() + seconds
        while any(r.process.poll() is None for r in ranks) and time.monotonic() < deadline:
            if self._signal is not None:
                break
            time.sleep(_POLL)
        self._signal = self._signal or seen


def _signal_all(ranks: list[Rank], number: int) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.signal(number)


def _report(rank: Rank, ended: list[int]) -> None:
    others = f"; ended rank(s) {', '.join(map(str, ended))}" if ended else ""
    _say(
        f"rank {rank.rank} (local rank {rank.local_rank}, pid {rank.process.pid}) failed with "
        f"{rank.how_it_ended()}{others}. The end of its stderr:\n"
        + rank.traceback().decode(errors="replace").rstrip("\n")
    )


def _say(text: str) -> None:
    print(f"tensorplay.distributed.run: {text}", file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser()
    return Launcher(job_of(parser.parse_args(argv), parser.error)).run()


if __name__ == "__main__":
    sys.exit(main())
