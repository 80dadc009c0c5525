// libibverbs.so.1 and libmlx5.so.1 in one file, with a software NIC of the same process behind them.
//
// Layouts are those of rdma-core's own headers. What a library or the kernel refuses is refused here, with the errno that
// they answer (libibverbs(7), mlx5dv(7) and their pages; drivers/infiniband/hw/mlx5/devx.c of Linux for DEVX). Whatever
// passes is handed to a table of functions, which Python fills (calls.py): these return a number, or a negative errno.
//
// What crashes real libraries, as use after free does, is complained of, and refused with EINVAL. So that it is seen,
// nothing that was handed out is ever freed.

#define _GNU_SOURCE
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>

#undef ibv_query_port  // macros over the exported functions
#undef ibv_reg_mr

enum { MAX_DEVICES = 8, PAGE = 4096, LOG_PAGE = 12, PORTS = 1, MAX_EVENT_TYPES = 16, EQE = 64 };

#ifndef MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED
#define MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED (1u << 31)  // since rdma-core 45
#endif

// The order of what query_device and query_port fill in; calls.py has the same.
enum {
    NODE_GUID, SYS_IMAGE_GUID, MAX_MR_SIZE, VENDOR_ID, VENDOR_PART_ID, HW_VER, MAX_QP, MAX_QP_WR, MAX_SGE, MAX_CQ,
    MAX_CQE, MAX_MR, MAX_PD, MAX_QP_RD_ATOM, MAX_QP_INIT_RD_ATOM, MAX_AH, MAX_SRQ, MAX_SRQ_WR, MAX_SRQ_SGE, MAX_PKEYS,
    PHYS_PORT_CNT, DEVICE_VALUES,
};
enum { STATE, MAX_MTU, ACTIVE_MTU, GID_TBL_LEN, LID, SM_LID, LMC, LINK_LAYER, ACTIVE_WIDTH, ACTIVE_SPEED,
       PORT_VALUES };
enum { COOKIE, TYPE, NUMBER, EVENT_VALUES };

typedef int64_t i64;
typedef uint64_t u64;

static struct calls {
    i64 (*enter)(const char *function, i64 context);  // the errno that the call is to fail with, or 0
    i64 (*complain)(const char *function, const char *what);
    i64 (*count_devices)(void);
    i64 (*open)(i64 device);
    i64 (*async_fd)(i64 context);
    i64 (*close)(i64 context);
    i64 (*query_device)(i64 context, char *fw_ver, u64 *values);
    i64 (*query_port)(i64 context, i64 port, u64 *values);
    i64 (*query_gid)(i64 context, i64 port, i64 index, uint8_t *gid);  // its type
    i64 (*alloc_pd)(i64 context);
    i64 (*dealloc_pd)(i64 context, i64 pdn);
    i64 (*reg_mr)(i64 context, i64 pdn, u64 address, u64 length, u64 iova, i64 access);  // the key
    i64 (*reg_dmabuf_mr)(i64 context, i64 pdn, i64 fd, u64 offset, u64 length, u64 iova, i64 access);
    // `changes` are IBV_REREG_MR_CHANGE_*; what has not changed is not looked at.
    i64 (*rereg_mr)(i64 context, i64 key, i64 changes, i64 pdn, u64 address, u64 length, i64 access);
    i64 (*dereg_mr)(i64 context, i64 key);
    i64 (*resolve)(i64 context, i64 port, i64 sgid_index, const uint8_t *dgid, uint8_t *mac);
    i64 (*get_async_event)(i64 context, u64 *port);  // its type
    i64 (*obj_create)(i64 context, const void *in, u64 inlen, void *out, u64 outlen);
    i64 (*obj_modify)(i64 context, i64 object, const void *in, u64 inlen, void *out, u64 outlen);
    i64 (*obj_query)(i64 context, i64 object, const void *in, u64 inlen, void *out, u64 outlen);
    i64 (*obj_destroy)(i64 context, i64 object);
    i64 (*general_cmd)(i64 context, const void *in, u64 inlen, void *out, u64 outlen);
    i64 (*query_eqn)(i64 context, i64 vector);
    i64 (*reg_umem)(i64 context, u64 address, u64 length, i64 access);
    i64 (*reg_dmabuf_umem)(i64 context, i64 fd, u64 offset, u64 length, i64 access);
    i64 (*dereg_umem)(i64 context, i64 umem);
    i64 (*alloc_uar)(i64 context, i64 kind, u64 *base);  // the page's id
    i64 (*free_uar)(i64 context, i64 page);
    i64 (*create_event_channel)(i64 context);
    i64 (*event_fd)(i64 context, i64 channel);
    i64 (*destroy_event_channel)(i64 context, i64 channel);
    i64 (*subscribe)(i64 context, i64 channel, i64 object, const uint16_t *types, i64 count, u64 cookie);
    i64 (*get_event)(i64 context, i64 channel, u64 *event);
    i64 (*attach_flow_table)(i64 context, i64 object);  // the rule's handle
    i64 (*detach_flow_table)(i64 context, i64 rule);
    i64 (*open_kernel_path)(i64 context, u64 *table);
    i64 (*close_kernel_path)(i64 context, i64 path);
} calls;
static bool installed;
static char sysfs[IBV_SYSFS_PATH_MAX - IBV_SYSFS_NAME_MAX], prefix[16];

// `folder` is what devices find in place of /sys/class; their names are `name` and a number.
void stand_in_install(const struct calls *functions, const char *folder, const char *name)
{
    calls = *functions;
    snprintf(sysfs, sizeof sysfs, "%s", folder);
    snprintf(prefix, sizeof prefix, "%s", name);
    installed = true;
}

// --- what is handed out -----------------------------------------------------------------------------------------------

enum tag {  // of living objects; the complement is that of dead ones
    CONTEXT = 0x57410001, OF_PD, OF_MR, OF_AH, OF_OBJECT, OF_UMEM, OF_UAR, OF_CHANNEL, OF_MATCHER, OF_FLOW, OF_ANCHOR,
};

struct context {
    struct verbs_context verbs;  // ends with what the caller sees
    u64 tag;
    i64 handle;
    struct mlx5dv_devx_uar *nc_uar;  // the one that all have who ask for a non-cached one
};

struct head {  // stands before every other object
    u64 tag;
    struct context *context;
    i64 number;
    i64 users;  // address handles of a PD
} __attribute__((aligned(16)));

struct ah {
    struct ibv_ah ibv;
    struct mlx5_wqe_av av;
    bool counted;
};
struct object {
    uint16_t creator;
    uint32_t number;
};

struct channel {
    struct mlx5dv_devx_event_channel dv;
    bool omit_data;
};

static void complain(const char *function, const char *what)
{
    if (installed) calls.complain(function, what);
}

static void *failed(i64 error)
{
    errno = (int)error;
    return NULL;
}

static struct head *head_of(const void *object) { return (struct head *)object - 1; }

static i64 handle_of(const void *object) { return head_of(object)->context->handle; }

