"""Recordings of machines: a replay is the machine, files that are none are refused, and identities can be masked."""

import gzip
import json
import os
import signal
import string
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doctor_rig import READY, answer, changed, command, file, folder, link, without
from gpunetio.doctor import LiveHost, ReplayHost, Trouble, Wanted, examine, load, record, save
from gpunetio.doctor.machine import live
from gpunetio.doctor.machine.host import Kind, Reading
from gpunetio.doctor.machine.redact import redact
from gpunetio.errors import InvalidValueError

WORDS = st.text(string.printable, min_size=1, max_size=12)
KEYS = st.lists(WORDS, min_size=1, max_size=3).map(tuple)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
VALUES = {
    Kind.FILE: st.binary(max_size=40) | WORDS.map(str.encode),
    Kind.COMMAND: st.binary(max_size=40),
    Kind.FOLDER: st.lists(WORDS, max_size=3),
    Kind.LINK: WORDS,
    Kind.QUESTION: JSON,
}
TROUBLES = st.sampled_from([trouble for trouble in Trouble if trouble])


@st.composite
def readings(draw):
    kind = draw(st.sampled_from(Kind))
    if draw(st.booleans()):
        return Reading(kind, draw(KEYS), draw(VALUES[kind]))
    value = draw(VALUES[kind]) if kind is Kind.COMMAND else None
    return Reading(kind, draw(KEYS), value, draw(TROUBLES), draw(WORDS))


@given(st.lists(readings(), max_size=6, unique_by=lambda one: (one.kind, one.key)))
def test_what_is_saved_is_loaded(tmp_path_factory, some):
    path = tmp_path_factory.getbasetemp() / "recording.json"
    save(some, path)
    host = load(path)
    assert [host.get(one.kind, *one.key) for one in some] == some


def test_a_replay_gives_the_same_report(tmp_path):
    path, live = tmp_path / "here.json", LiveHost()
    record(live, Wanted(), path)
    assert examine(load(path)) == examine(live)


def test_what_was_not_recorded():
    reading = ReplayHost({}).read("/etc/hostname")
    assert (reading.trouble, reading.text, reading.number) == (Trouble.UNRECORDED, "", None)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe", b'{"format": "other"}', b"[" * 100_000,
        b'{"format": "gpunetio-doctor 1", "files": {}}', b'{"format": "gpunetio-doctor 1", "file": []}',
        b'{"format": "gpunetio-doctor 1", "file": {"/x": 1}}', b'{"format": "gpunetio-doctor 1", "file": {"/x": {}}}',
        b'{"format": "gpunetio-doctor 1", "file": {"/x": {"hex": "0g"}}}',
        b'{"format": "gpunetio-doctor 1", "file": {"\'": ""}}',
        b'{"format": "gpunetio-doctor 1", "folder": {"/x": "name"}}',
        b'{"format": "gpunetio-doctor 1", "file": {"/x": {"trouble": "much", "error": ""}}}',
        b'{"format": "gpunetio-doctor 1", "question": {"user": 0}}',
    ],
    ids=lambda content: content[-30:].decode(errors="replace"),
)
def test_what_is_no_recording(tmp_path, content):
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(InvalidValueError, match=r"r\.json is not a recording of `gpunetio doctor --record`: \S"):
        load(path)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_recording_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(content)
    with pytest.raises(InvalidValueError):
        load(path)


# --- the machine that we are on --------------------------------------------------------------------------------------


def test_a_root_folder(tmp_path):
    (tmp_path / "sys" / "devices" / "a").mkdir(parents=True)
    (tmp_path / "sys" / "class").mkdir()
    (tmp_path / "sys" / "class" / "one").symlink_to("../devices/a")
    (tmp_path / "sys" / "devices" / "a" / "vendor").write_text("0x10de\n")
    host = LiveHost(str(tmp_path))
    assert host.names("/sys/class").names == ("one",)
    assert host.follow("/sys/class/one").text == "/sys/devices/a"
    assert host.read("/sys/class/one/vendor").number == 0x10DE
    assert host.read("/sys/class/two").trouble is Trouble.ABSENT
    assert host.names("/sys/class/one/vendor").trouble is Trouble.FAILED
    assert (host.run("true").trouble, host.ask("user").trouble) == (Trouble.UNRECORDED, Trouble.UNRECORDED)
    assert str(tmp_path) in host.run("true").error


@pytest.mark.parametrize(
    ("line", "trouble", "output", "error"),
    [
        (["echo", "a b"], Trouble.NONE, "a b", ""),
        (["no-such-command"], Trouble.ABSENT, "", "No such file or directory"),
        (["/etc"], Trouble.DENIED, "", "Permission denied"),
        (["sh", "-c", "echo out; echo bad >&2; exit 3"], Trouble.FAILED, "out", "exit status 3: bad"),
        (["sh", "-c", "exit 4"], Trouble.FAILED, "", "exit status 4"),
        (["cat"], Trouble.NONE, "", ""),
    ],
    ids=str,
)
def test_commands(line, trouble, output, error):
    reading = LiveHost().run(*line)
    assert (reading.trouble, reading.text, reading.error) == (trouble, output, error)


