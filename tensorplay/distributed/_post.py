"""Carries letters between processes over TCP.

Every process listens on a port of its own and connects to those it writes to, at the first letter.
The coordination service of JAX tells the ports, and a secret without which a connection is refused.
A message is a line of JSON, then the value's bytes. All sending is done by a thread per receiver,
so that no call waits for the network.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hmac
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
from jax._src import distributed

from ._control import Link, is_loopback

Header = dict[str, Any]

_LONGEST_LINE = 1 << 20
_CLOSE_LIMIT = 5.0  # seconds to send what is still queued
_ASK = 1.0  # seconds between looks whether to give up on a receiver that has not opened its port


class Post:
    """This process's end.

    Args:
        link: the control channel, which says who this is and by which address others reach it.
        on_letter: called with source, key, number and value (bytes or an array) of what has come.
        on_taken: called with the number of a letter that its receiver has taken.
    """

    def __init__(
        self,
        link: Link,
        on_letter: Callable[[int, Any, int, Any], None],
        on_taken: Callable[[int], None],
    ) -> None:
        self._rank = link.rank
        self._on_letter, self._on_taken = on_letter, on_taken
        self._closed = False
        self._lock = threading.Lock()
        self._readers: list[tuple[socket.socket, threading.Thread]] = []
        self._writers: dict[int, _Writer] = {}
        self._secret = secrets.token_hex(16)
        host = link.own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bind_to = host if is_loopback(host) else ""
        self._server = socket.create_server((bind_to, 0), family=family)
        self._address = (host, self._server.getsockname()[1])
        self._accepting = _start(self._accept, "accept")
        _publish(self._rank, self._address, self._secret)
        atexit.register(self.close)

    def send(self, target: int, key: Any, number: int, value: Any) -> None:
        """Queue a letter: bytes or an array."""
        self._writer(target).add({"letter": number, "key": key}, value)

    def acknowledge(self, source: int, number: int) -> None:
        """Tell ``source`` that its letter was taken."""
        self._writer(source).add({"taken": number}, b"")

    def close(self) -> None:
        """Send what is queued, then end the threads and close the sockets."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for writer in self._writers.values():
            writer.close()
        with contextlib.suppress(OSError):
            socket.create_connection(self._address, 1.0).close()  # wakes the accepting thread
        self._accepting.join()
        self._server.close()
        for sock, thread in self._readers:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            thread.join()
            sock.close()

    def _writer(self, target: int) -> _Writer:
        with self._lock:
            if target not in self._writers:
                self._writers[target] = _Writer(self._rank, target)
            return self._writers[target]

    def _accept(self) -> None:
        while True:
            sock, _ = self._server.accept()
            if self._closed:
                sock.close()
                return
            thread = _start(functools.partial(self._listen, sock), "letters")
            self._readers.append((sock, thread))

    def _listen(self, sock: socket.socket) -> None:
        """Read one peer's messages until it, or this process, closes the connection."""
        with contextlib.suppress(OSError, ValueError, KeyError), sock.makefile("rb") as stream:
            hello = _read_header(stream)
            if not hmac.compare_digest(str(hello["secret"]), self._secret):
                return
            while True:
                header = _read_header(stream)
                if "taken" in header:
                    self._on_taken(header["taken"])
                else:
                    value = _read_value(stream, header)
                    self._on_letter(hello["hello"], tuple(header["key"]), header["letter"], value)


class _Writer:
    """Sends to one receiver, in a thread of its own."""

    def __init__(self, rank: int, target: int) -> None:
        self._rank, self._target = rank, target
        self._queue: queue.SimpleQueue[tuple[Header, Any] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = _start(self._run, f"letters to rank {target}")

    def add(self, header: Header, value: Any) -> None:
        self._queue.put((header, value))

    def close(self) -> None:
        self._closed = True
        self._queue.put(None)
        self._thread.join(_CLOSE_LIMIT)

    def _run(self) -> None:
        """A receiver that is gone is found out by who waits for it, not here."""
        found = self._look_up()
        if found is None:
            return
        host, port, secret = found
        with contextlib.suppress(OSError), socket.create_connection((host, port)) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(_line({"hello": self._rank, "secret": secret}))
            while (item := self._queue.get()) is not None:
                _send(sock, *item)

    def _look_up(self) -> tuple[str, int, str] | None:
        while not self._closed:
            found = _ask_for(self._target)
            if found is not None:
                return found
        return None


def _start(run: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=run, name=f"tensorplay-{name}", daemon=True)
    thread.start()
    return thread


def _publish(rank: int, address: tuple[str, int], secret: str) -> None:
    client = distributed.global_state.client
    assert client is not None
    client.key_value_set(_name(rank), json.dumps([*address, secret]))


def _ask_for(rank: int) -> tuple[str, int, str] | None:
    """Where ``rank`` listens, None where it has not said so within a short time."""
    client = distributed.global_state.client
    try:
        assert client is not None
        found = client.blocking_key_value_get(_name(rank), int(_ASK * 1000))
    except Exception:
        time.sleep(_ASK / 10)
        return None
    host, port, secret = json.loads(found)
    return host, port, secret


def _name(rank: int) -> str:
    return f"tensorplay/letters/{rank}"


def _line(header: Header) -> bytes:
    return json.dumps(header).encode() + b"\n"


def _send(sock: socket.socket, header: Header, value: Any) -> None:
    if not isinstance(value, bytes):
        array = np.ascontiguousarray(value)
        header |= {"dtype": array.dtype.name, "shape": array.shape}
        value = array.reshape(-1).view(np.uint8)
    data = memoryview(value)
    sock.sendall(_line(header | {"size": data.nbytes}))
    sock.sendall(data)


def _read_header(stream: BinaryIO) -> Header:
    line = stream.readline(_LONGEST_LINE)
    header = json.loads(line)
    if not isinstance(header, dict):
        raise ValueError("not a message")
    return header


def _read_value(stream: BinaryIO, header: Header) -> Any:
    data = bytearray(header["size"])
    view, have = memoryview(data), 0
    while have < len(data):
        count = stream.readinto(view[have:])  # type: ignore[attr-defined]
        if not count:
            raise OSError("the connection ended inside a message")
        have += count
    if "dtype" not in header:
        return bytes(data)
    return np.ndarray(tuple(header["shape"]), np.dtype(header["dtype"]), data)
