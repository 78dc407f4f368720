"""Meshes to shard over: named dims of larger ones, slices, several in one model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import Job, Mlp, close, local, mlp_loss, on_ranks, random, seeded, train_twin, whole

import tensorplay.nn as nn
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import DataParallelMeshDims, fully_shard
from tensorplay.distributed.tensor import Replicate, Shard, distribute_tensor
from tensorplay.nn.utils import clip_grad_norm_, get_total_norm
from tensorplay.testing import ranks

NAMES = ("a", "b", "c")

# dims of a (2, 2, 2) mesh, and over how many ranks they shard
CASES = {
    "one shards": (DataParallelMeshDims("c"), 2),
    "another shards": (DataParallelMeshDims("a"), 2),
    "two shard": (DataParallelMeshDims(("a", "c")), 4),
    "all shard": (DataParallelMeshDims(("a", "b", "c")), 8),
    "shard and replicate": (DataParallelMeshDims("b", "a"), 2),
    "replicate behind shard": (DataParallelMeshDims("a", "b"), 2),
    "two replicate": (DataParallelMeshDims("b", ("a", "c")), 2),
    "replicate only": (DataParallelMeshDims(replicate=("a", "b")), 1),
}


def data_ranks(dims: DataParallelMeshDims, rank: int) -> list[int]:
    """The ranks whose gradients are averaged with those of ``rank``."""
    numbers = np.arange(8).reshape(2, 2, 2)
    place = np.argwhere(numbers == rank)[0]
    used = {NAMES.index(n) for n in (*dims.shard_names, *dims.replicate_names)}
    own = tuple(slice(None) if d in used else int(at) for d, at in enumerate(place))
    return numbers[own].reshape(-1).tolist()


@pytest.mark.parametrize("name", CASES)
def test_named_dims_of_a_larger_mesh(name: str) -> None:
    dims, shards = CASES[name]

    def run(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
        model = fully_shard(seeded(Mlp), mesh=mesh, dp_mesh_dims=dims)
        mlp_loss(model, rank, 0).backward()
        return tuple(model.inner.weight.shape), whole(model.inner.weight.grad)

    for rank, (shape, grad) in enumerate(on_ranks(8, run)):
        assert shape[0] in (-(-7 // shards), 7 % -(-7 // shards), 0)
        among = data_ranks(dims, rank)
        job = Job(Mlp, lambda m, r, s, among=among: mlp_loss(m, among[r], 0), steps=1)
        close(grad, train_twin(job, len(among)).grads[0]["inner.weight"])


@ranks(8)
def test_mistakes_with_named_dims(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
    with pytest.raises(ValueError, match="At least one"):
        DataParallelMeshDims()
    with pytest.raises(ValueError, match="'d' not found"):
        fully_shard(Mlp(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims("d"))
    unnamed = init_device_mesh("cpu", (2, 4))
    with pytest.raises(ValueError, match="mesh_dim_names"):
        fully_shard(Mlp(), mesh=unnamed, dp_mesh_dims=DataParallelMeshDims("a"))
    both = DataParallelMeshDims(("a", "b"))
    with pytest.raises(NotImplementedError, match="dp_mesh_dims"):
        fully_shard(Mlp(), mesh=mesh, dp_mesh_dims=both, reshard_after_forward=2)


@ranks(4)
def test_parameters_on_a_larger_mesh_must_be_whole_along_the_data(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dims = DataParallelMeshDims("dp")
    model = nn.Linear(4, 4)
    value = local(model.weight)
    everywhere = [Replicate(), Replicate()]
    for name, p in list(model.named_parameters()):
        setattr(model, name, distribute_tensor(p, mesh, everywhere))
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    assert tuple(model.weight.shape) == (2, 4)
    assert whole(model.weight).shape == value.shape
    cut = nn.Linear(4, 4)
    cut.weight = distribute_tensor(cut.weight, mesh, [Replicate(), Shard(0)])
    with pytest.raises(ValueError, match=r"'weight' is placed as .*redistribute"):
        fully_shard(cut, mesh=mesh, dp_mesh_dims=dims)


def test_slices_of_a_larger_mesh() -> None:
    def run(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
        found = []
        for part in (mesh["c"], mesh["b", "c"], mesh["a", "b"]._flatten("ab")):
            model = fully_shard(seeded(Mlp), mesh=part)
            mlp_loss(model, rank, 0).backward()
            found.append((part.mesh.reshape(-1).tolist(), whole(model.inner.weight.grad)))
        return found

    for found in on_ranks(8, run):
        for among, grad in found:
            job = Job(Mlp, lambda m, r, s, among=among: mlp_loss(m, among[r], 0), steps=1)
            close(grad, train_twin(job, len(among)).grads[0]["inner.weight"])


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_norms_over_two_meshes_and_plain_parameters(order: float) -> None:
    def run(rank: int) -> Any:
        model = seeded(Mlp)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
        ignored = model.outer.bias
        fully_shard(model.inner, mesh=init_device_mesh("cpu", (4,)))
        fully_shard(model, mesh=mesh, ignored_params={ignored})
        x = random(4, 5)  # the same on every rank, so that the ignored gradient is the mean too
        model(x).square().mean().backward()
        grads = [p.grad for p in model.parameters()]
        norm = get_total_norm(grads, order).item()
        clipped = clip_grad_norm_(model.parameters(), 0.5 * norm, order).item()
        return norm, clipped, get_total_norm(grads, order).item()

    twin = seeded(Mlp)
    twin(random(4, 5)).square().mean().backward()
    with pytest.warns(UserWarning, match="over another mesh"):
        results = on_ranks(4, run)
    flat = np.concatenate([local(p.grad).reshape(-1) for p in twin.parameters()])
    wanted = np.linalg.norm(flat, order)
    for norm, clipped, after in results:
        np.testing.assert_allclose([norm, clipped, 2 * after], wanted, rtol=1e-5)


@ranks(2)
def test_frozen_parameters_can_be_trained_later(rank: int) -> None:
    model = seeded(Mlp)
    model.inner.requires_grad_(False)
    fully_shard(model)
    mlp_loss(model, rank, 0).backward()
    assert model.inner.weight.grad is None
    model.inner.requires_grad_(True)
    model.zero_grad()
    mlp_loss(model, rank, 0).backward()
    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2).grads[0]
    for name, p in model.named_parameters():
        close(whole(p.grad), twin[name])
    model.requires_grad_(False)
    assert not model(random(2, 5)).requires_grad


@ranks(2)
def test_hooks_after_accumulation_fire_once_with_the_sharded_gradient(rank: int) -> None:
    model, seen = fully_shard(seeded(Mlp)), []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda q, name=name: seen.append((name, tuple(q.grad.shape) == tuple(q.shape)))
        )
    mlp_loss(model, rank, 0).backward()
    assert sorted(seen) == sorted((n, True) for n, _ in model.named_parameters())


@ranks(2)
def test_slices_of_a_sharded_container_are_plain(rank: int) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    part = model[:2]
    assert type(part) is nn.Sequential and part[0] is model[0]
    assert part(random(2, 5)).shape == (2, 7)
    copy = type(model)(nn.ReLU())
    assert type(copy) is nn.Sequential


@ranks(2)
def test_reset_iter_state_is_for_the_root(rank: int) -> None:
    model = seeded(Mlp)
    fully_shard(model.inner)
    fully_shard(model)
    model.set_requires_gradient_sync(False)
    mlp_loss(model, rank, 0).backward()
    with pytest.raises(RuntimeError, match="root FSDP module"):
        model.inner.reset_iter_state()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    mlp_loss(model, rank, 1).backward()
    job = Job(Mlp, lambda m, r, s: mlp_loss(m, r, 1), steps=1)
    close(whole(model.inner.weight.grad), train_twin(job, 2).grads[0]["inner.weight"])
