"""Certified attention by kernels: the result of ``definition.certified_step``, reading only the promoted part of tier 2.

    1. ``key_scores`` reads the int8 keys once and computes logits and their sums per block; ``select_blocks`` promotes keys and values and
       draws the explored blocks; if query heads share a selection, ``unite_blocks`` merges theirs.
    2. ``exact_scores`` reads the full-precision keys of promoted blocks and overwrites their logits. ``bound_sums`` adds up the terms of
       the certificate; with a budget of values, ``spend_value_budget`` promotes further ones. If originals are in host memory,
       ``stage_blocks`` runs before their readers and copies requested blocks into device memory, unless they are there already.
    3. ``weighted_values`` reads the int4 values once, and full-precision values of promoted blocks. ``certify`` makes the certificate and
       the causes.
    4. ``dense_scores``, ``dense_values`` and ``bound_sums`` again, all from originals, for heads that fall back; without one
       they end at once. ``finalize`` makes the certificate of those heads, and adds the step to the telemetry.

That is eleven kernels, one more per scratch, and no tensor code, except to rank more than one leading block.

No branch depends on data, nothing is copied to the host, and the planes determine every buffer's size: a CUDA graph can capture a step.

Every decision is the definition's, on logits and sums that were added in another order, except that blocks with equal float32 shares
leave the tail together if the budget would split them (never beyond ``k_max``). The certificate covers the blocks that were read, so
reading more is sound. Weights are relative to the largest logit by codes, or to the largest exact one if that is larger.
A head that falls back does not get the scheme ``dense``'s result bit for bit: it is the same float32 attention over the originals in
another order, within the certificate returned with it, which uses the originals' own norms.

The arithmetic: keys' codes on tensor cores (``bounds.CODED``); values' codes in float16 on tensor cores, tile by tile; originals in
float32; a split's tiles and blocks one after the other, so the chain of roundings grows by a split's blocks; splits and masses in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvcompile.errors import Tier2Missing
from kvcompile.extensions.certified.blocks import Masses
from kvcompile.extensions.certified.promotion import ALL
from kvcompile.extensions.certified.ranks import certified_ranks
from kvcompile.extensions.certified.scheme import BLOCK, SET, Certified, Tier2, ValueStorage
from kvcompile.extensions.certified.sizes import (
    ADDED_AT_ONCE,
    ANY_NUMBER,
    CHUNK,
    EXACT_WARPS,
    INSIDE,
    KEY_PROGRAMS,
    LARGEST,
    MOST_LISTED,
    OWN_PROGRAMS,
    OWN_WARPS,
    PROGRAMS,
    RADIUS,
    ROW_TILE,
    SPANS,
    SPLITS,
    STAGES,
    TALLY,
    TALLY_WARPS,
    VALUE_PROGRAMS,
    VALUE_WARPS,
    scorers,
)
from kvcompile.lowering.certificate import head_bounds
from kvcompile.lowering.host.launches import Direct, Launcher
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.schemes.certificate import bounds
from kvcompile.schemes.certificate.policy import Certify, Count, Fallback, Figure, Select
from kvcompile.schemes.certificate.telemetry import COLUMNS


class Scratches(NamedTuple):
    """The scratches of keys and of values if originals are in host memory, each as planes ``places`` and ``scratch``; None without one."""

    keys: tuple[torch.Tensor, torch.Tensor] | None = None
    values: tuple[torch.Tensor, torch.Tensor] | None = None


NONE_HELD = Scratches()
"""No scratches."""


def certified_by_kernels(
    rules: Certify, scheme: Certified, operands: AttendOperands[torch.Tensor], originals: Sequence[torch.Tensor], clock: torch.Tensor, *,
    splits: int | None = None, telemetry: torch.Tensor | None = None, scratch: Scratches = NONE_HELD, launcher: Launcher | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return output, figures and counters of ``definition.certified_step``, for operands that ``kernel_gap`` accepts.

    ``clock``: any dtype; its first element is the number of the step. The step is added to ``telemetry`` [1, B, K, 1, TELEMETRY].
    ``launcher``: starts the kernels; None runs them immediately. ``splits``: parts into which the tokens are divided; None for a number
    chosen here. Raises Tier2Missing if ``originals`` have fewer pages than the codes, or pages of another size.
    """
    for plane, what in zip(originals, ("full-precision keys", "full-precision values"), strict=True):
        pages, _, _, rows, _ = operands.keys[0].shape
        if plane.shape[0] < pages or plane.shape[3] != rows:
            raise Tier2Missing(expected=pages, found=plane.shape[0], what=what)
    run = DeviceStep(rules, scheme, operands, originals, splits, launcher)
    run.key_scores()
    chosen = run.select_blocks(clock)
    coded = Masses(run.peak, run.weight)
    exact = run.exact_scores(run.staged(scratch.keys, originals[0], chosen.read, chosen.explored, "key", clock, telemetry))
    chosen, sums = run.bound_sums(exact, chosen)
    parts = run.weighted_values(
        chosen.values, run.staged(scratch.values, originals[1], chosen.values, chosen.explored, "value", clock, telemetry)
    )
    run.certify(sums, parts, run.ranked(coded, exact, chosen.read) if rules.rank > 1 else None)
    if rules.fallback is Fallback.DENSE:
        exact = run.dense_scores()
        parts = run.dense_values()
        sums = run.bound_sums_again(exact)
    if rules.fallback is Fallback.DENSE or telemetry is not None:
        run.finalize(sums, parts, telemetry, scratch)
    return run.result, run.figures, run.counts


