"""Bad input to every call of verbs on a software NIC: the error's class and words, and that nothing is lost by it.

After each refused call the NIC's tables have what they had, the queue pair is in the state it was, and a write goes
through.
"""

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpunetio import verbs
from gpunetio.enums import Access, AddrType, QpAttrMask, QpSendDbrMode, QpState, WcStatus, WrOpcode
from gpunetio.errors import BadStateError, DocaError, DocaErrorCode, InvalidValueError, NotFoundError
from gpunetio.memory import HostMemory
from gpunetio.verbs import AhAttr, BadWrError, QpAttr, QpEndpoint, QpInitAttr, RecvWr, SendWr, Sge
from nic_rig import until

M = QpAttrMask
HUGE = 10**30
INIT = M.NEXT_STATE | M.PKEY_INDEX | M.PORT_NUM | M.ALLOW_REMOTE_WRITE | M.ALLOW_REMOTE_READ | M.ATOMIC_MODE
RTR = M.NEXT_STATE | M.RQ_PSN | M.DEST_QP_NUM | M.PATH_MTU | M.AH_ATTR | M.MIN_RNR_TIMER | M.MAX_DEST_RD_ATOMIC
RTS = M.NEXT_STATE | M.SQ_PSN | M.ACK_TIMEOUT | M.RETRY_CNT | M.RNR_RETRY | M.MAX_QP_RD_ATOMIC
TABLES = ("qps", "cqs", "mkeys", "pds", "umems", "uar_pages")


class Objects:
    """One object of every kind."""

    def __init__(self) -> None:
        self.ctx = verbs.open("soft0")
        self.pd, self.cq, self.uar = self.ctx.create_pd(), self.ctx.create_cq(16), self.ctx.create_uar()
        self.umem = self.ctx.register_umem(HostMemory(1 << 14))
        self.mr = self.pd.register(bytearray(64))
        self.qp = self.pd.create_qp(sq_wr=4, rq_wr=4, send_cq=self.cq, receive_cq=self.cq)


