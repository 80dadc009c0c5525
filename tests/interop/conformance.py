"""What two RC ends must do together: a kit that any two implementations can be held against.

A subclass gives `link`: who requests, who responds, and how they are connected. All contents are compared at both ends:
each has an image of what its memory must hold, guard bytes included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest

from guest import Failed, Party, Remote, both

MEMORY = 1 << 18
LARGEST = 1 << 16
WORD = 1 << 64
WRONG_KEY = 0x00BAD000


@dataclass(frozen=True)
class Manners:
    """How an implementation fails, where they differ. Statuses in pairs: at the requester, at the responder."""

    events: bool  # asynchronous events for requests that it refuses as responder
    too_long: tuple[str, str]  # a message longer than the receive, as responder
    no_right: tuple[str, str]  # a receive into memory without local write, as responder
    local_key: str  # a wrong local key, as requester
    alignment: bool  # does not even take an atomic that is not aligned, as requester


STANDARD = Manners(True, ("REM_INV_REQ_ERR", "LOC_LEN_ERR"), ("REM_OP_ERR", "LOC_PROT_ERR"), "LOC_PROT_ERR", False)
# Linux 6.1: what goes wrong with its own memory it calls a malformed request, and nobody is told of refusals.
RXE = Manners(False, ("REM_OP_ERR", "LOC_QP_OP_ERR"), ("REM_OP_ERR", "LOC_QP_OP_ERR"), "LOC_QP_OP_ERR", True)


@dataclass
class Link:
    """Two sessions, how they fail, and how to connect queue pairs of theirs."""

    requester: Remote
    responder: Remote
    requesting: Manners
    responding: Manners
    ip: str
    mtu: int

    @contextmanager
    def ends(
        self, requester: dict[str, Any] | None = None, responder: dict[str, Any] | None = None, **attributes: Any
    ) -> Iterator[tuple[Party, Party]]:
        """Two connected ends. The dictionaries: arguments of `create` for one of them, and `qp_access` of `connect`."""
        made: list[Party] = []
        rights: list[dict[str, Any]] = []
        try:
            for seed, remote, options in ((1, self.requester, requester), (2, self.responder, responder)):
                arguments = {"ip": self.ip, "size": MEMORY, "psn": 0xFFFFF0 + 8 * seed, **(options or {})}
                rights.append({"access": arguments.pop("qp_access")} if "qp_access" in arguments else {})
                made.append(remote.create(**arguments))
            a, b = made
            for party, other, access in ((a, b, rights[0]), (b, a, rights[1])):
                party.call("connect", remote=other.about, mtu=self.mtu, **access, **attributes)
            yield a, b
        finally:
            for party in made:
                if party.remote.usable:
                    party.call("destroy")


def sizes(mtu: int) -> list[int]:
    """Around every boundary: of padding, of packets, of the longest message."""
    edges = [edge for whole in (mtu, 2 * mtu, 3 * mtu) for edge in (whole - 1, whole, whole + 1)]
    return sorted({0, 1, 2, 3, 4, 5, 63, 64, 65, mtu - 3, mtu + 3, *edges, LARGEST - 1, LARGEST})


def offsets(number: int) -> tuple[int, int]:
    """Where the message of this number lies at either end: another place, and another alignment, each time."""
    return 256 + number * 1021 % 65521, 256 + number * 1543 % 65519


def expect(completion: dict[str, Any], **fields: Any) -> None:
    """The completion is good and has these fields."""
    assert {"status": "SUCCESS", **fields}.items() <= completion.items(), completion


SENDS = [("SEND", None), ("SEND_IMM", 0x01020304), ("WRITE_IMM", 0xFFFFFFFE)]


class Transfers:
    """Everything that succeeds, between the two ends of a `link`."""

    # messages of a ping-pong: short ones, at each packet boundary, long ones
    counts = (200, 20, 5)
    many = counts  # in one ping-pong of each path MTU: it may be longer

    # --- transfers

    def test_write(self, link: Link) -> None:
        with filled(link) as (a, b):
            for number, nbytes in enumerate(sizes(link.mtu)):
                here, there = offsets(number)
                a.post("WRITE", [[here, nbytes]], remote=b.address + there, rkey=b.rkey, wr_id=number)
                expect(a.sent(), opcode="RDMA_WRITE", wr_id=number)
                b.image[there : there + nbytes] = a.image[here : here + nbytes]
                b.verify(f"{nbytes} bytes")
            a.verify()
            assert b.poll("receive", timeout=0) == []

    def test_read(self, link: Link) -> None:
        with filled(link) as (a, b):
            for number, nbytes in enumerate(sizes(link.mtu)):
                here, there = offsets(number)
                a.post("READ", [[here, nbytes]], remote=b.address + there, rkey=b.rkey, wr_id=number)
                expect(a.sent(), opcode="RDMA_READ", wr_id=number)
                a.image[here : here + nbytes] = b.image[there : there + nbytes]
                a.verify(f"{nbytes} bytes")
            b.verify()

    @pytest.mark.parametrize("op, imm", SENDS)
    def test_with_receive(self, link: Link, op: str, imm: int | None) -> None:
        """What consumes a receive: a send scatters into it, a write with immediate leaves its memory alone."""
        write = op == "WRITE_IMM"
        with filled(link) as (a, b):
            for number, nbytes in enumerate(sizes(link.mtu)):
                here, there = offsets(number)
                b.receive([0, 8] if write else [there, nbytes + 8], wr_id=number)
                to = {"remote": b.address + there, "rkey": b.rkey} if write else {}
                a.post(op, [[here, nbytes]], imm=imm or 0, wr_id=number, **to)
                expect(a.sent(), opcode="RDMA_WRITE" if write else "SEND", wr_id=number)
                arrived = b.received()
                expect(arrived, opcode="RECV_RDMA_WITH_IMM" if write else "RECV", imm=imm, wr_id=number)
                assert arrived["byte_len"] == nbytes
                b.image[there : there + nbytes] = a.image[here : here + nbytes]
                b.verify(f"{nbytes} bytes")
            a.verify()

    @pytest.mark.parametrize("op", ["CS", "FA"])
    def test_atomic(self, link: Link, op: str) -> None:
        with filled(link) as (a, b):
            steps = [(1, None), (WORD - 1, None), (1 << 63, None), (0x0102030405060708, 0), (7, 0xDEAD)]
            for number, (value, compare) in enumerate(steps):
                here, there = 64 + 8 * number, 128 + 8 * (number % 2)
                old = int.from_bytes(b.image[there : there + 8], "little")
                wanted = old if compare is None else compare
                a.post(op, [[here, 8]], remote=b.address + there, rkey=b.rkey, swap_add=value, compare=wanted)
                expect(a.sent(), opcode="COMP_SWAP" if op == "CS" else "FETCH_ADD")
                a.image[here : here + 8] = old.to_bytes(8, "little")
                new = (old + value) % WORD if op == "FA" else value if wanted == old else old
                b.image[there : there + 8] = new.to_bytes(8, "little")
                a.verify(f"step {number}")
                b.verify(f"step {number}")

    def test_gather_and_scatter(self, link: Link) -> None:
        """Segments that meet packet boundaries nowhere, at both ends."""
        with filled(link) as (a, b):
            parts = [[1000, 3], [5000, link.mtu + 1], [9, 1], [20000, 2 * link.mtu - 6]]
            places = [[30001, link.mtu - 1], [40002, 5], [50003, 4 * link.mtu]]
            message = b"".join(bytes(a.image[at : at + n]) for at, n in parts)
            b.receive(*places)
            a.post("SEND", parts)
            expect(a.sent())
            assert b.received()["byte_len"] == len(message)
            at = 0
            for place, n in places:
                piece = message[at : at + n]
                b.image[place : place + len(piece)] = piece
                at += n
            b.verify()
            a.post("READ", places, remote=b.address + 11, rkey=b.rkey)
            expect(a.sent())
            at = 11
            for place, n in places:
                a.image[place : place + n] = b.image[at : at + n]
                at += n
            a.verify()

    def test_mixed(self, link: Link) -> None:
        """Many requests at once, of all kinds, one completion at the end: carried out in order."""
        with filled(link) as (a, b):
            n = 2 * link.mtu + 5
            requests: list[dict[str, Any]] = []
            for step in range(4):
                at = 1024 + step * 16384
                to = {"remote": b.address + at, "rkey": b.rkey, "signaled": False}
                b.receive([131072 + at, n], wr_id=step)
                requests += [
                    {"op": "WRITE", "sges": [[at, n]], **to},
                    {"op": "FA", "sges": [[512 + 16 * step, 8]], **to, "swap_add": 5},
                    {"op": "CS", "sges": [[520 + 16 * step, 8]], **to, "compare": 0, "swap_add": 1},
                    {"op": "SEND_IMM", "sges": [[at + 3, n]], "imm": step, "signaled": False},
                    {"op": "READ", "sges": [[131072 + at, n]], **to},
                ]
                old = int.from_bytes(a.image[at : at + 8], "little")
                new = (old + 5) % WORD
                b.image[at : at + n] = a.image[at : at + n]
                b.image[at : at + 8] = new.to_bytes(8, "little")
                b.image[131072 + at : 131072 + at + n] = a.image[at + 3 : at + 3 + n]
                a.image[512 + 16 * step : 528 + 16 * step] = old.to_bytes(8, "little") + new.to_bytes(8, "little")
                a.image[131072 + at : 131072 + at + n] = b.image[at : at + n]
            requests[-1] |= {"signaled": True, "wr_id": 99}
            a.call("post", requests=requests)
            expect(a.sent(), opcode="RDMA_READ", wr_id=99)
            assert a.poll("send", timeout=0) == []
            arrived = b.poll("receive", 4)
            assert [(one["status"], one["imm"], one["wr_id"]) for one in arrived] == [
                ("SUCCESS", step, step) for step in range(4)
            ]
            a.verify()
            b.verify()

    # --- ping-pong

    @pytest.mark.parametrize("requester_first", [True, False], ids=["requester_first", "responder_first"])
    def test_pingpong(self, link: Link, requester_first: bool) -> None:
        short, boundary, long = self.many if requester_first and link.ip == "ipv4" else self.counts
        mtu = link.mtu
        runs = [(64, short), *((n, boundary) for n in (mtu - 1, mtu, mtu + 1, 2 * mtu - 1, 2 * mtu, 2 * mtu + 1))]
        with link.ends({"size": 6 * LARGEST}, {"size": 6 * LARGEST}) as (a, b):
            for seed, (nbytes, count) in enumerate([*runs, (LARGEST, long)]):
                for party, first in ((a, requester_first), (b, not requester_first)):
                    party.call("prepare", first=first, nbytes=nbytes, seed=10 * seed)
                both(a, b, "pingpong", count=count, timeout=240)


class Conformance(Transfers):
    """What succeeds, and refusals."""

    @pytest.mark.parametrize("op", ["WRITE", "READ", "FA"])
    @pytest.mark.parametrize("wrong", ["key", "region", "queue_pair", "end", "start"])
    def test_access_refused(self, link: Link, op: str, wrong: str) -> None:
        """Wrong key; no right of the region, of the queue pair; a range that leaves the region behind or in front."""
        right = {"WRITE": "remote_write", "READ": "remote_read", "FA": "remote_atomic"}[op]
        others = ["local_write", *({"remote_write", "remote_read", "remote_atomic"} - {right})]
        option = {"region": {"access": others}, "queue_pair": {"qp_access": others}}.get(wrong, {})
        nbytes = 8 if op == "FA" else 100
        with filled(link, responder=option) as (a, b):
            b.receive([0, 64], wr_id=5)
            start = {"end": MEMORY - (0 if op == "FA" else 99), "start": -8}.get(wrong, 512)
            key = WRONG_KEY if wrong == "key" else b.rkey
            for number in range(3):
                a.post(op, [[64, nbytes]], remote=b.address + start, rkey=key, wr_id=number)
            # A queue pair without the right does not take the request at all; the others fail on the region.
            self.refused(link, a, b, "REM_INV_REQ_ERR" if wrong == "queue_pair" else "REM_ACCESS_ERR")

    @pytest.mark.parametrize("op", ["CS", "FA"])
    def test_atomic_misaligned(self, link: Link, op: str) -> None:
        with filled(link) as (a, b):
            b.receive([0, 64], wr_id=5)
            with pytest.raises(Failed, match="Invalid argument") if link.requesting.alignment else nullcontext():
                for number in range(3):
                    a.post(op, [[64, 8]], remote=b.address + 513, rkey=b.rkey, wr_id=number)
                self.refused(link, a, b, "REM_INV_REQ_ERR")

    @pytest.mark.parametrize("excess", [1, 5000])
    def test_message_longer_than_the_receive(self, link: Link, excess: int) -> None:
        there, here = link.responding.too_long
        with filled(link) as (a, b):
            self.receive_fails(a, b, 50 + excess, there, here)

    def test_receive_without_local_write(self, link: Link) -> None:
        there, here = link.responding.no_right
        with filled(link, responder={"access": []}) as (a, b):
            self.receive_fails(a, b, 50, there, here)
            b.verify()

    def test_local_key_refused(self, link: Link) -> None:
        """Nothing reaches the peer."""
        with filled(link) as (a, b):
            for number in range(3):
                a.post("WRITE", [[64, 100, WRONG_KEY]], remote=b.address, rkey=b.rkey, wr_id=number)
            self.failed(a, link.requesting.local_key)
            b.verify()
            assert b.state == "RTS"

    def test_no_receive(self, link: Link) -> None:
        """Receiver not ready, until the requester's patience ends; the responder stays as it is."""
        with link.ends(rnr_retry=2, min_rnr_timer=1) as (a, b):
            for number in range(3):
                a.post("SEND", [[0, 50]], wr_id=number)
            self.failed(a, "RNR_RETRY_EXC_ERR")
            assert b.state == "RTS"

    def test_late_receive(self, link: Link) -> None:
        """Receiver not ready, until it is."""
        with filled(link, rnr_retry=7, min_rnr_timer=14) as (a, b):
            a.post("SEND", [[0, 5000]])
            assert a.poll("send", timeout=0.1) == []
            b.receive([0, 5000])
            expect(a.sent())
            expect(b.received())
            b.image[:5000] = a.image[:5000]
            b.verify()

    def test_peer_gone(self, link: Link) -> None:
        with link.ends(ack_timeout=12, retry_cnt=2) as (a, b):
            b.call("to_error")
            for number in range(3):
                a.post("SEND", [[0, 50]], wr_id=number)
            self.failed(a, "RETRY_EXC_ERR")

    # --- how ends fail

    def refused(self, link: Link, requester: Party, responder: Party, status: str) -> None:
        """The responder has refused: it has changed nothing, is in error and says so, and its receive is flushed."""
        self.failed(requester, status)
        responder.verify()
        assert responder.state == "ERR"
        assert [(one["status"], one["wr_id"]) for one in responder.poll("receive", 1)] == [("WR_FLUSH_ERR", 5)]
        if link.responding.events:
            assert responder.events() == ["QP_REQ_ERR" if status == "REM_INV_REQ_ERR" else "QP_ACCESS_ERR"]
        else:
            assert responder.events(timeout=0) == []

    def receive_fails(self, requester: Party, responder: Party, nbytes: int, there: str, here: str) -> None:
        """The first of two receives fails and takes both queue pairs along."""
        responder.receive([100, 50], wr_id=5)
        responder.receive([200, 50], wr_id=6)
        for number in range(3):
            requester.post("SEND", [[0, nbytes]], wr_id=number)
        self.failed(requester, there)
        done = [(one["status"], one["wr_id"]) for one in responder.poll("receive", 2)]
        assert done == [(here, 5), ("WR_FLUSH_ERR", 6)]
        assert responder.state == "ERR"

    @staticmethod
    def failed(requester: Party, status: str) -> None:
        """The first of three requests has failed, the others are flushed, and the queue pair is in error."""
        done = [(one["status"], one["wr_id"]) for one in requester.poll("send", 3)]
        assert done == [(status, 0), ("WR_FLUSH_ERR", 1), ("WR_FLUSH_ERR", 2)]
        assert requester.state == "ERR"


