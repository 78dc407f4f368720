"""Loss scaling: values against plain training, the scale's course, and agreement of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorplay as tp
import tensorplay.nn as nn
from tensorplay.amp import GradScaler
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tensorplay.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from tensorplay.testing import ranks


def make() -> Any:
    tp.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def data(seed: int = 0) -> Any:
    return tp.tensor(np.random.RandomState(seed).randn(6, 4).astype(np.float32))


@pytest.mark.parametrize("enabled", [True, False])
def test_training_is_that_without_a_scaler(enabled: bool) -> None:
    plain, scaled = make(), make()
    scaler = GradScaler(init_scale=2.0**10, enabled=enabled)
    optimizers = [tp.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, scaled)]
    for step in range(3):
        plain(data(step)).square().mean().backward()
        scaler.scale(scaled(data(step)).square().mean()).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        scaler.unscale_(optimizers[1])
        nn.utils.clip_grad_norm_(scaled.parameters(), 0.1)
        optimizers[0].step()
        scaler.step(optimizers[1])
        scaler.update()
        for o in optimizers:
            o.zero_grad()
    for p, q in zip(plain.parameters(), scaled.parameters(), strict=True):
        np.testing.assert_allclose(p.detach().numpy(), q.detach().numpy(), rtol=1e-5)


def one_step(scaler: GradScaler, optimizer: Any, p: Any, grad: float) -> bool:
    """Whether the step changed ``p``."""
    before = p.detach().numpy()
    p.grad = tp.full(tuple(p.shape), grad)
    scaler.step(optimizer)
    scaler.update()
    return bool((p.detach().numpy() != before).any())


def test_the_scale_grows_and_halves_as_in_torch() -> None:
    p = nn.Parameter(tp.ones(2))
    optimizer = tp.optim.SGD([p], lr=0.1)
    scaler = GradScaler(init_scale=8.0, growth_interval=2)
    course = []
    for grad in (1.0, 1.0, 1.0, np.inf, 1.0, np.nan, 1.0, 1.0):
        stepped = one_step(scaler, optimizer, p, grad)
        assert stepped == bool(np.isfinite(grad))
        course.append(scaler.get_scale())
    assert course == [8, 16, 16, 8, 8, 4, 4, 8]
    other = GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    scaler.update(3.0)
    assert scaler.get_scale() == 3.0


def test_mistakes_are_refused_in_torchs_words() -> None:
    p = nn.Parameter(tp.ones(2))
    optimizer, scaler = tp.optim.SGD([p], lr=0.1), GradScaler()
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()
    with pytest.raises(AssertionError, match="for this optimizer"):
        scaler.step(optimizer)
    scaler = GradScaler()
    p.grad = tp.ones(2)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called on this optimizer"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(optimizer)
    half = nn.Parameter(tp.ones(2, dtype=tp.float16))
    half.grad = tp.ones(2, dtype=tp.float16)
    with pytest.raises(ValueError, match="FP16"):
        scaler.unscale_(tp.optim.SGD([half], lr=0.1))
    with pytest.raises(RuntimeError, match="Closure"):
        scaler.step(optimizer, closure=lambda: None)
    with pytest.raises(RuntimeError, match="state dict is empty"):
        scaler.load_state_dict(GradScaler(enabled=False).state_dict())
    with pytest.raises(AssertionError, match="growth factor"):
        GradScaler(growth_factor=1.0)


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", [GradScaler, ShardedGradScaler])
def test_an_inf_on_one_rank_skips_the_step_on_all(kind: Any, shape: Any) -> None:
    world = int(np.prod(shape))

    @ranks(world)
    def run(rank: int) -> None:
        model = fully_shard(make(), mesh=init_device_mesh("cpu", shape))
        optimizer = tp.optim.AdamW(model.parameters(), lr=0.1)
        scaler = kind(init_scale=4.0)
        for step, bad_rank in enumerate((None, 1, None)):
            before = [p.detach().full_tensor() for p in model.parameters()]
            loss = model(data(step)).square().mean()
            scaler.scale(loss * (np.inf if rank == bad_rank else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = [p.detach().full_tensor() for p in model.parameters()]
            changed = any(not tp.equal(a, b) for a, b in zip(before, after, strict=True))
            assert changed == (bad_rank is None)
        assert scaler.get_scale() == 2.0

    run()


@ranks(2)
def test_ranks_agree_on_gradients_of_ignored_parameters(rank: int) -> None:
    model = make()
    ignored = model[2].bias
    fully_shard(model, ignored_params={ignored})
    optimizer = tp.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(init_scale=2.0)
    scaler.scale(model(data()).sum()).backward()
    if rank == 1:
        ignored.grad.fill_(float("nan"))
    before = model[0].weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert tp.equal(model[0].weight.detach(), before) and scaler.get_scale() == 1.0


@ranks(2)
def test_float16_training_with_masters_in_float32(rank: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=tp.float16, reduce_dtype=tp.float32)
    model, twin = fully_shard(make(), mp_policy=policy), make()
    optimizers = [tp.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    scaler = ShardedGradScaler(init_scale=2.0**8)
    for step in range(3):
        scaler.scale(model(data(step)).float().square().mean()).backward()
        scaler.step(optimizers[0])
        scaler.update()
        twin(data(step)).square().mean().backward()
        optimizers[1].step()
        for o in optimizers:
            o.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        np.testing.assert_allclose(
            p.detach().full_tensor().numpy(), q.detach().numpy(), rtol=0.01, atol=2e-3
        )


def test_one_controller() -> None:
    model, twin = make(), make()
    fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
    scalers = [GradScaler(init_scale=16.0) for _ in range(2)]
    for m, scaler in zip((model, twin), scalers, strict=True):
        optimizer = tp.optim.AdamW(m.parameters(), lr=0.1)
        scaler.scale(m(data()).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        np.testing.assert_allclose(
            p.detach().full_tensor().numpy(), q.detach().numpy(), rtol=1e-4, atol=1e-6
        )
