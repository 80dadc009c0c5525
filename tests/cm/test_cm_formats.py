"""Messages of the connection manager against a transcription of the specification, and against a REQ of Linux."""

import csv
import secrets

import pytest

from gpunetio.cm.active import request_of
from gpunetio.cm.communication import Terms
from gpunetio.cm.ip_service import IpHeader, service_id
from gpunetio.cm.messages import pack, parse
from gpunetio.cm.path import Path
from gpunetio.cm.times import LINUX, ack_timeout, seconds
from gpunetio.formats import cm
from gpunetio.formats.cm import Attribute, PortSpace
from gpunetio.formats.layout import BitStruct
from repository import DATA

STRUCTS = {struct.name: struct for struct in vars(cm).values() if isinstance(struct, BitStruct)}


def transcription() -> dict[str, dict[str, tuple[int, int]]]:
    """Each message's fields: bit offset and width, from the byte and the bit in it that the specification names."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    with (DATA / "cm_messages.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            first = 8 * int(row["byte"]) + 7 - int(row["first_bit"])
            found.setdefault(row["message"], {})[row["field"]] = first, int(row["bits"])
    return found


def test_tables_are_those_of_the_specification():
    declared = {
        name: {field.name: (field.offset, field.width) for field in struct.fields.values()}
        for name, struct in STRUCTS.items()
    }
    assert declared == transcription()


# Sent by `rping -c -a 10.77.0.1 -p 7174` on Linux 6.1 with Soft-RoCE.
GOLDEN_REQ = bytes.fromhex(
    "0107020300000000000000028f1ee31a0010000000000000"
    "1ae31e8f000000000000000001061c06505400fffe7700020000000000000000"
    "0000110100000001000000a05f31cea7ffff37f0ffffffff"
    "00000000000000000000ffff0a4d000200000000000000000000ffff0a4d0001"
    "c65ea00000400098" + "00" * 44 +
    "0040e99c0000000000000000000000000a4d00020000000000000000000000000a4d0001" + "00" * 56
)
CLIENT, SERVER = (bytes(10) + b"\xff\xff" + bytes([10, 77, 0, host]) for host in (2, 1))


def test_a_req_is_the_one_of_linux():
    own = Terms(qpn=0x11, psn=0x5F31CE, responder_resources=1, initiator_depth=1, mtu=1024)
    fields = request_of(own, LINUX, service_id(PortSpace.TCP, 7174), Path(SERVER, flow_label=0xC65EA), CLIENT)
    made = pack(
        Attribute.REQ, 0x28F1EE31A, IpHeader(CLIENT, SERVER, 0xE99C).pack(), local_comm_id=0x1AE31E8F,
        local_ca_guid=0x505400FFFE770002, **fields,
    )
    assert made == GOLDEN_REQ


def test_addresses_of_a_req_are_gids():
    message = parse(GOLDEN_REQ)
    assert message is not None
    assert IpHeader.parse(message.fields["private_data"]) == IpHeader(CLIENT, SERVER, 0xE99C)


@pytest.mark.parametrize("size", [*range(24), 255, 257])
def test_only_whole_mads_are_messages(size):
    assert parse(GOLDEN_REQ.ljust(257, b"\0")[:size]) is None


@pytest.mark.parametrize("at", [0, 1, 2, 3, 16, 17])
def test_other_mads_are_no_messages(at):
    mad = bytearray(GOLDEN_REQ)
    mad[at] ^= 0x80
    assert parse(bytes(mad)) is None


@pytest.mark.parametrize("ipv4", [True, False])
def test_ip_headers_are_read_as_they_are_written(ipv4):
    gids = [bytes(10) + b"\xff\xff" + secrets.token_bytes(4) if ipv4 else secrets.token_bytes(16) for _ in range(2)]
    header = IpHeader(*gids, 7174)
    assert header.pack()[1] >> 4 == (4 if ipv4 else 6)
    assert IpHeader.parse(header.pack()) == header


def test_times_are_those_of_linux():
    assert [seconds(code) for code in (0, 8, 18, 20, 31)] == [0.001, 0.001, 1.024, 4.096, 8388.608]
    assert LINUX.resend == 6.144
    assert [ack_timeout(15, 18), ack_timeout(0, 18), ack_timeout(18, 18), ack_timeout(30, 18)] == [19, 19, 20, 30]
