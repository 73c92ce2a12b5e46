"""The operations that a rewritten graph is made of, with their eager bodies.

``kvcompile::append``  encodes new tokens and writes them into the planes of one store.
``kvcompile::append_window``  does so for stores whose newest tokens stay in full precision; returns these tokens (``append_window.py``).
``kvcompile::read_back``  encodes and decodes new tokens [B, K, S, D], in x's dtype; stores nothing.
``kvcompile::calibrate``   fills the planes that a scheme computes from queries, before the first tokens are encoded.
``kvcompile::keep_first``  writes the first tokens of each row, in full precision, into a plane of their own (``keep_first.py``).
``kvcompile::rotate_channels``  rotates the channels of tokens, queries or results [B, heads, S, D] as a store's tokens are rotated, or
                             back (``schemes.rotation``).
``kvcompile::undo_rope``  rotates new keys [B, K, S, D] back by angles [1 or B, S, Dr], for stores that hold keys before RoPE.
``kvcompile::first_visible``  finds the first position [B] that a mask [B, T] shows: the end of each row's left padding.
``kvcompile::unroll``  copies the codes of a sliding cache's newest tokens in token order, followed by new tokens' codes (``sliding.py``).
``kvcompile::gather``  copies the codes of tokens by slot number, from a store with one batch row (``gather.py``).
``kvcompile::attend_blocks``  attends to tokens that lie in blocks of a store with one batch row, which a table finds
                             (``attend_blocks.py``).
``kvcompile::attend``  attends over encoded planes; returns no softmax statistics but log-sums, if asked for.

The eager bodies are the definition: the reference for every kernel, and the code that ``inner="eager"`` runs.
For Inductor, ``append`` is inlined from its body, so that encoding fuses with RoPE and the projections' epilogues.

Operands of ``attend``
    q_BHSD      queries, in the model's dtype
    keys        planes of the key store, each [N, B, K, rows, width]; token t is row t % rows of page t // rows.
                A plain [B, K, T, D] tensor is one page: unsqueeze(0) makes it a dense store (prefill)
    values      planes of the value store, [N, B, K, rows, width_v]
    hi          int64 [B or 1, S]: the last position that each query attends to, -1 for none
    lo          int64 [B or 1, S] or None: the first position (sliding window)
    keep        bool [B or 1, T'] or None: False hides a position from all queries (padding); so are positions from T' on
    bias        float or bool, broadcastable to [B, H, S, T'] and given with 4 dims, or None: any other mask, added to the
                scores after the softcap. False in a bool bias replaces the score by ``fill``; so does minus infinity in a float
                bias if ``fill`` is given. Positions from T' on are hidden
    sinks       float [H] or None: one extra logit a head that takes mass and has no value
    exact_newest  None or the newest keys and values in full precision, [B, K, R, D] and [B, K, R, Dv]: row j is the
                token at position base + j; the planes' content from position base on is not read
    base        int64 [1 or B], may be negative (rows at negative positions are ignored); None without ``exact_newest``
    rope        None or cos and sin, each float [1 or B, T', Dr]: keys, decoded and exact, are stored before RoPE, and
                their first Dr channels are rotated by their position here: channel c < Dr / 2 pairs with
                c + Dr / 2 (``interleaved``: 2i with 2i + 1): k * cos + rotated(k) * sin; T' covers every visible token
    extra_key_planes  None or the planes of a second key store, whose ``extra_key_dim`` channels are concatenated behind those of
                ``keys`` (a latent cache's rotary part); exact keys have the channels of both
    exact_first  None or the first tokens in full precision, planes [1, B, K, N, D] and [1, B, K, N, Dv]: row j is the token at position
                exact_first_at + j; overrides the codes and ``exact_newest``
    exact_first_at  None for 0, or a plane int64 [1, B, 1, 1, 1]
    fill        the score of a token that ``bias`` excludes, for models that mask with a finite number; None for -inf
    scale       multiplies q . k;  softcap: scores become softcap * tanh(scores / softcap) if > 0
    log_sums    whether the result has one more channel: the log-sum-exp of each query's scores, its sink included
    result      [B, H, S, Dv] in q's dtype; a query that sees no token gives zeros, as with SDPA's bool masks. With log-sums
                [B, H, S, Dv + 1] in at least float32, and such a query's log-sum is -inf

H = G * K; query head h reads kv head h // G.

``kvcompile::expose`` marks every use of a compressed cache in Dynamo's graphs; its result is typed as the dense tensor that the
cache replaces. ``capture`` removes it, so it runs only in graphs that another backend compiled, and raises there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcompile import schemes
from kvcompile.errors import ForeignBackend
from kvcompile.lowering.ops.append_window import append_window_body, append_window_meta
from kvcompile.lowering.ops.attend_blocks import attend_blocks_body, attend_blocks_meta
from kvcompile.lowering.ops.gather import gather_body, gather_meta
from kvcompile.lowering.ops.keep_first import keep_first_body, keep_first_meta, origins
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.sliding import unroll_body, unroll_meta
from kvcompile.schemes.rotation import rotate, unrotate
from kvcompile.types import Role, SlotSpec

LIBRARY = torch.library.Library("kvcompile", "DEF")
LIBRARY.define("expose(Tensor x) -> Tensor")
LIBRARY.define("append(Tensor x, Tensor(a!)[] planes, Tensor pos, str scheme, Tensor? origin=None, Tensor[]? tables=None) -> ()")
LIBRARY.define(
    "append_window(Tensor x, Tensor(a!)[] planes, Tensor pos, Tensor? origin, str scheme, Tensor[]? tables=None) -> (Tensor, Tensor)"
)
LIBRARY.define("read_back(Tensor x, Tensor[] levels, Tensor[] tables, str scheme) -> Tensor")
# Its linear algebra may choose algorithms by size and device, so CUDA graphs leave it out; no decode step contains it.
LIBRARY.define(
    "calibrate(Tensor q, Tensor(a!)[] planes, Tensor? keep, str scheme, Tensor? keys=None, Tensor[]? angles=None, bool interleaved=False)"
    " -> ()", tags=(torch.Tag.cudagraph_unsafe,),
)
LIBRARY.define("keep_first(Tensor x, Tensor(a!)[] planes, Tensor pos, Tensor? origin) -> ()")
LIBRARY.define("rotate_channels(Tensor x, int order, Tensor? plane, bool inverse) -> Tensor")
LIBRARY.define("undo_rope(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor")
LIBRARY.define("first_visible(Tensor seen) -> Tensor")
LIBRARY.define("unroll(Tensor x, Tensor[] planes, Tensor cursor, SymInt past, int slots, str scheme, Tensor[]? tables=None) -> Tensor[]")
LIBRARY.define("gather(Tensor[] planes, Tensor places, SymInt head_dim, str scheme) -> Tensor[]")
LIBRARY.define(
    "attend_blocks(Tensor q, Tensor[] keys, Tensor[] values, Tensor table, int every, Tensor hi, int window, Tensor? sinks,"
    " str key_scheme, str value_scheme, float scale, float softcap, SymInt value_dim) -> Tensor"
)
LIBRARY.define(
    "attend(Tensor q, Tensor[] keys, Tensor[] values, Tensor hi, Tensor? lo, Tensor? keep, Tensor? bias,"
    " Tensor? sinks, str key_scheme, str value_scheme, float scale, float softcap, SymInt value_dim,"
    " Tensor[]? exact_newest=None, Tensor? base=None, Tensor[]? rope=None, bool interleaved=False,"
    " Tensor[]? extra_key_planes=None, str extra_key_scheme='', SymInt extra_key_dim=0, Tensor[]? exact_first=None,"
    " Tensor? exact_first_at=None, float? fill=None, bool log_sums=False) -> Tensor"
)


def slot_spec(planes: Sequence[torch.Tensor], head_dim: int, role: Role) -> SlotSpec:
    """Return the spec of the slot that ``planes`` store; its dtype is the first plane's: the model's for dense planes, else the codes'."""
    return SlotSpec(planes[0].shape[2], head_dim, planes[0].dtype, role)


