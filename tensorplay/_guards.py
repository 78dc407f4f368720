"""Guards: what of Python a trace has read, compared by value before its program is used again.

A compiled call must be indistinguishable from running the Python. So while the Python runs once to
be traced, ``Watch`` sees every function that starts and every builtin that is called (through
``sys.setprofile``): calls with effects or with results from outside stop the trace, and the globals
that the functions name are remembered (``Reads``).
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import types
from typing import Any

import numpy as np

from ._freeze import Freezer, Snapshot, Unfrozen, is_fixed_code, is_library
from ._profile import profiling
from ._state import state
from ._tensor import Tensor

_PURE_MODULES = frozenset(
    {
        "builtins", "math", "cmath", "_operator", "operator", "itertools", "_functools",
        "_collections", "_struct", "_bisect", "_heapq", "_abc", "_typing", "_weakref", "copy",
        "_sre", "unicodedata", "_string", "_stat", "marshal", "_opcode", "gc",
        "zlib", "binascii", "_json", "sys", "_thread", "collections", "functools", "types",
    }
)  # fmt: skip
_IMPURE_BUILTINS = frozenset({"print", "input", "open", "breakpoint", "exec", "eval", "__import__"})
_IMPURE_TYPE_MODULES = (
    "_io", "_random", "random", "_socket", "numpy.random", "select", "_queue", "_contextvars"
)  # fmt: skip
_CLOCKS = frozenset({"now", "utcnow", "today"})
_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
_ABSENT = object()


@functools.lru_cache(maxsize=4096)
def _impure_values(code: types.CodeType) -> tuple[str, ...]:
    """Builtins with effects that a function uses as values, so that C code may call them."""
    return tuple(
        i.argval
        for i in dis.get_instructions(code)
        if i.opname == "LOAD_GLOBAL" and i.argval in _IMPURE_BUILTINS and "NULL" not in i.argrepr
    )


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function names, read or written."""
    return tuple(
        dict.fromkeys(i.argval for i in dis.get_instructions(code) if i.opname in _GLOBAL_OPS)
    )


class Read:
    """One global that traced code named.

    Attributes:
        tensors: the tensors inside its value.
    """

    def __init__(self, namespace: dict[str, Any], name: str, value: Any) -> None:
        self.namespace, self.name, self.value = namespace, name, value
        freezer = Freezer()
        self.frozen = None if value is _ABSENT else freezer.freeze(value)
        self.snapshot = Snapshot(freezer)
        self.tensors, self.codes, self.cached = freezer.tensors, freezer.codes, freezer.cached

    def now(self) -> Any:
        return self.namespace.get(self.name, _ABSENT)

    def is_unchanged(self) -> bool:
        """Whether it is the very same object with the very same parts."""
        return self.now() is self.value and self.snapshot.unchanged()

    def renewed(self) -> Read | None:
        """The same global as it is now, if it is equal by value; else None."""
        try:
            fresh = Read(self.namespace, self.name, self.now())
        except Unfrozen:
            return None
        return fresh if fresh.frozen == self.frozen else None

    def undo(self) -> bool:
        """Gives the global and its parts their former values; tells whether that was needed."""
        if self.is_unchanged():
            return False
        if self.value is _ABSENT:
            self.namespace.pop(self.name, None)
        else:
            self.namespace[self.name] = self.value
        self.snapshot.undo()
        return True


