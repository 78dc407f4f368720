"""The recorded graph: gradients, hooks, in-place rules and grad modes, as in PyTorch."""

from __future__ import annotations

import parity
import pytest


@pytest.mark.parametrize("name", parity.cases("autograd"))
def test_as_torch(name):
    parity.check("autograd", name)
