"""What a device says of itself: capabilities, identity, port, completion vectors; and objects that it cleans up."""

from collections.abc import Iterator

import pytest

from command_rig import Device
from ethernet_rig import nic_of
from gpunetio import verbs
from gpunetio.errors import DriverError, InvalidValueError
from gpunetio.formats import commands as cmd
from gpunetio.formats import ethernet_queues as ethernet
from gpunetio.formats.commands import CapClass, Opcode, Status
from gpunetio.formats.contexts import ATOMIC_CAPS, CMD_HCA_CAP, HCA_VPORT_CONTEXT
from gpunetio.nic.control.guids import node_guid_of, port_guid_of
from gpunetio.nic.control.syndromes import CommandSyndrome
from gpunetio.nic.engine.port import CONNECTX_7, Port, PortConfig, _rate
from gpunetio.providers.provider import PortAttr

RDMA_CORE_ASKS = 2064  # bytes: status and half of the capability's room
CREATE_XRQ = 0x717  # an object that the software NIC does not have


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.close()


def capability(device: Device, kind: CapClass, out_size: int) -> bytes:
    out, refusal = device.execute(Opcode.QUERY_HCA_CAP, out_size, op_mod=kind << 1 | 1)
    assert not refusal
    assert len(out) == out_size
    return out[16:]


@pytest.mark.parametrize("out_size", [272, RDMA_CORE_ASKS, cmd.QUERY_HCA_CAP_OUT.size, 8208])
def test_an_answer_fills_the_room_that_there_is(device, out_size):
    told = capability(device, CapClass.GENERAL, out_size)
    longest = capability(device, CapClass.GENERAL, 8208)
    assert told == longest[: out_size - 16]


def test_room_for_less_than_the_structure_is_refused(device):
    out, refusal = device.execute(Opcode.QUERY_HCA_CAP, 271, op_mod=1)
    assert out[0] == Status.BAD_OUTPUT_LEN
    assert "272 bytes" in refusal


def test_capabilities_are_those_of_the_tables(device):
    told = CMD_HCA_CAP.unpack(capability(device, CapClass.GENERAL, RDMA_CORE_ASKS))
    nic = device.nic
    for name, table in (("log_max_qp", nic.qps), ("log_max_cq", nic.cqs), ("log_max_srq", nic.srqs),
                        ("log_max_mkey", nic.mkeys), ("log_max_pd", nic.pds)):
        assert 1 << told[name] == table.mask + 1, name
    known = device.provider.query_device()
    assert 1 << told["log_max_cq_sz"] == known.max_cqe
    assert 1 << told["log_max_qp_sz"] == known.max_qp_wr
    assert 1 << told["log_max_ra_req_qp"] == known.max_qp_init_rd_atom
    assert told["max_num_eqs"] == known.num_comp_vectors
    flags = ("num_ports", "roce", "cd", "atomic", "cq_resize", "cq_oi")
    assert [told[name] for name in flags] == [1] * len(flags)
    assert told["log_max_msg"] == 30
    assert told["device_frequency_khz"] == 1000 * told["device_frequency_mhz"] == 1_000_000


def test_atomics(device):
    told = ATOMIC_CAPS.unpack(capability(device, CapClass.ATOMIC, RDMA_CORE_ASKS))
    assert told == {  # 8-byte words in host order, words of 4 and 8 bytes
        "atomic_req_8B_endianness_mode": 1, "supported_atomic_req_8B_endianness_mode_1": 1,
        "atomic_operations": 0b1111, "atomic_size_qp": 0b1100, "atomic_size_dc": 0b1100,
    }


def vport(device: Device, **fields: int) -> tuple[bytes, str]:
    mailbox = cmd.QUERY_HCA_VPORT_CONTEXT_IN.pack(opcode=Opcode.QUERY_HCA_VPORT_CONTEXT, **fields)
    return device.nic.execute(bytes(mailbox), cmd.QUERY_HCA_VPORT_CONTEXT_OUT.size)


