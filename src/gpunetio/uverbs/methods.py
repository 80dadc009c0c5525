"""The tables of calls: what answers each method of each object, and each command that INVOKE_WRITE brings."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection

from .abi import EXTENDED, UHW_IN, UHW_OUT, Invoke, Method, Object, Write
from .call import Call, Refused
from .files import OpenFile

logger: logging.Logger = logging.getLogger("gpunetio.uverbs")

Answer = Callable[[OpenFile, Call], None]
_methods: dict[tuple[int, int], tuple[Answer, Collection[int]]] = {}  # and the attributes that it knows
_commands: dict[int, Answer] = {}


def method(object: Object, number: int, known: Collection[int]) -> Callable[[Answer], Answer]:
    """Have a function answer a method of an object, which knows these attributes, and structures of the driver."""

    def register(answer: Answer) -> Answer:
        _methods[object, number] = answer, (*known, UHW_IN, UHW_OUT)
        return answer

    return register


def command(number: int) -> Callable[[Answer], Answer]:
    """Have a function answer a command."""

    def register(answer: Answer) -> Answer:
        _commands[number] = answer
        return answer

    return register


def _name(of: type[Object] | type[Write], number: int) -> str:
    return of(number).name if number in list(of) else f"{number:#x}"


def execute(file: OpenFile, call: Call) -> None:
    """Execute a call. Refused with EOPNOTSUPP if nothing answers it here."""
    if (call.object, call.method) != (Object.DEVICE, Method.INVOKE_WRITE):
        what = f"method {call.method:#x} of {_name(Object, call.object)}"
        answer, known = _methods.get((call.object, call.method), (None, ()))
    else:
        number = call.number(Invoke.CMD)
        what = f"command {_name(Write, number & ~EXTENDED)}"
        answer, known = _commands.get(number), (*Invoke, UHW_IN, UHW_OUT)
    if answer is None:
        logger.warning("the program asks the kernel for %s, which software NICs do not have", what)
        raise Refused(errno.EOPNOTSUPP, f"{what} is not supported")
    logger.debug("%s", what)
    call.check_known(known)
    answer(file, call)
