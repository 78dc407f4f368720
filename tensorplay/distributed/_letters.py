"""Letters: values that one rank sends to another, for point-to-point and object collectives.

A letter has a key, a tuple of strings and numbers. What a rank expects is matched with what comes
in the order of sending, for each sender and key. The sender learns when its letter was taken.
Between rank threads letters are handed over, between processes they travel over TCP (``_post``).
"""

from __future__ import annotations

import collections
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from . import _failures
from ._errors import DistBackendError, rank_list
from ._post import Post
from ._rendezvous import Rendezvous
from ._world import World, on_backend_reset

Key = tuple[str | int, ...]

_NEWS_DELAY = 2.0  # seconds for a letter to come whose sender is known to have left since
_POLL = 0.2


class Letter:
    """A value on its way.

    Attributes:
        source: the sender.
        value: bytes or an array.
    """

    __slots__ = ("_on_taken", "_taken", "source", "value")

    def __init__(self, source: int, value: Any, on_taken: Callable[[], None] | None = None) -> None:
        self.source, self.value = source, value
        self._taken = False
        self._on_taken = on_taken

    def is_taken(self) -> bool:
        """Whether the receiver has it."""
        return self._taken

    def take(self) -> None:
        """The receiver has it now."""
        self._taken = True
        if self._on_taken is not None:
            self._on_taken()


class Ticket:
    """What a receiver expects; ``letter`` is there once it has come."""

    __slots__ = ("letter", "source")

    def __init__(self, source: int | None) -> None:
        self.source = source
        self.letter: Letter | None = None

    def is_done(self) -> bool:
        return self.letter is not None


class Letterbox:
    """What has come for one rank and what it expects.

    Args:
        changed: held for every change, and notified after it.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._letters: dict[Key, collections.deque[Letter]] = {}
        self._tickets: dict[Key, collections.deque[Ticket]] = {}

    def deliver(self, key: Key, letter: Letter) -> None:
        """A letter has come."""
        with self._changed:
            tickets = self._tickets.get(key, collections.deque())
            for ticket in tickets:
                if ticket.source in (None, letter.source):
                    tickets.remove(ticket)
                    self._match(ticket, letter)
                    return
            self._letters.setdefault(key, collections.deque()).append(letter)

    def expect(self, source: int | None, key: Key) -> Ticket:
        """Expect the next letter from ``source`` (None: from anyone)."""
        ticket = Ticket(source)
        with self._changed:
            letters = self._letters.get(key, collections.deque())
            for letter in letters:
                if source in (None, letter.source):
                    letters.remove(letter)
                    self._match(ticket, letter)
                    return ticket
            self._tickets.setdefault(key, collections.deque()).append(ticket)
        return ticket

    def _match(self, ticket: Ticket, letter: Letter) -> None:
        ticket.letter = letter
        letter.take()
        self._changed.notify_all()


class Mail(Protocol):
    """This rank's way to send and receive letters."""

    def send(self, target: int, key: Key, value: Any) -> Letter:
        """Send to a global rank, without waiting. ``value``: bytes, or an array."""

    def expect(self, source: int | None, key: Key) -> Ticket:
        """Expect the next letter from a global rank (None: from anyone)."""

    def wait(
        self,
        needs: tuple[int, ...],
        what: str,
        done: Callable[[], bool],
        timeout: float | None = None,
    ) -> bool:
        """Wait until ``done()``, which reads letters and tickets.

        Args:
            needs: ranks without which it cannot become true.
            what: the call in words, for messages.
            timeout: seconds after which to return False; None raises after the job's timeout.

        Raises:
            DistBackendError: a rank is gone, or the job's timeout is over.
        """


class _ThreadMail:
    """Mail between rank threads (or of a single rank with itself)."""

    def __init__(self, world: World, boxes: list[Letterbox]) -> None:
        self._world, self._boxes = world, boxes

    def send(self, target: int, key: Key, value: Any) -> Letter:
        letter = Letter(self._world.rank, value)
        self._boxes[target].deliver(key, letter)
        return letter

    def expect(self, source: int | None, key: Key) -> Ticket:
        return self._boxes[self._world.rank].expect(source, key)

    def wait(
        self,
        needs: tuple[int, ...],
        what: str,
        done: Callable[[], bool],
        timeout: float | None = None,
    ) -> bool:
        rendezvous = self._world.rendezvous
        if rendezvous is not None:
            return rendezvous.wait_for(self._world.rank, needs, what, done, timeout)
        if not done():
            raise DistBackendError(f"{what}: the only rank waits for itself")
        return True


