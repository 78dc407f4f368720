"""The knobs of FSDPModule, for compiled forwards and for forwards that run as plain Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import (
    Job,
    Mlp,
    close,
    local,
    mlp_loss,
    on_ranks,
    own_slice,
    seeded,
    sgd,
    train_twin,
    whole,
)

import tensorplay as tp
import tensorplay.nn as nn
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import fully_shard, share_comm_ctx


class EagerMlp(Mlp):
    """Reads a value, so that its Python runs at every call."""

    def forward(self, x: Any) -> Any:
        assert float(x.sum()) < 1e9
        return super().forward(x)


KINDS = [Mlp, EagerMlp]


def summed_loss(model: Any, rank: int, step: int) -> Any:
    """Of two micro-batches."""
    return mlp_loss(model, rank, 0) + mlp_loss(model, rank, 1)


def quiet_ranks(world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return on_ranks(world, fn, *args)


@pytest.mark.parametrize("make", KINDS)
def test_without_resharding_after_backward_the_wholes_stay_until_the_shards_change(
    make: Any,
) -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(make))
        model.set_reshard_after_backward(False)
        optimizer = sgd(model.parameters())
        shapes = []
        for step in range(3):
            optimizer.zero_grad()
            mlp_loss(model, rank, step).backward()
            shapes.append(tuple(model.inner.weight.shape))
            optimizer.step()
        model.reshard()
        shapes.append(tuple(model.inner.weight.shape))
        return shapes, {n: whole(p) for n, p in model.named_parameters()}

    twin = train_twin(Job(Mlp, mlp_loss, steps=3), 2)
    for rank, (shapes, params) in enumerate(quiet_ranks(2, run)):
        assert shapes == [(7, 5)] * 3 + [(4 - rank, 5)]
        for name, param in params.items():
            close(param, twin.params[name], name, atol=1e-5)


@pytest.mark.parametrize("make", KINDS)
def test_without_all_reduce_replicas_wait_for_the_last_micro_batch(make: Any) -> None:
    def run(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(seeded(make), mesh=mesh)
        model.set_requires_all_reduce(False)
        mlp_loss(model, rank, 0).backward()
        early = [p.grad for p in model.parameters()]
        model.set_requires_all_reduce(True)
        mlp_loss(model, rank, 1).backward()
        return early, {n: local(p.grad) for n, p in model.named_parameters()}

    twin = train_twin(Job(Mlp, summed_loss, steps=1), 4)
    for rank, (early, grads) in enumerate(quiet_ranks(4, run)):
        assert all(grad is None for grad in early)
        for name, grad in grads.items():
            close(grad, own_slice(twin.grads[0][name], 2, rank % 2), name)


@pytest.mark.parametrize("make", KINDS)
def test_divide_factors_of_single_groups(make: Any) -> None:
    def run(rank: int) -> Any:
        model = seeded(make)
        fully_shard(model.inner)
        fully_shard(model)
        model.inner.set_gradient_divide_factor(1.0)
        model.set_gradient_divide_factor(4.0)
        mlp_loss(model, rank, 0).backward()
        return {n: whole(p.grad) for n, p in model.named_parameters()}

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2)
    for grads in quiet_ranks(2, run):
        close(grads["inner.weight"], 2 * twin.grads[0]["inner.weight"])
        close(grads["outer.weight"], 0.5 * twin.grads[0]["outer.weight"])


@pytest.mark.parametrize("make", KINDS)
def test_gradient_sync_of_a_single_group(make: Any) -> None:
    def run(rank: int) -> Any:
        model = seeded(make)
        fully_shard(model.inner)
        fully_shard(model)
        model.set_requires_gradient_sync(False, recurse=False)
        mlp_loss(model, rank, 0).backward()
        first = {n: local(p.grad) for n, p in model.named_parameters()}
        model.set_requires_gradient_sync(True)
        mlp_loss(model, rank, 1).backward()
        return first, {n: local(p.grad) for n, p in model.named_parameters()}

    once = train_twin(Job(Mlp, mlp_loss, steps=1), 2).grads[0]
    both = train_twin(Job(Mlp, summed_loss, steps=1), 2).grads[0]
    for rank, (first, second) in enumerate(quiet_ranks(2, run)):
        assert first["outer.weight"] is None
        close(first["inner.weight"], own_slice(once["inner.weight"], 2, rank))
        for name, grad in second.items():
            close(grad, own_slice(both[name], 2, rank), name)


@pytest.mark.parametrize("make", KINDS)
def test_unused_parameters_get_zeros_when_asked(make: Any) -> None:
    class Spare(make):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(4, 4)

    def run(rank: int) -> Any:
        found = []
        for wanted in (False, True):
            model = fully_shard(seeded(Spare))
            model.set_reduce_scatter_unused_params(wanted)
            mlp_loss(model, rank, 0).backward()
            found.append((local(model.spare.weight.grad), local(model.inner.weight.grad)))
        return found

    twin = train_twin(Job(Spare, mlp_loss, steps=1), 2)
    for rank, ((none, used), (zeros, same)) in enumerate(quiet_ranks(2, run)):
        assert none is None
        np.testing.assert_array_equal(zeros, np.zeros((2, 4)))
        np.testing.assert_array_equal(used, same)
        close(used, own_slice(twin.grads[0]["inner.weight"], 2, rank))


def test_resharding_of_single_groups() -> None:
    def run(rank: int) -> Any:
        model = seeded(Mlp)
        fully_shard(model.inner)
        fully_shard(model)
        model.set_reshard_after_forward(True, recurse=False)
        model.inner.set_reshard_after_forward(False)
        loss = mlp_loss(model, rank, 0)
        shapes = model.inner.weight.shape[0], model.outer.weight.shape[0]
        loss.backward()
        return shapes, local(model.inner.weight.grad)

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2)
    for rank, (shapes, grad) in enumerate(on_ranks(2, run)):
        assert shapes == (7, 2 - rank)
        close(grad, own_slice(twin.grads[0]["inner.weight"], 2, rank))


def test_knobs_that_have_no_counterpart_here_are_accepted() -> None:
    model = fully_shard(seeded(Mlp))
    model.set_is_last_backward(False)
    model.set_is_last_backward(True)
    model.set_force_sum_reduction_for_comms(True)
    model.set_post_optim_event(None)
    share_comm_ctx([model, fully_shard(Mlp())])
    mlp_loss(model, 0, 0).backward()
    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 1)
    close(local(model.inner.weight.grad), twin.grads[0]["inner.weight"])
    with pytest.raises(ValueError, match="FSDPModule"):
        share_comm_ctx([Mlp()])  # type: ignore[list-item]


def test_backward_does_not_gather_where_that_is_forbidden() -> None:
    def run(rank: int) -> None:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        ids = tp.tensor([0, 3, 3])
        model[0].set_unshard_in_backward(False)
        model(ids).sum().backward()
        assert model[0].weight.grad is not None
        model[1].set_unshard_in_backward(False)
        with pytest.raises(RuntimeError, match=r"set_unshard_in_backward\(False\)"):
            model(ids).sum().backward()

    on_ranks(2, run)
