"""Records that matching produces: attentions, slots, writes, masks, sites, and refusals. Values only, no logic."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from kvcompile.passes.match.paged_places import BlockTable, Places
from kvcompile.passes.match.slot_kinds import SlotKind


class MaskKind(enum.Enum):
    """The effect of a mask term on the scores."""

    BOOL = "false excludes"
    FILL = "true excludes"
    ADD = "added to the scores"


class Stage(enum.Enum):
    """Where in the pipeline a site was refused."""

    CAPTURE = "capture"
    MATCH = "match"
    PLAN = "plan"
    VALIDATE = "validation"
    LOWER = "lowering"


@dataclass(frozen=True)
class MaskTerm:
    """One mask operand, its effect, and the role of each of its dims ('' for a dim that only broadcasts)."""

    node: fx.Node
    kind: MaskKind
    roles: tuple[str, ...]
    factor: float = 1.0
    """What a term that is added is multiplied with first: -1 where it is subtracted."""
    dtype: torch.dtype = torch.float32
    """The dtype in which a term is added: only its lowest number, and minus infinity, hide a token whatever the scores are."""
    fill: float = -math.inf
    """What the scores that a term excludes are replaced by."""
    hides: bool = True
    """Whether a term that ``Bounds`` carries may hide some of the cached tokens; a bias, or a term that is one for all tokens, does not."""


@dataclass(frozen=True)
class SecondProduct:
    """A second product of queries and keys, over channels of its own, whose scores are added times ``factor`` to the first's."""

    q: fx.Node
    q_roles: tuple[str, ...]
    k: fx.Node
    k_roles: tuple[str, ...]
    factor: float


@dataclass(frozen=True)
class Factor:
    """A value that all scores are multiplied with, or divided by: a symbolic float, or a tensor of one element, known in a call only."""

    node: fx.Node
    divides: bool = False


@dataclass(frozen=True)
class MemoryTokens:
    """Learned tokens that an attention reads ahead of the cached ones: keys and values, and what masks them.

    ``roles``: those of the dims of both. ``joins``: where each stands ahead of what is cached, keys first.
    """

    keys: fx.Node
    values: fx.Node
    count: int
    joins: tuple[fx.Node, fx.Node]
    masks: tuple[MaskTerm, ...] = ()
    roles: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


@dataclass(frozen=True)
class Zeroed:
    """Weights set to zero behind the softmax, where ``term`` hides them.

    ``statistics``: the masked scores and the weights, each with its dims' roles: what tells from these where a query sees nothing.
    """

    term: MaskTerm
    statistics: tuple[tuple[fx.Node, tuple[str, ...]], ...] = ()


