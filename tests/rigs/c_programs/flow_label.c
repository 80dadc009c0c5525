// The flow label of a connected queue pair, and a datagram with one.
#include "queue_pair.h"

static struct queue_pair q;

int main(void)
{
    make_queue_pair(&q);
    struct ibv_qp_attr attributes;
    struct ibv_qp_init_attr created;
    DONE(ibv_query_qp(q.qp, &attributes, IBV_QP_AV, &created));
    printf("flow_label %#x\n", attributes.ah_attr.grh.flow_label);

    struct ibv_qp_init_attr datagrams = {
        .send_cq = q.cq, .recv_cq = q.cq, .qp_type = IBV_QPT_UD, .cap = {.max_send_wr = 1, .max_send_sge = 1},
    };
    struct ibv_qp *qp = MADE(ibv_create_qp(q.pd, &datagrams));
    struct ibv_qp_attr next = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7};
    DONE(ibv_modify_qp(qp, &next, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
    next.qp_state = IBV_QPS_RTR;
    DONE(ibv_modify_qp(qp, &next, IBV_QP_STATE));
    next.qp_state = IBV_QPS_RTS;
    DONE(ibv_modify_qp(qp, &next, IBV_QP_STATE | IBV_QP_SQ_PSN));
    struct ibv_ah_attr path = path_to_itself(q.context);
    struct ibv_ah *ah = MADE(ibv_create_ah(q.pd, &path));
    struct ibv_sge from = {.addr = (uintptr_t)q.memory, .length = 8, .lkey = q.mr->lkey};
    struct ibv_send_wr request = {
        .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED,
        .wr.ud = {.ah = ah, .remote_qpn = qp->qp_num, .remote_qkey = 7},
    }, *refused;
    DONE(ibv_post_send(qp, &request, &refused));
    struct ibv_wc found;
    while (!ibv_poll_cq(q.cq, 1, &found)) continue;
    printf("status %d\n", found.status);
    DONE(ibv_destroy_ah(ah));
    DONE(ibv_destroy_qp(qp));
    destroy_queue_pair(&q);
}
