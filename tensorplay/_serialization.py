"""Saving and loading nested data with tensors, as ``torch.save`` and ``torch.load``.

A file is a zip archive: ``tensorplay.json`` holds the structure, ``arrays/0`` and so on hold
the raw little-endian, row-major bytes of the arrays that it names. Loading runs no code.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from . import _dtypes
from ._device import device as Device
from ._dtypes import dtype as Dtype
from ._ops.creation import from_values
from ._tensor import Size, Tensor, to_host

_STRUCTURE = "tensorplay.json"
_FORMAT = "tensorplay"
_VERSION = 1
_PLAIN = (type(None), bool, int, str)

MapLocation = str | Device | dict[str, str] | Callable[..., Any] | None


def save(obj: Any, f: Any) -> None:
    """Writes ``obj`` to ``f``: a path, or a file object opened for writing bytes.

    A path is written under a temporary name and then renamed, so that an interrupted save leaves
    the earlier file as it was.

    Args:
        obj: tensors, numbers, strings, bytes, None, dtypes, devices, numpy arrays, and dicts,
            lists, tuples and sets of these. Aliases of one tensor stay aliases.

    Raises:
        TypeError: ``obj`` holds something else; the message names its type and place.
        RuntimeError: ``obj`` holds a sharded tensor.
    """
    writer = _Writer()
    structure = {"format": _FORMAT, "version": _VERSION, "data": writer.encode(obj, "obj")}
    if hasattr(f, "write"):
        writer.write(f, structure)
        return
    path = os.fspath(f)
    temporary = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
    try:
        with open(temporary, "wb") as file:
            writer.write(file, structure)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise


class _Writer:
    """Turns objects into JSON data and keeps the arrays that it refers to."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self._known: dict[Any, int] = {}
        self._alive: list[Any] = []
        self._open: set[int] = set()

    def encode(self, obj: Any, place: str) -> Any:
        if type(obj) in _PLAIN:
            return obj
        if type(obj) is float:
            return {"float": repr(obj)}
        if isinstance(obj, Tensor):
            return self._tensor(obj, place)
        if isinstance(obj, (np.ndarray, np.generic)):
            return self._numpy(obj, place)
        with self._entered(obj, place):
            encoded = _encode_leaf(obj)
            return self._container(obj, place) if encoded is None else encoded

    @contextlib.contextmanager
    def _entered(self, obj: Any, place: str) -> Iterator[None]:
        if id(obj) in self._open:
            raise ValueError(f"tensorplay.save: {place} contains itself")
        self._open.add(id(obj))
        try:
            yield
        finally:
            self._open.discard(id(obj))

    def _container(self, obj: Any, place: str) -> dict[str, Any]:
        if type(obj) in (dict, OrderedDict):
            kind = "dict" if type(obj) is dict else "ordered"
            return {
                kind: [
                    [self.encode(k, f"the key {k!r} of {place}"), self.encode(v, f"{place}[{k!r}]")]
                    for k, v in obj.items()
                ]
            }
        if type(obj) in (list, tuple):
            items = [self.encode(v, f"{place}[{i}]") for i, v in enumerate(obj)]
            return {type(obj).__name__: items}
        if type(obj) in (set, frozenset):
            return {"set": [self.encode(v, f"an element of {place}") for v in obj]}
        raise TypeError(
            f"tensorplay.save: cannot save {place}, a {type(obj).__module__}."
            f"{type(obj).__qualname__}; it takes tensors, numbers, strings, bytes, None, dtypes, "
            "devices, numpy arrays, and dicts, lists, tuples and sets of these. Save a module or "
            "an optimizer through its state_dict()."
        )

    def _tensor(self, tensor: Tensor, place: str) -> dict[str, Any]:
        if tensor._layout is not None:
            raise RuntimeError(
                f"tensorplay.save: {place} is a sharded tensor; save {place}.full_tensor() (the "
                f"whole, on one rank) or {place}.to_local() (this rank's shard)"
            )
        if tensor.is_meta:
            raise RuntimeError(f"tensorplay.save: {place} is on the meta device and has no values")
        key = (id(tensor._storage), tensor._chain)
        if key not in self._known:
            self._alive.append(tensor)
            self._known[key] = self._add(to_host(tensor._read()))
        return {
            "tensor": self._known[key],
            "dtype": tensor.dtype.name,
            "shape": list(tensor.shape),
            "requires_grad": tensor.requires_grad,
            "device": str(tensor.device),
        }

    def _numpy(self, value: Any, place: str) -> dict[str, Any]:
        if value.dtype.kind not in "biufc":
            raise TypeError(f"tensorplay.save: cannot save {place}, a numpy {value.dtype} array")
        kind = "ndarray" if isinstance(value, np.ndarray) else "scalar"
        array = np.asarray(value)
        return {kind: self._add(array), "dtype": array.dtype.str, "shape": list(array.shape)}

    def _add(self, array: np.ndarray) -> int:
        self.arrays.append(array)
        return len(self.arrays) - 1

    def write(self, file: Any, structure: dict[str, Any]) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(_STRUCTURE, json.dumps(structure))
            for number, array in enumerate(self.arrays):
                with archive.open(f"arrays/{number}", "w", force_zip64=True) as entry:
                    entry.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _encode_leaf(obj: Any) -> dict[str, Any] | None:
    if type(obj) is complex:
        return {"complex": [repr(obj.real), repr(obj.imag)]}
    if type(obj) is bytes:
        return {"bytes": base64.b64encode(obj).decode()}
    if type(obj) is Dtype:
        return {"dtype": obj.name}
    if type(obj) is Device:
        return {"device": str(obj)}
    if type(obj) is Size:
        return {"size": list(obj)}
    return None


