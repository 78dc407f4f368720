"""FSDPModule: the methods that ``fully_shard`` gives to a module, as torch.distributed.fsdp."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ..._state import state as thread
from ..._tensor import Tensor
from ._api import AllGather, ReduceScatter
from ._param_group import FSDPParamGroup
from ._state import FSDPState, states_below


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        """Blocks until the parameters are unsharded; a second call does nothing."""
        if self._finish is not None:
            self._finish()
            self._finish = None


class FSDPModule:
    """The methods of a module that ``fully_shard`` was applied to."""

    _fsdp_state: FSDPState

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A module of the original class, as when a slice of a container is made."""
        return cls.__mro__[2](*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self._fsdp_state
        run = super().__call__  # type: ignore[misc]
        if thread.trace is not None:
            return state.run_traced(run, args, kwargs)
        state.lazy_init()
        return state.calls.run(run, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._fsdp_state.refuse_direct_forward()
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Module.state_dict``; sharded parameters are given as shards."""
        for group in self._groups(recurse=True):
            group.to_sharded()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.reshard()
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's group and shows the whole parameters until ``reshard()``.

        An edit of the whole parameters is lost at the next reshard.

        Returns:
            None; with ``async_op``, a handle whose ``wait()`` shows them.
        """
        group = self._fsdp_state.group
        finish = (lambda: None) if group is None else group.to_unsharded
        if async_op:
            return UnshardHandle(finish)
        finish()
        return None

    def reshard(self) -> None:
        """Shows this module's shards again and frees the whole parameters."""
        if self._fsdp_state.group is not None:
            self._fsdp_state.group.to_sharded()

    def reset_iter_state(self) -> None:
        """Forgets what an unfinished iteration left behind, after an exception.

        Gradients that were kept without synchronisation are lost.

        Raises:
            RuntimeError: this is not the root.
        """
        if self._fsdp_state.is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        for group in self._groups(recurse=True):
            group.to_sharded()
            group.unreduced.clear()
            group.partial.clear()

    # --- knobs -------------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether the whole parameters are freed after forward and gathered again in backward."""
        _require_bool("reshard_after_forward", reshard_after_forward)
        for state in self._states(recurse):
            state.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether the whole parameters are freed after backward.

        Otherwise the next forward uses them without a gather, unless a step changed the shards.
        """
        _require_bool("reshard_after_backward", reshard_after_backward)
        for group in self._groups(recurse):
            group.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """The modules whose gathers are issued when this module's forward starts.

        By default that of the FSDP module that runs next; an empty list gathers nothing ahead.

        Raises:
            ValueError: one of ``modules`` is not an FSDP module.
        """
        chosen = _groups_of(modules)
        for group in self._groups(recurse=False):
            group.forward_prefetch = chosen

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """The modules whose gathers are issued when this module's backward starts.

        By default that of the FSDP module whose backward comes next.

        Raises:
            ValueError: one of ``modules`` is not an FSDP module.
        """
        chosen = _groups_of(modules)
        for group in self._groups(recurse=False):
            group.backward_prefetch = chosen

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients; otherwise they are kept whole on each rank.

        The next backward with synchronisation on reduces their sum.
        """
        for group in self._groups(recurse):
            group.requires_gradient_sync = bool(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward on a hybrid (2-D) mesh sums gradients over the replicas too.

        Otherwise what the shard axis summed is kept, and the next backward with this on adds it.
        """
        for group in self._groups(recurse):
            group.requires_all_reduce = bool(requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """The sum of the ranks' gradients is divided by ``factor`` in place of their number."""
        for group in self._groups(recurse=False):
            group.divide_factor = float(factor)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters that no gradient reached get a gradient of zeros, not None."""
        for group in self._groups(recurse):
            group.reduce_unused = bool(reduce_scatter_unused_params)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward may gather this module's parameters again.

        Backward gathers only what it computes with anyway. With False it raises RuntimeError where
        it would have to gather these, as for an embedding it never has.
        """
        for group in self._groups(recurse=False):
            group.unshard_in_backward = bool(unshard_in_backward)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted as in PyTorch, where it delays waiting for reductions between microbatches.

        Here a backward is one XLA program: what reads its results waits for them, nothing else.
        """

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether reductions only ever sum, and are divided in a step of their own.

        The built-in ones do so anyway. It is a custom reduce-scatter and the all-reduce hook that
        see a difference: ``op``, and a row that is not divided yet.
        """
        for group in self._groups(recurse=False):
            group.comms.force_sum = bool(enable)

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gathers this module's parameters with ``comm``.

        It runs as Python on real tensors, so this group is gathered before the compiled program
        that uses it and before its backward, rather than inside where the schedule says.

        Raises:
            RuntimeError: one controller drives the mesh, so that there are no ranks to run it.
        """
        for group in self._groups_of_ranks("set_custom_all_gather"):
            group.comms.all_gather = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduces this module's gradients with ``comm``.

        It runs as Python on real tensors, after the compiled backward.

        Raises:
            RuntimeError: one controller drives the mesh, so that there are no ranks to run it.
        """
        for group in self._groups_of_ranks("set_custom_reduce_scatter"):
            group.comms.reduce_scatter = comm

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Calls ``hook`` with this module's reduced gradients: one flat tensor, to change in place.

        On a 1-D mesh they come from the reduce-scatter, on a 2-D mesh from the all-reduce. The hook
        runs as Python on real tensors, after the compiled backward.

        Args:
            stream: accepted as in PyTorch, where it is a CUDA stream; XLA has its own.

        Raises:
            ValueError: a stream together with a 2-D mesh.
            RuntimeError: one controller drives the mesh, so that there are no ranks to run it.
        """
        for group in self._groups_of_ranks("set_all_reduce_hook"):
            if stream is not None and group.mesh.replicate_axis is not None:
                raise ValueError("stream cannot be set when using native HSDP")
            group.comms.all_reduce_hook = hook

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        warnings.warn("Use `set_gradient_divide_factor` instead", FutureWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Accepted as in PyTorch, where it bounds buffers between CUDA streams; XLA plans its own.

        Raises:
            TypeError, ValueError: not a positive int.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Accepted as in PyTorch, where it gives reductions an NCCL communicator of their own.

        XLA makes communicators for the collectives of its programs itself.
        """

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepted as in PyTorch, where it takes buffers from NCCL; XLA allocates them itself."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Accepted as in PyTorch, where it takes NCCL's symmetric memory; XLA allocates itself."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted as in PyTorch, where it moves all-gathers between CUDA streams."""

    def set_post_optim_event(self, event: Any) -> None:
        """Accepted as in PyTorch, where the next all-gather waits for this CUDA event.

        Here a program waits for the arrays that it reads.
        """

    def _groups_of_ranks(self, what: str) -> list[FSDPParamGroup]:
        """This module's group, if ranks run Python for it."""
        groups = self._groups(recurse=False)
        if any(group.mesh.controlled for group in groups):
            raise RuntimeError(
                f"{what} needs a process group, whose ranks run it; one controller drives this "
                "mesh. Start ranks with run_ranks or the launcher"
            )
        return groups

    def _states(self, recurse: bool) -> Sequence[FSDPState]:
        return states_below(self) if recurse else [self._fsdp_state]  # type: ignore[arg-type]

    def _groups(self, recurse: bool) -> list[FSDPParamGroup]:
        found = (state.group for state in self._states(recurse))
        return list(dict.fromkeys(g for g in found if g is not None))


def _groups_of(modules: Sequence[Any]) -> list[FSDPParamGroup]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"expected modules that fully_shard was applied to, got {type(module).__name__}"
            )
    found = (module._fsdp_state.group for module in modules)
    return [group for group in found if group is not None]


def _require_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} should be a bool, got {type(value).__name__}")
