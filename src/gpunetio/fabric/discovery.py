"""Ask the NICs of this host for the memory of their tables or rules, all in parallel and within one deadline."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterable

from .claims import MAX_PENDING, PATIENCE, PREFIX, RETRY, new_socket
from .control_message import VERSION, BadMessage, Body, PartialMessage, credentials, send

logger: logging.Logger = logging.getLogger("gpunetio.fabric")


def look(name: str, timeout: float = PATIENCE) -> tuple[int, Body, list[int]] | None:
    """Ask one NIC for its tables, as `look_at_all` does. Return None if the NIC is left out there."""
    return look_at_all([name], timeout).get(name)


def look_at_all(
    wanted: Iterable[str], timeout: float = PATIENCE, silent: set[str] | None = None, op: str = "look"
) -> dict[str, tuple[int, Body, list[int]]]:
    """Ask the NICs that listen under these names for their tables. Return (pid, description, descriptors) by name.

    All NICs are asked in parallel and share one deadline, after `timeout` seconds. The caller closes the descriptors.
    NICs of other users, and NICs whose answer is late or invalid, are left out; the late ones are added to `silent`.
    With the `op` "rules", the NICs are asked for copies of their flow rules, and asked again while they are busy.
    """
    end = time.monotonic() + timeout
    found: dict[str, tuple[int, Body, list[int]]] = {}
    todo = deque(dict.fromkeys(wanted))
    with selectors.DefaultSelector() as asked:
        try:
            while todo or asked.get_map():
                for _ in range(min(len(todo), MAX_PENDING - len(asked.get_map()))):
                    name = todo.popleft()
                    try:
                        if (sock := _ask(name, op)) is not None:
                            asked.register(sock, selectors.EVENT_READ, data=(name, sock, PartialMessage()))
                    except BlockingIOError:  # its listen queue is full
                        todo.append(name)
                left = end - time.monotonic()
                if left <= 0:
                    late = [*todo, *(key.data[0] for key in asked.get_map().values())]
                    logger.info("cannot look at the NICs at %s: they do not answer", ", ".join(late))
                    if silent is not None:
                        silent.update(late)
                    break
                for key, _ in asked.select(min(left, RETRY) if todo else left):
                    if _read_answer(asked, key, found):
                        todo.append(key.data[0])
        finally:
            for key in list(asked.get_map().values()):
                _, sock, message = key.data
                message.close()
                sock.close()
    return found


def _ask(name: str, op: str) -> socket.socket | None:
    """Send a request to the NIC that listens under `name`. Return the connection.

    Return None if the NIC is gone or belongs to another user. BlockingIOError if its listen queue is full.
    """
    sock = new_socket()
    try:
        sock.setblocking(False)
        sock.connect(f"\0{PREFIX}{name}")
        if credentials(sock)[1] == os.geteuid():
            send(sock, {"version": VERSION, "op": op})
            return sock
    except BlockingIOError:
        sock.close()
        raise
    except OSError as error:
        logger.info("cannot look at the NIC at %s: %s", name, error)
    sock.close()
    return None


def _read_answer(
    asked: selectors.BaseSelector, key: selectors.SelectorKey,
    found: dict[str, tuple[int, Body, list[int]]],
) -> bool:
    """Read part of the answer of a NIC. Return whether the NIC must be asked again."""
    name, sock, message = key.data
    pid, _ = credentials(sock)
    again = False
    try:
        answer = message.read(sock)
        if answer is None:
            return False
        if answer.get("version") == VERSION and answer.get("ok") is True:
            found[name] = pid, answer, message.take_fds()
        else:
            reason, again = answer.get("reason", answer), answer.get("again") is True
            logger.info("cannot look at the NIC at %s (process %d): %s", name, pid, reason)
    except BlockingIOError:
        return False
    except (OSError, EOFError, BadMessage) as error:
        logger.info("cannot look at the NIC at %s (process %d): %s", name, pid, error)
    asked.unregister(sock)
    message.close()
    sock.close()
    return again
