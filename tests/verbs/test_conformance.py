"""The conformance kit passes on the software NIC, and fails on a provider that breaks one promise."""

import ctypes
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from gpunetio import LinkLayer, PortConfig, testing, verbs
from gpunetio.cli import app
from gpunetio.enums import Access
from gpunetio.errors import DriverError, NotFoundError, NotSupportedError
from gpunetio.formats import commands as cmd
from gpunetio.formats.commands import Opcode
from gpunetio.formats.cqe import CQE64
from gpunetio.formats.doorbell import CQ_DBREC
from gpunetio.formats.events import EventType
from gpunetio.formats.layout import BitStruct
from gpunetio.providers import open_device
from gpunetio.testing import Outcome
from gpunetio.testing.rig import PATIENCE
from repository import ROOT

DOCUMENT = ROOT / "docs" / "conformance.md"
HASTE = 1.0  # seconds that a check waits for what a broken provider will not do


def opener(name: str, port: PortConfig | None = None) -> Callable[[], verbs.Context]:
    return lambda: verbs.open(name, port=port)


INFINIBAND, UDP = PortConfig(link_layer=LinkLayer.INFINIBAND), PortConfig(wire="udp")


@pytest.mark.parametrize(
    "names, port",
    [
        pytest.param(["soft0"], None, id="loopback", marks=pytest.mark.slow),
        pytest.param(["soft0", "soft1"], None, id="wire"),
        pytest.param(["soft0", "soft1"], INFINIBAND, id="infiniband", marks=pytest.mark.slow),
        pytest.param(["soft0", "soft1"], UDP, id="udp", marks=pytest.mark.slow),
    ],
)
def test_the_software_nic_passes(names, port):
    report = testing.run(*(opener(name, port) for name in names))
    assert report.passed, str(report)
    assert report.of(Outcome.NOT_SUPPORTED) == []
    assert [result.check for result in report.results] == testing.checks()


# --- providers that break one promise each ---------------------------------------------------------------------------


class Broken:
    """A software NIC's provider with something else in between."""

    def __init__(self) -> None:
        self._inner: Any = open_device("soft0")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def opcode(mailbox: bytes) -> int:
    return int.from_bytes(mailbox[:2], "big")


class Generous(Broken):
    """Gives every region all rights."""

    def reg_mr(self, pdn, address, nbytes, iova, access, cuda):
        return self._inner.reg_mr(pdn, address, nbytes, iova, Access.all(), cuda)


class Wide(Broken):
    """Makes regions a byte longer."""

    def reg_mr(self, pdn, address, nbytes, iova, access, cuda):
        return self._inner.reg_mr(pdn, address, nbytes + 1, iova, access, cuda)


class Absolute(Broken):
    """Knows no base but the memory's own address."""

    def reg_mr(self, pdn, address, nbytes, iova, access, cuda):
        return self._inner.reg_mr(pdn, address, nbytes, address, access, cuda)


class Shifted(Broken):
    """Reaches every region 8 bytes further on."""

    def reg_mr(self, pdn, address, nbytes, iova, access, cuda):
        return self._inner.reg_mr(pdn, address + 8, nbytes, iova, access, cuda)


class Clinging(Broken):
    """Never deregisters."""

    def dereg_mr(self, handle):
        pass


class OneDomain(Broken):
    """Has one protection domain for all."""

    def reg_mr(self, pdn, address, nbytes, iova, access, cuda):
        self.pdn = getattr(self, "pdn", pdn)
        return self._inner.reg_mr(self.pdn, address, nbytes, iova, access, cuda)

    def devx_obj_create(self, mailbox, out_size):
        mailbox = bytearray(mailbox)
        if opcode(mailbox) == Opcode.CREATE_QP and hasattr(self, "pdn"):
            cmd.CREATE_QP_IN.update(mailbox, qpc={"pd": self.pdn})
        return self._inner.devx_obj_create(bytes(mailbox), out_size)


class Muted(Broken):
    """Loses every event of a completion."""

    def get_event(self, channel):
        while (event := self._inner.get_event(channel)) and event.type == EventType.COMPLETION:
            pass
        return event


class Repeating(Broken):
    """Tells every event twice."""

    again = None

    def get_event(self, channel):
        if self.again:
            event, self.again = self.again, None
            return event
        self.again = self._inner.get_event(channel)
        return self.again


class Deaf(Broken):
    """Takes no subscription to asynchronous events."""

    def subscribe(self, channel, handle, types, cookie):
        if EventType.COMPLETION in types:
            self._inner.subscribe(channel, handle, types, cookie)


