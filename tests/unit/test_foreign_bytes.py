"""Whatever bytes come from elsewhere, what reads them raises the package's own errors only."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import described_nics
import foreign_links
from foreign_bytes import PARSERS, Parser, mistakes
from gpunetio.errors import DocaError, InvalidValueError, NotFoundError
from gpunetio.fabric.faults import Faults
from gpunetio.fabric.pcap_reader import NOT_ROCE, PcapFile
from gpunetio.rendezvous.link import Decoder, PeerError, encode


@pytest.mark.parametrize("name", PARSERS)
def test_the_samples_are_right(name):
    for sample in PARSERS[name].samples:
        PARSERS[name].parse(sample)


def test_a_capture_with_datagrams():
    """One of these changes makes a packet of UD (opcode 0x64), for which a replay makes no queue pair."""
    assert [*mistakes("capture", 30, 502)] == []


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=10)
@given(st.integers(0, (1 << 32) - 1))
def test_samples_with_something_changed(name, seed):
    assert [*mistakes(name, 30, seed)] == []


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=10)
@given(st.binary(max_size=300))
def test_any_bytes(name, data):
    parser: Parser = PARSERS[name]
    try:
        parser.parse(data)
    except (DocaError, *parser.errors):
        pass


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PARSERS)
def test_many_samples_with_something_changed(name):
    assert [*mistakes(name, 20_000, 1)] == []


# --- what was found --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", range(5))
def test_an_ip_header_that_is_too_short(tmp_path, words):
    """RFC 791 3.1: the least header has five words. Such a frame is no packet, and the rest of the file is replayed."""
    sample = PARSERS["capture"].samples[0]
    at = sample.index(b"\x08\x00\x45") + 2
    (tmp_path / "file").write_bytes(sample[:at] + bytes([0x40 | words]) + sample[at + 1 :])
    with PcapFile(tmp_path / "file") as file:
        assert len([*file]) == 2
        assert (file.records, dict(file.skipped)) == (3, {NOT_ROCE: 1})


def test_a_key_that_is_no_text():
    """RFC 8259 8.2: JSON may carry a lone surrogate, which has no bytes in UTF-8. The rank is turned away."""
    PARSERS["join"].parse(encode("join", rank=1, size=4, key="\ud800"))


@pytest.mark.parametrize("call", [lambda message: message.integer("size", 1, 5), lambda message: message.text("size")])
def test_a_value_that_is_nested_deeply(call):
    """A thread of few frames has read it. Whoever shows it has many, and Python's limit is for both together."""
    deep = b"[" * 900 + b"]" * 900
    body = b'{"kind": "join", "size": %s}' % deep
    (message,) = Decoder("the peer").feed(encode("x")[:6] + len(body).to_bytes(4, "big") + body)

    def within(frames: int) -> None:
        if frames:
            within(frames - 1)
        else:
            call(message)

    with pytest.raises(PeerError, match=r"sent 'join' with size \[\[\[\[\[\[\[\.\.\.\]"):
        within(150)


def test_a_number_beyond_all_floats():
    """An integer of JSON may have any number of digits (RFC 8259 6)."""
    with pytest.raises(InvalidValueError, match="loss is larger than any float"):
        Faults(loss=10**400)


