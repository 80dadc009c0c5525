"""Pages of the HTTP server: files of a folder, or built-in pages, in memory from which the NIC sends them."""

from __future__ import annotations

import logging
import mimetypes
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

import numpy as np

from .. import device as dev
from ..jit.compile import device_function
from ..errors import InvalidValueError
from ..eth.place import PacketBuffer
from ..formats.layout import I64, U32, Record
from ..gpu import Gpu, GpuMemory
from ..jit.ops import ld_fixed32, ld_fixed64
from ..verbs import PD
from .http_request import path_byte

KEEP_ALIVE_SECONDS = 5
_BEHIND_BOTH_HEADS = 16384  # bytes: a body up to this size follows both heads, so that one packet can have both
_LARGEST_FOLDER = 1 << 30  # bytes
_ALIGNMENT = 64
_INDEX, _NOT_FOUND = b"/index.html", b"/404.html"
_UNKNOWN_TYPE = "application/octet-stream"
_COMPRESSED_TYPES = {"gzip": "application/gzip", "bzip2": "application/x-bzip2", "xz": "application/x-xz"}
_ADDRESSES = "keep_head", "keep_body", "close_head", "close_body"
_MASK32 = (1 << 32) - 1
_FNV_BASIS, _FNV_PRIME = 0x811C9DC5, 0x01000193


class PageRow(Record, size=64):
    """A page: its path, decoded, and a response each for connections that stay open and that close.

    Both bodies have `body_bytes`. A row without a path is free.
    """

    path: I64 = 0
    path_bytes: U32 = 8
    status: U32 = 12
    keep_head: I64 = 16
    keep_body: I64 = 24
    close_head: I64 = 32
    close_body: I64 = 40
    keep_bytes: U32 = 48
    close_bytes: U32 = 52
    body_bytes: I64 = 56


PAGE = PageRow.entry


class PageTable(Record, size=64):
    """The rows of pages: first those of STATUSES, then `mask` + 1 rows.

    A page is at the hash of its path, or in a row after that.
    """

    rows: I64 = 0
    mask: I64 = 8


PAGES = PageTable.entry
STATUSES = {
    404: "Not Found", 400: "Bad Request", 405: "Method Not Allowed", 431: "Request Header Fields Too Large",
}
NOT_FOUND_ROW, BAD_REQUEST_ROW, NOT_ALLOWED_ROW, TOO_LARGE_ROW = 0, 1, 2, 3
_FIRST = len(STATUSES)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Page:
    """A body, its content type, and the time of its last change, in seconds since 1970, if known."""

    body: bytes
    content_type: str = "text/html; charset=utf-8"
    modified: float | None = None


def _html(title: str, text: str) -> Page:
    return Page(
        f"<!DOCTYPE html>\n<html>\n<head><title>{title}</title></head>\n<body><h1>{title}</h1>\n<p>{text}</p></body>\n"
        "</html>\n".encode()
    )


_NONE = _html("GPUNetIO 404 page", "There is no such page.")
BUILT_IN = {
    _INDEX: _html("GPUNetIO index page", 'A kernel sends this page. <a href="contacts.html">Contacts</a>.'),
    b"/contacts.html": _html("GPUNetIO Contact page", 'Back to the <a href="index.html">index</a>.'),
    _NOT_FOUND: _NONE,
}


def read_folder(folder: str | Path) -> dict[bytes, Page]:
    """Return the pages of a folder, by their paths in it: `/` and the bytes of each name, whatever their encoding.

    Files whose names begin with a dot are left out, as are links to folders and links that lead out of the folder.
    InvalidValueError if it is not a folder, or larger than a gigabyte.
    """
    root = Path(folder).resolve()
    if not root.is_dir():
        raise InvalidValueError(f"pages = {str(folder)!r} is no folder")
    pages, left = {}, _LARGEST_FOLDER
    for file, path in _files(root, root):
        status = file.stat()
        left -= status.st_size
        if left < 0:
            raise InvalidValueError(
                f"pages = {str(folder)!r} has more than {_LARGEST_FOLDER} bytes, which would all stay in memory"
            )
        pages[path] = Page(file.read_bytes(), _content_type(file), status.st_mtime)
    return pages


def _content_type(file: Path) -> str:
    """Return the content type of a file by its name. For a compressed file, that is the type of the compression."""
    kind, compression = mimetypes.guess_type(file)
    if compression:
        return _COMPRESSED_TYPES.get(compression, _UNKNOWN_TYPE)
    kind = kind or _UNKNOWN_TYPE
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind


def _files(root: Path, folder: Path, path: bytes = b"") -> Iterator[tuple[Path, bytes]]:
    """Yield the files below a folder, and their paths."""
    for file in sorted(folder.iterdir()):
        here = path + b"/" + os.fsencode(file.name)
        if file.name.startswith("."):
            continue
        if file.is_symlink() and not (file.is_file() and file.resolve().is_relative_to(root)):
            _log.warning("%s is not served: it is a link to a folder, or out of %s", file, root)
        elif file.is_dir():
            yield from _files(root, file, here)
        elif file.is_file():
            yield file, here


def path_hash(path: bytes) -> int:
    """Return the hash of a decoded path: FNV-1a. Kernels compute the same."""
    found = _FNV_BASIS
    for byte in path:
        found = (found ^ byte) * _FNV_PRIME & _MASK32
    return found


