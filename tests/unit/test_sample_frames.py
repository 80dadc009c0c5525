"""The frames that samples send, as scapy reads them."""

import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether

from gpunetio.errors import InvalidValueError
from gpunetio.samples.frames import HEADERS, frame


@pytest.mark.parametrize("nbytes", [HEADERS, 64, 1514])
def test_a_frame_is_udp_over_ipv4(nbytes):
    made = Ether(frame(nbytes))
    assert (made.dst, made.src, made.type) == ("10:11:12:13:14:15", "20:21:22:23:24:25", 0x0800)
    assert (made[IP].version, made[IP].ihl, made[IP].len, made[IP].chksum) == (4, 5, nbytes - 14, 0)
    assert (made[UDP].len, made[UDP].chksum, bytes(made[UDP].payload)) == (nbytes - 34, 0, bytes(nbytes - HEADERS))


def test_the_payload_is_behind_the_headers():
    assert bytes(Ether(frame(64, b"text"))[UDP].payload) == b"text".ljust(22, b"\0")


def test_the_original_has_zeros_behind_the_ether_type():
    assert frame(20, original=True) == bytes.fromhex("101112131415 202122232425 0800") + bytes(6)


@pytest.mark.parametrize("nbytes, options, words", [
    (HEADERS - 1, {}, ["41 bytes", "42 or more", "--original-frame"]),
    (45, {"payload": b"four"}, ["45 bytes", "46 or more"]),
    (13, {"original": True}, ["13 bytes", "14 or more"]),
])
def test_a_frame_that_is_too_short_is_refused(nbytes, options, words):
    with pytest.raises(InvalidValueError) as error:
        frame(nbytes, **options)
    assert all(word in str(error.value) for word in words)
