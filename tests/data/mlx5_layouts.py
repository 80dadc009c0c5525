"""Write mlx5_layouts.csv and mlx5_numbers.csv: what public headers say about what gpunetio.formats declares.

    python tests/data/mlx5_layouts.py linux-6.12=mlx5_ifc.h linux-6.12=device.h linux-6.12=qp.h \\
        rdma-core-65=mlx5_ifc.h rdma-core-65=if_ether.h rdma-core-65=verbs.h rdma-core-65=tm_types.h \\
        rdma-core-65=mlx5dv.h rdma-core-65=wqe.h dpdk-26.11rc0=mlx5_prm.h

The headers are in include/linux/mlx5 of Linux, providers/mlx5 and libibverbs of rdma-core, and drivers/common/mlx5
of DPDK. A row of the layouts has a structure and a field by the names of the header, the field's first bit and number
of bits (0 if it runs to the end of a mailbox), and the sources that agree on them. A row without a field is the size of
the structure. A row of the numbers has an enumerator, its value, and the sources.
"""

import csv
import operator
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from gpunetio.formats import commands, contexts, cqe, events, flow, wqe
from gpunetio.formats import ethernet_queues as ethernet
from gpunetio.formats.layout import BitStruct, Entry

MODULES = (commands, contexts, cqe, ethernet, events, flow, wqe)
# Structures that a header does not call mlx5_ifc_NAME_bits.
OTHER_NAMES = {
    "mlx5_cqe64": "cqe64", "mlx5_err_cqe": "err_cqe64", "mlx5_error_cqe": "err_cqe64", "mlx5_eqe": "eqe",
    "mlx5_wqe_ctrl_seg": "ctrl_seg", "mlx5_wqe_raddr_seg": "raddr_seg", "mlx5_wqe_av": "av_seg",
    "mlx5_wqe_data_seg": "data_seg", "mlx5_wqe_inline_seg": "inline_header", "mlx5_wqe_atomic_seg": "atomic_seg",
    "mlx5_wqe_masked_atomic_seg": "masked_atomic_seg", "mlx5_wqe_eth_seg": "eth_seg",
    "mlx5_wqe_wseg": "wait_value_seg", "mlx5_mmo_metadata_seg": "mmo_seg", "mlx5_wqe_srq_next_seg": "srq_next_seg",
    "mlx5_klm": "klm", "mlx5_ifc_lag_context_bits": "lagc", "mlx5_ifc_dest_format_struct_bits": "dest_format",
}
# Bits of the types in the C structures of queue entries. In mlx5_ifc.h, a u8 stands for one bit.
TYPES = {
    name: bits
    for bits, names in ((8, "u8 uint8_t __u8"), (16, "__be16 uint16_t u16 rte_be16_t"),
                        (32, "__be32 uint32_t rte_be32_t"), (64, "__be64 uint64_t rte_be64_t"))
    for name in names.split()
}
# Enumerations by the prefix of their names in headers. The shorter of two prefixes comes later.
ENUMERATIONS: dict[str, type[IntEnum]] = {
    "MLX5_CMD_OP_": commands.Opcode, "MLX5_CMD_STAT_": commands.Status, "MLX5_EVENT_TYPE_": events.EventType,
    "MLX5_OPCODE_": wqe.WqeOpcode, "MLX5_CQE_SYNDROME_": cqe.Syndrome, "MLX5_CQE_": cqe.CqeOpcode,
}
RESERVED = re.compile(r"(reserved|rsvd|rsv)\w*")


@dataclass
class Layout:
    """A structure: its fields as (name, first bit, bits), its bits, and the alignment of its largest member."""

    fields: list[tuple[str, int, int]] = field(default_factory=list)
    bits: int = 0
    alignment: int = 1


