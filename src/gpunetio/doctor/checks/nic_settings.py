"""Check the firmware settings of network cards: link type, BlueField's mode, accurate send scheduling."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from ..finding import GUIDE, HARDWARE, Finding, Maker, Use, check, fail, ok, skip, warn
from ..machine import mlxconfig
from ..machine.devices import Machine, Nic
from ..machine.host import Reading
from ..machine.mlxconfig import COLD_REBOOT, Firmware
from ..machine.nics import MODELS, each_nic, is_nvidia, port_of

AREA = "NICs"
_LAYERS = {"InfiniBand": 1, "Ethernet": 2}  # of LINK_TYPE_Pn
_ENGINE = "INTERNAL_CPU_OFFLOAD_ENGINE"
_NIC_MODE = {
    "INTERNAL_CPU_MODEL": 1,            # EMBEDDED_CPU
    "INTERNAL_CPU_PAGE_SUPPLIER": 1,    # EXT_HOST_PF
    "INTERNAL_CPU_ESWITCH_MANAGER": 1,  # EXT_HOST_PF
    "INTERNAL_CPU_IB_VPORT0": 1,        # EXT_HOST_PF
    _ENGINE: 1,                         # DISABLED
}
# On BlueField-3 and later the engine alone decides about NIC mode; BlueField-2 needs all five settings (NVIDIA:
# BlueField Modes of Operation).
_BY_ENGINE = frozenset({0xA2DC, 0xA2DF})
_ACCURATE_SEND = {"ACCURATE_TX_SCHEDULER": 1, "REAL_TIME_CLOCK_ENABLE": 1}

_Judge = Callable[[Machine, Nic, Firmware], Iterator[Finding]]


def _each_card(judge: _Judge) -> Callable[[Machine], Iterator[Finding]]:
    """Turn a judge of one NIC's firmware settings into a check of all NICs."""

    @each_nic
    def judge_nic(machine: Machine, nic: Nic) -> Iterator[Finding]:
        yield from judge(machine, nic, mlxconfig.ask(machine, nic))

    @functools.wraps(judge)
    def ask(machine: Machine) -> Iterator[Finding]:
        mlxconfig.ask_all(machine)
        return judge_nic(machine)

    return ask


@check(
    "nic-link-type", "Ethernet or InfiniBand",
    why="Ethernet queues need a port in Ethernet mode. The link should stay up when the driver is unloaded.",
    cure="for Ethernet queues: sudo mlxconfig -d <mst device> --yes set LINK_TYPE_P1=2 KEEP_ETH_LINK_UP_P1=1 "
         "KEEP_IB_LINK_UP_P1=0; for InfiniBand, the values are 1, 0 and 1; then a cold reboot: ipmitool power cycle; "
         "for a virtual function, set them on the hypervisor's physical function",
    source=f"{GUIDE}: Configure ConnectX NIC, Configure BlueField NIC", uses=HARDWARE, reboot=True,
)
@_each_card
def link_type(machine: Machine, nic: Nic, firmware: Firmware) -> Iterator[Finding]:
    """Compare LINK_TYPE_Pn and KEEP_…_LINK_UP_Pn with the port's link layer."""
    layer = port_of(machine, nic)[1].get("link_layer")
    if layer is None or layer.text not in _LAYERS:
        yield skip("cannot read its link layer" if nic.rdma else "no RDMA device", *([layer] if layer else []))
        return
    port = int(nic.address[-1]) + 1 if firmware.card else 0  # mlx5 has a PCI function for each port
    ethernet = layer.text == "Ethernet"
    if not ethernet:
        yield fail(
            "InfiniBand: no Ethernet queues", layer,
            uses=frozenset({Use.ETHERNET}), reboot=bool(firmware.card), brief=True,
            cure=f"RDMA needs no change; for Ethernet: {_to_ethernet(machine, nic, firmware, port)}",
        )
    uses = HARDWARE if ethernet else HARDWARE - {Use.ETHERNET}
    if firmware.trouble:
        yield skip(
            f"{layer.text}; {firmware.trouble}", layer, *firmware.read, uses=uses, needs_root=firmware.needs_root,
        )
        return
    wanted = {f"LINK_TYPE_P{port}": _LAYERS[layer.text]}
    if not _is_bluefield(nic):  # the guide sets these for ConnectX only
        wanted |= {f"KEEP_ETH_LINK_UP_P{port}": int(ethernet), f"KEEP_IB_LINK_UP_P{port}": int(not ethernet)}
    yield _judged(machine, firmware, wanted, warn, good=f"{layer.text}, as its firmware is set", uses=uses)


def _to_ethernet(machine: Machine, nic: Nic, firmware: Firmware, port: int) -> str:
    if firmware.card:
        return _set(machine, firmware, {f"LINK_TYPE_P{port}": 2})
    return "set it on the hypervisor's physical function" if is_nvidia(nic) else "use a port of an Ethernet card"