def described(change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return the description of a NIC with something changed."""
    description = json.loads(described_nics.nic())
    change(description)
    return json.dumps(description).encode()


def with_field(table: str, name: str, kind: str) -> bytes:
    """Return the description of a NIC that has another type in a field of a table."""

    def change(description: dict[str, Any]) -> None:
        layout = description["tables"][table]["dtype"]
        layout["formats"][layout["names"].index(name)] = kind

    return described(change)


@pytest.mark.parametrize("text", ["\ud800", "\x1b[2J", "a\nb", 5, ["soft0"]])
@pytest.mark.parametrize("change", [
    lambda d, text: d.update(name=text), lambda d, text: d.update(addresses=[text]),
    lambda d, text: d.update(no_ethernet=text), lambda d, text: d["tables"]["cqs"]["dtype"]["names"].append(text),
])
def test_a_nic_whose_names_cannot_be_printed(change, text):
    """They would end the command in the middle of its output, or change the terminal's settings."""
    with pytest.raises(InvalidValueError, match=r"process 9 sent an invalid description .* must be printable text"):
        PARSERS["NIC"].parse(described(lambda d: change(d, text)))


@pytest.mark.parametrize("gone", ["cqs", "srqs", "wires"])
def test_a_queue_pair_of_a_nic_without_the_table_of_what_it_uses(gone):
    """A queue pair refers to rows of other tables by their addresses."""
    with pytest.raises(NotFoundError) if gone != "wires" else nullcontext():  # of the kinds that are shown after it
        PARSERS["NIC"].parse(described(lambda d: d["tables"].pop(gone)))


@pytest.mark.parametrize("address", ["0x1000", None, [], float("inf")])
def test_a_table_whose_address_is_no_number(address):
    with pytest.raises(InvalidValueError, match="process 9 sent an invalid description of its NIC"):
        PARSERS["NIC"].parse(described(lambda d: d["tables"]["cqs"].update(address=address)))


def test_a_table_without_numbers():
    with pytest.raises(InvalidValueError, match="rows of the table 'sqs' have no numbers: use the release"):
        PARSERS["NIC"].parse(described(lambda d: d["tables"]["sqs"].update(number=None)))


@pytest.mark.parametrize("table, name, kind", [
    ("cqs", "cqn", "|V8"), ("cqs", "cqn", "(2,)<i4"), ("cqs", "log", "|V8"), ("counters", "cqes", "|V8"),
    ("mkeys", "delta", "|V8"), ("qps", "peer_low", "(1,)<i8"), ("qps", "tx_psn", "|V8"), ("rqs", "frames", "|V8"),
    ("gids", "gid", "(2,)<i8"),
])
def test_a_field_that_is_not_one_number(table, name, kind):
    """Fields that are only shown may have any type."""
    with pytest.raises(InvalidValueError, match=f"the field '{name}'"):
        PARSERS["NIC"].parse(with_field(table, name, kind))
    PARSERS["NIC"].parse(with_field("qps", "rights", kind))


@pytest.mark.parametrize("name", ["peer_low", "dlid"])
def test_a_queue_pair_with_half_the_name_of_its_peer(name):
    def change(description: dict[str, Any]) -> None:
        names = description["tables"]["qps"]["dtype"]["names"]
        names[names.index(name)] = "other"

    with pytest.raises(InvalidValueError, match=f"the field '{name}' of a table is missing"):
        PARSERS["NIC"].parse(described(change))


@pytest.mark.parametrize("log", [64, 1 << 62, (1 << 64) - 1])
def test_a_completion_queue_of_more_entries_than_memory_has(log):
    """Rows are memory that another process writes, so its numbers may be any."""

    def change(description: dict[str, Any]) -> None:
        table = description["tables"]["cqs"]
        at = 2 * (table["offset"] + table["dtype"]["offsets"][table["dtype"]["names"].index("log")])
        memory = description["memory"]
        description["memory"] = memory[:at] + log.to_bytes(8, "little").hex() + memory[at + 16 :]

    PARSERS["NIC"].parse(described(change))


@pytest.mark.parametrize("nbytes", [0, 39, 40, 41, 63])
def test_a_question_for_a_neighbour_that_is_cut(nbytes):
    """RFC 4861 7.1: it has 24 bytes at least. An engine passes on no shorter ones, and others change nothing."""
    packet = foreign_links.frames()[2][14:][:nbytes]
    payload = max(0, nbytes - 40).to_bytes(2, "big")
    frame = foreign_links.frames()[2][:14] + packet[:4] + payload[: max(0, nbytes - 4)] + packet[6:]
    PARSERS["neighbour"].parse(foreign_links.checksummed(frame))
