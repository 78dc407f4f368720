"""Traced programs as data: inlining, dependencies, and evaluation in an order of our choosing.

A *program* here is a ``jax.extend.core.Jaxpr``: a list of equations over variables. Evaluating one
inside another trace (``Evaluation``) makes it part of the compiled function; values may be given
lazily, which is how a parameter is gathered just before its first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal, Var

Thunk = Callable[[], Any]
Handler = Callable[[Any, list[Any]], None]


def per_rank_program(
    fn: Callable[..., Any], args: Sequence[Any], mesh: Any
) -> tuple[Jaxpr, list[Any]]:
    """The program of ``fn(*args)`` on one rank of ``mesh`` (named axes are bound), inlined.

    Args:
        fn: takes and returns flat sequences of arrays.
        args: ``jax.ShapeDtypeStruct`` of each argument on one rank.

    Returns:
        The program, and the constants that belong to its last inputs.
    """
    spec = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with jax.enable_x64(True):
        closed = jax.make_jaxpr(mapped)(*args)
    (equation,) = closed.jaxpr.eqns
    inner = equation.params["jaxpr"]
    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    constants = [known[v] for v in equation.invars if v in known]
    assert [v for v in equation.invars if v not in known] == closed.jaxpr.invars
    order = [i for i, v in enumerate(equation.invars) if v not in known]
    order += [i for i, v in enumerate(equation.invars) if v in known]
    invars = [inner.invars[i] for i in order]
    return inlined(inner, invars), constants


def inlined(program: Any, invars: Sequence[Var]) -> Jaxpr:
    """``program`` with every inner jit and checkpoint replaced by its equations."""
    names: dict[Var, Any] = {}
    equations: list[Any] = []

    def look_up(scope: dict[Var, Any], v: Any) -> Any:
        return v if isinstance(v, Literal) else scope[v]

    def add(inner: Any, scope: dict[Var, Any]) -> None:
        for eqn in inner.eqns:
            inputs = [look_up(scope, v) for v in eqn.invars]
            if eqn.primitive.name in ("jit", "pjit", "closed_call", "core_call", "checkpoint"):
                body, below = _body(eqn)
                below.update(zip(body.invars, inputs, strict=True))
                add(body, below)
                results = [look_up(below, v) for v in body.outvars]
                scope.update(zip(eqn.outvars, results, strict=True))
                continue
            outputs = [Var(v.aval) for v in eqn.outvars]
            scope.update(zip(eqn.outvars, outputs, strict=True))
            equations.append(eqn.replace(invars=inputs, outvars=outputs))

    fresh = [Var(v.aval) for v in invars]
    names.update(zip(invars, fresh, strict=True))
    add(program, names)
    outvars = [look_up(names, v) for v in program.outvars]
    return Jaxpr((), fresh, outvars, equations, program.effects, debug_info=program.debug_info)


def _body(eqn: Any) -> tuple[Any, dict[Var, Any]]:
    """The inner program of an equation, and its constants."""
    body = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
    if not hasattr(body, "consts"):
        return body, {}
    constants = zip(body.jaxpr.constvars, body.consts, strict=True)
    return body.jaxpr, {var: Literal(value, var.aval) for var, value in constants}


def dependencies(program: Jaxpr, num_constants: int = 0) -> dict[Any, frozenset[int]]:
    """For every variable: the positions of the inputs that it depends on, but for the constants,
    which are the last inputs."""
    varying = len(program.invars) - num_constants
    found: dict[Any, frozenset[int]] = {
        v: frozenset((i,) if i < varying else ()) for i, v in enumerate(program.invars)
    }
    for eqn in program.eqns:
        united = frozenset().union(*(depends(found, v) for v in eqn.invars))
        found.update((v, united) for v in eqn.outvars)
    return found


def depends(found: dict[Any, frozenset[int]], v: Any) -> frozenset[int]:
    """What ``v`` depends on; nothing, for a literal."""
    return frozenset() if isinstance(v, Literal) else found[v]


class Evaluation:
    """Evaluates a program, one equation at a time.

    Args:
        program: what to evaluate.
        inputs: a value for each input; ``Thunk`` objects in ``lazy`` take precedence.
        lazy: input position to a function that makes the value at its first use.
        handlers: by name of a primitive, a function of (equation, input values) that is called in
            its place; the equation's results are its inputs.
    """

    def __init__(
        self,
        program: Jaxpr,
        inputs: Sequence[Any],
        lazy: dict[int, Thunk] | None = None,
        handlers: Mapping[str, Handler] | None = None,
    ) -> None:
        self.program = program
        self._handlers = handlers or {}
        self._lazy = {program.invars[i]: thunk for i, thunk in (lazy or {}).items()}
        self._values = {
            v: x
            for i, (v, x) in enumerate(zip(program.invars, inputs, strict=True))
            if i not in (lazy or {})
        }
        self._makers: dict[Any, Any] | None = None

    def run(self, on_value: Callable[[Any], None] = lambda v: None) -> list[Any]:
        """All equations in order; ``on_value(var)`` after each result. Returns the outputs."""
        for eqn in self.program.eqns:
            self._apply(eqn)
            for v in eqn.outvars:
                on_value(v)
        return [self.value(v) for v in self.program.outvars]

    def value(self, v: Any) -> Any:
        """The value of a variable that was computed already, or of an input."""
        if isinstance(v, Literal):
            return v.val
        if v not in self._values:
            self._values[v] = self._lazy[v]()
        return self._values[v]

    def demand(self, v: Any) -> Any:
        """The value of any variable, computing just the equations that it needs."""
        if isinstance(v, Literal) or v in self._values or v in self._lazy:
            return self.value(v)
        if self._makers is None:
            self._makers = {o: e for e in self.program.eqns for o in e.outvars}
        for eqn in _needed(self._makers, v, self._values):
            self._apply(eqn)
        return self._values[v]

    def _apply(self, eqn: Any) -> None:
        inputs = [self.value(v) for v in eqn.invars]
        handler = self._handlers.get(eqn.primitive.name)
        if handler is not None:
            handler(eqn, inputs)
            self._values.update(zip(eqn.outvars, inputs, strict=True))
            return
        params = eqn.primitive.get_bind_params(eqn.params)
        with eqn.ctx.manager:
            results = eqn.primitive.bind(*inputs, **params)
        if not eqn.primitive.multiple_results:
            results = [results]
        self._values.update(zip(eqn.outvars, results, strict=True))


def _needed(makers: dict[Any, Any], target: Any, known: Any) -> Iterable[Any]:
    """The equations that make ``target``, in an order in which they can run."""
    order: list[Any] = []
    seen: set[int] = set()
    stack: list[tuple[Any, bool]] = [(makers[target], False)]
    while stack:
        eqn, ready = stack.pop()
        if ready:
            order.append(eqn)
            continue
        if id(eqn) in seen:
            continue
        seen.add(id(eqn))
        stack.append((eqn, True))
        for v in eqn.invars:
            if not isinstance(v, Literal) and v not in known and v in makers:
                stack.append((makers[v], False))
    return order
