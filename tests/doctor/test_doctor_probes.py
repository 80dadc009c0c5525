"""Probes of the doctor: what is tried on NICs and GPUs that work and that do not, and processes that hang."""

import ctypes
import gc
import json
from contextlib import ExitStack
from dataclasses import replace
from ipaddress import IPv6Address
from types import SimpleNamespace

import pytest

from card_rig import REQ, REQ_ERR, Card, FakeCuda
from doctor_rig import READY, answer, changed
from gpunetio import Gpu, verbs
from gpunetio.doctor import Finding, Machine, Status, Wanted
from gpunetio.doctor.probes import bench as rig
from gpunetio.doctor.probes import kernel as probe_kernel
from gpunetio.doctor.probes import memory as probe_memory
from gpunetio.doctor.probes import process
from gpunetio.doctor.probes.explain import CUDA_ERRORS, LIKELY, SYNDROME_OF, cuda_error
from gpunetio.doctor.probes.trying import PROBES, run_probes
from gpunetio.enums import Access, GidType, MemType
from gpunetio.errors import DriverError, NotFoundError
from gpunetio.formats.cqe import Syndrome
from gpunetio.gpu.host_backend import HostBackend
from gpunetio.providers.mlx5.provider import Mlx5Provider
from gpunetio.providers.soft import SoftProvider
from plain_soft import PlainSoft

OK, WARN, FAIL, SKIP = Status
IDS = [probe.id for probe in PROBES]
ON_CARD = "mlx5_0"


def bench(name: str = "soft0", gpu: str = "host", patience: float = 5.0) -> rig.Bench:
    return rig.Bench(name, gpu, ExitStack(), patience)


def probed(at: rig.Bench) -> dict[str, list[Finding]]:
    """What each probe finds that was begun, as the process tells it, and the doctor understands it."""
    said: list[dict] = []
    with at.opened:
        process.probe(at, lambda line: said.append(json.loads(json.dumps(line))))
    begun = [line["begin"] for line in said if "begin" in line]
    host = changed(READY, answer("probe", at.name, "0000:ca:00.0", value={"said": said, "ended": ""}))
    found = run_probes(Machine(host, Wanted()), at.name)
    return {id: [each for each in found if each.check.id == id] for id in begun if id != "close"}


def statuses(found: dict[str, list[Finding]]) -> dict[str, list[Status]]:
    return {id: [finding.status for finding in findings] for id, findings in found.items()}


def text(finding: Finding) -> str:
    """All that a user can read of it."""
    return " | ".join([finding.summary, *(f"{e.source}: {e.value}" for e in finding.read), finding.cure])


HOST_ONLY = {"probe-gpu": [SKIP], "probe-uar": [SKIP], "probe-dmabuf": [SKIP], "probe-umem": [SKIP]}
ALL_WELL = {"probe-open": [OK], "probe-loopback-host": [OK], **HOST_ONLY, "probe-loopback-gpu": [OK, OK]}


# --- devices that work -----------------------------------------------------------------------------------------------


def test_a_software_nic_with_threads_of_the_host():
    found = probed(bench())
    assert statuses(found) == ALL_WELL
    proxy, own = found["probe-loopback-gpu"]
    assert "CPU threads" in proxy.summary
    assert "CPU proxy rings" in proxy.summary
    assert "kernel rings" in own.summary
    assert all("no GPU" in text(finding) for id in HOST_ONLY for finding in found[id])
    assert all(len(finding.summary) < 80 for findings in found.values() for finding in findings)


def test_a_card_with_threads_of_the_host(stand_in):
    found = probed(bench(ON_CARD))
    assert statuses(found) == ALL_WELL
    assert found["probe-loopback-host"][0].subject == ON_CARD
    assert found["probe-loopback-gpu"][0].subject == f"GPU0 {ON_CARD}"


def test_a_device_without_devx(monkeypatch):
    """As Soft-RoCE: the host's part works, and nothing of the rest is tried."""
    monkeypatch.setattr(rig, "open_context", lambda name: verbs.Context(PlainSoft("soft0")))
    found = probed(bench("plain-soft0"))
    assert statuses(found) == ALL_WELL | {"probe-loopback-gpu": [SKIP]}
    assert "no DEVX" in found["probe-loopback-gpu"][0].summary


@pytest.mark.gpu
def test_a_software_nic_with_a_gpu(request):
    """CUDA maps its registers, which are memory. Its rings are in GPU memory if its engine is on the GPU."""
    found = probed(bench(gpu="auto"))
    rings = [OK if request.config.getoption("--gpu-engine") else SKIP]
    assert statuses(found) == ALL_WELL | {
        "probe-gpu": [OK], "probe-uar": [OK], "probe-dmabuf": [OK], "probe-umem": rings,
    }
    assert "CUDA driver" in found["probe-dmabuf"][0].summary
    assert all("data in GPU memory" in text(finding) for finding in found["probe-loopback-gpu"])


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("kind", MemType)
def test_where_the_data_of_a_kernel_lie(on_gpu, kind):
    where = probe_kernel._where(SimpleNamespace(on_gpu=on_gpu), SimpleNamespace(kind=kind))
    assert where == ("GPU memory" if on_gpu and kind == MemType.GPU else "host memory")


