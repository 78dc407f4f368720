"""What an op costs beside a bare ``jax.jit`` call, on small arrays.

    python tests/benchmarks/op_overhead.py

Prints microseconds and the ratio to the bare call; an add under no_grad should stay below 2.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import jax

import tensorplay as tp


def microseconds(*fns: Callable[[], Any], number: int = 500, repeat: int = 40) -> list[float]:
    """The time of one call of each, the best of many short runs that take turns."""
    best = [float("inf")] * len(fns)
    for _ in range(repeat):
        for i, fn in enumerate(fns):
            best[i] = min(best[i], timeit.timeit(fn, number=number) / number * 1e6)
    return best


def main() -> None:
    x, y = tp.randn(8, 8), tp.randn(8, 8)
    leaf = tp.randn(8, 8, requires_grad=True)
    bare_add = jax.jit(lambda a, b: a + b)
    a, b = x._read(), y._read()
    rows: dict[str, Callable[[], Any]] = {
        "x + y": lambda: x + y,
        "x + 1.5": lambda: x + 1.5,
        "x @ y": lambda: x @ y,
        "x.sum()": lambda: x.sum(),
        "x.view(64)": lambda: x.view(64),
        "x[1:3]": lambda: x[1:3],
        "x.t() + y": lambda: x.t() + y,
        "x.add_(y)": lambda: x.add_(y),
        "leaf + y (recorded)": lambda: leaf + y,
        "leaf * y (recorded)": lambda: leaf * y,
        "leaf.view(64) (recorded)": lambda: leaf.view(64),
        "(leaf * y).sum().backward()": lambda: (leaf * y).sum().backward(),
    }
    for name, fn in rows.items():
        recorded = "recorded" in name or "backward" in name
        fn()
        with tp.set_grad_enabled(recorded):
            bare, cost = microseconds(lambda: bare_add(a, b), fn)
        print(f"{name:30s} {cost:8.2f} us   {cost / bare:5.2f} x  (bare {bare:.2f} us)")


if __name__ == "__main__":
    main()
