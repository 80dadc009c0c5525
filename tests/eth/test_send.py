"""Send queues of CPU programs: what comes back to a receive queue of the same NIC. scapy is the judge."""

import dataclasses
from contextlib import ExitStack

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.l2 import Dot1Q, Ether

from eth_receive_rig import lead, remove_rules
from ethernet_rig import nic_of
from gpunetio import Gpu, PortConfig, eth, verbs
from gpunetio.errors import BadStateError, FullError, InvalidValueError, NotSupportedError, TooBigError
from gpunetio.flow import FlowPort, match
from gpunetio.formats.ethernet_queues import InlineMode, QueueState
from gpunetio.formats.wqe import CTRL_SEG, DATA_SEG, ETH_SEG, WQEBB, EthChecksum, WqeOpcode
from gpunetio.memory import HostMemory
from nic_rig import view

SOON = 10.0  # seconds: nothing waits that long


class Out:
    """A region with frames to this NIC itself."""

    def __init__(self, pd: verbs.PD, nbytes: int = 1 << 16):
        self.memory = HostMemory(nbytes)
        self.region = pd.register(self.memory)
        self.l2 = Ether(src="02:00:00:00:00:05", dst=nic_of(pd.ctx).mac.hex(":"))

    def put(self, offset: int, packet: object) -> bytes:
        frame = bytes(packet)  # type: ignore[call-overload]
        self.memory.array[offset : offset + len(frame)] = list(frame)
        return frame


def set_caps(monkeypatch, ctx, **changes) -> None:
    caps = dataclasses.replace(eth.query_caps(ctx), **changes)
    monkeypatch.setattr("gpunetio.eth.sq.query_caps", lambda ctx: caps)


def test_packets_are_sent_and_complete_in_order(ctx, pd):
    out = Out(pd)
    with eth.ManagedRxq(pd, 64, 1600) as rxq, eth.CpuTxq(pd, 10) as txq:
        lead(ctx, rxq.tirn)
        assert (txq.depth, txq.state, txq.completions(timeout=0)) == (64, QueueState.RDY, [])
        for lap in range(8):  # more than a lap of the ring
            frames = [out.put(2048 * n, out.l2 / IP() / UDP() / bytes([lap, n]) / bytes(n)) for n in range(16)]
            txq.send(out.region, 0, len(frames[0]), context=(lap, 0))
            txq.post(eth.Packet(out.region, 2048 * n, len(frames[n]), (lap, n)) for n in range(1, 16))
            done = txq.completions(3, timeout=SOON)
            done += txq.completions(least=16 - len(done), timeout=SOON)
            assert [(one.context, one.error) for one in done] == [((lap, n), None) for n in range(16)]
            stamps = [one.timestamp for one in done]
            assert stamps == sorted(stamps)
            assert txq.in_flight == 0
            for packet, sent in zip(rxq.receive(least=16, timeout=SOON), frames, strict=True):
                with packet:
                    assert packet.data.tobytes() == sent
        remove_rules(ctx)


def test_checksums(ctx, pd):
    out = Out(pd)
    with eth.ManagedRxq(pd, 64, 1600) as rxq, eth.CpuTxq(pd, checksum=True) as txq:
        lead(ctx, rxq.tirn)
        right = bytes(out.l2 / IP() / UDP() / b"data")
        nbytes = len(out.put(0, out.l2 / IP(chksum=1) / UDP(chksum=2) / b"data"))
        txq.send(out.region, nbytes=nbytes)
        (packet,) = rxq.receive(timeout=SOON)
        assert packet.data.tobytes() == right
        remove_rules(ctx)


