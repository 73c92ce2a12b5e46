"""Records that matching produces: attentions, slots, writes, masks, sites and refusals. Values only, no logic."""

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
    """The stage of the pipeline at which a site was refused."""

    CAPTURE = "capture"
    MATCH = "match"
    PLAN = "plan"
    VALIDATE = "validation"
    LOWER = "lowering"


@dataclass(frozen=True)
class MaskTerm:
    """A mask term: one mask operand, its effect on the scores, and the role of each of its dims ('' for a dim that broadcasts)."""

    node: fx.Node
    kind: MaskKind
    roles: tuple[str, ...]
    factor: float = 1.0
    """Factor of an added term: -1 where the model subtracts it."""
    dtype: torch.dtype = torch.float32
    """Dtype in which a term is added: only the lowest number of it, or minus infinity, hides a token whatever its score is."""
    fill: float = -math.inf
    """Score that an excluding term puts in place of the excluded scores."""
    hides: bool = True
    """Whether a term that ``Bounds`` carries may hide cached tokens; a bias, or a term without a dim of tokens, does not."""


@dataclass(frozen=True)
class SecondProduct:
    """A second product of queries and keys, over separate channels: its scores times ``factor`` are added to the first product's."""

    q: fx.Node
    q_roles: tuple[str, ...]
    k: fx.Node
    k_roles: tuple[str, ...]
    factor: float


@dataclass(frozen=True)
class Factor:
    """A factor (or divisor) of all scores that only a call knows: a symbolic float, or a tensor of one element."""

    node: fx.Node
    divides: bool = False


@dataclass(frozen=True)
class MemoryTokens:
    """Memory: ``count`` learned tokens that an attention reads before the cached ones, with their keys, values and masks.

    ``joins``: the concatenations that prepend them to the cached keys and to the cached values. ``roles``: the roles of the dims of the
    learned keys and of the learned values.
    """

    keys: fx.Node
    values: fx.Node
    count: int
    joins: tuple[fx.Node, fx.Node]
    masks: tuple[MaskTerm, ...] = ()
    roles: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


@dataclass(frozen=True)
class Zeroed:
    """A mask of weights: the softmax's weights that ``term`` hides are set to zero.

    ``statistics``: the masked scores and the weights, each with the roles of its dims; a mask of queries that see no token may be computed
    from these.
    """

    term: MaskTerm
    statistics: tuple[tuple[fx.Node, tuple[str, ...]], ...] = ()


@dataclass(frozen=True)
class Attention:
    """One attention in any spelling: its operands, with the role of every dim, and its result.

    Roles: B batch, H query heads, K kv heads, G query heads per kv head, S new tokens, T cached tokens, D channels; several letters are one
    flattened dim (BH). ``others``: further readings of the same attention with other roles, where the attention alone does not decide them.
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
    """How many query heads are flattened into the dim of new tokens; 1 if none."""
    beside: SecondProduct | None = None
    """A second product over further channels of queries and keys: the rotary part, where a model multiplies it apart from the latent."""
    zeroed: tuple[Zeroed, ...] = ()
    """Masks of the softmax's weights; empty once ``match`` has checked that they change nothing a query sees."""
    rounding: float = 0.0
    """Relative change of the result by an epsilon in the model's own division, below the rounding of its dtype; 0 without one."""
    factors: tuple[Factor, ...] = ()
    """Further factors of the scores, before softcap and masks; the rewritten graph multiplies the queries with them."""
    log_sums: fx.Node | None = None
    """The node of each query's log-sum of exponentials (sinks included) if something else reads it: a second result; else None."""
    log_sum_roles: tuple[str, ...] = ()
    memory: MemoryTokens | None = None
    """Learned tokens before the cached ones; k, v and masks are then those of the cached tokens alone."""
    others: tuple[Attention, ...] = field(default=(), repr=False)

    @property
    def gives_log_sums(self) -> bool:
        """Whether attention over the cached tokens must return log-sums: a node reads them, or ``memory`` tokens are merged."""
        return self.log_sums is not None or self.memory is not None

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes that the rest of the graph reads: the output, and the log-sums if they are read."""
        return (self.output,) if self.log_sums is None else (self.output, self.log_sums)


@dataclass(frozen=True)
class Position:
    """The positions that new tokens are written to: in a tensor, from an offset on, or after ``past``.

    A tensor ``index`` is [S], or [B, S] with ``rows``.
    """

    index: fx.Node | None = None
    rows: bool = False
    offset: fx.Node | int = 0
    past: fx.Node | None = None
    roles: tuple[str, ...] = ()
    """Roles of the index's dims where its shape is none of [S], [B] and [B, S]."""


