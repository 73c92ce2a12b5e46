"""The operations on a pool of blocks, with their eager bodies: append encodes tokens into a pool, attend reads rows of its blocks.

``kvcompile::paged_append``  encodes new tokens and writes codes and scales into slots of a pool.
``kvcompile::paged_attend``  attends over the codes of rows, whose blocks may lie anywhere in the pool.

Both are made of ``encode`` and of ``kvcompile::attend``'s body: there is one definition of the numerics. Neither waits for a GPU. On CUDA,
``kernels`` runs kernels in their place.

Operands
    k, v         new keys [T, K, D] and values [T, K, Dv], in the model's dtype
    q            queries [T, H, D], H = G * K; query head h reads kv head h // G
    pool         uint8 [blocks, K, bytes], by ``BlockLayout``
    slots        int [T]: block * page + row of each token. Negative: the token is skipped. Two tokens of a call may not share a slot
    block_table  int [R, N]: the blocks of each row in order; entries behind a row's length are not looked at
    lengths      int [R]: tokens of each row that are in the pool, its queries' own tokens included; 0 for an empty row
    query_start  int [R + 1]: row r has the queries query_start[r] to query_start[r + 1] - 1, which are its newest tokens; queries outside
                 of all rows give zeros, as padding of a captured graph
    max_queries  the most queries of a row. If a row has more, the result for its queries beyond is NaN
    max_length   the most tokens of a row, which kernels allocate for; 0: as many as the table's blocks hold. If a row has more, the results
                 for its queries may be NaN
    window       each query sees this many tokens up to its own; 0: all
    softcap, sinks, scale  as in ``kvcompile::attend``
    layout       ``BlockLayout.text``
    key_tables, value_tables  constant planes of the schemes, ``block_layout.constant_planes``
    result       [T, H, Dv] in q's dtype, zeros where a query sees no token; and the log-sum-exp of its scores, float32 [T, H], natural,
                 sinks included, -inf where a query sees no token
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcompile.errors import BadBlock
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import attend_body
from kvcompile.schemes import Scheme
from kvcompile.schemes.rotation import rotate, unrotate
from kvcompile.serving.block_layout import BlockLayout, grown, layout_of
from kvcompile.types import Role, SlotSpec

LIBRARY = torch.library.Library("kvcompile", "FRAGMENT")
LIBRARY.define(
    "paged_append(Tensor k, Tensor v, Tensor(a!) pool, Tensor slots, str layout, Tensor[] key_tables, Tensor[] value_tables) -> ()"
)
LIBRARY.define(
    "paged_attend(Tensor q, Tensor pool, Tensor block_table, Tensor lengths, Tensor query_start, SymInt max_queries, str layout,"
    " Tensor[] key_tables, Tensor[] value_tables, float scale, float softcap=0.0, int window=0, Tensor? sinks=None,"
    " SymInt max_length=0) -> (Tensor, Tensor)"
)


def paged_append_body(
    k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, layout: str, key_tables: list[torch.Tensor],
    value_tables: list[torch.Tensor],
) -> None:
    """Encode k [T, K, D] and v [T, K, Dv] and write codes and scales into ``slots`` [T] of the pool; negative slots are skipped.

    Raises BadBlock for tensors that do not fit the layout.
    """
    made = layout_of(layout)
    made.require_pool(pool)
    require_tokens(made, k, v, slots)
    keys, values = made.planes(pool)
    write_codes(made, slots, k, Role.KEY, keys, key_tables)
    write_codes(made, slots, v, Role.VALUE, values, value_tables)


def write_codes(
    made: BlockLayout, slots: torch.Tensor, x: torch.Tensor, role: Role, planes: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]
) -> None:
    """Encode keys or values [T, K, D]; write codes and scales into ``slots`` [T] of ``planes`` [blocks, K, page, width], in place.

    ``made``: the layout; ``tables``: the scheme's constant planes. Negative slots are skipped.
    """
    if not len(slots):
        return
    scheme, slot = made.of_role(role)
    # A skipped token repeats the write of the first written token; if all are skipped, each writes slot 0's own codes back.
    written = slots >= 0
    some = written.any()
    source = torch.where(written, torch.arange(len(slots), device=slots.device), written.to(torch.int32).argmax())
    places = slots[source].clamp(min=0).to(torch.int64)
    block, row = places // made.page, places % made.page
    for plane, codes in zip(planes, encoded(scheme, slot, x, tables), strict=True):
        # Advanced indices around a slice come first in the result: [T, K, width].
        plane[block, :, row] = torch.where(some, codes[source], plane[block, :, row])


def encoded(scheme: Scheme, slot: SlotSpec, x_TKD: torch.Tensor, tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tokens [T, K, D] encoded, one tensor [T, K, width] for each plane that grows, such as codes and scales.

    ``tables``: the scheme's constant planes.
    """
    constant = [plane for plane in scheme.layout(slot).planes if plane.constant]
    given = [table for plane, table in zip(constant, tables, strict=True) if plane.encoding]
    x_BKSD, rotation = x_TKD.transpose(0, 1).unsqueeze(0), scheme.rotation(slot)
    if rotation is not None:
        x_BKSD = rotate(x_BKSD, rotation.order, None)
    planes = scheme.encode(x_BKSD, *given)
    return [plane[0].transpose(0, 1).to(spec.dtype) for plane, spec in zip(planes, grown(scheme, slot), strict=True)]


