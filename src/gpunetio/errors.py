"""The errors of gpunetio: one tree, each with the numeric `doca_error_t` that it stands for.

    DocaError
    ├── NotPermittedError (PermissionError)    ├── FullError
    ├── InUseError                             ├── TooBigError (ValueError)
    ├── NotSupportedError                      ├── BadStateError
    ├── AgainError                             ├── BadConfigError (ValueError)
    ├── InvalidValueError (ValueError)         ├── DriverError
    ├── NoMemoryError (MemoryError)            ├── OperatingSystemError (OSError)
    ├── InitializationError                    ├── UnexpectedError
    ├── TimedOutError (TimeoutError)           ├── DeviceFatalError
    ├── NotFoundError (LookupError)            ├── ConnectionRejectedError (ConnectionError)
    └── ConnectionEndedError (ConnectionAbortedError)
"""

from enum import IntEnum


class DocaErrorCode(IntEnum):
    """`doca_error_t`."""

    SUCCESS               = 0
    UNKNOWN               = 1
    NOT_PERMITTED         = 2
    IN_USE                = 3
    NOT_SUPPORTED         = 4
    AGAIN                 = 5
    INVALID_VALUE         = 6
    NO_MEMORY             = 7
    INITIALIZATION        = 8
    TIME_OUT              = 9
    SHUTDOWN              = 10
    CONNECTION_RESET      = 11
    CONNECTION_ABORTED    = 12
    CONNECTION_INPROGRESS = 13
    NOT_CONNECTED         = 14
    NO_LOCK               = 15
    NOT_FOUND             = 16
    IO_FAILED             = 17
    BAD_STATE             = 18
    UNSUPPORTED_VERSION   = 19
    OPERATING_SYSTEM      = 20
    DRIVER                = 21
    UNEXPECTED            = 22
    ALREADY_EXIST         = 23
    FULL                  = 24
    EMPTY                 = 25
    IN_PROGRESS           = 26
    TOO_BIG               = 27
    AUTHENTICATION        = 28
    BAD_CONFIG            = 29
    SKIPPED               = 30
    DEVICE_FATAL_ERROR    = 31


class DocaError(Exception):
    """Base of all errors raised by gpunetio. `code` is the `doca_error_t` that the C library would return."""

    code = DocaErrorCode.UNKNOWN


class NotPermittedError(DocaError, PermissionError):
    """DOCA_ERROR_NOT_PERMITTED."""

    code = DocaErrorCode.NOT_PERMITTED


class InUseError(DocaError):
    """DOCA_ERROR_IN_USE: another object still needs it."""

    code = DocaErrorCode.IN_USE


class NotSupportedError(DocaError):
    """DOCA_ERROR_NOT_SUPPORTED: this provider, device or build does not have it."""

    code = DocaErrorCode.NOT_SUPPORTED


class AgainError(DocaError):
    """DOCA_ERROR_AGAIN."""

    code = DocaErrorCode.AGAIN


class InvalidValueError(DocaError, ValueError):
    """DOCA_ERROR_INVALID_VALUE."""

    code = DocaErrorCode.INVALID_VALUE


class NoMemoryError(DocaError, MemoryError):
    """DOCA_ERROR_NO_MEMORY."""

    code = DocaErrorCode.NO_MEMORY


class InitializationError(DocaError):
    """DOCA_ERROR_INITIALIZATION."""

    code = DocaErrorCode.INITIALIZATION


class TimedOutError(DocaError, TimeoutError):
    """DOCA_ERROR_TIME_OUT: a wait reached its deadline."""

    code = DocaErrorCode.TIME_OUT


class NotFoundError(DocaError, LookupError):
    """DOCA_ERROR_NOT_FOUND."""

    code = DocaErrorCode.NOT_FOUND


class BadStateError(DocaError):
    """DOCA_ERROR_BAD_STATE: the object is closed, or in a state that does not allow the call."""

    code = DocaErrorCode.BAD_STATE


class OperatingSystemError(DocaError, OSError):
    """DOCA_ERROR_OPERATING_SYSTEM."""

    code = DocaErrorCode.OPERATING_SYSTEM


class DriverError(DocaError):
    """DOCA_ERROR_DRIVER: the device refused a command, or a driver call failed.

    `status` and `syndrome` are those of a refused command.
    """

    code = DocaErrorCode.DRIVER
    status: int
    syndrome: int

    def __init__(self, message: str, status: int = 0, syndrome: int = 0):
        super().__init__(message)
        self.status, self.syndrome = status, syndrome


class UnexpectedError(DocaError):
    """DOCA_ERROR_UNEXPECTED."""

    code = DocaErrorCode.UNEXPECTED


class FullError(DocaError):
    """DOCA_ERROR_FULL."""

    code = DocaErrorCode.FULL


class TooBigError(DocaError, ValueError):
    """DOCA_ERROR_TOO_BIG."""

    code = DocaErrorCode.TOO_BIG


class BadConfigError(DocaError, ValueError):
    """DOCA_ERROR_BAD_CONFIG."""

    code = DocaErrorCode.BAD_CONFIG


class DeviceFatalError(DocaError):
    """DOCA_ERROR_DEVICE_FATAL_ERROR."""

    code = DocaErrorCode.DEVICE_FATAL_ERROR


class ConnectionRejectedError(DocaError, ConnectionError):
    """DOCA_ERROR_CONNECTION_ABORTED: the peer refuses a connection, or a datagram service.

    `reason` is the peer's reason (`cm.RejectReason` or `cm.SidrStatus`), `private_data` the data sent with it.
    """

    code = DocaErrorCode.CONNECTION_ABORTED
    reason: int
    private_data: bytes

    def __init__(self, message: str, reason: int = 0, private_data: bytes = b""):
        super().__init__(message)
        self.reason, self.private_data = reason, private_data


class ConnectionEndedError(DocaError, ConnectionAbortedError):
    """DOCA_ERROR_CONNECTION_ABORTED: the connection has ended, because one side left it or a request on it failed."""

    code = DocaErrorCode.CONNECTION_ABORTED


def again(error: DocaError) -> DocaError:
    """Return a copy of a stored error, to be raised: an object that is raised often accumulates frames."""
    builtin: type = type(error)  # the built-in class whose layout it has, and whose `__new__` must create it
    while builtin.__module__ != "builtins" and builtin.__base__ is not None:
        builtin = builtin.__base__
    made: DocaError = builtin.__new__(type(error), *error.args)
    made.args = error.args
    vars(made).update(vars(error))
    made.__cause__, made.__suppress_context__ = error.__cause__, error.__suppress_context__
    return made


_BY_CODE = {kind.code: kind for kind in DocaError.__subclasses__()}


def error_of(code: int, message: str) -> DocaError:
    """Return the error for a `doca_error_t`: of its class or, if it has no class, a DocaError with its code.

    A number that is not a `doca_error_t` becomes UNKNOWN.
    """
    error = _BY_CODE.get(code, DocaError)(message)  # type: ignore[call-overload]
    if code in list(DocaErrorCode):
        error.code = DocaErrorCode(code)
    return error
