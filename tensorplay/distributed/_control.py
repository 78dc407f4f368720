"""The control channel between the processes of a job: who is there, barriers, goodbyes.

A star: rank 0 runs a `Hub` on the job's address, every rank (0 too) holds a `Link` to it. Both are
a thread and TCP sockets; messages are lines of JSON. A process that dies closes its socket, so the
hub knows within milliseconds and tells the others; when the hub's own process dies every link sees
it. Array data never passes here.

Messages to the hub: hello, meet, leave, need, fail, bye. Messages from it: start, refuse, met,
lost, left, all_left.
"""

from __future__ import annotations

import json
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ._errors import DistBackendError, DistNetworkError, rank_list

Message = dict[str, Any]

_KILLED = "its connection closed without a goodbye: killed, crashed, or its host is lost"


def _tune(sock: socket.socket) -> None:
    """Send at once, and let the kernel notice within about 20 s that the other host is lost."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Line:
    """A socket that carries JSON lines; `send` may be called from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._sending = threading.Lock()
        self._unread = b""

    def send(self, message: Message) -> None:
        """Send one message; a closed connection is the reader's business, not the sender's."""
        with self._sending, _ignore_os_errors():
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """The messages that have come, or None at the end of the connection. Call when readable.

        A peer that does not speak this protocol counts as ended.
        """
        try:
            data = self.sock.recv(65536)
            *lines, self._unread = (self._unread + data).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return None
        if not data or not all(isinstance(message, dict) for message in messages):
            return None
        return messages

    def close(self) -> None:
        with _ignore_os_errors():
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class _ignore_os_errors:
    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, OSError)


