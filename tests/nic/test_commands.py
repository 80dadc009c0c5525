"""The command interpreter of the software NIC: what each mailbox does, and how each mistake is refused."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_rig import GID, INIT, INPUTS, RST, RTS, Device, limit_tables, refusal
from gpunetio.enums import Access, UarAllocationType
from gpunetio.errors import BadStateError, InUseError, InvalidValueError, NoMemoryError, NotFoundError
from gpunetio.formats import commands as cmd
from gpunetio.formats import contexts
from gpunetio.formats.commands import CapClass, Opcode, PrmMtu, Status
from gpunetio.nic.control.queues.qp import MAX_QP
from gpunetio.nic.control.syndromes import CommandSyndrome
from gpunetio.providers.provider import UarPage

OUTPUTS = {  # the others: 16
    Opcode.QUERY_HCA_CAP: 272, Opcode.QUERY_ROCE_ADDRESS: 48, Opcode.QUERY_QP: 272, Opcode.QUERY_RMP: 272,
    Opcode.QUERY_FLOW_TABLE: 64, Opcode.QUERY_FLOW_GROUP: 1024, Opcode.QUERY_FLOW_TABLE_ENTRY: 832,
    Opcode.QUERY_FLOW_COUNTER: 32,
}


@pytest.fixture
def device() -> Iterator[Device]:
    opened = Device()
    yield opened
    opened.close()


# --- the mailbox itself


@pytest.mark.parametrize("mailbox", [b"", b"\x09", b"\x09\x99".ljust(64, b"\0")])
def test_unknown_opcode(device, mailbox):
    number = f"{int.from_bytes(mailbox[:2], 'big'):#05x}"
    device.refuses(
        lambda: device.provider.general_cmd(mailbox, 16), Status.BAD_OP, CommandSyndrome.UNKNOWN_OPCODE,
        f"opcode {number} failed",
    )


@pytest.mark.parametrize("opcode", INPUTS, ids=lambda opcode: opcode.name)
def test_short_input(device, opcode):
    size = INPUTS[opcode].size
    for length in (2, size - 1):
        short = opcode.to_bytes(2, "big").ljust(length, b"\0")
        status, syndrome, text = refusal(device.nic.execute(short, 8192))
        assert (status, syndrome) == (Status.BAD_INPUT_LEN, CommandSyndrome.SHORT_INPUT)
        assert text == f"{opcode.name} takes {size} bytes, the input has {length}"


@pytest.mark.parametrize("opcode", INPUTS, ids=lambda opcode: opcode.name)
def test_short_output(device, opcode):
    needed = OUTPUTS.get(opcode, 16)
    for room in (0, 1, needed - 1):
        status, syndrome, text = refusal(device.execute(opcode, room))
        assert (status, syndrome) == (Status.BAD_OUTPUT_LEN, CommandSyndrome.SHORT_OUTPUT)
        assert text == f"{opcode.name} answers {needed} bytes, the output has room for {room}"


def test_no_room_for_an_answer_is_an_error_of_the_call(device):
    mailbox = bytes(cmd.QUERY_HCA_CAP_IN.pack(opcode=Opcode.QUERY_HCA_CAP))
    for room in (0, 1, 16):
        device.refuses(
            lambda room=room: device.provider.general_cmd(mailbox, room),
            Status.BAD_OUTPUT_LEN, CommandSyndrome.SHORT_OUTPUT, "QUERY_HCA_CAP failed",
        )


def test_more_room_than_needed(device):
    qp = device.qp()
    out, _ = device.execute(Opcode.QUERY_QP, 300, qpn=qp[1])
    assert len(out) == 300
    assert not any(out[272:])
    longer = bytes(cmd.QUERY_QP_IN.pack(opcode=Opcode.QUERY_QP, qpn=qp[1])) + b"\xff" * 100
    assert device.nic.execute(longer, 272)[0] == out[:272]


@given(st.binary(max_size=600), st.sampled_from(list(INPUTS)), st.sampled_from([0, 15, 16, 48, 272, 4112]))
@settings(max_examples=150)
def test_any_mailbox_is_answered(noise, opcode, out_size):
    device = shared_device()
    out, text = device.nic.execute(opcode.to_bytes(2, "big") + noise, out_size)
    assert bool(out and out[0]) == bool(text)
    if not text:
        assert len(out) == out_size
    if opcode in (Opcode.CREATE_CQ, Opcode.CREATE_QP):
        assert text  # chance does not find PD, UMEM and UAR


_shared: list[Device] = []


def shared_device() -> Device:
    """For tests whose examples leave nothing behind."""
    if not _shared:
        _shared.append(Device("soft7"))
    return _shared[0]


@pytest.fixture(scope="module", autouse=True)
def _close_shared() -> Iterator[None]:
    yield
    while _shared:
        _shared.pop().close()


# --- capabilities and addresses


@pytest.mark.parametrize("current", [0, 1])
def test_query_hca_cap(device, current):
    def query(kind: CapClass, layout):
        mailbox = cmd.QUERY_HCA_CAP_IN.pack(opcode=Opcode.QUERY_HCA_CAP, op_mod=kind << 1 | current)
        out = device.provider.general_cmd(bytes(mailbox), 4112)
        assert len(out) == 4112
        return layout.unpack(out, 16)

    told = query(CapClass.GENERAL, contexts.CMD_HCA_CAP)
    assert told == told | {
        "hca_cap_2": 1, "log_max_qp_sz": 15, "log_max_cq_sz": 22, "rts2rts_qp_dscp": 1, "gid_table_size": 1,
        "port_type": 1, "rc": 1, "uc": 1, "max_wqe_sz_sq": 1024, "max_wqe_sz_rq": 512, "sctr_data_cqe": 1,
    }
    assert query(CapClass.ROCE, contexts.ROCE_CAP) == {
        "roce_version": 4, "r_roce_dest_udp_port": 4791, "r_roce_max_src_udp_port": 0xFFFF,
        "r_roce_min_src_udp_port": 0xC000, "roce_address_table_size": 16,
    }
    assert query(CapClass.GENERAL_2, contexts.CMD_HCA_CAP_2)["send_dbr_mode_no_dbr_ext"] == 1


def test_query_hca_cap_of_an_unknown_class(device):
    mailbox = bytes(cmd.QUERY_HCA_CAP_IN.pack(opcode=Opcode.QUERY_HCA_CAP, op_mod=0x13 << 1))
    device.refuses(
        lambda: device.provider.general_cmd(mailbox, 4112), Status.BAD_PARAM, CommandSyndrome.UNKNOWN_OP_MOD,
        "QUERY_HCA_CAP failed", "capability class 0x13 does not exist",
    )


def query_roce(device, index: int) -> dict[str, Any]:
    mailbox = cmd.QUERY_ROCE_ADDRESS_IN.pack(opcode=Opcode.QUERY_ROCE_ADDRESS, roce_address_index=index)
    return contexts.ROCE_ADDR_LAYOUT.unpack(device.provider.general_cmd(bytes(mailbox), 48), 16)


def test_query_roce_address(device):
    four, six, empty = (query_roce(device, index) for index in (0, 1, 15))
    assert (four["source_l3_address"], four["roce_version"], four["roce_l3_type"]) == (GID, 2, 0)
    assert (four["source_mac_47_32"], four["source_mac_31_0"]) == (0x0200, 0x7F000001)
    link_local = bytes.fromhex("fe80000000000000" + "0000" + "7ffffe" + "000001")  # EUI-64 of the MAC
    assert (six["source_l3_address"], six["roce_version"], six["roce_l3_type"]) == (link_local, 2, 1)
    assert not any(empty["source_l3_address"])
    assert empty["roce_version"] == 0
    device.refuses(
        lambda: query_roce(device, 16), Status.BAD_INDEX, CommandSyndrome.NO_SUCH_GID, "the GID table has no entry 16"
    )


# --- completion queues


def test_create_cq(device):
    _, cqn = device.cq({"log_cq_size": 3, "oi": 1, "cc": 1, "dbr_addr": 0x9000})
    row = device.nic.cqs[cqn]
    base = device.memory.address
    assert (row["cqn"], row["addr"], row["log"], row["dbrec"]) == (cqn, base + 0x400, 3, base + 0x9000)
    assert (row["overrun"], row["collapsed"], row["eqn"], row["uar_page"]) == (1, 1, 1, device.page.page_id)
    assert (row["pi"], row["error"]) == (0, 0)


@pytest.mark.parametrize(
    ("cqc", "fields", "status", "syndrome", "words"),
    [
        ({"log_cq_size": 23}, {}, Status.BAD_PARAM, CommandSyndrome.CQ_SIZE, "log_cq_size 23 is above 22"),
        ({"cqe_sz": 2}, {}, Status.BAD_PARAM, CommandSyndrome.CQ_SIZE, "cqe_sz 2 is not supported"),
        ({"c_eqn": 0}, {}, Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_EQ, "there is no EQ 0"),
        ({"c_eqn": 9}, {}, Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_EQ, "there is no EQ 9"),
        ({"uar_page": 0}, {}, Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_UAR, "there is no UAR page 0x0"),
        ({"uar_page": 99}, {}, Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_UAR, "there is no UAR page 0x63"),
        ({"dbr_umem_valid": 0}, {}, Status.BAD_PARAM, CommandSyndrome.UMEM_REQUIRED, "dbr_umem_valid must be set"),
        ({}, {"cq_umem_valid": 0}, Status.BAD_PARAM, CommandSyndrome.UMEM_REQUIRED, "cq_umem_valid"),
        ({}, {"cq_umem_id": 77}, Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_UMEM, "no UMEM 0x4d for the CQE ring"),
        ({"dbr_umem_id": 0}, {}, Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_UMEM, "0x0 for the CQ doorbell record"),
        ({}, {"cq_umem_offset": 0xFC40}, Status.BAD_PARAM, CommandSyndrome.UMEM_RANGE, "CQE ring: [0xfc40, +0x400)"),
        ({"log_cq_size": 22}, {}, Status.BAD_PARAM, CommandSyndrome.UMEM_RANGE, "+0x10000000) is outside UMEM"),
        ({}, {"cq_umem_offset": (1 << 64) - 64}, Status.BAD_PARAM, CommandSyndrome.UMEM_RANGE, "0xffffffffffffffc0"),
        ({"dbr_addr": 0x10000}, {}, Status.BAD_PARAM, CommandSyndrome.UMEM_RANGE, "the CQ doorbell record"),
        ({}, {"cq_umem_offset": 0x420}, Status.BAD_PARAM, CommandSyndrome.UMEM_ALIGNMENT, "not a multiple of 64"),
        ({"dbr_addr": 0x8004}, {}, Status.BAD_PARAM, CommandSyndrome.UMEM_ALIGNMENT, "not a multiple of 8"),
    ],
)
def test_create_cq_refused(device, cqc, fields, status, syndrome, words):
    device.refuses(lambda: device.cq(cqc, **fields), status, syndrome, "CREATE_CQ failed", words)
    assert len(device.nic.cqs) == 0


def test_cq_ring_needs_memory_that_can_be_written(device):
    umem = device.provider.reg_umem(device.memory.address, 0x10000, Access.LOCAL_READ)
    device.refuses(
        lambda: device.cq(cq_umem_id=umem), Status.BAD_PARAM, CommandSyndrome.UMEM_RIGHTS, "without LOCAL_WRITE"
    )
    device.cq({"dbr_umem_id": umem})  # the device only reads records


def test_ring_that_ends_with_the_umem(device):
    device.cq(cq_umem_offset=0x10000 - 16 * 64)
    device.qp({"dbr_addr": 0x10000 - 8})


def test_umem_of_an_odd_size(device):
    umem = device.provider.reg_umem(device.memory.address, 0x807, Access.LOCAL_WRITE)
    device.cq({"dbr_umem_id": umem, "dbr_addr": 0x7F8})
    device.refuses(
        lambda: device.cq({"dbr_umem_id": umem, "dbr_addr": 0x800}), Status.BAD_PARAM, CommandSyndrome.UMEM_RANGE,
        "the CQ doorbell record: [0x800, +0x8) is outside UMEM", "which has 0x807 bytes",
    )


def test_destroy_cq(device):
    handle, cqn = device.cq()
    device.provider.devx_obj_destroy(handle)
    assert cqn not in device.nic.cqs
    status, syndrome, text = refusal(device.execute(Opcode.DESTROY_CQ, cqn=cqn))
    assert (status, syndrome) == (Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_CQ)
    assert text == f"there is no CQ {cqn:#x}"
    with pytest.raises(InvalidValueError, match=f"soft0 has no DEVX object {handle}"):
        device.provider.devx_obj_destroy(handle)


@pytest.mark.parametrize("end", ["send", "receive"])
def test_destroy_of_a_cq_in_use(device, end):
    handle, cqn = device.cq()
    queue = {"no_sq": 0, "cqn_snd": cqn} if end == "send" else {"rq_type": 0, "cqn_rcv": cqn}
    qp, qpn = device.qp(queue)
    device.refuses(
        lambda: device.provider.devx_obj_destroy(handle), Status.RESOURCE_BUSY, CommandSyndrome.IN_USE,
        "DESTROY_CQ failed", f"CQ {cqn:#x} is used by QP {qpn:#x}",
    )
    device.provider.devx_obj_destroy(qp)
    device.provider.devx_obj_destroy(handle)


# --- queue pairs


def test_create_qp(device):
    (_, send), (_, receive) = device.cq(), device.cq()
    queues = {
        "no_sq": 0, "log_sq_size": 5, "cqn_snd": send, "rq_type": 0, "log_rq_size": 4, "log_rq_stride": 2,
        "cqn_rcv": receive, "user_index": 0xABCDEF, "send_dbr_mode": 1, "dbr_addr": 0x8010, "cs_res": 1,
    }
    _, qpn = device.qp(queues)
    row, nic, base = device.nic.qps[qpn], device.nic, device.memory.address
    assert (row["qpn"], row["state"], row["pdn"], row["rights"]) == (qpn, RST, device.pd, 0)
    assert (row["rq_addr"], row["rq_log"], row["rq_stride"]) == (base + 0x1000, 4, 64)
    assert (row["sq_addr"], row["sq_log"]) == (base + 0x1000 + 16 * 64, 5)
    assert (row["send_cq"], row["recv_cq"]) == (nic.cqs.row_address(send), nic.cqs.row_address(receive))
    assert (row["dbrec"], row["no_dbr"], row["user_index"]) == (base + 0x8010, 1, 0xABCDEF)
    assert row["cs_res"] == 1
    register = device.provider.doorbell_register(device.page, qpn)
    assert row["doorbell"] == (device.provider.nic.control.qps.near_register(register) or register)
    context = device.query(qpn)
    assert {name: context[name] for name in queues} == queues
    assert (context["state"], context["pd"], context["mtu"]) == (RST, device.pd, PrmMtu.MTU_256)


@pytest.mark.parametrize("fields, waits", [({}, 0), ({"cd_master": 1}, 1), ({"next_rcv_psn": 1}, 1)])
def test_which_queue_pairs_may_wait(device, fields, waits):
    """DOCA's library writes the 64 bits that end in next_rcv_psn when it sets cd_master."""
    _, qpn = device.qp(fields)
    assert device.nic.qps[qpn]["core_direct"] == waits