class Source:
    """The structures of the C headers of one project, read one after the other."""

    def __init__(self) -> None:
        self.structures: dict[str, Layout] = {}
        self.numbers: dict[str, str] = {}

    def read(self, text: str) -> None:
        """Add the structures of a header. Those whose types are unknown are left out."""
        text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)
        text = re.sub(r"^#if \(.*?^#endif|__rte_packed_begin", " ", text, flags=re.M | re.S)
        self.numbers |= re.findall(r"^\s*(?:#define\s+)?(\w+)\s*[=\s]\s*(\w+),?\s*$", text, flags=re.M)
        text = re.sub(r"^[ \t]*#(?:.*\\\n)*.*$", " ", text, flags=re.M)
        text = re.sub(r"DECLARE_FLEX_ARRAY\((.+), (\w+)\);", r"\1 \2[];", text)
        for found in re.finditer(r"^(struct|union)\s+(\w+)\s*\{(.*?^\}.*?);", text, flags=re.M | re.S):
            self._one_bit = found[2].startswith("mlx5_ifc_")
            self._packed = "packed" in found[3]
            self._tokens = (token[0] for token in re.finditer(r"\w+|[{}\[\];:*]", found[3]))
            with suppress(KeyError, ValueError):
                self.structures[found[2]] = self._body(union=found[1] == "union")

    def _body(self, *, union: bool) -> Layout:
        """Return the layout of the members up to the closing brace."""
        layout, end = Layout(), 0
        while (word := next(self._tokens)) != "}":
            one, inline, words = self._type(word)
            name, count, in_word = self._declarator(words)
            if in_word:
                one, count = Layout(bits=1), in_word
            alignment = 1 if self._packed else one.alignment
            at = 0 if union else -(-end // alignment) * alignment
            if name:
                layout.fields.append((name, at, one.bits * count))
            layout.fields += [
                (f"{name}.{sub}" if name else sub, at + to, bits)
                for sub, to, bits in one.fields
                if inline or (count == 1 and (bits == 0 or not self._one_bit))  # a list at the end, or a queue entry
            ]
            end = max(end, at + one.bits * count)
            layout.alignment = max(layout.alignment, alignment)
        layout.bits = -(-end // layout.alignment) * layout.alignment
        return layout

    def _type(self, word: str) -> tuple[Layout, bool, list[str]]:
        """Return a member's type, whether it is declared in place, and the words that are read behind it already."""
        if word not in ("struct", "union"):
            bits = 1 if self._one_bit else TYPES[word]
            return Layout(bits=bits, alignment=bits), False, []
        tag = next(self._tokens)
        if tag == "{" or (following := next(self._tokens)) == "{":
            return self._body(union=word == "union"), True, []
        return self.structures[tag], False, [following]

    def _declarator(self, words: list[str]) -> tuple[str, int, int]:
        """Return a member's name, the number of its elements (0: no end), and its bits if it is a bit-field."""
        words += (word for word in iter(self._tokens.__next__, ";") if word != "__packed")
        count = 1
        for number in re.findall(r"\[ (\w*) ?\]", " ".join(words)):
            while number in self.numbers:
                number = self.numbers[number]
            count *= int(number or "0", 0)
        in_word = int(words[words.index(":") + 1]) if ":" in words else 0
        return words[0] if words else "", count, in_word


def declared() -> dict[str, set[str | int]]:
    """Return the names and the first bits of the fields of our structures. Other fields need no row."""
    fields: dict[str, set[str | int]] = {"masked_atomic_seg": {0, 64, 128, 192}}
    for struct in (struct for module in MODULES for struct in vars(module).values()):
        if isinstance(struct, BitStruct):
            fields[struct.name] = {"", *struct.fields, *(each.offset for each in struct.fields.values())}
        elif isinstance(struct, Entry):
            fields[type(struct).__name__] = {"", *struct.offsets, *(8 * byte for byte in struct.offsets.values())}
    return fields


def rows(sources: dict[str, Source]) -> Iterator[tuple[str, str, str, int, str]]:
    """Yield structure, field, first bit, bits, and the sources of each fact."""
    facts: dict[tuple[str, str, int, int], dict[str, None]] = {}
    ours = declared()
    names = {f"mlx5_ifc_{name}_bits": name for name in ours} | OTHER_NAMES
    for theirs, struct in sorted(names.items(), key=operator.itemgetter(1, 0)):
        for label, source in sources.items():
            if layout := source.structures.get(theirs):
                for name, at, bits in [("", 0, layout.bits), *layout.fields]:
                    if not RESERVED.fullmatch(name.rpartition(".")[2]):
                        facts.setdefault((struct, name, at, bits), {})[label] = None
    wanted = {(struct, name) for struct, name, at, _ in facts if {name, at} & ours[struct]}
    for (struct, name, at, bits), found in facts.items():
        if (struct, name) in wanted:
            yield struct, name, f"{at:#x}", bits, " ".join(found)


def numbers(sources: dict[str, Source]) -> Iterator[tuple[str, str, str]]:
    """Yield the enumerators that have the value or the name of one of ours, with value and sources."""
    facts: dict[tuple[str, int], list[str]] = {}
    for label, source in sources.items():
        for name, text in source.numbers.items():
            prefix = next(filter(name.startswith, ENUMERATIONS), None)
            if prefix and re.fullmatch(r"0[xX][0-9a-fA-F]+|\d+", text):
                ours, value = ENUMERATIONS[prefix], int(text, 0)
                if value in list(ours) or name.removeprefix(prefix) in ours.__members__:
                    facts.setdefault((name, value), []).append(label)
    for (name, value), found in sorted(facts.items()):
        yield name, f"{value:#x}", " ".join(found)


def write(file: str, head: tuple[str, ...], table: Iterable[tuple[str | int, ...]]) -> None:
    """Write a table into this folder."""
    with Path(__file__).with_name(file).open("w", newline="") as out:
        csv.writer(out, lineterminator="\n").writerows([head, *table])


def main() -> None:
    """Read the headers that the arguments name, as SOURCE=FILE, and write the tables."""
    sources: dict[str, Source] = {}
    for label, file in (argument.split("=", 1) for argument in sys.argv[1:]):
        sources.setdefault(label, Source()).read(Path(file).read_text())
    write("mlx5_layouts.csv", ("struct", "field", "bit_offset", "width", "sources"), rows(sources))
    write("mlx5_numbers.csv", ("name", "value", "sources"), numbers(sources))


if __name__ == "__main__":
    main()
