"""The device library and the NIC's engine compile for CUDA with no GPU: no floating point, no spills, folded modes."""

import functools
import graphlib
import re

import pytest

pytest.importorskip("cuda.bindings", reason="needs cuda-bindings (extra 'cuda')")

import cuda_kernels
from cuda_kernels import (
    SM_90,
    SM_100,
    exclusive_async_put,
    exclusive_put,
    ptx_of,
    shared_put,
    two_functions_slots,
)
from gpunetio import device
from gpunetio.device import cq, library, onesided, qp
from gpunetio.errors import InvalidValueError
from gpunetio.fabric import injector
from gpunetio.jit import cubin, machine, nvvm, ops
from gpunetio.jit.compile import device_function, engine_function
from gpunetio.jit.kinds import INT, ArrayType
from gpunetio.jit.unit import Unit
from gpunetio.nic.gpu import row_cache, slices
from gpunetio.nic.memory import copies
from gpunetio.nic.queues import completion
from gpunetio.nic.transport import delivery, eth_send, lan, loopback, pipes, requester, responses

ARCHITECTURES = {"sm_90": SM_90, "sm_80": (8, 0), "sm_100": SM_100}
DEVICE = (
    "one_sided", "two_sided", "in_warps", "in_blocks", "low_level", "blue_flame", "counted", "groups", "eth_receive",
    "eth_send", "eth_headers", "eth_by_hand", "buffers", "dma_copies", "rdma_strong", "rdma_weak", "packet_headers",
    "receive_udp", "receive_tcp", "receive_icmp", "serve_http",
)
QUICK = (
    "blue_flame", "groups", "eth_headers", "eth_by_hand", "buffers", "dma_copies", "rdma_strong", "rdma_weak",
    "packet_headers",
)


@functools.cache
def compiled(name, capability):
    """PTX of a kernel for an architecture, and ptxas's report."""
    ptx = ptx_of(*cuda_kernels.KERNELS[name], capability)
    return ptx, cuda_kernels.report_of(name, ptx, capability)


# Bytes that a kernel with all 255 registers spills: what loads are worth before loops costs registers there
# (docs/decisions/one-source.md).
SPILLS = {("receive_icmp", (8, 0)): 28}


def check(ptx, report, most=0):
    """No floating point, and no spills, or `most` bytes of them."""
    assert not re.search(r"\.f(64|32)\b", ptx)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    assert spills, report
    assert max(map(int, spills)) <= most, report


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        pytest.param(name, capability, id=f"{name}-{arch}",
                     marks=() if name in QUICK and capability == SM_90 else pytest.mark.slow)
        for arch, capability in ARCHITECTURES.items() for name in DEVICE
    ],
)
def test_device_functions(name, capability):
    check(*compiled(name, capability), SPILLS.get((name, capability), 0))


def functions(ptx):
    """The functions that PTX defines, each with those that it calls."""
    found = {}
    for text in re.split(r"^(?=\.(?:weak|visible|func)\b)", ptx, flags=re.MULTILINE)[1:]:
        if "\n{" in text:
            name = re.search(r"\.(?:func\s*(?:\([^)]*\))?|entry)\s*([\w$]+)", text)[1]
            found[name] = set(re.findall(r"\bcall(?:\.uni)?\s+(?:\([^)]*\),)?\s*([\w$]+),", text))
    return found


def symbol(function):
    return f"{function.py_func.__module__}.{function.py_func.__qualname__}".replace(".", "_")