@dataclass(frozen=True)
class Attention:
    """One attention, whatever spelled it: operands with the role of every dim.

    Roles: B batch, H query heads, K kv heads, G queries a kv head, S new tokens, T cached tokens, D channels;
    several letters in one role are one flattened dim (BH). ``others`` are other readings of the same attention,
    with other roles, for where the roles cannot be told from the attention alone.
    """

    idiom: str
    output: fx.Node
    nodes: tuple[fx.Node, ...]
    q: fx.Node
    q_roles: tuple[str, ...]
    k: fx.Node
    k_roles: tuple[str, ...]
    v: fx.Node
    v_roles: tuple[str, ...]
    out_roles: tuple[str, ...]
    scale: float
    softcap: float = 0.0
    masks: tuple[MaskTerm, ...] = ()
    causal: bool = False
    sinks: fx.Node | None = None
    sink_roles: tuple[str, ...] = ()
    folded: int = 1
    """Query heads that are flattened into the dim of the new tokens."""
    beside: SecondProduct | None = None
    """More channels of queries and keys: the rotary part, where the author multiplies it apart from the latent."""
    zeroed: tuple[Zeroed, ...] = ()
    """What was set to zero behind the softmax: nothing that a query sees, once ``match`` has looked."""
    rounding: float = 0.0
    """How much an epsilon in the model's own division changes, as a share of the result: less than its dtype's rounding."""
    factors: tuple[Factor, ...] = ()
    """What the scores are multiplied with beside ``scale``, ahead of softcap and masks: the queries are, in the rewritten graph."""
    log_sums: fx.Node | None = None
    """The log of each query's sum of exponentials, sinks among them, where something else reads it: a second result."""
    log_sum_roles: tuple[str, ...] = ()
    memory: MemoryTokens | None = None
    """Learned tokens ahead of the cached ones; keys, values and masks are then those of the cached ones alone."""
    others: tuple[Attention, ...] = field(default=(), repr=False)

    @property
    def gives_log_sums(self) -> bool:
        """Whether the attention over the cached tokens has to give its log-sums: something reads them, or it is merged with another."""
        return self.log_sums is not None or self.memory is not None

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes that something else reads: the output, and the log-sums where they are read."""
        return (self.output,) if self.log_sums is None else (self.output, self.log_sums)


@dataclass(frozen=True)
class Position:
    """Where new tokens go: an index tensor [S] or [B, S], the offset of the first token, or behind the past."""

    index: fx.Node | None = None
    rows: bool = False
    offset: fx.Node | int = 0
    past: fx.Node | None = None
    roles: tuple[str, ...] = ()
    """Roles of the index's dims where it has others than [S], [B] or [B, S]."""


@dataclass(frozen=True)
class FirstRows:
    """The first ``count`` rows, an int or a SymInt, along ``dim`` of a cache tensor that has more: those of a largest batch."""

    dim: int
    count: Any = field(compare=False)


@dataclass(frozen=True)
class Write:
    """One write into a cache tensor; ``dims[i]`` is the root's dim that dim ``i`` of what is written runs along.

    ``values`` may broadcast to what is written: fewer dims on the left, dims of size one. ``count`` is how many
    tokens are written, an int or a SymInt.
    """

    idiom: str
    node: fx.Node
    root: fx.Node
    values: fx.Node
    dims: tuple[int, ...]
    token_dim: int
    position: Position
    count: Any = field(compare=False)
    select: tuple[tuple[int, int], ...] = ()
    row_dim: int | None = None
    """The root's dim whose entries have positions of their own."""
    via: tuple[fx.Node, ...] = ()
    """Nodes that make the new cache out of the old one before the write; they are gone with it."""
    places: Places | None = None
    """The slot mapping that a paged cache is written by; the position then says nothing."""
    anchor: fx.Node | None = None
    """Where the tokens are written in the rewritten graph: ahead of this node, else of ``node``."""
    late: bool = False
    """Whether the attention reads what was there before: the new tokens are read in the next call."""
    first_rows: FirstRows | None = None
    """The rows that are written, where the cache has more that keep what they hold."""

    @property
    def at(self) -> fx.Node:
        """The node ahead of which the rewritten graph writes."""
        return self.anchor if self.anchor is not None else self.node


@dataclass(frozen=True)
class SlidingCache:
    """A sliding window: the tokens that a cache keeps of those that were written.

    The graph lines tokens up: some of the past, then the new ones. Attention reads the line's last ``past`` + new
    tokens, the cache keeps its last ``keep``. Encoded, the token at position p lies in slot p % ``slots``, so that
    nothing ever moves. ``end``: where the past that is lined up ends among the tokens that the cache tensor shows;
    None where nothing of it is lined up, and what the cache held before is gone.
    """

    slots: int
    past: Any
    keep: Any
    end: Any
    chain: tuple[fx.Node, ...] = field(repr=False)

    @property
    def refilled(self) -> bool:
        """Whether attention reads the new tokens alone and the cache is filled anew."""
        return self.end is None


