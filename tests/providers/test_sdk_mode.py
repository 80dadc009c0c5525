"""SDK mode: queues made by DOCA's libraries, of which tests/rigs/doca_sdk is a stand-in that writes down each call."""

import ctypes
import logging
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from fake_device import GID, FakeProvider
from gpunetio import Gpu, errors, verbs
from gpunetio.enums import (
    Access,
    AddrType,
    CqOverrun,
    MtuSize,
    QpAtomicType,
    QpAttrMask,
    QpSendDbrMode,
    QpState,
    QpType,
    SrqType,
    UarAllocationType,
    WrOpcode,
)
from gpunetio.errors import DocaError, InUseError, NotSupportedError, UnexpectedError
from gpunetio.memory import HostMemory
from gpunetio.providers.mlx5 import structs
from gpunetio.providers.mlx5.device import VerbsDevice
from gpunetio.providers.sdk import libraries, signatures
from gpunetio.providers.sdk import provider as sdk_provider
from gpunetio.providers.sdk.provider import SdkProvider, through_sdk
from gpunetio.verbs import AhAttr, QpAttr, QpEndpoint, SendWr
from rdma_core import skip_without_libraries
from repository import RIGS
from stand_in.building import compiler

SOURCE = RIGS / "doca_sdk" / "stand_in.c"
COMMON, VERBS, GPUNETIO = "libdoca_common.so", "libdoca_verbs.so", "libdoca_gpunetio.so"
CONTEXT, PD = 0xC0DE000, 0xBD000  # addresses of libibverbs' own
PEER = QpEndpoint(0x1234, bytes(10) + b"\xff\xff\x0a\x00\x00\x02", 9, 1024, psn=0x77)


class Card(FakeProvider):
    """A card that libibverbs has opened."""

    ibv_context = CONTEXT

    def ibv_pd(self, pdn: int) -> int:
        assert pdn in self.live["pd"]
        return PD + pdn