class Hub:
    """Rank 0's end of the channel: a thread that serves every rank's `Link`.

    Args:
        host, port: the job's address; binds to loopback alone where the host is a loopback one.
        world_size: number of ranks to wait for.
        start: sent to all ranks when the last has come.

    Raises:
        DistNetworkError: the port is taken.
    """

    def __init__(self, host: str, port: int, world_size: int, start: Message) -> None:
        try:
            bind_to = host if is_loopback(host) else ""
            self._server = socket.create_server((bind_to, port), backlog=max(world_size, 16))
        except OSError as error:
            raise DistNetworkError(
                f"rank 0 cannot listen on {host}:{port} ({error.strerror}): give "
                "init_process_group a free port in init_method or MASTER_PORT"
            ) from error
        self.port: int = self._server.getsockname()[1]
        self._world_size = world_size
        self._start = start
        self._lines: dict[int, _Line] = {}
        self._said_bye: set[int] = set()
        self._leaving: set[int] = set()
        self._lost: dict[int, str] = {}
        self._meetings: dict[tuple[str, tuple[int, ...]], set[int]] = {}
        self._ballots: dict[tuple[str, tuple[int, ...]], dict[int, Message]] = {}
        self._gone = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="tensorplay-hub", daemon=True)
        self._thread.start()

    def wait_until_alone(self, timeout: float) -> None:
        """Block until every rank but 0 has said bye or is lost, at most ``timeout`` seconds."""
        with self._gone:
            self._gone.wait_for(
                lambda: len({*self._said_bye, *self._lost} - {0}) >= self._world_size - 1, timeout
            )

    def close(self) -> None:
        """End the thread and close every socket."""
        self._wake.send(b"x")
        self._thread.join()
        for line in self._lines.values():
            line.close()
        for sock in (self._server, self._wake, self._woken):
            sock.close()
        self._selector.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._read(key.data)

    def _accept(self) -> None:
        sock, _ = self._server.accept()
        _tune(sock)
        self._selector.register(sock, selectors.EVENT_READ, [_Line(sock), -1])

    def _read(self, peer: list[Any]) -> None:
        line, rank = peer
        messages = line.receive()
        if messages is None:
            self._selector.unregister(line.sock)
            line.close()
            if rank >= 0 and rank not in self._said_bye:
                self._lose(rank, _KILLED)
            return
        for message in messages:
            if "hello" in message:
                self._admit(peer, message)
            elif peer[1] >= 0:
                self._handle(peer[1], message)

    def _admit(self, peer: list[Any], message: Message) -> None:
        line, rank = peer[0], message["hello"]
        if message["world_size"] != self._world_size:
            line.send({"refuse": self._other_size(rank, message["world_size"])})
        elif rank in self._lines:
            line.send({"refuse": f"another process is rank {rank} already: each needs its own"})
        else:
            peer[1] = rank
            self._lines[rank] = line
            for lost, why in self._lost.items():
                line.send({"lost": lost, "why": why})
            if len(self._lines) == self._world_size:
                self._tell_all(self._start)

    def _other_size(self, rank: int, size: int) -> str:
        return f"rank 0 was started with world_size={self._world_size}, rank {rank} with {size}"

    def _handle(self, rank: int, message: Message) -> None:
        if "meet" in message:
            self._meet(rank, message["meet"], tuple(message["ranks"]))
        elif "vote" in message:
            self._vote(rank, message)
        elif "leave" in message:
            self._leaving.add(rank)
            self._tell_all({"left": rank, "why": message["leave"], "launches": message["launches"]})
            self._release_leavers()
        elif "need" in message:
            self._lines[message["need"]].send(
                {"all_left": True, "orderly": False, "why": f"rank {rank} waits for it"}
            )
        elif "fail" in message:
            self._said_bye.add(rank)
            self._lose(rank, message["fail"])
        elif "bye" in message:
            with self._gone:
                self._said_bye.add(rank)
                self._gone.notify_all()
            self._release_leavers()

    def _meet(self, rank: int, name: str, ranks: tuple[int, ...]) -> None:
        here = self._meetings.setdefault((name, ranks), set())
        here.add(rank)
        if len(here) == len(ranks):
            del self._meetings[name, ranks]
            for member in ranks:
                self._lines[member].send({"met": name})

    def _vote(self, rank: int, message: Message) -> None:
        """Collects one ballot; those who asked hear the result when all ranks have voted."""
        name, ranks = message["vote"], tuple(message["ranks"])
        ballots = self._ballots.setdefault((name, ranks), {})
        ballots[rank] = message
        if len(ballots) < len(ranks):
            return
        del self._ballots[name, ranks]
        values = [ballots[member]["value"] for member in ranks]
        for member in ranks:
            if ballots[member]["ask"]:
                self._lines[member].send({"voted": name, "values": values})

    def _lose(self, rank: int, why: str) -> None:
        with self._gone:
            if rank in self._lost:
                return
            self._lost[rank] = why
            self._gone.notify_all()
        self._tell_all({"lost": rank, "why": why})
        self._release_leavers()

    def _release_leavers(self) -> None:
        if len(self._leaving | self._lost.keys() | self._said_bye) == self._world_size:
            orderly = len(self._leaving) == self._world_size
            self._tell_all({"all_left": True, "orderly": orderly, "why": "another rank is gone"})

    def _tell_all(self, message: Message) -> None:
        """Tells every rank, this process's own last: it may end as soon as it knows."""
        for rank in sorted(self._lines, reverse=True):
            self._lines[rank].send(message)


