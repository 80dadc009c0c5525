"""The conformance kit: holds a provider, whichever it is, against the contract of DOCA Verbs as `gpunetio.verbs` gives it.

    report = testing.run(lambda: verbs.open("soft0"), lambda: verbs.open("soft1"))
    print(report)
    assert report.passed
"""

from . import (  # noqa: F401  each registers its checks
    checks_device,
    checks_objects,
    checks_memory,
    checks_states,
    checks_operations,
    checks_unreliable,
    checks_errors,
    checks_completions,
    checks_shared,
    checks_events,
)
from .kit import Check, Outcome, Report, Result, checks, run
from .rig import Rig, Violation

__all__ = ["Check", "Outcome", "Report", "Result", "Rig", "Violation", "checks", "run"]
