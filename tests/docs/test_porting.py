"""docs/porting.md is complete and true: every C symbol has its row, and every name that a row gives is there."""

import csv
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import gpunetio
import gpunetio.eth.headers
from errands import Errand, Errands
from gpunetio import Dpa, Gpu, core, device, dma, enums, errors, eth, flow, rdma, verbs
from gpunetio.formats.layout import Record
from repository import DATA, ROOT

TABLE = ROOT / "docs" / "porting.md"
SYMBOLS = [DATA / f"{where}_symbols.csv" for where in ("host", "device")]
WHERE = (verbs, gpunetio, enums, errors, device, core, dma, eth, flow, rdma)  # as the page says
NOTHING = ("not needed: ", "not there yet", "not supported: ")
NAME = re.compile(r"(?P<path>\w+(?:\.\w+)*)(?:\((?P<arguments>\w+=(?:, \w+=)*)\))?")


def rows() -> list[tuple[str, list[str], str]]:
    """Of each row its heading, its C symbols and what stands on the right."""
    found, heading = [], ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("| `"):
            left, right = line.strip("| ").split(" | ")
            found.append((heading, re.findall(r"`(\w+)`", left), right))
    return found


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@pytest.fixture(scope="module")
def objects() -> Iterator[dict[str, object]]:
    """An object of each class whose attributes are set when it is made, by the names of the class and its bases."""
    with ExitStack() as stack:
        ctx = stack.enter_context(verbs.open("soft0"))
        pd, cq, gpu = ctx.create_pd(), ctx.create_cq(4), stack.enter_context(Gpu("host"))
        memory = gpu.alloc(4096)
        errand, end = Errand(Errands(pd)), stack.enter_context(rdma.Rdma(pd))
        _, connection = end.export()
        remote = core.RemoteMemory(0, 8, 0)
        opened = [
            ctx, pd, cq, gpu, memory, pd.create_qp(sq_wr=1, send_cq=cq), pd.create_srq(4), ctx.create_uar(),
            ctx.register_umem(memory), pd.register(memory), ctx.create_comp_channel(), ctx.query_device(),
            gpu.create_qp(pd, 4), stack.enter_context(Dpa(ctx)), eth.CyclicRxq(gpu, pd, 512, 64),
            gpu.create_semaphore(1), core.MemoryMap(pd, memory), dma.Dma(pd), errand.context, errand,
            rdma.Receive(end), rdma.Read(connection, remote, bytearray(8)), rdma.CompareSwap(connection, remote, 0, 0),
            rdma.SyncEventGet(connection, remote), end, connection,
        ]
        yield {kind.__name__: each for each in opened for kind in type(each).__mro__}


def is_record(found: object) -> bool:
    """Whether it is what kernels see of an object: the page means the object."""
    return isinstance(found, type) and issubclass(found, Record)


def resolve(name: str, objects: dict[str, object]) -> None:
    """LookupError unless a name in the page's notation means something."""
    match = NAME.fullmatch(name)
    if match is None:
        raise LookupError(f"{name} is no name in the notation of the page")
    first, *rest = match["path"].split(".")
    place = next((module for module in WHERE if hasattr(module, first) and not is_record(getattr(module, first))), None)
    if place is None:
        raise LookupError(f"{name}: there is no {first}")
    found = getattr(place, first)
    for attribute in rest:
        # What a class does not have itself, its fields and its objects may have.
        if not hasattr(found, attribute):
            if attribute in getattr(found, "__dataclass_fields__", {}):
                found = None
                continue
            found = objects.get(getattr(found, "__name__", ""))
        if not hasattr(found, attribute):
            raise LookupError(f"{name}: there is no {attribute}")
        found = getattr(found, attribute)
    if match["arguments"]:
        if not callable(found):
            raise LookupError(f"{name} cannot be called")
        taken = inspect.signature(found).parameters
        for argument in re.findall(r"\w+", match["arguments"]):
            if argument not in taken:
                raise LookupError(f"{name}: it takes {', '.join(taken)}, and no {argument}")


def test_every_symbol_has_one_row_under_its_header():
    lines = [line for path in SYMBOLS for line in csv.DictReader(path.read_text().splitlines())]
    wanted = Counter((line["header"], line["symbol"]) for line in lines)
    assert set(wanted.values()) == {1}
    listed = Counter((heading, symbol) for heading, symbols, _ in rows() for symbol in symbols)
    assert wanted - listed == Counter(), "symbols without a row"
    assert listed - wanted == Counter(), "rows of unknown symbols, or symbols with a second row"


def test_every_name_is_there(objects):
    names = {name for _, _, right in rows() for name in code(right)}
    wrong = []
    for name in sorted(names):
        try:
            resolve(name, objects)
        except LookupError as error:
            wrong.append(str(error))
    assert wrong == []


def test_a_row_names_something_or_says_why_not():
    for _, symbols, right in rows():
        assert code(right) or right.startswith(NOTHING), f"{symbols}: {right}"


def test_attributes_of_attributes_are_not_written():
    """So that every name is a class and what it has, which is what `resolve` looks up."""
    assert [name for _, _, right in rows() for name in code(right) if name.partition("(")[0].count(".") > 1] == []


@pytest.mark.parametrize("name", [
    "Qp", "QP.nothing", "QP.modify(attributes=)", "PD.create_qp(sq_wr=, size=)", "QpAttr.max_sge", "QpState.SQE",
    "CQ.entries(most=)", "QP.modify(attr)", "QP.modify(attr=, mask)", "close()", "with", "doca_verbs_qp_create",
    "put(address=)", "ops.copy(typingctx=)", "ops.st256", "put_warp",
])
def test_what_is_not_there_is_found(objects, name):
    with pytest.raises(LookupError):
        resolve(name, objects)
