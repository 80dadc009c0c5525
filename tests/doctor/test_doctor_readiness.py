"""When a machine is ready for a use, and what is said when it is not."""

import pytest

from doctor_rig import file, folder, report, without
from gpunetio.doctor import Check, Finding, Readiness, Report, Status, Use, lines_of
from gpunetio.doctor.finding import EVERY_USE, HARDWARE, Verdict
from gpunetio.doctor.machine.host import Kind

READY, NOT_READY, UNKNOWN = Readiness.READY, Readiness.NOT_READY, Readiness.UNKNOWN
OK, WARN, FAIL, SKIP = Status
PAIRS = (("GPU0", "mlx5_0"), ("GPU0", "mlx5_1"), ("GPU1", "mlx5_0"), ("GPU1", "mlx5_1"))


def finding(status, check="one", gpu="", nic="", uses=EVERY_USE, essential=False, settles=""):
    made = Check(
        check, "area", "title", "why", "cure", "source", uses, False, essential, frozenset(settles.split()),
        lambda machine: iter(()),
    )
    return Finding(status, "summary", gpu=gpu, nic=nic).of(made)


def verdict(*findings, use=Use.VERBS, pairs=PAIRS):
    return Report(findings, pairs).ready(use)


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ([], Verdict(READY, "GPU0 with mlx5_0")),
        ([finding(WARN), finding(SKIP), finding(OK)], Verdict(READY, "GPU0 with mlx5_0")),
        ([finding(FAIL)], Verdict(NOT_READY, "one")),
        ([finding(FAIL, gpu="GPU0")], Verdict(READY, "GPU1 with mlx5_0")),
        ([finding(FAIL, nic="mlx5_0")], Verdict(READY, "GPU0 with mlx5_1")),
        ([finding(FAIL, gpu="GPU0", nic="mlx5_0")], Verdict(READY, "GPU0 with mlx5_1")),
        ([finding(FAIL, gpu="GPU0"), finding(FAIL, gpu="GPU1")], Verdict(NOT_READY, "one (GPU0)")),
        ([finding(FAIL, "a", gpu="GPU0"), finding(FAIL, "b", gpu="GPU1"), finding(FAIL, "c", nic="mlx5_0")],
            Verdict(NOT_READY, "a (GPU0)")),
        ([finding(FAIL, "a"), finding(FAIL, "b", nic="mlx5_0")], Verdict(NOT_READY, "a")),
        ([finding(FAIL, uses=frozenset({Use.ETHERNET}))], Verdict(READY, "GPU0 with mlx5_0")),
        ([finding(SKIP, essential=True)], Verdict(UNKNOWN, "one")),
        ([finding(SKIP, essential=True, nic="mlx5_0")], Verdict(READY, "GPU0 with mlx5_1")),
        ([finding(SKIP, essential=True, nic=nic) for nic in ("mlx5_0", "mlx5_1")], Verdict(UNKNOWN, "one (mlx5_0)")),
        ([finding(SKIP, "a", essential=True), finding(FAIL, "b")], Verdict(NOT_READY, "b")),
        ([finding(FAIL, "a", nic="mlx5_0"), finding(SKIP, "b", essential=True, nic="mlx5_1")],
            Verdict(UNKNOWN, "b (mlx5_1)")),
    ],
)
def test_pairs(findings, expected):
    assert verdict(*findings) == expected


GUESS = [finding(FAIL, "guess", gpu=gpu) for gpu in ("GPU0", "GPU1")]


@pytest.mark.parametrize(
    ("probe", "expected"),
    [
        (finding(OK, "probe", "GPU0", "mlx5_0", settles="guess"), Verdict(READY, "GPU0 with mlx5_0")),
        (finding(OK, "probe", "GPU1", "mlx5_1", settles="guess"), Verdict(READY, "GPU1 with mlx5_1")),
        (finding(FAIL, "probe", "GPU0", "mlx5_0", settles="guess"), Verdict(NOT_READY, "probe (GPU0 mlx5_0)")),
        (finding(SKIP, "probe", "GPU0", "mlx5_0", settles="guess"), Verdict(NOT_READY, "guess (GPU0)")),
        (finding(WARN, "probe", "GPU0", "mlx5_0", settles="guess"), Verdict(NOT_READY, "guess (GPU0)")),
        (finding(OK, "probe", "GPU0", "mlx5_0", settles="other"), Verdict(NOT_READY, "guess (GPU0)")),
    ],
)
def test_probes_settle_what_files_hint_at(probe, expected):
    assert verdict(*GUESS, probe) == expected


def test_no_pair():
    missing = finding(FAIL, "gpu-present", uses=HARDWARE)
    assert verdict(missing, pairs=()) == Verdict(NOT_READY, "gpu-present")
    assert verdict(missing, pairs=(), use=Use.SOFTWARE) == Verdict(READY, "")
    assert verdict(finding(SKIP, "gpu-present", essential=True), pairs=()) == Verdict(UNKNOWN, "gpu-present")
    assert verdict(pairs=()) == Verdict(NOT_READY, "no pair of a GPU and a NIC")


def test_the_software_nic_takes_no_pair():
    for one in (finding(FAIL, gpu="GPU0"), finding(FAIL, nic="mlx5_0"), finding(FAIL, uses=HARDWARE)):
        assert verdict(one, use=Use.SOFTWARE) == Verdict(READY, "")
    assert verdict(finding(FAIL), use=Use.SOFTWARE) == Verdict(NOT_READY, "one")
    assert verdict(finding(SKIP, essential=True), use=Use.SOFTWARE) == Verdict(UNKNOWN, "one")


def test_texts_of_a_finding():
    """Those of its check, where something is wrong and it has none of its own."""
    assert finding(FAIL).cure == "cure"
    assert finding(OK).cure == ""
    own = Finding(FAIL, "summary", cure="own", reboot=True).of(finding(OK).check)
    assert (own.cure, own.reboot, own.uses) == ("own", True, EVERY_USE)


@pytest.mark.parametrize(
    ("cure", "reboot", "told"),
    [
        ("BIOS: on", True, "BIOS: on (then reboot)"), ("BIOS: on", False, "BIOS: on"),
        ("set it, and a cold reboot", True, "set it, and a cold reboot"), ("sudo reboot", True, "sudo reboot"),
        ("BIOS; until the next reboot: setpci", True, "BIOS; until the next reboot: setpci (then reboot)"),
    ],
)
def test_a_reboot_is_told_once(cure, reboot, told):
    one = Finding(FAIL, "summary", cure=cure, reboot=reboot).of(finding(OK).check)
    assert f"        cure    {told}" in lines_of(Report((one,), ()))
CARD = "/sys/bus/pci/devices/0000:b5:00.0"


@pytest.mark.parametrize(
    ("changes", "cards"),
    [
        ([], ("mlx5_0", "mlx5_1")),
        ([folder("/sys/class/infiniband")], ("0000:b5:00.0", "0000:b5:00.1")),  # its driver is not loaded
        ([file(f"{CARD}/vendor", "0x14e4")], ("mlx5_1",)),  # Broadcom
        ([without(Kind.LINK, "/sys/class/infiniband/mlx5_0/device")], ("0000:b5:00.0", "mlx5_1")),
    ],
)
def test_cards(changes, cards):
    """With one of these, RDMA Verbs is what one wants to know of."""
    assert sorted(report(*changes).cards) == sorted(cards)