static void *make(struct context *context, enum tag tag, i64 number, size_t size)
{
    struct head *head = calloc(1, sizeof *head + size);
    if (!head) abort();
    *head = (struct head){tag, context, number, 0};
    return head + 1;
}

static void unmake(void *object) { head_of(object)->tag = ~head_of(object)->tag; }

static int enter(const char *function, const struct context *context)
{
    return installed ? (int)calls.enter(function, context->handle) : ENOSYS;
}

// Of every call on a context or object: whether that lives, and whether the call is to fail.
static int begin_context(const char *function, struct ibv_context *ibv)
{
    struct context *context = ibv ? (struct context *)verbs_get_ctx(ibv) : NULL;
    if (context && context->tag == CONTEXT) return enter(function, context);
    complain(function, ibv ? "the context is closed" : "the context is NULL");
    return EINVAL;
}

static int begin(const char *function, const void *object, enum tag tag)
{
    const struct head *head = object ? head_of(object) : NULL;
    if (head && head->tag == tag && head->context->tag == CONTEXT) return enter(function, head->context);
    const char *closed = head && head->tag == tag ? "the object's context is closed" : "the object is freed or no such";
    complain(function, head ? closed : "the object is NULL");
    return EINVAL;
}

static struct context *context_of(struct ibv_context *ibv) { return (struct context *)verbs_get_ctx(ibv); }

// A descriptor that can be read when `fd` can, with flags of its own: whether O_NONBLOCK is set is its user's business.
static int mirror(int fd)
{
    int mirrored = epoll_create1(EPOLL_CLOEXEC);
    if (mirrored < 0 || epoll_ctl(mirrored, EPOLL_CTL_ADD, fd, &(struct epoll_event){.events = EPOLLIN})) abort();
    return mirrored;
}

// As read(2) of the kernel's files of events: 0 when there is one, or an errno.
static int await(int fd)
{
    bool waits = !(fcntl(fd, F_GETFL) & O_NONBLOCK);
    int ready = poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, waits ? -1 : 0);
    return ready > 0 ? 0 : ready == 0 ? EAGAIN : errno;
}

// --- devices ----------------------------------------------------------------------------------------------------------

static struct device {
    struct ibv_device ibv;
    int users;  // lists that name it, and contexts
} devices[MAX_DEVICES];

static struct device *begin_device(const char *function, struct ibv_device *ibv)
{
    struct device *device = (struct device *)ibv;
    if (device >= devices && device < devices + MAX_DEVICES && __atomic_load_n(&device->users, __ATOMIC_RELAXED) > 0)
        return device;
    complain(function, "the device is in no list any more, and not open");
    return NULL;
}

static void use(struct device *device, int change) { __atomic_add_fetch(&device->users, change, __ATOMIC_RELAXED); }

struct ibv_device **ibv_get_device_list(int *num_devices)
{
    if (!installed) return failed(ENOSYS);
    i64 error = calls.enter(__func__, -1), count = error ? -error : calls.count_devices();
    if (count < 0) return failed(-count);
    struct ibv_device **list = calloc((size_t)count + 1, sizeof *list);
    if (!list) abort();
    for (int n = 0; n < count; n++) {
        struct ibv_device *ibv = &devices[n].ibv;
        ibv->node_type = IBV_NODE_CA;
        ibv->transport_type = IBV_TRANSPORT_IB;
        snprintf(ibv->name, sizeof ibv->name, "%s%d", prefix, n);
        snprintf(ibv->dev_name, sizeof ibv->dev_name, "uverbs%d", n);
        snprintf(ibv->dev_path, sizeof ibv->dev_path, "%s/infiniband_verbs/uverbs%d", sysfs, n);
        snprintf(ibv->ibdev_path, sizeof ibv->ibdev_path, "%s/infiniband/%s%d", sysfs, prefix, n);
        use(&devices[n], +1);
        list[n] = ibv;
    }
    if (num_devices) *num_devices = (int)count;
    return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
    if (!list) return complain(__func__, "the list is NULL");
    for (int n = 0; list[n]; n++) use((struct device *)list[n], -1);
    free(list);
}

const char *ibv_get_device_name(struct ibv_device *ibv)
{
    struct device *device = begin_device(__func__, ibv);
    return device ? device->ibv.name : NULL;
}

bool mlx5dv_is_supported(struct ibv_device *ibv)
{
    struct device *device = begin_device(__func__, ibv);
    return device && !calls.enter(__func__, -1);
}

// Plain objects do not exist here: the context's table has to be there, and answers.
static int absent(void) { return EOPNOTSUPP; }

static void *absent_object(void) { return failed(EOPNOTSUPP); }

static int query_port(struct ibv_context *, uint8_t, struct ibv_port_attr *, size_t);
static int query_rt_values(struct ibv_context *, struct ibv_values_ex *);
static int destroy_flow(struct ibv_flow *);

struct ibv_context *ibv_open_device(struct ibv_device *ibv)
{
    struct device *device = begin_device(__func__, ibv);
    if (!device) return failed(ENODEV);
    i64 error = calls.enter(__func__, -1), handle = error ? -error : calls.open(device - devices);
    if (handle < 0) return failed(-handle);
    struct context *context = calloc(1, sizeof *context);
    if (!context) abort();
    context->tag = CONTEXT;
    context->handle = handle;
    context->verbs.sz = sizeof context->verbs;
    context->verbs.query_port = query_port;
    context->verbs.query_rt_values = query_rt_values;
    context->verbs.ibv_destroy_flow = destroy_flow;
    struct ibv_context *seen = &context->verbs.context;
    seen->device = ibv;
    seen->abi_compat = __VERBS_ABI_IS_EXTENDED;
    seen->num_comp_vectors = 1;
    seen->cmd_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    seen->async_fd = mirror((int)calls.async_fd(handle));
    pthread_mutex_init(&seen->mutex, NULL);
    seen->ops.alloc_mw = (typeof(seen->ops.alloc_mw))absent_object;
    seen->ops.bind_mw = (typeof(seen->ops.bind_mw))absent;
    seen->ops.dealloc_mw = (typeof(seen->ops.dealloc_mw))absent;
    seen->ops.poll_cq = (typeof(seen->ops.poll_cq))absent;
    seen->ops.req_notify_cq = (typeof(seen->ops.req_notify_cq))absent;
    seen->ops.post_srq_recv = (typeof(seen->ops.post_srq_recv))absent;
    seen->ops.post_send = (typeof(seen->ops.post_send))absent;
    seen->ops.post_recv = (typeof(seen->ops.post_recv))absent;
    use(device, +1);
    return seen;
}

int ibv_close_device(struct ibv_context *ibv)
{
    int error = begin_context(__func__, ibv);
    if (error) return error;
    struct context *context = context_of(ibv);
    context->tag = ~context->tag;
    close(ibv->cmd_fd);
    close(ibv->async_fd);
    use((struct device *)ibv->device, -1);
    return (int)-calls.close(context->handle);
}

