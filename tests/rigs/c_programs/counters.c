// Five WRITEs, and one that is refused. It prints what sysfs counts, and exits without closing anything.
#include "queue_pair.h"

static struct queue_pair q;

static void print(const char *name)
{
    char path[256];
    long value = -1;
    snprintf(path, sizeof path, "/sys/class/infiniband/soft0/ports/1/%s", name);
    FILE *file = fopen(path, "r");
    if (!file || fscanf(file, "%ld", &value) != 1) err(1, "%s", path);
    fclose(file);
    printf("%s %ld\n", name, value);
}

int main(void)
{
    make_queue_pair(&q);
    for (int i = 0; i < 5; i++) if (write_a_byte(&q)) errx(1, "a WRITE fails");
    print("hw_counters/rx_write_requests");
    q.mr->rkey ^= 1;
    if (write_a_byte(&q) != IBV_WC_REM_ACCESS_ERR) errx(1, "a WRITE is not refused");
    print("hw_counters/req_remote_access_errors");
    print("hw_counters/resp_remote_access_errors");
    print("hw_counters/lifespan");
    print("counters/link_downed");
    return 0;
}