# --- devices that do not ---------------------------------------------------------------------------------------------


def test_no_such_device():
    found = probed(bench("nosuch"))
    assert statuses(found) == {"probe-open": [FAIL]}
    assert "no device 'nosuch'" in found["probe-open"][0].summary
    assert "gpunetio devices -l" in found["probe-open"][0].cure
    assert found["probe-open"][0].subject == ""


def test_no_such_gpu():
    """It is said, and threads of the host do what they can."""
    found = probed(bench(gpu="8a:00.0"))
    assert statuses(found) == ALL_WELL | {"probe-gpu": [FAIL]}
    assert "8a:00.0" in found["probe-gpu"][0].summary


@pytest.fixture(params=["soft0", ON_CARD])
def device(request):
    """A software NIC by itself, and as a card: its name, and how the NIC behind it is found."""
    if request.param == "soft0":
        return "soft0", lambda ctx: ctx.provider.nic
    stand_in = request.getfixturevalue("stand_in")
    return ON_CARD, lambda ctx: stand_in.nic(ON_CARD)


def test_a_port_that_is_down(device, monkeypatch):
    name, nic_of = device

    def opened(name):
        ctx = verbs.open(name)
        nic_of(ctx).set_link(False)
        return ctx

    monkeypatch.setattr(rig, "open_context", opened)
    found = probed(bench(name))
    assert statuses(found) == ALL_WELL | {"probe-loopback-host": [FAIL], "probe-loopback-gpu": [FAIL]}
    for id in ("probe-loopback-host", "probe-loopback-gpu"):
        assert "port 1 is DOWN" in found[id][0].summary


def to_nobody(self, queue):
    """A peer that has closed its end, as a wrong GID index looks."""
    qp = getattr(queue, "qp", queue)
    qp.connect(replace(qp.endpoint(), qpn=0xABCDE), ack_timeout=8, retry_cnt=1)


def without_rights(self, queue):
    queue.connect(queue, remote_access=Access(0))


@pytest.mark.parametrize(
    ("connect", "name", "cause"),
    [
        (to_nobody, "TRANSPORT_RETRY_EXC (0x15/", "wrong GID index"),
        (without_rights, "REMOTE_INVAL_REQ (0x12/", "path MTU"),
    ],
)
def test_a_request_that_fails(device, monkeypatch, connect, name, cause):
    """Posted by the host, by the CPU proxy and by the kernel."""
    monkeypatch.setattr(rig.Way, "connect", connect)
    found = probed(bench(device[0]))
    assert statuses(found) == ALL_WELL | {"probe-loopback-host": [FAIL], "probe-loopback-gpu": [FAIL, FAIL]}
    for id in ("probe-loopback-host", "probe-loopback-gpu"):
        for finding in found[id]:
            assert name in finding.summary
            assert cause in text(finding)
            assert "<device>" not in finding.cure
            assert "GID 0" in text(finding)


def test_a_nic_that_gives_no_umem(device, monkeypatch):
    """No queue can be made."""

    def refuse(self, *args):
        raise DriverError("refused UMEM", 5, 0xABC)

    for provider in (SoftProvider, Mlx5Provider):
        monkeypatch.setattr(provider, "reg_umem", refuse)
    found = probed(bench(device[0]))
    assert statuses(found) == ALL_WELL | {"probe-loopback-host": [FAIL], "probe-loopback-gpu": [FAIL]}
    assert all("refused UMEM" in found[id][0].summary for id in ("probe-loopback-host", "probe-loopback-gpu"))


def test_a_doorbell_that_cuda_does_not_map(monkeypatch):
    """The CPU proxy rings, and nobody calls that an error."""

    def refuse(self, address, nbytes, io=False):
        if io:
            raise DriverError("cudaHostRegister: operation not permitted (CUDA error 800)", 800)
        return address

    monkeypatch.setattr(HostBackend, "map", refuse)
    found = probed(bench())
    assert statuses(found) == ALL_WELL | {"probe-loopback-gpu": [OK, SKIP]}
    assert "probe-uar" in found["probe-loopback-gpu"][1].summary