int ibv_query_device(struct ibv_context *ibv, struct ibv_device_attr *attr)
{
    int error = begin_context(__func__, ibv);
    if (error) return error;
    u64 v[DEVICE_VALUES] = {0};
    memset(attr, 0, sizeof *attr);
    error = (int)-calls.query_device(context_of(ibv)->handle, attr->fw_ver, v);
    if (error) return error;
    attr->node_guid = htobe64(v[NODE_GUID]);
    attr->sys_image_guid = htobe64(v[SYS_IMAGE_GUID]);
    attr->max_mr_size = v[MAX_MR_SIZE];
    attr->page_size_cap = -(u64)PAGE;
    attr->vendor_id = (uint32_t)v[VENDOR_ID];
    attr->vendor_part_id = (uint32_t)v[VENDOR_PART_ID];
    attr->hw_ver = (uint32_t)v[HW_VER];
    attr->max_qp = (int)v[MAX_QP];
    attr->max_qp_wr = (int)v[MAX_QP_WR];
    attr->max_sge = attr->max_sge_rd = (int)v[MAX_SGE];
    attr->max_cq = (int)v[MAX_CQ];
    attr->max_cqe = (int)v[MAX_CQE];
    attr->max_mr = (int)v[MAX_MR];
    attr->max_pd = (int)v[MAX_PD];
    attr->max_qp_rd_atom = (int)v[MAX_QP_RD_ATOM];
    attr->max_qp_init_rd_atom = (int)v[MAX_QP_INIT_RD_ATOM];
    attr->atomic_cap = IBV_ATOMIC_HCA;
    attr->max_ah = (int)v[MAX_AH];
    attr->max_srq = (int)v[MAX_SRQ];
    attr->max_srq_wr = (int)v[MAX_SRQ_WR];
    attr->max_srq_sge = (int)v[MAX_SRQ_SGE];
    attr->max_pkeys = (uint16_t)v[MAX_PKEYS];
    attr->phys_port_cnt = (uint8_t)v[PHYS_PORT_CNT];
    return 0;
}

static enum ibv_mtu mtu_code(u64 nbytes) { return (enum ibv_mtu)(__builtin_ctzll(nbytes) - 7); }

static int ask_port(struct ibv_context *ibv, uint32_t port, struct ibv_port_attr *attr)
{
    u64 v[PORT_VALUES] = {0};
    if (port < 1 || port > PORTS) return EINVAL;
    int error = (int)-calls.query_port(context_of(ibv)->handle, port, v);
    if (error) return error;
    *attr = (struct ibv_port_attr){
        .state = (enum ibv_port_state)v[STATE],
        .max_mtu = mtu_code(v[MAX_MTU]),
        .active_mtu = mtu_code(v[ACTIVE_MTU]),
        .gid_tbl_len = (int)v[GID_TBL_LEN],
        .max_msg_sz = 1u << 30,
        .pkey_tbl_len = 1,
        .lid = (uint16_t)v[LID],
        .sm_lid = (uint16_t)v[SM_LID],
        .lmc = (uint8_t)v[LMC],
        .link_layer = (uint8_t)v[LINK_LAYER],
        .active_width = (uint8_t)v[ACTIVE_WIDTH],
        .active_speed = (uint8_t)v[ACTIVE_SPEED],
    };
    return 0;
}

static int query_port(struct ibv_context *ibv, uint8_t port, struct ibv_port_attr *attr, size_t size)
{
    struct ibv_port_attr found;
    int error = begin_context("ibv_query_port", ibv);
    if (!error) error = ask_port(ibv, port, &found);
    if (error) return error;
    memset(attr, 0, size);
    memcpy(attr, &found, size < sizeof found ? size : sizeof found);
    return 0;
}

int ibv_query_port(struct ibv_context *ibv, uint8_t port, struct _compat_ibv_port_attr *attr)
{
    // What callers of the exported function know of the structure ends with `flags`.
    return query_port(ibv, port, (struct ibv_port_attr *)attr, offsetof(struct ibv_port_attr, port_cap_flags2));
}

static i64 ask_gid(struct ibv_context *ibv, uint32_t port, uint32_t index, uint8_t *gid)
{
    struct ibv_port_attr attr;
    int error = ask_port(ibv, port, &attr);
    if (error) return -error;
    if (index >= (uint32_t)attr.gid_tbl_len) return -EINVAL;
    return calls.query_gid(context_of(ibv)->handle, port, index, gid);
}

int ibv_query_gid(struct ibv_context *ibv, uint8_t port, int index, union ibv_gid *gid)
{
    int error = begin_context(__func__, ibv);
    i64 type = error ? -error : ask_gid(ibv, port, (uint32_t)index, gid->raw);
    if (type == -ENODATA) memset(gid, 0, sizeof *gid);
    if (type >= 0 || type == -ENODATA) return 0;
    errno = (int)-type;
    return -1;
}

int _ibv_query_gid_ex(
    struct ibv_context *ibv, uint32_t port, uint32_t index, struct ibv_gid_entry *entry, uint32_t flags, size_t size)
{
    struct ibv_gid_entry found = {.gid_index = index, .port_num = port};
    int error = begin_context(__func__, ibv);
    if (!error && (flags || size < sizeof found.gid)) error = EINVAL;
    i64 type = error ? -error : ask_gid(ibv, port, index, found.gid.raw);
    if (type < 0) return (int)-type;
    found.gid_type = (uint32_t)type;
    memset(entry, 0, size);
    memcpy(entry, &found, size < sizeof found ? size : sizeof found);
    return 0;
}

int ibv_get_async_event(struct ibv_context *ibv, struct ibv_async_event *event)
{
    int error = begin_context(__func__, ibv);
    if (!error) error = await(ibv->async_fd);
    u64 port = 0;
    i64 type = error ? -error : calls.get_async_event(context_of(ibv)->handle, &port);
    if (type < 0) {
        errno = (int)-type;
        return -1;
    }
    *event = (struct ibv_async_event){.element.port_num = (int)port, .event_type = (enum ibv_event_type)type};
    return 0;
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
    if (!event) complain(__func__, "the event is NULL");
}

const char *ibv_event_type_str(enum ibv_event_type type)
{
#define NAME(type) [type] = #type
    static const char *names[] = {
        NAME(IBV_EVENT_CQ_ERR), NAME(IBV_EVENT_QP_FATAL), NAME(IBV_EVENT_QP_REQ_ERR), NAME(IBV_EVENT_QP_ACCESS_ERR),
        NAME(IBV_EVENT_COMM_EST), NAME(IBV_EVENT_SQ_DRAINED), NAME(IBV_EVENT_PATH_MIG), NAME(IBV_EVENT_PATH_MIG_ERR),
        NAME(IBV_EVENT_DEVICE_FATAL), NAME(IBV_EVENT_PORT_ACTIVE), NAME(IBV_EVENT_PORT_ERR),
        NAME(IBV_EVENT_LID_CHANGE), NAME(IBV_EVENT_PKEY_CHANGE), NAME(IBV_EVENT_SM_CHANGE), NAME(IBV_EVENT_SRQ_ERR),
        NAME(IBV_EVENT_SRQ_LIMIT_REACHED), NAME(IBV_EVENT_QP_LAST_WQE_REACHED), NAME(IBV_EVENT_CLIENT_REREGISTER),
        NAME(IBV_EVENT_GID_CHANGE), NAME(IBV_EVENT_WQ_FATAL),
    };
    return type < sizeof names / sizeof *names ? names[type] : "unknown";
}

