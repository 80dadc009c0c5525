"""Whatever bytes come from elsewhere, what reads them raises the package's own errors only."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreign_bytes import PARSERS, Parser, mistakes
from gpunetio.errors import DocaError, InvalidValueError
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
