// The limits beside the figures of benchmarks/wire.py: what C does between two processes of one host, over UDP and over
// shared memory, without RDMA: no opcodes, keys, CRC, completions or retransmission.
//
//   cc -O3 -march=native -pthread wire_limits.c -o wire_limits && ./wire_limits udp-stream --count 4096
//
// Prints a line of JSON for each of `--repeat` runs. Both ends are children of this process and inherit the sockets and
// the shared memory. Ping-pongs wait as ours do: an application as in device/waiting.py, an engine as in nic/host/engine.py.
// Nothing waits beyond `--deadline` seconds, and what arrived is compared with what was to be sent.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103  // linux/udp.h
#define UDP_GRO 104
#endif

enum { LINE = 64, PAGE = 4096, MEMORY = 4 << 20, DATAGRAM = 65507, MAX_BATCH = 64, MAX_ROUNDS = 1 << 20 };
enum { CLOCK_EVERY = 256 };

#define load_acquire(p) __atomic_load_n(p, __ATOMIC_ACQUIRE)
#define store_release(p, v) __atomic_store_n(p, v, __ATOMIC_RELEASE)

// --- options --------------------------------------------------------------------------------------------------------

static struct {
    int64_t count, message, segment, header, window, batch, receive, segments, connect, copy, threads, warm_up, datagram,
        ring, slot, publish, spins, yield_every, cores, deadline, repeat;
} o = {
    .count = 0,         // messages, or round trips; 0: what suits the limit
    .message = 0,       // bytes of a message; 0: what suits the limit
    .segment = 0,       // bytes of a datagram; 0: 4124, and 96 for udp-messages
    .header = 0,        // of which header; 0: 28, and 32 for udp-messages (with the ICRC)
    .window = 1 << 20,  // bytes in flight
    .batch = 2,         // sends a system call
    .receive = 8,       // buffers of 64 KiB a system call
    .segments = 64,     // datagrams a send, UDP_MAX_SEGMENTS of older kernels; 64 KiB are the other bound
    .connect = 0,       // 1: connected sockets
    .copy = 0,          // 1: the receiver also copies payload out of its buffers to where it belongs
    .threads = 2,       // of each process in a ping-pong: application and engine, or one for both
    .warm_up = 1000,    // round trips that do not count
    .datagram = 44,     // bytes of a ping
    .ring = 1 << 20,    // bytes of the ring's frames
    .slot = 0,          // payload bytes of a frame; 0: 4096, and 64 for shm-messages
    .publish = 0,       // frames made known together; 0: 4, and 64 for shm-messages
    .spins = 64,        // HOST_SPINS of device/waiting.py: polls before an application's first yield
    .yield_every = 16,  // yield_every() of nic/host/engine.py: an engine's idle turns between yields, a power of two
    .cores = 0,         // 0: the system decides; 1: all on one core; 2: a core for each process; 3: for each role
    .deadline = 20,
    .repeat = 1,
};

#define OPTION(name) {"--" #name, &o.name}
static const struct { const char *name; int64_t *value; } OPTIONS[] = {
    OPTION(count), OPTION(message), OPTION(segment), OPTION(header), OPTION(window), OPTION(batch), OPTION(receive),
    OPTION(segments), OPTION(connect), OPTION(copy), OPTION(threads), OPTION(warm_up), OPTION(datagram), OPTION(ring),
    OPTION(slot), OPTION(publish), OPTION(spins), OPTION(yield_every), OPTION(cores), OPTION(deadline), OPTION(repeat),
};

// --- time and failure -----------------------------------------------------------------------------------------------

static int64_t end_ns;

static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("wire_limits: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    exit(1);
}

