"""Rank threads meeting: each brings a value, the last to arrive acts for all.

A meeting has members (ranks), a key (what the rank came to do; equal on all members) and a
``combine`` function, which the last member to arrive calls once with everyone's values. The result
goes to all. A meeting that can never complete - a member has returned or raised, came with another
key, or every rank waits for another one - fails the whole job at once, with each rank's doing in
the message.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ._errors import DistBackendError, one_line


class _Arrival:
    """One rank that waits in a meeting."""

    __slots__ = ("done", "error", "key", "members", "result", "started", "value", "what")

    def __init__(self, members: tuple[int, ...], what: str, key: Hashable, value: Any) -> None:
        self.members = members
        self.what = what
        self.key = key
        self.value = value
        self.started = False
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None


class _Wait:
    """One rank that waits for something that other ranks do."""

    __slots__ = ("done", "endless", "needs", "what")

    def __init__(
        self, needs: tuple[int, ...], what: str, done: Callable[[], bool], endless: bool
    ) -> None:
        self.needs = needs
        self.what = what
        self.done = done
        self.endless = endless


class Rendezvous:
    """Where the rank threads of one process meet.

    Args:
        ranks: their numbers.
        timeout: seconds that a rank waits for the others of a meeting before the job fails.
    """

    def __init__(self, ranks: range, timeout: float) -> None:
        self.timeout = timeout
        self.failure: str | None = None
        self._changed = threading.Condition()
        self._arrivals: dict[int, _Arrival] = {}
        self._waits: dict[int, _Wait] = {}
        self._finished: dict[int, str] = {}
        self._ranks = ranks

    def meet(
        self,
        rank: int,
        members: tuple[int, ...],
        what: str,
        key: Hashable,
        value: Any,
        combine: Callable[[Sequence[Any]], Any],
    ) -> Any:
        """Wait for all ``members``, then return ``combine(values in member order)`` on each.

        Args:
            rank: the calling rank, one of ``members``.
            what: the call in words, for messages: "barrier()".
            key: compared between the members; a difference fails the job.
            combine: called by one member, outside any lock. What it raises is raised on every
                member (a copy of it on all but the caller).

        Raises:
            DistBackendError: the meeting cannot complete, or timed out.
        """
        arrival = _Arrival(members, what, key, value)
        with self._changed:
            self._raise_failure()
            self._arrivals[rank] = arrival
            if not self._is_complete(members):
                self._fail_if_stuck()
                self._wait(arrival)
                return self._outcome(arrival)
            together = [self._arrivals[member] for member in members]
            self._check_keys(members, together)
            for each in together:
                each.started = True
        self._run(members, together, arrival, combine)
        return arrival.result

    @property
    def changed(self) -> threading.Condition:
        """To be held while what a `wait_for` waits for is read or changed, and notified then."""
        return self._changed

    def wait_for(
        self,
        rank: int,
        needs: tuple[int, ...],
        what: str,
        done: Callable[[], bool],
        timeout: float | None = None,
    ) -> bool:
        """Wait until ``done()``, which other ranks bring about.

        Args:
            rank: the calling rank.
            needs: ranks without which it cannot become true.
            what: the call in words, for messages.
            timeout: seconds after which to return False; None fails the job after its timeout.

        Raises:
            DistBackendError: the job has failed, or it can never become true.
        """
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        with self._changed:
            self._waits[rank] = _Wait(needs, what, done, timeout is None)
            try:
                return self._wait_until_done(self._waits[rank], deadline)
            finally:
                del self._waits[rank]

    def _wait_until_done(self, wait: _Wait, deadline: float) -> bool:
        while not wait.done():
            self._fail_if_stuck()
            self._raise_failure()
            left = deadline - time.monotonic()
            gone = not self._finished.keys().isdisjoint(wait.needs)
            if not wait.endless and (left <= 0 or gone):
                return False
            if left <= 0:
                self._fail(f"the ranks did not meet within {self.timeout:g} s")
            else:
                self._changed.wait(left)
        return True

    def finish(self, rank: int, error: BaseException | None) -> int:
        """Record that ``rank`` has returned, or raised ``error``; fails whoever waits for it.

        Returns:
            How many ranks had finished before it.
        """
        with self._changed:
            place = len(self._finished)
            self._finished[rank] = "returned" if error is None else f"raised {one_line(error)}"
            self._fail_if_stuck()
            self._changed.notify_all()
            return place

    def wait_until_over(self, delay: float) -> None:
        """Block until all ranks have finished, or until ``delay`` seconds after the job failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self._all_finished())
            self._changed.wait_for(self._all_finished, delay)

    def _all_finished(self) -> bool:
        return len(self._finished) == len(self._ranks)

    def abort(self, reason: str) -> None:
        """Fail the job: every rank that waits, or comes to a meeting later, raises ``reason``."""
        with self._changed:
            self._fail(reason)

    def doings(self) -> str:
        """What each rank does now, in words."""
        return "; ".join(f"rank {rank} {self._doing(rank)}" for rank in self._ranks)

    def _doing(self, rank: int) -> str:
        if rank in self._finished:
            return self._finished[rank]
        waiting = self._arrivals.get(rank) or self._waits.get(rank)
        if waiting is not None:
            return f"waits in {waiting.what}"
        return "is running"

    def _is_complete(self, members: tuple[int, ...]) -> bool:
        return all(
            (arrival := self._arrivals.get(member)) is not None and arrival.members == members
            for member in members
        )

    def _run(
        self,
        members: tuple[int, ...],
        together: list[_Arrival],
        own: _Arrival,
        combine: Callable[[Sequence[Any]], Any],
    ) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = combine([each.value for each in together])
        except BaseException as raised:
            error = raised
            raise
        finally:
            with self._changed:
                for member, each in zip(members, together, strict=True):
                    del self._arrivals[member]
                    each.result, each.error, each.done = result, error, True
                self._changed.notify_all()

    def _wait(self, arrival: _Arrival) -> None:
        deadline = time.monotonic() + self.timeout
        while not arrival.done:
            if arrival.started:
                self._changed.wait()
                continue
            self._raise_failure()
            left = deadline - time.monotonic()
            if left <= 0:
                self._fail(f"the ranks did not meet within {self.timeout:g} s")
            else:
                self._changed.wait(left)

    def _outcome(self, arrival: _Arrival) -> Any:
        if arrival.error is not None:
            raise _for_another_thread(arrival.error)
        return arrival.result

    def _check_keys(self, members: tuple[int, ...], together: list[_Arrival]) -> None:
        if any(each.key != together[0].key for each in together[1:]):
            self._fail("the ranks must call the same collective, with the same shapes and dtypes")
            self._raise_failure()

    def _fail_if_stuck(self) -> None:
        waiting = {r: a.members for r, a in self._arrivals.items() if not a.started}
        waiting |= {r: w.needs for r, w in self._waits.items() if w.endless and not w.done()}
        for needs in waiting.values():
            for needed in needs:
                if needed in self._finished:
                    return self._fail(
                        f"rank {needed} {self._finished[needed]} while others wait for it"
                    )
        needed_ranks = {rank for needs in waiting.values() for rank in needs}
        others_may_act = not needed_ranks.issubset(self._ranks)
        all_wait = len(waiting) + len(self._finished) == len(self._ranks)
        if waiting and all_wait and not others_may_act:
            self._fail("the ranks wait for one another in different collectives")

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = f"{reason} ({self.doings()})"
        self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise DistBackendError(self.failure)


def _for_another_thread(error: BaseException) -> BaseException:
    """A copy of ``error`` with its own traceback; the same object where it cannot be copied."""
    try:
        twin = copy.copy(error)
    except Exception:
        return error
    if type(twin) is not type(error):
        return error
    return twin.with_traceback(None)
