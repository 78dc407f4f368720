"""Guards: what of Python a trace has read, compared by value before its program is used again.

A compiled call must be indistinguishable from running the Python. So while the Python runs once to
be traced, ``Watch`` sees every function that starts and every builtin that is called (through
``sys.setprofile``): calls with effects or with results from outside stop the trace, and the globals
and closure cells that the functions name are remembered. ``freeze`` turns a value into something
that compares by value; what is mutable is copied shallowly first, so that a trace that changed it
can be undone.
"""

from __future__ import annotations

import builtins
import enum
import functools
import operator
import struct
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from ._device import device
from ._dtypes import dtype
from ._state import state
from ._tensor import Tensor

_MAX_ITEMS = 20_000
_MAX_ARRAY_BYTES = 1 << 20
_PURE_MODULES = frozenset(
    {
        "builtins", "math", "cmath", "_operator", "operator", "itertools", "_functools",
        "_collections", "_struct", "_bisect", "_heapq", "_abc", "_typing", "_weakref", "copy",
        "_contextvars", "_sre", "unicodedata", "_string", "_stat", "marshal", "_opcode",
        "_tracemalloc", "gc", "zlib", "binascii", "_json", "sys", "_thread", "_warnings_filters",
    }
)  # fmt: skip
_IMPURE_BUILTINS = frozenset({"print", "input", "open", "breakpoint", "exec", "eval", "__import__"})
_IMPURE_TYPE_MODULES = ("_io", "_random", "random", "_socket", "numpy.random", "select", "_queue")
_OWN_PREFIX = __name__.partition(".")[0] + "."
_LIBRARIES = ("jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum")


class Unfrozen(Exception):
    """A value cannot be compared by value; the message says why."""


class Freezer:
    """Turns values into hashable ones that are equal exactly where the values are.

    Attributes:
        mutable: every mutable object met, with a shallow copy of its content.
        cells: every closure cell met, with its content.

    Args:
        special: called on each value first; returns its frozen form, or None to go on.
    """

    def __init__(self, special: Callable[[Any], Any] = lambda value: None) -> None:
        self.mutable: dict[int, tuple[Any, Any]] = {}
        self.cells: list[tuple[Any, Any]] = []
        self._special = special
        self._inside: dict[int, int] = {}
        self._items = 0

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
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (dtype, device, enum.Enum, types.ModuleType)):
            return (kind, value)
        special = self._special(value)
        if special is not None:
            return special
        if id(value) in self._inside:
            return ("seen", self._inside[id(value)])
        self._inside[id(value)] = len(self._inside)
        self._items += 1
        if self._items > _MAX_ITEMS:
            raise Unfrozen("holds too many values to compare at every call")
        return self._compound(kind, value)

    def _compound(self, kind: type, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return ("method", self.freeze(value.__func__), self._identity(value.__self__))
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, (types.BuiltinFunctionType, np.ufunc)):
            return ("builtin", value)
        if isinstance(value, (tuple, frozenset)):
            return (self.freeze_type(kind), tuple(self.freeze(v) for v in value))
        if isinstance(value, (list, set)):
            self.mutable[id(value)] = (value, kind(value))
            return (self.freeze_type(kind), tuple(self.freeze(v) for v in value))
        if isinstance(value, dict):
            self.mutable[id(value)] = (value, dict(value))
            return (self.freeze_type(kind), self._pairs(value))
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, functools.partial):
            return ("partial", self.freeze((value.func, value.args, value.keywords)))
        if hasattr(value, "__next__"):
            raise Unfrozen(f"is an iterator ({kind.__name__}), whose position cannot be compared")
        if hasattr(value, "__dict__") and not callable(value):
            content = vars(value)
            self.mutable[id(value)] = (value, dict(content))
            return (self.freeze_type(kind), self._pairs(content))
        return self._identity(value)

    def freeze_type(self, kind: type) -> Any:
        return kind if kind.__module__ == "builtins" else self.freeze(kind)

    def _pairs(self, mapping: Any) -> Any:
        return tuple((self.freeze(k), self.freeze(v)) for k, v in mapping.items())

    def _identity(self, value: Any) -> Any:
        return ("object", _ByIdentity(value))

    def _tensor(self, value: Tensor) -> Any:
        array = value._storage.array
        return (
            "tensor", type(value).__name__, tuple(value._array_shape()), str(array.dtype),
            value._requires_grad, value._layout,
        )  # fmt: skip

    def _array(self, value: np.ndarray) -> Any:
        if value.nbytes > _MAX_ARRAY_BYTES:
            raise Unfrozen("is a numpy array too large to compare at every call")
        return ("array", value.shape, value.dtype.str, value.tobytes())

    def _function(self, value: types.FunctionType) -> Any:
        if is_fixed_code(value.__module__):
            return ("function", value)
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
        self.mutable[id(value)] = (value, dict(vars(value)))
        own = tuple(
            (name, self.freeze(v))
            for name, v in vars(value).items()
            if name not in _CLASS_NOISE and not isinstance(v, _DESCRIPTORS)
        )
        return ("class", value.__qualname__, tuple(self.freeze(b) for b in value.__bases__), own)


_CLASS_NOISE = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__",
     "__static_attributes__", "__abstractmethods__", "_abc_impl", "__dataclass_fields__",
     "__dataclass_params__", "__match_args__", "__parameters__", "__orig_bases__"}
)  # fmt: skip
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)