__be64 ibv_get_device_guid(struct ibv_device *ibv)
{
    struct device *device = begin_device(__func__, ibv);
    char path[sizeof ibv->ibdev_path + sizeof "/node_guid"], text[32] = "";
    if (!device) return 0;
    snprintf(path, sizeof path, "%s/node_guid", device->ibv.ibdev_path);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    unsigned part[4] = {0};
    if (fgets(text, sizeof text, file)) sscanf(text, "%x:%x:%x:%x", &part[0], &part[1], &part[2], &part[3]);
    fclose(file);
    return htobe64((u64)part[0] << 48 | (u64)part[1] << 32 | (u64)part[2] << 16 | part[3]);
}

int ibv_query_pkey(struct ibv_context *ibv, uint8_t port, int index, __be16 *pkey)
{
    if (begin_context(__func__, ibv) || port < 1 || port > PORTS || index) return -1;
    *pkey = htobe16(0xFFFF);
    return 0;
}

int ibv_fork_init(void) { return 0; }

// --- protection domains and memory ------------------------------------------------------------------------------------

struct ibv_pd *ibv_alloc_pd(struct ibv_context *ibv)
{
    int error = begin_context(__func__, ibv);
    i64 pdn = error ? -error : calls.alloc_pd(context_of(ibv)->handle);
    if (pdn < 0) return failed(-pdn);
    struct ibv_pd *pd = make(context_of(ibv), OF_PD, pdn, sizeof *pd);
    pd->context = ibv;
    pd->handle = (uint32_t)pdn;
    return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
    int error = begin(__func__, pd, OF_PD);
    if (!error && head_of(pd)->users) error = EBUSY;
    if (!error) error = (int)-calls.dealloc_pd(handle_of(pd), head_of(pd)->number);
    if (!error) unmake(pd);
    return error;
}

enum {
    REMOTE_CHANGES = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC,
    MR_ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | REMOTE_CHANGES,
    NOT_HERE = IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB,
    UMEM_ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
};

// ib_check_mr_access and ib_umem_get: an errno.
static int check_region(u64 start, u64 length, unsigned access, unsigned known)
{
    if (access & NOT_HERE) return EOPNOTSUPP;
    if (access & ~known) return EINVAL;
    if (access & REMOTE_CHANGES && !(access & IBV_ACCESS_LOCAL_WRITE)) return EINVAL;
    return length == 0 || start + length < start ? EINVAL : 0;
}

static struct ibv_mr *new_mr(struct ibv_pd *pd, i64 key, void *address, size_t length)
{
    if (key < 0) return failed(-key);
    struct ibv_mr *mr = make(head_of(pd)->context, OF_MR, key, sizeof *mr);
    *mr = (struct ibv_mr){pd->context, pd, address, length, (uint32_t)key >> 8, (uint32_t)key, (uint32_t)key};
    return mr;
}

static struct ibv_mr *reg_mr(
    const char *function, struct ibv_pd *pd, void *address, size_t length, u64 iova, unsigned access)
{
    u64 start = (uintptr_t)address;
    int error = begin(function, pd, OF_PD);
    if (!error) error = check_region(start, length, access, MR_ACCESS | IBV_ACCESS_OPTIONAL_RANGE);
    if (!error && (start ^ iova) % PAGE) error = EINVAL;  // ib_uverbs_reg_mr: pages are mapped whole
    if (error) return failed(error);
    i64 key = calls.reg_mr(handle_of(pd), head_of(pd)->number, start, length, iova, access);
    return new_mr(pd, key, address, length);
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access)
{
    return reg_mr(__func__, pd, address, length, (uintptr_t)address, (unsigned)access);
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned access)
{
    return reg_mr(__func__, pd, address, length, iova, access);
}

struct ibv_mr *ibv_reg_dmabuf_mr(
    struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
    int error = begin(__func__, pd, OF_PD);
    if (!error) error = check_region(offset, length, (unsigned)access, MR_ACCESS | IBV_ACCESS_RELAXED_ORDERING);
    if (!error && (offset ^ iova) % PAGE) error = EINVAL;
    if (!error && fcntl(fd, F_GETFD) < 0) error = EBADF;
    if (error) return failed(error);
    i64 key = calls.reg_dmabuf_mr(handle_of(pd), head_of(pd)->number, fd, offset, length, iova, access);
    return new_mr(pd, key, (void *)(uintptr_t)offset, length);
}

// A driver may change the keys; this one leaves them.
int ibv_rereg_mr(struct ibv_mr *mr, int changes, struct ibv_pd *pd, void *address, size_t length, int access)
{
    bool moved = changes & IBV_REREG_MR_CHANGE_TRANSLATION;
    unsigned rights = changes & IBV_REREG_MR_CHANGE_ACCESS ? (unsigned)access : 0;
    int error = begin(__func__, mr, OF_MR);
    if (!error && changes & IBV_REREG_MR_CHANGE_PD) error = begin(__func__, pd, OF_PD);
    if (!error) error = check_region(moved ? (uintptr_t)address : 1, moved ? length : 1, rights, MR_ACCESS);
    if (error) {
        errno = error;
        return IBV_REREG_MR_ERR_INPUT;
    }
    i64 pdn = changes & IBV_REREG_MR_CHANGE_PD ? head_of(pd)->number : 0;
    i64 key = calls.rereg_mr(handle_of(mr), head_of(mr)->number, changes, pdn, (uintptr_t)address, length, access);
    if (key < 0) {
        errno = (int)-key;
        return IBV_REREG_MR_ERR_CMD;
    }
    if (changes & IBV_REREG_MR_CHANGE_PD) mr->pd = pd;
    if (moved) mr->addr = address, mr->length = length;
    mr->lkey = mr->rkey = (uint32_t)key;
    return 0;
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
    int error = begin(__func__, mr, OF_MR);
    if (!error) error = (int)-calls.dereg_mr(handle_of(mr), head_of(mr)->number);
    if (!error) unmake(mr);
    return error;
}