class Spilling(Broken):
    """Changes the byte behind every region when it works."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: list[int] = []

    def reg_mr(self, pdn, address, nbytes, iova, access, cuda):
        self._ends.append(address + nbytes)
        return self._inner.reg_mr(pdn, address, nbytes, iova, access, cuda)

    def doorbell_rung(self):
        self._inner.doorbell_rung()
        for end in self._ends:
            ctypes.c_ubyte.from_address(end).value ^= 1
        self._ends.clear()


class Disorderly(Broken):
    """Completes the first two requests of every CQ the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self._umems: dict[int, int] = {}
        self._rings: list[tuple[int, int]] = []  # where a CQ's first entry and its doorbell record are

    def reg_umem(self, address, nbytes, access):
        umem = self._inner.reg_umem(address, nbytes, access)
        self._umems[umem] = address
        return umem

    def devx_obj_create(self, mailbox, out_size):
        if opcode(mailbox) == Opcode.CREATE_CQ:
            get = cmd.CREATE_CQ_IN.get
            record = self._umems[get(mailbox, "cq_context.dbr_umem_id")] + get(mailbox, "cq_context.dbr_addr")
            self._rings.append(
                (self._umems[get(mailbox, "cq_umem_id")] + get(mailbox, "cq_umem_offset"), record + CQ_DBREC.set_ci)
            )
        return self._inner.devx_obj_create(mailbox, out_size)

    def doorbell_rung(self):
        self._inner.doorbell_rung()
        time.sleep(0.05)  # until the NIC has completed it
        for ring, record in self._rings:
            first, second = ((ctypes.c_char * 64).from_address(ring + 64 * n) for n in range(2))
            polled = bytes((ctypes.c_char * 4).from_address(record)) != bytes(4)
            if not polled and all(entry[CQE64.op_own] == b"\0" for entry in (first, second)):
                a, b = (slice(at, at + 2) for at in (CQE64.wqe_counter,) * 2)
                first[a], second[b] = second[b], first[a]
                self._rings.remove((ring, record))
                return


class Untroubled(Broken):
    """Reports RTS for ERR."""

    def devx_obj_query(self, handle, mailbox, out_size):
        out = bytearray(self._inner.devx_obj_query(handle, mailbox, out_size))
        if opcode(mailbox) == Opcode.QUERY_QP and cmd.QUERY_QP_OUT.get(out, "qpc.state") == cmd.QpState.ERR:
            cmd.QUERY_QP_OUT.update(out, qpc={"state": cmd.QpState.RTS})
        return bytes(out)


class Forgetful(Broken):
    """Reports another retry count than was set."""

    def devx_obj_query(self, handle, mailbox, out_size):
        out = bytearray(self._inner.devx_obj_query(handle, mailbox, out_size))
        if opcode(mailbox) == Opcode.QUERY_QP:
            cmd.QUERY_QP_OUT.update(out, qpc={"retry_count": 7})
        return bytes(out)


class Agreeable(Broken):
    """Says that every transition went well."""

    def devx_obj_modify(self, handle, mailbox, out_size):
        try:
            return self._inner.devx_obj_modify(handle, mailbox, out_size)
        except DriverError:
            return bytes(out_size)


class Modified(Broken):
    """Changes fields of one command on its way."""

    command: tuple[Opcode, BitStruct, dict[str, Any]]

    def _changed(self, mailbox):
        mailbox = bytearray(mailbox)
        which, layout, fields = self.command
        if opcode(mailbox) == which:
            layout.update(mailbox, **fields)
        return bytes(mailbox)

    def devx_obj_create(self, mailbox, out_size):
        return self._inner.devx_obj_create(self._changed(mailbox), out_size)

    def devx_obj_modify(self, handle, mailbox, out_size):
        return self._inner.devx_obj_modify(handle, self._changed(mailbox), out_size)


def modified(name: str, command: Opcode, layout: BitStruct, **fields: Any) -> type[Modified]:
    return type(name, (Modified,), {"command": (command, layout, fields)})


RIGHTS = {"rwe": 1, "rre": 1, "rae": 1, "atomic_mode": 1}
Permissive = modified("Permissive", Opcode.RST2INIT_QP, cmd.RST2INIT_QP_IN, qpc=RIGHTS)
Patient = modified("Patient", Opcode.RTR2RTS_QP, cmd.RTR2RTS_QP_IN, qpc={"rnr_retry": 7})
Impatient = modified("Impatient", Opcode.RTR2RTS_QP, cmd.RTR2RTS_QP_IN, qpc={"rnr_retry": 0})
Overrunning = modified("Overrunning", Opcode.CREATE_CQ, cmd.CREATE_CQ_IN, cq_context={"oi": 1})
Strict = modified("Strict", Opcode.CREATE_CQ, cmd.CREATE_CQ_IN, cq_context={"oi": 0, "cc": 0})
Unlimited = modified("Unlimited", Opcode.MODIFY_RMP, cmd.MODIFY_RMP_IN, ctx={"wq": {"lwm": 0}})
NeverMaster = modified("NeverMaster", Opcode.CREATE_QP, cmd.CREATE_QP_IN, qpc={"cd_master": 0})


