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


def microseconds(fn: Callable[[], Any], number: int = 2000, repeat: int = 7) -> float:
    """The time of one call, the best of several runs."""
    fn()
    return min(timeit.repeat(fn, number=number, repeat=repeat)) / number * 1e6


def main() -> None:
    x, y = tp.randn(8, 8), tp.randn(8, 8)
    leaf = tp.randn(8, 8, requires_grad=True)
    bare_add = jax.jit(lambda a, b: a + b)
    a, b = x._read(), y._read()
    bare = microseconds(lambda: bare_add(a, b))
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
    print(f"{'bare jax.jit add':30s} {bare:8.2f} us")
    for name, fn in rows.items():
        if "recorded" in name or "backward" in name:
            cost = microseconds(fn)
        else:
            with tp.no_grad():
                cost = microseconds(fn)
        print(f"{name:30s} {cost:8.2f} us   {cost / bare:5.2f} x")


if __name__ == "__main__":
    main()