@dataclass(frozen=True)
class Axes:
    """The labels of a cache tensor's dims: per dim the roles it holds, () where one index is selected."""

    labels: tuple[tuple[str, ...], ...]
    select: tuple[tuple[int, int], ...] = ()
    counts: tuple[tuple[int, int], ...] = ()
    """(dim, how many) of dims that hold more heads or channels than these: they begin at the dim's index in ``select``."""
    paged: bool = False
    """Whether attention gathers tokens by a block table: the dims of tokens together are then one row of slots."""

    @property
    def token_dim(self) -> int:
        """The dim that tokens run along, the first one of a paged cache."""
        return self.labels.index(("T",))

    @property
    def batch_dim(self) -> int | None:
        """The dim of the batch rows and nothing else; None where there is none."""
        return self.labels.index(("B",)) if ("B",) in self.labels else None

    @property
    def token_dims(self) -> tuple[int, ...]:
        """The dims that tokens run along: one, or all those of a paged cache."""
        return tuple(dim for dim, label in enumerate(self.labels) if label == ("T",))

    def room(self, shape: Sequence[Any]) -> Any:
        """Count the tokens that a tensor of ``shape`` has slots for."""
        return math.prod(shape[dim] for dim in self.token_dims)


@dataclass(frozen=True)
class Slot:
    """One cache slot (keys or values of one attention) as the graph sees it."""

    kind: SlotKind
    root: fx.Node
    placeholder: fx.Node | None
    outputs: tuple[int, ...]
    axes: Axes
    write: Write
    path: tuple[fx.Node, ...] = field(repr=False)
    heads: int = 0
    head_dim: int = 0
    batch: Any = field(default=0, compare=False)
    """Rows, an int or a SymInt."""
    capacity: Any = field(default=0, compare=False)
    """Places for tokens, an int or a SymInt."""
    factor: float = 1.0
    """What the attention multiplies the cached values with, after it reads them."""
    tiled: bool = False
    """Whether query head h reads kv head h % K (heads repeated as a whole) rather than h // G."""
    tiles: int = 1
    """How many times heads are repeated as a whole behind that: key head k goes with value head k % K of values that are tiled."""
    sliding: SlidingCache | None = field(default=None, compare=False)
    block_table: BlockTable | None = None
    """The block table that a paged cache is read by; its ``batch`` and ``capacity`` are those of what is gathered."""

    @property
    def part(self) -> tuple[fx.Node, tuple[tuple[int, int], ...]]:
        """The cache tensor and which part of it the slot is: two slots with the same one have one store."""
        return self.root, self.axes.select

    def rows(self, shape: Sequence[Any]) -> Any:
        """Return how many batch rows a call reads, an int or a SymInt, of a cache tensor of ``shape``."""
        if self.write.first_rows is not None:
            return self.write.first_rows.count
        return 1 if self.axes.batch_dim is None else shape[self.axes.batch_dim]


@dataclass(frozen=True)
class WeightDim:
    """How one dim of a weight runs: index = head * h + channel * c + start; or it is the dim that is summed over."""

    head: int = 0
    channel: int = 0
    start: int = 0
    summed: bool = False


@dataclass(frozen=True)
class Projection:
    """Channels made from a latent by a matrix for each head: ``weight`` holds ``heads`` matrices [channels, inner]."""

    weight: fx.Node
    dims: tuple[WeightDim, ...]
    heads: int
    channels: int
    inner: int


@dataclass(frozen=True)
class Stripe:
    """Channels ``start`` .. ``start + count`` of an attention operand and what they are made from.

    ``first`` is the first channel of the slot that takes part. Without a projection the channels are the slot's
    own, the same for all heads that share a kv head. ``factor`` is a number they are multiplied with.
    """

    start: int
    count: int
    slot: Slot
    first: int = 0
    projection: Projection | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class Assembly:
    """Keys and values that are made from a cached latent (MLA): stripes of channels, in order; ``heads`` of them are made."""

    keys: tuple[Stripe, ...]
    value: Stripe
    heads: int
    between: frozenset[fx.Node] = field(compare=False, repr=False)
    """Every node that stands between the cache and the attention, which alone reads it."""

    @property
    def slots(self) -> tuple[Slot, Slot, Slot | None]:
        """The key slot, the value slot, and the slot whose channels stand behind the key slot's."""
        found = {(stripe.slot.root, stripe.slot.axes.select): stripe.slot for stripe in self.keys}
        value = self.value.slot
        # What is both comes first: its channels are then the value's too.
        first = found.pop((value.root, value.axes.select), None)
        ordered = [*([first] if first is not None else []), *found.values()]
        return ordered[0], value if first is None else first, ordered[1] if len(ordered) > 1 else None


