// What a program's libibverbs and librdmacm take for the kernel: /dev/infiniband, /sys/class/infiniband, and ioctl, mmap,
// write and close on what was opened there. LD_PRELOAD puts these functions in front of libc's. All else goes to libc.
//
// A device file is opened as /dev/null, whose number the device's "dev" file in sysfs has, too: libibverbs compares both.
// For rdma_cm, Python puts a descriptor in its place that is readable when there is an event.
// Its calls go to Python (calls.py), in the program's own interpreter, or in one that is started here.

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "python.h"

enum { MAX_FDS = 65536, NETLINK_RDMA = 20, GET_EVENT = 12 /* RDMA_USER_CM_CMD_GET_EVENT */ };

// Filled by Python. Each returns a negative errno, or what it says. After Python's end, a device is like a card that was
// pulled out: all calls are answered with EIO.
static struct calls {
    long (*open)(const char *name, long fd);                   // number of the open file, above 0
    long (*control)(long file, void *header);                  // ioctl
    long (*map)(long file, uint64_t offset, uint64_t nbytes);  // address of the pages
    long (*write)(long file, uint64_t bytes, uint64_t nbytes); // bytes written
    long (*close)(long file);
    long (*worker)(long file);                                 // what threads that poll help; 0: nothing
    void (*help_out)(long worker, long posted);                // a turn of the engine (nic/loop.py)
} calls;

static int files[MAX_FDS];  // by descriptor; 0: not ours

// libc's own function of this name.
#define REAL(name) \
    ({ \
        static __typeof__(&name) found; \
        if (!found) found = (__typeof__(&name))real(#name); \
        found; \
    })

static void *real(const char *name)
{
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) {
        fprintf(stderr, "gpunetio run: this C library has no %s\n", name);
        abort();
    }
    return found;
}

// --- paths ------------------------------------------------------------------------------------------------------------

static const char *const PREFIXES[] = {
    "/dev/infiniband", "/sys/class/infiniband", "/sys/class/misc/rdma_cm", "/sys/module/nvidia_peermem"};

// The path with what stands for these folders, in `room`; or the path as it is.
static const char *place_of(const char *path, char room[PATH_MAX])
{
    const char *root = getenv("GPUNETIO_UVERBS");
    if (!path || !root) return path;
    for (size_t i = 0; i < sizeof PREFIXES / sizeof *PREFIXES; i++)
        if (!strncmp(path, PREFIXES[i], strlen(PREFIXES[i])) &&
            snprintf(room, PATH_MAX, "%s%s", root, path) < PATH_MAX)
            return room;
    return path;
}

static const char *device_in(const char *path)
{
    return strncmp(path, "/dev/infiniband/uverbs", 22) && strcmp(path, "/dev/infiniband/rdma_cm") ? NULL : path + 16;
}

// --- Python -----------------------------------------------------------------------------------------------------------

static void fail(const char *what, const char *about) { fprintf(stderr, "gpunetio run: %s%s\n", what, about); }

static int started;
static bool forked;  // from a process that had started Python, whose threads are not here

static void forget(void)
{
    memset(files, 0, sizeof files);
    forked = started;
    started = 0;
}

static const char *told(const char *variable)
{
    const char *text = getenv(variable);
    return text ? text : "";
}

static bool end_help(int fd);

static void start(void)
{
    pthread_atfork(NULL, NULL, forget);
    const struct python how = {
        .library = told("GPUNETIO_LIBPYTHON"), .home = told("GPUNETIO_PYTHONHOME"),
        .version = told("GPUNETIO_PYTHONVERSION"), .path = told("GPUNETIO_PATH"), .fail = fail,
    };
    char statement[160];
    snprintf(statement, sizeof statement, "from gpunetio.uverbs.calls import install; install(%llu, %llu, %llu)",
             (unsigned long long)(uintptr_t)&calls, (unsigned long long)(uintptr_t)&started,
             (unsigned long long)(uintptr_t)end_help);
    python_run(&how, statement);
}

static bool ready(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, start);
    if (forked) fail("a process that was forked after its parent had opened a device cannot open one: ", "use exec");
    return started;
}

// --- help for the engine ----------------------------------------------------------------------------------------------

// By descriptor of a device: the worker whose turns threads may make, and how many threads do that now.
static struct { long worker, helpers; } helped[MAX_FDS];

static void begin_help(int fd, long worker) { __atomic_store_n(&helped[fd].worker, worker, __ATOMIC_SEQ_CST); }

