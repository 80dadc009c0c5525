"""Where mailboxes, contexts and queue entries have their fields, and the numbers of commands, against public headers.

tests/data/mlx5_layouts.csv and mlx5_numbers.csv have the facts of Linux 6.12, rdma-core 65 and DPDK 26.11 (mlx5_ifc.h,
mlx5_prm.h, device.h, qp.h, mlx5dv.h, wqe.h), and mlx5_layouts.py beside them has extracted them. All that differs is in
tables here, with the reason.
"""

import csv
from enum import IntEnum

import pytest

from gpunetio.formats import commands, contexts, cqe, doorbell, events, flow, wqe
from gpunetio.formats import ethernet_queues as ethernet
from gpunetio.formats.layout import BitStruct, Entry
from repository import DATA

MODULES = (commands, contexts, cqe, doorbell, ethernet, events, flow, wqe)
Place = tuple[int, int]  # first bit, number of bits

# Fields by the headers' names. Headers have the events of each type in a structure of their own.
NAMES = {
    ("create_rqt_in", "ctx"): "rqt_context",
    ("create_rqt_in", "rq_num"): "rqt_context.rq_num",
    ("modify_rqt_in", "rq_num"): "ctx.rq_num",
    ("query_rqt_out", "rq_num"): "rqt_context.rq_num",
    ("query_rmp_out", "ctx"): "rmp_context",
    ("query_rq_out", "ctx"): "rq_context",
    ("query_rqt_out", "ctx"): "rqt_context",
    ("query_sq_out", "ctx"): "sq_context",
    ("query_tir_out", "ctx"): "tir_context",
    ("query_tis_out", "ctx"): "tis_context",
    ("set_fte_in", "list"): "flow_context.destination",
    ("query_fte_out", "list"): "flow_context.destination",
    ("dest_format", "vhca_id"): "destination_eswitch_owner_vhca_id",
    ("dest_format", "vhca_id_valid"): "destination_eswitch_owner_vhca_id_valid",
    ("mkc", "log_entity_size"): "log_page_size",
    ("modify_cq_in", "resize_field_select"): "modify_field_select_resize_field_select",
    ("av_seg", "q_key"): "key.qkey.qkey",
    ("ctrl_seg", "dci_stream"): "dci_stream_channel_id",
    ("mmo_seg", "mmo_control"): "mmo_control_31_0",
    ("mmo_seg", "opaque_lkey"): "local_key",
    ("mmo_seg", "opaque_addr"): "local_address",
    ("cqe64", "tunneled"): "tls_outer_l3_tunneled",
    ("cqe64", "lro_flags"): "lro.tcppsh_abort_dupack",
    ("cqe64", "lro_min_ttl"): "lro.min_ttl",
    ("cqe64", "lro_tcp_win"): "lro.tcp_win",
    ("cqe64", "lro_ack_seq"): "lro.ack_seq_num",
    ("eqe", "cqn"): "data.cq_err.cqn",
    ("eqe", "syndrome"): "data.cq_err.syndrome",
    ("eqe", "port"): "data.port.port",
    ("eqe", "queue_type"): "data.qp_srq.type",
    ("eqe", "number"): "data.qp_srq.qp_srq_n",
}

# Structures of no source.
NO_SOURCE = {
    "out": "the two fields with which every answer begins: see alloc_q_counter_out",
    "rts2sqd_qp_in": "headers know the opcode only; the mailbox of every other transition, such as sqd2rts_qp_in",
    "cq_dbrec": "indices of words: MLX5_CQ_SET_CI and MLX5_CQ_ARM_DB, in opcodes.csv",
    "qp_dbrec": "indices of words: MLX5_RCV_DBR and MLX5_SND_DBR, in opcodes.csv",
    "send_db": "the first 8 bytes of a control segment",
    "eth_vlan": "the union at the end of eth_seg: see test_unions",
    "wait_seg": "in queue_entries.csv",
    "masked_cs32_seg": "see test_unions",
    "masked_cs64_seg": "see test_unions",
    "masked_fa32_seg": "see test_unions",
    "masked_fa64_seg": "see test_unions",
}

