"""The policies that ``fully_shard`` takes. Source: torch.distributed.fsdp."""

from __future__ import annotations

import dataclasses

from ..._dtypes import dtype


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


@dataclasses.dataclass
class OffloadPolicy:
    """No offloading; the base of offload policies."""


@dataclasses.dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state live in host memory.

    On a CPU mesh they do so anyway. Other meshes are refused by ``fully_shard``.

    Attributes:
        pin_memory: page-lock that memory, for transfers that overlap compute.
    """

    pin_memory: bool = True


@dataclasses.dataclass(frozen=True)
class DataParallelMeshDims:
    """Which dims of a mesh shard and which replicate.

    Attributes:
        shard: name, or names, of the dims over which parameters are sharded.
        replicate: name, or names, of the dims over which they are replicated.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None
