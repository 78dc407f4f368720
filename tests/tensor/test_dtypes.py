"""Dtypes and 64-bit values, as in PyTorch, beside jax left in 32 bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest

import tensorplay as tp


@pytest.mark.parametrize("name", parity.cases("dtypes"))
def test_as_torch(name):
    parity.check("dtypes", name)


def test_users_jax_stays_in_32_bits():
    x = tp.tensor([2**40, 1]) + 1
    y = (tp.ones(2, dtype=tp.float64, requires_grad=True) / 3).sum()
    y.backward()
    x[0] = 5
    assert x.dtype is tp.int64 and y.dtype is tp.float64
    assert not jax.config.jax_enable_x64
    assert jnp.arange(3).dtype == jnp.int32
    assert (jnp.ones(2) / 3).dtype == jnp.float32
    assert jnp.asarray(np.float64(1)).dtype == jnp.float32
    assert jax.jit(lambda a: a * 2)(np.ones(2)).dtype == jnp.float32


def test_hooks_and_custom_gradients_run_in_32_bits():
    seen = []
    x = tp.ones(2, dtype=tp.float64, requires_grad=True)
    x.register_hook(lambda g: seen.append(jnp.ones(1).dtype))
    (x * 2).sum().backward()
    assert seen == [jnp.float32]
