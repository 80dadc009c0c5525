"""What commands print with --json is as their schemas in `gpunetio/cli/schemas` say: all of it, and nothing else."""

import json
import os
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from click.testing import CliRunner

import gpunetio as gn
from gpunetio import eth
from gpunetio.bench import report
from gpunetio.bench.loopback import Loopback
from gpunetio.bench.measure import measure
from gpunetio.bench.options import BENCHMARKS, Options
from gpunetio.cli import app
from gpunetio.flow import FlowPort, match
from gpunetio.nic.observe.kinds import KINDS
from gpunetio.nic.observe.words import QUEUE_KINDS
from gpunetio.nic.state.work_queue import QueueKind
from json_schema import STRICT, mistakes, schema
from repository import DATA, ROOT

MACHINES = DATA / "doctor" / "machines"
HERE = ("-d", "soft0", "--pid", os.getpid())
SCHEMAS = sorted(each.name.removesuffix(".json") for each in (files("gpunetio.cli") / "schemas").iterdir())


def printed(*args: object) -> Any:
    """What a command prints, as a document."""
    result = CliRunner().invoke(app, [*map(str, args), "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return json.loads(result.stdout)


@pytest.fixture
def nic() -> Iterator[gn.Context]:
    """A NIC of this process with an object of each kind, and with a peer on a wire."""
    with gn.open("soft0") as nic, gn.open("soft1") as other:
        ends, others = [], []
        for ctx in (nic, other):
            pd, cq = ctx.create_pd(), ctx.create_cq(4)
            others += [pd.register(bytearray(64), gn.Access.LOCAL_WRITE), pd.create_srq(4)]
            ends.append(pd.create_qp(sq_wr=4, rq_wr=4, send_cq=cq, receive_cq=cq))
        ends[0].connect(ends[1])
        pd = nic.create_pd()
        with eth.ManagedRxq(pd, 16, 1600) as rxq, eth.CpuTxq(pd, 16), FlowPort(nic) as port:
            port.steer(match.udp(dst=53), to=rxq)
            yield nic


def test_a_benchmark_on_the_twin_of_a_gpu():
    """By options of the command: queues and payload are in memory that only kernels and the NIC reach."""
    command = ["put_bw", "--loopback", "-s", "64,4096", "-g", "twin", "--nic-engine", "twin", "--target", "cpu",
               "--payload-memory", "gpu", "--json"]
    done = CliRunner().invoke(app, command)
    document = json.loads(done.stdout)
    assert mistakes(document, schema("benchmark")) == []
    settings = document["settings"]
    assert (settings["ring_memory"], settings["payload_memory"], settings["port"]["engine"]) == ("NEAR", "GPU", "twin")
    assert [row["validated"] for row in document["results"]] == [True] * 2


def test_the_settings_of_a_benchmark(tmp_path):
    port = gn.PortConfig(("127.0.0.9",), "udp", faults=gn.Faults(loss=0.01), capture=tmp_path / "capture")
    options = Options(
        benchmark=BENCHMARKS["put_bw"], gpu="host", device="soft6", nic_port=port, sizes=(500, 1000), iterations=10,
        nic_handler=gn.NicHandler.CPU_PROXY, payload_memory=gn.MemType.CPU_GPU,
    )
    with Loopback(options) as run:
        document = json.loads(report.as_json(run, [measure(run, 0, 500)]))
    assert mistakes(document, schema("benchmark")) == []
    settings = document["settings"]
    assert (settings["sizes"], settings["nic_handler"], settings["scope"]) == ([500, 1000], "CPU_PROXY", "THREAD")
    assert (settings["port"]["wire"], settings["port"]["faults"]["loss"]) == ("udp", 0.01)
    assert settings["port"]["capture"] == str(tmp_path / "capture")
    assert document["version"] == gn.__version__


def test_devices():
    document = printed("devices")
    assert mistakes(document, schema("devices")) == []
    first = next(each for each in document if each["name"] == "soft0")
    assert (first["link_layer"], first["ports"][0]["state"], first["ports"][0]["active_mtu"]) == (
        "ETHERNET", "ACTIVE", 4096,
    )
    assert first["roce_version"] == ["RoCE v2"]
    assert first["ports"][0]["gids"][0] == {"index": 0, "gid": "::ffff:127.0.0.1", "type": "ROCE_V2"}
    assert [each["name"] for each in printed("devices", "-d", "soft1")] == ["soft1"]


def test_devices_list():
    document = printed("devices", "-l")
    assert mistakes(document, schema("devices-list")) == []
    assert {"name": "soft0", "provider": "soft", "description": "software NIC (CPU engine)"} in document


@pytest.mark.parametrize("kind", KINDS)
def test_show(nic, kind):
    document = printed("show", kind, *HERE)
    assert document
    assert mistakes(document, schema("show")) == []


def test_show_has_names_where_numbers_stand_for_something(nic):
    (qp,) = printed("show", "qp", *HERE)
    assert {name: qp[name] for name in ("state", "service", "rights", "wire", "peer")} == {
        "state": "RTS", "service": "RC", "rights": ["REMOTE_WRITE", "REMOTE_READ", "REMOTE_ATOMIC"], "wire": "memory",
        "peer": "::ffff:127.0.0.2",
    }
    assert qp["kind"] == "CONNECTED_SEND"
    assert {kind.value: kind.name for kind in QueueKind} == QUEUE_KINDS
    assert qp["send_cq"] == qp["recv_cq"]
    assert qp["send_cq"] in {cq["cqn"] for cq in printed("show", "cq", *HERE)}
    (sq,), (rq,) = printed("show", "sq", *HERE), printed("show", "rq", *HERE)
    assert (sq["state"], sq["kind"], rq["state"]) == ("RDY", "ETHERNET_SEND", "RDY")
    (mr,) = (each for each in printed("show", "mr", *HERE) if each["pdn"] == qp["pdn"])
    assert mr["access"] == ["LOCAL_WRITE"]
    gid = printed("show", "gid", "0", *HERE)[0]
    assert (gid["gid"], gid["version"], gid["mac"]) == ("::ffff:127.0.0.1", "RoCE v2", "02:00:7f:00:00:01")
    assert {uar["kind"] for uar in printed("show", "uar", *HERE)} <= set(gn.enums.UarAllocationType.__members__)


def test_stat(nic):
    document = printed("stat", "--once", *HERE)
    assert document
    assert mistakes(document, schema("stat")) == []


def test_flow(nic):
    (document,) = listed = printed("flow", *HERE)
    assert mistakes(listed, schema("flow")) == []
    assert document["tables"][0]["rules"][0]["match"]["udp_dport"] == {"value": 53, "mask": 0xFFFF}


@pytest.mark.parametrize("machine", sorted(MACHINES.glob("*.json")), ids=lambda path: path.stem)
def test_machines(machine):
    assert mistakes(printed("topo", "--all", "--replay", machine), schema("topo")) == []
    assert mistakes(printed("doctor", "--replay", machine), schema("doctor")) == []


def test_conformance():
    document = printed("conformance", "device")
    assert mistakes(document, schema("conformance")) == []
    assert (document["passed"], document["device"], document["peer"]) == (True, "soft0", "soft0")
    listed = printed("conformance", "-l", "device")
    assert mistakes(listed, schema("conformance-list")) == []
    assert [each["name"] for each in listed] == [each["name"] for each in document["results"]]


def test_litmus():
    assert mistakes(printed("selftest", "litmus", "--seconds", 0.02, "-g", "host"), schema("litmus")) == []


def test_every_command_with_json_has_a_schema():
    """And every schema has a command, by name; benchmarks share one."""
    commands = {**app.commands, **app.commands["selftest"].commands}  # type: ignore[attr-defined]
    having = {name for name, one in commands.items() if any("--json" in each.opts for each in one.params)}
    named = {"benchmark" if name in BENCHMARKS else name for name in having}
    assert named == {name.removesuffix("-list") for name in SCHEMAS}


def test_the_page_names_every_schema():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert sorted(re.findall(r"^\| `(\S+)\.json` \|", page, re.MULTILINE)) == SCHEMAS


@pytest.mark.parametrize("document, message", [
    ([{"name": "a", "provider": "soft"}], "$[0]: 'description' is a required property"),
    (
        [{"name": "a", "provider": "soft", "description": "", "x": 1}],
        "$[0]: Additional properties are not allowed ('x' was unexpected)",
    ),
    ([{"name": 1, "provider": "soft", "description": ""}], "$[0].name: 1 is not of type 'string'"),
    ([{"name": "a", "provider": "", "description": ""}], "$[0].provider: '' is not one of ['mlx5', 'ibverbs', 'soft']"),
    ({}, "$: {} is not of type 'array'"),
])
def test_the_checker_finds_mistakes(document, message):
    assert mistakes(document, schema("devices-list")) == [message]


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_have_no_unknown_keywords(name):
    assert mistakes(schema(name), STRICT) == []


def test_an_unknown_keyword_is_found_at_any_depth():
    misspelt = {"type": "object", "properties": {"a": {"items": {"enums": ["b"]}}}}
    assert mistakes(misspelt, STRICT) != []
