"""Loading ahead, in threads.

Threads share the dataset with the program, and the interpreter with each other: they help where
samples wait for files or spend their time in numpy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import jax

from ..._ops.random import manual_seed
from ..._state import state

END = object()


@dataclass(frozen=True)
class WorkerInfo:
    """What ``get_worker_info`` tells inside a worker."""

    id: int
    num_workers: int
    seed: int
    dataset: Any


class _Local(threading.local):
    info: WorkerInfo | None = None


_local = _Local()


def get_worker_info() -> WorkerInfo | None:
    """The worker that calls this, or None outside of workers."""
    return _local.info


class Worker:
    """One thread that makes batches; its tensors are placed as those of the program's thread.

    Args:
        make_fetch: called in the thread: returns what turns an index into a batch.
        init_fn: called in the thread with the worker's number before that.
    """

    def __init__(
        self,
        info: WorkerInfo,
        make_fetch: Callable[[], Callable[[Any], Any]],
        init_fn: Callable[[int], None] | None,
    ) -> None:
        self._info, self._make_fetch, self._init_fn = info, make_fetch, init_fn
        self._device = jax.config.jax_default_device  # type: ignore[attr-defined]
        self._modes = state.default_device, state.default_dtype
        self._fetch: Callable[[Any], Any] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"DataLoader-{info.id}")

    def submit(self, index: Any) -> Future[Any]:
        """Starts making a batch; its result is ``END`` once the worker has no more."""
        return self._pool.submit(self._run, index)

    def _run(self, index: Any) -> Any:
        with jax.default_device(self._device):
            if self._fetch is None:
                self._start()
            assert self._fetch is not None
            return self._fetch(index)

    def _start(self) -> None:
        _local.info = self._info
        state.default_device, state.default_dtype = self._modes
        manual_seed(self._info.seed)
        if self._init_fn is not None:
            self._init_fn(self._info.id)
        self._fetch = self._make_fetch()

    def close(self) -> None:
        """Lets the thread end after the batch it is making."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def batches_of(
    workers: list[Worker], indices: Iterable[Any], ahead: int, timeout: float
) -> Iterator[Any]:
    """Batches in the order of ``indices``, dealt round the workers, each ``ahead`` of the reader.

    Raises:
        RuntimeError: a batch took longer than ``timeout`` seconds (0: no limit).
    """
    source, alive = iter(indices), deque(workers)
    pending: deque[tuple[Worker, Future[Any]]] = deque()
    try:
        while True:
            while len(pending) < ahead * len(alive) and (index := next(source, END)) is not END:
                pending.append((alive[0], alive[0].submit(index)))
                alive.rotate(-1)
            if not pending:
                return
            worker, future = pending.popleft()
            batch = _result(future, timeout)
            if batch is not END:
                yield batch
            elif worker in alive:
                alive.remove(worker)
    finally:
        for worker in workers:
            worker.close()


def _result(future: Future[Any], timeout: float) -> Any:
    try:
        return future.result(timeout or None)
    except FutureTimeout:
        if future.done():
            raise
        raise RuntimeError(f"DataLoader timed out after {timeout} seconds") from None
