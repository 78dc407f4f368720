"""The repr of tensors, as in PyTorch."""

from __future__ import annotations

import parity
import pytest


@pytest.mark.parametrize("name", parity.cases("printing"))
def test_as_torch(name):
    parity.check("printing", name)
