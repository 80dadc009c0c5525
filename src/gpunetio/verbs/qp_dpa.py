"""Find the DPA that drives a new queue pair, and the CQs of its DPA completions."""

from __future__ import annotations

from dataclasses import replace

from ..errors import InvalidValueError
from .dpa import AnyDpa
from .qp_init import QpInitAttr

_EXTERNAL = ("external_umem", "external_dbr_umem", "external_uar")


def for_dpa(attr: QpInitAttr) -> tuple[AnyDpa | None, QpInitAttr]:
    """Return the DPA of a queue pair, or None, and the attributes with the CQs of its DPA completions filled in.

    InvalidValueError if the attributes contradict each other, InUseError if a completion is already in use.
    """
    completions = [each for each in (attr.send_dpa_completion, attr.receive_dpa_completion) if each]
    dpa = attr.dpa or next((each.dpa for each in completions), None)
    if dpa is None:
        return None, attr
    _check_memory(attr)
    if attr.sq_wr == 0:
        raise InvalidValueError(f"sq_wr = 0: a queue pair of {dpa} needs a send queue; one request is enough")
    if len(set(completions)) < len(completions):
        raise InvalidValueError(f"{completions[0]} for sends and for receives: create a completion for each")
    for each in completions:
        if each.dpa is not dpa:
            raise InvalidValueError(f"{each} belongs to another DPA: create it from {dpa}")
        each.check_free()
    for side, requests in (("send", attr.sq_wr), ("receive", attr.rq_wr)):
        _check_side(attr, side, requests)
    send, receive = attr.send_dpa_completion, attr.receive_dpa_completion
    return dpa, replace(
        attr, send_cq=send.cq if send else attr.send_cq, receive_cq=receive.cq if receive else attr.receive_cq
    )


def _check_memory(attr: QpInitAttr) -> None:
    missing = [name for name in _EXTERNAL if getattr(attr, name) is None]
    if missing and len(missing) < len(_EXTERNAL):
        raise InvalidValueError(f"a queue pair of a DPA without {' and '.join(missing)}: give all three, or none")
    if missing and attr.dpa is None:
        raise InvalidValueError(f"a DPA completion without dpa: give it too, or {', '.join(_EXTERNAL)} of your own")


def _check_side(attr: QpInitAttr, side: str, requests: int) -> None:
    given = [name for name in (f"{side}_cq", f"{side}_dpa_completion") if getattr(attr, name) is not None]
    if len(given) == 2:
        raise InvalidValueError(f"{given[0]} and {given[1]} exclude each other: leave out {given[0]}")
    if requests and not given:
        raise InvalidValueError(
            f"{requests} {side} requests without {side}_dpa_completion: give one, of Dpa.create_completion()"
        )
