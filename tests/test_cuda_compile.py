"""The device library and the NIC's engine compile for CUDA with no GPU: no floating point, no spills, folded modes."""

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import files
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="needs numba-cuda (extra 'cuda')")

from numba import cuda, int64, void

from gpunetio import device
from gpunetio.device import cq, onesided, qp
from gpunetio.device.launch import offline
from gpunetio.nic.loopback import serve
from gpunetio.nic.step import step

SM_90 = (9, 0)


def one_sided(queue, raddr, rkey, laddr, lkey, n, out):
    """All of the one-sided API."""
    device.st64(out, device.wait(queue, device.put(queue, raddr, rkey, laddr, lkey, n)))
    device.st64(out, device.get_wait(queue, n, device.GPU, device.THREAD, laddr, lkey))
    device.st64(out, device.wait(queue, device.p(queue, raddr, rkey, n, 4)))
    device.st64(out, device.signal(queue, raddr, rkey, laddr, lkey, n))
    device.st64(out, device.put_signal(queue, raddr, rkey, laddr, lkey, n, raddr, rkey, laddr, lkey, n))
    device.st64(out, device.p_signal(queue, raddr, rkey, n, 4, raddr, rkey, laddr, lkey, n))
    device.st64(out, device.fence(queue))
    device.st64(out, device.wait_all(queue))


def in_warps(queue, raddr, rkey, laddr, lkey, n, out):
    """Warp scope."""
    ticket = device.put(queue, raddr, rkey, laddr, lkey, n, device.GPU, device.DEFAULT, device.WARP)
    device.st64(out, device.wait(queue, ticket, device.GPU, device.WARP))
    ticket = device.put_signal(
        queue, raddr, rkey, laddr, lkey, n, raddr, rkey, laddr, lkey, n, device.CTA, device.DEFAULT, device.WARP
    )
    device.st64(out, device.send(queue, laddr, lkey, n, device.GPU, device.DEFAULT, device.WARP))
    ticket = device.recv(queue, laddr, lkey, n, device.GPU, device.WARP)
    device.st64(out, device.recv_wait(queue, ticket, device.GPU, device.WARP, laddr, lkey))


def in_blocks(queue, raddr, rkey, laddr, lkey, n, out):
    """Block scope."""
    ticket = device.get(queue, raddr, rkey, laddr, lkey, n, device.GPU, device.DEFAULT, device.BLOCK, laddr, lkey, 1)
    device.st64(out, device.wait(queue, ticket, device.GPU, device.BLOCK))
    device.st64(out, device.p(queue, raddr, rkey, n, 8, device.CTA, device.DEFAULT, device.BLOCK))
    device.st64(out, device.recv(queue, laddr, lkey, n, device.GPU, device.BLOCK))


def low_level(queue, raddr, rkey, laddr, lkey, n, out):
    """All builders, and the queue protocol."""
    first = device.reserve(queue, 16)
    device.prepare_nop(queue, first)
    device.prepare_write(queue, first + 1, raddr, rkey, laddr, lkey, n)
    device.prepare_write2(queue, first + 2, raddr, rkey, laddr, lkey, n, laddr, lkey, n)
    device.prepare_write_value(queue, first + 3, raddr, rkey, n, 8)
    device.prepare_write_inline(queue, first + 4, raddr, rkey, laddr, n)
    device.prepare_read(queue, first + 5, raddr, rkey, laddr, lkey, n)
    device.prepare_read2(queue, first + 6, raddr, rkey, laddr, lkey, n, laddr, lkey, n)
    device.prepare_send(queue, first + 7, laddr, lkey, n)
    device.prepare_atomic(queue, first + 8, device.ATOMIC_CS, raddr, rkey, laddr, lkey, n, n)
    device.prepare_masked_add(queue, first + 9, 4, raddr, rkey, laddr, lkey, n, n)
    device.prepare_masked_swap32(queue, first + 10, raddr, rkey, laddr, lkey, n, n)
    device.prepare_masked_swap64(queue, first + 11, raddr, rkey, laddr, lkey, n, n)
    device.prepare_wait(queue, first + 13, n, n)
    device.prepare_dump(queue, first + 14, laddr, lkey)
    device.prepare_nop(queue, first + 15)
    device.mark_ready(queue, first, first + 15)
    device.submit(queue, first + 16, device.GPU, device.SYNC_SYS, device.ASYNC_STORE_RELEASE)
    device.st64(out, device.poll_one(queue, first))
    device.st64(out, device.poll_at(queue, first + 7))
    device.st64(out, device.poll(queue, 1))


def blue_flame(queue, raddr, rkey, laddr, lkey, n, out):
    """The WQE written to the register, by a thread and by a warp."""
    first = device.reserve(queue, 2, device.EXCLUSIVE)
    slot = device.block_slot()
    device.prepare_write(queue, first, raddr, rkey, laddr, lkey, n)
    device.prepare_write(queue, first, raddr, rkey, laddr, lkey, n, at=slot)
    device.st64(out, device.submit_bf(queue, first + 1, slot, device.EXCLUSIVE))
    device.st64(out, device.submit_bf_warp(queue, first + 2, slot))
    device.submit_multi(out, out, n)


