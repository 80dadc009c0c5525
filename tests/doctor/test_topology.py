"""How far apart GPUs and NICs are, and the checks of it."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doctor_rig import DATA, READY, answer, changed, command, file, folder, found, link, statuses, without
from gpunetio.doctor import Status, Wanted, examine
from gpunetio.doctor.machine.devices import natural
from gpunetio.doctor.machine.host import Kind
from gpunetio.doctor.machine.topo_m import parse
from gpunetio.doctor.machine.topology import (
    SELF,
    UNKNOWN,
    Distance,
    best_nic,
    distance,
    matrix,
    pairs,
)
from topology_rig import CONVERGED, EIGHT, EIGHT_TOPO_M, built, gpu, machine, nic

SWITCH = "pci0000:b0/b0:02.0/b1:00.0"
GPU = f"{SWITCH}/b2:00.0/ca:00.0"
SEED = DATA / "seed"
SEED_TOPO_M = (SEED / "topo_m.txt").read_text()


@pytest.mark.parametrize(
    ("where", "numa", "expected"),
    [
        (f"{SWITCH}/b2:01.0/b5:00.0",                              0, Distance.PIX),
        (f"{SWITCH}/b2:00.0/ca:00.1",                              0, Distance.PIX),   # another function of the card
        (f"{SWITCH}/b5:00.0",                                      0, Distance.PIX),   # inside of the switch
        (f"{SWITCH}/b2:01.0/b4:00.0/b6:00.0/b7:00.0",              0, Distance.PXB),
        (f"{SWITCH}/b2:00.0/b4:00.0/b6:00.0/b7:00.0",              0, Distance.PXB),   # a switch below the GPU's port
        ("pci0000:b0/b0:03.0/bb:00.0",                             0, Distance.PHB),
        ("pci0000:b0/b0:03.0",                                     0, Distance.PHB),
        ("pci0000:c0/c0:02.0/c1:00.0",                             0, Distance.NODE),
        ("pci0001:b0/b0:02.0/b1:00.0/b2:01.0/b5:00.0",             0, Distance.NODE),  # of another domain
        ("pci0000:c0/c0:02.0/c1:00.0",                             1, Distance.SYS),
        ("pci0000:b0/b0:03.0/bb:00.0",                             1, Distance.PHB),   # one host bridge all the same
    ],
)
def test_each_class(where, numa, expected):
    here = machine(built(gpu(GPU), nic("mlx5_0", where, numa)))
    assert matrix(here) == {"GPU0": {"GPU0": SELF, "mlx5_0": expected}}
    assert here.all_nics[0].pci == nic("mlx5_0", where, numa).pci


def test_functions_without_a_bridge():
    """As virtual machines show them."""
    there = gpu("pci0000:00/00:05.0").pci
    assert distance(there, nic("", "pci0000:00/00:05.1").pci) is Distance.PIX
    assert distance(there, nic("", "pci0000:00/00:06.0").pci) is Distance.PHB


def test_the_converged_card():
    """The lines of lspci that the set-up guide prints have the buses that the machine is made of."""
    text = (SEED / "lspci-tvvv.txt").read_text()
    assert re.search(r"02\.0-\[b1-b6\]----00\.0-\[b2-b6\]--\+-00\.0-\[b3\]--\+-00\.0 Mellanox", text)
    assert "01.0-[b4-b6]----00.0-[b5-b6]----08.0-[b6]----00.0 NVIDIA" in text
    assert matrix(machine(CONVERGED)) == {"GPU0": {"GPU0": "X", "mlx5_0": "PXB", "mlx5_1": "PXB"}}


def test_eight_gpus():
    """sysfs gives what nvidia-smi prints for that machine."""
    told = parse(EIGHT_TOPO_M)
    here = machine(EIGHT)
    for name, row in matrix(here).items():
        assert row == {other: cell for (first, other), cell in told.items() if first == name}
    assert [best.name for one in here.gpus if (best := best_nic(here, one))] == [f"mlx5_{10 + i}" for i in range(8)]
    assert pairs(here)[:8] == tuple((f"GPU{i}", f"mlx5_{10 + i}") for i in range(8))
    assert pairs(here)[-1] == ("GPU3", "mlx5_bond_0")
    assert len(pairs(here)) == 8 * 9


def test_what_sysfs_hides():
    pci = without(Kind.LINK, "/sys/bus/pci/devices/0000:ca:00.0")
    here = machine(changed(READY, pci, without(Kind.COMMAND, "nvidia-smi", "topo", "-m")))
    assert matrix(here) == {"GPU0": {"GPU0": SELF, "mlx5_0": UNKNOWN, "mlx5_1": UNKNOWN}}
    assert pairs(here) == (("GPU0", "mlx5_0"), ("GPU0", "mlx5_1"))
    (finding,) = found("topology", pci, without(Kind.COMMAND, "nvidia-smi", "topo", "-m"))
    assert (finding.status, finding.summary) == (
        Status.SKIP, "sysfs does not show where GPU0 (0000:ca:00.0) is plugged in"
    )


def test_what_sysfs_hides_nvidia_smi_tells():
    """A container without the host's sysfs, and the guide's matrix."""
    said = command("nvidia-smi -q", "GPU 00000000:CA:00.0\n"), command("nvidia-smi topo -m", SEED_TOPO_M)
    loaded = link("/dev/nvidiactl", "/dev/nvidiactl"), file("/proc/driver/nvidia/version", "NVRM version: 580.65.06")
    host = changed(built(), *said, *loaded, folder("/sys/class/infiniband", "mlx5_0", "mlx5_1"))
    assert matrix(machine(host)) == {"GPU0": {"GPU0": SELF, "mlx5_0": "NODE", "mlx5_1": "NODE"}}
    (finding,) = (one for one in examine(host).findings if one.check.id == "topology")
    assert (finding.status, finding.subject) == (Status.WARN, "GPU0 mlx5_0")
    assert finding.summary == "NODE: through two host bridges of a NUMA node"
    assert finding.cure == (
        "move the card of mlx5_0 to a slot behind the PCIe switch of GPU0, or of its host bridge"
    )
    assert [(one.source, one.value) for one in finding.read] == [("nvidia-smi topo -m", "GPU0 to mlx5_0: NODE")]
    nearer = SEED_TOPO_M.replace("GPU0 X NODE NODE", "GPU0 X NODE PXB")
    here = machine(changed(host, command("nvidia-smi topo -m", nearer)))
    assert best_nic(here, here.gpus[0]).name == "mlx5_1"
    assert pairs(here) == (("GPU0", "mlx5_1"), ("GPU0", "mlx5_0"))


def test_sysfs_comes_first():
    here = machine(changed(READY, command("nvidia-smi topo -m", SEED_TOPO_M)))
    assert matrix(here) == {"GPU0": {"GPU0": SELF, "mlx5_0": "PIX", "mlx5_1": "PIX"}}


def test_an_integrated_gpu_has_no_distance_that_matters():
    told = READY.recorded[Kind.QUESTION, ("cuda",)].value
    spark = answer("cuda", value=told | {"devices": [told["devices"][0] | {"integrated": 1}]})
    far = link("/sys/bus/pci/devices/0000:ca:00.0", "/sys/devices/pci0000:c0/0000:c0:01.0/0000:ca:00.0")
    assert statuses("topology", far) == [Status.WARN]
    (finding,) = found("topology", far, spark)
    assert (finding.status, finding.gpu) == (Status.SKIP, "GPU0")
    assert finding.summary == "integrated: the NIC uses host memory"


@pytest.mark.parametrize(
    ("cards", "down", "best"),
    [
        (("mlx5_0", "mlx5_10", "mlx5_2"), (),                   "mlx5_0"),
        (("mlx5_10", "mlx5_2"),           (),                   "mlx5_2"),
        (("mlx5_2", "mlx5_10"),           ("mlx5_2",),          "mlx5_10"),
        (("mlx5_2", "mlx5_10"),           ("mlx5_2", "mlx5_10"), "mlx5_2"),
        ((),                              (),                   None),
    ],
)
def test_best_nic_of_equals(cards, down, best):
    """Of those as near: one with an active port, then by name."""
    ports = {name: "1: DOWN" if name in down else "4: ACTIVE" for name in cards}
    host = built(gpu(GPU), *(nic(name, f"{SWITCH}/b2:01.0/b5:00.{i}") for i, name in enumerate(cards)))
    for name, state in ports.items():
        at = f"/sys/class/infiniband/{name}/ports"
        host = changed(host, file(f"{at}/1/state", state + "\n"), folder(at, "1"))
    here = machine(host)
    found = best_nic(here, here.gpus[0])
    assert (found and found.name) == best


def test_best_nic_is_the_nearest_and_of_the_same_numa_node():
    near, far = nic("mlx5_9", f"{SWITCH}/b2:01.0/b5:00.0"), nic("mlx5_0", "pci0000:b0/b0:03.0/bb:00.0")
    here = machine(built(gpu(GPU), far, near))
    assert best_nic(here, here.gpus[0]).name == "mlx5_9"
    assert best_nic(machine(built(gpu(GPU), far, near), nic="mlx5_0"), here.gpus[0]).name == "mlx5_0"
    other, same = nic("mlx5_0", "pci0000:b0/b0:03.0/bb:00.0", 1), nic("mlx5_1", "pci0000:b0/b0:04.0/bc:00.0", 0)
    here = machine(built(gpu(GPU), other, same))
    assert best_nic(here, here.gpus[0]).name == "mlx5_1"


def test_natural():
    assert sorted(["mlx5_10", "mlx5_2", "mlx5_bond_0", "mlx4_0"], key=natural) == [
        "mlx4_0", "mlx5_2", "mlx5_10", "mlx5_bond_0",
    ]


STEPS = st.lists(st.integers(0, 2), min_size=1, max_size=7)


def _place(root, steps, numa=0):
    """A device in a tree where each bus has three places; equal steps lead over the same bridges."""
    names, bus = [], 1
    for step in steps:
        names.append(f"{bus % 256:02x}:{step:02x}.0")
        bus = bus * 3 + step + 1
    return gpu("/".join((f"pci0000:{root:02x}", *names)), numa).pci


PLACES = st.builds(_place, st.integers(0, 1), STEPS, st.integers(-1, 1))


@given(PLACES, PLACES)
def test_symmetric(a, b):
    assert distance(a, b) is distance(b, a)


@given(PLACES)
def test_a_device_and_itself(a):
    assert distance(a, a) is Distance.PIX


@given(PLACES, PLACES, st.integers(1, 3))
def test_a_bridge_more_is_never_nearer(a, b, count):
    added = tuple(f"00ff:{i:02x}:00.0" for i in range(count))
    deeper = replace(a, path=(*a.bridges, *added, a.path[-1]))
    assert distance(deeper, b).rank >= distance(a, b).rank


def test_the_guides_matrix():
    cells = parse(SEED_TOPO_M)
    names = ("GPU0", "mlx5_0", "mlx5_1")
    rows = ("X NODE NODE", "NODE X PIX", "NODE PIX X")
    assert cells == {(a, b): cell for a, row in zip(names, rows) for b, cell in zip(names, row.split())}


def test_a_real_matrix():
    cells = parse(EIGHT_TOPO_M)
    assert "\x1b" in EIGHT_TOPO_M
    assert "\t" in EIGHT_TOPO_M
    assert len(cells) == 17 * 17
    assert [cells["GPU4", name] for name in ("GPU0", "GPU4", "mlx5_10", "mlx5_14", "mlx5_bond_0")] == [
        "NV18", "X", "SYS", "PXB", "NODE",
    ]


def test_a_matrix_of_an_older_driver():
    """NICs stood in the heading, and there was no NUMA column."""
    text = "\tGPU0\tmlx5_0\tCPU Affinity\nGPU0\t X \tPHB\t0-23\nmlx5_0\tPHB\t X \t\n"
    assert parse(text)["GPU0", "mlx5_0"] == "PHB"


@given(st.dictionaries(st.sampled_from([f"NIC{i}" for i in range(6)]), st.from_regex(r"mlx5_[0-9]{2}", fullmatch=True),
                       min_size=1), st.data())
def test_parsing_what_was_printed(legend, data):
    names = ["GPU0", *legend]
    cells = {(a, b): data.draw(st.sampled_from([*Distance, "NV4", "X"])) for a in names for b in names}
    lines = ["\t\x1b[4m" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\x1b[0m"]
    lines += ["\t".join([a, *(f" {cells[a, b]} " for b in names), "0-3", "0"]) for a in names]
    lines += ["", "NIC Legend:", "", *(f"  {short}: {name}" for short, name in legend.items())]
    told = {"GPU0": "GPU0"} | legend
    if len(set(legend.values())) == len(legend):
        assert parse("\n".join(lines)) == {(told[a], told[b]): cell for (a, b), cell in cells.items()}


@given(st.text(alphabet="GPUNIC01 \t\n\x1b[4m:mlx5_XSYV") | st.text())
def test_parsing_anything(text):
    for cell in parse(text).values():
        assert cell == SELF or cell.startswith("NV") or cell in set(Distance)


def _topology(*cards, wanted=None):
    return [one for one in examine(built(*cards), wanted).findings if one.check.id == "topology"]


def test_near_pairs_are_fine():
    for where, words in (
        (f"{SWITCH}/b2:01.0/b5:00.0", "PIX: at most one PCIe switch"),
        (f"{SWITCH}/b2:01.0/b4:00.0/b6:00.0/b7:00.0", "PXB: several PCIe switches"),
        ("pci0000:b0/b0:03.0/bb:00.0", "PHB: through their host bridge; the speed depends on the platform"),
    ):
        (finding,) = _topology(gpu(GPU), nic("mlx5_0", where))
        assert (finding.status, finding.subject, finding.cure) == (Status.OK, "GPU0 mlx5_0", "")
        assert finding.summary.startswith(words)


@pytest.mark.parametrize(("numa", "words"), [(0, "NODE: through two host bridges"), (1, "SYS: through the link")])
def test_far_pairs_are_slow(numa, words):
    far, near = nic("mlx5_0", "pci0000:c0/c0:02.0/c1:00.0", numa), nic("mlx5_1", f"{SWITCH}/b2:01.0/b5:00.0")
    (alone,) = _topology(gpu(GPU), far)
    assert (alone.status, alone.reboot) == (Status.WARN, True)
    assert alone.summary.startswith(words)
    assert alone.cure == "move the card of mlx5_0 to a slot behind the PCIe switch 0000:b1:00.0, which GPU0 is behind"
    (fine,) = _topology(gpu(GPU), far, near)
    assert (fine.status, fine.nic) == (Status.OK, "mlx5_1")
    (slow,) = _topology(gpu(GPU), far, near, wanted=Wanted(nic="mlx5_0"))
    assert (slow.status, slow.nic, slow.reboot) == (Status.WARN, "mlx5_0", False)
    assert slow.summary.endswith("; mlx5_1 is nearer")
    assert slow.cure == f"use mlx5_1 (PIX) with GPU0, or {alone.cure}"
    assert len(slow.summary) < 80


def test_a_far_pair_without_a_switch():
    (finding,) = _topology(gpu("pci0000:b0/b0:02.0/ca:00.0"), nic("mlx5_0", "pci0000:c0/c0:02.0/c1:00.0"))
    assert finding.cure == "move the card of mlx5_0 to a slot of pci0000:b0, the host bridge of GPU0"


def test_no_pair():
    assert statuses("topology") == [Status.OK]
    (finding,) = _topology(nic("mlx5_0", GPU))
    assert (finding.status, finding.summary) == (Status.SKIP, "no GPU")
    (finding,) = _topology(gpu(GPU))
    assert (finding.status, finding.summary) == (Status.SKIP, "no NIC")
    rxe = changed(built(gpu(GPU)), folder("/sys/class/infiniband", "rxe0"))
    (finding,) = (one for one in examine(rxe).findings if one.check.id == "topology")
    assert (finding.status, finding.summary) == (Status.SKIP, "rxe0 is not a PCI device")


def test_nvidia_smi_agrees():
    assert statuses("topology-agrees") == [Status.OK]
    agreed = [one for one in examine(EIGHT).findings if one.check.id == "topology-agrees"]
    assert [(one.status, one.gpu) for one in agreed] == [(Status.OK, f"GPU{i}") for i in range(8)]


def test_nvidia_smi_differs():
    """The guide's matrix is of another machine than its lspci."""
    (finding,) = found("topology-agrees", command("nvidia-smi topo -m", SEED_TOPO_M))
    assert finding.status is Status.WARN
    assert finding.summary == "to mlx5_0: PIX in sysfs, NODE in nvidia-smi, and 1 more differ"
    assert [(one.source, one.value) for one in finding.read[1:]] == [
        ("GPU0 to mlx5_0", "sysfs: PIX, nvidia-smi: NODE"), ("GPU0 to mlx5_1", "sysfs: PIX, nvidia-smi: NODE"),
    ]
    assert "lspci -tv" in finding.cure
    (finding,) = found(
        "topology-agrees", command("nvidia-smi topo -m", SEED_TOPO_M), wanted=Wanted(nic="mlx5_1")
    )
    assert finding.summary == "to mlx5_1: PIX in sysfs, NODE in nvidia-smi"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(Kind.COMMAND, "nvidia-smi", "topo", "-m"), "nvidia-smi topo -m does not run: No such file"),
        (command("nvidia-smi topo -m", "", "exit status 9"), "nvidia-smi topo -m does not run: exit status 9"),
        (command("nvidia-smi topo -m", "No devices were found"), "no distance is known to both sysfs and"),
        (folder("/sys/class/infiniband"), "no distance is known to both sysfs and"),
    ],
)
def test_nothing_to_compare(change, words):
    (finding,) = found("topology-agrees", change)
    assert finding.status is Status.SKIP
    assert finding.summary.startswith(words)