static void check(int64_t result, const char *what) {
    if (result < 0)
        fail("%s: %s", what, strerror(errno));
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void check_deadline(const char *what) {
    if (now_ns() > end_ns)
        fail("%s did not happen within %ld s", what, (long)o.deadline);
}

// One step of an application's wait: device/waiting.py.
static inline void patience(int64_t *polls, const char *what) {
    if (*polls < o.spins)
        __builtin_ia32_pause();
    else
        sched_yield();
    if ((++*polls & (CLOCK_EVERY - 1)) == 0)
        check_deadline(what);
}

// What an engine does after a turn that found nothing: nic/host/engine.py.
static inline void idle_turn(int64_t *idle, const char *what) {
    if (++*idle & (o.yield_every - 1)) {
        __builtin_ia32_pause();
        return;
    }
    sched_yield();
    check_deadline(what);
}

// --- memory that both processes reach -------------------------------------------------------------------------------

// A request or an arrival: one writer, one reader.
struct cell {
    int64_t value;
    int64_t sequence;
} __attribute__((aligned(2 * LINE)));

// Frames with one producer and one consumer, as in fabric/frames.py, of equal length. `acked` counts messages.
struct ring {
    int64_t head __attribute__((aligned(2 * LINE)));
    int64_t tail __attribute__((aligned(2 * LINE)));
    int64_t acked __attribute__((aligned(2 * LINE)));
    uint8_t frames[] __attribute__((aligned(PAGE)));
};

struct frame {
    int64_t target, nbytes;
    int64_t rest[6];
    uint8_t payload[];
};

struct shared {
    int64_t ready __attribute__((aligned(LINE)));
    int64_t ns;
    struct { struct cell post, landed; int64_t stop __attribute__((aligned(2 * LINE))); } ends[2];
    int64_t round_trips[MAX_ROUNDS];
};

static struct shared *shared;
static struct ring *rings[2];  // side 0 produces in the first, side 1 in the second

static void *memory(size_t nbytes) {
    void *p = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (p == MAP_FAILED)
        fail("no memory: %s", strerror(errno));
    return p;
}

static uint64_t pattern(uint64_t i) {
    i = (i + 1) * 0x9E3779B97F4A7C15u;
    return i ^ i >> 29;
}

static uint8_t *filled_memory(void) {
    uint64_t *words = memory(MEMORY);
    for (int64_t i = 0; i < MEMORY / 8; i++)
        words[i] = pattern(i);
    return (uint8_t *)words;
}

static void verify(const void *bytes, int64_t offset, int64_t nbytes, const char *what) {
    for (int64_t i = 0; i < nbytes; i += 8) {
        uint64_t want = pattern((offset + i) % MEMORY / 8);
        if (memcmp((const uint8_t *)bytes + i, &want, nbytes - i < 8 ? nbytes - i : 8) != 0)
            fail("%s: byte %ld is not what was sent", what, (long)(offset + i));
    }
}

// --- two processes --------------------------------------------------------------------------------------------------

static int core_list[CPU_SETSIZE], core_count;

static void list_cores(void) {
    cpu_set_t set;
    check(sched_getaffinity(0, sizeof set, &set), "sched_getaffinity");
    for (int i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &set))
            core_list[core_count++] = i;
}

// Where the calling thread runs. `role` is 0 for an application, 1 for an engine.
static void place(int side, int role) {
    if (o.cores == 0)
        return;
    int64_t wanted = o.cores == 1 ? 0 : o.cores == 2 ? side : role;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core_list[wanted % core_count], &set);
    check(sched_setaffinity(0, sizeof set, &set), "sched_setaffinity");
}

// Both ends begin together.
static void meet(void) {
    __atomic_add_fetch(&shared->ready, 1, __ATOMIC_ACQ_REL);
    for (int64_t polls = 0; load_acquire(&shared->ready) < 2;)
        patience(&polls, "the start of the other process");
}

// Run `ends` in a process each and wait for them; if one fails, the other is stopped.
static void run_pair(void (*const ends[2])(int side)) {
    pid_t children[2];
    memset(shared, 0, sizeof *shared);
    for (int i = 0; i < 2; i++)
        if (rings[i])
            rings[i]->head = rings[i]->tail = rings[i]->acked = 0;
    end_ns = now_ns() + o.deadline * 1000000000ll;
    fflush(stdout);
    for (int side = 0; side < 2; side++) {
        check(children[side] = fork(), "fork");
        if (children[side] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            alarm(o.deadline + 2);
            place(side, 1);
            ends[side](side);
            exit(0);
        }
    }
    bool good = true;
    for (int left = 2; left > 0; left--) {
        int status;
        pid_t child;
        check(child = wait(&status), "wait");
        if (status != 0 && good) {
            good = false;
            kill(children[child == children[0]], SIGKILL);  // the other one
        }
    }
    if (!good)
        fail("one of the two processes failed");
}

// --- UDP ------------------------------------------------------------------------------------------------------------

static int sockets[2];
static struct sockaddr_in addresses[2];