@dataclass(frozen=True)
class Bounds:
    """The mask in normal form: arithmetic on positions, and carried tensors for whatever is left.

    A term whose ``fill`` is a number is the only one that is carried.
    """

    hi: Limit
    lo: Limit | None = None
    keep: tuple[fx.Node, tuple[str, ...]] | None = None
    carried: tuple[MaskTerm, ...] = ()

    @property
    def fill(self) -> float:
        """The score that tokens have which the carried masks exclude."""
        return max((term.fill for term in self.carried), default=-math.inf)


class LimitKind(enum.Enum):
    """The origin that the last or first visible position is counted from."""

    NODE = "a tensor of positions"
    OWN = "the query's own index in this call"
    ALL = "the number of tokens read"
    CONST = "a constant"


@dataclass(frozen=True)
class Amount:
    """A symbolic int without a constant part; two of the same expression are equal, whatever nodes of the graph they came from."""

    expr: sympy.Expr
    value: torch.SymInt = field(compare=False, repr=False)


@dataclass(frozen=True)
class Limit:
    """A position limit: ``node`` (its dims' roles among B and S) or the query's index or the length, plus ``offset``.

    ``amount``: a symbolic int that is added too.
    """

    kind: LimitKind
    offset: int = 0
    node: fx.Node | None = None
    roles: tuple[str, ...] = ()
    amount: Amount | None = None

    @property
    def shift(self) -> Any:
        """All that is added to the origin, an int or a SymInt."""
        return self.offset if self.amount is None else self.offset + self.amount.value


@dataclass(frozen=True)
class Site:
    """One attention with both its slots: all that a plan and a rewrite need."""

    index: int
    attention: Attention
    key: Slot
    value: Slot
    bounds: Bounds
    path: str
    line: str
    heads: int
    groups: int
    tokens: Any = field(compare=False)
    """New tokens of a call, an int or a SymInt."""
    read: fx.Node
    extra_key: Slot | None = None
    """A second slot whose channels stand behind the key slot's: the rotary part of a latent cache."""
    assembly: Assembly | None = None
    """How keys and values are made, where they are not what the cache holds; key and value slot may then be one."""

    @property
    def read_as_keys(self) -> tuple[Slot, ...]:
        """The slots whose channels, one after another, are what queries are multiplied with."""
        return (self.key,) if self.extra_key is None else (self.key, self.extra_key)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots that the site reads, each once."""
        found = {(slot.root, slot.axes.select): slot for slot in (self.key, self.value, self.extra_key) if slot is not None}
        return tuple(found.values())


@dataclass(frozen=True)
class Refusal:
    """An attention that stays as it is, as a value: stage, reason, evidence, source line, nearest idiom, advice."""

    stage: Stage
    reason: str
    line: str
    path: str = ""
    nearest: str = ""
    advice: str = ""
    evidence: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.path or 'attention'} ({self.line}): {self.reason}"]
        if self.nearest:
            parts.append(f"nearest idiom: {self.nearest}")
        if self.advice:
            parts.append(self.advice)
        return "; ".join(parts)


class Miss(Exception):
    """The reason why a recogniser gave up; caught by ``match`` and turned into a Refusal value."""

    def __init__(self, reason: str, *evidence: fx.Node, advice: str = "") -> None:
        super().__init__(reason)
        self.reason, self.evidence, self.advice = reason, evidence, advice
