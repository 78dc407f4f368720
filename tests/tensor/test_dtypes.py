"""Dtypes and 64-bit values, as in PyTorch, beside jax left in 32 bits."""

from __future__ import annotations

import parity
import pytest


@pytest.mark.parametrize("name", parity.cases("dtypes"))
def test_as_torch(name):
    parity.check("dtypes", name)
