"""``reshard_after_forward=<int>``: what stays after forward is shared by a few neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import (
    Job,
    Lm,
    Mlp,
    check_parity,
    close,
    lm_loss,
    local,
    mlp_loss,
    on_ranks,
    own_slice,
    random,
    seeded,
    sgd,
    shard_nested,
    train_twin,
    whole,
)
from test_knobs import EagerMlp, quiet_ranks
from test_programs import programs

import tensorplay as tp
import tensorplay.nn as nn
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import fully_shard


def shard_all(model: Any, within: int, **options: Any) -> Any:
    for layer in (model.inner, model.outer):
        fully_shard(layer, reshard_after_forward=within, **options)
    return fully_shard(model, **options)


@pytest.mark.parametrize("make", [Mlp, EagerMlp])
def test_a8_the_shapes_after_forward_and_after_backward(make: Any) -> None:
    def run(rank: int) -> Any:
        model = shard_all(seeded(make), 2)
        shapes = [tuple(model.inner.weight.shape)]
        loss = mlp_loss(model, rank, 0)
        shapes.append(tuple(model.inner.weight.shape))
        shown = model.inner.weight.full_tensor().detach().numpy()
        assert model.state_dict()["inner.weight"].shape[0] == (2, 2, 2, 1)[rank]
        loss = mlp_loss(model, rank, 0)
        loss.backward()
        shapes.append(tuple(model.inner.weight.shape))
        return shapes, shown, local(model.inner.weight.grad)

    twin = train_twin(Job(make, mlp_loss, steps=1), 4)
    for rank, (shapes, shown, grad) in enumerate(quiet_ranks(4, run)):
        # 7 rows: 2, 2, 2, 1 over four ranks; 4, 3, 4, 3 where two share them
        assert shapes == [((2, 2, 2, 1)[rank], 5), ((4, 3, 4, 3)[rank], 5), ((2, 2, 2, 1)[rank], 5)]
        np.testing.assert_array_equal(shown, local(seeded(Mlp).inner.weight))
        close(grad, own_slice(twin.grads[0]["inner.weight"], 4, rank))


@pytest.mark.parametrize("within", [2, 3])
def test_parity_over_steps(within: int) -> None:
    def shard(model: Any) -> Any:
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=within)
        return fully_shard(model, reshard_after_forward=within)

    check_parity(Job(Lm, lm_loss, shard), 6)


def test_parity_on_a_hybrid_mesh() -> None:
    def run(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))
        model = shard_all(seeded(Mlp), 2, mesh=mesh)
        optimizer = sgd(model.parameters())
        for step in range(3):
            mlp_loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [whole(p) for p in model.parameters()]

    twin = train_twin(Job(Mlp, mlp_loss, steps=3), 8)
    for values in on_ranks(8, run):
        for value, wanted in zip(values, twin.params.values(), strict=True):
            close(value, wanted, atol=1e-5)


def test_backward_gathers_among_the_neighbours_only() -> None:
    def step(rank: int) -> None:
        lm_loss(shard_nested(seeded(Lm), reshard_after_forward=2), rank, 0).backward()

    forward, backward = programs(step, 4)
    assert "replica_groups = dense<[[0, 1, 2, 3]]>" in forward.text
    assert "[[0, 1], [2, 3]]" not in forward.text
    assert "[[0, 1], [2, 3]]" in backward.text
    assert backward.counts["all_gather"] == 3


def test_the_default_is_the_ends_of_the_range() -> None:
    def run(rank: int) -> Any:
        found = []
        for value in (1, 2):
            model = fully_shard(seeded(Mlp), reshard_after_forward=value)
            model(random(2, 5))
            found.append(tuple(model.inner.weight.shape))
        return found

    assert quiet_ranks(2, run)[0] == [(7, 5), (4, 5)]


@pytest.mark.parametrize("value", [0, 3, -2, 8, "2", 2.0])
def test_what_is_no_factor_is_refused(value: Any) -> None:
    def run(rank: int) -> None:
        model = seeded(Mlp)
        with pytest.raises(ValueError, match="reshard_after_forward"):
            fully_shard(model, reshard_after_forward=value)
        assert type(model) is Mlp

    on_ranks(4, run)


def test_an_optimizer_made_after_a_forward_trains_and_a_step_reshards() -> None:
    def run(rank: int) -> Any:
        model = shard_all(seeded(Mlp), 2)
        with tp.no_grad():
            model(random(2, 5))
        optimizer = sgd(model.parameters())
        mlp_loss(model, rank, 0).backward()
        optimizer.step()
        with tp.no_grad():
            model(random(2, 5))
        assert model.inner.weight.shape[0] > 2
        for p in model.parameters():
            assert p.grad is not None
        optimizer.step()
        return tuple(model.inner.weight.shape), isinstance(model.inner.weight, nn.Parameter)

    assert on_ranks(4, run)[0] == ((2, 5), True)