class Link:
    """This rank's end of the channel.

    Attributes:
        lost: the ranks that are gone and why, in the order of their going.
        left: the ranks that have left in order, and what their ``leave`` message said.

    Args:
        on_change: called in the link's thread after ``lost`` or ``left`` has grown.
    """

    def __init__(self, rank: int, world_size: int, on_change: Callable[[], None]) -> None:
        self.rank = rank
        self.world_size = world_size
        self.lost: dict[int, str] = {}
        self.left: dict[int, Message] = {}
        self._on_change = on_change
        self._start: Message | None = None
        self._refused: str | None = None
        self._met: set[str] = set()
        self._voted: dict[str, list[str]] = {}
        self._all_left: Message | None = None
        self._ended = False
        self._done = False
        self._changed = threading.Condition()
        self._line: _Line | None = None
        self._thread: threading.Thread | None = None

    def join(self, host: str, port: int, timeout: float) -> Message:
        """Connect, wait until all ranks have, and return the hub's start message.

        Raises:
            DistNetworkError: the hub refused, or not all ranks came within ``timeout`` seconds.
            DistBackendError: a rank was lost meanwhile.
        """
        deadline = time.monotonic() + timeout
        sock = _connect(host, port, deadline, timeout)
        _tune(sock)
        self._line = _Line(sock)
        self._line.send({"hello": self.rank, "world_size": self.world_size})
        self._thread = threading.Thread(target=self._listen, name="tensorplay-link", daemon=True)
        self._thread.start()
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._start or self._refused or self.lost, deadline - time.monotonic()
            )
        if self._refused is not None:
            raise DistNetworkError(f"init_process_group: {self._refused}")
        if self.lost:
            raise DistBackendError(self.describe_lost())
        if not done or self._start is None:
            raise DistNetworkError(
                f"init_process_group: not all {self.world_size} ranks came to {host}:{port} within "
                f"{timeout:g} s; start every rank with the same address and world_size"
            )
        return self._start

    def own_address(self) -> str:
        """The address of this process's host, as the other ranks' hosts reach it."""
        assert self._line is not None
        address: str = self._line.sock.getsockname()[0]
        return address

    def meet(self, name: str, ranks: tuple[int, ...], timeout: float) -> None:
        """Block until all ``ranks`` have come to the meeting ``name`` (used once).

        Raises:
            DistBackendError: one of them is gone or has left, or ``timeout`` seconds are over.
        """
        self.send({"meet": name, "ranks": ranks})
        with self._changed:
            done = self._changed.wait_for(lambda: name in self._met or self.missing(ranks), timeout)
            if name in self._met:
                self._met.discard(name)
                return
        if self.missing(ranks):
            raise DistBackendError(self.describe_lost(ranks))
        assert not done
        raise DistBackendError(f"{name}: {rank_list(ranks)} did not all come within {timeout:g} s")

    def vote(self, name: str, ranks: tuple[int, ...], value: str) -> None:
        """Give this rank's value in the ballot ``name`` (used once), without waiting."""
        self.send({"vote": name, "ranks": ranks, "value": value, "ask": False})

    def ballot(self, name: str, ranks: tuple[int, ...], value: str, timeout: float) -> list[str]:
        """Give this rank's value in the ballot ``name`` (used once), and wait for everyone's.

        Raises:
            DistBackendError: a rank is gone or has left, or ``timeout`` seconds are over.
        """
        self.send({"vote": name, "ranks": ranks, "value": value, "ask": True})
        with self._changed:
            self._changed.wait_for(lambda: name in self._voted or self.missing(ranks), timeout)
            if name in self._voted:
                return self._voted.pop(name)
        if self.missing(ranks):
            raise DistBackendError(self.describe_lost(ranks))
        raise DistBackendError(f"{name}: {rank_list(ranks)} did not all come within {timeout:g} s")

    def missing(self, ranks: tuple[int, ...]) -> bool:
        """Whether one of ``ranks`` can take part in nothing more."""
        return bool(self.lost) or not self.left.keys().isdisjoint(ranks)

    def wait_for_loss(self, timeout: float) -> bool:
        """Wait until some rank is known to be gone; False where none is within ``timeout``."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self.lost or self.left, timeout))

    def leave(self, why: str, launches: Message, timeout: float) -> str | None:
        """Say that this rank has nothing more to do, and wait until that is so for all.

        Returns:
            None if everyone left in order, else what is wrong: a rank is lost, or waits for this
            one in a collective, or time is over.
        """
        self.send({"leave": why, "launches": launches})
        with self._changed:
            self._changed.wait_for(lambda: self._all_left or self._ended or self.lost, timeout)
        if self.lost:
            return self.describe_lost()
        if self._all_left is None:
            return f"rank {self.rank} left, but others did not within {timeout:g} s"
        if self._all_left["orderly"]:
            return None
        return f"rank {self.rank} left too early: {self._all_left['why']}"

    def fail(self, why: str) -> None:
        """Tell the others that this rank ends by an error."""
        self._done = True
        self.send({"fail": why})

    def need(self, rank: int) -> None:
        """Tell ``rank``, which has left, that this one waits for it in a collective."""
        self.send({"need": rank})

    def bye(self) -> None:
        """Say that nothing is needed from the hub any more."""
        self._done = True
        self.send({"bye": True})

    def wait_for_end(self, timeout: float) -> None:
        """Wait until the hub has closed, at most ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended, timeout)

    def close(self) -> None:
        """End the thread and close the socket."""
        self._done = True
        if self._line is not None and self._thread is not None:
            self._line.close()
            self._thread.join()

    def send(self, message: Message) -> None:
        if self._line is not None:
            self._line.send(message)

    def describe_lost(self, ranks: tuple[int, ...] | None = None) -> str:
        """Names the ranks that are gone, or that have left ``ranks``, and why."""
        gone = [f"rank {rank} is gone ({why})" for rank, why in list(self.lost.items())]
        gone += [
            f"rank {rank} has left ({message['why']})"
            for rank, message in list(self.left.items())
            if not self.lost and rank != self.rank and (ranks is None or rank in ranks)
        ]
        return "; ".join(gone)

    def _listen(self) -> None:
        assert self._line is not None
        while True:
            try:
                select.select([self._line.sock], [], [])
            except (OSError, ValueError):
                messages = None
            else:
                messages = self._line.receive()
            with self._changed:
                for message in messages or ():
                    self._note(message)
                if messages is None:
                    self._note_end()
                self._changed.notify_all()
            if messages is None or any("lost" in m or "left" in m for m in messages):
                self._on_change()
            if messages is None:
                return

    def _note(self, message: Message) -> None:
        if "start" in message:
            self._start = message
        elif "refuse" in message:
            self._refused = message["refuse"]
        elif "met" in message:
            self._met.add(message["met"])
        elif "voted" in message:
            self._voted[message["voted"]] = message["values"]
        elif "lost" in message:
            self.lost[message["lost"]] = message["why"]
        elif "left" in message and message["left"] != self.rank:
            self.left[message["left"]] = message
        elif "all_left" in message:
            self._all_left = self._all_left or message

    def _note_end(self) -> None:
        self._ended = True
        if not self._done and self._all_left is None and self._refused is None:
            self.lost.setdefault(0, self.left[0]["why"] if 0 in self.left else _KILLED)