class Chosen(NamedTuple):
    """Flags of blocks [B, K, Q, N] that a step reads in full precision.

    ``read``: their keys are read; ``values``: their values are read; ``explored``: both are read, only to check a certificate (None if the
    scheme explores no blocks).
    """

    read: torch.Tensor
    values: torch.Tensor
    explored: torch.Tensor | None


class Staged(NamedTuple):
    """A scratch for kernels: its contents, where each block is in it, and its number of sets.

    ``held``: [1, B, K, rows, D]. ``found``: int32 [B, K, N], each block's slot in its set, -1 for none.
    """

    held: torch.Tensor
    found: torch.Tensor
    sets: int


class Sums(NamedTuple):
    """Partial sums of ``bound_sums`` for keys and for values, [B, K, Q, programs, columns].

    ``top``: the logit subtracted in all exponents.
    """

    keys: torch.Tensor
    values: torch.Tensor
    top: torch.Tensor


class DeviceStep:
    """The buffers of one step, and its kernels in the order in which they run."""

    def __init__(
        self, rules: Certify, scheme: Certified, operands: AttendOperands[torch.Tensor], originals: Sequence[torch.Tensor],
        splits: int | None, launcher: Launcher | None = None,
    ) -> None:
        from kvcompile.extensions.certified.kernels.dense_fallback import tile_of
        from kvcompile.extensions.certified.kernels.weighted_values import NEAR, turn_of

        q, keys, values, exact_newest, value_dim = operands.q, operands.keys, operands.values, operands.exact_newest, operands.value_dim
        assert exact_newest
        B, H, S, _ = q.shape
        K = keys[0].shape[2]
        self.operands = operands
        self.rules, self.group, self.value_dim, self.scale = rules, scheme.group, value_dim, float(operands.scale)
        self.full, self.hosted = scheme.values is ValueStorage.FULL, scheme.tier2 is Tier2.HOST
        self.q = q if q.stride(-1) == 1 else q.contiguous()
        self.keys, self.values, self.originals = keys, values, originals
        self.new_k, self.new_v = (x if x.stride(-1) == 1 else x.contiguous() for x in exact_newest)
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
        self.summed = TALLY
        self.launch = launcher or Direct(q.device.type == "cuda")

        self.at = torch.empty(B, 2 * S + 1, dtype=torch.int32, device=q.device)
        self.sinks, self.damaged = self.floats(*self.shape), torch.empty(B, K, dtype=torch.int8, device=q.device)
        self.logits = self.floats(*self.shape, N * BLOCK)
        self.peak, self.weight, self.channels = (self.floats(*self.shape, N) for _ in range(3))
        self.delta, self.own, self.query_norm = self.floats(*self.shape, N), self.floats(*self.shape, N), self.doubles(*self.shape)
        self.notes, self.key_size, self.value_size = self.floats(B, K, N, 4), self.floats(B, K, N), self.floats(B, K, N)
        self.top, self.stats, self.falls = self.floats(*self.shape), self.doubles(*self.shape, 3), self.flags(*self.shape)
        self.exact_top = self.floats(*self.shape)
        self.list = torch.empty(*self.shape, N, dtype=torch.int32, device=q.device)
        self.listed = torch.empty(self.shape, dtype=torch.int32, device=q.device)
        self.order, self.term = self.floats(*self.shape, N), self.doubles(*self.shape, N)
        # Rows of a kv head are ordered by head, then query: the results' own order.
        self.result, self.figures = self.q.new_empty(B, H, S, value_dim), self.floats(B, H, S, len(Figure))
        self.counts = torch.empty(B, H, S, len(Count), dtype=torch.int32, device=q.device)

    def floats(self, *shape: int) -> torch.Tensor:
        """Return an uninitialized float32 tensor of ``shape`` on the queries' device."""
        return torch.empty(shape, dtype=torch.float32, device=self.q.device)

    def doubles(self, *shape: int) -> torch.Tensor:
        """Return an uninitialized float64 tensor of ``shape`` on the queries' device."""
        return torch.empty(shape, dtype=torch.float64, device=self.q.device)

    def flags(self, *shape: int) -> torch.Tensor:
        """Return an uninitialized int8 tensor of ``shape``, for flags, on the queries' device."""
        return torch.empty(shape, dtype=torch.int8, device=self.q.device)

    def key_scores(self) -> None:
        """Write logits, masses, deviations and notes of all blocks into the step's buffers, and each row's visible range and sink."""
        from kvcompile.extensions.certified.kernels.key_scores import ROW_TILE, key_scores

        hi, lo, base, sinks = self.operands.hi, self.operands.lo, self.operands.base, self.operands.sinks
        assert base is not None
        B, K, Q = self.shape
        N, q, keys, new_k, new_v, key_notes, value_notes = (
            self.blocks, self.q, self.keys, self.new_k, self.new_v, self.keys[3], self.values[-1]
        )
        S = self.sizes["S"]
        lows, own_sinks = hi if lo is None else lo, self.sinks if sinks is None else sinks
        tiles = -(-Q // ROW_TILE.value)
        programs, span = scorers(N, B * K * tiles)
        self.launch.kernel(
            key_scores, (programs + 1, B * K, tiles), q, *keys[:3], key_notes, value_notes, new_k, new_v, hi, lows, base,
            own_sinks, self.at, self.sinks, self.damaged, self.logits, self.channels, self.peak, self.weight, self.delta, self.own,
            self.notes, self.query_norm, *q.stride()[:3], *keys[0].stride()[:3], *keys[1].stride()[:3], *key_notes.stride()[:3],
            *value_notes.stride()[:3], *new_k.stride()[:3], *new_v.stride()[:3], *hi.expand(B, S).stride(), *lows.expand(B, S).stride(),
            base.expand(B).stride(0), own_sinks.stride(0), N, new_k.shape[2], span, warps=1, SCALE=self.scale, D=q.shape[3],
            DV=self.value_dim, S2=1 << (S - 1).bit_length(), SPAN=SPANS[1], PER_PAGE=self.page // BLOCK, KEY_NOTE=key_notes.shape[4],
            OF_STEP=RADIUS[0], OF_ZERO=RADIUS[1], OF_ONE=RADIUS[2], HAS_LO=lo is not None, HAS_SINK=sinks is not None,
            PACKED=self.launch.cuda, STAGES=STAGES, **self.sizes,
        )

    def select_blocks(self, clock: torch.Tensor) -> Chosen:
        """Return the blocks of ``promotion.promote_keys``, chosen without a sort."""
        from kvcompile.extensions.certified.kernels.select_blocks import select_blocks

        rules, N = self.rules, self.blocks
        read, values = self.flags(*self.shape, N), self.flags(*self.shape, N)
        explored = self.flags(*self.shape, N) if rules.explore else None
        widen, together = not math.isinf(rules.key_budget), rules.select is Select.GROUP and self.sizes["G"] > 1
        explore, certain = math.ceil(rules.explore * 2.0**32), rules.widens_coverage
        self.launch.kernel(
            select_blocks, (math.prod(self.shape),), self.peak, self.weight, self.delta, self.notes, self.sinks, self.at, clock, self.order,
            self.floats(*self.shape, N) if certain else self.order, self.term if widen else self.order, read,
            read if explored is None else explored, values, self.list, self.listed, self.top, self.stats, N, warps=32,
            LEAST=min(rules.k_min, ANY_NUMBER), MOST=min(rules.k_max, ANY_NUMBER),
            MOST_WIDENED=min(rules.k_max << rules.widen, ANY_NUMBER),
            COVER=(1 - rules.tau_cov + ALL) * INSIDE if rules.tau_cov < 1 else -1.0, BUDGET=rules.key_budget * INSIDE if widen else 0.0,
            V_TOL=min(rules.v_tol, LARGEST), CERTAIN=certain, WIDEN=widen, EXPLORE=0 if together else explore, KEEP=together, CHUNK=CHUNK,
            **self.sizes,
        )
        return Chosen(self.united(read, values, explored, clock, explore) if together else read, values, explored)

    def united(
        self, chosen: torch.Tensor, values: torch.Tensor, explored: torch.Tensor | None, clock: torch.Tensor, explore: int
    ) -> torch.Tensor:
        """Return int8 flags [B, K, Q, N] of the blocks that all query heads of a kv head read: ``chosen`` for any of them, or explored."""
        from kvcompile.extensions.certified.kernels.select_blocks import unite_blocks

        read = self.flags(*self.shape, self.blocks)
        self.launch.kernel(
            unite_blocks, (math.prod(self.shape),), self.order, chosen, read, read if explored is None else explored, values, self.list,
            self.listed, self.stats, self.at, clock, self.blocks, warps=16, EXPLORE=explore, CHUNK=CHUNK, **self.sizes,
        )
        return read

    def staged(
        self, scratch: tuple[torch.Tensor, torch.Tensor] | None, originals: torch.Tensor, asked: torch.Tensor,
        explored: torch.Tensor | None, half: str, clock: torch.Tensor, telemetry: torch.Tensor | None,
    ) -> Staged | None:
        """Copy the blocks flagged in ``asked`` from ``originals`` into the scratch of keys or of values, in place; None without a scratch.

        Returns the scratch with each block's slot. ``explored``: blocks that are asked for only to check a certificate, which get no slot.
        ``half``: "key" or "value". The step is counted in ``telemetry``, if any.
        """
        from kvcompile.extensions.certified.kernels.stage_blocks import stage_blocks

        if scratch is None:
            return None
        (B, K, Q), (places, held) = self.shape, scratch
        found, sets = torch.empty(B, K, self.blocks, dtype=torch.int32, device=held.device), held.shape[3] // (SET * BLOCK)
        steps = clock if telemetry is None else telemetry
        strides = (0, 0) if telemetry is None else telemetry.stride()[1:3]
        columns = {what.upper(): COLUMNS.index(f"{half}_{what}") for what in ("found", "fetched", "bytes")}
        self.launch.kernel(
            stage_blocks, (sets, B * K), asked, asked if explored is None else explored, originals, held, places, steps, found,
            *originals.stride()[:4], *held.stride()[1:3], *places.stride()[:3], *strides, self.blocks, sets, warps=1, D=held.shape[4], K=K,
            ROWS=Q, ROWS2=1 << (Q - 1).bit_length(), PER_PAGE=self.page // BLOCK, EXPLORE=explored is not None,
            COUNTS_STEPS=telemetry is not None, **columns,
        )
        return Staged(held, found, sets)

    def exact_scores(self, staged: Staged | None) -> Masses:
        """Return the exact masses of the blocks on the rows' lists, and overwrite the stored logits of these blocks with exact ones."""
        from kvcompile.extensions.certified.kernels.exact_scores import exact_scores

        q, keys, originals, found = self.q, self.keys, self.originals[0], self.masses()
        scratch = staged or Staged(originals, self.list, 1)
        # At most one per block; that number may be symbolic, so no branch depends on it.
        programs = torch.sym_min(self.blocks, max(1, min(self.rules.k_max, MOST_LISTED)))
        self.launch.kernel(
            exact_scores, (programs, math.prod(self.shape)), q, *keys[:3], originals, self.list, self.listed, self.at, self.notes,
            self.delta, self.own, self.logits, *found, self.top, self.damaged, scratch.held, scratch.found, *q.stride()[:3],
            *keys[0].stride()[:3], *keys[1].stride()[:3], *originals.stride()[:4], *scratch.held.stride()[1:3], self.blocks, scratch.sets,
            warps=EXACT_WARPS, GUARD=min(self.rules.guard, LARGEST), STAGED=staged is not None, **self.of_originals(),
        )
        return found

    def dense_scores(self) -> Masses:
        """Return exact masses of all blocks of the rows that fall back, and write the logits and norms of these blocks."""
        from kvcompile.extensions.certified.kernels.exact_scores import dense_scores

        q, originals, found = self.q, self.originals[0], self.masses()
        self.launch.kernel(
            dense_scores, (torch.sym_min(self.blocks, KEY_PROGRAMS),), q, originals, self.falls, self.at, self.peak, self.logits, *found,
            self.exact_top, self.key_size, *q.stride()[:3], *originals.stride()[:4], math.prod(self.shape), self.blocks, warps=EXACT_WARPS,
            STAGES=STAGES, **self.of_originals(),
        )
        return found

    def masses(self) -> Masses:
        """Return uninitialized masses of all blocks, for a kernel to write."""
        return Masses(self.floats(*self.shape, self.blocks), self.floats(*self.shape, self.blocks))

    def of_originals(self) -> dict[str, float | int]:
        """Return the constants of kernels that read original keys, by name."""
        S = self.sizes["S"]
        return dict(self.sizes, SCALE=self.scale, D=self.q.shape[3], PER_PAGE=self.page // BLOCK, S2=1 << (S - 1).bit_length())

    def bound_sums(self, exact: Masses, chosen: Chosen) -> tuple[Chosen, Sums]:
        """Return the chosen blocks and the sums for the certificate.

        With a finite value budget, the chosen blocks include values that are promoted to meet it.
        """
        rules, spend = self.rules, not math.isinf(self.rules.value_budget)
        found = self._bound_sums(exact, chosen, self.top, False)
        if not spend:
            return chosen, found
        from kvcompile.extensions.certified.kernels import bound_sums as kernels

        values, left = self.flags(*self.shape, self.blocks), self.doubles(*self.shape, 1, len(kernels.VALUE_COLUMNS))
        self.launch.kernel(
            kernels.spend_value_budget, (math.prod(self.shape),), self.peak, self.weight, *exact, chosen.read,
            chosen.read if chosen.explored is None else chosen.explored, self.notes, self.sinks, self.at, self.top, found.keys, self.order,
            self.term, chosen.values, values, left, self.blocks, found.keys.shape[3], self.share, self.own_chain(), warps=16,
            BUDGET=rules.value_budget * INSIDE, EXPLORE=chosen.explored is not None, CHUNK=CHUNK // 2, WIDTH=len(kernels.COLUMNS),
            OUT_WIDTH=len(kernels.VALUE_COLUMNS), **self.chains(), **self.sizes,
        )
        return chosen._replace(values=values), found._replace(values=left)

    def own_chain(self) -> int:
        """Return the number of blocks that one program of ``weighted_originals`` adds in sequence, blocks of newest tokens included."""
        return self.own_share + -(-self.new_v.shape[2] // (BLOCK * self.own_programs))

    def chains(self) -> dict[str, float | int]:
        """Return the constants by which kernels bound rounding errors of weighted values, by name.

        CHAIN: roundings between a product and the output. T: tokens that tensor cores sum in one chain. CODES: whether values are stored as
        codes. FLOOR: the error that decoding below float16's least normal number adds to the norm of a value.
        """
        floor = 0.0 if self.full else math.sqrt(self.value_dim) * bounds.HALF_TINY * 2.0**12
        return dict(CHAIN=head_bounds.CHAIN, T=self.turn, FLOOR=floor, CODES=not self.full)

    def bound_sums_again(self, exact: Masses) -> Sums:
        """Return the certificate's sums again for rows that fall back: all blocks from originals, relative to the largest exact logit."""
        return self._bound_sums(exact, Chosen(self.falls, self.falls, None), self.exact_top, True)

    def _bound_sums(self, exact: Masses, chosen: Chosen, top: torch.Tensor, everything: bool) -> Sums:
        from kvcompile.extensions.certified.kernels import bound_sums as kernels

        chunks = -(-self.blocks // self.summed)
        keys = self.doubles(*self.shape, chunks, len(kernels.COLUMNS))
        values = self.doubles(*self.shape, chunks, len(kernels.VALUE_COLUMNS))
        chain = self.own_chain()
        if everything:
            # In sequence: the tiles and newest tokens at one index of a tile, then the indices of a tile, less a block that the chain has
            # already.
            tile, newest = self.value_tile, self.new_v.shape[2]
            chain = -(-self.blocks * BLOCK // (tile * self.value_programs)) + -(-newest // tile) + tile - BLOCK
        rank = self.rules.rank == 1 and not everything
        self.launch.kernel(
            kernels.bound_sums, (chunks, math.prod(self.shape)), self.peak, self.weight, *exact, chosen.read,
            chosen.read if chosen.explored is None else chosen.explored, chosen.values, self.delta, self.own, self.notes, self.key_size,
            self.value_size, self.query_norm, self.at, top, keys, values, self.blocks, self.share, chain, warps=TALLY_WARPS, RANK=rank,
            AGREE=rank and self.rules.agree, SCALE=abs(self.scale), D=self.q.shape[3], EXPLORE=chosen.explored is not None,
            CHUNK=self.summed, WIDTH=len(kernels.COLUMNS), OUT_WIDTH=len(kernels.VALUE_COLUMNS), ALL=everything,
            SPEND=not math.isinf(self.rules.value_budget), **self.chains(), **self.sizes,
        )
        return Sums(keys, values, top)

    def ranked(self, coded: Masses, exact: Masses, read: torch.Tensor) -> torch.Tensor:
        """Return the failures that ``checks.rank_fails`` finds, as bits of ``Cause``, int32 [B, K, Q]; for more than one leading block."""
        causes = torch.empty(self.shape, dtype=torch.int32, device=read.device)
        self.launch.operator(
            certified_ranks, causes, self.at, *coded, *exact, read, self.delta, self.own, self.heads[1],
            self.rules.rank, self.rules.agree,
        )
        return causes

    def certify(self, sums: Sums, parts: torch.Tensor, causes: torch.Tensor | None) -> None:
        """Write every row's result, figures and counters, and flag the rows that fall back.

        ``causes``: failures of the rank check as bits; None if the kernel computes them or there is no such check.
        """
        from kvcompile.extensions.certified.kernels.finish import certify

        rules, (_, K, Q) = self.rules, self.shape
        self.launch.kernel(
            certify, (math.prod(self.shape),), sums.keys, sums.values, parts, self.sinks, sums.top, self.own, self.stats, self.damaged,
            self.counts if causes is None else causes, self.result, self.figures, self.counts, self.falls, self.exact_top, self.blocks,
            sums.keys.shape[3], sums.values.shape[3], parts.shape[0], warps=16, KEY_BUDGET=min(rules.key_budget, LARGEST),
            VALUE_BUDGET=min(rules.value_budget, LARGEST), RANKED=rules.rank, AGREE=rules.agree, DENSE=rules.fallback is Fallback.DENSE,
            K=K, K2=1 << (K - 1).bit_length(), ROWS=Q, **self.rounding(),
        )

    def finalize(self, sums: Sums, parts: torch.Tensor, telemetry: torch.Tensor | None, scratch: Scratches) -> None:
        """Overwrite ``result`` and the bounds in ``figures`` for rows that fall back, and add the step to ``telemetry``, if any."""
        from kvcompile.extensions.certified.kernels.finish import finalize

        B, K, Q = self.shape
        held = self.stats if telemetry is None else telemetry
        key_bytes, value_bytes = (BLOCK * plane.shape[4] * plane.dtype.itemsize for plane in self.originals)
        self.launch.kernel(
            finalize, (B * K,), sums.keys, sums.values, parts, self.sinks, sums.top, self.falls, self.result, self.figures, self.counts,
            held, *held.stride()[1:3], sums.keys.shape[3], parts.shape[0], warps=16, K=K, S=self.sizes["S"], ROWS=Q,
            ROWS2=1 << (Q - 1).bit_length(), DENSE=self.rules.fallback is Fallback.DENSE, COUNTS_STEPS=telemetry is not None,
            KEY_BYTES=key_bytes if self.hosted else 0, VALUE_BYTES=value_bytes if self.hosted and not self.full else 0,
            KEYS_STAGED=scratch.keys is not None, VALUES_STAGED=scratch.values is not None, **self.rounding(),
        )

    def rounding(self) -> dict[str, float | int]:
        """Return, by name, the constants of the kernels that write the output.

        These are the rounding errors of its dtype, its number of channels, and the number of partial results that one load reads.
        """
        width, dtype = self.value_dim, self.q.dtype
        return dict(
            OUT_UNIT=head_bounds.OUTPUT_UNIT[dtype], OUT_TINY=head_bounds.OUTPUT_TINY[dtype] * math.sqrt(width), DV=width,
            SPAN=max(1, ADDED_AT_ONCE // width),
        )

    def weighted_values(self, asked: torch.Tensor, staged: Staged | None) -> torch.Tensor:
        """Return sum_t exp(logit_t - top) v_t in parts to be added, [parts, B, K, Q, Dv].

        Values of blocks flagged in ``asked`` are read from originals, others from codes.
        """
        from kvcompile.extensions.certified.kernels import weighted_values as kernels

        B, K, Q = self.shape
        values, originals, new_v, scratch = self.values, self.originals[1], self.new_v, staged or Staged(self.originals[1], self.list, 1)
        codes, steps, zeros = (values[0],) * 3 if self.full else values[:3]
        sizes = dict(self.value_sizes(), GROUP=self.group, FULL=self.full)
        parts = self.floats(self.splits + self.own_programs, *self.shape, self.value_dim)
        self.launch.kernel(
            kernels.weighted_values, (self.splits, B * K, self.tiles), codes, steps, zeros, self.logits, self.top, asked, self.at, parts,
            *codes.stride()[:4], *steps.stride()[:3], self.blocks, self.share, warps=1, TILE=self.tile, T=self.turn,
            PACKED=self.launch.cuda, **sizes,
        )
        self.launch.kernel(
            kernels.weighted_originals, (self.own_programs, B * K, Q), codes, steps, zeros, originals, new_v, self.logits, self.top, asked,
            self.at, self.notes, scratch.held, scratch.found, parts, self.damaged, *codes.stride()[:3], *steps.stride()[:3],
            *originals.stride()[:4], *scratch.held.stride()[1:3], *new_v.stride()[:3], self.blocks, scratch.sets, new_v.shape[2],
            self.own_share, self.splits, warps=OWN_WARPS, STAGED=staged is not None, **sizes,
        )
        return parts

    def dense_values(self) -> torch.Tensor:
        """Return partial sums of ``weighted_values`` over originals alone, for the rows that fall back: float32 [programs, B, K, Q, Dv]."""
        from kvcompile.extensions.certified.kernels.dense_fallback import dense_values

        originals, new_v, programs = self.originals[1], self.new_v, self.value_programs
        parts = self.floats(programs, *self.shape, self.value_dim)
        self.launch.kernel(
            dense_values, (programs,), originals, new_v, self.falls, self.at, self.logits, self.exact_top, parts, self.value_size,
            *originals.stride()[:4], *new_v.stride()[:3], math.prod(self.shape), self.blocks, new_v.shape[2], warps=VALUE_WARPS,
            T=self.value_tile, STAGES=STAGES, **self.value_sizes(),
        )
        return parts

    def value_sizes(self) -> dict[str, int]:
        """Return the constants of kernels that read values."""
        return dict(self.sizes, S2=1 << (self.sizes["S"] - 1).bit_length(), DV=self.value_dim, PAGE=self.page)
