"""Process groups, device meshes and the ranks of a job: tensorplay's torch.distributed."""

from . import fsdp as fsdp
from ._errors import DistBackendError as DistBackendError
from ._errors import DistError as DistError
from ._errors import DistNetworkError as DistNetworkError
from ._process_group import Backend as Backend
from ._process_group import GroupMember as GroupMember
from ._process_group import ProcessGroup as ProcessGroup
from ._process_group import Work as Work
from ._process_group import barrier as barrier
from ._process_group import default_pg_timeout as default_pg_timeout
from ._process_group import destroy_process_group as destroy_process_group
from ._process_group import get_backend as get_backend
from ._process_group import get_global_rank as get_global_rank
from ._process_group import get_group_rank as get_group_rank
from ._process_group import get_process_group_ranks as get_process_group_ranks
from ._process_group import get_rank as get_rank
from ._process_group import get_world_size as get_world_size
from ._process_group import group as group
from ._process_group import init_process_group as init_process_group
from ._process_group import is_available as is_available
from ._process_group import is_initialized as is_initialized
from ._process_group import new_group as new_group
from ._rank_threads import run_ranks as run_ranks
from ._registrations import register as _register
from .device_mesh import DeviceMesh as DeviceMesh
from .device_mesh import init_device_mesh as init_device_mesh

_register()
