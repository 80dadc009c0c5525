// What NCCL loads by NCCL_GIN_PLUGIN: tables of functions, one for each version of its GIN interface. Every function goes
// to Python (calls.py). No data pass here: NCCL's kernels use the queues that Python has exported.
//
// NCCL 2.28 looks for GIN only in the library of a NET plugin, so there is a table of that kind, too. It has devices and
// refuses to connect.
//
// NCCL keeps pointers to the tables and, depending on its version, unloads the library: it is linked with nodelete, as
// threads of Python live on.

#include <pthread.h>

#include "python.h"

typedef int result;  // ncclResult_t
enum { SYSTEM_ERROR = 2, INVALID_USAGE = 5 };

typedef void (*logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);
enum { WARN = 2, INIT = 0x1, NET = 0x10 };  // of ncclDebugLogger_t

enum version { OF_NET = 0, V11 = 11, V13 = 13, V14 = 14 };  // abi.py's Version

// Filled by Python, in this order (calls.py).
static struct calls {
    result (*init)(void **ctx);
    result (*devices)(int *count);
    result (*gin_properties)(void *properties);
    result (*properties)(int version, int dev, void *properties);
    result (*listen)(void *ctx, int dev, void *handle, void **listen_comm);
    result (*connect)(void *ctx, void **handles, int nranks, int rank, void *listen_comm, void **coll_comm);
    result (*create_context)(int version, void *coll_comm, const void *config, void **gin_ctx, void **dev_handle);
    result (*reg_mr)(void *coll_comm, void *data, size_t size, int type, uint64_t flags, void **mhandle, void **gin_handle);
    result (*dereg_mr)(void *coll_comm, void *mhandle);
    result (*destroy_context)(void *gin_ctx);
    result (*close_coll)(void *coll_comm);
    result (*close_listen)(void *listen_comm);
    result (*progress)(void *object);
    result (*last_error)(void *gin_ctx, bool *has_error);
    result (*finalize)(void *ctx);
} calls;

static int started;
static logger nccl_log;

static void say(int level, const char *text)
{
    logger log = __atomic_load_n(&nccl_log, __ATOMIC_ACQUIRE);
    if (log) log(level, INIT | NET, "libnccl-gin-gpunetio.so", 0, "GIN/gpunetio: %s", text);
    else fprintf(stderr, "GIN/gpunetio: %s\n", text);
}

static void fail(const char *what, const char *about)
{
    char text[512];
    snprintf(text, sizeof text, "%s%s", what, about);
    say(WARN, text);
}

static void start(void)
{
    const struct python how = {
        .library = PYTHON_LIBRARY, .home = PYTHON_HOME, .version = PYTHON_VERSION, .path = PYTHON_PATH, .fail = fail,
    };
    char statement[192];
    snprintf(statement, sizeof statement, "from gpunetio.nccl.calls import install; install(%llu, %llu, %llu)",
             (unsigned long long)(uintptr_t)&calls, (unsigned long long)(uintptr_t)&started,
             (unsigned long long)(uintptr_t)&say);
    python_run(&how, statement);
}

static result init(void **ctx, uint64_t comm_id, logger log)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)comm_id;
    __atomic_store_n(&nccl_log, log, __ATOMIC_RELEASE);
    python_once(&once, start);
    return started ? IN_PYTHON(calls.init(ctx), SYSTEM_ERROR) : SYSTEM_ERROR;
}

static result cannot_call(void)
{
    say(WARN, started ? "a call after the end of Python" : "a call before init(), or after an init() that failed");
    return started ? SYSTEM_ERROR : INVALID_USAGE;
}

#define ASK(call) (started ? IN_PYTHON(calls.call, cannot_call()) : cannot_call())

#define CALL(name, call, parameters, ...) \
    static result name parameters { return ASK(call(__VA_ARGS__)); }

CALL(devices, devices, (int *count), count)
CALL(gin_properties, gin_properties, (void *p), p)
CALL(properties_v11, properties, (int dev, void *p), V11, dev, p)
CALL(properties_v13, properties, (int dev, void *p), V13, dev, p)
CALL(properties_v14, properties, (int dev, void *p), V14, dev, p)
CALL(listen_, listen, (void *ctx, int dev, void *handle, void **lc), ctx, dev, handle, lc)
CALL(connect_, connect, (void *ctx, void **handles, int nranks, int rank, void *lc, void **cc),
     ctx, handles, nranks, rank, lc, cc)
