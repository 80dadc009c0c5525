"""Requests in a buffer: kernels find their ends and read them as plain Python does, however segments cut them."""

import ctypes
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio.packet_processing.http_request import (
    BAD_REQUEST,
    CLOSE,
    FOUND,
    HEAD_ONLY,
    METHOD_NOT_ALLOWED,
    empty_lines,
    parse_request,
    request_end,
)  # fmt: skip

TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
LINE = re.compile(rf"({TOKEN}) ([^ ]*) HTTP/1\.(\d)", re.ASCII)
FIELD = re.compile(rf"({TOKEN}):(.*)", re.DOTALL)
TARGET = re.compile(r"(?:http://[^/?]*)?(/[^?]*)?(?:\?.*)?", re.IGNORECASE)


class Buffer:
    """Bytes at an address."""

    def __init__(self, data: bytes):
        self._memory = ctypes.create_string_buffer(data, len(data) + 1)
        self.address = ctypes.addressof(self._memory)


def parsed(data: bytes):
    """Return what the compiled parser makes of a whole request: status, path, flags."""
    buffer = Buffer(data)
    assert request_end(buffer.address, 0, len(data)) == len(data)
    status, path, length, flags = parse_request(buffer.address, len(data))
    at = path - buffer.address
    return status, data[at : at + length] if path else b"", flags


def model(data: bytes):
    """The same with regular expressions."""
    bad = BAD_REQUEST, b"", CLOSE
    first, *fields = re.split(r"\r?\n", data.decode("latin-1"))[:-2]
    if not (line := LINE.fullmatch(first)):
        return bad
    method, target, minor = line.groups()
    hosts, keep, content = 0, set(), False
    for text in fields:
        if not (found := FIELD.fullmatch(text)):
            return bad
        name = found[1].lower()
        hosts += name == "host"
        content |= name in ("content-length", "transfer-encoding")
        if name == "connection":
            keep |= {option.lower() for option in re.split(r"[ \t,\r]+", found[2])}
    if hosts > 1 or (minor != "0" and not hosts):
        return bad
    flags = CLOSE if content or "close" in keep or (minor == "0" and "keep-alive" not in keep) else 0
    if method not in ("GET", "HEAD"):
        return METHOD_NOT_ALLOWED, b"", CLOSE
    flags |= HEAD_ONLY if method == "HEAD" else 0
    absolute = target.lower().startswith("http://")
    where = TARGET.fullmatch(target)
    if re.search(r"[^\x21-\x7e]", target) or where is None or not (where[1] or absolute):
        return BAD_REQUEST, b"", flags | CLOSE
    if re.search(r"%(?![0-9A-Fa-f]{2})", where[1] or ""):
        return BAD_REQUEST, b"", flags | CLOSE
    return FOUND, (where[1] or "/").encode(), flags


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", (FOUND, b"/", 0)),
        (b"GET /a.html?b=/c HTTP/1.1\r\nhOST:\r\n\r\n", (FOUND, b"/a.html", 0)),
        (b"HEAD /a HTTP/1.0\n\n", (FOUND, b"/a", HEAD_ONLY | CLOSE)),
        (b"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", (FOUND, b"/", 0)),
        (b"GET / HTTP/1.1\r\nHost: a\r\nconnection: upgrade ,\tCLOSE\r\n\r\n", (FOUND, b"/", CLOSE)),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n", (FOUND, b"/", CLOSE)),
        (b"GET HTTP://a.b/c?d HTTP/1.1\r\nHost: a\r\n\r\n", (FOUND, b"/c", 0)),
        (b"GET http://a.b?/c HTTP/1.1\r\nHost: a\r\n\r\n", (FOUND, b"/", 0)),
        (b"POST / HTTP/1.1\r\nHost: a\r\n\r\n", (METHOD_NOT_ALLOWED, b"", CLOSE)),
        (b"get / HTTP/1.1\r\nHost: a\r\n\r\n", (METHOD_NOT_ALLOWED, b"", CLOSE)),
        (b"GET / HTTP/1.1\r\n\r\n", (BAD_REQUEST, b"", CLOSE)),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", (BAD_REQUEST, b"", CLOSE)),
        (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", (BAD_REQUEST, b"", CLOSE)),
        (b"GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n", (BAD_REQUEST, b"", CLOSE)),
        (b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", (BAD_REQUEST, b"", CLOSE)),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", (BAD_REQUEST, b"", CLOSE)),
        (b"GET * HTTP/1.1\r\nHost: a\r\n\r\n", (BAD_REQUEST, b"", CLOSE)),
        (b"GET /%2fa%C3%00 HTTP/1.1\r\nHost: a\r\n\r\n", (FOUND, b"/%2fa%C3%00", 0)),
        (b"GET /a?%zz% HTTP/1.1\r\nHost: a\r\n\r\n", (FOUND, b"/a", 0)),
        (b"GET /%zz HTTP/1.1\r\nHost: a\r\n\r\n", (BAD_REQUEST, b"", CLOSE)),
        (b"GET /%4g HTTP/1.1\r\nHost: a\r\n\r\n", (BAD_REQUEST, b"", CLOSE)),
        (b"GET /%4?1 HTTP/1.1\r\nHost: a\r\n\r\n", (BAD_REQUEST, b"", CLOSE)),
        (b"HEAD /%4 HTTP/1.1\r\nHost: a\r\n\r\n", (BAD_REQUEST, b"", HEAD_ONLY | CLOSE)),
        (b"GET /%\n\n", (BAD_REQUEST, b"", CLOSE)),
        (b"hello\r\n\r\n", (BAD_REQUEST, b"", CLOSE)),
    ],
)  # fmt: skip
def test_requests(data, expected):
    assert parsed(data) == expected
    assert model(data) == expected


