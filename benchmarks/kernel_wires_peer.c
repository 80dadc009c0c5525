/* Frames to and from the kernel, as plain C programs move them: the peers of kernel_wires.py.
 *
 *     kernel_wires_peer HOW INTERFACE SECONDS BYTES
 *
 * HOW is one of the rows of HOWS. A reader prints "ready" before it starts. At the end, the number of frames is printed.
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BATCH = 64, BLOCK = 1 << 17, BLOCKS = 32, SLOT = 2048, BUFFER = 4 << 20 };

static uint8_t frame[1 << 16] = {2, 0, 0, 0, 0, 0xaa, 2, 0, 0, 0, 0, 0xbb, 0x88, 0xb5};
static double end;
static size_t nbytes;

static void need(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

static int late(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9 > end;
}

static void wait_for(int fd, short events) {
    struct pollfd one = {fd, events, 0};
    poll(&one, 1, 10);
}

static int tap(const char *name) {
    struct ifreq request = {0};
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    need(fd >= 0, "/dev/net/tun");
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    request.ifr_flags = IFF_TAP | IFF_NO_PI;
    need(ioctl(fd, TUNSETIFF, &request) == 0, "TUNSETIFF");
    int sock = socket(AF_INET, SOCK_DGRAM, 0);
    request.ifr_flags = IFF_UP;
    need(ioctl(sock, SIOCSIFFLAGS, &request) == 0, "up");
    close(sock);
    return fd;
}

static int packet_socket(void) {
    int fd = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, 0), size = BUFFER, one = 1;
    need(fd >= 0, "packet socket");
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &one, sizeof one);
    return fd;
}

static void attach(int fd, const char *name, int protocol) {
    struct sockaddr_ll to = {.sll_family = AF_PACKET, .sll_protocol = htons(protocol)};
    to.sll_ifindex = if_nametoindex(name);
    need(bind(fd, (struct sockaddr *)&to, sizeof to) == 0, "bind");
}

static uint8_t *ring(int fd, int which, int version) {
    struct tpacket_req3 request = {BLOCK, BLOCKS, SLOT, BLOCK / SLOT * BLOCKS, 1, 0, 0};
    need(setsockopt(fd, SOL_PACKET, PACKET_VERSION, &version, sizeof version) == 0, "PACKET_VERSION");
    socklen_t size = version == TPACKET_V3 ? sizeof request : sizeof(struct tpacket_req);
    need(setsockopt(fd, SOL_PACKET, which, &request, size) == 0, "ring");
    uint8_t *memory = mmap(0, (size_t)BLOCK * BLOCKS, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    need(memory != MAP_FAILED, "mmap");
    return memory;
}

static long write_each(int fd) {
    long count = 0;
    while (!late())
        for (int i = 0; i < BATCH; i++)
            count += write(fd, frame, nbytes) > 0;
    return count;
}

static long read_each(int fd) {
    long count = 0;
    puts("ready");
    fflush(stdout);
    while (!late())
        if (read(fd, frame, sizeof frame) > 0)
            count++;
        else
            wait_for(fd, POLLIN);
    return count;
}

static long tap_write(const char *name) { return write_each(tap(name)); }
static long tap_read(const char *name) { return read_each(tap(name)); }

static long packet_write(const char *name) {
    int fd = packet_socket();
    attach(fd, name, 0);
    return write_each(fd);
}

static long packet_read(const char *name) {
    int fd = packet_socket();
    attach(fd, name, ETH_P_ALL);
    return read_each(fd);
}

static long ring_write(const char *name) {
    int fd = packet_socket();
    uint8_t *memory = ring(fd, PACKET_TX_RING, TPACKET_V2);
    attach(fd, name, 0);
    long count = 0;
    while (!late()) {
        for (int i = 0; i < BATCH; i++, count++) {
            struct tpacket2_hdr *slot = (void *)(memory + count % (BLOCK / SLOT * BLOCKS) * SLOT);
            if (__atomic_load_n(&slot->tp_status, __ATOMIC_ACQUIRE) != TP_STATUS_AVAILABLE)
                break;
            memcpy((uint8_t *)slot + TPACKET_ALIGN(sizeof *slot), frame, nbytes);
            slot->tp_len = nbytes;
            __atomic_store_n(&slot->tp_status, TP_STATUS_SEND_REQUEST, __ATOMIC_RELEASE);
        }
        if (send(fd, 0, 0, MSG_DONTWAIT) < 0)
            wait_for(fd, POLLOUT);
    }
    return count;
}

static long ring_read(const char *name) {
    int fd = packet_socket();
    uint8_t *memory = ring(fd, PACKET_RX_RING, TPACKET_V3);
    attach(fd, name, ETH_P_ALL);
    puts("ready");
    fflush(stdout);
    long count = 0;
    for (int at = 0; !late();) {
        struct tpacket_block_desc *block = (void *)(memory + (size_t)at * BLOCK);
        if (!(__atomic_load_n(&block->hdr.bh1.block_status, __ATOMIC_ACQUIRE) & TP_STATUS_USER)) {
            wait_for(fd, POLLIN);
            continue;
        }
        uint8_t *next = (uint8_t *)block + block->hdr.bh1.offset_to_first_pkt;
        for (unsigned i = 0; i < block->hdr.bh1.num_pkts; i++, count++) {
            struct tpacket3_hdr *head = (void *)next;
            memcpy(frame, next + head->tp_mac, head->tp_snaplen);
            next += head->tp_next_offset;
        }
        __atomic_store_n(&block->hdr.bh1.block_status, TP_STATUS_KERNEL, __ATOMIC_RELEASE);
        at = (at + 1) % BLOCKS;
    }
    return count;
}

static const struct {
    const char *name;
    long (*run)(const char *);
} HOWS[] = {
    {"tap-write", tap_write}, {"tap-read", tap_read}, {"packet-write", packet_write},
    {"packet-read", packet_read}, {"ring-write", ring_write}, {"ring-read", ring_read},
};

int main(int count, char **words) {
    need(count == 5, "HOW INTERFACE SECONDS BYTES");
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    end = now.tv_sec + now.tv_nsec * 1e-9 + atof(words[3]);
    nbytes = atoi(words[4]);
    for (size_t i = 0; i < sizeof HOWS / sizeof *HOWS; i++)
        if (!strcmp(HOWS[i].name, words[1])) {
            printf("%ld\n", HOWS[i].run(words[2]));
            return 0;
        }
    fprintf(stderr, "no way is called %s\n", words[1]);
    return 1;
}
