"""Hold a device against the conformance kit, and against the checks below: hold.py DEVICE [NAME]...

Runs in the guest, with this package. Prints a line for each check, and at last a JSON object: for each check that has
not passed, its outcome and what was wrong. The checks below are of promises that those of the kit take from events or
objects that a device like Soft-RoCE does not have.
"""

import json
import sys

from gpunetio import testing, verbs
from gpunetio.enums import AsyncEventType, CqOverrun, QpSendDbrMode, SrqType, UarAllocationType, WrOpcode
from gpunetio.errors import BadStateError, InUseError, InvalidValueError, NotSupportedError
from gpunetio.testing.kit import check
from gpunetio.testing.rig import Rig, refused, same, true
from gpunetio.verbs import RecvWr


@check
def events_of_a_limit_are_acknowledged(rig: Rig) -> None:
    """An SRQ does not close before its asynchronous event was acknowledged, once.

    Source: ibv_ack_async_event(3).
    """
    pd = rig.far.create_pd()
    srq = pd.create_srq(4)
    a, b = rig.pair(far={"pd": pd, "srq": srq})
    srq.post_recv(RecvWr(), RecvWr())
    srq.modify(srq_limit=2)
    a.post(WrOpcode.SEND)
    event = rig.until("an asynchronous event", lambda: rig.far.get_async_event(rig.patience))
    same("the event", (event.type, event.element), (AsyncEventType.SRQ_LIMIT_REACHED, srq))
    b.qp.close()
    refused("closing an SRQ with an event that was not acknowledged", InUseError, srq.close)
    event.ack()
    refused("acknowledging once more", InvalidValueError, event.ack)
    srq.close()


@check
def closing_in_order(rig: Rig) -> None:
    """Nothing closes before what uses it, and a closed context leaves nothing open.

    Source: ibv_destroy_cq(3), ibv_destroy_srq(3) (EBUSY).
    """
    channel = rig.near.create_comp_channel()
    pd = rig.near.create_pd()
    srq, cq = pd.create_srq(4), rig.near.create_cq(4, channel=channel)
    qp = pd.create_qp(sq_wr=1, send_cq=cq, receive_cq=cq, srq=srq)
    for used in (cq, srq, channel):
        refused(f"closing {used}", InUseError, used.close)
    rig.near.close()
    for one in (qp, srq, cq, channel, pd):
        true(f"{one} is closed", one.closed)


@check
def nothing_of_devx(rig: Rig) -> None:
    """What libibverbs does not have is refused by name, with a cure, and leaves nothing behind.

    Source: docs/verbs.md.
    """
    ctx, pd = rig.near, rig.near.create_pd()
    cq = ctx.create_cq(4)
    qp, srq = pd.create_qp(sq_wr=1, send_cq=cq), pd.create_srq(4)
    for what, call in (
        ("UMEMs", lambda: ctx.register_umem(bytearray(4096))),
        ("UARs", lambda: ctx.create_uar(UarAllocationType.NONCACHE)),
        ("external_datapath", lambda: ctx.create_cq(4, external_datapath=True)),
        ("collapsed", lambda: ctx.create_cq(4, collapsed=True)),
        ("overrun ENABLE", lambda: ctx.create_cq(4, overrun=CqOverrun.ENABLE)),
        ("external_datapath", lambda: pd.create_qp(external_datapath=True)),
        ("core_direct_master", lambda: pd.create_qp(core_direct_master=True)),
        ("send_dbr_mode NO_DBR_EXT", lambda: pd.create_qp(send_dbr_mode=QpSendDbrMode.NO_DBR_EXT)),
        ("emulate_no_dbr_ext", lambda: pd.create_qp(emulate_no_dbr_ext=True)),
        ("cqe_inline", lambda: pd.create_qp(cqe_inline=True)),
        ("cqe_inline_responses", lambda: pd.create_qp(cqe_inline_responses=True)),
        ("memcpy", lambda: pd.create_qp(memcpy=True)),
        ("user_index = 7", lambda: pd.create_qp(user_index=7)),
        ("srq_type CONTIGUOUS", lambda: pd.create_srq(4, srq_type=SrqType.CONTIGUOUS, external_datapath=True)),
        ("sq_address", lambda: qp.sq_address), ("doorbell_register", lambda: qp.doorbell_register),
        ("ring_address", lambda: cq.ring_address), ("dbr_address", lambda: srq.dbr_address),
    ):
        said = str(refused(what, NotSupportedError, call))
        true(f"{said!r} names {what} and a cure", what in said and "ConnectX" in said)
    same("devices with DEVX", ctx.has_devx, False)
    same("what needs the context", sorted(map(str, ctx.users)), sorted(map(str, (pd, cq, qp, srq))))
    refused("a WAIT", BadStateError, lambda: qp.post_send(verbs.wait_cq_pi(cq, 0)))  # it is in RST


def main() -> None:
    device, *only = sys.argv[1:]
    report = testing.run(
        lambda: verbs.open(device), only=only or None, patience=5, tell=lambda result: print(result.line(), flush=True)
    )
    wrong = [one for one in report.results if one.outcome is not testing.Outcome.PASSED]
    print(json.dumps({one.check.name: [one.outcome.name, one.message] for one in wrong}))


if __name__ == "__main__":
    main()
