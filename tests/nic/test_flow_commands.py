"""Commands of flow tables: what they answer, and how each mistake is refused."""

from collections.abc import Callable, Iterator

import pytest

from flow_rig import MISC, OUTER, TABLE, TIR, Refused, Steering, match
from gpunetio import verbs
from gpunetio.enums import LinkLayer
from gpunetio.formats import flow
from gpunetio.formats.commands import CapClass, Opcode, Status
from gpunetio.formats.contexts import CMD_HCA_CAP
from gpunetio.formats.flow import FTE_MATCH_PARAM, DestinationType, EntryModify, FlowAction
from gpunetio.nic.control.flow.tables import MAX_LEVEL, MAX_LOG_SIZE
from gpunetio.nic.control.syndromes import CommandSyndrome
from gpunetio.nic.engine.port import PortConfig
from gpunetio.nic.state.flow import MAX_MASKS
from gpunetio.providers import open_device
from gpunetio.verbs import Context

PORT = {"udp_dport": 0xFFFF}


@pytest.fixture
def ctx() -> Iterator[Context]:
    with verbs.open("soft0") as opened:
        yield opened


@pytest.fixture
def flows(ctx) -> Steering:
    return Steering(ctx.provider.nic)


def refuses(call: Callable[[], object], status: Status, syndrome: CommandSyndrome, *words: str) -> None:
    with pytest.raises(Refused) as caught:
        call()
    assert (Status(caught.value.args[0]), CommandSyndrome(caught.value.args[1])) == (status, syndrome), caught.value
    for word in words:
        assert word in caught.value.args[2]


def context(flows: Steering, table: int) -> dict[str, int]:
    out = flows.execute(Opcode.QUERY_FLOW_TABLE, table_id=table)
    return {name: value for name, value in flow.QUERY_FLOW_TABLE_OUT.get(out, "flow_table_context").items() if value}


# --- tables


def test_a_table_is_what_it_was_created_as(flows):
    behind = flows.table(level=5)
    table = flows.table(level=4, log=10, miss=behind)
    assert context(flows, behind) == {"level": 5, "log_size": 8}
    assert context(flows, table) == {"level": 4, "log_size": 10, "table_miss_action": 1, "table_miss_id": behind}


def test_the_miss_of_a_table_can_be_changed(flows):
    one, other = flows.table(level=1), flows.table(level=2)
    table = flows.table(miss=one)
    change = {"table_miss_action": 1, "table_miss_id": other}
    flows.execute(Opcode.MODIFY_FLOW_TABLE, table_id=table, modify_field_select=1, flow_table_context=change)
    assert context(flows, table)["table_miss_id"] == other
    flows.execute(Opcode.DESTROY_FLOW_TABLE, table_id=one)
    destroy = {"opcode": Opcode.DESTROY_FLOW_TABLE, "table_id": other}
    refuses(
        lambda: flows.execute(**destroy), Status.RESOURCE_BUSY, CommandSyndrome.IN_USE,
        f"flow table {other:#x} is used by flow table {table:#x}",
    )
    flows.execute(Opcode.MODIFY_FLOW_TABLE, table_id=table, modify_field_select=1)
    assert "table_miss_id" not in context(flows, table)
    flows.execute(**destroy)
    for select in (0, 2, 3, 1 << 15):
        refuses(
            lambda select=select: flows.execute(
                Opcode.MODIFY_FLOW_TABLE, table_id=table, modify_field_select=select
            ),
            Status.BAD_PARAM, CommandSyndrome.FLOW_TABLE, f"modify_field_select {select:#x}", "MISS_TABLE_ID (1)",
        )


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 5, 6, 7, 8, 9, 255])
def test_only_tables_for_reception(flows, kind):
    table = flows.table()
    for opcode, fields in (
        (Opcode.CREATE_FLOW_TABLE, {}), (Opcode.QUERY_FLOW_TABLE, {"table_id": table}),
        (Opcode.DESTROY_FLOW_TABLE, {"table_id": table}), (Opcode.SET_FLOW_TABLE_ROOT, {"table_id": table}),
        (Opcode.CREATE_FLOW_GROUP, {"table_id": table}), (Opcode.SET_FLOW_TABLE_ENTRY, {"table_id": table}),
    ):
        refuses(
            lambda opcode=opcode, fields=fields: flows.execute(opcode, table_type=kind, **fields),
            Status.BAD_PARAM, CommandSyndrome.FLOW_TABLE, f"table_type {kind}", "NIC_RX (0)",
        )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"reformat_en": 1}, "reformat_en is not supported"),
        ({"decap_en": 1}, "decap_en is not supported"),
        ({"sw_owner": 1}, "sw_owner is not supported"),
        ({"termination_table": 1}, "termination_table is not supported"),
        ({"level": MAX_LEVEL + 1}, f"level {MAX_LEVEL + 1}"),
        ({"log_size": MAX_LOG_SIZE + 1}, f"log_size {MAX_LOG_SIZE + 1}"),
        ({"table_miss_action": 2}, "table_miss_action 2"),
    ],
)
def test_contexts_of_tables(flows, fields, words):
    refuses(
        lambda: flows.execute(Opcode.CREATE_FLOW_TABLE, flow_table_context=fields),
        Status.BAD_PARAM, CommandSyndrome.FLOW_TABLE, words,
    )