@dataclass(frozen=True)
class FirstRows:
    """The first ``count`` rows (an int or a SymInt) along ``dim`` of a cache tensor made for a larger batch."""

    dim: int
    count: Any = field(compare=False)


@dataclass(frozen=True)
class Write:
    """One write of ``count`` new tokens (an int or a SymInt) into a cache tensor.

    ``dims[i]`` is the dim of ``root`` along which dim i of the written part runs. ``values`` may broadcast to that part: fewer dims on the
    left, dims of size one.
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
    """The dim of the root whose entries have positions of their own: that of batch rows; None where all share them."""
    via: tuple[fx.Node, ...] = ()
    """Nodes that make the new cache from the old one before the write; the rewritten graph drops them with it."""
    places: Places | None = None
    """The slot mapping of a write to a paged cache; ``position`` is then empty."""
    anchor: fx.Node | None = None
    """The node before which the rewritten graph writes; None: before ``node``."""
    late: bool = False
    """Whether the attention reads the cache before the write, and the next call is the first to read the new tokens."""
    first_rows: FirstRows | None = None
    """The rows that are written where the cache has more, which keep their values; None: all rows."""

    @property
    def at(self) -> fx.Node:
        """The node before which the rewritten graph writes."""
        return self.anchor if self.anchor is not None else self.node


@dataclass(frozen=True)
class SlidingCache:
    """A sliding window: the cache keeps only the newest of the tokens that were written.

    The graph joins part of the past and the new tokens into one sequence. Attention reads its last ``past`` + new tokens, the cache keeps
    its last ``keep``. A store puts the token at position p into slot p % ``slots``, so that no token ever moves. ``end``: the index in the
    cache tensor of the token after the joined part of the past; None where no past is joined and the new tokens replace the whole cache.
    """

    slots: int
    past: Any
    keep: Any
    end: Any
    chain: tuple[fx.Node, ...] = field(repr=False)

    @property
    def refilled(self) -> bool:
        """Whether attention reads the new tokens alone, and these replace the whole cache."""
        return self.end is None


@dataclass(frozen=True)
class Axes:
    """The layout of a cache tensor: for each dim the roles that it holds, () for a dim with a single selected index."""

    labels: tuple[tuple[str, ...], ...]
    select: tuple[tuple[int, int], ...] = ()
    counts: tuple[tuple[int, int], ...] = ()
    """(dim, count) of the dims that hold more heads or channels than this slot's, which begin at the dim's index in ``select``."""
    paged: bool = False
    """Whether attention gathers tokens by a block table; the dims of tokens together then number the pool's slots."""

    @property
    def token_dim(self) -> int:
        """The dim of tokens; of a paged cache, the first of them."""
        return self.labels.index(("T",))

    @property
    def batch_dim(self) -> int | None:
        """The dim that holds batch rows and nothing else; None without one."""
        return self.labels.index(("B",)) if ("B",) in self.labels else None

    @property
    def token_dims(self) -> tuple[int, ...]:
        """All dims of tokens: one, or several of a paged cache."""
        return tuple(dim for dim, label in enumerate(self.labels) if label == ("T",))

    def room(self, shape: Sequence[Any]) -> Any:
        """Return how many tokens a cache tensor of ``shape`` has room for."""
        return math.prod(shape[dim] for dim in self.token_dims)


@dataclass(frozen=True)
class Slot:
    """A slot: the keys, or the values, that one attention reads from a cache tensor, with their layout and their write."""

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
    """Batch rows, an int or a SymInt."""
    capacity: Any = field(default=0, compare=False)
    """Tokens that fit, an int or a SymInt."""
    factor: float = 1.0
    """The number that the graph multiplies the slot's channels with after it reads them."""
    tiled: bool = False
    """Whether query head h reads kv head h % K (heads are tiled) rather than h // G (each head is repeated)."""
    tiles: int = 1
    """How often heads are tiled after that; with tiled values, key head k goes with value head k % K."""
    sliding: SlidingCache | None = field(default=None, compare=False)
    block_table: BlockTable | None = None
    """The block table of a paged cache; ``batch`` and ``capacity`` are then those of the gathered tokens. None for other caches."""

    @property
    def part(self) -> tuple[fx.Node, tuple[tuple[int, int], ...]]:
        """(cache tensor, selected indices): slots with equal parts share one store."""
        return self.root, self.axes.select

    def rows(self, shape: Sequence[Any]) -> Any:
        """Return how many batch rows of a cache tensor of ``shape`` a call reads, an int or a SymInt."""
        if self.write.first_rows is not None:
            return self.write.first_rows.count
        return 1 if self.axes.batch_dim is None else shape[self.axes.batch_dim]


@dataclass(frozen=True)
class WeightDim:
    """One dim of a projection's weight: its index is head * h + channel * c + ``start`` for head h and channel c.

    Or the dim is ``summed`` over.
    """

    head: int = 0
    channel: int = 0
    start: int = 0
    summed: bool = False


