"""Ethernet queues created through DEVX: calls that add what is missing in a context."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from gpunetio import verbs
from gpunetio.errors import DriverError
from gpunetio.formats.commands import Opcode, Status
from gpunetio.formats.ethernet_queues import DispType, RxHashFn, rq_list
from gpunetio.memory import HostMemory
from gpunetio.nic.control.objects import MailboxObjects
from gpunetio.nic.control.queues.ethernet_objects import EthernetObjects
from gpunetio.nic.control.syndromes import CommandSyndrome
from gpunetio.nic.nic import SoftNic
from gpunetio.verbs import DevxObject

KEY = bytes.fromhex("2cc681d15bdbf4f7fca28319db1a3e946b9e38d92c9c03d1ad9944a7d9563d59063c25f3fc1fdc2a")
SIZE, RECORD = 1 << 16, 0x8000
TABLES = ("tiss", "sqs", "rqs", "rqts", "tirs", "cqs", "pds", "umems", "uar_pages")


class Maker:
    """A PD, a UAR page and a UMEM of an open device. Objects are named by number, so the device alone counts users."""

    def __init__(self, ctx: verbs.Context):
        self.ctx, self.devx = ctx, ctx.devx
        self.memory = HostMemory(SIZE)
        self.pd, self.uar = ctx.create_pd(), self.devx.alloc_uar()
        self.umem = self.devx.register_umem(self.memory)

    def create(self, opcode: Opcode, **fields: Any) -> DevxObject:
        return self.devx.create(opcode, **fields)

    def cq(self) -> DevxObject:
        return self.create(
            Opcode.CREATE_CQ, cq_umem_valid=1, cq_umem_id=self.umem.umem_id,
            cq_context={
                "uar_page": self.uar.page_id, "c_eqn": self.devx.query_eqn(), "dbr_umem_valid": 1,
                "dbr_umem_id": self.umem.umem_id, "dbr_addr": RECORD, "log_cq_size": 4,
            },
        )

    def domain(self) -> DevxObject:
        return self.create(Opcode.ALLOC_TRANSPORT_DOMAIN)

    def counter(self) -> DevxObject:
        return self.create(Opcode.ALLOC_Q_COUNTER)

    def tis(self, domain: int, **context: Any) -> DevxObject:
        return self.create(Opcode.CREATE_TIS, ctx={"transport_domain": domain, **context})

    def wq(self, **fields: Any) -> dict[str, Any]:
        umem = self.umem.umem_id
        return {
            "wq_type": 1, "pd": self.pd.pdn, "log_wq_sz": 4, "wq_umem_valid": 1, "wq_umem_id": umem,
            "dbr_umem_valid": 1, "dbr_umem_id": umem, "dbr_addr": RECORD + 64, **fields,
        }

    def sq(self, cqn: int, tisn: int, wq: dict[str, Any] | None = None, **context: Any) -> DevxObject:
        ring = self.wq(log_wq_stride=6, uar_page=self.uar.page_id) | (wq or {})
        fields = {"cqn": cqn, "tis_lst_sz": 1, "tis_num_0": tisn, "flush_in_error_en": 1, "wq": ring}
        return self.create(Opcode.CREATE_SQ, ctx=fields | context)

    def rq(self, cqn: int, wq: dict[str, Any] | None = None, **context: Any) -> DevxObject:
        ring = self.wq(log_wq_stride=4) | (wq or {})
        return self.create(Opcode.CREATE_RQ, ctx={"cqn": cqn, "flush_in_error_en": 1, "vsd": 1, "wq": ring} | context)

    def rmp(self, **wq: Any) -> DevxObject:
        """A pool whose WQEs have a segment before their data."""
        ring = self.wq(log_wq_stride=5) | wq
        return self.create(Opcode.CREATE_RMP, ctx={"state": 1, "wq": ring})

    def rqt(self, rqns: Iterable[int], most: int = 8, **context: Any) -> DevxObject:
        rqns = list(rqns)
        fields = {"rqt_max_size": most, "rqt_actual_size": len(rqns)} | context
        return self.create(Opcode.CREATE_RQT, ctx=fields, rq_num=rq_list(rqns))

    def direct(self, domain: int, rqn: int, **context: Any) -> DevxObject:
        return self.create(Opcode.CREATE_TIR, ctx={"transport_domain": domain, "inline_rqn": rqn} | context)

    def hashed(self, domain: int, rqtn: int, **context: Any) -> DevxObject:
        fields = {
            "transport_domain": domain, "disp_type": DispType.INDIRECT, "indirect_table": rqtn,
            "rx_hash_fn": RxHashFn.TOEPLITZ, "rx_hash_toeplitz_key": KEY,
            "rx_hash_field_selector_outer": {"l4_prot_type": 1, "selected_fields": 0xF},
        }
        return self.create(Opcode.CREATE_TIR, ctx=fields | context)


def nic_of(ctx: verbs.Context) -> SoftNic:
    return ctx.provider.nic  # type: ignore[attr-defined]


def kinds_of(nic: SoftNic) -> list[MailboxObjects]:
    """The kinds of objects that others can use."""
    return [kind for kind in nic.control.kinds.values() if isinstance(kind, MailboxObjects)]


def everything(nic: SoftNic) -> list[bytes]:
    """All rows and contexts of Ethernet queues, and of what they use."""
    kinds = kinds_of(nic)
    contexts = [
        bytes(context) for kind in kinds if isinstance(kind, EthernetObjects) for context in kind.contexts.values()
    ]
    users = [repr(sorted(kind._users.items())).encode() for kind in kinds]
    return [getattr(nic, table).rows.tobytes() for table in TABLES] + contexts + users


def refuses(
    ctx: verbs.Context, call: Callable[[], Any], status: Status, syndrome: CommandSyndrome, *words: str
) -> None:
    """The device refuses the call with this status and syndrome and these words, and nothing has changed."""
    before = everything(nic_of(ctx))
    with pytest.raises(DriverError) as caught:
        call()
    text = str(caught.value)
    assert (Status(caught.value.status), CommandSyndrome(caught.value.syndrome)) == (status, syndrome), text
    for word in words:
        assert word in text
    assert everything(nic_of(ctx)) == before
