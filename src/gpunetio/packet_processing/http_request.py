"""Parse HTTP requests in a connection's buffer: where they end, and what they ask for (RFC 9112)."""

from __future__ import annotations

from .. import device as dev
from ..jit.compile import device_function

# The answer to a request: the page of its path, or the page of a status.
FOUND, BAD_REQUEST, METHOD_NOT_ALLOWED = 200, 400, 405

# Flags of a request.
HEAD_ONLY, CLOSE = 1, 2

_TAB, _LF, _CR, _SPACE = ord("\t"), ord("\n"), ord("\r"), ord(" ")
_COMMA, _COLON, _SLASH, _QUESTION, _DELETE = ord(","), ord(":"), ord("/"), ord("?"), 0x7F
_PERCENT = ord("%")
_UPPER_A, _UPPER_Z, _TO_LOWER = ord("A"), ord("Z"), 0x20
_ZERO, _NINE, _LOWER_A, _LOWER_F = ord("0"), ord("9"), ord("a"), ord("f")


def _excluded(text: bytes) -> tuple[int, int, int]:
    """Return up to 21 bytes in the form that `_is_visible` takes, 7 per word."""
    return tuple(int.from_bytes(text[i : i + 7], "big") for i in (0, 7, 14))  # type: ignore[return-value]


_NOT_IN_TOKEN = _excluded(b'"(),/:;<=>?@[\\]{}')  # RFC 9110 5.6.2
_NOT_IN_HOST = _excluded(b'"#/<>?@\\^`{|}')  # RFC 3986 3.2.2 and 3.2.3: a host and its port
_MOST_CONTENT = 10**17  # bytes; a longer Content-Length is refused, as it could overflow a count
_CHUNKED = 1  # the last transfer coding is "chunked"


def _words(text: bytes) -> tuple[int, int, int]:
    """Return a text in the form that `_lower` loads, 8 bytes at a time."""
    return tuple(int.from_bytes(text[i : i + 8], "little") for i in (0, 8, 16))  # type: ignore[return-value]


_GET, _HEAD, _VERSION = _words(b"GET")[0], _words(b"HEAD")[0], _words(b"HTTP/1.")[0]
_HTTP = _words(b"http://")[0]
_CLOSE, _KEEP = _words(b"close"), _words(b"keep-alive")
_HOST, _CONNECTION = _words(b"host"), _words(b"connection")
_LENGTH, _ENCODING, _CHUNKED_CODING = _words(b"content-length"), _words(b"transfer-encoding"), _words(b"chunked")
_HOST_BYTES, _CONNECTION_BYTES, _LENGTH_BYTES, _ENCODING_BYTES = 4, 10, 14, 17
_CLOSE_BYTES, _KEEP_BYTES, _CHUNKED_BYTES, _VERSION_BYTES, _HTTP_BYTES = 5, 10, 7, 7, 7


@device_function
def _load(at: int, nbytes: int) -> int:
    """Return up to 8 bytes as a word."""
    word = 0
    for i in range(min(nbytes, 8)):
        word |= dev.ld8(at + i) << 8 * i
    return word


@device_function
def _lower(at: int, nbytes: int) -> int:
    """Return up to 8 bytes as a word, with letters in lower case."""
    word = 0
    for i in range(min(nbytes, 8)):
        byte = dev.ld8(at + i)
        if _UPPER_A <= byte <= _UPPER_Z:
            byte |= _TO_LOWER
        word |= byte << 8 * i
    return word


@device_function
def _is(at: int, nbytes: int, length: int, words: tuple[int, int, int]) -> bool:
    """Return whether a name equals `words`, ignoring the case of its letters."""
    return (
        nbytes == length and _lower(at, nbytes) == words[0] and _lower(at + 8, nbytes - 8) == words[1]
        and _lower(at + 16, nbytes - 16) == words[2]
    )


