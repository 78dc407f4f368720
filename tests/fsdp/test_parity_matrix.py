"""Five steps against the unsharded twin: every world size, mesh, policy and resharding."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
from helpers import (
    Job,
    Mlp,
    adamw,
    check_parity,
    close,
    local,
    on_ranks,
    random,
    seeded,
    sgd,
    train_twin,
    whole,
)

import tensorplay as tp
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    check_replicas,
    fully_shard,
)

STEPS = 5


@dataclasses.dataclass
class Policy:
    """Options of fully_shard, and how exact the result is."""

    options: dict[str, Any]
    rtol: float = 1e-4
    atol: float = 1e-5


BF16, F32 = tp.bfloat16, tp.float32
POLICIES = {
    "full precision": Policy({}),
    "bf16": Policy({"mp_policy": MixedPrecisionPolicy(BF16)}, 0.05, 0.02),
    "bf16, f32 reduction": Policy({"mp_policy": MixedPrecisionPolicy(BF16, F32)}, 0.05, 0.01),
    "f16, f32 reduction": Policy({"mp_policy": MixedPrecisionPolicy(tp.float16, F32)}, 0.01, 0.003),
    "offload": Policy({"offload_policy": CPUOffloadPolicy()}),
}
MESHES = [(2, 1), (1, 2), (4, 1), (1, 4), (2, 2), (2, 4), (4, 2), (3, 2)]


def loss_of(model: Any, rank: int, step: int) -> Any:
    """With data of its own for every rank and step, in the dtype of the parameters."""
    x = random(4, 5, seed=100 * step + rank)
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def shard(model: Any, **options: Any) -> Any:
    """Two groups of uneven rows."""
    fully_shard(model.inner, **options)
    return fully_shard(model, **options)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("world", range(1, 9))
def test_world_sizes(world: int, optimizer: Any) -> None:
    check_parity(Job(Mlp, loss_of, shard, optimizer, STEPS), world)


def low_precision_twin(policy: MixedPrecisionPolicy, world: int) -> dict[str, np.ndarray]:
    """Parameters after the steps: a copy in low precision computes, float32 ones are stepped."""
    model = seeded(Mlp)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        gradients = []
        for rank in range(world):
            low = copy.deepcopy(model).to(policy.param_dtype)
            low.zero_grad()
            loss_of(low, rank, step).backward()
            gradients.append([p.grad.float() for p in low.parameters()])
        for p, *each in zip(model.parameters(), *gradients, strict=True):
            p.grad = sum(each) / world  # type: ignore[assignment]
        optimizer.step()
    return {name: local(p) for name, p in model.named_parameters()}


def check_parameters(policy: Policy, world: int, found: list[dict[str, np.ndarray]]) -> None:
    """Each rank's whole parameters against those of the twin."""
    mixed = policy.options.get("mp_policy")
    if mixed is None:
        wanted = train_twin(Job(Mlp, loss_of, steps=STEPS), world).params
    else:
        wanted = low_precision_twin(mixed, world)
    for params in found:
        for key, value in wanted.items():
            close(params[key], value, key, policy.rtol, policy.atol)


@pytest.mark.parametrize("reshard", [True, None])
@pytest.mark.parametrize("world", [1, 3, 8])
@pytest.mark.parametrize("name", POLICIES)
def test_policies(name: str, world: int, reshard: bool | None) -> None:
    policy = POLICIES[name]

    def run(rank: int) -> Any:
        model = shard(seeded(Mlp), reshard_after_forward=reshard, **policy.options)
        optimizer = sgd(model.parameters())
        for step in range(STEPS):
            loss = loss_of(model, rank, step)
            loss.backward()
            for p in model.parameters():
                assert p.dtype is F32 and p.grad.dtype is F32
            optimizer.step()
            optimizer.zero_grad()
        return {n: whole(p) for n, p in model.named_parameters()}

    check_parameters(policy, world, on_ranks(world, run))


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", ["full precision", "bf16, f32 reduction"])
def test_hybrid_meshes(shape: tuple[int, int], name: str) -> None:
    policy, world = POLICIES[name], int(np.prod(shape))

    def run(rank: int) -> Any:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = shard(seeded(Mlp), mesh=mesh, **policy.options)
        optimizer = sgd(model.parameters())
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        check_replicas(model)
        return {n: whole(p) for n, p in model.named_parameters()}

    check_parameters(policy, world, on_ranks(world, run))