CALL(create_v13, create_context, (void *cc, const void *config, void **gc, void **dh), V13, cc, config, gc, dh)
CALL(create_v14, create_context, (void *cc, const void *config, void **gc, void **dh), V14, cc, config, gc, dh)
CALL(reg_mr, reg_mr, (void *cc, void *data, size_t size, int type, uint64_t flags, void **mh, void **gh),
     cc, data, size, type, flags, mh, gh)
CALL(dereg_mr, dereg_mr, (void *cc, void *mh), cc, mh)
CALL(destroy_context, destroy_context, (void *gc), gc)
CALL(close_coll, close_coll, (void *cc), cc)
CALL(close_listen, close_listen, (void *lc), lc)
CALL(progress, progress, (void *object), object)
CALL(last_error, last_error, (void *gc, bool *has_error), gc, has_error)
CALL(finalize, finalize, (void *ctx), ctx)

static result create_v11(void *cc, int signals, int counters, void **gc, void **dh)
{
    const int config[5] = {signals, counters, 1, 0, -1};  // of v13: one context, our depth, no traffic class
    return ASK(create_context(V11, cc, config, gc, dh));
}

// --- the NET table of NCCL 2.28 ------------------------------------------------------------------------------------------

CALL(net_properties, properties, (int dev, void *p), OF_NET, dev, p)

static result net_init(void **ctx, uint64_t comm_id, void *config, logger log, void *profiler)
{
    (void)config, (void)profiler;
    return init(ctx, comm_id, log);
}

static result no_net(void)
{
    say(WARN, "this plugin has no NET transport: NCCL wants one between two ranks that neither P2P nor SHM connects");
    return INVALID_USAGE;
}

// --- the tables: interfaces of NCCL 2.28.9, 2.30.4 and 2.30.7 ----------------------------------------------------------

#define EXPORTED __attribute__((visibility("default"))) const void *const
#define SIZE(table, bytes) _Static_assert(sizeof table == bytes, #table)

static const char NAME[] = "gpunetio";

EXPORTED ncclGinPlugin_v14[] = {
    NAME, init, devices, gin_properties, properties_v14, listen_, connect_, create_v14, reg_mr, NULL /* DMABUF */,
    dereg_mr, destroy_context, close_coll, close_listen, progress, last_error, finalize,
};
SIZE(ncclGinPlugin_v14, 136);

// iput, iputSignal, iget, iflush and test are for plugins of type PROXY.
EXPORTED ncclGinPlugin_v13[] = {
    NAME, init, devices, properties_v13, listen_, connect_, create_v13, reg_mr, NULL /* DMABUF */,
    dereg_mr, destroy_context, close_coll, close_listen, NULL, NULL, NULL, NULL, NULL, progress, last_error, finalize,
};
SIZE(ncclGinPlugin_v13, 168);

EXPORTED ncclGinPlugin_v11[] = {
    NAME, init, devices, properties_v11, listen_, connect_, create_v11, reg_mr, NULL /* DMABUF */,
    dereg_mr, destroy_context, close_coll, close_listen, NULL, NULL, NULL, progress, last_error, finalize,
};
SIZE(ncclGinPlugin_v11, 152);

EXPORTED ncclNetPlugin_v11[] = {
    NAME, net_init, devices, net_properties,
    no_net /* listen */, no_net /* connect */, no_net /* accept */, no_net /* regMr */, NULL /* regMrDmaBuf */,
    no_net /* deregMr */, no_net /* isend */, no_net /* irecv */, no_net /* iflush */, no_net /* test */,
    no_net /* closeSend */, no_net /* closeRecv */, no_net /* closeListen */, NULL /* getDeviceMr */,
    NULL /* irecvConsumed */, NULL /* makeVDevice */, finalize, NULL /* setNetAttr */,
};
SIZE(ncclNetPlugin_v11, 176);
