"""Random programs that create, modify and destroy what Ethernet queues are made of, against a model in plain Python."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ethernet_rig import KEY, Maker, kinds_of, nic_of
from gpunetio import verbs
from gpunetio.errors import DriverError
from gpunetio.formats import ethernet_queues as eth
from gpunetio.formats.commands import Opcode, Status
from gpunetio.formats.ethernet_queues import ModifyRq, ModifyRqt, ModifyTir, QueueState, rq_list
from gpunetio.nic.control.syndromes import CommandSyndrome
from gpunetio.verbs import DevxObject

RST, RDY, ERR = QueueState.RST, QueueState.RDY, QueueState.ERR
NEXT = {RST: {RST, RDY}, RDY: {RDY, RST, ERR}, ERR: {ERR, RST}}
MISSING = 0x3FF
choices = st.integers(0, 1 << 16)
states = st.sampled_from([RST, RDY, ERR])


@dataclass(eq=False)
class Known:
    """What the model knows of an object: whom it uses, and what its QUERY answers."""

    kind: str
    made: DevxObject
    uses: list["Known"]
    state: QueueState | None = None
    told: dict[str, Any] = field(default_factory=dict)
    listed: list["Known"] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.made.number

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number:#x}"


class EthernetPrograms(RuleBasedStateMachine):
    """Every object is known by whoever uses it, and goes when nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.ctx = verbs.open("soft0")
        self.make = Maker(self.ctx)
        self.known: list[Known] = []

    def teardown(self) -> None:
        kinds = kinds_of(nic_of(self.ctx))
        while self.known:  # those that nothing uses: a modified object may use newer ones
            for one in [one for one in self.known if not any(one in other.uses for other in self.known)]:
                one.made.close()
                self.known.remove(one)
        self.ctx.close()
        assert not any(kind._users for kind in kinds)

    def pick(self, kind: str, choice: int) -> Known | None:
        """One of a kind that exists. None stands for a number that does not exist: sometimes, or if there is none."""
        of_kind = [one for one in self.known if one.kind == kind]
        return of_kind[choice % len(of_kind)] if of_kind and choice % 11 else None

    def create(
        self, kind: str, uses: list[Known | None], call: Any, state: QueueState | None = None, **told: Any
    ) -> None:
        """Create an object. The device refuses it if something that it uses does not exist."""
        there = [one for one in uses if one is not None]
        if len(there) == len(uses):
            self.known.append(Known(kind, call(), there, state, told))
        else:
            with pytest.raises(DriverError, match=rf"there is no .* {MISSING:#x}") as caught:
                call()
            assert caught.value.status == Status.BAD_RESOURCE

    @staticmethod
    def number(one: Known | None) -> int:
        return MISSING if one is None else one.number

    # --- creation

    @rule()
    def domain(self) -> None:
        self.create("transport domain", [], self.make.domain)

    @rule()
    def counter(self) -> None:
        self.create("Q counter", [], self.make.counter)

    @rule()
    def cq(self) -> None:
        self.create("CQ", [], self.make.cq)

    @rule(a=choices, prio=st.integers(0, 15))
    def tis(self, a: int, prio: int) -> None:
        domain = self.pick("transport domain", a)
        self.create("TIS", [domain], lambda: self.make.tis(self.number(domain), prio=prio), prio=prio)

    @rule(a=choices, b=choices)
    def sq(self, a: int, b: int) -> None:
        cq, tis = self.pick("CQ", a), self.pick("TIS", b)
        self.create("SQ", [cq, tis], lambda: self.make.sq(self.number(cq), self.number(tis)), RST)

    @rule(a=choices, b=choices, counted=st.booleans())
    def rq(self, a: int, b: int, counted: bool) -> None:
        cq, counter = self.pick("CQ", a), self.pick("Q counter", b)
        counted = counted and counter is not None  # 8 bits have no room for MISSING
        number = counter.number if counted and counter is not None else 0
        uses = [cq, counter] if counted else [cq]
        told = {"counter_set_id": number}
        self.create("RQ", uses, lambda: self.make.rq(self.number(cq), **told), RST, **told)

    @rule(a=st.lists(choices, min_size=4, max_size=4), log=st.integers(0, 2))
    def rqt(self, a: list[int], log: int) -> None:
        rqs = [self.pick("RQ", choice) for choice in a[: 1 << log]]
        before = len(self.known)
        self.create(
            "RQT", rqs, lambda: self.make.rqt(map(self.number, rqs), most=4), rqt_actual_size=1 << log, rqt_max_size=4
        )
        if len(self.known) > before:
            self.known[-1].listed = list(self.known[-1].uses)

    @rule(a=choices, b=choices, symmetric=st.booleans())
    def hashed(self, a: int, b: int, symmetric: bool) -> None:
        domain, table = self.pick("transport domain", a), self.pick("RQT", b)
        told = {"rx_hash_symmetric": int(symmetric)}
        call = lambda: self.make.hashed(self.number(domain), self.number(table), **told)  # noqa: E731
        self.create("TIR", [domain, table], call, **told, disp_type=1, indirect_table=self.number(table))

    @rule(a=choices, b=choices)
    def direct(self, a: int, b: int) -> None:
        domain, rq = self.pick("transport domain", a), self.pick("RQ", b)
        call = lambda: self.make.direct(self.number(domain), self.number(rq))  # noqa: E731
        self.create("TIR", [domain, rq], call, disp_type=0, inline_rqn=self.number(rq))

    # --- changes

    def expect(self, accepted: bool, syndrome: CommandSyndrome, call: Any) -> None:
        if accepted:
            call()
            return
        with pytest.raises(DriverError) as caught:
            call()
        assert CommandSyndrome(caught.value.syndrome) is syndrome

    @precondition(lambda self: any(one.state is not None for one in self.known))
    @rule(a=choices, told=states, right=st.booleans(), wanted=states)
    def state(self, a: int, told: QueueState, right: bool, wanted: QueueState) -> None:
        queues = [one for one in self.known if one.state is not None]
        queue = queues[a % len(queues)]
        assert queue.state is not None
        now = queue.state if right else told
        accepted = now is queue.state and wanted in NEXT[queue.state]
        self.expect(
            accepted, CommandSyndrome.QUEUE_STATE,
            lambda: queue.made.modify(
                Opcode[f"MODIFY_{queue.kind}"], **{f"{queue.kind.lower()}_state": now}, ctx={"state": wanted}
            ),
        )
        if accepted:
            queue.state = wanted

    @precondition(lambda self: any(one.kind == "RQ" for one in self.known))
    @rule(a=choices, b=choices)
    def count(self, a: int, b: int) -> None:
        """Another Q counter for an RQ, or none."""
        rq, counter = self.pick("RQ", a * 11 + 1), self.pick("Q counter", b)
        assert rq is not None
        assert rq.state is not None
        number = 0 if counter is None else counter.number
        rq.made.modify(
            Opcode.MODIFY_RQ, rq_state=rq.state, modify_bitmask=ModifyRq.COUNTER_SET_ID,
            ctx={"state": rq.state, "counter_set_id": number},
        )
        rq.uses = [one for one in rq.uses if one.kind != "Q counter"] + ([counter] if counter else [])
        rq.told["counter_set_id"] = number

    @precondition(lambda self: any(one.kind == "RQT" for one in self.known))
    @rule(a=choices, b=st.lists(choices, min_size=8, max_size=8), log=st.integers(0, 3))
    def relist(self, a: int, b: list[int], log: int) -> None:
        table, rqs = self.pick("RQT", a * 11 + 1), [self.pick("RQ", choice) for choice in b[: 1 << log]]
        assert table is not None
        there = [one for one in rqs if one is not None]
        fits = len(rqs) <= 4
        accepted = fits and len(there) == len(rqs)
        self.expect(
            accepted, CommandSyndrome.NO_SUCH_RQ if fits else CommandSyndrome.RQT_SIZE,
            lambda: table.made.modify(
                Opcode.MODIFY_RQT, bitmask=ModifyRqt.RQN_LIST, ctx={"rqt_actual_size": len(rqs)},
                rq_num=rq_list(map(self.number, rqs)),
            ),
        )
        if accepted:
            table.uses, table.listed, table.told["rqt_actual_size"] = list(there), there, len(there)

    @precondition(lambda self: any(one.kind == "TIR" for one in self.known))
    @rule(a=choices, b=choices)
    def redirect(self, a: int, b: int) -> None:
        """Another table for a TIR, which only one that has a table can get."""
        tir, table = self.pick("TIR", a * 11 + 1), self.pick("RQT", b)
        assert tir is not None
        hashed = tir.told["disp_type"] == 1
        accepted = hashed and table is not None
        self.expect(
            accepted, CommandSyndrome.NO_SUCH_RQT if hashed else CommandSyndrome.DISP_TYPE,
            lambda: tir.made.modify(
                Opcode.MODIFY_TIR, bitmask=ModifyTir.INDIRECT_TABLE, ctx={"indirect_table": self.number(table)}
            ),
        )
        if accepted and table is not None:
            tir.uses, tir.told["indirect_table"] = [tir.uses[0], table], table.number

    @precondition(lambda self: self.known)
    @rule(a=choices)
    def destroy(self, a: int) -> None:
        one = self.known[a % len(self.known)]
        users = {other.name for other in self.known if one in other.uses}
        if users:
            with pytest.raises(DriverError) as caught:
                self.ctx.provider.devx_obj_destroy(one.made.devx_handle)
            assert CommandSyndrome(caught.value.syndrome) is CommandSyndrome.IN_USE
            told = str(caught.value).partition(f"{one.name} is used by ")[2]
            assert set(told.split(", ")) == users
        else:
            one.made.close()
            self.known.remove(one)

    # --- what the device says

    @invariant()
    def what_exists_is_what_was_made(self) -> None:
        for kind in kinds_of(nic_of(self.ctx)):
            ours = sorted(one.number for one in self.known if one.kind == kind.table.name)
            numbers = kind.table.given[kind.table.entry.dtype.names[0]]
            assert sorted(numbers[numbers != 0].tolist()) == ours

    @precondition(lambda self: self.known)
    @rule(a=choices)
    def query(self, a: int) -> None:
        one = self.known[a % len(self.known)]
        if one.kind in ("CQ", "transport domain", "Q counter"):
            return
        context = one.made.query()["ctx"]
        assert context | one.told == context
        if one.state is not None:
            assert context["state"] == one.state
        if one.kind == "RQT":
            raw = one.made.query_raw(eth.QUERY_RQT_IN.pack(opcode=Opcode.QUERY_RQT, rqtn=one.number), 272 + 16)
            assert eth.rqns_of(raw[272:])[: len(one.listed)] == [rq.number for rq in one.listed]
        if one.kind == "TIR" and one.told["disp_type"] == 1:
            assert context["rx_hash_toeplitz_key"] == KEY


TestEthernetPrograms = EthernetPrograms.TestCase
TestEthernetPrograms.settings = settings(max_examples=20, stateful_step_count=50, deadline=None)
