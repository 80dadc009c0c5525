"""The software NICs that open while one test runs: their faults and captures, and the artefacts if the test fails."""

from __future__ import annotations

import re
import shutil
import sys
import zlib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BadStateError
from ..fabric.faults import Faults
from ..nic.engine.port import CPU, TWIN, PortConfig
from ..providers import watch

if TYPE_CHECKING:
    from ..nic.nic import SoftNic

DIAGNOSIS = "diagnosis.txt"
_LONGEST_NAME = 150  # file systems take 255 bytes


@dataclass(frozen=True)
class Network:
    """The settings that NICs get when they open.

    `faults`   faults to inject, or None
    `forced`   whether these faults replace those of the program's own port
    `twin`     whether the NIC's engine runs on the twin of a GPU
    """

    faults: Faults | None = None
    forced: bool = False
    twin: bool = False

    def port(self, asked: PortConfig) -> PortConfig:
        """Return the port that a NIC gets when a program asks for the port `asked`."""
        if self.forced or asked.faults is None:
            asked = replace(asked, faults=self.faults)
        if self.twin and asked.engine == CPU and asked.wire_kind.neighbours:
            asked = replace(asked, engine=TWIN)
        return asked


def open_nics() -> list[SoftNic]:
    """Return the software NICs that are open in this process. Load nothing if there are none."""
    soft = sys.modules.get("gpunetio.providers.soft")
    return soft.open_nics() if soft else []


def _diagnosis(nic: SoftNic) -> str:
    """Return the diagnosis of a NIC, or why there is none: a thread of the test may be closing the NIC."""
    from ..nic.diagnosis import diagnose

    try:
        return diagnose(nic)
    except Exception as error:
        return f"{nic.name}, whose diagnosis failed: {type(error).__name__}: {error}\n"


def folder_of(artefacts: Path, test: str) -> Path:
    """Return the folder for the artefacts of a test. Its name is valid for any file system and any upload."""
    name = re.sub(r"[^\w.-]+", "-", test).strip("-")
    if len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}-{zlib.crc32(test.encode()):08x}"
    return artefacts / name


class NicsOfTest:
    """The `gpunetio.providers.watch.Watcher` of one test.

    `folder` is the folder for captures and the diagnosis, or None. It is removed unless the test fails.
    """

    def __init__(self, test: str, network: Network, folder: Path | None):
        self.network, self.folder = network, folder
        self._test = test
        self._closed: list[str] = []  # the diagnoses of closed NICs
        self._injected: Counter[str] = Counter()  # by closed NICs, less what open NICs had injected before the test
        self._closings = 0  # how many NICs have added to it
        for nic in open_nics():
            with suppress(BadStateError):  # it has closed in the meantime
                self._injected.subtract(nic.injected())
        self._failed = False
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier run

    # --- gpunetio.providers.watch.Watcher

    def opening(self, name: str, port: PortConfig) -> PortConfig:
        """Return the port with the faults of the test, and with a capture in its folder."""
        port = self.network.port(port)
        return port if self.folder is None else watch.with_capture(port, self.folder)

    def closing(self, nic: SoftNic) -> None:
        """Keep the diagnosis and the counts of a NIC that closes."""
        self._injected.update(nic.injected())
        self._closings += 1
        if self.folder is not None:
            from ..nic.diagnosis import diagnose

            self._closed.append(diagnose(nic))

    # --- what the test asks

    def injected(self) -> dict[str, int]:
        """Return how many faults open and closed NICs have injected during the test, by kind."""
        while True:
            closings, counts = self._closings, Counter(self._injected)
            for nic in open_nics():
                with suppress(BadStateError):  # it has closed in the meantime
                    counts.update(nic.injected())
            if self._closings == closings:  # otherwise one NIC is counted twice, or not at all
                return dict(counts)

    # --- its end

    def failed(self, phase: str, text: str) -> None:
        """Write the diagnosis while the NICs of fixtures are still open. `text` is pytest's report."""
        self._failed = True
        if self.folder is None:
            return
        parts = [f"{self._test} failed in phase {phase}\n", f"{text}\n"]
        parts += [f"open: {_diagnosis(nic)}" for nic in open_nics()]
        parts += [f"closed before: {told}" for told in self._closed]
        parts += self._told_by_others()
        if len(parts) == 2:
            parts.append("no software NIC was open in this process, or in one that it started\n")
        self._write(self.folder, parts)

    def _told_by_others(self) -> list[str]:
        """Return the diagnoses of processes that the test has started, and remove their files."""
        told = []
        for file in sorted(self.folder.glob(watch.DIAGNOSES)) if self.folder else ():
            told.append(f"closed in process {file.stem}: {file.read_text(encoding='utf-8')}")
            file.unlink()
        return told

    def _write(self, folder: Path, parts: list[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / DIAGNOSIS).open("a", encoding="utf-8") as file:
            file.write("\n".join(parts) + "\n")

    def ended(self) -> None:
        """Remove the artefacts unless the test has failed. By now, NICs have closed their captures."""
        if self.folder is None:
            return
        if not self._failed:
            shutil.rmtree(self.folder, ignore_errors=True)
        elif told := self._told_by_others():  # by processes that ended later
            self._write(self.folder, told)
