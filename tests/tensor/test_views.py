"""Aliases and strides, as in PyTorch."""

from __future__ import annotations

import parity
import pytest


@pytest.mark.parametrize("name", parity.cases("views"))
def test_as_torch(name):
    parity.check("views", name)
