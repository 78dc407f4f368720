"""Values, gradients, errors and reprs against what torch gave (torch_values.json)."""

import json
import pathlib

import cases
import numpy as np
import pytest

import tensorplay as tp
from tensorplay import nn
from tensorplay.nn import functional as F

RECORD = json.loads(pathlib.Path(__file__).with_name("torch_values.json").read_text())
TOLERANCE = {"float32": 3e-5, "bfloat16": 4e-2}


def _tensors(case, dtype):
    made = [
        tp.tensor(a, dtype=dtype, requires_grad=True) if a.dtype.kind == "f" else tp.tensor(a)
        for a in case.arrays()
    ]
    return made, [t for t in made if t.requires_grad]


def _weights(tensors, salt):
    return [tp.tensor(cases.weights(tuple(t.shape), salt), dtype=t.dtype) for t in tensors]


def _check(tensor, wanted, dtype, tolerance, what):
    assert tensor.dtype is dtype, what
    got = tensor.detach().numpy().astype(np.float64).ravel()
    scale = max(1.0, np.abs(wanted).max(initial=0))
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance * scale, err_msg=what)


def _check_grads(grads, wanted, dtype, tolerance, what):
    for position, (grad, values) in enumerate(zip(grads, wanted, strict=True)):
        if grad is None:
            assert not np.any(values or 0), (what, position)
        else:
            zero = np.zeros(grad.numel())
            _check(grad, zero if values is None else values, dtype, tolerance, f"{what} {position}")


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_value_and_derivatives(case):
    record, close = RECORD["cases"][case.name], (tp.float64, case.tolerance)
    inputs, leaves = _tensors(case, tp.float64)
    out = case.call(F, *inputs)
    assert list(out.shape) == record["shape"]
    _check(out, record["out"], *close, "value")
    grads = tp.autograd.grad(
        [out], leaves, _weights([out], 0), create_graph=case.second, allow_unused=True
    )
    _check_grads(grads, record["grads"], *close, "gradient")
    used = [g for g in grads if g is not None and g.requires_grad]
    if case.second and used:
        second = tp.autograd.grad(used, leaves, _weights(used, 1), allow_unused=True)
        _check_grads(second, record["second"], *close, "second derivative")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in cases.CASES for dtype in case.dtypes],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_other_dtypes(case, dtype):
    record, close = RECORD["cases"][case.name], (getattr(tp, dtype), TOLERANCE[dtype])
    inputs, leaves = _tensors(case, close[0])
    out = case.call(F, *inputs)
    _check(out, record["out"], *close, "value")
    grads = tp.autograd.grad([out], leaves, _weights([out], 0), allow_unused=True)
    _check_grads(grads, record["grads"], *close, "gradient")


@pytest.mark.parametrize("text", cases.ERRORS)
def test_error(text):
    kind, message = RECORD["errors"][text]
    with pytest.raises(Exception) as caught:
        cases.ERRORS[text](nn, F, tp.tensor)
    assert type(caught.value).__name__ == kind
    assert str(caught.value).splitlines()[0] == message.replace("torch.Size", "tensorplay.Size")


@pytest.mark.parametrize("text", cases.MODULES)
def test_repr(text):
    assert repr(cases.MODULES[text](nn)) == RECORD["reprs"][text]
