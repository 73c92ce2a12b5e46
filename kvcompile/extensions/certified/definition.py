"""The definition of certified attention: attention over codes if the result is within its certificate, else over full-precision tokens.

The eager body is the definition that the kernels are compared with. No branch depends on data and nothing is copied to the host: both sides
of every decision are computed here and selected by flags; a kernel need not compute both.

Operands besides those of ``attend`` (see ``lowering.ops``):
    keys, values   the planes of codes, scales, zero points and notes; values that are stored without codes have originals and notes
    originals      the dense planes of tier 2, keys and values, [N, B, K, rows, D], in host or device memory; every token
    clock          int64 [1]: the number of the step, which decides the explored blocks
    policy         ``Certify.spec``
Results: the output [B, H, S, Dv]; the certificate, float32 [B, H, S, len(Figure)]; the counters, int32 [B, H, S, len(Count)].

Rungs. (1) Promotion of keys, widened to make its coverage certain and to keep the key budget. (2) Promotion of values. (3) A head falls
back if the leading blocks are not certain, a budget is exceeded, or its certificate is not finite. (4) All heads of a batch row fall back
if the stored codes or notes of a block do not match its originals: rows are requests, and one must not change another's result. A head that
falls back has the result of ``attend`` over the originals with the scheme ``dense``, bit for bit. Its certificate is then the rounding
alone, from the originals' own norms.

A block that is partly in the window counts as stored by codes throughout, which its notes bound; one that is wholly in it is exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvcompile.errors import Tier2Missing
from kvcompile.extensions.certified.blocks import Deviations, Masses, Notes, biased, blocks, deviations, masses, norms, notes_of
from kvcompile.extensions.certified.checks import logits_differ, notes_differ, rank_fails, ranked
from kvcompile.extensions.certified.promotion import promote_further_values, promote_keys
from kvcompile.extensions.certified.scheme import BLOCK, Certified
from kvcompile.lowering.certificate import head_bounds
from kvcompile.lowering.certificate.head_bounds import Sum, ValueBounds, causes_of
from kvcompile.lowering.certificate.logits import LogitInputs, gaps, visible_to_queries
from kvcompile.lowering.certificate.telemetry import Counted, counts_of, figures_of
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import as_tokens, attend_body, with_exact_rows
from kvcompile.schemes.certificate.policy import Cause, Certify, Fallback
from kvcompile.types import Role, SlotSpec


class CodedAndExact(NamedTuple):
    """Keys or values as float32 tokens [B, K, T, D], twice: decoded, with full precision in the window; and all in full precision."""

    coded: torch.Tensor
    exact: torch.Tensor


class BlockVisibility(NamedTuple):
    """Masks of the tokens and of the blocks that each query sees.

    ``tokens`` [B, 1 or K, Q, T]: visible tokens; ``from_codes``: the visible tokens before the window. ``live``: blocks with a visible
    token; ``alone``: blocks wholly in the window.
    """

    tokens: torch.Tensor
    from_codes: torch.Tensor
    live: torch.Tensor
    alone: torch.Tensor


def _tokens(
    scheme: Certified, planes: Sequence[torch.Tensor], originals: torch.Tensor, slot: SlotSpec, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return decoded and full-precision tokens, float32; zero for tokens that no query sees: unwritten ones may be NaN."""
    exact = as_tokens(originals).to(seen.device, torch.float32)[:, :, : seen.shape[-1]]
    coded = scheme.decode(tuple(as_tokens(plane) for plane in planes[:-1]), slot) if scheme.coded(slot) else exact
    at = seen[..., None]
    return torch.where(at, coded, 0), torch.where(at, exact, 0)


