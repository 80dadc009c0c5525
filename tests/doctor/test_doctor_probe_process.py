"""The process in which the doctor's probes run: what it may print, how it may end, and what is made of that."""

import json
import os
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doctor_rig import READY, answer, changed
from gpunetio.doctor import Finding, LiveHost, Machine, ReplayHost, Status, Use, Wanted, load, save
from gpunetio.doctor.finding import HARDWARE
from gpunetio.doctor.probes import process
from gpunetio.doctor.probes.trying import PROBES, device_to_probe, run_probes
from gpunetio.doctor.probes.watch import watch

OK, WARN, FAIL, SKIP = Status
IDS = [probe.id for probe in PROBES]
NOTHING_THERE = ReplayHost({})


def child(program: str, seconds: float = 20.0):
    """What is heard of a Python program."""
    return watch([sys.executable, "-I", "-c", f"import json, os, sys, time\n{program}"], lambda step: seconds)


def told(value, device: str = "soft0", host: ReplayHost = NOTHING_THERE) -> list[Finding]:
    """What the doctor makes of an answer, on a machine without hardware or on another one."""
    answers = [answer("probe", device, gpu, value=value) for gpu in ("auto", "0000:ca:00.0")]
    return run_probes(Machine(changed(host, *answers), Wanted()), device)


def lines(*objects) -> str:
    return "".join(f"print({json.dumps(json.dumps(each))}, flush=True)\n" for each in objects)


UAR = {"begin": "probe-uar"}
FINE = {"probe": "probe-open", "status": "OK", "summary": "fine", "read": [["a", "b"]], "cure": "", "reboot": None}
BEGUN = lines({"begin": "probe-open"}, FINE, UAR)


def test_a_process_that_ends_well():
    found = child(lines(FINE, UAR) + "print('no JSON')\nprint('[1]')\nprint(3)")
    assert found == {"said": [FINE, UAR], "ended": ""}


def test_a_process_that_hangs():
    """It is killed at the deadline of the step that it has begun, whatever it is in."""
    program = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(json.dumps([os.getpid()]))\n{BEGUN}"
    program += "print(json.dumps({'pid': os.getpid()}), flush=True)\ntime.sleep(100)"
    found = watch([sys.executable, "-I", "-c", f"import json, os, sys, time\n{program}"],
                  lambda step: 2.0 if step == "probe-uar" else 20.0)
    assert found["ended"] == "no answer within 2 s"
    with pytest.raises(ProcessLookupError):
        os.kill(found["said"][-1]["pid"], 0)
    by_id = {finding.check.id: finding for finding in told(found)}
    assert by_id["probe-open"].status is OK
    assert by_id["probe-uar"].status is FAIL
    assert "no answer within 2 s" in by_id["probe-uar"].summary
    assert "dmesg" in by_id["probe-uar"].cure
    assert by_id["probe-umem"].status is SKIP
    assert "probe-uar" in by_id["probe-umem"].summary


@pytest.mark.parametrize(
    ("program", "ended"),
    [
        (f"{BEGUN}os.kill(os.getpid(), 11)", "ended by signal 11 (SIGSEGV)"),
        (f"{BEGUN}sys.exit('what a pity')", "exit status 1: what a pity"),
        (f"{BEGUN}1 // 0", "exit status 1: ZeroDivisionError"),
        (f"{BEGUN}os.close(1); time.sleep(100)", "no end within 5 s"),
        (f"{BEGUN}while True: print('x' * 10000)", "it printed more than 1 MiB"),
    ],
)
def test_a_process_that_ends_otherwise(program, ended):
    """The probe that was under way has failed, and it is said how."""
    found = child(program, 5.0 if "close" in program else 20.0)
    assert found["ended"].startswith(ended)
    (finding,) = [finding for finding in told(found) if finding.check.id == "probe-uar"]
    assert finding.status is FAIL
    assert ended in finding.summary


def test_a_process_that_says_nothing():
    """Nobody can say that the device opens."""
    first, *others = told(child("sys.exit('no module')"))
    assert first.check.id == "probe-open"
    assert first.status is FAIL
    assert "no module" in first.summary
    assert {finding.status for finding in others} == {SKIP}


