"""Kernels that are compiled for GPUs that need not exist, and a process that compiles many for one architecture.

    python cuda_kernels.py FOLDER MAJOR MINOR KERNEL...     writes KERNEL.ptx, and KERNEL.txt with ptxas' report
                                                        and prints the CPU seconds that each took in this process
"""

import json
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gpunetio import device
from gpunetio.eth import headers
from gpunetio.jit import cubin
from gpunetio.jit.kinds import INT
from gpunetio.nic.gpu.slice_kernel import OPTIONS as SLICE_OPTIONS
from gpunetio.nic.gpu.slice_kernel import gpunetio_slice
from gpunetio.nic.transport.loopback import serve
from gpunetio.packet_processing.http_server import serve_http
from gpunetio.packet_processing.receive_icmp import receive_icmp
from gpunetio.packet_processing.receive_tcp import receive_tcp
from gpunetio.packet_processing.receive_udp import receive_udp

SM_90, SM_100 = (9, 0), (10, 0)


def one_sided(queue, raddr, rkey, laddr, lkey, n, out):
    """All of the one-sided API."""
    device.st64(out, device.wait(queue, device.put(queue, raddr, rkey, laddr, lkey, n)))
    device.st64(out, device.get_wait(queue, n, device.GPU, device.THREAD, laddr, lkey))
    device.st64(out, device.wait(queue, device.p(queue, raddr, rkey, n, 4)))
    device.st64(out, device.signal(queue, raddr, rkey, laddr, lkey, n))
    device.st64(out, device.put_signal(queue, raddr, rkey, laddr, lkey, n, raddr, rkey, laddr, lkey, n))
    device.st64(out, device.p_signal(queue, raddr, rkey, n, 4, raddr, rkey, laddr, lkey, n))
    device.st64(out, device.fence(queue))
    device.st64(out, device.wait_all(queue))


def in_warps(queue, raddr, rkey, laddr, lkey, n, out):
    """Warp scope."""
    ticket = device.put(queue, raddr, rkey, laddr, lkey, n, device.GPU, device.DEFAULT, device.WARP)
    device.st64(out, device.wait(queue, ticket, device.GPU, device.WARP))
    ticket = device.put_signal(
        queue, raddr, rkey, laddr, lkey, n, raddr, rkey, laddr, lkey, n, device.CTA, device.DEFAULT, device.WARP
    )
    device.st64(out, device.send(queue, laddr, lkey, n, device.GPU, device.DEFAULT, device.WARP))
    ticket = device.recv(queue, laddr, lkey, n, device.GPU, device.WARP)
    device.st64(out, device.recv_wait(queue, ticket, device.GPU, device.WARP, laddr, lkey))


def in_blocks(queue, raddr, rkey, laddr, lkey, n, out):
    """Block scope."""
    ticket = device.get(queue, raddr, rkey, laddr, lkey, n, device.GPU, device.DEFAULT, device.BLOCK, laddr, lkey, 1)
    device.st64(out, device.wait(queue, ticket, device.GPU, device.BLOCK))
    device.st64(out, device.p(queue, raddr, rkey, n, 8, device.CTA, device.DEFAULT, device.BLOCK))
    device.st64(out, device.recv(queue, laddr, lkey, n, device.GPU, device.BLOCK))


def low_level(queue, raddr, rkey, laddr, lkey, n, out):
    """All builders, and the queue protocol."""
    first = device.reserve(queue, 16)
    device.prepare_nop(queue, first)
    device.prepare_write(queue, first + 1, raddr, rkey, laddr, lkey, n)
    device.prepare_write2(queue, first + 2, raddr, rkey, laddr, lkey, n, laddr, lkey, n)
    device.prepare_write_value(queue, first + 3, raddr, rkey, n, 8)
    device.prepare_write_inline(queue, first + 4, raddr, rkey, laddr, n)
    device.prepare_read(queue, first + 5, raddr, rkey, laddr, lkey, n)
    device.prepare_read2(queue, first + 6, raddr, rkey, laddr, lkey, n, laddr, lkey, n)
    device.prepare_send(queue, first + 7, laddr, lkey, n)
    device.prepare_atomic(queue, first + 8, device.ATOMIC_CS, raddr, rkey, laddr, lkey, n, n)
    device.prepare_masked_add(queue, first + 9, 4, raddr, rkey, laddr, lkey, n, n)
    device.prepare_masked_swap32(queue, first + 10, raddr, rkey, laddr, lkey, n, n)
    device.prepare_masked_swap64(queue, first + 11, raddr, rkey, laddr, lkey, n, n)
    device.prepare_wait(queue, first + 13, n, n)
    device.prepare_dump(queue, first + 14, laddr, lkey)
    device.prepare_nop(queue, first + 15)
    device.mark_ready(queue, first, first + 15)
    device.submit(queue, first + 16, device.GPU, device.SYNC_SYS, device.ASYNC_STORE_RELEASE)
    device.st64(out, device.poll_one(queue, first))
    device.st64(out, device.poll_at(queue, first + 7))
    device.st64(out, device.poll(queue, 1))


