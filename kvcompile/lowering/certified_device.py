"""``certified_attend`` by kernels: what ``certified.certified_step`` defines, with tier 2 read only where it is asked for.

    1. ``score`` reads the int8 keys once, ``sums`` makes blocks of logits, ``choose`` promotes keys; exploration is drawn here.
    2. ``exact`` reads the original keys of what is read and puts their logits in place. ``tally`` adds up what a certificate is
       made of, ``tally_values`` promotes values.
    3. ``mix`` reads the int4 values once, and original values where promoted. The certificate and the causes are made here.
    4. ``exact``, ``mix`` and the tallies again, with everything from the originals, for heads that fall; without one they end at once.

What stands here as tensor code has one number a row, but for exploration and a ranking of more than one block.

No branch depends on data, nothing comes to the host, every buffer's size is that of the planes: a CUDA graph can hold it.

Every decision is the definition's, on logits and sums that were added in another order, except that blocks whose shares are equal as
float32 numbers leave the tail together where a budget draws the line between them (never beyond ``k_max``). What is certified is
what was read, so more is sound. Weights are relative to the largest logit by codes, or the largest exact one if that is above it.
A head that falls is not what the scheme ``dense`` gives bit for bit: it is the same float32 attention over the originals in
another order, within the certificate that comes with it, which the originals' own norms make.

The arithmetic: logits as in the definition; a block's values in float32, a split's blocks one after the other, so the chain of roundings
grows by a split's blocks; splits and masses in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import sympy
import torch

from kvcompile.errors import Tier2Missing
from kvcompile.lowering import certificate as certificates
from kvcompile.lowering.bound_printer import slack
from kvcompile.lowering.certified_blocks import Deviations, Masses, total
from kvcompile.lowering.certified_checks import causes_of, rank_fails, ranked
from kvcompile.lowering.certified_promotion import ALL, chance
from kvcompile.lowering.certified_telemetry import Counted, counts_of, figures_of, in_a_row
from kvcompile.schemes import bounds
from kvcompile.schemes.certified import BLOCK, Certified
from kvcompile.schemes.certify import Cause, Certify, Fallback

SPAN, SUM_BLOCKS, EXACT_BLOCKS, TALLY, CHUNK, WIDE = 8, 64, 16, 256, 2048, 8192
"""Blocks of a program of ``score``, ``sums``, ``exact`` and ``tally``; those that ``choose`` weighs at once, and those that it compares.
The first and the third were timed (benchmarks/CERTIFIED.md), the others chosen by registers; so are the next two."""

ROW_TILE, OWN_TILE = 4, 1
"""Rows of a program of ``score`` and ``mix``, and where ``mix`` reads originals."""

OWN_PROGRAMS = {False: 64, True: 256}
"""Programs of a head that look for original values; by whether a head may want all of its own, and nobody else any."""

MOST_ROWS = 16
"""Rows of a kv head up to which kernels are used: they are unrolled."""

MOST = 2**30
"""Stands for any number of blocks."""

SPLITS = 256
"""Programs that share the values of a head of few rows and heads."""

LARGEST = 1e308
"""Stands for infinity in constants of kernels."""

INSIDE = 1 - 2.0**-40
"""Budgets are kept by this much, so that the same sum in another order keeps them too."""

PROGRAMS = 2048
"""Programs of ``mix`` to aim for: 16 warps on each multiprocessor of a large device."""


def kernel_gap(
    q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], keep: torch.Tensor | None, bias: torch.Tensor | None,
    group: int, softcap: float, value_dim: int, recent: Sequence[torch.Tensor] | None,
) -> str | None:
    """Why the kernels do not know this attention, None where they do; for real tensors and fake ones."""
    D, rows, page = q.shape[-1], q.shape[1] // keys[0].shape[2] * q.shape[2], keys[0].shape[3]
    if keep is not None or bias is not None or softcap:
        return "a mask other than from a first to a last position, a bias or a softcap"
    if not recent:
        return "no newest tokens in full precision"
    if not isinstance(rows, int) or rows > MOST_ROWS:
        return f"{rows} rows of queries a kv head, above {MOST_ROWS}"
    if D & (D - 1) or value_dim & (value_dim - 1) or D < BLOCK or value_dim < 2 * group:
        return f"{D} key channels and {value_dim} value channels: powers of two, and two groups of {group}, are known"
    if not isinstance(page, int) or page % BLOCK or any(plane.shape[3] != page for plane in values[:3]):
        return f"pages of {page} rows that are not whole blocks of codes and values alike"
    if any(plane.stride(-1) != 1 or plane.stride(-2) != plane.shape[-1] for plane in (*keys[:4], *values[:4])):
        return "planes whose rows do not lie one after the other"
    return None


def _linear() -> tuple[float, float, float]:
    """The printed radius of a key channel as what multiplies its step, the magnitude of its zero point, and one."""
    expression, outward = sympy.expand(bounds.RADIUS.expression), 1 + slack(bounds.RADIUS)
    parts = [expression.coeff(bounds.STEP), expression.coeff(bounds.ZERO), expression.subs({bounds.STEP: 0, bounds.ZERO: 0})]
    assert sympy.expand(expression - parts[0] * bounds.STEP - parts[1] * bounds.ZERO - parts[2]) == 0
    # As a constant of a float32 kernel each is rounded once more.
    step, zero, one = (float(part) * outward * (1 + 2.0**-22) for part in parts)
    return step, zero, one


RADIUS = _linear()


class Launch(NamedTuple):
    """How kernels are started."""

    cuda: bool

    def __call__(self, kernel: object, grid: tuple[int, ...], *operands: object, warps: int, **constants: object) -> None:
        """Run, in a graph as a node of it."""
        from torch.library import wrap_triton

        if self.cuda:
            constants["num_warps"] = warps
        made = wrap_triton(kernel) if self.cuda else kernel  # type: ignore[arg-type]
        made[grid](*operands, **constants)  # type: ignore[index]


def certified_by_kernels(
    rules: Certify, scheme: Certified, q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor], hi: torch.Tensor, lo: torch.Tensor | None, sinks: torch.Tensor | None, clock: torch.Tensor,
    scale: float, value_dim: int, recent: Sequence[torch.Tensor], base: torch.Tensor, splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, figures and counters of ``certified_attend``, for what ``kernel_gap`` lets through."""
    B, _, S, _ = q.shape
    for plane, what in zip(originals, ("original keys", "original values"), strict=True):
        if plane.shape[0] < keys[0].shape[0]:
            raise Tier2Missing(expected=keys[0].shape[0], found=plane.shape[0], what=what)
    run = DeviceStep(rules, scheme, q, keys, values, originals, hi, lo, sinks, scale, value_dim, recent, base, splits)
    heads = run.heads
    codes = run.score()
    coded = Masses(run.peak, run.weight)

    chosen, explored, widened, tail = run.choose(clock, codes)
    read = chosen if explored is None else chosen | explored.to(torch.int8)
    exact = run.exact(read, False)
    original_values, sums = run.tally(exact, read, explored, run.top, False)
    output = run.mix(original_values, exact.peak, False) / sums["mass"].clamp(min=certificates.LEAST_NORMAL).unsqueeze(-1)
    certificate = certificates.from_sums(sums, output, q.dtype)

    causes = causes_of(certificate, rules)
    if rules.rank == 1:
        causes = causes | ranked(*run.ranked(sums))
    elif rules.rank:
        mixed = Masses(torch.where(read != 0, exact.peak, coded.peak), torch.where(read != 0, exact.weight, coded.weight))
        known = ~codes & torch.isfinite(coded.peak) | (read != 0)
        causes = causes | ranked(*rank_fails(coded, mixed, Deviations(run.delta, run.own), known, codes & (read == 0), rules.rank))
    row_damaged = (run.damaged.view(B, -1) != 0).any(1)[:, None, None]
    causes = causes | torch.where(row_damaged, int(Cause.DAMAGED), 0)

    result, falls, dense_arithmetic = output, torch.zeros_like(causes, dtype=torch.bool), torch.zeros_like(certificate.arithmetic)
    if rules.fallback is Fallback.DENSE:
        falls = causes != 0
        asked = falls.to(torch.int8)
        exact = run.exact(asked, True)
        summed = run.mix(asked, exact.peak, True)
        _, dense_sums = run.tally(exact, asked, None, torch.empty_like(run.top), True)
        dense = summed / dense_sums["mass"].clamp(min=certificates.LEAST_NORMAL).unsqueeze(-1)
        found = certificates.from_sums(dense_sums, dense, q.dtype)
        dense_arithmetic = found.key + found.arithmetic
        result = torch.where(falls.unsqueeze(-1), dense, output)

    figures = figures_of(certificate, falls, dense_arithmetic, sums["delta_codes"], tail)
    explorers = torch.zeros_like(sums["keys"]) if explored is None else total(explored.to(torch.float64))
    counted = Counted(sums["blocks"], sums["keys"] - explorers, sums["values"], explorers)
    counts = counts_of(counted, widened != 0, falls, causes)
    results = (result.to(q.dtype), figures, counts)
    return tuple(x.unflatten(2, (heads[1], S)).flatten(1, 2) for x in results)  # type: ignore[return-value]