class World(Objects):
    """`qp` is what bad calls are made on; `pair` is connected to itself, and writes to show that all is well."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign, self.closed = Objects(), Objects()
        self.closed.ctx.close()
        self.pair_cq = self.ctx.create_cq(16)
        self.pair = self.pd.create_qp(sq_wr=4, rq_wr=4, send_cq=self.pair_cq, receive_cq=self.pair_cq)
        self.pair.connect(self.pair)
        self.target = np.zeros(8, np.uint8)
        self.target_mr = self.pd.register(self.target)
        self.numbers = itertools.count(1)

    def endpoint(self, **changes: Any) -> QpEndpoint:
        return replace(self.qp.endpoint(), **changes)

    def place(self, **changes: Any) -> dict[str, Any]:
        """Where a queue goes in memory of the user."""
        return {"external_umem": (self.umem, 0), "external_dbr_umem": (self.umem, 8192), **changes}

    def bring(self, state: QpState) -> None:
        """Put `qp` into a state, connected to itself."""
        self.qp.reset()
        ah = AhAttr(gid=self.ctx.query_gid())
        for following, mask in ((QpState.INIT, INIT), (QpState.RTR, RTR), (QpState.RTS, RTS)):
            if state >= following:
                self.qp.modify(QpAttr(next_state=following, dest_qp_num=self.qp.qpn, ah_attr=ah), mask)
        if state == QpState.ERR:
            self.qp.to_error()

    def modify(self, state: QpState, mask: int, **values: Any) -> None:
        """From `state` to the next, with these values."""
        attr = QpAttr(
            next_state=QpState(state + 1), dest_qp_num=self.qp.qpn, ah_attr=AhAttr(gid=self.ctx.query_gid()),
        )
        self.qp.modify(replace(attr, **values), mask)

    def tables(self) -> list[int]:
        """How many objects the NIC has, of each kind."""
        nic = self.ctx.provider.nic  # type: ignore[attr-defined]
        return [len(getattr(nic, table)) for table in TABLES]

    def check_it_works(self, inline: Any = None) -> None:
        """A write arrives."""
        payload = next(self.numbers).to_bytes(8, "little") if inline is None else memoryview(inline).tobytes()
        self.pair.post_send(
            SendWr(
                opcode=WrOpcode.RDMA_WRITE, inline=payload if inline is None else inline,
                remote_addr=self.target_mr.address, rkey=self.target_mr.rkey,
            )
        )
        (done,) = until(self.pair_cq.poll, "the write's completion")
        assert done.status == WcStatus.SUCCESS
        assert self.target.tobytes() == payload


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    opened = World()
    yield opened
    opened.foreign.ctx.close()
    opened.ctx.close()


Call = Callable[[World], object]
Row = tuple[Call, type[DocaError], str]


def refuse(world: World, call: Call, error: type[DocaError], words: str) -> None:
    """The call fails as it should, and changes nothing."""
    tables, attributes = world.tables(), world.qp.query()
    with pytest.raises(error) as caught:
        call(world)
    assert type(caught.value) is error
    assert words in str(caught.value)
    assert isinstance(caught.value, BadWrError) or caught.value.code == error.code
    assert world.tables() == tables
    assert world.qp.query() == attributes
    world.check_it_works()


def table(rows: dict[str, Row]) -> Any:
    return pytest.mark.parametrize("call, error, words", list(rows.values()), ids=list(rows))


def numbers(name: str, call: Callable[..., object], bad: dict[Any, str]) -> dict[str, Row]:
    """Rows for an argument that is a number: what is none, and values that are out of range."""
    rows: dict[str, Row] = {}
    for value in ("16", None, 2.5, b"\x01", [1]):
        words = f"{name} = {value!r} is of type {type(value).__name__}: it must be a whole number"
        rows[f"{name}={value!r}"] = (lambda w, value=value: call(w, value), InvalidValueError, words)
    for value, words in bad.items():
        rows[f"{name}={value}"] = (lambda w, value=value: call(w, value), InvalidValueError, words)
    return rows


# --- sizes, modes and places of new objects

SIZE_OF_CQ = "it must be 1 to 4194304"


def qp_with(name: str) -> Callable[[World, Any], object]:
    def create(w: World, value: Any) -> object:
        good = {"sq_wr": 4, "rq_wr": 4, "send_cq": w.cq, "receive_cq": w.cq}
        return w.pd.create_qp(**{**good, name: value})  # type: ignore[arg-type]

    return create


CREATE: dict[str, Row] = {
    **numbers("cqe", lambda w, v: w.ctx.create_cq(v), {
        n: f"cqe = {n}: {SIZE_OF_CQ}" for n in (0, -1, 1 << 23, HUGE)
    }),
    **numbers("overrun", lambda w, v: w.ctx.create_cq(4, overrun=v), {
        n: f"overrun = {n}: it is one of DISABLE (0), ENABLE (1)" for n in (-1, 2)
    }),
    **numbers("collapsed", lambda w, v: w.ctx.create_cq(4, collapsed=v), {
        n: f"collapsed = {n}: it must be 0 to 1" for n in (-1, 2)
    }),
    **numbers("kind", lambda w, v: w.ctx.create_uar(v), {
        n: f"kind = {n}: it is one of BLUEFLAME (0), NONCACHE (1), NONCACHE_DEDICATED (2)" for n in (-1, 3)
    }),
    **numbers("sq_wr", qp_with("sq_wr"), {
        -1: "sq_wr = -1, rq_wr = 4, max_inline_data = 0: none may be negative",
        32769: "sq_wr = 32769 of 64 bytes make 65536 basic blocks of 64 bytes: the device holds at most 32768",
        HUGE: "the device holds at most 32768; ask for fewer requests",
    }),
    **numbers("rq_wr", qp_with("rq_wr"), {
        -1: "none may be negative", 32769: "rq_wr = 32769: the device holds at most 32768 receives",
    }),
    **numbers("send_max_sges", qp_with("send_max_sges"), {
        0: "send_max_sges = 0: a request needs at least one", -1: "at least one",
        62: "make a send WQE of 1024 bytes: the device takes at most 1008",
    }),
    **numbers("receive_max_sges", qp_with("receive_max_sges"), {
        0: "receive_max_sges = 0: a request needs at least one",
        33: "makes a receive WQE of 1024 bytes: the device takes at most 512",
    }),
    **numbers("max_inline_data", qp_with("max_inline_data"), {
        -1: "none may be negative", 973: "make a send WQE of 1024 bytes: the device takes at most 1008",
    }),
    **numbers("user_index", qp_with("user_index"), {
        -1: "user_index = -0x1 does not fit in 24 bits", 1 << 24: "user_index = 0x1000000 does not fit in 24 bits",
    }),
    **numbers("qp_type", qp_with("qp_type"), {
        n: f"qp_type = {n}: it must be RC (0), UC (1), UD (2) or GSI (3)" for n in (-1, 4)
    }),
    **numbers("send_dbr_mode", qp_with("send_dbr_mode"), {
        2: "send_dbr_mode = 2: it is one of DBR_VALID (0), NO_DBR_EXT (1)",
    }),
    **{
        row: value
        for name in (
            "sq_sig_all", "core_direct_master", "emulate_no_dbr_ext", "cqe_inline", "cqe_inline_responses", "memcpy",
        )
        for row, value in numbers(name, qp_with(name), {2: f"{name} = 2: it must be 0 to 1"}).items()
    },
    "responses for CQ.poll": (
        lambda w: w.pd.create_qp(cqe_inline_responses=True),
        InvalidValueError, "cqe_inline_responses without external_datapath"),
    "both doorbell modes": (
        lambda w: w.pd.create_qp(send_dbr_mode=QpSendDbrMode.NO_DBR_EXT, emulate_no_dbr_ext=True),
        InvalidValueError, "choose one of the two"),
    "no send CQ": (lambda w: w.pd.create_qp(sq_wr=1), InvalidValueError, "sq_wr = 1 without send_cq"),
    "no receive CQ": (lambda w: w.pd.create_qp(rq_wr=1), InvalidValueError, "rq_wr = 1 without receive_cq"),
    "port 2": (lambda w: w.ctx.query_port(2), InvalidValueError, "port 2: context soft0 has the ports 1 to 1"),
    "GID 16": (lambda w: w.ctx.query_gid(1, 16), InvalidValueError, "GID index 16: the table of context soft0 has"),
    **numbers("port", lambda w, v: w.ctx.query_port(v), {}),
    **numbers("index", lambda w, v: w.ctx.query_gid(1, v), {}),
    "no such device": (lambda w: verbs.open("soft9"), NotFoundError, "no device 'soft9'; there are: soft0"),
    "a port that is none": (
        lambda w: verbs.open("soft1", port="udp"),  # type: ignore[arg-type]
        InvalidValueError, "port = 'udp' is of type str: it must be of type PortConfig"),
}


@table(CREATE)
def test_new_objects(world, call, error, words):
    refuse(world, call, error, words)


CREATORS: dict[str, Callable[[World, dict[str, Any]], object]] = {
    "CQ": lambda w, place: w.ctx.create_cq(16, **place),
    "QP": lambda w, place: w.pd.create_qp(sq_wr=4, send_cq=w.cq, **place),
}
PLACES: dict[str, tuple[Callable[[World], dict[str, Any]], str]] = {
    "no pair": (lambda w: w.place(external_umem=w.umem), "it must be a pair, (UMEM, offset in bytes)"),
    "one": (lambda w: w.place(external_dbr_umem=(w.umem,)), "external_dbr_umem = (<UMEM"),
    "three": (lambda w: w.place(external_umem=(w.umem, 0, 0)), "it must be a pair"),
    "no UMEM": (lambda w: w.place(external_umem=(None, 0)), "external_umem[0] = None is of type NoneType: it must be"),
    "a CQ": (lambda w: w.place(external_dbr_umem=(w.cq, 0)), "it must be of type UMEM"),
    "str": (lambda w: w.place(external_umem=(w.umem, "0")), "external_umem[1] = '0' is of type str"),
    "float": (lambda w: w.place(external_dbr_umem=(w.umem, 64.0)), "external_dbr_umem[1] = 64.0 is of type float"),
    "odd": (lambda w: w.place(external_umem=(w.umem, 8)), "external_umem: offset 8 is no multiple of 64"),
    "odd record": (lambda w: w.place(external_dbr_umem=(w.umem, 4)), "external_dbr_umem: offset 4 is no multiple of 8"),
    "negative": (lambda w: w.place(external_umem=(w.umem, -64)), "offset -64 is no multiple"),
    "behind": (lambda w: w.place(external_umem=(w.umem, 1 << 14)), "at offset 16384 do not fit in the 16384 bytes of"),
    "record behind": (lambda w: w.place(external_dbr_umem=(w.umem, 1 << 14)), "8 bytes at offset 16384 do not fit"),
    "huge": (lambda w: w.place(external_umem=(w.umem, 1 << 80)), "do not fit"),
    "ring only": (lambda w: {"external_umem": (w.umem, 0)}, "external_umem without external_dbr_umem: give both"),
    "record only": (lambda w: {"external_dbr_umem": (w.umem, 0)}, "external_dbr_umem without external_umem: give both"),
    "foreign": (lambda w: w.place(external_umem=(w.foreign.umem, 0)), "belongs to another context: use one made from"),
    "foreign record": (lambda w: w.place(external_dbr_umem=(w.foreign.umem, 0)), "belongs to another context"),
    "foreign UAR": (lambda w: {"external_uar": w.foreign.uar}, "belongs to another context"),
    "no UAR": (lambda w: {"external_uar": 7}, "external_uar = 7 is of type int: it must be of type UAR"),
    "a PD as UAR": (lambda w: {"external_uar": w.pd}, "is of type PD: it must be of type UAR"),
}


@pytest.mark.parametrize("creator", CREATORS)
@pytest.mark.parametrize("place", PLACES)
def test_places_of_queues(world, creator, place):
    arguments, words = PLACES[place]
    refuse(world, lambda w: CREATORS[creator](w, arguments(w)), InvalidValueError, words)


CQS: dict[str, Row] = {
    f"{argument} {name}": (
        lambda w, argument=argument, size=size, bad=bad: w.pd.create_qp(**{size: 1, argument: bad(w)}),
        InvalidValueError, words.format(argument))
    for argument, size in (("send_cq", "sq_wr"), ("receive_cq", "rq_wr"))
    for name, bad, words in (
        ("foreign", lambda w: w.foreign.cq, "belongs to another context: use one made from context soft0"),
        ("number", lambda w: w.cq.cqn, "{} = 1 is of type int: it must be of type CQ"),
        ("UAR", lambda w: w.uar, "is of type UAR: it must be of type CQ"),
    )
}


@table(CQS)
def test_completion_queues_of_a_queue_pair(world, call, error, words):
    refuse(world, call, error, words)


# --- memory


def released() -> memoryview:
    view = memoryview(bytearray(8))
    view.release()
    return view


def closed_memory() -> HostMemory:
    memory = HostMemory(64)
    memory.close()
    return memory


class Nowhere:
    address, nbytes = 0x1000, 64


NO_MEMORY: dict[str, tuple[Callable[[], Any], type[DocaError], str]] = {
    "None": (lambda: None, InvalidValueError, "NoneType is not memory"),
    "int": (lambda: 0x1000, InvalidValueError, "0x1000 is an address: give the length of the memory too"),
    "str": (lambda: "text", InvalidValueError, "str is not memory"),
    "list": (lambda: [1, 2], InvalidValueError, "list is not memory"),
    "released": (released, InvalidValueError, "released memoryview"),
    "closed": (closed_memory, BadStateError, "the HostMemory is closed: its memory is gone"),
    "empty": (bytearray, InvalidValueError, "0 bytes"),
    "strided": (lambda: np.zeros(8)[::2], InvalidValueError, "not contiguous in memory"),
    "unmapped": (Nowhere, InvalidValueError, "[0x1000, +64) is not readable and writable memory of this process"),
}
REGISTER: dict[str, Callable[..., object]] = {
    "MR": lambda w, *arguments, **options: w.pd.register(*arguments, **options),
    "UMEM": lambda w, *arguments: w.ctx.register_umem(*arguments),
}


@pytest.mark.parametrize("register", REGISTER)
@pytest.mark.parametrize("thing", NO_MEMORY)
def test_memory(world, register, thing):
    make, error, words = NO_MEMORY[thing]
    refuse(world, lambda w: REGISTER[register](w, make()), error, words)


@pytest.mark.parametrize("register", REGISTER)
@pytest.mark.parametrize(
    "access, words",
    [
        ("rw", "access = 'rw' is of type str"),
        (1.0, "access = 1.0 is of type float"),
        (1 << 4, "access = 0x10 has unknown bits 0x10: its bits are 0x10000f"),
        (-1, "unknown bits"),
        (Access.REMOTE_WRITE, "REMOTE_WRITE without LOCAL_WRITE: add LOCAL_WRITE"),
        (Access.REMOTE_ATOMIC | Access.REMOTE_READ, "REMOTE_ATOMIC without LOCAL_WRITE"),
    ],
)
def test_rights(world, register, access, words):
    refuse(world, lambda w: REGISTER[register](w, bytearray(8), access), InvalidValueError, words)


IOVAS = numbers("iova", lambda w, v: w.pd.register(bytearray(8), iova=v), {
    -1: "iova -0x1: 8 bytes from there do not fit in 64 bits", (1 << 64) - 7: "do not fit in 64 bits",
})
del IOVAS["iova=None"]  # it means the memory's own addresses


@table(IOVAS)
def test_iova(world, call, error, words):
    refuse(world, call, error, words)


# --- modify


def modified(state: QpState, mask: int, name: str, most: int, least: int = 0, **words: str) -> dict[str, Row]:
    """Rows for an attribute with a range."""
    bad = {least - 1: words.get("low", f"it must be {least} to {most}"), most + 1: f"it must be {least} to {most}"}
    rows = numbers(name, lambda w, v: w.modify(state, mask, **{name: v}), bad)
    return {f"{state.name} {row}": value for row, value in rows.items()}


def with_path(name: str, most: int) -> dict[str, Row]:
    def call(w: World, value: Any) -> None:
        w.modify(QpState.INIT, RTR, ah_attr=AhAttr(**{"gid": w.ctx.query_gid(), name: value}))

    return numbers(f"ah_attr.{name}", call, {n: f"ah_attr.{name} = {n}: " for n in (-1, most + 1)})


def gid_of(value: Any) -> Call:
    return lambda w: w.modify(QpState.INIT, RTR, ah_attr=AhAttr(gid=value))


FROM_RST: dict[str, Row] = {
    **modified(QpState.RST, INIT, "pkey_index", 0),
    **modified(QpState.RST, INIT, "port_num", 1, 1),
    **modified(QpState.RST, INIT, "allow_remote_write", 1),
    **modified(QpState.RST, INIT, "allow_remote_read", 1),
    **numbers("allow_remote_atomic", lambda w, v: w.modify(QpState.RST, INIT, allow_remote_atomic=v), {
        n: f"allow_remote_atomic = {n}" for n in (-1, 2, 4)
    }),
    **numbers("next_state", lambda w, v: w.modify(QpState.RST, INIT, next_state=v), {
        n: f"next_state = {n}: it is one of RST (0), INIT (1), RTR (2), RTS (3), ERR (4), SQD (5)" for n in (-1, 6)
    }),
    **numbers("current_state", lambda w, v: w.modify(QpState.RST, INIT | M.CURRENT_STATE, current_state=v), {
        7: "current_state = 7: it is one of RST (0)",
    }),
    **numbers("mask", lambda w, v: w.modify(QpState.RST, v), {
        1 << 18: "does not take bits 0x40000: remove from the mask", INIT | 1 << 30: "RST2INIT_QP does not take bits",
        -1: "does not take", HUGE: "does not take",
    }),
    "no attributes": (
        lambda w: w.qp.modify(None, INIT),  # type: ignore[arg-type]
        InvalidValueError, "attr = None is of type NoneType: it must be of type QpAttr"),
    "other attributes": (
        lambda w: w.qp.modify(QpInitAttr(), INIT),  # type: ignore[arg-type]
        InvalidValueError, "is of type QpInitAttr: it must be of type QpAttr"),
    **{
        f"query {row}": value
        for row, value in numbers("mask", lambda w, v: w.qp.query(v), {
            1 << 18: "mask = 0x40000 has unknown bits 0x40000: its bits are 0x1003ffff", -1: "unknown bits",
        }).items()
        if row != "mask=None"  # all
    },
}
FROM_INIT: dict[str, Row] = {
    **modified(QpState.INIT, RTR, "dest_qp_num", (1 << 24) - 1),
    **numbers("path_mtu", lambda w, v: w.modify(QpState.INIT, RTR, path_mtu=v), {
        n: f"path_mtu = {n}: it must be 256, 512, 1024, 2048, 4096 bytes" for n in (-1, 0, 3, 1500, 8192)
    }),
    **modified(QpState.INIT, RTR, "min_rnr_timer", 31),
    **modified(QpState.INIT, RTR, "max_dest_rd_atomic", 16),
    **numbers("rq_psn", lambda w, v: w.modify(QpState.INIT, RTR, rq_psn=v), {}),
    "no path": (
        lambda w: w.modify(QpState.INIT, RTR, ah_attr=None), InvalidValueError, "ah_attr is None: set ah_attr to an"),
    "a GID as path": (
        lambda w: w.modify(QpState.INIT, RTR, ah_attr=bytes(16)),
        InvalidValueError, "is of type bytes: it must be of type AhAttr"),
    "short GID": (gid_of(bytes(15)), InvalidValueError, "ah_attr.gid has 15 bytes: a GID has 16"),
    "GID as text": (gid_of("x" * 16), InvalidValueError, "is of type str: it must be of type bytes or bytearray"),
    "GID as numbers": (gid_of([0] * 16), InvalidValueError, "is of type list"),
    "no GID": (gid_of(None), InvalidValueError, "ah_attr.gid = None"),
    "nobody there": (gid_of(bytes(10) + b"\xff" * 6), NotFoundError, "no route to 255.255.255.255"),
    **{row: value for row, value in with_path("addr_type", 3).items() if row != "ah_attr.addr_type=None"},  # the GID's
    **with_path("sgid_index", 15),
    **with_path("dlid", 0xFFFF),
    **with_path("sl", 15),
    **with_path("static_rate", 15),
    **with_path("hop_limit", 255),
    **with_path("traffic_class", 255),
    **with_path("flow_label", 0xFFFFF),
    "InfiniBand": (
        lambda w: w.modify(QpState.INIT, RTR, ah_attr=AhAttr(addr_type=AddrType.IB_GRH)),
        InvalidValueError, "IB_GRH on a port of ETHERNET: use IPv4 or IPv6"),
}
FROM_RTR: dict[str, Row] = {
    **modified(QpState.RTR, RTS, "ack_timeout", 31),
    **modified(QpState.RTR, RTS, "retry_cnt", 7),
    **modified(QpState.RTR, RTS, "rnr_retry", 7),
    **modified(QpState.RTR, RTS, "max_rd_atomic", 16),
    **numbers("sq_psn", lambda w, v: w.modify(QpState.RTR, RTS, sq_psn=v), {}),
}


@table(FROM_RST)
def test_modify_from_rst(world, call, error, words):
    world.bring(QpState.RST)
    refuse(world, call, error, words)


@table(FROM_INIT)
def test_modify_from_init(world, call, error, words):
    world.bring(QpState.INIT)
    refuse(world, call, error, words)


@table(FROM_RTR)
def test_modify_from_rtr(world, call, error, words):
    world.bring(QpState.RTR)
    refuse(world, call, error, words)


@pytest.mark.parametrize(
    "state, mask, name", [(QpState.INIT, RTR, "rq_psn"), (QpState.RTR, RTS, "sq_psn")], ids=["rq_psn", "sq_psn"]
)
@pytest.mark.parametrize("value, used", [(0x1_234567, 0x234567), (1 << 24, 0), (0xFFFF_FFFF, 0xFFFFFF)])
def test_a_psn_above_24_bits_is_cut_and_logged(world, caplog, state, mask, name, value, used):
    world.bring(state)
    with caplog.at_level(logging.ERROR, "gpunetio"):
        world.modify(state, mask, **{name: value})
    assert f"{name} = {value:#x} has more than 24 bits: {used:#x} is used" in caplog.text
    assert getattr(world.qp.query()[0], name) == used


# --- connect, endpoint

CONNECT: dict[str, Row] = {
    "nobody": (
        lambda w: w.qp.connect(None),  # type: ignore[arg-type]
        InvalidValueError, "remote = None is of type NoneType: it must be of type QP or QpEndpoint"),
    "a CQ": (lambda w: w.qp.connect(w.cq), InvalidValueError, "it must be of type QP or"),  # type: ignore[arg-type]
    **{
        f"connect {row}": value
        for name, most in (
            ("retry_cnt", 7), ("rnr_retry", 7), ("ack_timeout", 31), ("min_rnr_timer", 31), ("pkey_index", 0)
        )
        for row, value in numbers(name, lambda w, v, name=name: w.qp.connect(w.endpoint(), **{name: v}), {
            n: f"{name} = {n}: it must be 0 to {most}" for n in (-1, most + 1)
        }).items()
        if row != "pkey_index=None"  # as in INIT, or 0
    },
    **{
        f"connect {row}": value
        for name, most in (("sl", 15), ("traffic_class", 255), ("hop_limit", 255), ("flow_label", 0xFFFFF))
        for row, value in numbers(
            f"ah_attr.{name}", lambda w, v, name=name: w.qp.connect(w.endpoint(), **{name: v}),
            {n: f"ah_attr.{name} = {n}: it must be 0 to {most}" for n in (-1, most + 1)},
        ).items()
    },
    **numbers("max_rd_atomic", lambda w, v: w.qp.connect(w.endpoint(), max_rd_atomic=v), {
        -1: "rd_atomic = -1: it must be 0 to 16",
    }),
    **{
        row: value
        for row, value in numbers("remote_access", lambda w, v: w.qp.connect(w.endpoint(), remote_access=v), {
            1 << 4: "remote_access = 0x10 has unknown bits 0x10",
        }).items()
        if row != "remote_access=None"  # as in INIT, or everything
    },
    **numbers("dest_qp_num", lambda w, v: w.qp.connect(w.endpoint(qpn=v)), {
        n: f"dest_qp_num = {n}: it must be 0 to 16777215" for n in (-1, 1 << 24)
    }),
    **numbers("rq_psn", lambda w, v: w.qp.connect(w.endpoint(psn=v)), {}),
    **numbers("remote.mtu", lambda w, v: w.qp.connect(w.endpoint(mtu=v)), {
        n: f"remote.mtu = {n}: it must be 256, 512, 1024, 2048, 4096 bytes" for n in (0, -1, 1500)
    }),
    **numbers("ah_attr.dlid", lambda w, v: w.qp.connect(w.endpoint(lid=v)), {}),
    "connect GID as text": (
        lambda w: w.qp.connect(w.endpoint(gid="::1")), InvalidValueError, "remote.gid = '::1' is of type str"),
    "connect short GID": (
        lambda w: w.qp.connect(w.endpoint(gid=bytes(4))), InvalidValueError, "ah_attr.gid has 4 bytes"),
    "closed peer": (lambda w: w.qp.connect(w.closed.qp), BadStateError, "is closed"),
    **numbers("psn", lambda w, v: w.qp.endpoint(psn=v), {}),
    "connect port 2": (lambda w: w.qp.connect(w.endpoint(), port=2), InvalidValueError, "has the ports 1 to 1"),
    "connect empty GID": (
        lambda w: w.qp.connect(w.endpoint(), sgid_index=7), NotFoundError, "no GID at index 7: choose one that"),
}
del CONNECT["psn=None"]  # the queue pair's own


@table(CONNECT)
def test_connect(world, call, error, words):
    world.bring(QpState.RST)
    refuse(world, call, error, words)


# --- states, posting and polling

WRITE = SendWr(opcode=WrOpcode.RDMA_WRITE, inline=b"x")
STATES: dict[str, tuple[QpState, Call, str]] = {
    **{
        f"send in {state.name}": (state, lambda w: w.qp.post_send(WRITE), f"is in {state.name}: it takes sends from")
        for state in (QpState.RST, QpState.INIT, QpState.RTR)
    },
    "receive in RST": (QpState.RST, lambda w: w.qp.post_recv(RecvWr()), "is in RST: it takes receives from INIT on"),
    **{
        f"connect in {state.name}": (
            state, lambda w: w.qp.connect(w.qp), f"is in state {state.name}, but connect() starts from RST or INIT")
        for state in (QpState.RTR, QpState.RTS, QpState.ERR)
    },
}


@pytest.mark.parametrize("state, call, words", list(STATES.values()), ids=list(STATES))
def test_wrong_states(world, state, call, words):
    world.bring(state)
    refuse(world, call, BadStateError, words)


def sends(**values: Any) -> Call:
    return lambda w: w.pair.post_send(SendWr(**{"opcode": WrOpcode.RDMA_WRITE, "remote_addr": 0, "rkey": 0, **values}))


def receives(**values: Any) -> Call:
    return lambda w: w.pair.post_recv(RecvWr(**values))


WRONG = "a value is of the wrong type in SendWr("
POST: dict[str, tuple[Call, str]] = {
    "no request": (lambda w: w.pair.post_send(None), "request = None is of type NoneType: it must be of type SendWr"),  # type: ignore[arg-type]
    "a receive": (lambda w: w.pair.post_send(RecvWr()), "is of type RecvWr: it must be of type SendWr"),  # type: ignore[arg-type]
    "a send": (lambda w: w.pair.post_recv(WRITE), "is of type SendWr: it must be of type RecvWr"),  # type: ignore[arg-type]
    "a list": (lambda w: w.pair.post_send([WRITE]), "is of type list: it must be of type SendWr"),  # type: ignore[arg-type]
    "opcode": (sends(opcode=99), "opcode = 99: it must be a WrOpcode"),
    "no opcode": (sends(opcode=None), "opcode = None: it must be a WrOpcode"),
    "sges": (sends(sges=5), WRONG),
    "sge": (sends(sges=[5]), WRONG),
    "sge address": (sends(sges=[Sge("0", 1, 1)]), WRONG),  # type: ignore[arg-type]
    "sge length": (sends(sges=[Sge(0, 1.5, 1)]), WRONG),  # type: ignore[arg-type]
    "sge lkey": (sends(sges=[Sge(0, 1, None)]), WRONG),  # type: ignore[arg-type]
    "long sge": (sends(sges=[Sge(0, (1 << 31) + 1, 1)]), "length = 2147483649: a scatter/gather entry has 0 to"),
    "negative sge": (sends(sges=[Sge(0, -1, 1)]), "length = -1"),
    "two sges": (sends(sges=[Sge(0, 1, 1)] * 2), "2 scatter/gather entries: the queue takes 1 (send_max_sges)"),
    "inline text": (sends(inline="abc"), WRONG),
    "inline number": (sends(inline=5), WRONG),
    "long inline": (sends(inline=bytes(1000)), "1000 bytes inline"),
    "remote_addr": (sends(remote_addr="0"), WRONG),
    "far remote_addr": (sends(remote_addr=1 << 64), "remote_addr = 0x10000000000000000 does not fit in 64 bits"),
    "rkey": (sends(rkey="1"), WRONG),
    "no remote_addr": (sends(inline=b"x", remote_addr=None), "RDMA_WRITE without remote_addr: it needs"),
    "no rkey": (sends(inline=b"x", rkey=None), "RDMA_WRITE without rkey: it needs"),
    "neither": (sends(sges=[Sge(0, 1, 1)], remote_addr=None, rkey=None), "RDMA_WRITE without remote_addr and rkey"),
    "long rkey": (sends(rkey=1 << 32), "rkey = 0x100000000 does not fit in 32 bits"),
    "imm": (sends(opcode=WrOpcode.SEND_WITH_IMM, imm="1"), WRONG),
    "long imm": (sends(opcode=WrOpcode.SEND_WITH_IMM, imm=-1), "imm = -0x1 does not fit in 32 bits"),
    "flags": (sends(flags=None), WRONG),
    "add": (sends(opcode=WrOpcode.ATOMIC_FETCH_AND_ADD, add="1", sges=[Sge(0, 8, 0)]), WRONG),
    "receive sge": (receives(sges=[None]), "a value is of the wrong type in RecvWr("),
    "receive sges": (receives(sges=[Sge(0, 1, 1)] * 2), "2 scatter/gather entries: the queue takes 1 (receive_max_sg"),
}


@pytest.mark.parametrize("call, words", list(POST.values()), ids=list(POST))
def test_requests(world, call, words):
    with pytest.raises(BadWrError) as caught:
        call(world)
    assert (caught.value.index, caught.value.code) == (0, DocaErrorCode.INVALID_VALUE)
    refuse(world, call, BadWrError, words)


def test_a_bad_request_behind_good_ones(world):
    """Those before it are posted, and complete."""
    good = SendWr(opcode=WrOpcode.RDMA_WRITE, inline=b"", wr_id=5)
    with pytest.raises(BadWrError) as caught:
        world.pair.post_send(good, good, None, good)
    assert (caught.value.index, caught.value.request) == (2, None)
    done: list = []
    until(lambda: len(done.__iadd__(world.pair_cq.poll())) == 2, "both writes")
    assert [completion.wr_id for completion in done] == [5, 5]
    world.check_it_works()


@pytest.mark.parametrize("inline", [bytearray(b"01234567"), np.arange(4, dtype=np.uint16)], ids=["bytearray", "array"])
def test_inline_buffers(world, inline):
    """All bytes of any buffer are sent."""
    world.check_it_works(inline)


@table({
    **numbers("most", lambda w, v: w.cq.poll(v), {0: "most = 0: ask for one completion at least", -1: "most = -1"}),
})
def test_poll(world, call, error, words):
    refuse(world, call, error, words)


def test_poll_for_more_than_there_can_be(world):
    assert world.cq.poll(HUGE) == []


def test_numbers_of_numpy(world):
    """They are numbers like others."""
    with world.ctx.create_cq(np.int64(16), collapsed=np.bool_(False)) as cq:  # type: ignore[arg-type]
        assert cq.entries == 16
        place = {"external_umem": (world.umem, np.int32(64)), "external_dbr_umem": (world.umem, np.uint8(0))}
        with world.pd.create_qp(sq_wr=np.uint16(3), send_cq=cq, **place) as qp:
            assert qp.sq_entries == 4
            qp.modify(QpAttr(next_state=np.int8(1), allow_remote_write=np.bool_(True)), np.int64(INIT))  # type: ignore[arg-type]
            assert (qp.state, qp.query()[0].allow_remote_write) == (QpState.INIT, True)


# --- destroyed objects: in every call

OF_CLOSED: dict[str, Call] = {
    "ctx.query_device": lambda w: w.closed.ctx.query_device(),
    "ctx.query_port": lambda w: w.closed.ctx.query_port(),
    "ctx.query_gid": lambda w: w.closed.ctx.query_gid(),
    "ctx.create_pd": lambda w: w.closed.ctx.create_pd(),
    "ctx.create_cq": lambda w: w.closed.ctx.create_cq(4),
    "ctx.create_uar": lambda w: w.closed.ctx.create_uar(),
    "ctx.register_umem": lambda w: w.closed.ctx.register_umem(bytearray(8)),
    "pd.register": lambda w: w.closed.pd.register(bytearray(8)),
    "pd.create_qp": lambda w: w.closed.pd.create_qp(),
    "cq.poll": lambda w: w.closed.cq.poll(),
    "qp.state": lambda w: w.closed.qp.state,
    "qp.query": lambda w: w.closed.qp.query(),
    "qp.modify": lambda w: w.closed.qp.modify(QpAttr(), M.NEXT_STATE),
    "qp.reset": lambda w: w.closed.qp.reset(),
    "qp.to_error": lambda w: w.closed.qp.to_error(),
    "qp.endpoint": lambda w: w.closed.qp.endpoint(),
    "qp.connect": lambda w: w.closed.qp.connect(w.qp),
    "qp.connect, peer": lambda w: w.qp.connect(w.closed.qp),
    "qp.post_send": lambda w: w.closed.qp.post_send(WRITE),
    "qp.post_recv": lambda w: w.closed.qp.post_recv(RecvWr()),
    "qp.posting": lambda w: w.closed.qp.posting,
    "MR as memory": lambda w: w.pd.register(w.closed.mr),
    "UMEM as memory": lambda w: w.ctx.register_umem(w.closed.umem),
    "send_cq": lambda w: w.pd.create_qp(sq_wr=1, send_cq=w.closed.cq),
    "receive_cq": lambda w: w.pd.create_qp(rq_wr=1, receive_cq=w.closed.cq),
    "external_uar of a QP": lambda w: w.pd.create_qp(external_uar=w.closed.uar),
    "external_uar of a CQ": lambda w: w.ctx.create_cq(4, external_uar=w.closed.uar),
    "external_umem": lambda w: w.ctx.create_cq(4, **w.place(external_umem=(w.closed.umem, 0))),
    "external_dbr_umem": lambda w: w.pd.create_qp(**w.place(external_dbr_umem=(w.closed.umem, 0))),
}


@pytest.mark.parametrize("name", OF_CLOSED)
def test_destroyed_objects(world, name):
    world.bring(QpState.RST)
    refuse(world, OF_CLOSED[name], BadStateError, "is closed")


def test_closing_twice_does_nothing(world):
    tables = world.tables()
    for handle in vars(world.closed).values():
        handle.close()
    assert world.tables() == tables
