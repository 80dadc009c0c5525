"""The message of rping, rdma-core's tool: which memory the other end may read or write."""

from .layout import BitStruct

RPING_INFO = BitStruct("rping_info", 16, """
    address                     0x000     64
    rkey                        0x040     32
    nbytes                      0x060     32
""")
