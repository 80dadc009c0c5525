"""mlx5 contexts: the device's view of QPs, CQs and receive memory pools, and its capabilities.

Field names, bit offsets and widths are those of the PRM (mlx5_ifc). The contexts of Ethernet queues are in
`ethernet_queues`.
"""

from .layout import BitStruct

ADS = BitStruct("ads", 44, """
    fl                          0x000      1
    free_ar                     0x001      1
    pkey_index                  0x010     16
    grh                         0x028      1
    mlid                        0x029      7
    rlid                        0x030     16
    ack_timeout                 0x040      5
    src_addr_index              0x048      8
    stat_rate                   0x054      4
    hop_limit                   0x058      8
    tclass                      0x064      8
    flow_label                  0x06c     20
    rgid_rip                    0x080    128
    f_dscp                      0x104      1
    f_ecn                       0x105      1
    f_eth_prio                  0x107      1
    ecn                         0x108      2
    dscp                        0x10a      6
    udp_sport                   0x110     16
    dei_cfi                     0x120      1
    eth_prio                    0x121      3
    sl                          0x124      4
    vhca_port_num               0x128      8
    rmac_47_32                  0x130     16
    rmac_31_0                   0x140     32
""")

QPC = BitStruct("qpc", 232, """
    state                       0x000      4
    lag_tx_port_affinity        0x004      4
    st                          0x008      8
    isolate_vl_tc               0x012      1
    pm_state                    0x013      2
    offload_type                0x018      4
    end_padding_mode            0x01c      2
    pd                          0x028     24
    mtu                         0x040      3
    log_msg_max                 0x043      5
    log_rq_size                 0x049      4
    log_rq_stride               0x04d      3
    no_sq                       0x050      1
    log_sq_size                 0x051      4
    ts_format                   0x058      2
    rlky                        0x05b      1
    counter_set_id              0x060      8
    uar_page                    0x068     24
    send_dbr_mode               0x080      2
    user_index                  0x088     24
    log_page_size               0x0a3      5
    remote_qpn                  0x0a8     24
    primary_address_path        0x0c0    352  ADS
    secondary_address_path      0x220    352  ADS
    log_ack_req_freq            0x380      4
    log_sra_max                 0x388      3
    retry_count                 0x38d      3
    rnr_retry                   0x390      3
    fre                         0x394      1
    cur_rnr_retry               0x395      3
    cur_retry_count             0x398      3
    next_send_psn               0x3c8     24
    cqn_snd                     0x3e8     24
    deth_sqpn                   0x408     24
    last_acked_psn              0x448     24
    ssn                         0x468     24
    log_rra_max                 0x488      3
    atomic_mode                 0x48c      4
    rre                         0x490      1
    rwe                         0x491      1
    rae                         0x492      1
    page_offset                 0x494      6
    cd_slave_receive            0x49d      1
    cd_slave_send               0x49e      1
    cd_master                   0x49f      1
    min_rnr_nak                 0x4a3      5
    next_rcv_psn                0x4a8     24
    xrcd                        0x4c8     24
    cqn_rcv                     0x4e8     24
    dbr_addr                    0x500     64
    q_key                       0x540     32
    rq_type                     0x565      3
    srqn_rmpn_xrqn              0x568     24
    rmsn                        0x588     24
    hw_sq_wqebb_counter         0x5a0     16
    sw_sq_wqebb_counter         0x5b0     16
    hw_rq_counter               0x5c0     32
    sw_rq_counter               0x5e0     32
    cgs                         0x62f      1
    cs_req                      0x630      8
    cs_res                      0x638      8
    dc_access_key               0x640     64
    dbr_umem_valid              0x683      1
    dbr_umem_id                 0x720     32
""", ADS=ADS)

QPC_EXT = BitStruct("qpc_extension", 192, """
    mmo                         0x002      1
""")