static void open_sockets(void) {
    static const char *const HOSTS[2] = {"127.0.0.1", "127.0.0.2"};
    for (int i = 0; i < 2; i++) {
        int nbytes = 4 << 20;
        socklen_t length = sizeof addresses[i];
        check(sockets[i] = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), "socket");
        setsockopt(sockets[i], SOL_SOCKET, SO_RCVBUF, &nbytes, sizeof nbytes);
        setsockopt(sockets[i], SOL_SOCKET, SO_SNDBUF, &nbytes, sizeof nbytes);
        addresses[i].sin_family = AF_INET;
        inet_pton(AF_INET, HOSTS[i], &addresses[i].sin_addr);
        check(bind(sockets[i], (struct sockaddr *)&addresses[i], length), "bind");
        check(getsockname(sockets[i], (struct sockaddr *)&addresses[i], &length), "getsockname");
    }
    for (int i = 0; o.connect && i < 2; i++)
        check(connect(sockets[i], (struct sockaddr *)&addresses[!i], sizeof addresses[i]), "connect");
}

static void address(struct msghdr *header, int side) {
    if (!o.connect) {
        header->msg_name = &addresses[!side];
        header->msg_namelen = sizeof addresses[!side];
    }
}

// False when there is nothing to receive.
static bool received(int64_t result, const char *what) {
    if (result < 0 && errno != EAGAIN)
        fail("%s: %s", what, strerror(errno));
    return result >= 0;
}

// A datagram begins with its number, at any address.
static int64_t number_of(const uint8_t *datagram) {
    int64_t number;
    memcpy(&number, datagram, sizeof number);
    return number;
}

static int64_t total_segments(void) {
    int64_t payload = o.segment - o.header;
    return o.count * ((o.message + payload - 1) / payload);
}

// Datagrams lie ready, MEMORY bytes of payload with a header each; the header holds the datagram's number.
static void stream_sender(int side) {
    int64_t payload = o.segment - o.header, places = MEMORY / payload, total = total_segments();
    int64_t at_once = DATAGRAM / o.segment < o.segments ? DATAGRAM / o.segment : o.segments;
    int64_t window = o.window / o.segment > at_once ? o.window / o.segment : at_once;
    uint8_t *source = filled_memory(), *datagrams = memory(places * o.segment);
    for (int64_t i = 0; i < places; i++)
        memcpy(datagrams + i * o.segment + o.header, source + i * payload, payload);
    uint8_t controls[MAX_BATCH][CMSG_SPACE(sizeof(uint16_t))];
    struct iovec pieces[MAX_BATCH];
    struct mmsghdr headers[MAX_BATCH];
    memset(headers, 0, sizeof headers);
    for (int i = 0; i < o.batch; i++) {
        struct msghdr *h = &headers[i].msg_hdr;
        *h = (struct msghdr){.msg_iov = &pieces[i], .msg_iovlen = 1};
        h->msg_control = controls[i], h->msg_controllen = sizeof controls[i];
        address(h, side);
        struct cmsghdr *c = CMSG_FIRSTHDR(h);
        c->cmsg_level = IPPROTO_UDP, c->cmsg_type = UDP_SEGMENT, c->cmsg_len = CMSG_LEN(sizeof(uint16_t));
        uint16_t size = o.segment;
        memcpy(CMSG_DATA(c), &size, sizeof size);
    }
    meet();
    int64_t start = now_ns(), sent = 0, acked = 0, idle = 0;
    while (acked < total) {
        int ready = 0;
        int64_t next = sent;
        while (ready < o.batch && next < total) {
            int64_t place = next % places, n = at_once;
            n = n < total - next ? n : total - next;
            n = n < places - place ? n : places - place;
            if (next + n - acked > window)
                break;
            for (int64_t i = 0; i < n; i++) {
                int64_t number = next + i;
                memcpy(datagrams + (place + i) * o.segment, &number, sizeof number);
            }
            pieces[ready++] = (struct iovec){datagrams + place * o.segment, n * o.segment};
            next += n;
        }
        for (int done = 0; done < ready;) {
            int n = sendmmsg(sockets[side], headers + done, ready - done, 0);
            if (received(n, "sendmmsg"))
                done += n, idle = 0;
            else
                idle_turn(&idle, "room to send");
        }
        sent = next;
        if (ready == o.batch)
            continue;
        int64_t ack;
        bool news = false;
        while (received(recv(sockets[side], &ack, sizeof ack, 0), "recv"))
            acked = ack, news = true;
        if (news)
            idle = 0;
        else
            idle_turn(&idle, "an acknowledgement");
    }
    shared->ns = now_ns() - start;
}