@pytest.mark.parametrize("service", [0, 1])
def test_service_types(device, service):
    _, qpn = device.qp({"st": service})
    assert device.nic.qps[qpn]["service"] == service


def test_qp_without_queues_needs_no_cq(device):
    _, qpn = device.qp()
    row = device.nic.qps[qpn]
    assert (row["sq_addr"], row["rq_addr"], row["send_cq"], row["recv_cq"]) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("qpc", "fields", "status", "syndrome", "words"),
    [
        ({"st": 3}, {}, Status.BAD_PARAM, CommandSyndrome.SERVICE_TYPE, "service type 3 is not supported: only RC (0)"),
        ({"pd": 0}, {}, Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_PD, "there is no PD 0x0"),
        ({"pd": 900}, {}, Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_PD, "there is no PD 0x384"),
        ({"uar_page": 77}, {}, Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_UAR, "there is no UAR page 0x4d"),
        ({"rq_type": 2}, {}, Status.BAD_PARAM, CommandSyndrome.RQ_TYPE, "rq_type 2 is not supported"),
        ({"rq_type": 1}, {}, Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_CQ, "there is no CQ 0x0"),
        ({"rq_type": 0, "log_rq_stride": 6}, {}, Status.BAD_PARAM, CommandSyndrome.QP_SIZE, "stride 6 is above 5"),
        ({"no_sq": 0, "cqn_snd": 9}, {}, Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_CQ, "there is no CQ 0x9"),
        ({"rq_type": 0}, {}, Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_CQ, "there is no CQ 0x0"),
        ({}, {"wq_umem_valid": 0}, Status.BAD_PARAM, CommandSyndrome.UMEM_REQUIRED, "wq_umem_valid and dbr_umem_valid"),
        ({"dbr_umem_valid": 0}, {}, Status.BAD_PARAM, CommandSyndrome.UMEM_REQUIRED, "must be set"),
        ({}, {"wq_umem_id": 55}, Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_UMEM, "UMEM 0x37 for the work queues"),
        ({"dbr_umem_id": 55}, {}, Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_UMEM, "for the QP doorbell record"),
        ({}, {"wq_umem_offset": 1 << 20}, Status.BAD_PARAM, CommandSyndrome.UMEM_RANGE, "the work queues: [0x100000"),
        ({"dbr_addr": 0xFFFC}, {}, Status.BAD_PARAM, CommandSyndrome.UMEM_RANGE, "the QP doorbell record: [0xfffc"),
        ({}, {"wq_umem_offset": 32}, Status.BAD_PARAM, CommandSyndrome.UMEM_ALIGNMENT, "not a multiple of 64"),
        ({"dbr_addr": 12}, {}, Status.BAD_PARAM, CommandSyndrome.UMEM_ALIGNMENT, "not a multiple of 8"),
        ({"cs_res": 3}, {}, Status.BAD_PARAM, CommandSyndrome.SCATTER_TO_CQE, "cs_res 0x3 is not supported: only 0x0"),
        ({"cs_req": 1}, {}, Status.BAD_PARAM, CommandSyndrome.SCATTER_TO_CQE, "supported: only 0x0, 0x11, 0x22"),
    ],
)
def test_create_qp_refused(device, qpc, fields, status, syndrome, words):
    device.refuses(lambda: device.qp(qpc, **fields), status, syndrome, "CREATE_QP failed", words)
    assert len(device.nic.qps) == 0


