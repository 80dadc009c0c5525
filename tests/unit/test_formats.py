"""The tables of gpunetio/formats against an independent transcription of the specifications (tests/data)."""

import csv
from enum import IntEnum

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from compiled import optimized
from gpunetio import enums
from gpunetio.device import modes
from gpunetio.errors import DocaError, DocaErrorCode
from gpunetio.formats import commands, contexts, core_device, cqe, device_structs, doorbell, eth_device, flow, wqe
from gpunetio.formats import ethernet_queues as ethernet
from gpunetio.formats.layout import VARIABLE, BitStruct, Entry
from gpunetio.jit.compile import engine_function
from repository import DATA

MODULES = (commands, contexts, core_device, cqe, device_structs, doorbell, eth_device, ethernet, flow, wqe)
STRUCTS = {s.name: s for module in MODULES for s in vars(module).values() if isinstance(s, BitStruct)}
IN_C = {"VerbsCq": "doca_gpu_dev_verbs_cq", "VerbsQp": "doca_gpu_dev_verbs_qp"}
FOUND = [one for module in MODULES for one in vars(module).values() if isinstance(one, Entry)]
ENTRIES = {IN_C.get(type(one).__name__, type(one).__name__): one for one in FOUND}


def rows(file: str) -> list[dict[str, str]]:
    with (DATA / file).open(newline="") as lines:
        return list(csv.DictReader(lines))


def ids(row: dict[str, str]) -> str:
    return ".".join(list(row.values())[:2])


# --- command mailboxes and contexts

