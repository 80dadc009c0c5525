"""Mode arguments of device functions, as plain ints that fold at compile time (template parameters in C)."""

from ..enums import CodeOpt as _CodeOpt
from ..enums import NicHandler as _NicHandler
from ..enums import SharingMode as _SharingMode
from ..enums import SyncScope as _SyncScope

# resource sharing: who else uses the queue
EXCLUSIVE = int(_SharingMode.EXCLUSIVE)
CTA = int(_SharingMode.CTA)
GPU = int(_SharingMode.GPU)

# scope of the fence before a doorbell
SYNC_SYS = int(_SyncScope.SYS)
SYNC_GPU = int(_SyncScope.GPU)
SYNC_CTA = int(_SyncScope.CTA)
SYNC_THREAD = int(_SyncScope.THREAD)

# how the doorbell reaches the NIC
AUTO = int(_NicHandler.AUTO)
GPU_SM_DB = int(_NicHandler.GPU_SM_DB)

# code_opt
DEFAULT = int(_CodeOpt.DEFAULT)
SKIP_AVAILABILITY_CHECK = int(_CodeOpt.SKIP_AVAILABILITY_CHECK)
SKIP_DB_RINGING = int(_CodeOpt.SKIP_DB_RINGING)
