"""A simulated bad network: which faults outgoing frames get, and how often."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..arguments import instance, number, whole
from ..errors import InvalidValueError


@dataclass(frozen=True)
class Faults:
    """The faults of the frames that leave a NIC. Probabilities are 0 … 1 per frame; `delay_us` delays every frame.

    The same seed and the same frames give the same faults.
    """

    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    corruption: float = 0.0
    delay_us: float = 0.0
    seed: int = 1

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Parse names and values of fields, for example "loss=0.01,reordering=0.05,seed=7"."""
        text = instance("faults", text, str)
        known = {field.name: type(field.default) for field in fields(cls)}
        values = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                values[name.strip()] = known[name.strip()](value)
            except (KeyError, ValueError):
                raise InvalidValueError(
                    f"{part!r} is not a fault: give NAME=VALUE, separated by commas; names are {', '.join(known)}"
                ) from None
        return cls(**values)

    def __post_init__(self) -> None:
        for name in ("loss", "duplication", "reordering", "corruption"):
            if not 0 <= number(name, getattr(self, name)) <= 1:
                raise InvalidValueError(f"{name} = {getattr(self, name)}: a probability is 0 to 1")
        if not 0 <= number("delay_us", self.delay_us) <= 1e6:
            raise InvalidValueError(f"delay_us = {self.delay_us}: it must be 0 to 1000000")
        whole("seed", self.seed)
