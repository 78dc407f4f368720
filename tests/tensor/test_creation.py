"""Constructors and what tensors tell about themselves, as in PyTorch."""

from __future__ import annotations

import parity
import pytest


@pytest.mark.parametrize("name", parity.cases("creation"))
def test_as_torch(name):
    parity.check("creation", name)
