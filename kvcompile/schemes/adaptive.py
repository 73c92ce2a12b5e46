"""Adaptive schemes: the bit widths of stored tokens change between calls, by the attention that each token received.

New tokens enter planes that grow (``Extent.TOKENS``) and begin at the position in the plane ``first``. A reallocation re-encodes all other
tokens into planes whose sizes the scheme chooses (``Extent.STORE``). A token's position therefore does not say where it is stored, and
every read of a store asks the scheme. The runtime holds the planes and calls these hooks: planes go in, planes and numbers come out.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvcompile.schemes.base import Planes, Scheme
from kvcompile.schemes.device_event import Event, new_event
from kvcompile.types import Role, SlotSpec

EARLY, SPREAD = 2, 8
"""Steps from a decision to its first move, if the decision is computed concurrently with steps; and the largest number of steps over which
the moves of a graph's layers are spread, so that no single step does all of them."""


class Due(enum.Enum):
    """The time at which widths must be decided again.

    Not yet; after this step, with the moves applied some steps later; or now, as too many tokens wait.
    """

    NOT = "not yet"
    SOON = "some steps ahead"
    NOW = "now"


def on_device(numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return a list of numbers as a tensor [n] on ``device``; the copy to a CUDA device does not make the host wait."""
    made = torch.tensor(numbers, dtype=dtype, device="cpu")
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


class PendingNumbers:
    """Device numbers that the host reads some steps later: they are copied asynchronously, so that reading them does not wait."""

    def __init__(self, seen: torch.Tensor) -> None:
        self.event: Event | None = None
        if seen.is_cuda:
            host = torch.empty_like(seen, device="cpu", pin_memory=True)
            host.copy_(seen, non_blocking=True)
            self.event = new_event()
            self.event.record()
            seen = host
        self.seen = seen

    @functools.cached_property
    def numbers(self) -> list[Any]:
        """The numbers as lists. Waits only if the copy has not finished."""
        if self.event is not None:
            self.event.synchronize()
        return list(self.seen.tolist())


@dataclass(frozen=True)
class Churn:
    """Counts of reallocations and of the tokens that they changed.

    ``allocations``: reallocations. ``moved``: encoded tokens whose keys or values changed width; ``promoted``: those that became wider.
    ``refused``: promotions refused because no full-precision copy was kept.
    """

    allocations: int = 0
    moved: int = 0
    refused: int = 0
    promoted: int = 0

    def __add__(self, other: Churn) -> Churn:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Churn(*(ours + theirs for ours, theirs in pairs))


@dataclass(frozen=True)
class StoredLayer:
    """One layer's key and value planes with their slots, its number, and the position of the first token in planes that grow."""

    keys: Planes
    values: Planes
    slots: tuple[SlotSpec, SlotSpec]
    layer: int
    first: int


@dataclass(frozen=True)
class StoredTokens:
    """The tokens of one live store, ``count`` of each row. The next step changes its planes: read it before.

    ``first``: the position where planes that grow begin. ``path``: the module path of an attention that reads the store. ``churn``: counts
    of the changes by reallocations; set for keys, zero for values.
    """

    scheme: Adaptive
    planes: Planes
    slot: SlotSpec
    first: int
    count: int
    path: str
    churn: Churn

    @property
    def role(self) -> Role:
        """The slot's role: keys or values."""
        return self.slot.role

    @property
    def bits(self) -> torch.Tensor:
        """Bits per channel of each token, int64 [B, T] on the host. Waits for the device."""
        return self.scheme.token_bits(self.planes, self.slot, self.first, self.count).cpu()

    @property
    def attended(self) -> torch.Tensor | None:
        """The importance of each token, float32 [B, T] on the host; None if the store does not hold it. Waits for the device."""
        found = self.scheme.attended(self.planes, self.slot, self.count)
        return None if found is None else found.cpu()


@dataclass(frozen=True)
class Reallocated:
    """The planes of keys and values after a reallocation, and counts of its changes."""

    keys: Planes
    values: Planes
    churn: Churn


class Adaptive(Scheme):
    """A scheme whose stored tokens change width; its attention records how much attention each token received."""

    observes: ClassVar[str]
    """Name of the operation in ``torch.ops.kvcompile`` that records attention over this call's tokens when a call attends to no others."""
    in_order: ClassVar[bool] = True

    @property
    def position_independent(self) -> bool:
        return False

    @abc.abstractmethod
    def share(self, tokens: int) -> float:
        """Return the budget for this number of tokens, as a fraction of their bytes in 16 bits."""

    @property
    @abc.abstractmethod
    def announced(self) -> float:
        """The largest budget over all numbers of tokens, as a fraction of their bytes in 16 bits."""

    def bits_per_value(self, slot: SlotSpec) -> float:
        """Return the bits per value that the budget allows, plus those of a full-precision copy kept outside the budget."""
        return 16 * self.announced + 8 * self.original_bytes(slot) / slot.head_dim

    def original_bytes(self, slot: SlotSpec) -> int:
        """Return the bytes of one token's full-precision copy in one head, kept outside the budget; 0 if none is kept."""
        del slot
        return 0

    @abc.abstractmethod
    def with_room(self, planes: Planes, first: int, tokens: int) -> Planes:
        """Return planes with room for ``tokens`` tokens: the given tensors if they have it. Does not synchronise.

        ``first``: the position where planes that grow begin.
        """

    @abc.abstractmethod
    def room(self, planes: Planes, first: int) -> int:
        """Return how many tokens the planes have room for; ``first``: the first position in the planes that grow."""

    @abc.abstractmethod
    def tokens(self, planes: Planes, slot: SlotSpec, count: int) -> torch.Tensor:
        """Return the values of the first ``count`` tokens, float32 [B, K, T, D]."""

    @abc.abstractmethod
    def cut(self, planes: Planes, slot: SlotSpec, count: int) -> Planes:
        """Return planes that hold only the first ``count`` tokens, with their codes and scales unchanged."""

    @abc.abstractmethod
    def of_rows(self, planes: Planes, slot: SlotSpec, rows: torch.Tensor) -> Planes:
        """Return planes of the given batch rows, with their codes and scales unchanged."""

    @abc.abstractmethod
    def histogram(self, planes: Planes, slot: SlotSpec, first: int, count: int) -> dict[int, int]:
        """Return {bits: number of tokens} over the first ``count`` tokens of all rows, by bits per channel. Waits for the device.

        ``first``: the first position in the planes that grow.
        """

    @abc.abstractmethod
    def token_bits(self, planes: Planes, slot: SlotSpec, first: int, count: int) -> torch.Tensor:
        """Return the bits per channel of each of the first ``count`` tokens, int64 [B, T]. Waits for the device."""

    @abc.abstractmethod
    def attended(self, planes: Planes, slot: SlotSpec, count: int) -> torch.Tensor | None:
        """Return the importance of the first ``count`` tokens, from the attention received, float32 [B, T]; None for planes without it."""

    @abc.abstractmethod
    def quiet(self, first: int, count: int) -> bool:
        """Return whether no layer can need a decision (``due``) or a drift check (``looks``) now.

        It must cost no more than a comparison or two, since every layer asks at every step.
        """

    @abc.abstractmethod
    def due(self, keys: Planes, slot: SlotSpec, first: int, count: int, layer: int, early: int = EARLY) -> Due:
        """Return when widths must be decided anew, with ``count`` tokens now and ``first`` at the last decision (0: none so far).

        ``keys``: the key planes of layer number ``layer``. ``early``: SOON is returned from this many tokens before the decision is due,
        since its moves are applied some steps later; never before the first decision. Does not synchronise.
        """

    @abc.abstractmethod
    def looks(self, keys: Planes, slot: SlotSpec, first: int, count: int, layer: int) -> bool:
        """Return whether drift is checked after this step: the last check's result is read then, and ``drifted`` started again."""

    @abc.abstractmethod
    def importance(self, layers: Sequence[Planes], count: int, among: Sequence[Planes]) -> torch.Tensor:
        """Return a copy of the importance of the first ``count`` tokens of L layers, from their key planes, [L, ...]. Does not synchronise.

        ``among``: key planes of all layers of the graph with equal layout, over which schemes may average the importance. ``drifted`` and
        ``decide`` may run concurrently with the next step: they read this copy, and planes that steps do not write.
        """

    @abc.abstractmethod
    def drifted(self, importance: torch.Tensor) -> torch.Tensor:
        """Return whether each layer's widths must be decided anew because attention has shifted, bool [L] on the device."""

    @abc.abstractmethod
    def decide(self, layers: Sequence[StoredLayer], importance: torch.Tensor) -> Any:
        """Return new widths for the tokens of some layers of equal slots and batch, as ``move`` takes them, without a wait."""

    @abc.abstractmethod
    def move(self, layer: StoredLayer, decision: Any, number: int, held: int) -> Reallocated:
        """Return a layer's planes re-encoded at the decided widths; ``number``: its index in the decision; ``held``: tokens stored by now.

        May write and return the given tensors. Waits for the decision.
        """