def blue_flame(queue, raddr, rkey, laddr, lkey, n, out):
    """The WQE written to the register, by a thread and by a warp."""
    first = device.reserve(queue, 2, device.EXCLUSIVE)
    slot = device.block_slot()
    device.prepare_write(queue, first, raddr, rkey, laddr, lkey, n)
    device.prepare_write(queue, first, raddr, rkey, laddr, lkey, n, at=slot)
    device.st64(out, device.submit_bf(queue, first + 1, slot, device.EXCLUSIVE))
    device.st64(out, device.submit_bf_warp(queue, first + 2, slot))
    device.submit_multi(out, out, n)


def counted(queue, raddr, rkey, laddr, lkey, n, out):
    """All counted operations."""
    device.st64(out, device.put_counter(queue, raddr, rkey, laddr, lkey, n, n, raddr, rkey, laddr, lkey, 1))
    device.st64(out, device.get_counter(queue, raddr, rkey, laddr, lkey, n, n, raddr, rkey, laddr, lkey, 1))
    device.st64(out, device.p_counter(queue, raddr, rkey, n, 8, n, raddr, rkey, laddr, lkey, 1))
    device.st64(out, device.signal_counter(queue, raddr, rkey, laddr, lkey, n, n, raddr, rkey, laddr, lkey, 1))
    ticket = device.put_signal_counter(
        queue, raddr, rkey, laddr, lkey, n, raddr, rkey, laddr, lkey, 1, n, raddr, rkey, laddr, lkey, 1
    )
    device.st64(out, ticket)


def two_sided(queue, raddr, rkey, laddr, lkey, n, out):
    """All of the two-sided API."""
    device.st64(out, device.wait(queue, device.send(queue, laddr, lkey, n)))
    device.st64(out, device.wait(queue, device.send_imm(queue, laddr, lkey, n, n)))
    ticket = device.recv(queue, laddr, lkey, n)
    device.st64(out, device.recv_wait(queue, ticket, device.GPU, device.THREAD, laddr, lkey))
    arrival = device.recv_next(queue)
    device.st64(out, device.recv_imm(queue, arrival) + device.recv_slot(queue, arrival))
    device.st64(out, device.recv_inline(queue, arrival) + device.recv_wait_all(queue))
    device.st64(out, device.recv_poll(queue, arrival))


def groups(queue, raddr, rkey, laddr, lkey, n, out):
    """Identity and synchronisation."""
    device.block_sync()
    value = device.warp_broadcast(n + device.lane_id(), 0)
    device.warp_sync()
    device.st64(out + 8 * device.global_id(), value + device.warp_size())
    device.copy(laddr, raddr, n)
    device.st64(out, device.warp_sum(n) + device.warp_min(n) + device.block_sum(n) + device.block_max(n))
    device.yield_thread()


def eth_receive(rxq, raddr, rkey, laddr, lkey, n, out):
    """Receiving packets in all scopes."""
    device.st64(out, device.rxq_recv(rxq, n, n, laddr))
    device.st64(out, device.rxq_recv(rxq, n, n, laddr, device.WARP))
    device.st64(out, device.rxq_recv(rxq, n, n, 0, device.BLOCK, 1))
    device.rxq_give_back(rxq, n)
    device.st64(out, device.rxq_first(rxq) + device.rxq_packet(rxq, n) + device.rxq_lkey(rxq))


def eth_send(txq, raddr, rkey, laddr, lkey, n, out):
    """Sending packets in all scopes, and waiting for a time."""
    device.st64(out, device.txq_wait(txq, device.txq_send(txq, laddr, lkey, n, 1)))
    device.st64(out, device.txq_send(txq, laddr, lkey, n, 1, device.CTA, device.DEFAULT, device.WARP))
    device.st64(out, device.txq_send(txq, laddr, lkey, n, 1, device.EXCLUSIVE, device.DEFAULT, device.BLOCK))
    device.st64(out, device.txq_wait_send(txq, n, laddr, lkey, n))
    device.st64(out, device.txq_wait_send(txq, n, laddr, lkey, n, 1, device.CTA, device.DEFAULT, device.BLOCK))
    device.st64(out, device.txq_poll(txq) + device.txq_poll(txq, n, device.EXCLUSIVE, 0))


