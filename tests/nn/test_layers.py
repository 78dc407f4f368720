"""Layers: state, randomness, and what they do in training and evaluation."""

import math
import warnings

import numpy as np
import pytest

import tensorplay as tp
from tensorplay import nn
from tensorplay.nn import functional as F


def test_linear_starts_within_bound_and_keeps_dtype():
    layer = nn.Linear(16, 64, dtype=tp.float64)
    for p in layer.parameters():
        assert p.dtype is tp.float64 and p.requires_grad and p.is_leaf
        assert 0.8 / 4 < p.abs().max().item() <= 1 / 4
    x = tp.ones(2, 3, 16, dtype=tp.float64)
    want = np.ones((2, 3, 16)) @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
    np.testing.assert_allclose(layer(x).detach().numpy(), want)
    assert nn.Linear(3, 2, bias=False).bias is None


def test_layers_on_meta():
    for layer in (nn.Linear(3, 4), nn.Embedding(5, 4, padding_idx=0), nn.LayerNorm(4)):
        made = type(layer)(*_arguments(layer), device="meta")
        assert all(p.is_meta for p in made.parameters())


def _arguments(layer):
    if isinstance(layer, nn.LayerNorm):
        return (4,)
    return (3, 4) if isinstance(layer, nn.Linear) else (5, 4, 0)


def test_dropout_keeps_the_mean_and_its_mask_in_the_backward():
    tp.manual_seed(0)
    x = tp.ones(64, 64, requires_grad=True)
    out = F.dropout(x, 0.25)
    values = out.detach().numpy()
    assert set(np.unique(values)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs((values == 0).mean() - 0.25) < 0.03
    out.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), values)
    tp.manual_seed(0)
    np.testing.assert_array_equal(F.dropout(x, 0.25).detach().numpy(), values)
    assert not np.array_equal(F.dropout(x, 0.25).detach().numpy(), values)


def test_dropout_edges():
    x = tp.ones(5)
    assert F.dropout(x, 0.0) is x and F.dropout(x, 0.5, training=False) is x
    np.testing.assert_array_equal(F.dropout(x, 1.0).numpy(), np.zeros(5))
    assert F.dropout(x, 1.0, inplace=True) is x and x.sum().item() == 0
    layer = nn.Dropout(0.5).eval()
    assert layer(x) is x


@pytest.mark.parametrize("layer", [nn.ReLU, nn.SiLU, nn.Hardtanh, nn.ELU, nn.LeakyReLU])
def test_inplace_activation(layer):
    values = np.array([-2.0, -0.5, 0.5, 2.0])
    x = tp.tensor(values, requires_grad=True)
    y = x * 2
    out = layer(inplace=True)(y)
    assert out is y
    out.sum().backward()
    other = tp.tensor(values, requires_grad=True)
    layer()(other * 2).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), other.grad.numpy())
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        layer(inplace=True)(x)


def test_implicit_softmax_dim_warns():
    with pytest.warns(UserWarning, match="Implicit dimension choice for softmax"):
        out = nn.Softmax()(tp.ones(2, 4))
    np.testing.assert_allclose(out.numpy(), np.full((2, 4), 0.25))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_running_statistics(momentum):
    rng = np.random.default_rng(0)
    layer = nn.BatchNorm1d(3, momentum=momentum)
    mean, var = np.zeros(3), np.ones(3)
    for step in range(1, 4):
        x = rng.normal(size=(4, 3, 2)) * 3 + 1
        out = layer(tp.tensor(x, dtype=tp.float32))
        share = 1 / step if momentum is None else momentum
        mean = (1 - share) * mean + share * x.mean((0, 2))
        var = (1 - share) * var + share * x.var((0, 2)) * 8 / 7
        unit = (x - x.mean((0, 2), keepdims=True)) / np.sqrt(x.var((0, 2), keepdims=True) + 1e-5)
        np.testing.assert_allclose(out.detach().numpy(), unit, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.running_mean.numpy(), mean, rtol=1e-5)
    np.testing.assert_allclose(layer.running_var.numpy(), var, rtol=1e-5)
    assert layer.num_batches_tracked.item() == 3
    assert layer.num_batches_tracked.dtype is tp.int64
    assert not layer.running_mean.requires_grad and layer.running_mean.is_leaf
    layer.eval()
    out = layer(tp.tensor(x, dtype=tp.float32)).detach().numpy()
    want = (x - mean[:, None]) / np.sqrt(var[:, None] + 1e-5)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    assert list(layer.state_dict()) == [
        "weight", "bias", "running_mean", "running_var", "num_batches_tracked"
    ]  # fmt: skip
    layer.reset_running_stats()
    assert layer.num_batches_tracked.item() == 0 and layer.running_var.sum().item() == 3


