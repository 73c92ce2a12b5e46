"""smartkv: keys and values of 2, 3, 4 or 8 bits per token, chosen by the attention that it receives, within a budget of bytes.

A token enters at 8 bits. Every ``interval`` steps or more, and earlier if importance drifts, the widths of a layer's tokens are decided
anew: tokens that receive attention keep their width and others become narrower, so that the layer's stored bytes stay below ``budget`` of
its tokens' bytes in 16 bits. All stored bytes count: codes, scales, positions, importance and decisions per token, and the pages of tokens
that enter before the next decision. With few tokens, those pages and the protected tokens alone exceed the budget: fewer than ``EXEMPT``
tokens then keep 8 bits, more get the least widths.

Options by the paper's sections: 3.2 ``decay``; 3.3 ``scope``; 4.1 ``recency``, 0 for none; 4.2 ``head_decay``, ``head_share``,
``measure``; 4.3 ``protect_first``, ``protect_last``; 5.1 ``alpha``, ``floor``, ``moved``, ``checks``, ``costs``; 5.2 ``interval``, ``tau``,
``drift``; 6.1 and 9.1 ``keys`` and ``values``, the widths of each; 10.1 ``later`` from ``threshold`` tokens on in place of ``budget``; 10.2
``layer_weights`` by layer; 10.6 ``key_weight`` and ``value_weight``, for single layers by a policy of several schemes.

Differences from the paper, besides those listed in ``importance``, ``hysteresis`` and ``allocation``:

* Every query is a step of the moving averages, so a prompt gives the same averages in pieces and in one call.
* Heads are weighted by kv head: a token's keys and values serve all queries of a group. The weight is not divided by its mean over heads,
  as the mixture scales both importances to mean 1 anyway.
* Each layer has its own importance unless ``scope`` is model.
* Codes use all of their levels, and narrow keys are encoded in a frame of their own (``codes``); ``frame=source`` encodes as the paper.
* Keys and values of a token widen in one fixed order (``ladder``).
* Codes cannot be widened, so promotions are refused and counted, unless ``tier2`` keeps each token's full-precision copy: on the
  ``device``, or on the ``host`` in pinned memory, which a move reads in place. All codes that a token gets later are then made from that
  copy. Tier 2 takes the bytes of the dense cache, outside of the budget, which covers the bytes that attention reads.
* Learned importance (10.3) and training with codes in the loop (10.4) are not implemented.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import sympy
import torch

from kvcompile.errors import BadOption, PairedSchemesDiffer
from kvcompile.extensions.smartkv import buckets, clock, codes, moves, reallocation
from kvcompile.extensions.smartkv.allocation import Terms, looked_up
from kvcompile.extensions.smartkv.buckets import BucketFormat, Buckets
from kvcompile.extensions.smartkv.budget import Cost, KeyValueWidths, Phases, layer_budgets
from kvcompile.extensions.smartkv.codes import ENTERING, Frame
from kvcompile.extensions.smartkv.hysteresis import MOST_AWAY, Hysteresis
from kvcompile.extensions.smartkv.importance import Measure, blended
from kvcompile.extensions.smartkv.ladder import Ladder, LevelPreference, ladder
from kvcompile.extensions.smartkv.reallocation import KeyStatistics
from kvcompile.schemes.adaptive import EARLY, SPREAD, Adaptive, Due, Reallocated, StoredLayer
from kvcompile.schemes.base import QUIET, Planes, Scheme, require, require_divides
from kvcompile.schemes.symmetric import SCALE_DTYPES
from kvcompile.types import PAGE, AbsMax, Extent, KernelFormat, KeyOrValue, Layout, PlaneSpec, Role, SlotSpec, pages_for


class Scope(enum.Enum):
    """The scope of importance: one layer, or the mean over all layers of its graph that have the same options and sizes (3.3)."""

    LAYER = "layer"
    MODEL = "model"


class OptionalTier2(enum.Enum):
    """The memory of full-precision copies of tokens: none, the device's, or pinned host memory. On a CPU the last two are the same."""

    OFF = "off"
    DEVICE = "device"
    HOST = "host"


