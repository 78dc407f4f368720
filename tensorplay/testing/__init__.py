"""Helpers for tests: comparing tensors, as ``torch.testing``, and running on simulated ranks."""

from ._comparison import assert_allclose as assert_allclose
from ._comparison import assert_close as assert_close
from ._ranks import ranks as ranks
