"""CPUOffloadPolicy. CPU devices know host memory kinds too, so the accelerator's way runs here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import (
    Job,
    Lm,
    Mlp,
    adamw,
    check_parity,
    close,
    lm_loss,
    local,
    mlp_loss,
    on_ranks,
    random,
    seeded,
    shard_nested,
    train_twin,
    whole,
)
from test_knobs import EagerMlp

import tensorplay as tp
from tensorplay.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import CPUOffloadPolicy, _init, fully_shard
from tensorplay.nn.utils import clip_grad_norm_
from tensorplay.optim import _update

OFFLOAD = CPUOffloadPolicy()


@pytest.fixture
def as_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory counts as another memory than the devices' own."""
    monkeypatch.setattr(_init, "_is_in_host_memory", lambda device: False)


def kind(tensor: Any) -> str:
    return tensor._storage.stored.sharding.memory_kind


def shard(model: Any) -> Any:
    return shard_nested(model, offload_policy=OFFLOAD)


def test_on_cpu_it_trains_with_default_arguments() -> None:
    records = check_parity(Job(Lm, lm_loss, shard, adamw), 2)
    assert len(records) == 2


@pytest.mark.usefixtures("as_on_accelerators")
@pytest.mark.parametrize("pin", [True, False])
def test_shards_gradients_and_state_stay_in_host_memory(pin: bool) -> None:
    def run(rank: int) -> Any:
        policy = CPUOffloadPolicy(pin_memory=pin)
        model = fully_shard(seeded(Mlp), offload_policy=policy)
        optimizer = adamw(model.parameters())
        p = model.inner.weight
        kinds = [kind(p)]
        for step in range(2):
            mlp_loss(model, rank, step).backward()
            kinds += [kind(p), kind(p.grad)]
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            kinds += [kind(p), kind(p.grad), kind(optimizer.state[p]["exp_avg"])]
            optimizer.zero_grad()
        with tp.no_grad():
            kinds.append(kind((p * 2).exp()))
        assert p.device.type == "cpu" and tuple(p.shape)[1] == 5
        return set(kinds)

    assert on_ranks(2, run) == [{"pinned_host" if pin else "unpinned_host"}] * 2


@pytest.mark.usefixtures("as_on_accelerators")
@pytest.mark.parametrize("world", [1, 3])
def test_parity(world: int) -> None:
    check_parity(Job(Lm, lm_loss, shard, adamw), world)


@pytest.mark.usefixtures("as_on_accelerators")
def test_parity_of_eager_calls_and_clipping() -> None:
    job = Job(
        EagerMlp,
        mlp_loss,
        lambda m: fully_shard(m, offload_policy=OFFLOAD),
        adamw,
        before_step=lambda m: clip_grad_norm_(m.parameters(), 0.05),
    )
    with pytest.warns(UserWarning, match="runs eagerly"):
        check_parity(job, 2)


@pytest.mark.usefixtures("as_on_accelerators")
def test_the_optimizer_moves_some_parameters_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_update, "_PORTION", 64)
    runs = []
    run_program = _update._run_program
    monkeypatch.setattr(
        _update,
        "_run_program",
        lambda rule, r: (runs.append(len(r[0].cells)), run_program(rule, r)),
    )
    job = Job(Mlp, mlp_loss, lambda m: fully_shard(m, offload_policy=OFFLOAD), adamw, steps=2)
    check_parity(job, 2)
    assert max(runs[-4:]) < 4


@pytest.mark.usefixtures("as_on_accelerators")
def test_hybrid_meshes_accumulation_and_one_controller() -> None:
    def run(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2))
        model = fully_shard(seeded(Mlp), mesh=mesh, offload_policy=OFFLOAD)
        model.set_requires_gradient_sync(False)
        mlp_loss(model, rank, 0).backward()
        model.set_requires_gradient_sync(True)
        mlp_loss(model, rank, 1).backward()
        return whole(model.inner.weight.grad)

    job = Job(Mlp, lambda m, r, s: mlp_loss(m, r, 0) + mlp_loss(m, r, 1), steps=1)
    for grad in on_ranks(4, run):
        close(grad, train_twin(job, 4).grads[0]["inner.weight"])
    model = fully_shard(seeded(Mlp), mesh=init_device_mesh("cpu", (4,)), offload_policy=OFFLOAD)
    twin, x = seeded(Mlp), random(8, 5)
    for m in (model, twin):
        optimizer = adamw(m.parameters())
        m(x).square().mean().backward()
        optimizer.step()
    assert kind(model.inner.weight) == "pinned_host"
    close(whole(model.inner.weight), local(twin.inner.weight), atol=1e-5)


@pytest.mark.usefixtures("as_on_accelerators")
def test_state_dicts() -> None:
    full = StateDictOptions(full_state_dict=True)

    def run(rank: int) -> Any:
        models = [fully_shard(seeded(Mlp), offload_policy=OFFLOAD) for _ in range(2)]
        optimizers = [adamw(m.parameters()) for m in models]
        mlp_loss(models[0], rank, 0).backward()
        optimizers[0].step()
        saved, state = get_state_dict(models[0], optimizers[0], options=full)
        set_state_dict(
            models[1], optimizers[1], model_state_dict=saved, optim_state_dict=state, options=full
        )
        p, q = (m.inner.weight for m in models)
        sharded = {k: v.clone() for k, v in models[0].state_dict().items()}
        models[1].load_state_dict(sharded)
        moments = [kind(o.state[x]["exp_avg"]) for o, x in zip(optimizers, (p, q), strict=True)]
        return whole(p), whole(q), [kind(p), kind(q), *moments]

    for p, q, kinds in on_ranks(2, run):
        np.testing.assert_array_equal(p, q)
        assert set(kinds) == {"pinned_host"}
