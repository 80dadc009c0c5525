"""What Ethernet queues are made of, by DEVX: transport domains, TISs, SQs, RQs, RQTs, TIRs and Q counters."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ethernet_rig import KEY, RECORD, Maker, kinds_of, nic_of, refuses
from flow_rig import TIR, Steering
from gpunetio import LinkLayer, PortConfig, verbs
from gpunetio.errors import InUseError, InvalidValueError, NoMemoryError, NotSupportedError
from gpunetio.formats import ethernet_queues as eth
from gpunetio.formats.commands import CapClass, Opcode, Status, WqType
from gpunetio.formats.contexts import CMD_HCA_CAP, ETHERNET_OFFLOAD_CAPS
from gpunetio.formats.ethernet_queues import ModifyRq, ModifyRqt, ModifyTir, ModifyTis, QueueState, rq_list
from gpunetio.formats.events import EventType
from gpunetio.formats.flow import EntryModify
from gpunetio.formats.mailboxes import mailboxes
from gpunetio.nic.control.queues import q_counter, rq, rqt, sq, tir, tis, transport_domain
from gpunetio.nic.control.queues.qp import MAX_QP
from gpunetio.nic.control.syndromes import CommandSyndrome as Because
from gpunetio.nic.state.ethernet_queues import Q_COUNTER_ROW
from gpunetio.nic.state.extensions import ETHERNET_QUEUES
from gpunetio.nic.turn.commands import EngineCommand
from gpunetio.verbs import DevxObject
from nic_rig import PATIENCE

RST, RDY, ERR = QueueState.RST, QueueState.RDY, QueueState.ERR
BAD_PARAM, BAD_RESOURCE = Status.BAD_PARAM, Status.BAD_RESOURCE
NOWHERE = 0x3FF  # no object has this number


@pytest.fixture
def ctx() -> Iterator[verbs.Context]:
    with verbs.open("soft0") as opened:
        yield opened


@pytest.fixture
def make(ctx) -> Maker:
    return Maker(ctx)


def capabilities(ctx: verbs.Context, kind: CapClass) -> dict[str, int]:
    layout = {CapClass.GENERAL: CMD_HCA_CAP, CapClass.ETHERNET_OFFLOADS: ETHERNET_OFFLOAD_CAPS}[kind]
    told = ctx.devx.command(Opcode.QUERY_HCA_CAP, op_mod=kind << 1 | 1)
    return layout.unpack(told["capability"])


def destroy(made: DevxObject) -> None:
    """Past the object, which counts as closed even if the device refuses."""
    made.ctx.provider.devx_obj_destroy(made.devx_handle)


# --- as programs use them


@pytest.mark.parametrize("device", ["soft0", "mlx5_0"])
def test_a_send_and_a_receive_queue(device, request):
    """In the order of DPDK, on the software NIC and, with a stand-in, through libmlx5."""
    if device != "soft0":
        request.getfixturevalue("stand_in")
    with verbs.open(device) as ctx:
        make = Maker(ctx)
        cq, domain, counter = make.cq(), make.domain(), make.counter()
        tis = make.tis(domain.number, prio=2)
        sq = make.sq(cq.number, tis.number, user_index=0xABCDEF)
        rqs = [make.rq(cq.number, counter_set_id=counter.number) for _ in range(2)]
        rqt = make.rqt(rqs[n % 2].number for n in range(8))
        hashed, direct = make.hashed(domain.number, rqt.number), make.direct(domain.number, rqs[0].number)
        sq.modify(Opcode.MODIFY_SQ, sq_state=RST, ctx={"state": RDY})
        for queue in rqs:
            queue.modify(Opcode.MODIFY_RQ, rq_state=RST, ctx={"state": RDY})
        told = sq.query()["ctx"]
        assert (told["state"], told["user_index"]) == (RDY, 0xABCDEF)
        assert (told["cqn"], told["tis_num_0"]) == (cq.number, tis.number)
        assert tis.query()["ctx"]["prio"] == 2
        assert [queue.query()["ctx"]["state"] for queue in rqs] == [RDY, RDY]
        assert rqs[0].query()["ctx"]["counter_set_id"] == counter.number
        assert hashed.query()["ctx"]["rx_hash_toeplitz_key"] == KEY
        assert direct.query()["ctx"]["inline_rqn"] == rqs[0].number
        assert counter.query()["out_of_buffer"] == 0
        mailbox = eth.QUERY_RQT_IN.pack(opcode=Opcode.QUERY_RQT, rqtn=rqt.number)
        listed = rqt.query_raw(mailbox, eth.QUERY_RQT_OUT.size + 32)[eth.QUERY_RQT_OUT.size :]
        assert eth.rqns_of(listed) == [rqs[n % 2].number for n in range(8)]
        for made in (hashed, direct, rqt, *rqs, sq, tis, domain, counter, cq):
            made.close()
        make.pd.close()
        make.uar.close()
        make.umem.close()


def test_objects_have_names(make):
    assert repr(make.domain()).startswith("<DEVX TRANSPORT_DOMAIN 0x")
    assert repr(make.counter()).startswith("<DEVX Q_COUNTER 0x")


def test_a_program_names_objects_by_themselves(make):
    """Then `verbs` refuses to close them, before the device has to."""
    domain = make.domain()
    tis = make.create(Opcode.CREATE_TIS, ctx={"transport_domain": domain})
    with pytest.raises(InUseError, match="is still used by DEVX TIS"):
        domain.close()
    tis.close()
    domain.close()


# --- rows


def test_the_row_of_an_sq(ctx, make):
    nic, cq, tis = nic_of(ctx), make.cq(), make.tis(make.domain().number, prio=5)
    made = make.sq(
        cq.number, tis.number, {"log_wq_sz": 7, "wq_umem_offset": 128}, user_index=77, min_wqe_inline_mode=1,
        allow_multi_pkt_send_wqe=1, cd_master=1,
    )
    row = nic.sqs[made.number]
    assert (row["qpn"], row["state"], row["user_index"], row["pdn"]) == (made.number, RST, 77, make.pd.pdn)
    assert (row["tis"], row["send_cq"]) == (nic.tiss.row_address(tis.number), nic.cqs.row_address(cq.number))
    assert (row["sq_addr"], row["sq_log"]) == (make.memory.address + 128, 7)
    assert row["dbrec"] == make.memory.address + RECORD + 64
    assert (row["inline_mode"], row["multi_packet"], row["core_direct"], row["flush"]) == (1, 1, 1, 1)
    assert row["doorbell"] == ctx.devx.doorbell_register(make.uar, made)
    assert nic.tiss[tis.number]["prio"] == 5


def test_each_sq_has_a_number_and_a_doorbell_of_its_own(ctx, make):
    """No QP has the number of an SQ: both ring the registers of UAR pages."""
    cq, tis = make.cq().number, make.tis(make.domain().number).number
    made = [make.sq(cq, tis) for _ in range(20)]
    numbers = {queue.number for queue in made}
    assert len(numbers) == 20
    assert all(1 < number < MAX_QP for number in numbers)
    registers = {ctx.devx.doorbell_register(make.uar, queue) for queue in made}
    with make.pd.create_qp(send_cq=ctx.create_cq(8), sq_wr=4) as qp:
        registers.add(nic_of(ctx).doorbell_line(qp.qpn))
    assert len(registers) == 21


@pytest.mark.parametrize("wq_type, log_stride", [(0, 5), (0, 9), (1, 4), (1, 9)])
def test_the_row_of_an_rq(ctx, make, wq_type, log_stride):
    nic, cq, counter = nic_of(ctx), make.cq(), make.counter()
    made = make.rq(
        cq.number, {"wq_type": wq_type, "log_wq_stride": log_stride, "log_wq_sz": 3}, counter_set_id=counter.number,
        user_index=9,
    )
    row = nic.rqs[made.number]
    assert (row["rqn"], row["state"], row["user_index"], row["pdn"]) == (made.number, RST, 9, make.pd.pdn)
    assert (row["cq"], row["srq"]) == (nic.cqs.row_address(cq.number), 0)
    assert (row["wq_type"], row["addr"]) == (wq_type, make.memory.address)
    assert (row["log"], row["stride"]) == (3, 1 << log_stride)
    assert (row["strides"], row["stride_bytes"], row["padding"]) == (0, 0, 0)
    assert (row["keep_vlan"], row["flush"]) == (1, 1)
    assert row["counter"] == nic.control.q_counters.table.row_address(counter.number)
    assert nic.rqs[make.rq(cq.number, vsd=0).number]["counter"] == 0


@pytest.mark.parametrize("strides_log", range(3, 17))
@pytest.mark.parametrize("wq_type", [2, 3])
def test_the_row_of_a_striding_rq(ctx, make, wq_type, strides_log):
    wq = {
        "wq_type": wq_type, "log_wq_stride": 5, "log_wqe_num_of_strides": strides_log - 9 & 0xF,
        "log_wqe_stride_size": strides_log % 8, "two_byte_shift_en": strides_log & 1,
    }
    row = nic_of(ctx).rqs[make.rq(make.cq().number, wq).number]
    assert (row["strides"], row["stride_bytes"]) == (1 << strides_log, 64 << strides_log % 8)
    assert row["padding"] == 2 * (strides_log & 1)


@pytest.mark.parametrize("wq_type", [WqType.LINKED_LIST, WqType.CYCLIC])
def test_the_row_of_an_rq_with_a_receive_pool(ctx, make, wq_type):
    """The pool has the ring, and so its type and the PD: those in the context are ignored."""
    nic, pool = nic_of(ctx), make.rmp(wq_type=wq_type)
    row = nic.rqs[make.rq(make.cq().number, {"pd": 0, "wq_type": 15}, mem_rq_type=1, rmpn=pool.number).number]
    assert (row["srq"], row["pdn"]) == (nic.srqs.row_address(pool.number), make.pd.pdn)
    assert (row["wq_type"], row["stride"], row["addr"], row["dbrec"]) == (wq_type, 32, 0, 0)


def test_the_rows_of_tirs_and_of_a_table(ctx, make):
    nic, cq, domain = nic_of(ctx), make.cq().number, make.domain().number
    first, second = make.rq(cq).number, make.rq(cq).number
    table = make.rqt([first, second, second, first]).number
    row = nic.rqts[table]
    assert row["count"] == 4
    listed = nic.control.rqts._lists[table]
    assert row["rqs"] == listed.address
    addresses = [nic.rqs.row_address(rqn) for rqn in (first, second, second, first)]
    assert listed.view(np.int64, 0, 4).tolist() == addresses
    hashed = nic.tirs[make.hashed(domain, table, rx_hash_symmetric=1, self_lb_block=2).number]
    assert (hashed["rqt"], hashed["rq"], hashed["transport_domain"]) == (nic.rqts.row_address(table), 0, domain)
    assert (hashed["hash_fn"], hashed["symmetric"], hashed["self_lb_block"]) == (2, 1, 2)
    assert (hashed["l3_prot"], hashed["l4_prot"], hashed["fields"]) == (0, 1, 0xF)
    assert bytes(hashed["key"]) == KEY
    direct = nic.tirs[make.direct(domain, second).number]
    assert (direct["rq"], direct["rqt"], direct["hash_fn"]) == (nic.rqs.row_address(second), 0, 0)
    without = nic.tirs[make.hashed(
        domain, table, rx_hash_fn=0, rx_hash_toeplitz_key=bytes(40), rx_hash_field_selector_outer={}
    ).number]
    assert (without["rqt"], without["hash_fn"], without["fields"]) == (nic.rqts.row_address(table), 0, 0)


def test_destroyed_objects_leave_empty_rows(ctx, make):
    nic, cq, domain = nic_of(ctx), make.cq().number, make.domain()
    tis = make.tis(domain.number)
    sq, rq = make.sq(cq, tis.number), make.rq(cq)
    rqt = make.rqt([rq.number])
    tir = make.hashed(domain.number, rqt.number)
    for made, table in ((tir, nic.tirs), (rqt, nic.rqts), (rq, nic.rqs), (sq, nic.sqs), (tis, nic.tiss)):
        slot = made.number & table.mask
        made.close()
        assert not any(table.rows[slot].tobytes())
        assert made.number not in table


# --- capabilities


def test_capabilities(ctx):
    told = capabilities(ctx, CapClass.GENERAL)
    assert told == told | {
        "eth_net_offloads": 1, "log_max_transport_domain": 6, "log_max_tis": 10, "log_max_sq": 12, "log_max_rq": 12,
        "log_max_rqt": 10, "log_max_rqt_size": 11, "log_max_tir": 12, "log_max_tis_per_sq": 0, "log_max_wq_sz": 15,
        "striding_rq": 1, "ext_stride_num_range": 1, "log_min_stride_sz_rq": 6, "log_max_stride_sz_rq": 13,
        "sq_ts_format": 2, "rq_ts_format": 0, "wait_on_time": 1,
    }
    offloads = capabilities(ctx, CapClass.ETHERNET_OFFLOADS)
    assert {name: value for name, value in offloads.items() if value} == {
        "wqe_inline_mode": 2, "self_lb_en_modifiable": 1, "csum_cap": 1, "wqe_vlan_insert": 1, "max_lso_cap": 18,
        "enhanced_multi_pkt_send_wqe": 1,
    }


@pytest.mark.parametrize("kind", ["SQ", "RQ"])
def test_a_queue_loads_what_serves_it_while_others_use_the_nic(ctx, make, kind, monkeypatch):
    """The compiler may take many seconds, and other threads' commands do not wait for it."""
    nic, cq = nic_of(ctx), make.cq().number
    tis = make.tis(make.domain().number).number
    of_others: list[int] = []

    def load() -> None:
        other = threading.Thread(target=lambda: of_others.append(nic.alloc_pd()))
        other.start()
        other.join(PATIENCE)

    monkeypatch.setattr(ETHERNET_QUEUES, "load", load)
    made = make.sq(cq, tis) if kind == "SQ" else make.rq(cq)
    made.close()
    (pdn,) = of_others
    nic.dealloc_pd(pdn)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (PortConfig(link_layer=LinkLayer.INFINIBAND), "the port's link layer is InfiniBand"),
        (PortConfig(wire="udp"), "the port's wire is 'udp', which carries no Ethernet frames"),
        (PortConfig(wire="replay"), "the port's wire is 'replay', which carries no Ethernet frames"),
    ],
    ids=["infiniband", "udp", "replay"],
)
def test_a_port_without_ethernet(config, why, monkeypatch):
    """What it refuses, it refuses at once: nothing is compiled."""
    monkeypatch.setattr(ETHERNET_QUEUES, "load", lambda: pytest.fail("loaded"))
    with verbs.open("soft5", port=config) as ctx:
        make = Maker(ctx)
        cq = make.cq().number
        creations: dict[str, Callable[[], DevxObject]] = {
            "transport domain": make.domain, "Q counter": make.counter, "TIS": lambda: make.tis(1),
            "SQ": lambda: make.sq(cq, 1), "RQ": lambda: make.rq(cq), "RQT": lambda: make.rqt([1]),
            "TIR": lambda: make.direct(1, 1),
        }
        for kind, call in creations.items():
            refuses(
                ctx, call, Status.BAD_SYS_STATE, Because.NO_ETHERNET, f"{kind}s need an Ethernet port: {why}"
            )
        told = capabilities(ctx, CapClass.GENERAL)
        assert not any(told[f"log_max_{kind}"] for kind in ("tis", "sq", "rq", "rqt", "tir", "transport_domain"))
        assert told["eth_net_offloads"] == told["striding_rq"] == 0
        assert not any(capabilities(ctx, CapClass.ETHERNET_OFFLOADS).values())