def write_rows(plane: torch.Tensor, rows_BKSW: torch.Tensor, pos: torch.Tensor) -> None:
    """Write rows in place at pos int64 [1 or B, S]: plane[pos // R, :, :, pos % R] = rows; plane [N, B, K, R, width]."""
    page, row = pos // plane.shape[3], pos % plane.shape[3]
    if pos.shape[0] == 1:
        # Advanced indices around slices come first in the result: [S, B, K, width].
        plane[page[0], :, :, row[0]] = rows_BKSW.permute(2, 0, 1, 3)
        return
    batch = torch.arange(plane.shape[1], device=plane.device).unsqueeze(-1)
    plane[page, batch, :, row] = rows_BKSW.permute(0, 2, 1, 3)


def append_body(
    x: torch.Tensor, planes: list[torch.Tensor], pos: torch.Tensor, scheme: str, origin: torch.Tensor | None = None,
    tables: Sequence[torch.Tensor] | None = None,
) -> None:
    """Encode x [B, K, S, D] and write codes and scales at positions pos [1 or B, S], in place.

    ``tables``: the layout's ``encoding`` planes.

    ``origin``: int64 [B], each row's first position that is not padding, for schemes whose tokens share scales; None without padding.
    Padding before it is encoded separately: it is stored, but sets no other token's scale.

    The host cannot check positions without waiting for the device, and an index out of bounds would kill the process: a token whose
    position is outside of the planes is written as NaN into the last row, where attention up to that position reads it.
    """
    room = planes[0].shape[0] * planes[0].shape[3]
    inside = (pos >= 0) & (pos < room)
    x = torch.where(inside[:, None, :, None], x, float("nan"))
    pos = torch.where(inside, pos, room - 1)
    made = schemes.parse(scheme)
    given = tuple(tables or ())
    encoded = made.encode(x, *given) if origin is None else _encoded_apart(made, x, pos >= origin[:, None], given)
    # Constant planes may follow the written ones.
    for plane, rows in zip(planes[: len(encoded)], encoded, strict=True):
        write_rows(plane, rows.to(plane.dtype), pos)


