"""Packet headers against scapy's own idea of them, or the order of their fields where scapy has none."""

import ipaddress
import struct
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scapy.contrib import roce
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether

from gpunetio.formats import packet as formats
from gpunetio.formats.layout import Entry


def uint(bits: int):
    return st.integers(0, (1 << bits) - 1)


def decoded(entry: Entry, data: bytes) -> Mapping[str, object]:
    """The fields of an entry, integers and bytes."""
    record = np.frombuffer(data, entry.dtype, 1)[0]
    return {name: v.tobytes() if (v := record[name]).dtype.kind == "V" else int(v) for name in entry.offsets}


@given(opcode=st.sampled_from(sorted(formats.PacketOpcode)), solicited=uint(1), migrated=uint(1), pad=uint(2),
       version=uint(4), pkey=uint(16), fecn=uint(1), becn=uint(1), dqpn=uint(24), ackreq=uint(1),
       psn=uint(24))
def test_bth(opcode, solicited, migrated, pad, version, pkey, fecn, becn, dqpn, ackreq, psn):
    built = roce.BTH(opcode=opcode, solicited=solicited, migreq=migrated, padcount=pad, version=version, pkey=pkey,
                     fecn=fecn, becn=becn, dqpn=dqpn, ackreq=ackreq, psn=psn, icrc=0)
    data = bytes(built)
    assert len(data) == formats.BTH.size + formats.ICRC_SIZE
    flags = formats.SOLICITED * solicited | formats.MIGRATED * migrated | pad << formats.PAD_SHIFT | version
    assert decoded(formats.BTH, data) == {
        "opcode": opcode, "se_m_pad_tver": flags, "pkey": pkey,
        "resv_dest_qp": fecn << 31 | becn << 30 | dqpn, "ack_psn": formats.ACK_REQUEST * ackreq | psn,
    }
    assert flags & formats.TVER_MASK == version
    assert psn == psn & formats.PSN_MASK
    assert dqpn == dqpn & formats.QPN_MASK


@pytest.mark.parametrize("opcode", [opcode for opcode in formats.PacketOpcode if opcode < 0xC0])
def test_opcodes(opcode):
    """Those of IBTA. scapy writes RDMA_WRITE for WRITE, and all names in full."""
    short = {"WITH_IMMEDIATE": "IMM", "RDMA_": ""}
    name = roce._bth_opcodes[opcode.value]
    for long, instead in short.items():
        name = name.replace(long, instead)
    assert name == opcode.name


@given(syndrome=uint(8), msn=uint(24))
def test_aeth(syndrome, msn):
    got = decoded(formats.AETH, bytes(roce.AETH(syndrome=syndrome, msn=msn)))
    assert got == {"syndrome_msn": syndrome << formats.SYNDROME_SHIFT | msn}
    assert msn == msn & formats.MSN_MASK


@pytest.mark.parametrize(
    ("kind", "value", "syndrome"),
    [("ACK", formats.NO_CREDITS, 0x1F), ("RNR_NAK", 12, 0x2C), ("NAK", formats.NakCode.PSN_SEQUENCE, 0x60),
     ("NAK", formats.NakCode.REMOTE_ACCESS, 0x62)],
)
def test_syndromes(kind, value, syndrome):
    """The values of IBTA table 47 and those below it."""
    assert formats.AckKind[kind] << formats.ACK_KIND_SHIFT | value == syndrome
    assert syndrome & formats.ACK_VALUE_MASK == value


@given(traffic_class=uint(8), flow=uint(20), length=uint(16), hop_limit=uint(8), sgid=uint(128), dgid=uint(128))
def test_grh(traffic_class, flow, length, hop_limit, sgid, dgid):
    built = roce.GRH(tclass=traffic_class, flowlabel=flow, paylen=length, nexthdr=formats.GRH_NEXT_HEADER,
                     hoplmt=hop_limit, sgid=sgid, dgid=dgid)
    assert decoded(formats.GRH, bytes(built)) == {
        "version_class_flow": 6 << 28 | traffic_class << 20 | flow, "payload_length": length,
        "next_header": formats.GRH_NEXT_HEADER, "hop_limit": hop_limit,
        "sgid": sgid.to_bytes(16, "big"), "dgid": dgid.to_bytes(16, "big"),
    }


