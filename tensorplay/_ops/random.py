"""Random numbers: counter-based generators and the ops that draw from them.

A draw is a pure function of (seed, offset, stream): the generator only counts. So a compiled call
takes the numbers as inputs and draws what the same Python run eagerly would draw. ``stream`` is the
data-parallel rank while an FSDP module runs, which makes dropout masks differ between ranks that
were seeded alike; elsewhere it is 0.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _dtypes
from .._device import device as Device
from .._dtypes import dtype as Dtype
from .._state import state
from .._tensor import Tensor, wrap
from .creation import DeviceLike, _or_default, as_tensor, zeros
from .inplace import assign
from .primitive import primitive
from .views import as_sizes


class Generator:
    """A stream of random numbers, as ``torch.Generator``."""

    def __init__(self, device: DeviceLike = "cpu") -> None:
        self.device = Device(device or "cpu")
        self._seed = int.from_bytes(os.urandom(7), "little")
        self._offset = 0
        self.stream = 0

    def manual_seed(self, seed: int) -> Generator:
        """Starts the stream of ``seed`` (any 64-bit integer) anew."""
        _not_while_traced()
        self._seed, self._offset = int(seed) % 2**64, 0
        return self

    def seed(self) -> int:
        """Seeds from the operating system; returns the seed."""
        return self.manual_seed(int.from_bytes(os.urandom(7), "little"))._seed

    def initial_seed(self) -> int:
        return self._seed

    def get_state(self) -> Tensor:
        """The seed and the position as a uint8 tensor of 16 bytes."""
        _not_while_traced()
        return as_tensor(np.array([self._seed, self._offset], np.uint64).view(np.uint8))

    def set_state(self, new_state: Tensor) -> None:
        """Goes back to where ``get_state`` was called."""
        _not_while_traced()
        seed, offset = new_state.numpy().view(np.uint64).tolist()
        self._seed, self._offset = int(seed), int(offset)

    def draw(self) -> tuple[Any, Any, Any]:
        """(seed words, offset, stream) of the next draw."""
        if state.trace is not None:
            return state.trace.draw(self)
        offset, self._offset = self._offset, self._offset + 1
        return self.words(), np.uint32(offset), np.uint32(self.stream)

    def words(self) -> np.ndarray:
        """The seed as two uint32."""
        return np.array([self._seed >> 32, self._seed & 0xFFFFFFFF], np.uint32)

    def skip(self, draws: int) -> None:
        """Counts draws that a compiled call made."""
        self._offset += draws

    @property
    def offset(self) -> int:
        return self._offset


def _not_while_traced() -> None:
    if state.trace is not None:
        state.trace.abort("reads or sets the state of a random generator")


def default_generator() -> Generator:
    """This thread's generator."""
    if state.generator is None:
        state.generator = Generator()
    return state.generator  # type: ignore[no-any-return]


def manual_seed(seed: int) -> Generator:
    """Seeds this thread's generator and returns it."""
    return default_generator().manual_seed(seed)


def seed() -> int:
    """Seeds this thread's generator from the operating system."""
    return default_generator().seed()


def initial_seed() -> int:
    """The seed of this thread's generator."""
    return default_generator().initial_seed()


def get_rng_state() -> Tensor:
    """The state of this thread's generator."""
    return default_generator().get_state()


def set_rng_state(new_state: Tensor) -> None:
    """Sets the state of this thread's generator."""
    default_generator().set_state(new_state)


def _key(words: Any, offset: Any, stream: Any) -> Any:
    key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), offset)
    data = jnp.where(
        stream == 0, jax.random.key_data(key), jax.random.key_data(jax.random.fold_in(key, stream))
    )
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def _drawn(name: str, sample: Any) -> Any:
    def run(words, offset, stream, *params, **options):
        return sample(_key(words, offset, stream), *params, **options)

    return primitive(name, differentiable=False)(run)


