"""Change valid bytes: some are changed, cut, repeated or inserted. In JSON, values are replaced."""

from __future__ import annotations

import json
import random
from typing import Any

_ODD = [
    None, True, -1, 0, 1 << 63, 1 << 64, 10**400, 1e308, float("inf"), float("nan"), "", "\ud800", "\0", "x" * 5000, [],
    {}, [[]], {"kind": 1}, "127.0.0.1", "::1", "soft0", "|V8", "(2,)<i8", "\x1b[2J",
]


def mutated(chance: random.Random, sample: bytes) -> bytes:
    """Return a sample with something changed."""
    if chance.random() < 0.5 and (found := _json_in(sample)) is not None:
        before, value = found
        text = json.dumps(_replaced(chance, value)).encode()
        if chance.random() < 0.05:
            deep = chance.choice([10, chance.randrange(800, 1000), 5000])
            at = chance.choice([at for at, byte in enumerate(text, 1) if byte == ord(":")] or [0])
            text = text[:at] + b"[" * deep + b"]" * deep + b',"more":' + text[at:]
        if len(before) >= 4:  # the length of what follows; all our frames of JSON have it at their end
            before = before[:-4] + len(text).to_bytes(4, "big")
        return before + text
    changed = bytearray(sample)
    for _ in range(chance.choice([1, 1, 2, 4, 16])):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(8):
            case 0:
                del changed[at:]
            case 1:
                changed[at:at] = chance.randbytes(chance.choice([1, 4, 100]))
            case 2:
                changed[at : at + 4] = chance.choice([b"\0" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80\0\0\0"])
            case 3:
                changed[at:at] = changed[at : at + chance.randrange(64)]
            case 4 | 5 if at < len(changed):  # half a byte, such as a length in words
                shift = chance.choice([0, 4])
                changed[at] = changed[at] & 0xF0 >> shift | chance.randrange(16) << shift
            case _ if at < len(changed):
                changed[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
    return bytes(changed)


def _json_in(sample: bytes) -> tuple[bytes, Any] | None:
    """Return what comes before the JSON that ends a sample, and its value."""
    start = min((at for at in (sample.find(b"{"), sample.find(b"[")) if at >= 0), default=-1)
    try:
        return (sample[:start], json.loads(sample[start:])) if start >= 0 else None
    except ValueError:
        return None


def _replaced(chance: random.Random, value: Any) -> Any:
    """Return a value of JSON with something odd in place of one of its parts."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {name: part for name, part in value.items() if name != key}
        return value | {key: _replaced(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        return [*value[:at], _replaced(chance, value[at]), *value[at + 1 :]]
    return chance.choice(_ODD)