class Watch:
    """Sees what the Python of one traced call runs and reads; see the module's docstring."""

    def __init__(self) -> None:
        self.reads: dict[tuple[int, str], Read] = {}
        self.codes: set[types.CodeType] = set()
        self._known: set[types.CodeType] = set()
        self._cached: set[types.CodeType] = set()

    def expect(self, freezer: Freezer) -> None:
        """Functions whose closures are guarded already."""
        self._known |= freezer.codes
        self._cached |= freezer.cached

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """The block inside which the traced Python runs."""
        return profiling(self._on_event)

    def _on_event(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "call":
            if frame.f_code not in self.codes:
                self.codes.add(frame.f_code)
                self._on_function(frame)
        elif event == "c_call":
            self._on_builtin(frame, arg)

    def _on_function(self, frame: types.FrameType) -> None:
        code, namespace = frame.f_code, frame.f_globals
        if is_fixed_code(namespace.get("__name__")):
            if code.co_qualname.startswith("_Environ."):
                state.trace.abort("reads the environment")
            return
        for name in _impure_values(code):
            if name not in namespace:
                state.trace.abort(f"passes {name} on, to be called")
        for name in _global_names(code):
            value = namespace.get(name, _ABSENT)
            if value is _ABSENT and hasattr(builtins, name):
                continue
            self._remember(namespace, name, value)
            if value is np and "random" in code.co_names:
                state.trace.abort("draws from numpy.random")
            self._remember_attributes(value, code)
        if code in self._cached:
            state.trace.abort(f"fills the cache of {code.co_qualname}")
        self._check_closure(code)

    def _remember_attributes(self, value: Any, code: types.CodeType) -> None:
        """The attributes of a module that the code may name, of modules inside it too."""
        if not isinstance(value, types.ModuleType):
            return
        own = value.__name__.partition(".")[0] == __name__.partition(".")[0]
        if is_fixed_code(value.__name__) and not own:
            return
        for name in code.co_names:
            if name in vars(value) and (id(vars(value)), name) not in self.reads:
                attribute = vars(value)[name]
                self._remember(vars(value), name, attribute)
                self._remember_attributes(attribute, code)

    def _check_closure(self, code: types.CodeType) -> None:
        """Variables of an enclosing function must be guarded through a function met before."""
        if code in self._known:
            self._known.update(c for c in code.co_consts if isinstance(c, types.CodeType))
        elif code.co_freevars:
            state.trace.abort(
                f"calls {code.co_qualname}, whose enclosing variables cannot be watched"
            )

    def _remember(self, namespace: dict[str, Any], name: str, value: Any) -> None:
        key = (id(namespace), name)
        if key in self.reads:
            return
        try:
            read = self.reads[key] = Read(namespace, name, value)
        except Unfrozen as error:
            state.trace.abort(f"reads global {name!r}, which {error}")
        self._known |= read.codes
        self._cached |= read.cached

    def _on_builtin(self, frame: types.FrameType, function: Any) -> None:
        if is_library(frame.f_globals.get("__name__")):
            return
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__qualname__", repr(function))
        if owner is None or isinstance(owner, types.ModuleType):
            module = str(getattr(function, "__module__", None) or getattr(owner, "__name__", ""))
            impure = module == "builtins" and name in _IMPURE_BUILTINS
            unknown = module not in _PURE_MODULES and not is_library(module)
            if impure or unknown or module.startswith("numpy.random"):
                state.trace.abort(f"calls {name}()" if impure else f"calls {module}.{name}()")
            return
        kind = owner if isinstance(owner, type) else type(owner)
        if (
            any(c.__module__.startswith(_IMPURE_TYPE_MODULES) for c in kind.__mro__)
            or (isinstance(owner, type) and name.rpartition(".")[2] in _CLOCKS)
            or not (is_fixed_code(kind.__module__) or kind.__flags__ & _HEAP_TYPE)
        ):
            state.trace.abort(f"calls {name}() of a {kind.__module__}.{kind.__name__}")

    def undo(self) -> list[str]:
        """Gives globals that the traced code changed their former values; tells which."""
        return [read.name for read in self.reads.values() if read.undo()]


_HEAP_TYPE = 1 << 9


class Reads:
    """The globals that a trace read, for comparing at later calls."""

    def __init__(self, watch: Watch) -> None:
        self._reads = list(watch.reads.values())

    def hold(self) -> bool:
        """Whether all globals are equal by value to what the trace read."""
        for i, read in enumerate(self._reads):
            if not read.is_unchanged():
                fresh = read.renewed()
                if fresh is None:
                    return False
                self._reads[i] = fresh
        return True

    def locate(self, tensor: Tensor) -> tuple[str, int] | None:
        """Where among the globals a tensor is found: (name, number); None if it is not."""
        for read in self._reads:
            for number, found in enumerate(read.tensors):
                if found is tensor:
                    return read.name, number
        return None

    def tensor_at(self, location: tuple[str, int]) -> Tensor:
        """The tensor that is there now."""
        name, number = location
        return next(r.tensors[number] for r in self._reads if r.name == name and r.tensors)
