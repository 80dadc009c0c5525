// Attributes that mlx5 takes, and what it makes of them.
#include "queue_pair.h"

static struct queue_pair q;

int main(void)
{
    make_queue_pair(&q);
    struct ibv_device_attr device;
    DONE(ibv_query_device(q.context, &device));
    printf("device_cap_flags %#x\n", device.device_cap_flags);

    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_RESET};
    DONE(ibv_modify_qp(q.qp, &attributes, IBV_QP_STATE));
    connect_to_itself(q.qp, 12);
    struct ibv_qp_init_attr created;
    DONE(ibv_query_qp(q.qp, &attributes, IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC, &created));
    printf("max_rd_atomic %d, max_dest_rd_atomic %d\n", attributes.max_rd_atomic, attributes.max_dest_rd_atomic);

    struct ibv_srq_init_attr none = {.attr = {.max_wr = 0, .max_sge = 1}};
    struct ibv_srq *srq = MADE(ibv_create_srq(q.pd, &none));
    struct ibv_sge room = {.addr = (uintptr_t)q.memory, .length = 1, .lkey = q.mr->lkey};
    struct ibv_recv_wr receive = {.sg_list = &room, .num_sge = 1}, *refused;
    printf("max_wr %u, post: %s\n", none.attr.max_wr, ibv_post_srq_recv(srq, &receive, &refused) ? "refused" : "taken");
    DONE(ibv_destroy_srq(srq));

    struct ibv_qp_init_attr_ex datagrams = {
        .qp_type = IBV_QPT_UD, .send_cq = q.cq, .recv_cq = q.cq, .pd = q.pd,
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS,
        .create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB,
        .cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
    };
    struct ibv_qp *qp = MADE(ibv_create_qp_ex(q.context, &datagrams));
    DONE(ibv_destroy_qp(qp));
    destroy_queue_pair(&q);
}
