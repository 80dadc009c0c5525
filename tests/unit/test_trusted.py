"""Who may change what a path leads to. The kernel is the judge: another user tries it."""

import errno
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gpunetio.doctor.machine.questions import verbs_library
from gpunetio.errors import NotPermittedError, NotSupportedError
from gpunetio.fabric.pcap import Pcap
from gpunetio.providers.mlx5.libraries import Library
from gpunetio.samples.descriptor_files import Exchange
from gpunetio.trusted import (
    check_trusted,
    load_library,
    make_trusted_folder,
    open_input,
    open_output,
    read_trusted,
    write_trusted,
)

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")

# As the other user: replace, remove, write or open up what is at each path. Prints the paths where that was possible.
ATTACK = """
import json, os, sys

os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))

def tried(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return False
    return True

def may_change(path):
    above = [path]
    while above[-1] != "/":
        above.append(os.path.dirname(above[-1]))
    for here in above:
        if tried(os.chmod, here, 0o777) or tried(os.rename, here, here + ".aside"):
            return True
    if os.path.isdir(path):
        return tried(os.mkdir, path + "/planted")
    return tried(lambda: os.close(os.open(path, os.O_WRONLY)))

print(json.dumps([path for path in sys.argv[2:] if may_change(path)]))
"""


@pytest.fixture
def room() -> Iterator[Path]:
    """A folder of this user, which others may enter: pytest's own ones keep them out."""
    with TemporaryDirectory(prefix="gpunetio-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def layout(room: Path, number: int, above: int, above_owner: int, mode: int, owner: int, folder: bool) -> Path:
    """Make a file or folder of a mode and an owner, below a folder of another mode and owner."""
    parent = room / str(number)
    parent.mkdir()
    path = parent / "it"
    path.mkdir() if folder else path.write_text("it")
    for each, its_mode, its_owner in ((path, mode, owner), (parent, above, above_owner)):
        os.chown(each, its_owner, its_owner)
        each.chmod(its_mode)
    return path


@as_root
def test_the_kernel_agrees(room):
    """A path is trusted if another user, who may do all that modes and owners allow, cannot change it."""
    paths = [
        layout(room, number, above, above_owner, mode, owner, folder)
        for number, (above, above_owner, mode, owner, folder) in enumerate(
            (above, above_owner, mode, owner, folder)
            for above in (0o755, 0o777, 0o1777, 0o775) for above_owner in (0, NOBODY)
            for mode in (0o755, 0o757, 0o700) for owner in (0, NOBODY) for folder in (False, True)
        )
    ]
    refused = []
    for path in paths:
        try:
            check_trusted(path)
        except NotPermittedError:
            refused.append(str(path))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ATTACK, str(NOBODY), *map(str, paths)], capture_output=True, text=True,
        timeout=60, check=True,
    )
    assert refused == json.loads(done.stdout)
    assert 0 < len(refused) < len(paths)


def test_links(room):
    """Of this user, on the way but not at the end; unless the end may be one."""
    (room / "real").mkdir()
    (room / "real/file").write_bytes(b"it")
    (room / "link").symlink_to("real")
    (room / "real/again").symlink_to("../link/file")
    assert read_trusted(room / "link/file") == b"it"
    for path in (room / "link", room / "real/again"):
        with pytest.raises(NotPermittedError, match="is a symbolic link"):
            check_trusted(path)
        check_trusted(path, follow=True)


@as_root
@pytest.mark.parametrize("who", ["link", "target"])
def test_links_of_another_user(room, who):
    """They lead where the other user wants, now or later."""
    (room / "real").mkdir()
    (room / "real/file").write_bytes(b"it")
    (room / "link").symlink_to("real")
    os.lchown(room / ("link" if who == "link" else "real"), NOBODY, NOBODY)
    for follow in (False, True):
        with pytest.raises(NotPermittedError, match=f"link/file is not trusted: {room}/.* belongs to nobody; choose a"):
            check_trusted(room / "link/file", follow=follow)


