"""FSDPState: what ``fully_shard`` attaches to a module, and what happens around its forward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from ..._graph import queue_callback
from ..._ops.math import to_dtype
from ..._ops.random import default_generator
from ..._state import state as thread
from ..._structure import flatten, map_tensors
from ..._tensor import Tensor
from ...nn._module import Module
from ._api import MixedPrecisionPolicy
from ._boundary import ControllerBoundary, RankBoundary
from ._each_rank import run_for_each_rank
from ._mesh import DataParallelMesh
from ._param_group import FSDPParamGroup, ShardedState
from ._schedule import ENTER, LEAVE, mark


class FSDPState:
    """The FSDP side of one module.

    Attributes:
        module: the module.
        group: its group, shared by the modules of one call; None if no parameters were left for it.
        mesh: its data-parallel mesh.
        policy: its mixed-precision policy.
        reshard_after_forward: None until the root is known: then False for the root, else True. An
            int is the number of neighbours that share the pieces which stay.
        is_root: None until a forward ran; then whether forwards start here.
    """

    def __init__(
        self,
        module: Module,
        group: FSDPParamGroup | None,
        mesh: DataParallelMesh,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self.module, self.group, self.mesh, self.policy = module, group, mesh, policy
        self.reshard_after_forward = reshard_after_forward
        self.is_root: bool | None = None
        self.calls: Any = None
        self._depth = 0

    def __guard__(self) -> Any:
        """What a trace of the module's forward depends on."""
        names = None if self.group is None else tuple(self.group.names)
        return (self.policy, names)

    # --- the tree ----------------------------------------------------------------------------

    def lazy_init(self) -> None:
        """Makes this the root of its tree, at the first forward.

        Raises:
            RuntimeError: a module below was the root of a forward before.
        """
        if self.is_root is not None:
            return
        below = states_below(self.module)
        for other in below:
            if other is not self and other.is_root:
                raise RuntimeError(
                    "FSDP requires running forward through the root module first: the forward of "
                    f"{type(other.module).__name__} ran before that of "
                    f"{type(self.module).__name__}, which contains it. Run the outer module first."
                )
        _refuse_ties(self.module, below)
        for other in below:
            other.is_root = other is self
        if self.reshard_after_forward is None:
            self.reshard_after_forward = False

    def reshards(self) -> bool:
        """Whether the group is freed after forward."""
        return self.reshard_after_forward is not False

    @property
    def within(self) -> int:
        """How many neighbours share the pieces that stay after forward; 0 where none stay."""
        value = self.reshard_after_forward
        return 0 if value is None or isinstance(value, bool) else value

    def groups(self) -> list[FSDPParamGroup]:
        """The groups of this module and of all below it, each once."""
        found = (s.group for s in states_below(self.module))
        return list(dict.fromkeys(g for g in found if g is not None))

    def mixes_meshes(self) -> bool:
        """Whether groups below are on another mesh, so that no program holds all of them."""
        own = self.mesh.jax_mesh
        return any(group.mesh.jax_mesh != own for group in self.groups())

    # --- forward -----------------------------------------------------------------------------

    @property
    def in_forward(self) -> bool:
        """Whether a forward of this module is running through its hooks."""
        return self._depth > 0

    def refuse_direct_forward(self) -> None:
        """Raises RuntimeError if ``forward`` was called past the hooks on sharded parameters."""
        if self.in_forward or self.group is None or self.group.state is ShardedState.UNSHARDED:
            return
        if not self.group.params:
            return
        name = type(self.module).__name__
        raise RuntimeError(
            f"{name}.forward() was called directly, past the hooks that gather its sharded "
            f"parameters {self.group.names}. Call the module itself, model(input); or "
            'register_fsdp_forward_method(model, "forward") first; or model.unshard() first.'
        )

    def run_traced(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One forward inside the trace of an outer module's call."""
        if self.group is not None:
            thread.trace.owner.show(self.group)
        try:
            self._mark(ENTER, (args, kwargs))
            out = self._run_body(run, args, kwargs)
            self._mark(LEAVE, out)
            return out
        finally:
            if self.group is not None:
                thread.trace.owner.hide(self.group)

    def _mark(self, place: str, value: Any) -> None:
        """Marks the first floating tensor inside ``value``, else the first tensor."""
        if self.group is None:
            return
        trace = thread.trace
        tensors = [t for t in flatten(value)[0] if trace.in_scope(t)]
        floating = [t for t in tensors if t.is_floating_point()]
        for tensor in (floating or tensors)[:1]:
            storage = tensor._storage
            storage.array = mark(storage.array, place, trace.owner.number_of(self.group))

    def run_eagerly(
        self, run: Callable[..., Any], args: Any, kwargs: Any, boundary: RankBoundary | None = None
    ) -> Any:
        """One forward as plain Python: gather, run, free. One controller runs it for each rank."""
        if isinstance(boundary, ControllerBoundary):
            once = functools.partial(self._gathered, run)
            buffers = list(self.module.buffers())
            generator = default_generator()
            with self.random_stream():
                return run_for_each_rank(boundary, once, (args, kwargs), buffers, generator)
        with self.random_stream():
            return self._gathered(run, *args, **kwargs)

    def _gathered(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs with the group's whole parameters shown."""
        group = self.group
        if group is not None:
            group.to_unsharded()
        try:
            out = self._run_body(run, args, kwargs)
        except BaseException:
            if group is not None:
                group.to_sharded()
            raise
        if group is not None:
            if self.within:
                group.to_post_forward(self.within)
                self._reshard_after_backward(out)
            elif self.reshards():
                group.to_sharded()
            else:
                self._reshard_after_backward(out)
        return out

    def _run_body(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._depth += 1
        try:
            args, kwargs = self._cast_inputs(args, kwargs)
            return self._cast_outputs(run(*args, **kwargs))
        finally:
            self._depth -= 1

    def _cast_inputs(self, args: Any, kwargs: Any) -> Any:
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        return map_tensors(
            (args, kwargs), lambda t: to_dtype(t, dtype) if t.is_floating_point() else t
        )

    def _cast_outputs(self, out: Any) -> Any:
        dtype = self.policy.output_dtype
        if dtype is None:
            return out
        return map_tensors(out, lambda t: to_dtype(t, dtype) if t.is_floating_point() else t)

    def _reshard_after_backward(self, out: Any) -> None:
        """Frees the group at the end of the backward that reaches ``out``."""

        def on_gradient(grad: Tensor) -> None:
            assert self.group is not None
            if self.group.reshard_after_backward:
                queue_callback(self.group.to_sharded)

        for tensor in flatten(out)[0]:
            if tensor.requires_grad:
                tensor.register_hook(on_gradient)

    @contextlib.contextmanager
    def random_stream(self) -> Iterator[None]:
        """Lets random draws differ between data-parallel ranks that were seeded alike."""
        generator = default_generator()
        outer = generator.stream
        if not thread.one_rank:
            generator.stream = self.mesh.rank
        try:
            yield
        finally:
            generator.stream = outer


def state_of(module: Module) -> FSDPState | None:
    """The FSDP state of a module, if it has one."""
    return module.__dict__.get("_fsdp_state")


def states_below(module: Module) -> list[FSDPState]:
    """The FSDP states of a module and of all modules below it."""
    found = (state_of(m) for m in module.modules())
    return [s for s in found if s is not None]


def _refuse_ties(module: Module, states: list[FSDPState]) -> None:
    """Raises ValueError if a parameter that one group shards is used by another module too."""
    ties = [
        (param.name, param.tied_to)
        for group in dict.fromkeys(s.group for s in states if s.group is not None)
        for param in group.params
        if param.tied_to is not None
    ]
    ties += [
        (name, param.__dict__["_fsdp_sharded_as"])
        for name, param in module.named_parameters()
        if "_fsdp_sharded_as" in param.__dict__
    ]
    if ties:
        name, first = ties[0]
        raise ValueError(
            f"the parameter {name!r} is tied to {first!r}, which belongs to another group: each "
            "would train a copy of its own. Shard the modules that share it in one call, "
            "fully_shard([module_a, module_b])"
        )
