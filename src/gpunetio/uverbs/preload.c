// What a program's libibverbs and librdmacm take for the kernel: /dev/infiniband, /sys/class/infiniband, and ioctl, mmap,
// write, dup and close on what was opened there. LD_PRELOAD puts these functions in front of libc's. All else goes to libc.
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
    long (*refresh)(void);                                     // counters in sysfs
    long (*reach)(long file, const void *attributes);          // struct ibv_ah_attr
    void (*help_out)(long worker, long posted);                // a turn of the engine (nic/host/loop.py)
} calls;

// The open files, by descriptor; 0: not ours. Several descriptors may mean one file (dup(2)), which ends with the last one.
static int files[MAX_FDS];
static pthread_mutex_t files_change = PTHREAD_MUTEX_INITIALIZER;  // held while descriptors lose their files
static pid_t process;  // whose descriptors these are

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

static void refresh_counters(void);

static void fail(const char *what, const char *about) { fprintf(stderr, "gpunetio run: %s%s\n", what, about); }

// Whether only this user or root may change what is in the folder. Python has checked the way to it (trusted.py), and
// checks it again when it reads the ports.
static bool trusted(const char *root)
{
    static bool told;
    struct statx found;
    int before = errno;
    bool here = !REAL(statx)(AT_FDCWD, root, AT_SYMLINK_NOFOLLOW, STATX_TYPE | STATX_MODE | STATX_UID, &found);
    errno = before;
    bool good = here && S_ISDIR(found.stx_mode) && !(found.stx_mode & (S_IWGRP | S_IWOTH)) &&
                (found.stx_uid == geteuid() || found.stx_uid == 0);
    if (!good && !told)
        fail(here ? "no software NICs, as another user may change the folder that stands for them: "
                  : "no software NICs, as the folder that stands for them is gone: ", root);
    told |= !good;
    return good;
}

// The path with what stands for these folders, in `room`; or the path as it is.
static const char *place_of(const char *path, char room[PATH_MAX])
{
    const char *root = getenv("GPUNETIO_UVERBS");
    if (!path || !root) return path;
    for (size_t i = 0; i < sizeof PREFIXES / sizeof *PREFIXES; i++)
        if (!strncmp(path, PREFIXES[i], strlen(PREFIXES[i])) && trusted(root) &&
            snprintf(room, PATH_MAX, "%s%s", root, path) < PATH_MAX) {
            if (strstr(path, "counters/")) refresh_counters();
            return room;
        }
    return path;
}

static const char *device_in(const char *path)
{
    return strncmp(path, "/dev/infiniband/uverbs", 22) && strcmp(path, "/dev/infiniband/rdma_cm") ? NULL : path + 16;
}

// --- Python -----------------------------------------------------------------------------------------------------------

static int started;
static bool forked;  // from a process that had started Python, whose threads are not here

static void forget_threads(void);

static void forget(void)  // in a child of fork(2)
{
    forget_threads();
    if (!started) return;
    memset(files, 0, sizeof files);
    pthread_mutex_init(&files_change, NULL);
    forked = true;
    started = 0;
}

static const char *told(const char *variable)
{
    const char *text = getenv(variable);
    return text ? text : "";
}

static bool end_help(int fd);
static void end_with_the_program(void);

static void start(void)
{
    process = getpid();
    const struct python how = {
        .library = told("GPUNETIO_LIBPYTHON"), .home = told("GPUNETIO_PYTHONHOME"),
        .version = told("GPUNETIO_PYTHONVERSION"), .path = told("GPUNETIO_PATH"), .fail = fail,
    };
    char statement[160];
    snprintf(statement, sizeof statement, "from gpunetio.uverbs.calls import install; install(%llu, %llu, %llu)",
             (unsigned long long)(uintptr_t)&calls, (unsigned long long)(uintptr_t)&started,
             (unsigned long long)(uintptr_t)end_help);
    python_run(&how, statement);
    atexit(refresh_counters);
    end_with_the_program();
}