def build(folder: Path, *libraries: str, **renamed: str) -> Path:
    """Stand-ins in a folder, each linked to those that it needs, which it finds only if they are loaded already."""
    if (cc := compiler()) is None:
        pytest.skip("no C compiler")
    needed: list[str] = []
    for name in (COMMON, VERBS, GPUNETIO):
        if name in libraries:
            what = name.removeprefix("libdoca_").removesuffix(".so").upper()
            subprocess.run(
                [cc, "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-fPIC", "-shared", f"-D{what}",
                 *(f"-D{old}={new}" for old, new in renamed.items()), SOURCE, f"-L{folder}", "-Wl,--no-as-needed",
                 *(f"-l:{one}" for one in needed), f"-Wl,-soname,{name}.of-{folder.name}", "-o", folder / name],
                check=True, timeout=60,
            )
            needed.append(name)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All three libraries."""
    return build(tmp_path_factory.mktemp("sdk"), COMMON, VERBS, GPUNETIO)


class Calls:
    """What was called so far."""

    def __init__(self, path: Path):
        self.path = path
        path.touch()

    def __call__(self) -> list[str]:
        """Objects are numbered as they appear, each kind from 1."""
        seen: dict[str, dict[str, int]] = {}

        def name(found: re.Match[str]) -> str:
            numbers = seen.setdefault(found[1], {})
            return f"{found[1]}#{numbers.setdefault(found[2], len(numbers) + 1)}"

        return re.sub(r"(\w+)#(\d+)", name, self.path.read_text()).splitlines()

    def names(self) -> list[str]:
        return [line.split()[0] for line in self()]

    def forget(self) -> None:
        self.path.write_text("")

    def attributes(self, kind: str) -> dict[str, str]:
        """What was set in objects of a kind."""
        pattern = re.compile(rf"doca_verbs_{kind}_set_(\w+) \S+#\d+ (.+)")
        return {found[1]: found[2] for line in self() if (found := pattern.fullmatch(line))}


@pytest.fixture(autouse=True)
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """The log of the stand-ins. Each test reads the environment anew, as a process of its own would."""
    monkeypatch.setenv("DOCA_STAND_IN_LOG", str(tmp_path / "calls"))
    monkeypatch.delenv("DOCA_STAND_IN_FAILS", raising=False)
    libraries.sdk.cache_clear()
    yield Calls(tmp_path / "calls")
    libraries.sdk.cache_clear()


@pytest.fixture
def card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProvider:
    """A card in SDK mode."""
    monkeypatch.setenv(libraries.VARIABLE, str(folder))
    return through_sdk(Card())


@pytest.fixture
def ctx(card: FakeProvider) -> Iterator[verbs.Context]:
    with verbs.Context(card) as opened:
        yield opened


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "gpunetio.sdk"]


def test_programs_send_no_mailboxes(ctx):
    with pytest.raises(NotSupportedError, match=r"^Context\.devx: the DOCA SDK drives fake0, .*unset DOCA_SDK"):
        _ = ctx.devx


# --- the log, and who makes the queues --------------------------------------------------------------------------------

THINGS = (
    "Verbs Dev", "Verbs AH Attr", "Verbs CQ Attr", "Verbs CQ", "Verbs UMEM", "Verbs UAR", "Verbs QP Init Attr",
    "Verbs QP", "Verbs QP Attr", "Verbs SRQ Init Attr", "Verbs SRQ",
)


def not_in_use(folder: Path, *things: str) -> list[tuple[str, str]]:
    warning = f"Env var DOCA_SDK_LIB_PATH set to {folder}, but DOCA SDK libraries not found. DOCA SDK is not in use"
    return [line for thing in things for line in (("WARNING", warning), ("INFO", f"Use DOCA {thing} open"))]


def failed_to_find(folder: Path, name: str) -> tuple[str, str]:
    return "ERROR", f"Failed to find {name} library {folder}/{name} (DOCA_SDK_LIB_PATH={folder})"


def test_the_log_tells_once_of_each_thing_that_the_sdk_makes(folder, card, caplog):
    caplog.set_level(logging.INFO)
    with verbs.Context(card) as ctx, ctx.create_cq(16), ctx.create_cq(16):
        pass
    warning = f"Env var DOCA_SDK_LIB_PATH set to {folder}. DOCA SDK is in use"
    made = ("Verbs UMEM", "Verbs UAR", "Verbs CQ Attr", "Verbs CQ")
    wanted = [line for thing in made for line in (("WARNING", warning), ("INFO", f"Use DOCA {thing} SDK"))]
    assert messages(caplog) == wanted


def test_opening_a_device_is_told(folder, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(libraries.VARIABLE, str(folder))
    through_sdk(Card()).close()
    assert messages(caplog) == [
        ("WARNING", f"Env var DOCA_SDK_LIB_PATH set to {folder}. DOCA SDK is in use"),
        ("INFO", "Use DOCA Verbs Dev SDK"),
    ]


@pytest.mark.parametrize(
    "there, missing",  # in the order of the areas: Dev, AH, CQ, UMEM, UAR, QP, SRQ
    [
        ((VERBS, GPUNETIO), [COMMON, COMMON, COMMON, GPUNETIO, COMMON, COMMON, COMMON]),
        ((COMMON, GPUNETIO), [VERBS, VERBS, VERBS, GPUNETIO, VERBS, VERBS]),
        ((COMMON, VERBS), [GPUNETIO]),
        ((), [COMMON, COMMON, COMMON, GPUNETIO, COMMON, COMMON, COMMON]),
    ],
    ids=["common", "verbs", "gpunetio", "all"],
)
def test_a_library_that_is_missing_leaves_all_to_gpunetio(there, missing, tmp_path, monkeypatch, caplog, calls):
    """GPUNetIO's, which has what UMEMs of GPU memory take, cannot be loaded without the two others."""
    caplog.set_level(logging.INFO)
    folder = build(tmp_path, COMMON, VERBS, GPUNETIO)
    for name in {COMMON, VERBS, GPUNETIO} - set(there):
        (folder / name).unlink()
    monkeypatch.setenv(libraries.VARIABLE, str(folder))
    card = Card()
    assert through_sdk(card) is card
    told = messages(caplog)
    for (level, text), name in zip(told[: len(missing)], missing, strict=True):
        wanted = failed_to_find(folder, name)
        if name in there:  # then the loader says why
            assert "cannot open shared object file" in text.removeprefix(wanted[1])
        assert (level, text[: len(wanted[1])]) == wanted
    assert told[len(missing) :] == not_in_use(folder, *THINGS)
    assert calls() == []
    caplog.clear()
    assert through_sdk(card) is card  # and is not told again
    assert messages(caplog) == []


def test_a_folder_that_does_not_exist(tmp_path, monkeypatch, caplog):
    folder = tmp_path / "nowhere"
    monkeypatch.setenv(libraries.VARIABLE, str(folder))
    card = Card()
    assert through_sdk(card) is card
    assert failed_to_find(folder, COMMON) in messages(caplog)


