"""Adaptive schemes: the widths of stored tokens change between calls, by what attention gave to each.

A store of such a scheme is more than planes with a place for every position: new tokens enter planes that grow (``Extent.TOKENS``), which
begin at the position in the plane ``first``; all others are moved, at a reallocation, to planes whose sizes the scheme says
(``Extent.STORE``). So whatever asks a store for tokens asks the scheme. The runtime holds the planes and calls these hooks; nothing but
planes goes in, and nothing but planes and numbers comes out.
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
from kvcompile.types import Role, SlotSpec

EARLY, SPREAD = 2, 8
"""Steps between a decision and the first move that it leads to, by when it has been made beside the steps' own work; the most steps that
the moves of a graph's layers are spread over, so that no step has all of them."""


class Due(enum.Enum):
    """Time of a decision: not yet; after this step, for moves some steps later; at once, as more tokens came than that can wait for."""

    NOT = "not yet"
    SOON = "some steps ahead"
    NOW = "now"


def on_device(numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return numbers of the host on a device, without a wait for it."""
    made = torch.tensor(numbers, dtype=dtype, device="cpu")
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


class PendingNumbers:
    """Numbers of the device that the host reads later: by then they have been copied, so that reading them waits for nothing."""

    def __init__(self, seen: torch.Tensor) -> None:
        self.event: Any = None
        if seen.is_cuda:
            host = torch.empty_like(seen, device="cpu", pin_memory=True)
            host.copy_(seen, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
            seen = host
        self.seen = seen

    @functools.cached_property
    def numbers(self) -> list[Any]:
        """The numbers as lists; waits only where they are read too early."""
        if self.event is not None:
            self.event.synchronize()
        return list(self.seen.tolist())


@dataclass(frozen=True)
class Churn:
    """Counts of reallocations: how many, settled tokens whose keys or values changed width, promotions that codes could not give.

    ``promoted``: of the settled tokens that changed, those that became wider.
    """

    allocations: int = 0
    moved: int = 0
    refused: int = 0
    promoted: int = 0

    def __add__(self, other: Churn) -> Churn:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Churn(*(ours + theirs for ours, theirs in pairs))


@dataclass(frozen=True)
class Stored:
    """A layer's planes of keys and of values with their slots, its number, and the position of the first token in planes that grow."""

    keys: Planes
    values: Planes
    slots: tuple[SlotSpec, SlotSpec]
    layer: int
    first: int


@dataclass(frozen=True)
class StoredTokens:
    """The tokens of one live store, ``count`` of each row; the next step changes its planes, so read it before that.

    ``first``: the position where planes that grow begin. ``path``: the module path of an attention that reads it. ``churn``: what
    reallocations changed, counted with keys.
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
        """Whether they are keys or values."""
        return self.slot.role

    @property
    def bits(self) -> torch.Tensor:
        """Bits a channel of each token, int64 [B, T] on the host. Waits for the device."""
        return self.scheme.token_bits(self.planes, self.slot, self.first, self.count).cpu()

    @property
    def attended(self) -> torch.Tensor | None:
        """The importance of each token, float32 [B, T] on the host; None where another store knows it. Waits for the device."""
        found = self.scheme.attended(self.planes, self.slot, self.count)
        return None if found is None else found.cpu()


@dataclass(frozen=True)
class Reallocated:
    """The planes of keys and values after a reallocation, and what it changed."""

    keys: Planes
    values: Planes
    churn: Churn


class Adaptive(Scheme):
    """A scheme whose stored tokens change their widths; its attention writes what it gave to each token."""

    observes: ClassVar[str]
    """The operation in ``torch.ops.kvcompile`` that takes in what queries attend to where they see this call's tokens alone."""
    in_order: ClassVar[bool] = True

    @property
    def position_independent(self) -> bool:
        return False

    @abc.abstractmethod
    def share(self, tokens: int) -> float:
        """The budget at a number of tokens, a fraction of their bytes in 16 bits."""

    @property
    @abc.abstractmethod
    def announced(self) -> float:
        """The largest budget at any number of tokens."""

    def bits_per_value(self, slot: SlotSpec) -> float:
        """Bits per original value that the budget allows, and those of originals that are kept beside it."""
        return 16 * self.announced + 8 * self.original_bytes(slot) / slot.head_dim

    def original_bytes(self, slot: SlotSpec) -> int:
        """Bytes of a token's original, of one head, which the scheme keeps beside its budget; 0 where it keeps none."""
        del slot
        return 0

    @abc.abstractmethod
    def with_room(self, planes: Planes, first: int, tokens: int) -> Planes:
        """The planes with room for ``tokens`` tokens: the very tensors where they have it. Waits for nothing.

        ``first``: the position where those that grow begin.
        """

    @abc.abstractmethod
    def room(self, planes: Planes, first: int) -> int:
        """How many tokens the planes have room for, where those that grow begin at position ``first``."""

    @abc.abstractmethod
    def tokens(self, planes: Planes, slot: SlotSpec, count: int) -> torch.Tensor:
        """The values of the first ``count`` tokens, float32 [B, K, T, D]."""

    @abc.abstractmethod
    def cut(self, planes: Planes, slot: SlotSpec, count: int) -> Planes:
        """Planes of the first ``count`` tokens alone; codes as they are."""

    @abc.abstractmethod
    def of_rows(self, planes: Planes, slot: SlotSpec, rows: torch.Tensor) -> Planes:
        """Planes of the given batch rows; codes as they are."""

    @abc.abstractmethod
    def histogram(self, planes: Planes, slot: SlotSpec, first: int, count: int) -> dict[int, int]:
        """How many of the first ``count`` tokens of all rows have how many bits a channel. Waits for the device.

        ``first``: the position where planes that grow begin.
        """

    @abc.abstractmethod
    def token_bits(self, planes: Planes, slot: SlotSpec, first: int, count: int) -> torch.Tensor:
        """Bits a channel of each of the first ``count`` tokens, int64 [B, T]. Waits for the device."""

    @abc.abstractmethod
    def attended(self, planes: Planes, slot: SlotSpec, count: int) -> torch.Tensor | None:
        """The importance of each of the first ``count`` tokens, as attention gave it, float32 [B, T]; None for planes without it."""

    @abc.abstractmethod
    def quiet(self, first: int, count: int) -> bool:
        """Whether neither ``due`` nor ``looks`` can hold whatever the layer, by a comparison or two: asked of every layer at every step."""

    @abc.abstractmethod
    def due(self, keys: Planes, slot: SlotSpec, first: int, count: int, layer: int, early: int = EARLY) -> Due:
        """Whether widths are to be decided anew, ``first`` tokens having been there at the last time and ``count`` now.

        ``early``: how many steps before the moves have to be done that is asked for. By numbers alone: nothing waits for the device.
        """

    @abc.abstractmethod
    def looks(self, keys: Planes, slot: SlotSpec, first: int, count: int, layer: int) -> bool:
        """Whether drift is looked at after this step: what was seen at the last look is read, and ``drifted`` is asked anew."""

    @abc.abstractmethod
    def importance(self, layers: Sequence[Planes], count: int, among: Sequence[Planes]) -> torch.Tensor:
        """Copies of what the planes of keys of L layers know of the importance of ``count`` tokens, [L, ...].

        ``among``: planes of keys of all layers of the graph that are stored alike. Waits for nothing, and so do ``drifted`` and ``decide``,
        which may run beside the next step: they read these copies, and planes that steps do not write.
        """

    @abc.abstractmethod
    def drifted(self, importance: torch.Tensor) -> torch.Tensor:
        """Whether widths are to be decided anew since what attention gives has changed, bool [L] on the device."""

    @abc.abstractmethod
    def decide(self, layers: Sequence[Stored], importance: torch.Tensor) -> Any:
        """Decide the widths of the tokens of some layers of equal slots and batch anew."""

    @abc.abstractmethod
    def move(self, layer: Stored, decision: Any, number: int, held: int) -> Reallocated:
        """Move a layer's tokens as it was decided, ``number`` among the layers of the decision; ``held`` tokens are there now.

        The planes that come back may be the very tensors, written. Waits for the decision.
        """