class Boasting(Broken):
    """A port whose active MTU is larger than its largest."""

    def query_port(self, port):
        known = self._inner.query_port(port)
        return type(known)(**{**known.__dict__, "max_mtu": 2048})


BROKEN = [  # what a provider does wrong is seen when it happens, or when it has not happened for a while
    (PATIENCE, Generous, "right_remote_write", r"completions of sends: \[\(0, <WcStatus.SUCCESS"),
    (PATIENCE, Generous, "right_remote_read", "SUCCESS"),
    (PATIENCE, Generous, "right_remote_atomic", "SUCCESS"),
    (PATIENCE, Generous, "right_local_write_for_results", "SUCCESS"),
    (PATIENCE, Generous, "right_local_write_for_receives", "SUCCESS"),
    (PATIENCE, Wide, "bounds_of_remote_regions", "SUCCESS"),
    (PATIENCE, Wide, "bounds_of_local_regions", "SUCCESS"),
    (PATIENCE, Generous, "memcpy_between_regions", "SUCCESS"),
    (PATIENCE, Wide, "memcpy_outside_of_a_region", "SUCCESS"),
    (PATIENCE, Shifted, "memcpy_copies", "bytes of memory are wrong"),
    (PATIENCE, Absolute, "zero_based_regions", "LOC_PROT_ERR|REM_ACCESS_ERR"),
    (PATIENCE, Absolute, "shifted_regions", "LOC_PROT_ERR|REM_ACCESS_ERR"),
    (PATIENCE, Clinging, "keys_of_closed_regions", "SUCCESS"),
    (PATIENCE, OneDomain, "keys_of_other_domains", "SUCCESS"),
    (PATIENCE, Repeating, "one_event_for_a_request", "a completion event of CQ .*, and there should be none"),
    (PATIENCE, Repeating, "refused_request_is_told", "QP_REQ_ERR of QP .*, and there should be none"),
    (PATIENCE, Spilling, "write", "1 of 262144 bytes of memory are wrong, the first at offset 262144"),
    (PATIENCE, Disorderly, "completion_order", r"completions of sends: \[\(1, .*\), \(0, .*and it should be \[\(0,"),
    (PATIENCE, Untroubled, "state_path", "state: <QpState.RTS: 3>, and it should be <QpState.ERR: 4>"),
    (PATIENCE, Forgetful, "query_tells_what_was_set", "'retry_cnt': 7"),
    (PATIENCE, Agreeable, "a_wrong_current_state", "RTR to RTS in RST was not refused"),
    (PATIENCE, Permissive, "rights_of_the_queue_pair", "SUCCESS"),
    (PATIENCE, Impatient, "receiver_not_ready", "RNR_RETRY_EXC_ERR"),
    (PATIENCE, Unlimited, "srq_limit", "the limit: 0, and it should be 5"),
    (PATIENCE, NeverMaster, "wait_for_a_completion", "LOC_QP_OP_ERR"),
    (PATIENCE, Boasting, "port_attributes", "active MTU 4096 is at most 2048"),
    (HASTE, Muted, "one_event_for_a_request", "in vain for an event of CQ"),
    (HASTE, Muted, "many_cqs_on_a_channel", "the CQs that were told of"),
    (HASTE, Deaf, "refused_key_is_told", "in vain for QP_ACCESS_ERR"),
    (HASTE, Deaf, "srq_limit", "in vain for SRQ_LIMIT_REACHED"),
    (HASTE, Deaf, "srq_last_wqe", "in vain for QP_LAST_WQE_REACHED"),
    (HASTE, Deaf, "cq_overrun", "CQ_ERR of CQ .* is among the events"),
    (HASTE, Untroubled, "wrong_remote_key", "is in RTS, and it should be in ERR"),
    (HASTE, Permissive, "refused_request_is_told", "in vain for QP_REQ_ERR"),
    (HASTE, Patient, "receiver_not_ready_for_too_long", "in vain for 3 completions"),
    (HASTE, Overrunning, "cq_overrun", "CQ_ERR of CQ .* is among the events"),
    (HASTE, Strict, "cq_overrun_allowed", "in vain for 12 atomics"),
    (HASTE, Strict, "collapsed_cq", "in vain for the sixth completion"),
]


