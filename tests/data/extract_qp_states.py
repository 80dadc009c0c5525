"""Extract the attributes of queue pairs that Linux takes in each transition.

    python extract_qp_states.py verbs.c > linux_qp_states.csv

The argument is drivers/infiniband/core/verbs.c of a Linux source tree, or of MLNX_OFED, which adds attributes of its
own. The table was extracted from MLNX_OFED 4.2; without those attributes it says the same as Linux 4.6.
"""

import csv
import re
import sys
from pathlib import Path

TYPES = ("RC", "UC", "UD")
OF_OFED = {"FLOW_ENTROPY", "GROUP_RSS", "OFFLOAD_TYPE"}  # not in ibv_qp_attr_mask


def entries(text: str) -> dict[str, str]:
    """Return the designated initializers `[NAME] = …` on the outermost level of a C initializer, comments removed."""
    found: dict[str, str] = {}
    for match in re.finditer(r"\[(\w+)\]\s*=\s*", text):
        before = text[: match.start()]
        if before.count("{") == before.count("}"):
            found[match[1]] = value_at(text, match.end())
    return found


def value_at(text: str, start: int) -> str:
    """Return the initializer that begins at `start`: what is in its braces, or everything up to the next comma."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in "{(") - (text[at] in "})")
        if depth < 0 or (depth == 0 and text[at] == ","):
            return text[start:at].strip()
        if depth == 0 and text[at] == "}":
            return text[start + 1 : at]
    return text[start:].strip()


def attributes(members: str, name: str, kind: str) -> str:
    """Return the attributes of one service in `.req_param` or `.opt_param`, sorted."""
    match = re.search(rf"\.{name}\s*=\s*", members)
    wanted = entries(value_at(members, match.end())).get(f"IB_QPT_{kind}", "") if match else ""
    return " ".join(sorted(set(re.findall(r"IB_QP_(\w+)", wanted)) - OF_OFED))


def main() -> None:
    source = re.sub(r"/\*.*?\*/", "", Path(sys.argv[1]).read_text(), flags=re.DOTALL)
    start = re.search(r"qp_state_table\[.*?\]\s*=\s*", source)
    if start is None:
        sys.exit(f"{sys.argv[1]} has no qp_state_table: give drivers/infiniband/core/verbs.c")
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(("from", "to", "type", "required", "optional"))
    for before, moves in entries(value_at(source, start.end())).items():
        for after, members in entries(moves).items():
            if "valid" in members:
                for kind in TYPES:
                    states = (state.removeprefix("IB_QPS_") for state in (before, after))
                    lists = (attributes(members, name, kind) for name in ("req_param", "opt_param"))
                    rows.writerow((*states, kind, *lists))


if __name__ == "__main__":
    main()
