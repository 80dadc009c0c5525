"""The kernel's side of libibverbs and librdmacm, for unmodified programs on software NICs (`gpunetio run`).

    preload.c       in the program: opens device files, and hands ioctl, mmap, write and close on them to Python
    calls.py        the functions that preload.c calls
    call.py         one ioctl: its attributes, and the program's memory
    methods.py      tables of the functions that answer calls: device.py, memory.py, queues.py, events.py, devx.py
    files.py        an open device file and its objects
    pump.py         passes events on to the program; pump_loop.py is the compiled part
    abi.py          numbers and structures of the kernel's headers
    ucma.py         one command to the connection manager: ucma_addresses.py and ucma_connections.py answer it
    ucma_ids.py     its open files, identifiers and events; ucma_devices.py has the devices, ucma_watch.py their peers
    ucma_abi.py     numbers and structures of <rdma/rdma_user_cm.h>; sockaddr.py has those of addresses
    sysfs.py        a stand-in for /sys/class/infiniband; counter_files.py writes the counters there
    valgrind.py     programs under valgrind
    environment.py  the program's environment; remover.py removes its folder afterwards

docs/programs.md says what works, docs/decisions/libibverbs-programs.md why it is built this way.
"""
