"""Indirect memory keys: CREATE_MKEY with a list of keys (KSM)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpunetio as gn
from gpunetio.enums import Access
from gpunetio.errors import DriverError, InUseError
from gpunetio.formats import commands as cmd
from gpunetio.formats.commands import MkeyAccessMode, Opcode, Status
from gpunetio.formats.contexts import KLM
from gpunetio.nic.control.syndromes import CommandSyndrome as Because
from gpunetio.providers.soft import SoftProvider
from gpunetio.verbs import MR, Context, SendWr, Sge
from nic_rig import until

pytestmark = pytest.mark.soft_nic

NBYTES, SHIFT = 1 << 16, 1 << 12
ALL = {"a": 1, "rw": 1, "rr": 1, "lw": 1, "lr": 1}


class Rig:
    """A region in the same process as a queue pair that is connected to itself."""

    def __init__(self, ctx: Context):
        assert isinstance(ctx.provider, SoftProvider)
        self.ctx, self.provider = ctx, ctx.provider
        self.pd, self.cq = ctx.create_pd(), ctx.create_cq(16)
        self.memory, self.local = np.zeros(NBYTES, np.uint8), np.arange(NBYTES, dtype=np.uint8)
        self.region, self.mine = self.pd.register(self.memory), self.pd.register(self.local)

    def create(self, entries: int = 1, size: int = NBYTES, shift: int = SHIFT, pdn: int = 0,
               region: MR | None = None, entry: dict[str, int] | None = None, **context: Any) -> tuple[int, int]:
        """Make a key that leads to the region, `shift` bytes away: return the object's handle, and the key."""
        region = region or self.region
        first = region.address
        fields = {
            "access_mode_1_0": MkeyAccessMode.KSM, "pd": pdn or self.pd.pdn, "mkey_7_0": 0x5A, "qpn": 0xFFFFFF,
            "start_addr": first + shift, "len": entries * size, "log_entity_size": size.bit_length() - 1,
            "translations_octword_size": entries, **ALL, **context,
        }
        box = cmd.CREATE_MKEY_IN.pack(
            opcode=Opcode.CREATE_MKEY, memory_key_mkey_entry=fields, translations_octword_actual_size=entries
        )
        for n in range(entries):
            klm = {"byte_count": size, "mkey": region.lkey, "address": first + n * size}
            box += KLM.pack(**(klm | (entry or {} if n == entries - 1 else {})))
        handle, out = self.provider.devx_obj_create(bytes(box), cmd.CREATE_MKEY_OUT.size)
        return handle, cmd.CREATE_MKEY_OUT.get(out, "mkey_index") << 8 | 0x5A

    def send(self, key: int, address: int, nbytes: int, opcode: gn.WrOpcode = gn.WrOpcode.RDMA_WRITE) -> gn.WcStatus:
        """Make a request to a remote key, and return how it ended."""
        with self.pd.create_qp(send_cq=self.cq, receive_cq=self.cq, sq_wr=1, rq_wr=1) as qp:
            qp.connect(qp)
            qp.post_send(SendWr(
                opcode=opcode, sges=[Sge(self.mine.address, nbytes, self.mine.lkey)], remote_addr=address, rkey=key,
                add=1,
            ))
            return until(lambda: self.cq.poll(1), "the completion")[0].status


@pytest.fixture
def rig() -> Iterator[Rig]:
    with gn.open("soft0") as ctx:
        yield Rig(ctx)


OK, REFUSED = gn.WcStatus.SUCCESS, gn.WcStatus.REM_ACCESS_ERR


def test_it_leads_to_the_region(rig):
    _, key = rig.create()
    at = rig.region.address + SHIFT
    assert rig.send(key, at + 16, 64) == OK
    assert (rig.memory[16:80] == rig.local[:64]).all()
    assert not rig.memory[80:].any()
    rig.memory[:8] = 0
    assert rig.send(key, at, 8, gn.WrOpcode.ATOMIC_FETCH_AND_ADD) == OK
    assert rig.memory[:8].view("<u8")[0] == 1
    assert rig.send(key, at + NBYTES - 8, 8, gn.WrOpcode.RDMA_READ) == OK
    assert rig.send(key, at + NBYTES - 8, 9) == REFUSED
    assert rig.send(key, at - 1, 1) == REFUSED
    assert rig.send(rig.region.rkey, rig.region.address, 1) == OK  # the region's own key is as it was


