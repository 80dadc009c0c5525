"""Requests in a buffer: kernels find their ends and read them as plain Python does, however segments cut them."""

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
    is_no_request,
    request_end,
)
from http_requests import differences, memory, model, parsed


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", (FOUND, b"/", 0)),
        (b"GET /a.html?b=/c HTTP/1.1\r\nhOST:\r\n\r\n", (FOUND, b"/a.html", 0)),
        (b"HEAD /a HTTP/1.0\n\n", (FOUND, b"/a", HEAD_ONLY | CLOSE)),
        (b"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", (FOUND, b"/", 0)),
        (b"GET / HTTP/1.1\r\nHost: a\r\nconnection: upgrade ,\tCLOSE\r\n\r\n", (FOUND, b"/", CLOSE)),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n", (FOUND, b"/", CLOSE)),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nConnection: keep-alive\r\n\r\n", (FOUND, b"/", CLOSE)),
        (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close, keep-alive\r\n\r\n", (FOUND, b"/", CLOSE)),
        (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, close\r\n\r\n", (FOUND, b"/", CLOSE)),
        (
            b"GET / HTTP/1.0\r\nConnection: close\r\nConnection: keep-alive\r\n\r\n",
            (FOUND, b"/", CLOSE),
        ),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 4, 04\r\ncontent-length:4\r\n\r\n", (FOUND, b"/", CLOSE)),
        (b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, Chunked \r\n\r\n", (FOUND, b"/", CLOSE)),
        (b"GET / HTTP/1.1\r\nHost: [::1]:80\r\nX: \t\x01\xff\r\n\r\n", (FOUND, b"/", 0)),
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
        (b"GET / HTTP/1.1\r\nHost\r\n\r\n", (BAD_REQUEST, b"", CLOSE)),
    ],
)
def test_requests(data, expected):
    assert parsed(data) == expected
    assert model(data) == expected


@pytest.mark.parametrize("fields", [
    b"Content-Length:", b"Content-Length: x", b"Content-Length: -1", b"Content-Length: +1", b"Content-Length: 0x1",
    b"Content-Length: 1 2", b"Content-Length: 1,", b"Content-Length: ,1", b"Content-Length: 1, 2",
    b"Content-Length: 1\r\nContent-Length: 2", b"Content-Length: 1\r\nContent-Length: 1,x",
    b"Content-Length: 4\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: chunked\r\nContent-Length: 4",
    b"Transfer-Encoding:", b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked, gzip",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", b"Transfer-Encoding: chunked;a=b",
    b"Transfer-Encoding: xchunked",
])
def test_content_whose_end_nobody_knows(fields):
    """RFC 9112 6.3: it is refused, since another server may see a second request in it."""
    data = b"GET / HTTP/1.1\r\nHost: a\r\n" + fields + b"\r\nX: y\r\n\r\n"
    assert parsed(data) == model(data) == (BAD_REQUEST, b"", CLOSE)


@pytest.mark.parametrize("digits", [b"9" * 17, b"9" * 19, b"18446744073709551617", b"9" * 400])
def test_a_long_content_length(digits):
    """It is not taken modulo 2^64, and none of these equals 1."""
    data = b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: " + digits + b"\r\n\r\n"
    assert parsed(data)[0] == (FOUND if len(digits) < 18 else BAD_REQUEST)
    data = b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1," + digits + b"\r\n\r\n"
    assert parsed(data)[0] == BAD_REQUEST


@pytest.mark.parametrize("byte", [b"\0", b"\r"], ids=["NUL", "CR"])
def test_nul_and_a_bare_cr(byte):
    """RFC 9110 5.5, RFC 9112 2.2: nowhere in a request, and it does not end a line."""
    whole = b"GET /a HTTP/1.1\r\nHost: a\r\nAccept: b\r\n\r\n"
    inside = [at for at in range(1, len(whole) - 2) if whole[at - 1 : at + 1] not in (b"\r\n", b"\n\r")]
    for at in inside:
        data = whole[:at] + byte + whole[at:]
        assert parsed(data)[0] == BAD_REQUEST, data


@pytest.mark.parametrize("target", [
    "http://", "http:///", "http:///a", "http://?a", "http://:80/", "http://a@b/", "http://a@/", "HTTP://",
    "http://a b", "http://<a>/", "http://a\\b/",
])
def test_urls_without_a_host(target):
    """RFC 9110 4.2.1 and 4.2.4: no host, and no user either."""
    data = f"GET {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
    assert parsed(data) == model(data) == (BAD_REQUEST, b"", CLOSE)


@pytest.mark.parametrize("host", ["a b", "a/b", "a@b", "<a>", "a\\b", "a?b", "a#b", "é"])
def test_what_is_no_host(host):
    """RFC 9112 3.2."""
    data = f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    assert parsed(data) == model(data) == (BAD_REQUEST, b"", CLOSE)


GREETINGS = {
    "TLS": bytes.fromhex("16030100c8010000c40303"), "SSL 2": bytes.fromhex("802e0100020015"),
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n", "SSH with a comment": b"SSH-2.0-OpenSSH_9.6p1 Ubuntu-3ubuntu13\r\n",
    "SMTP": b"EHLO here\r\n", "HTTP/2": b"PRI * HTTP/2.0\r\n", "HTTP/0.9": b"GET /\r\n", "Redis": b"*1\r\n",
    "RDP": bytes.fromhex("0300002b26e000"), "SMB": bytes.fromhex("000000b0ff534d42"), "MQTT": b"\x10\x10\0\4MQTT",
    "PROXY": b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n", "SOCKS": b"\x05\x01\0", "a path with zeros": b"GET /\0\0",
    "a bare CR": b"GET /\ra", "two CRs": b"\r\r", "a CR and a method": b"\rG",
}


@pytest.mark.parametrize("name", GREETINGS)
def test_what_cannot_become_a_request(name):
    buffer = memory.put(GREETINGS[name])
    assert not request_end(buffer, 0, len(GREETINGS[name]))
    assert is_no_request(buffer, len(GREETINGS[name]))


@given(st.sampled_from([
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"OPTIONS http://a/b?c HTTP/1.0\n\n", b"HEAD /%20 HTTP/1.1\r\nHost:\r\n\r\n",
]), st.integers(0, 80))
def test_the_beginning_of_a_request_can_become_one(whole, cut):
    held = whole[: min(cut, len(whole) - 1)]
    assert not is_no_request(memory.put(held), len(held))


METHODS = st.sampled_from(["GET", "HEAD", "POST", "get", "G(T", ""])
TARGETS = st.one_of(
    st.sampled_from(["/", "*", "/a.b?c", "http://h/x", "http://h", "HTTP://h?q", "http:/x", "a", "", "/a\x7f"]),
    st.text("ab/?%.:\x01é", max_size=8),
    st.text("4aFg%?", max_size=8).map("/{}".format),
)
VERSIONS = st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/1.9", "HTTP/1.x", "HTTP/1.10", "http/1.1", ""])
NAMES = st.sampled_from(
    ["Host", "host", "Hos", "Connection", "CONNECTION", "Content-Length", "Transfer-Encoding", "X-a", "", "a b", "é"]
)
VALUES = st.one_of(
    st.sampled_from(["", " a", " close", "keep-alive", " Keep-Alive,x", "x , CLOSE", "closes", "\tclose\t", "é"]),
    st.sampled_from(["0", " 4", "4,4", "04 ,\t4", "4,5", "-4", "chunked", " gzip , CHUNKED", "chunked,", "a:1", "a@b"]),
    st.text("a1,\t \r\0;:", max_size=4),
)
FIELDS = st.lists(st.builds("{}:{}".format, NAMES, VALUES) | st.sampled_from([" folded", "nothing"]), max_size=4)


@st.composite
def requests(draw):
    eol = draw(st.sampled_from(["\r\n", "\n"]))
    line = " ".join((draw(METHODS), draw(TARGETS), draw(VERSIONS)))
    return eol.join((line, *draw(FIELDS), "", "")).encode("latin-1")


@given(requests())
def test_any_request(data):
    assert parsed(data) == model(data)


def test_requests_with_something_changed():
    assert [*differences(3000, 1)] == []


@pytest.mark.slow
def test_many_requests_with_something_changed():
    assert [*differences(100_000, 2)] == []


@given(st.lists(requests(), min_size=1, max_size=4), st.data())
def test_any_cut_of_a_stream_gives_the_same_requests(whole, data):
    """Empty lines between requests are no requests."""
    stream = b"".join(data.draw(st.sampled_from([b"", b"\r\n", b"\n"])) + one for one in whole)
    found, held, searched = [], b"", 0
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        held += stream[start:end]
        while True:
            buffer = memory.put(held)
            if empty := empty_lines(buffer, len(held)):
                held = held[empty:]
                continue
            nbytes = request_end(buffer, searched, len(held))
            if not nbytes:
                hopeless = is_no_request(buffer, len(held))
                assert not hopeless or model(whole[len(found)])[0] == BAD_REQUEST
                searched = len(held)
                break
            found.append(held[:nbytes])
            held, searched = held[nbytes:], 0
    assert found == whole
    assert not held