def eth_headers(txq, raddr, rkey, laddr, lkey, n, out):
    """Packets with headers in the WQE, one of them cut by the NIC."""
    device.st64(out, device.txq_send_headers(txq, raddr, 54, laddr, lkey, n))
    device.st64(out, device.txq_send_headers(txq, raddr, n, laddr, lkey, n, 1460, 1, device.EXCLUSIVE))
    first = device.txq_reserve(txq, device.txq_headers_blocks(n, n))
    device.st64(out, device.txq_prepare_headers(txq, first, raddr, n, laddr, lkey, n, n, 1))


def eth_by_hand(txq, raddr, rkey, laddr, lkey, n, out):
    """The builders of packets, and semaphores."""
    first = device.txq_reserve(txq, device.txq_multi_blocks(n) + 2)
    device.txq_prepare_send(txq, first, laddr, lkey, n)
    device.txq_prepare_wait(txq, first + 1, n)
    device.st64(out, device.txq_prepare_multi(txq, first + 2, n, device.lane_id(), laddr, lkey, n, 1))
    device.st64(out, device.post(txq, first, n))
    device.st64(out, device.sem_wait(raddr, n, device.SEM_FREE, n) + device.sem_status(raddr, n))
    device.st64(out, device.sem_set_packets(raddr, n, device.SEM_READY, n, n) + device.sem_info(raddr, n))
    device.st64(out, device.sem_set_status(raddr, n, n) + device.sem_first(raddr, n) + device.sem_packets(raddr, n))
    device.st64(out, device.sem_take(raddr, n) + device.sem_next(raddr, n) + device.sem_free(raddr, n))


def buffers(array, index, out):
    """Elements of an array of buffers."""
    buf = device.buf_get(array, index)
    device.st64(out, device.buf_addr(buf) + device.buf_nbytes(buf) + device.buf_mkey(buf))


def rdma_strong(rdma, array, buf, n, imm, out):
    """The RDMA library, strong mode."""
    buf, conn, flags = device.buf_get(array, n), n, device.RDMA_IMM
    status = device.rdma_write_strong(rdma, conn, buf, n, buf, n, n, imm, flags)
    status += device.rdma_write_inline_strong(rdma, conn, buf, n, out, n, imm, flags)
    status += device.rdma_write_value_strong(rdma, conn, buf, n, imm, 4)
    status += device.rdma_read_strong(rdma, conn, buf, n, buf, n, n) + device.rdma_send_strong(rdma, conn, buf, n, n)
    device.st64(out, status + device.rdma_commit_strong(rdma, conn) + device.rdma_wait_all(rdma))
    recv = device.rdma_get_recv(rdma)
    device.st64(out, device.rdma_recv_strong(recv, buf, n, n) + device.rdma_recv_commit_strong(recv))


def rdma_weak(rdma, array, buf, n, imm, out):
    """The RDMA library, weak mode, and the wait for messages."""
    buf, conn, flags = device.buf_get(array, n), n, device.RDMA_IMM
    position, mask = device.rdma_get_info(rdma, conn)
    status = device.rdma_write_weak(rdma, conn, buf, n, buf, n, n, imm, flags, position + 1 & mask)
    status += device.rdma_write_inline_weak(rdma, conn, buf, n, out, n, imm, flags, position)
    status += device.rdma_write_value_weak(rdma, conn, buf, n, imm, 4, imm, flags, position)
    status += device.rdma_read_weak(rdma, conn, buf, n, buf, n, n, position)
    status += device.rdma_send_weak(rdma, conn, buf, n, n, imm, flags, position)
    device.st64(out, status + device.rdma_commit_weak(rdma, conn, n))
    recv = device.rdma_get_recv(rdma)
    position, _ = device.rdma_recv_get_info(recv)
    device.st64(out, device.rdma_recv_weak(recv, buf, n, n, position) + device.rdma_recv_commit_weak(recv, n))
    device.st64(out, device.rdma_recv_wait_all(recv, out, out + n, 1))


def dma_copies(dma, source, target, nbytes, out):
    """All of DMA."""
    for i in range(nbytes):
        device.st64(out, device.dma_memcpy(dma, device.buf_get(source, i), i, device.buf_get(target, i), i, nbytes))
    device.st64(out, device.dma_wait(dma, device.dma_commit(dma)))
    device.st64(out, device.dma_wait_all(dma))


