"""``certified_attend`` by kernels: what ``certified.certified_step`` defines, with tier 2 read only where it is asked for.

    1. ``score``: int8 keys once. Then, over [B, K, Q, N] blocks: deviations, shares, ``choose`` (promotion), exploration.
    2. ``exact``: original keys of the blocks that are read, in place of their logits. Then the softmax, promotion of values.
    3. ``mix``: int4 values once, original values where promoted. Then the certificate and the causes.
    4. ``exact`` and ``mix`` again, with everything from the originals, for the heads that fall; whoever has none ends at once.

No branch depends on data, nothing comes to the host, every buffer's size is that of the planes: a CUDA graph can hold it.

Every decision is the definition's, on logits and sums that were added in another order, except that blocks whose shares are equal as
float32 numbers are promoted together where a budget draws the line between them (never beyond ``k_max``). What is certified is
what was read, so more is sound. A head that falls is not what the scheme ``dense`` gives bit for bit: it is the same
float32 attention over the originals in another order, within the certificate that comes with it.

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
from kvcompile.lowering.certificate import Sum, Values
from kvcompile.lowering.certified import causes_of, softmax_of
from kvcompile.lowering.certified_blocks import Deviations, Masses, Notes, block_deviations, total
from kvcompile.lowering.certified_checks import too_far
from kvcompile.lowering.certified_promotion import ALL, Promoted, chance, wanted
from kvcompile.lowering.certified_telemetry import counts_of, figures_of
from kvcompile.schemes import bounds
from kvcompile.schemes.certified import BLOCK, Certified
from kvcompile.schemes.certify import Cause, Certify, Fallback

SPAN, SUM_BLOCKS, EXACT_BLOCKS, CHUNK = 8, 64, 8, 2048
"""Blocks of a program of ``score``, ``sums`` and ``exact``, and those that ``choose`` compares at once. Chosen by instruction counts and
registers of what is compiled, never timed; so are the next two."""

ROW_TILE, OWN_TILE = 4, 1
"""Rows of a program of ``score`` and ``mix``, and where ``mix`` reads originals."""

MOST_ROWS = 16
"""Rows of a kv head up to which kernels are used: they are unrolled."""

MOST = 2**30
"""Stands for any number of blocks."""

SPLITS = 128
"""Programs that share the values of a head of few rows and heads."""

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
    if page % BLOCK or any(plane.shape[3] != page for plane in values[:3]):
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
    """What all kernels of a step share."""

    cuda: bool
    blocks: int
    rows: int
    heads: tuple[int, int]
    queries: int

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
    from kvcompile.lowering import triton_certified as kernels
    from kvcompile.lowering.triton_mix import mix

    B, H, S, D = q.shape
    K = keys[0].shape[2]
    heads, Q, N = (K, H // K), H // K * S, keys[1].shape[0] * keys[1].shape[3]
    for plane, what in zip(originals, ("original keys", "original values"), strict=True):
        if plane.shape[0] < keys[0].shape[0]:
            raise Tier2Missing(expected=keys[0].shape[0], found=plane.shape[0], what=what)
    launch = Launch(q.device.type == "cuda", N, Q, heads, S)
    q = q if q.stride(-1) == 1 else q.contiguous()
    new_k, new_v = (x if x.stride(-1) == 1 else x.contiguous() for x in recent)
    tiles, own_tiles, page = -(-Q // ROW_TILE), -(-Q // OWN_TILE), keys[0].shape[3]
    if splits is None:
        splits = max(1, min(SPLITS, PROGRAMS // (B * K * tiles)))
    share = -(-N // splits)
    sizes = dict(K=K, G=heads[1], S=S, S2=1 << (S - 1).bit_length())

    last = hi.expand(B, S).clamp(max=N * BLOCK - 1)
    least = torch.zeros_like(last) if lo is None else lo.expand(B, S).clamp(0, N * BLOCK)
    at = torch.cat([last, least, base.expand(B).clamp(-(2**30), N * BLOCK).unsqueeze(-1)], 1).to(torch.int32)

    def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    logits, (peak, weight, channels) = floats(B, K, Q, N * BLOCK), (floats(B, K, Q, N) for _ in range(3))
    stored = floats(B, K, N, 4)
    launch(
        kernels.score, (-(-N // SPAN) + 1, B * K, tiles), q, *keys[:3], new_k, at, logits, channels, *q.stride()[:3],
        *keys[0].stride()[:3], *keys[1].stride()[:3], *new_k.stride()[:3], N, new_k.shape[2], float(scale), warps=1, D=D,
        TILE=min(ROW_TILE, 1 << (Q - 1).bit_length()), SPAN=SPAN, PER_PAGE=page // BLOCK, OF_STEP=RADIUS[0], OF_ZERO=RADIUS[1],
        OF_ONE=RADIUS[2], **sizes,
    )
    launch(
        kernels.sums, (-(-N // SUM_BLOCKS), B * K, Q), logits, keys[3], values[3], new_k, new_v, at, peak, weight, stored,
        *keys[3].stride()[:3], *values[3].stride()[:3], *new_k.stride()[:3], *new_v.stride()[:3], N, new_k.shape[2], warps=4,
        D=D, DV=value_dim, K=K, S=S, S2=sizes["S2"], NB=SUM_BLOCKS, ROWS=Q, PER_PAGE=page // BLOCK,
    )

    first = torch.arange(N, device=q.device) * BLOCK
    ends = [x[:, None, None, :].expand(-1, -1, heads[1], -1).flatten(2, 3).unsqueeze(-1) for x in (last, least)]
    live = first <= ends[0]
    if lo is not None:
        live = live & (first + BLOCK > ends[1])
    live = live.expand(B, K, -1, -1)
    alone = (first >= base[:, None])[:, None].expand(B, 1, -1)
    codes = live & ~alone.unsqueeze(2)
    coded = _of_live(live, peak, weight)
    norms = torch.where(live.any(2).unsqueeze(-1), stored, 0).to(torch.float64)
    notes = Notes(*norms.unbind(-1))
    query = q.unflatten(1, heads).flatten(2, 3).to(torch.float32)
    sink = None if sinks is None else sinks.to(torch.float32).view(K, heads[1], 1).expand(-1, -1, S).flatten(1).expand(B, -1, -1)

    delta = block_deviations(query, torch.where(codes, channels, 0), notes, live, alone, scale, 0.0)
    nu = torch.where(live, notes.nu.unsqueeze(2), 0)
    promoted = _promote(launch, coded, delta, live, codes, nu, sink, clock, rules)
    read = promoted.read

    def from_originals(asked: torch.Tensor, everything: bool) -> tuple[Masses, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exact masses where asked for, how far logits moved, and of each block the squares of residual and original norms."""
        sums, moved = (floats(B, K, Q, N), floats(B, K, Q, N)), floats(B, K, Q, N)
        squares = floats(B, K, N, dtype=torch.float64), floats(B, K, N, dtype=torch.float64)
        launch(
            kernels.exact, (-(-N // EXACT_BLOCKS), B * K), q, *keys[:3], originals[0], asked.to(torch.int8).contiguous(), at,
            logits, *sums, moved, *squares, *q.stride()[:3], *keys[0].stride()[:3], *keys[1].stride()[:3], *originals[0].stride()[:4], N,
            originals[0].shape[3], float(scale), warps=4, D=D, NB=EXACT_BLOCKS, PER_PAGE=page // BLOCK, ALL=everything, **sizes,
        )
        return Masses(*sums), moved, *squares

    def mixed_values(asked: torch.Tensor, top: torch.Tensor, everything: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """sum exp(logit - top) v, float64 [B, K, Q, Dv], and of each block the squares of residual and original norms."""
        coded_splits = 0 if everything else splits
        parts = floats(coded_splits + splits, B, K, Q, value_dim)
        squares = floats(B, K, N, dtype=torch.float64), floats(B, K, N, dtype=torch.float64)
        launch(
            mix, (coded_splits + splits, B * K, own_tiles), *values[:3], originals[1], new_v, logits, top.contiguous(),
            asked.to(torch.int8).contiguous(), at, parts, *squares, *values[0].stride()[:3], *values[1].stride()[:3],
            *originals[1].stride()[:4], *new_v.stride()[:3], N, originals[1].shape[3], new_v.shape[2], coded_splits, share,
            share, warps=1, DV=value_dim, GROUP=scheme.group, TILE=min(ROW_TILE, Q), OWN_TILE=OWN_TILE,
            NEWEST=1 << (new_v.shape[2] - 1).bit_length(), PAGE=page, ALL=everything, **sizes,
        )
        return parts.sum(0, dtype=torch.float64), *squares

    exact, moved, *key_squares = from_originals(read, False)
    mixed = Masses(torch.where(read, exact.peak, coded.peak), torch.where(read, exact.weight, coded.weight))
    softmax, top = softmax_of(mixed, live, sink)
    left = torch.where(codes & ~read, delta.codes, delta.originals)
    eta = torch.where(codes & ~promoted.explored, notes.eta.unsqueeze(2), 0)
    original_values = _promote_values(launch, certificates.value_terms(softmax, eta), rules)
    eta = torch.where(original_values, 0, eta)
    original_values = original_values | promoted.explored
    summed, *value_squares = mixed_values(original_values, top, False)
    output = _divided(summed, softmax)
    chain = certificates.CHAIN + 1.0 * share
    certificate = certificates.certificate(softmax, left, Values(nu, eta), output, q.dtype, chain)

    known = live & (alone.unsqueeze(2) | read)
    causes = causes_of(certificate, coded, mixed, delta, known, codes & ~read, rules)
    damaged = too_far(moved, delta, rules.guard) & read
    damaged = damaged | (read & _beyond(key_squares, (notes.kappa, notes.mu)).unsqueeze(2))
    damaged = damaged | (original_values & _beyond(value_squares, (notes.eta, notes.nu)).unsqueeze(2))
    causes = causes | torch.where((damaged & codes).flatten(1).any(1)[:, None, None], int(Cause.DAMAGED), 0)

    result, falls, dense_arithmetic = output, torch.zeros_like(causes, dtype=torch.bool), torch.zeros_like(certificate.arithmetic)
    if rules.fallback is Fallback.DENSE:
        falls = causes != 0
        exact, _, _, key_square = from_originals(falls, True)
        theirs = codes & falls.unsqueeze(-1)
        mixed = Masses(torch.where(theirs, exact.peak, coded.peak), torch.where(theirs, exact.weight, coded.weight))
        softmax, top = softmax_of(mixed, live, sink)
        summed, _, value_square = mixed_values(falls, top, True)
        dense = _divided(summed, softmax)
        seen = codes.any(2)
        mu, nu = (torch.where(seen, _norm(square), note) for square, note in ((key_square, notes.mu), (value_square, notes.nu)))
        none = torch.zeros_like(mu)
        own = block_deviations(query, torch.zeros_like(channels), Notes(none, mu, none, nu), live, alone, scale, 0.0).originals
        found = certificates.certificate(
            softmax, own, Values(torch.where(live, nu.unsqueeze(2), 0), torch.zeros_like(own)), dense, q.dtype, chain
        )
        dense_arithmetic = found.key + found.arithmetic
        result = torch.where(falls.unsqueeze(-1), dense, output)

    figures = figures_of(certificate, falls, dense_arithmetic, torch.where(codes, delta.codes, 0).amax(-1), promoted.tail)
    counts = counts_of(codes, promoted, original_values & codes & ~promoted.explored, falls, causes)
    results = (result.to(q.dtype), figures, counts)
    return tuple(x.unflatten(2, (heads[1], S)).flatten(1, 2) for x in results)  # type: ignore[return-value]


def _of_live(live: torch.Tensor, peak: torch.Tensor, weight: torch.Tensor) -> Masses:
    """Sums that a kernel wrote of visible blocks; the others hold nothing."""
    return Masses(torch.where(live, peak, float("-inf")), torch.where(live, weight, 0))


def _divided(summed: torch.Tensor, softmax: Sum) -> torch.Tensor:
    """The output: sums of values over the mass of all blocks."""
    mass = total(softmax.weight * torch.exp(softmax.gap)) + softmax.sink
    return torch.where((mass == 0).unsqueeze(-1), 0, summed / mass.unsqueeze(-1))


def _norm(square: torch.Tensor) -> torch.Tensor:
    """A norm from its float64 square, not below the exact one."""
    return torch.sqrt(square) * (1 + 2.0**-40)


def _beyond(squares: Sequence[torch.Tensor], notes: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """For each block: the norms that ``notes`` has (of residuals, of originals) are below those that were found."""
    return ~((_norm(squares[0]) <= notes[0]) & (_norm(squares[1]) <= notes[1]))


def _promote(
    launch: Launch, coded: Masses, delta: Deviations, live: torch.Tensor, codes: torch.Tensor, nu: torch.Tensor,
    sinks: torch.Tensor | None, clock: torch.Tensor, policy: Certify,
) -> Promoted:
    """``certified_promotion.promote_keys`` without a sort."""
    share, terms = wanted(coded, delta, live, codes, nu, sinks)
    chosen, widened = _choose(
        launch, torch.where(codes, share, -1), share, 1 - policy.tau_cov + ALL if policy.tau_cov < 1 else None,
        (min(policy.k_min, MOST), min(policy.k_max, MOST)), terms, policy.key_budget, min(policy.k_max << policy.widen, MOST),
    )
    keys = chosen & codes
    explored = torch.zeros_like(keys)
    if policy.explore:
        explored = codes & ~keys & (chance(clock, codes) < policy.explore)
    return Promoted(keys, explored, widened, total(torch.where(codes & ~keys & ~explored, share, 0)))


def _promote_values(launch: Launch, terms: torch.Tensor, policy: Certify) -> torch.Tensor:
    """``certified_promotion.promote_values`` without a sort."""
    local = ~(terms <= policy.v_tol)
    if math.isinf(policy.value_budget):
        return local
    rest = torch.where(local, 0, terms)
    # Rounded up: what is less than the least float32 number must not look like what adds nothing.
    order = torch.where(rest > 0, rest + 2.0**-126, -1)
    return local | (_choose(launch, order, rest, policy.value_budget, (0, MOST))[0] & (rest > 0))


def _choose(
    launch: Launch, order: torch.Tensor, amounts: torch.Tensor, budget: float | None, limits: tuple[int, int],
    more: torch.Tensor | None = None, more_budget: float = math.inf, most: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``triton_choose.choose`` for all heads: flags [B, K, Q, N], and [B, K, Q] where ``more`` asked for more than the rest."""
    from kvcompile.lowering.triton_choose import choose

    widen = more is not None and not math.isinf(more_budget)
    chosen = torch.empty(order.shape, dtype=torch.int8, device=order.device)
    widened = torch.zeros(order.shape[:-1], dtype=torch.int8, device=order.device)
    second = more if widen and more is not None else amounts
    launch(
        choose, (math.prod(order.shape[:-1]),), order.to(torch.float32).contiguous(), amounts.contiguous(), second.contiguous(),
        chosen, widened, launch.blocks, *limits, most, warps=16, FIRST_BUDGET=0.0 if budget is None else budget * INSIDE,
        SECOND_BUDGET=more_budget * INSIDE if widen else 0.0, CHUNK=CHUNK, COVER=budget is not None, WIDEN=widen,
    )
    return chosen != 0, widened != 0
