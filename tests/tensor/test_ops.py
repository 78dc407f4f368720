"""Every op: its value and gradients as PyTorch has them, and against finite differences."""

from __future__ import annotations

import parity
import pytest
from torch_cases import ops

import tensorplay as tp

# Not smooth, or with a derivative that is a convention: the recorded gradients are the check.
NOT_CHECKED = {
    "sign", "sgn", "ceil", "floor", "trunc", "round", "maximum_ties", "norm_of_zero",
    "floor_divide",
    "pow_at_zero", "masked", "casts", "nan_to_num",
}  # fmt: skip


@pytest.mark.parametrize("name", ops.ROWS)
def test_as_torch(name):
    parity.check("ops", "op_" + name, tolerance=1e-6)


@pytest.mark.parametrize("name", [n for n in ops.ROWS if n not in NOT_CHECKED])
def test_gradient_against_differences(name):
    fn, kinds = ops.ROWS[name]
    leaves = [
        x.requires_grad_() if x.is_floating_point() else x for x in ops.inputs(tp, name, kinds)
    ]

    def outputs(*args):
        return [out for out in ops.listed(fn(tp, *args)) if out.requires_grad]

    assert tp.autograd.gradcheck(outputs, leaves)