@pytest.mark.parametrize("how", ["rule", "tir", "rss"])
def test_queues_do_not_hear_what_their_own_port_says_to_all(ctx, pd, how):
    """So that a kernel that forwards packets does not send one to all for ever. A frame to the own MAC comes back."""
    out = Out(pd)
    with ExitStack() as undo:
        rxq, other = (undo.enter_context(eth.ManagedRxq(pd, 4, 64)) for _ in range(2))
        txq = undo.enter_context(eth.CpuTxq(pd))
        if how == "tir":
            lead(ctx, rxq.tirn)
            undo.callback(remove_rules, ctx)
        else:
            port = undo.enter_context(FlowPort(ctx))
            port.steer(match.everything(), rxq if how == "rule" else [rxq, other])
        to_all = out.put(0, Ether(src=out.l2.src, dst="ff:ff:ff:ff:ff:ff") / IP() / UDP())
        own = out.put(100, out.l2 / IP() / UDP())
        txq.post([eth.Packet(out.region, 0, len(to_all)), eth.Packet(out.region, 100, len(own))])
        txq.completions(least=2, timeout=SOON)
        got = [packet.data.tobytes() for queue in (rxq, other) for packet in queue.receive(timeout=0)]
        assert got == [own]
        assert nic_of(ctx).counters["rx_frame_own"] == 1


def test_headers_in_the_wqe_where_a_device_needs_them(ctx, pd, monkeypatch):
    set_caps(monkeypatch, ctx, min_inline=InlineMode.L2)
    out = Out(pd)
    with eth.ManagedRxq(pd, 64, 1600) as rxq, eth.CpuTxq(pd) as txq:
        lead(ctx, rxq.tirn)
        for packet in (out.l2, out.l2 / b"1234", out.l2 / IP() / UDP() / bytes(range(99))):
            frame = out.put(0, packet)
            txq.send(out.region, nbytes=len(frame))
            (done,) = txq.completions(timeout=SOON)
            assert done.error is None
            with rxq.receive(timeout=SOON)[0] as found:
                assert found.data.tobytes() == frame
        remove_rules(ctx)


@pytest.mark.parametrize("mode, refused", [(InlineMode.L2, eth.EthTxq), (InlineMode.IP, eth.CpuTxq)])
def test_headers_that_a_queue_does_not_copy(ctx, pd, monkeypatch, mode, refused):
    set_caps(monkeypatch, ctx, min_inline=mode)
    said = f"up to {mode.name} in the WQE; a {refused.__name__} has"
    with Gpu("host") as gpu, pytest.raises(NotSupportedError, match=said):
        eth.EthTxq(gpu, pd) if refused is eth.EthTxq else eth.CpuTxq(pd)


def test_a_frame_fits_into_the_mtu_or_is_refused_before_it_is_sent():
    """VLAN tags do not count (IEEE 802.3 3.2.7). The device has the same limit, so what passes here is sent."""
    with verbs.open("soft0", port=PortConfig(mtu=1500)) as ctx:
        pd = ctx.create_pd()
        out = Out(pd)
        assert eth.query_caps(ctx).mtu == 1500
        with eth.CpuTxq(pd, max_lso_headers=64) as txq:
            for tags, most in ((0, 1514), (1, 1518), (2, 1522), (3, 1522)):
                head = out.l2
                for _ in range(tags):
                    head /= Dot1Q(vlan=5)
                nbytes = len(out.put(0, (head / bytes(1600))))
                txq.send(out.region, nbytes=most)
                assert txq.completions(timeout=SOON)[0].error is None
                for wrong in (most + 1, nbytes):
                    with pytest.raises(TooBigError, match=f"{wrong - most} bytes too long: .* MTU of 1500"):
                        txq.send(out.region, nbytes=wrong)
            headers = bytes(out.l2 / IP() / TCP())
            txq.send_lso(headers, out.region, 0, 4000, mss=1460)
            assert txq.completions(timeout=SOON)[0].error is None
            with pytest.raises(TooBigError, match="mss = 1461 makes a frame that is 1 bytes too long"):
                txq.send_lso(headers, out.region, 0, 4000, mss=1461)
            txq.send_lso(headers, out.region, 0, 1460, mss=9000)  # one packet
            assert txq.completions(timeout=SOON)[0].error is None
            assert txq.state is QueueState.RDY


