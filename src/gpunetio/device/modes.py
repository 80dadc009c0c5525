"""Mode arguments of device functions, as plain ints that fold at compile time (template parameters in C)."""

from ..enums import CodeOpt as _CodeOpt
from ..enums import ExecScope as _ExecScope
from ..enums import NicHandler as _NicHandler
from ..enums import SharingMode as _SharingMode
from ..enums import SyncScope as _SyncScope

# resource sharing: which threads use the queue
EXCLUSIVE = int(_SharingMode.EXCLUSIVE)
CTA = int(_SharingMode.CTA)
GPU = int(_SharingMode.GPU)

# which threads post together
THREAD = int(_ExecScope.THREAD)
WARP = int(_ExecScope.WARP)
BLOCK = int(_ExecScope.BLOCK)

# scope of the fence before a doorbell
SYNC_SYS = int(_SyncScope.SYS)
SYNC_GPU = int(_SyncScope.GPU)
SYNC_CTA = int(_SyncScope.CTA)
SYNC_THREAD = int(_SyncScope.THREAD)

# how the doorbell reaches the NIC
CPU_PROXY = int(_NicHandler.CPU_PROXY)
GPU_SM_DB = int(_NicHandler.GPU_SM_DB)
GPU_SM_BF = int(_NicHandler.GPU_SM_BF)
GPU_SM_NO_DBR = int(_NicHandler.GPU_SM_NO_DBR)

# code_opt
DEFAULT = int(_CodeOpt.DEFAULT)
ASYNC_STORE_RELEASE = int(_CodeOpt.ASYNC_STORE_RELEASE)
SKIP_AVAILABILITY_CHECK = int(_CodeOpt.SKIP_AVAILABILITY_CHECK)
SKIP_DB_RINGING = int(_CodeOpt.SKIP_DB_RINGING)
CPU_PROXY_UPDATE_PI = int(_CodeOpt.CPU_PROXY_UPDATE_PI)  # no effect: the submitted index is always stored
