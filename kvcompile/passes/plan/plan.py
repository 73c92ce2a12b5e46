"""Plan: the scheme of each site and its bytes. Pure.

Bytes are sympy expressions of B (batch rows) and T (tokens in use), so that announced bytes can be printed, evaluated and compared with
allocated ones.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch

from kvcompile.errors import (
    DeviceUnsupported,
    NotInPolicy,
    OrderNotKnown,
    PagedNeedsTokens,
    SchemeError,
    SlidingNeedsTokens,
    UnsupportedDtype,
    WindowOnlyRead,
    WindowReadLate,
)
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.shapes import equal, same, value_of
from kvcompile.passes.match.agreement import agreed
from kvcompile.passes.match.attention.steps import SEEN, UNSEEN
from kvcompile.passes.match.mask.masks import hiding
from kvcompile.passes.match.match import Matched, refuse
from kvcompile.passes.match.rope.rope import KeyRope, recognise
from kvcompile.passes.match.sites import Miss, Refusal, Site, Slot, Stage
from kvcompile.passes.plan.policy import Pair, Policy
from kvcompile.passes.plan.reporting import check_scheme, check_site, with_tally
from kvcompile.schemes import Adaptive, Certify, Scheme
from kvcompile.schemes.rotation import Rotation
from kvcompile.types import PAGE, Layout, Role, SlotSpec

BATCH, TOKENS = sympy.Symbol("B", integer=True, positive=True), sympy.Symbol("T", integer=True, nonnegative=True)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Growing:
    """The rule by which a store grows; stores of a graph with equal rules have the same number of pages.

    ``end``: the capacity that it grows up to, None for unbounded. ``still``: whether its first write is its last, as in cross-attention, so
    that it needs no spare room.
    """

    end: int | None
    still: bool = False

    @property
    def label(self) -> str:
        """A unique text for each value, '' for unbounded growth."""
        return f"{'' if self.end is None else self.end}{'still' if self.still else ''}"


@dataclass(frozen=True)
class SlotPlan:
    """A slot with its scheme, layout and bytes."""

    slot: Slot
    role: Role
    scheme: Scheme
    spec: SlotSpec
    layout: Layout
    window: int = 0
    """Newest tokens kept in full precision: the larger of the site's windows for keys and values, since one attention reads both."""
    rope: KeyRope | None = None
    """The rotary embedding to undo in stored keys (``pre_rope`` schemes); None for other slots."""
    sinks: int = 0
    """First tokens kept in full precision: the larger of the site's numbers for keys and values."""
    still: bool = False
    """Whether this graph shows that no token is appended after the first write."""

    @property
    def knows_padding(self) -> bool:
        """Whether the append gets each row's first position that is not padding, since a window, sinks or the scheme depend on it."""
        return bool(self.window or self.sinks) or self.scheme.keeps_padding_out

    @property
    def rotation(self) -> Rotation | None:
        """The rotation of the stored channels; None if they are stored unrotated."""
        return self.scheme.rotation(self.spec)

    @property
    def end(self) -> int | None:
        """The capacity that the store grows up to; None for unbounded."""
        slot = self.slot
        if slot.sliding is not None:
            return slot.sliding.slots
        size = slot.axes.room(value_of(slot.root).shape)
        return size if slot.kind.facts.fixed and isinstance(size, int) else None

    @property
    def growing(self) -> Growing:
        """The capacity that the store grows up to (None: unbounded), and whether its first write is its last, as one record."""
        return Growing(self.end, self.still)

    @property
    def in_order(self) -> bool:
        """Whether tokens must be appended in order."""
        return bool(self.window) or self.scheme.in_order

    @property
    def bytes_after(self) -> sympy.Expr:
        """Bytes of the planes for ``BATCH`` rows and ``TOKENS`` tokens in use, in whole pages.

        For an adaptive scheme: its announced budget, plus its full-precision tokens.
        """
        if isinstance(self.scheme, Adaptive):
            token = self.spec.head_dim * 2 * self.scheme.announced + self.scheme.original_bytes(self.spec)
            return sympy.ceiling(token * self._rows * self._tokens * self.spec.heads)
        return self.layout.nbytes(sympy.ceiling(self._tokens / PAGE), self._rows, self.spec.heads)

    @property
    def bytes_before(self) -> sympy.Expr:
        """Bytes of the dense cache for ``BATCH`` rows and ``TOKENS`` tokens in use."""
        return self._rows * self._tokens * self.spec.heads * self.spec.head_dim * self.spec.dtype.itemsize

    @property
    def _rows(self) -> sympy.Expr:
        """Stored rows: 1 for a pool, whatever the batch."""
        return BATCH if self.slot.block_table is None else sympy.Integer(1)

    @property
    def _tokens(self) -> sympy.Expr:
        """Stored tokens when ``TOKENS`` are in use: all slots of a pool, at most the window of a sliding cache."""
        if self.slot.block_table is not None:
            return sympy.Integer(self.slot.axes.room(value_of(self.slot.root).shape))
        return TOKENS if self.slot.sliding is None else sympy.Min(TOKENS, self.slot.sliding.slots)


