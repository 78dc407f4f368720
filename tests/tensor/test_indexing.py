"""Reading and writing through indices, as in PyTorch."""

from __future__ import annotations

import parity
import pytest


@pytest.mark.parametrize("name", parity.cases("indexing"))
def test_as_torch(name):
    parity.check("indexing", name)
