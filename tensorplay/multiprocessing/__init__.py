"""The standard library's ``multiprocessing``, and ``spawn``, as torch.multiprocessing.

Tensors that are sent through queues and pipes are copied.
"""

from multiprocessing import *  # noqa: F403

from ._spawn import ProcessContext as ProcessContext
from ._spawn import ProcessException as ProcessException
from ._spawn import ProcessExitedException as ProcessExitedException
from ._spawn import ProcessRaisedException as ProcessRaisedException
from ._spawn import spawn as spawn
from ._spawn import start_processes as start_processes
