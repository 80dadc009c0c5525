"""How the NIC's state is laid out: offsets are computed, and every field says who writes it and what it is."""

import json
from typing import Annotated

import numpy as np
import pytest

from gpunetio.formats.layout import I32, I64
from gpunetio.memory import HostMemory
from gpunetio.nic.observe.publish import Publication
from gpunetio.nic.observe.running import Observed
from gpunetio.nic.state.nic import NIC
from gpunetio.nic.state.qp import QP_CONNECTION, QP_ROW, QP_SETUP_BYTES
from gpunetio.nic.state.record import LINE, State, command, engine, nobody, responder
from gpunetio.nic.state.tables import Table
from gpunetio.nic.state.worker import WORKER


class Row(State):
    number: I64 = command("number")
    gid: Annotated[int, "raw[16]"] = nobody("a GID")
    counts: Annotated[int, "i64[3]"] = engine("three counts", line=True)
    done: I64 = responder("how many")


class LongerRow(Row):
    more: I32 = engine("follows the last field")
    apart: I64 = engine("on a line of its own", line=True)


def test_offsets_follow_the_order():
    assert Row.entry.offsets == {"number": 0, "gid": 8, "counts": LINE, "done": LINE + 24}
    assert Row.size == Row.entry.size == 2 * LINE
    assert Row.entry.dtype["counts"].shape == (3,)
    assert LongerRow.entry.offsets == {**Row.entry.offsets, "more": LINE + 32, "apart": 2 * LINE}
    assert LongerRow.size == 3 * LINE

    class Small(State, align=32):
        number: I64 = command("number")

    assert Small.size == 32


def test_what_fields_mean():
    assert Row.meanings == {"number": "number", "gid": "a GID", "counts": "three counts", "done": "how many"}
    assert LongerRow.meanings == {**Row.meanings, "more": "follows the last field", "apart": "on a line of its own"}


@pytest.mark.parametrize("declared", [0, "engine", engine("")])
def test_a_field_without_a_writer_or_a_meaning(declared):
    with pytest.raises(TypeError, match=r"Row\.count needs a writer and a meaning, such as engine\('CQEs written'\)"):
        type("Row", (State,), {"__annotations__": {"count": I64}, "count": declared})


def test_a_field_without_a_type():
    with pytest.raises(TypeError, match=r"Row\.count is declared as <class 'int'>: types of fields are I64, U32, BE16"):
        type("Row", (State,), {"__annotations__": {"count": int}, "count": engine("how many")})


def test_what_commands_prepare_of_a_qp():
    """The engine copies the first bytes of a prepared row; its own positions are behind them, in other cache lines."""
    prepared = {name for name, offset in QP_ROW.offsets.items() if offset < QP_SETUP_BYTES}
    assert {"qpn", "state", "rights", "sq_addr", "wire", "drain", "channel", "events", "min_rnr_code"} <= prepared
    assert not {"sq_ci", "sq_pi", "una_psn", "expect_psn", "rq_ci", "stream", "pending", "failed", "life"} & prepared
    assert QP_SETUP_BYTES % LINE == 0
    connection = {"rights", "remote_qpn", "wire", "mtu", "sq_psn", "timeout_ns", "drain"}
    assert connection <= set(QP_CONNECTION) <= prepared
    assert not {"qpn", "state", "sq_addr", "send_cq", "watch", "channel", "flights"} & set(QP_CONNECTION)


@pytest.mark.parametrize("host", ["command_seq", "command_bytes", "stop", "busy"])
@pytest.mark.parametrize("engine", ["command_done", "asleep", "now", "active_count"])
def test_the_host_and_the_engine_write_to_different_cache_lines(host, engine):
    assert WORKER.offsets[host] // LINE != WORKER.offsets[engine] // LINE


def test_a_worker_begins_with_the_nic():
    """Compiled functions take a worker's record for the NIC's."""
    assert {name: WORKER.offsets[name] for name in NIC.offsets} == NIC.offsets
    assert min(offset for name, offset in WORKER.offsets.items() if name not in NIC.offsets) >= NIC.size


def test_a_nic_of_another_release_is_read_by_its_own_layout():
    """A publication describes its rows, so an observer does not take the fields of its own release."""

    class Other(State):
        cqn: I64 = command("number")
        later: I64 = engine("a field that this release does not have", line=True)
        pi: I64 = engine("CQEs that were written")

    other = Other.entry
    table = Table("CQ", other, 16)
    table.rows[5] = (5, 77, 1234)
    memory = HostMemory(4096, shared=True)
    publication = Publication({"cqs": table}, (memory, 64, 1))
    description, fds = publication()
    told = {"name": "soft0", "addresses": ["127.0.0.1"], **json.loads(json.dumps(description))}
    with Observed(1, told, fds) as nic:
        rows = nic.tables["cqs"]
        assert rows.dtype == other.dtype
        assert [(int(row["cqn"]), int(row["pi"])) for row in rows] == [(5, 1234)]
        assert np.array_equal(rows["later"], [77])
    publication.close()
    table.close()
    memory.close()