@pytest.mark.parametrize("field, value, end", [
    ("cs_res", 2, {"rq_type": 0}), ("cs_req", 0x22, {"no_sq": 0, "log_sq_size": 4}),
])
def test_room_for_payload_in_completions(device, field, value, end):
    """64 bytes of it take entries of 128 bytes. Only the CQ that carries it counts."""
    (_, narrow), (_, wide) = device.cq(), device.cq({"cqe_sz": 1}, cq_umem_offset=0x2000)
    carrier, other = ("cqn_rcv", "cqn_snd") if field == "cs_res" else ("cqn_snd", "cqn_rcv")
    device.refuses(
        lambda: device.qp({field: value, carrier: narrow, other: wide, **end}), Status.BAD_PARAM,
        CommandSyndrome.SCATTER_TO_CQE, "CREATE_QP failed",
        f"{field} {value:#x} puts 64 bytes", f"CQ {narrow:#x} has entries of 64 bytes, and needs those of 128",
    )
    _, qpn = device.qp({field: value, carrier: wide, other: narrow, **end})
    assert device.nic.qps[qpn][field] == value
    device.qp({field: value})  # without that queue there is nothing to carry


@pytest.mark.parametrize("queue", [{"no_sq": 0, "log_sq_size": 10}, {"rq_type": 0, "log_rq_size": 12}])
def test_rings_that_do_not_fit(device, queue):
    _, cqn = device.cq()
    qpc = {"cqn_snd": cqn, "cqn_rcv": cqn, **queue}
    device.refuses(
        lambda: device.qp(qpc, wq_umem_offset=64), Status.BAD_PARAM, CommandSyndrome.UMEM_RANGE, "+0x10000) is outside"
    )
    device.qp(qpc, wq_umem_offset=0)


