"""The policies that ``fully_shard`` takes. Source: torch.distributed.fsdp."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

from ..._device import device
from ..._dtypes import dtype
from ..._tensor import Tensor
from .._process_group import ProcessGroup
from .._reduce_op import ReduceOp
from .._work import Work


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes in which a module computes and communicates.

    Attributes:
        param_dtype: of the unsharded parameters, and so of the all-gather and of the compute; None
            keeps the parameters' own. The cast happens on the shard, before the gather.
        reduce_dtype: of the gradient reduction; None takes the dtype of the gradients.
        output_dtype: floating outputs of the forward are cast to it; None leaves them.
        cast_forward_inputs: floating inputs of the forward are cast to ``param_dtype``.
    """

    param_dtype: dtype | None = None
    reduce_dtype: dtype | None = None
    output_dtype: dtype | None = None
    cast_forward_inputs: bool = True


class Comm(abc.ABC):
    """A collective of one's own; see ``set_custom_all_gather``, ``set_custom_reduce_scatter``."""

    @abc.abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: dtype, device: device) -> Tensor:
        """A buffer of shape ``size`` for the collective to read or write."""


class AllGather(Comm):
    """Called in the place of the all-gather of a group's parameters."""

    @abc.abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        """Writes all ranks' ``input_tensor`` into ``output_tensor``, both flat, in rank order."""


class ReduceScatter(Comm):
    """Called in the place of the reduce-scatter of a group's gradients."""

    @abc.abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> Work | None:
        """Combines part r of all ranks' ``input_tensor`` into rank r's ``output_tensor``."""


@dataclasses.dataclass
class OffloadPolicy:
    """No offloading; the base of offload policies."""


@dataclasses.dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state live in host memory.

    They are copied to the device when their group is gathered and when the optimizer updates them,
    some at a time. On a CPU mesh they are in host memory anyway, and nothing is copied.

    Attributes:
        pin_memory: page-lock that memory, for transfers that overlap compute, where the devices
            know such memory.
    """

    pin_memory: bool = True


@dataclasses.dataclass(frozen=True)
class DataParallelMeshDims:
    """Which dims of a mesh shard and which replicate.

    Attributes:
        shard: name, or names, of the dims over which parameters are sharded.
        replicate: name, or names, of the dims over which they are replicated.

    Several names are one dim together.

    Raises:
        ValueError: neither is set.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError(
                "At least one of shard or replicate must be set in DataParallelMeshDims"
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The names in ``shard``."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The names in ``replicate``."""
        return _names(self.replicate)


def _names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)
