"""Error types of the distributed package, named as in torch.distributed."""

from __future__ import annotations


class DistError(RuntimeError):
    """Anything that goes wrong between ranks. Source: torch.distributed.DistError."""


class DistBackendError(DistError):
    """A rank is gone, or the ranks disagree about what to do together.

    Raised on every rank that needs the missing one; the message names it.
    Source: torch.distributed.DistBackendError.
    """


class DistNetworkError(DistError):
    """The ranks could not reach one another. Source: torch.distributed.DistNetworkError."""


def one_line(error: BaseException) -> str:
    """``ValueError: boom`` - type and first line of the message, for use inside other messages."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def rank_list(ranks: list[int] | tuple[int, ...]) -> str:
    """``rank 1`` or ``ranks 1, 2`` for messages."""
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"
