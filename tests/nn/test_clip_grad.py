"""Gradient clipping, on plain gradients and on gradients in pieces."""

import numpy as np
import pytest

import tensorplay as tp
from tensorplay.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    get_total_norm,
    parameters_to_vector,
    vector_to_parameters,
)

GRADS = [np.array([[3.0, -4.0]]), np.array(12.0), np.array([[0.5], [1.0], [-2.0]])]


class Pieces:
    """What a sharded gradient's layout offers: here every other rank holds ``others``."""

    def __init__(self, key, total, top):
        self.group_key, self.total, self.top = key, total, top

    def readable(self, tensor):
        return tensor._storage.array

    def sum_over_ranks(self, partial):
        return partial + self.total

    def max_over_ranks(self, partial):
        return partial.clip(self.top)


def _parameters(dtype=tp.float32):
    made = []
    for grad in GRADS:
        p = tp.zeros(grad.shape, dtype=dtype, requires_grad=True)
        p.grad = tp.tensor(grad, dtype=dtype)
        made.append(p)
    return made


def _norm(order, extra=0.0):
    flat = np.concatenate([np.abs(g).ravel() for g in GRADS])
    return flat.max() if order == np.inf else ((flat**order).sum() + extra) ** (1 / order)


@pytest.mark.parametrize("order", [1, 2, 3.5, np.inf])
@pytest.mark.parametrize("dtype", [tp.float32, tp.float64, tp.bfloat16])
def test_norm_and_scaling(order, dtype):
    parameters = _parameters(dtype)
    tolerance = {"bfloat16": 2e-2}.get(dtype.name, 1e-5)
    total = clip_grad_norm_(parameters, 1.5, norm_type=order)
    assert total.shape == () and total.dtype is dtype
    np.testing.assert_allclose(float(total), _norm(order), rtol=tolerance)
    factor = 1.5 / (_norm(order) + 1e-6)
    for p, grad in zip(parameters, GRADS, strict=True):
        assert p.grad.dtype is dtype
        scaled = p.grad.numpy().astype(np.float64)
        np.testing.assert_allclose(scaled, grad * factor, rtol=tolerance)


def test_small_gradients_stay_and_versions_count():
    parameters = _parameters()
    grad = parameters[0].grad
    clip_grad_norm_(iter(parameters), 100.0, foreach=True)
    np.testing.assert_array_equal(grad.numpy(), GRADS[0])
    assert parameters[0].grad is grad and grad._version == 1


def test_without_gradients():
    assert clip_grad_norm_([tp.zeros(2, requires_grad=True)], 1.0).item() == 0
    assert get_total_norm([]).item() == 0
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((p for p in []), 1.0)


def test_a_norm_that_is_not_finite():
    parameters = _parameters()
    parameters[1].grad = tp.tensor(float("nan"))
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 .* is non-finite"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    np.testing.assert_array_equal(parameters[0].grad.numpy(), GRADS[0])
    assert np.isnan(clip_grad_norm_(parameters, 1.0).item())
    with pytest.raises(ValueError, match="must be positive"):
        get_total_norm(GRADS, norm_type=-1)


@pytest.mark.parametrize("order", [2, np.inf])
def test_gradients_in_pieces_add_up_once_for_each_group(order):
    parameters = _parameters()
    parameters[0].grad._layout = parameters[1].grad._layout = Pieces("a", 64.0, 20.0)
    parameters[2].grad._layout = Pieces("b", 36.0, 1.0)
    total = clip_grad_norm_(parameters, 1.0, norm_type=order)
    want = 20.0 if order == np.inf else _norm(2, extra=100.0)
    np.testing.assert_allclose(total.item(), want, rtol=1e-6)
    for p, grad in zip(parameters, GRADS, strict=True):
        np.testing.assert_allclose(p.grad._storage.array, grad / (want + 1e-6), rtol=1e-6)


def test_clip_grad_value():
    parameters = _parameters()
    clip_grad_value_(parameters, 2.5)
    for p, grad in zip(parameters, GRADS, strict=True):
        np.testing.assert_array_equal(p.grad.numpy(), grad.clip(-2.5, 2.5))


def test_parameters_as_a_vector():
    parameters = [tp.ones(2, 3, requires_grad=True), tp.zeros((), requires_grad=True)]
    vector = parameters_to_vector(parameters)
    vector.sum().backward()
    assert vector.shape == (7,) and parameters[0].grad.shape == (2, 3)
    vector_to_parameters(tp.arange(7.0), parameters)
    np.testing.assert_array_equal(parameters[0].detach().numpy(), [[0, 1, 2], [3, 4, 5]])
    assert parameters[1].item() == 6 and parameters[0].requires_grad
    with pytest.raises(TypeError, match=r"expected tensorplay\.Tensor"):
        vector_to_parameters([1.0], parameters)
