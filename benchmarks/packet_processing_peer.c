/* A station that answers ARP and ping on a TAP device, one read and one write a frame: the peer of packet_processing.py.
 *
 *     packet_processing_peer INTERFACE ADDRESS
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

static const uint8_t MAC[6] = {2, 0, 0, 0, 0, 0xaa};
static uint8_t frame[1 << 16];

static void need(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

static int tap(const char *name) {
    struct ifreq request = {0};
    int fd = open("/dev/net/tun", O_RDWR);
    need(fd >= 0, "/dev/net/tun");
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    request.ifr_flags = IFF_TAP | IFF_NO_PI;
    need(ioctl(fd, TUNSETIFF, &request) == 0, "TUNSETIFF");
    return fd;
}

static uint16_t checksum(const uint8_t *data, size_t nbytes) { /* RFC 1071 */
    uint32_t sum = 0;
    for (size_t i = 0; i + 1 < nbytes; i += 2)
        sum += data[i] << 8 | data[i + 1];
    if (nbytes & 1)
        sum += data[nbytes - 1] << 8;
    sum = (sum & 0xFFFF) + (sum >> 16);
    return ~((sum & 0xFFFF) + (sum >> 16));
}

static void put16(uint8_t *to, uint16_t value) {
    to[0] = value >> 8;
    to[1] = value;
}

static void turn_round(uint8_t *to, uint8_t *from, const uint8_t *own, size_t nbytes) {
    memcpy(to, from, nbytes);
    memcpy(from, own, nbytes);
}

/* RFC 826 */
static int answer_arp(const uint8_t *address) {
    uint8_t *arp = frame + 14;
    if (arp[7] != 1 || memcmp(arp + 24, address, 4))
        return 0;
    arp[7] = 2;
    turn_round(arp + 18, arp + 8, MAC, 6);
    turn_round(arp + 24, arp + 14, address, 4);
    return 1;
}

/* RFC 792: both checksums are verified and computed anew, as the kernel's. */
static int answer_ping(const uint8_t *address) {
    uint8_t *ip = frame + 14;
    size_t head = (ip[0] & 15) * 4, length = (ip[2] << 8 | ip[3]) - head;
    uint8_t *message = ip + head;
    if (ip[9] != 1 || memcmp(ip + 16, address, 4) || message[0] != 8 || checksum(ip, head) || checksum(message, length))
        return 0;
    turn_round(ip + 16, ip + 12, address, 4);
    put16(ip + 10, 0);
    put16(ip + 10, checksum(ip, head));
    message[0] = 0;
    put16(message + 2, 0);
    put16(message + 2, checksum(message, length));
    return 1;
}

int main(int count, char **words) {
    uint8_t address[4];
    need(count == 3 && inet_pton(AF_INET, words[2], address) == 1, "INTERFACE ADDRESS");
    int fd = tap(words[1]);
    puts("ready");
    fflush(stdout);
    for (;;) {
        ssize_t nbytes = read(fd, frame, sizeof frame);
        int type = frame[12] << 8 | frame[13];
        if (nbytes < 42 || !(type == 0x0806 ? answer_arp(address) : type == 0x0800 && answer_ping(address)))
            continue;
        turn_round(frame, frame + 6, MAC, 6);
        need(write(fd, frame, nbytes) == nbytes, "write");
    }
}
