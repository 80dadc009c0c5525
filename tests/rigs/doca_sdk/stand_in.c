/* A stand-in for the DOCA SDK's libraries: COMMON, VERBS or GPUNETIO says which one this is compiled to.
 *
 * Each call is a line of the file that DOCA_STAND_IN_LOG names: the function, then its arguments; an object is its kind
 * and number. DOCA_STAND_IN_FAILS is "function=code": that function returns the doca_error_t, or, if it returns none,
 * gives the code as number of entries. Objects of attributes keep what was set; queues take it over, and answer from it.
 */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INVALID_VALUE 6
#define FIRST_NUMBER 0x5D0001 /* of queues, UMEMs and UARs */
#define PAGE 4096
#define REGISTER 0x800
#define NO_DBR_REGISTER 0x600

typedef struct {
    const char *kind;
    int number;
    int count;
    struct {
        const char *name;
        uint64_t value, second;
    } set[32];
} object;

/* Log a call. `types` has a letter for each argument: o an object, n a number, s a string. */
static int called(const char *function, const char *types, ...)
{
    const char *fails = getenv("DOCA_STAND_IN_FAILS");
    size_t length = strlen(function);
    FILE *log = fopen(getenv("DOCA_STAND_IN_LOG"), "a");
    va_list arguments;
    va_start(arguments, types);
    fputs(function, log);
    for (; *types; types++) {
        if (*types == 'o') {
            const object *o = va_arg(arguments, const object *);
            fprintf(log, " %s#%d", o->kind, o->number - FIRST_NUMBER);
        } else if (*types == 's') {
            fprintf(log, " %s", va_arg(arguments, const char *));
        } else {
            fprintf(log, " %#llx", (unsigned long long)va_arg(arguments, uint64_t));
        }
    }
    fputc('\n', log);
    fclose(log);
    va_end(arguments);
    if (fails && !strncmp(fails, function, length) && fails[length] == '=')
        return atoi(fails + length + 1);
    return 0;
}

static int create(int error, const char *kind, const object *from, object **out)
{
    static int made;
    if (error)
        return error;
    *out = calloc(1, sizeof(object));
    if (from)
        **out = *from;
    (*out)->kind = kind;
    (*out)->number = FIRST_NUMBER + made++;
    return 0;
}

static int destroy(int error, object *o)
{
    if (!error)
        free(o);
    return error;
}

static int put(int error, object *o, const char *name, uint64_t value, uint64_t second)
{
    if (error)
        return error;
    for (int i = 0; i < o->count; i++)
        if (!strcmp(o->set[i].name, name))
            return INVALID_VALUE;
    o->set[o->count].name = name;
    o->set[o->count].value = value;
    o->set[o->count++].second = second;
    return 0;
}

static __attribute__((unused)) uint64_t *find(const object *o, const char *name)
{
    static uint64_t none[2];
    for (int i = 0; i < o->count; i++)
        if (!strcmp(o->set[i].name, name))
            return (uint64_t *)&o->set[i].value;
    none[0] = none[1] = 0;
    return none;
}

static __attribute__((unused)) uint64_t power_of_two(uint64_t n)
{
    uint64_t power = 1;
    while (power < n)
        power *= 2;
    return power;
}

#define CREATE(kind) \
    int doca_##kind##_create(object **out) { return create(called(__func__, ""), #kind, NULL, out); }
#define DESTROY(kind) \
    int doca_##kind##_destroy(object *o) { return destroy(called(__func__, "o", o), o); }
