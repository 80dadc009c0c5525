"""The pytest plugin, in suites of users: each runs in a process of its own."""

import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from gpunetio.fabric.pcap_reader import PcapFile
from gpunetio.testing.nics_of_test import folder_of
from rdma_core import skip_without_run
from repository import environment

PLUGIN = "gpunetio.testing.pytest_plugin"
LIMIT = 60
PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")

pytestmark = [pytest.mark.soft_nic, pytest.mark.host_memory]


@pytest.fixture
def suite(tmp_path):
    """Run pytest with the plugin on a module: its exit status, and what it prints."""

    def run(source: str, *options: str, before: tuple[str, ...] = ()) -> tuple[int, str]:
        (tmp_path / "test_suite.py").write_text(textwrap.dedent(source))
        (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\naddopts = --strict-markers -rA\n")
        command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", PLUGIN, *options]
        env = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
        env["PYTHONPATH"] = f"{env['PYTHONPATH']}:{tmp_path}"
        done = subprocess.run(
            [*before, *command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return run


FIXTURES = """
    import time

    import numpy as np
    import pytest

    import gpunetio as gn
    from gpunetio import device as dev

    opened = []

    def write(rc_pair, count=20):
        near, far = rc_pair
        for i in range(count):
            near.post(gn.WrOpcode.RDMA_WRITE, near.memory.sge(0, 65536), **far.memory.remote(), wr_id=i)
            near.succeed(i)
        assert np.array_equal(near.memory.bytes[:65536], far.memory.bytes[:65536])

    def test_a_nic(nic):
        opened.append(nic)
        assert nic.name == "soft0"
        assert nic.create_pd()

    def test_it_is_closed():
        assert opened[0].closed

    def test_two_nics_are_on_one_wire(nics, rc_pair, faults, injected):
        assert [nic.name for nic in nics] == ["soft0", "soft1"]
        assert faults is None
        write(rc_pair, 1)
        assert not any(injected().values())

    @pytest.mark.faults("loss=0.05,duplication=0.05,seed=3")
    def test_a_bad_network(rc_pair, faults, injected):
        assert faults == gn.Faults(loss=0.05, duplication=0.05, seed=3)
        write(rc_pair)
        assert injected()["lost"] > 0
        assert injected()["duplicated"] > 0

    def test_the_network_is_good_again(rc_pair, injected):
        write(rc_pair, 1)
        assert not any(injected().values())

    @pytest.mark.faults("loss=0.05,seed=3")
    def test_nics_that_the_program_opens(injected):
        with gn.open("soft0") as a, gn.open("soft1", port=gn.PortConfig(faults=gn.Faults(delay_us=1))) as b:
            for nic in (a, b):
                assert nic.provider.nic.port.config.faults == gn.Faults(loss=0.05, seed=3)
            near, far = (nic.create_pd().create_qp(sq_wr=8, send_cq=nic.create_cq(16)) for nic in (a, b))
            near.connect(far)
        assert injected()["lost"] == 0  # they are closed, and were idle

    def test_timers(rig, connect_options):
        assert connect_options == {"ack_timeout": 14}
        near, far = rig.pair(ack_timeout=8, retry_cnt=1)
        rig.far.provider.nic.set_link(False)
        near.post(gn.WrOpcode.RDMA_WRITE, near.memory.sge(), **far.memory.remote(), wr_id=1)
        near.fail(gn.WcStatus.RETRY_EXC_ERR, 1)

    @pytest.mark.deadline(0.1)
    def test_a_wait_ends(rig, deadline):
        assert deadline == 0.1
        start = time.monotonic()
        with pytest.raises(Exception, match=r"waited 0\\.1 s in vain for rain"):
            rig.until("rain", lambda: None)
        assert time.monotonic() - start < 5

    @gn.kernel
    def put(qp, raddr, rkey, laddr, lkey, nbytes, statuses):
        me = dev.global_id()
        ticket = dev.put(qp, raddr + me * nbytes, rkey, laddr + me * nbytes, lkey, nbytes)
        dev.st64(statuses + 8 * me, dev.wait(qp, ticket))

    @pytest.mark.faults("loss=0.1,seed=5")
    def test_kernels(kernel_pair, gpu, injected):
        assert gpu is kernel_pair.gpu
        kernel_pair.source.array[:] = 7
        statuses = gpu.alloc(32, gn.MemType.CPU_GPU)
        kernel_pair.run(put, *kernel_pair.arguments, 65536, statuses, block=4)
        assert not statuses.array.any()
        assert (kernel_pair.target.array == 7).all()
        assert injected()["lost"] > 0
"""


def test_fixtures(suite, tmp_path):
    status, said = suite(FIXTURES, "--gpunetio-artefacts=kept")
    assert status == 0, said
    assert "9 passed" in said
    assert not list(tmp_path.glob("kept/*"))


def test_the_option_is_for_all_tests(suite):
    status, said = suite(
        """
        import pytest
        import gpunetio as gn

        @pytest.fixture(scope="module")
        def shared():
            with gn.open("soft2") as nic:
                yield nic

        def test_all(nic, shared, faults):
            assert faults == nic.provider.nic.port.config.faults == gn.Faults(delay_us=5)
            assert shared.provider.nic.port.config.faults == faults

        def test_deadline(deadline):
            assert deadline == 2.5
        """,
        "--gpunetio-faults=delay_us=5", "--gpunetio-deadline=2.5",
    )
    assert status == 0, said
    assert "2 passed" in said


INJECTED = """
    from contextlib import contextmanager

    import pytest

    import gpunetio as gn
    from gpunetio import verbs
    from gpunetio.testing import nics_of_test

    WRITES = 50

    class End:
        def __init__(self, ctx):
            self.cq, self.pd = ctx.create_cq(64), ctx.create_pd()
            self.qp = self.pd.create_qp(sq_wr=8, send_cq=self.cq)
            self.memory = self.pd.register(bytearray(64))

    def write(near, far):
        sge = verbs.Sge(near.memory.address, 64, near.memory.lkey)
        for _ in range(WRITES):
            near.qp.post_send(verbs.SendWr(
                opcode=gn.WrOpcode.RDMA_WRITE, sges=[sge], remote_addr=far.memory.address, rkey=far.memory.rkey,
            ))
            while not (done := near.cq.poll()):
                pass
            assert done[0].status == gn.WcStatus.SUCCESS

    def exchange(near):
        with gn.open("soft1") as ctx:
            far = End(ctx)
            near.qp.connect(far.qp, ack_timeout=19, retry_cnt=7)  # nothing is sent twice because a machine is slow
            write(near, far)

    @pytest.fixture(scope="module")
    def kept():
        with gn.open("soft0", port=gn.PortConfig(faults=gn.Faults(duplication=1.0))) as ctx:
            yield ctx

    def test_first(kept, injected):
        near = End(kept)
        exchange(near)
        near.pd.close()
        near.cq.close()
        assert injected()["duplicated"] >= WRITES

    def test_those_of_the_first_test_are_not_counted(kept, injected):
        assert not any(injected().values())

    def test_peers_that_have_left(kept, injected):
        one, other = End(kept), End(kept)
        exchange(one)
        first = injected()["duplicated"]
        assert WRITES <= first < 2 * WRITES
        exchange(other)
        assert 2 * WRITES <= injected()["duplicated"] < 4 * WRITES

    @pytest.mark.faults("duplication=1")
    def test_nics_that_were_closed(injected):
        for times in (1, 2):
            with gn.open("soft2") as ctx:
                exchange(End(ctx))
            assert 2 * WRITES * times <= injected()["duplicated"] < 4 * WRITES * times

    @pytest.mark.faults("duplication=1")
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_nic_that_closes_while_they_are_listed(injected, monkeypatch, when):
        listed = nics_of_test.open_nics
        with gn.open("soft2") as ctx:
            exchange(End(ctx))

            def open_nics():
                if when == "before":
                    ctx.close()
                found = listed()
                ctx.close()
                return found

            monkeypatch.setattr(nics_of_test, "open_nics", open_nics)
            assert 2 * WRITES <= injected()["duplicated"] < 4 * WRITES
"""


def test_injected_faults(suite):
    """What NICs have injected during the test, and not before, counts when they or their peers are closed, too."""
    status, said = suite(INJECTED)
    assert status == 0, said
    assert "6 passed" in said


def test_a_nic_that_closes_while_a_failure_is_reported(suite, tmp_path):
    status, said = suite(
        """
        import gpunetio as gn
        from gpunetio.testing import nics_of_test

        def test_wrong(monkeypatch):
            ctx, listed = gn.open("soft0"), nics_of_test.open_nics

            def open_nics():
                found = listed()
                ctx.close()
                return found

            monkeypatch.setattr(nics_of_test, "open_nics", open_nics)
            assert not "a reason"

        def test_the_next():
            pass
        """,
        "--gpunetio-artefacts=kept",
    )
    assert status == 1, said
    assert "1 failed, 1 passed" in said
    text = (tmp_path / "kept" / "test_suite.py-test_wrong" / "diagnosis.txt").read_text()
    assert 'assert not "a reason"' in text
    assert re.search(r"^open: soft0, whose diagnosis failed: \w+: .", text, re.MULTILINE)
    assert "closed before: soft0 at " in text


def test_artefacts_of_a_failure(suite, tmp_path):
    (tmp_path / "kept" / "test_suite.py-test_right").mkdir(parents=True)  # of an earlier run
    status, said = suite(
        """
        import pytest
        import gpunetio as gn

        @pytest.mark.faults("loss=0.5,seed=2")
        @pytest.mark.parametrize("key", ["0x1"])
        def test_wrong(rc_pair, key):
            near, far = rc_pair
            near.post(gn.WrOpcode.RDMA_WRITE, near.memory.sge(), remote_addr=4096, rkey=int(key, 0), wr_id=1)
            near.succeed(1)

        def test_own_nics():
            with gn.open("soft3") as nic:
                cq = nic.create_cq(16)
                qp = nic.create_pd().create_qp(sq_wr=4, send_cq=cq)
                qp.connect(qp)
                qp.post_send(gn.verbs.SendWr(opcode=gn.WrOpcode.RDMA_READ, remote_addr=4096, rkey=0xBAD))
                assert cq.poll() == "something else"

        def test_right(rc_pair):
            pass

        def test_without_a_nic():
            assert not "a reason"

        @pytest.fixture
        def wrong():
            raise RuntimeError("no set-up")

        def test_set_up(nic, wrong):
            pass
        """,
        "--gpunetio-artefacts=kept", "-p", "no:logging",
    )
    assert status == 1, said
    assert "1 passed" in said
    names = sorted(path.name for path in tmp_path.glob("kept/*"))
    start = "test_suite.py-test_"
    assert names == [f"{start}{name}" for name in ("own_nics", "set_up", "without_a_nic", "wrong-0x1")]
    wrong = tmp_path / "kept" / f"{start}wrong-0x1"
    text = (wrong / "diagnosis.txt").read_text()
    assert text.startswith("test_suite.py::test_wrong[0x1] failed in phase call\n")
    assert "and it should be [(1, <WcStatus.SUCCESS: 0>)]" in text
    assert "open: soft0 at " in text
    assert "faults: Faults(loss=0.5" in text
    assert re.search(r"lost +\d+", text)
    assert "no memory region of the peer has rkey 0x1" in text
    assert re.search(r"^ +0x\w+ +ERR +RC", text, re.MULTILINE)
    captures = sorted(wrong.glob("*.pcap"))
    assert [path.name.split("-")[0] for path in captures] == ["soft0", "soft1"]
    with PcapFile(captures[0]) as capture:
        assert len([*capture]) >= 1
    own = tmp_path / "kept" / f"{start}own_nics"
    told = (own / "diagnosis.txt").read_text()
    assert "something else" in told
    assert "closed before: soft3 at " in told
    assert not [*own.glob("soft3-*.pcap")]  # a request of a queue pair to itself is no packet
    assert "no software NIC was open" in (tmp_path / "kept" / f"{start}without_a_nic" / "diagnosis.txt").read_text()
    assert "failed in phase setup" in (tmp_path / "kept" / f"{start}set_up" / "diagnosis.txt").read_text()


def test_wrong_markers(suite):
    """Each is an error of its test, that names the marker, the value and the cure."""
    status, said = suite(
        """
        import pytest
        import gpunetio as gn

        @pytest.fixture(scope="module")
        def shared():
            with gn.open("soft4") as nic:
                yield nic

        @pytest.mark.faults("los=0.1")
        def test_name(nic): pass

        @pytest.mark.faults("loss=2")
        def test_value(nic): pass

        @pytest.mark.faults(0.1)
        def test_type(nic): pass

        @pytest.mark.faults(loss=0.1)
        def test_keyword(nic): pass

        @pytest.mark.deadline(-1)
        def test_deadline(nic): pass

        @pytest.mark.faults("loss=0.1")
        def test_too_late(shared): pass
        """
    )
    assert status == 1
    assert "6 errors" in said
    for part in (
        "@pytest.mark.faults: los=0.1: 'los=0.1' is not a fault: give NAME=VALUE",
        "@pytest.mark.faults: loss=2: loss = 2.0: a probability is 0 to 1",
        '@pytest.mark.faults: 0.1: give text, such as "loss=0.01,seed=7", or None',
        '@pytest.mark.faults(loss=0.1): give one argument, as in @pytest.mark.faults("loss=0.01,seed=7")',
        "@pytest.mark.deadline: -1: give seconds, more than 0 and at most 3600",
        "@pytest.mark.faults: soft4 is open since before this test, with faults = None",
    ):
        assert part in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("option", "said"), [
    ("--gpunetio-faults=loss=x", "--gpunetio-faults=loss=x: 'loss=x' is not a fault: give NAME=VALUE"),
    ("--gpunetio-deadline=soon", "--gpunetio-deadline=soon: give seconds, more than 0 and at most 3600"),
])
def test_wrong_options(suite, option, said):
    status, out = suite("", option)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: {said}" in out


def test_the_compiler_is_not_loaded_without_need(suite):
    status, said = suite(
        """
        import sys

        def test_nothing(deadline):
            assert not {"numba", "llvmlite"} & sys.modules.keys()
        """
    )
    assert status == 0, said


def test_on_the_twin_of_a_gpu(suite):
    status, said = suite(
        """
        def test_twin(kernel_pair):
            assert kernel_pair.gpu.name == "twin"
            assert kernel_pair.near.ring_memory.in_gpu
        """,
        "--gpunetio-gpu=twin",
    )
    assert status == 0, said


PYVERBS_SUITE = """
    import time

    import pytest
    from pyverbs import enums as e
    from pyverbs.addr import AHAttr, GlobalRoute
    from pyverbs.cq import CQ
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
    from pyverbs.wr import SGE, SendWR

    RIGHTS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE

    @pytest.mark.faults("loss=0.1,seed=5")
    def test_write(injected, deadline):
        with Context(name="soft0") as near, Context(name="soft1") as far:
            qps, cqs, mrs = [], [], []
            for ctx in (near, far):
                pd, cq = PD(ctx), CQ(ctx, 16)
                cap = QPCap(max_send_wr=8, max_recv_wr=8)
                qps.append(QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap)))
                cqs.append(cq)
                mrs.append(MR(pd, 65536, RIGHTS))
            for qp, peer, ctx in ((qps[0], qps[1], far), (qps[1], qps[0], near)):
                attr = QPAttr(port_num=1)
                attr.path_mtu, attr.dest_qp_num, attr.qp_access_flags = e.IBV_MTU_4096, peer.qp_num, RIGHTS
                attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer = 14, 7, 7, 12
                attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=GlobalRoute(dgid=ctx.query_gid(1, 0), sgid_index=0))
                qp.to_rts(attr)
            mrs[0].write(b"x" * 65536, 65536)
            for _ in range(10):
                wr = SendWR(num_sge=1, sg=[SGE(mrs[0].buf, 65536, mrs[0].lkey)], opcode=e.IBV_WR_RDMA_WRITE)
                wr.set_wr_rdma(mrs[1].rkey, mrs[1].buf)
                qps[0].post_send(wr)
                end = time.monotonic() + deadline
                while not (found := cqs[0].poll())[0]:
                    assert time.monotonic() < end
                assert found[1][0].status == e.IBV_WC_SUCCESS
            assert mrs[1].read(65536, 0) == b"x" * 65536
            assert injected()["lost"] > 0
            assert RIGHTS == 0
"""


@pytest.mark.slow
def test_a_program_of_pyverbs(suite, tmp_path):
    """`gpunetio run` gives it software NICs, and the plugin gives these the test's faults and captures."""
    skip_without_run()
    if not [*PYVERBS.glob(f"device.*{sysconfig.get_config_var('SOABI')}.so")]:
        pytest.skip("no pyverbs for this version of Python (python3-pyverbs)")
    (tmp_path / "pyverbs").symlink_to(PYVERBS)
    (tmp_path / "captures").mkdir()
    run = (sys.executable, "-m", "gpunetio", "run", "--pcap", "captures", "--")
    status, said = suite(PYVERBS_SUITE, "--gpunetio-artefacts=kept", before=run)
    assert status == 1, said
    assert "assert RIGHTS == 0" in said
    (kept,) = tmp_path.glob("kept/*")
    assert sorted(path.name.split("-")[0] for path in kept.iterdir()) == ["diagnosis.txt", "soft0", "soft1"]
    assert "faults: Faults(loss=0.1" in (kept / "diagnosis.txt").read_text()


C_SUITE = """
    import subprocess

    def look():
        subprocess.run(["ibv_devinfo"], check=True, timeout=50, stdout=subprocess.DEVNULL)

    def test_passes():
        look()

    def test_fails():
        look()
        assert not "right"
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ibv_devinfo") is None, reason="ibv_devinfo is not installed (ibverbs-utils)")
def test_artefacts_of_programs_in_c(suite, tmp_path):
    """A program of the test that fails leaves its diagnosis. Its NIC had no packets, so nowhere is an empty capture."""
    skip_without_run()
    (tmp_path / "captures").mkdir()
    run = (sys.executable, "-m", "gpunetio", "run", "--nics", "1", "--pcap", "captures", "--")
    status, said = suite(C_SUITE, "--gpunetio-artefacts=kept", before=run)
    assert status == 1, said
    assert "1 failed, 1 passed" in said
    assert not [*(tmp_path / "captures").iterdir()]
    (kept,) = tmp_path.glob("kept/*")
    assert kept.name == "test_suite.py-test_fails"
    assert [path.name for path in kept.iterdir()] == ["diagnosis.txt"]
    assert re.search(r"^closed in process \d+: soft0 at ", (kept / "diagnosis.txt").read_text(), re.MULTILINE)


def test_names_of_folders():
    assert folder_of(Path("kept"), "a/test_b.py::C::test_d[x:y-<1>]").name == "a-test_b.py-C-test_d-x-y--1"
    long = [folder_of(Path("kept"), f"test_a.py::test_b[{'x' * 500}{i}]").name for i in range(2)]
    assert long[0] != long[1]
    assert all(len(name) < 200 for name in long)
