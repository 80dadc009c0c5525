"""`ibv_modify_qp` against Linux: every transition, service and attribute of `qp_state_table`.

data/extract_qp_states.py has extracted data/linux_qp_states.csv from drivers/infiniband/core/verbs.c.
"""

import csv
import errno
from itertools import product

import pytest

from gpunetio.enums import QpState, QpType
from gpunetio.uverbs.call import Refused
from gpunetio.uverbs.qp_rules import check
from repository import DATA

# enum ibv_qp_attr_mask of rdma-core's verbs.h, and enum ib_qp_state
BITS = {
    "STATE": 0, "CUR_STATE": 1, "EN_SQD_ASYNC_NOTIFY": 2, "ACCESS_FLAGS": 3, "PKEY_INDEX": 4, "PORT": 5, "QKEY": 6,
    "AV": 7, "PATH_MTU": 8, "TIMEOUT": 9, "RETRY_CNT": 10, "RNR_RETRY": 11, "RQ_PSN": 12, "MAX_QP_RD_ATOMIC": 13,
    "ALT_PATH": 14, "MIN_RNR_TIMER": 15, "SQ_PSN": 16, "MAX_DEST_RD_ATOMIC": 17, "PATH_MIG_STATE": 18, "CAP": 19,
    "DEST_QPN": 20, "RATE_LIMIT": 25,
}
STATES = {
    "RESET": QpState.RST, "INIT": QpState.INIT, "RTR": QpState.RTR, "RTS": QpState.RTS, "SQD": QpState.SQD,
    "ERR": QpState.ERR,
}
# mlx5 has no command for it (mlx5_ib's `optab`), and refuses it with EINVAL, too.
NOT_ON_MLX5 = {("SQD", "SQD")}


def table() -> dict[tuple[str, str, str], tuple[set[str], set[str]]]:
    with (DATA / "linux_qp_states.csv").open(newline="") as lines:
        return {
            (row["from"], row["to"], row["type"]): (set(row["required"].split()), set(row["optional"].split()))
            for row in csv.DictReader(lines)
            if row["from"] in STATES and row["to"] in STATES and (row["from"], row["to"]) not in NOT_ON_MLX5
        }


LINUX = table()


def takes(before: str, after: str, kind: str, names: set[str]) -> bool:
    mask = sum(1 << BITS[name] for name in names)
    try:
        check(STATES[before], STATES[after], QpType[kind], mask)  # type: ignore[arg-type]
    except Refused as refused:
        return refused.code != errno.EINVAL
    return True


@pytest.mark.parametrize("kind", ["RC", "UC", "UD"])
@pytest.mark.parametrize(("before", "after"), list(product(STATES, STATES)))
def test_as_linux(before, after, kind):
    """With what it requires and each attribute more, and without each that it requires."""
    if (before, after, kind) not in LINUX:
        assert not any(takes(before, after, kind, {"STATE", name}) for name in BITS)
        return
    required, optional = LINUX[before, after, kind]
    for name in BITS:
        assert takes(before, after, kind, required | {"STATE", name}) == (name in required | optional | {"STATE"}), name
    for name in required:
        assert not takes(before, after, kind, required - {name} | {"STATE"}), name
    assert takes(before, after, kind, required | optional | {"STATE"})