# Declared here, and not in the transcription, which lists what the original library uses.
FIELDS_OF_OURS = {
    ("create_qp_in", "wq_umem_offset"): (0x800, 64),  # mlx5_ifc.h has it
    # OUT and DESTROY_* come from mlx5_ifc.h as well: the original leaves them to libmlx5
    ("out", "status"): (0x00, 8),
    ("out", "syndrome"): (0x20, 32),
    **{
        (f"destroy_{kind}_in", field): place
        for kind, number in (("cq", "cqn"), ("qp", "qpn"), ("rmp", "rmpn"))
        for field, place in {
            "opcode": (0x00, 16), "uid": (0x10, 16), "op_mod": (0x30, 16), number: (0x48, 24),
        }.items()
    },
    # what a device tells of itself
    **{
        ("cmd_hca_cap", field): place
        for field, place in {
            "log_max_srq_sz": (0x80, 8), "log_max_qp": (0x9B, 5), "log_max_srq": (0xAB, 5), "log_max_cq": (0xDB, 5),
            "log_max_mkey": (0xEA, 6), "log_max_eq": (0xFC, 4), "log_max_mrw_sz": (0x109, 7),
            "log_max_ra_req_qp": (0x14A, 6), "rts2rts_qp_udp_sport": (0x151, 1), "log_max_ra_res_qp": (0x15A, 6),
            "log_max_msg": (0x1C3, 5), "cqe_version": (0x1FC, 4), "sctr_data_cqe": (0x215, 1),
            "roce": (0x21D, 1), "atomic": (0x21E, 1), "cq_oi": (0x220, 1), "cq_resize": (0x221, 1), "ud": (0x23D, 1),
            "log_max_pd": (0x32B, 5), "log_max_rmp": (0x383, 5),
            "max_num_eqs": (0x470, 16), "device_frequency_mhz": (0x4C0, 32),
            "log_max_atomic_size_qp": (0x580, 8),
        }.items()
    },
    **{
        ("atomic_caps", field): place
        for field, place in {
            "atomic_req_8B_endianness_mode": (0x40, 2), "supported_atomic_req_8B_endianness_mode_1": (0x46, 1),
            "atomic_operations": (0x90, 16), "atomic_size_qp": (0xB0, 16), "atomic_size_dc": (0xD0, 16),
        }.items()
    },
    **{
        ("hca_vport_context", field): place
        for field, place in {
            "field_select": (0x00, 32), "grh_required": (0x103, 1), "port_physical_state": (0x110, 4),
            "vport_state_policy": (0x114, 4), "port_state": (0x118, 4), "vport_state": (0x11C, 4),
            "system_image_guid": (0x140, 64), "port_guid": (0x180, 64), "node_guid": (0x1C0, 64), "lid": (0x300, 16),
            "lmc": (0x318, 3), "sm_lid": (0x320, 16), "sm_sl": (0x330, 4),
        }.items()
    },
    **{
        (f"query_hca_vport_context_{end}", field): place
        for end, fields in (
            ("in", {"opcode": (0x00, 16), "op_mod": (0x30, 16), "other_vport": (0x40, 1), "port_num": (0x4C, 4),
                    "vport_number": (0x50, 16)}),
            ("out", {"status": (0x00, 8), "syndrome": (0x20, 32), "hca_vport_context": (0x80, 4096)}),
        )
        for field, place in fields.items()
    },
    # whether ports are aggregated
    **{
        (struct, field): place
        for struct, fields in (
            ("lagc", {"port_select_mode": (0x15, 3), "lag_state": (0x1D, 3)}),
            ("query_lag_in", {"opcode": (0x00, 16), "op_mod": (0x30, 16)}),
            ("query_lag_out", {"status": (0x00, 8), "syndrome": (0x20, 32), "ctx": (0x40, 64)}),
        )
        for field, place in fields.items()
    },
    # a CQ's next ring, and a drained send queue
    **{
        ("modify_cq_in", field): place
        for field, place in {
            "opcode": (0x00, 16), "uid": (0x10, 16), "op_mod": (0x30, 16), "cqn": (0x48, 24),
            "resize_field_select": (0x60, 32), "cq_context": (0x80, 512), "cq_umem_offset": (0x280, 64),
            "cq_umem_id": (0x2C0, 32), "cq_umem_valid": (0x2E0, 1), "pas": (0x880, 0),
        }.items()
    },
    **{
        (f"{name}_qp_in", field): place
        for name in ("rts2sqd", "sqd2rts")
        for field, place in {
            "opcode": (0x00, 16), "qpn": (0x48, 24), "opt_param_mask": (0x80, 32), "qpc": (0xC0, 1856),
        }.items()
    },
    # what else is done to a receive pool
    **{
        (f"{kind}_rmp_{end}", field): place
        for kind, end, fields in (
            ("modify", "in", {"opcode": (0x00, 16), "uid": (0x10, 16), "op_mod": (0x30, 16), "rmp_state": (0x40, 4),
                              "rmpn": (0x48, 24), "modify_size": (0xBE, 1), "modify_lwm": (0xBF, 1),
                              "ctx": (0x100, 1920)}),
            ("query", "in", {"opcode": (0x00, 16), "uid": (0x10, 16), "op_mod": (0x30, 16), "rmpn": (0x48, 24)}),
            ("query", "out", {"status": (0x00, 8), "syndrome": (0x20, 32), "ctx": (0x100, 1920)}),
        )
        for field, place in fields.items()
    },
}
STRUCTS_OF_OURS = {
    "out": 16, "destroy_cq_in": 16, "destroy_qp_in": 16, "destroy_rmp_in": 16, "modify_rmp_in": 272, "query_rmp_in": 16,
    "query_rmp_out": 272, "atomic_caps": 256, "hca_vport_context": 512, "query_hca_vport_context_in": 16,
    "query_hca_vport_context_out": 528, "modify_cq_in": 272, "rts2sqd_qp_in": 272, "sqd2rts_qp_in": 272,
    "lagc": 8, "query_lag_in": 16, "query_lag_out": 16,
}


@pytest.mark.parametrize("row", rows("prm_sizes.csv"), ids=ids)
def test_struct_size(row):
    assert STRUCTS[row["struct"]].size == int(row["bytes"])


@pytest.mark.parametrize("row", rows("prm_fields.csv"), ids=ids)
def test_struct_field(row):
    field = STRUCTS[row["struct"]].fields[row["field"]]
    assert (hex(field.offset), field.width) == (hex(int(row["bit_offset"], 16)), int(row["width"]))
    assert field.struct is None or field.struct.size * 8 == field.width


def test_no_other_structs_and_fields():
    known = {(row["struct"], row["field"]) for row in rows("prm_fields.csv")}
    declared = {(s.name, f.name): (f.offset, f.width) for s in STRUCTS.values() for f in s.fields.values()}
    assert {key: place for key, place in declared.items() if key not in known} == FIELDS_OF_OURS
    sizes = {row["struct"] for row in rows("prm_sizes.csv")}
    assert {name: s.size for name, s in STRUCTS.items() if name not in sizes} == STRUCTS_OF_OURS


@pytest.mark.parametrize("struct", STRUCTS.values(), ids=STRUCTS)
def test_fields_neither_overlap_nor_leave_the_struct(struct):
    end = 0
    for field in sorted(struct.fields.values(), key=lambda field: field.offset):
        assert field.offset >= end, field.name
        end = field.offset + field.width
        if field.width == VARIABLE:  # the rest of a mailbox
            assert field.offset == struct.size * 8
        else:
            assert end <= struct.size * 8, field.name
        if field.struct or field.width > 64:
            assert field.offset % 8 == 0


