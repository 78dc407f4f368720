"""Tests on simulated ranks, in one line."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ..distributed._rank_threads import run_ranks

Test = Callable[..., Any]


def ranks(*world_sizes: int, timeout: float | timedelta | None = None) -> Callable[[Test], Test]:
    """Decorator: the test runs on that many ranks, as threads of this process.

    ::

        @ranks(4)
        def test_sum(rank):
            x = tp.tensor(float(rank))
            dist.all_reduce(x)
            assert x.item() == 6

    With several world sizes, ``ranks(1, 2, 4)``, it runs once for each. Its first parameter gets
    the rank; pytest fills the others, so that fixtures and ``parametrize`` work as usual (every
    rank gets the same objects). Works with any test runner, and on any function: called without
    pytest, ``ranks(4)(fn)()`` runs ``fn`` now. What ``run_ranks`` says of devices and of failures
    holds here.

    Args:
        world_sizes: numbers of ranks.
        timeout: seconds that a rank waits for the others in a collective; default 300.

    Raises:
        TypeError: the function has no parameter for the rank.
        Exception: when run, what the first failing rank raised, with a note that names the rank.
    """

    def decorate(test: Test) -> Test:
        parameters = list(inspect.signature(test).parameters.values())
        if not parameters:
            raise TypeError(f"{test.__name__} must take the rank as its first parameter")

        @functools.wraps(test)
        def on_ranks(*args: Any, **fixtures: Any) -> None:
            fn = functools.partial(_call, test, args, fixtures)
            for size in world_sizes:
                run_ranks(fn, size, timeout=timeout)

        on_ranks.__signature__ = inspect.Signature(parameters[1:])  # type: ignore[attr-defined]
        return on_ranks

    return decorate


def _call(test: Test, args: tuple[Any, ...], fixtures: dict[str, Any], rank: int) -> None:
    test(rank, *args, **fixtures)
