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
TOLERANCE = {"float64": 1e-9, "float32": 3e-5, "float16": 6e-3, "bfloat16": 4e-2}


def _tensors(case, dtype):
    made = [tp.tensor(a) for a in case.arrays()]
    cast = [t.to(dtype) if t.is_floating_point() else t for t in made]
    return cast, [t.requires_grad_() for t in cast if t.is_floating_point()]


def _weighted(tensors, salt):
    return sum((t * tp.tensor(cases.weights(tuple(t.shape), salt), dtype=t.dtype)).sum() for t in tensors)


def _check(tensor, wanted, dtype, what):
    assert tensor.dtype is dtype, what
    got = tensor.detach().double().numpy().ravel()
    wanted = np.array(wanted)
    scale = max(1.0, np.abs(wanted[np.isfinite(wanted)]).max(initial=0))
    np.testing.assert_allclose(
        got, wanted, rtol=TOLERANCE[dtype.name], atol=TOLERANCE[dtype.name] * scale, err_msg=what
    )


def _check_grads(grads, wanted, dtype, what):
    for position, (grad, values) in enumerate(zip(grads, wanted, strict=True)):
        if values is None or not np.any(values):
            assert grad is None or not np.any(grad.detach().double().numpy()), (what, position)
        else:
            _check(grad, values, dtype, f"{what} {position}")


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_value_and_derivatives(case):
    record = RECORD["cases"][case.name]
    inputs, leaves = _tensors(case, tp.float64)
    out = case.call(F, *inputs)
    assert list(out.shape) == record["shape"]
    _check(out, record["out"], tp.float64, "value")
    grads = tp.autograd.grad(_weighted([out], 0), leaves, create_graph=case.second, allow_unused=True)
    _check_grads(grads, record["grads"], tp.float64, "gradient")
    if case.second:
        used = [g for g in grads if g is not None and g.requires_grad]
        second = [None] * len(leaves)
        if used:
            second = tp.autograd.grad(_weighted(used, 1), leaves, allow_unused=True)
        _check_grads(second, record["second"], tp.float64, "second derivative")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in cases.CASES for dtype in case.dtypes],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_other_dtypes(case, dtype):
    record, dtype = RECORD["cases"][case.name], getattr(tp, dtype)
    inputs, leaves = _tensors(case, dtype)
    out = case.call(F, *inputs)
    _check(out, record["out"], dtype, "value")
    grads = tp.autograd.grad(_weighted([out], 0), leaves, allow_unused=True)
    _check_grads(grads, record["grads"], dtype, "gradient")


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