static void refresh_counters(void)
{
    if (started) IN_PYTHON(calls.refresh(), 0);
}

static bool ready(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    python_once(&once, start);
    if (forked) fail("a process that was forked after its parent had opened a device cannot open one: ", "use exec");
    return started;
}

// --- threads ----------------------------------------------------------------------------------------------------------
//
// A process ends with 0 when its first thread has ended by pthread_exit(3), and all others have ended. The threads of Python
// and of the NIC, of which the program knows nothing, never do. So they are counted, and do not count.

static pthread_key_t ending;          // its destructor is called when a thread ends that has one of these values
static const char FIRST = 0, OURS = 0;
static bool first_has_ended;
static int our_threads;

struct beginning { void *(*function)(void *); void *argument; };

static void *begin_ours(void *given)
{
    struct beginning begun = *(struct beginning *)given;
    free(given);
    python_depth = 1;  // for the threads that it creates
    pthread_setspecific(ending, &OURS);
    return begun.function(begun.argument);
}

int pthread_create(
    pthread_t *restrict thread, const pthread_attr_t *restrict attributes, void *(*function)(void *),
    void *restrict argument)
{
    if (!python_depth) return REAL(pthread_create)(thread, attributes, function, argument);
    struct beginning *begun = malloc(sizeof *begun);
    if (!begun) return EAGAIN;
    *begun = (struct beginning){function, argument};
    int code = REAL(pthread_create)(thread, attributes, begin_ours, begun);
    if (code) free(begun);
    else __atomic_add_fetch(&our_threads, 1, __ATOMIC_SEQ_CST);
    return code;
}

// The threads of this process. The first one is listed even if it has ended (proc(5)). INT_MAX if /proc cannot be read.
static int all_threads(void)
{
    DIR *folder = opendir("/proc/self/task");
    if (!folder) return INT_MAX;
    int count = 0;
    for (struct dirent *entry; (entry = readdir(folder));) count += *entry->d_name != '.';
    closedir(folder);
    return count;
}

static void *wait_for_the_program(void *unused)
{
    (void)unused;
    // Our threads count from after their beginning to before their end: a change meanwhile makes the difference too large.
    for (int ours, all;; usleep(10000)) {
        ours = __atomic_load_n(&our_threads, __ATOMIC_SEQ_CST);
        all = all_threads();
        if (all <= 1 + ours && ours == __atomic_load_n(&our_threads, __ATOMIC_SEQ_CST)) exit(0);
    }
}

// Wait for the program's threads, in a thread of ours, if the first one has ended and ours are there. Idempotent.
static void end_with_the_program(void)
{
    static bool waits;
    if (!started || !__atomic_load_n(&first_has_ended, __ATOMIC_SEQ_CST)) return;
    if (__atomic_exchange_n(&waits, true, __ATOMIC_SEQ_CST)) return;
    struct python_caller caller = python_enter();
    pthread_t thread;
    if (!pthread_create(&thread, NULL, wait_for_the_program, NULL)) pthread_detach(thread);
    python_leave(caller);
}

static void end_thread(void *which)
{
    if (which == &OURS) {
        __atomic_sub_fetch(&our_threads, 1, __ATOMIC_SEQ_CST);
        return;
    }
    __atomic_store_n(&first_has_ended, true, __ATOMIC_SEQ_CST);
    end_with_the_program();
}

static void forget_threads(void)  // the thread that has forked is the first one of the child
{
    our_threads = 0;
    pthread_setspecific(ending, &FIRST);
}

__attribute__((constructor)) static void begin(void)
{
    pthread_key_create(&ending, end_thread);
    pthread_setspecific(ending, &FIRST);
    pthread_atfork(NULL, NULL, forget);
}

// --- help for the engine ----------------------------------------------------------------------------------------------

// By descriptor of a device: the worker whose turns threads may make, and how many threads do that now.
static struct { long worker, helpers; } helped[MAX_FDS];