class DeviceStep:
    """The buffers of one step, and its kernels in the order in which they run."""

    def __init__(
        self, rules: Certify, scheme: Certified, q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor],
        originals: Sequence[torch.Tensor], hi: torch.Tensor, lo: torch.Tensor | None, sinks: torch.Tensor | None, scale: float,
        value_dim: int, recent: Sequence[torch.Tensor], base: torch.Tensor, splits: int | None,
    ) -> None:
        B, H, S, _ = q.shape
        K = keys[0].shape[2]
        self.rules, self.group, self.value_dim, self.scale = rules, scheme.group, value_dim, float(scale)
        self.q = q if q.stride(-1) == 1 else q.contiguous()
        self.keys, self.values, self.originals = keys, values, originals
        self.new_k, self.new_v = (x if x.stride(-1) == 1 else x.contiguous() for x in recent)
        self.heads, self.blocks, self.page = (K, H // K), keys[1].shape[0] * keys[1].shape[3], keys[0].shape[3]
        self.shape = (B, K, H // K * S)
        Q, N = self.shape[2], self.blocks
        self.tile = min(ROW_TILE, 1 << (Q - 1).bit_length())
        self.tiles = -(-Q // self.tile)
        self.splits = splits or max(1, min(SPLITS, PROGRAMS // (B * K * self.tiles)))
        self.share, self.own_programs = -(-N // self.splits), {asked: splits or count for asked, count in OWN_PROGRAMS.items()}
        self.sizes = dict(K=K, G=H // K, S=S)
        self.launch = Launch(q.device.type == "cuda")

        self.last = hi.expand(B, S).clamp(max=N * BLOCK - 1)
        self.least = torch.zeros_like(self.last) if lo is None else lo.expand(B, S).clamp(0, N * BLOCK)
        self.base = base
        window = base.expand(B).clamp(-(2**30), N * BLOCK).unsqueeze(-1)
        self.at = in_a_row([self.last, self.least, window], 2 * S + 1).to(torch.int32)
        sink = self.q.new_full((H,), float("-inf"), dtype=torch.float32) if sinks is None else sinks.to(torch.float32)
        # A slice of something larger is made once; what is a constant all over would be made anew for every kernel that reads it.
        rows = sink.view(K, H // K, 1).expand(B, -1, -1, S).flatten()
        self.sinks = torch.cat([rows, rows[:1]])[:-1].view(B, K, H // K, S)
        self.logits = self.floats(*self.shape, N * BLOCK)
        self.peak, self.weight, self.channels = (self.floats(*self.shape, N) for _ in range(3))
        self.delta, self.own, self.query_norm = self.doubles(*self.shape, N), self.doubles(*self.shape, N), self.doubles(*self.shape)
        self.notes, self.key_size, self.value_size = self.floats(B, K, N, 4), self.doubles(B, K, N), self.doubles(B, K, N)
        self.damaged = torch.zeros(B, K, dtype=torch.int8, device=q.device)
        self.top = self.floats(*self.shape)
        self.order, self.share_of, self.term = self.floats(*self.shape, N), self.doubles(*self.shape, N), self.doubles(*self.shape, N)

    def floats(self, *shape: int) -> torch.Tensor:
        """Uninitialized float32."""
        return torch.empty(shape, dtype=torch.float32, device=self.q.device)

    def doubles(self, *shape: int) -> torch.Tensor:
        """Uninitialized float64."""
        return torch.empty(shape, dtype=torch.float64, device=self.q.device)

    def flags(self) -> torch.Tensor:
        """Uninitialized flags of all blocks."""
        return torch.empty((*self.shape, self.blocks), dtype=torch.int8, device=self.q.device)

    def score(self) -> torch.Tensor:
        """Logits, sums of blocks, deviations and notes; which blocks each row sees that are codes, bool [B, K, Q, N]."""
        from kvcompile.lowering import triton_certified as kernels

        B, K, Q = self.shape
        N, q, keys, new_k, new_v, key_notes, value_notes = (
            self.blocks, self.q, self.keys, self.new_k, self.new_v, self.keys[3], self.values[3]
        )
        S = self.sizes["S"]
        several = dict(self.sizes, S2=1 << (S - 1).bit_length())
        self.launch(
            kernels.score, (-(-N // SPAN) + 1, B * K, self.tiles), q, *keys[:3], new_k, self.at, self.logits, self.channels,
            *q.stride()[:3], *keys[0].stride()[:3], *keys[1].stride()[:3], *new_k.stride()[:3], N, new_k.shape[2], warps=1,
            SCALE=self.scale, D=q.shape[3], TILE=self.tile, SPAN=SPAN, PER_PAGE=self.page // BLOCK, OF_STEP=RADIUS[0], OF_ZERO=RADIUS[1],
            OF_ONE=RADIUS[2], **several,
        )
        self.launch(
            kernels.sums, (-(-N // SUM_BLOCKS), B * K, Q), q, self.logits, self.channels, key_notes, value_notes, new_k, new_v, self.at,
            self.peak, self.weight, self.delta, self.own, self.notes, self.query_norm, *q.stride()[:3], *key_notes.stride()[:3],
            *value_notes.stride()[:3], *new_k.stride()[:3], *new_v.stride()[:3], N, new_k.shape[2], warps=4, SCALE=abs(self.scale),
            D=q.shape[3], DV=self.value_dim, NB=SUM_BLOCKS, PER_PAGE=self.page // BLOCK, **several,
        )
        first = torch.arange(N, device=q.device) * BLOCK
        last, least = (
            x[:, None, None, :].expand(-1, -1, self.heads[1], -1).flatten(2, 3).unsqueeze(-1) for x in (self.last, self.least)
        )
        seen = (first <= last) & (first + BLOCK > least) & (first < self.base[:, None])[:, None, None]
        return seen.expand(*self.shape, -1)

    def choose(
        self, clock: torch.Tensor, codes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """``certified_promotion.promote_keys`` without a sort: flags of promoted blocks, those explored, whether widened, the tail."""
        from kvcompile.lowering.triton_choose import choose

        rules, chosen, stats = self.rules, self.flags(), self.doubles(*self.shape, 2)
        widen = not math.isinf(rules.key_budget)
        self.launch(
            choose, (math.prod(self.shape),), self.peak, self.weight, self.delta, self.notes, self.sinks, self.at, self.order,
            self.share_of, self.term, chosen, self.top, stats, self.blocks, warps=16, LEAST=min(rules.k_min, MOST),
            MOST=min(rules.k_max, MOST), MOST_WIDENED=min(rules.k_max << rules.widen, MOST),
            COVER=(1 - rules.tau_cov + ALL) * INSIDE if rules.tau_cov < 1 else -1.0, BUDGET=rules.key_budget * INSIDE if widen else 0.0,
            WIDEN=widen, CHUNK=CHUNK, WIDE=WIDE, **self.sizes,
        )
        widened, tail = stats.unbind(-1)
        if not rules.explore:
            return chosen, None, widened, tail
        explored = codes & (chosen == 0) & (chance(clock, codes) < rules.explore)
        return chosen, explored, widened, total(torch.where(codes & (chosen == 0) & ~explored, self.share_of, 0))

    def exact(self, asked: torch.Tensor, everything: bool) -> Masses:
        """Exact masses where asked for, of blocks or (``everything``) of rows; logits there are exact from now on."""
        from kvcompile.lowering.triton_certified import exact

        B, K, _ = self.shape
        q, keys, originals = self.q, self.keys, self.originals[0]
        found = Masses(self.floats(*self.shape, self.blocks), self.floats(*self.shape, self.blocks))
        self.launch(
            exact, (-(-self.blocks // EXACT_BLOCKS), B * K), q, *keys[:3], originals, asked, self.at, self.notes, self.delta, self.own,
            self.logits, *found, self.top, self.key_size, self.damaged, *q.stride()[:3], *keys[0].stride()[:3], *keys[1].stride()[:3],
            *originals.stride()[:4], self.blocks, originals.shape[3], warps=1, SCALE=self.scale, GUARD=min(self.rules.guard, LARGEST),
            D=q.shape[3], NB=EXACT_BLOCKS, PER_PAGE=self.page // BLOCK, ALL=everything, S2=1 << (self.sizes["S"] - 1).bit_length(),
            **self.sizes,
        )
        return found

    def tally(
        self, exact: Masses, read: torch.Tensor, explored: torch.Tensor | None, top: torch.Tensor, everything: bool
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Which blocks' values come from the originals, and the sums that a certificate is made of, [B, K, Q] each."""
        from kvcompile.lowering import triton_tally as kernels

        rules, values, rows = self.rules, self.flags(), math.prod(self.shape)
        chunks = -(-self.blocks // TALLY)
        keys = self.doubles(*self.shape, chunks, len(kernels.COLUMNS))
        self.launch(
            kernels.tally, (chunks, rows), self.peak, self.weight, *exact, read, self.delta, self.own, self.notes, self.key_size,
            self.value_size, self.query_norm, self.sinks, self.at, top, keys, self.blocks, warps=4,
            RANK=rules.rank == 1 and not everything, SCALE=abs(self.scale), D=self.q.shape[3], CHUNK=TALLY, WIDTH=len(kernels.COLUMNS),
            ALL=everything, **self.sizes,
        )
        spend = not everything and not math.isinf(rules.value_budget)
        programs = 1 if spend else chunks
        left = self.doubles(*self.shape, programs, len(kernels.VALUE_COLUMNS))
        self.launch(
            kernels.tally_values, (programs, rows), self.peak, self.weight, *exact, read,
            read if explored is None else explored.to(torch.int8), self.notes, self.value_size, self.sinks, self.at, top, keys, self.order,
            self.term, values, left, self.blocks, chunks, self.share, warps=16 if spend else 4, CHAIN=certificates.CHAIN,
            V_TOL=min(rules.v_tol, LARGEST), BUDGET=rules.value_budget * INSIDE if spend else 0.0, SPEND=spend,
            EXPLORE=explored is not None, CHUNK=CHUNK if spend else TALLY, WIDE=WIDE,
            WIDTH=len(kernels.COLUMNS), OUT_WIDTH=len(kernels.VALUE_COLUMNS), ALL=everything, **self.sizes,
        )
        return values, self.summed(keys, left, top)

    def summed(self, keys: torch.Tensor, left: torch.Tensor, top: torch.Tensor) -> dict[str, torch.Tensor]:
        """What programs of ``tally`` and ``tally_values`` found, of all blocks and a sink together."""
        from kvcompile.lowering import triton_tally as kernels

        # One reduction for all columns of a kind: a column at a time each would be a kernel of its own.
        places, most = len(kernels.ADDED) + len(kernels.LARGEST), [kernels.COLUMNS.index(name) for name in ("by_codes", "by_exact")]
        largest = keys[..., len(kernels.ADDED) : places].amax(-2)
        found = dict(zip(kernels.ADDED, keys[..., : len(kernels.ADDED)].sum(-2).unbind(-1), strict=True))
        found |= dict(zip(kernels.LARGEST, largest.unbind(-1), strict=True))
        found |= dict(zip(kernels.VALUE_COLUMNS[:-1], left[..., :-1].sum(-2).unbind(-1), strict=True))
        found[kernels.VALUE_COLUMNS[-1]] = left[..., -1].amax(-1)
        attained = keys[..., most[0] : most[1] + 1] == largest[..., None, most[0] - len(kernels.ADDED) : most[1] + 1 - len(kernels.ADDED)]
        first = torch.where(attained, keys[..., places:], float(MOST)).amin(-2)
        found |= dict(zip(kernels.PLACES, first.unbind(-1), strict=True))
        sink = torch.exp(self.sinks.view(self.shape).to(torch.float64) - top.to(torch.float64))
        found["mass"] = found["mass"] + sink
        for name in ("total", "least"):
            found[name] = (found[name] + sink * (1 - 2.0**-20)).clamp(min=certificates.LEAST_NORMAL)
        return found

    def ranked(self, sums: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """``certified_checks.rank_fails`` for one leading block, from what ``tally`` found."""
        at = sums["first_by_exact"].to(torch.int64)
        own = torch.where(at < self.blocks, self.own.gather(-1, at.clamp(max=self.blocks - 1).unsqueeze(-1)).squeeze(-1), 0)
        return sums["first_by_codes"] != sums["first_by_exact"], ~(sums["upper"] <= sums["by_exact"] - own)

    def mix(self, asked: torch.Tensor, exact_peak: torch.Tensor, everything: bool) -> torch.Tensor:
        """sum exp(logit - top) v, float64 [B, K, Q, Dv]; original values where asked for, as in ``exact``."""
        from kvcompile.lowering import triton_mix as kernels

        B, K, Q = self.shape
        values, originals, new_v = self.values, self.originals[1], self.new_v
        coded, sizes = 0 if everything else self.splits, dict(self.sizes, S2=1 << (self.sizes["S"] - 1).bit_length())
        own = self.own_programs[everything]
        parts = self.floats(coded + own, *self.shape, self.value_dim)
        if coded:
            self.launch(
                kernels.mix, (coded, B * K, self.tiles), *values[:3], self.logits, self.top, asked, self.at, parts,
                *values[0].stride()[:3], *values[1].stride()[:3], self.blocks, self.share, warps=1, DV=self.value_dim, GROUP=self.group,
                TILE=self.tile, PAGE=self.page, **sizes,
            )
        self.launch(
            kernels.mix_own, (own, B * K, -(-Q // OWN_TILE)), *values[:3], originals, new_v, self.logits, self.top, asked, self.peak,
            exact_peak, self.sinks, self.at, self.notes, parts, self.value_size, self.damaged, *values[0].stride()[:3],
            *values[1].stride()[:3], *originals.stride()[:4], *new_v.stride()[:3], self.blocks, originals.shape[3], new_v.shape[2],
            -(-self.blocks // own), coded, warps=1, DV=self.value_dim, GROUP=self.group, TILE=OWN_TILE,
            NEWEST=1 << (new_v.shape[2] - 1).bit_length(), PAGE=self.page, ALL=everything, **sizes,
        )
        return parts.sum(0, dtype=torch.float64)
