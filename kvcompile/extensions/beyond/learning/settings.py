"""The settings of learning; the defaults are the paper's (its Table 1), with windows and rates in units where a group spans 0 to 1."""

from __future__ import annotations

import dataclasses
import math

from kvcompile.errors import BadLearnSetting
from kvcompile.settings import Inner


@dataclasses.dataclass(frozen=True)
class LearnSettings:
    """The settings of learning.

    ``steps``           largest number of optimizer steps, and the length of the rate's cosine
    ``batch``           sequences per step, over all processes; smaller batches are joined as pieces of one step
    ``rate``            Adam's learning rate at the first step
    ``window``          the distance from a threshold within which values move it
    ``validate_every``  steps between validations;  ``patience``: consecutive rising validations that end learning
    ``levels``, ``thresholds``, ``half_wave``   False for the paper's ablations
    ``margin``          least distance of thresholds, in the units of ``window``
    ``compared``        whether to compare training with serving first, if the model can make a cache
    ``memory_budget``   share of activations that Inductor keeps for the backward pass; below 1 it recomputes the others

    Raises BadLearnSetting for a number outside of its range.
    """

    steps: int = 500
    batch: int = 32
    rate: float = 7e-4
    window: float = 0.009
    validate_every: int = 10
    patience: int = 3
    levels: bool = True
    thresholds: bool = True
    half_wave: bool = True
    margin: float = 1e-5
    inner: Inner = Inner.INDUCTOR
    memory_budget: float = 1.0
    compared: bool = True

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "validate_every", "patience"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadLearnSetting(setting=name, expected="a whole number, at least 1", found=value)
        for name, high in (("rate", 1.0), ("window", 0.5), ("margin", 0.01)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 < value <= high:
                raise BadLearnSetting(setting=name, expected=f"a number above 0, at most {high:g}", found=value)
        if not isinstance(self.memory_budget, (int, float)) or not 0 <= self.memory_budget <= 1:
            raise BadLearnSetting(setting="memory_budget", expected="a number from 0 to 1", found=self.memory_budget)

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0: a cosine down to zero."""
        return self.rate * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def plain(self) -> dict[str, object]:
        """Return the settings as a dict for JSON."""
        return {**dataclasses.asdict(self), "inner": self.inner.value}
