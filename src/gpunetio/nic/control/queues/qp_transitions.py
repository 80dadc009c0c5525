"""The state transitions of queue pairs: the modify commands, QP_2ERR and QP_2RST."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_

import numpy as np

from ....enums import Access, QpAtomicType
from ....errors import BadStateError, InUseError, InvalidValueError
from ....fabric.frames import egress_of, with_traffic
from ....formats import commands as cmd
from ....formats.commands import CapClass, Opcode, OptParam, OptParam32, PrmMtu, QpState, ServiceType, Status
from ....formats.layout import BitStruct
from ....formats.packet import GSI_Q_KEY, GSI_QPN
from ....formats.wqe import MAX_TRANSFER_SHIFT
from ...engine.hardware import Hardware
from ...state.qp import EXTENDED_ATOMICS, QP_CONNECTION
from ...transport.rnr import rnr_delay_ns
from ...turn.commands import EngineCommand
from ..command import DONE, Call, Capabilities, Command, Handlers, opcode_of
from ..components import FIRST, Components
from ..gids import UDP_SPORTS, Gids
from ..links.links import Links
from ..links.routes import Routes
from ..syndromes import CommandError, CommandSyndrome
from .qp import QueuePairs, state_of
from .qp_extension import check_mmo

logger: logging.Logger = logging.getLogger("gpunetio.nic")

ACK_TIMEOUT_UNIT_NS = 4096  # IBTA 9.7.6.1.3: 4.096 µs · 2^code; code 0 never times out


_DSCP_SHIFT = 2
_NO_PARAM = OptParam(0)


@dataclass(frozen=True)
class _Transition:
    """A modify command. It sets the `required` fields, and the fields of opt_param_mask, which must be `allowed`."""

    mailbox: BitStruct
    before: QpState
    after: QpState
    required: tuple[str, ...] = ()
    allowed: OptParam = _NO_PARAM


_PATH = "primary_address_path"
_RIGHTS = OptParam.RRE | OptParam.RWE | OptParam.RAE
_OF_DATAGRAMS = OptParam.PKEY_INDEX | OptParam.PORT_NUM | OptParam.Q_KEY
_TO_INIT = (
    "pm_state", "rwe", "rre", "rae", "atomic_mode", "q_key", f"{_PATH}.vhca_port_num", f"{_PATH}.pkey_index",
)
_TO_RTR = (
    "next_rcv_psn", "remote_qpn", "log_msg_max", "mtu", "min_rnr_nak", "log_rra_max",
    *(f"{_PATH}.{field}" for field in (
        "tclass", "flow_label", "rlid", "sl", "stat_rate", "rgid_rip", "hop_limit", "src_addr_index", "rmac_47_32",
        "rmac_31_0", "grh", "udp_sport", "dscp")),
)
_TO_RTS = (
    "next_send_psn", "retry_count", "rnr_retry", "log_sra_max", "log_ack_req_freq", f"{_PATH}.ack_timeout",
)
_TRANSITIONS: dict[Opcode, _Transition] = {
    Opcode.RST2INIT_QP:  _Transition(cmd.RST2INIT_QP_IN,  QpState.RST,  QpState.INIT, _TO_INIT),
    Opcode.INIT2INIT_QP: _Transition(cmd.INIT2INIT_QP_IN, QpState.INIT, QpState.INIT, (),
                                     _RIGHTS | OptParam.PKEY_INDEX | OptParam.PORT_NUM | OptParam.Q_KEY),
    Opcode.INIT2RTR_QP:  _Transition(cmd.INIT2RTR_QP_IN,  QpState.INIT, QpState.RTR, _TO_RTR,
                                     _RIGHTS | OptParam.PKEY_INDEX | OptParam.Q_KEY),
    Opcode.RTR2RTS_QP:   _Transition(cmd.RTR2RTS_QP_IN,   QpState.RTR,  QpState.RTS, _TO_RTS,
                                     _RIGHTS | OptParam.MIN_RNR_NAK | OptParam.Q_KEY),
    Opcode.RTS2RTS_QP:   _Transition(cmd.RTS2RTS_QP_IN,   QpState.RTS,  QpState.RTS, (),
                                     _RIGHTS | OptParam.MIN_RNR_NAK | OptParam.SGID_INDEX | OptParam.DSCP
                                     | OptParam.Q_KEY),
    Opcode.RTS2SQD_QP:   _Transition(cmd.RTS2SQD_QP_IN,   QpState.RTS,  QpState.SQDRAINED),
    Opcode.SQD2RTS_QP:   _Transition(cmd.SQD2RTS_QP_IN,   QpState.SQDRAINED, QpState.RTS, (),
                                     _RIGHTS | OptParam.MIN_RNR_NAK | OptParam.Q_KEY),
}

_OPTIONAL: dict[OptParam, tuple[str, ...]] = {
    OptParam.RRE:         ("rre",),
    OptParam.RWE:         ("rwe",),
    OptParam.RAE:         ("rae", "atomic_mode"),
    OptParam.PKEY_INDEX:  (f"{_PATH}.pkey_index",),
    OptParam.Q_KEY:       ("q_key",),
    OptParam.PORT_NUM:    (f"{_PATH}.vhca_port_num",),
    OptParam.MIN_RNR_NAK: ("min_rnr_nak",),
    OptParam.SGID_INDEX:  (f"{_PATH}.src_addr_index",),
    OptParam.DSCP:        (f"{_PATH}.dscp",),
}


def _get(context: bytes | bytearray, path: str) -> int:
    return cmd.QPC.get(context, path)


@cache
def _settable_bits(opcode: Opcode, optional: int) -> int:
    """Return a mask of the QPC bits that a command sets with the given optional parameters."""
    named = (path for bit, paths in _OPTIONAL.items() if bit & optional for path in paths)
    return reduce(or_, map(cmd.QPC.bits, (*_TRANSITIONS[opcode].required, *named)), 0)


def _merge_bits(context: bytes | bytearray, wanted: bytes, bits: int) -> bytearray:
    """Return a copy of a context in which some bits are replaced by those of another context."""
    merged = int.from_bytes(context, "big") & ~bits | int.from_bytes(wanted, "big") & bits
    return bytearray(merged.to_bytes(len(context), "big"))


class QpTransitions(Handlers):
    """The commands that change the state of queue pairs."""

    def __init__(
        self, hardware: Hardware, components: Components, qps: QueuePairs, gids: Gids, links: Links, routes: Routes
    ):
        self._port, self._engine, self._components = hardware.port, hardware.engine, components
        self._qps, self._gids, self._links, self._routes = qps, gids, links, routes
        self._name = hardware.name

    def commands(self) -> Iterable[Command]:
        return (
            *(Command(Call.MODIFY, opcode, row.mailbox, self._modify) for opcode, row in _TRANSITIONS.items()),
            Command(Call.MODIFY, Opcode.QP_2ERR, cmd.QP_2ERR_IN, self._to_error),
            Command(Call.MODIFY, Opcode.QP_2RST, cmd.QP_2RST_IN, self._to_reset),
        )

    def capabilities(self) -> Capabilities:
        return {
            CapClass.GENERAL: {"rts2rts_qp_dscp": 1, "rts2rts_qp_udp_sport": int(not self._port.infiniband)},
        }

    # --- commands --------------------------------------------------------------------------------------------------

    def _modify(self, mailbox: bytes) -> bytes:
        opcode = Opcode(opcode_of(mailbox))
        transition = _TRANSITIONS[opcode]
        qpn = transition.mailbox.get(mailbox, "qpn")
        row_address = self._qps.need(qpn)
        state = state_of(self._qps.table[qpn])
        if state != transition.before:
            raise _bad_state(opcode, qpn, state)
        start = transition.mailbox.offset("qpc")
        wanted = mailbox[start : start + cmd.QPC.size]
        datagrams = bool(self._qps.table[qpn]["service"] == ServiceType.UD)
        optional, sport, mmo = self._optional(opcode, mailbox, wanted, datagrams)
        if mmo is not None:
            check_mmo(mmo, int(self._qps.table[qpn]["service"]))
        qp = self._qps.known[qpn]
        context = _merge_bits(qp.context, wanted, _settable_bits(opcode, optional))
        if sport is not None:
            cmd.QPC.update(context, **{_PATH: {"udp_sport": sport}})
        self._check_context(opcode, context)
        cmd.QPC.update(context, state=int(transition.after))
        if datagrams:
            row = self._prepare_datagrams(qpn, context, transition.after)
        else:
            row = self._prepare(qpn, context, transition.after, qp.udp_sport if sport is None else sport)
        if mmo is not None:
            row["mmo"] = mmo
        try:
            # To the engine, SQD is RTS in which no new WQE starts.
            expected = QpState.RTS if transition.before is QpState.SQDRAINED else transition.before
            worker = self._components.worker_of(row_address)
            self._engine.post(EngineCommand.MODIFY_QP, row_address, row, state=int(expected), worker=worker)
        except BadStateError:
            raise _bad_state(opcode, qpn, int(self._qps.table[qpn]["state"])) from None
        qp.context = context
        if sport is not None:
            qp.udp_sport = sport
        if transition.after is QpState.RTR:
            self._links.drain(int(row["wire"]))
        if row["remote_row"] and opcode in (Opcode.INIT2RTR_QP, Opcode.RTR2RTS_QP):
            self._compare_with_peer(qpn, transition.after)
        return DONE

    def _compare_with_peer(self, qpn: int, state: QpState) -> None:
        """Warn if the settings of a queue pair that has entered a state do not fit its peer on this NIC.

        Within a software NIC, such requests succeed, because each is executed as a whole. On a card, they fail.
        """
        own = self._qps.table[qpn]
        number = int(own["remote_qpn"])
        if number == qpn or number not in self._qps.table:
            return
        peer = self._qps.table[number]
        if int(peer["remote_qpn"]) != qpn or peer["state"] not in (QpState.RTR, QpState.RTS):
            return
        if state is QpState.RTR and own["mtu"] != peer["mtu"]:
            logger.warning(
                "%s: QP %#x has a path MTU of %d, and its peer QP %#x one of %d. Over a network, each refuses the "
                "other's packets: connect both with the same path_mtu",
                self._name, qpn, own["mtu"], number, peer["mtu"],
            )
        reader, responder = (own, peer) if state is QpState.RTS else (peer, own)
        if reader["state"] == QpState.RTS and reader["max_rd"] > responder["max_dest_rd"]:
            logger.warning(
                "%s: QP %#x may have %d READs and atomics in flight, but its peer QP %#x accepts %d. A card refuses "
                "more with a NAK: lower max_rd_atomic, or raise the peer's max_dest_rd_atomic", self._name,
                reader["qpn"], reader["max_rd"], responder["qpn"], responder["max_dest_rd"],
            )

    def _optional(
        self, opcode: Opcode, mailbox: bytes, wanted: bytes, datagrams: bool
    ) -> tuple[int, int | None, int | None]:
        """Return opt_param_mask, and the UDP source port and `mmo` to set, each None if it is not to be set.

        CommandError if the command does not allow one of them.
        """
        struct = _TRANSITIONS[opcode].mailbox
        optional: int = struct.get(mailbox, "opt_param_mask")
        allowed = int(_TRANSITIONS[opcode].allowed)  # plain ints: ~ of a flag loses unknown bits
        allowed &= int(_OF_DATAGRAMS) if datagrams else ~int(OptParam.Q_KEY)
        refused = optional & ~allowed
        further: int = struct.get(mailbox, "opt_param_mask_95_32") if "opt_param_mask_95_32" in struct.fields else 0
        sport = None
        if opcode is Opcode.RTS2RTS_QP and not datagrams and further & OptParam32.UDP_SPORT:
            # qpc_ext may be set or not: libmlx5 does not set it.
            sport = self._check_sport(_get(wanted, f"{_PATH}.udp_sport"))
            further &= ~int(OptParam32.UDP_SPORT)
        mmo = None
        if opcode is Opcode.INIT2INIT_QP and struct.get(mailbox, "qpc_ext") and further & OptParam32.MMO:
            mmo = struct.get(mailbox, "qpc_data_ext.mmo")
            further &= ~int(OptParam32.MMO)
        if further and (datagrams or struct.get(mailbox, "qpc_ext")):
            refused |= further << 32
        if refused:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.OPT_PARAM,
                f"{opcode.name} cannot carry optional parameters {refused:#x} ({OptParam(refused & 0xFFFF_FFFF)!r})",
            )
        return optional, sport, mmo

    def _to_error(self, mailbox: bytes) -> bytes:
        qpn = cmd.QP_2ERR_IN.get(mailbox, "qpn")
        row_address = self._qps.need(qpn)
        state = int(self._qps.table[qpn]["state"])
        if state == QpState.ERR:
            return DONE
        row = self._qps.table.copy(qpn)
        row["state"] = QpState.ERR
        worker = self._components.worker_of(row_address)
        self._engine.post(EngineCommand.MODIFY_QP, row_address, row, state=state, worker=worker)
        return DONE

    def _to_reset(self, mailbox: bytes) -> bytes:
        qpn = cmd.QP_2RST_IN.get(mailbox, "qpn")
        row_address = self._qps.need(qpn)
        row = self._qps.table.copy(qpn)
        for field in QP_CONNECTION:
            row[field] = 0
        row["state"], row["mmo"] = QpState.RST, self._qps.known[qpn].mmo
        worker = self._components.worker_of(row_address)
        if worker != 0:  # the first worker forwards doorbells rung in UAR registers: now, or never after the reset
            self._engine.synchronize()
        self._engine.post(EngineCommand.RESET_QP, row_address, row, worker=worker)
        self._components.disconnect(row_address)
        qp = self._qps.known[qpn]
        qp.udp_sport, qp.context = 0, bytearray(qp.created)
        return DONE

    # --- checks ----------------------------------------------------------------------------------------------------

    def _check_sport(self, port: int) -> int:
        least, most = UDP_SPORTS
        if self._port.infiniband or not least <= port <= most:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.UDP_SPORT,
                f"udp_sport {port}: an Ethernet port accepts {least} to {most}, an InfiniBand port accepts none",
            )
        return port

    def _check_context(self, opcode: Opcode, context: bytearray) -> None:
        port, pkey = _get(context, f"{_PATH}.vhca_port_num"), _get(context, f"{_PATH}.pkey_index")
        if port != 1:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.PORT_NUMBER, f"port {port} does not exist: only port 1"
            )
        if pkey != 0:
            raise CommandError(
                Status.BAD_INDEX, CommandSyndrome.PKEY_INDEX, f"pkey_index {pkey} is outside the table of 1"
            )
        if opcode is Opcode.INIT2RTR_QP:
            mtu = _get(context, "mtu")
            if not PrmMtu.MTU_256 <= mtu <= PrmMtu.MTU_4K:
                raise CommandError(Status.BAD_PARAM, CommandSyndrome.MTU, f"MTU code {mtu} is not 1 (256) to 5 (4096)")
            if (log := _get(context, "log_msg_max")) > MAX_TRANSFER_SHIFT:
                raise CommandError(
                    Status.BAD_PARAM, CommandSyndrome.MSG_MAX,
                    f"log_msg_max {log} is above {MAX_TRANSFER_SHIFT} (1 GiB)",
                )
        if opcode in (Opcode.INIT2RTR_QP, Opcode.RTS2RTS_QP):
            self._gids.need_index(_get(context, f"{_PATH}.src_addr_index"))

    # --- rows ------------------------------------------------------------------------------------------------------

    def _prepare(self, qpn: int, context: bytearray, state: QpState, sport: int) -> np.void:
        """Return the QP's row for a context and a state. `sport` is the UDP source port set for the QP, or 0."""
        route = None
        if state in (QpState.RTR, QpState.RTS):
            gid, lid = cmd.QPC.get(context, f"{_PATH}.rgid_rip"), _get(context, f"{_PATH}.rlid")
            source, peer = _get(context, f"{_PATH}.src_addr_index"), _get(context, "remote_qpn")
            route = self._routes.route(gid, lid, source, peer)
            self._components.connect(self._qps.table.row_address(qpn), route[0] or FIRST)  # may move the QP
        row = self._qps.table.copy(qpn)
        row["drain"] = state is QpState.SQDRAINED
        if state is QpState.SQDRAINED:
            return row
        row["state"] = state
        atomics = _get(context, "atomic_mode") if _get(context, "rae") else QpAtomicType.NONE
        row["rights"] = (
            Access.REMOTE_WRITE * _get(context, "rwe")
            | Access.REMOTE_READ * _get(context, "rre")
            | Access.REMOTE_ATOMIC * (atomics != QpAtomicType.NONE)
            | EXTENDED_ATOMICS * (atomics == QpAtomicType.UP_TO_8BYTES)
        )
        row["min_rnr_code"] = _get(context, "min_rnr_nak")
        row["min_rnr"] = rnr_delay_ns.py_func(int(row["min_rnr_code"]))
        if route is not None:
            row["remote_qpn"], row["rq_psn"] = _get(context, "remote_qpn"), _get(context, "next_rcv_psn")
            row["mtu"], row["msg_max"] = 128 << _get(context, "mtu"), 1 << _get(context, "log_msg_max")
            row["remote_row"], row["wire"], gid, row["source"] = route
            row["peer_high"], row["peer_low"] = np.frombuffer(gid, np.int64)
            egress = self._egress(qpn, int(row["wire"]), gid, int(row["source"]), sport)
            hops, label = _get(context, f"{_PATH}.hop_limit"), _get(context, f"{_PATH}.flow_label")
            row["egress"] = with_traffic.py_func(egress, self._traffic_class(context), hops, label)
            row["dlid"], row["sl"] = _get(context, f"{_PATH}.rlid"), _get(context, f"{_PATH}.sl")
            row["grh"] = _get(context, f"{_PATH}.grh")
            row["max_dest_rd"] = 1 << _get(context, "log_rra_max")
        if state is QpState.RTS:
            code = _get(context, f"{_PATH}.ack_timeout")
            row["timeout_ns"] = ACK_TIMEOUT_UNIT_NS << code if code else 0
            row["retry_cnt"], row["rnr_retry"] = _get(context, "retry_count"), _get(context, "rnr_retry")
            row["sq_psn"] = _get(context, "next_send_psn")
            row["max_rd"] = 1 << _get(context, "log_sra_max")
        return row

    def _prepare_datagrams(self, qpn: int, context: bytearray, state: QpState) -> np.void:
        """Return the row of a UD queue pair for a context and a state. It has no peer, and a message is one packet."""
        row = self._qps.table.copy(qpn)
        row["drain"] = state is QpState.SQDRAINED
        if state is QpState.SQDRAINED:
            return row
        row["state"] = state
        row["q_key"] = GSI_Q_KEY if qpn == GSI_QPN else _get(context, "q_key")
        if state in (QpState.RTR, QpState.RTS):
            row["mtu"] = min(128 << _get(context, "mtu"), self._port.active_mtu)
            row["msg_max"] = min(1 << _get(context, "log_msg_max"), row["mtu"])
        if state is QpState.RTR:
            self._components.connect(self._qps.table.row_address(qpn), FIRST)  # its datagrams may use any wire
            self._links.listen()
        if state is QpState.RTS:
            row["sq_psn"] = _get(context, "next_send_psn")
        return row

    def _traffic_class(self, context: bytearray) -> int:
        """Return the traffic class of a path. On Ethernet it is the DSCP with the two ECN bits clear (RFC 3168)."""
        if self._port.infiniband:
            return _get(context, f"{_PATH}.tclass")
        return _get(context, f"{_PATH}.dscp") << _DSCP_SHIFT

    def _egress(self, qpn: int, wire: int, gid: bytes, source: int, port: int) -> int:
        """Return the egress of a QP's packets (`Links.egress`)."""
        rows = self._qps.table.given
        try:
            used = set(egress_of.py_func(rows["egress"][rows["qpn"] != qpn]).tolist())
            return self._links.egress(wire, gid, source, port, used)
        except (InUseError, InvalidValueError) as error:
            raise CommandError(Status.RESOURCE_BUSY, CommandSyndrome.UDP_SPORT, str(error)) from None


def _bad_state(opcode: Opcode, qpn: int, state: int) -> CommandError:
    return CommandError(
        Status.BAD_QP_STATE, CommandSyndrome.QP_STATE,
        f"{opcode.name}: QP {qpn:#x} is in {QpState(state).name}, not in {_TRANSITIONS[opcode].before.name}",
    )