def _head(status: int, page: Page, keep: bool) -> bytes:
    reason = STATUSES.get(status, "OK")
    lines = [f"HTTP/1.1 {status} {reason}", "Server: GPUNetIO", f"Content-Type: {page.content_type}"]
    lines.append(f"Content-Length: {len(page.body)}")
    if page.modified is not None:
        lines.append(f"Last-Modified: {formatdate(page.modified, usegmt=True)}")
    if status == 405:
        lines.append("Allow: GET, HEAD")
    lines += ["Connection: keep-alive", f"Keep-Alive: timeout={KEEP_ALIVE_SECONDS}"] if keep else ["Connection: close"]
    return "\r\n".join((*lines, "", "")).encode()


class _Image:
    """A block of bytes that is built up and then stored in memory at once."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.nbytes = 0

    def add(self, *parts: bytes) -> int:
        """Append parts, one after another. Return the offset of the first."""
        padding = -self.nbytes % _ALIGNMENT
        self._parts += (bytes(padding), *parts)
        at = self.nbytes + padding
        self.nbytes += padding + sum(map(len, parts))
        return at

    def __bytes__(self) -> bytes:
        return b"".join(self._parts)


def _responses(image: _Image, status: int, page: Page) -> dict[str, int]:
    """Add both responses of a page to the image. Return the fields of its row."""
    keep, close, body = _head(status, page, True), _head(status, page, False), page.body
    keep_head = image.add(keep, body)
    keep_body = keep_head + len(keep)
    close_head = image.add(close, *([body] if len(body) <= _BEHIND_BOTH_HEADS else []))
    close_body = close_head + len(close) if len(body) <= _BEHIND_BOTH_HEADS else keep_body
    return {
        "status": status, "keep_head": keep_head, "keep_body": keep_body, "keep_bytes": len(keep),
        "close_head": close_head, "close_body": close_body, "close_bytes": len(close), "body_bytes": len(body),
    }


class Pages:
    """Pages in memory of the NIC, and a table in which kernels find them: `device_address` is that of a PageTable.

    `pages` are by path, as `read_folder` returns them. "/" is index.html; 404.html is the answer to requests for
    unknown paths. `undo` frees everything.
    """

    lkey: int
    nbytes: int

    def __init__(self, gpu: Gpu, pd: PD, pages: dict[bytes, Page], undo: ExitStack):
        by_path = dict(pages)
        if _INDEX in pages:
            by_path[b"/"] = pages[_INDEX]
        by_status = {
            status: pages.get(_NOT_FOUND, _NONE) if status == 404 else _html(f"{status} {reason}", f"{reason}.")
            for status, reason in STATUSES.items()
        }
        image = _Image()
        errors = [_responses(image, status, page) for status, page in by_status.items()]
        found = {path: _responses(image, 200, page) for path, page in by_path.items()}
        buffer = PacketBuffer(gpu, pd, image.nbytes, None, 0, None, undo)
        assert buffer.memory
        buffer.memory.write(bytes(image))
        self.lkey, self.nbytes = buffer.region.lkey, image.nbytes
        self._memory = self._table(gpu, errors, found, buffer.address, undo)

    def _table(
        self, gpu: Gpu, errors: list[dict[str, int]], found: dict[bytes, dict[str, int]], address: int, undo: ExitStack
    ) -> GpuMemory:
        """Return the memory of PageTable, rows and paths. The responses are at `address`."""
        size = 1 << (2 * len(found)).bit_length()
        rows, paths = np.zeros(len(errors) + size, PAGE.dtype), b"".join(found)
        memory = undo.enter_context(gpu.alloc(PAGES.size + rows.nbytes + max(len(paths), 1)))
        first = memory.device_address + PAGES.size
        at = first + rows.nbytes
        places = dict(enumerate(errors))
        for path, fields in found.items():
            place = path_hash(path) & size - 1
            while len(errors) + place in places:
                place = place + 1 & size - 1
            places[len(errors) + place] = fields | {"path": at, "path_bytes": len(path)}
            at += len(path)
        for place, fields in places.items():
            for name, value in fields.items():
                rows[name][place] = value + address if name in _ADDRESSES else value
        memory.write(PAGES.pack(rows=first, mask=size - 1))
        memory.write(rows.view(np.uint8), PAGES.size)
        if paths:
            memory.write(paths, PAGES.size + rows.nbytes)
        return memory

    @property
    def device_address(self) -> int:
        """Return the address of the PageTable for kernels."""
        return self._memory.device_address


# --- for kernels -----------------------------------------------------------------------------------------------------


@device_function
def page_of_status(pages: PageTable, row: int) -> PageRow:
    """Return the page in one of the first rows: NOT_FOUND_ROW …"""
    return PageRow(ld_fixed64(pages + PAGES.rows) + row * PAGE.size)


@device_function
def _is_path(there: int, length: int, path: int, end: int) -> bool:
    """Return whether a percent-encoded path of `length` decoded bytes equals the path at `there`."""
    for i in range(length):
        byte, width = path_byte(path, end)
        if byte != dev.ld8(there + i):
            return False
        path += width
    return True


@device_function
def find_page(pages: PageTable, path: int, nbytes: int) -> PageRow:
    """Return the page with a percent-encoded path, or that of NOT_FOUND_ROW.

    A decoded slash counts as a slash: this looks a path up, and opens no file.
    """
    place = _FNV_BASIS
    length = 0
    at = path
    while at < path + nbytes:
        byte, width = path_byte(at, path + nbytes)
        place = (place ^ byte) * _FNV_PRIME & _MASK32
        length += 1
        at += width
    mask = ld_fixed64(pages + PAGES.mask)
    while True:
        row = page_of_status(pages, _FIRST + (place & mask))
        there = ld_fixed64(row + PAGE.path)
        if there == 0:
            return page_of_status(pages, NOT_FOUND_ROW)
        if ld_fixed32(row + PAGE.path_bytes) == length and _is_path(there, length, path, path + nbytes):
            return row
        place += 1
