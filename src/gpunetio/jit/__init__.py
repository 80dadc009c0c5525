"""The compiler: functions in Python that run on CPU threads and on CUDA devices.

From a function to LLVM's IR, in the order in which to read:

    kinds.py        types, and values.py: what an expression is while a function is compiled
    source.py       the syntax tree, and what names mean
    lower.py        statements; expressions.py, numbers.py, calls.py, arrays.py, shared.py: what is in them
    annotations.py  the types of parameters and results; struct_view.py and signatures.py read them
    emit.py         the text of IR, and lines.py: which line of Python it comes from
    unit.py         functions that are compiled together; by_kind.py: calls by number
    ops/            primitives: memory, fences, atomics, lanes, for each target
    compile.py      `@device_function`, `@engine_function`
    interpret.py    the same functions as plain Python: what compiled code must do

From IR to machine code that stays:

    targets.py      what differs from target to target
    machine.py      LLVM; processor.py: for which processor
    cubin.py        CUDA; nvvm.py: by CUDA's own compiler; libdevice.py: its mathematics
    frozen.py       what decides about compiled code: the source that it reaches, and the values that it has frozen
    cache.py        where it is kept; prebuilt.py: what comes with a wheel
    roots.py        what is called from outside; extension.py: what is loaded when it is needed
    python_call.py  calls from Python; c_function.py: from C
    perf.py         names for perf(1); progress.py: a line for who waits

Launches:

    launch.py       `@kernel`; arguments.py and dlpack.py: what it takes; code.py: what a target is to it
    host_threads.py on threads; fault_signals.py and wild_addresses.py: kernels that access what is not there
    cuda_launch.py  on GPUs; room.py: SMs that they must leave to others
    twin.py         the twin of a GPU

docs/kernel-language.md has the language, docs/decisions/one-source.md why it is made so.
"""