static int64_t gro_size(struct msghdr *h, int64_t otherwise) {
    for (struct cmsghdr *c = CMSG_FIRSTHDR(h); c; c = CMSG_NXTHDR(h, c))
        if (c->cmsg_level == IPPROTO_UDP && c->cmsg_type == UDP_GRO) {
            int size;
            memcpy(&size, CMSG_DATA(c), sizeof size);
            return size;
        }
    return otherwise;
}

static void stream_receiver(int side) {
    int64_t payload = o.segment - o.header, places = MEMORY / payload, total = total_segments();
    int64_t ack_every = o.window / o.segment / 4;
    uint8_t *target = memory(MEMORY), *buffers = memory(o.receive << 16);
    uint8_t controls[MAX_BATCH][CMSG_SPACE(sizeof(int))];
    struct iovec pieces[MAX_BATCH];
    struct mmsghdr headers[MAX_BATCH];
    int on = 1, last = 0;
    check(setsockopt(sockets[side], IPPROTO_UDP, UDP_GRO, &on, sizeof on), "UDP_GRO");
    memset(headers, 0, sizeof headers);
    for (int i = 0; i < o.receive; i++) {
        pieces[i] = (struct iovec){buffers + ((int64_t)i << 16), 1 << 16};
        headers[i].msg_hdr = (struct msghdr){.msg_iov = &pieces[i], .msg_iovlen = 1, .msg_control = controls[i]};
    }
    meet();
    int64_t expected = 0, acked = 0, idle = 0;
    while (acked < total) {
        for (int i = 0; i < o.receive; i++)
            headers[i].msg_hdr.msg_controllen = sizeof controls[i];
        int n = recvmmsg(sockets[side], headers, o.receive, 0, NULL);
        if (received(n, "recvmmsg")) {
            idle = 0;
            for (int i = 0; i < n; i++) {
                int64_t size = gro_size(&headers[i].msg_hdr, o.segment);
                if (size != o.segment || headers[i].msg_len % size != 0)
                    fail("datagrams of %ld bytes arrived", (long)size);
                for (uint8_t *at = pieces[i].iov_base, *end = at + headers[i].msg_len; at < end; at += size) {
                    int64_t number = number_of(at);
                    if (number != expected++)
                        fail("datagram %ld arrived instead of %ld", (long)number, (long)expected - 1);
                    if (o.copy)
                        memcpy(target + number % places * payload, at + o.header, payload);
                }
            }
            last = n;
        } else {
            idle_turn(&idle, "a datagram");
        }
        // At the end of what has arrived too, so that no window is too small to go on.
        if (expected - acked >= ack_every || (expected != acked && n < o.receive)) {
            struct iovec piece = {&expected, sizeof expected};
            struct msghdr h = {.msg_iov = &piece, .msg_iovlen = 1};
            address(&h, side);
            check(sendmsg(sockets[side], &h, 0), "sendmsg");
            acked = expected;
        }
    }
    if (o.copy)
        verify(target, 0, (total < places ? total : places) * payload, "the target");
    for (int i = 0; i < last; i++)
        for (uint8_t *at = pieces[i].iov_base, *end = at + headers[i].msg_len; at < end; at += o.segment)
            verify(at + o.header, number_of(at) % places * payload, payload, "the last datagrams");
}

static void udp_stream(void) {
    if (o.segment <= o.header || o.header < 8 || o.segment > DATAGRAM || o.batch > MAX_BATCH || o.batch < 1 ||
        o.receive > MAX_BATCH || o.receive < 1)
        fail("these sizes do not go together");
    open_sockets();
    run_pair((void (*const[])(int)){stream_sender, stream_receiver});
    close(sockets[0]), close(sockets[1]);
}

// --- shared memory --------------------------------------------------------------------------------------------------

static int64_t stride(void) { return sizeof(struct frame) + ((o.slot + LINE - 1) & -LINE); }
static int64_t slots(void) { return o.ring / stride(); }

static struct frame *frame_at(struct ring *ring, int64_t slot) {
    return (struct frame *)(ring->frames + slot * stride());
}

