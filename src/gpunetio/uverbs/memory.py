"""Calls about protection domains and memory regions."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ..enums import Access
from ..errors import InvalidValueError, NotSupportedError
from ..memory import PAGE, is_accessible
from ..verbs import PD
from . import abi
from .abi import Object, Rereg, Write
from .call import Call, Refused
from .files import OpenFile
from .methods import command, method

_KNOWN = sum(Access.all()) | Access.RELAXED_ORDERING
_MW_BIND, _HUGETLB = 1 << 4, 1 << 7  # IB_UVERBS_ACCESS_*: windows, which cannot be created, and a hint
_MOST_INT = (1 << 31) - 1
_OPTIONAL = (1 << 30) - (1 << 20)  # IB_UVERBS_ACCESS_OPTIONAL_RANGE: rights that the device need not know


def access_of(bits: int) -> Access:
    """Return the rights that a program asks for.

    Refused with EOPNOTSUPP if the device does not know a right that is not optional, and with EINVAL if peers may write
    where the device itself may not (`ib_check_mr_access` in Linux).
    """
    if unknown := bits & ~_KNOWN & ~_OPTIONAL & ~_MW_BIND & ~_HUGETLB:
        raise Refused(errno.EOPNOTSUPP, f"access {unknown:#x} is not supported")
    if bits & (Access.REMOTE_WRITE | Access.REMOTE_ATOMIC) and not bits & Access.LOCAL_WRITE:
        raise Refused(errno.EINVAL, f"access {bits:#x}: REMOTE_WRITE and REMOTE_ATOMIC take LOCAL_WRITE as well")
    return Access(bits & _KNOWN)


@contextmanager
def pinned(start: int, nbytes: int, access: Access) -> Iterator[None]:
    """Refuse, with EFAULT, memory of a program that the device cannot use.

    Linux does so when it pins the pages (`ib_umem_get`): pages that are not mapped, that nobody may read, or that are
    read-only although the device may write to them.
    """
    try:
        yield
    except (InvalidValueError, NotSupportedError) as error:
        if not 0 < nbytes <= (1 << 64) - start or is_accessible(start, nbytes, Access.LOCAL_WRITE in access):
            raise
        raise Refused(errno.EFAULT, str(error)) from error


@command(Write.ALLOC_PD)
def alloc_pd(file: OpenFile, call: Call) -> None:
    pd = file.ctx.create_pd()
    call.put_number(abi.Invoke.OUT, file.add(Object.PD, pd))
    call.put_number(abi.UHW_OUT, pd.pdn)


@method(Object.PD, abi.DESTROY_ONLY, (abi.DESTROYED,))
def dealloc_pd(file: OpenFile, call: Call) -> None:
    handle = call.number(abi.DESTROYED)
    pd: PD = file.get(Object.PD, handle)
    if pd.users:
        raise Refused(errno.EBUSY, f"{pd} is still used")
    file.remove(Object.PD, handle)


@command(Write.REG_MR)
def reg_mr(file: OpenFile, call: Call) -> None:
    request = call.take(abi.Invoke.IN, abi.REG_MR)
    pd: PD = file.get(Object.PD, int(request["pd_handle"]))
    start, nbytes, iova = int(request["start"]), int(request["length"]), int(request["hca_va"])
    if (start ^ iova) % PAGE:
        raise Refused(errno.EINVAL, f"iova {iova:#x} and address {start:#x} have different offsets in a page")
    access = access_of(int(request["access_flags"]))
    with pinned(start, nbytes, access):
        mr = pd.register(start, access, nbytes=nbytes, iova=iova)
    answer = abi.REG_MR_RESP.pack(mr_handle=file.add(Object.MR, mr), lkey=mr.lkey, rkey=mr.rkey)
    call.put(abi.Invoke.OUT, answer)


@method(Object.MR, abi.REG_DMABUF_MR, abi.RegDmabufMr)
def reg_dmabuf_mr(file: OpenFile, call: Call) -> None:
    """Refuse with EOPNOTSUPP. NCCL and UCX pass the descriptor -1 to find out whether a device registers dmabufs."""
    asks = call.number(abi.RegDmabufMr.FD, 0) > _MOST_INT
    raise Refused(errno.EOPNOTSUPP, "registrations of dmabufs are not supported", expected=asks)


@command(Write.REREG_MR)
def rereg_mr(file: OpenFile, call: Call) -> None:
    request = call.take(abi.Invoke.IN, abi.REREG_MR)
    changes = Rereg(int(request["flags"]))
    mr = file.get(Object.MR, int(request["mr_handle"]))
    moved = Rereg.TRANSLATION in changes
    start, nbytes = (int(request["start"]), int(request["length"])) if moved else (mr.address, mr.nbytes)
    access = access_of(int(request["access_flags"])) if Rereg.ACCESS in changes else mr.access
    with pinned(start, nbytes, access):
        mr.reregister(
            start if moved else None,
            nbytes=nbytes if moved else None,
            pd=file.get(Object.PD, int(request["pd_handle"])) if Rereg.PD in changes else None,
            access=access if Rereg.ACCESS in changes else None,
        )
    call.put(abi.Invoke.OUT, mr.lkey.to_bytes(4, "little") + mr.rkey.to_bytes(4, "little"))


@method(Object.MR, abi.DESTROY_MR, (abi.DESTROYED,))
def dereg_mr(file: OpenFile, call: Call) -> None:
    file.remove(Object.MR, call.number(abi.DESTROYED))


@method(Object.MR, abi.QUERY_MR, abi.QueryMr)
def query_mr(file: OpenFile, call: Call) -> None:
    mr = file.get(Object.MR, call.number(abi.QueryMr.HANDLE))
    call.put_number(abi.QueryMr.RESP_LKEY, mr.lkey)
    call.put_number(abi.QueryMr.RESP_RKEY, mr.rkey)
    call.put_number(abi.QueryMr.RESP_LENGTH, mr.nbytes)
    call.put_number(abi.QueryMr.RESP_IOVA, mr.iova)