def test_a_table_behind_another_has_a_higher_level(flows):
    low = flows.table(level=3)
    for level in (3, 4):
        refuses(
            lambda level=level: flows.table(level=level, miss=low), Status.BAD_PARAM, CommandSyndrome.FLOW_LEVEL,
            "table_miss_id", f"level 3, which must be above {level}",
        )
    refuses(lambda: flows.table(miss=99), Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_FLOW_TABLE, "flow table 0x63")
    table = flows.table(level=4)
    change = {"table_miss_action": 1, "table_miss_id": low}
    refuses(
        lambda: flows.execute(
            Opcode.MODIFY_FLOW_TABLE, table_id=table, modify_field_select=1, flow_table_context=change
        ),
        Status.BAD_PARAM, CommandSyndrome.FLOW_LEVEL, "table_miss_id",
    )


def test_no_other_vport(flows):
    for fields in ({"other_vport": 1}, {"vport_number": 3}):
        refuses(
            lambda fields=fields: flows.execute(Opcode.CREATE_FLOW_TABLE, **fields),
            Status.BAD_PARAM, CommandSyndrome.FLOW_TABLE, "there is no other vport",
        )


def test_tables_that_do_not_exist(flows):
    for opcode in (
        Opcode.QUERY_FLOW_TABLE, Opcode.MODIFY_FLOW_TABLE, Opcode.DESTROY_FLOW_TABLE, Opcode.SET_FLOW_TABLE_ROOT,
        Opcode.CREATE_FLOW_GROUP, Opcode.QUERY_FLOW_GROUP, Opcode.DESTROY_FLOW_GROUP, Opcode.SET_FLOW_TABLE_ENTRY,
        Opcode.QUERY_FLOW_TABLE_ENTRY, Opcode.DELETE_FLOW_TABLE_ENTRY,
    ):
        for number in (0, 7):
            refuses(
                lambda opcode=opcode, number=number: flows.execute(opcode, table_id=number),
                Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_FLOW_TABLE, f"flow table {number:#x}",
            )


def test_the_root(flows):
    one, other = flows.table(), flows.table()
    flows.root(one)
    refuses(
        lambda: flows.execute(Opcode.DESTROY_FLOW_TABLE, table_id=one), Status.RESOURCE_BUSY, CommandSyndrome.IN_USE,
        "is used by the root of NIC_RX",
    )
    flows.root(other)
    flows.execute(Opcode.DESTROY_FLOW_TABLE, table_id=one)
    flows.root(0)
    flows.execute(Opcode.DESTROY_FLOW_TABLE, table_id=other)
    refuses(
        lambda: flows.execute(Opcode.SET_FLOW_TABLE_ROOT, op_mod=2), Status.BAD_PARAM, CommandSyndrome.UNKNOWN_OP_MOD
    )
    refuses(
        lambda: flows.execute(Opcode.SET_FLOW_TABLE_ROOT, underlay_qpn=5, table_id=other),
        Status.BAD_PARAM, CommandSyndrome.FLOW_TABLE, "underlay_qpn 0x5",
    )


def test_all_tables_in_use(flows):
    room = flows.nic.control.flow_tables.table.mask
    for _ in range(room):
        flows.table(log=0)
    refuses(flows.table, Status.NO_RESOURCES, CommandSyndrome.TABLE_FULL, f"all {room} flow tables are in use")