@dataclass(frozen=True)
class SitePlan:
    """A site with its planned slots; ``key`` and ``value`` are one plan if a latent serves as both.

    ``extra_key``: a second slot of key channels, or None. ``certify``: every step over codes adds its error report to the keys' last
    plane, counting excesses over these budgets; None for no report.
    """

    site: Site
    key: SlotPlan
    value: SlotPlan
    extra_key: SlotPlan | None = None
    certify: Certify | None = None

    @property
    def parts(self) -> tuple[SlotPlan, ...]:
        """The plans of all slots, without repeats."""
        distinct = (self.key,) if self.value is self.key else (self.key, self.value)
        return distinct if self.extra_key is None else (*distinct, self.extra_key)

    @property
    def keys(self) -> tuple[SlotPlan, ...]:
        """The plans of the slots with the keys' channels, in order of channels."""
        return (self.key,) if self.extra_key is None else (self.key, self.extra_key)


@dataclass(frozen=True)
class Plan:
    """All planned sites, the refusals, and the module paths of sites that the policy leaves out."""

    sites: tuple[SitePlan, ...]
    refusals: tuple[Refusal, ...]
    left_out: tuple[str, ...] = ()


def _slot_plan(slot: Slot, role: Role, chosen: Scheme, exact: tuple[int, int], rolling: int | None, effects: Effects) -> SlotPlan:
    """Return the plan of ``slot`` with ``exact`` = (newest, first) tokens in full precision.

    Raises a SchemeError or Miss if the scheme cannot hold it.

    ``rolling``: the capacity of a buffer with moving tokens, else None.
    """
    scheme, (window, sinks) = chosen.for_role(role), exact
    spec = SlotSpec(slot.heads, slot.head_dim, value_of(slot.root).dtype, role)
    scheme.check(spec)
    layout = scheme.layout(spec).with_sinks(spec, sinks)
    if slot.block_table is not None:
        _check_table(scheme, layout)
    elif rolling is not None:
        _check_ring(rolling, scheme, layout)
    rope = agreed(effects.output.graph, lambda: recognise(slot, effects), slot.write.node) if scheme.pre_rope else None
    layout = layout.windowed(spec, window).with_sinks(spec, sinks) if window else layout
    return SlotPlan(slot, role, scheme, spec, layout, window, rope, sinks)


def _needs_order(scheme: Scheme, layout: Layout, blocks: str, beside: str, turned: str) -> str | None:
    """Return why a scheme needs its tokens in order, as a clause of an error message; None if it does not.

    ``blocks``, ``beside`` and ``turned``: the end of that clause for schemes that encode blocks, keep further planes, or undo RoPE.
    """
    if not scheme.by_token:
        return f"encodes blocks of consecutive tokens, and {blocks}"
    if scheme.window:
        return f"keeps its newest {scheme.window} tokens in full precision beside its codes, which {beside}"
    if layout.ordered:
        return f"keeps tokens or tables in addition to its codes, which {beside}"
    if scheme.pre_rope:
        return f"undoes RoPE by a key's slot in the cache, which is not its position{turned}"
    return None