@pytest.mark.parametrize("up, states", [(True, (4, 5)), (False, (1, 2))])
def test_the_vport_context_has_state_and_guids(device, up, states):
    device.nic.set_link(up)
    try:
        out, refusal = vport(device, port_num=1)
    finally:
        device.nic.set_link(True)
    assert not refusal
    told = HCA_VPORT_CONTEXT.unpack(out, 16)
    assert (told["port_state"], told["port_physical_state"]) == states
    assert told["vport_state"] == told["port_state"]
    guid = device.provider.query_device().node_guid
    assert told["node_guid"] == told["port_guid"] == told["system_image_guid"] == guid


def test_ports_are_not_aggregated(device):
    """To rdma-core 65 (mlx5dv_query_qp_lag_port) and UCX 1.23, a device with a lag_state of 0 has no LAG."""
    mailbox = cmd.QUERY_LAG_IN.pack(opcode=Opcode.QUERY_LAG)
    out, refusal = device.nic.execute(bytes(mailbox), cmd.QUERY_LAG_OUT.size)
    assert not refusal
    assert out == bytes(16)


def test_node_guids_tell_nics_apart_by_all_of_their_address():
    """Those of IPv6 addresses that end alike, too, although the ports' MACs are the same."""
    ports = [Port(PortConfig(addresses=(text,)), "") for text in ("fd77::1", "fd78::1", "fd77::1:0:1")]
    assert len({port_guid_of(port) for port in ports}) == 1
    guids = {node_guid_of(port) for port in ports}
    assert len(guids) == 3
    assert {guid >> 56 & 3 for guid in guids} == {2}, "locally administered, and of one device (EUI-64)"
    port = Port(PortConfig(addresses=("10.0.0.7",)), "")
    assert node_guid_of(port) == port_guid_of(port) == 0x02000AFFFE000007


@pytest.mark.parametrize("fields", [{"port_num": 2}, {"port_num": 1, "other_vport": 1}])
def test_there_is_no_other_port_or_vport(device, fields):
    out, refusal = vport(device, **fields)
    assert out[0] == Status.BAD_PARAM
    assert "one port" in refusal


def nic_vport(device: Device, **fields: int) -> tuple[bytes, str]:
    mailbox = ethernet.QUERY_NIC_VPORT_CONTEXT_IN.pack(opcode=Opcode.QUERY_NIC_VPORT_CONTEXT, **fields)
    return device.nic.execute(bytes(mailbox), ethernet.QUERY_NIC_VPORT_CONTEXT_OUT.size)


@pytest.mark.parametrize("mtu, told_mtu", [(1500, 1522), (9000, 9022), (1 << 16, 0xFFFF)])
def test_the_vport_of_ethernet_has_mac_and_mtu(mtu, told_mtu):
    with verbs.open("soft0", port=PortConfig(mtu=mtu, promiscuous=False)) as ctx:
        told = ctx.devx.command(Opcode.QUERY_NIC_VPORT_CONTEXT)["nic_vport_context"]
        assert told["mtu"] == told_mtu
        assert told["permanent_address"] == int.from_bytes(nic_of(ctx).mac, "big")
        assert told["node_guid"] == told["port_guid"] == ctx.query_device().node_guid
        assert (told["roce_en"], told["promisc_uc"], told["allowed_list_size"]) == (1, 0, 0)


@pytest.mark.parametrize("fields", [{"vport_number": 1}, {"other_vport": 1}])
def test_there_is_no_other_vport_of_ethernet(device, fields):
    out, refusal = nic_vport(device, **fields)
    assert out[0] == Status.BAD_PARAM
    assert "there is one vport" in refusal


def test_an_unknown_opcode_is_bad_op_from_every_door(device):
    provider, mailbox = device.provider, CREATE_XRQ.to_bytes(2, "big") + bytes(270)
    handle, _ = device.cq()
    doors = (
        lambda: provider.devx_obj_create(mailbox, 16),
        lambda: provider.devx_obj_modify(handle, mailbox, 16),
        lambda: provider.devx_obj_query(handle, mailbox, 16),
        lambda: provider.general_cmd(mailbox, 16),
    )
    for door in doors:
        device.refuses(door, Status.BAD_OP, CommandSyndrome.UNKNOWN_OPCODE, "0x717")


