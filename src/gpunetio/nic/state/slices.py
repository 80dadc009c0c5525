"""What a worker's thread and the slices of its turns on a GPU tell each other (nic/gpu/slices.py)."""

from __future__ import annotations

from ...jit.struct_view import View, struct_view
from .record import record

SLICES = record("slices", """
    # how to launch a slice: functions of the CUDA driver, and their arguments
    launch         i64      nobody     address of cuLaunchKernelEx
    enter          i64      nobody     address of cuCtxSetCurrent
    query          i64      nobody     address of cuStreamQuery
    config         i64      nobody     address of a CUlaunchConfig: its blocks, and the stream of this worker
    shared         i64      nobody     address of the size of its dynamic shared memory, 32 bits
    function       i64      nobody     the kernel, a CUfunction
    parameters     i64      nobody     address of the list of addresses of the kernel's arguments
    context        i64      nobody     CUDA context
    stream         i64      nobody     CUDA stream
    # the thread
    number         i64      engine     number of the last slice, an argument of the kernel
    given          i64      engine     slices that were launched
    failure        i64      engine     CUresult of the call that has failed; 0 while all is well
    # the slices
    ended          i64      engine     slices that are over
    wanted         i64      engine     not 0: what is next is the thread's, and slices behind this one do nothing
    done           i64      engine     how much slices have done
""")
slices_at: View = struct_view(SLICES)
