"""Decide how many processes run the tests, and where: each in a network namespace of its own.

Software NICs of one namespace see each other, and some tests use fixed ports. With `pytest -n auto` there are more
processes than cores, because many tests wait for deadlines or peers. `-n logical` is for tests that start processes.
"""

import os
import shlex
import subprocess
import sys

MOST = 8  # each takes a gigabyte
UP = shlex.join([sys.executable, "-c", 'from gpunetio.fabric.interface import set_up; set_up("lo")'])


def _namespace() -> list[str]:
    """What runs the command behind it in a new network namespace, as the same user."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        return ["unshare", "--net", "sh", "-c", f'{UP} && exec "$@"', "sh"]
    back = f'exec unshare --user --map-user={user} --map-group={group} "$@"'
    return ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", f"{UP} && {back}", "sh"]


def python() -> str | None:
    """The command line of Python in a namespace of its own, or None where this machine or its rules have none."""
    command = [*_namespace(), sys.executable]
    try:
        subprocess.run([*command, "-c", ""], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return shlex.join(command)


PER_CORE = {"auto": 2, "logical": 1}


def count(asked: str) -> int:
    """So many for each core. Where they would share a namespace there are none: the tests run in pytest itself."""
    return min(PER_CORE[asked] * len(os.sched_getaffinity(0)), MOST) if python() else 0
