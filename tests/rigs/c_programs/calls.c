// Calls of libibverbs that succeed. It prints those that change errno.
#include "queue_pair.h"

int main(void)
{
    static struct queue_pair q;
    make_queue_pair(&q);
    DONE(ibv_req_notify_cq(q.cq, 0));
    q.memory[0] = 'x';
    enum ibv_wc_status status = write_a_byte(&q);
    printf("status %d, %c\n", status, q.memory[sizeof q.memory / 2]);
    struct ibv_cq *cq;
    void *about;
    DONE(ibv_get_cq_event(q.channel, &cq, &about));
    ibv_ack_cq_events(cq, 1);
    destroy_queue_pair(&q);
}
