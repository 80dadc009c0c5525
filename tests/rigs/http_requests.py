"""Compare the compiled HTTP parser with plain Python on random requests.

    python tests/rigs/http_requests.py N [SEED]      parses N requests, and prints those on which both differ

A request lies at the end of its page, so a parser that reads beyond it dies.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from gpunetio.packet_processing.http_request import (
    BAD_REQUEST,
    CLOSE,
    FOUND,
    HEAD_ONLY,
    METHOD_NOT_ALLOWED,
    empty_lines,
    is_no_request,
    parse_request,
    request_end,
)
from guarded import Guarded
from mutations import mutated

TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
LINE = re.compile(rf"({TOKEN}) ([!-~]*) HTTP/1\.(\d)", re.ASCII)
FIELD = re.compile(rf"({TOKEN}):(.*)", re.DOTALL)
HOST = r"[!$%&'()*+,\-.0-9:;=A-Z\[\]_a-z~]*"  # RFC 3986 3.2: with IP literals and a port, without a user
TARGET = re.compile(rf"(?:http://(?!:){HOST}(?<!//))?(/[^?]*)?(?:\?.*)?", re.IGNORECASE)
LENGTHS = re.compile(r"[ \t]*\d+[ \t]*(?:,[ \t]*\d+[ \t]*)*", re.ASCII)
TOO_LONG = 10**17  # content
REQUESTS = [
    b"GET /a.html?b=/c HTTP/1.1\r\nHost: a.b:80\r\nConnection: close, x\r\nAccept: */*\r\n\r\n",
    b"HEAD /%20a HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n",
    b"GET http://[::1]:80/c HTTP/1.1\nhost:\ncontent-length: 4, 04\nConnection: keep-alive\n\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, Chunked\r\n\r\n",
]
PARTS = [
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b",", b"%", b"%4g", b"%41", b"?", b"@", b"/", b"http://", b"\xe9",
    b"HTTP/1.1", b"HTTP/1.0", b"GET ", b"HEAD ", b"Host: b\r\n", b"Content-Length: 4\r\n", b"Content-Length:",
    b"18446744073709551620", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"keep-alive", b"close",
    b"chunked", b"\r\n\r\n",
]

Parsed = tuple[int, bytes, int]  # status, path, flags
memory = Guarded()  # of the request that is being read


def parsed(data: bytes) -> Parsed:
    """Return what the compiled parser makes of a whole request."""
    buffer = memory.put(data)
    assert request_end(buffer, 0, len(data)) == len(data)
    status, path, length, flags = parse_request(buffer, len(data))
    at = path - buffer
    return status, data[at : at + length] if path else b"", flags


def model(data: bytes) -> Parsed:
    """The same with regular expressions."""
    bad = BAD_REQUEST, b"", CLOSE
    first, *fields = re.split(r"\r?\n", data.decode("latin-1"))[:-2]
    if not (line := LINE.fullmatch(first)):
        return bad
    method, target, minor = line.groups()
    hosts, keep, lengths, codings = 0, set(), set(), []
    for text in fields:
        if not (found := FIELD.fullmatch(text)) or re.search("[\0\r]", found[2]):
            return bad
        name, value = found[1].lower(), found[2].strip(" \t")
        hosts += name == "host"
        if name == "host" and not re.fullmatch(HOST, value):
            return bad
        if name == "content-length":
            if not LENGTHS.fullmatch(value):
                return bad
            lengths |= {int(one) for one in value.split(",")}
            if max(lengths) >= TOO_LONG:
                return bad
        if name == "transfer-encoding":
            codings += [one.strip(" \t").lower() for one in value.split(",")]
        if name == "connection":
            keep |= {option.lower() for option in re.split(r"[ \t,]+", value)}
    if hosts > 1 or (minor != "0" and not hosts):
        return bad
    if len(lengths) > 1 or (codings and (lengths or codings[-1] != "chunked")):
        return bad
    flags = CLOSE if lengths or codings or "close" in keep or (minor == "0" and "keep-alive" not in keep) else 0
    if method not in ("GET", "HEAD"):
        return METHOD_NOT_ALLOWED, b"", CLOSE
    flags |= HEAD_ONLY if method == "HEAD" else 0
    absolute = target.lower().startswith("http://")
    where = TARGET.fullmatch(target)
    if where is None or not (where[1] or absolute):
        return BAD_REQUEST, b"", flags | CLOSE
    if re.search(r"%(?![0-9A-Fa-f]{2})", where[1] or ""):
        return BAD_REQUEST, b"", flags | CLOSE
    return FOUND, (where[1] or "/").encode(), flags


# --- any requests ----------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """A request on which the compiled parser and the model differ."""

    data: bytes
    found: object
    expected: object


def changed(chance: random.Random) -> bytes:
    """Return a request with something changed, mostly by parts of other requests."""
    data = chance.choice(REQUESTS)
    if chance.random() < 0.4:
        return mutated(chance, data)
    for _ in range(chance.choice([1, 1, 2, 3])):
        at = chance.randrange(len(data) + 1)
        data = data[:at] + chance.choice(PARTS) + data[at + chance.choice([0, 0, 1, 4, 20]) :]
    return data


def differences(times: int, seed: int) -> Iterator[Difference]:
    """Parse so many changed requests. Yield those on which the compiled parser and the model differ."""
    chance = random.Random(seed)
    for _ in range(times):
        held = changed(chance)
        held = held[empty_lines(memory.put(held), len(held)) :]
        buffer = memory.put(held)
        nbytes, hopeless = request_end(buffer, 0, len(held)), is_no_request(buffer, len(held))
        expected = end_of(held)
        if nbytes != expected:
            yield Difference(held, nbytes, expected)
        elif nbytes:
            data = held[:nbytes]
            if (found := parsed(data)) != (right := model(data)):
                yield Difference(data, found, right)
        elif hopeless and (right := model(held + b"\r\n\r\n"))[0] != BAD_REQUEST:
            yield Difference(held, "no request", right)


def end_of(data: bytes) -> int:
    """Return where the first request ends, with the empty line behind it; 0 if that has not come."""
    found = re.search(rb"\n\r?\n", data)
    return found.end() if found else 0


def main(times: int, seed: int = 0) -> None:
    """Parse changed requests, and print the differences."""
    count = 0
    for data, found, expected in differences(times, seed):
        count += 1
        if count <= 20:
            print(f"{data!r}\n    {found}, expected {expected}", flush=True)
    print(f"{times} requests, {count} differences")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
