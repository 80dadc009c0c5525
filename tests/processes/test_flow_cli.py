"""`gpunetio flow`, and the Ethernet rows of `gpunetio stat` and `show`: of a NIC in another process, with traffic."""

import functools
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether

from gpunetio import PortConfig, verbs
from gpunetio.cli import app
from gpunetio.enums import LinkLayer
from gpunetio.fabric.control_socket import ControlSocket
from gpunetio.nic.observe import running
from gpunetio.nic.observe.publish import copies
from gpunetio.nic.observe.rules import GROUP, RQT, RULE, RULES, TABLE, TIR
from json_schema import mistakes, schema
from rules_child import BURST, MAX_PACKET, Child

CHURNS, LOOKS = 300, 20


def run(*args: object, expect: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == expect, result.output
    return result


def error(*args: object, expect: int = 1) -> str:
    (line,) = run(*args, expect=expect).stderr.splitlines()
    return line.removeprefix("gpunetio: error: ")


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    started = Child("soft5")
    try:
        yield started
    finally:
        started.kill()


@pytest.fixture
def nic(child) -> Child:
    """The NIC without rules."""
    child.ask("clear")
    return child


def here(nic: Child) -> tuple[object, ...]:
    return "--pid", nic.pid


def document(nic: Child, *args: object) -> dict[str, Any]:
    (found,) = listed = json.loads(run("flow", *here(nic), "--json", *args).stdout)
    assert mistakes(listed, schema("flow")) == []
    return found


def all_rules(nic: Child) -> list[dict[str, Any]]:
    return [rule for table in document(nic)["tables"] for rule in table["rules"]]


def frame(nic: Child, *layers: Any, nbytes: int = 60) -> str:
    """A frame to the NIC itself, of so many bytes."""
    packet = Ether(src="02:00:00:00:00:05", dst=nic.has["mac"])
    for layer in layers:
        packet /= layer
    raw = bytes(packet)
    assert len(raw) <= nbytes
    return (bytes(packet / bytes(nbytes - len(raw)))).hex()


def ipv4(address: str, mask: str = "255.255.255.255") -> dict[str, str]:
    return {"value": address, "mask": mask}


# --- what it shows -------------------------------------------------------------------------------------------------


def test_rules_have_words_places_and_counts(nic):
    nic.ask("steer", "udp", {"dst": 53}, "rq", tag=7)
    nic.ask("steer", "ipv4", {"src": "10.1.0.0/16"}, "drop", priority=1)
    nic.ask("steer", "eth", {"dst": nic.has["mac"], "ether_type": 0x86DD}, "kernel", priority=2)
    nic.ask("send", frame(nic, IP(src="10.1.2.3"), UDP(dport=53), nbytes=100), 5)  # the first table has it
    nic.ask("send", frame(nic, IP(src="10.1.2.3"), TCP(), nbytes=70), 3)
    nic.ask("send", frame(nic, IPv6(), UDP(dport=9), nbytes=90), 2)
    nic.ask("send", frame(nic, IP(src="10.2.2.3"), TCP()), 1)  # no rule's
    found = document(nic)
    tables = {table["table"]: table for table in found["tables"]}
    first = tables[found["root"]]
    assert next(iter(tables)) == found["root"]
    (dns,) = first["rules"]
    assert dns["match"]["udp_dport"] == {"value": 53, "mask": 0xFFFF}
    assert dns["match"]["ip_protocol"] == {"value": 17, "mask": 0xFF}
    assert (dns["to"]["kind"], dns["to"]["rqns"], dns["tag"]) == ("tir", [nic.has["rqns"][0]], 7)
    assert (dns["counter"]["packets"], dns["counter"]["bytes"]) == (5, 500)
    second = tables[first["miss"]["number"]]
    (net,) = second["rules"]
    assert net["match"] == {"ip_version": {"value": 4, "mask": 15}, "src_ipv4": ipv4("10.1.0.0", "255.255.0.0")}
    assert (net["to"]["kind"], net["counter"]["packets"], net["counter"]["bytes"]) == ("drop", 3, 210)
    assert second["groups"][0]["mask"] == {"ip_version": 15, "src_ipv4": "255.255.0.0"}
    (six,) = tables[second["miss"]["number"]]["rules"]
    assert six["match"]["dmac"] == {"value": nic.has["mac"], "mask": "ff:ff:ff:ff:ff:ff"}
    assert (six["to"]["kind"], six["counter"]["packets"], six["counter"]["bytes"]) == ("kernel", 2, 180)
    text = run("flow", *here(nic)).stdout
    assert text.startswith(f"soft5, process {nic.pid}: {len(tables)} flow tables, ")
    assert f"packets begin in table {found['root']:#x}\n" in text
    assert re.search(rf"^table {found['root']:#x} \(root\): level 0, 1 of \d+ rules; no match: table 0x", text, re.M)
    words = "ip_protocol 17, frag 0, udp_dport 53"
    assert re.search(rf"^ *0 +{words} +TIR 0x\w+: RQ 0x\w+ +7 +0x\w+ +5 +500$", text, re.M)
    assert "compares ip_version, src_ipv4 & 255.255.0.0\n" in text
    assert re.search(r" ip_version 4, src_ipv4 10.1.0.0 & 255.255.0.0 +drop +0x\w+ +3 +210$", text, re.M)
    assert re.search(r"\n +0 +ethertype 0x86dd, dmac [0-9a-f:]{17} +kernel \(table 0x\w+\) +0x\w+ +2 +180\n", text)


def test_rss_names_its_queues(nic):
    nic.ask("steer", "everything", {}, "rss")
    hashed = [rule["to"] for rule in all_rules(nic) if rule["to"]["hash"]]
    assert {tuple(to["rqns"]) for to in hashed} == {tuple(nic.has["rqns"])}
    assert {tuple(to["hash"]) for to in hashed} == {("src_ip", "dst_ip", "l4_sport", "l4_dport"), ("src_ip", "dst_ip")}
    one, other = map(hex, nic.has["rqns"])
    text = run("flow", *here(nic)).stdout
    assert re.search(rf"TIR 0x\w+: RQ {one}, {other} by src_ip, dst_ip *$", text, re.M)
    assert re.search(r"^  group \d+ \(\d+ … \d+\) compares nothing$", text, re.M)
    assert re.search(r"^ *\d+ +all packets +table 0x\w+ ", text, re.M)


def test_a_table_and_a_limit(nic):
    nic.ask("fill", 150)
    table = document(nic)["root"]
    assert len(document(nic, "--table", table)["tables"][0]["rules"]) == 150
    (some,) = document(nic, "--table", hex(table), "--limit", 3)["tables"]
    assert [rule["match"]["udp_dport"]["value"] for rule in some["rules"]] == [1, 2, 3]
    assert some["rules_left_out"] == 147
    text = run("flow", *here(nic), "--table", table).stdout
    assert text.count("\ntable ") == 1
    assert len(re.findall(" udp_dport .* drop ", text)) == 100
    assert "\n  50 of 150 rules left out: --limit 150 shows all\n" in text
    assert "left out" not in run("flow", *here(nic), "--limit", 150).stdout


def test_a_nic_without_rules_shows_none(nic):
    """Its port has tables, which leave everything to the NIC."""
    assert document(nic)["root"]
    assert all_rules(nic) == [rule for rule in all_rules(nic) if rule["to"]["kind"] == "kernel"]


# --- rules that come and go ----------------------------------------------------------------------------------------


def test_each_look_is_of_one_moment(nic):
    """While a program adds and removes a rule again and again, a look finds it whole, or not at all."""
    nic.ask("fill", 20)
    nic.tell("churn", CHURNS)
    for _ in range(LOOKS):
        (found,) = running.rules(pid=nic.pid, timeout=10)
        with found:
            listed = found.tables[RULES]
            tags = [int(row["tag"]) for row in listed if row["tag"]]
            drops = [row for row in listed if row["counter"] and not row["target"]]
            assert len(drops) == 20
            assert len(tags) <= 1
    for rule in all_rules(nic):
        if rule["tag"]:
            assert rule["match"]["udp_dport"]["value"] == 999 + rule["tag"]
            assert rule["to"]["rqns"] == [nic.has["rqns"][0]]
    nic.answer()
    assert [rule["tag"] for rule in all_rules(nic) if rule["tag"]] == []


# --- refused -------------------------------------------------------------------------------------------------------


def test_what_is_not_there(nic):
    text = error("flow", "--table", "0x3ff", *here(nic))
    assert text.startswith(f"there is no flow table 0x3ff: soft5 in process {nic.pid} has 0x")
    assert "'seven' is not a number" in error("flow", "--table", "seven", *here(nic), expect=2)
    assert error("flow", "-d", "soft99").startswith("no software NIC soft99 runs; there are: ")


@pytest.mark.parametrize("port, why", [
    (PortConfig(link_layer=LinkLayer.INFINIBAND), "the port's link layer is InfiniBand"),
    (PortConfig(wire="udp"), "the port's wire is 'udp', which carries no Ethernet frames"),
])
def test_a_port_without_ethernet(nic, port, why):
    with verbs.open("soft6", port=port):
        own = f"soft6 in process {os.getpid()}"
        assert error("flow", "-d", "soft6", "--pid", os.getpid()) == f"flow tables need an Ethernet port: {own}: {why}"
        assert f"soft6, process {os.getpid()}: no flow tables: {why}\n" in run("flow").stdout


@pytest.mark.parametrize("change, problem", [
    ({"group_id": 9}, "a rule belongs to no group"), ({"table_id": 9}, "a rule belongs to no group"),
    ({"fate": 7}, "a rule's fate is none of 1, 2 and 3"),
    ({"fate": 1, "target": 5}, "a rule leads to a TIR that is not there"),
])
def test_rules_that_make_no_sense(change, problem):
    """Another process may send anything."""
    rule = np.zeros(1, RULE)
    for name, value in {"table_id": 1, "group_id": 1, "fate": 2, **change}.items():
        rule[name] = value
    sent = {
        "flow_tables": np.array([(1, 1, 0, 8, 0)], TABLE), "flow_groups": np.array([(1, 1, 0, 7, np.void(72))], GROUP),
        RULES: rule, "tirs": np.zeros(0, TIR), "rqts": np.zeros(0, RQT),
    }
    with ControlSocket(["127.0.0.99"], "soft98", rules=lambda: copies(sent)):
        text = error("flow", "-d", "soft98")
    assert text == f"soft98 in process {os.getpid()} sent rules that do not fit together: {problem}"
    sent["tirs"] = np.zeros(0, RQT)
    with ControlSocket(["127.0.0.99"], "soft98", rules=lambda: copies(sent)):
        assert error("flow", "-d", "soft98").endswith(": other columns in tirs: use the same release")
    with ControlSocket(["127.0.0.99"], "soft98", rules=lambda: ({"tables": {}}, [])):
        assert error("flow", "-d", "soft98").startswith("the NIC has no table 'flow_tables'; it has")


def test_a_nic_that_is_busy_is_asked_again(monkeypatch):
    monkeypatch.setattr(running, "rules", functools.partial(running.rules, timeout=0.2))
    with verbs.open("soft6") as ctx:
        lock = ctx.provider.nic._lock  # type: ignore[attr-defined]
        with lock:
            text = error("flow", "--pid", os.getpid())
        assert text == (
            f"soft6 in process {os.getpid()}: no answer about flow rules; it is busy with a command, or another release"
        )
        assert [found.name for found in running.rules(pid=os.getpid(), timeout=10)] == ["soft6"]


# --- stat and show -------------------------------------------------------------------------------------------------


def looked(nic: Child) -> tuple[dict[str, int], dict[tuple[str, int], dict[str, int]]]:
    """The NIC's counters and its queues' in `gpunetio stat`."""
    (found,) = listed = json.loads(run("stat", "--once", "--json", *here(nic)).stdout)
    assert mistakes(listed, schema("stat")) == []
    return found["counters"], {(queue["kind"], queue["number"]): queue["counters"] for queue in found["queues"]}


def grown(past: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    return {name: value - past[name] for name, value in now.items()}


def test_stat_counts_frames_bytes_and_drops_by_cause(nic):
    nic.ask("steer", "udp", {"dst": 53}, "rq")
    nic.ask("steer", "tcp", {"dst": 80}, "drop")
    past, queues_past = looked(nic)
    to_queue = frame(nic, IP(), UDP(dport=53), nbytes=100)
    nic.ask("send", to_queue, BURST + 4)  # four find no buffer
    assert nic.ask("receive") == BURST
    nic.ask("send", frame(nic, IP(), UDP(dport=53), nbytes=MAX_PACKET + 1), 2)
    nic.ask("send", frame(nic, IP(), TCP(dport=80), nbytes=80), 3)
    nic.ask("send", frame(nic, IP(), TCP(dport=81), nbytes=70), 6)  # no rule
    frames = BURST + 4 + 2 + 3 + 6
    nbytes = 100 * (BURST + 4) + 2 * (MAX_PACKET + 1) + 3 * 80 + 6 * 70
    now, queues_now = looked(nic)
    counters, queues = grown(past, now), {key: grown(queues_past[key], counts) for key, counts in queues_now.items()}
    assert {name: value for name, value in counters.items() if "frame" in name and value} == {
        "rx_frames": frames, "rx_frame_bytes": nbytes, "rx_frame_delivered": BURST,
        "rx_frame_delivered_bytes": 100 * BURST, "rx_frame_no_buffer": 4, "rx_frame_too_long": 2,
        "rx_frame_rule_dropped": 3, "rx_frame_own": 6, "tx_frames": frames, "tx_frame_bytes": nbytes,
    }
    one, other = nic.has["rqns"]
    received = {"frames": BURST, "frame_bytes": 100 * BURST, "no_buffer": 4, "too_long": 2, "not_ready": 0}
    assert queues == {
        ("sq", nic.has["sqn"]): {"frames": frames, "frame_bytes": nbytes}, ("rq", one): received,
        ("rq", other): dict.fromkeys(received, 0),
    }


def test_stat_and_show_print_queues(nic):
    nic.ask("steer", "udp", {"dst": 53}, "rq")
    nic.ask("send", frame(nic, IP(), UDP(dport=53)), BURST + 1)
    counters, queues = looked(nic)
    one, other = nic.has["rqns"]
    sent, received = queues["sq", nic.has["sqn"]], queues["rq", one]
    text = run("stat", "--once", *here(nic)).stdout
    for line in (
        f"rx_frame_bytes +{counters['rx_frame_bytes']}", f"rq {one:#x} no_buffer +{received['no_buffer']}",
        f"sq {nic.has['sqn']:#x} frames +{sent['frames']}",
    ):
        assert re.search(rf"^ +{line} *$", text, re.M), line
    assert f"rq {other:#x}" not in text
    assert f"rq {other:#x} no_buffer" in run("stat", "--once", "--all", *here(nic)).stdout
    samples = run("stat", "--prometheus", *here(nic)).stdout
    labels = f'device="soft5",port="1",pid="{nic.pid}"'
    assert f'gpunetio_rq_no_buffer_total{{{labels},queue="{one:#x}"}} {received["no_buffer"]}\n' in samples
    assert f"gpunetio_rx_frame_bytes_total{{{labels}}} {counters['rx_frame_bytes']}\n" in samples
    assert "# HELP gpunetio_rx_frame_no_buffer_total Frames dropped: their Ethernet queue has no receive" in samples
    assert "# HELP gpunetio_sq_frame_bytes_total Bytes of frames that it has sent.\n" in samples
    (row, _) = shown("rq", nic)
    assert (row["rqn"], row["state"]) == (hex(one), "RDY")
    assert [row[name] for name in ("frames", "bytes", "no buffer", "too long", "not ready")] == [
        *map(str, received.values())
    ]
    (row,) = shown("sq", nic)
    assert (row["sqn"], row["state"]) == (hex(nic.has["sqn"]), "RDY")
    assert [row[name] for name in ("frames", "bytes")] == [*map(str, sent.values())]


def shown(kind, nic):
    """What `gpunetio show` lists, by heading."""
    heading, *rows = (
        re.split(r"  +", line.strip()) for line in run("show", kind, "--wide", *here(nic)).stdout.splitlines()
    )
    return [dict(zip(heading, row, strict=True)) for row in rows]


def test_rates_of_queues(nic):
    watch = run("stat", "--json", *here(nic), "--count", 2, "--interval", 0.1).stdout
    first, second = (json.loads(line)[0]["queues"] for line in watch.splitlines())
    assert {queue["rates"] for queue in first} == {None}
    assert [queue["rates"]["frames"] for queue in second] == [0, 0, 0]


# --- gone ----------------------------------------------------------------------------------------------------------


def test_a_nic_that_has_gone(nic):
    """The last test with this NIC."""
    nic.kill()
    for command in (("flow",), ("show", "rq"), ("stat", "--once")):
        assert error(*command, *here(nic)).startswith(f"no software NIC runs in process {nic.pid}")
