"""Certified attention by kernels: what ``definition.certified_step`` defines, with tier 2 read only where it is asked for.

    1. ``key_scores`` reads the int8 keys once and sums up blocks of logits, ``select_blocks`` promotes keys and draws what is explored.
    2. ``exact_scores`` reads the original keys of what is read and puts their logits in place. ``bound_sums`` adds up what a certificate is
       made of, ``bound_value_sums`` promotes values. Where the originals are in host memory, ``stage_keys`` goes before: it copies what
       is asked for into device memory, where it is not there yet.
    3. ``weighted_values`` reads the int4 values once, and original values where promoted. ``certify`` makes the certificate and the causes.
    4. ``dense_scores``, ``dense_values`` and ``bound_sums`` again, with everything from the originals, for heads that fall; without one
       they end at once. ``finalize`` makes the certificate of those, and adds the step to the telemetry.

That is twelve kernels (with ``stage_keys`` thirteen) and no tensor code, but for a ranking of more than one block.

No branch depends on data, nothing comes to the host, every buffer's size is that of the planes: a CUDA graph can hold it.

Every decision is the definition's, on logits and sums that were added in another order, except that blocks whose shares are equal as
float32 numbers leave the tail together where a budget draws the line between them (never beyond ``k_max``). What is certified is
what was read, so more is sound. Weights are relative to the largest logit by codes, or the largest exact one if that is above it.
A head that falls is not what the scheme ``dense`` gives bit for bit: it is the same float32 attention over the originals in
another order, within the certificate that comes with it, which the originals' own norms make.

The arithmetic: keys by codes on tensor cores (``bounds.CODED``), values by codes in float16 on tensor cores, turn by turn; originals in
float32; a split's turns and blocks one after the other, so the chain of roundings grows by a split's blocks; splits and masses in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import sympy
import torch

from kvcompile.errors import Tier2Missing
from kvcompile.lowering.certificate import head_bounds
from kvcompile.lowering.certificate.bound_printer import slack
from kvcompile.lowering.certified.blocks import Masses
from kvcompile.lowering.certified.promotion import ALL
from kvcompile.lowering.certified.ranks import certified_ranks
from kvcompile.lowering.host.launches import Direct, Launcher
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.schemes.certificate import bounds
from kvcompile.schemes.certificate.policy import Certify, Count, Fallback, Figure
from kvcompile.schemes.certified import BLOCK, SET, Certified

CHUNK, WIDE = 2048, 8192
"""Blocks that ``select_blocks`` weighs at once, and those that it compares; chosen by registers."""

TALLIES = {4096: (64, 1), 8192: (128, 1)}
TALLY = (256, 4)
"""Blocks and warps of a program of ``bound_sums`` for up to so many blocks, and for more: ``certify`` adds up 64 at once."""

SPANS, SCORERS = (32, 16, 8), 1000
"""Blocks of a program of ``key_scores``: as many as leave that many programs, timed (benchmarks/CERTIFIED.md)."""

STAGES = 3
"""Blocks of ``key_scores``, ``dense_scores`` and ``dense_values`` whose loads are under way."""

ROW_TILE = 4
"""Rows of a program of ``weighted_values``."""

OWN_PROGRAMS, OWN_WARPS = 16, 4
"""Programs of a row that look for original values, and their warps: mostly one of them finds a block, and that is what all wait for."""

KEY_PROGRAMS, VALUE_PROGRAMS = 1024, 256
"""Programs of ``dense_scores`` and ``dense_values``, which share the rows that fall: so many parts has ``finalize`` to add up."""

VALUE_WARPS = 4
"""Warps of a program of ``dense_values``."""

MOST_LISTED = 256
"""Programs of a row's list in ``exact_scores`` at most: up to there a block each, as far as ``k_max`` lets expect."""

EXACT_WARPS = 1
"""Warps of a program of ``exact_scores`` and ``dense_scores``."""

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
"""Programs of ``weighted_values`` to aim for: 16 warps on each multiprocessor of a large device."""