@pytest.mark.parametrize(
    ("port", "words"),
    [(PortConfig(link_layer=LinkLayer.INFINIBAND), "is InfiniBand"), (PortConfig(wire="udp"), "wire is 'udp'")],
)
def test_without_ethernet_there_are_none(port, words):
    with verbs.open("soft1", port=port) as ctx:
        flows = Steering(ctx.provider.nic)  # type: ignore[attr-defined]
        refuses(flows.table, Status.BAD_SYS_STATE, CommandSyndrome.NO_ETHERNET, "a flow table needs", words)
        refuses(flows.counter, Status.BAD_SYS_STATE, CommandSyndrome.NO_ETHERNET, "a flow counter needs", words)
        assert CMD_HCA_CAP.get(capability(flows, CapClass.GENERAL), "nic_flow_table") == 0


def capability(flows: Steering, kind: CapClass) -> bytes:
    return flows.execute(Opcode.QUERY_HCA_CAP, op_mod=kind << 1 | 1, room=4112)[16:]


def test_capabilities_are_the_limits(flows):
    assert CMD_HCA_CAP.get(capability(flows, CapClass.GENERAL), "nic_flow_table") == 1
    cap = flow.FLOW_TABLE_NIC_CAP.unpack(capability(flows, CapClass.FLOW_TABLE))
    assert not any(cap["flow_table_properties_nic_transmit"].pop("ft_field_support").values())
    assert not any(cap["flow_table_properties_nic_transmit"].values())
    receive = cap["flow_table_properties_nic_receive"]
    assert (receive["ft_support"], receive["flow_counter"], receive["sw_owner"]) == (1, 1, 0)
    flows.table(level=receive["max_ft_level"], log=receive["log_max_ft_size"])
    supported = receive["ft_field_support"]
    assert [name for name, bit in supported.items() if not bit] == ["outer_vxlan_vni"]


# --- groups


def test_a_group_is_what_it_was_created_as(flows):
    table = flows.table()
    criteria = match({"udp_dport": 0xFF00, "src_ipv4_src_ipv6": b"\xff" * 16}, {"outer_second_vid": 0xFFF})
    group = flows.group(table, 3, 9, criteria)
    out = flows.execute(Opcode.QUERY_FLOW_GROUP, table_id=table, group_id=group)
    get = flow.QUERY_FLOW_GROUP_OUT.get
    assert (get(out, "start_flow_index"), get(out, "end_flow_index"), get(out, "match_criteria_enable")) == (3, 9, 3)
    assert out[64 : 64 + 512] == criteria


def test_groups_do_not_overlap(flows):
    table = flows.table(log=5)
    group = flows.group(table, 10, 20)
    for start, end in ((0, 10), (20, 31), (12, 13), (0, 31), (10, 20)):
        refuses(
            lambda start=start, end=end: flows.group(table, start, end), Status.BAD_INDEX, CommandSyndrome.FLOW_GROUP,
            f"start_flow_index {start}, end_flow_index {end}", f"group {group:#x}", "10 to 20",
        )
    for start, end in ((0, 32), (32, 32), (5, 4)):
        refuses(
            lambda start=start, end=end: flows.group(table, start, end), Status.BAD_INDEX, CommandSyndrome.FLOW_GROUP,
            "indices 0 to 31",
        )
    flows.group(table, 0, 9)
    flows.group(table, 21, 31)
    assert len({*flows.nic.control.flow_tables.known[table].groups}) == 3


UNMATCHABLE = [
    *(("outer_headers", name) for name in ("l4_type", "ipv4_ihl")),
    *(("misc_parameters", name) for name in flow.FTE_MATCH_SET_MISC.fields if not name.startswith("outer_second")),
    ("inner_headers", "udp_dport"), ("misc_parameters_2", "metadata_reg_c_0"), ("misc_parameters_3", "icmp_type"),
]


@pytest.mark.parametrize(("part", "name"), UNMATCHABLE)
def test_what_cannot_be_matched_is_refused_by_name(flows, part, name):
    table = flows.table()
    criteria = bytes(FTE_MATCH_PARAM.pack(**{part: {name: 1}}))
    refuses(
        lambda: flows.group(table, 0, 1, criteria), Status.BAD_PARAM, CommandSyndrome.FLOW_MATCH, f"{part}.{name}",
        "ft_field_support",
    )