def test_a_function_that_is_missing(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    folder = build(tmp_path, COMMON, VERBS, GPUNETIO, doca_verbs_srq_get_wq="gone")
    monkeypatch.setenv(libraries.VARIABLE, str(folder))
    card = Card()
    assert through_sdk(card) is card
    why = f"No function doca_verbs_srq_get_wq in {folder}/{COMMON}, {folder}/{VERBS}"
    assert messages(caplog) == [("ERROR", why), *not_in_use(folder, *THINGS)]


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_nothing_is_told(value, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    if value is None:
        monkeypatch.delenv(libraries.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(libraries.VARIABLE, value)
    card = Card()
    assert through_sdk(card) is card
    assert messages(caplog) == []


def test_the_environment_is_read_once(card, folder, monkeypatch):
    monkeypatch.delenv(libraries.VARIABLE)
    assert isinstance(through_sdk(Card()), SdkProvider)


def test_the_software_nic_is_not_concerned(folder, monkeypatch, caplog, calls):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(libraries.VARIABLE, str(folder))
    with verbs.open("soft0") as ctx, ctx.create_cq(16):
        assert not isinstance(ctx.provider, SdkProvider)
    assert messages(caplog) == []
    assert calls() == []


# --- what is called ---------------------------------------------------------------------------------------------------


def test_a_device_is_opened_and_closed_in_order(card, calls):
    (pdn,) = card.live["pd"]
    with verbs.Context(card):
        pass
    assert calls() == [
        f"doca_rdma_bridge_open_dev_from_pd {PD + pdn:#x}",
        f"doca_verbs_bridge_verbs_context_import {CONTEXT:#x} 0",
        "doca_verbs_context_destroy context#1",
        "doca_dev_close dev#1",
    ]
    assert card.gone == ["channel", "pd", "device"]


def test_a_completion_queue(ctx, calls):
    calls.forget()
    with ctx.create_cq(16, overrun=CqOverrun.ENABLE) as cq:
        ring, register = cq.ring_address, cq.uar.reg_addr
        assert cq.dbr_address == ring + 16 * 64
        assert register % 4096 == 0x800
        assert cq.uar.page.base_addr == register - 0x800
    assert calls() == [
        f"doca_umem_create dev#1 {ring:#x} 0x1000 0x1",
        "doca_umem_get_id umem#1",
        "doca_uar_create dev#1 0x1",
        "doca_uar_id_get uar#1",
        "doca_uar_reg_addr_get uar#1",
        "doca_verbs_cq_attr_create",
        "doca_verbs_cq_attr_set_cq_size verbs_cq_attr#1 0x10",
        "doca_verbs_cq_attr_set_external_datapath_en verbs_cq_attr#1 0x1",
        "doca_verbs_cq_attr_set_external_umem verbs_cq_attr#1 umem#1 0",
        "doca_verbs_cq_attr_set_external_uar verbs_cq_attr#1 uar#1",
        "doca_verbs_cq_attr_set_cq_overrun verbs_cq_attr#1 0x1",
        "doca_verbs_cq_create context#1 verbs_cq_attr#1",
        "doca_verbs_cq_attr_destroy verbs_cq_attr#1",
        "doca_verbs_cq_get_wq verbs_cq#1",
        "doca_verbs_cq_get_dbr_addr verbs_cq#1",
        "doca_verbs_cq_get_cqn verbs_cq#1",
        "doca_verbs_cq_destroy verbs_cq#1",
        "doca_umem_destroy umem#1",
    ]


def queue_pair(ctx: verbs.Context, stack: ExitStack, **options) -> verbs.QP:
    """One with rings of 8 sends and 4 receives, and CQs of its own."""
    sends, receives = (stack.enter_context(ctx.create_cq(16)) for _ in range(2))
    pd = stack.enter_context(ctx.create_pd())
    wanted = {"sq_wr": 8, "rq_wr": 4, "receive_max_sges": 2, "send_cq": sends, "receive_cq": receives} | options
    return stack.enter_context(pd.create_qp(**wanted))


@pytest.fixture
def qp(ctx: verbs.Context, calls: Calls) -> Iterator[verbs.QP]:
    with ExitStack() as stack:
        yield queue_pair(ctx, stack, user_index=0x123456)


def test_a_queue_pair(qp, calls):
    pd = PD + qp.pd.pdn
    ring, record = qp.rq_address, qp.dbr_address - qp.rq_address
    created = calls()[calls.names().index("doca_verbs_bridge_verbs_pd_import") :]
    assert created == [
        f"doca_verbs_bridge_verbs_pd_import {pd:#x}",
        "doca_verbs_qp_init_attr_create",
        *(
            f"doca_verbs_qp_init_attr_set_{what}".replace(" ", " verbs_qp_init_attr#1 ", 1)
            for what in (
                "pd pd#1", "qp_type 0", "user_index 0x123456", "send_dbr_mode 0", "core_direct_master 0",
                "external_datapath_en 0x1", "external_umem umem#3 0", f"external_dbr_umem umem#3 {record:#x}",
                "external_uar uar#2", "send_cq verbs_cq#1", "sq_wr 0x8", "send_max_sges 0x1", "rq_wr 0x4",
                "receive_max_sges 0x2", "receive_cq verbs_cq#2",
            )
        ),
        "doca_verbs_qp_create context#1 verbs_qp_init_attr#1",
        "doca_verbs_qp_init_attr_destroy verbs_qp_init_attr#1",
        "doca_verbs_qp_get_wq verbs_qp#1",
        "doca_verbs_qp_get_dbr_addr verbs_qp#1",
        "doca_verbs_qp_get_qpn verbs_qp#1",
        "doca_verbs_qp_get_uar_addr verbs_qp#1",
    ]
    assert (qp.sq_address, qp.sq_entries, qp.rq_entries, qp.rq_stride) == (ring + 4 * 32, 8, 4, 32)
    assert qp.doorbell_register == qp.uar.reg_addr
    before = len(calls())
    qp.close()
    assert calls()[before:] == ["doca_verbs_qp_destroy verbs_qp#1", "doca_verbs_pd_destroy pd#1", *calls()[-1:]]
    assert calls()[-1] == "doca_umem_destroy umem#3"


TO_INIT = {
    "next_state": "0x1", "pkey_index": "0", "port_num": "0x1", "allow_remote_write": "0x1", "allow_remote_read": "0x1",
    "atomic_mode": "0x1",
}
TO_RTR = {
    "next_state": "0x2", "min_rnr_timer": "0x1", "rq_psn": "0x77", "dest_qp_num": "0x1234",
    "path_mtu": f"{MtuSize.MTU_1K:#x}", "max_dest_rd_atomic": "0x10", "ah_attr": "ah_attr#1",
}
TO_RTS = {
    "next_state": "0x3", "sq_psn": "0x99", "ack_timeout": "0xe", "retry_cnt": "0x7", "rnr_retry": "0x5",
    "max_rd_atomic": "0x10",
}
ADDRESS = {
    "gid": PEER.gid.hex(), "addr_type": "0", "dlid": "0", "sl": "0", "sgid_index": "0", "static_rate": "0",
    "hop_limit": "0x40", "traffic_class": "0x60",
}


def moves(calls: Calls) -> list[tuple[dict[str, str], str]]:
    """Attributes and mask of each modify, which the attribute objects do not outlive."""
    found, attributes = [], {}
    for line in calls():
        name, *arguments = line.split()
        if name == "doca_verbs_qp_attr_create":
            attributes = {}
        elif name.startswith("doca_verbs_qp_attr_set_"):
            attributes[name.removeprefix("doca_verbs_qp_attr_set_")] = arguments[1]
        elif name == "doca_verbs_qp_modify":
            found.append((attributes, arguments[2]))
    return found


def test_a_connection_goes_through_the_states_with_all_attributes(qp, calls):
    calls.forget()
    qp.connect(PEER, psn=0x99, rnr_retry=5, hop_limit=64, traffic_class=0x60)
    M = QpAttrMask
    masks = [
        M.NEXT_STATE | M.PKEY_INDEX | M.PORT_NUM | M.ALLOW_REMOTE_WRITE | M.ALLOW_REMOTE_READ | M.ATOMIC_MODE,
        M.NEXT_STATE | M.RQ_PSN | M.DEST_QP_NUM | M.PATH_MTU | M.AH_ATTR | M.MIN_RNR_TIMER | M.MAX_DEST_RD_ATOMIC,
        M.NEXT_STATE | M.SQ_PSN | M.ACK_TIMEOUT | M.RETRY_CNT | M.RNR_RETRY | M.MAX_QP_RD_ATOMIC,
    ]
    assert moves(calls) == list(zip([TO_INIT, TO_RTR, TO_RTS], [f"{mask:#x}" for mask in masks], strict=True))
    assert calls.attributes("ah_attr") == ADDRESS
    assert qp.state == QpState.RTS


def test_a_flow_label_is_refused(qp, calls):
    with pytest.raises(NotSupportedError, match="flow_label = 0xabcde: not in SDK mode, as doca_verbs_ah_attr has no"):
        qp.connect(PEER, flow_label=0xABCDE)
    assert qp.state == QpState.RST


def test_the_attribute_objects_are_gone_after_each_move(qp, calls):
    calls.forget()
    qp.connect(PEER)
    created = Counter(line.removesuffix("_create") for line in calls.names() if line.endswith("_create"))
    destroyed = Counter(line.removesuffix("_destroy") for line in calls.names() if line.endswith("_destroy"))
    assert created == destroyed
    assert created["doca_verbs_ah_attr"] == 1


def test_query_tells_what_was_set(qp):
    qp.connect(PEER, psn=0x99, hop_limit=64, traffic_class=0x60)
    attr, _ = qp.query()
    assert attr == QpAttr(
        next_state=QpState.RTS, current_state=QpState.RTS, path_mtu=1024, rq_psn=0x77, sq_psn=0x99,
        dest_qp_num=0x1234, allow_remote_write=True, allow_remote_read=True, allow_remote_atomic=QpAtomicType.IB_SPEC,
        ah_attr=AhAttr(PEER.gid, AddrType.IPv4, hop_limit=64, traffic_class=0x60), pkey_index=0, port_num=1,
        ack_timeout=14, retry_cnt=7, rnr_retry=7, min_rnr_timer=1, max_rd_atomic=16, max_dest_rd_atomic=16,
    )


def test_reset_forgets_and_error_stays(qp, calls):
    qp.connect(PEER)
    qp.to_error()
    assert qp.state == QpState.ERR
    qp.reset()
    calls.forget()
    attr, _ = qp.query()
    assert (attr.current_state, attr.dest_qp_num, attr.ah_attr) == (QpState.RST, 0, None)
    assert calls.names() == [
        "doca_verbs_qp_attr_create", "doca_verbs_qp_init_attr_create", "doca_verbs_qp_query",
        "doca_verbs_qp_attr_get_current_state", "doca_verbs_qp_init_attr_destroy", "doca_verbs_qp_attr_destroy",
    ]


def test_a_connected_queue_pair_changes_what_it_is_given(qp, calls):
    qp.connect(PEER, hop_limit=64, traffic_class=0x60)
    calls.forget()
    M = QpAttrMask
    qp.modify(QpAttr(ah_attr=AhAttr(gid=GID, sgid_index=3, traffic_class=0x88)), M.AH_ATTR)
    qp.modify(QpAttr(allow_remote_write=False, min_rnr_timer=9), M.ALLOW_REMOTE_WRITE | M.MIN_RNR_TIMER)
    assert moves(calls) == [
        ({"next_state": "0x3", "ah_attr": "ah_attr#1"}, f"{M.NEXT_STATE | M.AH_ATTR:#x}"),
        (
            {"next_state": "0x3", "allow_remote_write": "0", "min_rnr_timer": "0x9"},
            f"{M.NEXT_STATE | M.ALLOW_REMOTE_WRITE | M.MIN_RNR_TIMER:#x}",
        ),
    ]
    assert calls.attributes("ah_attr") == ADDRESS | {"sgid_index": "0x3", "traffic_class": "0x88"}  # same peer


def test_infiniband_is_addressed_by_lid(calls, folder, monkeypatch):
    monkeypatch.setenv(libraries.VARIABLE, str(folder))
    card = Card(ethernet=False)
    with ExitStack() as stack:
        ctx = stack.enter_context(verbs.Context(through_sdk(card)))
        qp = queue_pair(ctx, stack)
        qp.connect(QpEndpoint(0x1234, GID[:8] + bytes(8), 9, 4096), sl=5)
        assert qp.query()[0].ah_attr.dlid == 9
    found = calls.attributes("ah_attr")
    assert (found["dlid"], found["sl"], found["addr_type"]) == ("0x9", "0x5", f"{AddrType.IB_NO_GRH:#x}")


def test_uc_has_no_attributes_of_acknowledgements(ctx, calls, monkeypatch):
    real = FakeProvider.general_cmd

    def general_cmd(self, mailbox, out_size):
        out = bytearray(real(self, mailbox, out_size))
        if mailbox[:8] == bytes.fromhex("0100000000000001"):  # QUERY_HCA_CAP, general
            out[0x10 + 0x47] |= 2  # uc
        return bytes(out)

    monkeypatch.setattr(FakeProvider, "general_cmd", general_cmd)
    with ExitStack() as stack:
        qp = queue_pair(ctx, stack, qp_type=QpType.UC)
        qp.connect(PEER, psn=0x99)
    assert calls.attributes("qp_init_attr")["qp_type"] == "0x1"
    assert [sorted(attributes) for attributes, _ in moves(calls)] == [
        ["allow_remote_read", "allow_remote_write", "next_state", "pkey_index", "port_num"],
        ["ah_attr", "dest_qp_num", "next_state", "path_mtu", "rq_psn"],
        ["next_state", "sq_psn"],
    ]


@pytest.mark.parametrize("srq_type, wr, kind", [(SrqType.LINKED_LIST, "0xf", "0"), (SrqType.CONTIGUOUS, "0x10", "0x1")])
def test_a_shared_receive_queue(srq_type, wr, kind, ctx, calls):
    with ExitStack() as stack:
        pd = stack.enter_context(ctx.create_pd())
        srq = stack.enter_context(
            pd.create_srq(15, srq_type=srq_type, external_datapath=srq_type == SrqType.CONTIGUOUS)
        )
        assert calls.attributes("srq_init_attr") == {
            "srq_wr": wr, "receive_max_sges": "0x1", "type": kind, "pd": "pd#1", "external_datapath_en": "0x1",
            "external_umem": "umem#1 0",
        }
        qp = queue_pair(ctx, stack, rq_wr=0, srq=srq)
        assert calls.attributes("qp_init_attr")["srq"] == "verbs_srq#1"
        assert "rq_wr" not in calls.attributes("qp_init_attr")
        assert qp.rq_entries == 0


def test_a_queue_without_doorbell_record_rings_its_own_register(ctx, calls, card):
    card.no_dbr_ext = True
    card._provider.no_dbr_ext = True
    with ExitStack() as stack:
        qp = queue_pair(ctx, stack, send_dbr_mode=QpSendDbrMode.NO_DBR_EXT, core_direct_master=True)
        assert qp.doorbell_register == qp.uar.reg_addr - 0x800 + 0x600
    found = calls.attributes("qp_init_attr")
    assert (found["send_dbr_mode"], found["core_direct_master"]) == ("0x1", "0x1")


def test_optional_attributes_are_set_when_they_are_wanted(ctx, calls, card):
    card._provider.cqe_inline = True
    with ExitStack() as stack:
        queue_pair(ctx, stack, cqe_inline=True)
        stack.enter_context(ctx.create_cq(4, collapsed=True))
    assert calls.attributes("qp_init_attr")["cqe_inline"] == "0x1"
    assert calls.attributes("cq_attr")["cq_collapsed"] == "0x1"


def test_queues_in_memory_of_the_users(ctx, calls):
    with ExitStack() as stack:
        memory = HostMemory(8192)
        stack.callback(memory.close)
        umem = stack.enter_context(ctx.register_umem(memory.array))
        uar = stack.enter_context(ctx.create_uar(UarAllocationType.NONCACHE_DEDICATED))
        cq = stack.enter_context(
            ctx.create_cq(16, external_umem=(umem, 64), external_dbr_umem=(umem, 64 + 1024), external_uar=uar)
        )
        assert (cq.ring_address, cq.dbr_address) == (memory.address + 64, memory.address + 64 + 1024)
        assert calls.attributes("cq_attr")["external_umem"] == "umem#1 0x40"
        assert f"doca_uar_create dev#1 {UarAllocationType.NONCACHE_DEDICATED:#x}" in calls()
        pd = stack.enter_context(ctx.create_pd())
        qp = stack.enter_context(
            pd.create_qp(
                sq_wr=8, send_cq=cq, external_umem=(umem, 2048), external_dbr_umem=(umem, 4096), external_uar=uar
            )
        )
        assert (qp.sq_address, qp.dbr_address) == (memory.address + 2048, memory.address + 4096)
        found = calls.attributes("qp_init_attr")
        assert (found["external_umem"], found["external_dbr_umem"]) == ("umem#1 0x800", "umem#1 0x1000")


def test_the_cpu_posts_to_such_a_queue(qp):
    """Its ring is the SDK's queue pair's, and the register that it rings is the SDK's UAR's."""
    qp.connect(PEER)
    qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE, inline=b"", remote_addr=0, rkey=1))
    assert ctypes.string_at(qp.dbr_address + 4, 4) == b"\0\0\0\1"
    assert ctypes.string_at(qp.doorbell_register + 4, 3) == qp.qpn.to_bytes(3, "big")
    assert ctypes.string_at(qp.sq_address + 4, 3) == qp.qpn.to_bytes(3, "big")


# --- what fails -------------------------------------------------------------------------------------------------------


def use_everything(card: Card) -> None:
    """A run through all that the SDK makes."""
    with ExitStack() as stack:
        ctx = stack.enter_context(verbs.Context(through_sdk(card)))
        pd = stack.enter_context(ctx.create_pd())
        srq = stack.enter_context(pd.create_srq(15))
        qp = queue_pair(ctx, stack, cqe_inline=True)
        other = queue_pair(ctx, stack, rq_wr=0, srq=srq)
        stack.enter_context(ctx.create_cq(4, collapsed=True))
        qp.connect(PEER)
        other.to_error()
        assert other.state == QpState.ERR


FUNCTIONS = sorted(
    {name for area in signatures.DEVICE for name in (*area.functions, *area.optional)} - set(signatures.RESULTS)
)


def left(calls: Calls) -> set[str]:
    """Objects whose last appearance is not that they are taken away."""
    last: dict[str, str] = {}
    for line in calls():
        name, *arguments = line.split()
        for one in arguments:
            if "#" in one:
                last[one] = name
    return {one for one, name in last.items() if not name.endswith(("_destroy", "_close"))}


def test_everything_is_taken_away(folder, monkeypatch, calls):
    monkeypatch.setenv(libraries.VARIABLE, str(folder))
    card = Card()
    card.cqe_inline = True
    use_everything(card)
    assert set(calls.names()) >= set(FUNCTIONS)  # so the next test goes through all of them
    assert left(calls) == set()
    assert card.left() == []


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_that_fails_leaves_nothing_behind(function, folder, monkeypatch, calls):
    monkeypatch.setenv(libraries.VARIABLE, str(folder))
    monkeypatch.setenv("DOCA_STAND_IN_FAILS", f"{function}=3")
    card = Card()
    card.cqe_inline = True
    with pytest.raises(InUseError, match=rf"^{function} of the DOCA SDK failed with 3 \(DOCA_ERROR_IN_USE\)$"):
        use_everything(card)
    assert left(calls) == set()
    assert card.left() == []
    assert card.gone[-1] == "device"


@pytest.mark.parametrize(
    "code, kind, meaning",
    [
        (2, errors.NotPermittedError, "NOT_PERMITTED"),
        (7, errors.NoMemoryError, "NO_MEMORY"),
        (9, errors.TimedOutError, "TIME_OUT"),
        (21, errors.DriverError, "DRIVER"),
        (31, errors.DeviceFatalError, "DEVICE_FATAL_ERROR"),
        (19, DocaError, "UNSUPPORTED_VERSION"),  # without a class of its own
    ],
)
def test_errors_have_their_codes(code, kind, meaning, ctx, monkeypatch):
    monkeypatch.setenv("DOCA_STAND_IN_FAILS", f"doca_verbs_cq_attr_create={code}")
    with pytest.raises(DocaError, match=rf"failed with {code} \(DOCA_ERROR_{meaning}\)") as caught:
        ctx.create_cq(16)
    assert type(caught.value) is kind
    assert (caught.value.code, caught.value.code.name) == (code, meaning)


def test_an_error_that_nobody_knows(ctx, monkeypatch):
    monkeypatch.setenv("DOCA_STAND_IN_FAILS", "doca_verbs_cq_attr_create=99")
    with pytest.raises(DocaError, match=r"failed with 99 \(unknown\)") as caught:
        ctx.create_cq(16)
    assert caught.value.code == errors.DocaErrorCode.UNKNOWN


@pytest.mark.parametrize("kind", ["CQ", "SRQ", "QP"])
def test_a_ring_of_another_layout_is_refused(kind, ctx, monkeypatch, calls):
    monkeypatch.setenv("DOCA_STAND_IN_FAILS", f"doca_verbs_{kind.lower()}_get_wq=5")
    with ExitStack() as stack:
        pd = stack.enter_context(ctx.create_pd())
        make = {
            "CQ": lambda: ctx.create_cq(16), "SRQ": lambda: pd.create_srq(15), "QP": lambda: queue_pair(ctx, stack),
        }[kind]
        with pytest.raises(UnexpectedError, match=f"the DOCA SDK has laid out a {kind} as .*'0x5'.*, not as"):
            make()
    ctx.close()
    assert left(calls) == set()


def test_a_state_that_nobody_knows(qp, monkeypatch):
    monkeypatch.setenv("DOCA_STAND_IN_FAILS", "doca_verbs_qp_attr_get_current_state=9")
    with pytest.raises(UnexpectedError, match="reports state 9 of QP"):
        qp.state  # noqa: B018


# --- what is refused --------------------------------------------------------------------------------------------------

HOW_OUT = "unset DOCA_SDK_LIB_PATH to use gpunetio's own control path$"


def test_what_the_sdk_does_not_do_for_us_is_refused_with_the_way_out(ctx):
    memory = HostMemory(8192)
    with ExitStack() as stack:
        stack.callback(memory.close)
        pd = stack.enter_context(ctx.create_pd())
        srq, cq = (stack.enter_context(made) for made in (pd.create_srq(15), ctx.create_cq(16)))
        umem, channel = (
            stack.enter_context(made) for made in (ctx.register_umem(memory.array), ctx.create_comp_channel())
        )
        for call, what in (
            (lambda: ctx.register_dmabuf_umem(3, 4096), "a UMEM in a dmabuf: .*doca_umem_gpu_create"),
            (lambda: ctx.register_umem(memory.array, Access.REMOTE_READ), "a UMEM with access .*doca_access_flag"),
            (lambda: ctx.create_cq(16, channel=channel), "a completion channel: "),
            (lambda: srq.modify(srq_limit=3), "the limit of SRQ"),
            (lambda: srq.query(), "asking about SRQ"),
            (
                lambda: ctx.create_cq(16, external_umem=(umem, 0), external_dbr_umem=(umem, 4096)),
                "a doorbell record at offset 0x1000 .* it has to be at offset 0x400",
            ),
            (
                lambda: ctx.create_cq(16, external_umem=(umem, 0x400), external_dbr_umem=(umem, 4096)),
                "a doorbell record at offset 0x1000 .* it has to be at offset 0x800",
            ),
        ):
            with pytest.raises(NotSupportedError, match=f"^{what}.*{HOW_OUT}"):
                call()
        assert cq.users == ()


def test_responses_in_completions_are_refused_with_the_way_out(folder, monkeypatch):
    monkeypatch.setenv(libraries.VARIABLE, str(folder))
    card = Card()
    card.cqe_inline = True
    with verbs.Context(through_sdk(card)) as ctx, ctx.create_pd() as pd, ctx.create_cq(16) as cq:
        with pytest.raises(NotSupportedError, match=f"^responses in completions: .*{HOW_OUT}"):
            pd.create_qp(sq_wr=1, send_cq=cq, external_datapath=True, cqe_inline_responses=True)
        assert cq.users == ()


def test_a_release_without_an_optional_function(tmp_path, monkeypatch):
    folder = build(tmp_path, COMMON, VERBS, GPUNETIO, doca_verbs_cq_attr_set_cq_collapsed="gone")
    monkeypatch.setenv(libraries.VARIABLE, str(folder))
    with verbs.Context(through_sdk(Card())) as ctx:
        ctx.create_cq(16).close()
        with pytest.raises(NotSupportedError, match=f"^doca_verbs_cq_attr_set_cq_collapsed: .*{folder}.*{HOW_OUT}"):
            ctx.create_cq(16, collapsed=True)


# --- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A CUDA device, as far as opening and closing a handle goes."""
    backend = SimpleNamespace(
        name="8a:00.0", target="cuda", has_memory=True, sdk=True, lanes=32, integrated=False, closed=0
    )

    def close() -> None:
        backend.closed += 1

    backend.close = close
    monkeypatch.setattr(Gpu, "_open_backend", staticmethod(lambda which: backend))
    return backend


def test_a_gpu_has_a_handle_of_the_sdk(cuda, folder, monkeypatch, caplog, calls):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(libraries.VARIABLE, str(folder))
    with Gpu("8a:00.0"):
        assert calls() == ["doca_gpu_create 8a:00.0"]
    assert calls()[1:] == ["doca_gpu_destroy gpu#1"]
    assert cuda.closed == 1
    assert messages(caplog) == [
        ("WARNING", f"Env var DOCA_SDK_LIB_PATH set to {folder}. DOCA SDK is in use"),
        ("INFO", "Use DOCA GPUNetIO SDK"),
    ]


def test_a_gpu_without_the_libraries(cuda, tmp_path, monkeypatch, caplog, calls):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(libraries.VARIABLE, str(tmp_path))
    Gpu("8a:00.0").close()
    told = messages(caplog)
    assert told[0] == failed_to_find(tmp_path, COMMON)
    assert told[-2:] == not_in_use(tmp_path, "GPUNetIO")
    assert (calls(), cuda.closed) == ([], 1)


def test_a_gpu_that_the_sdk_refuses_is_closed(cuda, folder, monkeypatch):
    monkeypatch.setenv(libraries.VARIABLE, str(folder))
    monkeypatch.setenv("DOCA_STAND_IN_FAILS", "doca_gpu_create=8")
    with pytest.raises(errors.InitializationError, match="doca_gpu_create of the DOCA SDK failed with 8"):
        Gpu("8a:00.0")
    assert cuda.closed == 1


def test_the_host_as_gpu_is_not_concerned(folder, monkeypatch, calls):
    monkeypatch.setenv(libraries.VARIABLE, str(folder))
    with Gpu("host"):
        pass
    assert calls() == []


def test_a_forked_child_leaves_the_device_to_its_parent(card, calls, monkeypatch):
    before = calls()
    parent = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(sdk_provider.os, "getpid", lambda: parent + 1)
        card.close()
    assert calls() == before
    card.close()
    assert left(calls) == set()


def test_a_card_tells_where_libibverbs_has_it():
    skip_without_libraries()
    context, pd = structs.ibv_context(), structs.ibv_pd()
    device = VerbsDevice("mlx5_0", ctypes.pointer(context), borrowed=True)
    device.hold("PD", 7, lambda pointer: 0, ctypes.pointer(pd))
    assert device.ibv_context == ctypes.addressof(context)
    assert device.ibv_pd(7) == ctypes.addressof(pd)
    with pytest.raises(errors.InvalidValueError, match="mlx5_0 has no PD 0x8"):
        device.ibv_pd(8)
