"""Programs of these tests compile with few of XLA's passes: there are many, and each runs briefly.

The tests over processes compile as users do.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def quick_compilation() -> Iterator[None]:
    """Turns XLA's expensive passes off for this folder."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
