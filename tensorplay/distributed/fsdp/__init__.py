"""Fully sharded data parallel: ``fully_shard`` and its policies, as torch.distributed.fsdp."""

from ._api import AllGather as AllGather
from ._api import Comm as Comm
from ._api import CPUOffloadPolicy as CPUOffloadPolicy
from ._api import DataParallelMeshDims as DataParallelMeshDims
from ._api import MixedPrecisionPolicy as MixedPrecisionPolicy
from ._api import OffloadPolicy as OffloadPolicy
from ._api import ReduceScatter as ReduceScatter
from ._explain import explain as explain
from ._fully_shard import fully_shard as fully_shard
from ._fully_shard import register_fsdp_forward_method as register_fsdp_forward_method
from ._fully_shard import share_comm_ctx as share_comm_ctx
from ._module import FSDPModule as FSDPModule
from ._module import UnshardHandle as UnshardHandle
from ._replicas import broadcast_module_states as broadcast_module_states
from ._replicas import check_replicas as check_replicas