def load(f: Any, map_location: MapLocation = None, *, weights_only: bool = True) -> Any:
    """Reads what ``save`` wrote.

    Args:
        f: a path, or a seekable file object opened for reading bytes.
        map_location: the device for all tensors; or a dict from saved to new devices. Default (and
            with a function): this thread's default device.
        weights_only: accepted for PyTorch's sake; loading never runs code.

    Raises:
        RuntimeError: the file was not written by ``save``, or is truncated or damaged; the message
            names it and says what is wrong.
    """
    name = getattr(f, "name", "the given file object") if hasattr(f, "read") else os.fspath(f)
    try:
        with zipfile.ZipFile(f) as archive:
            return _Reader(archive, map_location).read()
    except zipfile.BadZipFile as error:
        raise RuntimeError(
            f"tensorplay.load: {name} is not a file that tensorplay.save wrote, or it is truncated "
            f"({error})"
        ) from error
    except (_Damaged, KeyError, ValueError, EOFError) as error:
        raise RuntimeError(f"tensorplay.load: {name}: {error}") from error


class _Damaged(Exception):
    pass


class _Reader:
    """Builds objects from an archive."""

    def __init__(self, archive: zipfile.ZipFile, map_location: MapLocation) -> None:
        self.archive, self.map_location = archive, map_location
        self._tensors: dict[Any, Tensor] = {}

    def read(self) -> Any:
        names = self.archive.namelist()
        if _STRUCTURE not in names:
            torch = any(n.endswith("data.pkl") for n in names)
            hint = (
                " (torch.save wrote it: load it with torch and pass numpy arrays)" if torch else ""
            )
            raise _Damaged(f"it is a zip archive, but not one that tensorplay.save wrote{hint}")
        structure = json.loads(self.archive.read(_STRUCTURE))
        if structure.get("format") != _FORMAT or structure.get("version") != _VERSION:
            raise _Damaged(
                f"its format is {structure.get('format')!r} version {structure.get('version')!r}; "
                f"this version reads {_FORMAT!r} version {_VERSION}"
            )
        return self.decode(structure["data"])

    def decode(self, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if "tensor" in node:
            return self._tensor(node)
        if "ndarray" in node or "scalar" in node:
            value = self._array(
                node["ndarray" if "ndarray" in node else "scalar"],
                np.dtype(node["dtype"]),
                node["shape"],
            )
            return value if "ndarray" in node else value[()]
        ((kind, value),) = node.items()
        if kind not in _DECODERS:
            raise _Damaged(f"it holds an entry of the unknown kind {kind!r}")
        return _DECODERS[kind](self, value)

    def _pairs(self, items: Any) -> list[tuple[Any, Any]]:
        return [(self.decode(k), self.decode(v)) for k, v in items]

    def _list(self, items: Any) -> list[Any]:
        return [self.decode(v) for v in items]

    def _array(self, number: int, dtype: np.dtype, shape: list[int]) -> np.ndarray:
        data = self.archive.read(f"arrays/{number}")
        expected = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if len(data) != expected:
            raise _Damaged(
                f"array {number} has {len(data)} bytes; its shape {shape} needs {expected}"
            )
        return np.frombuffer(data, dtype).reshape(shape).copy()

    def _tensor(self, node: dict[str, Any]) -> Tensor:
        number, dtype = node["tensor"], getattr(_dtypes, _attribute(node["dtype"]))
        target = self._target(node["device"])
        first = self._tensors.get(number)
        if first is None:
            values = self._array(number, dtype.numpy, node["shape"])
            out = self._tensors[number] = from_values(values, dtype.numpy, target)
        else:
            out = first.detach()
            out._detached = False
        return out.requires_grad_() if node["requires_grad"] else out

    def _target(self, saved: str) -> str | Device | None:
        if isinstance(self.map_location, dict):
            return self.map_location.get(saved)
        return None if callable(self.map_location) else self.map_location


def _attribute(name: str) -> str:
    if name not in {d.name for d in _dtypes.ALL}:
        raise _Damaged(f"it holds a tensor of the unknown dtype {name!r}")
    return "bool_" if name == "bool" else name


_DECODERS: dict[str, Callable[[_Reader, Any], Any]] = {
    "float": lambda reader, v: float(v),
    "complex": lambda reader, v: complex(float(v[0]), float(v[1])),
    "bytes": lambda reader, v: base64.b64decode(v),
    "dtype": lambda reader, v: getattr(_dtypes, _attribute(v)),
    "device": lambda reader, v: Device(v),
    "size": lambda reader, v: Size(v),
    "dict": lambda reader, v: dict(reader._pairs(v)),
    "ordered": lambda reader, v: OrderedDict(reader._pairs(v)),
    "list": lambda reader, v: reader._list(v),
    "tuple": lambda reader, v: tuple(reader._list(v)),
    "set": lambda reader, v: set(reader._list(v)),
}
