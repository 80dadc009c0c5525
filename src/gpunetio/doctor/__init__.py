"""Find out whether a machine is ready for GPU networking, what is wrong, and how to fix it.

    report = doctor.examine(doctor.LiveHost())
    report.ready(doctor.Use.VERBS)

Checks read the machine only through a `Host`, so that readings can be recorded there and replayed elsewhere.
"""

from .checks.catalog import examine
from .finding import Check, Evidence, Finding, Readiness, Report, Status, Use
from .machine.devices import Machine, Wanted
from .machine.host import Host, Reading, Trouble
from .machine.live import LiveHost
from .machine.recording import ReplayHost, load, record, save
from .report.text import as_json, lines_of

__all__ = [
    "Check", "Evidence", "Finding", "Host", "LiveHost", "Machine", "Readiness", "Reading", "ReplayHost", "Report",
    "Status", "Trouble", "Use", "Wanted", "as_json", "examine", "lines_of", "load", "record", "save",
]
