"""The conformance kit: checks any provider against the contract of DOCA Verbs, as `gpunetio.verbs` implements it.

    report = testing.run(lambda: verbs.open("soft0"), lambda: verbs.open("soft1"))
    print(report)
    assert report.passed

`pytest_plugin` is for test suites of programs that use RDMA.
"""

# Each module registers its checks, in the order of the report.
# isort: off
from . import (  # noqa: F401
    checks_device,
    checks_objects,
    checks_memory,
    checks_states,
    checks_operations,
    checks_ordering,
    checks_posting,
    checks_copies,
    checks_unreliable,
    checks_errors,
    checks_completions,
    checks_shared,
    checks_events,
)
# isort: on
from .kit import Check, Outcome, Report, Result, checks, run
from .rig import Rig, Violation

__all__ = ["Check", "Outcome", "Report", "Result", "Rig", "Violation", "checks", "run"]
