"""Collectives that reduce and broadcast, on rank threads, against numpy."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorplay as tp
import tensorplay.distributed as dist
from tensorplay.distributed.fsdp import fully_shard
from tensorplay.testing import ranks

ReduceOp = dist.ReduceOp
SHAPES = [(), (5,), (2, 3), (0, 3)]
INTEGERS = [tp.uint8, tp.int8, tp.int16, tp.int32, tp.int64]
FLOATS = [tp.float16, tp.bfloat16, tp.float32, tp.float64]
COMPLEX = [tp.complex64, tp.complex128]
COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": operator.add,
    "AVG": operator.add,
    "PREMUL_SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}
OPS_OF = (
    [(op, d) for op in ("SUM", "PRODUCT", "MIN", "MAX") for d in [tp.bool, *INTEGERS, *FLOATS]]
    + [(op, d) for op in ("BAND", "BOR", "BXOR") for d in [tp.bool, *INTEGERS]]
    + [("AVG", d) for d in FLOATS + COMPLEX]
    + [("PREMUL_SUM", d) for d in FLOATS + COMPLEX]
    + [("SUM", d) for d in COMPLEX]
)


def sample(rank: int, shape: tuple[int, ...], dtype: tp.dtype) -> np.ndarray[Any, Any]:
    """Small numbers that every dtype holds exactly, also their sums and products."""
    values = np.random.default_rng(rank).integers(0, 4, shape)
    return values.astype(dtype.numpy)


def tensor(values: np.ndarray[Any, Any], dtype: tp.dtype) -> tp.Tensor:
    return tp.tensor(values.astype(np.complex128 if dtype.is_complex else np.float64), dtype=dtype)


def combined(op: str, values: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """What the ranks get, computed by numpy."""
    if op == "PREMUL_SUM":
        values = [value * np.asarray(0.5, value.dtype) for value in values]
    total = functools.reduce(COMBINE[op], values)
    return total / np.asarray(len(values), total.dtype) if op == "AVG" else total


def op_of(name: str) -> dist.ReduceOp:
    return dist._make_nccl_premul_sum(0.5) if name == "PREMUL_SUM" else getattr(ReduceOp, name)


def same(got: tp.Tensor, expected: np.ndarray[Any, Any]) -> None:
    found = got.numpy()
    assert found.dtype == expected.dtype and found.shape == expected.shape
    wide = np.complex128 if np.iscomplexobj(found) else np.float64
    np.testing.assert_allclose(found.astype(wide), expected.astype(wide), rtol=1e-2)


@pytest.mark.parametrize(("op", "dtype"), OPS_OF, ids=str)
@ranks(3)
def test_all_reduce(rank: int, op: str, dtype: tp.dtype) -> None:
    for shape in SHAPES if dtype is tp.float32 else [(2, 3)]:
        x = tensor(sample(rank, shape, dtype), dtype)
        assert dist.all_reduce(x, op_of(op)) is None
        same(x, np.asarray(combined(op, [sample(r, shape, dtype) for r in range(3)])))


@ranks(1, 2, 4)
def test_world_sizes(rank: int) -> None:
    size = dist.get_world_size()
    everyones = [sample(r, (4, 3), tp.float32) for r in range(size)]
    for op in ("SUM", "AVG", "PRODUCT", "MAX"):
        x = tp.tensor(everyones[rank])
        dist.all_reduce(x, op_of(op))
        same(x, combined(op, everyones))
        out = tp.zeros(3)
        rows = np.concatenate([everyones[rank][:1]] * size)
        dist.reduce_scatter_single(out, tp.tensor(rows), op_of(op))
        same(out, combined(op, [e[0] for e in everyones]))
    y = tp.tensor(everyones[rank])
    dist.broadcast(y, src=size - 1)
    same(y, everyones[size - 1])


@ranks(3)
def test_integers_beyond_float_precision(rank: int) -> None:
    big = 2**53 + 1
    x = tp.tensor([big + rank])
    dist.all_reduce(x)
    assert x.item() == 3 * big + 3
    dist.all_reduce(x, ReduceOp.MAX)
    assert x.item() == 3 * big + 3
    y = tp.tensor([1.0 + 2**-40], dtype=tp.float64)
    dist.all_reduce(y)
    assert y.item() == 3 * (1.0 + 2**-40)


@pytest.mark.parametrize("dtype", [tp.bool, *INTEGERS, *FLOATS, *COMPLEX], ids=str)
@ranks(3)
def test_broadcast(rank: int, dtype: tp.dtype) -> None:
    for shape in SHAPES if dtype is tp.float32 else [(2, 3)]:
        x = tensor(sample(rank, shape, dtype), dtype)
        dist.broadcast(x, src=1)
        same(x, sample(1, shape, dtype))


@ranks(2)
def test_broadcast_keeps_every_bit(rank: int) -> None:
    x = tp.tensor([-0.0, float("nan"), float("inf")] if rank else [1.0, 1.0, 1.0])
    dist.broadcast(x, src=1)
    values = x.numpy()
    assert np.signbit(values[0]) and np.isnan(values[1]) and np.isinf(values[2])


@ranks(3)
def test_reduce_leaves_the_other_ranks_alone(rank: int) -> None:
    x = tp.tensor([float(rank + 1)])
    dist.reduce(x, dst=2)
    assert x.item() == (6.0 if rank == 2 else rank + 1)
    y = tp.tensor([rank + 1])
    dist.reduce(y, group_dst=0, op=ReduceOp.PRODUCT)
    assert y.item() == (6 if rank == 0 else rank + 1)


@pytest.mark.parametrize("op", ["SUM", "MAX", "PRODUCT"])
@pytest.mark.parametrize("dtype", [tp.bool, tp.int64, tp.bfloat16, tp.float32], ids=str)
@ranks(3)
def test_reduce_scatter(rank: int, op: str, dtype: tp.dtype) -> None:
    shapes = [(2, 2), (5,), (0,)]

    def part(of: int, to: int) -> np.ndarray[Any, Any]:
        return sample(10 * of + to, shapes[to], dtype)

    out = tensor(np.zeros(shapes[rank]), dtype)
    dist.reduce_scatter(out, [tensor(part(rank, to), dtype) for to in range(3)], op_of(op))
    same(out, combined(op, [part(of, rank) for of in range(3)]))
    for shape in ((6, 2), (3, 2, 2)):  # concatenated, stacked
        single = tensor(np.zeros((2, 2)), dtype)
        whole = [sample(of, (6, 2), dtype) for of in range(3)]
        dist.reduce_scatter_tensor(single, tensor(whole[rank], dtype).reshape(shape), op_of(op))
        same(single, combined(op, whole)[2 * rank : 2 * rank + 2])


@ranks(3)
def test_views_and_other_memory_orders(rank: int) -> None:
    base = tp.zeros(4, 3)
    view = base.t()[1]
    view.fill_(float(rank))
    dist.all_reduce(view)
    assert base.tolist() == [[0.0, 3.0, 0.0]] * 4
    x = tp.arange(6).reshape(2, 3).t()
    dist.all_reduce(x)
    assert x.tolist() == (3 * np.arange(6).reshape(2, 3).T).tolist()


@ranks(4)
def test_sub_groups(rank: int) -> None:
    odd = dist.new_group([1, 3])
    x = tp.tensor([float(rank)])
    if rank % 2:
        dist.all_reduce(x, group=odd)
        assert x.item() == 4.0
        dist.broadcast(x, src=3, group=odd)
        dist.reduce(x, group=odd, group_dst=1)
        assert x.item() == (8.0 if rank == 3 else 4.0)
        with pytest.raises(ValueError, match="Global rank 0 is not part of group"):
            dist.broadcast(x, src=0, group=odd)


def outside(rank: int) -> float:
    first = dist.new_group([0])
    x = tp.tensor([float(rank + 2)])
    assert dist.all_reduce(x, group=first, async_op=rank == 1) is None
    return x.item()


def test_a_rank_outside_the_group_is_warned() -> None:
    with pytest.warns(UserWarning, match="Running all_reduce on global rank 1 which does not bel"):
        assert dist.run_ranks(outside, 2) == [2.0, 3.0]


@ranks(4)
def test_new_subgroups(rank: int) -> None:
    own, groups = dist.new_subgroups(2)
    assert len(groups) == 2
    x = tp.tensor(rank)
    dist.all_reduce(x, group=own)
    assert x.item() == (1 if rank < 2 else 5)
    own, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    dist.all_reduce(x, group=own)
    assert x.item() == 6
    for wrong, message in (
        (3, r"The world size \(4\) must be divisible by 'group_size=3'"),
        (8, r"The arg 'group_size' \(8\) must not exceed the world size \(4\)"),
        (0, r"The arg 'group_size' \(0\) must be positive"),
        (None, "please pass in 'group_size'"),
    ):
        with pytest.raises(ValueError, match=message):
            dist.new_subgroups(wrong)
    with pytest.raises(ValueError, match="Rank 1 has appeared in both subgroup"):
        dist.new_subgroups_by_enumeration([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match="cannot be empty"):
        dist.new_subgroups_by_enumeration([])


@ranks(2)
def test_async_op(rank: int) -> None:
    x = tp.ones(3)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None and work.wait() and work.is_completed() and work.is_success()
    assert x.tolist() == [2.0] * 3 and work.exception() is None


@ranks(2)
def test_nothing_is_recorded(rank: int) -> None:
    leaf = tp.ones(2, requires_grad=True)
    dist.all_reduce(leaf)
    assert leaf.tolist() == [2.0, 2.0] and leaf.requires_grad and leaf.is_leaf
    y = leaf * 3
    dist.all_reduce(y)
    y.sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [3.0, 3.0]


class Averaged(tp.nn.Module):
    def forward(self, x: tp.Tensor) -> tp.Tensor:
        mean = x.detach().mean()
        dist.all_reduce(mean, ReduceOp.AVG)
        return x - mean


def run_averaged(rank: int) -> Any:
    model = tp.nn.Sequential(tp.nn.Linear(2, 2, bias=False), Averaged())
    fully_shard(model)
    return model(tp.ones(1, 2) * rank).mean().item()


def test_a_module_that_calls_one_runs_eagerly() -> None:
    with pytest.warns(UserWarning, match=r"runs eagerly, as its forward calls dist\.all_reduce\("):
        means = dist.run_ranks(run_averaged, 2)
    assert abs(means[0] + means[1]) < 1e-6


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "dtype", "error", "message"),
    [
        ("BAND", tp.float32, RuntimeError, "Cannot use ReduceOp.BAND with non-integral dtype"),
        ("AVG", tp.int64, RuntimeError, "result type Float can't be cast to .* Long"),
        ("AVG", tp.bool, RuntimeError, "result type Float can't be cast to .* Bool"),
        ("MAX", tp.complex64, ValueError, "all_reduce does not support RedOpType.MAX on complex"),
        ("PREMUL_SUM", tp.int32, RuntimeError, "PREMUL_SUM with integral dtype"),
    ],
)
@ranks(2)
def test_ops_refuse_dtypes(
    rank: int, op: str, dtype: tp.dtype, error: type[Exception], message: str
) -> None:
    x = tp.zeros(2, dtype=dtype)
    with pytest.raises(error, match=message):
        dist.all_reduce(x, op_of(op))


@ranks(2)
def test_bad_arguments(rank: int) -> None:
    x = tp.zeros(4)
    with pytest.raises(TypeError, match=r"Expected parameter `tensor` of type tensorplay\.Tensor"):
        dist.all_reduce([x])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="op must be a ReduceOp"):
        dist.all_reduce(x, "sum")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="needs a factor"):
        dist.all_reduce(x, ReduceOp.PREMUL_SUM)
    with pytest.raises(ValueError, match="Must specify global_rank or group_rank"):
        dist.broadcast(x)
    with pytest.raises(ValueError, match="Can't specify both"):
        dist.broadcast(x, 0, group_src=0)
    with pytest.raises(RuntimeError, match="No backend type associated with device type meta"):
        dist.all_reduce(tp.zeros(2, device="meta"))
    with pytest.raises(ValueError, match=r"same size as output size times world size.*float32"):
        dist.reduce_scatter_tensor(x, x)
    with pytest.raises(TypeError, match="must have the same type"):
        dist.reduce_scatter_tensor(tp.zeros(2, dtype=tp.int32), x)
    with pytest.raises(ValueError, match="expected 2, got 1"):
        dist.reduce_scatter(x, [x])
    with pytest.raises(ValueError, match=r"different dtypes: Found .*float32 and .*int64"):
        dist.reduce_scatter(x, [x, tp.zeros(4, dtype=tp.int64)])


def test_before_init() -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.all_reduce(tp.zeros(1))


def different_shapes(rank: int) -> None:
    dist.all_reduce(tp.zeros(2 + rank))


def different_dtypes(rank: int) -> None:
    dist.broadcast(tp.zeros(2, dtype=tp.float32 if rank else tp.int64), src=0)


def different_ops(rank: int) -> None:
    dist.all_reduce(tp.zeros(2), ReduceOp.MAX if rank else ReduceOp.SUM)


def different_collectives(rank: int) -> None:
    dist.all_reduce(tp.zeros(2)) if rank else dist.broadcast(tp.zeros(2), src=1)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (different_shapes, r"rank 0 passed float32\[2\]; rank 1 passed float32\[3\]"),
        (different_dtypes, r"rank 0 passed int64\[2\]; rank 1 passed float32\[2\]"),
        (different_ops, r"rank 0 waits in all_reduce\(SUM\).*rank 1 waits in all_reduce\(MAX\)"),
        (different_collectives, r"rank 0 waits in broadcast\(src=1\).*in all_reduce\(SUM\)"),
    ],
)
def test_ranks_that_differ(fn: Callable[[int], None], message: str) -> None:
    with pytest.raises(dist.DistBackendError, match=message):
        dist.run_ranks(fn, 2)


# ---- names -------------------------------------------------------------------------------------


def test_reduce_op_names() -> None:
    assert str(ReduceOp.SUM) == "RedOpType.SUM" and repr(ReduceOp.SUM) == "<RedOpType.SUM>"
    assert ReduceOp(ReduceOp.MAX) == ReduceOp.MAX != ReduceOp.MIN
    assert dist._make_nccl_premul_sum(2.0).factor == 2.0
    assert len({ReduceOp.SUM, ReduceOp("SUM"), ReduceOp.AVG}) == 2


def test_backends() -> None:
    assert dist.is_gloo_available() and not dist.is_mpi_available()
    assert dist.is_backend_available("gloo") and not dist.is_backend_available("smoke")
    assert isinstance(dist.is_nccl_available(), bool)
    assert dist.get_default_backend_for_device("cpu") == "gloo"
    assert dist.get_default_backend_for_device("cuda:1") == "nccl"
    assert dist.get_default_backend_for_device(tp.device("tpu")) == "xla"
    with pytest.raises(ValueError, match="not registered for device : meta"):
        dist.get_default_backend_for_device("meta")
