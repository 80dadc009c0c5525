"""A program as a user writes it, with all of it typed: mypy --strict and pyright in strict mode have nothing to say."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

import gpunetio as gn
from gpunetio import device as dev
from gpunetio import verbs

THREADS = 4


@gn.device_function
def offset(nbytes: int) -> int:
    return dev.global_id() * nbytes


@gn.kernel
def send(qp: dev.VerbsQp, raddr: int, rkey: int, laddr: int, lkey: int, nbytes: int, statuses: int) -> None:
    at = offset(nbytes)
    ticket = dev.put(qp, raddr + at, rkey, laddr + at, lkey, nbytes, dev.GPU, scope=dev.THREAD)
    status = dev.wait(qp, ticket)
    if status != dev.OK:
        dev.st64(statuses + 8 * dev.thread_idx(), status)


def port(address: str) -> gn.PortConfig:
    return gn.PortConfig(
        addresses=(address,), wire="udp", capture="frames.pcap", faults=gn.Faults(loss=0.01, reordering=0.05, seed=7)
    )


def put(nic: gn.Context, gpu: gn.Gpu) -> tuple[NDArray[np.uint8], gn.QpError | None]:
    pd: verbs.PD = nic.create_pd()
    near, far = gpu.create_qp(pd, timeout=10), gpu.create_qp(pd)
    near.connect(far)
    source, target = gpu.alloc(256, gn.MemType.CPU_GPU), gpu.alloc(256)
    source.array[:] = np.arange(256, dtype=np.uint8)
    here, there = pd.register(source), pd.register(target, gn.Access.LOCAL_WRITE | gn.Access.REMOTE_WRITE)
    with gpu.alloc(8 * THREADS, gn.MemType.CPU_GPU) as statuses:
        launch = send[1, THREADS, gpu](near, there.address, there.rkey, here.address, here.lkey, 64, statuses)
        ended: bool = launch.wait(timeout=60)
        words: NDArray[np.int64] = statuses.array.view(np.int64)
        print(ended, int(words[0]), near.nic_handler.name, near.ring_memory, here.nbytes, here.access)
    return target.array, near.last_error()


def post(qp: verbs.QP, cq: verbs.CQ, mr: verbs.MR, raddr: int, rkey: int) -> Iterator[verbs.Completion]:
    sge = verbs.Sge(mr.address, 64, mr.lkey)
    qp.post_recv(verbs.RecvWr(sges=[sge], wr_id=1))
    qp.post_send(
        verbs.SendWr(
            opcode=gn.WrOpcode.RDMA_WRITE, sges=[sge], wr_id=2, remote_addr=raddr, rkey=rkey,
            flags=gn.SendFlags.SIGNALED | gn.SendFlags.FENCE,
        )
    )
    for completion in cq.poll(16):
        if completion.status is not gn.WcStatus.SUCCESS:
            print(completion.wr_id, completion.status.name)
        yield completion


def objects(nic: gn.Context) -> None:
    with nic.create_comp_channel() as channel, nic.create_cq(64, channel=channel) as cq, nic.create_pd() as pd:
        srq = pd.create_srq(srq_wr=16)
        qp = pd.create_qp(sq_wr=16, rq_wr=16, send_cq=cq, receive_cq=cq, qp_type=gn.QpType.RC)
        mr = pd.register(bytearray(64))
        endpoint = qp.endpoint()
        qp.connect(endpoint)
        print(qp.query()[0].current_state is gn.QpState.RTS, qp.qpn, cq.entries, srq.srqn, channel.fileno())
        wr_ids = [completion.wr_id for completion in post(qp, cq, mr, mr.address, mr.rkey)]
        print(sum(wr_ids), nic.query_port().active_mtu, nic.query_device().max_qp, nic.name)


def exports(pd: verbs.PD, gpu: gn.Gpu) -> None:
    group: gn.QpGroup = gpu.create_qp_group(pd, nic_handler=gn.NicHandler.CPU_PROXY)
    queues: gn.ExportedQps = gpu.export_qps([group.main])
    for queue in queues:
        queue.reset()
    with gn.ProxyService() as service:
        service.monitor(queues[0])
    print("all done:", gn.gpu_list(), gn.library_version())


def main() -> None:
    try:
        with gn.open("soft0", port=port("127.0.0.1")) as nic, gn.Gpu("host", warp=2) as gpu:
            arrived, error = put(nic, gpu)
            print(arrived.sum(), error)
            objects(nic)
            exports(nic.create_pd(), gpu)
    except gn.errors.InvalidValueError as refused:
        print(refused.code.name, refused)
    except gn.DocaError as failed:
        print(failed.code)


if __name__ == "__main__":
    main()