// --- address handles --------------------------------------------------------------------------------------------------

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
    struct ibv_port_attr port;
    int error = begin(__func__, pd, OF_PD);
    if (error) return failed(error);
    if (attr->port_num < 1 || attr->port_num > PORTS) return NULL;  // mlx5_create_ah leaves errno alone
    error = ask_port(pd->context, attr->port_num, &port);
    if (error) return failed(error);
    bool ethernet = port.link_layer == IBV_LINK_LAYER_ETHERNET;
    if (ethernet && !attr->is_global) return failed(EINVAL);
    struct ah *ah = make(head_of(pd)->context, OF_AH, 0, sizeof *ah);
    const struct ibv_global_route *grh = &attr->grh;
    ah->ibv = (struct ibv_ah){pd->context, pd, 0};
    ah->av.stat_rate_sl = (uint8_t)(attr->static_rate << 4 | (ethernet ? (attr->sl & 7) << 1 : attr->sl));
    ah->av.fl_mlid = attr->src_path_bits & 0x7F;
    if (attr->is_global) {
        ah->av.tclass = grh->traffic_class;
        ah->av.hop_limit = grh->hop_limit;
        uint32_t has_grh = ethernet ? 0 : 1u << 30;
        ah->av.grh_gid_fl = htobe32(has_grh | (uint32_t)grh->sgid_index << 20 | (grh->flow_label & 0xFFFFF));
        memcpy(ah->av.rgid, grh->dgid.raw, sizeof ah->av.rgid);
    }
    if (!ethernet) {
        ah->av.rlid = htobe16(attr->dlid);
        return &ah->ibv;
    }
    ah->av.rlid = htobe16(0xC000 | (rand() & 0x3FFF));  // RoCE v2: the UDP source port
    i64 found = calls.resolve(handle_of(pd), attr->port_num, grh->sgid_index, grh->dgid.raw, ah->av.rmac);
    if (found < 0) {
        unmake(ah);
        return failed(-found);
    }
    ah->counted = true;  // on InfiniBand the kernel does not hear of address handles
    head_of(pd)->users++;
    return &ah->ibv;
}

int ibv_destroy_ah(struct ibv_ah *ibv)
{
    struct ah *ah = (struct ah *)ibv;
    int error = begin(__func__, ibv, OF_AH);
    if (error) return error;
    if (ah->counted) head_of(ibv->pd)->users--;
    unmake(ah);
    return 0;
}

int mlx5dv_init_obj(struct mlx5dv_obj *obj, uint64_t type)
{
    int error = type == 0 || type & ~(u64)(MLX5DV_OBJ_PD | MLX5DV_OBJ_AH) ? EOPNOTSUPP : 0;
    if (!error && type & MLX5DV_OBJ_PD) {
        error = begin(__func__, obj->pd.in, OF_PD);
        if (!error) *obj->pd.out = (struct mlx5dv_pd){.pdn = (uint32_t)head_of(obj->pd.in)->number};
    }
    if (!error && type & MLX5DV_OBJ_AH) {
        error = begin(__func__, obj->ah.in, OF_AH);
        if (!error) *obj->ah.out = (struct mlx5dv_ah){.av = &((struct ah *)obj->ah.in)->av};
    }
    return error;
}

int mlx5dv_query_device(struct ibv_context *ibv, struct mlx5dv_context *attrs)
{
    int error = begin_context(__func__, ibv);
    if (error) return error;
    // As libmlx5 does: nothing that the caller has not asked for. Programs of older headers have a shorter structure.
    attrs->version = 0;
    attrs->flags = MLX5DV_CONTEXT_FLAGS_CQE_V1;
    attrs->comp_mask = 0;
    return 0;
}

// --- the clock: CLOCK_MONOTONIC, which the software NIC takes its timestamps from --------------------------------------

static u64 nanoseconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (u64)now.tv_sec * 1000000000 + (u64)now.tv_nsec;
}

static int query_rt_values(struct ibv_context *ibv, struct ibv_values_ex *values)
{
    int error = begin_context("ibv_query_rt_values_ex", ibv);
    if (error) return error;
    if (values->comp_mask != IBV_VALUES_MASK_RAW_CLOCK) return EINVAL;
    values->raw_clock = (struct timespec){0, (long)nanoseconds(CLOCK_MONOTONIC)};  // cycles, all of them, as mlx5 does
    return 0;
}

int mlx5dv_get_clock_info(struct ibv_context *ibv, struct mlx5dv_clock_info *info)
{
    int error = begin_context(__func__, ibv);
    if (error) return error;
    *info = (struct mlx5dv_clock_info){
        .nsec = nanoseconds(CLOCK_REALTIME), .last_cycles = nanoseconds(CLOCK_MONOTONIC), .mult = 1u << 20, .shift = 20,
        .mask = ~(u64)0,
    };
    return 0;
}

// --- DEVX -------------------------------------------------------------------------------------------------------------

enum { HEADER = 16, TUNNEL_AT = 4, NUMBER_AT = 9, TABLE_AT = 21, COUNTER_AT = 29, INDEX_AT = 33 };
enum { CREATE_CQ = 0x400, CREATE_QP = 0x500, CREATE_RMP = 0x90C };
enum {
    ALLOC_Q_COUNTER = 0x771, QUERY_Q_COUNTER = 0x773, ALLOC_TRANSPORT_DOMAIN = 0x816, CREATE_TIR = 0x900,
    CREATE_SQ = 0x904, CREATE_RQ = 0x908, CREATE_TIS = 0x912, CREATE_RQT = 0x916
};
enum {
    CREATE_FLOW_TABLE = 0x930, CREATE_FLOW_GROUP = 0x933, SET_FLOW_TABLE_ENTRY = 0x936, ALLOC_FLOW_COUNTER = 0x939,
    QUERY_FLOW_COUNTER = 0x93B
};
enum command { CREATE, MODIFY, QUERY, GENERAL };