ADDED_AT_ONCE = 16384
"""Numbers of partial results that ``certify`` and ``finalize`` read at once: 32 a thread."""


def kernel_gap(operands: AttendOperands[torch.Tensor], group: int) -> str | None:
    """Why the kernels do not know this attention, None where they do; for real tensors and fake ones."""
    q, keys, values, value_dim = operands.q, operands.keys, operands.values, operands.value_dim
    D, rows, page = q.shape[-1], q.shape[1] // keys[0].shape[2] * q.shape[2], keys[0].shape[3]
    if operands.keep is not None or operands.bias is not None or operands.softcap:
        return "a mask other than from a first to a last position, a bias or a softcap"
    if not operands.recent:
        return "no newest tokens in full precision"
    if not isinstance(rows, int) or rows > MOST_ROWS:
        return f"{rows} rows of queries a kv head, above {MOST_ROWS}"
    if D & (D - 1) or value_dim & (value_dim - 1) or D < 2 * BLOCK or value_dim < 2 * group:
        known = f"powers of two, from {2 * BLOCK} and from two groups of {group} on, are known"
        return f"{D} key channels and {value_dim} value channels: {known}"
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


def span_of(blocks: int, heads: int) -> int:
    """Blocks of a program of ``key_scores``; of caches that grow, whose number of blocks no graph may depend on, the one in the middle."""
    if not isinstance(blocks, int):
        return SPANS[1]
    return next((span for span in SPANS if blocks * heads >= SCORERS * span), SPANS[-1])


def tile_of_bound_sums(blocks: int) -> tuple[int, int]:
    """Blocks and warps of a program of ``bound_sums``."""
    if not isinstance(blocks, int):
        return TALLY
    return next((each for most, each in TALLIES.items() if blocks <= most), TALLY)


