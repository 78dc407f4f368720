"""Tensor: a view of a storage cell that holds a jax array, and its place in the recorded graph.

This file is the only crossing between tensors and jax arrays. Ops are attached to the class by
``_ops.methods``.
"""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from . import _printing, _views
from ._device import device, device_of
from ._dtypes import bool_, dtype, from_numpy_dtype, get_default_dtype, int64
from ._graph import Edge, Node, RemovableHandle, add_hook, run_backward
from ._state import state

read_error_translators: list[Callable[[BaseException], BaseException | None]] = []


class Size(tuple[int, ...]):
    """A tensor's shape: a tuple with ``numel()``."""

    __slots__ = ()

    def numel(self) -> int:
        return math.prod(self)

    def __repr__(self) -> str:
        return f"tensorplay.Size({list(self)})"

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Size(found) if isinstance(index, slice) else found

    def __add__(self, other: Any) -> Size:
        return Size(super().__add__(tuple(other)))


class Meta:
    """The shape and dtype of an array without values: what a meta tensor's storage holds.

    jax refuses it as an argument at once, before it would compile anything.
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def struct(self) -> jax.ShapeDtypeStruct:
        """What ``jax.eval_shape`` takes."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


class Storage:
    """The cell that a tensor and its aliases share.

    ``array``: the jax array (a tracer while a call is traced; a ``Meta`` on meta).
    ``version``: counts in-place writes, as autograd sees them.
    """

    __slots__ = ("__weakref__", "array", "version")

    def __init__(self, array: Any) -> None:
        self.array = array
        self.version = 0
        if state.trace is not None:
            state.trace.own(self)

    @property
    def stored(self) -> Any:
        """What `held` gives, in the memory where it lies."""
        return self.array

    @property
    def held(self) -> Any:
        """All that this thread holds of the value: ``array``, with padding and other ranks' pieces
        where there are such."""
        return self.array

    @held.setter
    def held(self, array: Any) -> None:
        self.array = array


