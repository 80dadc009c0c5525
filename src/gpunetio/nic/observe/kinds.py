"""The types of objects that `gpunetio show` lists, and the table of the NIC that contains each."""

from __future__ import annotations

KINDS = {
    "qp": "qps", "cq": "cqs", "srq": "srqs", "mr": "mkeys", "gid": "gids", "pd": "pds", "umem": "umems",
    "uar": "uar_pages", "eq": "eqs", "sq": "sqs", "rq": "rqs",
}