CQC = BitStruct("cqc", 64, """
    status                      0x000      4
    dbr_umem_valid              0x006      1
    cqe_sz                      0x008      3
    cc                          0x00b      1
    oi                          0x00e      1
    cq_period_mode              0x00f      2
    cqe_comp_en                 0x011      1
    st                          0x014      4
    dbr_umem_id                 0x020     32
    page_offset                 0x054      6
    cq_timestamp_format         0x05e      2
    log_cq_size                 0x063      5
    uar_page                    0x068     24
    cq_period                   0x084     12
    cq_max_count                0x090     16
    c_eqn                       0x0b8      8
    log_page_size               0x0c3      5
    last_notified_index         0x108     24
    consumer_counter            0x148     24
    producer_counter            0x168     24
    dbr_addr                    0x1c0     64
""")

WQ = BitStruct("wq", 192, """
    wq_type                     0x000      4
    wq_signature                0x004      1
    end_padding_mode            0x005      2
    cd_slave                    0x007      1
    hds_skip_first_sge          0x020      1
    log2_hds_buf_size           0x021      3
    page_offset                 0x02b      5
    lwm                         0x030     16
    pd                          0x048     24
    uar_page                    0x068     24
    dbr_addr                    0x080     64
    hw_counter                  0x0c0     32
    sw_counter                  0x0e0     32
    log_wq_stride               0x10c      4
    log_wq_pg_sz                0x113      5
    log_wq_sz                   0x11b      5
    dbr_umem_valid              0x120      1
    wq_umem_valid               0x121      1
    log_hairpin_num_packets     0x123      5
    log_hairpin_data_sz         0x12b      5
    log_wqe_num_of_strides      0x134      4
    two_byte_shift_en           0x138      1
    log_wqe_stride_size         0x13d      3
    dbr_umem_id                 0x140     32
    wq_umem_id                  0x160     32
    wq_umem_offset              0x180     64
    headers_mkey                0x1c0     32
    shampo_enable               0x1e0      1
""")

RMPC = BitStruct("rmpc", 240, """
    state                       0x008      4
    basic_cyclic_rcv_wqe        0x020      1
    wq                          0x180   1536  WQ
""", WQ=WQ)

# A memory key's context. `log_entity_size` has the place of log_page_size.
MKC = BitStruct("mkc", 64, """
    access_mode_4_2             0x003      3
    a                           0x011      1
    rw                          0x012      1
    rr                          0x013      1
    lw                          0x014      1
    lr                          0x015      1
    access_mode_1_0             0x016      2
    qpn                         0x020     24
    mkey_7_0                    0x038      8
    pd                          0x068     24
    start_addr                  0x080     64
    len                         0x0c0     64
    translations_octword_size   0x1a0     32
    log_entity_size             0x1da      6
""")

# An entry of an indirect key's list: other memory, by its key.
KLM = BitStruct("klm", 16, """
    byte_count                  0x000     32
    mkey                        0x020     32
    address                     0x040     64
""")

CMD_HCA_CAP = BitStruct("cmd_hca_cap", 256, """
    hca_cap_2                   0x020      1
    log_dma_mmo_max_size        0x06b      5
    log_max_srq_sz              0x080      8
    log_max_qp_sz               0x088      8
    log_max_qp                  0x09b      5
    log_max_srq                 0x0ab      5
    log_max_cq_sz               0x0c8      8
    log_max_cq                  0x0db      5
    log_max_mkey                0x0ea      6
    log_max_eq                  0x0fc      4
    fixed_buffer_size           0x108      1
    log_max_mrw_sz              0x109      7
    log_max_klm_list_size       0x11a      6
    qpc_extension               0x122      1
    log_max_ra_req_qp           0x14a      6
    rts2rts_qp_udp_sport        0x151      1
    dma_mmo_sq                  0x153      1
    log_max_ra_res_qp           0x15a      6
    rts2rts_qp_dscp             0x16a      1
    gid_table_size              0x170     16
    vport_counters              0x181      1
    rq_delay_drop               0x185      1
    nic_flow_table              0x1a6      1
    eswitch_manager             0x1a7      1
    port_type                   0x1b6      2
    num_ports                   0x1b8      8
    log_max_msg                 0x1c3      5
    cqe_version                 0x1fc      4
    striding_rq                 0x201      1
    sctr_data_cqe               0x215      1
    qos                         0x21b      1
    eth_net_offloads            0x21c      1
    roce                        0x21d      1
    atomic                      0x21e      1
    cq_oi                       0x220      1
    cq_resize                   0x221      1
    cd                          0x22c      1
    ud                          0x23d      1
    uc                          0x23e      1
    rc                          0x23f      1
    max_wqe_sz_sq               0x290     16
    max_wqe_sz_rq               0x2b0     16
    flow_counter_bulk_alloc     0x310      8
    log_max_transport_domain    0x323      5
    log_max_pd                  0x32b      5
    log_max_flow_counter_bulk   0x348      8
    log_max_rq                  0x363      5
    log_max_sq                  0x36b      5
    log_max_tir                 0x373      5
    log_max_tis                 0x37b      5
    basic_cyclic_rcv_wqe        0x380      1
    log_max_rmp                 0x383      5
    log_max_rqt                 0x38b      5
    log_max_rqt_size            0x393      5
    log_max_tis_per_sq          0x39b      5
    ext_stride_num_range        0x3a0      1
    log_max_stride_sz_rq        0x3a3      5
    log_min_stride_sz_rq        0x3ab      5
    log_max_stride_sz_sq        0x3b3      5
    log_min_stride_sz_sq        0x3bb      5
    log_max_wq_sz               0x3db      5
    sq_ts_format                0x440      2
    rq_ts_format                0x442      2
    max_num_eqs                 0x470     16
    device_frequency_mhz        0x4c0     32
    device_frequency_khz        0x4e0     32
    log_max_atomic_size_qp      0x580      8
    cqe_compression             0x5bf      1
    wait_on_data                0x68b      1
    wait_on_time                0x68c      1
    uctx_cap                    0x6a0     32
    dma_mmo_qp                  0x748      1
""")

