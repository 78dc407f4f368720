"""tp.testing, as torch.testing."""

from __future__ import annotations

import parity
import pytest


@pytest.mark.parametrize("name", parity.cases("testing"))
def test_as_torch(name):
    parity.check("testing", name)
