"""`gpunetio topo`: what it prints and draws."""

import json
import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from doctor_rig import DATA, READY, changed, command, file, folder, link
from gpunetio.cli import app
from gpunetio.doctor import Trouble, save
from gpunetio.doctor.checks import topology as checks_topology
from gpunetio.doctor.machine import topology
from gpunetio.doctor.machine.host import Kind, Reading
from gpunetio.doctor.machine.pci import FOLDER
from gpunetio.doctor.report import picture, tree
from gpunetio.doctor.report.tree import Node
from tools import new_terminal
from topology_rig import CONVERGED, EIGHT, built, gpu, machine, nic

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def show(tmp_path):
    """What the command says of a machine: exit status, stdout, stderr."""

    def run(host, *args):
        save(list(host.recorded.values()), tmp_path / "machine.json")
        result = CliRunner().invoke(app, ["topo", "--replay", str(tmp_path / "machine.json"), *args])
        return result.exit_code, result.stdout, result.stderr

    return run


def test_the_ready_machine(show):
    golden = (DATA / "ready_topo.txt").read_text()
    assert show(READY) == (0, golden, "")


def test_eight_gpus_fit_the_terminal(show):
    status, out, _ = show(EIGHT)
    assert status == 0
    assert max(map(len, out.splitlines())) <= tree.WIDTH
    for number in range(8):
        best = f"mlx5_{10 + number} (PXB: several PCIe switches between them, no host bridge; no active port)"
        assert f"GPU{number}: best with {best}\n" in out
    assert out.count("NUMA node 1") == 5
    (row,) = re.findall(r"^GPU4 .*mlx5_bond_0.*|^GPU4  +NV18.*", out, re.MULTILINE)
    assert row.split()[:6] == ["GPU4", "NV18", "NV18", "NV18", "NV18", "X"]
    assert out.endswith("\nnvidia-smi topo -m agrees.\n")


def test_switches_below_switches(show):
    _, out, _ = show(CONVERGED)
    assert out.splitlines()[:11] == [
        "pci0000:b0  host bridge, NUMA node 0",
        "└─ b0:02.0  root port",
        "   └─ b1:00.0  PCIe switch",
        "      ├─ b2:00.0  port",
        "      │  ├─ b3:00.0  mlx5_0, ConnectX-7",
        "      │  └─ b3:00.1  mlx5_1, ConnectX-7",
        "      └─ b2:01.0  port",
        "         └─ b4:00.0  PCIe switch",
        "            └─ b5:08.0  port",
        "               └─ b6:00.0  GPU0",
        "",
    ]


def test_long_names_are_cut(show):
    name = "NVIDIA " + "very " * 20 + "long"
    _, out, _ = show(changed(READY, file("/proc/driver/nvidia/gpus/0000:ca:00.0/information", f"Model: {name}\n")))
    (line,) = (line for line in out.splitlines() if "very" in line)
    assert len(line) == tree.WIDTH
    assert line.endswith("…")


def test_a_slow_link(show):
    at = f"{FOLDER}/0000:ca:00.0"
    slow = file(f"{at}/current_link_width", "8\n"), file(f"{at}/current_link_speed", "2.5 GT/s PCIe\n")
    assert "GPU0, x8 2.5 GT/s of x16 16.0 GT/s, NVIDIA A100" in show(changed(READY, *slow))[1]
    unknown = file(f"{at}/current_link_speed", "Unknown\n")
    assert "GPU0, NVIDIA A100" in show(changed(READY, unknown))[1]


def test_a_gpu_that_only_nvidia_smi_shows(show):
    """As in a container that has no sysfs of the host; and a NIC that is no device."""
    node = link("/dev/nvidiactl", "/dev/nvidiactl")
    said = command("nvidia-smi -q", "GPU 00000000:CA:00.0\n    Product Name : NVIDIA L4\n")
    _, out, _ = show(changed(built(), node, said, folder("/sys/class/infiniband", "rxe0")))
    assert out == (
        "no place on a PCI bus\n├─ ca:00.0  GPU0, NVIDIA L4\n└─ rxe0, software\n\n      GPU0  rxe0\nGPU0  X     ?\n\n"
        "GPU0: best with rxe0 (distance unknown; no active port)\n\n"
        "Not compared with nvidia-smi: nvidia-smi topo -m does not run: this recording does not have it\n"
    )


def test_all_devices(show):
    ssd = f"{FOLDER}/0000:b1:00.1"
    host = changed(
        READY, folder(FOLDER, *READY.recorded[Kind.FOLDER, (FOLDER,)].names, "0000:b1:00.1"),
        link(ssd, "/sys/devices/pci0000:b0/0000:b0:02.0/0000:b1:00.1"),
        file(f"{ssd}/class", "0x010802"), file(f"{ssd}/vendor", "0x144d"), file(f"{ssd}/device", "0xa80a"),
    )
    line = "   └─ b1:00.1  storage, 144d:a80a\n"
    assert line in show(host, "--all")[1]
    assert show(host) == show(READY)


