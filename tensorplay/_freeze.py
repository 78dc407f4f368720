"""Freezing: values turned into hashable ones that are equal exactly where the values are.

Mutable objects are copied shallowly on the way (``Snapshot``), so that later changes are seen by
comparing parts by identity, and can be undone.
"""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import operator
import random
import struct
import sys
import types
from typing import Any

import numpy as np

from ._device import device
from ._dtypes import dtype
from ._tensor import Tensor
from .nn._module import Module

_MAX_ITEMS = 50_000
_MAX_ARRAY_BYTES = 1 << 20
_OWN_PREFIX = __name__.partition(".")[0] + "."
_LIBRARIES = frozenset({"jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum"})
_CLASS_NOISE = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__",
     "__static_attributes__", "__abstractmethods__", "_abc_impl", "__dataclass_fields__",
     "__dataclass_params__", "__match_args__", "__parameters__", "__orig_bases__", "__slots__"}
)  # fmt: skip
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_RANDOM = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_CALL_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_REGISTRIES = frozenset(
    {"_parameters", "_buffers", "_modules", *_CALL_HOOKS, "_state_dict_hooks",
     "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
     "_non_persistent_buffers_set"}
)  # fmt: skip


class Unfrozen(Exception):
    """A value cannot be compared by value; the message says why."""


def is_library(module_name: str | None) -> bool:
    """Whether code of that module is ours or jax's or numpy's, and so known to be pure."""
    name = (module_name or "") + "."
    return name.startswith(_OWN_PREFIX) or name.partition(".")[0] in _LIBRARIES


def is_fixed_code(module_name: str | None) -> bool:
    """Whether code of that module does not change while a program runs."""
    top = (module_name or "").partition(".")[0]
    return is_library(module_name) or top in sys.stdlib_module_names