// Which call takes an opcode, and which one has made the object that it is about. DESTROY_… are for none.
static const struct opcode {
    uint16_t code;
    enum command call;
    uint16_t creator;
} opcodes[] = {
    {CREATE_CQ, CREATE, CREATE_CQ},
    {0x402, QUERY, CREATE_CQ},    // QUERY_CQ
    {0x403, MODIFY, CREATE_CQ},   // MODIFY_CQ
    {CREATE_QP, CREATE, CREATE_QP},
    {0x502, MODIFY, CREATE_QP},   // RST2INIT_QP
    {0x503, MODIFY, CREATE_QP},   // INIT2RTR_QP
    {0x504, MODIFY, CREATE_QP},   // RTR2RTS_QP
    {0x505, MODIFY, CREATE_QP},   // RTS2RTS_QP
    {0x507, MODIFY, CREATE_QP},   // QP_2ERR
    {0x50A, MODIFY, CREATE_QP},   // QP_2RST
    {0x50B, QUERY, CREATE_QP},    // QUERY_QP
    {0x50E, MODIFY, CREATE_QP},   // INIT2INIT_QP
    {CREATE_RMP, CREATE, CREATE_RMP},
    {0x90D, MODIFY, CREATE_RMP},  // MODIFY_RMP
    {0x90F, QUERY, CREATE_RMP},   // QUERY_RMP
    {ALLOC_Q_COUNTER, CREATE, ALLOC_Q_COUNTER},
    {QUERY_Q_COUNTER, QUERY, ALLOC_Q_COUNTER},
    {ALLOC_TRANSPORT_DOMAIN, CREATE, ALLOC_TRANSPORT_DOMAIN},
    {CREATE_TIR, CREATE, CREATE_TIR},
    {0x901, MODIFY, CREATE_TIR},  // MODIFY_TIR
    {0x903, QUERY, CREATE_TIR},   // QUERY_TIR
    {CREATE_SQ, CREATE, CREATE_SQ},
    {0x905, MODIFY, CREATE_SQ},   // MODIFY_SQ
    {0x907, QUERY, CREATE_SQ},    // QUERY_SQ
    {CREATE_RQ, CREATE, CREATE_RQ},
    {0x909, MODIFY, CREATE_RQ},   // MODIFY_RQ
    {0x90B, QUERY, CREATE_RQ},    // QUERY_RQ
    {CREATE_TIS, CREATE, CREATE_TIS},
    {0x913, MODIFY, CREATE_TIS},  // MODIFY_TIS
    {0x915, QUERY, CREATE_TIS},   // QUERY_TIS
    {CREATE_RQT, CREATE, CREATE_RQT},
    {0x917, MODIFY, CREATE_RQT},  // MODIFY_RQT
    {0x919, QUERY, CREATE_RQT},   // QUERY_RQT
    {CREATE_FLOW_TABLE, CREATE, CREATE_FLOW_TABLE},
    {0x932, QUERY, CREATE_FLOW_TABLE},   // QUERY_FLOW_TABLE
    {0x93C, MODIFY, CREATE_FLOW_TABLE},  // MODIFY_FLOW_TABLE
    {CREATE_FLOW_GROUP, CREATE, CREATE_FLOW_GROUP},
    {SET_FLOW_TABLE_ENTRY, CREATE, SET_FLOW_TABLE_ENTRY},
    {SET_FLOW_TABLE_ENTRY, MODIFY, SET_FLOW_TABLE_ENTRY},
    {ALLOC_FLOW_COUNTER, CREATE, ALLOC_FLOW_COUNTER},
    {QUERY_FLOW_COUNTER, QUERY, ALLOC_FLOW_COUNTER},
    {0x100, GENERAL, 0},          // QUERY_HCA_CAP
    {0x101, GENERAL, 0},          // QUERY_ADAPTER
    {0x754, GENERAL, 0},          // QUERY_NIC_VPORT_CONTEXT
    {0x760, GENERAL, 0},          // QUERY_ROCE_ADDRESS
};

static uint32_t number_in(const uint8_t *box, size_t at)
{
    return (uint32_t)box[at] << 16 | (uint32_t)box[at + 1] << 8 | box[at + 2];
}

// Where an input names the object.
static size_t place_of_number(uint16_t code)
{
    switch (code) {
    case QUERY_Q_COUNTER: case QUERY_FLOW_COUNTER: return COUNTER_AT;
    case 0x932: case 0x93C: return TABLE_AT;
    case SET_FLOW_TABLE_ENTRY: return INDEX_AT;
    default: return NUMBER_AT;
    }
}

// What the kernel looks at before the device does: an errno.
static int check_mailbox(
    enum command call, const struct object *object, const void *in, size_t inlen, const void *out, size_t outlen)
{
    const uint8_t *box = in;
    if (!in || !out) return EFAULT;
    if (inlen < HEADER || outlen < HEADER) return EINVAL;
    if (call != GENERAL && (box[TUNNEL_AT] || box[TUNNEL_AT + 1])) return EINVAL;
    for (size_t i = 0; i < sizeof opcodes / sizeof *opcodes; i++) {
        if (opcodes[i].code != (box[0] << 8 | box[1]) || opcodes[i].call != call) continue;
        if (!object) return 0;
        size_t at = place_of_number(opcodes[i].code);
        if (opcodes[i].creator != object->creator || inlen < at + 3) return EINVAL;
        return number_in(box, at) == object->number ? 0 : EINVAL;
    }
    return EINVAL;
}

struct mlx5dv_devx_obj *mlx5dv_devx_obj_create(
    struct ibv_context *ibv, const void *in, size_t inlen, void *out, size_t outlen)
{
    int error = begin_context(__func__, ibv);
    if (!error) error = check_mailbox(CREATE, NULL, in, inlen, out, outlen);
    i64 handle = error ? -error : calls.obj_create(context_of(ibv)->handle, in, inlen, out, outlen);
    if (handle < 0) return failed(-handle);
    struct object *object = make(context_of(ibv), OF_OBJECT, handle, sizeof *object);
    const uint8_t *box = in;
    uint16_t code = (uint16_t)(box[0] << 8 | box[1]);
    // An entry is named by what asks for it, all else by the answer.
    *object = (struct object){code, code == SET_FLOW_TABLE_ENTRY ? number_in(in, INDEX_AT) : number_in(out, NUMBER_AT)};
    return (struct mlx5dv_devx_obj *)object;
}

int mlx5dv_devx_obj_modify(struct mlx5dv_devx_obj *obj, const void *in, size_t inlen, void *out, size_t outlen)
{
    int error = begin(__func__, obj, OF_OBJECT);
    if (!error) error = check_mailbox(MODIFY, (struct object *)obj, in, inlen, out, outlen);
    return error ? error : (int)-calls.obj_modify(handle_of(obj), head_of(obj)->number, in, inlen, out, outlen);
}

int mlx5dv_devx_obj_query(struct mlx5dv_devx_obj *obj, const void *in, size_t inlen, void *out, size_t outlen)
{
    int error = begin(__func__, obj, OF_OBJECT);
    if (!error) error = check_mailbox(QUERY, (struct object *)obj, in, inlen, out, outlen);
    return error ? error : (int)-calls.obj_query(handle_of(obj), head_of(obj)->number, in, inlen, out, outlen);
}

int mlx5dv_devx_obj_destroy(struct mlx5dv_devx_obj *obj)
{
    int error = begin(__func__, obj, OF_OBJECT);
    if (!error) error = (int)-calls.obj_destroy(handle_of(obj), head_of(obj)->number);
    if (!error) unmake(obj);
    return error;
}

int mlx5dv_devx_general_cmd(struct ibv_context *ibv, const void *in, size_t inlen, void *out, size_t outlen)
{
    int error = begin_context(__func__, ibv);
    if (!error) error = check_mailbox(GENERAL, NULL, in, inlen, out, outlen);
    return error ? error : (int)-calls.general_cmd(context_of(ibv)->handle, in, inlen, out, outlen);
}

// --- flow rules -------------------------------------------------------------------------------------------------------

// Only rules for all packets are here: what else there is to match on is the flow tables' business.
static bool matches_everything(const struct mlx5dv_flow_match_parameters *match)
{
    if (!match || match->match_sz > 512) return false;
    for (size_t i = 0; i < match->match_sz / 8; i++)
        if (match->match_buf[i]) return false;
    return true;
}

struct mlx5dv_flow_matcher *mlx5dv_create_flow_matcher(struct ibv_context *ibv, struct mlx5dv_flow_matcher_attr *attr)
{
    int error = begin_context(__func__, ibv);
    if (!error && (attr->type != IBV_FLOW_ATTR_NORMAL || attr->flags || attr->priority > 15)) error = EINVAL;
    if (!error && attr->comp_mask & MLX5DV_FLOW_MATCHER_MASK_FT_TYPE && attr->ft_type != MLX5DV_FLOW_TABLE_TYPE_NIC_RX)
        error = EOPNOTSUPP;
    if (!error && (attr->match_criteria_enable || !matches_everything(attr->match_mask))) error = EOPNOTSUPP;
    return error ? failed(error) : make(context_of(ibv), OF_MATCHER, 0, 1);
}

