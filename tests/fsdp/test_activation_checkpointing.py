"""Activation checkpointing inside, outside and across FSDP modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import (
    Block,
    Job,
    check_parity,
    close,
    local,
    on_ranks,
    random,
    seeded,
    whole,
)
from test_knobs import quiet_ranks
from test_programs import Program, captured, programs

import tensorplay as tp
import tensorplay.nn as nn
import tensorplay.nn.functional as F
from tensorplay.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from tensorplay.distributed.fsdp import fully_shard
from tensorplay.utils.checkpoint import checkpoint

Call = Callable[..., Any]


class Stack(nn.Module):
    """Three blocks; ``eager`` reads a value, so that the root runs as plain Python."""

    def __init__(self, eager: bool = False, checkpointed: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(5), Block(5), Block(5)])
        self.head = nn.Linear(5, 3)
        self.eager = eager
        self.checkpointed = checkpointed

    def run(self, block: Call, *args: Any) -> Any:
        return checkpoint(block, *args, use_reentrant=False) if self.checkpointed else block(*args)

    def forward(self, x: Any) -> Any:
        if self.eager:
            assert float(x.sum()) < 1e9
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


class Across(Stack):
    """One checkpoint over two FSDP modules."""

    def forward(self, x: Any) -> Any:
        if self.eager:
            assert float(x.sum()) < 1e9
        x = self.run(lambda v: self.blocks[1](self.blocks[0](v)), x)
        return self.head(self.blocks[2](x))


class InsideBlock(Block):
    """A checkpoint inside an FSDP module."""

    def forward(self, x: Any) -> Any:
        return x + checkpoint(lambda v: self.down(F.gelu(self.up(self.norm(v)))), x)


class Inside(Stack):
    def __init__(self, eager: bool = False) -> None:
        super().__init__(eager, checkpointed=False)
        self.blocks = nn.ModuleList([InsideBlock(5), InsideBlock(5), InsideBlock(5)])


def loss(model: Any, rank: int, step: int) -> Any:
    return model(random(4, 5, seed=10 * step + rank)).square().mean()


def shard(model: Any) -> Any:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@pytest.mark.parametrize("kind", [Stack, Across, Inside])
@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_parity(kind: Any, eager: bool) -> None:
    job = Job(lambda: kind(eager), loss, shard, steps=3)
    if eager:
        with pytest.warns(UserWarning, match="runs eagerly"):
            check_parity(job, 3)
    else:
        check_parity(job, 3)


@pytest.mark.parametrize("kind", [Stack, Across, Inside])
def test_there_are_no_extra_gathers(kind: Any) -> None:
    def step(rank: int) -> None:
        loss(shard(seeded(kind)), rank, 0).backward()

    forward, backward = programs(step)
    assert forward.counts == {"all_gather": 4}
    assert backward.counts == {"all_gather": 3, "reduce_scatter": 4}


def test_an_eager_root_gathers_each_block_once_in_forward_and_once_in_backward() -> None:
    def step(rank: int) -> None:
        loss(shard(seeded(lambda: Stack(eager=True))), rank, 0).backward()

    with captured() as launches, pytest.warns(UserWarning, match="runs eagerly"):
        on_ranks(2, step)
    gathers = sum(Program(*launch, 2).counts["all_gather"] for launch in launches)
    assert gathers == 2 * (3 + 3)  # on two ranks; the root's own gather is not in a program


def test_residuals_are_the_inputs_of_what_is_checkpointed() -> None:
    def largest(checkpointed: bool) -> int:
        def step(rank: int) -> None:
            model = seeded(lambda: Stack(checkpointed=checkpointed))
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model, reshard_after_forward=True)
            model(random(64, 5)).square().mean().backward()

        forward = programs(step)[0]
        kept = [size for size, _ in forward.outputs]
        return sum(kept)

    assert largest(True) <= 64 * (3 + 5 * 3) + 10  # the output, and each block's input
    assert largest(False) > 2 * largest(True)


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_dropout_masks_are_those_of_the_forward(eager: bool) -> None:
    class Drops(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            self.weight = nn.Parameter(tp.ones(40))
            self.checkpointed = checkpointed

        def forward(self, x: Any) -> Any:
            if eager:
                assert float(x.sum()) < 1e9

            def run(v: Any) -> Any:
                return F.dropout(v * self.weight, 0.5).exp()

            return checkpoint(run, x) if self.checkpointed else run(x)

    def step(rank: int) -> Any:
        found = []
        for checkpointed in (False, True):
            model = fully_shard(Drops(checkpointed))
            tp.manual_seed(3)
            out = model(tp.ones(2, 40))
            out.sum().backward()
            found += [local(out), whole(model.weight.grad), local(tp.rand(2))]
        return found

    for out, grad, drawn, *again in quiet_ranks(2, step):
        for a, b in zip((out, grad, drawn), again, strict=True):
            close(a, b)


def test_a13_two_forwards_before_one_backward() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Any) -> Any:
            return checkpoint(lambda v: self.b(tp.tanh(self.a(v))), x, use_reentrant=False)

    def product(model: Any, rank: int, step: int) -> Any:
        first, second = random(2, 5, seed=step + rank), random(2, 5, seed=step + rank + 50)
        return model(first).sum() * model(second).sum()

    def shard_pair(model: Any) -> Any:
        for layer in (model.a, model.b):
            fully_shard(layer)
        return fully_shard(model)

    check_parity(Job(Pair, product, shard_pair, steps=2), 2)


def test_statistics_are_updated_once() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(5)

        def forward(self, x: Any) -> Any:
            return checkpoint(self.norm, x)

    def step(rank: int) -> Any:
        model = fully_shard(Normed())
        model(random(8, 5, seed=rank)).square().sum().backward()
        return local(model.norm.running_mean), model.norm.num_batches_tracked.item()

    for rank, (mean, count) in enumerate(on_ranks(2, step)):
        close(mean, 0.1 * local(random(8, 5, seed=rank)).mean(0))
        assert count == 1


def test_wrapped_blocks_train_and_keep_names() -> None:
    def make() -> Any:
        model = Stack(checkpointed=False)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
        return model

    def run(rank: int) -> Any:
        model = shard(seeded(make))
        loss(model, rank, 0).backward()
        return list(model.state_dict()), whole(model.blocks[1].up.weight.grad)

    plain = seeded(lambda: Stack(checkpointed=False))
    sum(loss(plain, rank, 0) for rank in range(2)).backward()  # type: ignore[attr-defined]
    for names, grad in on_ranks(2, run):
        assert names == list(plain.state_dict())
        close(grad, local(plain.blocks[1].up.weight.grad) / 2)


@pytest.mark.parametrize("reshard", [2, False])
def test_blocks_of_an_eager_root_with_other_resharding(reshard: Any) -> None:
    def shard_blocks(model: Any) -> Any:
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=reshard)
        return fully_shard(model)

    with pytest.warns(UserWarning, match="runs eagerly"):
        check_parity(Job(lambda: Stack(eager=True), loss, shard_blocks, steps=2), 4)


def test_eager_modules_that_stay_unsharded_run_again() -> None:
    class Reads(Block):
        def forward(self, x: Any) -> Any:
            assert float(x.sum()) < 1e9
            return super().forward(x)

    def make() -> Any:
        model = Stack(eager=True)
        model.blocks = nn.ModuleList([Reads(5), Reads(5), Reads(5)])
        return model

    def shard_kept(model: Any) -> Any:
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=False)
        return fully_shard(model)

    with pytest.warns(UserWarning, match="runs eagerly"):
        check_parity(Job(make, loss, shard_kept, steps=2), 2)


def test_writes_to_an_argument_run_eagerly() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 5)

        def forward(self, x: Any) -> Any:
            y = self.inner(x)

            def double(v: Any) -> Any:
                return v.mul_(2)

            with tp.no_grad():
                return checkpoint(double, y.detach())

    def run(rank: int) -> Any:
        return local(fully_shard(seeded(Writes))(random(2, 5)))

    twin = local(seeded(Writes).inner(random(2, 5)))
    for out in quiet_ranks(2, run):
        np.testing.assert_allclose(out, 2 * twin, rtol=1e-6)
    assert math.prod(twin.shape) == 10
