"""The tables of calls: a function for each method of each object, and for each command that INVOKE_WRITE brings."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection
from enum import IntEnum

from .abi import EXTENDED, REG_MR_METHOD, UHW_IN, UHW_OUT, Invoke, Method, Object, Write, WriteExtended
from .call import Call, Refused
from .files import OpenFile

logger: logging.Logger = logging.getLogger("gpunetio.uverbs")

Answer = Callable[[OpenFile, Call], None]
_methods: dict[tuple[int, int], tuple[Answer, Collection[int]]] = {}  # the function, and the attributes that it knows
_commands: dict[int, Answer] = {}


def method(object: Object, number: int, known: Collection[int]) -> Callable[[Answer], Answer]:
    """Make a function answer a method of an object. The method knows these attributes, and structures of the driver."""

    def register(answer: Answer) -> Answer:
        _methods[object, number] = answer, (*known, UHW_IN, UHW_OUT)
        return answer

    return register


def command(number: int) -> Callable[[Answer], Answer]:
    """Make a function answer a command."""

    def register(answer: Answer) -> Answer:
        _commands[number] = answer
        return answer

    return register


def _name(number: int, *enums: type[IntEnum]) -> str:
    return next((enum(number).name for enum in enums if number in list(enum)), f"{number:#x}")


# Newer methods. If the kernel lacks them, libibverbs sends a command instead.
_REPLACED = {(Object.MR, REG_MR_METHOD)}


def execute(file: OpenFile, call: Call) -> None:
    """Execute a call.

    A call that no function answers is refused as the kernel refuses it: a method with EPROTONOSUPPORT, after which
    libibverbs tries another way (ib_uverbs_cmd_verbs), and a command with EOPNOTSUPP.
    """
    method = call.object, call.method
    if method != (Object.DEVICE, Method.INVOKE_WRITE):
        what = f"method {call.method:#x} of {_name(call.object, Object)}"
        answer, known = _methods.get(method, (None, ()))
        code = errno.EPROTONOSUPPORT
    else:
        number = call.number(Invoke.CMD)
        what = f"command {_name(number & ~EXTENDED, Write, WriteExtended)}"
        answer, known = _commands.get(number), (*Invoke, UHW_IN, UHW_OUT)
        code = errno.EOPNOTSUPP
    if answer is None:
        raise Refused(code, f"{what} is not supported", expected=method in _REPLACED)
    logger.debug("%s", what)
    call.check_known(known)
    answer(file, call)
