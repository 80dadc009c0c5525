// The structures that a kernel built with GPUNetIO's headers (2.0.1) finds at our pointer, field by field. With QP_BYTES
// 280, they are those of 1.0, with which NCCL 2.28 and 2.29 were built.
#pragma once

#ifndef QP_BYTES
#define QP_BYTES 296
#endif

#include "machine.hpp"

#define AT(type, field, offset) static_assert(offsetof(type, field) == offset, #type "." #field)
#define PACKED __attribute__((packed, aligned(8)))

struct PACKED Cq {  // struct doca_gpu_dev_verbs_cq
    u8 *cqe_daddr;
    u32 cq_num;
    u32 cqe_num;
    u32 *dbrec;
    u64 cqe_ci;
    u32 cqe_mask;
    u8 cqe_size;
    u8 reserved0[3];
    u64 cqe_rsvd;
    int mem_type;
    u8 reserved1[QP_BYTES == 296 ? 12 : 4];
};
static_assert(sizeof(Cq) == (QP_BYTES == 296 ? 64 : 56), "Cq");
AT(Cq, cqe_daddr, 0);
AT(Cq, cq_num, 8);
AT(Cq, cqe_num, 12);
AT(Cq, dbrec, 16);
AT(Cq, cqe_ci, 24);
AT(Cq, cqe_mask, 32);
AT(Cq, cqe_size, 36);
AT(Cq, cqe_rsvd, 40);
AT(Cq, mem_type, 48);

struct PACKED Qp {  // struct doca_gpu_dev_verbs_qp
    u64 sq_rsvd_index;
    u64 sq_ready_index;
    u64 sq_wqe_pi;
    u32 sq_num;
    u32 sq_num_shift8;
    u32 sq_num_shift8_be;
    u32 sq_num_shift8_be_1ds;
    u32 sq_num_shift8_be_2ds;
    u32 sq_num_shift8_be_3ds;
    u32 sq_num_shift8_be_4ds;
#if QP_BYTES == 296
    u32 sq_num_shift8_be_5ds;
#endif
    int sq_lock;
    u16 sq_wqe_num;
    u16 sq_wqe_mask;
#if QP_BYTES == 280
    u8 reserved3[4];
#endif
    u8 *sq_wqe_daddr;
    u32 *sq_dbrec;
    u64 *sq_db;
    u8 reserved0[8];
    u8 reserved1[64];
    Cq cq_sq;
    u8 reserved2[sizeof(Cq)];
    int nic_handler;
    int mem_type;
};
static_assert(sizeof(Qp) == QP_BYTES, "Qp");
AT(Qp, sq_rsvd_index, 0);
AT(Qp, sq_ready_index, 8);
AT(Qp, sq_wqe_pi, 16);
AT(Qp, sq_num, 24);
AT(Qp, sq_num_shift8, 28);
AT(Qp, sq_num_shift8_be, 32);
AT(Qp, sq_num_shift8_be_1ds, 36);
AT(Qp, sq_num_shift8_be_2ds, 40);
AT(Qp, sq_num_shift8_be_3ds, 44);
AT(Qp, sq_num_shift8_be_4ds, 48);
#if QP_BYTES == 296
AT(Qp, sq_num_shift8_be_5ds, 52);
AT(Qp, sq_lock, 56);
AT(Qp, sq_wqe_num, 60);
AT(Qp, sq_wqe_mask, 62);
#else
AT(Qp, sq_lock, 52);
AT(Qp, sq_wqe_num, 56);
AT(Qp, sq_wqe_mask, 58);
#endif
AT(Qp, sq_wqe_daddr, 64);
AT(Qp, sq_dbrec, 72);
AT(Qp, sq_db, 80);
AT(Qp, reserved0, 88);
AT(Qp, reserved1, 96);
AT(Qp, cq_sq, 160);
AT(Qp, reserved2, (QP_BYTES == 296 ? 224 : 216));
AT(Qp, nic_handler, (QP_BYTES - 8));
AT(Qp, mem_type, (QP_BYTES - 4));

// Segments of 16 bytes. What a builder leaves alone holds garbage, where theirs has what was on the stack.
struct __attribute__((packed)) Ctrl {
    u32 opmod_idx_opcode;
    u32 qpn_ds;
    u8 signature;
    u16 dci_stream;
    u8 fm_ce_se;
    u32 imm;
};
struct Raddr {
    u64 raddr;
    u32 rkey;
    u32 reserved;
};
struct Data {
    u32 byte_count;
    u32 lkey;
    u64 addr;
};
struct InlineHeader {
    u32 byte_count;
    u8 payload[12];
};
struct Atomic {
    u64 swap_add;
    u64 compare;
};
struct Wait {
    u32 reserved[2];
    u32 max_index;
    u32 qpn_cqn;
};
AT(Ctrl, signature, 8);
AT(Ctrl, dci_stream, 9);
AT(Ctrl, fm_ce_se, 11);
AT(Ctrl, imm, 12);
AT(Raddr, rkey, 8);
AT(Data, lkey, 4);
AT(Data, addr, 8);
AT(Wait, max_index, 8);
AT(Wait, qpn_cqn, 12);

struct __attribute__((aligned(16))) Segment {
    u64 low, high;
};

union Wqe {  // struct doca_gpu_dev_verbs_wqe
    Segment segments[4];
    struct {
        Ctrl ctrl;
        Raddr raddr;
        Data data0, data1;
    } write;
    struct {
        Ctrl ctrl;
        Raddr raddr;
        Atomic atomic;
        Data data;
    } atomic;
    struct {
        Ctrl ctrl;
        Data data[3];
    } send;
    struct {
        Ctrl ctrl;
        Wait wait;
    } wait;
};
static_assert(sizeof(Wqe) == 64 && alignof(Wqe) == 16, "Wqe");
AT(Wqe, write.raddr, 16);
AT(Wqe, write.data0, 32);
AT(Wqe, write.data1, 48);
AT(Wqe, atomic.atomic, 32);
AT(Wqe, atomic.data, 48);
AT(Wqe, send.data, 16);
AT(Wqe, wait.wait, 16);

struct Addr {  // struct doca_gpu_dev_verbs_addr: the key is in big-endian order already
    u64 addr;
    u32 key;
};
AT(Addr, key, 8);