class Streams:
    """Many requests on their way at once, over a wire that loses packets: each is carried out, once and in order."""

    ROUNDS, BATCH = 6, 24
    HALF = 1 << 19  # of the memory: messages come from the lower half and go to the same place in the upper one

    # The limit holds back reads only.
    @pytest.mark.parametrize(
        "op, max_rd_atomic", [("WRITE", 16), ("WRITE_IMM", 1), ("SEND", 16), ("READ", 1), ("READ", 16)]
    )
    def test_stream(self, link: Link, op: str, max_rd_atomic: int) -> None:
        half, mtu = self.HALF, link.mtu
        lengths = [mtu * 50, 1, mtu, 3 * mtu + 5, 0, mtu * 9 - 1]
        memory = {"size": 2 * half + 4096, "depth": 2 * self.BATCH}
        with filled(link, requester=memory, responder=memory, max_rd_atomic=max_rd_atomic) as (a, b):
            source, target = (b, a) if op == "READ" else (a, b)
            for step in range(self.ROUNDS):
                requests, receives, at = [], [], 0
                for number in range(self.BATCH):
                    n = min(lengths[(number + step) % len(lengths)], half - at)
                    from_, to = at + 17 * step, half + at
                    remote = b.address + (from_ if op == "READ" else to)
                    here = to if op == "READ" else from_
                    request = {"op": op, "sges": [[here, n]], "remote": remote, "rkey": b.rkey}
                    requests.append({**request, "imm": number, "wr_id": number})
                    receives.append({"sges": [[to, n]] if op == "SEND" else [[0, 1]], "wr_id": number})
                    target.image[to : to + n] = source.image[from_ : from_ + n]
                    at += n
                if op in ("WRITE_IMM", "SEND"):
                    b.call("receive", requests=receives)
                a.call("post", requests=requests)
                done = [(one["status"], one["wr_id"]) for one in a.poll("send", self.BATCH, timeout=40)]
                assert done == [("SUCCESS", number) for number in range(self.BATCH)]
                if op in ("WRITE_IMM", "SEND"):
                    arrived = b.poll("receive", self.BATCH)
                    assert [(one["status"], one["wr_id"]) for one in arrived] == done
                target.verify(f"round {step}")

    @pytest.mark.parametrize("max_rd_atomic", [1, 16])
    def test_counter(self, link: Link, max_rd_atomic: int) -> None:
        """No atomic is lost, none is carried out twice."""
        with filled(link, max_rd_atomic=max_rd_atomic) as (a, b):
            b.store(64, bytes(8))
            for step in range(2 * self.ROUNDS):
                to = {"remote": b.address + 64, "rkey": b.rkey, "swap_add": 1}
                slots = range(512, 512 + 8 * self.BATCH, 8)
                a.call("post", requests=[{"op": "FA", "sges": [[slot, 8]], "wr_id": slot, **to} for slot in slots])
                done = [(one["status"], one["wr_id"]) for one in a.poll("send", self.BATCH, timeout=40)]
                assert done == [("SUCCESS", slot) for slot in slots]
                for number, slot in enumerate(slots, self.BATCH * step):
                    a.image[slot : slot + 8] = number.to_bytes(8, "little")
                a.verify(f"round {step}")
            b.image[64:72] = (2 * self.ROUNDS * self.BATCH).to_bytes(8, "little")
            b.verify()


@contextmanager
def filled(link: Link, **options: Any) -> Iterator[tuple[Party, Party]]:
    """Connected ends with different contents."""
    with link.ends(**options) as (a, b):
        a.fill(1)
        b.fill(2)
        yield a, b
