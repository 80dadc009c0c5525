"""Is this machine ready for GPU networking: what it has, what is wrong, and what cures it.

    report = doctor.examine(doctor.LiveHost())
    report.ready(doctor.Use.VERBS)

Everything read goes through a `Host`, so that it can be recorded on one machine and replayed on another.
"""

from .checks import examine
from .finding import Check, Evidence, Finding, Readiness, Report, Status, Use
from .host import Host, Reading, Trouble
from .live import LiveHost
from .machine import Machine, Wanted
from .recording import ReplayHost, load, record, save
from .text import as_json, lines_of

__all__ = [
    "Check", "Evidence", "Finding", "Host", "LiveHost", "Machine", "Readiness", "Reading", "ReplayHost", "Report",
    "Status", "Trouble", "Use", "Wanted", "as_json", "examine", "lines_of", "load", "record", "save",
]  # fmt: skip
