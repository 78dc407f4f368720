"""A loopback relay in front of the coordination service of rank 0.

JAX's coordination client aborts its process in the same millisecond in which the service closes its
socket, that is when rank 0 dies: too soon for a readable error. Behind the relay that socket stays
open, silent, so the client goes on until its own heartbeat timeout, and the control channel names
rank 0 first. A few bytes a second pass here.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time

from ._control import _ignore_os_errors

_START_LIMIT = 5.0  # seconds; after a refusal JAX's client would wait for one before it tries again


class Relay:
    """Listens on a free loopback port and joins every connection to ``host:port``.

    Attributes:
        address: where to connect, as "127.0.0.1:port".
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets: set[socket.socket] = set()
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="tensorplay-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close every socket."""
        self._wake.send(b"x")
        self._thread.join()
        for sock in (*self._sockets, self._server, self._wake, self._woken):
            sock.close()
        self._selector.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._server:
                    self._accept()
                elif key.data[0] in self._sockets:
                    self._pass_on(*key.data)

    def _accept(self) -> None:
        near, _ = self._server.accept()
        far = self._connect()
        if far is None:
            near.close()
            return
        for sock in (near, far):
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.add(sock)
        self._selector.register(near, selectors.EVENT_READ, (near, far, True))
        self._selector.register(far, selectors.EVENT_READ, (far, near, False))

    def _connect(self) -> socket.socket | None:
        """A connection to the service, which rank 0 may be about to start."""
        deadline = time.monotonic() + _START_LIMIT
        while time.monotonic() < deadline:
            try:
                return socket.create_connection(self._target, _START_LIMIT)
            except OSError:
                time.sleep(0.01)
        return None

    def _pass_on(self, source: socket.socket, sink: socket.socket, source_is_near: bool) -> None:
        data = b""
        with _ignore_os_errors():
            data = source.recv(65536)
        if data:
            with _ignore_os_errors():
                sink.sendall(data)
            return
        self._drop(source)
        if source_is_near:
            self._drop(sink)

    def _drop(self, sock: socket.socket) -> None:
        if sock in self._sockets:
            self._sockets.discard(sock)
            self._selector.unregister(sock)
            sock.close()
