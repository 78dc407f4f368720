"""DTensor: placements, redistribution, math and gradients, against the whole tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorplay as tp
import tensorplay.distributed as dist
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    full,
    ones,
    zeros,
)
from tensorplay.testing import ranks

WHOLE = np.random.RandomState(0).randn(6, 5, 2).astype(np.float32)


def whole() -> Any:
    return tp.tensor(WHOLE)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_pieces_are_those_of_chunk(world: int, dim: int) -> None:
    def run(rank: int) -> Any:
        d = distribute_tensor(whole(), init_device_mesh("cpu", (world,)), [Shard(dim)])
        return d.to_local().numpy(), d.full_tensor().numpy(), d.global_shape, d.placements

    pieces = [c.numpy() for c in whole().chunk(world, dim)]
    for rank, (rows, full_value, shape, placements) in enumerate(dist.run_ranks(run, world)):
        if rank < len(pieces):
            np.testing.assert_array_equal(rows, pieces[rank])
        else:
            assert rows.shape[dim] == 0
        np.testing.assert_array_equal(full_value, WHOLE)
        assert shape == (6, 5, 2) and placements == (Shard(dim % 3),)


@pytest.mark.parametrize(
    "placements",
    [
        [Replicate(), Replicate()],
        [Replicate(), Shard(0)],
        [Shard(1), Replicate()],
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Shard(0), Shard(2)],
    ],
)
@pytest.mark.parametrize("shape", [(2, 2), (2, 3)])
def test_every_placement_of_a_2d_mesh_becomes_every_other(placements: Any, shape: Any) -> None:
    targets = [[Replicate(), Shard(1)], [Shard(2), Shard(0)], [Replicate(), Replicate()]]

    def run(rank: int) -> Any:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
        d = distribute_tensor(whole(), mesh, placements)
        found = [d.redistribute(placements=target) for target in targets]
        for moved, target in zip(found, targets, strict=True):
            assert moved.placements == tuple(target)
            direct = distribute_tensor(whole(), mesh, target)
            assert tp.equal(moved.to_local(), direct.to_local())
        return [x.full_tensor().numpy() for x in (d, *found)]

    for values in dist.run_ranks(run, 2 * shape[1]):
        for value in values:
            np.testing.assert_array_equal(value, WHOLE)


@ranks(4)
def test_one_dim_over_two_axes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    d = distribute_tensor(tp.arange(8.0), mesh, [Shard(0), Shard(0)])
    assert d.to_local().tolist() == [2.0 * rank, 2.0 * rank + 1]
    assert d.full_tensor().tolist() == list(range(8))
    with pytest.raises(ValueError, match="6 rows, which their 4 ranks do not divide"):
        distribute_tensor(tp.arange(6.0), mesh, [Shard(0), Shard(0)])


@ranks(3)
def test_partial_values_are_reduced(rank: int) -> None:
    mesh = init_device_mesh("cpu", (3,))
    own = whole() * (rank + 1)
    for op, factor in {"sum": 6, "avg": 2, "product": None, "max": None, "min": None}.items():
        d = DTensor.from_local(own, mesh, [Partial(op)])
        stacked = np.stack([WHOLE, 2 * WHOLE, 3 * WHOLE])
        want = {
            "product": stacked.prod(0), "max": stacked.max(0), "min": stacked.min(0)
        }.get(op, WHOLE * (factor or 1))  # fmt: skip
        np.testing.assert_allclose(d.full_tensor().numpy(), want, rtol=1e-6)
        cut = d.redistribute(placements=[Shard(1)])
        np.testing.assert_allclose(cut.full_tensor().numpy(), want, rtol=1e-6)


@ranks(2)
def test_math_on_partial_values_is_linear(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    d = DTensor.from_local(whole(), mesh, [Partial()])
    np.testing.assert_allclose(((d + d) * 3 - d).full_tensor().numpy(), 10 * WHOLE, rtol=1e-5)
    for wrong in (lambda: d * d, lambda: d + 1, d.exp, d.sum):
        with pytest.raises(RuntimeError, match="Partial tensor: call redistribute"):
            wrong()
    with pytest.raises(RuntimeError, match="reading values"):
        d.numpy()


REDUCTIONS = {
    "sum": lambda x: x.sum(),
    "sum of a cut dim": lambda x: x.sum(0),
    "sum of two dims, kept": lambda x: x.sum((0, 2), keepdim=True),
    "sum of another dim": lambda x: x.sum(1),
    "mean": lambda x: x.mean(),
    "mean of a cut dim": lambda x: x.mean(0),
    "max": lambda x: x.max(),
    "amax": lambda x: x.amax(0),
    "min": lambda x: x.min(),
    "amin": lambda x: x.amin((0, 1)),
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: x.norm(1),
    "norm 3": lambda x: x.norm(3, dim=0),
    "norm inf": lambda x: x.norm(float("inf")),
    "norm -inf": lambda x: x.norm(-float("inf")),
    "norm 0": lambda x: x.norm(0),
    "prod": lambda x: x.prod(),
    "all": lambda x: (x > -9).all(),
    "any": lambda x: (x > 9).any(),
    "in float64": lambda x: x.sum(dtype=tp.float64),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_are_of_the_whole(name: str) -> None:
    reduce = REDUCTIONS[name]
    want = reduce(whole()).numpy()

    def run(rank: int) -> Any:
        d = distribute_tensor(whole(), init_device_mesh("cpu", (4,)), [Shard(0)])
        return reduce(d).full_tensor().numpy()

    for value in dist.run_ranks(run, 4):
        np.testing.assert_allclose(value, want, rtol=2e-5)
        assert value.dtype == want.dtype


@ranks(3)
def test_elementwise_math_and_in_place_updates(rank: int) -> None:
    mesh = init_device_mesh("cpu", (3,))
    a = distribute_tensor(tp.arange(4.0), mesh, [Shard(0)])
    b = distribute_tensor(tp.ones(4), mesh, [Shard(0)])
    c = (a + b).exp() / 2
    a.mul_(2).add_(b)
    np.testing.assert_allclose(c.full_tensor().numpy(), np.exp(np.arange(4) + 1) / 2, rtol=1e-6)
    assert a.full_tensor().tolist() == [1, 3, 5, 7]
    assert (a == a).all().item() and a.sum().item() == 16  # padding stays zero
    with pytest.raises(RuntimeError, match="plain tensor of shape"):
        _ = a + tp.ones(2)
    with pytest.raises(RuntimeError, match="laid out as"):
        _ = a + distribute_tensor(tp.ones(4), mesh, [Replicate()])
    with pytest.raises(RuntimeError, match="not elementwise"):
        a.argmax()


@ranks(2)
def test_gradients_through_every_move(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    p = distribute_tensor(tp.nn.Parameter(tp.arange(3.0)), mesh, [Shard(0)])
    assert isinstance(p, tp.nn.Parameter) and p.is_leaf and p.requires_grad
    (p.full_tensor() ** 2).sum().backward()
    assert p.grad.placements == (Shard(0),)
    assert p.grad.full_tensor().tolist() == [0, 2, 4]
    p.grad = None
    (p.to_local() * 3).sum().backward()
    assert p.grad.full_tensor().tolist() == [3, 3, 3]
    p.grad = None
    (p.redistribute(placements=[Replicate()]).to_local() ** 2).sum().backward()
    assert p.grad.full_tensor().tolist() == [0, 2, 4]
    rows = tp.ones(2, requires_grad=True)
    made = DTensor.from_local(rows, mesh, [Shard(0)])
    (made.full_tensor() * tp.arange(4.0)).sum().backward()
    assert rows.grad.tolist() == [2.0 * rank, 2.0 * rank + 1]


@ranks(2)
def test_values_come_from_one_rank_unless_told_otherwise(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    own = tp.full((4,), float(rank))
    assert distribute_tensor(own, mesh, [Shard(0)]).full_tensor().tolist() == [0, 0, 0, 0]
    kept = distribute_tensor(own, mesh, [Shard(0)], src_data_rank=None)
    assert kept.full_tensor().tolist() == [0, 0, 1, 1]
    checked = DTensor.from_local(own, mesh, [Replicate()], run_check=True)
    assert checked.to_local().tolist() == [0, 0, 0, 0]


@ranks(3)
def test_rows_of_unequal_size_need_the_shape(rank: int) -> None:
    mesh = init_device_mesh("cpu", (3,))
    rows = tp.arange(4.0)[2 * rank : 2 * rank + 2]
    d = DTensor.from_local(rows, mesh, [Shard(0)], shape=(4,))
    assert d.full_tensor().tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"rows of shape \(3,\) do not fit"):
        DTensor.from_local(tp.ones(3), mesh, [Shard(0)], shape=(4,))


@ranks(2)
def test_factories_and_instances(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    made = [
        zeros(3, 2, device_mesh=mesh, placements=[Shard(0)]),
        ones((3, 2), device_mesh=mesh, placements=[Shard(1)]),
        full((3, 2), 7, dtype=tp.int32, device_mesh=mesh),
    ]
    for d, value in zip(made, (0, 1, 7), strict=True):
        assert isinstance(d, DTensor) and d.global_shape == (3, 2)
        assert tp.equal(d.full_tensor().float(), tp.full((3, 2), float(value)))
    assert made[2].dtype is tp.int32 and made[2].placements == (Replicate(),)
    assert not isinstance(tp.ones(1), DTensor)
    with pytest.raises(TypeError, match="distribute_tensor"):
        DTensor(tp.ones(1))


@ranks(2)
def test_what_does_not_fit_is_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = tp.ones(4)
    with pytest.raises(ValueError, match="same length"):
        distribute_tensor(x, mesh, [Shard(0), Shard(0)])
    with pytest.raises(RuntimeError, match="does not fit a tensor of 1 dims"):
        distribute_tensor(x, mesh, [Shard(1)])
    with pytest.raises(RuntimeError, match="not as Partial"):
        distribute_tensor(x, mesh, [Partial()])
    with pytest.raises(RuntimeError, match="leaf"):
        distribute_tensor(tp.ones(4, requires_grad=True) * 2, mesh, [Shard(0)])
    d = distribute_tensor(x, mesh, [Shard(0)])
    assert distribute_tensor(d, mesh, [Shard(0)]) is d
    with pytest.raises(ValueError, match="redistribute"):
        distribute_tensor(d, mesh, [Replicate()])
    with pytest.raises(RuntimeError, match="internal use only"):
        d.redistribute(placements=[Partial()])
    with pytest.raises(AttributeError, match="no placements"):
        _ = x.placements
    with pytest.raises(ValueError, match="reduce_op"):
        Partial("median")