# --- what creation refuses


@pytest.mark.parametrize(
    ("context", "status", "syndrome", "words"),
    [
        ({"transport_domain": 0}, BAD_RESOURCE, Because.NO_SUCH_TRANSPORT_DOMAIN, "there is no transport domain 0x0"),
        ({"transport_domain": NOWHERE}, BAD_RESOURCE, Because.NO_SUCH_TRANSPORT_DOMAIN, "transport domain 0x3ff"),
        ({"pd": NOWHERE}, BAD_RESOURCE, Because.NO_SUCH_PD, "there is no PD 0x3ff"),
        ({"tls_en": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "tisc.tls_en = 1: the software NIC has no TLS"),
        ({"strict_lag_tx_port_affinity": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "link aggregation"),
        ({"lag_tx_port_affinity": 2}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "lag_tx_port_affinity = 2"),
        ({"underlay_qpn": 5}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "IP over InfiniBand"),
    ],
)
def test_create_tis_refused(ctx, make, context, status, syndrome, words):
    domain = make.domain().number
    refuses(ctx, lambda: make.tis(**{"domain": domain, **context}), status, syndrome, "CREATE_TIS failed", words)


COMMON = [  # of SQs and RQs: fields of the context, fields of its WQ, and the refusal
    ({"state": 1}, {}, BAD_PARAM, Because.QUEUE_STATE, "state = 1: a queue is created in RST (0)"),
    ({"state": 3}, {}, BAD_PARAM, Because.QUEUE_STATE, "state = 3"),
    ({"ts_format": 3}, {}, BAD_PARAM, Because.TIMESTAMP_FORMAT, "ts_format = 3: it must be one of FREE_RUNNING (0)"),
    ({"cqn": 0}, {}, BAD_RESOURCE, Because.NO_SUCH_CQ, "there is no CQ 0x0"),
    ({"cqn": NOWHERE}, {}, BAD_RESOURCE, Because.NO_SUCH_CQ, "there is no CQ 0x3ff"),
    ({"rlky": 1}, {}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "rlky = 1: the software NIC has no reserved lkey"),
    ({"hairpin": 1}, {}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "hairpin queues"),
    ({"hairpin_peer_vhca": 1}, {}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "hairpin queues"),
    ({}, {"pd": 0}, BAD_RESOURCE, Because.NO_SUCH_PD, "there is no PD 0x0"),
    ({}, {"log_wq_sz": 16}, BAD_PARAM, Because.WQ_SIZE, "log_wq_sz 16 is above 15"),
    ({}, {"wq_type": 4}, BAD_PARAM, Because.WQ_TYPE, "wq_type 4"),
    ({}, {"wq_signature": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "wq.wq_signature = 1"),
    ({}, {"cd_slave": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "wq.cd_slave = 1"),
    ({}, {"hds_skip_first_sge": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "header-data split"),
    ({}, {"log2_hds_buf_size": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "header-data split"),
    ({}, {"headers_mkey": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "header-data split"),
    ({}, {"shampo_enable": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "header-data split"),
    ({}, {"log_hairpin_data_sz": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "hairpin queues"),
    ({}, {"log_hairpin_num_packets": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "hairpin queues"),
    ({}, {"page_offset": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "use wq_umem_offset"),
    ({}, {"lwm": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "limit events"),
    ({}, {"wq_umem_valid": 0}, BAD_PARAM, Because.UMEM_REQUIRED, "wq_umem_valid and dbr_umem_valid must be set"),
    ({}, {"dbr_umem_valid": 0}, BAD_PARAM, Because.UMEM_REQUIRED, "wq_umem_valid and dbr_umem_valid must be set"),
    ({}, {"wq_umem_id": NOWHERE}, BAD_RESOURCE, Because.NO_SUCH_UMEM, "there is no UMEM 0x3ff for the ring of the"),
    ({}, {"dbr_umem_id": NOWHERE}, BAD_RESOURCE, Because.NO_SUCH_UMEM, "no UMEM 0x3ff for its doorbell record"),
    ({}, {"wq_umem_offset": 0xFFC0}, BAD_PARAM, Because.UMEM_RANGE, "[0xffc0, +0x"),
    ({}, {"log_wq_sz": 15}, BAD_PARAM, Because.UMEM_RANGE, "is outside UMEM"),
    ({}, {"wq_umem_offset": 32}, BAD_PARAM, Because.UMEM_ALIGNMENT, "not a multiple of 64"),
    ({}, {"dbr_addr": 0x10000}, BAD_PARAM, Because.UMEM_RANGE, "its doorbell record: [0x10000, +0x8)"),
    ({}, {"dbr_addr": 4}, BAD_PARAM, Because.UMEM_ALIGNMENT, "not a multiple of 8"),
]


@pytest.mark.parametrize(
    ("context", "wq", "status", "syndrome", "words"),
    [
        *COMMON,
        ({"tis_num_0": 0}, {}, BAD_RESOURCE, Because.NO_SUCH_TIS, "there is no TIS 0x0"),
        ({"tis_num_0": NOWHERE}, {}, BAD_RESOURCE, Because.NO_SUCH_TIS, "there is no TIS 0x3ff"),
        ({"tis_lst_sz": 0}, {}, BAD_PARAM, Because.TIS_LIST, "tis_lst_sz 0: an SQ has one TIS"),
        ({"tis_lst_sz": 2}, {}, BAD_PARAM, Because.TIS_LIST, "tis_lst_sz 2"),
        ({"min_wqe_inline_mode": 4}, {}, BAD_PARAM, Because.INLINE_MODE, "min_wqe_inline_mode 4 is above 3"),
        ({}, {"uar_page": 0}, BAD_RESOURCE, Because.NO_SUCH_UAR, "there is no UAR page 0x0"),
        ({}, {"wq_type": 0}, BAD_PARAM, Because.WQ_TYPE, "wq_type 0, log_wq_stride 6: the ring of an SQ is cyclic"),
        ({}, {"wq_type": 3}, BAD_PARAM, Because.WQ_TYPE, "wq_type 3"),
        ({}, {"log_wq_stride": 5}, BAD_PARAM, Because.WQ_TYPE, "log_wq_stride is 6"),
        ({}, {"log_wqe_num_of_strides": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "strides in send queues"),
        ({}, {"log_wqe_stride_size": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "strides in send queues"),
        ({}, {"two_byte_shift_en": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "padding in send queues"),
        ({"fre": 1}, {}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "fast registration"),
        ({"reg_umr": 1}, {}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "UMR"),
        ({"allow_swp": 1}, {}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "software parser"),
        ({"non_wire": 1}, {}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "queues that send to no wire"),
        ({"static_sq_wq": 1}, {}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "static WQEs"),
        ({"hairpin_peer_rq": 1}, {}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "hairpin queues"),
        ({"ts_cqe_to_dest_cqn": 1}, {}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "second CQ for timestamps"),
        ({"packet_pacing_rate_limit_index": 7}, {}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "packet pacing"),
        ({"qos_queue_group_id": 7}, {}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "packet pacing"),
    ],
)
def test_create_sq_refused(ctx, make, context, wq, status, syndrome, words):
    fields = {"cqn": make.cq().number, "tisn": make.tis(make.domain().number).number}
    make.sq(**fields)
    refuses(ctx, lambda: make.sq(**{**fields, "wq": wq, **context}), status, syndrome, "CREATE_SQ failed", words)


STRIDING = {"wq_type": 3, "log_wq_stride": 5}


@pytest.mark.parametrize(
    ("context", "wq", "status", "syndrome", "words"),
    [
        *COMMON,
        ({"ts_format": 2}, {}, BAD_PARAM, Because.TIMESTAMP_FORMAT, "one of FREE_RUNNING (0), DEFAULT (1)"),
        ({"counter_set_id": 77}, {}, BAD_RESOURCE, Because.NO_SUCH_Q_COUNTER, "there is no Q counter 0x4d"),
        ({"mem_rq_type": 2}, {}, BAD_PARAM, Because.RQ_TYPE, "mem_rq_type 2: WQEs are in the RQ (0) or in an RMP (1)"),
        ({"mem_rq_type": 1}, {}, BAD_RESOURCE, Because.NO_SUCH_SRQ, "there is no SRQ 0x0"),
        ({"mem_rq_type": 1, "rmpn": NOWHERE}, {}, BAD_RESOURCE, Because.NO_SUCH_SRQ, "there is no SRQ 0x3ff"),
        ({"delay_drop_en": 1}, {}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "delayed drops"),
        ({"scatter_fcs": 1}, {}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "frame check sequences"),
        ({"hairpin_peer_sq": 1}, {}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "hairpin queues"),
        ({"reservation_timeout": 1}, {}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "header-data split"),
        ({}, {"log_wq_stride": 3}, BAD_PARAM, Because.WQ_SIZE, "log_wq_stride 3: with wq_type CYCLIC it can be from 4"),
        ({}, {"log_wq_stride": 10}, BAD_PARAM, Because.WQ_SIZE, "from 4 to 9"),
        ({}, {"wq_type": 0}, BAD_PARAM, Because.WQ_SIZE, "with wq_type LINKED_LIST it can be from 5 to 9"),
        ({}, {"wq_type": 3}, BAD_PARAM, Because.WQ_SIZE, "with wq_type CYCLIC_STRIDING it can be from 5 to 5"),
        ({}, {"wq_type": 2, "log_wq_stride": 6}, BAD_PARAM, Because.WQ_SIZE, "LINKED_LIST_STRIDING"),
        ({}, {"log_wqe_num_of_strides": 1}, BAD_PARAM, Because.STRIDES, "log_wqe_num_of_strides 1, log_wqe_stride"),
        ({}, {"log_wqe_stride_size": 1}, BAD_PARAM, Because.STRIDES, "they must be 0 with wq_type CYCLIC"),
        ({}, {"two_byte_shift_en": 1}, BAD_PARAM, Because.STRIDES, "two_byte_shift_en 1: they must be 0"),
        ({}, STRIDING | {"log_wqe_num_of_strides": 8}, BAD_PARAM, Because.STRIDES, "0x8 is 2^1 strides"),
        ({}, STRIDING | {"log_wqe_num_of_strides": 9}, BAD_PARAM, Because.STRIDES, "a WQE has 8 strides at least"),
    ],
)
def test_create_rq_refused(ctx, make, context, wq, status, syndrome, words):
    cq = make.cq().number
    make.rq(cq)
    refuses(ctx, lambda: make.rq(**{"cqn": cq, "wq": wq, **context}), status, syndrome, "CREATE_RQ failed", words)


@pytest.mark.parametrize(
    ("entries", "most", "context", "status", "syndrome", "words"),
    [
        (0, 8, {}, BAD_PARAM, Because.RQT_SIZE, "rqt_actual_size 0: it is a power of two"),
        (3, 8, {}, BAD_PARAM, Because.RQT_SIZE, "rqt_actual_size 3"),
        (8, 4, {}, BAD_PARAM, Because.RQT_SIZE, "and rqt_max_size, 4, at most"),
        (1, 0, {}, BAD_PARAM, Because.RQT_SIZE, "rqt_max_size 0: it is a power of two, 2048 at most"),
        (1, 6, {}, BAD_PARAM, Because.RQT_SIZE, "rqt_max_size 6"),
        (1, 4096, {}, BAD_PARAM, Because.RQT_SIZE, "rqt_max_size 4096"),
        (2, 8, {"list_q_type": 1}, BAD_PARAM, Because.RQ_TYPE, "list_q_type 1: only RQs (0)"),
        (2, 8, {"rq_vhca_id_format": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "RQs of other functions"),
        (2, 8, {"rqt_actual_size": 4}, Status.BAD_INPUT_LEN, Because.SHORT_INPUT,
         "an RQT of 4 entries takes 288 bytes, the input has 280"),
    ],
)
def test_create_rqt_refused(ctx, make, entries, most, context, status, syndrome, words):
    rqn = make.rq(make.cq().number).number
    call: Callable[[], Any] = lambda: make.rqt([rqn] * entries, most, **context)  # noqa: E731
    refuses(ctx, call, status, syndrome, "CREATE_RQT failed", words)


@pytest.mark.parametrize("at", [0, 3])
def test_an_rqt_of_rqs_that_exist(ctx, make, at):
    rqns = [make.rq(make.cq().number).number] * 4
    rqns[at] = NOWHERE
    refuses(ctx, lambda: make.rqt(rqns), BAD_RESOURCE, Because.NO_SUCH_RQ, "there is no RQ 0x3ff")


def test_the_largest_rqt(ctx, make):
    rqn = make.rq(make.cq().number).number
    assert nic_of(ctx).rqts[make.rqt([rqn] * 2048, 2048).number]["count"] == 2048


def outer(fields: int) -> dict[str, Any]:
    return {"rx_hash_field_selector_outer": {"selected_fields": fields}}


@pytest.mark.parametrize(
    ("context", "status", "syndrome", "words"),
    [
        ({"transport_domain": 0}, BAD_RESOURCE, Because.NO_SUCH_TRANSPORT_DOMAIN, "there is no transport domain 0x0"),
        ({"indirect_table": 0}, BAD_RESOURCE, Because.NO_SUCH_RQT, "there is no RQT 0x0"),
        ({"indirect_table": NOWHERE}, BAD_RESOURCE, Because.NO_SUCH_RQT, "there is no RQT 0x3ff"),
        ({"inline_rqn": 1}, BAD_PARAM, Because.DISP_TYPE, "disp_type 1, inline_rqn 0x1, indirect_table 0x"),
        ({"disp_type": 0}, BAD_PARAM, Because.DISP_TYPE, "DIRECT (0) takes an RQ, INDIRECT (1) an RQT"),
        ({"disp_type": 2}, BAD_PARAM, Because.DISP_TYPE, "disp_type 2"),
        ({"disp_type": 0, "indirect_table": 0}, BAD_RESOURCE, Because.NO_SUCH_RQ, "there is no RQ 0x0"),
        ({"rx_hash_fn": 1}, BAD_PARAM, Because.RX_HASH, "rx_hash_fn 1: only NONE (0) and TOEPLITZ (2) are supported"),
        ({"rx_hash_fn": 3}, BAD_PARAM, Because.RX_HASH, "rx_hash_fn 3"),
        (outer(0x10), BAD_PARAM, Because.RX_HASH, "selected_fields 0x10: addresses (1, 2) and ports (4, 8)"),
        (outer(0x20), BAD_PARAM, Because.RX_HASH, "selected_fields 0x20"),
        ({"rx_hash_fn": 0}, BAD_PARAM, Because.RX_HASH, "selected_fields 0xf, rx_hash_symmetric 0: without a hash"),
        ({"rx_hash_fn": 0, "rx_hash_symmetric": 1, **outer(0)}, BAD_PARAM, Because.RX_HASH, "rx_hash_symmetric 1"),
        ({"rx_hash_toeplitz_key": bytes(40)}, BAD_PARAM, Because.RX_HASH, "all zeros: every packet would have hash 0"),
        ({"rx_hash_symmetric": 1, **outer(0x1)}, BAD_PARAM, Because.RX_HASH, "a symmetric hash takes both addresses"),
        ({"rx_hash_symmetric": 1, **outer(0xB)}, BAD_PARAM, Because.RX_HASH, "selected_fields 0xb"),
        ({"tls_en": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "TLS"),
        ({"packet_merge_mask": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "tirc.packet_merge_mask = 1"),
        ({"lro_timeout_period_usecs": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "LRO"),
        ({"lro_max_ip_payload_size": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "LRO"),
        ({"tunneled_offload_en": 1}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "tunnels"),
        ({"rx_hash_field_selector_inner": {"selected_fields": 1}}, BAD_PARAM, Because.UNSUPPORTED_FIELD, "tunnels"),
    ],
)
def test_create_tir_refused(ctx, make, context, status, syndrome, words):
    domain, rqn = make.domain().number, make.rq(make.cq().number).number
    rqtn = make.rqt([rqn, rqn]).number
    fields = {"domain": domain, "rqtn": rqtn, **context}
    refuses(ctx, lambda: make.hashed(**fields), status, syndrome, "CREATE_TIR failed", words)


def test_a_direct_tir_has_no_hash(ctx, make):
    domain, rqn = make.domain().number, make.rq(make.cq().number).number
    call: Callable[[], Any] = lambda: make.direct(domain, rqn, rx_hash_fn=2, rx_hash_toeplitz_key=KEY)  # noqa: E731
    refuses(ctx, call, BAD_PARAM, Because.RX_HASH, "a DIRECT TIR has one RQ and no hash")
    call = lambda: make.direct(domain, rqn, **outer(1))  # noqa: E731
    refuses(ctx, call, BAD_PARAM, Because.RX_HASH, "without a hash function both are 0")


# --- states and MODIFY


ALLOWED = {(RST, RST), (RST, RDY), (RDY, RDY), (RDY, RST), (RDY, ERR), (ERR, ERR), (ERR, RST)}
WAYS = {RST: (), RDY: (RDY,), ERR: (RDY, ERR)}  # from RST to each state


@pytest.mark.parametrize("kind", ["SQ", "RQ"])
@pytest.mark.parametrize("now", [RST, RDY, ERR])
def test_states(ctx, make, kind, now):
    cq, tis = make.cq().number, make.tis(make.domain().number).number
    opcode, field = Opcode[f"MODIFY_{kind}"], f"{kind.lower()}_state"

    def move(queue: DevxObject, told: int, wanted: int) -> None:
        queue.modify(opcode, **{field: told}, ctx={"state": wanted})
        assert queue.query()["ctx"]["state"] == wanted

    def queue_in(state: QueueState) -> DevxObject:
        queue, at = make.rq(cq) if kind == "RQ" else make.sq(cq, tis), RST
        for after in WAYS[state]:
            move(queue, at, after)
            at = after
        return queue

    queue = queue_in(now)
    for told in {*QueueState, 2, 15} - {now}:
        refuses(
            ctx, lambda told=told: move(queue, told, RDY), Status.BAD_RES_STATE, Because.QUEUE_STATE,
            f"{kind} {queue.number:#x} is in state {now.name} ({int(now)}), not in {int(told)} as the mailbox says",
        )
    for wanted in (RST, RDY, ERR, 2, 4):
        queue = queue_in(now)
        if (now, wanted) in ALLOWED:
            move(queue, now, wanted)
        else:
            refuses(
                ctx, lambda queue=queue, wanted=wanted: move(queue, now, wanted), Status.BAD_RES_STATE,
                Because.QUEUE_STATE, f"from {now.name} to state {int(wanted)}; {now.name} leads to {now.name} (",
            )


def test_modify_of_a_queue_that_does_not_exist(ctx, make):
    nic = nic_of(ctx)
    for opcode in (op for op in Opcode if op.name.split("_")[-1] in ("SQ", "RQ", "TIR", "TIS", "RQT")):
        if opcode.name.startswith("CREATE"):
            continue
        command = nic.control.interpreter.find(opcode.to_bytes(2, "big"))
        assert command is not None
        named = dict.fromkeys(mailboxes(opcode).numbers, NOWHERE)
        out, text = nic.execute(command.input_for(named), 4096)
        assert Status(out[0]) == BAD_RESOURCE
        assert text == f"there is no {opcode.name.split('_')[-1]} 0x3ff"


def test_modify_sq_takes_no_bits(ctx, make):
    queue = make.sq(make.cq().number, make.tis(make.domain().number).number)
    for mask in (1, 1 << 63):
        refuses(
            ctx, lambda mask=mask: queue.modify(Opcode.MODIFY_SQ, modify_bitmask=mask), BAD_PARAM, Because.MODIFY_MASK,
            f"bitmask {mask:#x}: bits {mask:#x} cannot be modified, only the state",
        )


def test_modify_rq(ctx, make):
    nic, counter = nic_of(ctx), make.counter()
    queue = make.rq(make.cq().number)

    def modify(mask: int, **context: Any) -> None:
        queue.modify(Opcode.MODIFY_RQ, modify_bitmask=mask, ctx=context)

    modify(ModifyRq.VSD, vsd=0, counter_set_id=counter.number, user_index=5)  # only what has its bit
    told = queue.query()["ctx"]
    assert (told["vsd"], told["counter_set_id"], told["user_index"]) == (0, 0, 0)
    assert nic.rqs[queue.number]["keep_vlan"] == 0
    counter.close()
    counter = make.counter()
    modify(ModifyRq.COUNTER_SET_ID, counter_set_id=counter.number)
    assert nic.rqs[queue.number]["counter"] == nic.control.q_counters.table.row_address(counter.number)
    words = f"Q counter {counter.number:#x} is used by RQ {queue.number:#x}"
    refuses(ctx, lambda: destroy(counter), Status.RESOURCE_BUSY, Because.IN_USE, words)
    modify(ModifyRq.COUNTER_SET_ID | ModifyRq.VSD, vsd=1)
    told = queue.query()["ctx"]
    assert (told["vsd"], told["counter_set_id"]) == (1, 0)
    counter.close()
    words = "there is no Q counter 0x4d"
    refuses(
        ctx, lambda: modify(ModifyRq.COUNTER_SET_ID, counter_set_id=77), BAD_RESOURCE, Because.NO_SUCH_Q_COUNTER, words
    )
    for bit in (ModifyRq.LWM, ModifyRq.SCATTER_FCS, 16):
        words = f"bits {int(bit):#x} cannot be modified, only VSD (0x2), COUNTER_SET_ID (0x8)"
        refuses(ctx, lambda bit=bit: modify(bit | ModifyRq.VSD), BAD_PARAM, Because.MODIFY_MASK, words)


def test_modify_tis(ctx, make):
    tis = make.tis(make.domain().number, prio=1)
    tis.modify(Opcode.MODIFY_TIS, ctx={"prio": 9})
    assert tis.query()["ctx"]["prio"] == 1
    tis.modify(Opcode.MODIFY_TIS, bitmask=ModifyTis.PRIO, ctx={"prio": 9})
    assert tis.query()["ctx"]["prio"] == nic_of(ctx).tiss[tis.number]["prio"] == 9
    for bit in (ModifyTis.STRICT_LAG, ModifyTis.LAG_TX_PORT_AFFINITY):
        words = f"bits {int(bit):#x} cannot be modified, only PRIO (0x1)"
        call: Callable[[], Any] = lambda bit=bit: tis.modify(Opcode.MODIFY_TIS, bitmask=bit)  # noqa: E731
        refuses(ctx, call, BAD_PARAM, Because.MODIFY_MASK, words)


def listed_in(table: DevxObject) -> list[int]:
    count = table.query()["ctx"]["rqt_actual_size"]
    raw = table.query_raw(eth.QUERY_RQT_IN.pack(opcode=Opcode.QUERY_RQT, rqtn=table.number), 272 + 4 * count)
    return eth.rqns_of(raw[272:])


def test_modify_rqt(ctx, make):
    cq = make.cq().number
    first, second = make.rq(cq), make.rq(cq)
    table = make.rqt([first.number] * 4)

    def modify(rqns: list[int], size: int | None = None, mask: int = ModifyRqt.RQN_LIST) -> None:
        table.modify(
            Opcode.MODIFY_RQT, bitmask=mask, ctx={"rqt_actual_size": len(rqns) if size is None else size},
            rq_num=rq_list(rqns),
        )

    modify([second.number] * 2, mask=0)
    assert listed_in(table) == [first.number] * 4
    modify([second.number, first.number])
    assert listed_in(table) == [second.number, first.number]
    modify([second.number] * 8)
    assert nic_of(ctx).rqts[table.number]["count"] == 8
    first.close()
    words = f"RQ {second.number:#x} is used by RQT {table.number:#x}"
    refuses(ctx, lambda: destroy(second), Status.RESOURCE_BUSY, Because.IN_USE, words)
    refuses(ctx, lambda: modify([second.number] * 16), BAD_PARAM, Because.RQT_SIZE, "and rqt_max_size, 8, at most")
    refuses(ctx, lambda: modify([]), BAD_PARAM, Because.RQT_SIZE, "rqt_actual_size 0")
    refuses(ctx, lambda: modify([first.number]), BAD_RESOURCE, Because.NO_SUCH_RQ, f"no RQ {first.number:#x}")
    refuses(
        ctx, lambda: modify([second.number], 2), Status.BAD_INPUT_LEN, Because.SHORT_INPUT, "takes 280 bytes"
    )
    refuses(ctx, lambda: modify([second.number], mask=3), BAD_PARAM, Because.MODIFY_MASK, "only RQN_LIST (0x1)")
    table.close()
    second.close()


def test_modify_tir(ctx, make):
    nic, domain, rqn = nic_of(ctx), make.domain().number, make.rq(make.cq().number).number
    first, second = make.rqt([rqn]), make.rqt([rqn, rqn])
    tir, direct = make.hashed(domain, first.number), make.direct(domain, rqn)

    def modify(mask: int, of: DevxObject = tir, **context: Any) -> None:
        of.modify(Opcode.MODIFY_TIR, bitmask=mask, ctx=context)

    modify(0, indirect_table=second.number, self_lb_block=3)
    assert tir.query()["ctx"]["indirect_table"] == first.number
    modify(ModifyTir.INDIRECT_TABLE | ModifyTir.SELF_LB_EN, indirect_table=second.number, self_lb_block=3)
    told = tir.query()["ctx"]
    assert (told["indirect_table"], told["self_lb_block"], told["rx_hash_fn"]) == (second.number, 3, 2)
    assert nic.tirs[tir.number]["rqt"] == nic.rqts.row_address(second.number)
    first.close()
    words = f"RQT {second.number:#x} is used by TIR {tir.number:#x}"
    refuses(ctx, lambda: destroy(second), Status.RESOURCE_BUSY, Because.IN_USE, words)
    key = bytes(range(40))
    modify(ModifyTir.HASH, rx_hash_fn=2, rx_hash_symmetric=1, rx_hash_toeplitz_key=key, **outer(3))
    row, told = nic.tirs[tir.number], tir.query()["ctx"]
    assert (bytes(row["key"]), row["symmetric"], row["fields"]) == (key, 1, 3)
    assert (told["rx_hash_toeplitz_key"], told["rx_hash_field_selector_outer"]["selected_fields"]) == (key, 3)
    modify(ModifyTir.HASH)
    assert nic.tirs[tir.number]["hash_fn"] == 0
    modify(ModifyTir.SELF_LB_EN, direct, self_lb_block=1)
    assert nic.tirs[direct.number]["self_lb_block"] == 1

    refuses(ctx, lambda: modify(ModifyTir.PACKET_MERGE), BAD_PARAM, Because.MODIFY_MASK, "bits 0x1 cannot be modified")
    refuses(ctx, lambda: modify(ModifyTir.HASH, rx_hash_fn=1), BAD_PARAM, Because.RX_HASH, "rx_hash_fn 1")
    refuses(
        ctx, lambda: modify(ModifyTir.INDIRECT_TABLE, indirect_table=NOWHERE), BAD_RESOURCE, Because.NO_SUCH_RQT,
        "there is no RQT 0x3ff",
    )
    refuses(
        ctx, lambda: modify(ModifyTir.INDIRECT_TABLE, direct, indirect_table=second.number), BAD_PARAM,
        Because.DISP_TYPE, "disp_type 0",
    )
    refuses(
        ctx, lambda: modify(ModifyTir.HASH, direct, rx_hash_fn=2), BAD_PARAM, Because.RX_HASH, "a DIRECT TIR has one RQ"
    )
    refuses(
        ctx, lambda: modify(ModifyTir.HASH, rx_hash_field_selector_inner={"selected_fields": 1}), BAD_PARAM,
        Because.UNSUPPORTED_FIELD, "tunnels",
    )


def test_a_q_counter_is_read_and_cleared(ctx, make):
    nic, counter = nic_of(ctx), make.counter()
    row = nic.control.q_counters.table.row_address(counter.number)
    nic.engine.post(EngineCommand.WRITE_ROW, row + Q_COUNTER_ROW.out_of_buffer, np.array([(7 << 32) + 41], np.int64))
    assert counter.query()["out_of_buffer"] == 41  # 32 bits
    assert counter.query(clear=1)["out_of_buffer"] == 41
    assert counter.query()["out_of_buffer"] == 0


# --- users


def test_what_is_used_is_not_destroyed(ctx, make):
    cq, domain, counter, pool = make.cq(), make.domain(), make.counter(), make.rmp()
    tis = make.tis(domain.number, pd=make.pd.pdn)
    sq, rq = make.sq(cq.number, tis.number), make.rq(cq.number, counter_set_id=counter.number)
    shared = make.rq(cq.number, mem_rq_type=1, rmpn=pool.number)
    rqt = make.rqt([rq.number, shared.number, rq.number, rq.number])
    hashed, direct = make.hashed(domain.number, rqt.number), make.direct(domain.number, rq.number)

    def busy(used: DevxObject, name: str, *users: tuple[str, DevxObject]) -> None:
        by = ", ".join(f"{kind} {user.number:#x}" for kind, user in users)
        words = f"{name} {used.number:#x} is used by {by}"
        refuses(ctx, lambda: destroy(used), Status.RESOURCE_BUSY, Because.IN_USE, words)

    busy(cq, "CQ", ("SQ", sq), ("RQ", rq), ("RQ", shared))
    busy(domain, "transport domain", ("TIS", tis), ("TIR", hashed), ("TIR", direct))
    busy(tis, "TIS", ("SQ", sq))
    busy(counter, "Q counter", ("RQ", rq))
    busy(pool, "SRQ", ("RQ", shared))
    busy(rq, "RQ", ("RQT", rqt), ("TIR", direct))
    busy(rqt, "RQT", ("TIR", hashed))
    provider = ctx.provider
    for call in (
        lambda: provider.dealloc_pd(make.pd.pdn), lambda: provider.free_uar(make.uar.page),
        lambda: provider.dereg_umem(make.umem.umem_id),
    ):
        with pytest.raises(InUseError, match="is still used by"):
            call()
    direct.close()
    busy(rq, "RQ", ("RQT", rqt))
    hashed.close()
    rqt.close()
    for made in (shared, rq, counter, pool):
        made.close()
    busy(cq, "CQ", ("SQ", sq))
    sq.close()
    busy(domain, "transport domain", ("TIS", tis))
    for made in (tis, domain, cq):
        made.close()
    for parent in (make.pd, make.uar, make.umem):
        parent.close()


def test_a_tir_is_held_by_an_entry_that_leads_to_it(ctx, make):
    flows, domain, rqn = Steering(nic_of(ctx)), make.domain().number, make.rq(make.cq().number).number
    one, other = make.direct(domain, rqn), make.direct(domain, rqn)
    table = flows.table()
    group = flows.group(table, 0, 3)
    flows.set(table, group, 1, to=(TIR, one.number))
    words = f"TIR {one.number:#x} is used by entry 1 of flow table {table:#x}"
    refuses(ctx, lambda: destroy(one), Status.RESOURCE_BUSY, Because.IN_USE, words)
    flows.set(table, group, 1, to=(TIR, other.number), op_mod=1, modify_enable_mask=EntryModify.DEST_LIST)
    one.close()
    words = f"TIR {other.number:#x} is used by entry 1"
    refuses(ctx, lambda: destroy(other), Status.RESOURCE_BUSY, Because.IN_USE, words)
    flows.delete(table, 1)
    other.close()


def test_closing_the_device_destroys_all(make):
    nic = nic_of(make.ctx)
    cq, domain = make.cq().number, make.domain().number
    rqn = make.rq(cq, counter_set_id=make.counter().number).number
    make.sq(cq, make.tis(domain).number)
    make.hashed(domain, make.rqt([rqn]).number)
    with verbs.open("soft0"):  # keeps the NIC
        make.ctx.close()
        kinds = kinds_of(nic)
        assert [len(kind.table) for kind in kinds] == [0] * len(kinds)
        assert not any(kind._users for kind in kinds)


@pytest.mark.parametrize(("device", "closes"), [("soft0", "context"), ("soft0", "provider"), ("mlx5_0", "context")])
def test_closing_the_device_after_a_modify(device, closes, request):
    """An RQT that was modified uses an RQ that is newer, and would be destroyed first."""
    if device != "soft0":
        request.getfixturevalue("stand_in")
    with verbs.open("soft0") as keeps:
        ctx = verbs.open(device)
        make = Maker(ctx)
        cq = make.cq().number
        table = make.rqt([make.rq(cq).number])
        newer = [make.rq(cq).number]
        table.modify(Opcode.MODIFY_RQT, bitmask=ModifyRqt.RQN_LIST, ctx={"rqt_actual_size": 1}, rq_num=rq_list(newer))
        if closes == "context":
            ctx.close()
        else:
            ctx.provider.close()
        kinds = kinds_of(nic_of(keeps))
        assert [len(kind.table) for kind in kinds] == [0] * len(kinds)
        if closes == "provider":
            with pytest.raises(InvalidValueError, match="no event channel"):  # the provider has closed it
                ctx.close()


def test_full_tables(monkeypatch):
    for module, name in (
        (transport_domain, "TRANSPORT_DOMAIN"), (q_counter, "Q_COUNTER"), (tis, "TIS"), (sq, "SQ"), (rq, "RQ"),
        (rqt, "RQT"), (tir, "TIR"),
    ):
        monkeypatch.setattr(module, f"MAX_{name}", 4)
    with verbs.open("soft5") as ctx:
        make = Maker(ctx)
        cq, domain = make.cq().number, make.domain()
        numbers = {"tis": make.tis(domain.number), "rq": make.rq(cq)}
        numbers["rqt"] = make.rqt([numbers["rq"].number])
        creations: dict[str, tuple[int, Callable[[], DevxObject]]] = {
            "transport domain": (2, make.domain), "Q counter": (3, make.counter),
            "TIS": (2, lambda: make.tis(domain.number)), "SQ": (3, lambda: make.sq(cq, numbers["tis"].number)),
            "RQ": (2, lambda: make.rq(cq)), "RQT": (2, lambda: make.rqt([numbers["rq"].number])),
            "TIR": (3, lambda: make.hashed(domain.number, numbers["rqt"].number)),
        }
        for kind, (room, create) in creations.items():
            for _ in range(2):
                made = [create() for _ in range(room)]
                words = f"all 3 {kind}s are in use"
                with pytest.raises(NoMemoryError, match=rf"{words}; close one first"):
                    create()
                for one in made:
                    one.close()


# --- what is not there yet



def test_no_events(ctx, make):
    """Those of the CQ come; the objects themselves raise none."""
    domain = make.domain()
    channel = ctx.provider.create_event_channel()
    with pytest.raises(NotSupportedError, match=rf"transport_domain {domain.number:#x} raises no events"):
        ctx.provider.subscribe(channel, domain.devx_handle, [EventType.WQ_CATAS_ERROR], 1)
