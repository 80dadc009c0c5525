"""Pages of the HTTP server: what a folder gives, the responses in memory, and how kernels find them."""

import ctypes
import os
import re
import tempfile
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpunetio as gn
from gpunetio.errors import InvalidValueError
from gpunetio.packet_processing.http_request import FOUND, parse_request
from gpunetio.packet_processing.pages import (
    BUILT_IN,
    NOT_ALLOWED_ROW,
    NOT_FOUND_ROW,
    PAGE,
    Page,
    Pages,
    find_page,
    page_of_status,
    read_folder,
)


@pytest.fixture(scope="module")
def put():
    """Return a function that puts pages into memory, until an ExitStack ends."""
    with gn.open("soft0") as ctx, gn.Gpu("host") as gpu:
        pd = ctx.create_pd()
        yield lambda pages, undo: Pages(gpu, pd, pages, undo)


@pytest.fixture
def placed(put):
    """Return a function that puts pages into memory, for a test."""
    with ExitStack() as undo:
        yield lambda pages: put(pages, undo)


def row_at(address: int):
    return PAGE.at(ctypes.string_at(address, PAGE.size))


def responses(row):
    """Head and body of both responses of a page."""
    return [
        (ctypes.string_at(int(row[f"{way}_head"]), int(row[f"{way}_bytes"])),
         ctypes.string_at(int(row[f"{way}_body"]), int(row["body_bytes"])))
        for way in ("keep", "close")
    ]


def found(pages: Pages, path: bytes):
    memory = ctypes.create_string_buffer(path + b"41")  # what follows is not part of the path
    return row_at(find_page(pages.device_address, ctypes.addressof(memory), len(path)))


def body_of(pages: Pages, target: bytes) -> bytes | None:
    """Return the body that a request for this target gets, or None if there is no such page."""
    request = b"GET %s HTTP/1.0\n\n" % target
    memory = ctypes.create_string_buffer(request)
    what, path, length, _ = parse_request(ctypes.addressof(memory), len(request))
    assert what == FOUND
    row = row_at(find_page(pages.device_address, path, length))
    return responses(row)[0][1] if row["status"] == 200 else None


def test_the_built_in_pages_have_the_titles_of_the_original(placed):
    pages = placed(BUILT_IN)
    for path, title in ((b"/index.html", b"GPUNetIO index page"), (b"/contacts.html", b"GPUNetIO Contact page")):
        row = found(pages, path)
        assert row["status"] == 200
        assert b"<title>" + title + b"</title>" in responses(row)[0][1]
    assert responses(found(pages, b"/")) == responses(found(pages, b"/index.html"))
    missing = found(pages, b"/nothing")
    assert missing["status"] == 404
    assert b"<title>GPUNetIO 404 page</title>" in responses(missing)[1][1]


@pytest.mark.parametrize("nbytes", [0, 1, 16384, 16385, 100_000])
def test_both_responses_of_a_page(placed, nbytes):
    body = bytes(i % 251 for i in range(nbytes))
    row = found(placed({b"/a.bin": Page(body, "application/octet-stream", 0.0)}), b"/a.bin")
    head = (
        b"HTTP/1.1 200 OK\r\nServer: GPUNetIO\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n"
        b"Last-Modified: Thu, 01 Jan 1970 00:00:00 GMT\r\n" % nbytes
    )
    assert responses(row) == [
        (head + b"Connection: keep-alive\r\nKeep-Alive: timeout=5\r\n\r\n", body),
        (head + b"Connection: close\r\n\r\n", body),
    ]


def test_paths_are_exact(placed):
    pages = placed({b"/index.html": Page(b"i"), b"/a/index.html": Page(b"a"), b"/index.htm": Page(b"h")})
    paths = b"/", b"/index.html", b"/index.htm", b"/a/index.html"
    bodies = {path: responses(found(pages, path))[0][1] for path in paths}
    assert bodies == {b"/": b"i", b"/index.html": b"i", b"/index.htm": b"h", b"/a/index.html": b"a"}
    for path in (b"/index.", b"/Index.html", b"/a/", b"/a", b"index.html", b"/index.html/", b"//index.html"):
        assert found(pages, path)["status"] == 404


def test_a_thousand_pages_are_all_found(placed):
    pages = placed({b"/%d" % i: Page(b"%d" % i) for i in range(1000)})
    assert [responses(found(pages, b"/%d" % i))[0][1] for i in range(1000)] == [b"%d" % i for i in range(1000)]
    assert found(pages, b"/1000")["status"] == 404


def test_a_method_that_is_not_allowed_names_those_that_are(placed):
    pages = placed({b"/404.html": Page(b"mine")})
    row = row_at(page_of_status(pages.device_address, NOT_ALLOWED_ROW))
    assert row["status"] == 405
    assert b"\r\nAllow: GET, HEAD\r\n" in responses(row)[1][0]
    assert responses(row_at(page_of_status(pages.device_address, NOT_FOUND_ROW)))[0][1] == b"mine"


