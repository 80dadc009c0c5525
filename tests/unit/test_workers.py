"""The processes that run the tests side by side do not meet on the network."""

import os
import socket
import subprocess

import pytest

import workers

SEE = """
import os, socket
listener = socket.create_server(("127.0.0.1", {port}))
socket.create_connection(listener.getsockname()).close()
print(os.geteuid(), os.getegid())
"""


def test_each_has_a_loopback_interface_of_its_own() -> None:
    if workers.python() is None:
        pytest.skip("no network namespaces here")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        program = SEE.format(port=taken.getsockname()[1])
        command = f'{workers.python()} -c "$0"'  # the first is a command line
        done = subprocess.run(["sh", "-c", command, program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [str(os.geteuid()), str(os.getegid())]


@pytest.mark.parametrize("command", [["false"], ["/no such program"]])
def test_one_process_where_there_are_no_namespaces(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_namespace", lambda: command)
    assert workers.python() is None
    assert workers.count("auto") == workers.count("logical") == 0