@pytest.mark.parametrize(
    ("entry", "model"),
    [
        (formats.RETH, ">QII"), (formats.ATOMIC_ETH, ">QIQQ"), (formats.ATOMIC_ACK_ETH, ">Q"), (formats.IMM_DT, ">I"),
        (formats.LRH, ">BBHHH"), (formats.DETH, ">II"),
    ],
    ids=["reth", "atomic_eth", "atomic_ack_eth", "imm_dt", "lrh", "deth"],
)
def test_headers_that_scapy_lacks(entry, model):
    """IBTA 9.3.2, 9.3.3, 9.3.5, 9.5.3, 9.6 and 7.7: fields without gaps."""
    values = tuple(0x0102030405060708 * (i + 1) % (1 << 8 * struct.calcsize(">" + code))
                   for i, code in enumerate(model[1:]))
    data = struct.pack(model, *values)
    assert entry.size == len(data)
    assert tuple(decoded(entry, data).values()) == values


@given(destination=uint(48), source=uint(48), kind=st.sampled_from([formats.ETHER_TYPE_IPV4, formats.ETHER_TYPE_IPV6]))
def test_ethernet(destination, source, kind):
    macs = [mac.to_bytes(6, "big") for mac in (destination, source)]
    built = Ether(dst=macs[0].hex(":"), src=macs[1].hex(":"), type=kind)
    assert decoded(formats.ETHERNET, bytes(built)) == {
        "destination": macs[0], "source": macs[1], "ether_type": kind,
    }


@given(tos=uint(8), length=uint(16), ip_id=uint(16), ttl=uint(8), checksum=uint(16), source=uint(32), target=uint(32))
def test_ipv4(tos, length, ip_id, ttl, checksum, source, target):
    addresses = [ipaddress.IPv4Address(a) for a in (source, target)]
    built = IP(tos=tos, len=length, id=ip_id, flags="DF", ttl=ttl, proto=17, chksum=checksum,
               src=str(addresses[0]), dst=str(addresses[1]))
    assert decoded(formats.IPV4, bytes(built)) == {
        "version_ihl": 0x45, "tos": tos, "total_length": length, "identification": ip_id,
        "flags_fragment": formats.IPV4_DONT_FRAGMENT, "ttl": ttl, "protocol": formats.IP_PROTOCOL_UDP,
        "checksum": checksum, "source": addresses[0].packed, "destination": addresses[1].packed,
    }


@given(traffic_class=uint(8), flow=uint(20), length=uint(16), hop_limit=uint(8), source=uint(128), target=uint(128))
def test_ipv6(traffic_class, flow, length, hop_limit, source, target):
    addresses = [ipaddress.IPv6Address(a) for a in (source, target)]
    built = IPv6(tc=traffic_class, fl=flow, plen=length, nh=formats.IP_PROTOCOL_UDP, hlim=hop_limit,
                 src=str(addresses[0]), dst=str(addresses[1]))
    assert decoded(formats.IPV6, bytes(built)) == {
        "version_class_flow": 6 << 28 | traffic_class << 20 | flow, "payload_length": length,
        "next_header": formats.IP_PROTOCOL_UDP, "hop_limit": hop_limit,
        "source": addresses[0].packed, "destination": addresses[1].packed,
    }


@given(port=uint(16), length=uint(16), checksum=uint(16))
def test_udp(port, length, checksum):
    built = UDP(sport=port, dport=formats.ROCE_UDP_PORT, len=length, chksum=checksum)
    assert decoded(formats.UDP, bytes(built)) == {
        "source_port": port, "destination_port": 4791, "length": length, "checksum": checksum,
    }