def certified_by_kernels(
    rules: Certify, scheme: Certified, operands: AttendOperands[torch.Tensor], originals: Sequence[torch.Tensor], clock: torch.Tensor, *,
    splits: int | None = None, telemetry: torch.Tensor | None = None, scratch: tuple[torch.Tensor, torch.Tensor] | None = None,
    launcher: Launcher | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, figures and counters of ``definition.certified_step``, for what ``kernel_gap`` lets through.

    ``clock``: of any dtype, whose first element is the number of the step. The step is added to ``telemetry`` [1, B, K, 1, 34].
    ``launcher``: starts the kernels; None runs them at once.
    """
    for plane, what in zip(originals, ("original keys", "original values"), strict=True):
        pages, _, _, rows, _ = operands.keys[0].shape
        if plane.shape[0] < pages or plane.shape[3] != rows:
            raise Tier2Missing(expected=pages, found=plane.shape[0], what=what)
    run = DeviceStep(rules, scheme, operands, originals, splits, launcher)
    run.key_scores()
    read, explored = run.select_blocks(clock)
    coded = Masses(run.peak, run.weight)
    exact = run.exact_scores(scratch, None if scratch is None else run.stage_keys(scratch, read, explored, clock, telemetry))
    original_values, sums = run.bound_sums(exact, read, explored)
    parts = run.weighted_values(original_values)
    run.certify(sums, parts, run.ranked(coded, exact, read) if rules.rank > 1 else None)
    if rules.fallback is Fallback.DENSE:
        exact = run.dense_scores()
        parts = run.dense_values()
        sums = run.bound_sums_again(exact)
    if rules.fallback is Fallback.DENSE or telemetry is not None:
        run.finalize(sums, parts, telemetry)
    return run.result, run.figures, run.counts


class Sums(NamedTuple):
    """Sums of the programs of ``bound_sums`` and ``bound_value_sums``, [B, K, Q, programs, columns], and the logit they are relative to."""

    keys: torch.Tensor
    values: torch.Tensor
    top: torch.Tensor


class DeviceStep:
    """The buffers of one step, and its kernels in the order in which they run."""

    def __init__(
        self, rules: Certify, scheme: Certified, operands: AttendOperands[torch.Tensor], originals: Sequence[torch.Tensor],
        splits: int | None, launcher: Launcher | None = None,
    ) -> None:
        from kvcompile.lowering.certified.kernels.dense_fallback import tile_of
        from kvcompile.lowering.certified.kernels.weighted_values import NEAR, turn_of

        q, keys, values, recent, value_dim = operands.q, operands.keys, operands.values, operands.recent, operands.value_dim
        assert recent
        B, H, S, _ = q.shape
        K = keys[0].shape[2]
        self.operands = operands
        self.rules, self.group, self.value_dim, self.scale = rules, scheme.group, value_dim, float(operands.scale)
        self.q = q if q.stride(-1) == 1 else q.contiguous()
        self.keys, self.values, self.originals = keys, values, originals
        self.new_k, self.new_v = (x if x.stride(-1) == 1 else x.contiguous() for x in recent)
        self.heads, self.blocks, self.page = (K, H // K), keys[1].shape[0] * keys[1].shape[3], keys[0].shape[3]
        self.shape = (B, K, H // K * S)
        Q, N = self.shape[2], self.blocks
        self.tile = min(ROW_TILE, 1 << (Q - 1).bit_length())
        self.tiles = -(-Q // self.tile)
        self.splits = splits or max(1, min(SPLITS, PROGRAMS // (B * K * self.tiles)))
        self.turn = turn_of(self.page, value_dim)
        self.share = -(-N // (self.splits * self.turn // BLOCK)) * (self.turn // BLOCK)
        self.own_programs, self.value_programs = splits or OWN_PROGRAMS, splits or VALUE_PROGRAMS
        near = NEAR.value
        self.own_share = -(-N // (self.own_programs * near)) * near
        self.value_tile = tile_of(self.page, value_dim)
        self.sizes = dict(K=K, G=H // K, S=S)
        self.summed, self.sum_warps = tile_of_bound_sums(N)
        self.launch = launcher or Direct(q.device.type == "cuda")

        self.at = torch.empty(B, 2 * S + 1, dtype=torch.int32, device=q.device)
        self.sinks, self.damaged = self.floats(*self.shape), torch.empty(B, K, dtype=torch.int8, device=q.device)
        self.logits = self.floats(*self.shape, N * BLOCK)
        self.peak, self.weight, self.channels = (self.floats(*self.shape, N) for _ in range(3))
        self.delta, self.own, self.query_norm = self.doubles(*self.shape, N), self.doubles(*self.shape, N), self.doubles(*self.shape)
        self.notes, self.key_size, self.value_size = self.floats(B, K, N, 4), self.floats(B, K, N), self.floats(B, K, N)
        self.top, self.stats, self.falls = self.floats(*self.shape), self.doubles(*self.shape, 3), self.flags(*self.shape)
        self.exact_top = self.floats(*self.shape)
        self.list = torch.empty(*self.shape, N, dtype=torch.int32, device=q.device)
        self.listed = torch.empty(self.shape, dtype=torch.int32, device=q.device)
        self.order, self.share_of, self.term = self.floats(*self.shape, N), self.doubles(*self.shape, N), self.doubles(*self.shape, N)
        # Rows of a kv head are heads and queries one after the other: the results' own order.
        self.result, self.figures = self.q.new_empty(B, H, S, value_dim), self.floats(B, H, S, len(Figure))
        self.counts = torch.empty(B, H, S, len(Count), dtype=torch.int32, device=q.device)

    def floats(self, *shape: int) -> torch.Tensor:
        """Uninitialized float32."""
        return torch.empty(shape, dtype=torch.float32, device=self.q.device)

    def doubles(self, *shape: int) -> torch.Tensor:
        """Uninitialized float64."""
        return torch.empty(shape, dtype=torch.float64, device=self.q.device)

    def flags(self, *shape: int) -> torch.Tensor:
        """Uninitialized flags."""
        return torch.empty(shape, dtype=torch.int8, device=self.q.device)

    def key_scores(self) -> None:
        """Logits, sums of blocks, deviations and notes; what each row sees, its sink."""
        from kvcompile.lowering.certified.kernels.key_scores import ROW_TILE, key_scores

        hi, lo, base, sinks = self.operands.hi, self.operands.lo, self.operands.base, self.operands.sinks
        assert base is not None
        B, K, Q = self.shape
        N, q, keys, new_k, new_v, key_notes, value_notes = (
            self.blocks, self.q, self.keys, self.new_k, self.new_v, self.keys[3], self.values[3]
        )
        S = self.sizes["S"]
        lows, own_sinks = hi if lo is None else lo, self.sinks if sinks is None else sinks
        tiles = -(-Q // ROW_TILE.value)
        span = span_of(N, B * K * tiles)
        self.launch.kernel(
            key_scores, (-(-N // span) + 1, B * K, tiles), q, *keys[:3], key_notes, value_notes, new_k, new_v, hi, lows, base,
            own_sinks, self.at, self.sinks, self.damaged, self.logits, self.channels, self.peak, self.weight, self.delta, self.own,
            self.notes, self.query_norm, *q.stride()[:3], *keys[0].stride()[:3], *keys[1].stride()[:3], *key_notes.stride()[:3],
            *value_notes.stride()[:3], *new_k.stride()[:3], *new_v.stride()[:3], *hi.expand(B, S).stride(), *lows.expand(B, S).stride(),
            base.expand(B).stride(0), own_sinks.stride(0), N, new_k.shape[2], warps=1, SCALE=self.scale, D=q.shape[3], DV=self.value_dim,
            S2=1 << (S - 1).bit_length(), SPAN=span, PER_PAGE=self.page // BLOCK, KEY_NOTE=key_notes.shape[4], OF_STEP=RADIUS[0],
            OF_ZERO=RADIUS[1], OF_ONE=RADIUS[2], HAS_LO=lo is not None, HAS_SINK=sinks is not None, PACKED=self.launch.cuda, STAGES=STAGES,
            **self.sizes,
        )

    def select_blocks(self, clock: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``promotion.promote_keys`` without a sort: flags of blocks whose keys are read, and of those explored among them."""
        from kvcompile.lowering.certified.kernels.select_blocks import select_blocks

        rules, read = self.rules, self.flags(*self.shape, self.blocks)
        explored = self.flags(*self.shape, self.blocks) if rules.explore else None
        widen = not math.isinf(rules.key_budget)
        self.launch.kernel(
            select_blocks, (math.prod(self.shape),), self.peak, self.weight, self.delta, self.notes, self.sinks, self.at, clock, self.order,
            self.share_of, self.term, read, read if explored is None else explored, self.list, self.listed, self.top, self.stats,
            self.blocks, warps=32, LEAST=min(rules.k_min, MOST), MOST=min(rules.k_max, MOST),
            MOST_WIDENED=min(rules.k_max << rules.widen, MOST), COVER=(1 - rules.tau_cov + ALL) * INSIDE if rules.tau_cov < 1 else -1.0,
            BUDGET=rules.key_budget * INSIDE if widen else 0.0, WIDEN=widen, EXPLORE=math.ceil(rules.explore * 2.0**32), CHUNK=CHUNK,
            WIDE=WIDE, **self.sizes,
        )
        return read, explored

    def stage_keys(
        self, scratch: tuple[torch.Tensor, torch.Tensor], read: torch.Tensor, explored: torch.Tensor | None, clock: torch.Tensor,
        telemetry: torch.Tensor | None,
    ) -> torch.Tensor:
        """Bring blocks of keys that are asked for into the scratch; int32 [B, K, N]: the slots of those that are there, else -1."""
        from kvcompile.lowering.certified.kernels.stage_keys import stage_keys

        (B, K, Q), (places, held), originals = self.shape, scratch, self.originals[0]
        found = torch.empty(B, K, self.blocks, dtype=torch.int32, device=held.device)
        steps = clock if telemetry is None else telemetry
        strides = (0, 0) if telemetry is None else telemetry.stride()[1:3]
        self.launch.kernel(
            stage_keys, (-(-self.blocks // SET), B * K), read, read if explored is None else explored, originals, held, places, steps,
            found, *originals.stride()[:4], *held.stride()[:3], *places.stride()[:3], *strides, self.blocks, warps=1, D=self.q.shape[3],
            K=K, ROWS=Q, ROWS2=1 << (Q - 1).bit_length(), SLOTS=self.slots(held), PER_PAGE=self.page // BLOCK, EXPLORE=explored is not None,
            COUNTS_STEPS=telemetry is not None,
        )
        return found

    def slots(self, held: torch.Tensor) -> int:
        """Return the number of scratch slots per set of blocks."""
        return held.shape[3] * SET // self.page

    def exact_scores(self, scratch: tuple[torch.Tensor, torch.Tensor] | None, found_at: torch.Tensor | None) -> Masses:
        """Exact masses of the blocks on the rows' lists; logits there are exact from now on. ``found_at``: slots of the scratch."""
        from kvcompile.lowering.certified.kernels.exact_scores import exact_scores

        q, keys, originals, found = self.q, self.keys, self.originals[0], self.masses()
        held, slots = (originals, 0) if scratch is None else (scratch[1], self.slots(scratch[1]))
        # Not more than there are blocks, whose number may be a symbol that nothing is to be decided by.
        programs = torch.sym_min(self.blocks, max(1, min(self.rules.k_max, MOST_LISTED)))
        self.launch.kernel(
            exact_scores, (programs, math.prod(self.shape)), q, *keys[:3], originals, self.list, self.listed, self.at, self.notes,
            self.delta, self.own, self.logits, *found, self.top, self.damaged, held, self.list if found_at is None else found_at,
            *q.stride()[:3], *keys[0].stride()[:3], *keys[1].stride()[:3], *originals.stride()[:4], *held.stride()[:3], self.blocks,
            warps=EXACT_WARPS, GUARD=min(self.rules.guard, LARGEST), SLOTS=slots, **self.of_originals(),
        )
        return found

    def dense_scores(self) -> Masses:
        """Exact masses, logits and norms of all blocks of the rows that fall."""
        from kvcompile.lowering.certified.kernels.exact_scores import dense_scores

        q, originals, found = self.q, self.originals[0], self.masses()
        self.launch.kernel(
            dense_scores, (torch.sym_min(self.blocks, KEY_PROGRAMS),), q, originals, self.falls, self.at, self.peak, self.logits, *found,
            self.exact_top, self.key_size, *q.stride()[:3], *originals.stride()[:4], math.prod(self.shape), self.blocks, warps=EXACT_WARPS,
            STAGES=STAGES, **self.of_originals(),
        )
        return found

    def masses(self) -> Masses:
        """Uninitialized ones of all blocks."""
        return Masses(self.floats(*self.shape, self.blocks), self.floats(*self.shape, self.blocks))

    def of_originals(self) -> dict[str, float | int]:
        """Constants of what reads original keys."""
        S = self.sizes["S"]
        return dict(self.sizes, SCALE=self.scale, D=self.q.shape[3], PER_PAGE=self.page // BLOCK, S2=1 << (S - 1).bit_length())

    def bound_sums(self, exact: Masses, read: torch.Tensor, explored: torch.Tensor | None) -> tuple[torch.Tensor, Sums]:
        """Which blocks' values come from the originals, and the sums that a certificate is made of."""
        from kvcompile.lowering.certified.kernels import bound_sums as kernels

        rules, values = self.rules, self.flags(*self.shape, self.blocks)
        spend = not math.isinf(rules.value_budget)
        found = self._bound_sums(exact, read, self.top, False, 1 if spend else -(-self.blocks // self.summed))
        self.launch.kernel(
            kernels.bound_value_sums, (found.values.shape[3], math.prod(self.shape)), self.peak, self.weight, *exact, read,
            read if explored is None else explored, self.notes, self.sinks, self.at, self.top, found.keys, self.order, self.term, values,
            found.values, self.blocks, found.keys.shape[3], self.share,
            self.own_share + -(-self.new_v.shape[2] // (BLOCK * self.own_programs)), warps=16 if spend else self.sum_warps,
            CHAIN=head_bounds.CHAIN, T=self.turn, FLOOR=math.sqrt(self.value_dim) * bounds.HALF_TINY * 2.0**12,
            V_TOL=min(rules.v_tol, LARGEST), BUDGET=rules.value_budget * INSIDE if spend else 0.0, SPEND=spend,
            EXPLORE=explored is not None, CHUNK=CHUNK if spend else self.summed, WIDE=WIDE, WIDTH=len(kernels.COLUMNS),
            OUT_WIDTH=len(kernels.VALUE_COLUMNS), **self.sizes,
        )
        return values, found

    def bound_sums_again(self, exact: Masses) -> Sums:
        """The sums of rows that fall: everything from the originals, relative to what is the largest logit then."""
        return self._bound_sums(exact, self.falls, self.exact_top, True, -(-self.blocks // self.summed))

    def _bound_sums(self, exact: Masses, read: torch.Tensor, top: torch.Tensor, everything: bool, programs: int) -> Sums:
        """``bound_sums``, with room for what ``programs`` find of values."""
        from kvcompile.lowering.certified.kernels import bound_sums as kernels

        chunks = -(-self.blocks // self.summed)
        keys = self.doubles(*self.shape, chunks, len(kernels.COLUMNS))
        values = self.doubles(*self.shape, programs, len(kernels.VALUE_COLUMNS))
        # A place's tiles and newest tokens one after the other, then the places of a tile, of which a chain has a block's already.
        tile, newest = self.value_tile, self.new_v.shape[2]
        added = -(-self.blocks * BLOCK // (tile * self.value_programs)) + -(-newest // tile) + tile - BLOCK
        self.launch.kernel(
            kernels.bound_sums, (chunks, math.prod(self.shape)), self.peak, self.weight, *exact, read, self.delta, self.own,
            self.notes, self.key_size, self.value_size, self.query_norm, self.at, top, keys, values, self.blocks, added,
            warps=self.sum_warps, CHAIN=head_bounds.CHAIN, RANK=self.rules.rank == 1 and not everything, SCALE=abs(self.scale),
            D=self.q.shape[3], CHUNK=self.summed, WIDTH=len(kernels.COLUMNS), OUT_WIDTH=len(kernels.VALUE_COLUMNS), ALL=everything,
            **self.sizes,
        )
        return Sums(keys, values, top)

    def ranked(self, coded: Masses, exact: Masses, read: torch.Tensor) -> torch.Tensor:
        """``checks.rank_fails`` for more than one leading block, as causes; int32 [B, K, Q]."""
        causes = torch.empty(self.shape, dtype=torch.int32, device=read.device)
        self.launch.operator(
            certified_ranks, causes, self.at, *coded, *exact, read, self.delta, self.own, self.heads[1],
            self.rules.rank,
        )
        return causes

    def certify(self, sums: Sums, parts: torch.Tensor, causes: torch.Tensor | None) -> None:
        """Result, figures, counters, and which rows fall; ``causes``: of ranks, where those are known already."""
        from kvcompile.lowering.certified.kernels.finish import certify

        rules, (_, K, Q) = self.rules, self.shape
        self.launch.kernel(
            certify, (math.prod(self.shape),), sums.keys, sums.values, parts, self.sinks, sums.top, self.own, self.stats, self.damaged,
            self.counts if causes is None else causes, self.result, self.figures, self.counts, self.falls, self.exact_top, self.blocks,
            sums.keys.shape[3], sums.values.shape[3], parts.shape[0], warps=16, KEY_BUDGET=min(rules.key_budget, LARGEST),
            VALUE_BUDGET=min(rules.value_budget, LARGEST), RANKED=rules.rank, DENSE=rules.fallback is Fallback.DENSE, K=K,
            K2=1 << (K - 1).bit_length(), ROWS=Q, **self.rounding(),
        )

    def finalize(self, sums: Sums, parts: torch.Tensor, telemetry: torch.Tensor | None) -> None:
        """Write the results of rows that fall back, and the step's telemetry."""
        from kvcompile.lowering.certified.kernels.finish import finalize

        B, K, Q = self.shape
        held = self.stats if telemetry is None else telemetry
        self.launch.kernel(
            finalize, (B * K,), sums.keys, sums.values, parts, self.sinks, sums.top, self.falls, self.result, self.figures, self.counts,
            held, *held.stride()[1:3], sums.keys.shape[3], parts.shape[0], warps=16, K=K, ROWS=Q, ROWS2=1 << (Q - 1).bit_length(),
            DENSE=self.rules.fallback is Fallback.DENSE, COUNTS_STEPS=telemetry is not None, **self.rounding(),
        )

    def rounding(self) -> dict[str, float | int]:
        """Constants of the result: how it is rounded, how wide it is, partial results that are read at once."""
        width, dtype = self.value_dim, self.q.dtype
        return dict(
            OUT_UNIT=head_bounds.OUTPUT_UNIT[dtype], OUT_TINY=head_bounds.OUTPUT_TINY[dtype] * math.sqrt(width), DV=width,
            SPAN=max(1, ADDED_AT_ONCE // width),
        )

    def weighted_values(self, asked: torch.Tensor) -> torch.Tensor:
        """sum exp(logit - top) v in parts [parts, B, K, Q, Dv]; original values of the blocks that are asked for."""
        from kvcompile.lowering.certified.kernels import weighted_values as kernels

        B, K, Q = self.shape
        values, originals, new_v = self.values, self.originals[1], self.new_v
        sizes = dict(self.value_sizes(), GROUP=self.group)
        parts = self.floats(self.splits + self.own_programs, *self.shape, self.value_dim)
        self.launch.kernel(
            kernels.weighted_values, (self.splits, B * K, self.tiles), *values[:3], self.logits, self.top, asked, self.at, parts,
            *values[0].stride()[:3], *values[1].stride()[:3], self.blocks, self.share, warps=1, TILE=self.tile, T=self.turn,
            PACKED=self.launch.cuda, **sizes,
        )
        self.launch.kernel(
            kernels.weighted_originals, (self.own_programs, B * K, Q), *values[:3], originals, new_v, self.logits, self.top, asked, self.at,
            self.notes, parts, self.damaged, *values[0].stride()[:3], *values[1].stride()[:3], *originals.stride()[:4],
            *new_v.stride()[:3], self.blocks, new_v.shape[2], self.own_share, self.splits, warps=OWN_WARPS, **sizes,
        )
        return parts

    def dense_values(self) -> torch.Tensor:
        """Sum the values of rows that fall back, by originals alone."""
        from kvcompile.lowering.certified.kernels.dense_fallback import dense_values

        originals, new_v, programs = self.originals[1], self.new_v, self.value_programs
        parts = self.floats(programs, *self.shape, self.value_dim)
        self.launch.kernel(
            dense_values, (programs,), originals, new_v, self.falls, self.at, self.logits, self.exact_top, parts, self.value_size,
            *originals.stride()[:4], *new_v.stride()[:3], math.prod(self.shape), self.blocks, new_v.shape[2], warps=VALUE_WARPS,
            T=self.value_tile, STAGES=STAGES, **self.value_sizes(),
        )
        return parts

    def value_sizes(self) -> dict[str, int]:
        """Constants of what reads values."""
        return dict(self.sizes, S2=1 << (self.sizes["S"] - 1).bit_length(), DV=self.value_dim, PAGE=self.page)