@dataclass(frozen=True)
class Projection:
    """A projection of a latent: ``weight`` holds ``heads`` matrices [channels, inner], one for each head."""

    weight: fx.Node
    dims: tuple[WeightDim, ...]
    heads: int
    channels: int
    inner: int


@dataclass(frozen=True)
class Stripe:
    """Channels ``start`` .. ``start + count`` of an attention operand, and the slot that they come from.

    ``first``: the first channel of the slot that they use. With a ``projection`` they are computed from the slot's channels; without one
    they are the slot's channels themselves, shared by all heads of a kv head. In either case they are multiplied by ``factor``.
    """

    start: int
    count: int
    slot: Slot
    first: int = 0
    projection: Projection | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class Assembly:
    """Keys and values that are made from a cached latent (MLA): their stripes of channels, in order, for ``heads`` heads."""

    keys: tuple[Stripe, ...]
    value: Stripe
    heads: int
    between: frozenset[fx.Node] = field(compare=False, repr=False)
    """Every node between the cache and the attention; only the attention may read them."""

    @property
    def slots(self) -> tuple[Slot, Slot, Slot | None]:
        """The key slot, the value slot, and the slot of the keys' further channels; None where one slot holds them all."""
        found = {(stripe.slot.root, stripe.slot.axes.select): stripe.slot for stripe in self.keys}
        value = self.value.slot
        # A slot of both keys and values comes first, so that values are among its first channels.
        first = found.pop((value.root, value.axes.select), None)
        ordered = [*([first] if first is not None else []), *found.values()]
        return ordered[0], value if first is None else first, ordered[1] if len(ordered) > 1 else None


@dataclass(frozen=True)
class Bounds:
    """The mask of an attention in normal form: limits on positions, a padding row, and ``carried`` tensors for all other terms.

    A carried term that fills scores with a finite number (``fill``) is the last one, and the ones before it are biases.
    """

    hi: Limit
    lo: Limit | None = None
    keep: tuple[fx.Node, tuple[str, ...]] | None = None
    carried: tuple[MaskTerm, ...] = ()

    @property
    def fill(self) -> float:
        """The score of tokens that the carried masks exclude: minus infinity, or the finite number that replaces scores."""
        return max((term.fill for term in self.carried), default=-math.inf)


class LimitKind(enum.Enum):
    """The origin that the first or last visible position is counted from."""

    NODE = "a tensor of positions"
    OWN = "the query's own index in this call"
    ALL = "the number of tokens read"
    CONST = "a constant"


@dataclass(frozen=True)
class Amount:
    """A symbolic int without a constant part; equal to another one of the same expression, whatever nodes both came from."""

    expr: sympy.Expr
    value: torch.SymInt = field(compare=False, repr=False)


@dataclass(frozen=True)
class Limit:
    """The first or last position that a query sees: an origin plus ``offset`` and ``amount``.

    The origin is ``node`` (dims of roles B and S), the query's index, the number of tokens or zero, by ``kind``. ``amount``: a symbolic
    int, None for none.
    """

    kind: LimitKind
    offset: int = 0
    node: fx.Node | None = None
    roles: tuple[str, ...] = ()
    amount: Amount | None = None

    @property
    def shift(self) -> Any:
        """The sum of ``offset`` and ``amount``, an int or a SymInt."""
        return self.offset if self.amount is None else self.offset + self.amount.value


@dataclass(frozen=True)
class Site:
    """A site: one attention over a cache with its slots and masks, all that a plan and a rewrite need."""

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
    """A second slot of keys, with the channels after the key slot's: the rotary part of a latent cache. None without one."""
    assembly: Assembly | None = None
    """How keys and values are made from the slots; None where they are views of the slots. Key and value slot may then be one."""

    @property
    def read_as_keys(self) -> tuple[Slot, ...]:
        """The slots whose channels, one after another, are multiplied with the queries."""
        return (self.key,) if self.extra_key is None else (self.key, self.extra_key)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots that the site reads, each once."""
        found = {(slot.root, slot.axes.select): slot for slot in (self.key, self.value, self.extra_key) if slot is not None}
        return tuple(found.values())


@dataclass(frozen=True)
class Refusal:
    """A refusal: an attention that is not rewritten, with stage, reason, source line, nearest idiom, advice and evidence."""

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
    """Raised where a recogniser gives up, with the reason, the nodes that show it and advice; ``match`` turns it into a Refusal."""

    def __init__(self, reason: str, *evidence: fx.Node, advice: str = "") -> None:
        super().__init__(reason)
        self.reason, self.evidence, self.advice = reason, evidence, advice