INSIDE = (loopback.serve, completion.record_error)
SLICES = (*INSIDE, row_cache.cache_rows, row_cache.write_back_rows, copies.copy_together, slices.take_slice)
WIRES = (
    requester.serve, pipes.take_frames, delivery.receive, responses.take_response, injector.inject,
    eth_send.serve, lan.take_lan_frames,  # of extensions: there is nothing to load later
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "has", "capability"),
    [
        *(pytest.param("engine", SLICES + WIRES, capability, id=arch) for arch, capability in ARCHITECTURES.items()),
        pytest.param("engine_inside", INSIDE, SM_90, id="inside-sm_90"),
    ],
)
def test_the_engine_compiles_for_a_gpu(name, has, capability):
    """It is free of what exists on a CPU only, and its functions are called.

    As many registers as the linker was told and a small stack are enough. Nothing is on the stack but registers that a
    function saves.
    """
    ptx, report = compiled(name, capability)
    assert not re.search(r"\.f(64|32)\b", ptx)
    assert ".extern .func" not in ptx
    assert "__local_depot" not in ptx
    calls = functions(ptx)
    assert {symbol(function) for function in has} <= calls.keys()
    graphlib.TopologicalSorter(calls).prepare()  # no recursion, so the linker knows the depth of the stack
    registers, stack = cuda_kernels.used(report)
    assert registers <= int(cuda_kernels.OPTIONS[name][0].partition("=")[2])
    assert stack <= 2048


@pytest.mark.slow
@pytest.mark.parametrize(("name", "capability"), [("exclusive_async_put", SM_100)], ids=["sm_100"])
def test_a_doorbell_that_is_its_own_fence_does_not_order_the_record(name, capability):
    ptx, _ = compiled(name, capability)
    order = re.findall(r"st\.async[.\w]*|fence\.release\.sys|st\.relaxed\.sys\.global\.u32", ptx)
    rings = [at for at, what in enumerate(order) if what.startswith("st.async")]
    record = order.index("st.relaxed.sys.global.u32", rings[0])
    assert rings[0] < record < rings[1]
    assert "fence.release.sys" in order[rings[0] : record]


def test_constant_modes_fold():
    """An exclusive put has no atomics and no lock; a shared one has."""
    exclusive, shared = ptx_of(exclusive_put, 7), ptx_of(shared_put, 7)
    assert "atom." not in exclusive
    assert "atom.relaxed.gpu.global.add.u64" in shared
    assert "atom.acquire.gpu.global.max.u64" in shared
    assert "match.any" in shared
    assert "match.any" not in exclusive
    assert "bar.sync" not in shared


RING, PROXY_WORD, RECORD = "st.mmio.relaxed.sys.global.u64", "st.relaxed.sys.global.u64", "st.relaxed.sys.global.u32"


def before(ptx: str, what: str) -> list[set[str]]:
    """For each place of `what`: the last fence, or store for the NIC, of every path that leads there ("" for none).

    Branches stand beside each other in the text, so that a fence above a store need not be on the store's path.
    """
    lines = [line.strip() for line in ptx.splitlines()]
    jumps: dict[str, list[int]] = {}
    for at, line in enumerate(lines):
        if jump := re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line):
            jumps.setdefault(f"{jump[1]}:", []).append(at)
    found = []
    for place in (at for at, line in enumerate(lines) if what in line):
        last, seen, todo = set(), {place}, [place]
        while todo:
            at = todo.pop()
            falls_through = at > 0 and not lines[at - 1].startswith(("bra", "ret"))
            for earlier in jumps.get(lines[at], []) + [at - 1] * falls_through:
                event = re.search(rf"fence\.(?:release|acq_rel|sc)\.\w+|{RING}|{PROXY_WORD}|{RECORD}", lines[earlier])
                if event or lines[earlier].startswith((".entry", ".visible .entry")):
                    last.add(event[0] if event else "")
                elif earlier not in seen:
                    seen.add(earlier)
                    todo.append(earlier)
        found.append(last)
    return found


def test_doorbell_is_rung_with_an_mmio_store_behind_a_system_fence():
    """On each path: the first ring, and the word for a proxy. The second ring, behind the record, needs less.

    So does the only ring to a NIC on the same GPU, whose record comes first.
    """
    ptx = ptx_of(exclusive_put, 7)
    assert before(ptx, RING) == [{"fence.release.sys"}, {"fence.release.gpu"}]
    assert before(ptx, PROXY_WORD) == [{"fence.release.sys"}]
    assert before(ptx, RECORD) == [{""}, {RING}]
    assert before(ptx, "fence.release.gpu")[:2] == [{"", RECORD}, {RECORD}], "the rings' fences are behind the record"


