"""mlx5 flow steering: flow tables, groups, entries and counters, and what they match on.

Field names, bit offsets and widths are those of the PRM (mlx5_ifc).
"""

from enum import IntEnum, IntFlag

from .layout import BitStruct, answer, request


class FlowTableType(IntEnum):
    """table_type of the mailboxes. The `ft_type` of uverbs has other numbers."""

    NIC_RX          = 0
    NIC_TX          = 1
    ESW_EGRESS_ACL  = 2
    ESW_INGRESS_ACL = 3
    FDB             = 4
    SNIFFER_RX      = 5
    SNIFFER_TX      = 6
    RDMA_RX         = 7
    RDMA_TX         = 8


class MissAction(IntEnum):
    """flow_table_context.table_miss_action: where a packet goes if it matches no entry."""

    DEFAULT       = 0
    FORWARD       = 1
    SWITCH_DOMAIN = 2


class TableModify(IntFlag):
    """modify_flow_table_in.modify_field_select."""

    MISS_TABLE_ID       = 1 << 0
    LAG_NEXT_TABLE_ID   = 1 << 15


class RootChange(IntEnum):
    """op_mod of SET_FLOW_TABLE_ROOT."""

    SET   = 0
    RESET = 1


class GroupType(IntEnum):
    """create_flow_group_in.group_type."""

    TCAM_SUBTABLE = 0
    HASH_SPLIT    = 1


class MatchCriteria(IntFlag):
    """match_criteria_enable: which parts of fte_match_param a group compares."""

    OUTER_HEADERS     = 1 << 0
    MISC_PARAMETERS   = 1 << 1
    INNER_HEADERS     = 1 << 2
    MISC_PARAMETERS_2 = 1 << 3
    MISC_PARAMETERS_3 = 1 << 4
    MISC_PARAMETERS_4 = 1 << 5
    MISC_PARAMETERS_5 = 1 << 6


class FlowAction(IntFlag):
    """flow_context.action."""

    ALLOW           = 0x0001
    DROP            = 0x0002
    FWD_DEST        = 0x0004
    COUNT           = 0x0008
    PACKET_REFORMAT = 0x0010
    DECAP           = 0x0020
    MOD_HDR         = 0x0040
    VLAN_POP        = 0x0080
    VLAN_PUSH       = 0x0100
    VLAN_POP_2      = 0x0400
    VLAN_PUSH_2     = 0x0800
    CRYPTO_DECRYPT  = 0x1000
    CRYPTO_ENCRYPT  = 0x2000
    EXECUTE_ASO     = 0x4000


class EntryChange(IntEnum):
    """op_mod of SET_FLOW_TABLE_ENTRY."""

    CREATE = 0
    MODIFY = 1


class EntryModify(IntFlag):
    """set_fte_in.modify_enable_mask."""

    ACTION    = 1 << 0
    FLOW_TAG  = 1 << 1
    DEST_LIST = 1 << 2
    COUNTERS  = 1 << 3


class DestinationType(IntEnum):
    """dest_format.destination_type."""

    VPORT        = 0x0
    FLOW_TABLE   = 0x1
    TIR          = 0x2
    FLOW_SAMPLER = 0x6
    UPLINK       = 0x8
    TABLE_TYPE   = 0xA


COUNTERS_PER_BULK_BIT = 128  # alloc_flow_counter_in.flow_counter_bulk: 1 is 128 counters, 2 is 256, 4 is 512

FTE_MATCH_SET_LYR_2_4 = BitStruct("fte_match_set_lyr_2_4", 64, """
    smac_47_16                  0x000     32
    smac_15_0                   0x020     16
    ethertype                   0x030     16
    dmac_47_16                  0x040     32
    dmac_15_0                   0x060     16
    first_prio                  0x070      3
    first_cfi                   0x073      1
    first_vid                   0x074     12
    ip_protocol                 0x080      8
    ip_dscp                     0x088      6
    ip_ecn                      0x08e      2
    cvlan_tag                   0x090      1
    svlan_tag                   0x091      1
    frag                        0x092      1
    ip_version                  0x093      4
    tcp_flags                   0x097      9
    tcp_sport                   0x0a0     16
    tcp_dport                   0x0b0     16
    l4_type                     0x0c0      2
    ipv4_ihl                    0x0d0      4
    ttl_hoplimit                0x0d8      8
    udp_sport                   0x0e0     16
    udp_dport                   0x0f0     16
    src_ipv4_src_ipv6           0x100    128
    dst_ipv4_dst_ipv6           0x180    128
""")

