"""Files and folders whose contents this process executes or trusts: their owner and mode are checked at each use.

A path is trusted if only this user and root can change what it leads to. Each folder of the path belongs to one of the
two, and only they may write to it. In a folder with the sticky bit, such as /tmp, other users may create files, but
cannot rename or delete those of this user (unlink(2), EPERM). The last component is no symbolic link. Once a path has
passed the check, only its owner and root can replace it, so it may be opened by its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import grp
import os
import pwd
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from .errors import NotPermittedError

_ROOT = 0
_MOST_LINKS = 40  # path_resolution(7): ELOOP
CURE = "choose a folder of yours that only you may write"


def check_trusted(path: Path, owner: int | None = None, cure: str = CURE, follow: bool = False) -> None:
    """Raise NotPermittedError unless a file or folder is trusted; OSError if it does not exist.

    `owner` is another user who is trusted with this path. `cure` ends the message. With `follow`, the last component
    may be a symbolic link that belongs to a trusted user and leads to a trusted path.
    """
    owners = {_ROOT, os.geteuid()} | ({owner} if owner is not None else set())
    # The owner of the root of the file system may replace all of it. In a user namespace of an ordinary user, this is
    # root, shown as a number without meaning there (user_namespaces(7), overflow user ID).
    above = owners | {os.stat("/").st_uid}
    for here, found, last in _components(path):
        why = _why_not(found, owners if last else above, last)
        if not why and last and not follow and stat.S_ISLNK(found.st_mode):
            why = "is a symbolic link"
        if why:
            what = "it" if here == os.fspath(path) else here
            raise NotPermittedError(f"{path} is not trusted: {what} {why}; {cure}")


def _components(path: Path) -> Iterator[tuple[str, os.stat_result, bool]]:
    """Yield each component of a path, and of links in it, with its status and whether it is the last."""
    at, links = "/", 0
    todo = [part for part in reversed(os.path.join(os.getcwd(), path).split("/")) if part not in ("", ".")]
    yield at, os.lstat(at), not todo
    while todo:
        part = todo.pop()
        if part == "..":
            at = os.path.dirname(at)
            continue
        here = os.path.join(at, part)
        found = os.lstat(here)
        yield here, found, not todo
        if not stat.S_ISLNK(found.st_mode):
            at = here
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
        target = os.readlink(here)
        at = "/" if target.startswith("/") else at
        todo += [part for part in reversed(target.split("/")) if part not in ("", ".")]


def _why_not(found: os.stat_result, owners: set[int], last: bool) -> str:
    """Return why a component is not trusted; "" if it is."""
    if found.st_uid not in owners:
        return f"belongs to {_name(found.st_uid)}"
    if stat.S_ISLNK(found.st_mode):  # its mode means nothing
        return ""
    others = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid))
    if others and (last or not found.st_mode & stat.S_ISVTX):
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


@functools.cache
def _is_private(gid: int) -> bool:
    """Return whether a group is root's, or has this user's name and no other member, as on systems with umask 002."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return gid == _ROOT
    return gid == _ROOT or (group.gr_name == user and set(group.gr_mem) <= {user})


def load_library(library: str, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    """Load a shared library, by its path or by a name that the loader looks up in the system's folders.

    NotPermittedError if another user could put code there; other errors are those of `ctypes.CDLL`.
    """
    if "/" in library and os.path.exists(library):
        check_trusted(Path(library), cure="copy the library to a folder that only you may write", follow=True)
    return ctypes.CDLL(library, mode)


def make_trusted_folder(path: Path, owner: int | None = None, cure: str = CURE) -> None:
    """Create a folder, and its parents, that only this user may write to. Check it, as `check_trusted` does."""
    missing = [path, *path.parents]
    for folder in reversed(missing[: next((n for n, each in enumerate(missing) if os.path.lexists(each)), None)]):
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.mkdir(folder, 0o755)
    check_trusted(path, owner, cure)


def read_trusted(path: Path, owner: int | None = None, cure: str = CURE) -> bytes:
    """Return the contents of a trusted file. Errors are those of `check_trusted`."""
    check_trusted(path, owner, cure)
    with open(path, "rb", opener=_without_links) as file:
        return file.read()


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o644)  # the umask may remove more permissions


def write_trusted(path: Path, contents: bytes, owner: int | None = None) -> None:
    """Write a file into a trusted folder. It appears with all of its contents, and replaces an earlier one."""
    check_trusted(path.parent, owner)
    part = path.with_name(f".{secrets.token_hex(8)}.new")
    with open(part, "xb", opener=_for_this_user) as file:  # x: never an existing file, nor a link
        try:
            file.write(contents)
            file.flush()
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def open_output(path: str | os.PathLike[str]) -> int:
    """Open a file for output, and create it if it is missing. Return the descriptor. Old contents stay.

    NotPermittedError if another user has put a file or a symbolic link there: they could redirect the output, or read
    it. The folder may belong to any user.
    """
    return _open_own(path, os.O_WRONLY | os.O_CREAT)


def open_input(path: str | os.PathLike[str]) -> int:
    """Open a file for reading, and return the descriptor. The folder may belong to any user.

    NotPermittedError if another user has put a file or a symbolic link there. A FIFO is opened without waiting.
    """
    return _open_own(path, os.O_RDONLY | os.O_NONBLOCK)


def _open_own(path: str | os.PathLike[str], flags: int) -> int:
    owners = {_ROOT, os.geteuid()}
    links = os.O_NOFOLLOW
    with contextlib.suppress(FileNotFoundError):
        if os.lstat(path).st_uid in owners:  # links of this user or of root may be followed; /dev/stdout is one
            links = 0
    try:
        fd = os.open(path, flags | links | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise NotPermittedError(f"{path} is a symbolic link of another user; {CURE}") from None
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_uid not in owners:
        os.close(fd)
        raise NotPermittedError(f"{path} belongs to {_name(found.st_uid)}; {CURE}")
    return fd