def test_what_a_group_cannot_be(flows):
    table = flows.table()
    reserved = bytearray(512)
    reserved[0x19] = 1
    raw = bytearray(flow.CREATE_FLOW_GROUP_IN.pack(opcode=Opcode.CREATE_FLOW_GROUP, table_id=table))
    raw[64 : 64 + 512] = reserved
    out, words = flows.nic.execute(bytes(raw), 16)
    assert out[0] == Status.BAD_PARAM
    assert "bit 0xcf of fte_match_param, which is reserved" in words
    for bit in (4, 8, 0x10, 0x20, 0x40, 0x80):
        refuses(
            lambda bit=bit: flows.group(table, 0, 1, enable=bit | OUTER), Status.BAD_PARAM, CommandSyndrome.FLOW_MATCH,
            f"match_criteria_enable {bit | 1:#x}",
        )
    refuses(
        lambda: flows.group(table, 0, 1, match(PORT), MISC), Status.BAD_PARAM, CommandSyndrome.FLOW_MATCH,
        "outer_headers.udp_dport has a mask", "lacks OUTER_HEADERS (1)",
    )
    for name in ("group_type", "match_definer_id", "source_eswitch_owner_vhca_id_valid"):
        refuses(
            lambda name=name: flows.execute(Opcode.CREATE_FLOW_GROUP, table_id=table, **{name: 1}),
            Status.BAD_PARAM, CommandSyndrome.FLOW_GROUP, f"{name} 1 is not supported",
        )
    for opcode in (Opcode.QUERY_FLOW_GROUP, Opcode.DESTROY_FLOW_GROUP):
        refuses(
            lambda opcode=opcode: flows.execute(opcode, table_id=table, group_id=5),
            Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_FLOW_GROUP, f"flow table {table:#x} has no group 0x5",
        )


def test_masks_are_limited(flows):
    table = flows.table()
    masks = [match({"udp_dport": n}) for n in range(MAX_MASKS + 1)]
    groups = [flows.group(table, n, n, mask) for n, mask in enumerate(masks[:-1])]
    refuses(
        lambda: flows.group(table, 100, 100, masks[-1]), Status.NO_RESOURCES, CommandSyndrome.FLOW_MATCH,
        f"{MAX_MASKS} different masks",
    )
    flows.group(table, 101, 101, masks[0])
    flows.execute(Opcode.DESTROY_FLOW_GROUP, table_id=table, group_id=groups[7])
    flows.group(table, 100, 100, masks[-1])


def test_users_before_what_they_use(flows):
    table = flows.table()
    group = flows.group(table, 0, 9)
    refuses(
        lambda: flows.execute(Opcode.DESTROY_FLOW_TABLE, table_id=table), Status.RESOURCE_BUSY, CommandSyndrome.IN_USE,
        f"flow table {table:#x} has 1 group",
    )
    behind, counter = flows.table(level=1), flows.counter()
    flows.set(table, group, 4, to=(TABLE, behind), counter=counter)
    entry = f"entry 4 of flow table {table:#x}"
    for opcode, fields, words in (
        (Opcode.DESTROY_FLOW_GROUP, {"table_id": table, "group_id": group}, "has 1 entries"),
        (Opcode.DESTROY_FLOW_TABLE, {"table_id": behind}, f"is used by {entry}"),
        (Opcode.DEALLOC_FLOW_COUNTER, {"flow_counter_id": counter}, f"is used by {entry}"),
    ):
        refuses(
            lambda opcode=opcode, fields=fields: flows.execute(opcode, **fields),
            Status.RESOURCE_BUSY, CommandSyndrome.IN_USE, words,
        )
    flows.delete(table, 4)
    flows.execute(Opcode.DEALLOC_FLOW_COUNTER, flow_counter_id=counter)
    flows.execute(Opcode.DESTROY_FLOW_GROUP, table_id=table, group_id=group)
    flows.execute(Opcode.DESTROY_FLOW_TABLE, table_id=behind)
    flows.execute(Opcode.DESTROY_FLOW_TABLE, table_id=table)


# --- entries


def query(flows: Steering, table: int, index: int) -> tuple[dict, bytes]:
    """(context, destinations and counters)."""
    out = flows.execute(Opcode.QUERY_FLOW_TABLE_ENTRY, table_id=table, flow_index=index, room=832 + 16)
    context = flow.QUERY_FLOW_TABLE_ENTRY_OUT.get(out, "flow_context")
    context["match_value"] = bytes(FTE_MATCH_PARAM.pack(**context["match_value"]))
    return {name: value for name, value in context.items() if value and name != "push_vlan"}, out[832:]


