"""Nested values: taking the tensors out of a call's arguments or outputs, and putting others in.

Tuples (named ones too), lists, dicts, dataclasses, and any object whose attributes hold tensors are
opened; everything else is a constant of the structure.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from ._tensor import Tensor

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The place of tensor number ``index``."""

    index: int


@dataclasses.dataclass(frozen=True)
class Constant:
    """A value that holds no tensor."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Container:
    """A container of type ``kind`` with ``children`` under ``keys``.

    ``template``: the original object, copied when rebuilding what has no constructor of its own.
    """

    kind: type
    keys: tuple[Any, ...]
    children: tuple[Any, ...]
    template: Any = dataclasses.field(compare=False, default=None)


@dataclasses.dataclass(frozen=True)
class Handed:
    """The container found along ``path`` inside another value, as that very object."""

    path: tuple[Any, ...]


def constants(spec: Any) -> Iterator[Any]:
    """The values of a structure that hold no tensor."""
    if isinstance(spec, Constant):
        yield spec.value
    elif isinstance(spec, Container):
        for child in spec.children:
            yield from constants(child)


def containers(value: Any) -> dict[int, tuple[Any, ...]]:
    """The path to each mutable container inside ``value``, by identity."""
    found: dict[int, tuple[Any, ...]] = {}

    def visit(part: Any, path: tuple[Any, ...]) -> None:
        if isinstance(part, (Tensor, *_ATOMS)) or id(part) in found:
            return
        opened = _open(part)
        if opened is None:
            return
        if type(part) is not tuple:
            found[id(part)] = path
        for key, child in zip(*opened, strict=True):
            visit(child, (*path, key))

    visit(value, ())
    return found


def at_path(value: Any, path: tuple[Any, ...]) -> Any:
    """The part of ``value`` that ``path`` leads to."""
    for key in path:
        keys, children = _open(value)  # type: ignore[misc]
        value = children[keys.index(key)]
    return value


def flatten(
    value: Any, known: dict[int, tuple[Any, ...]] | None = None
) -> tuple[list[Tensor], Any]:
    """The tensors inside ``value`` in order (each object once), and its structure.

    Args:
        known: containers that the structure refers to by path; see `containers`.
    """
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}

    def visit(part: Any, above: tuple[int, ...]) -> Any:
        if isinstance(part, Tensor):
            if id(part) not in numbers:
                numbers[id(part)] = len(tensors)
                tensors.append(part)
            return Leaf(numbers[id(part)])
        if isinstance(part, _ATOMS) or id(part) in above:
            return Constant(part)
        if known and id(part) in known:
            return Handed(known[id(part)])
        opened = _open(part)
        if opened is None:
            return Constant(part)
        keys, children = opened
        before = len(numbers)
        visited = tuple(visit(c, (*above, id(part))) for c in children)
        plain = type(part) in (tuple, list, dict)
        if not plain and len(numbers) == before and not any(map(_holds_leaf, visited)):
            return Constant(part)
        return Container(type(part), keys, visited, None if plain else part)

    return tensors, visit(value, ())


def _holds_leaf(spec: Any) -> bool:
    if isinstance(spec, Container):
        return any(map(_holds_leaf, spec.children))
    return isinstance(spec, (Leaf, Handed))


def _open(part: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """Keys and children of a container; None for what is not opened."""
    if isinstance(part, (tuple, list)):
        return tuple(range(len(part))), tuple(part)
    if isinstance(part, dict):
        return tuple(part), tuple(part.values())
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        names = tuple(f.name for f in dataclasses.fields(part) if hasattr(part, f.name))
        return names, tuple(getattr(part, n) for n in names)
    if callable(part) or not hasattr(part, "__dict__"):
        return None
    return tuple(vars(part)), tuple(vars(part).values())


def unflatten(spec: Any, tensors: list[Any], origin: Any = None) -> Any:
    """``value`` again, with ``tensors`` in the places of the original ones.

    Args:
        origin: where the containers are that the structure refers to by path.
    """
    if isinstance(spec, Leaf):
        return tensors[spec.index]
    if isinstance(spec, Constant):
        return spec.value
    if isinstance(spec, Handed):
        return at_path(origin, spec.path)
    children = [unflatten(c, tensors, origin) for c in spec.children]
    if spec.kind in (tuple, list):
        return spec.kind(children)
    if spec.kind is dict:
        return dict(zip(spec.keys, children, strict=True))
    return _rebuild(spec, children)


def _rebuild(spec: Container, children: list[Any]) -> Any:
    if issubclass(spec.kind, tuple):
        return (
            spec.kind(*children) if hasattr(spec.kind, "_fields") else spec.kind(children)  # type: ignore[call-arg]
        )
    out = copy.copy(spec.template)
    if issubclass(spec.kind, list):
        out[:] = children
    elif issubclass(spec.kind, dict):
        for key, child in zip(spec.keys, children, strict=True):
            out[key] = child
    else:
        for key, child in zip(spec.keys, children, strict=True):
            object.__setattr__(out, key, child)
    return out


def map_tensors(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """``value`` with every tensor replaced by ``fn(tensor)``."""
    tensors, spec = flatten(value)
    return unflatten(spec, [fn(t) for t in tensors])