Tier2 = OptionalTier2
"""The name in pickles of version 0.1 (``files.pickled``)."""


def _signed(words: torch.Tensor, part: int) -> torch.Tensor:
    del part
    return (words ^ 128).to(torch.float32) - 128


IMPORTANCE, BEFORE, HEADS, DECIDED = "importance", "before", "heads", "decided"
"""Names of planes stored with keys. Per position: plain and head-weighted importance; the plain one at the last allocation; the state of
the
decision (``reallocation``). Per kv head: the average of its measure (``heads``)."""


EXEMPT = 4 * PAGE
"""Below this number of tokens 8 bits are kept while the budget cannot be met: otherwise they would stay at the least widths for few bytes.
"""


@dataclasses.dataclass(frozen=True)
class Smartkv(Adaptive):
    """The scheme smartkv: widths chosen by attention within a budget. Keys and values of one attention have the same options."""

    budget: float = 0.4
    keys: str = "3/4/8"
    values: str = "2/3/4/8"
    decay: float = 0.9
    recency: float = 512.0
    head_decay: float = 0.95
    head_share: float = 0.3
    measure: Measure = Measure.PEAK
    scope: Scope = Scope.LAYER
    protect_first: int = 4
    protect_last: int = 0
    alpha: float = 0.5
    floor: float = 1e-6
    key_weight: float = 1.0
    value_weight: float = 1.0
    moved: float = 0.05
    checks: int = 2
    costs: float = 0.02
    interval: int = 16
    tau: float = 0.02
    drift: float = 0.1
    later: float = 0.0
    threshold: int = 0
    layer_weights: str = ""
    frame: Frame = Frame.TURNED
    scale_dtype: torch.dtype = torch.float16
    key_or_value: KeyOrValue = KeyOrValue.AUTO
    tier2: OptionalTier2 = dataclasses.field(default=OptionalTier2.OFF, metadata=QUIET)

    name: ClassVar[str] = "smartkv"
    renamed: ClassVar[Mapping[str, str]] = {"half": "key_or_value"}
    source: ClassVar[str] = "SmartKV: Attention-Guided Adaptive Precision KV-Cache Compression, sections 2 to 6, 9, 10.1, 10.2 and 10.6"
    attention: ClassVar[str] = "smartkv_attend"
    observes: ClassVar[str] = "smartkv_observe"
    attention_writes: ClassVar[tuple[str, ...]] = (IMPORTANCE, HEADS)
    kernels: ClassVar[str | None] = "kvcompile.extensions.smartkv.plugin"

    def __post_init__(self) -> None:
        def number(option: str, least: float, most: float, todo: str, above: bool = False) -> None:
            value = getattr(self, option)
            real = isinstance(value, (int, float)) and not isinstance(value, bool)
            fits = real and (least < value if above else least <= value) and value <= most
            require(fits, self.name, option, f"a number {'above' if above else 'from'} {least:g} to {most:g}", value, todo)

        def count(option: str, least: int, todo: str) -> None:
            value = getattr(self, option)
            require(type(value) is int and value >= least, self.name, option, f"a whole number, at least {least}", value, todo)

        number("budget", 0, 1, "0.4 is the paper's", above=True)
        number("later", 0, 1, "0 leaves the budget as it is at every length")
        number("decay", 0, 0.9999, "0.9 is the paper's")
        number("head_decay", 0, 0.9999, "0.95 is the paper's")
        number("head_share", 0, 1, "0.3 is the paper's, 0 weighs no heads")
        number("recency", 0, 1e9, "512 steps is the default, 0 weighs no ages")
        number("alpha", 0, 1, "0.5 is the paper's", above=True)
        number("floor", 0, 1, "1e-6 is the paper's", above=True)
        for option in ("key_weight", "value_weight"):
            number(option, 0, 1e6, "1 weighs keys and values alike", above=True)
        for option in ("moved", "costs", "drift"):
            number(option, 0, 1, "a share of all tokens, or of the utility")
        number("tau", 0, 1e9, "0.02 nats is the paper's")
        count("protect_first", 0, "4 is the paper's")
        count("protect_last", 0, "0 is the paper's: new tokens have 8 bits anyway until widths are decided")
        count("checks", 1, "2 is the paper's")
        require(self.checks <= MOST_AWAY, self.name, "checks", f"at most {MOST_AWAY}", self.checks, "2 is the paper's")
        count("interval", 1, "16 steps is the paper's")
        count("threshold", 0, "the number of tokens from which on ``later`` is the budget")
        require(isinstance(self.measure, Measure), self.name, "measure", "peak, entropy, off-sinks or mean", self.measure, "peak is usual")
        require(isinstance(self.scope, Scope), self.name, "scope", "layer or model", self.scope, "layer is usual; the paper's is model")
        require(isinstance(self.frame, Frame), self.name, "frame", "turned or source", self.frame, "turned is usual")
        require(isinstance(self.tier2, OptionalTier2), self.name, "tier2", "off, device or host", self.tier2, "off is usual")
        require(
            isinstance(self.key_or_value, KeyOrValue), self.name, "key_or_value", "auto, key or value", self.key_or_value,
            "auto takes the role of the slot",
        )
        require(
            self.scale_dtype in SCALE_DTYPES, self.name, "scale_dtype", "float16, bfloat16 or float32", self.scale_dtype,
            "float16 is the default",
        )
        _ = self.key_value_widths, self.weights

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """The hash of all options, cached: tables keyed by the scheme are read at every step of every layer."""
        return hash(tuple(self.__getstate__().values()))

    def __getstate__(self) -> dict[str, Any]:
        """Return the options alone: the cached hash differs between processes."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    # --- options as the mathematics takes them -------------------------------------------------------

    @property
    def key_value_widths(self) -> KeyValueWidths:
        """The widths, in bits of a code, that keys and values may have. Raises BadOption."""
        return KeyValueWidths(*(_numbers(option, getattr(self, option), int) for option in ("keys", "values")))

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the layers' budgets, () if all are equal. Raises BadOption."""
        return _numbers("layer_weights", self.layer_weights, float) if self.layer_weights != "" else ()

    @property
    def preference(self) -> LevelPreference:
        """The exponent of a width's utility, the least importance that counts, and the weights of keys and values in a token's utility."""
        return LevelPreference(self.alpha, self.floor, self.key_weight, self.value_weight)

    @property
    def hysteresis(self) -> Hysteresis:
        """The limits that a token's change of rank must pass before its widths change: how far, for how many checks, at what cost."""
        return Hysteresis(self.moved, self.checks, self.costs)

    @functools.cached_property
    def levels(self) -> Ladder:
        """The ladder of levels that a token may have: the widths of its key and value at each level, least first."""
        return ladder(self.key_value_widths, self.preference)

    @functools.cached_property
    def form(self) -> BucketFormat:
        """The code format of this slot, keys or values."""
        assert self.key_or_value is not KeyOrValue.AUTO, "keys or values? call for_role(role) first"
        keys = self.key_or_value is KeyOrValue.KEY
        return BucketFormat(self.levels.keys if keys else self.levels.values, self.frame, keys, self.keeps_originals)

    @property
    def keeps_originals(self) -> bool:
        """Whether reallocation may widen a stored token, from its full-precision copy."""
        return self.tier2 is not OptionalTier2.OFF

    def original_bytes(self, slot: SlotSpec) -> int:
        return slot.head_dim * slot.dtype.itemsize if self.keeps_originals else 0

    def terms(self, slot: SlotSpec) -> Terms:
        """Return the costs and worths by which levels are decided, for a layer of ``slot``'s sizes."""
        return Terms.of(self.cost(slot), self.levels, self.preference)

    @property
    def for_good(self) -> int:
        """Bytes of importance and decision that are stored per token at any width, besides its codes."""
        return 4 * 2 + 2 + 2

    def mean_bytes(self, slot: SlotSpec) -> int:
        """Return the bytes of the mean vector that is added to one head's narrow keys."""
        return slot.head_dim * buckets.MEAN_DTYPE.itemsize if self.frame is Frame.TURNED else 0

    def cost(self, slot: SlotSpec) -> Cost:
        """Return the ``Cost`` of settled tokens, their bytes at any widths: codes, scales, and a 4-byte position each for key and value."""
        return Cost(slot.heads, slot.head_dim, self.scale_dtype.itemsize, beside=8)

    def share(self, tokens: int) -> float:
        return Phases(self.budget, self.later, self.threshold).at(tokens) if self.later else self.budget

    @property
    def announced(self) -> float:
        return max(self.budget, self.later)

    def layer_share(self, tokens: int, slot: SlotSpec, layer: int) -> float:
        """Return the budget of a layer that holds ``tokens`` tokens, as a fraction of their bytes in 16 bits."""
        budget = self.share(tokens)
        return budget if self.layer_weights == "" else _layer_budgets(self, budget, slot)[layer]

    def _least(self, slot: SlotSpec) -> float:
        """Return the smallest budget that many tokens can meet: least widths, plus the bytes stored per token at any width."""
        cost = dataclasses.replace(self.cost(slot), beside=self.cost(slot).beside + self.for_good)
        return cost.least(self.key_value_widths)

    # --- a slot ----------------------------------------------------------------------------------

    @classmethod
    def variants(cls) -> tuple[Scheme, ...]:
        changes: tuple[dict[str, Any], ...] = (
            {"keys": "4/8", "values": "2/4", "budget": 0.6}, {"scale_dtype": torch.float32, "budget": 0.7}, {"tier2": OptionalTier2.DEVICE},
        )
        return (cls(), *(cls(**change) for change in changes))

    def for_role(self, role: Role) -> Smartkv:
        return dataclasses.replace(self, key_or_value=self.key_or_value.for_role(role))

    def check(self, slot: SlotSpec) -> None:
        require_divides(16, slot, self.name, "whole words of every width")
        cost = dataclasses.replace(self.cost(slot), beside=self.cost(slot).beside + self.for_good)
        for budget in (self.budget, self.later or self.budget):
            cost.check(budget, self.key_value_widths)

    def check_site(self, keys: SlotSpec, values: SlotSpec, layer: int) -> None:
        require(
            keys.head_dim == values.head_dim, self.name, "the head dim", "the same for keys and values", (keys.head_dim, values.head_dim),
            "use another scheme for this layer",
        )
        require(
            not self.weights or layer < len(self.weights), self.name, "layer_weights", f"a number for every layer, {layer + 1} at least",
            self.layer_weights, "write one for each, as 2/1/1",
        )

    def check_pair(self, keys: Scheme, values: Scheme, latent: bool, path: str) -> None:
        if keys != values:
            raise PairedSchemesDiffer(scheme=self.name, keys=keys.spec(), values=values.spec(), path=path)
        super().check_pair(keys, values, latent, path)

    def layout(self, slot: SlotSpec) -> Layout:
        made = self.for_role(slot.role)
        planes = buckets.plane_specs(slot, made.form, self.scale_dtype, self.tier2 is OptionalTier2.HOST)
        if made.key_or_value is KeyOrValue.VALUE:
            return Layout(planes)
        return Layout((
            *planes, PlaneSpec(IMPORTANCE, torch.float32, 2, PAGE, Extent.STORE, tally=True, shared=True),
            PlaneSpec(BEFORE, torch.bfloat16, 1, PAGE, Extent.STORE, tally=True, shared=True),
            PlaneSpec(HEADS, torch.float32, 1, 1, Extent.ROW, tally=True),
            PlaneSpec(DECIDED, torch.int16, 1, PAGE, Extent.STORE, tally=True, shared=True),
        ))

    def planes_read(self, slot: SlotSpec) -> int:
        return self.for_role(slot.role).form.read

    def format(self, slot: SlotSpec) -> KernelFormat:
        """Return how a kernel reads entering tokens."""
        return KernelFormat(torch.uint8, 1, slot.head_dim, True, _signed)

    def absmax(self, head_dim: int) -> AbsMax | None:
        return None if self.keeps_originals else AbsMax(ENTERING, 1, head_dim, codes.largest_code(ENTERING), False)

    def encode(self, x_BKSD: torch.Tensor, *fixed: torch.Tensor) -> Planes:
        del fixed
        coded = codes.encode(x_BKSD, ENTERING, self.scale_dtype)
        return (*coded, x_BKSD) if self.keeps_originals else coded

    def bound(self, slot: SlotSpec) -> sympy.Expr | None:
        """Return None: a token's error depends on the width that it has when it is read."""
        del slot
        return None

    # --- stored planes ---------------------------------------------------------------------------

    def _split(self, planes: Planes) -> tuple[Buckets, KeyStatistics | None]:
        """Return a slot's planes as its buckets and, for keys, the statistics stored with them; None in place of statistics for values."""
        slot_buckets = Buckets.of(planes, self.form)
        rest = planes[len(slot_buckets.planes) :]
        return slot_buckets, KeyStatistics(*rest) if rest else None

    def with_room(self, planes: Planes, first: int, tokens: int) -> Planes:
        slot_buckets, kept = self._split(planes)
        made = buckets.with_room(slot_buckets, max(1, pages_for(tokens - first)))
        if kept is None:
            return made.planes
        pages = pages_for(tokens)
        if pages > min(plane.shape[0] for plane in (kept.importance, kept.before, kept.decided)):
            pages = buckets.pages_by_position(pages)
            kept = KeyStatistics(
                buckets.grown(kept.importance, pages), buckets.grown(kept.before, pages), kept.heads, buckets.grown(kept.decided, pages),
            )
        return (*made.planes, *kept.planes)

    def room(self, planes: Planes, first: int) -> int:
        slot_buckets, kept = self._split(planes)
        entering = first + slot_buckets.entering[0].shape[0] * PAGE
        return entering if kept is None else min(entering, *(
            plane.shape[0] * PAGE for plane in (kept.importance, kept.before, kept.decided)
        ))

    def tokens(self, planes: Planes, slot: SlotSpec, count: int) -> torch.Tensor:
        return buckets.values(self._split(planes)[0], count)

    def cut(self, planes: Planes, slot: SlotSpec, count: int) -> Planes:
        slot_buckets, kept = self._split(planes)
        made = buckets.cut(slot_buckets, count)
        if kept is None:
            return made.planes
        importance, before, decided = (
            reallocation.forgotten(plane, count) for plane in (kept.importance, kept.before, kept.decided)
        )
        return (*made.planes, importance, before, kept.heads.clone(), decided)

    def of_rows(self, planes: Planes, slot: SlotSpec, rows: torch.Tensor) -> Planes:
        slot_buckets, kept = self._split(planes)
        return (*buckets.of_rows(slot_buckets, rows).planes, *(plane.index_select(1, rows) for plane in (kept.planes if kept else ())))

    def histogram(self, planes: Planes, slot: SlotSpec, first: int, count: int) -> dict[int, int]:
        return self._split(planes)[0].histogram(count, first)

    def token_bits(self, planes: Planes, slot: SlotSpec, first: int, count: int) -> torch.Tensor:
        slot_buckets = self._split(planes)[0]
        # A cache that was rewound drops its tokens only when the next ones arrive.
        levels = moves.movement(slot_buckets.ends.device).levels(slot_buckets, max(first, count))[:, :count]
        return looked_up([0, *slot_buckets.widths, ENTERING], levels, torch.int64)

    def attended(self, planes: Planes, slot: SlotSpec, count: int) -> torch.Tensor | None:
        kept = self._split(planes)[1]
        if kept is None:
            return None
        # Blended as in a decision, but without the weight of ages.
        plain, weighted = reallocation.by_position(kept.importance, count).unbind(-1)
        return blended(plain, weighted, self.head_share, plain > 0)

    def quiet(self, first: int, count: int) -> bool:
        since = count - first
        # The least interval of the clock, or one page: the budget may have room for no more new tokens.
        return bool(first) and since % self.interval != 0 and since < min(PAGE, clock.interval(0, first, self.interval)) - EARLY - SPREAD

    def due(self, keys: Planes, slot: SlotSpec, first: int, count: int, layer: int, early: int = EARLY) -> Due:
        if self._exempt(keys, slot, count, layer):
            return Due.NOT
        rows, since = keys[buckets.CODES].shape[1], count - first
        left = (reallocation.interval(self, slot, rows, first, layer) if first else clock.interval(0, 0, self.interval)) - since
        return Due.NOW if left <= 0 else Due.SOON if left <= early and first else Due.NOT

    def looks(self, keys: Planes, slot: SlotSpec, first: int, count: int, layer: int) -> bool:
        return first > 0 and (count - first) % self.interval == 0 and not self._exempt(keys, slot, count, layer)

    def _exempt(self, keys: Planes, slot: SlotSpec, count: int, layer: int) -> bool:
        """Return whether a store has so few tokens that it may exceed the budget: fewer than EXEMPT, with a budget that cannot be met."""
        return count < EXEMPT and not reallocation.can_be_met(self, slot, keys[buckets.CODES].shape[1], count, layer)

    def importance(self, layers: Sequence[Planes], count: int, among: Sequence[Planes]) -> torch.Tensor:
        found = reallocation.of_layers([self._kept(keys) for keys in layers], count)
        if self.scope is Scope.MODEL:
            # Importance is the mean over layers; the copy of the last allocation stays each layer's own.
            found[..., :2] = reallocation.of_layers([self._kept(keys) for keys in among], count)[..., :2].mean(0)
        return found

    def _kept(self, keys: Planes) -> KeyStatistics:
        found = self._split(keys)[1]
        assert found is not None
        return found

    def drifted(self, importance: torch.Tensor) -> torch.Tensor:
        return reallocation.drifted(self, importance)

    def decide(self, layers: Sequence[StoredLayer], importance: torch.Tensor) -> Any:
        return reallocation.decided(self, [self._layer(item) for item in layers], layers[0].slots[0], importance)

    def move(self, layer: StoredLayer, decision: Any, number: int, held: int) -> Reallocated:
        return reallocation.moved(self, self._layer(layer), layer.slots[0], decision, number, held)

    def _layer(self, item: StoredLayer) -> reallocation.LayerBuckets:
        """Return a stored layer's planes as the record that reallocation takes."""
        key, value = (dataclasses.replace(self, key_or_value=half) for half in (KeyOrValue.KEY, KeyOrValue.VALUE))
        keys, values = key._split(item.keys)[0], value._split(item.values)[0]
        return reallocation.LayerBuckets(keys, key._kept(item.keys), values, item.layer, item.first)


@functools.lru_cache(maxsize=64)
def _layer_budgets(scheme: Smartkv, budget: float, slot: SlotSpec) -> list[float]:
    """Return the budget of each layer as a share of full precision, by ``weights``; the mean of all is ``budget``. Cached."""
    return layer_budgets(budget, scheme.weights, scheme._least(slot), scheme.cost(slot).most(scheme.key_value_widths))


def _numbers(option: str, text: str, kind: type) -> tuple:  # type: ignore[type-arg]
    """Return the numbers in ``text``, the value of an option, which are separated by slashes. Raises BadOption for other text."""
    try:
        return tuple(kind(part) for part in text.split("/"))
    except (ValueError, AttributeError) as error:
        raise BadOption(
            scheme="smartkv", option=option, expected="numbers separated by slashes", found=text, todo="write them as 3/4/8",
        ) from error