int mlx5dv_destroy_flow_matcher(struct mlx5dv_flow_matcher *matcher)
{
    int error = begin(__func__, matcher, OF_MATCHER);
    if (!error && head_of(matcher)->users) error = EBUSY;
    if (!error) unmake(matcher);
    return error;
}

struct flow {
    struct ibv_flow ibv;
    struct mlx5dv_flow_matcher *matcher;
};

struct ibv_flow *mlx5dv_create_flow(
    struct mlx5dv_flow_matcher *matcher, struct mlx5dv_flow_match_parameters *value, size_t count,
    struct mlx5dv_flow_action_attr actions[])
{
    int error = begin(__func__, matcher, OF_MATCHER);
    if (!error && (count != 1 || actions[0].type != MLX5DV_FLOW_ACTION_DEST_DEVX || !matches_everything(value)))
        error = EOPNOTSUPP;
    if (!error && (!actions[0].obj || head_of(actions[0].obj)->tag != OF_OBJECT)) {
        complain(__func__, "the object is freed or no such");
        error = EINVAL;
    }
    if (!error && ((struct object *)actions[0].obj)->creator != CREATE_FLOW_TABLE) error = EINVAL;
    if (error) return failed(error);
    struct context *context = head_of(matcher)->context;
    i64 handle = calls.attach_flow_table(context->handle, head_of(actions[0].obj)->number);
    if (handle < 0) return failed(-handle);
    struct flow *flow = make(context, OF_FLOW, handle, sizeof *flow);
    *flow = (struct flow){.ibv = {.context = &context->verbs.context}, .matcher = matcher};
    head_of(matcher)->users++;
    return &flow->ibv;
}

static int destroy_flow(struct ibv_flow *ibv)
{
    int error = begin("ibv_destroy_flow", ibv, OF_FLOW);
    if (!error) error = (int)-calls.detach_flow_table(handle_of(ibv), head_of(ibv)->number);
    if (error) return error;
    head_of(((struct flow *)ibv)->matcher)->users--;
    unmake(ibv);
    return 0;
}

struct mlx5dv_steering_anchor *mlx5dv_create_steering_anchor(
    struct ibv_context *ibv, struct mlx5dv_steering_anchor_attr *attr)
{
    int error = begin_context(__func__, ibv);
    if (!error && (attr->ft_type != MLX5DV_FLOW_TABLE_TYPE_NIC_RX || attr->priority > 15 || attr->comp_mask))
        error = EINVAL;
    u64 table = 0;
    i64 handle = error ? -error : calls.open_kernel_path(context_of(ibv)->handle, &table);
    if (handle < 0) return failed(-handle);
    struct mlx5dv_steering_anchor *anchor = make(context_of(ibv), OF_ANCHOR, handle, sizeof *anchor);
    anchor->id = (uint32_t)table;
    return anchor;
}

int mlx5dv_destroy_steering_anchor(struct mlx5dv_steering_anchor *anchor)
{
    int error = begin(__func__, anchor, OF_ANCHOR);
    if (!error) error = (int)-calls.close_kernel_path(handle_of(anchor), head_of(anchor)->number);
    if (!error) unmake(anchor);
    return error;
}

int mlx5dv_devx_query_eqn(struct ibv_context *ibv, uint32_t vector, uint32_t *eqn)
{
    int error = begin_context(__func__, ibv);
    i64 found = error ? -error : calls.query_eqn(context_of(ibv)->handle, vector);
    if (found >= 0) *eqn = (uint32_t)found;
    return found < 0 ? (int)-found : 0;
}

static struct mlx5dv_devx_umem *reg_umem(
    const char *function, struct ibv_context *ibv, const struct mlx5dv_devx_umem_in *in)
{
    bool dmabuf = in->comp_mask & MLX5DV_UMEM_MASK_DMABUF;
    u64 start = (uintptr_t)in->addr;
    int error = begin_context(function, ibv);
    if (!error && in->comp_mask & ~(u64)MLX5DV_UMEM_MASK_DMABUF) error = EOPNOTSUPP;
    if (!error && dmabuf && fcntl(in->dmabuf_fd, F_GETFD) < 0) error = EBADF;
    if (!error) error = check_region(start, in->size, in->access, UMEM_ACCESS);
    // ib_umem_find_best_pgoff: what the pages of the CPU cannot be put together to, the device must be able to take.
    if (!error && !(in->pgsz_bitmap & 1u << LOG_PAGE)) error = EINVAL;
    if (error) return failed(error);
    i64 handle = context_of(ibv)->handle, access = in->access;
    i64 id = dmabuf ? calls.reg_dmabuf_umem(handle, in->dmabuf_fd, start, in->size, access)
                    : calls.reg_umem(handle, start, in->size, access);
    if (id < 0) return failed(-id);
    struct mlx5dv_devx_umem *umem = make(context_of(ibv), OF_UMEM, id, sizeof *umem);
    umem->umem_id = (uint32_t)id;
    return umem;
}

struct mlx5dv_devx_umem *mlx5dv_devx_umem_reg(struct ibv_context *ibv, void *address, size_t size, uint32_t access)
{
    struct mlx5dv_devx_umem_in in = {.addr = address, .size = size, .access = access, .pgsz_bitmap = -(u64)PAGE};
    return reg_umem(__func__, ibv, &in);
}

struct mlx5dv_devx_umem *mlx5dv_devx_umem_reg_ex(struct ibv_context *ibv, struct mlx5dv_devx_umem_in *in)
{
    return reg_umem(__func__, ibv, in);
}

int mlx5dv_devx_umem_dereg(struct mlx5dv_devx_umem *umem)
{
    int error = begin(__func__, umem, OF_UMEM);
    if (!error) error = (int)-calls.dereg_umem(handle_of(umem), head_of(umem)->number);
    if (!error) unmake(umem);
    return error;
}

enum uar_kind { BLUEFLAME, NONCACHE, NONCACHE_DEDICATED };

struct mlx5dv_devx_uar *mlx5dv_devx_alloc_uar(struct ibv_context *ibv, uint32_t flags)
{
    int error = begin_context(__func__, ibv);
    if (!error && flags & ~(MLX5DV_UAR_ALLOC_TYPE_NC | MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED)) error = EOPNOTSUPP;
    if (error) return failed(error);
    struct context *context = context_of(ibv);
    enum uar_kind kind = flags & MLX5DV_UAR_ALLOC_TYPE_NC ? NONCACHE : flags ? NONCACHE_DEDICATED : BLUEFLAME;
    if (kind == NONCACHE && context->nc_uar) return context->nc_uar;  // mlx5_get_singleton_nc_uar
    u64 base = 0;
    i64 id = calls.alloc_uar(context->handle, kind, &base);
    if (id < 0) return failed(-id);
    struct mlx5dv_devx_uar *uar = make(context, OF_UAR, id, sizeof *uar);
    uar->page_id = (uint32_t)id;
    uar->base_addr = (void *)(uintptr_t)base;
    uar->reg_addr = (char *)uar->base_addr + 0x800;  // MLX5_BF_OFFSET
    if (kind == NONCACHE) context->nc_uar = uar;
    return uar;
}