def _encoded_apart(
    scheme: schemes.Scheme, x: torch.Tensor, keep_BS: torch.Tensor, tables: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    """Return the encoded planes of x [B, K, S, D], with the tokens that ``keep_BS`` marks and all others encoded by separate calls."""
    keep = keep_BS[:, None, :, None]
    one, other = (scheme.encode(torch.where(chosen, x, torch.zeros_like(x)), *tables) for chosen in (keep, ~keep))
    return [torch.where(keep, a, b) for a, b in zip(one, other, strict=True)]


def read_back_body(x: torch.Tensor, levels: Sequence[torch.Tensor], tables: Sequence[torch.Tensor], scheme: str) -> torch.Tensor:
    """Return x [B, K, S, D] after encoding and decoding, in x's dtype.

    ``tables``: the constant planes that ``encode`` takes; ``levels``: the constant planes that ``decode`` takes.
    """
    made = schemes.parse(scheme)
    slot = SlotSpec(x.shape[1], x.shape[3], x.dtype, Role.VALUE)
    return made.decode((*made.encode(x, *tables), *levels), slot).to(x.dtype)


def calibrate_body(
    q: torch.Tensor, planes: list[torch.Tensor], keep: torch.Tensor | None, scheme: str, keys: torch.Tensor | None = None,
    angles: Sequence[torch.Tensor] | None = None, interleaved: bool = False,
) -> None:
    """Fill the planes from queries q [B, H, S, D] of tokens 0, 1, 2, ...; ``keep`` [B or 1, T'] is False for padding, None without.

    ``keys``: the call's keys [B, K, S, D] as the store is to hold them. ``angles``: cos and sin [1 or B, S, Dr] at the queries' positions,
    if queries are before RoPE.
    """
    if keep is not None:
        keep = _padded(keep, q.shape[2], False).expand(q.shape[0], -1)
    prompt = schemes.Prompt(keys, None if angles is None else (angles[0], angles[1], interleaved))
    made = schemes.parse(scheme).calibrate(q.unflatten(1, (planes[0].shape[2], -1)), keep, prompt)
    for plane, values in zip(planes, made, strict=True):
        plane.copy_(values)


def as_tokens(plane: torch.Tensor) -> torch.Tensor:
    """Return a plane [N, B, K, R, width] with its pages joined, [B, K, N * R, width]."""
    return plane.permute(1, 2, 0, 3, 4).flatten(2, 3)


def visible(
    hi: torch.Tensor, lo: torch.Tensor | None, keep: torch.Tensor | None, tokens: int
) -> torch.Tensor:
    """Return the mask of positions that each query attends to, bool [B or 1, 1, S, T], for ``tokens`` positions.

    ``hi``, ``lo``: last and first position, int64 [1 or B, S]; ``keep``: positions that any query may see, bool [1 or B, T']. ``lo`` or
    ``keep`` None hides nothing; positions from T' on are hidden.
    """
    t = torch.arange(tokens, device=hi.device)
    mask = t <= hi[:, None, :, None]
    if lo is not None:
        mask = mask & (t >= lo[:, None, :, None])
    if keep is not None:
        mask = mask & _padded(keep, tokens, False)[:, None, None, :]
    return mask


def _padded(mask: torch.Tensor, tokens: int, fill: float) -> torch.Tensor:
    """Return ``mask`` [..., n] with ``tokens`` entries along its last axis: cut, or extended by ``fill``."""
    missing = tokens - mask.shape[-1]
    if missing <= 0:
        return mask[..., :tokens]
    return torch.cat([mask, torch.full((*mask.shape[:-1], missing), fill, dtype=mask.dtype, device=mask.device)], -1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return x [B, K, T, D] with RoPE applied to its first Dr channels, by cos and sin [1 or B, T, Dr]."""
    width = cos.shape[-1]
    part, rest = x[..., :width], x[..., width:]
    if interleaved:
        turned = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)
    else:
        turned = torch.cat((-part[..., width // 2 :], part[..., : width // 2]), dim=-1)
    return torch.cat((part * cos.unsqueeze(1) + turned * sin.unsqueeze(1), rest), dim=-1)


def undo_rope_body(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return x [B, K, S, D] with ``apply_rope`` undone, in x's dtype; ``cos``, ``sin``: [1 or B, S, channels that are rotated].

    It inverts the 2 x 2 matrices of pairs of channels, as cos and sin may be scaled. A singular matrix gives Inf or NaN.
    """
    width = cos.shape[-1]
    exact = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(exact).unsqueeze(1), sin.to(exact).unsqueeze(1)
    first, second = (slice(0, width, 2), slice(1, width, 2)) if interleaved else (slice(width // 2), slice(width // 2, width))
    a, b = x[..., first].to(exact), x[..., second].to(exact)
    size = cos[..., first] * cos[..., second] + sin[..., first] * sin[..., second]
    left = (a * cos[..., second] + b * sin[..., first]) / size
    right = (b * cos[..., first] - a * sin[..., second]) / size
    part = torch.stack((left, right), dim=-1).flatten(-2) if interleaved else torch.cat((left, right), dim=-1)
    return torch.cat((part.to(x.dtype), x[..., width:]), dim=-1)


def first_visible_body(seen: torch.Tensor) -> torch.Tensor:
    """Return the first position whose entry of ``seen`` [B, T] is not zero, int64 [B]; T if all are zero."""
    tokens = seen.shape[1]
    index = torch.arange(tokens, dtype=torch.int64, device=seen.device)
    return (index + (seen == 0).to(torch.int64) * tokens).amin(1)


def with_exact_rows(decoded: torch.Tensor, exact_newest: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``decoded`` [B, K, T, D] with tokens base .. base + R - 1 from ``exact_newest`` [B, K, R, D]; ``base``: [1 or B]."""
    tokens, rows = decoded.shape[2], exact_newest.shape[2]
    j = torch.arange(tokens, device=decoded.device) - base[:, None]
    taken = exact_newest.gather(2, j.clamp(0, rows - 1)[:, None, :, None].expand(*exact_newest.shape[:2], tokens, exact_newest.shape[3]))
    return torch.where(((j >= 0) & (j < rows))[:, None, :, None], taken.to(decoded.dtype), decoded)


def attend_body(operands: AttendOperands[torch.Tensor], compute: torch.dtype | None = None) -> torch.Tensor:
    """Return the result of ``attend``, [B, H, S, Dv], computed one kv head at a time; this is the definition of the operation.

    ``compute``: the dtype of the computation, None for q's dtype, at least float32.
    """
    q, kv_heads = operands.q, operands.keys[0].shape[2]
    compute = compute or torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // kv_heads
    out = _attend_meta(*operands.arguments())
    for head in range(kv_heads):
        k, v = _decoded(operands, slice(head, head + 1), compute)
        heads = slice(head * group, (head + 1) * group)
        out[:, heads] = _attend_heads(operands, heads, k, v, compute)
    return out


def _decoded(operands: AttendOperands[torch.Tensor], one: slice, compute: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and the values [B, 1, T, .] of kv head ``one`` (a slice), decoded to ``compute``.

    Exact tokens are filled in, and RoPE is applied to keys that are stored without it.
    """
    extra_key_planes, exact_newest, base = operands.extra_key_planes, operands.exact_newest, operands.base
    ks, vs = schemes.parse(operands.key_scheme), schemes.parse(operands.value_scheme)
    key_slot = slot_spec(operands.keys, operands.q.shape[3] - operands.extra_key_dim, Role.KEY)
    value_slot = slot_spec(operands.values, operands.value_dim, Role.VALUE)
    k = ks.decode(decodable(ks, operands.keys, key_slot, one), key_slot).to(compute)
    if extra_key_planes:
        ms, more_slot = schemes.parse(operands.extra_key_scheme), slot_spec(extra_key_planes, operands.extra_key_dim, Role.KEY)
        k = torch.cat((k, ms.decode(decodable(ms, extra_key_planes, more_slot, one), more_slot).to(compute)), dim=-1)
    v = vs.decode(decodable(vs, operands.values, value_slot, one), value_slot).to(compute)
    tokens = k.shape[2]
    if exact_newest:
        assert base is not None
        k, v = with_exact_rows(k, exact_newest[0][:, one], base), with_exact_rows(v, exact_newest[1][:, one], base)
    if operands.exact_first:
        first = origins(operands.exact_first_at, k.device)
        k, v = (with_exact_rows(x, rows[0, :, one], first) for x, rows in zip((k, v), operands.exact_first, strict=True))
    if operands.rope:
        cos, sin = (_fitted(table.to(compute), tokens) for table in operands.rope)
        k = apply_rope(k, cos, sin, operands.interleaved)
    return k, v


def _attend_heads(
    operands: AttendOperands[torch.Tensor], heads: slice, k: torch.Tensor, v: torch.Tensor, compute: torch.dtype
) -> torch.Tensor:
    """Return the result of one kv head's query heads: [B, G, S, Dv] in q's dtype, or [B, G, S, Dv + 1] in ``compute`` with log-sums."""
    weights, total, mask, top = softmax_parts(operands, heads, k, compute)
    result = weighted(weights, total, mask, v)
    return torch.cat((result, top + torch.log(total)), -1) if operands.log_sums else result.to(operands.q.dtype)


def softmax_parts(
    operands: AttendOperands[torch.Tensor], heads: slice, k: torch.Tensor, compute: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (weights, total, mask, top) of the softmax of one kv head's query heads over keys [B, 1, T, D].

    ``weights``: unnormalised [B, G, S, T]. ``total``: their sums, sinks included [B, G, S, 1]. ``mask``: the visible tokens, bool [B or 1,
    1 or G, S, T]. ``top``: the maximum that was subtracted from the scores [B, G, S, 1].
    """
    q, bias, sinks, softcap, fill, tokens = operands.q, operands.bias, operands.sinks, operands.softcap, operands.fill, k.shape[2]
    scores = (q[:, heads].to(compute) @ k.transpose(-1, -2)) * operands.scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    mask = visible(operands.hi, operands.lo, operands.keep, tokens)
    if bias is not None:
        part = bias[:, heads] if bias.shape[1] == q.shape[1] else bias
        if part.dtype == torch.bool and fill is None:
            mask = mask & _padded(part, tokens, False)
        elif fill is not None:
            added = part if part.dtype != torch.bool else torch.zeros_like(part, dtype=compute).masked_fill(~part, float("-inf"))
            added = _padded(added.to(compute), tokens, 0.0)
            scores = torch.where(torch.isneginf(added), fill, scores + added)
            mask = mask & (torch.arange(tokens, device=q.device) < part.shape[-1])
        else:
            scores = scores + _padded(part.to(compute), tokens, float("-inf"))
    scores = scores.masked_fill(~mask, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks[heads].to(compute)[None, :, None, None])
    top = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks[heads].to(compute)[None, :, None, None] - top)
    return weights, total, mask, top


def weighted(weights: torch.Tensor, total: torch.Tensor, mask: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean of values [B, 1, T, Dv] as [B, G, S, Dv]; the other arguments are ``softmax_parts``' results."""
    # Masked values must not poison the sum: 0 * NaN of an unwritten token is NaN.
    v = torch.where(mask.any(2).any(1)[:, None, :, None], v, torch.zeros_like(v))
    # "== 0" and not "<= 0 or NaN": the total of a row that saw NaN is NaN, and the result must be NaN too.
    return torch.where(total == 0, torch.zeros_like(total), (weights @ v) / total)


def _fitted(table: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return cos or sin [., T', Dr] with ``tokens`` positions: cut, or extended by zeros; positions from T' on are never visible."""
    return torch.nn.functional.pad(table, (0, 0, 0, max(0, tokens - table.shape[1])))[:, :tokens]


def decodable(scheme: schemes.Scheme, planes: Sequence[torch.Tensor], slot: SlotSpec, heads: slice) -> tuple[torch.Tensor, ...]:
    """Return the argument ``planes`` of ``Scheme.decode`` for the kv heads ``heads``: planes as tokens [B, K, T, width].

    Only planes that a kernel reads are returned; a constant last plane keeps its shape.
    """
    fmt = scheme.format(slot)
    read = [plane[:, :, heads] for plane in planes[: fmt.planes]]
    return tuple(plane if fmt.ends_constant and at == fmt.planes - 1 else as_tokens(plane) for at, plane in enumerate(read))


def _attend(*args: Any, **kwargs: Any) -> torch.Tensor:
    return attend_body(AttendOperands(*args, **kwargs))


def _attend_meta(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return an empty tensor of the result's shape: [B, H, S, Dv] in q's dtype; with log-sums one channel more, in at least float32."""
    operands: AttendOperands[torch.Tensor] = AttendOperands(*args, **kwargs)
    q, width = operands.q, operands.value_dim
    if operands.log_sums:
        return q.new_empty(*q.shape[:3], width + 1, dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(*q.shape[:3], width)


def _calibrate_meta(
    q: torch.Tensor, planes: list[torch.Tensor], keep: torch.Tensor | None, scheme: str, keys: torch.Tensor | None = None,
    angles: Sequence[torch.Tensor] | None = None, interleaved: bool = False,
) -> None:
    return None


def _append_meta(
    x: torch.Tensor, planes: list[torch.Tensor], pos: torch.Tensor, scheme: str, origin: torch.Tensor | None = None,
    tables: Sequence[torch.Tensor] | None = None,
) -> None:
    return None


def _read_back_meta(x: torch.Tensor, levels: Sequence[torch.Tensor], tables: Sequence[torch.Tensor], scheme: str) -> torch.Tensor:
    return x.new_empty(x.shape)


def rotate_channels_body(x: torch.Tensor, order: int, plane: torch.Tensor | None, inverse: bool) -> torch.Tensor:
    """Return x with channels rotated by Hadamard blocks of ``order``, plus ``plane`` [1, 1 or B, K, D, D] if any; ``inverse``: back."""
    return (unrotate if inverse else rotate)(x, order, None if plane is None else plane[0])


def _rotate_channels_meta(x: torch.Tensor, order: int, plane: torch.Tensor | None, inverse: bool) -> torch.Tensor:
    return x.new_empty(x.shape)


def _undo_rope_meta(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return x.new_empty(x.shape)


def _first_visible_meta(seen: torch.Tensor) -> torch.Tensor:
    return seen.new_empty(seen.shape[0], dtype=torch.int64)


def _expose(x: torch.Tensor) -> torch.Tensor:
    """Raise ForeignBackend, whatever ``x`` is: another backend compiled the graph, and would read or write a tensor without storage."""
    raise ForeignBackend(shape=tuple(x.shape))


def _expose_meta(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


LIBRARY.impl("expose", _expose, "CompositeExplicitAutograd")
LIBRARY.impl("expose", _expose_meta, "Meta")
LIBRARY.impl("calibrate", calibrate_body, "CompositeExplicitAutograd")
LIBRARY.impl("calibrate", _calibrate_meta, "Meta")
LIBRARY.impl("append", append_body, "CompositeExplicitAutograd")
LIBRARY.impl("read_back", read_back_body, "CompositeExplicitAutograd")
LIBRARY.impl("read_back", _read_back_meta, "Meta")
LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
LIBRARY.impl("append_window", append_window_body, "CompositeExplicitAutograd")
LIBRARY.impl("append_window", append_window_meta, "Meta")
LIBRARY.impl("unroll", unroll_body, "CompositeExplicitAutograd")
LIBRARY.impl("unroll", unroll_meta, "Meta")
LIBRARY.impl("gather", gather_body, "CompositeExplicitAutograd")
LIBRARY.impl("gather", gather_meta, "Meta")
LIBRARY.impl("attend_blocks", attend_blocks_body, "CompositeExplicitAutograd")
LIBRARY.impl("attend_blocks", attend_blocks_meta, "Meta")
LIBRARY.impl("append", _append_meta, "Meta")
LIBRARY.impl("keep_first", keep_first_body, "CompositeExplicitAutograd")
LIBRARY.impl("keep_first", keep_first_meta, "Meta")
LIBRARY.impl("rotate_channels", rotate_channels_body, "CompositeExplicitAutograd")
LIBRARY.impl("rotate_channels", _rotate_channels_meta, "Meta")
LIBRARY.impl("undo_rope", undo_rope_body, "CompositeExplicitAutograd")
LIBRARY.impl("undo_rope", _undo_rope_meta, "Meta")
LIBRARY.impl("first_visible", first_visible_body, "CompositeExplicitAutograd")
LIBRARY.impl("first_visible", _first_visible_meta, "Meta")
LIBRARY.impl("attend", _attend_meta, "Meta")

expose = torch.ops.kvcompile.expose.default
append = torch.ops.kvcompile.append.default
append_window = torch.ops.kvcompile.append_window.default
read_back = torch.ops.kvcompile.read_back.default
calibrate = torch.ops.kvcompile.calibrate.default
keep_first = torch.ops.kvcompile.keep_first.default
rotate_channels = torch.ops.kvcompile.rotate_channels.default
undo_rope = torch.ops.kvcompile.undo_rope.default
first_visible = torch.ops.kvcompile.first_visible.default
unroll = torch.ops.kvcompile.unroll.default
gather = torch.ops.kvcompile.gather.default
attend_blocks = torch.ops.kvcompile.attend_blocks.default
attend = torch.ops.kvcompile.attend.default