# Fields of no source. `uid` comes on top: it has the same place in every request, also where headers reserve it.
FIELDS_OF_NO_SOURCE = {
    ("qpc", "send_dbr_mode"): "in prm_fields.csv, from the original's headers",
    ("cmd_hca_cap_2", "send_dbr_mode_no_dbr_ext"): "in prm_fields.csv, from the original's headers",
    ("modify_cq_in", "cq_umem_offset"): "as in create_cq_in, whose fields it has",
    ("modify_cq_in", "cq_umem_id"): "as in create_cq_in, whose fields it has",
    ("modify_rmp_in", "modify_lwm"): "bit 0 of `bitmask`, a structure with the same field in Linux (rmp_bitmask)",
    ("modify_rmp_in", "modify_size"): "a reserved bit of `bitmask`: an extension of the software NIC",
    ("qp_2err_in", "vhca_tunnel_id"): "in prm_fields.csv, from the original's headers",
    ("query_roce_address_out", "roce_address_num"): "in prm_fields.csv, from the original's headers",
    ("roce_addr_layout", "rx_allow_untagged"): "in prm_fields.csv, from the original's headers",
    ("raddr_seg", "reserved"): "a reserved word",
}

# Fields whose place is another one in some source, with that place.
OTHER_PLACES: dict[tuple[str, str], tuple[Place, str]] = {
    ("eqe", "owner"): ((511, 1), "mlx5_ifc.h names the bit, device.h the byte in which it is the lowest bit"),
    ("mkc", "log_entity_size"): ((475, 5), "Linux has added a bit at the upper end"),
    ("query_flow_counter_in", "num_of_counters"): ((194, 30), "DPDK includes reserved bits before it"),
    ("query_flow_counter_out", "flow_statistics"): ((128, 0), "an array, of which we declare the first element"),
    ("query_roce_address_out", "roce_address"): ((128, 256), "an array, of which headers declare the first element"),
}

# Structures that have another size in some source, with that size in bytes.
OTHER_SIZES = {
    "create_qp_in": (464, "DPDK counts the extension, which `pas` starts with"),
    "eth_seg": (32, "rdma-core counts 16 bytes of inline headers behind it"),
    "flow_table_nic_cap": (4096, "we declare what precedes the properties that nobody reads"),
    "init2init_qp_in": (272, "Linux and DPDK leave the extension out"),
    "rts2rts_qp_in": (272, "Linux and DPDK leave the extension out"),
    "query_flow_counter_out": (16, "without the first element of the array"),
    "query_qp_out": (464, "Linux counts the extension, which `pas` starts with"),
    "query_roce_address_out": (48, "with the first element of the array"),
}


