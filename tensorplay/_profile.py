"""Pausing the profile function that watches user code while it is traced."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def paused_profile(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Runs ``fn`` without the profile function: what happens inside is known to be pure."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        previous = sys.getprofile()
        if previous is None:
            return fn(*args, **kwargs)
        sys.setprofile(None)
        try:
            return fn(*args, **kwargs)
        finally:
            sys.setprofile(previous)

    return run