FTE_MATCH_SET_MISC = BitStruct("fte_match_set_misc", 64, """
    source_vhca_port            0x004      4
    source_sqn                  0x008     24
    source_port                 0x030     16
    outer_second_prio           0x040      3
    outer_second_cfi            0x043      1
    outer_second_vid            0x044     12
    inner_second_prio           0x050      3
    inner_second_cfi            0x053      1
    inner_second_vid            0x054     12
    outer_second_cvlan_tag      0x060      1
    inner_second_cvlan_tag      0x061      1
    outer_second_svlan_tag      0x062      1
    inner_second_svlan_tag      0x063      1
    gre_protocol                0x070     16
    gre_key                     0x080     32
    vxlan_vni                   0x0a0     24
    bth_opcode                  0x0b8      8
    geneve_vni                  0x0c0     24
    outer_ipv6_flow_label       0x0ec     20
    geneve_protocol_type        0x130     16
    bth_dst_qp                  0x148     24
    inner_esp_spi               0x160     32
    outer_esp_spi               0x180     32
""")

FTE_MATCH_SET_MISC2 = BitStruct("fte_match_set_misc2", 64, """
    metadata_reg_c_7            0x080     32
    metadata_reg_c_6            0x0a0     32
    metadata_reg_c_5            0x0c0     32
    metadata_reg_c_4            0x0e0     32
    metadata_reg_c_3            0x100     32
    metadata_reg_c_2            0x120     32
    metadata_reg_c_1            0x140     32
    metadata_reg_c_0            0x160     32
    metadata_reg_a              0x180     32
""")

FTE_MATCH_SET_MISC3 = BitStruct("fte_match_set_misc3", 64, """
    icmp_header_data            0x0c0     32
    icmp_type                   0x100      8
    icmp_code                   0x108      8
    icmpv6_type                 0x110      8
    icmpv6_code                 0x118      8
""")

FTE_MATCH_PARAM = BitStruct("fte_match_param", 512, """
    outer_headers               0x000    512  LYR_2_4
    misc_parameters             0x200    512  MISC
    inner_headers               0x400    512  LYR_2_4
    misc_parameters_2           0x600    512  MISC2
    misc_parameters_3           0x800    512  MISC3
    misc_parameters_4           0xa00    512
    misc_parameters_5           0xc00    512
""", LYR_2_4=FTE_MATCH_SET_LYR_2_4, MISC=FTE_MATCH_SET_MISC, MISC2=FTE_MATCH_SET_MISC2, MISC3=FTE_MATCH_SET_MISC3)

FLOW_TABLE_CONTEXT = BitStruct("flow_table_context", 40, """
    reformat_en                 0x000      1
    decap_en                    0x001      1
    sw_owner                    0x002      1
    termination_table           0x003      1
    table_miss_action           0x004      4
    level                       0x008      8
    log_size                    0x018      8
    table_miss_id               0x028     24
    lag_master_next_table_id    0x048     24
    sw_owner_icm_root_1         0x0c0     64
    sw_owner_icm_root_0         0x100     64
""")

VLAN = BitStruct("vlan", 4, """
    ethtype                     0x000     16
    prio                        0x010      3
    cfi                         0x013      1
    vid                         0x014     12
""")

# Destinations follow it, then counters: `DEST_FORMAT` and `FLOW_COUNTER_LIST`.
FLOW_CONTEXT = BitStruct("flow_context", 768, """
    push_vlan                   0x000     32  VLAN
    group_id                    0x020     32
    flow_tag                    0x048     24
    action                      0x070     16
    extended_destination        0x080      1
    flow_source                 0x082      2
    encrypt_decrypt_type        0x084      4
    destination_list_size       0x088     24
    flow_counter_list_size      0x0a8     24
    packet_reformat_id          0x0c0     32
    modify_header_id            0x0e0     32
    push_vlan_2                 0x100     32  VLAN
    encrypt_decrypt_obj_id      0x120     32
    match_value                 0x200   4096  FTE_MATCH_PARAM
    execute_aso                 0x1200   256
""", VLAN=VLAN, FTE_MATCH_PARAM=FTE_MATCH_PARAM)