def _check_dtypes(site: Site) -> None:
    """Raise UnsupportedDtype if no kernel supports a cache's dtype."""
    for slot in site.slots:
        if (dtype := value_of(slot.root).dtype) not in DTYPES:
            raise UnsupportedDtype(known=[str(known).removeprefix("torch.") for known in DTYPES], dtype=dtype)


def _check_table(scheme: Scheme, layout: Layout) -> None:
    """Raise PagedNeedsTokens if the scheme of a paged cache needs its tokens in order: a pool does not keep them in order.

    Schemes with windows, with blocks of tokens that are encoded together, and with planes computed from queries need that order.
    """
    why = _needs_order(scheme, layout, "the tokens of a sequence are in scattered slots", "cannot be gathered with them", "")
    if why is not None:
        raise PagedNeedsTokens(scheme=scheme.spec(), why=why)


def _check_ring(slots: int, scheme: Scheme, layout: Layout) -> None:
    """Raise SlidingNeedsTokens if the scheme of a cache of ``slots`` slots that are overwritten needs its tokens in order."""
    why = _needs_order(
        scheme, layout, "each new token would be written over one of the oldest block", "do not wrap around with them",
        " once slots are overwritten",
    )
    if why is not None:
        raise SlidingNeedsTokens(slots=slots, scheme=scheme.spec(), why=why)


def _check_order(site: Site, pair: Pair) -> None:
    """Raise OrderNotKnown if a scheme needs tokens in order, and the graph does not show that the call writes them in order."""
    needs = next((scheme for scheme in (pair.k, pair.v) if scheme.in_order), None)
    if needs is None:
        return
    found = None
    if not site.key.kind.facts.written:
        found = "a cache that this attention only reads"
    elif any(slot.write.late for slot in site.slots):
        found = "tokens that are written after the attention, for the next call"
    elif any(slot.write.position.rows for slot in site.slots):
        found = "separate positions for each batch row"
    if found is not None:
        raise OrderNotKnown(scheme=needs.name, path=site.path or "*", found=found)


def _check_alone(site: Site, pair: Pair, every: Sequence[Site]) -> None:
    """Raise OrderNotKnown if another attention reads a cache of this site whose contents depend on the attention of its scheme."""
    needs = next((scheme for scheme in (pair.k, pair.v) if scheme.attention != Scheme.attention), None)
    parts = {slot.part for slot in site.slots}
    others = {slot.part for other in every if other is not site for slot in other.slots}
    if needs is not None and parts & others:
        raise OrderNotKnown(scheme=needs.name, path=site.path or "*", found="a cache that another attention reads too")


def _check_device(site: Site, pair: Pair) -> None:
    """Raise DeviceUnsupported if a scheme's attention does not run on the cache's device."""
    for scheme in (pair.k, pair.v):
        device = value_of(site.key.root).device.type
        if scheme.devices is not None and device not in scheme.devices:
            raise DeviceUnsupported(scheme=scheme.name, path=site.path or "*", known=" and ".join(scheme.devices), device=device)


def _check_log_sums(site: Site, pair: Pair) -> None:
    """Raise Miss if the log-sum of the scores is needed, and the scheme's attention does not return it."""
    if not site.attention.gives_log_sums:
        return
    own = next((scheme.name for scheme in (pair.k, pair.v) if scheme.attention != Scheme.attention), None)
    read = "the log-sum of the scores is read" if site.attention.memory is None else "learned tokens are read together with the cache"
    if own is not None:
        raise Miss(f"{read}, and the attention of {own} gives none", site.attention.output, advice="use another scheme for this layer")
    if pair.certify is not None:
        raise Miss(f"{read}, and a certificate bounds results alone", site.attention.output, advice="leave certify out")


