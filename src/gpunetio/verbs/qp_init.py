"""Attributes of a new queue pair, and the size of its rings."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..arguments import instance, member, whole, within
from ..enums import QpSendDbrMode, QpType
from ..errors import InvalidValueError, NotSupportedError
from ..formats.wqe import ATOMIC_SEG, AV_SEG, CTRL_SEG, DATA_SEG, INLINE_HEADER, RADDR_SEG, SEGMENT, WQEBB
from ..memory import round_up
from .cq import CQ
from .device_attr import DeviceAttributes
from .devx.ring import check_places
from .dpa import AnyDpa, AnyDpaCompletion
from .srq import SRQ
from .uar import UAR
from .umem import UMEM

_MAX_SQ_BYTES = 0x7FFF_FFFF
_MIN_RQ_BYTES = 64
_MAX_SEND_WQE = 63 * SEGMENT  # `ds` of a control segment has 6 bits (PRM), whatever max_wqe_sz_sq says
_USER_INDEX_BITS = 24
_SIZES = ("sq_wr", "rq_wr", "send_max_sges", "receive_max_sges", "max_inline_data", "user_index")
_SWITCHES = (
    "sq_sig_all", "external_datapath", "core_direct_master", "emulate_no_dbr_ext", "cqe_inline",
    "cqe_inline_responses", "memcpy",
)
_OBJECTS = {
    "send_cq": CQ, "receive_cq": CQ, "srq": SRQ, "external_uar": UAR, "dpa": AnyDpa,
    "send_dpa_completion": AnyDpaCompletion, "receive_dpa_completion": AnyDpaCompletion,
}


@dataclass(frozen=True, kw_only=True)
class QpInitAttr:
    """Attributes of a new queue pair (`doca_verbs_qp_init_attr`).

    `sq_wr`, `rq_wr`          work requests that each ring must hold; 0 for no ring
    `send_cq`, `receive_cq`   the completion queue of each ring
    `send_max_sges`           scatter/gather entries of one send
    `receive_max_sges`        scatter/gather entries of one receive
    `max_inline_data`         inline bytes of one send; raised to what its WQE has room for
    `sq_sig_all`              every send makes a completion; whoever posts must set the flag
    `qp_type`                 RC, or UC: no acknowledgements, no READs, no atomics. UD: datagrams of one packet each, to
                              any address; GSI: the same, as queue pair 1 of a port, for general services
    `user_index`              24 bits that the device puts into completions
    `srq`                     replaces the receive ring; `rq_wr` is then ignored
    `external_datapath`       something else posts, for example a kernel; always so with `external_umem`
    `external_umem`           (UMEM, offset) of the rings, receive ring first; the offset is a multiple of 64
    `external_dbr_umem`       (UMEM, offset) of the 8-byte doorbell record
    `external_uar`            doorbell page to share; by default the queue pair gets its own
    `core_direct_master`      the queue may hold WAIT requests
    `send_dbr_mode`           NO_DBR_EXT: the device needs no doorbell record for sends
    `emulate_no_dbr_ext`      a CPU thread updates the record instead of the kernels
    `cqe_inline`              SENDs of up to 32 bytes arrive in their completions (`…_set_cqe_inline`): a kernel reads
                              them there, and `CQ.poll` copies them to the receive's buffers. With `external_datapath`
                              and 128-byte entries, this holds for up to 64 bytes
    `cqe_inline_responses`    results of READs and atomics of up to 32 bytes, or 64 with 128-byte entries, arrive in
                              their completions; whoever polls copies them, so this needs `external_datapath`
    `memcpy`                  the queue may hold MEMCPY requests, which copy local memory
                              (`MLX5DV_QP_EX_WITH_MEMCPY`); only RC, on a device that has them
    `dpa`                     kernels of this DPA post and poll (`…_set_dpa`); ring, record and page are allocated in
                              the DPA, unless `external_umem`, `external_dbr_umem` and `external_uar` are all given
    `send_dpa_completion`     replaces `send_cq` (`…_set_send_dpa_completion`)
    `receive_dpa_completion`  replaces `receive_cq`; with the three external attributes, completions also identify the
                              DPA, so `dpa` may be omitted
    `context`                 an arbitrary object, kept as an attribute of the queue pair
    """

    sq_wr: int = 0
    rq_wr: int = 0
    send_cq: CQ | None = None
    receive_cq: CQ | None = None
    send_max_sges: int = 1
    receive_max_sges: int = 1
    max_inline_data: int = 0
    sq_sig_all: bool = False
    user_index: int = 0
    qp_type: QpType = QpType.RC
    srq: SRQ | None = None
    external_datapath: bool = False
    external_umem: tuple[UMEM, int] | None = None
    external_dbr_umem: tuple[UMEM, int] | None = None
    external_uar: UAR | None = None
    core_direct_master: bool = False
    send_dbr_mode: QpSendDbrMode = QpSendDbrMode.DBR_VALID
    emulate_no_dbr_ext: bool = False
    cqe_inline: bool = False
    cqe_inline_responses: bool = False
    memcpy: bool = False
    dpa: AnyDpa | None = None
    send_dpa_completion: AnyDpaCompletion | None = None
    receive_dpa_completion: AnyDpaCompletion | None = None
    context: object = None

    def typed(self) -> QpInitAttr:
        """Return the attributes as ints and enumeration members. InvalidValueError names a value of the wrong type."""
        for name, kind in _OBJECTS.items():
            if getattr(self, name) is not None:
                instance(name, getattr(self, name), kind)
        check_places(self.external_umem, self.external_dbr_umem)
        return replace(
            self,
            **{name: whole(name, getattr(self, name)) for name in (*_SIZES, "qp_type")},
            **{name: bool(within(name, getattr(self, name), 0, 1)) for name in _SWITCHES},
            send_dbr_mode=member("send_dbr_mode", self.send_dbr_mode, QpSendDbrMode),
        )

    @property
    def for_dpa(self) -> bool:
        """Return whether kernels of a DPA post or poll."""
        return any(part is not None for part in (self.dpa, self.send_dpa_completion, self.receive_dpa_completion))

    def check(self, device: DeviceAttributes) -> None:
        """Raise an error unless the device can create this queue pair. `queue_sizes` checks the sizes."""
        if self.qp_type not in list(QpType):
            raise InvalidValueError(f"qp_type = {self.qp_type}: it must be RC (0), UC (1), UD (2) or GSI (3)")
        if not device.is_qp_type_supported(self.qp_type):
            raise NotSupportedError(f"the device has no {QpType(self.qp_type).name} queue pairs")
        if QpType(self.qp_type).datagrams and self.for_dpa:
            raise NotSupportedError(
                f"{QpType(self.qp_type).name} queue pairs are for the CPU: kernels of a DPA send over RC and UC"
            )
        if self.sq_wr < 0 or self.rq_wr < 0 or self.max_inline_data < 0:
            raise InvalidValueError(
                f"sq_wr = {self.sq_wr}, rq_wr = {self.rq_wr}, max_inline_data = {self.max_inline_data}: "
                "none may be negative"
            )
        if not 0 <= self.user_index < 1 << _USER_INDEX_BITS:
            raise InvalidValueError(f"user_index = {self.user_index:#x} does not fit in {_USER_INDEX_BITS} bits")
        if self.send_dbr_mode == QpSendDbrMode.NO_DBR_EXT:
            if self.emulate_no_dbr_ext:
                raise InvalidValueError("emulate_no_dbr_ext with send_dbr_mode NO_DBR_EXT: choose one of the two")
            if not device.send_dbr_mode_no_dbr_ext:
                raise NotSupportedError(
                    "send_dbr_mode NO_DBR_EXT: the device needs doorbell records; use DBR_VALID or emulate_no_dbr_ext"
                )
        for name in ("cqe_inline", "cqe_inline_responses"):
            if getattr(self, name) and not device.is_cqe_inline_supported:
                raise NotSupportedError(f"{name}: the device puts no payload into completions; leave it out")
        if self.cqe_inline_responses and not self.external_datapath:
            raise InvalidValueError(
                "cqe_inline_responses without external_datapath: CQ.poll does not copy what READs and atomics return"
            )
        if self.memcpy and self.qp_type != QpType.RC:
            raise InvalidValueError(f"memcpy on a {QpType(self.qp_type).name} queue pair: only RC has it")
        if self.memcpy and not device.max_wr_memcpy_length:
            raise NotSupportedError(
                "memcpy: the device's queue pairs do not copy memory (its capabilities dma_mmo_qp and qpc_extension); "
                "leave it out"
            )
        if self.cqe_inline and self.srq and self.srq.external_datapath and not self.external_datapath:
            raise InvalidValueError(
                f"cqe_inline with {self.srq}, whose receives are not posted here: set external_datapath here, too"
            )
        if self.sq_wr and self.send_cq is None:
            raise InvalidValueError(f"sq_wr = {self.sq_wr} without send_cq: sends need a completion queue")
        if (self.rq_wr or self.srq) and self.receive_cq is None:
            what = "srq" if self.srq else f"rq_wr = {self.rq_wr}"
            raise InvalidValueError(f"{what} without receive_cq: receives need a completion queue")


@dataclass(frozen=True)
class QueueSizes:
    """Ring sizes of a queue pair: send ring in WQE basic blocks of 64 bytes, receive ring in WQEs."""

    rq_bytes: int
    rq_entries: int
    rq_stride: int
    sq_bytes: int
    sq_entries: int
    max_inline_data: int


def queue_sizes(attr: QpInitAttr, device: DeviceAttributes) -> QueueSizes:
    """Return the ring sizes for `attr`. InvalidValueError if the device does not support rings that large."""
    rq_bytes = rq_stride = sq_bytes = 0
    max_inline = attr.max_inline_data
    if attr.rq_wr and not attr.srq:
        if attr.rq_wr > device.max_qp_wr:
            raise InvalidValueError(f"rq_wr = {attr.rq_wr}: the device holds at most {device.max_qp_wr} receives")
        rq_stride = SEGMENT * _next_power_of_two(_at_least_one("receive_max_sges", attr.receive_max_sges))
        if rq_stride > device.max_wqe_sz_rq:
            raise InvalidValueError(
                f"receive_max_sges = {attr.receive_max_sges} makes a receive WQE of {rq_stride} bytes: "
                f"the device takes at most {device.max_wqe_sz_rq}"
            )
        rq_bytes = max(_next_power_of_two(attr.rq_wr * rq_stride), _MIN_RQ_BYTES)
    if attr.sq_wr:
        headers = _header_bytes(QpType(attr.qp_type))
        sges = _at_least_one("send_max_sges", attr.send_max_sges)
        most_wqe = min(device.max_wqe_sz_sq, _MAX_SEND_WQE)
        wqe = headers + max(DATA_SEG.size * sges, round_up(INLINE_HEADER.size + attr.max_inline_data, SEGMENT))
        if wqe > most_wqe:
            raise InvalidValueError(
                f"send_max_sges = {attr.send_max_sges} and max_inline_data = {attr.max_inline_data} make a send WQE of "
                f"{wqe} bytes: the device takes at most {most_wqe}"
            )
        if not QpType(attr.qp_type).datagrams:  # leave room for an atomic
            wqe = max(wqe, headers + ATOMIC_SEG.size + DATA_SEG.size * sges)
        wqe = round_up(wqe, WQEBB)
        sq_bytes = _next_power_of_two(attr.sq_wr * wqe)
        most = 1 << device.log_max_qp_sz
        if attr.sq_wr > _MAX_SQ_BYTES // device.max_wqe_sz_sq or sq_bytes // WQEBB > most:
            raise InvalidValueError(
                f"sq_wr = {attr.sq_wr} of {wqe} bytes make {sq_bytes // WQEBB} basic blocks of 64 bytes: the device "
                f"holds at most {most}; ask for fewer requests, or smaller ones"
            )
        max_inline = min(wqe, most_wqe) - (headers + INLINE_HEADER.size)
    return QueueSizes(
        rq_bytes, rq_bytes // rq_stride if rq_stride else 0, rq_stride, sq_bytes, sq_bytes // WQEBB, max_inline
    )


def _header_bytes(qp_type: QpType) -> int:
    """Return the bytes that precede the data of a WRITE or, for datagrams, of a SEND."""
    return CTRL_SEG.size + (AV_SEG.size if qp_type.datagrams else RADDR_SEG.size)


def _next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise InvalidValueError(f"{name} = {value}: a request needs at least one scatter/gather entry")
    return value
