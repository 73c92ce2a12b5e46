"""Rules: the options of ``smartkv`` that reallocation reads, as a protocol, since the scheme's own module imports reallocation."""

from __future__ import annotations

from typing import Protocol

from kvcompile.extensions.smartkv.allocation import Terms
from kvcompile.extensions.smartkv.budget import Cost, KeyValueWidths
from kvcompile.extensions.smartkv.hysteresis import Hysteresis
from kvcompile.extensions.smartkv.ladder import Ladder, LevelPreference
from kvcompile.types import SlotSpec


class Rules(Protocol):
    """The scheme's options by name, and the numbers derived from them."""

    @property
    def tau(self) -> float:
        """The divergence of importance, in nats, above which widths are decided anew."""
        ...

    @property
    def moved(self) -> float:
        """The share of all ranks by which a token's rank must change to count as moved."""
        ...

    @property
    def drift(self) -> float:
        """The share of moved tokens above which widths are decided anew."""
        ...

    @property
    def interval(self) -> int:
        """The least number of decode steps between two decisions."""
        ...

    @property
    def protect_first(self) -> int:
        """The number of tokens at the start of a row that keep the largest widths."""
        ...

    @property
    def protect_last(self) -> int:
        """The number of newest tokens of a row that keep the largest widths."""
        ...

    @property
    def head_share(self) -> float:
        """The share of head-weighted importance in a token's blended importance, 0 to 1."""
        ...

    @property
    def recency(self) -> float:
        """The age in steps at which importance has decayed by a factor e; 0 ignores ages."""
        ...

    @property
    def levels(self) -> Ladder:
        """The ladder of levels; a token's level sets the widths of its key and its value."""
        ...

    @property
    def key_value_widths(self) -> KeyValueWidths:
        """The widths, in bits of a code, that keys and values may have."""
        ...

    @property
    def preference(self) -> LevelPreference:
        """The exponent of a width's utility, the least importance that counts, and the weights of keys and values in a token's utility."""
        ...

    @property
    def hysteresis(self) -> Hysteresis:
        """The limits that a token's change of rank must pass before its widths change: how far, for how many checks, at what cost."""
        ...

    @property
    def keeps_originals(self) -> bool:
        """Whether reallocation may widen a stored token, from its full-precision copy."""
        ...

    @property
    def for_good(self) -> int:
        """Bytes of importance and decision that are stored per token at any width, besides its codes."""
        ...

    def __hash__(self) -> int:
        """Return the hash of the options; results of decisions are cached by it."""
        ...

    def terms(self, slot: SlotSpec) -> Terms:
        """Return the costs and worths by which levels are decided, for a layer of ``slot``'s sizes."""
        ...

    def cost(self, slot: SlotSpec) -> Cost:
        """Return the bytes of a settled token of a slot's layer by width, as ``Cost``."""
        ...

    def mean_bytes(self, slot: SlotSpec) -> int:
        """Return the bytes of the mean vector that is added to one head's narrow keys."""
        ...

    def layer_share(self, tokens: int, slot: SlotSpec, layer: int) -> float:
        """Return the budget of a layer that holds ``tokens`` tokens, as a fraction of their bytes in 16 bits."""
        ...
