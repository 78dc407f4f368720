"""One thread drives all devices of a mesh: parity with the unsharded twin on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import (
    Lm,
    Mlp,
    adamw,
    close,
    ids,
    local,
    no_warnings,
    random,
    seeded,
    sgd,
    shard_nested,
    whole,
)

import tensorplay as tp
import tensorplay.distributed as dist
import tensorplay.nn as nn
import tensorplay.nn.functional as F
from tensorplay.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tensorplay.nn.utils import clip_grad_norm_

MESHES = [(1,), (2,), (3,), (4,), (8,), (2, 2), (2, 4), (4, 1), (1, 4)]


def check_training(
    make: Callable[[], Any],
    loss: Callable[[Any, int], Any],
    mesh: Any,
    shard: Callable[..., Any] = fully_shard,
    optimizer: Any = adamw,
    before_step: Callable[[Any], Any] = lambda model: None,
    **options: Any,
) -> Any:
    """Four steps of the sharded model and of its twin; returns the sharded model."""
    twin, model = seeded(make), shard(seeded(make), mesh=mesh, **options)
    optimizers = [optimizer(m.parameters()) for m in (twin, model)]
    for step in range(4):
        losses = [loss(m, step) for m in (twin, model)]
        for value in losses:
            value.backward()
        close(local(losses[1]), local(losses[0]), "loss")
        norms = [before_step(m) for m in (twin, model)]
        if norms[0] is not None:
            close(local(norms[1]), local(norms[0]), "norm")
        for (name, p), q in zip(twin.named_parameters(), model.parameters(), strict=True):
            close(whole(q.grad), local(p.grad), f"grad of {name} at step {step}")
        for o in optimizers:
            o.step()
            o.zero_grad()
    for (name, p), q in zip(twin.named_parameters(), model.parameters(), strict=True):
        close(whole(q), local(p), name, atol=1e-5)
    return model


def joined_loss(model: Any, step: int) -> Any:
    """Computed on the joined output."""
    return F.mse_loss(model(random(24, 5, seed=step)), random(24, 3, seed=90 + step))


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_losses_on_the_joined_output(shape: Any) -> None:
    mesh = init_device_mesh("cpu", shape)
    with no_warnings():
        check_training(
            Mlp, joined_loss, mesh, before_step=lambda m: clip_grad_norm_(m.parameters(), 0.1)
        )


@pytest.mark.parametrize("world", [2, 8])
def test_losses_of_the_ranks_are_averaged(world: int) -> None:
    def loss(model: Any, step: int) -> Any:
        return model(ids(11, 8, 4, seed=step), with_loss=True)

    check_training(Lm, loss, init_device_mesh("cpu", (world,)), shard_nested, sgd)


def test_accumulation_without_synchronisation() -> None:
    mesh = init_device_mesh("cpu", (4,))
    twin, model = seeded(Mlp), fully_shard(seeded(Mlp), mesh=mesh)
    for step in range(3):
        joined_loss(twin, step).backward()
        model.set_requires_gradient_sync(step == 2)
        joined_loss(model, step).backward()
        assert (model.inner.weight.grad is None) == (step < 2)
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        close(whole(q.grad), local(p.grad))


class Branch(Mlp):
    """Runs eagerly."""

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        return y if y.sum() > -1e9 else x


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("nested", [False, True])
def test_eager_calls_run_once_for_each_rank(shape: Any, nested: bool) -> None:
    def shard(model: Any, mesh: Any) -> Any:
        if nested:
            fully_shard(model.inner, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    with pytest.warns(UserWarning, match="runs eagerly"):
        check_training(Branch, joined_loss, init_device_mesh("cpu", shape), shard)


def test_an_eager_call_sees_the_rows_of_a_rank() -> None:
    seen = []

    class Looks(Mlp):
        def forward(self, x: Any) -> Any:
            seen.append((tuple(x.shape), x[0, 0].item()))
            return super().forward(x)

    model = fully_shard(seeded(Looks), mesh=init_device_mesh("cpu", (4,)))
    x = tp.arange(8.0).view(8, 1).expand(8, 5).clone()
    with pytest.warns(UserWarning, match="runs eagerly"):
        out = model(x)
    assert seen[-4:] == [((2, 5), 2.0 * rank) for rank in range(4)]
    close(local(out), local(seeded(Mlp)(x)))


def test_arguments_are_split_replicated_or_given_to_all() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(tp.ones(5))

        def forward(self, x: Any, table: Any, scale: Any, options: Any) -> Any:
            return {
                "rows": x * self.weight * scale + options["bias"],
                "shapes": (x.shape[0], table.shape[0], options["bias"].shape[0]),
                "mean": (x * self.weight).mean(),
                "table": table.sum() * self.weight.sum(),
            }

    model = fully_shard(Takes(), mesh=init_device_mesh("cpu", (4,)))
    x = random(8, 5).requires_grad_()
    table = tp.ones(8, requires_grad=True)
    scale, bias = tp.tensor(2.0, requires_grad=True), random(8, 5, seed=1)
    out = model(x, dist.replicate(table), scale, {"bias": bias})
    assert out["shapes"] == (2, 8, 2)
    close(local(out["rows"]), local(x) * 2 + local(bias))
    close(out["mean"].item(), local(x).mean())
    close(out["table"].item(), 8 * 5)
    (out["rows"].sum() + out["mean"] + out["table"]).backward()
    close(local(x.grad), np.full((8, 5), 2 + 1 / 40))
    close(scale.grad.item(), local(x).sum())
    close(local(table.grad), np.full(8, 5.0))


def test_a_batch_that_does_not_divide_is_refused_before_anything_runs() -> None:
    model = fully_shard(seeded(Mlp), mesh=init_device_mesh("cpu", (4,)))
    with pytest.raises(ValueError, match=r"6 rows.*\(6, 5\).*4 ranks.*replicate"):
        model(random(6, 5))
    assert model(random(8, 5)).shape == (8, 3)


def test_values_are_reached_as_the_whole_or_rank_by_rank() -> None:
    mesh = init_device_mesh("cpu", (4,))
    model, twin = fully_shard(seeded(Mlp), mesh=mesh), seeded(Mlp)
    p, value = model.inner.weight, local(twin.inner.weight)
    assert tuple(p.shape) == (2, 5) and p.global_shape == (7, 5)
    shards = p.shards
    assert [tuple(s.shape) for s in shards] == [(2, 5), (2, 5), (2, 5), (1, 5)]
    np.testing.assert_array_equal(np.concatenate([np.asarray(s) for s in shards]), value)
    np.testing.assert_array_equal(whole(p), value)
    with tp.no_grad():
        doubled = (p * 2 + 1).exp()
        close(whole(doubled), np.exp(value * 2 + 1))
        close(doubled.sum().item(), np.exp(value * 2 + 1).sum())
        p.mul_(3).add_(p)
        close(whole(p), 6 * value)
        for read in (lambda: p.numpy(), lambda: repr(p), lambda: p.to_local(), lambda: p[0]):
            with pytest.raises(RuntimeError, match=r"full_tensor\(\).*\.shards|\.shards.*full_ten"):
                read()


def test_mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=tp.bfloat16, reduce_dtype=tp.float32)
    model = fully_shard(seeded(Mlp), mesh=init_device_mesh("cpu", (4,)), mp_policy=policy)
    out = model(random(8, 5))
    assert out.dtype is tp.bfloat16
    out.float().square().mean().backward()
    twin = seeded(Mlp)
    twin(random(8, 5)).square().mean().backward()
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        assert q.grad.dtype is tp.float32
        close(whole(q.grad), local(p.grad), atol=0.02)


def test_state_dicts_move_between_controller_and_plain_module() -> None:
    full = StateDictOptions(full_state_dict=True)
    models = [fully_shard(seeded(Mlp), mesh=init_device_mesh("cpu", s)) for s in ((4,), (2, 3))]
    optimizers = [adamw(m.parameters()) for m in models]
    for step in range(2):
        joined_loss(models[0], step).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    saved, state = get_state_dict(models[0], optimizers[0], options=full)
    set_state_dict(
        models[1], optimizers[1], model_state_dict=saved, optim_state_dict=state, options=full
    )
    plain = seeded(Mlp)
    plain.load_state_dict(saved)
    for model, optimizer in zip(models, optimizers, strict=True):
        joined_loss(model, 5).backward()
        optimizer.step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        close(whole(p), whole(q), atol=1e-6)
    assert all(tuple(p.shape) == tuple(q.global_shape) for p, q in zip(
        plain.parameters(), models[0].parameters(), strict=True))  # fmt: skip


def test_sharded_state_dicts_load_in_place() -> None:
    model = fully_shard(seeded(Mlp), mesh=init_device_mesh("cpu", (4,)))
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    before = whole(model.outer.weight)
    with tp.no_grad():
        model.outer.weight.zero_()
    model.load_state_dict(saved)
    np.testing.assert_array_equal(whole(model.outer.weight), before)


def test_batch_norm_sees_each_ranks_rows() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(5)

        def forward(self, x: Any) -> Any:
            return self.norm(x)

    model = fully_shard(Normed(), mesh=init_device_mesh("cpu", (4,)))
    x = random(16, 5)
    out = local(model(x))
    for rank in range(4):
        rows = local(x)[4 * rank : 4 * rank + 4]
        want = (rows - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5)
        close(out[4 * rank : 4 * rank + 4], want, atol=1e-5)
    close(local(model.norm.running_mean), 0.1 * local(x)[:4].mean(0))
    assert model.norm.num_batches_tracked.item() == 1


@pytest.mark.parametrize("eager", [False, True])
def test_dropout_differs_between_ranks_and_equals_that_of_rank_threads(eager: bool) -> None:
    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(tp.ones(50))

        def forward(self, x: Any) -> Any:
            if eager:
                x.sum().item()
            return F.dropout(x * self.weight, 0.5)

    def run(rank: int) -> Any:
        model = fully_shard(Drop())
        tp.manual_seed(7)
        return np.stack([local(model(tp.ones(2, 50))) for _ in range(2)])

    model = fully_shard(Drop(), mesh=init_device_mesh("cpu", (4,)))
    tp.manual_seed(7)
    own = [local(model(tp.ones(8, 50))) for _ in range(2)]
    by_rank = dist.run_ranks(run, 4)
    for call in range(2):
        np.testing.assert_array_equal(own[call], np.concatenate([r[call] for r in by_rank]))
    assert len({own[0][2 * r : 2 * r + 2].tobytes() for r in range(4)}) == 4


def test_a_model_without_a_mesh_stays_on_one_rank() -> None:
    model = fully_shard(seeded(Mlp))
    assert tuple(model.inner.weight.shape) == (7, 5)


def test_unshard_shows_the_whole() -> None:
    model = fully_shard(seeded(Mlp), mesh=init_device_mesh("cpu", (4,)))
    model.unshard()
    assert tuple(model.inner.weight.shape) == (7, 5)
    x = random(8, 5)
    close(local(model.forward(x)), local(seeded(Mlp)(x)))
    close(local(model(x)), local(seeded(Mlp)(x)))
    model.reshard()
    assert tuple(model.inner.weight.shape) == (2, 5)


def test_ignored_parameters_get_the_gradient_of_the_whole_batch() -> None:
    def shard(model: Any, mesh: Any) -> Any:
        return fully_shard(model, mesh=mesh, ignored_params={model.outer.weight})

    model = check_training(Mlp, joined_loss, init_device_mesh("cpu", (4,)), shard)
    assert tuple(model.outer.weight.shape) == (3, 7)
