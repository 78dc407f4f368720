"""When groups are gathered, relative to the compute of the modules that own them.

The order is plain data (``gathers_at_entry``). It reaches XLA as dependencies: while a call is
traced, ``mark`` puts an equation into the program where a group's module is entered, in forward on
an input, in backward on the gradient of an output. Evaluating the marked program issues there the
gathers that the order lists, each made to depend on the marked value: none can start earlier, and
each may overlap with the compute of the module that was entered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, Literal, Primitive
from jax.interpreters import ad, batching, mlir

ENTER = "enter"
LEAVE = "leave"
ENTER_BACKWARD = "enter backward"
LEAVE_BACKWARD = "leave backward"
_TRANSPOSED = {LEAVE: ENTER_BACKWARD, ENTER: LEAVE_BACKWARD}
_TRANSPOSED |= {back: forth for forth, back in _TRANSPOSED.items()}

MARK = "fsdp_mark"


def gathers_at_entry(
    entries: Sequence[int], explicit: Mapping[int, Sequence[int]]
) -> dict[int, tuple[int, ...]]:
    """For each group: the groups whose gathers are issued when its modules are entered.

    A group's own gather comes first, unless an earlier entry issued it; then those listed.

    Args:
        entries: groups in the order in which they are entered first.
        explicit: what to issue ahead at the entry of a group; by default the next one entered.
    """
    order = {}
    for position, group in enumerate(entries):
        ahead = explicit.get(group, entries[position + 1 : position + 2])
        order[group] = (group, *(g for g in ahead if g != group))
    return order


_mark_p = Primitive(MARK)


def mark(value: Any, place: str, group: int) -> Any:
    """``value`` itself; the program says that here ``place`` of ``group`` is."""
    return _mark_p.bind(value, place=place, group=group)


def without_marks(program: Jaxpr, variables: Sequence[Any]) -> list[Any]:
    """``variables``, each traced back through the marks that it comes from."""
    marked = {e.outvars[0]: e.invars[0] for e in program.eqns if e.primitive is _mark_p}

    def source(v: Any) -> Any:
        while not isinstance(v, Literal) and v in marked:
            v = marked[v]
        return v

    return [source(v) for v in variables]


def depending_on(value: Any, token: Any, zero: Any) -> Any:
    """``value``, bit for bit, which XLA cannot compute before ``token``.

    XLA:CPU drops optimization barriers before it schedules, so the dependency is one of data: a bit
    of the token, masked by ``zero``, is or-ed into the value.

    Args:
        zero: uint32[1] that is 0, as an input of the program, so that XLA does not know.
    """
    if token.size == 0 or value.size == 0:
        return value
    nothing = (_bits(token.reshape(-1)[:1]).astype(np.uint32) & zero)[0]
    if value.dtype == np.bool_:
        return value | (nothing != 0)
    bits = _bits(value)
    return lax.bitcast_convert_type(bits | nothing.astype(bits.dtype), value.dtype)


def _bits(value: Any) -> Any:
    """The value's bits as unsigned integers of its width."""
    if value.dtype == np.bool_:
        return value.astype(np.uint8)
    if jnp.issubdtype(value.dtype, np.complexfloating):
        value = value.real
    return lax.bitcast_convert_type(value, np.dtype(f"uint{8 * value.dtype.itemsize}"))


def _transpose(cotangent: Any, _: Any, *, place: str, group: int) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [cotangent]
    return [mark(cotangent, _TRANSPOSED[place], group)]


_mark_p.def_impl(lambda value, *, place, group: value)
_mark_p.def_abstract_eval(lambda aval, *, place, group: aval)
ad.deflinear2(_mark_p, _transpose)
mlir.register_lowering(_mark_p, lambda context, value, *, place, group: [value])
batching.primitive_batchers[_mark_p] = lambda values, dims, *, place, group: (
    mark(values[0], place, group),
    dims[0],
)