static void help_out(int fd, bool posted)
{
    if (!started) return;  // in a child, which has no engine
    __atomic_add_fetch(&helped[fd].helpers, 1, __ATOMIC_SEQ_CST);
    long worker = __atomic_load_n(&helped[fd].worker, __ATOMIC_SEQ_CST);
    if (worker) calls.help_out(worker, posted);
    __atomic_sub_fetch(&helped[fd].helpers, 1, __ATOMIC_RELEASE);
}

// Let no thread help any more. Python calls this before the NIC closes. False if a turn takes too long.
static bool end_help(int fd)
{
    __atomic_store_n(&helped[fd].worker, 0, __ATOMIC_SEQ_CST);
    for (int i = 0; i < 10000 && __atomic_load_n(&helped[fd].helpers, __ATOMIC_SEQ_CST); i++) usleep(1000);
    return !__atomic_load_n(&helped[fd].helpers, __ATOMIC_SEQ_CST);
}

// --- the device files -------------------------------------------------------------------------------------------------

static int opened(const char *path, int fd)
{
    const char *name = device_in(path);
    if (fd < 0 || !name) return fd;
    long file = fd >= MAX_FDS ? -EMFILE : ready() ? IN_PYTHON(calls.open(name, fd), -ENODEV) : -ENODEV;
    if (file < 0) {
        close(fd);
        errno = (int)-file;
        return -1;
    }
    __atomic_store_n(&files[fd], (int)file, __ATOMIC_RELEASE);
    begin_help(fd, IN_PYTHON(calls.worker(file), 0));
    return fd;
}

static int file_of(int fd) { return fd < 0 || fd >= MAX_FDS ? 0 : __atomic_load_n(&files[fd], __ATOMIC_ACQUIRE); }

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list list; \
        va_start(list, flags); \
        mode = va_arg(list, mode_t); \
        va_end(list); \
    }

#define OPEN(name) \
    int name(const char *path, int flags, ...) \
    { \
        char room[PATH_MAX]; \
        MODE(flags) \
        return opened(path, REAL(name)(place_of(path, room), flags, mode)); \
    }