@device_function
def _is_visible(byte: int, excluded: tuple[int, int, int]) -> bool:
    """Return whether a byte is a visible ASCII character and not one of those excluded."""
    if byte <= _SPACE or byte >= _DELETE:
        return False
    for i in range(7):
        shift = 8 * i
        if byte == excluded[0] >> shift & 0xFF or byte == excluded[1] >> shift & 0xFF:
            return False
        if byte == excluded[2] >> shift & 0xFF:
            return False
    return True


@device_function
def _token_end(at: int, end: int) -> int:
    """Return the end of a token, such as a method or a field name."""
    while at < end and _is_visible(dev.ld8(at), _NOT_IN_TOKEN):
        at += 1
    return at


@device_function
def _line_feed(at: int, end: int) -> int:
    """Return the address of the next line feed, or `end`."""
    while at < end and dev.ld8(at) != _LF:
        at += 1
    return at


@device_function
def _line_end(at: int, line_feed: int) -> int:
    """Return the end of a line's text: before its line feed, and before a CR that precedes the line feed."""
    return line_feed - 1 if line_feed > at and dev.ld8(line_feed - 1) == _CR else line_feed


@device_function
def empty_lines(buffer: int, length: int) -> int:
    """Return the bytes of empty lines before a request, which a server ignores (RFC 9112 2.2)."""
    count = 0
    while count < length:
        if dev.ld8(buffer + count) == _LF:
            count += 1
        elif count + 1 < length and dev.ld8(buffer + count) == _CR and dev.ld8(buffer + count + 1) == _LF:
            count += 2
        else:
            break
    return count


@device_function
def request_end(buffer: int, seen: int, length: int) -> int:
    """Return the length of the first request, including the empty line that ends it, or 0 if that has not arrived.

    The first `seen` bytes are known to have no end.
    """
    for i in range(max(seen - 2, 0), length - 1):
        if dev.ld8(buffer + i) == _LF:
            following = dev.ld8(buffer + i + 1)
            if following == _LF:
                return i + 2
            if following == _CR and i + 2 < length and dev.ld8(buffer + i + 2) == _LF:
                return i + 3
    return 0


@device_function
def _options(at: int, end: int, keep: int) -> int:
    """Return how the connection continues after a Connection field, given `keep` from the fields before (RFC 9112 9.3).

    -1 means close, which later fields cannot change; 1 means keep-alive; 0 means neither.
    """
    while at < end:
        byte = dev.ld8(at)
        if byte == _COMMA or byte == _SPACE or byte == _TAB:
            at += 1
            continue
        start = at
        while at < end and byte != _COMMA and byte != _SPACE and byte != _TAB:
            at += 1
            byte = dev.ld8(at)
        if _is(start, at - start, _CLOSE_BYTES, _CLOSE):
            keep = -1
        elif keep == 0 and _is(start, at - start, _KEEP_BYTES, _KEEP):
            keep = 1
    return keep


@device_function
def _is_value(at: int, end: int) -> bool:
    """Return whether a field value has no NUL and no CR, which other parsers may take as an end (RFC 9110 5.5)."""
    while at < end:
        if dev.ld8(at) == 0 or dev.ld8(at) == _CR:
            return False
        at += 1
    return True


@device_function
def _skip_blanks(at: int, end: int) -> int:
    """Return the position after any spaces and tabs."""
    while at < end and (dev.ld8(at) == _SPACE or dev.ld8(at) == _TAB):
        at += 1
    return at


@device_function
def _is_host(at: int, end: int) -> bool:
    """Return whether the value of a Host field may be a host and a port, or is empty (RFC 9112 3.2)."""
    at = _skip_blanks(at, end)
    while at < end and _is_visible(dev.ld8(at), _NOT_IN_HOST):
        at += 1
    return _skip_blanks(at, end) == end


