"""Calls about protection domains and memory regions."""

from __future__ import annotations

import errno

from ..enums import Access
from ..verbs import PD
from . import abi
from .abi import Object, Rereg, Write
from .call import Call, Refused
from .files import OpenFile
from .methods import command, method

_KNOWN = sum(Access.all()) | Access.RELAXED_ORDERING
_OPTIONAL = (1 << 30) - (1 << 20)  # IB_UVERBS_ACCESS_OPTIONAL_RANGE: what the device need not know


def access_of(bits: int) -> Access:
    """Return the rights that a program asks for. Refused with EOPNOTSUPP if the device must know them, and does not."""
    if unknown := bits & ~_KNOWN & ~_OPTIONAL:
        raise Refused(errno.EOPNOTSUPP, f"access {unknown:#x} is not supported")
    return Access(bits & _KNOWN)


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
    start, nbytes = int(request["start"]), int(request["length"])
    mr = pd.register(start, access_of(int(request["access_flags"])), nbytes=nbytes, iova=int(request["hca_va"]))
    answer = abi.REG_MR_RESP.pack(mr_handle=file.add(Object.MR, mr), lkey=mr.lkey, rkey=mr.rkey)
    call.put(abi.Invoke.OUT, answer)


@command(Write.REREG_MR)
def rereg_mr(file: OpenFile, call: Call) -> None:
    request = call.take(abi.Invoke.IN, abi.REREG_MR)
    changes = Rereg(int(request["flags"]))
    mr = file.get(Object.MR, int(request["mr_handle"]))
    moved = Rereg.TRANSLATION in changes
    mr.reregister(
        int(request["start"]) if moved else None,
        nbytes=int(request["length"]) if moved else None,
        pd=file.get(Object.PD, int(request["pd_handle"])) if Rereg.PD in changes else None,
        access=access_of(int(request["access_flags"])) if Rereg.ACCESS in changes else None,
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