static void ring_producer(int side) {
    struct ring *ring = rings[side];
    uint8_t *source = filled_memory();
    int64_t size = stride(), capacity = slots(), head = 0, tail = 0, slot = 0, published = 0, polls = 0, at = 0;
    meet();
    int64_t start = now_ns();
    for (int64_t message = 0; message < o.count; message++) {
        for (int64_t done = 0; done < o.message; done += o.slot) {
            int64_t nbytes = o.message - done < o.slot ? o.message - done : o.slot;
            if (head - tail == capacity && (tail = load_acquire(&ring->tail), head - tail == capacity)) {
                store_release(&ring->head, published = head);
                for (polls = 0; head - (tail = load_acquire(&ring->tail)) == capacity;)
                    idle_turn(&polls, "room in the ring");
            }
            struct frame *f = (struct frame *)(ring->frames + slot * size);
            f->target = at + done;
            f->nbytes = nbytes;
            memcpy(f->payload, source + at + done, nbytes);
            slot = slot + 1 == capacity ? 0 : slot + 1;
            if (++head - published >= o.publish)
                store_release(&ring->head, published = head);
        }
        at = (at + o.message) & (MEMORY - 1);
    }
    store_release(&ring->head, head);
    for (polls = 0; load_acquire(&ring->acked) < o.count;)
        idle_turn(&polls, "the last acknowledgement");
    shared->ns = now_ns() - start;
}

static void ring_consumer(int side) {
    struct ring *ring = rings[!side];
    uint8_t *target = memory(MEMORY);
    int64_t size = stride(), capacity = slots(), head = 0, tail = 0, slot = 0, released = 0, idle = 0;
    int64_t parts = (o.message + o.slot - 1) / o.slot, part = 0, messages = 0;
    meet();
    while (messages < o.count) {
        if (tail == head && (head = load_acquire(&ring->head), tail == head)) {
            store_release(&ring->tail, released = tail);
            for (idle = 0; (head = load_acquire(&ring->head)) == tail;)
                idle_turn(&idle, "a frame");
        }
        struct frame *f = (struct frame *)(ring->frames + slot * size);
        if (f->nbytes < 0 || f->nbytes > o.slot || f->target < 0 || f->target > MEMORY - f->nbytes)
            fail("a frame of nonsense");
        memcpy(target + f->target, f->payload, f->nbytes);
        slot = slot + 1 == capacity ? 0 : slot + 1;
        if (++part == parts)
            part = 0, messages++;
        if (++tail - released >= o.publish) {
            store_release(&ring->tail, released = tail);
            store_release(&ring->acked, messages);
        }
    }
    store_release(&ring->acked, messages);
    verify(target, 0, o.count * o.message < MEMORY ? o.count * o.message : MEMORY, "the target");
}

static void shm_stream(void) {
    if (o.message > MEMORY || (o.message & (o.message - 1)) || o.message % 8 || slots() < 2 || o.publish < 1)
        fail("these sizes do not go together");
    if (!rings[0])
        rings[0] = memory(sizeof(struct ring) + o.ring);
    run_pair((void (*const[])(int)){ring_producer, ring_consumer});
}

// --- ping-pong ------------------------------------------------------------------------------------------------------

static bool over_udp;
static int64_t position[2];  // of a process: what it has produced, what it has consumed

static void wire_send(int side, int64_t value) {
    if (over_udp) {
        int64_t words[DATAGRAM / 8 + 1] = {value};
        struct iovec piece = {words, o.datagram};
        struct msghdr h = {.msg_iov = &piece, .msg_iovlen = 1};
        address(&h, side);
        check(sendmsg(sockets[side], &h, 0), "sendmsg");
    } else {
        struct frame *f = frame_at(rings[side], position[0] % slots());
        f->nbytes = sizeof value;
        memcpy(f->payload, &value, sizeof value);
        store_release(&rings[side]->head, ++position[0]);
    }
}

static bool wire_receive(int side, int64_t *value) {
    if (over_udp) {
        int64_t words[64];
        int64_t n = recv(sockets[side], words, sizeof words, 0);
        if (!received(n, "recv"))
            return false;
        if (n != o.datagram)
            fail("a datagram of %ld bytes arrived", (long)n);
        *value = words[0];
    } else {
        struct ring *ring = rings[!side];
        if (load_acquire(&ring->head) == position[1])
            return false;
        memcpy(value, frame_at(ring, position[1] % slots())->payload, sizeof *value);
        store_release(&ring->tail, ++position[1]);
    }
    return true;
}

