"""The state machine of a queue pair, all of it, on a software NIC. The table is DOCA's, and asks nothing of src.

Each ordered pair of states is tried with what it needs, with each attribute left out and with each added; after every
try the device is queried: all that was asked for has changed, or nothing has.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from gpunetio import verbs
from gpunetio.enums import AddrType, QpAtomicType, QpAttrMask, QpState, QpType
from gpunetio.errors import DocaErrorCode, DriverError, InvalidValueError
from gpunetio.formats.commands import Status
from gpunetio.verbs import QP, AhAttr, QpAttr

STATES = ("RST", "INIT", "RTR", "RTS", "ERR")

# DOCA_VERBS_QP_ATTR_*, and the attribute that each bit announces
BITS = {
    "ALLOW_REMOTE_WRITE": (0, "allow_remote_write"),
    "ALLOW_REMOTE_READ":  (1, "allow_remote_read"),
    "PKEY_INDEX":         (2, "pkey_index"),
    "MIN_RNR_TIMER":      (3, "min_rnr_timer"),
    "PORT_NUM":           (4, "port_num"),
    "NEXT_STATE":         (5, "next_state"),
    "CURRENT_STATE":      (6, "current_state"),
    "PATH_MTU":           (7, "path_mtu"),
    "RQ_PSN":             (8, "rq_psn"),
    "SQ_PSN":             (9, "sq_psn"),
    "DEST_QP_NUM":        (10, "dest_qp_num"),
    "ACK_TIMEOUT":        (11, "ack_timeout"),
    "RETRY_CNT":          (12, "retry_cnt"),
    "RNR_RETRY":          (13, "rnr_retry"),
    "AH_ATTR":            (14, "ah_attr"),
    "ATOMIC_MODE":        (15, "allow_remote_atomic"),
    "MAX_QP_RD_ATOMIC":   (16, "max_rd_atomic"),
    "MAX_DEST_RD_ATOMIC": (17, "max_dest_rd_atomic"),
}
UNKNOWN = {"bits 0x40000": 18, "bits 0x40000000": 30}
STATE_BITS = ("NEXT_STATE", "CURRENT_STATE")  # allowed everywhere

# from, to: (required, optional)
TABLE = {
    ("RST", "INIT"): ("PKEY_INDEX PORT_NUM ALLOW_REMOTE_WRITE ALLOW_REMOTE_READ", "ATOMIC_MODE"),
    ("INIT", "INIT"): ("", "PKEY_INDEX PORT_NUM ALLOW_REMOTE_WRITE ALLOW_REMOTE_READ ATOMIC_MODE"),
    ("INIT", "RTR"): (
        "RQ_PSN DEST_QP_NUM PATH_MTU AH_ATTR MIN_RNR_TIMER",
        "PKEY_INDEX ALLOW_REMOTE_WRITE ALLOW_REMOTE_READ ATOMIC_MODE MAX_DEST_RD_ATOMIC",
    ),
    ("RTR", "RTS"): (
        "SQ_PSN ACK_TIMEOUT RETRY_CNT RNR_RETRY",
        "MIN_RNR_TIMER ALLOW_REMOTE_WRITE ATOMIC_MODE MAX_QP_RD_ATOMIC",
    ),
    ("RTS", "RTS"): ("", "MIN_RNR_TIMER ALLOW_REMOTE_WRITE ALLOW_REMOTE_READ ATOMIC_MODE AH_ATTR"),
    **{(state, "RST"): ("", "") for state in STATES},
    **{(state, "ERR"): ("", "") for state in STATES},
}
NOT_REQUIRED_OF_UC = {"MIN_RNR_TIMER", "ACK_TIMEOUT", "RETRY_CNT", "RNR_RETRY"}

Rule = tuple[set[str], set[str]]


def rule(transport: str, start: str, following: str) -> Rule | None:
    """Required and optional names of a transition, or None when there is none."""
    if (start, following) not in TABLE:
        return None
    required, optional = (set(names.split()) for names in TABLE[start, following])
    waived = required & NOT_REQUIRED_OF_UC if transport == "UC" else set[str]()
    return required - waived, optional | waived


def mask_of(names: set[str]) -> int:
    return sum(1 << (UNKNOWN[name] if name in UNKNOWN else BITS[name][0]) for name in names)


class Machine:
    """One queue pair, brought to any state with `first`; what is tried carries `second`, different in all it can be."""

    def __init__(self, pd: verbs.PD, transport: str):
        cq = pd.ctx.create_cq(16)
        self.qp: QP = pd.create_qp(sq_wr=4, rq_wr=4, send_cq=cq, receive_cq=cq, qp_type=QpType[transport])
        ah = AhAttr(gid=pd.ctx.query_gid(), addr_type=AddrType.IPv4, static_rate=1, hop_limit=9, traffic_class=0x10,
                    flow_label=0x12345)
        self.first = QpAttr(
            path_mtu=512, rq_psn=0x111111, sq_psn=0x222222, dest_qp_num=self.qp.qpn, ah_attr=ah,
            ack_timeout=10, retry_cnt=1, rnr_retry=2, min_rnr_timer=3, max_rd_atomic=2, max_dest_rd_atomic=4,
        )
        self.second = QpAttr(
            path_mtu=2048, rq_psn=0xABCDEF, sq_psn=0xFEDCBA, dest_qp_num=0x123456,
            allow_remote_write=True, allow_remote_read=True, allow_remote_atomic=QpAtomicType.UP_TO_8BYTES,
            ah_attr=replace(ah, sgid_index=1, static_rate=2, hop_limit=77, traffic_class=0xAC, flow_label=0xFFFFF),
            ack_timeout=17, retry_cnt=5, rnr_retry=6, min_rnr_timer=19, max_rd_atomic=8, max_dest_rd_atomic=16,
        )
        self.transport = transport

    def bring(self, state: str) -> QpAttr:
        """Put the queue pair into a state: what it reports there."""
        ways = {
            "RST": (), "INIT": ("INIT",), "RTR": ("INIT", "RTR"), "RTS": ("INIT", "RTR", "RTS"),
            "ERR": ("INIT", "RTR", "RTS", "ERR"),
        }
        self.qp.reset()
        for start, following in zip(("RST", "INIT", "RTR", "RTS"), ways[state], strict=False):
            required = TABLE[start, following][0].split()
            attr = replace(self.first, next_state=QpState[following])
            self.qp.modify(attr, mask_of({*required, "NEXT_STATE"}))
        return self.now(state)

    def now(self, state: str) -> QpAttr:
        """What the device reports; the state must be this one."""
        attr, _ = self.qp.query()
        assert (attr.current_state, attr.next_state, self.qp.state) == (QpState[state],) * 3
        return attr

    def try_(self, start: str, following: str, names: set[str]) -> None:
        self.qp.modify(
            replace(self.second, current_state=QpState[start], next_state=QpState[following]), mask_of(names)
        )

    def after(self, before: QpAttr, start: str, following: str, names: set[str]) -> QpAttr:
        """What a successful try must leave: all that the mask names, and nothing else."""
        if following == "RST":
            return self.bring("RST")
        set_ = {BITS[name][1] for name in names if name not in STATE_BITS}
        expected = replace(
            before, current_state=QpState[following], next_state=QpState[following],
            **{name: getattr(self.second, name) for name in set_},
        )
        if (start, following) == ("RTS", "RTS") and "AH_ATTR" in names:  # a connected path changes in these only
            assert before.ah_attr
            assert self.second.ah_attr
            path = {name: getattr(self.second.ah_attr, name) for name in ("sgid_index", "traffic_class")}
            expected.ah_attr = replace(before.ah_attr, **path)
        return expected

    def works(self, start: str, following: str, names: set[str]) -> None:
        before = self.bring(start)
        self.try_(start, following, names)
        found = self.now(following)
        assert found == self.after(before, start, following, names)

    def is_refused(self, before: QpAttr, start: str, following: str, names: set[str], *words: str) -> None:
        """A try must leave the queue pair as it is, and its error must have these words."""
        with pytest.raises(InvalidValueError) as caught:
            self.try_(start, following, names)
        assert caught.value.code == DocaErrorCode.INVALID_VALUE
        for word in words:
            assert word in str(caught.value)
        assert self.now(before.current_state.name) == before


@pytest.fixture(scope="module")
def machines() -> Iterator[dict[str, Machine]]:
    with verbs.open("soft0") as ctx, ctx.create_pd() as pd:
        yield {transport: Machine(pd, transport) for transport in ("RC", "UC")}


@pytest.fixture(params=["RC", "UC"])
def machine(request: pytest.FixtureRequest, machines: dict[str, Machine]) -> Machine:
    return machines[request.param]


LEGAL = pytest.mark.parametrize("start, following", list(TABLE))
ILLEGAL = pytest.mark.parametrize(
    "start, following", [pair for pair in product(STATES, STATES) if pair not in TABLE]
)


def test_the_table_has_all_states_and_bits():
    assert {(state.name, state.value) for state in QpState} == {*zip(STATES, range(5), strict=True), ("SQD", 5)}
    bits = {name: 1 << n for name, (n, _) in BITS.items()}
    assert {bit.name: bit.value for bit in QpAttrMask} == {**bits, "QKEY": 1 << 28}  # of UD
    assert len(TABLE) == 15


@LEGAL
def test_with_what_is_required(machine, start, following):
    rules = rule(machine.transport, start, following)
    assert rules
    machine.works(start, following, rules[0] | {"NEXT_STATE"})
    machine.works(start, following, rules[0] | set(STATE_BITS))
    machine.works(start, following, rules[0] | rules[1] | set(STATE_BITS))


@LEGAL
def test_each_required_attribute_left_out(machine, start, following):
    rules = rule(machine.transport, start, following)
    assert rules
    before = machine.bring(start)
    for name in rules[0]:
        machine.is_refused(before, start, following, (rules[0] - {name}) | {"NEXT_STATE"}, f"needs {name}: add")
    if len(rules[0]) > 1:
        machine.is_refused(before, start, following, {"NEXT_STATE"}, *rules[0])


@LEGAL
def test_each_optional_attribute_added(machine, start, following):
    rules = rule(machine.transport, start, following)
    assert rules
    for name in rules[1]:
        machine.works(start, following, rules[0] | {name, "NEXT_STATE"})


@LEGAL
def test_each_foreign_attribute_added(machine, start, following):
    rules = rule(machine.transport, start, following)
    assert rules
    foreign = {*BITS, *UNKNOWN} - rules[0] - rules[1] - set(STATE_BITS)
    before = machine.bring(start)
    for name in foreign:
        machine.is_refused(before, start, following, rules[0] | {name, "NEXT_STATE"}, f"not take {name}: remove")
    words = [name for name in foreign if name in BITS]
    machine.is_refused(before, start, following, rules[0] | foreign | {"NEXT_STATE"}, *words, "bits 0x40040000")


@ILLEGAL
def test_no_such_transition(machine, start, following):
    before = machine.bring(start)
    names = {"NEXT_STATE"} | {name for pair in TABLE.values() for names in pair for name in names.split()}
    for mask in ({"NEXT_STATE"}, set(STATE_BITS), names, *({"NEXT_STATE", name} for name in (*BITS, *UNKNOWN))):
        machine.is_refused(before, start, following, mask, f"no transition from {start} to {following}")


@pytest.mark.parametrize("start, following", list(product(STATES, STATES)))
def test_without_next_state_the_state_stays(machine, start, following):
    """The transition is then the one to itself, whatever next_state says, and takes what that one takes."""
    required, optional = rule(machine.transport, start, following) or (set(), set())
    before = machine.bring(start)
    for names in (required, required | optional, {"CURRENT_STATE"}):
        to_itself = rule(machine.transport, start, start)
        if to_itself and to_itself[0] <= names <= to_itself[0] | to_itself[1] | {"CURRENT_STATE"}:
            before = machine.bring(start)
            machine.try_(start, following, names)
            assert machine.now(start) == machine.after(before, start, start, names)
            before = machine.bring(start)
        else:
            machine.is_refused(before, start, following, names)


@pytest.mark.parametrize("start, claimed", [pair for pair in product(STATES, STATES) if pair[0] != pair[1]])
def test_current_state_that_is_not_so(machine, start, claimed):
    """The device refuses what starts from another state; RST and ERR are reached from every one."""
    for following in STATES:
        rules = rule(machine.transport, claimed, following)
        before = machine.bring(start)
        if rules is None:
            words = f"no transition from {claimed} to {following}"
            machine.is_refused(before, claimed, following, set(STATE_BITS), words)
            continue
        names = rules[0] | set(STATE_BITS)
        if following in ("RST", "ERR"):
            machine.try_(claimed, following, names)
            machine.now(following)
            continue
        with pytest.raises(DriverError, match=f"is in {start}, not in {claimed}$") as caught:
            machine.try_(claimed, following, names)
        assert caught.value.status == Status.BAD_QP_STATE
        assert machine.now(start) == before


def test_the_values_are_told_apart(machine):
    """What is tried differs from what was there, or else the tests above would see nothing."""
    same = {"pkey_index", "port_num", "next_state", "current_state"}  # one port, one P_Key
    for _, name in BITS.values():
        assert (getattr(machine.first, name) == getattr(machine.second, name)) == (name in same)
