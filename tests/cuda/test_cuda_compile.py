"""The device library and the NIC's engine compile for CUDA with no GPU: no floating point, no spills, folded modes."""

import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("numba_cuda", reason="needs numba-cuda (extra 'cuda')")

from numba import cuda, int64, types
from numba.cuda.compiler import compile_cuda

import cuda_kernels
from cuda_kernels import SM_90, SM_100, exclusive_put, ptx_of, shared_put, two_functions_slots
from gpunetio import device
from gpunetio.device import cq, onesided, qp
from gpunetio.errors import InvalidValueError
from gpunetio.fabric import injector
from gpunetio.jit import ops
from gpunetio.jit.compile import device_function, engine_function
from gpunetio.jit.launch import offline
from gpunetio.nic import borrowed, copies, slices
from gpunetio.nic.queues import completion
from gpunetio.nic.transport import delivery, eth_send, lan, loopback, pipes, requester, responses

ARCHITECTURES = {"sm_90": SM_90, "sm_80": (8, 0), "sm_100": SM_100}
ASYNCHRONOUS = ("low_level", "exclusive_async_put")  # with the one instruction that only sm_100 has
DEVICE = (
    "one_sided", "two_sided", "in_warps", "in_blocks", "low_level", "blue_flame", "counted", "groups", "eth_receive",
    "eth_send", "eth_headers", "eth_by_hand", "buffers", "dma_copies", "rdma_strong", "rdma_weak", "packet_headers",
    "receive_udp", "receive_tcp", "receive_icmp", "serve_http",
)  # fmt: skip
QUICK = (
    "blue_flame", "groups", "eth_headers", "eth_by_hand", "buffers", "dma_copies", "rdma_strong", "rdma_weak",
    "packet_headers",
)  # fmt: skip
SECONDS = 400  # for one process, on two busy cores


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """PTX and ptxas's report of a kernel for an architecture. All that the tests to run ask for is compiled at once:
    a process for each architecture, which shares what its kernels have in common, and one for each engine.

    For sm_100 most code is that of sm_90, which is assembled for it."""
    wanted: dict[tuple, list[str]] = {}

    def key_of(name, capability):
        shared = capability == SM_100 and name not in ASYNCHRONOUS
        return SM_90 if shared else capability, "engine" in name

    for item in request.session.items:
        if item.path == request.path and "compiled" in item.fixturenames:
            name, capability = item.callspec.params["name"], item.callspec.params["capability"]
            names = wanted.setdefault(key_of(name, capability), [])
            if name not in names:
                names.append(name)
    folders = {key: tmp_path_factory.mktemp("compiled") for key in wanted}

    def run(key):
        (major, minor), _ = key
        argv = [sys.executable, cuda_kernels.__file__, folders[key], str(major), str(minor), *wanted[key]]
        return subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=False)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        # The engines first: they take the longest.
        processes = {key: pool.submit(run, key) for key in sorted(wanted, key=lambda key: not key[1])}

        def result(name, capability):
            key = key_of(name, capability)
            ran = processes[key].result()
            ptx = folders[key] / f"{name}.ptx"
            assert ptx.exists(), ran.stderr
            shared = key[0] != capability
            return ptx.read_text(), ptx.with_suffix(".sm_100.txt" if shared else ".txt").read_text()

        yield result


def check(ptx, report):
    """No floating point, and no spills."""
    assert not re.search(r"\.f(64|32)\b", ptx)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    assert spills, report
    assert set(spills) == {"0"}, report


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    ("name", "capability"),
    [
        pytest.param(name, capability, id=f"{name}-{arch}",
                     marks=() if name in QUICK and capability == SM_90 else pytest.mark.slow)
        for arch, capability in ARCHITECTURES.items() for name in DEVICE
    ],
)  # fmt: skip
def test_device_functions(name, capability, compiled):
    check(*compiled(name, capability))