def certified_step(
    rules: Certify, scheme: Certified, operands: AttendOperands[torch.Tensor], originals: Sequence[torch.Tensor], clock: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (output, figures of the certificate, counters) of attention over certified codes, each [B, H, S, ...].

    ``rules`` and ``scheme`` are given as objects, not as text. ``originals``: the planes of tier 2. ``clock``: its first element is the
    number of the step. Raises Tier2Missing if ``originals`` have fewer pages than the codes.
    """
    q, keys, sinks = operands.q, operands.keys, operands.sinks
    B, H, S, _ = q.shape
    K = keys[0].shape[2]
    heads = (K, H // K)
    T = keys[0].shape[0] * keys[0].shape[3]
    _check_tier_2(originals, keys[0].shape[0])
    visible, extra = _sight(operands, heads, T)
    seen = visible.tokens.any(2)
    k, v = _sides(scheme, operands, originals, seen)
    query = q.unflatten(1, heads).flatten(2, 3).to(torch.float32)
    scores = LogitInputs(query, visible.tokens, extra, operands.scale, operands.softcap)
    notes = notes_of(as_tokens(keys[-1]), as_tokens(operands.values[-1]), k.coded, v.coded, visible.alone, seen)
    live = visible.live.expand(B, K, -1, -1)
    codes = live & ~visible.alone.unsqueeze(2)
    products = CodedAndExact(scores.products(k.coded), scores.products(k.exact))
    logits = CodedAndExact(*(scores.logits(each) for each in products))
    coded = masses(logits.coded)
    # A block in the window has the same masses from both, in whatever order they were added.
    exact = _chosen(codes, masses(logits.exact), coded)
    sink = None if sinks is None else sinks.to(torch.float32).view(K, heads[1], 1).expand(-1, -1, S).flatten(1).expand(B, -1, -1)

    steps, zeros = (as_tokens(plane).to(torch.float32) for plane in keys[1:3])
    delta = of_products = deviations(scores, steps, zeros, notes, live, visible.alone)
    if extra is not None:
        highest = torch.maximum(coded.peak, exact.peak).amax(-1)
        delta = Deviations(*(biased(each, live, torch.where(torch.isneginf(highest), 0, highest)) for each in delta))
    nu = torch.where(live, notes.nu.unsqueeze(2), 0)
    own_eta = notes.eta.unsqueeze(2)
    promoted = promote_keys(coded, delta, live, codes, (nu, own_eta), sink, clock, rules, heads[1])
    softmax, top = _softmax(_chosen(promoted.read, exact, coded), live, sink)
    left = torch.where(codes & ~promoted.read, delta.codes, delta.originals)
    coded_values = torch.where(codes & ~promoted.explored, own_eta, 0)
    chosen = promote_further_values(head_bounds.value_terms(softmax, coded_values), promoted.values, rules)
    eta, original_values = torch.where(chosen, 0, coded_values), chosen | promoted.explored
    output = _output(logits_of(promoted.read, logits), top, v, original_values, sink)
    certificate = head_bounds.certificate(softmax, left, ValueBounds(nu, eta), output, q.dtype)

    known = live & (visible.alone.unsqueeze(2) | promoted.read)
    causes = causes_of(certificate, rules)
    if rules.rank:
        causes = causes | ranked(*rank_fails(coded, exact, delta, known, codes & ~promoted.read, rules.rank, rules.agree))
    # Without the bias: a large one would round both logits by more than the keys' codes could.
    damaged = logits_differ(products.coded, products.exact, of_products, visible.from_codes, rules.guard) & promoted.read
    # Keys with NaN or Inf, marked by a NaN note, have no logit to compare.
    damaged = damaged & ~torch.isnan(notes.kappa).unsqueeze(2)
    differ = _differ(k, v, notes, visible.from_codes.any(2))
    damaged = damaged | (promoted.read & differ[0]) | (original_values & differ[1])
    causes = causes | torch.where((damaged & codes).flatten(1).any(1)[:, None, None], int(Cause.DAMAGED), 0)

    by_heads = _dense(operands, originals).unflatten(1, heads).flatten(2, 3)
    dense_arithmetic = _dense_arithmetic(scores, logits.exact, k.exact, v.exact, by_heads, live, sink, q.dtype, extra is not None)
    falls = (causes != 0) if rules.fallback is Fallback.DENSE else torch.zeros_like(causes, dtype=torch.bool)
    result = torch.where(falls.unsqueeze(-1), by_heads, output.to(q.dtype))
    figures = figures_of(certificate, falls, dense_arithmetic, torch.where(codes, delta.codes, 0).amax(-1), promoted.tail)
    counted = (codes, promoted.keys, original_values & codes & ~promoted.explored, promoted.explored)
    counts = counts_of(Counted(*(x.sum(-1) for x in counted)), promoted.widened, falls, causes)
    return tuple(x.unflatten(2, (heads[1], S)).flatten(1, 2) for x in (result, figures, counts))  # type: ignore[return-value]


def _check_tier_2(originals: Sequence[torch.Tensor], pages: int) -> None:
    """Raise Tier2Missing if the planes of tier 2 have fewer pages than the codes."""
    for plane, what in zip(originals, ("full-precision keys", "full-precision values"), strict=True):
        if plane.shape[0] < pages:
            raise Tier2Missing(expected=pages, found=plane.shape[0], what=what)


def _chosen(flags: torch.Tensor, new: Masses, old: Masses) -> Masses:
    """Return the masses of ``new`` for flagged blocks, and of ``old`` for the others."""
    return Masses(*(torch.where(flags, a, b) for a, b in zip(new, old, strict=True)))


def _sides(
    scheme: Certified, operands: AttendOperands[torch.Tensor], originals: Sequence[torch.Tensor], seen: torch.Tensor
) -> tuple[CodedAndExact, CodedAndExact]:
    """Return the keys and the values, decoded and in full precision, with the window's tokens in both."""
    q, K, exact_newest, base = operands.q, operands.keys[0].shape[2], operands.exact_newest, operands.base
    slots = SlotSpec(K, q.shape[3], q.dtype, Role.KEY), SlotSpec(K, operands.value_dim, q.dtype, Role.VALUE)
    k, v = (
        CodedAndExact(*_tokens(scheme.for_role(slot.role), planes, plane, slot, seen))
        for planes, plane, slot in zip((operands.keys, operands.values), originals, slots, strict=True)
    )
    if not exact_newest:
        return k, v
    assert base is not None
    k, v = (
        CodedAndExact(*(torch.where(seen[..., None], with_exact_rows(x, new, base), 0) for x in side))
        for side, new in zip((k, v), exact_newest, strict=True)
    )
    return k, v


def _differ(k: CodedAndExact, v: CodedAndExact, notes: Notes, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two flags per block, [B, K, 1, N]: a norm of a key, and of a value, among the tokens ``own`` exceeds the stored notes."""
    keys = notes_differ(k.coded, k.exact, (notes.kappa, notes.mu), own)
    values = notes_differ(v.coded, v.exact, (notes.eta, notes.nu), own)
    return keys.unsqueeze(2), values.unsqueeze(2)


def _dense(operands: AttendOperands[torch.Tensor], originals: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return attention over the originals with the scheme ``dense``, [B, H, S, Dv]."""
    keys, values = (plane.to(operands.q.device) for plane in originals)
    return attend_body(dataclasses.replace(
        operands, keys=[keys], values=[values], key_scheme="dense", value_scheme="dense", exact_newest=None, base=None
    ))


def _sight(
    operands: AttendOperands[torch.Tensor], heads: tuple[int, int], tokens: int
) -> tuple[BlockVisibility, torch.Tensor | None]:
    """Return (visible tokens and blocks of each query, bias of its logits); the bias is [B or 1, 1 or K, Q, T], None without one."""
    q, base = operands.q, operands.base
    mask, extra = visible_to_queries(operands, heads, tokens)
    place = torch.arange(tokens, device=q.device)
    behind = place < tokens if base is None else place < base[:, None]
    behind = behind.expand(q.shape[0], -1)[:, None]
    # A block whose first token is in the window has no token from codes.
    alone = ~blocks(behind)[..., 0]
    return BlockVisibility(mask, mask & behind.unsqueeze(2), blocks(mask).any(-1), alone), extra


def logits_of(read: torch.Tensor, logits: CodedAndExact) -> torch.Tensor:
    """Return the logits by block, [B, K, Q, N, 16]: from original keys for blocks flagged in ``read`` [B, K, Q, N], else from codes."""
    return torch.where(read.unsqueeze(-1), blocks(logits.exact), blocks(logits.coded))


def _softmax(of: Masses, live: torch.Tensor, sink: torch.Tensor | None) -> tuple[Sum, torch.Tensor]:
    """Return softmax masses of blocks, relative to each query's largest logit (the sink's included), and that logit [B, K, Q].

    ``of``: each block's peak logit and sum of exponentials [B, K, Q, N]; ``live``: blocks with a visible token.
    """
    top = of.peak.amax(-1)
    top = top if sink is None else torch.maximum(top, sink)
    top = torch.where(torch.isneginf(top), 0, top)
    own = 0.0 if sink is None else torch.exp(sink.to(torch.float64) - top.to(torch.float64))
    return Sum(gaps(of.peak, top, live), torch.where(live, of.weight.to(torch.float64), 0), own), top


def _output(
    per_token: torch.Tensor, top: torch.Tensor, v: CodedAndExact, original: torch.Tensor, sink: torch.Tensor | None
) -> torch.Tensor:
    """Return softmax(logits) @ values, float64 [B, K, Q, Dv]: products within a block are summed in float32, blocks are added in float64.

    ``original``: flags of the blocks whose values are used in full precision.
    """
    weights = torch.exp(per_token - top[..., None, None])
    use = original.unsqueeze(-1)
    parts = []
    for side, mine in ((v.coded, ~use), (v.exact, use)):
        shares = torch.where(mine, weights, 0).transpose(2, 3)
        parts.append(shares @ side.unflatten(2, (-1, BLOCK)))
    summed = (parts[0] + parts[1]).sum(2, dtype=torch.float64)
    mass = weights.sum(-1).sum(-1, dtype=torch.float64)
    if sink is not None:
        mass = mass + torch.exp(sink - top).to(torch.float64)
    return torch.where((mass == 0).unsqueeze(-1), 0, summed / mass.unsqueeze(-1))


def _dense_arithmetic(
    scores: LogitInputs, logits: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, live: torch.Tensor,
    sink: torch.Tensor | None, dtype: torch.dtype, has_bias: bool,
) -> torch.Tensor:
    """Return a bound on the rounding error of the fallback's result, [B, K, Q]: float32 sums over all tokens in any order."""
    everywhere = torch.ones((), dtype=torch.bool, device=k.device)
    nu, mu = norms(v, everywhere), norms(k, everywhere)
    none, steps = torch.zeros_like(mu), torch.zeros_like(k[:, :, ::BLOCK])
    softmax, top = _softmax(masses(logits), live, sink)
    own = deviations(scores, steps, steps, Notes(none, mu, none, nu), live, torch.zeros_like(mu, dtype=torch.bool))
    delta = biased(own.originals, live, top) if has_bias else own.originals
    found = head_bounds.certificate(
        softmax, delta, ValueBounds(torch.where(live, nu.unsqueeze(2), 0), torch.zeros_like(delta)), output, dtype,
        head_bounds.CHAIN + 2.0 * k.shape[2],
    )
    return found.key + found.arithmetic
