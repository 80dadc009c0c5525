"""`gpunetio device-lib`: C++ that NVRTC or nvcc compiles links with the device library, in each format, with no GPU."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from typing import Any

import pytest

from repository import ROOT

pytest.importorskip("cuda.bindings", reason="needs cuda-bindings (extra 'cuda')")
pytest.importorskip("cuda.core", reason="needs cuda-core (extra 'cuda')")

from click.testing import CliRunner
from cuda.core import Device, LaunchConfig, Linker, LinkerOptions, ObjectCode, Program, ProgramOptions, launch

import gpunetio as gn
from gpunetio import device, eth, flow
from gpunetio.cli import app
from gpunetio.cli.device_lib import KINDS
from gpunetio.device import library
from gpunetio.errors import InvalidValueError, NotSupportedError, UnexpectedError
from gpunetio.jit import machine, nvvm, ops
from gpunetio.jit.compile import DeviceFunction, device_function, engine_function
from gpunetio.jit.cuda_launch import capability_of
from gpunetio.jit.launch import observers
from nvcc import path_with_nvcc

pytestmark = pytest.mark.timeout(200)  # the first test also builds the library

ARCH = "sm_90"
READ = {"ltoir": ObjectCode.from_ltoir, "ptx": ObjectCode.from_ptx, "cubin": ObjectCode.from_cubin}
SEVERAL_RESULTS = {"rdma_get_info", "rdma_recv_get_info"}  # docs/device-lib.md says that C++ does without
PROTOTYPE = re.compile(r'^extern "C" __device__ long long gpunetio_(\w+)\(([^;]*)\);', re.MULTILINE)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder that the command has filled: all formats for sm_90, and the header."""
    folder = tmp_path_factory.mktemp("device-lib")
    formats = [word for kind in KINDS for word in ("--format", kind)]
    result = CliRunner().invoke(app, ["device-lib", "--arch", ARCH, *formats, "-o", str(folder / "new")])
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [f"{folder}/new/gpunetio_device.{end}" for end in (*KINDS, "cuh")]
    return folder / "new"


def header_of(folder):
    return (folder / "gpunetio_device.cuh").read_text()


def prototypes(folder):
    """{function: [its parameters, with their defaults]}"""
    found = {}
    for name, parameters in PROTOTYPE.findall(header_of(folder)):
        found[name] = [" ".join(p.split()) for p in parameters.split(",") if p]
    return found


def link(folder, source, kind, **options):
    """C++ that uses the header, compiled by NVRTC and linked with the library by nvJitLink."""
    lto = kind == "ltoir"
    compile_options = ProgramOptions(arch=ARCH, relocatable_device_code=True, link_time_optimization=lto)
    compiled = Program(header_of(folder) + source, "c++", compile_options).compile("ltoir" if lto else "cubin")
    functions = READ[kind](str(folder / f"gpunetio_device.{kind}"))
    linker = Linker(compiled, functions, options=LinkerOptions(arch=ARCH, link_time_optimization=lto, **options))
    return linker.link("ptx" if options.get("ptx") else "cubin").code


# --- what is in the files ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_public_device_function_is_declared(made):
    public = {name for name in device.__all__ if isinstance(getattr(device, name), DeviceFunction)}
    assert set(prototypes(made)) == (public - SEVERAL_RESULTS) | {"clock_ns"}
    assert KINDS == library.KINDS


@pytest.mark.slow
def test_the_ptx_defines_what_the_header_declares_and_nothing_else(made):
    ptx = (made / "gpunetio_device.ptx").read_text()
    defined = re.findall(r"^\.visible \.func +\(\.param \.b64 \w+\) gpunetio_(\w+)\(([^)]*)\)", ptx, re.MULTILINE)
    assert {name: text.count(".b64") for name, text in defined} == {
        name: len(parameters) for name, parameters in prototypes(made).items()
    }
    assert ptx.count(".func") == len(defined)
    assert not re.search(r"\.extern|\.global \.align|call\.uni|\.f(32|64)\b", ptx)