DEST_FORMAT = BitStruct("dest_format", 8, """
    destination_type            0x000      8
    destination_id              0x008     24
    vhca_id_valid               0x020      1
    packet_reformat             0x021      1
    destination_table_type      0x028      8
    vhca_id                     0x030     16
""")

FLOW_COUNTER_LIST = BitStruct("flow_counter_list", 8, """
    flow_counter_id             0x000     32
""")

TRAFFIC_COUNTER = BitStruct("traffic_counter", 16, """
    packets                     0x000     64
    octets                      0x040     64
""")

FLOW_TABLE_FIELDS_SUPPORTED = BitStruct("flow_table_fields_supported", 16, """
    outer_dmac                  0x000      1
    outer_smac                  0x001      1
    outer_ether_type            0x002      1
    outer_ip_version            0x003      1
    outer_first_prio            0x004      1
    outer_first_cfi             0x005      1
    outer_first_vid             0x006      1
    outer_ipv4_ttl              0x007      1
    outer_second_prio           0x008      1
    outer_second_cfi            0x009      1
    outer_second_vid            0x00a      1
    outer_sip                   0x00c      1
    outer_dip                   0x00d      1
    outer_frag                  0x00e      1
    outer_ip_protocol           0x00f      1
    outer_ip_ecn                0x010      1
    outer_ip_dscp               0x011      1
    outer_udp_sport             0x012      1
    outer_udp_dport             0x013      1
    outer_tcp_sport             0x014      1
    outer_tcp_dport             0x015      1
    outer_tcp_flags             0x016      1
    outer_vxlan_vni             0x019      1
""")

FLOW_TABLE_PROP_LAYOUT = BitStruct("flow_table_prop_layout", 64, """
    ft_support                  0x000      1
    flow_counter                0x002      1
    modify_root                 0x004      1
    sw_owner                    0x011      1
    ignore_flow_level           0x015      1
    log_max_ft_size             0x022      6
    max_ft_level                0x038      8
    log_max_ft_num              0x078      8
    log_max_flow_counter        0x090      8
    log_max_destination         0x098      8
    log_max_flow                0x0b8      8
    ft_field_support            0x100    128  FIELDS
""", FIELDS=FLOW_TABLE_FIELDS_SUPPORTED)

# The beginning of the capabilities of class FLOW_TABLE, up to the properties of NIC_TX tables.
FLOW_TABLE_NIC_CAP = BitStruct("flow_table_nic_cap", 320, """
    flow_table_properties_nic_receive   0x200    512  PROPERTIES
    flow_table_properties_nic_transmit  0x800    512  PROPERTIES
""", PROPERTIES=FLOW_TABLE_PROP_LAYOUT)

SET_FLOW_TABLE_ROOT_IN = request("set_flow_table_root_in", 64, """
    other_vport                 0x040      1
    vport_number                0x050     16
    table_type                  0x080      8
    table_id                    0x0a8     24
    underlay_qpn                0x0c8     24
""")

CREATE_FLOW_TABLE_IN = request("create_flow_table_in", 64, """
    other_vport                 0x040      1
    vport_number                0x050     16
    table_type                  0x080      8
    flow_table_context          0x0c0    320  CONTEXT
""", CONTEXT=FLOW_TABLE_CONTEXT)

CREATE_FLOW_TABLE_OUT = answer("create_flow_table_out", 16, """
    icm_address_63_40           0x008     24
    icm_address_39_32           0x040      8
    table_id                    0x048     24
    icm_address_31_0            0x060     32
""")

MODIFY_FLOW_TABLE_IN = request("modify_flow_table_in", 64, """
    other_vport                 0x040      1
    vport_number                0x050     16
    modify_field_select         0x070     16
    table_type                  0x080      8
    table_id                    0x0a8     24
    flow_table_context          0x0c0    320  CONTEXT
""", CONTEXT=FLOW_TABLE_CONTEXT)

DESTROY_FLOW_TABLE_IN = request("destroy_flow_table_in", 64, """
    other_vport                 0x040      1
    vport_number                0x050     16
    table_type                  0x080      8
    table_id                    0x0a8     24
""")