def facts() -> dict[tuple[str, str], dict[Place, str]]:
    """Return the places of each field, and their sources. The field "" is the structure."""
    table: dict[tuple[str, str], dict[Place, str]] = {}
    with (DATA / "mlx5_layouts.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            place = int(row["bit_offset"], 16), int(row["width"])
            table.setdefault((row["struct"], row["field"]), {})[place] = row["sources"]
    return table


def declared() -> dict[str, tuple[int, dict[str, Place]]]:
    """Return the size in bytes and the fields of each structure of ours."""
    found: dict[str, tuple[int, dict[str, Place]]] = {}
    for struct in (struct for module in MODULES for struct in vars(module).values()):
        if isinstance(struct, BitStruct):
            fields = {field.name: (field.offset, field.width) for field in struct.fields.values()}
            found[struct.name] = struct.size, fields
        elif isinstance(struct, Entry):
            fields = {name: (8 * byte, 8 * struct.dtype[name].itemsize) for name, byte in struct.offsets.items()}
            found[type(struct).__name__] = struct.size, fields
    return found


FACTS, OURS = facts(), declared()


@pytest.mark.parametrize("struct", OURS)
def test_a_structure_is_as_headers_have_it(struct):
    size, fields = OURS[struct]
    assert ((struct, "") in FACTS) != (struct in NO_SOURCE)
    if struct in NO_SOURCE:
        return
    sizes = {bits // 8 for _, bits in FACTS[struct, ""]}
    assert sizes - {OTHER_SIZES[struct][0] if struct in OTHER_SIZES else None} <= {size}
    for name, place in fields.items():
        theirs = FACTS.get((struct, NAMES.get((struct, name), name)))
        if theirs is None:
            assert (struct, name) in FIELDS_OF_NO_SOURCE or (name, place) == ("uid", (0x10, 16)), name
        else:
            other = OTHER_PLACES[struct, name][0] if (struct, name) in OTHER_PLACES else None
            assert set(theirs) - {other} <= {place}, name


def test_the_tables_of_differences_have_no_more_than_differs():
    every = {(struct, name) for struct, (_, fields) in OURS.items() for name in fields}
    for table in (NAMES, FIELDS_OF_NO_SOURCE, OTHER_PLACES):
        assert set(table) <= every
    assert set(NO_SOURCE) <= set(OURS)
    assert not {key for key in FIELDS_OF_NO_SOURCE if (key[0], NAMES.get(key, key[1])) in FACTS}
    for struct, (size, _) in OTHER_SIZES.items():
        assert (0, 8 * size) in FACTS[struct, ""]
        assert size != OURS[struct][0]
    for (struct, name), (place, _) in OTHER_PLACES.items():
        assert place in FACTS[struct, NAMES.get((struct, name), name)]
        assert place != OURS[struct][1][name]


def test_unions():
    """Structures that a header has as a part of another one."""
    assert OURS["eth_vlan"][1] == {
        "insert": place_of("eth_seg", "insert.type"), "tci": place_of("eth_seg", "insert.vlan_tci"),
    }
    # A masked compare-and-swap of 8 bytes has two of our segments, of 16 bytes, one behind the other.
    (swap, width), (compare, _) = OURS["masked_cs64_seg"][1].values()
    assert [(swap, width), (compare, width), (swap + 128, width), (compare + 128, width)] == [
        place_of("masked_atomic_seg", name) for name in ("swap_add", "compare", "swap_add_mask", "compare_mask")
    ]
    assert OURS["masked_fa64_seg"][1]["add_data"] == place_of("masked_atomic_seg", "swap_add")


def place_of(struct: str, field: str) -> Place:
    """Return the place on which all sources agree."""
    (place,) = FACTS[struct, field]
    return place


# --- numbers

ENUMERATIONS: dict[str, type[IntEnum]] = {
    "MLX5_CMD_OP_": commands.Opcode, "MLX5_CMD_STAT_": commands.Status, "MLX5_EVENT_TYPE_": events.EventType,
    "MLX5_OPCODE_": wqe.WqeOpcode, "MLX5_CQE_SYNDROME_": cqe.Syndrome, "MLX5_CQE_": cqe.CqeOpcode,
}

# Enumerators by the headers' names. Statuses and syndromes end in _ERR there.
ENUMERATORS = {
    "QP_2ERR": "2ERR_QP", "QP_2RST": "2RST_QP", "SQD2RTS_QP": "SQD_RTS_QP",
    "INTERNAL_ERR": "INT_ERR", "BAD_RESOURCE": "BAD_RES_ERR", "RESOURCE_BUSY": "RES_BUSY", "EXCEED_LIM": "LIM_ERR",
    "BAD_INDEX": "IX_ERR", "NO_RESOURCES": "NO_RES_ERR", "BAD_OUTS_CQES": "BAD_SIZE_OUTS_CQES_ERR",
    "BAD_INPUT_LEN": "BAD_INP_LEN_ERR", "BAD_OUTPUT_LEN": "BAD_OUTP_LEN_ERR",
    "COMPLETION": "COMP", "PATH_MIGRATED": "PATH_MIG", "PATH_MIGRATE_FAILED": "PATH_MIG_FAILED",
}

# Enumerators of no source.
NUMBERS_OF_NO_SOURCE = {
    "RTS2SQD_QP": "Linux had it up to 3.19, and sends no queue pair of mlx5 to SQD since",
    "WAIT": "in opcodes.csv, from the original's headers",
    "SEND_EN": "in opcodes.csv, from the original's headers",
}


def test_numbers_are_those_of_headers():
    with (DATA / "mlx5_numbers.csv").open(newline="") as lines:
        theirs = {row["name"]: int(row["value"], 16) for row in csv.DictReader(lines)}
    unknown = set()
    for prefix, ours in ENUMERATIONS.items():
        for member in ours:
            name = prefix + ENUMERATORS.get(member.name, member.name)
            value = theirs.get(name, theirs.get(f"{name}_ERR"))
            if value is None:
                unknown.add(member.name)
            else:
                assert value == member, name
    assert unknown == set(NUMBERS_OF_NO_SOURCE)