void mlx5dv_devx_free_uar(struct mlx5dv_devx_uar *uar)
{
    if (begin(__func__, uar, OF_UAR) || uar == head_of(uar)->context->nc_uar) return;
    if (calls.free_uar(handle_of(uar), head_of(uar)->number)) complain(__func__, "a queue still rings there");
    unmake(uar);
}

// --- DEVX events ------------------------------------------------------------------------------------------------------

struct mlx5dv_devx_event_channel *mlx5dv_devx_create_event_channel(
    struct ibv_context *ibv, enum mlx5dv_devx_create_event_channel_flags flags)
{
    int error = begin_context(__func__, ibv);
    if (!error && flags & ~MLX5DV_DEVX_CREATE_EVENT_CHANNEL_FLAGS_OMIT_EV_DATA) error = EINVAL;
    i64 handle = error ? -error : context_of(ibv)->handle;
    i64 number = error ? -error : calls.create_event_channel(handle);
    if (number < 0) return failed(-number);
    struct channel *channel = make(context_of(ibv), OF_CHANNEL, number, sizeof *channel);
    channel->dv.fd = mirror((int)calls.event_fd(handle, number));
    channel->omit_data = flags;
    return &channel->dv;
}

void mlx5dv_devx_destroy_event_channel(struct mlx5dv_devx_event_channel *channel)
{
    if (begin(__func__, channel, OF_CHANNEL)) return;
    close(channel->fd);
    calls.destroy_event_channel(handle_of(channel), head_of(channel)->number);
    unmake(channel);
}

int mlx5dv_devx_subscribe_devx_event(
    struct mlx5dv_devx_event_channel *channel, struct mlx5dv_devx_obj *obj, uint16_t events_sz, uint16_t events_num[],
    uint64_t cookie)
{
    int error = begin(__func__, channel, OF_CHANNEL), count = events_sz / (int)sizeof *events_num;
    if (!error && obj) error = begin(__func__, obj, OF_OBJECT);
    if (!error && obj && head_of(obj)->context != head_of(channel)->context) error = EINVAL;
    if (!error && (events_sz % sizeof *events_num || count < 1 || count > MAX_EVENT_TYPES)) error = EINVAL;
    if (error) return error;
    i64 number = obj ? head_of(obj)->number : -1;
    return (int)-calls.subscribe(handle_of(channel), head_of(channel)->number, number, events_num, count, cookie);
}

static void put_be32(uint8_t *at, u64 value)
{
    uint32_t word = htobe32((uint32_t)value);
    memcpy(at, &word, sizeof word);
}

// PRM, event queue entries: the data begin at byte 32.
static void fill_eqe(uint8_t *eqe, u64 type, u64 number)
{
    enum { COMPLETION = 0x00, CQ_ERROR = 0x04, INTERNAL_ERROR = 0x08, PORT_CHANGE = 0x09 };
    memset(eqe, 0, EQE);
    eqe[1] = (uint8_t)type;
    if (type == PORT_CHANGE) {
        eqe[3] = (uint8_t)number;               // sub_type
        eqe[40] = (uint8_t)(number >> 8 << 4);  // the port, in the upper half
    } else if (type == CQ_ERROR) {
        put_be32(eqe + 32, number);
        eqe[43] = 1;  // an overrun
    } else if (type != INTERNAL_ERROR) {
        put_be32(eqe + 56, number);  // the CQ that has a completion; else the QP or SRQ, whose kind (0) is at byte 52
    }
}

ssize_t mlx5dv_devx_get_event(
    struct mlx5dv_devx_event_channel *dv, struct mlx5dv_devx_async_event_hdr *data, size_t room)
{
    u64 event[EVENT_VALUES] = {0};
    const struct channel *channel = (struct channel *)dv;
    int error = begin(__func__, dv, OF_CHANNEL);
    if (!error) error = await(dv->fd);
    size_t size = sizeof *data + (error || channel->omit_data ? 0 : EQE);
    if (!error && room < size) error = EINVAL;
    if (!error) error = (int)-calls.get_event(handle_of(dv), head_of(dv)->number, event);
    if (error) {
        errno = error;
        return -1;
    }
    data->cookie = event[COOKIE];
    if (!channel->omit_data) fill_eqe(data->out_data, event[TYPE], event[NUMBER]);
    return (ssize_t)size;
}

// --- plain verbs: not here --------------------------------------------------------------------------------------------

#define NO_OBJECT(type, name, ...) struct type *name(__VA_ARGS__) { return failed(EOPNOTSUPP); }
#define NO_CALL(name, ...) int name(__VA_ARGS__) { return EOPNOTSUPP; }

NO_OBJECT(ibv_comp_channel, ibv_create_comp_channel, struct ibv_context *c)
NO_OBJECT(ibv_cq, ibv_create_cq, struct ibv_context *c, int n, void *v, struct ibv_comp_channel *h, int k)
NO_OBJECT(ibv_srq, ibv_create_srq, struct ibv_pd *p, struct ibv_srq_init_attr *a)
NO_OBJECT(ibv_qp, ibv_create_qp, struct ibv_pd *p, struct ibv_qp_init_attr *a)
NO_OBJECT(ibv_qp, mlx5dv_create_qp, struct ibv_context *c, struct ibv_qp_init_attr_ex *a, struct mlx5dv_qp_init_attr *m)
NO_CALL(ibv_destroy_comp_channel, struct ibv_comp_channel *h)
NO_CALL(ibv_destroy_cq, struct ibv_cq *q)
NO_CALL(ibv_get_cq_event, struct ibv_comp_channel *h, struct ibv_cq **q, void **v)
NO_CALL(ibv_modify_srq, struct ibv_srq *s, struct ibv_srq_attr *a, int m)
NO_CALL(ibv_query_srq, struct ibv_srq *s, struct ibv_srq_attr *a)
NO_CALL(ibv_destroy_srq, struct ibv_srq *s)
NO_CALL(ibv_modify_qp, struct ibv_qp *q, struct ibv_qp_attr *a, int m)
NO_CALL(ibv_query_qp, struct ibv_qp *q, struct ibv_qp_attr *a, int m, struct ibv_qp_init_attr *i)
NO_CALL(ibv_destroy_qp, struct ibv_qp *q)
NO_CALL(ibv_query_ece, struct ibv_qp *q, struct ibv_ece *e)
NO_CALL(ibv_set_ece, struct ibv_qp *q, struct ibv_ece *e)

void ibv_ack_cq_events(struct ibv_cq *q, unsigned n) { complain(__func__, "there are no events of plain CQs"); }