def cases_of(rows: list[tuple[float, type[Broken], str, str]]) -> Iterator[Any]:
    """Of those in which a check waits in vain, the first case is in the quick suite."""
    waited = False
    for patience, broken, name, message in rows:
        slow = pytest.mark.slow if patience == HASTE and waited else ()
        waited = waited or patience == HASTE
        yield pytest.param(patience, broken, name, message, id=f"{broken.__name__}-{name}", marks=slow)


@pytest.mark.parametrize("patience, broken, name, message", [*cases_of(BROKEN)])
def test_a_broken_provider_is_caught(patience, broken, name, message):
    report = testing.run(lambda: verbs.Context(broken()), only=[name], patience=patience)
    (result,) = report.results
    assert result.outcome is Outcome.FAILED
    assert re.search(message, result.message), result.message
    assert not report.passed
    assert f"{name}  FAILED: " in str(report)


def test_every_operation_has_its_bytes_compared():
    report = testing.run(lambda: verbs.Context(Shifted()), only=["operations", "ordering", "unreliable"])
    passed = {result.check.name for result in report.of(Outcome.PASSED)}
    assert passed == {"all_requests_signalled", "unreliable_has_no_reads"}


class WithoutSrqs(Broken):
    def devx_obj_create(self, mailbox, out_size):
        if opcode(mailbox) == Opcode.CREATE_RMP:
            raise NotSupportedError("this device has no shared receive queues")
        return self._inner.devx_obj_create(mailbox, out_size)


def test_what_a_provider_does_not_have_is_no_failure():
    report = testing.run(lambda: verbs.Context(WithoutSrqs()), only=["shared", "srq_life", "send"])
    assert report.passed
    names = [result.check.name for result in report.of(Outcome.NOT_SUPPORTED)]
    assert names == [one.name for one in testing.checks(["shared", "srq_life"])]
    assert {result.message for result in report.of(Outcome.NOT_SUPPORTED)} == {
        "this device has no shared receive queues"
    }
    assert "not supported: this device has no shared receive queues" in str(report)
    assert [result.check.name for result in report.of(Outcome.PASSED)] == ["send"]


class Crashing(Broken):
    def query_port(self, port):
        raise ZeroDivisionError("in the provider")


def test_a_crash_of_the_provider_fails_its_check_and_no_other():
    report = testing.run(lambda: verbs.Context(Crashing()), only=["port_attributes", "device_attributes"])
    assert [(result.check.name, result.outcome, result.message) for result in report.results] == [
        ("device_attributes", Outcome.PASSED, ""),
        ("port_attributes", Outcome.FAILED, "ZeroDivisionError: in the provider"),
    ]


# --- the list of checks ----------------------------------------------------------------------------------------------


def test_every_check_says_what_it_holds_and_by_which_document():
    for check in testing.checks():
        assert re.search(r"^Source: .{6,}", check.contract, re.MULTILINE), check.name
        assert check.summary.endswith("."), check.name


def test_the_document_lists_every_check():
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert rows == [(check.name, check.summary) for check in testing.checks()]


def test_selection():
    assert [check.name for check in testing.checks(["send", "device"])] == [
        *(check.name for check in testing.checks(["device"])), "send",
    ]
    with pytest.raises(NotFoundError, match="no check or area 'sendd'; the areas are device, objects,"):
        testing.run(opener("soft0"), only=["sendd"])


# --- the command -----------------------------------------------------------------------------------------------------


def command(*args: str) -> Any:
    return CliRunner().invoke(app, ["conformance", *args])


def test_command():
    result = command("--peer", "soft1", "send", "device")
    assert result.exit_code == 0, result.output
    *rows, summary = result.stdout.splitlines()
    assert [row.split() for row in rows] == [[check.name, "passed"] for check in testing.checks(["send", "device"])]
    assert summary == "5 checks: 5 passed, 0 FAILED, 0 not supported"


def test_command_fails_with_its_checks(monkeypatch):
    monkeypatch.setattr(verbs, "open", lambda name: verbs.Context(Boasting()))
    result = command("device")
    assert result.exit_code == 1
    assert "port_attributes    FAILED: it should be that active MTU 4096 is at most 2048" in result.stdout


def test_command_lists():
    result = command("--list")
    assert result.exit_code == 0
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [
        [check.area, check.name] for check in testing.checks()
    ]
    assert command("--list", "states").stdout.splitlines()[0].startswith("states      state_path")


@pytest.mark.parametrize("args, said", [("nonsense", "no check or area 'nonsense'"), ("-d x9", "no device 'x9'")])
def test_command_line_mistakes(args, said):
    result = command(*args.split())
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert said in line