def test_an_entry_is_what_it_was_set_to(flows):
    table, behind, counter = flows.table(), flows.table(level=9), flows.counter()
    group = flows.group(table, 0, 9, match(PORT))
    value = match({"udp_dport": 4242})
    flows.set(table, group, 3, value, to=(TABLE, behind), counter=counter, tag=0xABCDEF)
    context, items = query(flows, table, 3)
    expected = {
        "group_id": group, "flow_tag": 0xABCDEF, "action": 12, "destination_list_size": 1, "flow_counter_list_size": 1,
        "match_value": value,
    }
    assert {name: context[name] for name in expected} == expected
    assert items == bytes([1, *behind.to_bytes(3, "big"), 0, 0, 0, 0]) + counter.to_bytes(4, "big") + bytes(4)


def test_parts_of_an_entry_are_changed(flows):
    table, one, two = flows.table(), flows.table(level=1), flows.table(level=2)
    counter, group = flows.counter(), flows.group(table, 0, 9)
    flows.set(table, group, 0, to=(TABLE, one), tag=5)

    def change(mask: int, **fields) -> None:
        flows.set(table, group, 0, op_mod=1, modify_enable_mask=mask, **fields)

    change(EntryModify.FLOW_TAG, tag=6)
    assert query(flows, table, 0)[0]["flow_tag"] == 6
    change(EntryModify.DEST_LIST, to=(TABLE, two), tag=7)
    flows.execute(Opcode.DESTROY_FLOW_TABLE, table_id=one)
    context, items = query(flows, table, 0)
    assert (context["flow_tag"], context["action"], items[3]) == (6, 4, two)
    change(EntryModify.ACTION | EntryModify.COUNTERS, action=FlowAction.FWD_DEST | FlowAction.COUNT, counter=counter)
    assert query(flows, table, 0)[0]["action"] == 12
    before = query(flows, table, 0)
    refuses(
        lambda: change(EntryModify.ACTION, action=FlowAction.DROP), Status.BAD_PARAM, CommandSyndrome.FLOW_ACTION,
        "flow_counter_list_size 1: action 0x2, which lacks COUNT (8), takes 0",
    )
    refuses(lambda: change(0x10), Status.BAD_PARAM, CommandSyndrome.FLOW_ACTION, "modify_enable_mask 0x10")
    assert query(flows, table, 0) == before
    change(EntryModify.ACTION | EntryModify.COUNTERS | EntryModify.DEST_LIST, action=FlowAction.DROP)
    flows.execute(Opcode.DESTROY_FLOW_TABLE, table_id=two)
    flows.execute(Opcode.DEALLOC_FLOW_COUNTER, flow_counter_id=counter)


def test_places_of_entries(flows):
    table = flows.table()
    group = flows.group(table, 4, 6, match(PORT))
    for index in (3, 7, 1 << 31):
        refuses(
            lambda index=index: flows.set(table, group, index), Status.BAD_INDEX, CommandSyndrome.FLOW_INDEX,
            f"flow_index {index}", "4 to 6",
        )
    flows.set(table, group, 5)
    refuses(
        lambda: flows.set(table, group, 5), Status.BAD_INDEX, CommandSyndrome.FLOW_INDEX, "has an entry already",
        "op_mod 1",
    )
    refuses(
        lambda: flows.set(table, group + 1, 4), Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_FLOW_GROUP,
        f"no group {group + 1:#x}",
    )
    refuses(
        lambda: flows.set(table, group, 4, op_mod=2), Status.BAD_PARAM, CommandSyndrome.UNKNOWN_OP_MOD, "op_mod 2",
        "SET_FLOW_TABLE_ENTRY",
    )
    for call in (
        lambda: flows.set(table, group, 4, op_mod=1), lambda: flows.delete(table, 4), lambda: query(flows, table, 4),
    ):
        refuses(call, Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_FLOW_ENTRY, f"flow table {table:#x} has no entry 4")


def test_values_outside_the_mask(flows):
    table = flows.table()
    group = flows.group(table, 0, 9, match({"udp_dport": 0xFF00}))
    for value, name in ((match({"udp_dport": 0x1201}), "udp_dport"), (match({"first_vid": 1}), "first_vid")):
        refuses(
            lambda value=value: flows.set(table, group, 0, value), Status.BAD_PARAM, CommandSyndrome.FLOW_MATCH,
            f"match_value: outer_headers.{name} has bits outside the mask",
        )