// The thread that is the NIC: sends what its application has posted, and puts what arrives into memory.
static void *serve(void *argument) {
    int side = (int)(intptr_t)argument;
    struct cell *post = &shared->ends[side].post, *landed = &shared->ends[side].landed;
    int64_t sent = 0, arrived = 0, idle = 0, value;
    place(side, 1);
    while (true) {
        int64_t stop = load_acquire(&shared->ends[side].stop);
        bool busy = false;
        if (load_acquire(&post->sequence) != sent) {
            wire_send(side, post->value);
            sent++;
            busy = true;
        }
        if (wire_receive(side, &value)) {
            landed->value = value;
            store_release(&landed->sequence, ++arrived);
            busy = true;
        }
        if (busy)
            idle = 0;
        else if (stop)
            return NULL;
        else
            idle_turn(&idle, "the end");
    }
}

static void put(int side, int64_t number, int64_t value) {
    if (o.threads == 1) {
        wire_send(side, value);
        return;
    }
    shared->ends[side].post.value = value;
    store_release(&shared->ends[side].post.sequence, number);
}

static int64_t take(int side, int64_t number) {
    int64_t polls = 0, value;
    if (o.threads == 1) {
        while (!wire_receive(side, &value))
            idle_turn(&polls, "the other's ping");
        return value;
    }
    while (load_acquire(&shared->ends[side].landed.sequence) != number)
        patience(&polls, "the other's ping");
    return shared->ends[side].landed.value;
}

static void player(int side) {
    pthread_t engine;
    if (o.threads > 1) {
        if (pthread_create(&engine, NULL, serve, (void *)(intptr_t)side) != 0)
            fail("no thread");
        place(side, 0);
    }
    meet();
    for (int64_t i = 1; i <= o.warm_up + o.count; i++) {
        int64_t start = now_ns(), ping = (int64_t)pattern(i), value;
        if (side == 0)
            put(side, i, ping);
        value = take(side, i);
        if (value != (side ? ping : ~ping))
            fail("ping %ld arrived with the wrong bytes", (long)i);
        if (side == 1)
            put(side, i, ~ping);
        else if (i > o.warm_up)
            shared->round_trips[i - o.warm_up - 1] = now_ns() - start;
    }
    if (o.threads > 1) {
        store_release(&shared->ends[side].stop, 1);
        pthread_join(engine, NULL);
    }
}

static void play(void) {
    if (o.datagram < 8 || o.datagram > 512 || o.count > MAX_ROUNDS || o.threads < 1 || o.threads > 2 || slots() < 2)
        fail("these sizes do not go together");
    if (over_udp)
        open_sockets();
    for (int i = 0; i < 2; i++)
        if (!rings[i])
            rings[i] = memory(sizeof(struct ring) + o.ring);
    run_pair((void (*const[])(int)){player, player});
    if (over_udp)
        close(sockets[0]), close(sockets[1]);
}

// --- memcpy ---------------------------------------------------------------------------------------------------------

static void copier(int side) {
    if (side == 1)
        return;
    if (MEMORY % o.message)
        fail("pieces of %ld bytes do not fill the memory", (long)o.message);
    uint8_t *source = filled_memory(), *target = memory(MEMORY);
    int64_t start = now_ns();
    for (int64_t i = 0, at = 0; i < o.count; i++, at = (at + o.message) % MEMORY)
        memcpy(target + at, source + at, o.message);
    shared->ns = now_ns() - start;
    verify(target, 0, o.count * o.message < MEMORY ? o.count * o.message : MEMORY, "the target");
}

// --- the limits -----------------------------------------------------------------------------------------------------