def test_segmentation_is_asked_for_as_the_device_has_it(ctx, pd, monkeypatch):
    """The WQE: opcode, MSS, all headers inline, then the payload."""
    out = Out(pd)
    set_caps(monkeypatch, ctx, max_lso=0)
    with pytest.raises(NotSupportedError, match="has no LSO"):
        eth.CpuTxq(pd, max_lso_headers=64)
    set_caps(monkeypatch, ctx, max_lso=1 << 16)
    headers = bytes(out.l2 / IP() / TCP())
    with eth.CpuTxq(pd, 4, max_lso_headers=64) as txq:
        monkeypatch.setattr(txq, "_doorbells", Doorbells())
        txq.send_lso(headers, out.region, 100, 4000, mss=1460, context="lso")
        wqe = view(txq.sq_address, 2 * WQEBB)
        control, segment = CTRL_SEG.at(wqe), ETH_SEG.at(wqe, 16)
        assert control["opmod_idx_opcode"] == WqeOpcode.TSO
        assert control["qpn_ds"] == txq.sqn << 8 | 7
        assert (segment["mss"], segment["inline_hdr_sz"]) == (1460, 54)
        assert segment["cs_flags"] == EthChecksum.L3 | EthChecksum.L4, "whatever the queue does with other packets"
        assert wqe[30:84].tobytes() == headers
        data = DATA_SEG.at(wqe, 96)
        assert (data["byte_count"], data["lkey"], data["addr"]) == (4000, out.region.lkey, out.region.iova + 100)
        assert txq.in_flight == 2
        for wrong, error, words in (
            ({"headers": bytes(65)}, TooBigError, "65 bytes of headers"), ({"mss": 0}, InvalidValueError, "mss = 0"),
            ({"nbytes": 0}, TooBigError, "nbytes = 0"), ({"nbytes": 1 << 17}, InvalidValueError, "131072 bytes"),
        ):
            packet = eth.Packet(**{"region": out.region, "nbytes": 100, "headers": headers, "mss": 1000} | wrong)
            with pytest.raises(error, match=words):
                txq.post([packet])
        assert txq.in_flight == 2
    with eth.CpuTxq(pd) as txq, pytest.raises(BadStateError, match="max_lso_headers="):
        txq.send_lso(headers, out.region, mss=1000)


def test_segments_arrive(ctx, pd):
    """Each has a copy of the headers with lengths, sequence number and checksums of its own: scapy builds the same."""
    if not eth.query_caps(ctx).max_lso:
        pytest.skip("the device has no LSO")
    out = Out(pd)
    payload = bytes(range(250)) * 16
    out.put(0, payload)
    head = out.l2 / IP(src="192.0.2.1", dst="192.0.2.2") / TCP(sport=1, dport=2, seq=1000, flags="A")
    with eth.ManagedRxq(pd, 64, 1600) as rxq:
        with eth.CpuTxq(pd, checksum=True, max_lso_headers=64) as txq:
            lead(ctx, rxq.tirn)
            txq.send_lso(bytes(head), out.region, 0, len(payload), mss=1460, context="lso")
            (done,) = txq.completions(timeout=SOON)
            assert (done.context, done.error) == ("lso", None)
        for n, packet in enumerate(rxq.receive(least=3, timeout=SOON)):
            with packet:
                found = Ether(packet.data.tobytes())
            part = payload[1460 * n : 1460 * (n + 1)]
            assert (bytes(found[TCP].payload), found[TCP].seq) == (part, 1000 + 1460 * n)
            chksums = found[IP].chksum, found[TCP].chksum
            del found[IP].chksum, found[TCP].chksum
            right = Ether(bytes(found))
            assert chksums == (right[IP].chksum, right[TCP].chksum)
            assert found[IP].len == 40 + len(part)
        remove_rules(ctx)


class Doorbells:
    """Doorbells that nobody hears."""

    def ring_send(self, *args: int) -> None: ...