def test_findings_before_a_hang_are_kept():
    found = told({"said": [{"begin": "probe-open"}, FINE], "ended": "no answer within 1 s"})
    assert [finding.status for finding in found if finding.check.id == "probe-open"] == [OK, FAIL]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from([*FINE, "begin", "said", "ended", "x"]), inner | st.sampled_from([*Status, *IDS]), max_size=6
    ),
)
PRINTED = st.binary(max_size=200) | st.builds(lambda each: json.dumps(each).encode() + b"\n", JSON)


@settings(max_examples=25)
@given(st.lists(PRINTED, max_size=5))
def test_a_process_that_prints_anything(tmp_path_factory, printed):
    path = tmp_path_factory.mktemp("printed") / "it"
    path.write_bytes(b"".join(printed))
    found = watch(["cat", str(path)], lambda step: 20.0)
    assert found["ended"] == ""
    assert {finding.check.id for finding in told(found)} == set(IDS)


@settings(max_examples=50)
@given(JSON | st.fixed_dictionaries({"said": st.lists(JSON), "ended": JSON}))
def test_answers_of_any_shape(value):
    assert {finding.check.id for finding in told(value)} == set(IDS)


# --- the doctor's side -----------------------------------------------------------------------------------------------


def test_all_probes_are_declared_and_carried_out():
    assert [*process.TRIALS] == IDS
    assert len(set(IDS)) == len(IDS)


@pytest.mark.parametrize(
    ("wanted", "device"),
    [("", "mlx5_0"), ("mlx5_1", "mlx5_1"), ("ens6f1", "mlx5_1"), ("b5:00.1", "mlx5_1"), ("soft3", "soft3"), ("x", "x")],
)
def test_which_device_is_probed(wanted, device):
    assert device_to_probe(Machine(READY, Wanted(nic=wanted))) == device


def test_without_a_card_a_software_nic_is_probed():
    assert device_to_probe(Machine(NOTHING_THERE, Wanted())) == "soft0"


@pytest.mark.parametrize(
    ("device", "uses", "subjects"),
    [
        ("mlx5_0", HARDWARE, {"mlx5_0", "GPU0 mlx5_0"}),
        ("soft0", {Use.SOFTWARE}, {""}),
        ("nosuch", set(Use), {""}),
    ],
)
def test_whom_findings_concern(device, uses, subjects):
    """What a software NIC does says nothing of cards."""
    found = told({"said": [{"begin": id} for id in IDS], "ended": ""}, device, READY)
    assert {finding.subject for finding in found} == subjects
    assert all(finding.uses <= uses for finding in found)
    assert frozenset().union(*(finding.uses for finding in found)) == uses


def test_a_recording_without_probes():
    found = run_probes(Machine(READY, Wanted()))
    assert {finding.status for finding in found} == {SKIP}
    assert all("recording" in finding.summary for finding in found)


@pytest.mark.slow
def test_a_software_nic_in_a_process_of_its_own(tmp_path):
    """For real; and a replay finds the same."""
    host = LiveHost()
    wanted = Wanted(nic="soft0", gpu="host")
    found = run_probes(Machine(host, wanted))
    by_id = {id: [each.status for each in found if each.check.id == id] for id in IDS}
    assert by_id == {id: [SKIP] for id in IDS} | {
        "probe-open": [OK], "probe-loopback-host": [OK], "probe-loopback-gpu": [OK, OK],
    }
    save(host.readings(), tmp_path / "recording")
    assert run_probes(Machine(load(tmp_path / "recording"), wanted)) == found


def test_a_process_of_its_own():
    """What it prints is understood, and its end is no failure."""
    found = run_probes(Machine(LiveHost(), Wanted(nic="nosuch", gpu="host")))
    assert [finding.status for finding in found] == [FAIL] + [SKIP] * (len(IDS) - 1)
    assert "no device 'nosuch'" in found[0].summary
    assert all("probe-open failed" in finding.summary for finding in found[1:])