class _ByIdentity:
    """Equal to what holds the very same object, which it keeps alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__} at {id(self.value):#x}>"


def is_library(module_name: str | None) -> bool:
    """Whether code of that module is ours or jax's or numpy's, and so known to be pure."""
    name = (module_name or "") + "."
    return name.startswith(_OWN_PREFIX) or name.partition(".")[0] in _LIBRARIES


def is_fixed_code(module_name: str | None) -> bool:
    """Whether code of that module does not change while a program runs."""
    top = (module_name or "").partition(".")[0]
    return is_library(module_name) or (top in sys.stdlib_module_names and top != "__main__")


class Snapshot:
    """Mutable objects with their content at one moment, compared by identity of the parts."""

    def __init__(self, freezer: Freezer) -> None:
        self._objects = list(freezer.mutable.values())
        self._cells = freezer.cells

    def unchanged(self) -> bool:
        """Whether every object still has the very same parts."""
        for cell, before in self._cells:
            if cell.cell_contents is not before:
                return False
        return all(_same_parts(value, before) for value, before in self._objects)

    def undo(self) -> None:
        """Gives every object its content back."""
        for value, before in self._objects:
            if isinstance(value, list):
                value[:] = before
            elif isinstance(value, (set, dict)):
                value.clear()
                value.update(before)
            elif not isinstance(value, type):
                vars(value).clear()
                vars(value).update(before)


def _same_parts(value: Any, before: Any) -> bool:
    if isinstance(value, set):
        return bool(value == before)
    if isinstance(value, list):
        return len(value) == len(before) and all(map(operator.is_, value, before))
    now = value if isinstance(value, dict) else vars(value)
    return (
        len(now) == len(before)
        and all(map(operator.is_, now.values(), before.values()))
        and list(now) == list(before)
    )


class Watch:
    """Sees what the Python of one traced call runs and reads; see the module's docstring."""

    def __init__(self) -> None:
        self.reads: dict[tuple[int, str], tuple[Any, str, Any, Any]] = {}
        self.freezer = Freezer()
        self._codes: set[types.CodeType] = set()
        self._previous: Any = None

    def __enter__(self) -> Watch:
        self._previous = sys.getprofile()
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(self._previous)

    def _on_event(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "call":
            if frame.f_code not in self._codes:
                self._codes.add(frame.f_code)
                self._on_function(frame)
        elif event == "c_call":
            self._on_builtin(frame, arg)

    def _on_function(self, frame: types.FrameType) -> None:
        if is_fixed_code(frame.f_globals.get("__name__")):
            return
        names = frame.f_code.co_names
        for name in names:
            if name in frame.f_globals:
                self._remember(frame.f_globals, name, frame.f_globals[name])
        for name in frame.f_code.co_freevars:
            if name in frame.f_locals:
                self._frozen(f"variable {name!r}", frame.f_locals[name])

    def _remember(self, namespace: dict[str, Any], name: str, value: Any) -> None:
        key = (id(namespace), name)
        if key not in self.reads:
            frozen = self._frozen(f"global {name!r}", value)
            self.reads[key] = (namespace, name, value, frozen)

    def _frozen(self, what: str, value: Any) -> Any:
        """``value`` frozen; a value that cannot be stops the trace."""
        own = Freezer()
        try:
            frozen = own.freeze(value)
        except Unfrozen as error:
            state.trace.abort(f"reads {what}, which {error}")
        self.freezer.mutable.update(own.mutable)
        self.freezer.cells.extend(own.cells)
        return frozen

    def _on_builtin(self, frame: types.FrameType, function: Any) -> None:
        if is_library(frame.f_globals.get("__name__")):
            return
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__qualname__", repr(function))
        if owner is None or isinstance(owner, types.ModuleType):
            module = getattr(function, "__module__", None) or getattr(owner, "__name__", "")
            if module == "builtins" and name in _IMPURE_BUILTINS:
                state.trace.abort(f"calls {name}()")
            if module not in _PURE_MODULES and not is_library(module):
                state.trace.abort(f"calls {module}.{name}()")
            if module.startswith("numpy.random"):
                state.trace.abort(f"calls {module}.{name}()")
            return
        kind = owner if isinstance(owner, type) else type(owner)
        if any(c.__module__.startswith(_IMPURE_TYPE_MODULES) for c in kind.__mro__):
            state.trace.abort(f"calls {name}() of a {kind.__module__}.{kind.__name__}")

    def snapshot(self) -> Snapshot:
        """The mutable objects that the functions named, as they were when first seen."""
        return Snapshot(self.freezer)

    def changed_globals(self) -> list[str]:
        """Names of globals that the traced code rebound; they get their former values back."""
        changed = []
        for namespace, name, value, _ in self.reads.values():
            if namespace.get(name, builtins) is not value:
                changed.append(name)
                namespace[name] = value
        return changed


class Reads:
    """The globals that a trace read, for comparing at later calls."""

    def __init__(self, watch: Watch) -> None:
        self._entries = list(watch.reads.values())
        self._snapshot = Snapshot(watch.freezer)

    def difference(self) -> str | None:
        """The first global that is not what it was, or None."""
        same_content = self._snapshot.unchanged()
        for namespace, name, value, frozen in self._entries:
            now = namespace.get(name, builtins)
            if (now is value and same_content) or _freezes_to(now, frozen):
                continue
            return f"global {name!r}"
        return None


def _freezes_to(value: Any, frozen: Any) -> bool:
    try:
        return bool(Freezer().freeze(value) == frozen)
    except Unfrozen:
        return False


def paused_profile(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Runs ``fn`` without the profile function: what happens inside is known to be pure."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        previous = sys.getprofile()
        if previous is None:
            return fn(*args, **kwargs)
        sys.setprofile(None)
        try:
            return fn(*args, **kwargs)
        finally:
            sys.setprofile(previous)

    return run
