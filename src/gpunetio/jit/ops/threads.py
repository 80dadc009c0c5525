"""The identity of a thread: its index, its warp, its block and the grid."""

# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from llvmlite import ir

from ..compile import device_function
from .lowering import INT, Emit, Llvm, extern, op, ptx

# On the host, a thread's identity comes from a record in pthread-specific data, set by the launch (host_threads.py).
# The key is read from memory by symbol, never frozen into compiled code, which another process may load from the cache.


THREAD_KEY_SYMBOL = "gpunetio_thread_key"


def _record(b) -> Llvm:
    key = b.module.globals.get(THREAD_KEY_SYMBOL) or ir.GlobalVariable(b.module, INT[32], THREAD_KEY_SYMBOL)
    return extern(b, "pthread_getspecific", INT[64].as_pointer(), [b.load(key)])


# The words of a thread that runs no kernel, such as a Python or Numba thread: it is alone in its block, its warp and
# the grid.
_ALONE = (0, 0, 1, 1, 0, 1, 0, 0)


def _thread_word(index) -> Emit:
    def emit(b: Llvm) -> Llvm:
        name, words = "gpunetio_alone", ir.ArrayType(INT[64], len(_ALONE))
        alone: Llvm = b.module.globals.get(name)
        if alone is None:
            alone = ir.GlobalVariable(b.module, words, name)
            alone.linkage, alone.global_constant, alone.initializer = "internal", True, words(_ALONE)
        record = _record(b)
        none = b.icmp_unsigned("==", record, ir.Constant(record.type, None))
        return b.load(b.gep(b.select(none, b.bitcast(alone, record.type), record), [INT[32](index)]))

    return emit


def _special(register) -> Emit:
    return ptx(f"mov.u32 $0, %{register};", 32, pure=True)


def _word_or_register(index, register) -> dict[str, Emit]:
    word = _thread_word(index)
    return {"cpu": lambda b: b.trunc(word(b), INT[32]), "cuda": _special(register)}


@op(ret=32, **_word_or_register(0, "tid.x"))
def thread_idx() -> int:
    """Return the index of the thread in its block (threadIdx.x)."""


@op(ret=32, **_word_or_register(1, "ctaid.x"))
def block_idx() -> int:
    """Return the index of the block in the grid (blockIdx.x)."""


@op(ret=32, **_word_or_register(2, "ntid.x"))
def block_dim() -> int:
    """Return the number of threads in a block (blockDim.x)."""


@op(ret=32, **_word_or_register(3, "nctaid.x"))
def grid_dim() -> int:
    """Return the number of blocks in the grid (gridDim.x)."""


@op(ret=32, **_word_or_register(4, "laneid"))
def lane_id() -> int:
    """Return the lane of the thread in its warp (`doca_gpu_dev_verbs_get_lane_id`)."""


@op(ret=32, cpu=lambda b: b.trunc(_thread_word(5)(b), INT[32]), cuda=lambda b: INT[32](32))
def warp_size() -> int:
    """Return the number of threads in a warp: 32 on CUDA; on the host, the launch chooses it."""


@op(ret=64, cpu=lambda b: b.ptrtoint(_record(b), INT[64]), cuda=lambda b: INT[64](0))
def thread_record() -> int:
    """Return the address of the thread's record; 0 in a thread that runs no kernel. Host only (host_threads.py)."""


@op(ret=64, cpu=_thread_word(6), cuda=lambda b: INT[64](0))
def warp_group() -> int:
    """Return the address of the warp's barrier. Host only (host_threads.py)."""


@op(ret=64, cpu=_thread_word(7), cuda=lambda b: INT[64](0))
def block_group() -> int:
    """Return the address of the block's barrier. Host only (host_threads.py)."""


BLOCK_PARTS = 128  # offset in a block's slot of a word for each warp
BLOCK_SLOT = BLOCK_PARTS + 8 * 32  # bytes
GROUP_HEADER = 8  # words of a host group before the slot
GROUP_SHARED = 5  # of these, of a block: the address of its shared arrays
GROUP_WORDS = GROUP_HEADER + BLOCK_SLOT // 8
_CPU_ONLY = 1


@op(ret=32, cpu=lambda b: INT[32](_CPU_ONLY), cuda=lambda b: INT[32](0))
def on_host() -> int:
    """Return 1 in code compiled for the CPU, 0 on CUDA. Folds at compile time."""


def _dynamic_shared(b):
    """Return the generic address of the shared memory whose size the launch sets."""
    name, none = "gpunetio_dynamic_shared", ir.ArrayType(INT[8], 0)
    variable: Llvm = b.module.globals.get(name)
    if variable is None:
        variable = ir.GlobalVariable(b.module, none, name, 3)
        variable.linkage, variable.align = "external", 128
    return b.ptrtoint(b.addrspacecast(variable, none.as_pointer(), "generic"), INT[64])


@op(ret=64, cpu=lambda b: INT[64](0), cuda=_dynamic_shared)
def dynamic_shared() -> int:
    """Return the address of the block's shared memory whose size the launch sets; 0 on the host."""


@op(ret=32, cpu=lambda b: INT[32](0), cuda=_special("dynamic_smem_size"))
def dynamic_shared_bytes() -> int:
    """Return the size of the memory at `dynamic_shared`; 0 on the host."""


def _shared_slot(b):
    """Return the generic address of the block's variable in shared memory."""
    name, slot = "gpunetio_shared_slot", ir.ArrayType(INT[8], BLOCK_SLOT)
    variable: Llvm = b.module.globals.get(name)
    if variable is None:
        variable = ir.GlobalVariable(b.module, slot, name, 3)
        variable.linkage, variable.align, variable.initializer = "internal", 128, ir.Constant(slot, ir.Undefined)
    return b.ptrtoint(b.addrspacecast(variable, slot.as_pointer(), "generic"), INT[64])


@op(ret=64, cpu=lambda b: b.add(_thread_word(7)(b), INT[64](8 * GROUP_HEADER)), cuda=_shared_slot)
def _block_slot() -> int: ...


@device_function
def block_slot():
    """Return the address of memory that the threads of a block share.

    The first 64 bytes are free for any use, for example a WQE for BlueFlame. `block_broadcast` uses the next ones, and
    reductions those at BLOCK_PARTS.
    """
    return _block_slot()  # called only here: each function that contains it gets its own variable
