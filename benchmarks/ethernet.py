"""Ethernet frames in the software NIC: what they cost the engine, and what processes exchange, each beside its peer."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial

from ethernet_engine import MASKS, paths, pipes, steering
from ethernet_pair import pair
from ethernet_results import Result, progress, show
from ethernet_times import lateness

JOBS: dict[str, Callable[[int], list[Result]]] = {
    "steering": partial(steering, masks=MASKS),
    "steering-one-mask": partial(steering, masks=1),
    "steering-pipes": pipes,
    "engine-64": partial(paths, nbytes=64),
    "engine-1500": partial(paths, nbytes=1500),
    "pair-64": partial(pair, nbytes=64),
    "pair-1500": partial(pair, nbytes=1500),
    "wait-time": lateness,
}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side")
    parser.add_argument("--only", metavar="NAME", choices=JOBS, action="append", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    results: list[Result] = []
    for name in args.only or JOBS:
        progress(name)
        results += JOBS[name](args.rounds)
    progress("done")
    if args.json:
        print(json.dumps([result.summary() for result in results], indent=2, ensure_ascii=False))
    else:
        show(results)


if __name__ == "__main__":
    main()
