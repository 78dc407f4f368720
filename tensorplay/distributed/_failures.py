"""What happens to a process when another rank of its job is gone.

The `Link` to the hub learns of it within milliseconds. Where Python runs, the next launch, barrier
or read raises a `DistBackendError` that names the rank. Where the main thread is blocked inside an
XLA collective it cannot raise: a watchdog prints the same line and ends the process.
"""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import threading
import time
from types import TracebackType
from typing import NoReturn

from ._control import Link
from ._errors import DistBackendError, one_line
from ._quiet import real_stderr

GRACE = 8.0  # seconds between learning that a rank is gone and ending a process that has not raised
_SAY_BYE = 0.2
_NEWS_DELAY = 5.0  # seconds that a broken connection waits for the hub to say whose it was

launches: collections.Counter[tuple[int, ...]] = collections.Counter()
"""Programs launched over each set of ranks by this process: tells who would wait for whom."""

trouble = False
"""Whether a rank is gone or has left: makes `check` worth calling."""

_link: Link | None = None
_raised = False
_quiet = threading.Event()
_watchdog: threading.Thread | None = None
_watching = threading.Lock()

_BROKEN = (
    "connection closed",
    "connection reset",
    "broken pipe",
    "gloo",
    "nccl",
    "socket closed",
    "coordination service",
    "timed out",
    "deadline_exceeded",
)


def watch(link: Link) -> None:
    """Start to end this process when a rank behind ``link`` is gone."""
    global _link, _raised
    _raised = False
    _quiet.clear()
    launches.clear()
    _link = link
    on_change()


def unwatch() -> None:
    """The job is over: nobody can be missed any more."""
    global _link, trouble, _watchdog
    with _watching:
        _link = None
        trouble = False
        _quiet.set()
        watchdog, _watchdog = _watchdog, None
    if watchdog is not None:
        watchdog.join()


def on_change() -> None:
    """Called by the link's thread when a rank is gone or has left."""
    global trouble, _watchdog
    with _watching:
        if _link is None or not (_link.lost or _link.left):
            return
        trouble = True
        left = list(_link.left.items())
        awaited = [rank for rank, said in left if _is_ahead_of(rank, said["launches"])]
        for rank in awaited:
            _link.need(rank)
        if _watchdog is None and (_link.lost or awaited):
            _watchdog = threading.Thread(target=_bite, name="tensorplay-watchdog", daemon=True)
            _watchdog.start()


def check(ranks: tuple[int, ...]) -> None:
    """Raise when a rank is gone, or one of ``ranks`` has left.

    Raises:
        DistBackendError: names the rank and why it is gone.
    """
    if _link is not None and _link.missing(ranks):
        for rank in _link.left.keys() & set(ranks):
            _link.need(rank)
        raise peer_lost(_link.describe_lost(ranks))


def launched(ranks: tuple[int, ...]) -> None:
    """Count a launch over ``ranks``, and end this process if one of them has left before it."""
    launches[ranks] += 1
    if trouble:
        on_change()


def peer_lost(message: str) -> DistBackendError:
    """The error for ``message``; from here on the main thread knows, and the watchdog rests."""
    global _raised
    _raised = True
    return DistBackendError(message)


def has_raised() -> bool:
    """Whether an error that names the missing rank has been raised in this process."""
    return _raised


def translate(error: BaseException) -> RuntimeError | None:
    """The error that names the rank whose going broke a collective.

    Args:
        error: what launching a program or reading an array raised.

    Returns:
        A `DistBackendError` to raise from ``error``; None where ``error`` is about something else.
    """
    link = _link
    if link is None or isinstance(error, DistBackendError):
        return None
    text = str(error).lower()
    if not any(words in text for words in _BROKEN):
        return None
    if link.wait_for_loss(_NEWS_DELAY):
        return peer_lost(link.describe_lost())
    return peer_lost(
        f"rank {link.rank}: the connection to another rank broke in a collective, but all "
        f"{link.world_size} ranks are still there ({one_line(error)})"
    )


def tell(link: Link, error: BaseException) -> None:
    """Tell the other ranks that this one ends by ``error``."""
    if isinstance(error, DistBackendError):  # they know already who is gone
        link.bye()
    else:
        link.fail(f"it raised {one_line(error)}")


def print_line(text: str) -> None:
    """Write one line to the process's stderr, past any Python object that stands in for it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os.write(real_stderr(), f"tensorplay: {text}\n".encode())


def _is_ahead_of(rank: int, theirs: dict[str, int]) -> bool:
    """Whether this process has launched a program that ``rank``, which has left, never will."""
    return any(
        rank in ranks and count > theirs.get(launch_key(ranks), 0)
        for ranks, count in list(launches.items())
    )


def launch_key(ranks: tuple[int, ...]) -> str:
    """``ranks`` as a key of the ``launches`` in a leave message."""
    return ",".join(map(str, ranks))


def _bite() -> None:
    link = _link
    if link is None or _quiet.wait(GRACE) or _raised:
        return
    end_process(link)


def end_process(link: Link) -> NoReturn:
    """End this process, which cannot go on without the rank that is gone."""
    print_line(f"rank {link.rank} ends: {link.describe_lost()}")
    link.bye()
    time.sleep(_SAY_BYE)  # rank 0's own hub must pass it on
    os._exit(1)


class ExceptHook:
    """Tells the hub about the exception that ends this process, then prints it as before."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._before = sys.excepthook
        self.error: BaseException | None = None

    def install(self) -> None:
        """Put this hook in front of the present ``sys.excepthook``."""
        sys.excepthook = self

    def uninstall(self) -> None:
        """Take this hook out again, unless another has been put in front of it."""
        if sys.excepthook is self:
            sys.excepthook = self._before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.error = error
        tell(self._link, error)
        self._before(kind, error, trace)