@pytest.mark.parametrize("packet, error, words", [
    ({"nbytes": 13}, InvalidValueError, "nbytes = 13"), ({"nbytes": -1}, InvalidValueError, "-1 bytes"),
    ({"nbytes": 16385}, TooBigError, "16384 bytes at most"), ({"nbytes": 64, "offset": -1}, InvalidValueError, "-1"),
    ({"nbytes": 64, "offset": 65473}, InvalidValueError, "64 bytes at offset 65473"),
    ({"region": "other", "nbytes": 64}, InvalidValueError, "belongs to PD"),
    ({"region": "closed", "nbytes": 64}, BadStateError, "is closed"),
    ({"region": None, "nbytes": 64}, InvalidValueError, "region = None"),
])
def test_packets_that_are_refused(ctx, pd, packet, error, words):
    out, gone = Out(pd), pd.register(HostMemory(4096))
    gone.close()
    regions = {"other": ctx.create_pd().register(HostMemory(4096)), "closed": gone, None: None, "right": out.region}
    with eth.CpuTxq(pd) as txq:
        bad = eth.Packet(**packet | {"region": regions[packet.get("region", "right")]})
        with pytest.raises(error, match=words):
            txq.post([eth.Packet(out.region, 0, 64), bad])
        assert txq.in_flight == 0  # all, or none
        with pytest.raises(InvalidValueError, match="packet = 5"):
            txq.post([5])  # type: ignore[list-item]


def test_a_full_queue(pd):
    out = Out(pd)
    with eth.CpuTxq(pd, 64) as txq:
        for _ in range(3):
            txq.post([eth.Packet(out.region, 0, 64)] * 64)
            with pytest.raises(FullError, match=r"64 of 64 basic blocks wait, and these packets take 1"):
                txq.send(out.region, 0, 64)
            assert len(txq.completions(least=64, timeout=SOON)) == 64


def test_a_failure_moves_the_queue_to_err_and_reset_brings_it_back(ctx, pd):
    out, gone = Out(pd), pd.register(HostMemory(4096))
    with eth.CpuTxq(pd) as txq:
        txq.send(out.region, 0, 64, context=0)
        (first,) = txq.completions(timeout=SOON)
        key = gone.lkey
        gone.close()
        body = txq._body(eth.Packet(out.region, 0, 64, "bad"))
        bad = body[0], body[1].replace(out.region.lkey.to_bytes(4, "big"), key.to_bytes(4, "big"), 1)
        bodies = iter([bad, body])
        txq._body = lambda packet: next(bodies)  # type: ignore[method-assign]
        txq.post([eth.Packet(out.region, 0, 64, "bad"), eth.Packet(out.region, 0, 64, "flushed")])
        del txq._body  # type: ignore[method-assign]
        done = txq.completions(least=2, timeout=SOON)
        assert [one.context for one in done] == ["bad", "flushed"]
        assert "LOCAL_PROT" in str(done[0].error)
        assert "WR_FLUSH" in str(done[1].error)
        assert (first.error, txq.last_error(), txq.state) == (None, done[0].error, QueueState.ERR)
        with pytest.raises(BadStateError, match=r"reset\(\) it"):
            txq.send(out.region, 0, 64)
        txq.reset()
        assert (txq.state, txq.last_error()) == (QueueState.RDY, None)
        txq.send(out.region, 0, 64, context="again")
        assert [one.context for one in txq.completions(timeout=SOON)] == ["again"]


def test_events_of_a_channel(ctx, pd):
    out, channel = Out(pd), ctx.create_comp_channel()
    with eth.CpuTxq(pd, channel=channel) as txq:
        txq.req_notify()
        assert channel.get_event(0.01) is None
        txq.send(out.region, 0, 64)
        assert channel.get_event(SOON) is txq.cq
        txq.cq.ack_events()
    with eth.CpuTxq(pd) as txq, pytest.raises(BadStateError, match="channel="):
        txq.req_notify()


def test_closing_leaves_nothing(ctx):
    pd = ctx.create_pd()
    eth.CpuTxq(pd).close()
    before = len(ctx.users), len(ctx.provider.devx_objects())
    with eth.CpuTxq(pd) as txq:
        pass
    with pytest.raises(BadStateError, match="closed"):
        txq.completions(timeout=0)
    assert (len(ctx.users), len(ctx.provider.devx_objects())) == before
    assert not pd.users