def test_a_mistake_of_a_probe_is_told_as_such(monkeypatch):
    monkeypatch.setitem(process.TRIALS, "probe-uar", lambda bench: iter([1 // 0]))
    (finding,) = probed(bench())["probe-uar"]
    assert finding.status is SKIP
    assert "ZeroDivisionError" in finding.summary


# --- a card that is played -------------------------------------------------------------------------------------------


class Playing:
    """A card and a GPU with `refused` sets, on a bench of theirs."""

    def __init__(self, monkeypatch, card: Card, gpu: str = "auto"):
        self.card, self.cuda = card, FakeCuda()
        backend = staticmethod(lambda which: HostBackend() if which == "host" else self.cuda)
        monkeypatch.setattr(Gpu, "_open_backend", backend)
        monkeypatch.setattr(rig, "open_context", lambda name: verbs.import_context(card))
        self.bench = bench("card0", gpu, 0.25)

    def run(self, *trials) -> list[Finding]:
        with self.bench.opened:
            trials = (rig.open_device, rig.open_gpu, *trials)
            *_, found = [list(rig.tried(trial, self.bench)) for trial in trials]
        assert self.card.left() == []
        gc.collect()  # errors hold the frames that have raised them, and so what was refused
        assert dict(+self.cuda.live) == dict(+self.cuda.mapped) == {}
        return found


@pytest.fixture
def playing(monkeypatch):
    return Playing(monkeypatch, Card())


@pytest.mark.parametrize(
    ("trial", "cuda", "card", "status", "words"),
    [
        (probe_memory.dmabuf, (), (), OK, "by dmabuf"),
        (probe_memory.dmabuf, ("dmabuf",), (), OK, "by nvidia-peermem"),
        (probe_memory.dmabuf, (), ("reg_dmabuf_mr",), OK, "by nvidia-peermem"),
        (probe_memory.dmabuf, ("dmabuf",), ("MR of GPU",), FAIL, "does not accept memory of GPU fa:00.0"),
        (probe_memory.dmabuf, (), ("reg_dmabuf_mr", "MR of GPU"), FAIL, "does not accept memory of GPU fa:00.0"),
        (probe_memory.dmabuf, ("alloc GPU",), (), FAIL, "cudaMalloc"),
        (probe_memory.umem, (), (), OK, "by dmabuf"),
        (probe_memory.umem, ("dmabuf",), (), OK, "by nvidia-peermem"),
        (probe_memory.umem, (), ("reg_dmabuf_umem",), OK, "by nvidia-peermem"),
        (probe_memory.umem, ("dmabuf",), ("UMEM of GPU",), WARN, "are in host memory"),
        (probe_memory.umem, (), ("reg_dmabuf_umem", "UMEM of GPU"), WARN, "are in host memory"),
    ],
)
def test_ways_to_gpu_memory(playing, trial, cuda, card, status, words):
    """Each refusal is told, as is the way that worked."""
    playing.cuda.refused |= set(cuda)
    playing.card.refused |= set(card)
    (finding,) = playing.run(trial)
    assert finding.status is status
    assert words in finding.summary
    told = text(finding)
    assert all(f"refused {what}" in told for what in card)
    assert ("CUDA_ERROR_NOT_SUPPORTED" in told) == ("dmabuf" in cuda)


@pytest.mark.parametrize("number", [*CUDA_ERRORS, 12345])
def test_registers_that_cuda_refuses(playing, monkeypatch, number):
    """By the name of the error, with the cure for it."""

    def refuse(self, address, nbytes, io=False):
        raise DriverError(f"cudaHostRegister: no (CUDA error {number})", number)

    monkeypatch.setattr(FakeCuda, "map", refuse)
    (finding,) = playing.run(probe_memory.uar)
    probe = PROBES[IDS.index("probe-uar")]
    finding = finding.of(probe)
    assert finding.status is WARN
    assert cuda_error(number).name in finding.summary
    assert str(number) in finding.summary
    assert ("PeerMappingOverride" in finding.cure) == (number == 800)
    assert finding.reboot == (number == 800)
    assert finding.cure


def test_a_register_that_cuda_maps(playing):
    (finding,) = playing.run(probe_memory.uar)
    assert finding.status is OK


@pytest.mark.parametrize("trial", [probe_memory.uar, probe_memory.dmabuf, probe_memory.umem])
def test_an_integrated_gpu(playing, trial):
    """No NIC reaches its memory, and no doorbell is mapped: so it is meant."""
    playing.cuda.integrated = True
    (finding,) = playing.run(trial)
    assert finding.status is SKIP
    assert "integrated" in finding.summary


def test_rings_of_a_software_nic_and_a_gpu(playing):
    """They are in host memory by design."""
    playing.card.reaches_gpu_memory = False
    (finding,) = playing.run(probe_memory.umem)
    assert finding.status is SKIP
    assert "host memory" in finding.summary


def test_a_card_that_loses_doorbells(monkeypatch):
    """Nobody waits for ever: neither the host nor a kernel, whoever rings."""
    playing = Playing(monkeypatch, Card(), "host")
    (host,) = playing.run(process.probe_loopback.host)
    assert host.status is FAIL
    assert "completes nothing" in host.summary
    playing = Playing(monkeypatch, Card(), "host")
    proxy, own = playing.run(process.TRIALS["probe-loopback-gpu"])
    for finding, rings in ((proxy, "the CPU proxy rings"), (own, "the kernel rings")):
        assert finding.status is FAIL
        assert rings in finding.summary
        assert "ETIMEDOUT" in text(finding)
        assert "submitted 1" in text(finding)
        assert "completed 0" in text(finding)


class Scripted(Card):
    """It completes what the host posts with a syndrome, or with success and no bytes."""

    syndrome = vendor = 0

    def create(self, ctx, *args, **options):
        self.cq = verbs.Context.create_cq(ctx, *args, **options)
        return self.cq

    def doorbell_rung(self):
        cqe = bytearray(64)
        cqe[54:56] = self.vendor, self.syndrome
        cqe[57:60] = self.live["qp"][-1].to_bytes(3, "big")
        cqe[63] = (REQ_ERR if self.syndrome else REQ) << 4
        ctypes.memmove(self.cq.ring_address, bytes(cqe), 64)


@pytest.fixture
def scripted(monkeypatch):
    card = Scripted()
    playing = Playing(monkeypatch, card, "host")

    def opened(name):
        ctx = verbs.import_context(card)
        monkeypatch.setattr(ctx, "create_cq", lambda *args, **options: card.create(ctx, *args, **options))
        return ctx

    monkeypatch.setattr(rig, "open_context", opened)
    return playing


@pytest.mark.parametrize("syndrome", [*Syndrome, 0x77])
def test_error_completions(scripted, syndrome):
    """Each is named, with what it means and what is likely behind it."""
    scripted.card.syndrome, scripted.card.vendor = syndrome, 0x81
    (finding,) = scripted.run(process.probe_loopback.host)
    assert finding.status is FAIL
    if syndrome in list(Syndrome):
        assert f"{Syndrome(syndrome).name} ({syndrome:#04x}/0x81)" in finding.summary
        assert LIKELY[syndrome].cause in text(finding)
    assert "card0" in finding.cure or "<" not in finding.cure


def test_success_without_bytes(scripted):
    (finding,) = scripted.run(process.probe_loopback.host)
    assert finding.status is FAIL
    assert "reports success" in finding.summary
    assert "of 16384 bytes are wrong, the first at" in finding.summary


def test_bytes_that_differ():
    wanted = bytes(range(256)) * 64
    found = bytearray(wanted)
    assert rig.differences(wanted, found) == ""
    found[5] ^= 1
    found[-1] ^= 1
    assert rig.differences(wanted, found) == "2 of 16384 bytes are wrong, the first at 5"


def test_every_syndrome_is_explained():
    assert set(LIKELY) == set(Syndrome) == set(SYNDROME_OF.values())
    assert len(SYNDROME_OF) == len(Syndrome)
    assert all(likely.cause and likely.cure for likely in LIKELY.values())
    assert all(error.cause for error in CUDA_ERRORS.values())


# --- the way back to the device --------------------------------------------------------------------------------------

V1, V2 = GidType.ROCE_V1, GidType.ROCE_V2
LINK_LOCAL = IPv6Address("fe80::1").packed
GLOBAL = IPv6Address("2001:db8::1").packed
MAPPED = IPv6Address("::ffff:10.0.0.1").packed
MAPPED_LINK_LOCAL = IPv6Address("::ffff:169.254.0.1").packed
NOTHING = bytes(16)


@pytest.mark.parametrize(
    ("table", "chosen"),
    [
        ([(LINK_LOCAL, V1), (LINK_LOCAL, V2), (MAPPED, V1), (MAPPED, V2)], 3),  # as on a ConnectX
        ([(LINK_LOCAL, V1), (LINK_LOCAL, V2)], 1),
        ([(LINK_LOCAL, V2), (GLOBAL, V2), (MAPPED, V2)], 2),
        ([(LINK_LOCAL, V2), (NOTHING, V2), (GLOBAL, V2)], 2),
        ([(MAPPED_LINK_LOCAL, V2), (GLOBAL, V2)], 1),
        ([(MAPPED, V1)], 0),
        ([(NOTHING, V2)], None),
    ],
)
def test_which_gid_is_taken(table, chosen):
    card = Card()
    card.query_gid = lambda port, index: table[index][0] if index < len(table) else NOTHING  # type: ignore[method-assign]
    card.gid_type = lambda port, index: table[index][1]  # type: ignore[method-assign]
    at = bench("card0")
    with at.opened:
        at.ctx = verbs.import_context(card)
        if chosen is None:
            with pytest.raises(NotFoundError, match="no GID"):
                at.way()
        else:
            assert (at.way().port, at.way().sgid_index) == (1, chosen)
