"""Many queues for one kernel: their structures lie in one contiguous array, as in C."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NoReturn, overload

from ..arguments import instance
from ..closing import Closing
from ..errors import BadStateError, InvalidValueError
from ..formats.device_structs import DEV_QP
from ..jit.code import Launch
from ..verbs import QP
from .export import ExportedQp, Exporter, ExportOptions
from .handlers import mode_of, structure_kind
from .structure import Place, places

_ALIGNMENT = 1 << 16


class ExportedQps(Closing, Sequence[ExportedQp]):
    """Exported QPs whose structures form an array (`doca_gpu_verbs_export_multi_qps_dev`).

    A kernel takes the array as an argument. Element i is at `device_address` + i × `STRIDE`. Each element is an
    `ExportedQp`; closing the array closes them all.
    """

    STRIDE = DEV_QP.size

    def __init__(self, gpu: Exporter, qps: Sequence[QP | ExportedQp], options: ExportOptions):
        if not instance("qps", qps, Sequence):
            raise InvalidValueError("no queue pairs to export: an array needs at least one")
        for i, qp in enumerate(qps):
            if instance(f"qps[{i}]", qp, QP, ExportedQp) in qps[:i]:
                raise InvalidValueError(f"qps[{i}], QP {qp.qpn:#x}, is in the list twice")
        modes = [qp.send_dbr_mode if isinstance(qp, ExportedQp) else mode_of(qp, options.send_dbr_mode) for qp in qps]
        nbytes, offsets = places(len(qps))
        with ExitStack() as undo:
            memory = gpu.alloc(nbytes, structure_kind(modes, options.cpu_gpu), _ALIGNMENT)
            undo.callback(memory.close)
            found: dict[int, ExportedQp] = {}
            # Queues that are already exported move last, and move back if a later step fails.
            for i in sorted(range(len(qps)), key=lambda i: isinstance(qps[i], ExportedQp)):
                qp, place = qps[i], Place(memory, *offsets[i])
                if isinstance(qp, ExportedQp):
                    before, found[i] = qp.place, qp
                    qp.move(place)
                    undo.callback(qp.move, before)
                else:
                    found[i] = gpu.export(qp, options, place)
                    undo.callback(found[i].close)
            undo.pop_all()
        self._gpu, self._memory, self._qps = gpu, memory, tuple(found[i] for i in range(len(qps)))
        for qp in self._qps:
            qp.free_own()

    @property
    def device_address(self) -> int:
        """Return the `struct doca_gpu_dev_verbs_qp *` of element 0."""
        if self._memory.closed:
            raise BadStateError("this array of exported QPs is closed")
        return self._memory.device_address

    def check_launch(self) -> None:
        """Raise BadStateError if a queue is not connected. Called before a launch with the array as an argument."""
        for qp in self._qps:
            qp.check_launch()

    def used_by(self, launch: Launch) -> None:
        """Keep the array open while `launch`, which has it as an argument, runs."""
        for qp in self._qps:
            qp.used_by(launch)

    def close(self) -> None:
        """Close every element, then the array (`doca_gpu_verbs_unexport_multi_qps_dev`). Idempotent.

        Wait until no kernel uses any of them. TimedOutError if a kernel does not end.
        """
        if not self._gpu.opened_here:
            return
        for qp in self._qps:
            qp.wait_idle()
        with ExitStack() as steps:  # in reverse order; every step runs, even if others raise
            steps.callback(self._memory.close)
            for qp in self._qps:
                steps.callback(qp.close)

    @overload
    def __getitem__(self, index: int) -> ExportedQp: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[ExportedQp]: ...

    def __getitem__(self, index: int | slice) -> ExportedQp | Sequence[ExportedQp]:
        return self._qps[index]

    def __len__(self) -> int:
        return len(self._qps)

    def __repr__(self) -> str:
        closed = ", closed" if self._memory.closed else ""
        return f"<array of {len(self)} exported QPs on GPU {self._gpu.name}{closed}>"

    def __reduce__(self) -> NoReturn:
        raise BadStateError("an array of exported QPs cannot be pickled: export them in the other process")
