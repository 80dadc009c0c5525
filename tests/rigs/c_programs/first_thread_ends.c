// A program whose first thread ends by pthread_exit(3) ("exit") or pthread_cancel(3) ("cancel"), before or after the other
// one has opened the device ("before", "after").
#include "queue_pair.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

static struct queue_pair q;
static pthread_t first;
static char **arguments;

static void at_exit(void) { puts("exit handlers run"); }

static void *other(void *unused)
{
    (void)unused;
    if (!strcmp(arguments[1], "cancel")) pthread_cancel(first);
    usleep(100000);  // the first thread ends meanwhile
    if (!strcmp(arguments[2], "after")) make_queue_pair(&q);
    printf("status %d\n", write_a_byte(&q));
    return NULL;
}

int main(int argc, char **given)
{
    if (argc != 3) return 2;
    arguments = given, first = pthread_self();
    atexit(at_exit);
    pthread_t thread;
    if (!strcmp(arguments[2], "before")) make_queue_pair(&q);
    if (pthread_create(&thread, NULL, other, NULL)) return 3;
    if (!strcmp(arguments[1], "cancel")) for (;;) pause();
    pthread_exit(NULL);
}
