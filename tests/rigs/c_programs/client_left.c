// Errors of librdmacm: a queue pair that is too long, and a client that leaves before it is accepted.
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct rdma_cm_id *next(struct rdma_event_channel *channel, enum rdma_cm_event_type wanted)
{
    struct rdma_cm_event *event;
    if (rdma_get_cm_event(channel, &event)) err(1, "rdma_get_cm_event");
    if (event->event != wanted) errx(1, "%s in place of %s", rdma_event_str(event->event), rdma_event_str(wanted));
    struct rdma_cm_id *id = event->id;
    rdma_ack_cm_event(event);
    return id;
}

static void print(const char *what, int result)
{
    printf("%s: %d, %s\n", what, result, errno == EINVAL ? "EINVAL" : strerror(errno));
}

int main(int argc, char **arguments)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(arguments[argc - 1]))};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    struct rdma_event_channel *of_server = rdma_create_event_channel(), *of_client = rdma_create_event_channel();
    struct rdma_cm_id *listener, *client;
    if (rdma_create_id(of_server, &listener, NULL, RDMA_PS_TCP)) err(1, "rdma_create_id");
    if (rdma_create_id(of_client, &client, NULL, RDMA_PS_TCP)) err(1, "rdma_create_id");
    if (rdma_bind_addr(listener, (struct sockaddr *)&at) || rdma_listen(listener, 1)) err(1, "rdma_listen");
    if (rdma_resolve_addr(client, NULL, (struct sockaddr *)&at, 5000)) err(1, "rdma_resolve_addr");
    next(of_client, RDMA_CM_EVENT_ADDR_RESOLVED);
    if (rdma_resolve_route(client, 5000)) err(1, "rdma_resolve_route");
    next(of_client, RDMA_CM_EVENT_ROUTE_RESOLVED);

    struct ibv_qp_init_attr small = {.qp_type = IBV_QPT_RC, .cap = {8, 8, 1, 1, 0}}, large = small, same = small;
    large.cap.max_send_wr = 1 << 20;
    print("rdma_create_qp", rdma_create_qp(client, NULL, &large));
    if (rdma_create_qp(client, NULL, &small)) err(1, "rdma_create_qp");
    struct rdma_conn_param parameters = {.responder_resources = 1, .initiator_depth = 1, .retry_count = 7};
    if (rdma_connect(client, &parameters)) err(1, "rdma_connect");
    struct rdma_cm_id *server = next(of_server, RDMA_CM_EVENT_CONNECT_REQUEST);
    if (rdma_create_qp(server, NULL, &same)) err(1, "rdma_create_qp");
    rdma_destroy_qp(client);
    if (rdma_destroy_id(client)) err(1, "rdma_destroy_id");
    // Events of a connection that is not accepted yet are not reported: ask until the client's message has come.
    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_RTR};
    for (int mask, i = 0; i < 500 && !rdma_init_qp_attr(server, &attributes, &mask); i++) usleep(10000);
    print("rdma_accept", rdma_accept(server, &parameters));
}