METHODS = st.sampled_from(["GET", "HEAD", "POST", "get", "G(T", ""])
TARGETS = st.one_of(
    st.sampled_from(["/", "*", "/a.b?c", "http://h/x", "http://h", "HTTP://h?q", "http:/x", "a", "", "/a\x7f"]),
    st.text("ab/?%.:\x01é", max_size=8),
    st.text("4aFg%?", max_size=8).map("/{}".format),
)  # fmt: skip
VERSIONS = st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/1.9", "HTTP/1.x", "HTTP/1.10", "http/1.1", ""])
NAMES = st.sampled_from(
    ["Host", "host", "Hos", "Connection", "CONNECTION", "Content-Length", "Transfer-Encoding", "X-a", "", "a b", "é"]
)
VALUES = st.sampled_from(["", " a", " close", "keep-alive", " Keep-Alive,x", "x , CLOSE", "closes", "\tclose\t", "é"])
FIELDS = st.lists(st.builds("{}:{}".format, NAMES, VALUES) | st.sampled_from([" folded", "nothing"]), max_size=4)


@st.composite
def requests(draw):
    eol = draw(st.sampled_from(["\r\n", "\n"]))
    line = " ".join((draw(METHODS), draw(TARGETS), draw(VERSIONS)))
    return eol.join((line, *draw(FIELDS), "", "")).encode("latin-1")


@given(requests())
def test_any_request(data):
    assert parsed(data) == model(data)


@given(st.lists(requests(), min_size=1, max_size=4), st.data())
def test_any_cut_of_a_stream_gives_the_same_requests(whole, data):
    """Empty lines between requests are no requests."""
    stream = b"".join(data.draw(st.sampled_from([b"", b"\r\n", b"\n"])) + one for one in whole)
    found, held, searched = [], b"", 0
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        held += stream[start:end]
        while True:
            buffer = Buffer(held)
            if searched == 0 and (empty := empty_lines(buffer.address, len(held))):
                held = held[empty:]
                continue
            nbytes = request_end(buffer.address, searched, len(held))
            if not nbytes:
                searched = len(held)
                break
            found.append(held[:nbytes])
            held, searched = held[nbytes:], 0
    assert found == whole
    assert not held