def counted(queue, raddr, rkey, laddr, lkey, n, out):
    """All counted operations."""
    device.st64(out, device.put_counter(queue, raddr, rkey, laddr, lkey, n, n, raddr, rkey, laddr, lkey, 1))
    device.st64(out, device.get_counter(queue, raddr, rkey, laddr, lkey, n, n, raddr, rkey, laddr, lkey, 1))
    device.st64(out, device.p_counter(queue, raddr, rkey, n, 8, n, raddr, rkey, laddr, lkey, 1))
    device.st64(out, device.signal_counter(queue, raddr, rkey, laddr, lkey, n, n, raddr, rkey, laddr, lkey, 1))
    ticket = device.put_signal_counter(
        queue, raddr, rkey, laddr, lkey, n, raddr, rkey, laddr, lkey, 1, n, raddr, rkey, laddr, lkey, 1
    )
    device.st64(out, ticket)


def two_sided(queue, raddr, rkey, laddr, lkey, n, out):
    """All of the two-sided API."""
    device.st64(out, device.wait(queue, device.send(queue, laddr, lkey, n)))
    device.st64(out, device.wait(queue, device.send_imm(queue, laddr, lkey, n, n)))
    ticket = device.recv(queue, laddr, lkey, n)
    device.st64(out, device.recv_wait(queue, ticket, device.GPU, device.THREAD, laddr, lkey))
    arrival = device.recv_next(queue)
    device.st64(out, device.recv_imm(queue, arrival) + device.recv_slot(queue, arrival))
    device.st64(out, device.recv_inline(queue, arrival) + device.recv_wait_all(queue))
    device.st64(out, device.recv_poll(queue, arrival))


def groups(queue, raddr, rkey, laddr, lkey, n, out):
    """Identity and synchronisation."""
    device.block_sync()
    value = device.warp_broadcast(n + device.lane_id(), 0)
    device.warp_sync()
    device.st64(out + 8 * device.global_id(), value + device.warp_size())
    device.copy(laddr, raddr, n)
    device.yield_thread()


def exclusive_put(queue, raddr, rkey, laddr, lkey, n, out):
    device.st64(out, device.put(queue, raddr, rkey, laddr, lkey, n, device.EXCLUSIVE))


def shared_put(queue, raddr, rkey, laddr, lkey, n, out):
    device.st64(out, device.put(queue, raddr, rkey, laddr, lkey, n, device.GPU))


def exclusive_async_put(queue, raddr, rkey, laddr, lkey, n, out):
    flags = device.ASYNC_STORE_RELEASE
    device.st64(out, device.put(queue, raddr, rkey, laddr, lkey, n, device.EXCLUSIVE, flags))


@device.device_function
def own_slot():
    return device.block_slot()


def two_functions_slots(out):
    device.st64(out, device.block_slot())
    device.st64(out + 8, own_slot())
    device.st64(out + 16, device.block_broadcast(out, 0))


def engine(nic, out):
    """A turn of the software NIC, as a later engine on the GPU itself runs it."""
    device.st64(out, step(nic))


def engine_inside(nic, row, out):
    """The part of it that executes requests inside one NIC."""
    device.st64(out, serve(nic, row, 64))


KERNELS: dict[str, tuple[Callable, int]] = {
    "one_sided": (one_sided, 7),
    "two_sided": (two_sided, 7),
    "in_warps": (in_warps, 7),
    "in_blocks": (in_blocks, 7),
    "low_level": (low_level, 7),
    "blue_flame": (blue_flame, 7),
    "counted": (counted, 7),
    "groups": (groups, 7),
    "engine": (engine, 2),
    "engine_inside": (engine_inside, 3),
}
DEVICE = tuple(name for name in KERNELS if "engine" not in name)
QUICK = ("low_level", "blue_flame", "groups")


def ptx_of(body: Callable, parameters: int, capability: tuple[int, int] = SM_90) -> str:
    with offline(capability):
        ptx, _ = cuda.compile(
            body, void(*[int64] * parameters), device=False, cc=capability, output="ptx", abi="numba"
        )
    return ptx


def in_another_process(code: str) -> str:
    """What it prints. Numba keeps one compilation of a device function for all architectures, in a process."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_cuda_compile as t; {code}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def ptxas() -> Path:
    """The assembler of the pinned CUDA wheel."""
    found = [f for f in files("nvidia-cuda-nvcc") or [] if f.name == "ptxas"]
    assert found, "the nvidia-cuda-nvcc wheel has no ptxas"
    return Path(str(found[0].locate()))


def assemble(ptx: str, capability: tuple[int, int], folder: Path) -> str:
    """ptxas's report on registers, stack and spills."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    arch = f"sm_{capability[0]}{capability[1]}"
    ran = subprocess.run(
        [ptxas(), "-v", f"-arch={arch}", source, "-o", folder / "kernel.cubin"],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


def check(name: str, capability: tuple[int, int], folder: Path) -> None:
    """No floating point, and no spills."""
    ptx = ptx_of(*KERNELS[name], capability)
    assert not re.search(r"\.f(64|32)\b", ptx)
    report = assemble(ptx, capability, folder)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    assert spills, report
    assert set(spills) == {"0"}, report


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in DEVICE])
def test_compiles_for_sm_90(name, tmp_path):
    check(name, SM_90, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [SM_90, (8, 0), (10, 0)], ids=["sm_90", "sm_80", "sm_100"])
