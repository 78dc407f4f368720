"""What each thread of a program holds on its own: modes that every layer reads."""

from __future__ import annotations

import threading
from typing import Any


class ThreadState(threading.local):
    """Modes of the current thread; rank threads therefore each have their own.

    ``grad_enabled``: ops on tensors that require grad are recorded.
    ``inference``: new tensors can never take part in autograd.
    ``trace``: the trace of a compiled module call in progress, or None when Python runs eagerly.
    ``one_rank``: one controller runs Python for one of its ranks.
    ``recomputing``: a checkpointed function runs again in backward.
    ``default_dtype``: None stands for float32.
    ``default_device``: the device given to ``set_default_device`` or ``with device(...)``.
    """

    grad_enabled: bool = True
    inference: bool = False
    trace: Any = None
    one_rank: bool = False
    recomputing: bool = False
    default_dtype: Any = None
    default_device: Any = None
    generator: Any = None


state = ThreadState()