def packet_headers(packet, nbytes, address, port, out):
    """Headers of packets, and their checksums."""
    protocol, ip, l4, length = headers.l4_of(packet, nbytes)
    payload, size = headers.udp_payload(l4, length)
    segment, more = headers.tcp_payload(l4, length)
    device.st64(out, protocol + payload + size + segment + more + headers.is_l4_intact(ip, protocol, l4, length))
    device.st64(out, headers.is_ipv4_intact(ip) + headers.spend_hop(ip) + headers.ipv6_at(ip).source_high)
    device.st64(out, headers.arp_at(packet).sender_mac + headers.icmp_at(l4).identifier)
    headers.set_source(ip, protocol, l4, address, port)
    headers.set_destination(ip, protocol, l4, address, port)
    headers.swap_macs(packet)
    headers.swap_addresses(ip)
    headers.swap_ports(l4)
    headers.write_ipv4_checksum(ip)
    headers.write_l4_checksum(ip, protocol, l4, length)


def exclusive_put(queue, raddr, rkey, laddr, lkey, n, out):
    device.st64(out, device.put(queue, raddr, rkey, laddr, lkey, n, device.EXCLUSIVE))


def shared_put(queue, raddr, rkey, laddr, lkey, n, out):
    device.st64(out, device.put(queue, raddr, rkey, laddr, lkey, n, device.GPU))


def exclusive_async_put(queue, raddr, rkey, laddr, lkey, n, out):
    flags = device.ASYNC_STORE_RELEASE
    device.st64(out, device.put(queue, raddr, rkey, laddr, lkey, n, device.EXCLUSIVE, flags))


@device.device_function
def own_slot():
    return device.block_slot()


def two_functions_slots(out):
    device.st64(out, device.block_slot())
    device.st64(out + 8, own_slot())
    device.st64(out + 16, device.block_broadcast(out, 0))


def engine_inside(nic, row, out):
    """The part of it that executes requests inside one NIC."""
    device.st64(out, serve(nic, row, 64))


KERNELS: dict[str, tuple[Callable, int]] = {
    "one_sided": (one_sided, 7),
    "two_sided": (two_sided, 7),
    "in_warps": (in_warps, 7),
    "in_blocks": (in_blocks, 7),
    "low_level": (low_level, 7),
    "blue_flame": (blue_flame, 7),
    "counted": (counted, 7),
    "groups": (groups, 7),
    "eth_receive": (eth_receive, 7),
    "eth_send": (eth_send, 7),
    "eth_headers": (eth_headers, 7),
    "eth_by_hand": (eth_by_hand, 7),
    "buffers": (buffers, 3),
    "rdma_strong": (rdma_strong, 6),
    "rdma_weak": (rdma_weak, 6),
    "dma_copies": (dma_copies, 5),
    "packet_headers": (packet_headers, 5),
    "receive_udp": (receive_udp.py_func, 9),
    "receive_tcp": (receive_tcp.py_func, 11),
    "receive_icmp": (receive_icmp.py_func, 13),
    "serve_http": (serve_http.py_func, 4),
    "exclusive_async_put": (exclusive_async_put, 7),
    "engine": (gpunetio_slice, 3),
    "engine_inside": (engine_inside, 3),
}
# The option of the second kernel leaves room for 24 warps on a multiprocessor.
OPTIONS = {"engine": SLICE_OPTIONS, "engine_inside": ("-maxrregcount=80",)}


def ptx_of(body: Callable, parameters: int, capability: tuple[int, int] = SM_90) -> str:
    """A kernel of integers as PTX, without a bound on the threads of a block: `OPTIONS` decide about registers."""
    return cubin.ptx_of(body, (INT,) * parameters, capability)[0]


def assemble(ptx: str, capability: tuple[int, int], *options: str) -> str:
    """What ptxas and the linker report of registers, stack and spills. They run as for a launch."""
    return cubin.assemble(ptx, capability, ("-verbose", *options))[1]


def used(report: str) -> tuple[int, int]:
    """The registers, and the bytes of stack, of a linked kernel."""
    found = re.search(r"used (\d+) registers, .* (\d+) stack", report)
    assert found, report
    return int(found[1]), int(found[2])


def report_of(name: str, ptx: str, capability: tuple[int, int]) -> str:
    """What ptxas and the linker report of a kernel of `KERNELS`."""
    return assemble(ptx, capability, *OPTIONS.get(name, ()))


def main() -> None:
    folder, capability = Path(sys.argv[1]), (int(sys.argv[2]), int(sys.argv[3]))
    for name in sys.argv[4:]:
        start = time.process_time()
        ptx = ptx_of(*KERNELS[name], capability)
        compiled = time.process_time()
        report = report_of(name, ptx, capability)
        assembled = time.process_time()
        registers, stack = used(report)
        (folder / f"{name}.txt").write_text(report)
        (folder / f"{name}.ptx").write_text(ptx)
        cost = {
            "kernel": name, "compiler_s": compiled - start, "ptxas_s": assembled - compiled,
            "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, "registers": registers, "stack": stack,
        }
        print(json.dumps(cost))


if __name__ == "__main__":
    main()