@check(
    "bluefield-mode", "NIC mode of BlueField",
    why="In DPU mode, the Arm cores of a BlueField own its ConnectX. The host's programs cannot use it directly.",
    cure="sudo mlxconfig -d <mst device> --yes set INTERNAL_CPU_MODEL=1 INTERNAL_CPU_PAGE_SUPPLIER=1 "
         "INTERNAL_CPU_ESWITCH_MANAGER=1 INTERNAL_CPU_IB_VPORT0=1 INTERNAL_CPU_OFFLOAD_ENGINE=1, "
         "then a cold reboot: ipmitool power cycle",
    source=f"{GUIDE}: BlueField NIC", uses=HARDWARE, reboot=True, essential=True,
)
@_each_card
def bluefield_mode(machine: Machine, nic: Nic, firmware: Firmware) -> Iterator[Finding]:
    """Check INTERNAL_CPU_…: the settings that decide about the mode. The cure sets all that the guide sets."""
    if nic.pci is None or not _is_bluefield(nic):
        unknown = nic.address if nic.pci is None else min(nic.pci.vendor, nic.pci.device) < 0
        yield skip("cannot read its PCI device") if unknown else ok("not a BlueField", *_ids(machine, nic))
        return
    decisive = {_ENGINE: _NIC_MODE[_ENGINE]} if nic.pci.device in _BY_ENGINE else _NIC_MODE
    if firmware.trouble:
        yield skip(firmware.trouble, *firmware.read, needs_root=firmware.needs_root)
    elif not firmware.having(decisive):
        yield skip(f"its firmware has no {next(iter(decisive))}", *firmware.read)
    elif firmware.wrong(decisive) or firmware.pending(decisive):
        yield _judged(machine, firmware, decisive | _NIC_MODE, fail, good="", bad="DPU mode: ")
    else:
        yield ok("NIC mode", firmware.shown(decisive))


@check(
    "accurate-send", "Accurate send scheduling",
    why="wait_on_time, which sends packets at a given time, needs the card's real-time clock and its scheduler.",
    cure="only for wait_on_time: "
         "sudo mlxconfig -d <mst device> --yes set ACCURATE_TX_SCHEDULER=1 REAL_TIME_CLOCK_ENABLE=1, "
         "then a cold reboot: ipmitool power cycle",
    source=f"{GUIDE}: Configure ConnectX NIC", uses=frozenset({Use.ETHERNET}), reboot=True,
)
@_each_card
def accurate_send(machine: Machine, nic: Nic, firmware: Firmware) -> Iterator[Finding]:
    """Check ACCURATE_TX_SCHEDULER and REAL_TIME_CLOCK_ENABLE."""
    layer = port_of(machine, nic)[1].get("link_layer")
    if layer and layer.text == "InfiniBand":
        yield skip("only for Ethernet", layer)
    elif firmware.trouble:
        yield skip(firmware.trouble, *firmware.read, needs_root=firmware.needs_root)
    elif len(firmware.having(_ACCURATE_SEND)) < len(_ACCURATE_SEND):
        cure = "use a ConnectX-7 or later with recent firmware"
        yield skip("its firmware does not have it; only wait_on_time needs it", *firmware.read, cure=cure)
    elif wrong := firmware.wrong(_ACCURATE_SEND):
        cure = _set(machine, firmware, wrong)
        yield ok("off; only wait_on_time needs it", firmware.shown(_ACCURATE_SEND), cure=cure)
    else:
        yield _judged(machine, firmware, _ACCURATE_SEND, ok, good="accurate send scheduling is on")


def _is_bluefield(nic: Nic) -> bool:
    model = MODELS.get(nic.pci.device) if nic.pci and is_nvidia(nic) else None
    return model is not None and model.bluefield


def _ids(machine: Machine, nic: Nic) -> list[Reading]:
    return [machine.host.read(f"{nic.pci.folder}/{name}") for name in ("vendor", "device")] if nic.pci else []


def _judged(
    machine: Machine, firmware: Firmware, wanted: dict[str, int], complain: Maker, *, good: str, bad: str = "",
    uses: frozenset[Use] | None = None,
) -> Finding:
    """Judge whether all settings that the card has are as wanted, now and at the next boot."""
    wrong, shown = firmware.wrong(wanted), firmware.shown(wanted)
    if not firmware.having(wanted):
        return skip(f"its firmware has no {next(iter(wanted))}", *firmware.read, uses=uses)
    if wrong:
        cure = _set(machine, firmware, wrong)
        first = next(iter(wrong))
        others = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return complain(f"{bad}{first} is {firmware.settings[first].next}{others}", shown, cure=cure, uses=uses)
    if firmware.pending(wanted):
        return complain(f"{bad}right only after the next cold reboot", shown, cure=COLD_REBOOT, uses=uses)
    return ok(good, shown, uses=uses)


def _set(machine: Machine, firmware: Firmware, values: dict[str, int]) -> str:
    return f"{mlxconfig.set_command(machine, firmware, values)}, then {COLD_REBOOT}"


CHECKS = (link_type, bluefield_mode, accurate_send)