def test_the_engine_compiles_for_a_gpu(capability):
    """Requester and responder are free of what exists on a CPU only."""
    ptx = ptx_of(*KERNELS["engine"], capability)
    assert not re.search(r"\.f(64|32)\b", ptx)
    assert ".extern .func" not in ptx


@pytest.mark.slow
def test_the_engine_assembles_for_sm_90_without_spills(tmp_path):
    """Without its wires: for all of it ptxas takes more than five minutes and 9 GB."""
    check("engine_inside", SM_90, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (10, 0)], ids=["sm_80", "sm_100"])
@pytest.mark.parametrize("name", DEVICE)
def test_compiles_for_other_architectures(name, capability, tmp_path):
    in_another_process(f"from pathlib import Path; t.check({name!r}, {capability!r}, Path({str(tmp_path)!r}))")


def test_constant_modes_fold():
    """An exclusive put has no atomics and no lock; a shared one has."""
    exclusive, shared = ptx_of(exclusive_put, 7), ptx_of(shared_put, 7)
    assert "atom." not in exclusive
    assert "atom.relaxed.gpu.global.add.u64" in shared
    assert "atom.acquire.gpu.global.max.u64" in shared
    assert "match.any" in shared
    assert "match.any" not in exclusive
    assert "bar.sync" not in shared


def test_doorbell_is_rung_with_an_mmio_store_behind_a_system_fence():
    """The first ring; the second, behind the record, needs less."""
    ptx = ptx_of(exclusive_put, 7)
    order = re.findall(r"fence\.release\.\w+|st\.mmio\.relaxed\.sys\.global\.u64", ptx)
    ring = "st.mmio.relaxed.sys.global.u64"
    at = order.index(ring)
    assert order[at - 1] == "fence.release.sys"
    assert ring in order[at + 1 :]


@pytest.mark.slow
def test_a_doorbell_that_is_its_own_fence_does_not_order_the_record():
    ptx = in_another_process("print(t.ptx_of(t.exclusive_async_put, 7, (10, 0)))")
    order = re.findall(r"st\.async[.\w]*|fence\.release\.sys|st\.relaxed\.sys\.global\.u32", ptx)
    rings = [at for at, what in enumerate(order) if what.startswith("st.async")]
    record = order.index("st.relaxed.sys.global.u32")
    assert rings[0] < record < rings[1]
    assert "fence.release.sys" in order[rings[0] : record]


def test_a_block_has_one_slot():
    """Numba compiles each device function to a module of its own."""
    assert len(re.findall(r"\.shared .*\bgpunetio_shared_slot", ptx_of(two_functions_slots, 1))) == 1


def lto_ir(body: Callable, signature, name: str) -> bytes:
    """`body` as LTO-IR with C ABI, under `name`."""
    with offline(SM_90):
        image, _ = cuda.compile(
            body, signature, device=True, cc=SM_90, output="ltoir", abi="c", abi_info={"abi_name": name}
        )
    return image


@pytest.mark.parametrize(
    ("function", "parameters"), [(onesided.put, 9), (cq.poll_at, 3), (cq.poll_one, 3), (qp.reserve, 4)]
)
def test_c_abi_lto_ir_links_into_foreign_code(function, parameters):
    """What CUDA C++ does: call the function by its C name and link it in, here from PTX, with nvJitLink."""
    from cuda.bindings import nvjitlink

    name = f"gpunetio_{function.py_func.__name__}"
    image = lto_ir(function.py_func, int64(*[int64] * parameters), name)
    formals = ", ".join(f".param .b64 a{i}" for i in range(parameters))
    stores = "\n".join(f"st.param.b64 [a{i}], v;" for i in range(parameters))
    locals_ = "\n".join(f".param .b64 a{i};" for i in range(parameters))
    actuals = ", ".join(f"a{i}" for i in range(parameters))
    caller = f"""
        .version 8.0
        .target sm_90
        .address_size 64
        .extern .func (.param .b64 r) {name} ({formals});
        .visible .entry caller(.param .u64 p) {{
            .reg .b64 v;
            ld.param.u64 v, [p];
            {{
                .param .b64 r;
                {locals_}
                {stores}
                call.uni (r), {name}, ({actuals});
                ld.param.b64 v, [r];
            }}
            ret;
        }}"""
    linker = nvjitlink.create(2, ["-arch=sm_90", "-lto"])
    try:
        nvjitlink.add_data(linker, nvjitlink.InputType.LTOIR, image, len(image), name)
        ptx = caller.encode()
        nvjitlink.add_data(linker, nvjitlink.InputType.PTX, ptx, len(ptx), "caller")
        nvjitlink.complete(linker)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, cubin)
    finally:
        nvjitlink.destroy(linker)
    assert cubin.startswith(b"\x7fELF")
    assert name.encode() in cubin
