"""The compiler substrate: functions in Python that run on CPU threads and on CUDA devices."""

from . import enums as enums  # registers the enumerations with Numba
