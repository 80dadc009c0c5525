"""How the NIC's state is laid out: offsets are computed, and every field says who writes it and what it is."""

import json

import numpy as np
import pytest

from gpunetio.memory import HostMemory
from gpunetio.nic.observe.publish import Publication
from gpunetio.nic.observe.running import Observed
from gpunetio.nic.state.nic import NIC
from gpunetio.nic.state.qp import QP_CONNECTION, QP_ROW, QP_SETUP_BYTES
from gpunetio.nic.state.record import LINE, record
from gpunetio.nic.state.tables import Table
from gpunetio.nic.state.worker import WORKER


def test_offsets_follow_the_order():
    row = record("row", """
        # set-up
        number  i64     command    number
        gid     raw[16] nobody     a GID
        # state
        counts  i64[3]  engine     three counts
        done    i64     responder  how many
    """)  # fmt: skip
    assert row.offsets == {"number": 0, "gid": 8, "counts": LINE, "done": LINE + 24}
    assert row.size == 2 * LINE
    assert row.dtype["counts"].shape == (3,)
    assert record("small", "number i64 command number", align=32).size == 32


@pytest.mark.parametrize("field", ["count i64", "count i64 engine", "count i64 somebody how many", "count"])
def test_a_field_without_a_writer_or_a_meaning(field):
    with pytest.raises(ValueError, match=r"row\.count needs a type, one of the writers .*, and a meaning"):
        record("row", f"number i64 command number\n{field}")


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
    other = record("cq_row", """
        cqn    i64  command  number
        # moved
        later  i64  engine   a field that this release does not have
        pi     i64  engine   CQEs that were written
    """)  # fmt: skip
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