class _ProcessMail:
    """Mail between processes."""

    def __init__(self, world: World) -> None:
        self._changed = threading.Condition()
        self._box = Letterbox(self._changed)
        self._sent: dict[int, Letter] = {}
        self._numbers = itertools.count()
        self._rank, self._timeout = world.rank, world.timeout
        self.post = Post(world.link, self._on_letter, self._on_taken)  # type: ignore[arg-type]

    def send(self, target: int, key: Key, value: Any) -> Letter:
        letter = Letter(self._rank, value)
        if target == self._rank:
            self._box.deliver(key, letter)
            return letter
        with self._changed:
            number = next(self._numbers)
            self._sent[number] = letter
        self.post.send(target, key, number, value)
        return letter

    def expect(self, source: int | None, key: Key) -> Ticket:
        return self._box.expect(source, key)

    def wait(
        self,
        needs: tuple[int, ...],
        what: str,
        done: Callable[[], bool],
        timeout: float | None = None,
    ) -> bool:
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        in_trouble: float | None = None
        with self._changed:
            while not done():
                now = time.monotonic()
                if _failures.trouble:
                    in_trouble = in_trouble or now
                    if now > in_trouble + _NEWS_DELAY:
                        _failures.check(needs)
                if now >= deadline:
                    if timeout is not None:
                        return False
                    raise DistBackendError(
                        f"{what}: {rank_list(needs)} did not answer within {self._timeout:g} s"
                    )
                self._changed.wait(min(_POLL, deadline - now))
        return True

    def _on_letter(self, source: int, key: Key, number: int, value: Any) -> None:
        letter = Letter(source, value, lambda: self.post.acknowledge(source, number))
        self._box.deliver(key, letter)

    def _on_taken(self, number: int) -> None:
        with self._changed:
            self._sent.pop(number).take()
            self._changed.notify_all()


class _HostMail(_ThreadMail):
    """Mail of a rank thread, to the other threads of its process and to those of others."""

    def __init__(self, world: World, boxes: list[Letterbox], post: _HostPost) -> None:
        super().__init__(world, boxes)
        self._post = post

    def send(self, target: int, key: Key, value: Any) -> Letter:
        world = self._world
        if target // world.threads == world.rank // world.threads:
            return super().send(target, key, value)
        return self._post.send(world.rank, target, target // world.threads, key, value)


class _HostPost:
    """The letters of a process's rank threads to and from other processes."""

    def __init__(self, link: Any, boxes: list[Letterbox], changed: threading.Condition) -> None:
        self._boxes, self._changed = boxes, changed
        self._sent: dict[int, Letter] = {}
        self._numbers = itertools.count()
        self.post = Post(link, self._on_letter, self._on_taken)

    def send(self, source: int, target: int, process: int, key: Key, value: Any) -> Letter:
        letter = Letter(source, value)
        with self._changed:
            number = next(self._numbers)
            self._sent[number] = letter
        self.post.send(process, (source, target, *key), number, value)
        return letter

    def _on_letter(self, process: int, key: Any, number: int, value: Any) -> None:
        source, target, *own_key = key
        letter = Letter(source, value, lambda: self.post.acknowledge(process, number))
        self._boxes[target].deliver(tuple(own_key), letter)

    def _on_taken(self, number: int) -> None:
        with self._changed:
            self._sent.pop(number).take()
            self._changed.notify_all()


_thread_boxes: weakref.WeakKeyDictionary[Rendezvous, list[Letterbox]] = weakref.WeakKeyDictionary()
_host_posts: weakref.WeakKeyDictionary[Rendezvous, _HostPost] = weakref.WeakKeyDictionary()
_mails: weakref.WeakKeyDictionary[World, Mail] = weakref.WeakKeyDictionary()
_opening = threading.Lock()


def mail_of(world: World) -> Mail:
    """The mail of the rank that ``world`` is seen from; opened at the first use."""
    with _opening:
        if world not in _mails:
            _mails[world] = _ProcessMail(world) if world.link is not None else _of_threads(world)
        return _mails[world]


def _of_threads(world: World) -> _ThreadMail:
    if world.rendezvous is None:
        return _ThreadMail(world, [Letterbox(threading.Condition())])
    boxes = _thread_boxes.get(world.rendezvous)
    if boxes is None:
        changed = world.rendezvous.changed
        boxes = [Letterbox(changed) for _ in range(world.world_size)]
        _thread_boxes[world.rendezvous] = boxes
    if world.process is None:
        return _ThreadMail(world, boxes)
    if world.rendezvous not in _host_posts:
        link, changed = world.process.link, world.rendezvous.changed
        _host_posts[world.rendezvous] = _HostPost(link, boxes, changed)
    return _HostMail(world, boxes, _host_posts[world.rendezvous])


def _close_all() -> None:
    for mail in list(_mails.values()):
        if isinstance(mail, _ProcessMail):
            mail.post.close()
    for post in list(_host_posts.values()):
        post.post.close()
    _mails.clear()
    _host_posts.clear()


on_backend_reset(_close_all, lambda: None)