QUERY_FLOW_TABLE_IN = request("query_flow_table_in", 64, """
    table_type                  0x080      8
    table_id                    0x0a8     24
""")

QUERY_FLOW_TABLE_OUT = answer("query_flow_table_out", 64, """
    flow_table_context          0x0c0    320  CONTEXT
""", CONTEXT=FLOW_TABLE_CONTEXT)

CREATE_FLOW_GROUP_IN = request("create_flow_group_in", 1024, """
    other_vport                         0x040      1
    vport_number                        0x050     16
    table_type                          0x080      8
    group_type                          0x08c      4
    table_id                            0x0a8     24
    source_eswitch_owner_vhca_id_valid  0x0c0      1
    start_flow_index                    0x0e0     32
    end_flow_index                      0x120     32
    match_definer_id                    0x150     16
    match_criteria_enable               0x1f8      8
    match_criteria                      0x200   4096  FTE_MATCH_PARAM
""", FTE_MATCH_PARAM=FTE_MATCH_PARAM)

CREATE_FLOW_GROUP_OUT = answer("create_flow_group_out", 16, """
    group_id                    0x048     24
""")

DESTROY_FLOW_GROUP_IN = request("destroy_flow_group_in", 64, """
    other_vport                 0x040      1
    vport_number                0x050     16
    table_type                  0x080      8
    table_id                    0x0a8     24
    group_id                    0x0c0     32
""")

QUERY_FLOW_GROUP_IN = request("query_flow_group_in", 64, """
    table_type                  0x080      8
    table_id                    0x0a8     24
    group_id                    0x0c0     32
""")

QUERY_FLOW_GROUP_OUT = answer("query_flow_group_out", 1024, """
    start_flow_index            0x0e0     32
    end_flow_index              0x120     32
    match_criteria_enable       0x1f8      8
    match_criteria              0x200   4096  FTE_MATCH_PARAM
""", FTE_MATCH_PARAM=FTE_MATCH_PARAM)

# The lists of destinations and counters follow the context, here and in the answer to a query.
SET_FLOW_TABLE_ENTRY_IN = request("set_fte_in", 832, """
    other_vport                 0x040      1
    vport_number                0x050     16
    table_type                  0x080      8
    table_id                    0x0a8     24
    ignore_flow_level           0x0c0      1
    modify_enable_mask          0x0d8      8
    flow_index                  0x100     32
    flow_context                0x200   6144  CONTEXT
    list                        0x1a00     *
""", CONTEXT=FLOW_CONTEXT)

QUERY_FLOW_TABLE_ENTRY_IN = request("query_fte_in", 64, """
    table_type                  0x080      8
    table_id                    0x0a8     24
    flow_index                  0x100     32
""")

QUERY_FLOW_TABLE_ENTRY_OUT = answer("query_fte_out", 832, """
    flow_context                0x200   6144  CONTEXT
    list                        0x1a00     *
""", CONTEXT=FLOW_CONTEXT)

DELETE_FLOW_TABLE_ENTRY_IN = request("delete_fte_in", 64, """
    other_vport                 0x040      1
    vport_number                0x050     16
    table_type                  0x080      8
    table_id                    0x0a8     24
    flow_index                  0x100     32
""")

ALLOC_FLOW_COUNTER_IN = request("alloc_flow_counter_in", 16, """
    flow_counter_bulk_log_size  0x073      5
    flow_counter_bulk           0x078      8
""")

ALLOC_FLOW_COUNTER_OUT = answer("alloc_flow_counter_out", 16, """
    flow_counter_id             0x040     32
""")

DEALLOC_FLOW_COUNTER_IN = request("dealloc_flow_counter_in", 16, """
    flow_counter_id             0x040     32
""")

QUERY_FLOW_COUNTER_IN = request("query_flow_counter_in", 32, """
    clear                       0x0c0      1
    num_of_counters             0x0d0     16
    flow_counter_id             0x0e0     32
""")

# The statistics of more counters follow.
QUERY_FLOW_COUNTER_OUT = answer("query_flow_counter_out", 32, """
    flow_statistics             0x080    128  TRAFFIC_COUNTER
""", TRAFFIC_COUNTER=TRAFFIC_COUNTER)