def paged_attend_body(
    q: torch.Tensor, pool: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, query_start: torch.Tensor, max_queries: int,
    layout: str, key_tables: list[torch.Tensor], value_tables: list[torch.Tensor], scale: float, softcap: float = 0.0, window: int = 0,
    sinks: torch.Tensor | None = None, max_length: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (results [T, H, Dv] in q's dtype, log-sums float32 [T, H]) of attention of queries q [T, H, D] over blocks of ``pool``.

    Row r has the queries ``query_start[r]`` to ``query_start[r + 1]`` - 1 and reads the tokens before ``lengths[r]`` in the blocks
    ``block_table[r]``. ``layout``: ``BlockLayout.text``; ``key_tables``, ``value_tables``: the schemes' constant planes. The module
    describes all operands. Raises BadBlock for tensors that do not fit the layout.
    """
    made = layout_of(layout)
    made.require_pool(pool)
    require_rows(made, q, block_table, lengths, query_start)
    out, lse = paged_attend_meta(q, pool, block_table, lengths, query_start, max_queries, layout, key_tables, value_tables, scale)
    if not q.shape[0] or not block_table.shape[0]:
        return out.zero_(), lse.fill_(float("-inf"))
    starts, lengths = query_start.to(torch.int64), lengths.to(torch.int64)
    counts = starts[1:] - starts[:-1]
    at = torch.arange(max_queries, device=q.device)
    # [R, S]: the position of each row's queries, -1 for none.
    hi = torch.where(at < counts[:, None], (lengths - counts)[:, None] + at, -1)
    lo = (hi - window + 1).clamp(min=0) if window else None
    padded = q[(starts[:-1, None] + at).clamp(0, q.shape[0] - 1)].transpose(1, 2)
    key_rotation, value_rotation = made.keys.rotation(made.key_slot), made.values.rotation(made.value_slot)
    if key_rotation is not None:
        padded = rotate(padded, key_rotation.order, None)
    used = torch.arange(block_table.shape[1], device=q.device) * made.page < lengths[:, None]
    # A negative block in use must not count from the pool's end: it becomes one that the index refuses.
    blocks = torch.where(used, torch.where(block_table < 0, pool.shape[0], block_table), 0).t().to(torch.int64)
    keys, values = ([plane[blocks] for plane in planes] for planes in made.planes(pool))
    result = attend_body(AttendOperands(
        padded, [*keys, *key_tables], [*values, *value_tables], hi, lo, None, None, sinks, made.keys.spec(), made.values.spec(), scale,
        softcap, made.value_dim, log_sums=True,
    ))
    sums, logs = result[..., :-1].to(q.dtype), result[..., -1]
    if value_rotation is not None:
        sums = unrotate(sums, value_rotation.order, None)
    return _unpadded(out, sums.transpose(1, 2), starts), _unpadded(lse, logs.transpose(1, 2), starts, float("-inf"))


def _unpadded(out: torch.Tensor, padded_RS: torch.Tensor, starts: torch.Tensor, absent: float = 0.0) -> torch.Tensor:
    """Return the results [T, ...] of all queries from padded rows [R, S, ...]; ``absent`` for queries of no row.

    A query beyond the S of its row gets NaN.
    """
    token = torch.arange(out.shape[0], device=out.device)
    row = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    inside = (row < padded_RS.shape[0]) & (token >= starts[0])
    row = row.clamp(max=padded_RS.shape[0] - 1)
    at = token - starts[row]
    found = padded_RS[row, at.clamp(0, padded_RS.shape[1] - 1)].to(out.dtype)
    shape = (-1, *[1] * (out.dim() - 1))
    found = torch.where((at < padded_RS.shape[1]).view(shape), found, float("nan"))
    return torch.where(inside.view(shape), found, absent)


def paged_append_meta(
    k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, layout: str, key_tables: list[torch.Tensor],
    value_tables: list[torch.Tensor],
) -> None:
    """Return nothing: the pool is written in place."""
    return


def paged_attend_meta(
    q: torch.Tensor, pool: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, query_start: torch.Tensor, max_queries: int,
    layout: str, key_tables: list[torch.Tensor], value_tables: list[torch.Tensor], scale: float, softcap: float = 0.0, window: int = 0,
    sinks: torch.Tensor | None = None, max_length: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty tensors of the results' shapes: [T, H, Dv] in q's dtype, [T, H] float32."""
    return q.new_empty(q.shape[0], q.shape[1], layout_of(layout).value_dim), q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)


def require_tokens(layout: BlockLayout, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Raise BadBlock unless new tokens have the layout's sizes and dtype, and one slot each."""
    for what, x, dim in (("k", k, layout.head_dim), ("v", v, layout.value_dim)):
        if x.dtype != layout.dtype or tuple(x.shape) != (slots.shape[0], layout.heads, dim):
            expected = f"{layout.dtype} [{slots.shape[0]}, {layout.heads}, {dim}], a token a slot"
            raise BadBlock(what=what, expected=expected, found=f"{x.dtype} {list(x.shape)}")
    _require_integers("slots", slots, 1)


def require_rows(layout: BlockLayout, q: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, query_start: torch.Tensor) -> None:
    """Raise BadBlock unless queries have the layout's sizes and dtype, and the tables have one row for each request."""
    if q.dtype != layout.dtype or q.dim() != 3 or q.shape[1] % layout.heads or q.shape[2] != layout.head_dim:
        expected = f"{layout.dtype} [tokens, a multiple of {layout.heads}, {layout.head_dim}]"
        raise BadBlock(what="q", expected=expected, found=f"{q.dtype} {list(q.shape)}")
    for what, tensor, dims in (("block_table", table, 2), ("lengths", lengths, 1), ("query_start", query_start, 1)):
        _require_integers(what, tensor, dims)
    if lengths.shape[0] != table.shape[0] or query_start.shape[0] != table.shape[0] + 1:
        raise BadBlock(
            what="lengths and query_start", expected=f"[{table.shape[0]}] and [{table.shape[0] + 1}], as block_table has rows",
            found=f"{list(lengths.shape)} and {list(query_start.shape)}",
        )


def _require_integers(what: str, tensor: torch.Tensor, dims: int) -> None:
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != dims:
        raise BadBlock(what=what, expected=f"int32 or int64 with {dims} dims", found=f"{tensor.dtype} {list(tensor.shape)}")


LIBRARY.impl("paged_append", paged_append_body, "CompositeExplicitAutograd")
LIBRARY.impl("paged_append", paged_append_meta, "Meta")
LIBRARY.impl("paged_attend", paged_attend_body, "CompositeExplicitAutograd")
LIBRARY.impl("paged_attend", paged_attend_meta, "Meta")

paged_append = torch.ops.kvcompile.paged_append.default
paged_attend = torch.ops.kvcompile.paged_attend.default
