"""Pack and parse messages of the connection manager as MADs."""

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
)
from ..formats.layout import Fields

_HEADER = {
    "base_version": BASE_VERSION, "mgmt_class": CM_CLASS, "class_version": CM_CLASS_VERSION, "method": METHOD_SEND,
}
_KNOWN = frozenset(Attribute)
_START = bytes(MAD_HEADER.pack(**_HEADER)[:4])  # the header up to the method
_ATTRIBUTE = MAD_HEADER.offset("attribute_id")
_NAMED: dict[int, int] = {  # offset of this end's ID of the communication in a peer's message
    attribute: MAD_HEADER.size + message.offset("request_id" if attribute is Attribute.SIDR_REP else "remote_comm_id")
    for attribute, message in MESSAGES.items() if attribute not in (Attribute.REQ, Attribute.SIDR_REQ)
}


@dataclass(frozen=True, slots=True)
class Message:
    """A received message. `fields` are those of its table in `formats.cm`, unchecked."""

    attribute: Attribute
    transaction_id: int
    fields: Fields


def pack(attribute: Attribute, transaction_id: int, private_data: bytes = b"", **fields: int | bytes) -> bytes:
    """Return a MAD that contains the message."""
    message = MESSAGES[attribute]
    header = MAD_HEADER.pack(**_HEADER, transaction_id=transaction_id, attribute_id=attribute)
    return bytes(header + message.pack(private_data=private_data.ljust(private_bytes(message), b"\0"), **fields))


def is_message(mad: bytes) -> bool:
    """Return whether a MAD is a supported message. This is cheap, because strangers can send anything."""
    return len(mad) == MAD_BYTES and mad.startswith(_START) and mad[_ATTRIBUTE] == 0 and mad[_ATTRIBUTE + 1] in _KNOWN


def attribute_of(mad: bytes) -> int:
    """Return the attribute of a MAD, which says what message it is."""
    return mad[_ATTRIBUTE + 1]


def named_by(mad: bytes) -> int:
    """Return this end's ID of the communication that a message is about; 0 if it has none."""
    at = _NAMED.get(mad[_ATTRIBUTE + 1])
    return int.from_bytes(mad[at : at + 4], "big") if at is not None else 0


def own_name_in(mad: bytes) -> int:
    """Return the sender's ID of the communication that a message is about."""
    return int.from_bytes(mad[MAD_HEADER.size : MAD_HEADER.size + 4], "big")


def parse(mad: bytes) -> Message | None:
    """Parse a MAD. Return None if it is not a supported message of the connection manager."""
    if not is_message(mad):
        return None
    attribute = Attribute(mad[_ATTRIBUTE + 1])
    return Message(attribute, MAD_HEADER.get(mad, "transaction_id"), MESSAGES[attribute].unpack(mad, MAD_HEADER.size))