def test_batch_norm_without_running_statistics():
    layer = nn.BatchNorm1d(2, track_running_stats=False, affine=False).eval()
    out = layer(tp.tensor([[1.0, 2.0], [3.0, 6.0]]))
    np.testing.assert_allclose(out.numpy(), [[-1, -1], [1, 1]], rtol=1e-4)
    assert not layer.state_dict()


def test_half_precision_norm_takes_float32_parameters():
    x = tp.randn(4, 8).bfloat16()
    out = nn.LayerNorm(8)(x)
    assert out.dtype is tp.bfloat16
    assert F.rms_norm(x, (8,), tp.ones(8)).dtype is tp.bfloat16
    layer = nn.BatchNorm1d(8)
    assert layer(x).dtype is tp.bfloat16 and layer.running_mean.dtype is tp.float32


def test_rms_norm_default_eps_is_that_of_the_dtype_computed_in():
    x = np.full((1, 4), 1e-4)
    want = 1e-4 / math.sqrt(1e-8 + np.finfo(np.float32).eps)
    for dtype, tolerance in ((tp.float32, 1e-5), (tp.float16, 1e-3)):
        out = nn.RMSNorm(4, dtype=dtype)(tp.tensor(x, dtype=dtype))
        np.testing.assert_allclose(out.detach().numpy(), want, rtol=tolerance)


def test_embedding_padding_and_pretrained_rows():
    layer = nn.Embedding(5, 3, padding_idx=1)
    assert layer.weight[1].abs().sum().item() == 0
    layer(tp.tensor([1, 2, 1])).sum().backward()
    np.testing.assert_array_equal(layer.weight.grad.numpy()[:, 0], [0, 0, 1, 0, 0])
    frozen = nn.Embedding.from_pretrained(tp.arange(6.0).reshape(3, 2))
    assert not frozen.weight.requires_grad
    np.testing.assert_array_equal(frozen(tp.tensor([2])).numpy(), [[4, 5]])


def test_embedding_max_norm_scales_used_rows_in_place():
    weight = tp.tensor([[3.0, 4.0], [6.0, 8.0], [0.3, 0.4]], requires_grad=True)
    out = F.embedding(tp.tensor([0, 2]), weight, max_norm=1.0)
    np.testing.assert_allclose(weight.detach().numpy(), [[0.6, 0.8], [6, 8], [0.3, 0.4]], rtol=1e-5)
    np.testing.assert_allclose(out.detach().numpy(), [[0.6, 0.8], [0.3, 0.4]], rtol=1e-5)


def test_embedding_refuses_sparse_gradients():
    with pytest.raises(ValueError, match="there are no sparse ones"):
        nn.Embedding(3, 2, sparse=True)


def test_one_hot():
    np.testing.assert_array_equal(F.one_hot(tp.tensor([0, 2])).numpy(), [[1, 0, 0], [0, 0, 1]])
    assert F.one_hot(tp.tensor([[0, 2]]), 4).shape == (1, 2, 4)


def test_losses_of_modules():
    x, y = tp.tensor([[1.0, 2.0, 4.0]]), tp.tensor([2])
    weight = tp.tensor([1.0, 1.0, 2.0])
    loss = nn.CrossEntropyLoss(weight=weight, reduction="sum")
    assert list(loss.state_dict()) == ["weight"]
    np.testing.assert_allclose(
        loss(x, y).item(), -2 * (4 - np.log(np.exp([1, 2, 4]).sum())), rtol=1e-6
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert nn.MSELoss(size_average=False).reduction == "sum"
    assert math.isnan(F.cross_entropy(x, tp.tensor([-100])).item())
    with pytest.warns(UserWarning, match="different to the input size"):
        assert nn.MSELoss()(x, tp.tensor([[1.0]])).item() == pytest.approx(10 / 3)


def test_attention_drops_probabilities_and_scales_the_rest():
    tp.manual_seed(1)
    q = tp.zeros(1, 2, 8, 4)
    v = tp.ones(1, 2, 64, 1, requires_grad=True)
    out = F.scaled_dot_product_attention(q, tp.zeros(1, 2, 64, 4), v, dropout_p=0.5)
    kept = out.detach().numpy() * 32
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-4)
    assert 24 < kept.mean() < 40 and len(np.unique(kept)) > 1
    out.sum().backward()
    np.testing.assert_allclose(v.grad.sum().item(), out.detach().sum().item(), rtol=1e-5)


def test_flatten_and_unflatten():
    x = tp.ones(2, 3, 4)
    assert nn.Flatten()(x).shape == (2, 12)
    assert nn.Unflatten(1, (3, -1))(nn.Flatten()(x)).shape == (2, 3, 4)
    with pytest.raises(TypeError, match="unflattened_size must be tuple of ints"):
        nn.Unflatten(1, (2.5,))