def test_every_doorbell_of_a_shared_queue_stands_behind_a_fence():
    """Also of the path that takes no fence of its own, since the one before its looks orders the slots.

    That one has the scope of the GPU for a NIC there. The paths of both kinds of NICs cross in the text.
    """
    ptx = ptx_of(shared_put, 7)
    rings = before(ptx, RING)
    fences = {"fence.acq_rel.sys", "fence.release.sys", "fence.acq_rel.gpu"}
    assert len(rings) % 2 == 0, "each doorbell is rung twice"
    assert all(first <= fences for first in rings[::2])
    assert all(second == {"fence.release.gpu"} for second in rings[1::2])
    assert all(word <= fences for word in before(ptx, PROXY_WORD))


def test_a_fence_stands_behind_a_doorbell_without_a_record():
    """Of GPU scope without a record, of system scope with a proxy: a look at the completion must not come too early."""
    order = re.findall(r"fence\.release\.\w+|st\.mmio\.relaxed\.sys\.global\.u64", ptx_of(exclusive_put, 7))
    last = max(at for at, found in enumerate(order) if found.startswith("st.mmio"))
    assert sorted(order[last + 1 :]) == ["fence.release.gpu", "fence.release.sys"]


def test_a_block_has_one_slot():
    """Whichever functions ask for it."""
    assert len(re.findall(r"\.shared .*\bgpunetio_shared_slot", ptx_of(two_functions_slots, 1))) == 1


def test_a_kernel_calls_no_function():
    """It would be one with its entry otherwise, and save registers on its stack."""
    assert functions(ptx_of(exclusive_put, 7)) == {"exclusive_put": set()}


def store_into(out):
    ops.st64(out, 7)


def store_behind(out):
    ops.st64(out + 8, 7)


@device_function
def scaled(value, by, offset=0):
    return value * by + offset


@engine_function
def called(value, by, offset=0):
    return scaled(value, by, offset) ^ scaled(value, by + 1)


def calls_both(n, out):
    ops.st64(out, called(n, 3) + called(n, 4) + called(n, 5, 6) + scaled(n, 7) + scaled(n, 8))


def test_an_engine_function_is_called_and_a_device_function_is_inlined():
    """One function for all constants, whether or not an argument is omitted. Results are in registers."""
    found = functions(ptx := ptx_of(calls_both, 2))
    assert found == {"calls_both": {symbol(called)}, symbol(called): set()}
    assert len(re.findall(r"\bcall\b", ptx)) == 3
    assert not re.search(r"__local_depot|\b(ld|st)\.local", ptx)


@device_function
def grows(number):
    return number + 1 > number


@engine_function
def shrinks(number):
    return number - 1 < number


def may_overflow(number, out):
    ops.st64(out, grows(number) + shrinks(number))


def test_sums_wrap():
    """If numbers could not overflow, both answers would be yes without a look."""
    assert len(re.findall(r"\bsetp\.\w+\.[bsu]64\b", ptx_of(may_overflow, 2))) == 2


def follow(address, steps, out):
    for _ in range(steps):
        address = ops.ld_fixed64(address)
    ops.st64(out, address)


def test_a_load_reads_its_address_before_it_writes_there():
    """Its PTX writes 0 to the result first. In one register, the load would be of address 0."""
    loads = re.findall(r"ld\.global\.nc\.u64 (%\w+), \[(%\w+)\]", ptx_of(follow, 3))
    assert loads
    assert all(result != address for result, address in loads)