_uniform = _drawn(
    "rand",
    lambda key, low, high, *, shape, dtype: (
        jax.random.uniform(key, shape, dtype) * (jnp.asarray(high) - low).astype(dtype)
        + jnp.asarray(low).astype(dtype)
    ),
)
_normal = _drawn(
    "randn",
    lambda key, mean, std, *, shape, dtype: (
        jax.random.normal(key, shape, dtype) * jnp.asarray(std).astype(dtype)
        + jnp.asarray(mean).astype(dtype)
    ),
)
_truncated = _drawn(
    "trunc_normal",
    lambda key, low, high, *, shape, dtype: jax.random.truncated_normal(
        key, low, high, shape, dtype
    ),
)
_integers = _drawn(
    "randint",
    lambda key, low, high, *, shape, dtype: jax.random.randint(key, shape, low, high, dtype),
)
_permutation = _drawn("randperm", lambda key, *, n: jax.random.permutation(key, n).astype(np.int64))
_bernoulli = _drawn(
    "bernoulli", lambda key, p, *, shape, dtype: jax.random.bernoulli(key, p, shape).astype(dtype)
)
_exponential = _drawn(
    "exponential",
    lambda key, rate, *, shape, dtype: (
        jax.random.exponential(key, shape, dtype) / jnp.asarray(rate).astype(dtype)
    ),
)
_categorical = _drawn(
    "multinomial", lambda key, p, *, n, replacement: _choose(key, p, n, replacement)
)


def _choose(key: Any, p: Any, n: int, replacement: bool) -> Any:
    logits = jnp.log(p)
    if replacement:
        drawn = jax.random.categorical(key, logits, axis=-1, shape=(n, *p.shape[:-1]))
        return jnp.moveaxis(drawn, 0, -1).astype(np.int64)
    noisy = logits + jax.random.gumbel(key, p.shape, p.dtype)
    return jax.lax.top_k(noisy, n)[1].astype(np.int64)


def _draw(generator: Generator | None) -> tuple[Any, Any, Any]:
    words, offset, stream = (generator or default_generator()).draw()
    return wrap_constant(words), wrap_constant(offset), wrap_constant(stream)


def wrap_constant(value: Any) -> Tensor:
    """A tensor over a number or array that an op takes as it is."""
    return wrap(jnp.asarray(value))


def _new(
    op: Any,
    params: tuple[Any, ...],
    sizes: Any,
    dtype: Any,
    device: DeviceLike,
    grad: bool,
    generator: Any,
) -> Tensor:
    target = zeros(sizes, device=device) if _is_meta(device) else None
    if target is not None:
        return target.to(_dtypes.from_numpy_dtype(dtype)).requires_grad_(grad)
    out = op(*_draw(generator), *params, shape=tuple(sizes), dtype=np.dtype(dtype))
    if device is not None:
        out = out.to(device)
    return out.requires_grad_() if grad else out


def _is_meta(device: DeviceLike) -> bool:
    found = device if device is not None else state.default_device
    return found is not None and str(found) == "meta"


