// What becomes of a device when a program closes, replaces and duplicates its descriptor. It prints what goes wrong.
#define _GNU_SOURCE
#include "queue_pair.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static struct queue_pair q;
static int null;

static void check(const char *what, bool holds) { if (!holds) printf("not so: %s\n", what); }

static bool is_device(int fd)
{
    char no_call[24] = "";  // which uverbs refuses with EINVAL, and other files with ENOTTY
    return ioctl(fd, 0xc0181b01 /* RDMA_VERBS_IOCTL */, no_call) && errno == EINVAL;
}

static int threads(void)  // one that has ended may still be listed
{
    DIR *folder = opendir("/proc/self/task");
    int count = -2;  // "." and ".."
    while (readdir(folder)) count++;
    closedir(folder);
    return count;
}

static int fewest_threads(void)
{
    int fewest = threads();
    for (int looks = 0; looks < 200; looks++) {
        usleep(1000);
        fewest = threads() < fewest ? threads() : fewest;
    }
    return fewest;
}

static bool not_more_threads(int count)
{
    for (int looks = 0; threads() > count && looks < 10000; looks++) usleep(1000);
    return threads() <= count;
}

static void open_device(void)
{
    memset(&q, 0, sizeof q);
    make_queue_pair(&q);
    check("a new device works", write_a_byte(&q) == IBV_WC_SUCCESS);
    check("it is a device", is_device(q.context->cmd_fd));
    null = open("/dev/null", O_RDONLY);
    check("/dev/null is none", !is_device(null));
}

static void by_dup2(int fd) { dup2(null, fd); }
static void by_dup3(int fd) { dup3(null, fd, O_CLOEXEC); }
static void by_close_range(int fd) { (void)fd, close_range(3, ~0U, 0); }
static void by_closefrom(int fd) { (void)fd, closefrom(3); }
static void by_a_loop(int fd) { for (int i = 3; i < fd + 4096; i++) close(i); }
static void by_syscall(int fd) { syscall(SYS_close, fd); }

static void copied(void)
{
    int fd = q.context->cmd_fd, first = dup(fd), second = fcntl(fd, F_DUPFD_CLOEXEC, 100);
    close(fd);
    close(first);
    check("closed copies are no devices", !is_device(fd) && !is_device(first));
    q.context->cmd_fd = second;
    check("the last copy is the device", is_device(second) && write_a_byte(&q) == IBV_WC_SUCCESS);
    destroy_queue_pair(&q);
    check("it is closed with its last copy", !is_device(second));
}

static void unchanged(void)
{
    int fd = q.context->cmd_fd;
    dup2(fd, fd);
    dup2(-1, fd);
    close_range(3, ~0U, 1 << 2 /* CLOSE_RANGE_CLOEXEC */);
    pid_t child = vfork();  // which shares the memory, and has descriptors of its own
    if (!child) {
        close(fd);
        close_range(3, ~0U, 0);
        _exit(0);
    }
    waitpid(child, NULL, 0);
    check("nothing of this closes the device", is_device(fd) && write_a_byte(&q) == IBV_WC_SUCCESS);
    destroy_queue_pair(&q);
}

int main(void)
{
    static void (*const ways[])(int) = {by_dup2, by_dup3, by_close_range, by_closefrom, by_a_loop, by_syscall};
    open_device();
    destroy_queue_pair(&q);
    int with_no_nic = fewest_threads();
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        open_device();
        check("a NIC has threads", threads() > with_no_nic);
        int fd = q.context->cmd_fd;
        ways[i](fd);
        check("the descriptor is no device any more", !is_device(fd));
        check("the NIC is closed", not_more_threads(with_no_nic));
    }
    open_device();
    copied();
    open_device();
    unchanged();
    open_device();
    puts("done");
}