@pytest.mark.slow
def test_defaults_and_documentation_are_those_of_python(made):
    declared = prototypes(made)
    assert declared["put"][-3:] == [
        "long long sharing = GPUNETIO_SHARING_GPU", "long long code_opt = GPUNETIO_CODE_OPT_DEFAULT",
        "long long scope = GPUNETIO_SCOPE_THREAD",
    ]
    assert declared["prepare_write"][-4:-2] == [
        "long long flags = GPUNETIO_CTRL_CQ_UPDATE", "long long opcode = GPUNETIO_OPCODE_RDMA_WRITE",
    ]
    assert declared["p"][4] == "long long nbytes = 8"
    assert declared["ring_db"][-2] == "long long sync = GPUNETIO_SYNC_SYS"
    put = r"// Write `nbytes` from `laddr` to `raddr`; 0 bytes post a NOP \(`doca_gpu_dev_verbs_put`\)\.\nextern \"C\""
    assert re.search(put + r" __device__ long long gpunetio_put\(", header_of(made))
    assert max(map(len, header_of(made).splitlines())) <= 120


# --- linking -------------------------------------------------------------------------------------------------------

# Values of GPUNetIO's headers (and of errno.h), written out.
CONSTANTS = {
    "OK": 0, "EIO": -5, "EBUSY": 16, "EINVAL": -22, "ENOBUFS": -105, "ETIMEDOUT": -110, "ENOTRECOVERABLE": -131,
    "SHARING_EXCLUSIVE": 0, "SHARING_CTA": 1, "SHARING_GPU": 2,
    "SYNC_SYS": 0, "SYNC_GPU": 1, "SYNC_CTA": 2, "SYNC_THREAD": 3,
    "CODE_OPT_DEFAULT": 0, "CODE_OPT_SKIP_AVAILABILITY_CHECK": 2, "CODE_OPT_SKIP_DB_RINGING": 4,
    "OPCODE_NOP": 0, "OPCODE_RDMA_WRITE": 8, "OPCODE_SEND": 10, "OPCODE_RDMA_READ": 16, "OPCODE_ATOMIC_FA": 18,
    "CTRL_CQ_UPDATE": 8, "CTRL_FENCE": 64, "CTRL_STRONG_ORDERING": 96,
}


def call_everything(folder):
    """For each function of the header a kernel that calls it with arguments that are not known when it is compiled."""
    calls = "\n".join(
        f'extern "C" __global__ void call_{name}(const long long *a, long long *out)'
        f" {{ *out = gpunetio_{name}({', '.join(f'a[{j}]' for j in range(len(parameters)))}); }}"
        for name, parameters in prototypes(folder).items()
    )
    asserts = "\n".join(f'static_assert(GPUNETIO_{name} == {value}, "");' for name, value in CONSTANTS.items())
    return f"{asserts}\n{calls}\n"


@pytest.mark.slow
def test_lto_ir_is_inlined_into_its_callers(made):
    """In the linked program nothing of the library is left but instructions: no functions, no calls."""
    ptx = bytes(link(made, call_everything(made), "ltoir", ptx=True)).decode()
    assert ptx.count(".entry") == len(prototypes(made))
    assert not re.search(r"gpunetio_(?!shared_slot)|\.func\b|\.extern|call\.", ptx)
    assert "st.mmio.relaxed.sys.global.u64" in ptx


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_function_links(made, kind):
    image = bytes(link(made, call_everything(made), kind))
    assert image.startswith(b"\x7fELF")
    assert (b"gpunetio_put" in image) == (kind != "ltoir")


@pytest.mark.slow
def test_a_function_that_is_not_there_does_not_link(made):
    source = 'extern "C" __device__ int gpunetio_nonsense(); __global__ void k(int *i) { *i = gpunetio_nonsense(); }'
    with pytest.raises(Exception, match="gpunetio_nonsense"):
        link(made, source, "ltoir")


PUT = """
extern "C" __global__ void put(long long qp, long long a, long long k, long long n, long long *out)
{{
    *out = gpunetio_wait(qp, gpunetio_put(qp, a, k, a, k, n{mode}){mode});
}}"""


@pytest.mark.slow
def test_constant_modes_fold_in_cpp_too(made):
    exclusive = bytes(link(made, PUT.format(mode=", GPUNETIO_SHARING_EXCLUSIVE"), "ltoir", ptx=True))
    shared = bytes(link(made, PUT.format(mode=""), "ltoir", ptx=True))
    assert b"atom." not in exclusive
    assert b"atom.relaxed.gpu.global.add.u64" in shared
    assert b"atom.acquire.gpu.global.max.u64" in shared