def test_the_device_says_that_it_is_a_connectx_7():
    with verbs.open("soft0") as ctx:
        known = ctx.query_device()
        assert (known.vendor_id, known.vendor_part_id) == (0x02C9, CONNECTX_7) == (0x02C9, 4129)


def test_the_device_says_what_it_is_told_to():
    with verbs.open("soft0", port=PortConfig(part_id=0)) as ctx:
        assert ctx.query_device().vendor_part_id == 0
    with pytest.raises(InvalidValueError, match="part_id = 0x10000"):
        PortConfig(part_id=0x10000)


def test_a_port_has_a_speed():
    with verbs.open("soft0") as ctx:
        port = ctx.query_port()
        assert port.gbps == 10  # of loopback no driver tells one
        assert (port.active_width, port.active_speed) == (1, 8)


@pytest.mark.parametrize(
    "mbps, gbps", [(1000, 2.5), (10_000, 10), (25_000, 25), (40_000, 40), (50_000, 50), (100_000, 100), (200_000, 200),
                   (400_000, 400), (800_000, 800), (1_600_000, 800)]
)
def test_speeds_have_the_codes_of_libibverbs(mbps, gbps):
    width, speed = _rate(mbps)
    assert PortAttr(*[0] * 8, active_width=width, active_speed=speed).gbps == gbps  # type: ignore[arg-type]


def test_completion_vectors_are_event_queues():
    with verbs.open("soft0") as ctx:
        vectors = ctx.query_device().num_comp_vectors
        nic = ctx.provider.nic  # type: ignore[attr-defined]
        cqs = [ctx.create_cq(4, comp_vector=vector) for vector in range(vectors)]
        queues = [int(nic.cqs[cq.cqn]["eqn"]) for cq in cqs]
        assert queues == [int(row["eqn"]) for row in nic.eqs]
        with pytest.raises(InvalidValueError, match=f"comp_vector = {vectors}"):
            ctx.create_cq(4, comp_vector=vectors)


def test_what_mailboxes_have_made_is_closed_with_its_context(caplog):
    """A queue in memory of the context, on a CQ of its own: neither could be closed before it."""
    with verbs.open("soft0") as keeper:
        nic = keeper.provider.nic  # type: ignore[attr-defined]
        ctx = verbs.open("soft0")
        pd, cq = ctx.create_pd(), ctx.create_cq(4)
        memory = ctx.register_umem(bytearray(1 << 13))
        uar = ctx.create_uar()
        mailbox = cmd.CREATE_QP_IN.pack(
            opcode=Opcode.CREATE_QP, wq_umem_id=memory.umem_id, wq_umem_valid=1, wq_umem_offset=-memory.address % 64,
            qpc={"st": 0, "pd": pd.pdn, "uar_page": uar.page_id, "rq_type": 3, "log_sq_size": 2, "cqn_snd": cq.cqn,
                 "dbr_umem_valid": 1, "dbr_umem_id": memory.umem_id, "dbr_addr": -memory.address % 64 + 4096},
        )
        ctx.provider.devx_obj_create(bytes(mailbox), 16)
        assert len(nic.qps) == 1
        ctx.close()
        assert (len(nic.qps), len(nic.cqs), len(nic.pds), len(nic.umems)) == (0, 0, 0, 0)


def test_what_mailboxes_have_made_on_an_imported_device_is_its_owners():
    with verbs.open("soft0") as owner:
        ctx = verbs.import_context(owner.provider)
        pd = owner.create_pd()
        ctx.close()
        assert pd.pdn in owner.provider.nic.pds  # type: ignore[attr-defined]
        with pytest.raises(DriverError):
            owner.provider.general_cmd(bytes(16), 16)
