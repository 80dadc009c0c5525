"""The kernel's side of libibverbs, for programs that use software NICs without knowing it (`gpunetio run`).

    preload.c       in the program: opens device files, and hands ioctl, mmap and close on them to Python
    calls.py        what it calls
    call.py         one ioctl: its attributes, and the program's memory
    methods.py      the tables of what answers calls: device.py, memory.py, queues.py, events.py, devx.py
    files.py        an open device file and its objects
    pump.py         events on their way to the program; pump_loop.py is the compiled part
    abi.py          numbers and structures of the kernel's headers
    sysfs.py        what stands for /sys/class/infiniband
    environment.py  the program's environment; building.py compiles preload.c

docs/programs.md says what works, docs/decisions/libibverbs-programs.md why it is made so.
"""