def test_each_function_is_compiled_once_for_its_types():
    unit = Unit(machine.cuda(SM_90))
    unit.entry(device_function(calls_both), "calls_both", (INT, INT))
    unit.entry(device_function(follow), "follow", (INT, INT, INT))
    defined = re.findall(r'^define [^@]*@"([^"]+)"', unit.text(), re.MULTILINE)
    assert len(set(defined)) == len(defined)
    named = [name for name in defined if name.startswith(__name__.replace(".", "_"))]
    assert set(named) == {symbol(one) for one in (device_function(calls_both), called, scaled, device_function(follow))}


def test_a_bound_kernel_may_have_the_largest_block():
    """A multiprocessor has 65,536 registers (CUDA C++ Programming Guide, "Technical Specifications")."""
    assert ".maxntid" not in cubin.ptx_of(shared_put, (INT,) * 7, SM_90)[0]
    for block, threads in ((1, 256), (256, 256), (257, 512), (512, 512), (513, 1024), (1024, 1024)):
        assert cubin.threads_of(block) == threads
        bound = cubin.ptx_of(shared_put, (INT,) * 7, SM_90, threads)[0]
        assert f".maxntid {threads}" in bound
        registers = cuda_kernels.used(cuda_kernels.assemble(bound, SM_90, *cubin.limit_of(threads)))[0]
        assert registers * threads <= 65536


def wärmer(größe, out):
    zähler = größe
    for größe in range(3):
        zähler = scaled(zähler, größe)
    ops.st64(out, zähler)


def test_names_may_have_any_letters():
    """PTX has ASCII's only."""
    image = cubin.image_of(wärmer, (INT, INT), SM_90)
    assert image.symbol == "w_rmer"
    assert b".text.w_rmer" in image.code


@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (8, 8), (10, 3), (11, 0), (12, 0), (12, 1)])
def test_other_gpus(capability):
    """Each has PTX of a version that knows it and its instructions, and is assembled."""
    ptx = ptx_of(exclusive_async_put, 7, capability)
    assert ".target sm_{}{}\n".format(*capability) in ptx
    if capability > (8, 0):  # nvJitLink 13.0 has begun to refuse older ones
        assert "used" in cuda_kernels.assemble(ptx, capability)


def test_a_gpu_that_the_compiler_does_not_know_runs_ptx_of_an_older_one():
    assert ".target sm_121\n" in ptx_of(exclusive_put, 7, (13, 0))


ARRAY = ArrayType("int64", 1, True)


def test_a_public_function_says_which_argument_is_no_integer():
    def put_from(queue, out):
        device.put(queue, 0, 0, out, 0, 8)

    with pytest.raises(InvalidValueError, match=r"put\(\) takes integers only, and laddr is an array"):
        cubin.ptx_of(put_from, (INT, ARRAY), SM_90)


def test_an_array_is_no_address():
    """As on the host: nothing says which address of it is meant."""
    with pytest.raises(InvalidValueError, match="addr is an array of int64: register it"):
        cubin.ptx_of(store_into, (ARRAY,), SM_90)
    with pytest.raises(InvalidValueError, match=r"\+ takes numbers, not an array of int64"):
        cubin.ptx_of(store_behind, (ARRAY,), SM_90)


@pytest.mark.parametrize(
    ("function", "parameters"), [(onesided.put, 9), (cq.poll_at, 3), (cq.poll_one, 3), (qp.reserve, 4)]
)
def test_c_abi_lto_ir_links_into_foreign_code(function, parameters):
    """What CUDA C++ does: call the function by its C name and link it in, here from PTX, with nvJitLink."""
    from cuda.bindings import nvjitlink

    name = f"gpunetio_{function.py_func.__name__}"
    one = library.Function(name.removeprefix("gpunetio_"), "", function, ("",) * parameters, ())
    image = nvvm.lto_ir(library.unit_of([one], SM_90), SM_90)
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
        linked = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, linked)
    finally:
        nvjitlink.destroy(linker)
    assert linked.startswith(b"\x7fELF")
    assert name.encode() in linked