def test_links_in_a_circle(room):
    (room / "a").symlink_to("b")
    (room / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        check_trusted(room / "a/file")


def test_a_relative_path(room, monkeypatch):
    (room / "sub").mkdir()
    (room / "file").write_bytes(b"it")
    monkeypatch.chdir(room / "sub")
    assert read_trusted(Path("../sub/../file")) == b"it"


@pytest.mark.parametrize(("umask", "mode"), [(0, 0o644), (0o022, 0o644), (0o077, 0o600)])
def test_what_is_written_is_trusted(room, umask, mode):
    """Whatever the umask is, which may keep others from reading it."""
    before = os.umask(umask)
    try:
        make_trusted_folder(room / "one/two")
        write_trusted(room / "one/two/file", b"first")
        write_trusted(room / "one/two/file", b"second")
    finally:
        os.umask(before)
    assert read_trusted(room / "one/two/file") == b"second"
    assert [path.name for path in (room / "one/two").iterdir()] == ["file"]
    assert stat.S_IMODE((room / "one/two/file").stat().st_mode) == mode


def test_what_could_not_be_written_leaves_nothing(room, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (room / "file").write_bytes(b"before")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_trusted(room / "file", b"after")
    assert [(path.name, path.read_bytes()) for path in room.iterdir()] == [("file", b"before")]


def test_an_error_names_what_is_at_fault(room):
    (room / "sub").mkdir()
    (room / "sub").chmod(0o777)
    said = "can be written by others (mode 777); choose a folder of yours that only you may write"
    for path, what in ((room / "sub", "it"), (room / "sub/file", f"{room}/sub")):
        (room / "sub/file").touch()
        with pytest.raises(NotPermittedError) as raised:
            check_trusted(path)
        assert str(raised.value) == f"{path} is not trusted: {what} {said}"


def test_nothing_is_written_where_others_write(room):
    room.chmod(0o777)
    with pytest.raises(NotPermittedError, match=r"can be written by others \(mode 777\); choose a folder of yours"):
        write_trusted(room / "file", b"it")
    with pytest.raises(NotPermittedError, match=r"can be written by others"):
        make_trusted_folder(room / "sub")


def test_what_is_missing(room):
    with pytest.raises(FileNotFoundError):
        read_trusted(room / "file")


# --- output ----------------------------------------------------------------------------------------------------------


def test_output_may_go_to_a_link_of_this_user(room):
    (room / "link").symlink_to("file")
    os.close(open_output(room / "link"))
    assert (room / "file").exists()
    os.close(open_output("/dev/stdout"))


def test_output_keeps_what_is_there_until_it_is_written(room):
    (room / "file").write_text("before")
    os.close(open_output(room / "file"))
    assert (room / "file").read_text() == "before"


@as_root
@pytest.mark.parametrize("kind", ["link", "file"])
def test_output_does_not_go_where_another_user_wants(room, kind):
    mine, planted = room / "mine", room / "planted"
    mine.write_text("before")
    if kind == "link":
        planted.symlink_to(mine)
    else:
        planted.write_text("")
    os.lchown(planted, NOBODY, NOBODY)
    with pytest.raises(NotPermittedError, match=r"symbolic link of another user|belongs to nobody"):
        open_output(planted)
    assert mine.read_text() == "before"


def test_input_from_a_fifo_does_not_wait(room):
    os.mkfifo(room / "fifo")
    os.close(open_input(room / "fifo"))


def test_a_socket_is_no_file(room):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(room / "s"))
        with pytest.raises(OSError, match="No such device or address"):
            open_output(room / "s")


# --- libraries that the environment names ----------------------------------------------------------------------------


@as_root
@pytest.mark.parametrize("use", [
    lambda path: load_library(path),
    lambda path: Library(path, "GPUNETIO_LIBIBVERBS", "libibverbs1", {}),
    lambda path: verbs_library("libibverbs"),
])
def test_a_library_of_another_user_is_not_loaded(room, monkeypatch, use):
    """A link of this user's is fine, as libraries have them; what it leads to must not be theirs."""
    real, link = room / "libz.so.1.2", room / "libz.so.1"
    real.write_bytes(b"no library")
    link.symlink_to(real.name)
    monkeypatch.setenv("GPUNETIO_LIBIBVERBS", str(link))
    with pytest.raises((OSError, NotSupportedError), match=r"file too short|invalid ELF header"):
        use(str(link))
    os.chown(real, NOBODY, NOBODY)
    with pytest.raises(NotPermittedError, match=r"libz\.so\.1\.2 belongs to nobody; copy the library to a folder"):
        use(str(link))


@as_root
def test_a_description_of_another_user_is_not_read(room):
    """The samples exchange theirs in /tmp: a connection would lead to the other user's process."""
    theirs = room / "theirs"
    theirs.write_bytes(b"gpunetio-rdma ")
    os.chown(theirs, NOBODY, NOBODY)
    exchange = Exchange(room / "mine", theirs, 1, "peer", lambda: False)
    with pytest.raises(NotPermittedError, match="theirs belongs to nobody"):
        exchange.read(theirs)


@as_root
def test_a_capture_does_not_go_where_another_user_wants(room):
    (room / "mine").write_bytes(b"before")
    (room / "planted.pcap").symlink_to("mine")
    os.lchown(room / "planted.pcap", NOBODY, NOBODY)
    with pytest.raises(NotPermittedError, match=r"planted\.pcap is a symbolic link of another user"):
        Pcap(room / "planted.pcap", infiniband=False)
    assert (room / "mine").read_bytes() == b"before"
