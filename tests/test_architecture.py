"""Imports go down the layers only, and none hides in a function."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tensorplay"

# From the bottom up. A name stands for a module or for a package with all that it contains, unless
# a longer name says otherwise. A module imports from lower layers; within a layer, from the same
# name only, and without cycles.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("_version", "_state", "_profile", "multiprocessing"),  # _state: grad mode, trace, dtype
    ("_dtypes",),
    ("_device", "_graph", "_views", "_printing"),  # the engine knows no op
    ("_tensor",),  # the only crossing between tensors and jax arrays
    ("_trace", "_structure", "_program"),  # what a traced call is made of
    ("_ops",),
    ("_function", "_gradcheck", "linalg"),
    ("autograd",),
    ("_serialization", "nn", "optim", "utils"),
    ("_freeze", "amp"),
    ("_guards",),  # what of Python a trace has read
    ("_staged",),  # a module call as a pair of programs
    ("distributed",),
    ("distributed.fsdp", "distributed.checkpoint"),
    ("distributed.__init__", "testing"),
    ("__init__",),
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}


def module_name(path: Path) -> str:
    """The dotted name below the package; a package is its ``__init__``."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def layer_name(module: str) -> str | None:
    """The entry of ``LAYERS`` that ``module`` belongs to."""
    parts = module.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((p for p in prefixes if p in LEVELS), None)


def runtime_imports(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.AST]]:
    """(name of the function around it or "", import statement), without those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield inside, node
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from runtime_imports(node, node.name)
        else:
            yield from runtime_imports(node, inside)


def absolute_names(module: str, node: ast.AST) -> list[str]:
    """The modules that an import statement names, those of the package as "tensorplay. ..."."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert isinstance(node, ast.ImportFrom)
    if not node.level:
        return [node.module or ""]
    base = module.split(".")[: -node.level]
    source = ".".join([*base, *(node.module.split(".") if node.module else [])])
    names = []
    for alias in node.names:
        inner = f"{source}.{alias.name}".lstrip(".")
        names.append(inner if inner in FILES or f"{inner}.__init__" in FILES else source)
    return [f"tensorplay.{name}" for name in names]


def own_imports(module: str) -> set[str]:
    """The modules of the package that ``module`` imports when it is run."""
    found = set()
    for _, node in runtime_imports(ast.parse(FILES[module].read_text())):
        for name in absolute_names(module, node):
            if name.partition(".")[0] == "tensorplay":
                inner = name.partition(".")[2]
                found.add(inner if inner in FILES else f"{inner}.__init__".lstrip("."))
    return found


@pytest.mark.parametrize("module", FILES)
def test_imports_go_down(module: str) -> None:
    own = layer_name(module)
    assert own is not None, f"{module} has no place in LAYERS"
    for imported in sorted(own_imports(module)):
        other = layer_name(imported)
        assert other is not None, f"{module} imports {imported}, which has no place in LAYERS"
        assert other == own or LEVELS[other] < LEVELS[own], (
            f"{module} ({own}) imports {imported} ({other}), which is not below it"
        )


def test_no_cycles() -> None:
    graphlib.TopologicalSorter({module: own_imports(module) for module in FILES}).prepare()


@pytest.mark.parametrize("module", FILES)
def test_imports_stand_at_the_top(module: str) -> None:
    hidden = [
        f"{function}(): {ast.unparse(node)}"
        for function, node in runtime_imports(ast.parse(FILES[module].read_text()))
        if function
    ]
    assert not hidden, "import at the top of the file instead"


@pytest.mark.parametrize(
    "module", [m for m in FILES if m.startswith(("nn.", "optim.", "utils.", "amp."))]
)
def test_single_rank_packages_know_nothing_of_ranks(module: str) -> None:
    assert not [name for name in own_imports(module) if name.startswith("distributed.")]


@pytest.mark.parametrize("module", FILES)
def test_no_torch(module: str) -> None:
    for _, node in runtime_imports(ast.parse(FILES[module].read_text())):
        for name in absolute_names(module, node):
            assert name.partition(".")[0] != "torch"
