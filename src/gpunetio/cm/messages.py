"""Messages of the connection manager as whole MADs."""

from __future__ import annotations

from dataclasses import dataclass

from ..formats.cm import (
    BASE_VERSION,
    CM_CLASS,
    CM_CLASS_VERSION,
    MAD_BYTES,
    MAD_HEADER,
    MESSAGES,
    METHOD_SEND,
    Attribute,
    private_bytes,
)  # fmt: skip
from ..formats.layout import Fields

_HEADER = {
    "base_version": BASE_VERSION, "mgmt_class": CM_CLASS, "class_version": CM_CLASS_VERSION, "method": METHOD_SEND,
}  # fmt: skip
_KNOWN = frozenset(Attribute)


@dataclass(frozen=True, slots=True)
class Message:
    """A message that arrived: `fields` are those of its table in `formats.cm`, not checked."""

    attribute: Attribute
    transaction_id: int
    fields: Fields


def pack(attribute: Attribute, transaction_id: int, private_data: bytes = b"", **fields: int | bytes) -> bytes:
    """Return a MAD with one message."""
    message = MESSAGES[attribute]
    header = MAD_HEADER.pack(**_HEADER, transaction_id=transaction_id, attribute_id=attribute)
    return bytes(header + message.pack(private_data=private_data.ljust(private_bytes(message), b"\0"), **fields))


def parse(mad: bytes) -> Message | None:
    """Return the message of a MAD, or None if it is no request of the connection manager that is known here."""
    if len(mad) != MAD_BYTES:
        return None
    header = MAD_HEADER.unpack(mad)
    if any(header[name] != value for name, value in _HEADER.items()) or header["attribute_id"] not in _KNOWN:
        return None
    attribute = Attribute(header["attribute_id"])
    return Message(attribute, header["transaction_id"], MESSAGES[attribute].unpack(mad, MAD_HEADER.size))
