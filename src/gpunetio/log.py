"""Logging with the standard library, under the name `gpunetio`, at the level of `DOCA_GPUNETIO_LOG`.

The variable takes 0 … 7 (EMERG, ALERT, CRIT, ERR, WARNING, NOTICE, INFO, DEBUG); messages go to stderr.
Unset means WARNING, so that errors explain themselves.
"""

import logging
import os
import sys

_LEVELS = (logging.CRITICAL,) * 3 + (logging.ERROR, logging.WARNING, logging.INFO, logging.INFO, logging.DEBUG)
_MOST_DIGITS = 100  # Python refuses to read numbers of thousands of digits
# The levels of DOCA (`doca_log_level`), which the samples take: DISABLE, CRITICAL, ERROR, WARNING, INFO, DEBUG, TRACE.
DOCA_LEVELS = {
    10: logging.CRITICAL + 1, 20: logging.CRITICAL, 30: logging.ERROR, 40: logging.WARNING, 50: logging.INFO,
    60: logging.DEBUG, 70: 1,
}

logger: logging.Logger = logging.getLogger("gpunetio")
_compiling: logging.Logger = logging.getLogger("gpunetio.compile")


def level_from_environment(text: str | None) -> int:
    """Return the logging level for a value of `DOCA_GPUNETIO_LOG`. Unset or invalid means WARNING."""
    if not text or not text.isdecimal() or len(text) > _MOST_DIGITS:
        return logging.WARNING
    return _LEVELS[min(int(text), len(_LEVELS) - 1)]


def configure() -> None:
    """Send gpunetio's messages to stderr at the environment's level. Programs call this, libraries do not."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s [%(levelname)s] %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level_from_environment(os.environ.get("DOCA_GPUNETIO_LOG")))


def tell_who_waits(message: str) -> None:
    """Tell a user who waits for the compiler, in the log at INFO, and on stderr unless GPUNETIO_QUIET is set."""
    _compiling.info(message)
    if sys.stderr is not None and not os.environ.get("GPUNETIO_QUIET"):
        print(f"gpunetio: {message}", file=sys.stderr, flush=True)