# --- packing


def values_of(struct: BitStruct) -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries({field.name: value_of(field) for field in struct.fields.values()})


def value_of(field) -> st.SearchStrategy:
    if field.struct:
        return values_of(field.struct)
    if field.width == VARIABLE:
        return st.binary(max_size=32)
    if field.width > 1024:
        return st.binary(max_size=8).map(lambda start: start.ljust(field.width // 8, b"\xa5"))
    if field.width > 64:
        return st.binary(min_size=field.width // 8, max_size=field.width // 8)
    return st.integers(0, (1 << field.width) - 1)


@pytest.mark.parametrize("struct", STRUCTS.values(), ids=STRUCTS)
@settings(max_examples=20)
@given(data=st.data())
def test_round_trip(struct, data):
    values = data.draw(values_of(struct))
    packed = struct.pack(**values)
    assert struct.unpack(packed) == values
    assert struct.unpack(bytes(3) + packed, 3) == values


def leaves(struct: BitStruct, at: int = 0, prefix: str = ""):
    """(dotted name, first bit, width) of every field that is no structure."""
    for field in struct.fields.values():
        if field.struct:
            yield from leaves(field.struct, at + field.offset, f"{prefix}{field.name}.")
        elif field.width != VARIABLE:
            yield f"{prefix}{field.name}", at + field.offset, field.width


def nest(name: str, value) -> dict:
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize("struct", STRUCTS.values(), ids=STRUCTS)
@pytest.mark.parametrize("background", [0x00, 0xFF])
def test_a_field_sets_its_own_bits_and_no_other(struct, background):
    for name, first, width in leaves(struct):
        buf = bytearray([background]) * struct.size
        before = int.from_bytes(buf, "big")
        ones = (1 << width) - 1
        value = 0 if background else ones
        struct.update(buf, **nest(name, value if width <= 64 else value.to_bytes(width // 8, "big")))
        mask = ones << (struct.size * 8 - first - width)
        assert int.from_bytes(buf, "big") ^ before == mask == struct.bits(name), name
        got = struct.get(buf, name)
        assert (got if width <= 64 else int.from_bytes(got, "big")) == value, name
        if first % 8 == 0:
            assert struct.offset(name) == first // 8


@pytest.mark.parametrize("struct", STRUCTS.values(), ids=STRUCTS)
def test_what_does_not_fit_is_refused_by_name(struct):
    for name, _, width in leaves(struct):
        buf = struct.pack()
        too_much = [1 << width, -1] if width <= 64 else [bytes(width // 8 + 1), bytes(width // 8 - 1)]
        for value in too_much:
            with pytest.raises(ValueError, match=rf"\b\w+\.{name.rpartition('.')[2]} ") as caught:
                struct.update(buf, **nest(name, value))
            if "." not in name:
                assert str(caught.value).startswith(f"{struct.name}.{name} ")
        assert not any(buf)


def test_unknown_fields():
    for call in (
        lambda: contexts.QPC.pack(stat=1),
        lambda: contexts.QPC.get(bytes(232), "stat"),
        lambda: contexts.QPC.offset("stat"),
        lambda: contexts.QPC.bits("stat"),
    ):
        with pytest.raises(ValueError, match=r"qpc has no field 'stat'; it has state, lag_tx_port_affinity, "):
            call()
    for call in (
        lambda: contexts.QPC.get(bytes(232), "pd.x"),
        lambda: contexts.QPC.offset("user_index.x"),
        lambda: contexts.QPC.bits("user_index.x"),
    ):
        with pytest.raises(ValueError, match="is not a structure: it has no field 'x'"):
            call()
    with pytest.raises(ValueError, match=r"^qpc.pm_state starts at bit 0x13, not on a byte boundary$"):
        contexts.QPC.offset("pm_state")


@given(st.binary(min_size=232, max_size=232), st.sampled_from(sorted(contexts.QPC.fields)))
def test_update_of_the_value_that_is_there_changes_nothing(raw, name):
    assume(contexts.QPC.fields[name].struct is None)
    buf = bytearray(raw)
    contexts.QPC.update(buf, **{name: contexts.QPC.get(raw, name)})
    assert buf == raw


# --- queue entries, records and device structures

ENTRY_NAMES = {  # the transcription's structures, by our names
    "ctrl": "ctrl_seg", "raddr": "raddr_seg", "data": "data_seg", "atomic": "atomic_seg", "wait": "wait_seg",
    "srq_next": "srq_next_seg", "inline_header": "inline_header", "cqe64": "cqe64", "err_cqe64": "err_cqe64",
    "eth": "eth_seg", "eth_vlan": "eth_vlan", "wait_value": "wait_value_seg",
}
FIELD_NAMES = {("inline_header", "length"): "byte_count"}

# Masked atomics and doorbells are words in the PRM, without field tables in the transcription; DEV_SIDE is ours.
ENTRIES_OF_OURS = {
    "masked_fa32_seg": {"add_data": (0, 4), "field_boundary": (4, 4), "reserved": (8, 8)},
    "masked_fa64_seg": {"add_data": (0, 8), "field_boundary": (8, 8)},
    "masked_cs32_seg": {"swap_data": (0, 4), "compare_data": (4, 4), "swap_mask": (8, 4), "compare_mask": (12, 4)},
    "masked_cs64_seg": {"swap": (0, 8), "compare": (8, 8)},
    "av_seg": {  # mlx5_wqe_av of mlx5dv.h
        "q_key": (0, 4), "dqp_dct": (8, 4), "stat_rate_sl": (12, 1), "fl_mlid": (13, 1), "rlid": (14, 2),
        "rmac": (20, 6), "tclass": (26, 1), "hop_limit": (27, 1), "grh_gid_fl": (28, 4), "rgid": (32, 16),
    },
    "mmo_seg": {"mmo_control": (0, 4), "opaque_lkey": (4, 4), "opaque_addr": (8, 8)},
    "qp_dbrec": {"rcv": (0, 4), "snd": (4, 4)},
    "cq_dbrec": {"set_ci": (0, 4), "arm": (4, 4)},
    "send_db": {"pi_shift8": (0, 4), "qpn_shift8": (4, 4)},
}
SIDE = "side"  # the one reserved pointer of the QP that we use, at byte 88


def place(entry: Entry, field: str) -> tuple[int, int]:
    dtype, offset = entry.dtype.fields[field][:2]
    assert getattr(entry, field) == entry.offsets[field] == offset
    return offset, dtype.itemsize


@pytest.mark.parametrize("row", rows("queue_entries.csv"), ids=ids)
def test_queue_entry(row):
    entry = ENTRIES[ENTRY_NAMES[row["struct"]]]
    field = FIELD_NAMES.get((row["struct"], row["field"]), row["field"])
    assert place(entry, field) == (int(row["byte_offset"]), int(row["bytes"]))
    if row["endian"] == "be":
        assert entry.dtype.fields[field][0].byteorder == ">"


def test_sizes_of_queue_entries():
    sizes = {name: ENTRIES[ours].size for name, ours in ENTRY_NAMES.items()}
    others = {"cqe64": 64, "err_cqe64": 64, "inline_header": 4, "wait_value": 32}
    assert sizes == {name: others.get(name, 16) for name in sizes}


@pytest.mark.parametrize("row", rows("device_structs.csv"), ids=ids)
def test_device_struct(row):
    entry = ENTRIES[row["struct"]]
    if row["field"] == "_size":
        assert entry.size == entry.dtype.itemsize == int(row["bytes"])
    else:
        assert place(entry, row["field"]) == (int(row["byte_offset"]), int(row["bytes"]))
        assert entry.dtype.fields[row["field"]][0].byteorder in "<|="


def test_no_other_entries_and_fields():
    known = {(ENTRY_NAMES[r["struct"]], FIELD_NAMES.get((r["struct"], r["field"]), r["field"]))
             for r in rows("queue_entries.csv")}
    known |= {(r["struct"], r["field"]) for r in rows("device_structs.csv")}
    other = {name: {f: place(e, f) for f in e.offsets if (name, f) not in known} for name, e in ENTRIES.items()}
    assert other.pop("doca_gpu_dev_verbs_qp") == {SIDE: (88, 8)}
    for ours in ("VerbsSide", "VerbsRq", "EthTxq", "EthRxq", "PacketAttr", "DevSemaphore", "SemaphoreItem",
                 "SemaphoreRing", "DevBuf", "DevBufArr", "memory_export"):
        del other[ours]
    assert {name: fields for name, fields in other.items() if fields} == ENTRIES_OF_OURS


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_entry(entry):
    assert entry.dtype.itemsize == entry.size
    end = 0
    for name, offset in sorted(entry.offsets.items(), key=lambda item: item[1]):
        assert offset >= end, name
        end = offset + place(entry, name)[1]
    assert end <= entry.size
    assert entry._asdict() == {**entry.offsets, "size": entry.size}


def test_entries_are_big_endian_in_memory():
    row = np.zeros(1, wqe.DATA_SEG.dtype)
    row["byte_count"], row["lkey"], row["addr"] = 0x01020304, 0x05060708, 0x090A0B0C0D0E0F10
    assert row.tobytes() == bytes(range(1, 17))


def test_entries_fold_in_compiled_code():
    entry, nested = device_structs.DEV_QP, device_structs.DEV_CQ

    @engine_function
    def offsets():
        return entry.sq_db, entry.cq_sq + nested.cqe_ci, entry.size

    assert offsets() == (80, 160 + 24, 296)
    body = optimized(offsets)
    assert all(f"i64 {n}" in body for n in (80, 184, 296))
    assert not any(op in body for op in ("load", " add ", "getelementptr i8"))


# --- enumerations


def numbered(enum, prefix: str = "") -> dict[str, int]:
    """Members by the transcription's name."""
    return {name.removeprefix(prefix): int(member) for name, member in enum.__members__.items()}


ENUMS = {
    "doca_error": numbered(DocaErrorCode),
    "exec_scope": numbered(enums.ExecScope),
    "sync_scope": numbered(enums.SyncScope),
    "resource_sharing_mode": numbered(enums.SharingMode),
    "nic_handler": numbered(enums.NicHandler),
    "code_opt": numbered(enums.CodeOpt),
    "mem_reg_type": numbered(enums.MemRegType),
    "send_dbr_mode_ext": numbered(enums.SendDbrModeExt),
    "gpu_mem_type": numbered(enums.MemType),
    "qp_state": numbered(enums.QpState),
    "addr_type": numbered(enums.AddrType),
    "mtu_size": numbered(enums.MtuSize, "MTU_"),
    "uar_allocation_type": numbered(enums.UarAllocationType),
    "cq_overrun": numbered(enums.CqOverrun),
    "srq_type": numbered(enums.SrqType),
    "qp_atomic_type": numbered(enums.QpAtomicType),
    "qp_send_dbr_mode": numbered(enums.QpSendDbrMode),
    "qp_attr_mask": numbered(enums.QpAttrMask),
}
NOT_DECLARED = {  # nothing in the package has a use for them yet; whoever gives them one declares and checks them
    "mem_type": "the kind of memory is found by looking at the object that is given",
    "qp_type": "marks a send queue among queue handles: there is one kind of exported queue",
    "nic_handler_flags": "the bits that the values of nic_handler are made of",
    "signal_op": "ADD is the only one",
    "dump_mode": "an address to dump asks for it",
    "blocking_mode": "a flag, 0 or 1",
    "mcst_mode": "an address to dump asks for it",
    "wqe_segment_counts": "ds is counted where a WQE is built",
    "atomic_ext_bytes": "the number of bytes itself",
    "qp_ready_mode": "there is one way to mark slots ready",
}
SENTINELS = {("nic_handler", "TYPE_MAX"), ("mem_reg_type", "MAX")}  # no value, but one more than the largest
OURS = [("exec_scope", "BLOCK"), ("qp_state", "SQD"), ("qp_attr_mask", "QKEY")]


@pytest.mark.parametrize("row", rows("enums.csv"), ids=ids)
def test_enum(row):
    key = (row["enum"], row["name"])
    if row["enum"] in NOT_DECLARED:
        assert row["enum"] not in ENUMS
    elif key in SENTINELS:
        assert row["name"] not in ENUMS[row["enum"]]
        assert max(ENUMS[row["enum"]].values()) < int(row["value"])
    else:
        assert ENUMS[row["enum"]][row["name"]] == int(row["value"])


def test_no_other_enumerators():
    known = {(row["enum"], row["name"]) for row in rows("enums.csv")}
    assert {row["enum"] for row in rows("enums.csv")} == set(ENUMS) | set(NOT_DECLARED)
    assert [(enum, name) for enum, members in ENUMS.items() for name in members if (enum, name) not in known] == OURS


def test_error_classes_have_their_codes():
    """A class that is named after no code would be a mistake; DocaError itself is UNKNOWN."""
    names = {"TimedOutError": "TIME_OUT", "OperatingSystemError": "OPERATING_SYSTEM", "DocaError": "UNKNOWN",
             "DeviceFatalError": "DEVICE_FATAL_ERROR", "PeerError": "CONNECTION_ABORTED",
             "ConnectionRejectedError": "CONNECTION_ABORTED", "ConnectionEndedError": "CONNECTION_ABORTED",
             "PeerInterrupted": "CONNECTION_ABORTED", "CompileError": "INVALID_VALUE",
             "BadWrError": "UNKNOWN"}  # its instances have their cause's code

    def check(cls: type[DocaError]) -> None:
        words = "".join("_" + c if c.isupper() else c for c in cls.__name__.removesuffix("Error"))
        assert cls.code.name == names.get(cls.__name__, words.removeprefix("_").upper())
        for sub in cls.__subclasses__():
            check(sub)

    assert DocaError.__subclasses__()
    check(DocaError)


def test_verbs_constants_of_libibverbs():
    assert numbered(enums.Access) == {
        "LOCAL_READ": 0, "LOCAL_WRITE": 1, "REMOTE_WRITE": 2, "REMOTE_READ": 4, "REMOTE_ATOMIC": 8,
        "RELAXED_ORDERING": 1 << 20,
    }
    assert enums.Access.all() == 15
    assert numbered(enums.LinkLayer) == {"INFINIBAND": 1, "ETHERNET": 2}
    assert numbered(enums.QpType) == {"RC": 0, "UC": 1, "UD": 2, "GSI": 3}
    assert [size.nbytes for size in enums.MtuSize][:5] == [256, 512, 1024, 2048, 4096]


def test_modes_of_device_functions():
    values = {name: value for name, value in vars(modes).items() if not name.startswith("_")}
    for name, value in values.items():
        owners = [
            members
            for members, short in (
                (ENUMS["resource_sharing_mode"], name),
                (ENUMS["exec_scope"], name),
                (ENUMS["sync_scope"], name.removeprefix("SYNC_") if name.startswith("SYNC_") else ""),
                (ENUMS["nic_handler"], name),
                (ENUMS["code_opt"], name),
            )
            if members.get(short) == value
        ]
        assert len(owners) == 1, name
        assert type(value) is int  # what it is a member of is for the enumeration to say


# --- opcodes and codes of the PRM

RENAMED = {  # the transcription's name → ours
    ("command", "RST2INIT"): "RST2INIT_QP",
    ("command", "INIT2INIT"): "INIT2INIT_QP",
    ("command", "INIT2RTR"): "INIT2RTR_QP",
    ("command", "RTR2RTS"): "RTR2RTS_QP",
    ("command", "RTS2RTS"): "RTS2RTS_QP",
    ("ce", "CQE_ON_CQE_ERROR"): "ON_ERROR",
    ("ce", "CQE_ON_FIRST_CQE_ERROR"): "ON_FIRST_ERROR",
    ("ce", "CQE_ALWAYS"): "ALWAYS",
}
GROUPS: dict[str, type[IntEnum] | dict[str, int]] = {
    "command": numbered(commands.Opcode),
    "wqe": numbered(wqe.WqeOpcode),
    "cqe": numbered(cqe.CqeOpcode),
    "ce": numbered(wqe.CompletionMode),
    "fm": numbered(wqe.FenceMode),
    "ctrl_flags": numbered(wqe.CtrlFlags),
    "opt_param_mask": numbered(commands.OptParam),
    "qp_state": numbered(commands.QpState),
    "mtu": numbered(commands.PrmMtu, "MTU_"),
    "rq_type": numbered(commands.RqType),
    "flow_action": numbered(flow.FlowAction),
    "flow_table_type": numbered(flow.FlowTableType),
    "flow_miss": numbered(flow.MissAction),
    "flow_table_modify": numbered(flow.TableModify),
    "flow_group_type": numbered(flow.GroupType),
    "match_criteria": numbered(flow.MatchCriteria),
    "flow_entry_modify": numbered(flow.EntryModify),
    "flow_destination": numbered(flow.DestinationType),
    "pm_state": {"MIGRATED": commands.PM_STATE_MIGRATED},
    "wq_type": numbered(commands.WqType),
    "cap_class": {name: numbered(commands.CapClass)[name] for name in ("GENERAL", "ETHERNET_OFFLOADS")},
    "wait_opmod": numbered(wqe.WaitMode),
    "wait_operation": numbered(wqe.WaitOperation),
    "eth_cs_flags": numbered(wqe.EthChecksum),
    "eth_swp_flags": numbered(wqe.EthSoftwareParser),
    "eth_insert": {"VLAN": wqe.ETH_INSERT_VLAN, "SVLAN": wqe.ETH_INSERT_SVLAN},
    "queue_state": numbered(ethernet.QueueState),
    "mem_rq_type": numbered(ethernet.RqMemory),
    "ts_format": numbered(ethernet.TimestampFormat),
    "ts_format_cap": numbered(ethernet.TimestampFormats),
    "inline_mode": numbered(ethernet.InlineMode),
    "inline_mode_cap": numbered(ethernet.InlineModeCap),
    "disp_type": numbered(ethernet.DispType),
    "rx_hash_fn": numbered(ethernet.RxHashFn),
    "self_lb_block": numbered(ethernet.SelfLbBlock),
    "l3_prot_type": numbered(ethernet.L3Prot),
    "l4_prot_type": numbered(ethernet.L4Prot),
    "hash_field": numbered(ethernet.HashField),
    "packet_merge": numbered(ethernet.PacketMerge),
    "list_q_type": numbered(ethernet.ListQType),
    "modify_sq": numbered(ethernet.ModifySq),
    "modify_rq": numbered(ethernet.ModifyRq),
    "modify_tir": numbered(ethernet.ModifyTir),
    "modify_tis": numbered(ethernet.ModifyTis),
    "modify_rqt": numbered(ethernet.ModifyRqt),
    "rx_checksum": numbered(cqe.RxChecksum),
    "rx_headers": numbered(cqe.RxHeaders),
    "rx_l3_type": numbered(cqe.RxL3Type),
    "rx_l4_type": numbered(cqe.RxL4Type),
    "rx_hash_ip": numbered(cqe.RxHashIp),
    "rx_hash_l4": numbered(cqe.RxHashL4),
    "dbr": {  # indices of 32-bit words
        "RCV": doorbell.QP_DBREC.rcv // 4, "SND": doorbell.QP_DBREC.snd // 4,
        "CQ_SET_CI": doorbell.CQ_DBREC.set_ci // 4, "CQ_ARM": doorbell.CQ_DBREC.arm // 4,
    },
}
OPCODES_OF_OURS = {  # from mlx5_ifc.h
    ("command", "DESTROY_CQ"): 0x401,
    ("command", "DESTROY_QP"): 0x501,
    ("command", "MODIFY_CQ"): 0x403,
    ("command", "RTS2SQD_QP"): 0x508,
    ("command", "SQD2RTS_QP"): 0x50C,
    ("command", "QUERY_HCA_VPORT_CONTEXT"): 0x762,
    ("command", "QUERY_LAG"): 0x842,
    ("qp_state", "SQ_DRAINING"): 7,
    ("opt_param_mask", "RAE"): 1 << 2,
    ("opt_param_mask", "Q_KEY"): 1 << 5,  # MLX5_QP_OPTPAR_Q_KEY
}
NO_FENCE_MODE = ("fm", "CUSTOM")  # 0x100 fits in no field: the original's mark for "take the next argument"


@pytest.mark.parametrize("row", rows("opcodes.csv"), ids=ids)
def test_opcode(row):
    key = (row["group"], row["name"])
    if key == NO_FENCE_MODE:
        assert "CUSTOM" not in GROUPS["fm"]
        assert max(GROUPS["fm"].values()) < 8  # 3 bits
    else:
        assert GROUPS[row["group"]][RENAMED.get(key, row["name"])] == int(row["value"], 16)


def test_no_other_opcodes():
    known = {(row["group"], RENAMED.get((row["group"], row["name"]), row["name"])) for row in rows("opcodes.csv")}
    declared = {(group, name): value for group, members in GROUPS.items() for name, value in members.items()}
    assert {key: value for key, value in declared.items() if key not in known} == OPCODES_OF_OURS


def test_control_flags_are_made_of_the_two_modes():
    def flags(ce: str, fm: str) -> int:
        return wqe.CompletionMode[ce] << wqe.CE_SHIFT | wqe.FenceMode[fm] << wqe.FM_SHIFT

    assert flags("ALWAYS", "NO_FENCE") == wqe.CtrlFlags.CQ_UPDATE
    assert flags("ON_ERROR", "NO_FENCE") == wqe.CtrlFlags.CQ_ERROR_UPDATE
    assert flags("ON_FIRST_ERROR", "NO_FENCE") == wqe.CtrlFlags.CQ_FIRST_CQE_ERROR
    assert flags("ALWAYS", "FENCE") == wqe.CtrlFlags.CQ_UPDATE_FENCE
    assert flags("ON_ERROR", "INITIATOR_SMALL_FENCE") == wqe.CtrlFlags.INITIATOR_SMALL_FENCE
    assert flags("ON_ERROR", "STRONG_ORDERING") == wqe.CtrlFlags.STRONG_ORDERING


def test_words_of_an_ethernet_completion():
    """The header types lie between the flags, and a striding queue's byte count has three parts."""
    word = cqe.RX_L3_MASK << cqe.RX_L3_SHIFT, cqe.RX_L4_MASK << cqe.RX_L4_SHIFT
    assert word == (0b0000_1100, 0b0111_0000)
    assert sum(word) + sum(cqe.RxHeaders) == 0xFF
    assert (cqe.RX_HASH_MASK << cqe.RX_HASH_IP_SHIFT, cqe.RX_HASH_MASK << cqe.RX_HASH_L4_SHIFT) == (0x0C, 0xC0)
    assert cqe.STRIDES_MASK << cqe.STRIDES_SHIFT | cqe.FILLER | cqe.STRIDING_LENGTH_MASK == 0xFFFF_FFFF
    assert (cqe.FILLER, cqe.FLOW_TAG_MASK, 1 << cqe.LRO_SEGMENTS_SHIFT) == (0x8000_0000, 0xFF_FFFF, 0x100_0000)


def test_striding_receive_wqe():
    """A next segment and one data segment; sizes are counted from 64 bytes and from 512 strides."""
    assert wqe.SRQ_NEXT_SEG.size + wqe.DATA_SEG.size == wqe.STRIDING_WQE
    assert (1 << wqe.MIN_STRIDE_LOG, 1 << wqe.MIN_STRIDES_LOG) == (64, 512)


def test_list_of_an_rqt():
    listed = ethernet.rq_list([1, 0xABCDEF, 0])
    assert listed == bytes.fromhex("00000001 00abcdef 00000000")
    assert ethernet.rqns_of(listed[:4] + b"\xff" + listed[5:]) == [1, 0xABCDEF, 0]  # the upper byte is reserved


def test_scatter_to_cqe():
    """From mlx5's qp.h and mlx5dv.h: MLX5_RES_SCAT_DATA32_CQE, MLX5_INLINE_SCATTER_32 and what belongs to them."""
    assert numbered(commands.ScatterToCqe) == {"NONE": 0, "DATA_32": 0x1, "DATA_64": 0x2}
    assert numbered(commands.ResponsesToCqe) == {"NONE": 0, "DATA_32": 0x11, "DATA_64": 0x22}
    assert numbered(cqe.CqeFormat) == {"NO_INLINE": 0, "INLINE_32": 1, "INLINE_64": 2, "COMPRESSED": 3}
    assert cqe.CqeFormat.INLINE_32 << cqe.FORMAT_SHIFT == 0x4
    assert cqe.CqeFormat.COMPRESSED << cqe.FORMAT_SHIFT == cqe.FORMAT_MASK
    assert cqe.OWNER_MASK & cqe.FORMAT_MASK == 0 == cqe.FORMAT_MASK >> cqe.OPCODE_SHIFT


def test_opmods_of_masked_atomics():
    """Of the words that GPUNetIO's builders put into the upper 8 bits: extended, and how large."""
    assert (wqe.EXTENDED_ATOMIC_4 << wqe.OPMOD_SHIFT, wqe.EXTENDED_ATOMIC_8 << wqe.OPMOD_SHIFT) == (
        0x08000000, 0x09000000,
    )


def test_statuses_and_syndromes_of_the_prm():
    """From mlx5's device.h and mlx5dv.h: the transcription leaves them out."""
    assert numbered(commands.Status) == {
        "OK": 0x00, "INTERNAL_ERR": 0x01, "BAD_OP": 0x02, "BAD_PARAM": 0x03, "BAD_SYS_STATE": 0x04,
        "BAD_RESOURCE": 0x05, "RESOURCE_BUSY": 0x06, "EXCEED_LIM": 0x08, "BAD_RES_STATE": 0x09, "BAD_INDEX": 0x0A,
        "NO_RESOURCES": 0x0F, "BAD_QP_STATE": 0x10, "BAD_PKT": 0x30, "BAD_OUTS_CQES": 0x40, "BAD_INPUT_LEN": 0x50,
        "BAD_OUTPUT_LEN": 0x51,
    }
    assert numbered(cqe.Syndrome) == {
        "LOCAL_LENGTH": 0x01, "LOCAL_QP_OP": 0x02, "LOCAL_PROT": 0x04, "WR_FLUSH": 0x05, "MW_BIND": 0x06,
        "BAD_RESP": 0x10, "LOCAL_ACCESS": 0x11, "REMOTE_INVAL_REQ": 0x12, "REMOTE_ACCESS": 0x13, "REMOTE_OP": 0x14,
        "TRANSPORT_RETRY_EXC": 0x15, "RNR_RETRY_EXC": 0x16, "REMOTE_ABORTED": 0x22,
    }