# A packet goes from one NIC to another, and the kernel reports what it is told of it.
PACKET = """
extern "C" __global__ void packet(long long txq, long long rxq, long long address, long long lkey, long long nbytes,
                                  long long attrs, long long *out)
{
    out[0] = gpunetio_txq_wait(txq, gpunetio_txq_send(txq, address, lkey, nbytes, 1));
    out[1] = gpunetio_rxq_recv(rxq, 1, 20000000000, attrs);
    const auto *attr = (const gpunetio_packet_attr *)attrs;
    out[2] = attr->bytes;
    out[3] = attr->flow_tag;
    const auto *bytes = (const unsigned char *)gpunetio_rxq_packet(rxq, gpunetio_rxq_first(rxq));
    out[4] = bytes[attr->bytes - 1];
}"""


def test_attributes_of_packets_have_a_structure(tmp_path):
    """As a C++ compiler of the host reads the header: offsets are those of device-api.md, and a kernel compiles."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    offsets = {"timestamp_ns": 0, "bytes": 8, "flow_tag": 12, "hash": 16, "metadata": 20, "checks": 24, "headers": 25,
               "vlan": 26, "hash_type": 28, "check_sum": 30}
    asserts = "\n".join(
        f'static_assert(offsetof(gpunetio_packet_attr, {name}) == {offset}, "");' for name, offset in offsets.items()
    )
    source = tmp_path / "attr.cpp"
    source.write_text(f"#include <cstddef>\n{library.header()}{PACKET}\n{asserts}\n")
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Werror", "-D__device__=", "-D__global__=", str(source)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_a_kernel_that_sends_and_receives_packets_links(made):
    assert b"packet" in bytes(link(made, PACKET, "ltoir"))


@pytest.mark.gpu
def test_a_kernel_in_cpp_sends_and_receives_a_packet():
    arch = "sm_{}{}".format(*capability_of(0))
    options = ProgramOptions(arch=arch, relocatable_device_code=True, link_time_optimization=True)
    compiled = Program(library.header() + PACKET, "c++", options).compile("ltoir")
    functions = ObjectCode.from_ltoir(library.build(arch)["ltoir"])
    made = Linker(compiled, functions, options=LinkerOptions(arch=arch, link_time_optimization=True)).link("cubin")
    with gn.Gpu(0) as gpu, gn.open("soft0") as near, gn.open("soft1") as far, flow.FlowPort(far) as port:
        card = Device(0)
        card.set_current()
        stream, pd = card.create_stream(), near.create_pd()
        attrs, out = (gpu.alloc(64, gn.MemType.CPU_GPU) for _ in range(2))
        frame = gpu.alloc(64, gn.MemType.CPU_GPU)
        frame.array[:] = [*eth.query_caps(far).mac, *bytes(6), 0x88, 0xB5, *range(50)]
        rxq, txq = eth.CyclicRxq(gpu, far.create_pd(), 1024, 2048), eth.EthTxq(gpu, pd)
        port.steer(flow.match.everything(), to=rxq, tag=77)
        kernel, region = made.get_kernel("packet"), pd.register(frame)
        with library.foreign_kernels():
            launch(
                stream, LaunchConfig(grid=1, block=1), kernel, txq.device_address, rxq.device_address, region.address,
                region.lkey, 64, attrs.device_address, out.device_address,
            )
            stream.sync()
        assert out.array.view("<i8")[:5].tolist() == [0, 1, 64, 77, 49]


# --- nvcc ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nvcc_path(tmp_path_factory):
    """A PATH with an nvcc that links LTO-IR."""
    return path_with_nvcc(tmp_path_factory.mktemp("cuda"))


def command_blocks(text):
    """The shell commands of a document, a list for each block."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [[line for line in block.splitlines() if line] for block in blocks]


def run_commands(commands, folder, path, arch=ARCH):
    """Run them in `folder`, where what `gpunetio device-lib` would write is already."""
    for command in commands:
        words = shlex.split(command.replace(ARCH, arch))
        if words[0] == "gpunetio":
            kinds = [words[i + 1] for i, word in enumerate(words) if word == "--format"]
            assert words[:4] == ["gpunetio", "device-lib", "--arch", arch]
            assert words[-2:] == ["-o", "."]
            assert all((folder / f"gpunetio_device.{kind}").is_file() for kind in kinds or ["ltoir"])
            continue
        env = {**os.environ, "PATH": path}
        ran = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False)
        assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"


