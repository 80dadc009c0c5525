// Asks for what software NICs do not have. It prints what is not refused.
#include "queue_pair.h"

#include <infiniband/mlx5dv.h>

static struct queue_pair q;

#define REFUSED(call) do { if (call) printf("not refused: %s\n", #call); } while (0)

int main(void)
{
    make_queue_pair(&q);
    struct ibv_qp_init_attr raw = {
        .qp_type = IBV_QPT_RAW_PACKET, .send_cq = q.cq, .recv_cq = q.cq, .cap = {1, 1, 1, 1, 0}};
    REFUSED(ibv_create_qp(q.pd, &raw));
    struct ibv_qp_init_attr_ex dc = {
        .qp_type = IBV_QPT_DRIVER, .send_cq = q.cq, .recv_cq = q.cq, .pd = q.pd, .cap = {1, 0, 1, 0, 0},
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .send_ops_flags = IBV_QP_EX_WITH_SEND,
    };
    struct mlx5dv_qp_init_attr initiator = {
        .comp_mask = MLX5DV_QP_INIT_ATTR_MASK_DC, .dc_init_attr = {.dc_type = MLX5DV_DCTYPE_DCI}};
    REFUSED(mlx5dv_create_qp(q.context, &dc, &initiator));
    struct ibv_xrcd_init_attr domain = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = 0100 /* O_CREAT */};
    REFUSED(ibv_open_xrcd(q.context, &domain));
    REFUSED(ibv_alloc_mw(q.pd, IBV_MW_TYPE_1));
    union ibv_gid group = {.raw = {0xff, 0x0e}};
    REFUSED(!ibv_attach_mcast(q.qp, &group, 0));
    struct ibv_flow_attr flow = {.type = IBV_FLOW_ATTR_NORMAL, .size = sizeof flow, .port = 1};
    REFUSED(ibv_create_flow(q.qp, &flow));
    struct ibv_cq_init_attr_ex timestamps = {
        .cqe = 1, .channel = q.channel, .wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP};
    REFUSED(ibv_create_cq_ex(q.context, &timestamps));
    destroy_queue_pair(&q);
}