def _connect(host: str, port: int, deadline: float, timeout: float) -> socket.socket:
    """Connect as soon as the hub listens."""
    while True:
        try:
            sock = socket.create_connection((host, port), max(deadline - time.monotonic(), 0.1))
        except OSError as error:
            if time.monotonic() >= deadline:
                raise DistNetworkError(
                    f"init_process_group: rank 0 does not answer at {host}:{port} after "
                    f"{timeout:g} s ({error}); check that rank 0 runs and that the address is its"
                ) from error
            time.sleep(0.05)
        else:
            sock.settimeout(None)
            return sock


def is_loopback(host: str) -> bool:
    """Whether ``host`` names this machine's loopback interface."""
    return host in ("localhost", "::1") or host.startswith("127.")


class HeldPort:
    """A free port that nobody else gets until `release`, though a server may listen on it.

    The server must set SO_REUSEPORT, as gRPC's do. Elsewhere the port is merely free now.
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        if hasattr(socket, "SO_REUSEPORT"):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((host if is_loopback(host) else "", 0))
        self.number: int = self._socket.getsockname()[1]
        if not hasattr(socket, "SO_REUSEPORT"):
            self.release()

    def release(self) -> None:
        """The server listens, or will not."""
        self._socket.close()


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    bind_to = host if is_loopback(host) else ""
    with socket.create_server((bind_to, 0)) as server:
        port: int = server.getsockname()[1]
        return port
