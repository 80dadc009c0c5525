"""The kinds of objects that a NIC shows, and the tables in which it has them."""

from __future__ import annotations

KINDS = {
    "qp": "qps", "cq": "cqs", "srq": "srqs", "mr": "mkeys", "gid": "gids", "pd": "pds", "umem": "umems",
    "uar": "uar_pages", "eq": "eqs", "sq": "sqs", "rq": "rqs",
}