ETHERNET_OFFLOAD_CAPS = BitStruct("per_protocol_networking_offload_caps", 256, """
    csum_cap                    0x000      1
    vlan_cap                    0x001      1
    lro_cap                     0x002      1
    wqe_vlan_insert             0x007      1
    self_lb_en_modifiable       0x008      1
    max_lso_cap                 0x00b      5
    multi_pkt_send_wqe          0x010      2
    wqe_inline_mode             0x012      2
    rss_ind_tbl_cap             0x014      4
    scatter_fcs                 0x019      1
    enhanced_multi_pkt_send_wqe 0x01a      1
    swp                         0x020      1
    swp_csum                    0x021      1
    cqe_checksum_full           0x023      1
    lro_min_mss_size            0x050     16
""")

ATOMIC_CAPS = BitStruct("atomic_caps", 256, """
    atomic_req_8B_endianness_mode               0x040      2
    supported_atomic_req_8B_endianness_mode_1   0x046      1
    atomic_operations                           0x090     16
    atomic_size_qp                              0x0b0     16
    atomic_size_dc                              0x0d0     16
""")

CMD_HCA_CAP_2 = BitStruct("cmd_hca_cap_2", 256, """
    log_reserved_qpn_granularity  0x093      5
    send_dbr_mode_no_dbr_ext    0x2e1      1
""")

ROCE_CAP = BitStruct("roce_cap", 256, """
    roce_version                0x098      8
    r_roce_dest_udp_port        0x0b0     16
    r_roce_max_src_udp_port     0x0c0     16
    r_roce_min_src_udp_port     0x0d0     16
    roce_address_table_size     0x0f0     16
""")

ROCE_ADDR_LAYOUT = BitStruct("roce_addr_layout", 32, """
    source_l3_address           0x000    128
    rx_allow_untagged           0x082      1
    vlan_valid                  0x083      1
    vlan_id                     0x084     12
    source_mac_47_32            0x090     16
    source_mac_31_0             0x0a0     32
    roce_l3_type                0x0d4      4
    roce_version                0x0d8      8
""")

LAGC = BitStruct("lagc", 8, """
    port_select_mode            0x015      3
    lag_state                   0x01d      3
""")

HCA_VPORT_CONTEXT = BitStruct("hca_vport_context", 512, """
    field_select                0x000     32
    grh_required                0x103      1
    port_physical_state         0x110      4
    vport_state_policy          0x114      4
    port_state                  0x118      4
    vport_state                 0x11c      4
    system_image_guid           0x140     64
    port_guid                   0x180     64
    node_guid                   0x1c0     64
    lid                         0x300     16
    lmc                         0x318      3
    sm_lid                      0x320     16
    sm_sl                       0x330      4
""")