def _check_tiles(site: Site, pair: Pair, value: SlotPlan) -> None:
    """Raise Miss if values have fewer heads than keys, and the scheme or certificate needs equal numbers."""
    if site.value.tiles == 1:
        return
    own = next((scheme.name for scheme in (pair.k, pair.v) if scheme.attention != Scheme.attention), None)
    found = f"the attention of {own} takes as many of both" if own is not None else None
    if pair.certify is not None:
        found = "a certificate takes as many of both"
    elif value.rotation is not None and value.rotation.plane is not None:
        found = f"{pair.v.name} computes a rotation for each of them"
    if found is not None:
        raise Miss(f"the values have fewer heads than the keys, and {found}", site.attention.output, advice="use another scheme here")


def _check_fill(site: Site, pair: Pair) -> None:
    """Raise Miss if masked scores get a finite fill value, and the scheme or cache only supports hidden tokens (-inf)."""
    fill = site.bounds.fill
    if fill == -math.inf:
        return
    found = None
    if pair.certify is not None or pair.k.attention != Scheme.attention:
        found = f"the attention of {pair.k.name} knows only tokens that are hidden"
    elif site.key.sliding is not None or site.key.block_table is not None:
        found = "the slots of its cache are in another order"
    elif max(pair.k.window, pair.v.window) and any("B" in role for term in hiding(site.bounds) for role in term.roles):
        found = "its padding is left out of blocks of tokens"
    if found is not None:
        raise Miss(
            f"masked scores are replaced by {fill:g}, {SEEN}, and {found}", site.attention.output, advice=UNSEEN,
        )


def layer_of(path: str, index: int) -> int:
    """Return a layer's number: the first number in its module path, else ``index``."""
    found = re.search(r"(?<![A-Za-z_])\d+(?![A-Za-z_])", path)
    return int(found[0]) if found else index


def rolls(site: Site) -> int | None:
    """Return the capacity of a buffer whose tokens move once it is full, as its mask's window is no shorter; None for other caches."""
    hi, lo, slot = site.bounds.hi, site.bounds.lo, site.key
    if lo is None or not slot.kind.facts.in_place or (hi.kind, hi.node) != (lo.kind, lo.node):
        return None
    longest = hi.offset - lo.offset + 1
    return slot.capacity if hi.amount == lo.amount and isinstance(slot.capacity, int) and longest >= slot.capacity else None


def _still(slot: Slot, site: Site) -> bool:
    """Return whether a cache will not grow: the graph only reads it, or creates it with a number of tokens that differs from the queries'.

    If the answer is wrong, the next write makes room at the cost of a copy. A buffer has its own capacity in any case.
    """
    facts = slot.kind.facts
    if not facts.written:
        return not facts.created
    return facts.created and facts.grows and slot.sliding is None and not same(slot.write.count, site.tokens)


def _one_length(site: Site) -> None:
    """Guard that a site's queries, its write and the written values have equally many tokens, if they have in this call.

    SDPA compares lengths on a GPU when the variant for an empty cache is traced: after Dynamo's guards are fixed. Queries, keys, values and
    positions have sizes of their own where Dynamo broke the graph in front of the write.
    """
    for slot in site.slots:
        write = slot.write
        equal(site.tokens, write.count)
        given = value_of(write.values).shape
        # The values may have fewer dims on the left than what is written.
        place = write.dims.index(write.token_dim) - len(write.dims) + len(given) if write.token_dim in write.dims else -1
        if place >= 0 and not same(given[place], 1):
            equal(given[place], write.count)


