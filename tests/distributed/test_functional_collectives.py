"""Collectives with gradients: the gradient is that of the sum of all ranks' losses (numpy)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorplay as tp
import tensorplay.distributed as dist
import tensorplay.distributed.nn as dnn
import tensorplay.nn as nn
from tensorplay.distributed import ReduceOp
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import fully_shard
from tensorplay.testing import ranks

W = 3
X = np.random.RandomState(0).randn(W, 6, 2)
WEIGHT = np.random.RandomState(1).randn(W, W * 6, 2)  # of each rank's loss

Fn = Callable[[Any, int], Any]
SUM, AVG, MAX, MIN, PRODUCT = (
    getattr(ReduceOp, n) for n in ("SUM", "AVG", "MAX", "MIN", "PRODUCT")
)


def parts(x: Any) -> list[Any]:
    return [x[2 * r : 2 * r + 2] for r in range(W)]


def joined(tensors: Any) -> Any:
    return tp.cat(list(tensors))


# name: the collective, and what it makes of everyone's inputs on each rank, in numpy
CASES: dict[str, tuple[Fn, Callable[[Any], list[Any]]]] = {
    "all_reduce": (lambda x, r: dnn.all_reduce(x), lambda xs: [xs.sum(0)] * W),
    "all_reduce_avg": (lambda x, r: dnn.all_reduce(x, AVG), lambda xs: [xs.mean(0)] * W),
    "all_reduce_max": (lambda x, r: dnn.all_reduce(x, MAX), lambda xs: [xs.max(0)] * W),
    "all_reduce_min": (lambda x, r: dnn.all_reduce(x, MIN), lambda xs: [xs.min(0)] * W),
    "all_reduce_prod": (lambda x, r: dnn.all_reduce(x, PRODUCT), lambda xs: [xs.prod(0)] * W),
    "reduce": (
        lambda x, r: dnn.reduce(x, 1),
        lambda xs: [xs.sum(0) if r == 1 else 0 * xs[0] for r in range(W)],
    ),
    "broadcast": (lambda x, r: dnn.broadcast(x, 2), lambda xs: [xs[2]] * W),
    "all_gather": (lambda x, r: joined(dnn.all_gather(x)), lambda xs: [np.concatenate(xs)] * W),
    "all_gather_tensor": (
        lambda x, r: dnn.all_gather_tensor(x, 1),
        lambda xs: [np.concatenate(xs, 1)] * W,
    ),
    "gather": (
        lambda x, r: joined(dnn.gather(x, 1)),
        lambda xs: [np.concatenate(xs) * (r == 1) for r in range(W)],
    ),
    "scatter": (
        lambda x, r: dnn.scatter(parts(x), 1),
        lambda xs: [xs[1][2 * r : 2 * r + 2] for r in range(W)],
    ),
    "reduce_scatter": (
        lambda x, r: dnn.reduce_scatter(x[:2], parts(x)),
        lambda xs: [xs.sum(0)[2 * r : 2 * r + 2] for r in range(W)],
    ),
    "reduce_scatter_tensor": (
        lambda x, r: dnn.reduce_scatter_tensor(x, AVG),
        lambda xs: [xs.mean(0)[2 * r : 2 * r + 2] for r in range(W)],
    ),
    "reduce_scatter_max": (
        lambda x, r: dnn.reduce_scatter_tensor(x, MAX),
        lambda xs: [xs.max(0)[2 * r : 2 * r + 2] for r in range(W)],
    ),
    "all_to_all": (
        lambda x, r: joined(dnn.all_to_all(parts(x), parts(x))),
        lambda xs: [np.concatenate(xs[:, 2 * r : 2 * r + 2]) for r in range(W)],
    ),
    "all_to_all_single": (
        lambda x, r: dnn.all_to_all_single(x, x),
        lambda xs: [np.concatenate(xs[:, 2 * r : 2 * r + 2]) for r in range(W)],
    ),
    "permute_tensor": (
        lambda x, r: dnn.permute_tensor(x, [1, 2, 0]),
        lambda xs: [xs[r - 1] for r in range(W)],
    ),
}


def weight_of(rank: int, shape: Any) -> Any:
    """The weights of a rank's loss, for an output of that shape."""
    return WEIGHT[rank].reshape(-1)[: int(np.prod(shape))].reshape(shape)


