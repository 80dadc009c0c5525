// Events that wait until the program reads them: more than a pipe holds. Meanwhile, some of what they are about is
// destroyed. It prints what goes wrong.
#include "queue_pair.h"

#include <poll.h>
#include <stdbool.h>

enum { COUNT = 200, LIMIT_MS = 20000, IN_THE_PIPE = 5, BEHIND_IT = 150 };

static struct queue_pair q;
static struct ibv_cq *cqs[COUNT];
static struct ibv_qp *qps[COUNT];

static void make(int i)
{
    cqs[i] = MADE(ibv_create_cq(q.context, 16, NULL, q.channel, 0));
    DONE(ibv_req_notify_cq(cqs[i], 0));
    struct ibv_qp_init_attr attributes = {
        .send_cq = cqs[i], .recv_cq = cqs[i], .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1},
    };
    qps[i] = MADE(ibv_create_qp(q.pd, &attributes));
    connect_to_itself(qps[i], 1);
}

static enum ibv_wc_status write_by(int i)
{
    struct ibv_cq *cq = q.cq;
    struct ibv_qp *qp = q.qp;
    q.cq = cqs[i], q.qp = qps[i];
    enum ibv_wc_status status = write_a_byte(&q);
    q.cq = cq, q.qp = qp;
    return status;
}

static void destroy(int i)
{
    DONE(ibv_destroy_qp(qps[i]));
    DONE(ibv_destroy_cq(cqs[i]));
    qps[i] = NULL;
}

static bool comes(int fd, int milliseconds)
{
    struct pollfd event = {.fd = fd, .events = POLLIN};
    return poll(&event, 1, milliseconds) == 1;
}

static void expect(int fd, const char *what, int i)
{
    if (!comes(fd, LIMIT_MS)) errx(1, "%s %d does not come", what, i);
}

static void completions(void)
{
    for (int i = 0; i < COUNT; i++)
        if (write_by(i) != IBV_WC_SUCCESS) errx(1, "write %d fails", i);
    destroy(IN_THE_PIPE);
    destroy(BEHIND_IT);
    for (int i = 0; i < COUNT; i++) {
        if (!qps[i]) continue;
        expect(q.channel->fd, "completion", i);
        struct ibv_cq *found;
        void *context;
        DONE(ibv_get_cq_event(q.channel, &found, &context));
        if (found != cqs[i]) printf("completion %d is out of order\n", i);
        ibv_ack_cq_events(found, 1);
    }
    if (comes(q.channel->fd, 100)) puts("there are more completions");
}

// The queue pairs refuse what they are asked by themselves.
static void errors(void)
{
    q.mr->rkey ^= 0xff;
    for (int i = 0; i < COUNT; i++)
        if (qps[i] && write_by(i) != IBV_WC_REM_ACCESS_ERR) errx(1, "write %d is not refused", i);
    q.mr->rkey ^= 0xff;
    destroy(IN_THE_PIPE + 1);
    destroy(BEHIND_IT + 1);
    for (int i = 0; i < COUNT; i++) {
        if (!qps[i]) continue;
        expect(q.context->async_fd, "error", i);
        struct ibv_async_event found;
        DONE(ibv_get_async_event(q.context, &found));
        if (found.event_type != IBV_EVENT_QP_ACCESS_ERR || found.element.qp != qps[i])
            printf("error %d is out of order: %s\n", i, ibv_event_type_str(found.event_type));
        ibv_ack_async_event(&found);
    }
    if (comes(q.context->async_fd, 100)) puts("there are more errors");
}

int main(void)
{
    make_queue_pair(&q);
    for (int i = 0; i < COUNT; i++) make(i);
    completions();
    errors();
    for (int i = 0; i < COUNT; i++)
        if (qps[i]) destroy(i);
    destroy_queue_pair(&q);
    puts("done");
}
