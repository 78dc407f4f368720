"""What the layers below learn from this package when it is imported."""

from __future__ import annotations

from .._tensor import read_error_translators
from ..utils.data.distributed import set_rank_provider
from . import _failures, _live_tensors
from ._process_group import get_rank, get_world_size


def register() -> None:
    """Failures of other ranks are named where a value is read; samplers know the rank."""
    read_error_translators.append(_failures.translate)
    set_rank_provider(lambda: (get_world_size(), get_rank()))
    _live_tensors.register()
