"""The agreement of a benchmark's two ends before they start."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import InvalidValueError
from ..rendezvous.endpoints import endpoint_of, endpoint_values
from ..rendezvous.link import Link, Message, PeerError
from ..verbs import QpEndpoint
from .options import TERMS, Options

MOST_SIZES = 256
MOST_SIZE = 1 << 30
MOST_QPS = 64
MOST_ITERATIONS = 1 << 40
MOST_SECONDS = 1e6


@dataclass(frozen=True)
class File:
    """A payload: its length, and the SHA-256 of the whole file in hexadecimal."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Far:
    """The other end's queue pairs and memory, and the slots of each queue pair's receive queue."""

    endpoints: tuple[QpEndpoint, ...]
    address: int
    rkey: int
    receives: int


def agree(link: Link, options: Options, file: File | None, client: bool) -> tuple[Options, File | None]:
    """Compare the options of both ends. Return the common options, and the file to send, if any."""
    asked = {name: getattr(options, name) for name in TERMS if name in options.asked}
    payload = None if file is None else {"nbytes": file.nbytes, "sha256": file.sha256}
    link.send("hello", benchmark=options.benchmark.name, asked=asked, payload=payload)
    hello = link.expect("hello")
    theirs = hello.text("benchmark")[:40]
    if theirs != options.benchmark.name:
        raise PeerError(f"{link.peer} runs {theirs}, but this end {options.benchmark.name}: run the same at both ends")
    wanted = _asked(hello.part("asked"))
    for name, value in wanted.items():
        if asked.get(name, value) != value:
            raise PeerError(
                f"{link.peer} has {TERMS[name]} {_shown(value)}, this end {_shown(asked[name])}: "
                "give the same to both, or to one of them only"
            )
    both = asked | wanted
    if {"iterations", "duration"} <= both.keys():
        raise PeerError(f"one end has --iters, the other ({link.peer} or this one) --duration: they exclude each other")
    agreed = replace(options, **both)
    shared = _file(link, file, hello, sends=client != options.benchmark.reads)
    if shared is not None and agreed.duration is not None:
        raise InvalidValueError("a payload is sent once: do not give --duration at either end")
    return agreed, shared


def _asked(asked: Message) -> dict[str, object]:
    values: dict[str, object] = {}
    if "sizes" in asked:
        sizes = asked["sizes"]
        if not isinstance(sizes, list) or not 0 < len(sizes) <= MOST_SIZES:
            raise asked.wrong("sizes", f"a list of at most {MOST_SIZES} sizes")
        of_one = [Message(asked.peer, {"kind": asked.kind, "sizes": size}) for size in sizes]
        values["sizes"] = tuple(one.integer("sizes", 1, MOST_SIZE) for one in of_one)
    if "iterations" in asked:
        values["iterations"] = asked.integer("iterations", 1, MOST_ITERATIONS)
    if "duration" in asked:
        values["duration"] = asked.number("duration", 1e-9, MOST_SECONDS)
    if "qps" in asked:
        values["qps"] = asked.integer("qps", 1, MOST_QPS)
    if "inline" in asked:
        if asked["inline"] is not True:
            raise asked.wrong("inline", "true")
        values["inline"] = True
    return values


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _file(link: Link, own: File | None, hello: Message, sends: bool) -> File | None:
    """Return the file to send. Only the sender needs it; a receiver that also has one must have the same."""
    theirs = None
    if hello.get("payload") is not None:
        part = hello.part("payload")
        theirs = File(part.integer("nbytes", 0, 1 << 62), part.raw("sha256", 32).hex())
    if own is not None and theirs is not None and own != theirs:
        raise PeerError(
            f"{link.peer} has another --payload: {theirs.nbytes} bytes with SHA-256 {theirs.sha256}, this end "
            f"{own.nbytes} bytes with {own.sha256}"
        )
    sender, receiver = (own, theirs) if sends else (theirs, own)
    if receiver is not None and sender is None:
        who = "this end" if sends else link.peer
        raise PeerError(f"{who} sends the data, but has no --payload: give the file to it, or to neither")
    return sender


def swap_ends(
    link: Link, endpoints: list[QpEndpoint], address: int, rkey: int, nbytes: int, needed: int, receives: int = 0
) -> Far:
    """Exchange descriptions of queue pairs and memory with the peer. `needed` bytes of this end's memory are used.

    `receives` is the number of slots of this end's receive queues, which limits what the peer may send at a time.
    """
    link.send(
        "ends", address=address, rkey=rkey, nbytes=nbytes, receives=receives,
        qps=[endpoint_values(endpoint) for endpoint in endpoints],
    )
    ends = link.expect("ends")
    theirs = ends.parts("qps", 2 * MOST_QPS)
    if len(theirs) != len(endpoints):
        raise PeerError(f"{link.peer} has {len(theirs)} queue pairs, this end {len(endpoints)}")
    ends.integer("nbytes", needed, 1 << 62)
    return Far(
        tuple(endpoint_of(each) for each in theirs), ends.integer("address", 0, (1 << 63) - 1),
        ends.integer("rkey", 0, 0xFFFF_FFFF), ends.integer("receives", 0, 1 << 15),
    )


def swap_words(link: Link, address: int, rkey: int) -> tuple[int, int]:
    """Exchange addresses and keys of the words that the other end adds to."""
    link.send("words", address=address, rkey=rkey)
    words = link.expect("words")
    return words.integer("address", 0, (1 << 63) - 1), words.integer("rkey", 0, 0xFFFF_FFFF)