def test_a_folder(tmp_path):
    root = tmp_path / "site"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("s")
    (root / "index.html").write_text("i")
    (root / "sub" / "a b.css").write_text("c")
    (root / ".hidden").write_text("h")
    (root / "inside").symlink_to(root / "index.html")
    (root / "outside").symlink_to(tmp_path / "secret")
    (root / "loop").symlink_to(root)
    pages = read_folder(root)
    assert {path: (page.body, page.content_type) for path, page in pages.items()} == {
        b"/index.html": (b"i", "text/html; charset=utf-8"),
        b"/sub/a b.css": (b"c", "text/css; charset=utf-8"),
        b"/inside": (b"i", "application/octet-stream"),
    }
    with pytest.raises(InvalidValueError, match="is no folder"):
        read_folder(root / "index.html")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("x.tar", "application/x-tar"), ("x.tar.gz", "application/gzip"), ("x.tgz", "application/gzip"),
        ("x.html.gz", "application/gzip"), ("x.tar.bz2", "application/x-bzip2"), ("x.txt.xz", "application/x-xz"),
        ("x.css.br", "application/octet-stream"), ("x.Z", "application/octet-stream"), ("data:,x.png", "image/png"),
    ],
)
def test_the_type_of_a_file(tmp_path, name, expected):
    """Files are not decompressed, so a compressed file has the type of its compression."""
    (tmp_path / name).touch()
    assert [page.content_type for page in read_folder(tmp_path).values()] == [expected]


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        (b"a+b.html", ["/a+b.html", "/a%2Bb.html", "/a%2bb.html?x=y", "http://h/a+b.html", "/%61+b.%68tml"]),
        (b"photo (1).jpg", ["/photo%20(1).jpg", "/photo%20%281%29.jpg"]),
        (b"x,y;z@w!.txt", ["/x,y;z@w!.txt", "/x%2Cy%3Bz%40w%21.txt"]),
        ("umläut.html".encode(), ["/uml%c3%a4ut.html", "/uml%C3%A4ut.html", "/uml%c3%A4ut.html"]),
        (b"tilde~x.css", ["/tilde~x.css", "/tilde%7Ex.css", "/tilde%7ex.css"]),
        (b"100%.txt", ["/100%25.txt"]),
        (b"%41?#.txt", ["/%2541%3f%23.txt", "/%2541%3F#.txt"]),
        (b"latin\xe4\xff.txt", ["/latin%E4%ff.txt"]),
        (b"line\nend", ["/line%0Aend"]),
    ],
)
def test_every_spelling_of_a_path_finds_the_file(placed, tmp_path, name, targets):
    (tmp_path / os.fsdecode(name)).write_bytes(name)
    pages = placed(read_folder(tmp_path))
    assert [body_of(pages, target.encode()) for target in targets] == [name] * len(targets)


def test_an_escape_is_decoded_once_and_only_looked_up(placed, tmp_path):
    """A decoded slash is a slash. It leads to the same pages, and never out of the folder."""
    root = tmp_path / "site"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"s")
    (root / "sub" / "A").write_bytes(b"a")
    pages = placed(read_folder(root))
    assert body_of(pages, b"/sub%2FA") == body_of(pages, b"/sub%2f%41") == b"a"
    for target in (b"/sub%252FA", b"/sub/%2541", b"/sub/A%00", b"/%2e%2e/secret", b"/..%2Fsecret", b"/%2Fsub/A"):
        assert body_of(pages, target) is None


@pytest.mark.parametrize("escape", [b"%", b"%4", b"%zz", b"%4g", b"%g4", b"%%41", b"%+4", b"%:@", b"%`G"])
def test_a_malformed_escape_finds_nothing(placed, escape):
    """The server refuses such a request before it looks for a page. Looking ends in bounds all the same."""
    path = b"/a" + escape
    pages = placed({b"/aA": Page(b""), b"/aD": Page(b""), path: Page(b"")})
    assert found(pages, path)["status"] == 404


NAMES = st.binary(min_size=1, max_size=24).map(lambda name: name.translate(None, b"/\0")).filter(
    lambda name: name and not name.startswith(b".")
)
LEGAL = "!$&'()*+,;=:@"  # beside those that `quote_from_bytes` never encodes (RFC 3986 3.3)


@st.composite
def encoded(draw, name: bytes) -> bytes:
    """A name, percent-encoded: what need not be encoded may be, and hexadecimal digits are in either case."""
    quoted = quote_from_bytes(name, safe=draw(st.text(LEGAL)))
    return re.sub("%..", lambda escape: draw(st.sampled_from([escape[0], escape[0].lower()])), quoted).encode()


@given(names=st.sets(NAMES, min_size=1, max_size=5), data=st.data())
def test_files_of_any_names_are_found(put, names, data):
    """However a client encodes them."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        for name in names:
            Path(folder, os.fsdecode(name)).write_bytes(name)
        pages = put(read_folder(folder), undo)
        for name in names:
            assert body_of(pages, b"/" + data.draw(encoded(name))) == name
