"""State that a worker's thread shares with the slices of its turns on a GPU (nic/gpu/slices.py)."""

from __future__ import annotations

from ...formats.layout import I64
from .record import State, engine, nobody


class Slices(State):
    """How a worker's thread launches slices on a GPU, and the words that thread and slices share."""

    # how to launch a slice: functions of the CUDA driver, and their arguments
    launch: I64 = nobody("address of cuLaunchKernelEx")
    enter: I64 = nobody("address of cuCtxSetCurrent")
    query: I64 = nobody("address of cuStreamQuery")
    config: I64 = nobody("address of a CUlaunchConfig: its blocks, and the stream of this worker")
    shared: I64 = nobody("address of the size of its dynamic shared memory, 32 bits")
    function: I64 = nobody("the kernel, a CUfunction")
    parameters: I64 = nobody("address of the list of addresses of the kernel's arguments")
    context: I64 = nobody("CUDA context")
    stream: I64 = nobody("CUDA stream")
    # the thread
    number: I64 = engine("number of the last slice, an argument of the kernel", line=True)
    launched: I64 = engine("slices that were launched")
    failure: I64 = engine("CUresult of the call that failed; 0 if none did")
    # the slices
    finished: I64 = engine("slices that are over", line=True)
    host_wanted: I64 = engine("not 0: the thread has to act, and slices queued after this one do nothing")
    done: I64 = engine("units of work that slices have done")


SLICES = Slices.entry
