"""Messages of the connection manager as tshark sees them."""

import subprocess
from pathlib import Path

import pytest

from gpunetio import PortConfig, cm, verbs
from gpunetio.errors import ConnectionRejectedError
from pcap_rig import need_tshark
from udp_rig import own_address

pytestmark = pytest.mark.soft_nic

PORT = 7500
REQ, REJ, REP, RTU, DREQ, DREP, SIDR_REQ, SIDR_REP = 0x10, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18
CM = "infiniband.cm"
FIELDS = {
    "malformed": "_ws.malformed", "severity": "_ws.expert.severity", "qpn": "infiniband.bth.destqp",
    "q_key": "infiniband.deth.q_key", "source": "infiniband.deth.srcqp", "class": "infiniband.mad.mgmtclass",
    "method": "infiniband.mad.method", "attribute": "infiniband.mad.attributeid",
    "service": f"{CM}.req.serviceid", "ca_guid": f"{CM}.req.localcaguid", "local_qpn": f"{CM}.req.localqpn",
    "psn": f"{CM}.req.startpsn", "mtu": f"{CM}.req.pppmtu", "retries": f"{CM}.req.maxcmretr",
    "rep_qpn": f"{CM}.rep.localqpn", "rep_psn": f"{CM}.rep.startpsn", "rep_guid": f"{CM}.rep.localcaguid",
    "reason": f"{CM}.rej.reason",
}


def dissect(path: Path) -> list[dict[str, str]]:
    """The packets of a file, none of which tshark finds malformed."""
    command = ["tshark", "-n", "-r", str(path), "-T", "fields", "-E", "separator=|"]
    for field in FIELDS.values():
        command += ["-e", field]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    packets = [dict(zip(FIELDS, line.split("|"), strict=True)) for line in done.stdout.splitlines()]
    assert all(not packet["malformed"] and not packet["severity"] for packet in packets), packets
    return packets


def test_tshark_knows_the_messages(tmp_path):
    """A connection that is refused, one that comes and goes, and a service of datagrams."""
    need_tshark()
    file = tmp_path / "cm.pcap"
    ports = [PortConfig(addresses=(own_address(),), capture=file), PortConfig(addresses=(own_address(),))]
    with verbs.open("soft0", port=ports[0]) as a, verbs.open("soft1", port=ports[1]) as b:
        cqs = a.create_cq(8), b.create_cq(8)
        asks, serves = (
            cq.ctx.create_pd().create_qp(sq_wr=2, rq_wr=2, send_cq=cq, receive_cq=cq) for cq in cqs
        )
        psns = asks.psn, serves.psn
        guids = [ctx.query_device().node_guid for ctx in (a, b)]
        assert guids[0] != guids[1]
        to = ports[1].addresses[0]
        with cm.listen(b, PORT) as listener:
            with pytest.raises(ConnectionRejectedError):
                cm.connect(asks, to, PORT + 1)
            asks_psn = asks.psn  # a new one, after the reset
            with cm.start_connecting(asks, to, PORT) as connection, listener.accept().accept(serves) as other:
                connection.established()
                connection.disconnect()
                other.disconnected()
        with pytest.raises(ConnectionRejectedError):
            cm.resolve(a, to, PORT)
        qpns = asks.qpn, serves.qpn
    packets = dissect(file)
    assert [int(packet["attribute"], 0) for packet in packets] == [
        REQ, REJ, REQ, REP, RTU, DREQ, DREP, SIDR_REQ, SIDR_REP
    ]
    for packet in packets:
        assert [int(packet[name], 0) for name in ("qpn", "source", "q_key", "class", "method")] == [
            1, 1, 0x80010000, 7, 3
        ]
    req, rep = packets[2], packets[3]
    told = {name: int(req[name], 0) for name in ("service", "ca_guid", "local_qpn", "psn", "retries")}
    assert told == {
        "service": 0x1060000 + PORT, "ca_guid": guids[0], "local_qpn": qpns[0], "psn": asks_psn, "retries": 15
    }
    told = [int(rep[name], 0) for name in ("rep_qpn", "rep_psn", "rep_guid")]
    assert told == [qpns[1], psns[1], guids[1]]
    assert int(packets[1]["reason"], 0) == cm.RejectReason.INVALID_SERVICE_ID
