"""The profile function of this thread: set for a while, paused, and put back."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def profiling(function: Callable[..., Any] | None) -> Iterator[None]:
    """Makes ``function`` the profile function inside the block; None means no profiling.

    A profiler written in C, such as cProfile's, rests meanwhile.
    """
    previous = sys.getprofile()
    sys.setprofile(function)
    try:
        yield
    finally:
        if previous is None or callable(previous):
            sys.setprofile(previous)
        else:
            sys.setprofile(None)
            previous.enable()


def paused_profile(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Runs ``fn`` without the profile function: what happens inside is known to be pure."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if sys.getprofile() is None:
            return fn(*args, **kwargs)
        with profiling(None):
            return fn(*args, **kwargs)

    return run