#define SET(kind, name, type) \
    int doca_##kind##_set_##name(object *o, type value) \
    { return put(called(__func__, "on", o, (uint64_t)value), o, #name, value, 0); }
#define SET_OBJECT(kind, name) \
    int doca_##kind##_set_##name(object *o, object *value) \
    { return put(called(__func__, "oo", o, value), o, #name, (uint64_t)(uintptr_t)value, 0); }
#define SET_PLACE(kind, name) \
    int doca_##kind##_set_##name(object *o, object *umem, uint64_t offset) \
    { return put(called(__func__, "oon", o, umem, offset), o, #name, (uint64_t)(uintptr_t)umem, offset); }
#define CREATE_QUEUE(kind) \
    int doca_##kind##_create(object *context, object *attr, object **out) \
    { return create(called(__func__, "oo", context, attr), #kind, attr, out); }
#define NUMBER(kind, name) \
    uint32_t doca_##kind##_get_##name(object *o) { called(__func__, "o", o); return o->number; }

#ifdef COMMON
int doca_rdma_bridge_open_dev_from_pd(void *pd, object **out)
{
    return create(called(__func__, "n", (uint64_t)(uintptr_t)pd), "dev", NULL, out);
}

int doca_dev_close(object *dev) { return destroy(called(__func__, "o", dev), dev); }

int doca_umem_create(object *dev, void *address, size_t size, uint32_t access, object **out)
{
    int error = called(__func__, "onnn", dev, (uint64_t)(uintptr_t)address, (uint64_t)size, (uint64_t)access);
    if (!(error = create(error, "umem", NULL, out)))
        put(0, *out, "address", (uint64_t)(uintptr_t)address, 0);
    return error;
}

int doca_umem_get_id(object *umem, uint32_t *id)
{
    *id = umem->number;
    return called(__func__, "o", umem);
}
DESTROY(umem)

int doca_uar_create(object *dev, int kind, object **out)
{
    int error = create(called(__func__, "on", dev, (uint64_t)kind), "uar", NULL, out);
    if (!error)
        put(0, *out, "page", (uint64_t)(uintptr_t)aligned_alloc(PAGE, PAGE), 0);
    return error;
}

int doca_uar_id_get(object *uar, uint32_t *id)
{
    *id = uar->number;
    return called(__func__, "o", uar);
}

int doca_uar_reg_addr_get(object *uar, uint64_t *address)
{
    *address = *find(uar, "page") + REGISTER;
    return called(__func__, "o", uar);
}
DESTROY(uar)
#endif

#ifdef VERBS
int doca_verbs_bridge_verbs_context_import(void *ibv_context, uint32_t flags, object **out)
{
    return create(called(__func__, "nn", (uint64_t)(uintptr_t)ibv_context, (uint64_t)flags), "context", NULL, out);
}

int doca_verbs_bridge_verbs_pd_import(void *ibv_pd, object **out)
{
    return create(called(__func__, "n", (uint64_t)(uintptr_t)ibv_pd), "pd", NULL, out);
}
DESTROY(verbs_context)
DESTROY(verbs_pd)

typedef struct { uint8_t raw[16]; } gid;

int doca_verbs_ah_attr_create(object *context, object **out)
{
    return create(called(__func__, "o", context), "ah_attr", NULL, out);
}

int doca_verbs_ah_attr_set_gid(object *o, gid value)
{
    char text[33];
    for (int i = 0; i < 16; i++)
        sprintf(text + 2 * i, "%02x", value.raw[i]);
    return put(called(__func__, "os", o, text), o, "gid", 0, 0);
}
SET(verbs_ah_attr, addr_type, int)
SET(verbs_ah_attr, dlid, uint32_t)
SET(verbs_ah_attr, sl, uint8_t)
SET(verbs_ah_attr, sgid_index, uint8_t)
SET(verbs_ah_attr, static_rate, uint8_t)
SET(verbs_ah_attr, hop_limit, uint8_t)
SET(verbs_ah_attr, traffic_class, uint8_t)
DESTROY(verbs_ah_attr)

CREATE(verbs_cq_attr)
SET(verbs_cq_attr, cq_size, uint32_t)
SET(verbs_cq_attr, cq_overrun, uint8_t)
SET(verbs_cq_attr, cq_collapsed, uint8_t)
SET(verbs_cq_attr, external_datapath_en, uint8_t)
SET_PLACE(verbs_cq_attr, external_umem)
SET_OBJECT(verbs_cq_attr, external_uar)
DESTROY(verbs_cq_attr)
CREATE_QUEUE(verbs_cq)
DESTROY(verbs_cq)
NUMBER(verbs_cq, cqn)

static uint64_t ring(const object *queue)
{
    const uint64_t *place = find(queue, "external_umem");
    return *find((object *)(uintptr_t)place[0], "address") + place[1];
}

static uint64_t behind(const object *queue, uint64_t bytes) { return ring(queue) + (bytes + 63) / 64 * 64; }

void doca_verbs_cq_get_wq(object *cq, uint64_t *ring_at, uint32_t *entries, uint8_t *entry_size)
{
    int wrong = called(__func__, "o", cq);
    *ring_at = ring(cq);
    *entries = wrong ? (uint64_t)wrong : *find(cq, "cq_size");
    *entry_size = 64;
}

void doca_verbs_cq_get_dbr_addr(object *cq, uint64_t *uar_register, uint64_t *consumer, uint64_t *arm)
{
    called(__func__, "o", cq);
    *uar_register = *find((object *)(uintptr_t)*find(cq, "external_uar"), "page") + 0x20;
    *consumer = behind(cq, *find(cq, "cq_size") * 64);
    *arm = *consumer + 4;
}

CREATE(verbs_srq_init_attr)
SET(verbs_srq_init_attr, srq_wr, uint32_t)
SET(verbs_srq_init_attr, receive_max_sges, uint32_t)
SET(verbs_srq_init_attr, type, int)
SET_OBJECT(verbs_srq_init_attr, pd)
SET(verbs_srq_init_attr, external_datapath_en, uint8_t)
SET_PLACE(verbs_srq_init_attr, external_umem)
DESTROY(verbs_srq_init_attr)
CREATE_QUEUE(verbs_srq)
DESTROY(verbs_srq)
NUMBER(verbs_srq, srqn)

static int linked(const object *srq) { return *find(srq, "type") == 0; }
static uint64_t srq_entries(const object *srq) { return power_of_two(*find(srq, "srq_wr") + linked(srq)); }
static uint64_t srq_stride(const object *srq)
{
    return power_of_two(16 * (*find(srq, "receive_max_sges") + linked(srq)));
}

void doca_verbs_srq_get_wq(object *srq, uint64_t *ring_at, uint32_t *entries, uint32_t *stride)
{
    int wrong = called(__func__, "o", srq);
    *ring_at = ring(srq);
    *entries = wrong ? (uint64_t)wrong : srq_entries(srq);
    *stride = srq_stride(srq);
}

uint64_t doca_verbs_srq_get_dbr_addr(object *srq)
{
    called(__func__, "o", srq);
    return behind(srq, srq_entries(srq) * srq_stride(srq));
}

CREATE(verbs_qp_init_attr)
SET_OBJECT(verbs_qp_init_attr, pd)
SET_OBJECT(verbs_qp_init_attr, send_cq)
SET_OBJECT(verbs_qp_init_attr, receive_cq)
SET_OBJECT(verbs_qp_init_attr, srq)
SET(verbs_qp_init_attr, sq_wr, uint32_t)
SET(verbs_qp_init_attr, rq_wr, uint32_t)
SET(verbs_qp_init_attr, send_max_sges, uint32_t)
SET(verbs_qp_init_attr, receive_max_sges, uint32_t)
SET(verbs_qp_init_attr, user_index, uint32_t)
SET(verbs_qp_init_attr, qp_type, uint32_t)
SET(verbs_qp_init_attr, external_datapath_en, uint8_t)
SET_PLACE(verbs_qp_init_attr, external_umem)
SET_PLACE(verbs_qp_init_attr, external_dbr_umem)
SET_OBJECT(verbs_qp_init_attr, external_uar)
SET(verbs_qp_init_attr, core_direct_master, uint8_t)
SET(verbs_qp_init_attr, send_dbr_mode, int)
SET(verbs_qp_init_attr, cqe_inline, uint8_t)
DESTROY(verbs_qp_init_attr)
CREATE_QUEUE(verbs_qp)
DESTROY(verbs_qp)
NUMBER(verbs_qp, qpn)

void doca_verbs_qp_get_wq(object *qp, uint64_t *sq, uint32_t *sq_entries, uint64_t *rq, uint32_t *rq_entries,
                          uint32_t *stride)
{
    int wrong = called(__func__, "o", qp);
    uint64_t wqe = (48 + 16 * *find(qp, "send_max_sges") + 63) / 64 * 64;
    *stride = 16 * power_of_two(*find(qp, "receive_max_sges"));
    *rq_entries = *find(qp, "rq_wr") ? power_of_two(*find(qp, "rq_wr") * *stride) / *stride : 0;
    *sq_entries = *find(qp, "sq_wr") ? power_of_two(*find(qp, "sq_wr") * wqe) / 64 : 0;
    if (wrong)
        *sq_entries = wrong;
    *rq = ring(qp);
    *sq = *rq + *rq_entries * *stride;
}

uint64_t doca_verbs_qp_get_dbr_addr(object *qp)
{
    const uint64_t *place = find(qp, "external_dbr_umem");
    called(__func__, "o", qp);
    return *find((object *)(uintptr_t)place[0], "address") + place[1];
}

uint64_t doca_verbs_qp_get_uar_addr(object *qp)
{
    called(__func__, "o", qp);
    return *find((object *)(uintptr_t)*find(qp, "external_uar"), "page")
           + (*find(qp, "send_dbr_mode") ? NO_DBR_REGISTER : REGISTER);
}

CREATE(verbs_qp_attr)
SET(verbs_qp_attr, next_state, int)
SET(verbs_qp_attr, path_mtu, int)
SET(verbs_qp_attr, rq_psn, uint32_t)
SET(verbs_qp_attr, sq_psn, uint32_t)
SET(verbs_qp_attr, dest_qp_num, uint32_t)
SET(verbs_qp_attr, allow_remote_write, int)
SET(verbs_qp_attr, allow_remote_read, int)
SET(verbs_qp_attr, atomic_mode, int)
SET_OBJECT(verbs_qp_attr, ah_attr)
SET(verbs_qp_attr, pkey_index, uint16_t)
SET(verbs_qp_attr, port_num, uint16_t)
SET(verbs_qp_attr, ack_timeout, uint16_t)
SET(verbs_qp_attr, retry_cnt, uint16_t)
SET(verbs_qp_attr, rnr_retry, uint16_t)
SET(verbs_qp_attr, min_rnr_timer, uint16_t)
SET(verbs_qp_attr, max_rd_atomic, uint8_t)
SET(verbs_qp_attr, max_dest_rd_atomic, uint8_t)
DESTROY(verbs_qp_attr)

static uint64_t *state_of(object *qp)
{
    put(0, qp, "state", 0, 0); /* refused when it is there */
    return find(qp, "state");
}

int doca_verbs_qp_modify(object *qp, object *attr, int mask)
{
    int error = called(__func__, "oon", qp, attr, (uint64_t)mask);
    if (!error)
        *state_of(qp) = *find(attr, "next_state");
    return error;
}

int doca_verbs_qp_query(object *qp, object *attr, object *init_attr, int *mask)
{
    int error = called(__func__, "ooon", qp, attr, init_attr, (uint64_t)*mask);
    return error ? error : put(0, attr, "found", *state_of(qp), 0);
}

int doca_verbs_qp_attr_get_current_state(object *attr)
{
    int wrong = called(__func__, "o", attr);
    return wrong ? wrong : (int)*find(attr, "found");
}
#endif

#ifdef GPUNETIO
int doca_gpu_create(const char *bus_id, object **out)
{
    return create(called(__func__, "s", bus_id), "gpu", NULL, out);
}
DESTROY(gpu)
#endif