class Freezer:
    """Freezes values, which may share parts.

    Attributes:
        tensors: every tensor met, once, in the order met. A frozen tensor tells its number, shape
            and dtype; its values are not compared.
        mutable: every mutable object met, with a shallow copy of its content.
        cells: every closure cell met, with its content.
        codes: the code of every function met.
        cached: the code of every function met behind ``functools.lru_cache``.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.mutable: dict[int, tuple[Any, Any]] = {}
        self.cells: list[tuple[Any, Any]] = []
        self.codes: set[types.CodeType] = set()
        self.cached: set[types.CodeType] = set()
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []

    def freeze(self, value: Any) -> Any:
        """The frozen form of ``value``.

        Raises:
            Unfrozen: the value is an iterator, or too large to compare at every call.
        """
        kind = type(value)
        if kind in (bool, int, str, bytes, types.NoneType, types.EllipsisType):
            return (kind, value)
        if kind is float:
            return (float, struct.pack("d", value))
        if isinstance(value, np.generic):
            return (kind, value.tobytes())
        if isinstance(value, (dtype, device, enum.Enum, types.ModuleType, np.dtype, range)):
            return (kind, value)
        if kind in (tuple, frozenset):
            return (kind, tuple(self.freeze(v) for v in value))
        if isinstance(value, Tensor) and value._stands_for is not None:
            value = value._stands_for
        if id(value) in self._numbers:
            return ("seen", self._numbers[id(value)])
        self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        if len(self._kept) > _MAX_ITEMS:
            raise Unfrozen("holds too many values to compare at every call")
        return self._compound(kind, value)

    def _compound(self, kind: type, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, Module):
            return self._module(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return ("method", self.freeze(value.__func__), self.freeze(value.__self__))
        if isinstance(value, (staticmethod, classmethod)):
            return (kind, self.freeze(value.__func__))
        if isinstance(value, property):
            return (property, self.freeze(value.fget))
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, functools.partial):
            return ("partial", self.freeze((value.func, value.args, value.keywords)))
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, functools._lru_cache_wrapper):
            self.cached.add(value.__wrapped__.__code__)
            return ("cached", self.freeze(value.__wrapped__))
        return self._container(kind, value)

    def _container(self, kind: type, value: Any) -> Any:
        content = None
        if isinstance(value, (tuple, frozenset)):
            content = tuple(self.freeze(v) for v in value)
        elif isinstance(value, (list, set, collections.deque, bytearray)):
            self._remember(value, list(value))
            content = tuple(self.freeze(v) for v in value)
        elif isinstance(value, dict):
            self._remember(value, dict(value))
            content = self._pairs(value)
        elif isinstance(value, _RANDOM):
            raise Unfrozen(f"is a random generator ({kind.__name__}), whose state is not compared")
        elif hasattr(value, "__next__"):
            raise Unfrozen(f"is an iterator ({kind.__name__}), whose position cannot be compared")
        guard = getattr(kind, "__guard__", None)
        if guard is not None:
            return ("guard", self.freeze(guard(value)))
        attributes = self._attributes(kind, value)
        if content is None and attributes is None:
            return ("object", ByIdentity(value))
        return (self.freeze_type(kind), content, attributes)

    def _attributes(self, kind: type, value: Any) -> Any:
        """Attributes of an object of the user's; None for what has none or is not the user's."""
        if is_fixed_code(kind.__module__) and kind not in _NAMESPACES:
            return None
        found: dict[str, Any] = {}
        if hasattr(value, "__dict__"):
            self._remember(value, dict(vars(value)))
            found.update(vars(value))
        slots = [s for c in kind.__mro__ for s in _slots(c) if hasattr(value, s)]
        if slots:
            self._remember_slots(value, slots)
            found.update({s: getattr(value, s) for s in slots})
        return self._pairs(found) if found or hasattr(value, "__dict__") else None

    def _remember(self, value: Any, content: Any) -> None:
        self.mutable[id(value)] = (value, content)

    def _remember_slots(self, value: Any, slots: list[str]) -> None:
        self.mutable[-id(value)] = (Slots(value, slots), {s: getattr(value, s) for s in slots})

    def freeze_type(self, kind: type) -> Any:
        return kind if is_fixed_code(kind.__module__) else self.freeze(kind)

    def _pairs(self, mapping: Any) -> Any:
        return tuple((self.freeze(k), self.freeze(v)) for k, v in mapping.items())

    def _tensor(self, value: Tensor) -> Any:
        self.tensors.append(value)
        layout = value._layout
        shape = value._array_shape() if layout is None else layout.global_shape
        return (
            "tensor", type(value).__name__, tuple(shape), str(value._storage.array.dtype),
            value._requires_grad, layout is None,
        )  # fmt: skip

    def _array(self, value: np.ndarray) -> Any:
        if value.nbytes > _MAX_ARRAY_BYTES:
            raise Unfrozen("is a numpy array too large to compare at every call")
        self._remember(value, value.copy())
        return ("array", value.shape, value.dtype.str, value.tobytes())

    def _module(self, module: Module) -> Any:
        own = module.__dict__
        self._remember(module, dict(own))
        return (
            "module",
            self.freeze_type(type(module)),
            tuple(
                (name, self._attribute(module, name, value))
                for name, value in own.items()
                if name not in _REGISTRIES
            ),
            *(
                tuple((n, None if v is None else self.freeze(v)) for n, v in own[kind].items())
                for kind in ("_parameters", "_buffers", "_modules")
            ),
            tuple(self._attribute(module, n, tuple(own[n].values())) for n in _CALL_HOOKS),
        )

    def _attribute(self, module: Module, name: str, value: Any) -> Any:
        try:
            return self.freeze(value)
        except Unfrozen as error:
            if str(error).startswith("attribute"):
                raise
            raise Unfrozen(f"attribute {name!r} of {type(module).__name__} {error}") from None

    def _function(self, value: types.FunctionType) -> Any:
        if is_fixed_code(value.__module__) and not value.__closure__:
            return ("function", value)
        self.codes.add(value.__code__)
        cells = tuple(self._cell(c) for c in value.__closure__ or ())
        defaults = self.freeze((value.__defaults__, value.__kwdefaults__))
        return ("function", value.__code__, defaults, cells)

    def _cell(self, cell: Any) -> Any:
        try:
            content = cell.cell_contents
        except ValueError:
            return "empty"
        self.cells.append((cell, content))
        return self.freeze(content)

    def _class(self, value: type) -> Any:
        """Classes made by the same code with the same attributes are the same."""
        if is_fixed_code(value.__module__):
            return value
        self._remember(value, dict(vars(value)))
        own = tuple(
            (name, self.freeze(v))
            for name, v in vars(value).items()
            if name not in _CLASS_NOISE and not isinstance(v, _DESCRIPTORS)
        )
        return ("class", value.__qualname__, tuple(self.freeze(b) for b in value.__bases__), own)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


class Slots:
    """The slots of an object, as a namespace of its own."""

    def __init__(self, owner: Any, names: list[str]) -> None:
        self.owner, self.names = owner, names

    def content(self) -> dict[str, Any]:
        return {n: getattr(self.owner, n) for n in self.names if hasattr(self.owner, n)}


class ByIdentity:
    """Equal to what holds the very same object, which it keeps alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__} at {id(self.value):#x}>"


class Snapshot:
    """Mutable objects with their content at one moment, compared by identity of the parts."""

    def __init__(self, freezer: Freezer) -> None:
        self._objects = list(freezer.mutable.values())
        self._cells = freezer.cells

    def unchanged(self) -> bool:
        """Whether every object still has the very same parts."""
        for cell, before in self._cells:
            if _content_of(cell) is not before:
                return False
        return all(_same_parts(value, before) for value, before in self._objects)

    def undo(self) -> None:
        """Gives every object its content back."""
        for cell, before in self._cells:
            if _content_of(cell) is not before:
                cell.cell_contents = before
        for value, before in self._objects:
            if not _same_parts(value, before):
                _restore(value, before)


def _content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return Snapshot


def _same_parts(value: Any, before: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.shape == before.shape and value.tobytes() == before.tobytes()
    if isinstance(value, (list, set, collections.deque, bytearray)):
        return len(value) == len(before) and all(map(operator.is_, value, before))
    now = _namespace(value)
    return (
        len(now) == len(before)
        and all(map(operator.is_, now.values(), before.values()))
        and all(map(operator.eq, now, before))
    )


def _namespace(value: Any) -> Any:
    if isinstance(value, dict):
        return value
    return value.content() if isinstance(value, Slots) else vars(value)


def _restore(value: Any, before: Any) -> None:
    if isinstance(value, np.ndarray):
        value[...] = before
    elif isinstance(value, (list, bytearray)):
        value[:] = before
    elif isinstance(value, (set, collections.deque)):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(before)
    elif isinstance(value, (Slots, type)):
        target = value.owner if isinstance(value, Slots) else value
        for name, content in before.items():
            if _namespace(value).get(name) is not content:
                setattr(target, name, content)
    else:
        namespace = _namespace(value)
        namespace.clear()
        namespace.update(before)