static int ascending(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static double cpu_seconds(const struct rusage *r) {
    return r->ru_utime.tv_sec + r->ru_stime.tv_sec + (r->ru_utime.tv_usec + r->ru_stime.tv_usec) / 1e6;
}

enum measure { BANDWIDTH, RATE, LATENCY };

static void run_limit(const char *name, enum measure measure) {
    struct rusage before, after;
    getrusage(RUSAGE_CHILDREN, &before);
    int64_t start = now_ns();
    if (measure == LATENCY)
        play();
    else if (!strcmp(name, "memcpy"))
        run_pair((void (*const[])(int)){copier, copier});  // the second has nothing to do
    else if (over_udp)
        udp_stream();
    else
        shm_stream();
    double seconds = (now_ns() - start) / 1e9;
    getrusage(RUSAGE_CHILDREN, &after);
    long switches = after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw;
    printf("{\"limit\": \"%s\", ", name);
    if (measure == LATENCY) {
        double sum = 0;
        for (int64_t i = 0; i < o.count; i++)
            sum += shared->round_trips[i];
        qsort(shared->round_trips, o.count, sizeof(int64_t), ascending);
        double half[3];
        for (int i = 0; i < 3; i++)
            half[i] = shared->round_trips[(o.count - 1) * (int[]){0, 50, 99}[i] / 100] / 2e3;
        printf("\"unit\": \"µs\", \"value\": %.3f, \"mean\": %.3f, \"min\": %.3f, \"p99\": %.3f, ", half[1],
               sum / o.count / 2e3, half[0], half[2]);
    } else {
        double rate = 1e3 * o.count / shared->ns;
        printf("\"unit\": \"%s\", \"value\": %.3f, ", measure == RATE ? "M/s" : "GB/s",
               measure == RATE ? rate : rate * o.message / 1e3);
    }
    printf("\"count\": %ld, \"cores\": %ld, \"cpu_s\": %.3f, \"wall_s\": %.3f, \"switches\": %ld}\n", (long)o.count,
           (long)o.cores, cpu_seconds(&after) - cpu_seconds(&before), seconds, switches);
}

#define DEFAULT(name, value) (o.name = o.name ? o.name : (value))

int main(int argc, char **argv) {
    static const struct { const char *name; enum measure measure; int64_t count, message, segment, header, slot, publish; }
        LIMITS[] = {
            {"udp-stream", BANDWIDTH, 16 << 10, 64 << 10, 4124, 28, 0, 0},
            {"udp-messages", RATE, 2 << 20, 64, 96, 32, 0, 0},
            {"udp-pingpong", LATENCY, 20000, 8, 0, 0, 64, 0},
            {"shm-stream", BANDWIDTH, 32 << 10, 64 << 10, 0, 0, 4096, 4},
            {"shm-messages", RATE, 8 << 20, 64, 0, 0, 64, 64},
            {"shm-pingpong", LATENCY, 50000, 8, 0, 0, 64, 0},
            {"memcpy", BANDWIDTH, 32 << 10, 64 << 10, 0, 0, 0, 0},
        };
    const int limits = sizeof LIMITS / sizeof *LIMITS, options = sizeof OPTIONS / sizeof *OPTIONS;
    int limit = 0;
    while (argc > 1 && limit < limits && strcmp(argv[1], LIMITS[limit].name))
        limit++;
    if (argc < 2 || limit == limits) {
        fprintf(stderr, "usage: %s LIMIT [--option number]...\n  limits:", argv[0]);
        for (int i = 0; i < limits; i++)
            fprintf(stderr, " %s", LIMITS[i].name);
        fputs("\n  options:", stderr);
        for (int i = 0; i < options; i++)
            fprintf(stderr, " %s", OPTIONS[i].name);
        fputc('\n', stderr);
        return 2;
    }
    for (int i = 2; i < argc; i += 2) {
        int option = 0;
        while (option < options && strcmp(argv[i], OPTIONS[option].name))
            option++;
        char *end = NULL;
        if (option < options && i + 1 < argc)
            *OPTIONS[option].value = strtoll(argv[i + 1], &end, 0);
        if (!end || *end || end == argv[i + 1] || *OPTIONS[option].value < 0)
            fail("%s needs a number, or there is no such option", argv[i]);
    }
    DEFAULT(count, LIMITS[limit].count), DEFAULT(message, LIMITS[limit].message);
    DEFAULT(segment, LIMITS[limit].segment), DEFAULT(header, LIMITS[limit].header);
    DEFAULT(slot, LIMITS[limit].slot), DEFAULT(publish, LIMITS[limit].publish);
    over_udp = !strncmp(LIMITS[limit].name, "udp", 3);
    list_cores();
    shared = (struct shared *)memory(sizeof *shared);
    for (int64_t i = 0; i < o.repeat; i++)
        run_limit(LIMITS[limit].name, LIMITS[limit].measure);
}
