"""A plugin for NCCL: the networking of its kernels (GIN, type GDAKI) on a software NIC or a card.

    plugin.c    tables of functions, which NCCL loads by NCCL_GIN_PLUGIN; each function calls into `calls`
    calls       the functions, by number and address; errors become results and lines of NCCL's log
    abi         NCCL's structures and numbers, and the differences between versions of the interface
    device      the NIC and the GPU of a rank
    connection  listen and connect: how ranks meet
    context     queues, signals and counters, described for kernels
    window      memory that all ranks register together
    settings    the environment
"""

from .library import plugin

__all__ = ["plugin"]
