"""What tells a program's NICs how they are connected: it is read as data, and only if nobody else may write it."""

import json
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio.enums import LinkLayer
from gpunetio.errors import InUseError, InvalidValueError, NotPermittedError
from gpunetio.fabric.faults import Faults
from gpunetio.nic.engine.port import PortConfig
from gpunetio.uverbs import environment, ports

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")

CONFIGS = st.builds(
    PortConfig, addresses=st.lists(st.sampled_from(["127.0.0.9", "fd00::1"]), max_size=2, unique=True),
    wire=st.sampled_from(["auto", "udp", "tap:x"]), mtu=st.sampled_from([0, 9000]),
    faults=st.none() | st.builds(Faults, loss=st.floats(0, 1), seed=st.integers(0, 1 << 70)),
    capture=st.none() | st.just("a \u00e4 file") | st.just(Path("/a/folder")), workers=st.integers(0, 16),
    promiscuous=st.booleans(), link_layer=st.just(LinkLayer.ETHERNET),
)


@given(st.lists(st.tuples(st.text(), CONFIGS), max_size=3))
def test_what_is_written_is_read(tmp_path_factory, given_ports):
    file = tmp_path_factory.mktemp("folder") / "ports"
    ports.write(file, given_ports)
    found = ports.read(file)
    assert [name for name, _ in found] == [name for name, _ in given_ports]
    for (_, port), (_, before) in zip(found, given_ports, strict=True):
        told = "" if before.capture is None else str(before.capture)
        assert port.capture == (told or None)
        assert port.faults == before.faults
        assert {**vars(port), "capture": ""} == {**vars(before), "capture": ""}


def test_infiniband(tmp_path):
    ports.write(tmp_path / "ports", [("soft0", PortConfig(link_layer=LinkLayer.INFINIBAND, lid=7))])
    ((_, port),) = ports.read(tmp_path / "ports")
    assert (port.link_layer, port.lid) == (LinkLayer.INFINIBAND, 7)


class Planted:
    """An object whose pickle makes a file."""

    def __init__(self, made: Path):
        self._made = made

    def __reduce__(self):
        return Path.touch, (self._made,)


@pytest.mark.parametrize("contents", [
    b"", b"{}x", b"[1]", b"[{}]", b'[{"name": "soft0", "port": {"mtu": 1}}]', b"[" * 100_000, b"\xff",
    json.dumps([{"name": "soft0", "port": {"faults": {"loss": "much"}, "link_layer": 1}}]).encode(),
    json.dumps([{"name": "soft0", "port": {"faults": None, "link_layer": 99}}]).encode(),
    json.dumps([{"name": "soft0", "port": {"faults": None, "link_layer": 1, "unknown": 1}}]).encode(),
])
def test_any_other_file_is_refused(tmp_path, contents):
    (tmp_path / "ports").write_bytes(contents)
    with pytest.raises(InvalidValueError):
        ports.read(tmp_path / "ports")


def test_a_pickle_is_not_executed(tmp_path):
    (tmp_path / "ports").write_bytes(pickle.dumps(Planted(tmp_path / "made")))
    with pytest.raises(InvalidValueError, match=r"ports does not describe the ports of software NICs .*: make"):
        ports.read(tmp_path / "ports")
    assert not (tmp_path / "made").exists()


@as_root
@pytest.mark.parametrize("change", [
    lambda file: os.chown(file, 65534, 65534), lambda file: os.chown(file.parent, 65534, 65534),
    lambda file: file.chmod(0o666), lambda file: file.parent.chmod(0o777),
    lambda file: file.symlink_to(file.rename(file.with_name("other"))),
])
def test_it_is_checked_at_each_use(tmp_path, monkeypatch, change):
    """Not only when it was made."""
    file = tmp_path / "nics" / environment.PORTS
    file.parent.mkdir()
    ports.write(file, [("soft0", PortConfig())])
    monkeypatch.setenv(environment.FOLDER, str(file.parent))
    assert environment.ports_of_this_program() == [("soft0", PortConfig())]
    change(file)
    with pytest.raises(NotPermittedError, match=r"ports is not trusted"):
        environment.ports_of_this_program()


# --- the folder of a drop-in -----------------------------------------------------------------------------------------


@pytest.fixture
def prepare(monkeypatch):
    """`prepare`, without the library that a C compiler makes."""
    monkeypatch.setattr(environment, "library", lambda: Path("/nowhere.so"))
    monkeypatch.setattr(environment, "_need_shared_library", lambda: None)
    return lambda folder: environment.prepare(folder, [("soft0", PortConfig())])


def test_a_folder_is_made(tmp_path, prepare):
    prepare(tmp_path / "one/two")
    assert ports.read(tmp_path / "one/two" / environment.PORTS) == [("soft0", PortConfig())]


def test_a_folder_that_others_write_is_refused(tmp_path, prepare):
    tmp_path.chmod(0o777)
    with pytest.raises(NotPermittedError, match=r"can be written by others \(mode 777\); choose a folder of yours"):
        prepare(tmp_path)


def test_a_folder_that_is_not_empty_is_refused(tmp_path, prepare):
    (tmp_path / "file").touch()
    with pytest.raises(InUseError, match="is not empty"):
        prepare(tmp_path)


@as_root
def test_a_folder_of_another_user_is_refused(tmp_path, prepare):
    """Its owner could replace what is in it. So could the owner of a folder above it."""
    folder = tmp_path / "nics"
    folder.mkdir()
    for theirs in (folder, tmp_path):
        os.chown(theirs, 65534, 65534)
        with pytest.raises(NotPermittedError, match=r"nics is not trusted.* belongs to nobody; choose a"):
            prepare(folder)
        os.chown(theirs, 0, 0)
    assert not any(folder.iterdir())


def test_a_link_to_a_folder_is_refused(tmp_path, prepare):
    (tmp_path / "real").mkdir()
    (tmp_path / "nics").symlink_to("real")
    with pytest.raises(NotPermittedError, match="is a symbolic link"):
        prepare(tmp_path / "nics")