def functions(ptx):
    """The functions that PTX defines, each with those that it calls."""
    found = {}
    for text in re.split(r"^(?=\.(?:weak|visible|func)\b)", ptx, flags=re.MULTILINE)[1:]:
        if "\n{" in text:
            name = re.search(r"\.(?:func\s*(?:\([^)]*\))?|entry)\s*([\w$]+)", text)[1]
            found[name] = set(re.findall(r"\bcall(?:\.uni)?\s*(?:\([^)]*\),)?\s*([\w$]+),", text))
    return found


def symbol(function):
    return f"{function.py_func.__module__}.{function.py_func.__qualname__}".replace(".", "_")


INSIDE = (loopback.serve, completion.record_error)
SLICES = (*INSIDE, borrowed.borrow, borrowed.give_back, copies.copy_together, slices.take_slice)
WIRES = (
    requester.serve, pipes.take_frames, delivery.receive, responses.take_response, injector.inject,
    eth_send.serve, lan.take_lan_frames,  # of extensions: there is nothing to load later
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    ("name", "has", "capability"),
    [
        *(pytest.param("engine", SLICES + WIRES, capability, id=arch) for arch, capability in ARCHITECTURES.items()),
        pytest.param("engine_inside", INSIDE, SM_90, id="inside-sm_90"),
    ],
)
def test_the_engine_compiles_for_a_gpu(name, has, capability, compiled):
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
def test_a_doorbell_that_is_its_own_fence_does_not_order_the_record(name, capability, compiled):
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
    """Numba compiles each device function to a module of its own."""
    assert len(re.findall(r"\.shared .*\bgpunetio_shared_slot", ptx_of(two_functions_slots, 1))) == 1


def store_into(out):
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
    """One function for all constants, and one more where an argument is omitted. Results are in registers."""
    found = functions(ptx := ptx_of(calls_both, 2))
    callees = {symbol(called), f"{symbol(called)}$1"}
    assert {name: calls for name, calls in found.items() if "calls_both" not in name} == {one: set() for one in callees}
    assert callees in found.values()
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
    assert len(re.findall(r"\bsetp\.\w+\.[su]64\b", ptx_of(may_overflow, 2))) == 2


def follow(address, steps, out):
    for _ in range(steps):
        address = ops.ld_fixed64(address)
    ops.st64(out, address)


def test_a_load_reads_its_address_before_it_writes_there():
    """Its PTX writes 0 to the result first. In one register, the load would be of address 0."""
    loads = re.findall(r"ld\.global\.nc\.u64 (%\w+), \[(%\w+)\]", ptx_of(follow, 3))
    assert loads
    assert all(result != address for result, address in loads)


def test_each_module_is_linked_once_and_behind_its_callers():
    with offline(SM_90):
        library = compile_cuda(calls_both, types.void, (int64, int64), cc=SM_90).library
    texts = library.llvm_strs
    assert len(set(texts)) == len(texts) == 5, "the kernel, and each function with and without its third argument"
    defined = [re.search(r'^define [^@]*@"([^"]+)"', text, re.MULTILINE)[1] for text in texts]
    for at, text in enumerate(texts):
        assert not [name for name in defined[:at] if f'@"{name}"' in text]


def test_a_public_function_says_which_argument_is_no_integer():
    def put_from(queue, out):
        device.put(queue, 0, 0, out, 0, 8)

    with offline(SM_90), pytest.raises(InvalidValueError, match=r"put\(\) takes integers only, and laddr is an array"):
        cuda.compile(put_from, (int64, types.Array(int64, 1, "C")), cc=SM_90)


def test_an_array_is_no_address():
    """As on the host: what would be stored to is Numba's descriptor."""
    with offline(SM_90), pytest.raises(InvalidValueError, match="addr is an array of int64: register it"):
        cuda.compile(store_into, (types.Array(int64, 1, "C"),), cc=SM_90)


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
