"""Keeps known chatter of the C++ libraries off the terminal, and nothing else."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

_CHATTER = (b"[Gloo] Rank ", b"Using experimental recoverable task feature")


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hold back what goes to file descriptors 1 and 2 inside, then pass on all but chatter."""
    with contextlib.ExitStack() as stack:
        for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
            stack.enter_context(_filtered(descriptor, stream))
        yield


_real: dict[int, int] = {}  # of descriptors that are held back now: where they led before


def real_stderr() -> int:
    """The descriptor of the process's own stderr, also while it is held back."""
    return _real.get(2, 2)


@contextlib.contextmanager
def _filtered(descriptor: int, stream: object) -> Iterator[None]:
    try:
        real = os.dup(descriptor)
    except OSError:  # closed, as in a daemon
        yield
        return
    _flush(stream)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), descriptor)
        _real[descriptor] = real
        try:
            yield
        finally:
            _flush(stream)
            os.dup2(real, descriptor)
            del _real[descriptor]
            held.seek(0)
            for line in held:
                if not any(words in line for words in _CHATTER):
                    os.write(real, line)
            os.close(real)


def _flush(stream: object) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()  # type: ignore[attr-defined]
