"""Statuses that device functions return: an index or 0 on success, otherwise one of these negative errno values."""

OK = 0
EIO = -5  # an error completion; on the host, `ExportedQp.last_error()` has it
EAGAIN = -11  # the ring of a semaphore has no item for the consumer yet
EBUSY = 16  # not yet: positive, as in the C library
EOVERFLOW = -75  # the message has arrived, but its completion was overwritten: its length is unknown
ENOBUFS = -105  # all receives of the queue are posted, or all items of a ring are taken: wait for one first
ETIMEDOUT = -110  # the deadline of the queue has passed
EINVAL = -22  # an argument that no WQE can express
ENOTRECOVERABLE = -131  # a reservation of this queue timed out and left a hole: reset the queue

NAMES = {
    OK: "ok",
    EIO: "error completion",
    EAGAIN: "no item ready",
    EBUSY: "not yet complete",
    EOVERFLOW: "completion overwritten",
    ENOBUFS: "queue full",
    ETIMEDOUT: "deadline passed",
    EINVAL: "invalid argument",
    ENOTRECOVERABLE: "queue broken by an earlier timeout: reset it",
}
