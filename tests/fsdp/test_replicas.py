"""Replicas that are made equal, and a check that finds those that are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import Mlp, local, mlp_loss, on_ranks, seeded, sgd, whole

import tensorplay as tp
import tensorplay.nn as nn
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import broadcast_module_states, check_replicas, fully_shard
from tensorplay.testing import ranks


class WithBuffer(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", tp.randn(3))


def of_rank(rank: int) -> Any:
    tp.manual_seed(rank)
    return WithBuffer()


@pytest.mark.parametrize("how", ["call", "option"])
@pytest.mark.parametrize("src", [0, 1])
def test_all_ranks_start_from_one(how: str, src: int) -> None:
    def run(rank: int) -> Any:
        model = of_rank(rank)
        if how == "call":
            broadcast_module_states(model, src=src)
            fully_shard(model)
        else:
            fully_shard(model, sync_module_states=True)
        return whole(model.inner.weight), local(model.table)

    twin = of_rank(src if how == "call" else 0)
    for weight, table in on_ranks(3, run):
        np.testing.assert_array_equal(weight, local(twin.inner.weight))
        np.testing.assert_array_equal(table, local(twin.table))


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4), (2, 4)], ids=str)
def test_replicas_are_equal_bit_for_bit_after_steps(shape: Any) -> None:
    def run(rank: int) -> None:
        model = fully_shard(seeded(Mlp), mesh=init_device_mesh("cpu", shape))
        optimizer = sgd(model.parameters())
        for step in range(3):
            mlp_loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            check_replicas(model)

    on_ranks(int(np.prod(shape)), run)


@ranks(4)
def test_replicas_that_differ_are_named_on_every_rank(rank: int) -> None:
    tp.manual_seed(rank // 2)  # the two replicas start differently
    model = Mlp()
    ignored = model.outer.bias
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2)), ignored_params={ignored})
    with pytest.raises(RuntimeError, match=r"'inner\.weight' on rank 2.*broadcast_module_states"):
        check_replicas(model)
    with pytest.raises(RuntimeError, match=r"'outer\.bias' on rank 2"):
        check_replicas(model)
    broadcast_module_states(model)
    check_replicas(model)
    with tp.no_grad():
        if rank == 3:
            model.inner.weight.to_local()[0, 0] += 1e-6
    with pytest.raises(RuntimeError, match=r"^replicas differ: 'inner\.weight' on rank 3\. "):
        check_replicas(model)


@ranks(2)
def test_buffers_are_compared_when_asked(rank: int) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: Any) -> Any:
            return self.norm(x)

    model = fully_shard(Normed())
    model(tp.randn(4, 2) + rank)
    check_replicas(model)
    with pytest.raises(RuntimeError, match="running_mean"):
        check_replicas(model, buffers=True)


def test_one_rank_has_nothing_to_compare() -> None:
    model = fully_shard(seeded(Mlp))
    broadcast_module_states(model)
    check_replicas(model)
