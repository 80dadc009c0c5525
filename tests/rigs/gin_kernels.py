"""NCCL's kernels for a GIN context, written with our device functions: they read its members at byte offsets.

This is the counterpart of `gin/gin.cpp`, for contexts whose queues are those of GPUNetIO 2.0 (296 bytes).
"""

from gpunetio import device, kernel
from gpunetio.device import device_function

QP_BYTES = 296


@device_function
def key_of(rkeys, rank):
    """Return a key of a table, which is stored in big-endian order."""
    return device.be32(device.ld32(rkeys + 4 * rank))


@kernel
def work(ctx, window, rank, ranks, piece, value, counted, out):
    """To each peer: a put with a signal, a value with one, and a put that counts here. Then wait for all."""
    rkeys = device.ld64(window)
    lkey = device.be32(device.ld32(window + 8))
    sink = device.be32(device.ld32(ctx + 64))
    counter_at = 8 * (1 + device.ld32(ctx + 36))
    signal_at = 8 * device.ld32(ctx + 60)
    status = 0
    for peer in range(ranks):
        qp = device.ld64(ctx) + peer * QP_BYTES
        key = key_of(rkeys, peer)
        signal_key = key_of(device.ld64(ctx + 48), peer)
        at = (1 + rank) * piece
        ticket = device.put_signal(qp, at, key, 0, lkey, piece, signal_at, signal_key, 0, sink, 1)
        at += ranks * piece
        if ticket >= 0:
            ticket = device.p_signal(qp, at, key, value, 8, signal_at + 8, signal_key, 0, sink, value)
        at += ranks * piece
        if ticket >= 0 and counted:
            companion = device.ld64(ctx + 8) + peer * QP_BYTES
            counter_key = key_of(device.ld64(ctx + 24), rank)
            ticket = device.put_counter(
                qp, at, key, 0, lkey, piece, companion, counter_at, counter_key, 0, sink, 1
            )
        if ticket < 0:
            status = ticket
    for peer in range(ranks):
        if status == 0:
            status = device.wait_all(device.ld64(ctx) + peer * QP_BYTES)
    device.st64(out, status)


@kernel
def gets(ctx, window, rank, ranks, piece, target, words, out):
    """Get from each peer the piece that it sends, to `target` on, as NCCL 2.30.7 does; add to a word in its window.

    The context has 88 bytes: it counts gets that were issued, and those that a DUMP has made visible.
    """
    rkeys = device.ld64(window)
    lkey = device.be32(device.ld32(window + 8))
    sink = device.be32(device.ld32(ctx + 64))
    issued, visible = device.ld64(ctx + 72), device.ld64(ctx + 80)
    status = 0
    for peer in range(ranks):
        qp = device.ld64(ctx) + peer * QP_BYTES
        ticket = device.get(qp, 0, key_of(rkeys, peer), target + peer * piece, lkey, piece)
        device.st64(issued + 8 * peer, ticket + 1)
        if device.ld64(visible + 8 * peer) < ticket + 1:
            ticket = device.mcst(qp, 0, sink)
            device.st64(visible + 8 * peer, ticket + 1)
        if ticket >= 0:
            ticket = device.signal(qp, words + 8 * rank, key_of(rkeys, peer), 0, sink, 1 + rank)
        if ticket < 0:
            status = ticket
    for peer in range(ranks):
        if status == 0:
            status = device.wait_all(device.ld64(ctx) + peer * QP_BYTES)
    device.st64(out, status)
