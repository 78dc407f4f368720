"""Work: a collective in progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Self

import jax

from . import _failures

_POLL = 0.001


class Work:
    """A collective in progress. Source: torch.distributed.Work.

    Args:
        finish: blocks until it is done, at most so many seconds (None: for ever); raises what the
            collective raised, TimeoutError when time is over.
        is_done: whether ``finish`` would return, or raise, at once.
    """

    def __init__(
        self, finish: Callable[[float | None], object], is_done: Callable[[], bool]
    ) -> None:
        self._finish, self._is_done = finish, is_done
        self._error: BaseException | None = None

    @classmethod
    def of_arrays(cls, arrays: Sequence[jax.Array]) -> Self:
        """The computation of ``arrays``."""
        return cls(
            lambda timeout: _wait_for(arrays, timeout),
            lambda: _ready(arrays),
        )

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is done; raises what the collective raised, TimeoutError after timeout."""
        try:
            self._finish(None if timeout is None else timeout.total_seconds())
        except Exception as error:
            self._error = error
            raise
        self._error = None
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._is_done()

    def is_success(self) -> bool:
        """Whether it is done, and the last `wait` has not raised."""
        return self._is_done() and self._error is None

    def exception(self) -> BaseException | None:
        """What the last `wait` raised."""
        return self._error

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()


def _ready(arrays: Sequence[jax.Array]) -> bool:
    return all(array.is_ready() for array in arrays)  # type: ignore[attr-defined]


def _wait_for(arrays: Sequence[jax.Array], timeout: float | None) -> None:
    if timeout is not None:
        deadline = time.monotonic() + timeout
        while not _ready(arrays):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the collective did not end within {timeout:g} s")
            time.sleep(_POLL)
    try:
        jax.block_until_ready(list(arrays))
    except Exception as error:
        translated = _failures.translate(error)
        if translated is None:
            raise
        raise translated from error