NVCC_BLOCKS = [
    commands
    for commands in command_blocks((ROOT / "docs/device-lib.md").read_text())
    if any(command.startswith("nvcc") for command in commands)
]


def workshop(folder, made):
    """A folder with the library and the source that the commands compile."""
    shutil.copytree(made, folder, dirs_exist_ok=True)
    shutil.copy(ROOT / "examples/cpp_put.cu", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("commands", NVCC_BLOCKS, ids=["ltoir", "cubin"])
def test_the_commands_of_the_document_build_a_shared_object(made, nvcc_path, tmp_path, commands):
    run_commands(commands, workshop(tmp_path, made), nvcc_path)
    # Loaded elsewhere, so that this process stays without CUDA's runtime; with no GPU it says which error that is.
    load = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).run_put_pieces(0, 0, 0, 0, 0, 0, 0, 0, 0))"
    done = subprocess.run(
        [sys.executable, "-c", load, tmp_path / "cpp_put.so"], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) > 0


def test_the_commands_of_the_document_are_those_of_the_example():
    source = (ROOT / "examples/cpp_put.cu").read_text()
    assert re.findall(r"^//     (.*)", source, re.MULTILINE) == NVCC_BLOCKS[0]


@pytest.mark.gpu
@pytest.mark.parametrize("commands", NVCC_BLOCKS, ids=["ltoir", "cubin"])
def test_what_nvcc_has_built_puts(nvcc_path, tmp_path, commands):
    arch = "sm_{}{}".format(*capability_of(0))
    for kind, image in library.build(arch, ("ltoir", "cubin")).items():
        (tmp_path / f"gpunetio_device.{kind}").write_bytes(image)
    (tmp_path / "gpunetio_device.cuh").write_text(library.header())
    shutil.copy(ROOT / "examples/cpp_put.cu", tmp_path)
    run_commands(commands, tmp_path, nvcc_path, arch)
    done = subprocess.run(
        [sys.executable, ROOT / "examples/cpp_put.py", tmp_path / "cpp_put.so"], capture_output=True, text=True,
        timeout=100, check=False,
    )
    assert done.stdout == "CUDA error 0, 0 failed puts, 32768 of 32768 bytes arrived\n", done.stderr


def test_nics_are_told_of_foreign_kernels():
    told: list[int] = []
    observers.append(told.append)
    try:
        with library.foreign_kernels():
            assert told == [1]
        with pytest.raises(KeyError), library.foreign_kernels():
            raise KeyError
    finally:
        observers.remove(told.append)
    assert told == [1, -1, 1, -1]


# --- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "kinds", "said"),
    [
        ("sm_9x", ["ltoir"], "no architecture 'sm_9x'"),
        ("90", ["ltoir"], "no architecture '90'"),
        ("compute_90", ["cubin"], "sm_90, not compute_90"),
        ("sm_90", ["elf"], "no format 'elf': there are ltoir, ptx, cubin"),
    ],
)
def test_what_cannot_be_built_is_said(arch, kinds, said):
    with pytest.raises(InvalidValueError, match=re.escape(said)):
        library.build(arch, kinds)


@pytest.mark.parametrize("missing", ["cuda.bindings.nvvm", "libNVVM"])
def test_without_the_compiler_it_says_what_to_install(monkeypatch, tmp_path, missing):
    if missing == "libNVVM":
        def not_found():
            raise RuntimeError("no libnvvm.so.4")

        monkeypatch.setattr("cuda.bindings.nvvm.create_program", not_found)
    else:
        monkeypatch.setitem(sys.modules, missing, None)
        monkeypatch.delattr("cuda.bindings.nvvm")
    with pytest.raises(NotSupportedError, match=re.escape("pip install 'gpunetio[cuda-compilers]'")):
        library.build(ARCH)
    result = CliRunner().invoke(app, ["device-lib", "--arch", ARCH, "-o", str(tmp_path / "new")])
    assert result.exit_code == 1
    assert "pip install 'gpunetio[cuda-compilers]'" in result.stderr
    assert not (tmp_path / "new").exists()


