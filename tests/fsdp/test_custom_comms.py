"""Gathers, reductions and hooks by the user's own Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import (
    Job,
    Mlp,
    check_parity,
    close,
    local,
    mlp_loss,
    on_ranks,
    own_slice,
    random,
    seeded,
    train_rank,
    train_twin,
    whole,
)
from test_knobs import KINDS, quiet_ranks

import tensorplay as tp
import tensorplay.distributed as dist
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import (
    AllGather,
    MixedPrecisionPolicy,
    ReduceScatter,
    fully_shard,
)


class Gather(AllGather):
    """torch's interface, noting what it was called with."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
        return tp.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        self.calls.append((tuple(output_tensor.shape), input_tensor.dtype, group.size()))
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op=True)


class Scatter(ReduceScatter):
    """As `Gather`."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
        return tp.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.calls.append((tuple(input_tensor.shape), input_tensor.dtype, op))
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def shard_custom(model: Any, **options: Any) -> Any:
    """Both collectives of ``inner`` and the gather of the root are custom."""
    fully_shard(model.inner, **options)
    fully_shard(model, **options)
    model.inner.set_custom_all_gather(Gather())
    model.inner.set_custom_reduce_scatter(Scatter())
    model.set_custom_all_gather(Gather())
    return model


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("reshard", [True, False, None])
def test_parity(make: Any, reshard: bool | None) -> None:
    job = Job(make, mlp_loss, lambda m: shard_custom(m, reshard_after_forward=reshard), steps=3)
    twin = train_twin(job, 3)

    def run(rank: int) -> Any:
        return train_rank(rank, job)

    for rank, record in enumerate(quiet_ranks(3, run)):
        for step, grads in enumerate(record.grads):
            for name, grad in grads.items():
                close(grad, own_slice(twin.grads[step][name], 3, rank), name)


def test_how_often_and_with_what_they_are_called() -> None:
    def run(rank: int) -> Any:
        policy = MixedPrecisionPolicy(param_dtype=tp.bfloat16, reduce_dtype=tp.float32)
        model = shard_custom(seeded(Mlp), mp_policy=policy, reshard_after_forward=True)
        gather, scatter = Gather(), Scatter()
        model.inner.set_custom_all_gather(gather)
        model.inner.set_custom_reduce_scatter(scatter)
        x = random(4, 5).requires_grad_()
        model(x).float().sum().backward()
        return gather.calls, scatter.calls, model.inner.weight.grad.dtype

    gathers, scatters, dtype = on_ranks(2, run)[0]
    # 4 rows of 5 and 4 of the bias on each of two ranks; forward, and backward for the input
    assert gathers == [((48,), tp.bfloat16, 2)] * 2
    assert scatters == [((48,), tp.float32, dist.ReduceOp.AVG)]
    assert dtype is tp.float32


@pytest.mark.parametrize(
    ("configure", "op", "scale"),
    [
        (lambda m: None, "AVG", 1),
        (lambda m: m.set_force_sum_reduction_for_comms(True), "SUM", 1),
        (lambda m: m.set_gradient_divide_factor(6.0), "PREMUL_SUM", 0.5),
        (lambda m: m.set_gradient_divide_factor(3.0), "AVG", 1),
    ],
)
def test_the_op_follows_the_divide_factor(configure: Any, op: str, scale: float) -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        scatter = Scatter()
        model.set_custom_reduce_scatter(scatter)
        configure(model)
        mlp_loss(model, rank, 0).backward()
        return [call[2].name for call in scatter.calls], local(model.outer.bias.grad)

    wanted = train_twin(Job(Mlp, mlp_loss, steps=1), 3).grads[0]["outer.bias"]
    for rank, (ops, grad) in enumerate(on_ranks(3, run)):
        assert ops == [op]
        close(grad, own_slice(wanted * scale, 3, rank))


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("shape", [(2,), (2, 2), (1, 3)], ids=str)
def test_an_all_reduce_hook_changes_the_gradients(make: Any, shape: Any) -> None:
    world = int(np.prod(shape))

    def run(rank: int) -> Any:
        seen = []

        def hook(row: Any) -> None:
            seen.append((tuple(row.shape), row.dtype))
            row.mul_(2)

        model = fully_shard(seeded(make), mesh=init_device_mesh("cpu", shape))
        model.set_all_reduce_hook(hook)
        mlp_loss(model, rank, 0).backward()
        return seen, whole(model.inner.weight.grad)

    wanted = train_twin(Job(make, mlp_loss, steps=1), world).grads[0]["inner.weight"]
    for seen, grad in quiet_ranks(world, run):
        assert len(seen) == 1 and seen[0][1] is tp.float32
        close(grad, 2 * wanted)


def test_kept_gradients_are_reduced_by_the_custom_collective() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        scatter = Scatter()
        model.set_custom_reduce_scatter(scatter)
        model.set_requires_gradient_sync(False)
        mlp_loss(model, rank, 0).backward()
        assert model.inner.weight.grad is None and not scatter.calls
        model.set_requires_gradient_sync(True)
        mlp_loss(model, rank, 1).backward()
        return len(scatter.calls), whole(model.inner.weight.grad)

    job = Job(Mlp, lambda m, r, s: mlp_loss(m, r, 0) + mlp_loss(m, r, 1), steps=1)
    wanted = train_twin(job, 2).grads[0]["inner.weight"]
    for calls, grad in on_ranks(2, run):
        assert calls == 1
        close(grad, wanted)


def test_replicas_that_wait_and_unused_parameters() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp), mesh=init_device_mesh("cpu", (2, 2)))
        model.set_custom_reduce_scatter(Scatter())
        model.set_reduce_scatter_unused_params(True)
        model.set_requires_all_reduce(False)
        mlp_loss(model, rank, 0).backward()
        assert model.inner.weight.grad is None
        model.set_requires_all_reduce(True)
        model(random(2, 5)).detach()
        mlp_loss(model, rank, 1).backward()
        return whole(model.inner.weight.grad)

    job = Job(Mlp, lambda m, r, s: mlp_loss(m, r, 0) + mlp_loss(m, r, 1), steps=1)
    wanted = train_twin(job, 4).grads[0]["inner.weight"]
    for grad in on_ranks(4, run):
        close(grad, wanted)


def test_float16_reductions_are_divided_before_and_after() -> None:
    """The sum of four gradients of 30,000 is above float16's largest number, their mean is not."""

    def run(rank: int) -> Any:
        policy = MixedPrecisionPolicy(reduce_dtype=tp.float16)
        model = fully_shard(tp.nn.Linear(1, 8, bias=False), mp_policy=policy)
        (model(tp.ones(1, 1)) * 30000.0).sum().backward()
        return whole(model.weight.grad)

    for grad in on_ranks(4, run):
        np.testing.assert_allclose(grad, 30000.0, rtol=1e-3)


def test_one_controller_has_no_ranks_to_run_them() -> None:
    model = fully_shard(seeded(Mlp), mesh=init_device_mesh("cpu", (2,)))
    for set_it in (
        lambda: model.set_custom_all_gather(Gather()),
        lambda: model.set_custom_reduce_scatter(Scatter()),
        lambda: model.set_all_reduce_hook(lambda row: None),
    ):
        with pytest.raises(RuntimeError, match="needs a process group"):
            set_it()


def test_check_parity_of_a_model_whose_root_alone_is_custom() -> None:
    def shard(model: Any) -> Any:
        fully_shard(model.inner)
        fully_shard(model)
        model.set_custom_all_gather(Gather())
        return model

    check_parity(Job(Mlp, mlp_loss, shard, steps=2), 2)