def test_only_some(show):
    _, out, _ = show(READY, "--nic", "ens6f1", "--gpu", "0")
    assert "mlx5_1" in out
    assert "mlx5_0" not in out
    status, out, err = show(READY, "--gpu", "3")
    assert (status, out) == (2, "")
    assert err == "gpunetio: error: no GPU is '3'; there is GPU0 (0000:ca:00.0)\n"
    assert show(READY, "--nic", "x")[2].endswith("there is mlx5_0 (0000:b5:00.0), mlx5_1 (0000:b5:00.1)\n")


def test_nvidia_smi_says_otherwise(show):
    host = changed(READY, command("nvidia-smi topo -m", (DATA / "seed" / "topo_m.txt").read_text()))
    assert show(host)[1].endswith(
        "nvidia-smi topo -m differs: GPU0 to mlx5_0: PIX in sysfs, NODE in nvidia-smi, and 1 more differ\n"
    )


def test_an_active_port_farther_away(show):
    """The nearest NIC has no cable: there is another that has one."""
    host = changed(READY, file("/sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n"),
                   link(f"{FOLDER}/0000:b5:00.1", "/sys/devices/pci0000:e0/0000:e0:01.0/0000:b5:00.1"))
    assert (
        "GPU0: best with mlx5_0 (PIX: at most one PCIe switch between them; no active port); next with an\n"
        "      active port: mlx5_1 (NODE: through two host bridges of a NUMA node; port active)\n"
    ) in show(host)[1]
    down = file("/sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n")
    assert "next with" not in show(changed(host, down))[1]


def test_no_sentence_is_wider_than_the_terminal(show, tmp_path):
    error = "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver at all"
    topo_m = (DATA / "seed" / "topo_m.txt").read_text().replace("mlx5_", "mlx5_of_the_very_long_name_")
    said = Reading(Kind.COMMAND, ("nvidia-smi", "topo", "-m"), None, Trouble.FAILED, error)
    long = tmp_path / ("folder " * 12) / "topo.svg"
    names = ("mlx5_of_the_very_long_name_0", "mlx5_of_the_very_long_name_1")
    cards = (nic(name, f"pci0000:b0/b0:0{i}.0/b{i}:00.0", i) for i, name in enumerate(names, 3))
    for host, *options in (
        (changed(READY, said),),
        (built(gpu("pci0000:b0/b0:01.0/b1:00.0"), *cards, topo_m=topo_m),),
        (built(), "--svg", str(long)),
    ):
        status, out, _ = show(host, *options)
        assert status == 0
        assert max(map(len, out.splitlines())) <= tree.WIDTH