def test_destroy_qp(device):
    handle, qpn = device.qp()
    device.provider.devx_obj_destroy(handle)
    assert qpn not in device.nic.qps
    for opcode, size in ((Opcode.DESTROY_QP, 16), (Opcode.QUERY_QP, 272), (Opcode.QP_2ERR, 16), (Opcode.QP_2RST, 16)):
        status, syndrome, text = refusal(device.execute(opcode, size, qpn=qpn))
        assert (status, syndrome) == (Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_QP)
        assert text == f"there is no QP {qpn:#x}"


@pytest.mark.parametrize("opcode", [op for op in INPUTS if "qpc" in INPUTS[op].fields and op != Opcode.CREATE_QP])
def test_transition_of_no_qp(device, opcode):
    _, qpn = device.qp()
    other = qpn ^ 1 << 20  # the same row, another number
    status, syndrome, text = refusal(device.execute(opcode, qpn=other))
    assert (status, syndrome, text) == (Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_QP, f"there is no QP {other:#x}")


# --- receive pools


def test_a_receive_pool_stays_ready(device):
    wq = {
        "pd": device.pd, "log_wq_sz": 4, "log_wq_stride": 5, "wq_umem_valid": 1, "wq_umem_id": device.umem,
        "dbr_umem_valid": 1, "dbr_umem_id": device.umem, "dbr_addr": 0x8000,
    }
    mailbox = cmd.CREATE_RMP_IN.pack(opcode=Opcode.CREATE_RMP, ctx={"state": 1, "wq": wq})
    _, out = device.provider.devx_obj_create(bytes(mailbox), 16)
    rmpn = cmd.CREATE_RMP_OUT.get(out, "rmpn")

    def modify(now: int, wanted: int) -> tuple[bytes, str]:
        return device.execute(Opcode.MODIFY_RMP, rmp_state=now, rmpn=rmpn, ctx={"state": wanted})

    assert modify(1, 1) == (bytes(16), "")
    for now, wanted in ((0, 1), (1, 0), (1, 3)):
        status, syndrome, text = refusal(modify(now, wanted))
        assert (status, syndrome) == (Status.BAD_PARAM, CommandSyndrome.RMP_STATE)
        assert text == f"from state {now} to {wanted}: a pool stays in RDY (1)"