class Tensor:
    """A multi-dimensional array with torch's semantics over a jax array.

    ``Tensor(data)`` makes a float tensor from nested sequences and ``Tensor(2, 3)`` one of that
    shape, as ``torch.Tensor`` does; ``tensorplay.tensor`` keeps the data's own dtype.
    """

    _storage: Storage
    _chain: _views.Chain | None = None
    _cached: tuple[Any, Any] | None = None
    _requires_grad: bool = False
    _grad_fn: Node | None = None
    _output_nr: int = 0
    _grad: Tensor | None = None
    _accumulator: Any = None
    _hooks: dict[int, Callable] | None = None
    _post_accumulate_hooks: dict[int, Callable] | None = None
    _base: Tensor | None = None
    _base_chain: _views.Chain = ()
    _base_epoch: int = 0
    _view_kind: str | None = None
    _epoch: int = 0
    _retains_grad: bool = False
    _detached: bool = False
    _untracked: bool = False
    _inference: bool = False
    _layout: Any = None
    _refusal: str | None = None
    _gradient_edge: Edge | None = None
    _stands_for: Tensor | None = None
    _guarded: bool = False
    __array_priority__ = 1000

    if TYPE_CHECKING:  # what _ops.methods attaches

        def __getattr__(self, name: str) -> Any: ...
        def __getitem__(self, index: Any) -> Tensor: ...
        def __setitem__(self, index: Any, value: Any) -> None: ...
        def __iter__(self) -> Iterator[Tensor]: ...
        def __neg__(self) -> Tensor: ...
        def __abs__(self) -> Tensor: ...
        def __invert__(self) -> Tensor: ...
        def __eq__(self, other: Any) -> Tensor: ...  # type: ignore[override]
        def __ne__(self, other: Any) -> Tensor: ...  # type: ignore[override]
        def __add__(self, other: Any) -> Tensor: ...
        def __radd__(self, other: Any) -> Tensor: ...
        def __iadd__(self, other: Any) -> Tensor: ...
        def __sub__(self, other: Any) -> Tensor: ...
        def __rsub__(self, other: Any) -> Tensor: ...
        def __isub__(self, other: Any) -> Tensor: ...
        def __mul__(self, other: Any) -> Tensor: ...
        def __rmul__(self, other: Any) -> Tensor: ...
        def __imul__(self, other: Any) -> Tensor: ...
        def __truediv__(self, other: Any) -> Tensor: ...
        def __rtruediv__(self, other: Any) -> Tensor: ...
        def __itruediv__(self, other: Any) -> Tensor: ...
        def __floordiv__(self, other: Any) -> Tensor: ...
        def __rfloordiv__(self, other: Any) -> Tensor: ...
        def __mod__(self, other: Any) -> Tensor: ...
        def __rmod__(self, other: Any) -> Tensor: ...
        def __pow__(self, other: Any) -> Tensor: ...
        def __rpow__(self, other: Any) -> Tensor: ...
        def __matmul__(self, other: Any) -> Tensor: ...
        def __rmatmul__(self, other: Any) -> Tensor: ...
        def __and__(self, other: Any) -> Tensor: ...
        def __or__(self, other: Any) -> Tensor: ...
        def __xor__(self, other: Any) -> Tensor: ...
        def __lshift__(self, other: Any) -> Tensor: ...
        def __rshift__(self, other: Any) -> Tensor: ...
        def __lt__(self, other: Any) -> Tensor: ...
        def __le__(self, other: Any) -> Tensor: ...
        def __gt__(self, other: Any) -> Tensor: ...
        def __ge__(self, other: Any) -> Tensor: ...

    def __init__(self, *data: Any) -> None:
        from_data = _construct(*data)
        self._storage = from_data._storage
        self._chain = from_data._chain

    # --- shape and place ---------------------------------------------------------------------

    @property
    def shape(self) -> Size:
        return Size(self._array_shape())

    def _array_shape(self) -> tuple[int, ...]:
        array = self._storage.array
        if self._chain is None:
            return array.shape
        return _views.layout(array.shape, self._chain)[0]

    @property
    def ndim(self) -> int:
        return len(self._array_shape())

    def dim(self) -> int:
        """The number of dims."""
        return len(self._array_shape())

    ndimension = dim

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of one dim."""
        shape = self.shape
        if dim is None:
            return shape
        return shape[wrap_dim(dim, len(shape))]

    def numel(self) -> int:
        return math.prod(self._array_shape())

    nelement = numel

    def stride(self, dim: int | None = None) -> Any:
        """Strides in elements, as if the storage were row-major memory."""
        strides = self._strides()
        return strides if dim is None else strides[wrap_dim(dim, len(strides))]

    def _strides(self) -> tuple[int, ...]:
        return _views.layout(self._storage.array.shape, self._chain or ())[1]

    def storage_offset(self) -> int:
        """The place of the first element in the storage, in elements."""
        return _views.layout(self._storage.array.shape, self._chain or ())[2]

    def is_contiguous(self) -> bool:
        """Whether elements lie in row-major order without gaps."""
        return self._chain is None or _views.is_contiguous(self._array_shape(), self._strides())

    @property
    def dtype(self) -> dtype:
        return from_numpy_dtype(self._storage.array.dtype)

    @property
    def device(self) -> device:
        array = self._storage.array
        if type(array) is Meta:
            return device("meta")
        if self._layout is not None and self._layout.memory is not None:
            return device("cpu")
        if isinstance(array, jax.core.Tracer):
            return state.trace.device if state.trace is not None else device("cpu")
        return device_of(next(iter(array.devices())))

    @property
    def layout(self) -> str:
        return "strided"

    is_sparse = False
    is_quantized = False

    @property
    def is_meta(self) -> bool:
        return type(self._storage.array) is Meta

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def element_size(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel() * self.itemsize

    def is_floating_point(self) -> bool:
        """Whether the dtype is floating."""
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        """Whether the dtype is complex."""
        return self.dtype.is_complex

    def is_inference(self) -> bool:
        """Whether the tensor was made in inference mode."""
        return self._inference

    def is_nonzero(self) -> bool:
        """Whether the only element is not zero."""
        return bool(self)

    def is_signed(self) -> bool:
        """Whether the dtype has negative values."""
        return self.dtype.is_signed

    def get_device(self) -> int:
        """The index of the device, -1 for the CPU."""
        return -1 if self.device.index is None else self.device.index

    def data_ptr(self) -> int:
        """A number for the place of the first element: equal for aliases only (no address)."""
        return (id(self._storage) << 40) + self.storage_offset() * self.itemsize

    @property
    def _version(self) -> int:
        return self._storage.version

    # --- values ------------------------------------------------------------------------------

    def _read(self) -> Any:
        """The jax array of this tensor's value."""
        array = self._storage.array if self._layout is None else self._layout.readable(self)
        if state.trace is not None:
            state.trace.on_read(self)
        if self._chain is None:
            return array
        if self._cached is not None and self._cached[0] is array:
            return self._cached[1]
        if type(array) is Meta:
            return Meta(self._array_shape(), array.dtype)
        with jax.enable_x64(True):
            if state.trace is not None:
                return _views.read(array, self._chain)
            value = _views.read_compiled(array, self._chain)
        self._cached = (array, value)
        return value

    def _write(self, value: Any) -> None:
        """Stores ``value`` (same shape and dtype) through this view, as a new version."""
        storage = self._storage
        if self._inference and not state.inference:
            raise RuntimeError(
                "Inplace update to inference tensor outside InferenceMode is not allowed. "
                "You can make a clone to get a normal tensor before doing inplace update."
            )
        if state.trace is not None:
            state.trace.on_write(self)
        if self._chain is None:
            storage.array = value
        elif type(storage.array) is not Meta:
            run = _views.write if state.trace is not None else _views.write_compiled
            with jax.enable_x64(True):
                storage.array = run(storage.array, value, self._chain)
        if not self._untracked:
            storage.version += 1

    def _write_pieces(self, held: Any) -> None:
        """Stores the padded pieces of a tensor with a layout, as a new version."""
        self._storage.held = held
        if not self._untracked:
            self._storage.version += 1

    def _host(self) -> np.ndarray:
        """The value in host memory, once computed."""
        if state.trace is not None:
            state.trace.abort("reads the value of a tensor")
        if self.is_meta:
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        if self._layout is not None:
            self._layout.refuse_read(self)
        return to_host(self._read())

    def item(self) -> Any:
        """The only element as a Python number.

        Raises:
            RuntimeError: the tensor does not have exactly one element.
        """
        if self.is_meta:
            raise RuntimeError("Tensor.item() cannot be called on meta tensors")
        if self.numel() != 1:
            raise RuntimeError(
                f"a Tensor with {self.numel()} elements cannot be converted to Scalar"
            )
        value = self._host()
        return value.astype(np.float32).item() if value.dtype.kind == "V" else value.item()

    def tolist(self) -> Any:
        """The elements as nested lists of Python numbers."""
        value = self._host()
        return value.astype(np.float32).tolist() if value.dtype.kind == "V" else value.tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """A numpy copy of the value (jax arrays are immutable, so memory is not shared).

        Raises:
            RuntimeError: the tensor requires grad and ``force`` is false.
        """
        if self.requires_grad and not force and state.grad_enabled:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. "
                "Use tensor.detach().numpy() instead."
            )
        return np.array(self._host())

    def __array_wrap__(
        self, array: np.ndarray, context: Any = None, return_scalar: bool = False
    ) -> Tensor:
        with jax.enable_x64(True):
            return wrap(jax.numpy.array(array))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = self.numpy()
        return value if dtype is None else value.astype(dtype)

    def __bool__(self) -> bool:
        if self.numel() == 0:
            raise RuntimeError("Boolean value of Tensor with no values is ambiguous")
        if self.numel() > 1:
            raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        if self.dtype.is_floating_point or self.numel() != 1:
            raise TypeError("only integer tensors of a single element can be converted to an index")
        return int(self.item())

    def __len__(self) -> int:
        shape = self._array_shape()
        if not shape:
            raise TypeError("len() of a 0-d tensor")
        return shape[0]

    def __hash__(self) -> int:
        return id(self)

    def __format__(self, spec: str) -> str:
        if self.ndim == 0 and not self.is_meta and type(self) is Tensor:
            return format(self.item(), spec)
        return object.__format__(self, spec)

    def __contains__(self, element: Any) -> bool:
        return bool((self._host() == getattr(element, "_host", lambda: element)()).any())

    def __repr__(self) -> str:
        prefix, suffixes = "tensor(", []
        if self.is_meta or isinstance(self._storage.array, jax.core.Tracer):
            text = "..."
            suffixes.append("device='meta'" if self.is_meta else "traced")
            suffixes.append(f"size={tuple(self.shape)}")
        else:
            text = _printing.values_text(self._host(), len(prefix))
            if self.device.type != "cpu":
                suffixes.append(f"device='{self.device}'")
            if self.numel() == 0 and self.ndim != 1:
                suffixes.append(f"size={tuple(self.shape)}")
        implied = (get_default_dtype(), int64, bool_) if self.numel() else (get_default_dtype(),)
        if (self.dtype not in implied and not self.is_complex()) or (
            self.is_complex() and self.dtype.itemsize != 2 * get_default_dtype().itemsize
        ):
            suffixes.append(f"dtype={self.dtype}")
        if self.grad_fn is not None:
            suffixes.append(f"grad_fn=<{self.grad_fn.name()}>")
        elif self.requires_grad:
            suffixes.append("requires_grad=True")
        return _printing.with_suffixes(prefix + text, suffixes, len(prefix))

    # --- autograd ----------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        if self._base is not None:
            self._sync()
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value and not (self.dtype.is_floating_point or self.dtype.is_complex):
            raise RuntimeError("only Tensors of floating point dtype can require gradients")
        if value and self._inference and not state.inference:
            raise RuntimeError(
                "Setting requires_grad=True on inference tensor outside InferenceMode is not "
                "allowed."
            )
        if not value and self.grad_fn is not None:
            raise RuntimeError(
                "you can only change requires_grad flags of leaf variables. If you want to use a "
                "computed variable in a subgraph that doesn't require differentiation use "
                "var_no_grad = var.detach()."
            )
        if state.trace is not None:
            state.trace.on_flag(self)
        if self._guarded and self._requires_grad != value:
            state_changes.bump()
        self._requires_grad = bool(value)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Sets ``requires_grad`` and returns the tensor."""
        self.requires_grad = requires_grad
        return self

    @property
    def grad_fn(self) -> Node | None:
        if self._base is not None:
            self._sync()
        return self._grad_fn

    @property
    def output_nr(self) -> int:
        return self._output_nr

    @property
    def is_leaf(self) -> bool:
        return self.grad_fn is None

    @property
    def grad(self) -> Tensor | None:
        if self._stands_for is not None:
            return self._stands_for.grad
        if self._grad is None and self._grad_fn is not None and not self._retains_grad:
            warnings.warn(
                "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed. Its "
                ".grad attribute won't be populated during autograd.backward(). If you indeed want "
                "the .grad field to be populated for a non-leaf Tensor, use .retain_grad() on the "
                "non-leaf Tensor.",
                UserWarning,
                stacklevel=2,
            )
        return self._grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self._stands_for is not None:
            self._stands_for.grad = value
            return
        if value is not None:
            _check_assigned_grad(self, value)
        self._grad = value

    @property
    def data(self) -> Tensor:
        """The same values without history; in-place writes through it escape autograd's checks."""
        out = self._alias()
        out._untracked = True
        return out

    @data.setter
    def data(self, value: Tensor) -> None:
        if self._layout != value._layout:
            raise RuntimeError(
                f"the new .data must be laid out over ranks as the tensor is: the tensor has "
                f"{self._layout}, the data {value._layout}"
            )
        self._storage, self._chain, self._cached = value._storage, value._chain, None
        state_changes.bump()

    def detach(self) -> Tensor:
        """The same storage, outside the graph."""
        return self._alias()

    def detach_(self) -> Tensor:
        """Takes the tensor out of the graph, in place."""
        if self._base is not None:
            raise RuntimeError("Can't detach views in-place. Use detach() instead.")
        self._grad_fn, self._requires_grad, self._output_nr = None, False, 0
        self._detached = True
        return self

    def _alias(self) -> Tensor:
        out = Tensor.__new__(Tensor)
        out._storage, out._chain, out._cached = self._storage, self._chain, self._cached
        out._layout, out._detached = self._layout, True
        out._inference, out._refusal = self._inference, self._refusal
        return out

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        """Accumulates the gradient of this tensor into the ``grad`` of the leaves.

        Args:
            gradient: same shape as this tensor; may be left out for a single element.
            retain_graph: keep what the graph saved, for a further backward (default:
                ``create_graph``).
            create_graph: record the backward pass itself, for higher derivatives.
            inputs: accumulate only into these tensors.

        Raises:
            RuntimeError: no graph, a graph that was freed, or a saved value that was changed in
                place since.
        """
        if inputs is not None:
            inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
            if not inputs:
                raise RuntimeError("`inputs` argument to `backward()` cannot be empty.")
        backward([self], [gradient], retain_graph, create_graph, inputs)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """``hook(grad)`` runs when this tensor's gradient is known; may return a replacement."""
        if not self.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        if state.trace is not None:
            state.trace.abort("registers a hook on a tensor")
        if self.grad_fn is not None:
            return add_hook(self._grad_fn.hooks_of_output(self._output_nr), hook)  # type: ignore[union-attr]
        if self._hooks is None:
            self._hooks = self._leaf_edge()[0].hooks_of_output(0)
        return add_hook(self._hooks, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """``hook(tensor)`` runs after ``tensor.grad`` was accumulated; leaves only."""
        if not self.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        if self.grad_fn is not None:
            raise RuntimeError(
                "post accumulate grad hooks cannot be registered on non-leaf tensors"
            )
        if self._post_accumulate_hooks is None:
            self._post_accumulate_hooks = {}
        return add_hook(self._post_accumulate_hooks, hook)

    def retain_grad(self) -> None:
        """Lets ``grad`` be filled although this tensor is not a leaf."""
        if not self.requires_grad:
            raise RuntimeError("can't retain_grad on Tensor that has requires_grad=False")
        if self.grad_fn is None or self._retains_grad:
            return
        if state.trace is not None:
            state.trace.abort("calls retain_grad()")
        self._retains_grad = True
        self._retain_at_node()

    def _retain_at_node(self) -> None:
        own = weakref.ref(self)

        def keep(grad: Tensor) -> None:
            tensor = own()
            if tensor is not None:
                tensor._grad = _own_copy(grad) if tensor._grad is None else tensor._grad + grad

        assert self._grad_fn is not None
        self._grad_fn.retained = {**(self._grad_fn.retained or {}), self._output_nr: keep}

    @property
    def retains_grad(self) -> bool:
        return self._retains_grad

    def _edge(self) -> Edge | None:
        """Where this tensor's gradient goes."""
        if self._base is not None:
            self._sync()
        if self._grad_fn is not None:
            return (self._grad_fn, self._output_nr)
        return self._leaf_edge() if self._requires_grad else None

    def _leaf_edge(self) -> Edge:
        if self._gradient_edge is not None:
            return self._gradient_edge
        node = self._accumulator() if self._accumulator is not None else None
        if node is None:
            node = AccumulateGrad(self)
            self._accumulator = weakref.ref(node)
        return (node, 0)

    def _set_history(self, node: Node | None, index: int, requires_grad: bool) -> None:
        """Gives this tensor a new place in the graph after an in-place op."""
        if self._retains_grad and self._grad_fn is not None:
            (self._grad_fn.retained or {}).pop(self._output_nr, None)
        self._grad_fn, self._output_nr = node, index
        self._requires_grad = requires_grad
        self._epoch += 1
        if self._retains_grad and node is not None:
            self._retain_at_node()

    def _sync(self) -> None:
        """A view takes its history anew from its base where the base was written in place."""
        base = self._base
        assert base is not None
        if base._base is not None:
            base._sync()
        if self._base_epoch == base._epoch:
            return
        self._base_epoch = base._epoch
        if base._grad_fn is not None and self._view_kind != "no_grad":
            fresh = _replay_view(base, self._base_chain)
            self._requires_grad = True
            self._grad_fn, self._output_nr = fresh._grad_fn, fresh._output_nr

    # --- copies ------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            return memo[id(self)]
        if self.grad_fn is not None:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment."
            )
        if self._layout is not None:
            self._layout.refuse(self, "copy.deepcopy", "copy through state_dict() instead")
        out = type(self).__new__(type(self))
        memo[id(self)] = out
        out._storage, out._chain = _copied_storage(self._storage, memo), self._chain
        out._requires_grad = self._requires_grad
        out._grad = copy.deepcopy(self._grad, memo)
        for name, value in self.__dict__.items():
            if name not in _OWN_STATE:
                out.__dict__[name] = copy.deepcopy(value, memo)
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._layout is not None:
            self._layout.refuse(self, "pickle", "take .full_tensor() or .to_local() first")
        return (_rebuild, (type(self), np.array(self._host()), self.requires_grad))