def test_without_the_assembler_it_says_what_to_install(monkeypatch):
    """Before it compiles anything."""
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(library, "unit_of", lambda *_: pytest.fail("it compiles"))
    with pytest.raises(NotSupportedError, match=r"a cubin is made by ptxas: pip install .*compilers"):
        library.build(ARCH, ("ltoir", "cubin"))


def test_what_the_assembler_says_is_told(monkeypatch):
    monkeypatch.setattr(library, "unit_of", lambda *_: None)
    monkeypatch.setattr(machine, "ptx_of", lambda _: "nonsense")
    with pytest.raises(UnexpectedError, match=r"(?s)does not compile for sm_90 with this .*ptxas .*\.version"):
        library.build(ARCH, ("cubin",))


# --- further builds ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_bytes_each_time(made):
    assert library.build(ARCH, KINDS) == {kind: (made / f"gpunetio_device.{kind}").read_bytes() for kind in KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "sm_120", "compute_90"])
def test_other_architectures(arch):
    built = library.build(arch, KINDS if arch.startswith("sm") else ("ltoir", "ptx"))
    ptx = built["ptx"]
    assert b".target " + arch.replace("compute", "sm").encode() in ptx
    # No .gpu fence in front of a doorbell where it was not measured; older GPUs have no one-sided fences.
    assert (b"fence.release" in ptx) == (arch != "sm_80")
    if arch.startswith("sm"):
        assert built["cubin"].startswith(b"\x7fELF")


def test_what_the_compiler_says_is_told():
    with pytest.raises(UnexpectedError, match=r"does not compile for sm_300 with this .* ERROR_INVALID_OPTION"):
        library.build("sm_300")


# --- the dialects of libNVVM -----------------------------------------------------------------------------------------


@device_function
def pair_of(value):
    return abs(value), ops.be16(value)


@engine_function
def least(first, second, third=7):
    return min(first, second, max(third, 2))


CALLS = """
extern "C" __device__ long long gpunetio_everything(long long address, long long n);
extern "C" __global__ void call_everything(long long *to, long long n) { *to = gpunetio_everything((long long)to, n); }
"""
LTO: Any = {"relocatable_device_code": True, "link_time_optimization": True}


def everything(address, n):
    """What is written in another way in each dialect: memory, pairs, variables, tables, and missing intrinsics."""
    größe = 0
    for i in range(n):
        one, other = pair_of(ops.ld64(address + 8 * i))
        größe += least(one, other) + device.warp_size() * (11, 5, 3)[i % 3] + device.thread_idx()
        device.st64(address, größe)
    return größe + device.block_slot()


@pytest.mark.parametrize(("capability", "kind"), [((8, 0), "i8*"), ((9, 0), "i8*"), ((10, 0), "ptr"), ((12, 0), "ptr")])
def test_a_dialect_is_understood(capability, kind):
    function = library.Function("everything", "", device_function(everything), ("address", "n"), ())
    unit = library.unit_of([function], capability)
    text = nvvm.text_of(unit, typed=kind == "i8*")
    pointers = set(re.findall(r"inttoptr i64 \S+ to (\S+)$", text, re.MULTILINE))
    assert kind in pointers
    assert all(one.endswith("*") == (kind == "i8*") for one in pointers)
    assert ("poison" in text, "range(" in text, "llvm.smin" in text) == (False, False, False)
    arch = "sm_{}{}".format(*capability)
    compiled = Program(CALLS, "c++", ProgramOptions(arch=arch, **LTO)).compile("ltoir")
    functions = ObjectCode.from_ltoir(nvvm.lto_ir(unit, capability))
    for end in ("ptx", "cubin"):
        options = LinkerOptions(arch=arch, link_time_optimization=True, ptx=end == "ptx")
        image = bytes(Linker(compiled, functions, options=options).link(end).code)
        assert b"call_everything" in image
        if end == "ptx":
            assert not re.search(rb"\.extern|\.local", image)
            assert set(re.findall(rb"\.func .*?(\w+)\(", image)) == {f"{__name__}.least".replace(".", "_").encode()}
            assert re.search(rb"\.global .*table.*\[(?:24|3)\]", image)
            assert b"min.s64" in image