def test_rights_are_those_of_both(rig):
    _, key = rig.create(rw=0)
    at = rig.region.address + SHIFT
    assert rig.send(key, at, 8) == REFUSED
    assert rig.send(key, at, 8, gn.WrOpcode.RDMA_READ) == OK
    with rig.pd.register(np.zeros(NBYTES, np.uint8), access=Access.LOCAL_WRITE | Access.REMOTE_WRITE) as region:
        _, key = rig.create(region=region)
        assert rig.send(key, region.address + SHIFT, 8) == OK
        assert rig.send(key, region.address + SHIFT, 8, gn.WrOpcode.RDMA_READ) == REFUSED


def test_without_its_region_it_leads_nowhere(rig):
    handle, key = rig.create()
    at = rig.region.address + SHIFT
    rig.region.close()
    assert rig.send(key, at, 8) == REFUSED
    assert not rig.memory.any()
    regions = [rig.pd.register(np.zeros(64, np.uint8)) for _ in range(200)]
    assert key >> 8 not in {region.lkey >> 8 for region in regions}  # its index is its own until it is destroyed
    rig.provider.devx_obj_destroy(handle)
    assert rig.send(key, at, 8) == REFUSED


def test_a_region_that_changes_is_left(rig):
    _, key = rig.create()
    rig.region.reregister(np.zeros(NBYTES, np.uint8))
    assert rig.send(key, rig.region.address + SHIFT, 8) == REFUSED


def test_its_pd_is_used(rig):
    with gn.open("soft1") as ctx:
        other = Rig(ctx)
        handle, _ = other.create()
        other.region.close()
        other.mine.close()
        with pytest.raises(InUseError):
            other.pd.close()
        other.provider.devx_obj_destroy(handle)
        other.pd.close()


@pytest.mark.parametrize(("arguments", "status", "syndrome", "words"), [
    ({"access_mode_1_0": MkeyAccessMode.MTT}, Status.BAD_PARAM, Because.UNSUPPORTED_FIELD, "access_mode = 1"),
    ({"access_mode_4_2": 1}, Status.BAD_PARAM, Because.UNSUPPORTED_FIELD, "access_mode = 7"),
    ({"entries": 0}, Status.BAD_PARAM, Because.UNSUPPORTED_FIELD, "= 0: give 1 to"),
    ({"entry": {"mkey": 0x123456}}, Status.BAD_RESOURCE, Because.NO_SUCH_MKEY, "no memory key 0x123456"),
    ({"entries": 2, "size": 1 << 12, "entry": {"mkey": 0x123456}}, Status.BAD_PARAM, Because.UNSUPPORTED_FIELD,
     "entry 1 has key 0x123456"),
    ({"entries": 2, "size": 1 << 12, "entry": {"address": 64}}, Status.BAD_PARAM, Because.UNSUPPORTED_FIELD,
     "entry 1 has key .* and address 0x40"),
    ({"len": 0}, Status.BAD_PARAM, Because.MKEY_RANGE, "leads to no byte"),
    ({"shift": 0, "start_addr": 1 << 20, "entry": {"address": 4096}}, Status.BAD_PARAM, Because.MKEY_RANGE, "no byte"),
    ({"pdn": 999}, Status.BAD_RESOURCE, Because.NO_SUCH_PD, "no PD 0x3e7"),
])
def test_what_is_refused(rig, arguments, status, syndrome, words):
    keys = len(rig.provider.nic.mkeys)
    with pytest.raises(DriverError, match=words) as caught:
        rig.create(**arguments)
    assert (caught.value.status, caught.value.syndrome) == (status, syndrome)
    assert len(rig.provider.nic.mkeys) == keys


def test_of_another_pd(rig):
    with rig.ctx.create_pd() as other, pytest.raises(DriverError, match="belongs to PD"):
        rig.create(pdn=other.pdn)


@settings(max_examples=60, deadline=None)
@given(shift=st.integers(-NBYTES, 2 * NBYTES), entries=st.integers(1, 4), log=st.integers(12, 15),
       length=st.integers(1, 2 * NBYTES), at=st.integers(-100, NBYTES), nbytes=st.integers(1, 200))
def test_against_a_model(shift, entries, log, length, at, nbytes):
    """An access succeeds where key and region both reach, and then has the region's bytes, `shift` away."""
    with gn.open("soft0") as ctx:
        rig = Rig(ctx)
        _, key = rig.create(entries=entries, size=1 << log, shift=shift, len=length)
        reach = min(length, entries << log, NBYTES)
        done = rig.send(key, rig.region.address + shift + at, nbytes)
        assert (done == OK) == (at >= 0 and at + nbytes <= reach)
        expected = np.zeros(NBYTES, np.uint8)
        if done == OK:
            expected[at : at + nbytes] = rig.local[:nbytes]
        assert (rig.memory == expected).all()