def rand(
    *size: Any,
    dtype: Dtype | None = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    """Uniform on [0, 1), shape ``size``."""
    return _new(
        _uniform, (0.0, 1.0), as_sizes(size), _or_default(dtype), device, requires_grad, generator
    )


def randn(
    *size: Any,
    dtype: Dtype | None = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    """Standard normal, shape ``size``."""
    return _new(
        _normal, (0.0, 1.0), as_sizes(size), _or_default(dtype), device, requires_grad, generator
    )


def randint(
    low: int = 0,
    high: Any = None,
    size: Any = None,
    *,
    dtype: Dtype | None = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    """Integers from ``low`` (0 if left out) to ``high``, exclusive."""
    if size is None:
        low, high, size = 0, low, high
    if low >= high:
        raise RuntimeError(
            f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}"
        )
    found = (dtype or _dtypes.int64).numpy
    return _new(
        _integers, (int(low), int(high)), as_sizes((size,)), found, device, requires_grad, generator
    )


def randint_like(
    input: Tensor,
    low: int,
    high: int | None = None,
    *,
    dtype: Dtype | None = None,
    device: DeviceLike = None,
) -> Tensor:
    """Integers from ``low`` (0 if ``high`` is left out) to ``high`` in the shape of ``input``."""
    low, high = (0, low) if high is None else (low, high)
    found = dtype or input.dtype
    whole = found if not found.is_floating_point else None
    return randint(low, high, input.shape, dtype=whole, device=device).to(found)


def rand_like(
    input: Tensor,
    *,
    dtype: Dtype | None = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """Uniform on [0, 1) in the shape of ``input``."""
    return rand(input.shape, dtype=dtype or input.dtype, device=device, requires_grad=requires_grad)


def randn_like(
    input: Tensor,
    *,
    dtype: Dtype | None = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """Standard normal in the shape of ``input``."""
    return randn(
        input.shape, dtype=dtype or input.dtype, device=device, requires_grad=requires_grad
    )


def randperm(
    n: int,
    *,
    generator: Generator | None = None,
    dtype: Dtype | None = None,
    device: DeviceLike = None,
) -> Tensor:
    """A random order of 0 .. n-1."""
    out = _permutation(*_draw(generator), n=int(n))
    return out if dtype is None else out.to(dtype)


def normal(mean: Any, std: Any, size: Any = None, *, generator: Generator | None = None) -> Tensor:
    """Normal with ``mean`` and ``std``: numbers (with ``size``) or tensors."""
    if size is not None:
        return _new(
            _normal, (mean, std), as_sizes((size,)), _or_default(None), None, False, generator
        )
    noise = randn((mean if isinstance(mean, Tensor) else std).shape, generator=generator)
    return noise * std + mean


def bernoulli(input: Tensor, *, generator: Generator | None = None) -> Tensor:
    """1 with probability ``input``, else 0."""
    return _bernoulli(
        *_draw(generator), input.detach(), shape=tuple(input.shape), dtype=input.dtype.numpy
    )


def dropout_mask(shape: tuple[int, ...], keep: float, dtype: Any) -> Tensor:
    """1 with probability ``keep``, else 0; what dropout multiplies by."""
    return _bernoulli(*_draw(None), keep, shape=shape, dtype=dtype)


def multinomial(
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: Generator | None = None,
) -> Tensor:
    """Indices drawn with weights ``input`` (rows if 2-D)."""
    if not replacement and num_samples > input.shape[-1]:
        raise RuntimeError(
            "cannot sample n_sample > prob_dist.size(-1) samples without replacement"
        )
    return _categorical(*_draw(generator), input.detach(), n=num_samples, replacement=replacement)


def _fill(x: Tensor, op: Any, params: tuple[Any, ...], generator: Generator | None) -> Tensor:
    if x.is_meta:
        return x
    if x._layout is not None:
        x._layout.refuse(x, "random fill", "initialise before fully_shard, or fill p.to_local()")
    value = op(*_draw(generator), *params, shape=tuple(x.shape), dtype=_float_of(x))
    return assign(x, value.to(x.dtype))


def _float_of(x: Tensor) -> Any:
    return x.dtype.numpy if x.is_floating_point() else np.dtype(np.float32)


def normal_(
    x: Tensor, mean: float = 0, std: float = 1, *, generator: Generator | None = None
) -> Tensor:
    """Fills with normal values."""
    return _fill(x, _normal, (float(mean), float(std)), generator)


def uniform_(
    x: Tensor, from_: float = 0, to: float = 1, *, generator: Generator | None = None
) -> Tensor:
    """Fills with uniform values of [from_, to)."""
    return _fill(x, _uniform, (float(from_), float(to)), generator)


def truncated_normal_(
    x: Tensor, low: float, high: float, generator: Generator | None = None
) -> Tensor:
    """Fills with standard normal values limited to (low, high)."""
    return _fill(x, _truncated, (float(low), float(high)), generator)


def bernoulli_(x: Tensor, p: float = 0.5, *, generator: Generator | None = None) -> Tensor:
    """Fills with 1 with probability ``p``, else 0."""
    return _fill(x, _bernoulli, (float(p),), generator)


def random_(
    x: Tensor, from_: int = 0, to: int | None = None, *, generator: Generator | None = None
) -> Tensor:
    """Fills with integers of [from_, to); one argument is ``to``, none the dtype's whole range."""
    if to is None:
        from_, to = 0, from_ or _largest(x) + 1
    value = randint(from_, to, x.shape, generator=generator)
    return assign(x, value.to(x.dtype))


def _largest(x: Tensor) -> int:
    if x.is_floating_point():
        return 2 ** {"float16": 11, "bfloat16": 8, "float64": 53}.get(x.dtype.name, 24)
    return 1 if x.dtype.name == "bool" else min(_dtypes.iinfo(x.dtype).max, 2**63 - 2)


def exponential_(x: Tensor, lambd: float = 1, *, generator: Generator | None = None) -> Tensor:
    """Fills with exponential values of rate ``lambd``."""
    return _fill(x, _exponential, (float(lambd),), generator)
