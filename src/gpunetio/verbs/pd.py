"""Protection domains: a queue can use only memory registered in its own domain."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..arguments import instance, within
from ..enums import Access, QpSendDbrMode, QpType, SrqType
from ..errors import InvalidValueError
from ..formats.packet import GRH
from .ah import AddressHandle, sender_of
from .ah_attr import AhAttr
from .cq import CQ
from .dpa import AnyDpa, AnyDpaCompletion
from .handle import Handle
from .mr import MR, Dmabuf
from .qp import QP
from .qp_init import QpInitAttr
from .srq import SRQ, SrqInitAttr
from .uar import UAR
from .umem import UMEM
from .work import Completion

if TYPE_CHECKING:
    from .context import Context


class PD(Handle):
    """A protection domain (`ibv_pd`), number `pdn`. It closes the MRs and QPs created from it."""

    _rank = 3
    _closes_users = True
    pdn: int

    def __init__(self, ctx: Context, imported: int | None = None):
        super().__init__(ctx)
        self._use(ctx)
        provider = ctx.provider
        with ExitStack() as undo:
            if imported is None:
                self.pdn = provider.alloc_pd()
                undo.callback(provider.dealloc_pd, self.pdn)
            else:
                self.pdn = within("pdn", imported, 0, (1 << 24) - 1)
            self._opened(f"PD {self.pdn:#x} of {ctx.name}", undo)

    def register(
        self, obj: object, access: Access | None = None, *, nbytes: int | None = None, iova: int | None = None
    ) -> MR:
        """Register the memory of `obj` with the device (`ibv_reg_mr_iova2`).

        `obj` is a buffer, or has `__cuda_array_interface__` or DLPack. Its host or GPU memory is not copied, and stays
        alive as long as the region. Keep the region as long as requests use its keys. By default the region has all
        rights, or only read rights if `obj` is read-only. With `nbytes`, `obj` is the address of that much memory,
        which the caller keeps allocated until the region is closed.

        Requests address the memory from `iova` on: by default the memory's own address; 0 for offsets from its start.
        On a card, `iova` and the memory's address must have the same offset within a page.
        """
        return MR(self, obj, access, iova, nbytes)

    def register_dmabuf(
        self, fd: int, nbytes: int, access: Access | None = None, *, offset: int = 0, iova: int | None = None
    ) -> MR:
        """Register `nbytes` at `offset` of a dmabuf with the device (`ibv_reg_dmabuf_mr`).

        By default the region has all rights. Requests address it from `iova` on, by default from `offset`.
        NotSupportedError if the device cannot register dmabufs. The software NIC needs an exporter that lets the CPU
        map the dmabuf.
        """
        return MR(self, Dmabuf(fd, offset, nbytes), access, offset if iova is None else iova)

    def create_srq(
        self,
        srq_wr: int,
        *,
        receive_max_sges: int = 1,
        srq_type: SrqType = SrqType.LINKED_LIST,
        external_umem: tuple[UMEM, int] | None = None,
        external_dbr_umem: tuple[UMEM, int] | None = None,
        external_datapath: bool = False,
        context: object = None,
    ) -> SRQ:
        """Create a shared receive queue with room for at least `srq_wr` receives (`doca_verbs_srq_create`).

        A CONTIGUOUS queue, whose WQEs are used in ring order, needs an external data path: kernels fill it.
        `external_umem` and `external_dbr_umem`, each (UMEM, byte offset), place the ring and its doorbell record in
        your UMEMs. `context` is an arbitrary object, kept as an attribute of the queue.
        """
        attr = SrqInitAttr(
            srq_wr=srq_wr,
            receive_max_sges=receive_max_sges,
            srq_type=srq_type,
            external_umem=external_umem,
            external_dbr_umem=external_dbr_umem,
            external_datapath=external_datapath,
            context=context,
        )
        return self.ctx.kinds.srq(self, attr)

    def create_ah(self, attr: AhAttr, *, port: int = 1) -> AddressHandle:
        """Create an address handle for datagrams (`ibv_create_ah`). NotFoundError if the address does not answer."""
        return AddressHandle(self, attr, port)

    def create_ah_to_sender(self, done: Completion, header: bytes, *, port: int = 1) -> AddressHandle:
        """Create an address handle to the sender of a datagram (`ibv_create_ah_from_wc`).

        `done` is the completion of the datagram's receive, and `header` is the first 40 bytes in its buffers.
        """
        header = bytes(header)
        if len(header) != GRH.size:
            raise InvalidValueError(f"header has {len(header)} bytes: a receive of a datagram begins with {GRH.size}")
        return AddressHandle(self, sender_of(self.ctx, port, instance("done", done, Completion), header), port)

    def create_qp(
        self,
        *,
        sq_wr: int = 0,
        rq_wr: int = 0,
        send_cq: CQ | None = None,
        receive_cq: CQ | None = None,
        send_max_sges: int = 1,
        receive_max_sges: int = 1,
        max_inline_data: int = 0,
        sq_sig_all: bool = False,
        user_index: int = 0,
        qp_type: QpType = QpType.RC,
        srq: SRQ | None = None,
        external_datapath: bool = False,
        external_umem: tuple[UMEM, int] | None = None,
        external_dbr_umem: tuple[UMEM, int] | None = None,
        external_uar: UAR | None = None,
        core_direct_master: bool = False,
        send_dbr_mode: QpSendDbrMode = QpSendDbrMode.DBR_VALID,
        emulate_no_dbr_ext: bool = False,
        cqe_inline: bool = False,
        cqe_inline_responses: bool = False,
        memcpy: bool = False,
        dpa: AnyDpa | None = None,
        send_dpa_completion: AnyDpaCompletion | None = None,
        receive_dpa_completion: AnyDpaCompletion | None = None,
        context: object = None,
    ) -> QP:
        """Create a queue pair in state RST (`doca_verbs_qp_create`). The arguments are those of `QpInitAttr`."""
        attr = QpInitAttr(
            sq_wr=sq_wr,
            rq_wr=rq_wr,
            send_cq=send_cq,
            receive_cq=receive_cq,
            send_max_sges=send_max_sges,
            receive_max_sges=receive_max_sges,
            max_inline_data=max_inline_data,
            sq_sig_all=sq_sig_all,
            user_index=user_index,
            qp_type=qp_type,
            srq=srq,
            external_datapath=external_datapath,
            external_umem=external_umem,
            external_dbr_umem=external_dbr_umem,
            external_uar=external_uar,
            core_direct_master=core_direct_master,
            send_dbr_mode=send_dbr_mode,
            emulate_no_dbr_ext=emulate_no_dbr_ext,
            cqe_inline=cqe_inline,
            cqe_inline_responses=cqe_inline_responses,
            memcpy=memcpy,
            dpa=dpa,
            send_dpa_completion=send_dpa_completion,
            receive_dpa_completion=receive_dpa_completion,
            context=context,
        )
        return self.ctx.kinds.qp(self, attr)
