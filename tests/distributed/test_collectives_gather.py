"""Collectives that gather, scatter and exchange, on rank threads, against numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorplay as tp
import tensorplay.distributed as dist
from tensorplay.testing import ranks

DTYPES = [tp.bool, tp.uint8, tp.int64, tp.float16, tp.bfloat16, tp.float64, tp.complex64]


def values(rank: int, shape: tuple[int, ...], dtype: tp.dtype = tp.float32) -> tp.Tensor:
    """Different numbers on every rank."""
    size = int(np.prod(shape))
    return (tp.arange(size) + 50 * rank).reshape(shape).to(dtype)


def zeros(shape: tuple[int, ...], dtype: tp.dtype = tp.float32) -> tp.Tensor:
    return tp.zeros(shape, dtype=dtype)


def check(got: tp.Tensor, expected: tp.Tensor) -> None:
    assert got.dtype is expected.dtype and got.shape == expected.shape
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ranks(3)
def test_all_kinds_of_dtypes(rank: int, dtype: tp.dtype) -> None:
    x, shape = values(rank, (2, 2), dtype), (2, 2)
    outputs = [zeros(shape, dtype) for _ in range(3)]
    dist.all_gather(outputs, x)
    for of, output in enumerate(outputs):
        check(output, values(of, shape, dtype))
    whole = zeros((6, 2), dtype)
    dist.all_gather_into_tensor(whole, x)
    check(whole, tp.cat([values(of, shape, dtype) for of in range(3)]))
    received = zeros((3, 2), dtype)
    dist.all_to_all_single(received, values(rank, (3, 2), dtype))
    check(received, tp.stack([values(of, (3, 2), dtype)[rank] for of in range(3)]))
    own = zeros(shape, dtype)
    dist.scatter(own, [values(to, shape, dtype) for to in range(3)] if rank == 1 else None, src=1)
    check(own, values(rank, shape, dtype))


@pytest.mark.parametrize("shape", [(), (5,), (0, 3)], ids=str)
@ranks(1, 2, 4)
def test_all_kinds_of_shapes(rank: int, shape: tuple[int, ...]) -> None:
    size, last = dist.get_world_size(), dist.get_world_size() - 1
    x = values(rank, shape)
    outputs = [zeros(shape) for _ in range(size)]
    dist.all_gather(outputs, x)
    gathered = [zeros(shape) for _ in range(size)] if rank == last else None
    dist.gather(x, gathered, dst=last)
    stacked = zeros((size, *shape))
    work = dist.all_gather_single(stacked, x, async_op=True)
    assert work is not None and work.wait()
    own = zeros(shape)
    dist.scatter(own, [values(to, shape) for to in range(size)] if rank == 0 else [])
    check(own, x)
    for of in range(size):
        check(outputs[of], values(of, shape))
        check(stacked[of], values(of, shape))
        if gathered is not None:
            check(gathered[of], values(of, shape))


@ranks(2)
def test_gathering_of_two(rank: int) -> None:
    x = values(rank, (2, 2))
    outputs = [zeros((2, 2)) for _ in range(2)]
    dist.all_gather(outputs, x)
    check(outputs[1], values(1, (2, 2)))
    uneven = [zeros((1,)), zeros((4,))]
    dist.all_gather(uneven, values(rank, (1 + 3 * rank,)))
    check(uneven[1], values(1, (4,)))
    dist.gather(x, outputs if rank == 1 else None, dst=1)
    check(outputs[0], values(0, (2, 2)))
    dist.scatter(x, outputs if rank == 1 else None, src=1)
    check(x, values(rank, (2, 2)))


@ranks(3)
def test_all_gather_of_different_sizes(rank: int) -> None:
    shapes: list[tuple[int, ...]] = [(2, 2), (0,), (3,)]
    outputs = [zeros(shape) for shape in shapes]
    dist.all_gather(outputs, values(rank, shapes[rank]))
    for of, output in enumerate(outputs):
        check(output, values(of, shapes[of]))


@ranks(3)
def test_gathering_into_views(rank: int) -> None:
    whole = zeros((2, 3))
    dist.all_gather(list(whole.unbind(1)), tp.tensor([1.0, 2.0]) * (rank + 1))
    assert whole.tolist() == [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]


@pytest.mark.parametrize("dtype", [tp.float32, tp.bool, tp.int64], ids=str)
@ranks(1, 3)
def test_all_to_all_of_different_sizes(rank: int, dtype: tp.dtype) -> None:
    size = dist.get_world_size()

    def count(of: int, to: int) -> int:
        return (of * to + of) % 3  # 0 for all that rank 0 sends

    inputs = [values(10 * rank + to, (count(rank, to), 2), dtype) for to in range(size)]
    expected = [values(10 * of + rank, (count(of, rank), 2), dtype) for of in range(size)]
    outputs = [zeros((count(of, rank), 2), dtype) for of in range(size)]
    dist.all_to_all(outputs, inputs)
    for output, wanted in zip(outputs, expected, strict=True):
        check(output, wanted)
    received = zeros((sum(count(of, rank) for of in range(size)), 2), dtype)
    dist.all_to_all_single(
        received,
        tp.cat(inputs),
        [count(of, rank) for of in range(size)],
        [count(rank, to) for to in range(size)],
    )
    check(received, tp.cat(expected))


@ranks(2)
def test_all_to_all_of_nothing_and_of_vectors(rank: int) -> None:
    nothing = zeros((0, 3))
    dist.all_to_all_single(nothing, nothing.clone(), [0, 0], [0, 0])
    dist.all_to_all_single(nothing, nothing.clone())
    x, out = values(rank, (3,)), zeros((4,) if rank else (2,))
    dist.all_to_all_single(out, x, [2, 2] if rank else [1, 1], [1, 2])
    check(out, tp.cat([values(of, (3,))[1:] if rank else values(of, (3,))[:1] for of in range(2)]))


@ranks(4)
def test_sub_groups(rank: int) -> None:
    group = dist.new_group([0, 2, 3])
    if rank == 1:
        return
    place = dist.get_rank(group)
    outputs = [tp.zeros(1) for _ in range(3)]
    dist.all_gather(outputs, tp.tensor([float(rank)]), group=group)
    assert tp.cat(outputs).tolist() == [0.0, 2.0, 3.0]
    own = tp.zeros(1)
    parts = [tp.tensor([float(i)]) for i in range(3)]
    dist.scatter(own, parts if place == 2 else None, group_src=2, group=group)
    assert own.item() == place
    dist.gather(own, outputs if place == 1 else None, dst=2, group=group)
    exchanged = [tp.zeros(1) for _ in range(3)]
    dist.all_to_all(exchanged, [own * 10 + to for to in range(3)], group=group)
    assert tp.cat(exchanged).tolist() == [float(place + 10 * of) for of in range(3)]


@ranks(2)
def test_bad_arguments(rank: int) -> None:
    x = tp.zeros(4)
    two = [tp.zeros(4), tp.zeros(4)]
    refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: dist.all_gather(tuple(two), x), TypeError, r"type List\[tensorplay.Tensor\]"),
        (lambda: dist.all_gather([x], x), ValueError, "expected 2, got 1"),
        (lambda: dist.all_gather(two, x[:3]), ValueError, r"expected 4 .* got float32\[3\]"),
        (lambda: dist.all_gather(two, x.int()), ValueError, "different dtypes"),
        (lambda: dist.all_gather_single(x, x), ValueError, "equal to world_size times input"),
        (lambda: dist.all_gather_single(x.int(), x[:2]), TypeError, "must have the same type"),
        (lambda: dist.gather(x, two, dst=1 - rank), ValueError, "must NOT be specified on non-d"),
        (lambda: dist.gather(x, dst=rank), ValueError, "must be specified on destination rank"),
        (lambda: dist.scatter(x, two, src=1 - rank), ValueError, "must NOT be specified on non-s"),
        (lambda: dist.scatter(x, src=rank), ValueError, "must be specified on source rank"),
        (lambda: dist.scatter(x[:3], two, src=rank), ValueError, "all tensors have one size"),
        (lambda: dist.all_to_all([x], two), ValueError, "expected 2, got 1"),
        (lambda: dist.all_to_all_single(x[:3], x[:3]), RuntimeError, "does not divide equally"),
        (
            lambda: dist.all_to_all_single(x, x, [1, 2], [2, 2]),
            RuntimeError,
            "Split sizes doesn't match total dim 0 size",
        ),
        (lambda: dist.all_to_all_single(x, x, [4], [4]), RuntimeError, "not equal to group size"),
        (lambda: dist.all_to_all_single(x, x[:2]), ValueError, "must have one shape"),
        (lambda: dist.all_to_all_single(zeros((2, 3)), zeros((2, 2))), ValueError, "same dims"),
    ]
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            call()


@ranks(2)
def test_sizes_that_sender_and_receiver_see_differently(rank: int) -> None:
    out = [tp.zeros(2), tp.zeros(3)]
    with pytest.raises(ValueError, match="rank 1 sends 1 elements to rank 0, which expects 3"):
        dist.all_to_all(out, [tp.zeros(2), tp.zeros(2)] if rank == 0 else [tp.zeros(1)] * 2)


def other_sizes(rank: int) -> None:
    dist.all_gather([tp.zeros(2), tp.zeros(3 + rank)], tp.zeros(2 + 2 * rank))


def test_all_gather_with_lists_that_differ() -> None:
    with pytest.raises(dist.DistBackendError, match=r"all_gather of 2, 3 elements.*of 2, 4 elem"):
        dist.run_ranks(other_sizes, 2)