def test_json(show):
    status, out, _ = show(READY, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["matrix"] == {"GPU0": {"GPU0": "X", "mlx5_0": "PIX", "mlx5_1": "PIX"}}
    assert found["gpus"][0] == {
        "name": "GPU0", "address": "0000:ca:00.0", "model": "NVIDIA A100 80GB PCIe", "numa": 1, "best_nic": "mlx5_0",
    }
    assert [(one["name"], one["interfaces"], one["active"]) for one in found["nics"]] == [
        ("mlx5_0", ["ens6f0"], True), ("mlx5_1", ["ens6f1"], True),
    ]
    assert [one["status"] for one in found["nvidia_smi"]] == ["OK"]
    assert found["tree"][0]["below"][0]["below"][0]["kind"] == "switch"


def test_a_machine_with_neither(show, tmp_path):
    sentence = "This machine has neither an NVIDIA GPU nor an RDMA NIC."
    assert show(built()) == (0, f"{sentence}\n", "")
    svg = tmp_path / "topo.svg"
    status, out, err = show(built(), "--svg", str(svg))
    assert (status, "".join(out.split()), err) == (0, f"{sentence}{svg}wasnotwritten.".replace(" ", ""), "")
    assert not svg.exists()
    assert json.loads(show(built(), "--json")[1])["matrix"] == {}
    assert show(built(nic("mlx5_0", "pci0000:00/00:05.0")))[1].splitlines() == [
        "pci0000:00  host bridge, NUMA node 0", "└─ 00:05.0  mlx5_0, ConnectX-7",
    ]
    assert show(built(gpu("pci0000:00/00:05.0")))[1].splitlines()[-3] == "GPU0: no NIC with an RDMA device"


def test_below_a_folder(tmp_path):
    pci = tmp_path / "sys/devices/pci0000:00/0000:00:05.0"
    pci.mkdir(parents=True)
    for name, value in (("vendor", "0x15b3"), ("device", "0x101d"), ("class", "0x020000"), ("numa_node", "0")):
        (pci / name).write_text(value + "\n")
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:00:05.0").symlink_to(pci)
    result = CliRunner().invoke(app, ["topo", "--root", str(tmp_path)])
    assert result.stdout.splitlines()[1] == "└─ 00:05.0  NIC without RDMA device, ConnectX-6 Dx"
    for words in (["--root", str(tmp_path / "none")], ["--root", "/", "--replay", "x"]):
        assert CliRunner().invoke(app, ["topo", *words]).exit_code == 2
    (tmp_path / "machine.json").write_text("{}")
    result = CliRunner().invoke(app, ["topo", "--replay", str(tmp_path / "machine.json")])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is not a recording" in result.stderr


def _texts(svg):
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return root, [text.text or "" for text in root.iter(f"{SVG}text")]


def test_the_picture(show, tmp_path):
    svg = tmp_path / "topo.svg"
    assert show(READY, "--svg", str(svg))[0] == 0
    root, texts = _texts(svg.read_bytes())
    for name in ("GPU0  ca:00.0", "mlx5_0 (ens6f0)  b5:00.0", "mlx5_1 (ens6f1)  b5:00.1", "PCIe switch  b1:00.0"):
        assert texts.count(name) == 1
    assert texts[-4:] == ["GPU0", "X", "PIX", "PIX"]
    assert not {"image", "script", "use", "link"} & {one.tag.removeprefix(SVG) for one in root.iter()}
    assert "http" not in svg.read_text().replace("http://www.w3.org/2000/svg", "")


def test_boxes_of_the_picture_do_not_overlap():
    here = machine(EIGHT)
    root, texts = _texts(picture.draw(tree.build(here), topology.matrix(here)))
    for one in (*here.gpus, *here.nics):
        assert any(text.startswith(f"{one.name}  ") for text in texts)
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    boxes = [tuple(float(rect.get(k, "")) for k in ("x", "y", "width", "height")) for rect in root.iter(f"{SVG}rect")]
    for x, y, w, h in boxes:
        assert 0 <= x < x + w <= width
        assert 0 <= y < y + h <= height
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x", "")) <= width
        assert 0 <= float(text.get("y", "")) <= height
    for index, (x, y, w, h) in enumerate(boxes):
        assert not any(x < a + c and a < x + w and y < b + d and b < y + h for a, b, c, d in boxes[:index])


NODES = st.recursive(
    st.builds(Node, st.text(), st.sampled_from(sorted(picture.FILLS)), st.text(), st.tuples(st.text())),
    lambda below: st.builds(Node, st.text(), st.just("switch"), st.text(), below=st.tuples(below, below)),
    max_leaves=8,
)


@given(NODES, st.dictionaries(st.text(), st.just(""), max_size=3))
def test_any_words_make_a_picture(node, row):
    _texts(picture.draw([node], dict.fromkeys(row, row)))


def test_kinds_have_colours():
    kinds = {node.kind for host in (READY, EIGHT) for _, node in tree.rows(tree.build(machine(host), everything=True))}
    assert kinds <= set(picture.FILLS)


SYSFS = sorted(key for key in READY.recorded if key[0] in (Kind.FILE, Kind.FOLDER, Kind.LINK))
VALUES = {
    Kind.FILE: st.binary() | st.integers(-9, 9).map(lambda number: b"%d" % number),
    Kind.FOLDER: st.lists(st.text() | st.just("0000:b1:00.0")),
    Kind.LINK: st.lists(st.sampled_from(["pci0000:b0", "0000:b1:00.0", "0000:ca:00.0", "", "x"])).map("/".join),
}


@given(st.lists(st.sampled_from(SYSFS).flatmap(lambda key: st.builds(Reading, *map(st.just, key), VALUES[key[0]]))))
def test_any_machine_can_be_drawn(readings):
    here = machine(changed(READY, *readings))
    nodes, matrix = tree.build(here, everything=True), topology.matrix(here)
    assert all(len(line) <= tree.WIDTH or len(line.split()) <= 2 for line in tree.table(matrix))
    assert {node.kind for _, node in tree.rows(nodes)} <= set(picture.FILLS)
    _texts(picture.draw(nodes, matrix))
    assert [*checks_topology.distances.ask(here), *checks_topology.agrees.ask(here)]


@given(st.text())
def test_words_for_a_terminal(text):
    assert tree.plain(text).isprintable()


def _command(tmp_path):
    save(list(READY.recorded.values()), tmp_path / "machine.json")
    return [sys.executable, "-m", "gpunetio", "topo", "--replay", str(tmp_path / "machine.json")]


def test_colours_only_on_a_terminal(tmp_path):
    golden = (DATA / "ready_topo.txt").read_text()
    words = _command(tmp_path)
    piped = subprocess.run(words, capture_output=True, text=True, encoding="utf-8", timeout=60, check=True)
    assert (piped.stdout, piped.stderr) == (golden, "")
    reader, writer = new_terminal()
    with subprocess.Popen(words, stdout=writer, env=os.environ | {"TERM": "xterm"}) as process:
        os.close(writer)
        shown = b""
        try:
            while chunk := os.read(reader, 1 << 16):
                shown += chunk
        except OSError:
            pass  # Linux: the other end is closed
        assert process.wait(60) == 0
    os.close(reader)
    plain = re.sub(rb"\x1b\[[0-9;]*m", b"", shown)
    assert plain != shown
    assert plain.decode().replace("\r\n", "\n") == golden


def test_it_imports_little(tmp_path):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *_command(tmp_path)[1:]], capture_output=True, text=True, timeout=60,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "gpunetio.doctor.report.tree" in imported
    assert not {"numba", "llvmlite", "matplotlib", "rich", "gpunetio.gpu", "gpunetio.nic.host.engine"} & imported