@pytest.mark.parametrize(("wq_type", "basic_cyclic"), [(2, 0), (3, 1), (3, 0), (0, 1), (15, 0)])
def test_a_receive_pool_of_another_type(device, wq_type, basic_cyclic):
    """Striding pools exist on cards, but not here."""
    context = {"state": 1, "basic_cyclic_rcv_wqe": basic_cyclic, "wq": {"wq_type": wq_type}}
    status, syndrome, text = refusal(device.execute(Opcode.CREATE_RMP, ctx=context))
    assert (status, syndrome) == (Status.BAD_PARAM, CommandSyndrome.RQ_TYPE)
    assert text.startswith(f"wq_type {wq_type} with basic_cyclic_rcv_wqe {basic_cyclic}: only a linked list")


# --- numbers and room


def test_numbers_are_unique_and_spread(device):
    qpns = {device.qp()[1] for _ in range(100)}
    assert len(qpns) == 100
    assert all(MAX_QP <= qpn < 0xFFFFFF for qpn in qpns)  # not QP 0 and 1, which are special, nor multicast
    assert len({qpn // MAX_QP for qpn in qpns}) > 10
    cqns = {device.cq()[1] for _ in range(100)}
    assert len(cqns) == 100
    assert 0 not in cqns


def test_a_new_qp_in_an_old_row_has_another_number(device):
    """Rows are used in turns: an old one when all others were."""
    handle, qpn = device.qp()
    device.provider.devx_obj_destroy(handle)
    again = set()
    mask = device.nic.qps.mask
    for _ in range(8):
        handle, number = device.qp()
        assert number & mask == (qpn & mask) + 1
        device.provider.devx_obj_destroy(handle)
        device.nic.qps._last = 0
        handle, number = device.qp()
        again.add(number)
        assert number & mask == qpn & mask
        device.provider.devx_obj_destroy(handle)
    assert again != {qpn}


@pytest.fixture
def small(monkeypatch) -> Iterator[Device]:
    """A device with room for three of everything, keys and QPs seven; one PD, UMEM and UAR page are taken."""
    limit_tables(monkeypatch, {"QP": 8, "CQ": 4, "PD": 4, "UMEM": 4, "UAR": 4, "MR": 8})
    opened = Device("soft6")
    yield opened
    opened.close()


def test_full_tables(small):
    provider, memory = small.provider, small.memory
    limits = {"QP": (7, small.qp), "CQ": (3, small.cq)}
    for kind, (most, create) in limits.items():
        for _ in range(3):
            handles = [create()[0] for _ in range(most)]
            words = f"all {most} {kind}s are in use"
            small.refuses(create, Status.NO_RESOURCES, CommandSyndrome.TABLE_FULL, f"CREATE_{kind} failed", words)
            for handle in handles:
                provider.devx_obj_destroy(handle)

    handles = [small.qp()[0] for _ in range(7)]  # one of them is where QP 1 would be
    small.refuses(
        lambda: small.qp(qpc={"st": 8}), Status.NO_RESOURCES, CommandSyndrome.TABLE_FULL, "has the row of QP 1"
    )
    for handle in handles:
        provider.devx_obj_destroy(handle)
    handle, number = small.qp(qpc={"st": 8})
    assert number == 1
    provider.devx_obj_destroy(handle)

    def key() -> int:
        return provider.reg_mr(small.pd, memory.address, 64, 0, Access.LOCAL_WRITE, False).handle

    pairs: dict[str, tuple[int, Callable[[], Any], Callable[[Any], None]]] = {
        "PD": (2, provider.alloc_pd, provider.dealloc_pd),
        "UMEM": (2, lambda: provider.reg_umem(memory.address, 64, Access.LOCAL_WRITE), provider.dereg_umem),
        "UAR page": (2, lambda: provider.alloc_uar(UarAllocationType.BLUEFLAME), provider.free_uar),
        "memory key": (7, key, provider.dereg_mr),
    }
    for kind, (room, take, give) in pairs.items():
        for _ in range(3):
            numbers = [take() for _ in range(room)]
            assert len(set(numbers)) == room
            most = 7 if kind == "memory key" else 3
            with pytest.raises(NoMemoryError, match=f"soft6 has no free {kind}: all {most} are in use"):
                take()
            for number in numbers:
                give(number)


def test_many_threads(device):
    made: list[int] = []
    failed: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        try:
            barrier.wait()
            for _ in range(25):
                handle, qpn = device.qp()
                made.append(qpn)
                device.bring((handle, qpn), INIT)
                if len(made) % 2:
                    device.provider.devx_obj_destroy(handle)
                    made.remove(qpn)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert sorted(made) == sorted(int(row["qpn"]) for row in device.nic.qps)
    assert all(device.query(qpn)["state"] == INIT for qpn in made)
    assert device.nic.pds[device.pd]["users"] == len(made)


# --- what depends on what


def test_parents_are_busy_while_children_live(device):
    provider = device.provider
    umem = provider.reg_umem(device.memory.address, 0x10000, Access.LOCAL_WRITE)
    cq, cqn = device.cq(cq_umem_id=umem)
    qp, _ = device.qp({"no_sq": 0, "cqn_snd": cqn})
    mr = provider.reg_mr(device.pd, device.memory.address, 64, 0, Access.LOCAL_WRITE, False)

    def free_page(page_id: int) -> None:
        provider.free_uar(UarPage(page_id, 0, 0))

    def busy(call: Callable[[int], None], number: int, text: str) -> None:
        with pytest.raises(InUseError, match=f"^{text} {number:#x} is still used by"):
            call(number)

    busy(provider.dealloc_pd, device.pd, "PD")
    busy(free_page, device.page.page_id, "UAR page")
    busy(provider.dereg_umem, device.umem, "UMEM")
    busy(provider.dereg_umem, umem, "UMEM")
    provider.devx_obj_destroy(qp)
    busy(provider.dealloc_pd, device.pd, "PD")  # the key
    busy(free_page, device.page.page_id, "UAR page")  # the CQ
    busy(provider.dereg_umem, umem, "UMEM")
    provider.devx_obj_destroy(cq)
    provider.dereg_mr(mr.handle)
    provider.dealloc_pd(device.pd)
    provider.free_uar(device.page)
    provider.dereg_umem(umem)
    provider.dereg_umem(device.umem)
    for call, number in (
        (provider.dealloc_pd, device.pd), (free_page, device.page.page_id), (provider.dereg_umem, umem),
        (provider.dereg_mr, mr.handle),
    ):
        with pytest.raises(NotFoundError, match=f"{number:#x}"):
            call(number)
    assert [len(t) for t in (device.nic.pds, device.nic.umems, device.nic.uar_pages, device.nic.mkeys)] == [0] * 4


def test_close_takes_everything_of_this_open_and_nothing_of_another():
    keeper, leaver = Device(), Device()
    try:
        nic = keeper.nic
        assert leaver.nic is nic
        tables = (nic.qps, nic.cqs, nic.srqs, nic.mkeys, nic.pds, nic.umems, nic.uar_pages)
        qp = keeper.qp()
        before = [len(table) for table in tables]
        uars = int(nic.record["uar_count"])
        leaver.provider.reg_mr(leaver.pd, leaver.memory.address, 64, 0, Access.LOCAL_WRITE, False)
        _, cqn = leaver.cq()
        leaver.bring(leaver.qp({"no_sq": 0, "cqn_snd": cqn}), RTS)
        gone = leaver.provider.reg_umem(leaver.memory.address, 64, Access.LOCAL_WRITE)
        leaver.provider.dereg_umem(gone)
        leaver.close()
        leaver.close()
        assert [len(table) for table in tables] == [n - (table in tables[4:]) for n, table in zip(before, tables)]
        assert int(nic.record["uar_count"]) == uars - 1
        keeper.bring(qp, RTS)
    finally:
        keeper.close()
    with pytest.raises(BadStateError, match="soft0 is closed"):
        keeper.provider.alloc_pd()
    with pytest.raises(BadStateError, match="soft0 is closed"):
        keeper.execute(Opcode.QUERY_HCA_CAP, 4112)


# --- which call takes which mailbox


def test_calls_are_for_their_kind_of_mailbox(device):
    qp, other = device.qp(), device.qp()
    provider = device.provider
    query = bytes(cmd.QUERY_QP_IN.pack(opcode=Opcode.QUERY_QP, qpn=qp[1]))
    destroy = bytes(cmd.DESTROY_QP_IN.pack(opcode=Opcode.DESTROY_QP, qpn=qp[1]))
    reset = bytes(cmd.QP_2RST_IN.pack(opcode=Opcode.QP_2RST, qpn=qp[1]))
    create = bytes(cmd.CREATE_QP_IN.pack(opcode=Opcode.CREATE_QP))
    before = device.tables()
    for call, text in (
        (lambda: provider.devx_obj_create(query, 272), "QUERY_QP creates no object"),
        (lambda: provider.devx_obj_create(destroy, 16), "DESTROY_QP creates no object"),
        (lambda: provider.devx_obj_modify(qp[0], query, 272), "QUERY_QP is not for this call"),
        (lambda: provider.devx_obj_modify(qp[0], destroy, 16), "DESTROY_QP is not for this call"),
        (lambda: provider.devx_obj_query(qp[0], reset, 16), "QP_2RST is not for this call"),
        (lambda: provider.general_cmd(destroy, 16), "DESTROY_QP concerns an object"),
        (lambda: provider.general_cmd(create, 16), "CREATE_QP concerns an object"),
        (lambda: provider.devx_obj_query(other[0], query, 272), f"names qpn {qp[1]:#x}"),
        (lambda: provider.devx_obj_modify(other[0], reset, 16), f"object {other[0]} is qpn {other[1]:#x}"),
        (lambda: provider.devx_obj_query(12345, query, 272), "soft0 has no DEVX object 12345"),
        (lambda: provider.devx_obj_modify(12345, reset, 16), "soft0 has no DEVX object 12345"),
    ):
        with pytest.raises(InvalidValueError, match=text):
            call()
    assert device.tables() == before


@pytest.mark.parametrize("port", [0, 2])
def test_ports(device, port):
    for call in (
        lambda: device.provider.query_port(port),
        lambda: device.provider.query_gid(port, 0),
        lambda: device.provider.resolve_mac(port, 0, GID),
    ):
        with pytest.raises(InvalidValueError, match=f"port {port} does not exist"):
            call()


def test_addresses(device):
    assert device.provider.resolve_mac(1, 0, GID) == bytes.fromhex("02007f000001")
    assert device.provider.resolve_mac(1, 0, GID[:15] + b"\x03") == bytes.fromhex("02007f000003")
    with pytest.raises(NotFoundError, match=r"soft0 has no route to 255\.255\.255\.255: see `ip route get "):
        device.provider.resolve_mac(1, 0, GID[:12] + b"\xff\xff\xff\xff")  # for a socket, only by permission
    for index in (-1, 16):
        with pytest.raises(InvalidValueError, match=f"GID index {index} is outside the table of 16"):
            device.provider.query_gid(1, index)
    with pytest.raises(InvalidValueError, match="completion vector 8: the software NIC has 0 to 7"):
        device.provider.query_eqn(8)
