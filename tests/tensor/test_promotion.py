"""The dtype of a result, as in PyTorch."""

from __future__ import annotations

import parity
import pytest


@pytest.mark.parametrize("name", parity.cases("promotion"))
def test_as_torch(name):
    parity.check("promotion", name)
