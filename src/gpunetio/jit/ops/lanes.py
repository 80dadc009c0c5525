"""Operations among the lanes of a warp that run together."""

# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

from ..compile import device_function
from .lowering import INT, llvm, nothing, op, ptx
from .threads import on_host

# Threads of a CUDA warp that are converged at some point of the program can act as one. Host threads never are.


@op(ret=32, cpu=lambda b: INT[32](1), cuda=ptx("activemask.b32 $0;", 32, convergent=True))
def _active_lanes() -> int: ...


@op(32, 64, ret=32, cpu=lambda b, lanes, value: lanes,
    cuda=ptx("match.any.sync.b64 $0, $2, $1;", 32, convergent=True))
def _match(lanes: int, value: int) -> int: ...


@device_function
def converged_lanes(value):
    """Return the mask of lanes that are converged here and have the same `value`; on the host, only this thread."""
    return 1 if on_host() else _match(_active_lanes(), value)


@device_function
def lanes_with(lanes, value):
    """Return the lanes of a mask that have the same `value` as this one. All lanes of the mask call this."""
    return lanes if on_host() else _match(lanes, value)


@op(32, ret=32, cpu=llvm("llvm.ctpop", INT[32]), cuda=ptx("popc.b32 $0, $1;", 32, pure=True))
def count_lanes(lanes: int) -> int:
    """Return the number of lanes in a mask."""


@op(32, ret=32, cpu=lambda b, lanes: INT[32](0),
    cuda=ptx("{.reg .b32 m; mov.u32 m, %lanemask_lt; and.b32 m, m, $1; popc.b32 $0, m;}", 32, pure=True))
def rank_among(lanes: int) -> int:
    """Return the number of lanes of a mask that are below this one."""


@op(32, cpu=nothing, cuda=ptx("bar.warp.sync $0;", convergent=True))
def sync_lanes(lanes: int) -> None:
    """Wait for the lanes of a mask, which all call this. Each lane then sees what the others have stored."""


_SHFL64_DOWN = (
    "{.reg .b32 l, h; mov.b64 {l, h}, $1; shfl.sync.down.b32 l, l, $2, 31, 0xffffffff;"
    " shfl.sync.down.b32 h, h, $2, 31, 0xffffffff; mov.b64 $0, {l, h};}"
)


@op(64, 32, ret=64, cpu=lambda b, value, lanes: value, cuda=ptx(_SHFL64_DOWN, 64, convergent=True))
def shuffle_down(value: int, lanes: int) -> int:
    """Return the `value` of the lane that is `lanes` above (`__shfl_down_sync`). All lanes call this. CUDA only."""


_SHFL64_FIRST = (
    "{.reg .b32 l, h, f; brev.b32 f, $2; bfind.shiftamt.u32 f, f; mov.b64 {l, h}, $1;"
    " shfl.sync.idx.b32 l, l, f, 31, $2; shfl.sync.idx.b32 h, h, f, 31, $2; mov.b64 $0, {l, h};}"
)


@op(64, 32, ret=64, cpu=lambda b, value, lanes: value, cuda=ptx(_SHFL64_FIRST, 64, convergent=True))
def from_first(value: int, lanes: int) -> int:
    """Return the `value` of the lowest lane of a mask in all its lanes."""


ALL_LANES = 0xFFFFFFFF

_BALLOT = "{.reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}"


@op(32, ret=32, cpu=lambda b, which: b.zext(b.icmp_unsigned("!=", which, INT[32](0)), INT[32]),
    cuda=ptx(_BALLOT, 32, convergent=True))
def lanes_where(which: int) -> int:
    """Return the mask of lanes in which `which` is not 0 (`__ballot_sync`). All lanes call this."""


_SHFL64_FROM = (
    "{.reg .b32 l, h; mov.b64 {l, h}, $1; shfl.sync.idx.b32 l, l, $2, 31, 0xffffffff;"
    " shfl.sync.idx.b32 h, h, $2, 31, 0xffffffff; mov.b64 $0, {l, h};}"
)


@op(64, 32, ret=64, cpu=lambda b, value, lane: value, cuda=ptx(_SHFL64_FROM, 64, convergent=True))
def from_lane(value: int, lane: int) -> int:
    """Return the `value` of a lane in all lanes (`__shfl_sync`). All lanes call this; on the host there is only one."""


@op(32, ret=32, cpu=lambda b, lanes: b.cttz(lanes, INT[1](0)),
    cuda=ptx("{.reg .b32 r; brev.b32 r, $1; clz.b32 $0, r;}", 32, pure=True))
def first_lane(lanes: int) -> int:
    """Return the number of the lowest lane in a mask, or 32 for an empty mask."""


_SCAN32 = "".join(
    f" shfl.sync.up.b32 t|p, $0, {1 << step}, 0, 0xffffffff; @p add.u32 $0, $0, t;" for step in range(5)
)


@op(32, ret=32, cpu=lambda b, value: value,
    cuda=ptx(f"{{.reg .b32 t; .reg .pred p; mov.b32 $0, $1;{_SCAN32}}}", 32, convergent=True))
def sum_up_to(value: int) -> int:
    """Return the sum of the 32-bit values of this lane and those below it. All lanes call this."""


@op(32, ret=32, cpu=lambda b, value: value,
    cuda=ptx("redux.sync.add.u32 $0, $1, 0xffffffff;", 32, convergent=True))
def sum_of_lanes(value: int) -> int:
    """Return the sum of the 32-bit values of all lanes (`__reduce_add_sync`). All lanes call this."""


@op(ret=32, cpu=lambda b: INT[32](0), cuda=ptx("mov.u32 $0, %laneid;", 32, pure=True))
def lane_or_0() -> int:
    """Return the number of this lane. On the host, where single threads call this, it is 0."""


@op(ret=32, cpu=lambda b: INT[32](1), cuda=lambda b: INT[32](32))
def lanes_here() -> int:
    """Return how many lanes act together: all lanes of a warp on CUDA, and 1 on the host."""
