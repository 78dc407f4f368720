"""Eight CPU devices for simulated ranks, set before JAX starts; compiled programs are bounded."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

_MEMORY_LIMIT = 4 << 30

if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", 8)


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True, scope="module")
def _bounded_memory() -> Iterator[None]:
    """Drops compiled programs between test files once they take much memory."""
    yield
    if _resident_bytes() > _MEMORY_LIMIT:
        gc.collect()
        jax.clear_caches()