_OWN_STATE = frozenset(Tensor.__annotations__)


class StateChanges:
    """Counts changes to what compiled calls may have read of parameters, modules and knobs.

    ``count`` equal to an earlier value means that nothing changed since.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def bump(self) -> None:
        self.count += 1


state_changes = StateChanges()


class AccumulateGrad(Node):
    """The end of a gradient's way: adds into a leaf's ``grad``."""

    __slots__ = ("variable",)
    recorded = False

    def __init__(self, variable: Tensor) -> None:
        super().__init__(())
        self.variable = variable
        self.sequence = 1 << 62
        if variable._hooks is not None:
            self._output_hooks = {0: variable._hooks}

    def backward(self, grads: list[Any]) -> list[Any]:
        variable, grad = self.variable, grads[0]
        if variable._grad is None:
            variable._grad = grad if state.grad_enabled else _own_copy(grad)
        elif state.grad_enabled:
            variable._grad = variable._grad + grad
        else:
            variable._grad.add_(grad)
        for hook in list((variable._post_accumulate_hooks or {}).values()):
            hook(variable)
        return []


def _copied_storage(storage: Storage, memo: dict[int, Any]) -> Storage:
    """A storage with its own buffer; aliases that are copied together stay aliases."""
    found = memo.get(id(storage))
    if found is None:
        array = storage.array
        with jax.enable_x64(True):
            found = Storage(array if type(array) is Meta else jax.numpy.copy(array))
        memo[id(storage)] = found
    return found  # type: ignore[no-any-return]


def _own_copy(grad: Tensor) -> Tensor:
    """A gradient in a storage of its own (arrays are immutable, so no data moves)."""
    out = grad._alias()
    if grad._layout is None:
        out._storage, out._chain = Storage(grad._read()), None
    else:
        out._storage = grad._layout.copy_storage(grad._storage)
    out._detached = False
    return out


def wrap(array: Any) -> Tensor:
    """A new tensor over a jax array."""
    out = Tensor.__new__(Tensor)
    out._storage = Storage(array)
    if state.inference:
        out._inference = True
    return out


def to_host(array: Any) -> np.ndarray:
    """A jax array in host memory; a failure of another rank is raised in its own words."""
    try:
        return np.asarray(array)
    except Exception as error:
        for translate in read_error_translators:
            translated = translate(error)
            if translated is not None:
                raise translated from error
        raise


def wrap_dim(dim: int, ndim: int) -> int:
    """``dim`` counted from the front.

    Raises:
        IndexError: ``dim`` is out of range.
    """
    limit = max(ndim, 1)
    if not -limit <= dim < limit:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-limit}, {limit - 1}], "
            f"but got {dim})"
        )
    return dim % limit


def backward(
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[Tensor] | None = None,
) -> None:
    """Runs the graph backward from ``tensors`` and accumulates into leaves (or ``inputs``)."""
    if inputs is not None:
        for position, tensor in enumerate(inputs):
            if not tensor.requires_grad:
                raise RuntimeError(
                    f"One of the differentiated Tensors does not require grad (inputs[{position}])"
                )
            tensor.retain_grad()
    _differentiate(tensors, gradients, retain_graph, create_graph, inputs, True)


def gradients_of(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    retain_graph: bool | None,
    create_graph: bool,
) -> list[Tensor | None]:
    """Gradients of ``outputs`` with respect to ``inputs``, accumulated nowhere."""
    return _differentiate(outputs, gradients, retain_graph, create_graph, inputs, False)


def _differentiate(
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    retain_graph: bool | None,
    create_graph: bool,
    inputs: Sequence[Tensor] | None,
    accumulate: bool,
) -> list[Tensor | None]:
    if state.trace is not None:
        state.trace.abort("runs a backward pass")
    roots, grads = [], []
    for position, (tensor, gradient) in enumerate(zip(tensors, gradients, strict=True)):
        edge = tensor._edge()
        if edge is None:
            raise RuntimeError(
                f"element {position} of tensors does not require grad and does not have a grad_fn"
            )
        roots.append(edge)
        grads.append(_initial_gradient(tensor, gradient))
    capture = None if inputs is None else [t._edge() for t in inputs]
    outer, state.grad_enabled = state.grad_enabled, create_graph
    try:
        return run_backward(
            roots,
            grads,
            keep_graph=create_graph if retain_graph is None else retain_graph,
            add=lambda a, b: a + b,
            capture=capture,  # type: ignore[arg-type]
            accumulate_captured=accumulate,
        )
    finally:
        state.grad_enabled = outer


def _initial_gradient(tensor: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        if tensor.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return _ones_like(tensor)
    if gradient.shape != tensor.shape:
        raise RuntimeError(
            f"Mismatch in shape: grad_output[0] has a shape of {gradient.shape} and output[0] has "
            f"a shape of {tensor.shape}."
        )
    return gradient


def _check_assigned_grad(tensor: Tensor, grad: Tensor) -> None:
    if not isinstance(grad, Tensor):
        raise TypeError(f"assigned grad expected to be a Tensor or None but got {type(grad)}")
    if grad.shape != tensor.shape:
        raise RuntimeError(
            f"assigned grad has data of a different size: the tensor's shape is "
            f"{tuple(tensor.shape)}, the grad's {tuple(grad.shape)}"
        )
    if grad.dtype is not tensor.dtype:
        raise RuntimeError(
            f"assigned grad has data of a different type: the tensor has {tensor.dtype}, "
            f"the grad {grad.dtype}"
        )


def _rebuild(kind: type[Tensor], value: np.ndarray, requires_grad: bool) -> Tensor:
    out = kind.__new__(kind)
    with jax.enable_x64(True):
        out._storage = Storage(jax.numpy.asarray(value))
    out._requires_grad = requires_grad
    return out


def _ones_like(tensor: Tensor) -> Tensor:
    with jax.enable_x64(True):
        return wrap(_ones(tensor._array_shape(), tensor._storage.array.dtype))


_ones = partial(jax.jit, static_argnums=(0, 1))(jax.numpy.ones)


_construct: Callable[..., Tensor]
_replay_view: Callable[[Tensor, _views.Chain], Tensor]


def install(construct: Callable[..., Tensor], replay_view: Callable[..., Tensor]) -> None:
    """Gives this file the two ops it needs, from the layer above that owns ops."""
    global _construct, _replay_view
    _construct, _replay_view = construct, replay_view
