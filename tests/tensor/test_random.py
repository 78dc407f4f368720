"""Random numbers: seeds and states reproduce them, and their distributions are right."""

from __future__ import annotations

import threading

import pytest

import tensorplay as tp


def _draws():
    return [
        tp.rand(3), tp.randn(2, 2), tp.randint(0, 100, (4,)), tp.randperm(5),
        tp.normal(0.0, 1.0, (2,)),
        tp.bernoulli(tp.full((4,), 0.5)), tp.multinomial(tp.ones(5), 3),
        tp.empty(3).uniform_(-1, 1),
        tp.empty(3).normal_(1, 2), tp.empty(3).exponential_(),
        tp.zeros(3, dtype=tp.int64).random_(9),
        tp.rand_like(tp.ones(2)), tp.randn_like(tp.ones(2)), tp.randint_like(tp.ones(2), 9),
        tp.empty(4).bernoulli_(0.5),
    ]  # fmt: skip


def _same(a, b):
    return all(tp.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_seed_reproduces_every_draw():
    tp.manual_seed(7)
    first = _draws()
    second = _draws()
    tp.manual_seed(7)
    assert _same(first, _draws()) and not _same(first, second)
    assert tp.initial_seed() == 7
    tp.manual_seed(8)
    assert not tp.equal(tp.rand(3), first[0])
    assert tp.manual_seed(-1).initial_seed() == 2**64 - 1
    assert tp.seed() != tp.seed()


def test_states_can_be_kept_and_set():
    tp.manual_seed(3)
    tp.rand(2)
    state = tp.get_rng_state()
    first = _draws()
    assert state.dtype is tp.uint8
    tp.set_rng_state(state)
    assert _same(first, _draws())


def test_generators_are_streams_of_their_own():
    tp.manual_seed(0)
    expected = tp.rand(2)
    tp.manual_seed(0)
    own = tp.Generator().manual_seed(5)
    a = tp.rand(3, generator=own)
    assert tp.equal(tp.rand(2), expected)
    again = tp.Generator("cpu")
    again.manual_seed(5)
    assert tp.equal(tp.rand(3, generator=again), a) and again.device == tp.device("cpu")
    state = again.get_state()
    b = tp.randperm(6, generator=again)
    own.set_state(state)
    assert tp.equal(tp.randperm(6, generator=own), b)
    for fill in ("normal_", "uniform_", "bernoulli_", "exponential_"):
        own.manual_seed(1)
        first = getattr(tp.empty(3), fill)(generator=own)
        own.manual_seed(1)
        assert tp.equal(getattr(tp.empty(3), fill)(generator=own), first)


def test_threads_have_generators_of_their_own():
    tp.manual_seed(11)
    expected = tp.rand(2)
    found = []

    def other():
        tp.manual_seed(11)
        found.append(tp.rand(2))

    tp.manual_seed(11)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert tp.equal(found[0], expected) and tp.equal(tp.rand(2), expected)


def test_distributions():
    tp.manual_seed(0)
    n = 20000
    u, z = tp.rand(n), tp.randn(n)
    assert float(u.min()) >= 0 and float(u.max()) < 1
    assert abs(float(u.mean()) - 0.5) < 0.01 and abs(float(u.var()) - 1 / 12) < 0.005
    assert abs(float(z.mean())) < 0.03 and abs(float(z.std()) - 1) < 0.03
    assert abs(float((z.abs() < 1).float().mean()) - 0.6827) < 0.02
    i = tp.randint(-2, 3, (n,))
    assert i.dtype is tp.int64 and i.unique().tolist() == [-2, -1, 0, 1, 2]
    assert abs(float(i.float().mean())) < 0.05
    assert tp.randperm(50).sort().values.tolist() == list(range(50))
    b = tp.bernoulli(tp.full((n,), 0.3))
    assert b.dtype is tp.float32 and abs(float(b.mean()) - 0.3) < 0.02
    e = tp.empty(n).exponential_(2.0)
    assert abs(float(e.mean()) - 0.5) < 0.03 and float(e.min()) >= 0
    m = tp.normal(tp.tensor([0.0, 10.0]).expand(n // 2, 2), 0.1)
    assert abs(float(m[:, 1].mean()) - 10) < 0.01
    s = tp.empty(n).normal_(3, 0.5)
    assert abs(float(s.mean()) - 3) < 0.03 and abs(float(s.std()) - 0.5) < 0.02


def test_multinomial_follows_weights():
    tp.manual_seed(0)
    weights = tp.tensor([0.0, 1.0, 3.0])
    counts = tp.multinomial(weights, 4000, replacement=True).bincount(minlength=3)
    assert counts[0].item() == 0 and abs(counts[2].item() / 4000 - 0.75) < 0.05
    rows = tp.multinomial(tp.ones(3, 4), 4)
    assert rows.sort(1).values.tolist() == [[0, 1, 2, 3]] * 3
    with pytest.raises(RuntimeError, match="without replacement"):
        tp.multinomial(weights, 4)


def test_dtypes_shapes_and_refusals():
    assert tp.randn(2, 3, dtype=tp.float64).dtype is tp.float64
    assert tp.rand((2, 3), dtype=tp.bfloat16).shape == (2, 3)
    assert tp.randint(5, (2,), dtype=tp.int32).dtype is tp.int32
    assert tp.randint(high=5, size=(2,)).shape == (2,)
    assert tp.randperm(4, dtype=tp.int32).dtype is tp.int32
    assert tp.randn(2, requires_grad=True).requires_grad
    assert tp.rand(0).shape == (0,) and tp.randn(()).shape == ()
    assert tp.randn(2, device="meta").is_meta
    x = tp.zeros(100, dtype=tp.uint8).random_()
    assert int(x.min()) >= 0 and int(x.max()) > 100
    with pytest.raises(RuntimeError, match="less than"):
        tp.randint(3, 3, (2,))
    leaf = tp.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        leaf.normal_()
    with tp.no_grad():
        leaf.uniform_(2, 3)
    assert float(leaf.min()) >= 2