@device_function
def _content_length(at: int, end: int, known: int) -> int:
    """Return the number in the value of a Content-Length field, or -1 if it is not valid (RFC 9112 6.3).

    The number may be repeated, in a list or in several fields. `known` is that of the fields before, or -1.
    """
    while True:
        at = _skip_blanks(at, end)
        start = at
        number = 0
        while at < end and _ZERO <= dev.ld8(at) <= _NINE and number < _MOST_CONTENT:
            number = 10 * number + dev.ld8(at) - _ZERO
            at += 1
        if at == start or number >= _MOST_CONTENT or (known >= 0 and number != known):
            return -1
        known = number
        at = _skip_blanks(at, end)
        if at == end:
            return number
        if dev.ld8(at) != _COMMA:
            return -1
        at += 1


@device_function
def _last_coding(at: int, end: int) -> int:
    """Return _CHUNKED if that is the last transfer coding of a field, otherwise -1 (RFC 9112 6.1)."""
    start = at
    while at < end:
        if dev.ld8(at) == _COMMA:
            start = at + 1
        at += 1
    start = _skip_blanks(start, end)
    stop = _token_end(start, end)
    whole = _skip_blanks(stop, end) == end
    return _CHUNKED if whole and _is(start, stop - start, _CHUNKED_BYTES, _CHUNKED_CODING) else -1


@device_function
def _fields(at: int, end: int, minor: int) -> int:
    """Read the header fields. Return the flag CLOSE or 0, or -1 if they are not valid in a request."""
    hosts = 0
    keep = 0
    content, coding = -1, 0
    while at < end:
        line_feed = _line_feed(at, end)
        stop = _line_end(at, line_feed)
        if stop == at:
            break  # the empty line
        colon = _token_end(at, stop)
        nbytes = colon - at
        if nbytes == 0 or colon == stop or dev.ld8(colon) != _COLON or not _is_value(colon + 1, stop):
            return -1
        if _is(at, nbytes, _HOST_BYTES, _HOST):
            hosts += 1
            if not _is_host(colon + 1, stop):
                return -1
        elif _is(at, nbytes, _CONNECTION_BYTES, _CONNECTION):
            keep = _options(colon + 1, stop, keep)
        elif _is(at, nbytes, _LENGTH_BYTES, _LENGTH):
            content = _content_length(colon + 1, stop, content)
            if content < 0:
                return -1
        elif _is(at, nbytes, _ENCODING_BYTES, _ENCODING):
            coding = _last_coding(colon + 1, stop)
        at = line_feed + 1
    if hosts > 1 or (hosts == 0 and minor > 0):  # RFC 9112 3.2
        return -1
    if coding < 0 or (coding > 0 and content >= 0):  # RFC 9112 6.3: the end of the content is ambiguous
        return -1
    if coding > 0 or content >= 0:
        return CLOSE  # content follows, not a request
    return CLOSE if keep < 0 or (keep == 0 and minor == 0) else 0


@device_function
def _hex_digit(byte: int) -> int:
    """Return the value of a hexadecimal digit, or -1."""
    if _ZERO <= byte <= _NINE:
        return byte - _ZERO
    byte |= _TO_LOWER
    return byte - _LOWER_A + 10 if _LOWER_A <= byte <= _LOWER_F else -1


@device_function
def path_byte(at: int, end: int) -> tuple[int, int]:
    """Return a byte of a path that ends at `end`, and how many bytes encode it: 3 for `%XX` (RFC 3986 2.1), or 1.

    The byte is -1 for a `%` that two hexadecimal digits do not follow.
    """
    byte = dev.ld8(at)
    if byte != _PERCENT:
        return byte, 1
    if end - at < 3:
        return -1, 1
    high = _hex_digit(dev.ld8(at + 1))
    low = _hex_digit(dev.ld8(at + 2))
    return (high << 4 | low, 3) if high >= 0 and low >= 0 else (-1, 1)


