"""Linear algebra, as in PyTorch."""

from __future__ import annotations

import parity
import pytest


@pytest.mark.parametrize("name", parity.cases("linalg"))
def test_as_torch(name):
    parity.check("linalg", name, tolerance=1e-7)
