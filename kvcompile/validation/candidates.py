"""Candidates: the random values that one argument of a cut program may have in a call, the likeliest first.

Queries, new tokens and caches are normal numbers. An argument that positions or masks are computed from has several readings: positions of
the new tokens, a count of tokens, flags of padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import torch
from torch import fx

from kvcompile.passes.capture.capture import Input
from kvcompile.passes.capture.position_graph import dataflow, extract
from kvcompile.passes.graph.operators import COPIES
from kvcompile.passes.graph.shapes import op_name, value_of
from kvcompile.passes.graph.worlds import Values
from kvcompile.passes.match.mask.reach import held
from kvcompile.passes.match.sites import LimitKind, MaskKind, MaskTerm
from kvcompile.types import NUMBERS
from kvcompile.validation.sizes import hints, past, read
from kvcompile.validation.subgraph import Subgraph

QUERIES = 3.0
"""The spread of random queries."""
HOSTILE = 1e4
"""The factor of queries in a hostile call: their scores go far beyond -1e4, with which some models mask."""


def taken_from(node: fx.Node) -> fx.Node:
    """Return the node that ``node``, a number, is read from through elements and copies."""
    while op_name(node) in NUMBERS | COPIES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


@dataclass(frozen=True)
class TrialCall:
    """One trial call: the program's sizes, the position of its first token, and the most tokens of a row that are padding.

    ``blind``: the last row's padding reaches into the new tokens, whose queries then see nothing; otherwise every query sees a token.
    ``infinite``: added masks hide by -inf rather than by the lowest finite number. ``ahead``: masks show some slots that are not written
    yet. ``hostile``: values that are unlike random ones: large scores, masks of integers other than 0 and 1, any pattern of booleans, added
    masks far from zero.
    """

    values: Values
    start: int
    padded: int = 0
    blind: bool = False
    infinite: bool = False
    ahead: bool = False
    hostile: bool = False

    def padding(self, rows: int) -> torch.Tensor:
        """Return how many tokens on the left of each row are hidden, int64 [rows]."""
        if self.blind:
            return torch.arange(1, rows + 1, device="cpu") * self.padded // rows
        return torch.arange(rows, device="cpu") % ((self.padded if self.start > self.padded else 0) + 1)


@dataclass
class Candidates:
    """A maker of values for each argument of a program; ``examples``: the captured graph's arguments, where they are known."""

    part: Subgraph
    examples: Sequence[Any]
    random: torch.Generator
    first_reading: dict[int, int] = field(default_factory=dict)
    """For an argument's index, the reading of it that was right in an earlier call."""

    def __post_init__(self) -> None:
        sites, effects = self.part.sites, self.part.effects
        captured = self.part.captured
        written = [slot.write.position for site in sites for slot in site.slots if slot.kind.facts.written and slot.sliding is None]
        # The slots in a block table are in no order.
        self.pooled = any(slot.block_table is not None for site in sites for slot in site.slots)
        written = [] if self.pooled else written
        self.indices = tuple(dict.fromkeys(where.index for where in written if where.index is not None))
        self.offsets = tuple(dict.fromkeys(where.offset for where in written if where.index is None and where.past is None))
        terms = [term for site in sites for term in site.bounds.carried]
        terms += [MaskTerm(site.bounds.keep[0], MaskKind.BOOL, site.bounds.keep[1]) for site in sites if site.bounds.keep is not None]
        self.terms = tuple(dict.fromkeys(term for term in terms if "T" in term.roles))
        limits = [limit.node for site in sites for limit in (site.bounds.hi, site.bounds.lo) if limit and limit.node is not None]
        flow = dataflow(captured, effects)
        masks = {term.node for site in sites for term in (*site.attention.masks, *site.bounds.carried)} | {term.node for term in self.terms}
        reading = {node for node in (*self.indices, *limits, *masks) if node in flow}
        self.behind = reading.union(*(nx.ancestors(flow, node) for node in reading)) if reading else set()
        placed = [node for node in (*self.indices, *limits) if node in flow]
        self.places = set(placed).union(*(nx.ancestors(flow, node) for node in placed)) if placed else set()
        self.places |= {entry.node for entry in captured.inputs if self.counts_on(entry)}
        writing = {node for node in self.indices if node in flow}
        writing = writing.union(*(nx.ancestors(flow, node) for node in writing)) if writing else set()
        inputs = {entry.node for entry in captured.inputs if isinstance(value_of(entry.node), torch.Tensor)}
        # Arguments from which limits of visible positions are computed, and no positions of writes.
        self.limiting = (self.places & inputs) - writing
        # Masks that depend on arguments other than positions, which decide the tokens that they hide.
        self.free = {term for term in self.terms if (nx.ancestors(flow, term.node) | {term.node}) & inputs - self.places}
        # Index tensors of gathers, each with the size of the dim that it indexes.
        gathers = [slot.block_table.places.picked for site in sites for slot in site.slots if slot.block_table is not None]
        self.tables = {held(picked.node): picked.size for found in gathers for picked in found}
        self.caches = {slot.placeholder for site in sites for slot in site.slots if slot.placeholder is not None}
        nodes = (*self.indices, *(term.node for term in self.terms))
        # With no upper limit, only mask arguments can hide slots that are not written yet.
        self.open = any(site.bounds.hi.kind is LimitKind.ALL for site in sites)
        self.checks = extract(captured, nodes, effects) if nodes else None
        beside = {site.attention.beside.q for site in sites if site.attention.beside is not None}
        self.queries = {site.attention.q for site in sites} | beside
        self.factors = {
            taken_from(factor.node): (value_of(site.attention.q).shape[-1]) ** (0.5 if factor.divides else -0.5)
            for site in sites for factor in site.attention.factors
        }

    def counts_on(self, entry: Input) -> bool:
        """Return whether an integer argument held, in the compiled call, the positions of its new tokens, and no write says so: where a
        cache grows, or is written at a slice.
        """
        grown = [slot for site in self.part.sites for slot in site.slots if slot.kind.facts.extended]
        sliced = [
            slot for site in self.part.sites for slot in site.slots
            if slot.kind.facts.written and slot.sliding is None and slot.write.position.index is None and slot.write.position.past is None
        ]
        fake = self.part.captured.fakes[entry.index]
        if not (grown or sliced) or not isinstance(fake, torch.Tensor) or fake.dtype not in {torch.int32, torch.int64}:
            return False
        known = hints(self.part)
        value = self.example(entry.index, tuple(read(size, known) for size in fake.shape))
        offset = 0 if grown else sliced[0].write.position.offset
        start = read(past(grown[0]) if grown else offset if isinstance(offset, int) else value_of(offset), known)
        count = read((grown or sliced)[0].write.count, known)
        if value is None or (value.numel() != 1 and value.shape[-1] != count):
            return False
        rows = value.reshape(-1, value.shape[-1] if value.dim() else 1).to(torch.int64)
        return torch.equal(rows, (torch.arange(rows.shape[1], device="cpu") + start).expand(rows.shape))

    def tokens(self, moment: TrialCall) -> int:
        """Return the number of new tokens of a call."""
        counts = [slot.write.count for site in self.part.sites for slot in site.slots if slot.kind.facts.written]
        return read(counts[0] if counts else self.part.sites[0].tokens, moment.values)

    def keys(self, moment: TrialCall) -> int:
        """Return the number of tokens that attention reads in a call."""
        attention = self.part.sites[0].attention
        return read(value_of(attention.k).shape[attention.k_roles.index("T")], moment.values)

    def shape(self, fake: torch.Tensor, moment: TrialCall) -> tuple[int, ...]:
        """Return the shape that an argument, given as its fake tensor, has in a call."""
        return tuple(read(size, moment.values) for size in fake.shape)

    def normal(self, shape: Sequence[int], dtype: torch.dtype, spread: float = 1.0) -> torch.Tensor:
        """Return random numbers of ``shape`` and ``dtype``: normal ones of standard deviation ``spread``, 0s and 1s for ints and bools."""
        if dtype.is_floating_point:
            return (torch.randn(tuple(shape), generator=self.random, device="cpu") * spread).to(dtype)
        return torch.randint(0, 2, tuple(shape), generator=self.random, device="cpu").to(dtype)

    def among(self, values: Sequence[float], shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor of ``shape`` whose elements are drawn at random from ``values``, with repetition."""
        return torch.tensor(values, device="cpu")[torch.randint(0, len(values), tuple(shape), generator=self.random, device="cpu")]

    def plain(self, fake: torch.Tensor, index: int, moment: TrialCall) -> torch.Tensor:
        """Return a value for an argument from which neither positions nor masks are computed, in the shape that it has in this call.

        The value is random numbers; for tables, integers and factors of scores, values like those of the compiled call.
        """
        shape = self.shape(fake, moment)
        node = self.part.captured.inputs[index].node
        if node in self.tables:
            return self.table(fake.dtype, index, shape, read(self.tables[node], moment.values))
        if not fake.dtype.is_floating_point and (example := self.example(index, shape)) is not None:
            return example
        if node in self.factors:
            return self.factor(shape, fake.dtype, self.factors[node])
        if index in self.part.given:
            spread = (QUERIES * HOSTILE if moment.hostile else QUERIES) if node in self.queries else 1.0
            return self.normal(shape, fake.dtype, spread)
        # A weight, scaled so that sums over its last dim are of order one.
        return self.normal(shape, fake.dtype, max(shape[-1], 1) ** -0.5 if len(shape) > 1 else 1.0)

    def factor(self, shape: tuple[int, ...], dtype: torch.dtype, usual: float) -> torch.Tensor:
        """Return a factor of the scores of ``shape`` and ``dtype``, drawn in each call: of one sign, 0.5 to 1.5 times ``usual`` in size.

        With a larger factor a softmax would show one token alone, and hide errors in all others.
        """
        drawn = torch.rand(shape, generator=self.random, device="cpu") + 0.5
        sign = 1.0 if float(torch.rand((), generator=self.random, device="cpu")) < 0.5 else -1.0
        return (drawn * sign * usual).to(dtype)

    def example(self, index: int, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return the value that the argument at ``index`` had when the graph was compiled.

        None if it is unknown, or has another shape in this call.
        """
        if index not in self.part.sources:
            return None
        value = self.examples[self.part.sources[index]] if self.part.sources[index] < len(self.examples) else None
        plain = type(value) in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
        if not plain or not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
            return None
        return value.detach().to("cpu", copy=True)

    def table(self, dtype: torch.dtype, index: int, shape: tuple[int, ...], count: int) -> torch.Tensor:
        """Return the block table that a program was compiled with; if that does not fit the call, one of random slots below ``count``.

        ``index``: the argument's index; ``shape``: its shape in this call. Slots repeat if the table has more than ``count`` entries.
        """
        example = self.example(index, shape)
        if example is not None and bool(((example >= -count) & (example < count)).all()):
            return example
        places = torch.randperm(count, generator=self.random, device="cpu")
        return places[torch.arange(math.prod(shape), device="cpu") % count].view(shape).to(dtype)

    def readings(self, fake: torch.Tensor, index: int, moment: TrialCall) -> list[torch.Tensor]:
        """Return the values that the argument ``index``, from which positions or masks are computed, may have, the likeliest first."""
        shape, count, keys = self.shape(fake, moment), self.tokens(moment), self.keys(moment)
        start, dtype = moment.start, fake.dtype
        if not shape:
            return [torch.full((), number, dtype=dtype, device="cpu") for number in (start, start + count, start + count - 1)]
        found: list[torch.Tensor] = []
        wide = shape[-1] == keys and (keys != count or len(shape) > 1 or start == 0) and keys > 1
        if dtype is torch.bool or (dtype.is_floating_point and wide):
            if wide:
                shown = self.shown(shape, moment)
                if dtype is torch.bool:
                    unpadded = self.unpadded(shape, moment)
                    found += [unpadded, shown, ~unpadded, ~shown]
                else:
                    lowest = torch.finfo(dtype).min
                    # Visible tokens get a random bias, since an argument may be a mask and a bias at once.
                    bias = self.normal(shape, dtype)
                    found += [] if self.open or moment.blind else [bias]
                    found += [torch.where(shown, bias, low) for low in ((lowest, -math.inf) if not moment.infinite else (-math.inf,))]
            example = self.example(index, shape)
            return [*found, *([example] if example is not None else []), self.normal(shape, dtype)]
        if dtype.is_floating_point:
            where = [(torch.arange(count, device="cpu") + start).expand(shape).to(dtype)] if shape[-1] == count else []
            return [self.normal(shape, dtype), *where]
        if self.pooled and len(shape) == 2 and shape[-1] != count:
            found.append(torch.randperm(shape[0] * shape[1], generator=self.random, device="cpu").view(shape))
        if self.part.captured.inputs[index].node not in self.places:
            # 1 for a token that counts.
            found += [self.unpadded(shape, moment), self.shown(shape, moment)]
        if shape[-1] == count:
            found.append((torch.arange(count, device="cpu") + start).expand(shape))
        if shape[0] == count and len(shape) > 1:
            found.append((torch.arange(count, device="cpu") + start).view(-1, *[1] * (len(shape) - 1)).expand(shape))
        if wide:
            found.append(self.shown(shape, moment).to(dtype))
        if max(shape) == 1 or (len(shape) <= 2 and shape[-1] != keys):
            found += [torch.full(shape, number, device="cpu") for number in (start, start + count, start + count - 1)]
        if shape[-1] == keys:
            found.append(torch.arange(keys, device="cpu").expand(shape))
        if shape[-1] > count and self.part.captured.inputs[index].node in self.places:
            # A counter with a number for every token, of which a call takes the first ones.
            found.append((torch.arange(shape[-1], device="cpu") + start).expand(shape))
        if (example := self.example(index, shape)) is not None:
            found.insert(0 if index not in self.first_reading and not found else len(found), example)
        found.append(torch.zeros(shape, device="cpu"))
        return [value.to(dtype).clone() for value in found]

    def shown(self, shape: tuple[int, ...], moment: TrialCall) -> torch.Tensor:
        """Return a mask, bool of ``shape`` [..., T], that hides padding on the left and unwritten slots.

        If it has a dim of queries, it is causal.
        """
        count, keys, start = self.tokens(moment), shape[-1], moment.start
        t = torch.arange(keys, device="cpu")
        seen = (t < start + count).expand(shape).clone()
        if len(shape) >= 2 and shape[-2] == count and (len(shape) > 2 or count > 1):
            seen &= t <= start + torch.arange(count, device="cpu")[:, None]
        if len(shape) >= 2 and (shape[0] > 1 or moment.blind):
            seen &= t >= moment.padding(shape[0]).view(-1, *[1] * (len(shape) - 1))
        if moment.ahead:
            seen |= (t >= start + count) & (torch.rand(shape, generator=self.random, device="cpu") < 0.5)
        return seen

    def unpadded(self, shape: tuple[int, ...], moment: TrialCall) -> torch.Tensor:
        """Return a mask, bool of ``shape`` [..., T], that hides only padding on the left.

        It is for programs in which positions hide unwritten slots.
        """
        seen = torch.ones(shape, dtype=torch.bool, device="cpu")
        if len(shape) >= 2 and (shape[0] > 1 or moment.blind):
            seen &= torch.arange(shape[-1], device="cpu") >= moment.padding(shape[0]).view(-1, *[1] * (len(shape) - 1))
        return seen