@device_function
def _path(target: int, end: int) -> tuple[int, int]:
    """Return the address and the length of the path in a request target; 0 and 0 if there is none, or a malformed one.

    A target is a path with a query, or a URL (RFC 9112 3.2), which must have a host, and no user (RFC 9110 4.2). The
    path is still percent-encoded.
    """
    path = target
    if _lower(target, min(end - target, _HTTP_BYTES)) == _HTTP:
        host = target + _HTTP_BYTES
        path = host
        while path < end and dev.ld8(path) != _SLASH and dev.ld8(path) != _QUESTION:
            if not _is_visible(dev.ld8(path), _NOT_IN_HOST):
                return 0, 0
            path += 1
        if path == host or dev.ld8(host) == _COLON:
            return 0, 0
        if path == end or dev.ld8(path) == _QUESTION:
            return target + _HTTP_BYTES - 1, 1  # the root: the second slash of "http://"
    if path == end or dev.ld8(path) != _SLASH:
        return 0, 0
    stop = path
    while stop < end and dev.ld8(stop) != _QUESTION:
        byte, width = path_byte(stop, end)
        if byte < 0:
            return 0, 0
        stop += width
    return path, stop - path


@device_function
def _request_line(request: int, stop: int) -> tuple[int, int, int]:
    """Read a request line that ends at `stop`. Return the ends of its method and its target, and the minor version.

    The version is -1 if the line is not a request line of HTTP/1 (RFC 9112 3).
    """
    blank = _token_end(request, stop)
    target_end = min(blank + 1, stop)
    while target_end < stop and _SPACE < dev.ld8(target_end) < _DELETE:
        target_end += 1
    version = target_end + 1
    parts = request < blank < stop and dev.ld8(blank) == _SPACE and stop - version == _VERSION_BYTES + 1
    if not parts or dev.ld8(target_end) != _SPACE or _load(version, _VERSION_BYTES) != _VERSION:
        return blank, target_end, -1
    minor = dev.ld8(version + _VERSION_BYTES) - _ZERO
    return blank, target_end, minor if 0 <= minor <= _NINE - _ZERO else -1


@device_function
def is_no_request(buffer: int, length: int) -> bool:
    """Return whether bytes without a complete request cannot begin one either, such as a greeting of TLS or SSH."""
    end = buffer + length
    line_feed = _line_feed(buffer, end)
    if line_feed < end:
        return _request_line(buffer, _line_end(buffer, line_feed))[2] < 0
    if length > 0 and dev.ld8(end - 1) == _CR:
        end -= 1  # a line feed may follow
    blank = _token_end(buffer, end)
    if blank == end:
        return length > 1 and end < buffer + length  # a method, and the end of the line
    if blank == buffer or dev.ld8(blank) != _SPACE:
        return True
    for at in range(blank + 1, end):
        if dev.ld8(at) < _SPACE or dev.ld8(at) >= _DELETE:
            return True
    return False


@device_function
def parse_request(request: int, nbytes: int) -> tuple[int, int, int, int]:
    """Parse a whole request of `nbytes`. Return its result, the address and the length of its path, and flags.

    The result is FOUND, after which the path decides, or BAD_REQUEST or METHOD_NOT_ALLOWED, which also close.
    """
    end = request + nbytes
    line_feed = _line_feed(request, end)
    blank, target_end, minor = _request_line(request, _line_end(request, line_feed))
    if minor < 0:
        return BAD_REQUEST, 0, 0, CLOSE
    flags = _fields(line_feed + 1, end, minor)
    if flags < 0:
        return BAD_REQUEST, 0, 0, CLOSE
    path, length = _path(blank + 1, target_end)
    method = _load(request, blank - request)
    if blank - request == 4 and method == _HEAD:
        flags |= HEAD_ONLY
    elif blank - request != 3 or method != _GET:
        return METHOD_NOT_ALLOWED, 0, 0, CLOSE
    if path == 0:
        return BAD_REQUEST, 0, 0, flags | CLOSE
    return FOUND, path, length, flags