@pytest.mark.parametrize("bit", [1 << n for n in range(16) if 1 << n not in (2, 4, 8)])
def test_actions_that_there_are_not(flows, bit):
    table = flows.table()
    group = flows.group(table, 0, 9)
    name = FlowAction(bit).name if bit in list(FlowAction) else ""
    refuses(
        lambda: flows.set(table, group, 0, action=bit | FlowAction.DROP), Status.BAD_PARAM,
        CommandSyndrome.FLOW_ACTION, name or f"{bit}", "only DROP (2), FWD_DEST (4), COUNT (8)",
    )


def test_actions_that_make_no_sense(flows):
    table, behind, counter = flows.table(), flows.table(level=1), flows.counter()
    group, to = flows.group(table, 0, 9), (TABLE, behind)
    for fields, words in (
        ({"action": 0}, "exactly one of DROP (2) and FWD_DEST (4)"),
        ({"action": FlowAction.COUNT, "counter": counter}, "exactly one of"),
        ({"action": FlowAction.DROP | FlowAction.FWD_DEST, "to": to}, "exactly one of"),
        ({"action": FlowAction.FWD_DEST}, "destination_list_size 0: action 0x4, which has FWD_DEST (4), takes 1"),
        ({"action": FlowAction.DROP, "to": to}, "destination_list_size 1: action 0x2, which lacks FWD_DEST"),
        ({"action": FlowAction.DROP | FlowAction.COUNT}, "flow_counter_list_size 0"),
        ({"action": FlowAction.DROP, "counter": counter}, "flow_counter_list_size 1"),
    ):
        refuses(
            lambda fields=fields: flows.set(table, group, 0, **fields), Status.BAD_PARAM, CommandSyndrome.FLOW_ACTION,
            words,
        )
    lists = {"destination_list_size": 2, "action": FlowAction.FWD_DEST}
    mailbox = {"table_id": table, "flow_context": {"group_id": group, **lists}}
    refuses(
        lambda: flows.execute(Opcode.SET_FLOW_TABLE_ENTRY, bytes(16), **mailbox), Status.BAD_PARAM,
        CommandSyndrome.FLOW_ACTION, "destination_list_size 2",
    )
    refuses(
        lambda: flows.execute(Opcode.SET_FLOW_TABLE_ENTRY, bytes(15), **mailbox), Status.BAD_INPUT_LEN,
        CommandSyndrome.SHORT_INPUT, "takes 848 bytes and has 847",
    )
    assert not flows.nic.control.flow_tables.known[table].groups[group].entries


def test_destinations(flows):
    table, low = flows.table(level=5), flows.table(level=5)
    group = flows.group(table, 0, 9)
    for kind in (0, 6, 8, 10, 77):
        refuses(
            lambda kind=kind: flows.set(table, group, 0, to=(kind, 1)), Status.BAD_PARAM,
            CommandSyndrome.FLOW_DESTINATION, f"destination_type {kind}", "FLOW_TABLE (1) or a TIR (2)",
        )
    refuses(
        lambda: flows.set(table, group, 0, to=(DestinationType.FLOW_TABLE, 99)), Status.BAD_RESOURCE,
        CommandSyndrome.NO_SUCH_FLOW_TABLE, "0x63",
    )
    refuses(
        lambda: flows.set(table, group, 0, to=(TIR, 99)), Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_TIR,
        "there is no TIR 0x63",
    )
    for target in (low, table):
        refuses(
            lambda target=target: flows.set(table, group, 0, to=(TABLE, target)), Status.BAD_PARAM,
            CommandSyndrome.FLOW_LEVEL, "destination_id", "level 5, which must be above 5",
        )
    flows.set(table, group, 0, to=(TABLE, low), ignore_flow_level=1)
    refuses(
        lambda: flows.set(table, group, 1, context={"extended_destination": 1}), Status.BAD_PARAM,
        CommandSyndrome.FLOW_DESTINATION, "extended_destination",
    )


# --- counters