static void begin_help(int fd, long worker) { __atomic_store_n(&helped[fd].worker, worker, __ATOMIC_SEQ_CST); }

static void help_out(int fd, bool posted)
{
    if (!started) return;  // in a child, which has no engine
    int before = errno;    // the engine makes system calls
    __atomic_add_fetch(&helped[fd].helpers, 1, __ATOMIC_SEQ_CST);
    long worker = __atomic_load_n(&helped[fd].worker, __ATOMIC_SEQ_CST);
    int cancel;  // a thread that ended in the middle of a turn would keep it
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    if (worker) calls.help_out(worker, posted);
    pthread_setcancelstate(cancel, NULL);
    __atomic_sub_fetch(&helped[fd].helpers, 1, __ATOMIC_RELEASE);
    errno = before;
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

// The file that a descriptor means; 0: none of ours. A child of vfork(2) has this memory, but descriptors of its own.
static int file_of(int fd)
{
    int file = fd < 0 || fd >= MAX_FDS ? 0 : __atomic_load_n(&files[fd], __ATOMIC_ACQUIRE);
    return file && getpid() == process ? file : 0;
}

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

// A command to rdma_cm. One that finds no event is repeated when there is one, unless the program does not want to wait. The
// connection manager, whose threads run Python, makes the event: so a program in Python waits without Python's lock.
// In the kernel, a call that waits does so even when another thread closes the file: rping's does until the program ends.
ssize_t write(int fd, const void *bytes, size_t nbytes)
{
    int file = file_of(fd);
    if (!file) return REAL(write)(fd, bytes, nbytes);
    bool waits = !(fcntl(fd, F_GETFL) & O_NONBLOCK);
    struct pollfd event = {.fd = fd, .events = POLLIN};
    long result;
    while ((result = IN_PYTHON(calls.write(file, (uintptr_t)bytes, nbytes), -EIO)) == -EAGAIN && waits)
        if (WITHOUT_PYTHONS_LOCK(poll(&event, 1, -1)) < 0) return -1;
    if (result >= 0) return result;
    if (result == -EBADF && waits && *(const uint32_t *)bytes == GET_EVENT) {
        WITHOUT_PYTHONS_LOCK(pause());
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

// The descriptor is closed, or will mean something else.
static void let_go(int fd)
{
    if (!file_of(fd)) return;
    pthread_mutex_lock(&files_change);
    int file = __atomic_exchange_n(&files[fd], 0, __ATOMIC_ACQ_REL), others = 0;
    for (int other = 0; other < MAX_FDS; other++) others += files[other] == file;
    pthread_mutex_unlock(&files_change);
    if (!file) return;  // another thread was first
    if (others) end_help(fd);
    else IN_PYTHON(calls.close(file), 0);
}

int close(int fd)
{
    let_go(fd);
    return REAL(close)(fd);
}

enum { CLOSE_ON_EXEC = 1 << 2 /* CLOSE_RANGE_CLOEXEC */, CLOSE_RANGE = 436 /* SYS_close_range */ };

int close_range(unsigned first, unsigned last, int flags)
{
    for (unsigned fd = first; !(flags & CLOSE_ON_EXEC) && fd <= last && fd < MAX_FDS; fd++) let_go((int)fd);
    return (int)REAL(syscall)(CLOSE_RANGE, first, last, flags);
}

void closefrom(int first);
void closefrom(int first)
{
    for (int fd = first < 0 ? 0 : first; fd < MAX_FDS; fd++) let_go(fd);
    REAL(closefrom)(first);
}

// The result of duplicating a descriptor.
static int duplicated(int fd, int copy)
{
    int file = copy < 0 || copy >= MAX_FDS || copy == fd ? 0 : file_of(fd);
    if (!file) return copy;
    __atomic_store_n(&files[copy], file, __ATOMIC_RELEASE);
    return copy;
}

static bool is_open(int fd) { return REAL(fcntl)(fd, F_GETFD) >= 0; }

int dup(int fd) { return duplicated(fd, REAL(dup)(fd)); }

int dup2(int fd, int copy)
{
    if (fd != copy && file_of(copy) && is_open(fd)) let_go(copy);
    return duplicated(fd, REAL(dup2)(fd, copy));
}

int dup3(int fd, int copy, int flags)
{
    if (fd != copy && file_of(copy) && is_open(fd) && !(flags & ~O_CLOEXEC)) let_go(copy);
    return duplicated(fd, REAL(dup3)(fd, copy, flags));
}

#define FCNTL(name) \
    int name(int fd, int command, ...) \
    { \
        va_list list; \
        va_start(list, command); \
        void *argument = va_arg(list, void *); \
        va_end(list); \
        int result = REAL(name)(fd, command, argument); \
        return command == F_DUPFD || command == F_DUPFD_CLOEXEC ? duplicated(fd, result) : result; \
    }

FCNTL(fcntl)
FCNTL(fcntl64)

// Programs that call the kernel directly: UCX puts a jump to itself into mmap, others close descriptors like this.
long syscall(long number, ...)
{
    long arguments[6];
    va_list list;
    va_start(list, number);
    for (size_t i = 0; i < 6; i++) arguments[i] = va_arg(list, long);
    va_end(list);
    int file;
    switch (number) {
    case SYS_mmap:
        file = arguments[3] & MAP_ANONYMOUS ? 0 : file_of((int)arguments[4]);
        if (file) return (long)map(file, (size_t)arguments[1], (uint64_t)arguments[5]);
        break;
    case SYS_close: return close((int)arguments[0]);
    case CLOSE_RANGE: return close_range((unsigned)arguments[0], (unsigned)arguments[1], (int)arguments[2]);
    case SYS_dup3: return dup3((int)arguments[0], (int)arguments[1], (int)arguments[2]);
    }
    return REAL(syscall)(
        number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
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

// --- libibverbs -------------------------------------------------------------------------------------------------------
//
// Members of <infiniband/verbs.h>, which need not be there, at the places that they have in the ABI.

struct pd { struct context *context; };

// A function of libibverbs, which the program may have loaded for itself alone (RTLD_LOCAL).
static void *of_libibverbs(const char *name)
{
    void *library = dlopen("libibverbs.so.1", RTLD_LAZY | RTLD_NOLOAD), *found = library ? dlsym(library, name) : NULL;
    if (!found) fail("libibverbs.so.1 has no function ", name);
    return found;
}

// --- the data path ----------------------------------------------------------------------------------------------------
//
// libmlx5 posts and polls. A thread that polls in vain, or has just posted, then makes a turn of the engine: where cores
// are few, the engine's own thread gets none while programs poll.

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

// --- address handles --------------------------------------------------------------------------------------------------
//
// On InfiniBand, libmlx5 makes address handles without a call of the kernel, since a card needs nothing but the LID. A
// software NIC must know the way before the first datagram.

union ah_attributes { char bytes[32]; uint64_t alignment; };  // struct ibv_ah_attr, which is ib_uverbs_ah_attr

void *ibv_create_ah(struct pd *pd, union ah_attributes *attributes)
{
    void *(*create)(struct pd *, void *) = of_libibverbs("ibv_create_ah");
    int file = create ? file_of(pd->context->cmd_fd) : 0;
    long result = file ? IN_PYTHON(calls.reach(file, attributes), -EIO) : 0;
    if (result >= 0) return create ? create(pd, attributes) : NULL;
    errno = (int)-result;
    return NULL;
}

// libibverbs' own calls its own ibv_create_ah.
void *ibv_create_ah_from_wc(struct pd *pd, void *completion, void *header, uint8_t port)
{
    int (*initialize)(void *, uint8_t, void *, void *, void *) = of_libibverbs("ibv_init_ah_from_wc");
    union ah_attributes attributes;
    if (!initialize || initialize(pd->context, port, completion, header, &attributes)) return NULL;
    return ibv_create_ah(pd, &attributes);
}
