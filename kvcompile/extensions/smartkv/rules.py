"""Rules: the options of ``smartkv`` that reallocation reads, as a protocol, since the scheme's own module imports reallocation."""

from __future__ import annotations

from typing import Protocol

from kvcompile.extensions.smartkv.allocation import Terms
from kvcompile.extensions.smartkv.budget import Cost, KeyValueWidths
from kvcompile.extensions.smartkv.hysteresis import Hysteresis
from kvcompile.extensions.smartkv.ladder import Ladder, LevelPreference
from kvcompile.types import SlotSpec


class Rules(Protocol):
    """Options of the scheme, by their names, and what follows from them."""

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
        """How many tokens at the start of a row keep the largest widths."""
        ...

    @property
    def protect_last(self) -> int:
        """How many of a row's newest tokens keep the largest widths."""
        ...

    @property
    def head_share(self) -> float:
        """The share of head-weighted importance in a token's worth, 0 to 1."""
        ...

    @property
    def recency(self) -> float:
        """How many tokens back the bonus of new tokens reaches; 0 for no bonus."""
        ...

    @property
    def levels(self) -> Ladder:
        """The levels of a token."""
        ...

    @property
    def key_value_widths(self) -> KeyValueWidths:
        """The widths of keys and of values."""
        ...

    @property
    def preference(self) -> LevelPreference:
        """The weights of a step's worth."""
        ...

    @property
    def hysteresis(self) -> Hysteresis:
        """How a width holds."""
        ...

    @property
    def keeps_originals(self) -> bool:
        """Return whether reallocation may give a stored token more bits."""
        ...

    @property
    def for_good(self) -> int:
        """Bytes that attention and the allocator keep of each token."""
        ...

    def __hash__(self) -> int:
        """Decisions are kept by it."""
        ...

    def terms(self, slot: SlotSpec) -> Terms:
        """The terms of a decision."""
        ...

    def cost(self, slot: SlotSpec) -> Cost:
        """Bytes of a token that is settled."""
        ...

    def mean_bytes(self, slot: SlotSpec) -> int:
        """Bytes of what is added to a head's narrow keys."""
        ...

    def layer_share(self, tokens: int, slot: SlotSpec, layer: int) -> float:
        """The budget of one layer at a number of tokens."""
        ...
