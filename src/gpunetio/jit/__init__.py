"""The compiler: functions in Python that run on CPU threads and on CUDA devices.

From a function to LLVM's IR, in reading order:

    kinds.py        types; values.py: the value of an expression while a function is compiled
    source.py       the syntax tree, and the meaning of names
    lower.py        statements; expressions.py, numbers.py, calls.py, arrays.py, shared.py: what they contain
    annotations.py  the types of parameters and results; struct_view.py and signatures.py read them
    emit.py         the text of IR; lines.py: the lines of Python that it comes from
    unit.py         functions that are compiled together; by_kind.py: calls by number
    ops/            primitives: memory, fences, atomics, lanes, for each target
    compile.py      `@device_function`, `@engine_function`
    interpret.py    the same functions as plain Python: the reference for compiled code

From IR to cached machine code:

    targets.py      the differences between targets
    machine.py      LLVM; processor.py: the processor to compile for
    cubin.py        CUDA; nvvm.py: CUDA's own compiler; libdevice.py: CUDA's mathematical functions
    frozen.py       everything that determines compiled code: the source that it reaches, and the values frozen into it
    cache.py        the cache of compiled code; prebuilt.py: the code that comes with a wheel
    roots.py        functions that are called from outside; extension.py: functions that are loaded when needed
    python_call.py  calls from Python; c_function.py: calls from C
    perf.py         names for perf(1); progress.py: messages while the user waits

Launches:

    launch.py       `@kernel`; arguments.py and dlpack.py: its arguments; code.py: the interface of a target
    host_threads.py on threads; fault_signals.py and wild_addresses.py: kernels that access unmapped addresses
    cuda_launch.py  on GPUs; room.py: SMs that kernels must leave to NICs
    twin.py         the twin of a GPU

docs/kernel-language.md describes the language; docs/decisions/one-source.md explains the design.
"""
