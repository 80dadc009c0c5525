// A queue pair that is connected to itself, for small programs of libibverbs.
#pragma once

#include <err.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>

struct queue_pair {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_mr *mr;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    char memory[8192];
};

// Evaluates a call, which must succeed and leave errno alone.
#define KEEPS_ERRNO(call) \
    ({ \
        errno = EXDEV; \
        __typeof__(call) result = (call); \
        if (errno != EXDEV) printf("%s: errno is %d\n", #call, errno); \
        result; \
    })

#define MADE(call) ({ __typeof__(call) made = KEEPS_ERRNO(call); if (!made) err(1, "%s", #call); made; })
#define DONE(call) ({ int code = KEEPS_ERRNO(call); if (code) errx(1, "%s: %d", #call, code); })

static struct ibv_context *open_first(void)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    if (!devices || !devices[0]) errx(1, "there is no device");
    struct ibv_context *context = ibv_open_device(devices[0]);
    if (!context) err(1, "ibv_open_device");
    ibv_free_device_list(devices);
    return context;
}

static struct ibv_ah_attr path_to_itself(struct ibv_context *context)
{
    struct ibv_port_attr port;
    DONE(ibv_query_port(context, 1, &port));
    // Of the flow label, the lower 20 bits count.
    struct ibv_ah_attr path = {
        .is_global = 1, .port_num = 1, .dlid = port.lid, .grh = {.hop_limit = 1, .flow_label = 0xF12345}};
    DONE(ibv_query_gid(context, 1, 0, &path.grh.dgid));
    return path;
}

static void connect_to_itself(struct ibv_qp *qp, int reads)
{
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
    DONE(ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    struct ibv_qp_attr rtr = {
        .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp->qp_num, .max_dest_rd_atomic = reads,
        .min_rnr_timer = 12, .ah_attr = path_to_itself(qp->context),
    };
    DONE(ibv_modify_qp(
        qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = reads};
    DONE(ibv_modify_qp(
        qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
        IBV_QP_MAX_QP_RD_ATOMIC));
}

static void make_queue_pair(struct queue_pair *q)
{
    q->context = open_first();
    q->pd = MADE(ibv_alloc_pd(q->context));
    q->mr = MADE(ibv_reg_mr(q->pd, q->memory, sizeof q->memory, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
    q->channel = MADE(ibv_create_comp_channel(q->context));
    q->cq = MADE(ibv_create_cq(q->context, 16, NULL, q->channel, 0));
    struct ibv_qp_init_attr attributes = {
        .send_cq = q->cq, .recv_cq = q->cq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1},
    };
    q->qp = MADE(ibv_create_qp(q->pd, &attributes));
    connect_to_itself(q->qp, 1);
}

// Writes a byte into the second half of the memory, and returns the status of the completion.
static enum ibv_wc_status write_a_byte(struct queue_pair *q)
{
    struct ibv_sge from = {.addr = (uintptr_t)q->memory, .length = 1, .lkey = q->mr->lkey};
    struct ibv_send_wr request = {
        .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
        .wr.rdma = {.remote_addr = (uintptr_t)q->memory + sizeof q->memory / 2, .rkey = q->mr->rkey},
    }, *refused;
    struct ibv_wc found;
    DONE(ibv_post_send(q->qp, &request, &refused));
    int count;
    while (!(count = KEEPS_ERRNO(ibv_poll_cq(q->cq, 1, &found)))) continue;
    return count < 0 ? IBV_WC_GENERAL_ERR : found.status;
}

static void destroy_queue_pair(struct queue_pair *q)
{
    DONE(ibv_destroy_qp(q->qp));
    DONE(ibv_destroy_cq(q->cq));
    DONE(ibv_destroy_comp_channel(q->channel));
    DONE(ibv_dereg_mr(q->mr));
    DONE(ibv_dealloc_pd(q->pd));
    DONE(ibv_close_device(q->context));
}