def test_counters(flows):
    one = flows.counter()
    assert flows.counts(one) == (0, 0)
    first = flows.counter(flow_counter_bulk=2)
    next_one = flows.counter()
    assert next_one not in range(first, first + 256)
    out = flows.execute(
        Opcode.QUERY_FLOW_COUNTER, flow_counter_id=first, num_of_counters=256, room=16 + 256 * 16
    )
    assert out == bytes(16 + 256 * 16)
    for number, count in ((first + 256 + 5, 1), (first, 300), (0, 1), (1 << 31, 1)):
        refuses(
            lambda number=number, count=count: flows.counts(number, num_of_counters=count), Status.BAD_RESOURCE,
            CommandSyndrome.NO_SUCH_FLOW_COUNTER,
        )
    refuses(
        lambda: flows.execute(Opcode.DEALLOC_FLOW_COUNTER, flow_counter_id=first + 1), Status.BAD_RESOURCE,
        CommandSyndrome.NO_SUCH_FLOW_COUNTER, "inside a bulk",
    )
    flows.execute(Opcode.DEALLOC_FLOW_COUNTER, flow_counter_id=first)
    refuses(lambda: flows.counts(first), Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_FLOW_COUNTER)
    for fields in ({"flow_counter_bulk": 3}, {"flow_counter_bulk_log_size": 1}):
        refuses(
            lambda fields=fields: flows.counter(**fields), Status.BAD_PARAM, CommandSyndrome.FLOW_COUNTER,
            "may have one bit",
        )
    bulks = [flows.counter(flow_counter_bulk=0x80) for _ in range(3)]
    assert len({bulk // 16384 for bulk in bulks}) == 3
    refuses(
        lambda: flows.counter(flow_counter_bulk=0x80), Status.NO_RESOURCES, CommandSyndrome.TABLE_FULL,
        "no 16384 free flow counters",
    )


# --- as objects of DEVX


def test_objects_of_devx(ctx):
    """Objects name each other, and close in any order that the device takes."""
    devx = ctx.devx
    behind = devx.create(Opcode.CREATE_FLOW_TABLE, flow_table_context={"level": 1, "log_size": 4})
    table = devx.create(
        Opcode.CREATE_FLOW_TABLE,
        flow_table_context={"log_size": 4, "table_miss_action": 1, "table_miss_id": behind},
    )
    group = devx.create(Opcode.CREATE_FLOW_GROUP, table_id=table, end_flow_index=7)
    counter = devx.create(Opcode.ALLOC_FLOW_COUNTER)
    entry = devx.create(
        Opcode.SET_FLOW_TABLE_ENTRY, table_id=table, flow_index=6,
        flow_context={"group_id": group, "action": FlowAction.DROP | FlowAction.COUNT, "flow_counter_list_size": 1},
        list=counter.number.to_bytes(4, "big") + bytes(4), uses=[counter],
    )
    assert entry.number == 6
    assert entry.query()["flow_context"]["action"] == 10
    assert group.query()["end_flow_index"] == 7
    assert counter.query()["flow_statistics"] == {"packets": 0, "octets": 0}
    assert table.query()["flow_table_context"]["table_miss_id"] == behind.number
    entry.modify(Opcode.SET_FLOW_TABLE_ENTRY, op_mod=1, modify_enable_mask=2, flow_context={"flow_tag": 9})
    assert entry.query()["flow_context"]["flow_tag"] == 9
    for closed in (entry, group, table, counter, behind):
        closed.close()


def test_closing_frees_what_refers_forward(ctx):
    """A table that an earlier object refers to cannot go first. Another open of the NIC gets nothing of it."""
    provider = open_device("soft0")
    create = flow.CREATE_FLOW_TABLE_IN.pack(opcode=Opcode.CREATE_FLOW_TABLE)
    table, _ = provider.devx_obj_create(bytes(create), 16)
    flow.CREATE_FLOW_TABLE_IN.update(create, flow_table_context={"level": 3})
    _, out = provider.devx_obj_create(bytes(create), 16)
    miss = {"table_miss_action": 1, "table_miss_id": flow.CREATE_FLOW_TABLE_OUT.get(out, "table_id")}
    number = miss["table_miss_id"] - 1
    change = flow.MODIFY_FLOW_TABLE_IN.pack(
        opcode=Opcode.MODIFY_FLOW_TABLE, table_id=number, modify_field_select=1, flow_table_context=miss
    )
    provider.devx_obj_modify(table, bytes(change), 16)
    provider.close()
    assert not ctx.provider.nic.control.flow_tables.known
