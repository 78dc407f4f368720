"""Initialisers: distributions, and that they record nothing."""

import math

import numpy as np
import pytest

import tensorplay as tp
from tensorplay import nn
from tensorplay.nn import init

SHAPE = (64, 96)


def _drawn(fill, **options):
    tp.manual_seed(3)
    p = nn.Parameter(tp.empty(SHAPE))
    assert fill(p, **options) is p
    assert p.is_leaf and p.requires_grad
    return p.detach().numpy()


@pytest.mark.parametrize(
    ("fill", "options", "std", "kind"),
    [
        (init.uniform_, {"a": -2.0, "b": 2.0}, 2 / math.sqrt(3), "uniform"),
        (init.normal_, {"std": 0.02}, 0.02, "normal"),
        (init.xavier_uniform_, {"gain": 2.0}, 2 * math.sqrt(2 / 160), "uniform"),
        (init.xavier_normal_, {}, math.sqrt(2 / 160), "normal"),
        (init.kaiming_uniform_, {"a": math.sqrt(5)}, 1 / math.sqrt(3 * 96), "uniform"),
        (
            init.kaiming_normal_,
            {"mode": "fan_out", "nonlinearity": "relu"},
            math.sqrt(2 / 64),
            "normal",
        ),
    ],
)
def test_distribution(fill, options, std, kind):
    values = _drawn(fill, **options)
    assert abs(values.mean()) < 0.05 * std
    assert values.std() == pytest.approx(std, rel=0.04)
    reach = np.abs(values).max() / std
    assert (reach <= math.sqrt(3) + 1e-4) if kind == "uniform" else reach > 3


def test_trunc_normal_stays_inside():
    values = _drawn(init.trunc_normal_, mean=0.5, std=2.0, a=-1.0, b=2.0)
    assert values.min() >= -1 and values.max() <= 2 and values.std() > 0.5
    with pytest.warns(UserWarning, match="more than 2 std"):
        init.trunc_normal_(tp.empty(2), mean=9.0)


def test_constants_and_eye():
    assert (_drawn(init.ones_) == 1).all() and (_drawn(init.zeros_) == 0).all()
    assert (_drawn(init.constant_, val=0.3) == np.float32(0.3)).all()
    np.testing.assert_array_equal(_drawn(init.eye_), np.eye(*SHAPE))


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 2, 3)])
def test_orthogonal(shape):
    q = init.orthogonal_(tp.empty(shape), gain=2.0).numpy().reshape(shape[0], -1)
    small = q @ q.T if q.shape[0] <= q.shape[1] else q.T @ q
    np.testing.assert_allclose(small, 4 * np.eye(len(small)), atol=1e-5)


def test_sparse():
    values = _drawn(init.sparse_, sparsity=0.3, std=1.0)
    np.testing.assert_array_equal((values == 0).sum(axis=0), math.ceil(0.3 * 64))


def test_gain():
    assert init.calculate_gain("tanh") == 5 / 3
    assert init.calculate_gain("leaky_relu", 2) == math.sqrt(2 / 5)


def test_generator_and_meta():
    a = init.normal_(tp.empty(3), generator=tp.Generator().manual_seed(5)).numpy()
    b = init.normal_(tp.empty(3), generator=tp.Generator().manual_seed(5)).numpy()
    np.testing.assert_array_equal(a, b)
    assert init.trunc_normal_(tp.empty(2, device="meta")).is_meta
    with pytest.warns(UserWarning, match="zero-element tensors is a no-op"):
        init.kaiming_uniform_(tp.empty(0, 3))