def test_what_a_command_leaves_running_is_not_waited_for():
    started = time.monotonic()
    reading = LiveHost().run("sh", "-c", "sleep 60 & echo $!")
    os.kill(int(reading.text), signal.SIGKILL)
    assert time.monotonic() - started < live.DEADLINE


def test_a_command_is_stopped_with_all_it_started(monkeypatch):
    monkeypatch.setattr(live, "DEADLINE", 3.0)
    reading = LiveHost().run("sh", "-c", "sleep 60 & echo $!; wait")
    assert (reading.trouble, reading.error) == (Trouble.TIMEOUT, "no answer within 3 s")
    for _ in range(100):  # the orphan is reaped by whoever adopts it
        state = Path(f"/proc/{reading.text}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("it still runs")


def test_commands_of_the_current_folder_are_not_run(tmp_path, monkeypatch):
    (tmp_path / "intruder").write_text("#!/bin/sh\necho in\n")
    (tmp_path / "intruder").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for path in ("", None):
        monkeypatch.setenv("PATH", path) if path is not None else monkeypatch.delenv("PATH")
        assert LiveHost().run("intruder").trouble is Trouble.ABSENT


def test_a_pipe_in_the_place_of_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in LiveHost().read(str(tmp_path / "pipe")).error


def test_a_command_that_hangs(monkeypatch):
    monkeypatch.setattr("gpunetio.doctor.machine.live.DEADLINE", 0.2)
    reading = LiveHost().run("sleep", "60")
    assert (reading.trouble, reading.error) == (Trouble.TIMEOUT, "no answer within 0.2 s")


def test_things_are_read_once(tmp_path):
    path = tmp_path / "value"
    path.write_text("1")
    host = LiveHost()
    assert host.read(str(path)).number == 1
    path.write_text("2")
    assert host.read(str(path)).number == 1


# --- identities ------------------------------------------------------------------------------------------------------

SECRETS = {
    "GPU UUID : GPU-3d4c1c8e-aaaa-4bcd-9e55-0123456789ab": "00000000-0000-0000-0000-000000000001",
    "pod_3d4c1c8e_aaaa_4bcd_9e55_0123456789ab": "pod_00000000-0000-0000-0000-000000000001",
    "/docker/" + 4 * "0123456789abcdef": "/docker/" + "1".zfill(64),
    "Serial Number : 1564720004631": "Serial Number : 0000000000001",
    "Serial Number                         : 1564720004631": "Serial Number                         : 0000000000001",
    "GPU PDI      : 0x1a2b3c4d5e6f7a8b": "GPU PDI      : 0x0000000000000001",
    "Processes\n    Name   : /opt/secret/train.py": "Processes\n    Name   : process 1",
    "link/ether 94:6d:ae:12:34:56 brd": "link/ether 02:00:00:00:00:01 brd",
    "946d:ae03:0012:3456": "0200:5eff:fe00:0001",
    "fe80:0000:0000:0000:966d:aeff:fe12:3456": "fe80:0000:0000:0000:0200:5eff:fe00:0001",
    "fe80::966d:aeff:fe12:3456": "fe80::200:5eff:fe00:1",
    "0000:0000:0000:0000:0000:ffff:0a0a:1401": "0000:0000:0000:0000:0000:ffff:c612:0001",
    "2a02:1234:5678:0001:966d:aeff:fe12:3456": "2001:0db8:0000:0000:0200:5eff:fe00:0001",
    "enx946dae123456": "enx020000000001",
    "10.1.2.3/24": "198.18.0.1/24",
    "/home/alice/lib:/home/bob": "/home/user1/lib:/home/user2",
    "node17 login": "host login",
    "root@node17": "root@host",
    "node17.rack.example.com:22": "host:22",
    "94-6d-ae-ff-fe-12-34-56": "02-00-00-ff-fe-00-00-01",
}
KEPT = [
    "0000:ca:00.0", "00000000:CA:00.0", "0000:0000:0000:0000:0000:0000:0000:0000", "127.0.0.1", "580.65.06",
    "22.39.1002", "0x15b3", "MT_0000000359", "NVIDIA A100 80GB PCIe", "N/A", "Serial Number : N/A", "node170", "::1",
    "MLNX_OFED_LINUX-5.8-1.0.1.1:", "0x00000f0000000000 0x00000f1fffffffff 0x000000000014220c", "Product Name : X",
]
NAMED = answer("system", value={"nodename": "node17.example.com"})


@pytest.mark.parametrize(("secret", "masked"), SECRETS.items())
def test_identities_are_masked(secret, masked):
    _, one, other = redact([NAMED, file("/a", secret), command("b", f"x {secret}\n y")])
    assert masked in one.text
    assert masked in other.text


@pytest.mark.parametrize("text", KEPT)
def test_what_identifies_nobody_is_kept(text):
    assert redact([NAMED, file("/a", text), folder("/b", text)])[1:] == [file("/a", text), folder("/b", text)]


def test_the_same_stays_the_same():
    """And others get others, of the same shape."""
    numbers = [1, 2, 1, *range(3, 1000)]
    for identity, last in (
        ("94:6d:ae:00:{0:02x}:{1:02x}", "02:00:00:00:03:e7"),
        ("94-6d-ae-ff-fe-00-{0:02x}-{1:02x}", "02-00-00-ff-fe-00-03-e7"),
        ("10.1.{0}.{1}", "198.18.3.231"),
        ("946d:ae00:0000:{0:02x}{1:02x}", "0200:5eff:fe00:03e7"),
        ("enx946dae00{0:02x}{1:02x}", "enx0200000003e7"),
    ):
        here = [file(f"/{i}", identity.format(*divmod(number, 256))) for i, number in enumerate(numbers)]
        texts = [one.text for one in redact(here)]
        assert texts[0] == texts[2]
        assert len(set(texts)) == len(numbers) - 1
        assert texts[-1] == last


def test_kernel_options():
    line = "BOOT_IMAGE=/vmlinuz root=UUID=x iommu=pt intel_iommu=on token=hunter2 quiet"
    (masked,) = redact([file("/proc/cmdline", line)])
    assert masked.text == "BOOT_IMAGE=… root=… iommu=pt intel_iommu=on token=… quiet"


def test_keys_are_masked_too():
    (masked,) = redact([link("/sys/class/net/enx946dae123456", "/sys/devices/x/enx946dae123456")])
    assert masked == link("/sys/class/net/enx020000000001", "/sys/devices/x/enx020000000001")


@pytest.mark.parametrize("name", ["nvidia", "sys", "mlx5_0", "x"])
def test_a_host_that_is_called_like_a_part_of_the_system(name):
    here = [answer("system", value={"nodename": name}), link("/sys/bus/pci/drivers/nvidia", "/sys/module/nvidia"),
            folder("/sys/class/infiniband", "mlx5_0"), file("/proc/modules", f"{name} 1 0"),
            file("/sys/class/infiniband/mlx5_0/fw_ver", "22.39.1002")]
    assert redact(here) == here


def test_host_names_stay_in_paths():
    """A replay would not find them again; paths that are asked for have none."""
    here = [NAMED, folder("/sys/node17", "node17"), link("/sys/x", "/sys/node17")]
    assert redact(here)[1:] == here[1:]


def test_files_of_which_a_part_is_kept():
    config = "CONFIG_DEFAULT_HOSTNAME=\"node17\"\nCONFIG_PCI_P2PDMA=y\n# CONFIG_DMA_SHARED_BUFFER is not set\n"
    status, boot, packed = redact([
        file("/proc/self/status", "Name:\tsecret\nPid:\t12\nCapEff:\t000001ffffffffff\n"),
        file("/boot/config-6.8.0", config), file("/proc/config.gz", gzip.compress(config.encode())),
    ])
    assert status.text == "CapEff:\t000001ffffffffff"
    assert boot.text == "CONFIG_PCI_P2PDMA=y\n# CONFIG_DMA_SHARED_BUFFER is not set"
    assert gzip.decompress(packed.value).decode() == boot.value.decode()


def test_owners():
    who = answer("permissions", "/dev/infiniband/uverbs0", value={"owner": "alice", "group": "rdma", "mode": "660"})
    assert redact([who])[0].value == {"owner": "someone", "group": "rdma", "mode": "660"}


def test_bytes_that_are_no_text_are_masked_too():
    (masked,) = redact([command("nvidia-smi -q", "Serial Number : 15647\n")])
    (other,) = redact([Reading(Kind.COMMAND, ("nvidia-smi", "-q"), b"\xff Serial Number : 15647\n")])
    assert other.value == b"\xff " + masked.value

@given(st.lists(readings(), max_size=4))
def test_masking_never_fails_and_is_done_once(some):
    once = redact(some)
    assert len(once) == len(some)
    assert [(one.kind, one.trouble) for one in once] == [(one.kind, one.trouble) for one in some]


def test_a_masked_recording_tells_the_same(tmp_path):
    host = changed(READY, NAMED, without(Kind.COMMAND, "nvidia-smi", "-q"))
    record(host, Wanted(), tmp_path / "r.json", masked=True)
    plain, masked = examine(host), examine(load(tmp_path / "r.json"))
    assert [(f.check.id, f.status, f.subject) for f in plain.findings] == [
        (f.check.id, f.status, f.subject) for f in masked.findings
    ]
    assert "node17" not in (tmp_path / "r.json").read_text()
    assert json.loads((tmp_path / "r.json").read_text())["format"] == "gpunetio-doctor 1"


def test_the_file_of_a_recording_is_text(tmp_path):
    save([file("/a", b"\x00\xff"), file("/b", "tab\t\u00e9\n")], tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_bytes().decode("ascii"))["file"] == {
        "/a": {"hex": "00ff"}, "/b": "tab\té\n",
    }