#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) \
    { \
        char room[PATH_MAX]; \
        MODE(flags) \
        return opened(path, REAL(name)(folder, place_of(path, room), flags, mode)); \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

int __open_2(const char *path, int flags) { return open(path, flags); }

int __open64_2(const char *path, int flags) { return open64(path, flags); }

#define WITH_PATH(type, name, parameters, ...) \
    type name parameters \
    { \
        char room[PATH_MAX]; \
        path = place_of(path, room); \
        return REAL(name)(__VA_ARGS__); \
    }

WITH_PATH(FILE *, fopen, (const char *restrict path, const char *restrict mode), path, mode)
WITH_PATH(FILE *, fopen64, (const char *restrict path, const char *restrict mode), path, mode)
WITH_PATH(DIR *, opendir, (const char *path), path)
WITH_PATH(int, chdir, (const char *path), path)
WITH_PATH(int, access, (const char *path, int mode), path, mode)
WITH_PATH(int, eaccess, (const char *path, int mode), path, mode)
WITH_PATH(int, euidaccess, (const char *path, int mode), path, mode)
WITH_PATH(int, faccessat, (int folder, const char *path, int mode, int flags), folder, path, mode, flags)
WITH_PATH(int, stat, (const char *restrict path, struct stat *restrict found), path, found)
WITH_PATH(int, stat64, (const char *restrict path, struct stat64 *restrict found), path, found)
WITH_PATH(int, lstat, (const char *restrict path, struct stat *restrict found), path, found)
WITH_PATH(int, lstat64, (const char *restrict path, struct stat64 *restrict found), path, found)

WITH_PATH(
    int, fstatat, (int folder, const char *restrict path, struct stat *restrict found, int flags),
    folder, path, found, flags)
WITH_PATH(
    int, fstatat64, (int folder, const char *restrict path, struct stat64 *restrict found, int flags),
    folder, path, found, flags)
WITH_PATH(
    int, statx, (int folder, const char *restrict path, int flags, unsigned mask, struct statx *restrict found),
    folder, path, flags, mask, found)
WITH_PATH(
    ssize_t, getxattr, (const char *path, const char *name, void *value, size_t nbytes), path, name, value, nbytes)
WITH_PATH(
    ssize_t, lgetxattr, (const char *path, const char *name, void *value, size_t nbytes), path, name, value, nbytes)

// In these, the C library opens folders by itself.
WITH_PATH(
    int, scandir,
    (const char *restrict path, struct dirent ***restrict found, int (*wanted)(const struct dirent *),
     int (*order)(const struct dirent **, const struct dirent **)),
    path, found, wanted, order)
WITH_PATH(
    int, scandir64,
    (const char *restrict path, struct dirent64 ***restrict found, int (*wanted)(const struct dirent64 *),
     int (*order)(const struct dirent64 **, const struct dirent64 **)),
    path, found, wanted, order)

// What programs and libraries call instead that were built with glibc before 2.33.
int __xstat(int, const char *, struct stat *);
int __xstat64(int, const char *, struct stat64 *);
int __lxstat(int, const char *, struct stat *);
int __lxstat64(int, const char *, struct stat64 *);
WITH_PATH(int, __xstat, (int version, const char *path, struct stat *found), version, path, found)
WITH_PATH(int, __xstat64, (int version, const char *path, struct stat64 *found), version, path, found)
WITH_PATH(int, __lxstat, (int version, const char *path, struct stat *found), version, path, found)
WITH_PATH(int, __lxstat64, (int version, const char *path, struct stat64 *found), version, path, found)
WITH_PATH(
    ssize_t, readlinkat, (int folder, const char *restrict path, char *restrict room_, size_t size),
    folder, path, room_, size)
WITH_PATH(ssize_t, readlink, (const char *restrict path, char *restrict room_, size_t size), path, room_, size)
WITH_PATH(char *, realpath, (const char *restrict path, char *restrict resolved), path, resolved)

// What they call that were built with _FORTIFY_SOURCE. The C library checks the rest.
char *__realpath_chk(const char *, char *, size_t);
ssize_t __readlink_chk(const char *, char *, size_t, size_t);
WITH_PATH(char *, __realpath_chk, (const char *path, char *resolved, size_t size), path, resolved, size)
WITH_PATH(
    ssize_t, __readlink_chk, (const char *path, char *room_, size_t nbytes, size_t size), path, room_, nbytes, size)

int ioctl(int fd, unsigned long request, ...)
{
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    int file = file_of(fd);
    if (!file) return REAL(ioctl)(fd, request, argument);
    long result = IN_PYTHON(calls.control(file, argument), -EIO);
    if (result >= 0) return (int)result;
    errno = (int)-result;
    return -1;
}

static void *map(int file, size_t nbytes, uint64_t offset)
{
    long address = IN_PYTHON(calls.map(file, offset, nbytes), -EIO);
    if (address < 0) {
        errno = (int)-address;
        return MAP_FAILED;
    }
    // A second mapping of the same pages, which the program may unmap (mremap(2): old_size 0).
    return mremap((void *)address, 0, nbytes, MREMAP_MAYMOVE);
}

void *mmap(void *address, size_t nbytes, int protection, int flags, int fd, off_t offset)
{
    int file = flags & MAP_ANONYMOUS ? 0 : file_of(fd);
    return file ? map(file, nbytes, (uint64_t)offset) : REAL(mmap)(address, nbytes, protection, flags, fd, offset);
}

void *mmap64(void *address, size_t nbytes, int protection, int flags, int fd, off64_t offset)
{
    int file = flags & MAP_ANONYMOUS ? 0 : file_of(fd);
    return file ? map(file, nbytes, (uint64_t)offset) : REAL(mmap64)(address, nbytes, protection, flags, fd, offset);
}

// UCX puts a jump to itself into the function above, and calls the kernel directly then.
long syscall(long number, ...)
{
    long arguments[6];
    va_list list;
    va_start(list, number);
    for (size_t i = 0; i < 6; i++) arguments[i] = va_arg(list, long);
    va_end(list);
    int file = number == SYS_mmap && !(arguments[3] & MAP_ANONYMOUS) ? file_of((int)arguments[4]) : 0;
    if (file) return (long)map(file, (size_t)arguments[1], (uint64_t)arguments[5]);
    return REAL(syscall)(
        number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
}

// A command to rdma_cm. One that finds no event is repeated when there is one, unless the program does not want to wait.
// In the kernel, a call that waits does so even when another thread closes the file: rping's does until the program ends.
ssize_t write(int fd, const void *bytes, size_t nbytes)
{
    int file = file_of(fd);
    if (!file) return REAL(write)(fd, bytes, nbytes);
    bool waits = !(fcntl(fd, F_GETFL) & O_NONBLOCK);
    struct pollfd event = {.fd = fd, .events = POLLIN};
    long result;
    while ((result = IN_PYTHON(calls.write(file, (uintptr_t)bytes, nbytes), -EIO)) == -EAGAIN && waits)
        if (poll(&event, 1, -1) < 0) return -1;
    if (result >= 0) return result;
    if (result == -EBADF && waits && *(const uint32_t *)bytes == GET_EVENT) {
        pause();
        result = -EINTR;
    }
    errno = (int)-result;
    return -1;
}

// librdmacm checks that it has opened a character device.
#define FSTAT(name, real_name, type) \
    int name(int fd, struct type *found) \
    { \
        return file_of(fd) ? REAL(real_name)("/dev/null", found) : REAL(name)(fd, found); \
    }

FSTAT(fstat, stat, stat)
FSTAT(fstat64, stat64, stat64)

int close(int fd)
{
    int file = file_of(fd);
    if (file) {
        __atomic_store_n(&files[fd], 0, __ATOMIC_RELEASE);
        IN_PYTHON(calls.close(file), 0);
    }
    return REAL(close)(fd);
}

// Where the kernel has RDMA devices of its own, libibverbs asks netlink for them, and never looks at sysfs.
int socket(int domain, int type, int protocol)
{
    if (domain == AF_NETLINK && protocol == NETLINK_RDMA) {
        errno = EPROTONOSUPPORT;
        return -1;
    }
    return REAL(socket)(domain, type, protocol);
}

// --- the data path ----------------------------------------------------------------------------------------------------
//
// libmlx5 posts and polls. A thread that polls in vain, or has just posted, then makes a turn of the engine: where cores
// are few, the engine's own thread gets none while programs poll.

// <infiniband/verbs.h>, which need not be there: the members that are used here, at the places that they have in the ABI.
struct cq { struct context *context; };
struct qp { struct context *context; };

struct context {
    void *device, *before_poll_cq[11];
    int (*poll_cq)(struct cq *cq, int most, void *found);
    void *before_post_send[13];
    int (*post_send)(struct qp *qp, void *request, void **bad);
    void *after_post_send[6];
    int cmd_fd;
};

struct qp_ex {
    struct {
        struct context *context;
        void *members[5];
        uint32_t numbers[4];
        pthread_mutex_t mutex;
        pthread_cond_t cond;
        uint32_t events_completed;
    } qp;
    uint64_t comp_mask, wr_id;
    unsigned flags;
    void (*before_wr_complete[18])(void);
    int (*wr_complete)(struct qp_ex *qp);
};

// libmlx5's own functions: the same for all contexts and queue pairs that use ours.
static int (*mlx5_poll_cq)(struct cq *, int, void *);
static int (*mlx5_post_send)(struct qp *, void *, void **);
static int (*mlx5_wr_complete)(struct qp_ex *);

static int poll_cq(struct cq *cq, int most, void *found)
{
    int count = mlx5_poll_cq(cq, most, found);
    if (count) return count;
    help_out(cq->context->cmd_fd, false);
    return mlx5_poll_cq(cq, most, found);
}

static int post_send(struct qp *qp, void *request, void **bad)
{
    int result = mlx5_post_send(qp, request, bad);
    help_out(qp->context->cmd_fd, true);
    return result;
}

static int wr_complete(struct qp_ex *qp)
{
    int result = mlx5_wr_complete(qp);
    help_out(qp->qp.context->cmd_fd, true);
    return result;
}

// Put a function of ours in front of libmlx5's.
#define IN_FRONT(place, mlx5, ours) \
    do { \
        if (!mlx5) mlx5 = (place); \
        if ((place) == mlx5) (place) = ours; \
    } while (0)

static bool is_helped(int fd) { return file_of(fd) && __atomic_load_n(&helped[fd].worker, __ATOMIC_RELAXED); }

// A function of libibverbs, which the program may have loaded for itself alone (RTLD_LOCAL).
static void *of_libibverbs(const char *name)
{
    void *library = dlopen("libibverbs.so.1", RTLD_LAZY | RTLD_NOLOAD), *found = library ? dlsym(library, name) : NULL;
    if (!found) fail("libibverbs.so.1 has no function ", name);
    return found;
}

struct context *ibv_open_device(void *device)
{
    struct context *(*open)(void *) = of_libibverbs("ibv_open_device"), *context = open ? open(device) : NULL;
    if (context && is_helped(context->cmd_fd)) {
        IN_FRONT(context->poll_cq, mlx5_poll_cq, poll_cq);
        IN_FRONT(context->post_send, mlx5_post_send, post_send);
    }
    return context;
}

struct qp_ex *ibv_qp_to_qp_ex(void *qp)
{
    struct qp_ex *(*convert)(void *) = of_libibverbs("ibv_qp_to_qp_ex"), *found = convert ? convert(qp) : NULL;
    if (found && is_helped(found->qp.context->cmd_fd)) IN_FRONT(found->wr_complete, mlx5_wr_complete, wr_complete);
    return found;
}