def site_plan(site: Site, pair: Pair, effects: Effects) -> SitePlan:
    """Return the plan of ``site``, with the schemes of ``pair`` for its slots.

    Raises a SchemeError or Miss if a scheme cannot hold its slot, such as one with a window for a cache that is only read.
    """
    pair = dataclasses.replace(pair, k=pair.k.for_module(site.path), v=pair.v.for_module(site.path))
    window, sinks = max(pair.k.window, pair.v.window), max(pair.k.sinks, pair.v.sinks)
    if window and not site.key.kind.facts.written:
        raise WindowOnlyRead(window=window, path=site.path or "*")
    if window and any(slot.write.late for slot in site.slots):
        raise WindowReadLate(window=window, path=site.path or "*")
    for scheme in (pair.k, pair.v):
        scheme.check_pair(pair.k, pair.v, site.assembly is not None, site.path or "*")
    _check_device(site, pair)
    _one_length(site)
    _check_order(site, pair)
    _check_fill(site, pair)
    _check_log_sums(site, pair)
    rolling = site.key.sliding.slots if site.key.sliding is not None else rolls(site)
    if pair.certify is not None:
        check_site(site, rolling)

    def planned(slot: Slot, role: Role, chosen: Scheme) -> SlotPlan:
        made = dataclasses.replace(_slot_plan(slot, role, chosen, (window, sinks), rolling, effects), still=_still(slot, site))
        if pair.certify is None:
            return made
        check_scheme(made.scheme, made.spec, site.path or "*")
        return dataclasses.replace(made, layout=with_tally(made.layout, made.spec))

    if site.assembly is None:
        key, value = planned(site.key, Role.KEY, pair.k), planned(site.value, Role.VALUE, pair.v)
        _check_tiles(site, pair, value)
        pair.k.check_site(key.spec, value.spec, layer_of(site.path, site.index))
        return SitePlan(site, key, value, certify=pair.certify)
    # A slot that serves as keys and values is stored once, by the scheme of the more sensitive keys, in the form for values (scales for
    # every token), as a latent's channels have no known statistics.
    key = planned(site.key, Role.VALUE, pair.k)
    extra_key = None if site.extra_key is None else planned(site.extra_key, Role.VALUE, pair.k)
    return SitePlan(site, key, key if site.value is site.key else planned(site.value, Role.VALUE, pair.v), extra_key)


def plan(matched: Matched, policy: Policy) -> Plan:
    """Return the plan of every site of a matched graph: planned sites, refusals, and the paths of sites that the policy leaves out.

    A site is refused if no entry of ``policy`` matches its path, if its schemes cannot hold its cache, or if it shares its cache with an
    attention that stays dense. A site whose entry is None is left out: neither planned nor refused.
    """
    sites, refusals = [], [item for item in matched.refusals if not policy.leaves_out(item.path)]
    paths = [*(item.path for item in matched.refusals), *(item.path for item in matched.sites)]
    left_out = [path for path in paths if policy.leaves_out(path)]
    for site in (item for item in matched.sites if not policy.leaves_out(item.path)):
        pair = policy.of(site.path)
        try:
            if pair is None:
                raise NotInPolicy(path=site.path)
            _check_dtypes(site)
            _check_alone(site, pair, matched.sites)
            sites.append(site_plan(site, pair, matched.effects))
        except Miss as miss:
            advice = "use the scheme without pre_rope for this layer"
            refusals.append(refuse(miss, site.attention.output, site.attention.idiom, Stage.PLAN, advice))
        except SchemeError as error:
            refusals.append(Refusal(Stage.PLAN, str(error), site.line, site.path, site.attention.idiom))
    kept = [item for item in sites if not _shares(item.site, matched, sites)]
    refusals += [
        Refusal(Stage.PLAN, "its cache tensor is shared with an attention that stays dense", item.site.line, item.site.path)
        for item in sites if item not in kept
    ]
    return Plan(tuple(kept), tuple(refusals), tuple(left_out))


def _shares(site: Site, matched: Matched, planned: list[SitePlan]) -> bool:
    """Return whether a refused site reads a cache tensor of ``site`` too, which must then stay dense."""
    refused = {other.index for other in matched.sites} - {item.site.index for item in planned}
    roots = {slot.root for slot in site.slots}
    return any(roots & {slot.root for slot in other.slots} for other in matched.sites if other.index in refused)