def numeric_gradient(everyone: Callable[[Any], list[Any]]) -> Any:
    """Of the sum of all ranks' losses, by central differences."""

    def total(xs: Any) -> float:
        return float(sum((o * weight_of(r, o.shape)).sum() for r, o in enumerate(everyone(xs))))

    grad, step = np.zeros_like(X), 1e-5
    for place in np.ndindex(*X.shape):
        moved = X.copy()
        moved[place] += step
        up = total(moved)
        moved[place] -= 2 * step
        grad[place] = (up - total(moved)) / (2 * step)
    return grad


class Inside(nn.Module):
    """Runs a collective inside a sharded module's program."""

    def __init__(self, fn: Fn) -> None:
        super().__init__()
        self.fn = fn
        self.scale = nn.Parameter(tp.ones(1, dtype=tp.float64))

    def forward(self, x: Any) -> Any:
        return self.fn(x * self.scale, 0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, compiled: bool) -> None:
    fn, everyone = CASES[name]

    def run(rank: int) -> Any:
        x = tp.tensor(X[rank], requires_grad=True)
        if compiled:
            module = fully_shard(Inside(fn))
            out = module(x)
            assert module._fsdp_state.calls.traces == 1
        else:
            out = fn(x, rank)
        loss = (out * tp.tensor(weight_of(rank, tuple(out.shape)))).sum()
        loss.backward()
        return out.detach().numpy(), x.grad.numpy()

    grad = numeric_gradient(everyone)
    for rank, (value, own) in enumerate(dist.run_ranks(run, W)):
        np.testing.assert_allclose(value, everyone(X)[rank], rtol=1e-12)
        np.testing.assert_allclose(own, grad[rank], atol=1e-7)


@ranks(4)
def test_sub_groups_along_an_axis_compile(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(tp.ones(2))

        def forward(self, x: Any) -> Any:
            return dnn.all_reduce(x * self.scale, group=mesh.get_group("shard"))

    model = fully_shard(Summed(), mesh=mesh)
    out = model(tp.full((1, 2), float(rank)))
    assert out.tolist() == [[1.0, 1.0] if rank < 2 else [5.0, 5.0]]


@ranks(3)
def test_other_groups_run_eagerly(rank: int) -> None:
    pair = dist.new_group([0, 1])

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(tp.ones(2))

        def forward(self, x: Any) -> Any:
            y = x * self.scale
            return dnn.all_reduce(y, group=pair) if rank < 2 else y

    model = fully_shard(Summed())
    out = model(tp.full((1, 2), float(rank)))
    assert out.tolist() == [[1.0, 1.0] if rank < 2 else [2.0, 2.0]]
    out.sum().backward()


@ranks(2)
def test_scalars_and_integers(rank: int) -> None:
    x = tp.tensor(float(rank + 1), requires_grad=True)
    total = dnn.all_reduce(x)
    assert total.shape == () and total.item() == 3
    (total * (rank + 1)).backward()
    assert x.grad.item() == 3  # d(1 * total + 2 * total)
    counts = dnn.all_reduce(tp.tensor([rank, 5]), MAX)
    assert counts.tolist() == [1, 5] and not counts.requires_grad


@ranks(2)
def test_what_does_not_fit_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="does not divide over 2 ranks"):
        dnn.reduce_scatter_tensor(tp.ones(3))
    with pytest.raises(ValueError, match="permutation of 2 ranks"):
        dnn.permute_tensor(tp.ones(3), [0, 0])
    with pytest.raises(ValueError, match="has no dim 2"):
        dnn.all_gather_tensor(tp.ones(3), 2)
    with pytest.raises(ValueError, match="equal size"):
        dnn.all_to_all_single(tp.ones(3), tp.ones(3), [1, 2], [2, 1])
    with pytest.raises(ValueError, match="one tensor per rank"):
        dnn.scatter([tp.ones(3)])
    x = tp.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        tp.autograd.grad(dnn.all_reduce(x).sum(), x, create_graph=True)


def test_without_a_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        dnn.all_reduce(tp.ones(1))
