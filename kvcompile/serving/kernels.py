"""``paged_append`` and ``paged_attend`` on CUDA: by the kernels of ``lowering.paged``, or by the eager bodies where no kernel fits.

    append     tokens are encoded in torch if no append kernel supports their head dim
    attend     runs in torch if a page is not a multiple of 16 tokens, or the pool does not begin at a multiple of 16 bytes
    prompts    a row with 128 queries or more is decoded into a scratch, over which torch runs flash attention; not in float32, with a
               softcap, or with heads above 256 channels
    rotations  of tokens before they are encoded, of queries, and of results: a kernel of their own

Nothing here waits for the device. ``runs`` returns which code runs each operation, and the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvcompile.lowering.host.launches import Direct, Launcher
from kvcompile.schemes.rotation import Rotation, rotate
from kvcompile.serving import operations
from kvcompile.serving.block_layout import BlockLayout, layout_of
from kvcompile.types import Role

if TYPE_CHECKING:
    from kvcompile.lowering.decode.site import Machine
    from kvcompile.lowering.paged.append import PagedAppend
    from kvcompile.lowering.paged.config import PagedAttend


def turned(x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Return tokens [T, H, D] rotated (or rotated back, by the same matrix); unchanged if ``rotation`` is None."""
    if rotation is None:
        return x
    if not x.is_cuda:
        return rotate(x.transpose(0, 1).unsqueeze(0), rotation.order, None)[0].transpose(0, 1).contiguous()
    from kvcompile.lowering.paged.rotate import rotated

    return rotated(x, rotation.order, Direct(True))


def to_append(
    made: BlockLayout, role: Role, x: torch.Tensor, planes: Sequence[torch.Tensor], slots: torch.Tensor, tables: Sequence[torch.Tensor]
) -> PagedAppend:
    """Return the operands of the append kernels for keys or values [T, K, D]; tokens are rotated if the scheme stores rotated channels."""
    from kvcompile.lowering.paged.append import PagedAppend

    scheme, slot = made.of_role(role)
    x, constant = turned(x, scheme.rotation(slot)), [plane for plane in scheme.layout(slot).planes if plane.constant]
    encoding = [table for plane, table in zip(constant, tables, strict=True) if plane.encoding]
    return PagedAppend(x, planes, slots, encoding, scheme.spec(), slot)


def to_attend(
    made: BlockLayout, q: torch.Tensor, pool: torch.Tensor, tables: Sequence[torch.Tensor], max_queries: int,
    key_tables: Sequence[torch.Tensor], value_tables: Sequence[torch.Tensor], numbers: tuple[float, float, int], sinks: torch.Tensor | None,
    max_length: int = 0,
) -> PagedAttend:
    """Return the operands of the attention kernels; queries [T, H, D] are rotated if the pool stores rotated keys.

    ``tables``: block_table, lengths, query_start. ``numbers``: scale, softcap, window.
    """
    from kvcompile.lowering.paged.config import PagedAttend

    q = turned(q, made.keys.rotation(made.key_slot))
    keys, values = made.planes(pool)
    block_table, lengths, query_start = (table.contiguous() for table in tables)
    return PagedAttend(
        q, keys, key_tables, values, value_tables, block_table, lengths, query_start, max_queries, made.keys.spec(), made.values.spec(),
        made.value_dim, *numbers, sinks, max_length,
    )


def attended(made: BlockLayout, given: PagedAttend, machine: Machine, launcher: Launcher) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention's results [T, H, Dv] by kernels, rotated back if the pool stores rotated values, and log-sums [T, H]."""
    from kvcompile.lowering.paged.attend import attend_by_kernels
    from kvcompile.lowering.paged.prompts import attend_with_prompts, flashes, plan_of

    plan = plan_of(given, launcher.cuda) if flashes(given.q.device) else None
    found = attend_by_kernels(given, machine, launcher) if plan is None else attend_with_prompts(given, plan, machine, launcher)
    out, lse = found
    return turned(out, made.values.rotation(made.value_slot)), lse


def append_on_cuda(
    k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, layout: str, key_tables: list[torch.Tensor],
    value_tables: list[torch.Tensor],
) -> None:
    """Run ``kvcompile::paged_append`` on CUDA: by kernels, and by the eager body for keys or values that no kernel encodes.

    Raises BadBlock for tensors that do not fit the layout.
    """
    from kvcompile.lowering.paged.append import Checked

    made = layout_of(layout)
    made.require_pool(pool)
    operations.require_tokens(made, k, v, slots)
    if len(slots):
        with torch.cuda.device(pool.device):
            appended(made, (k, v), pool, slots, (key_tables, value_tables), Checked(True))


def appended(
    made: BlockLayout, tokens: tuple[torch.Tensor, torch.Tensor], pool: torch.Tensor, slots: torch.Tensor,
    tables: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]], launcher: Launcher,
) -> None:
    """Write keys and values [T, K, D], T above 0, into the pool: by kernels where ``refusal`` finds no gap, else by ``write_codes``."""
    from kvcompile.lowering.paged.append import append_by_kernels, refusal

    slots, both = slots.contiguous(), zip((Role.KEY, Role.VALUE), tokens, made.planes(pool), tables, strict=True)
    by_kernels = []
    for role, x, planes, constant in both:
        given = to_append(made, role, x, planes, slots, constant)
        if refusal(given) is None:
            by_kernels.append(given)
        else:
            operations.write_codes(made, slots, x, role, planes, constant)
    append_by_kernels(by_kernels, launcher)


def attend_on_cuda(
    q: torch.Tensor, pool: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, query_start: torch.Tensor, max_queries: int,
    layout: str, key_tables: list[torch.Tensor], value_tables: list[torch.Tensor], scale: float, softcap: float = 0.0, window: int = 0,
    sinks: torch.Tensor | None = None, max_length: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``kvcompile::paged_attend`` on CUDA: by kernels, or by the eager body if ``refusal`` finds a gap; return (results, log-sums).

    Raises BadBlock for tensors that do not fit the layout.
    """
    from kvcompile.lowering.paged.config import machine_of, refusal

    made = layout_of(layout)
    made.require_pool(pool)
    operations.require_rows(made, q, block_table, lengths, query_start)
    tables, numbers = (block_table, lengths, query_start), (scale, softcap, window)
    given = to_attend(made, q, pool, tables, max_queries, key_tables, value_tables, numbers, sinks, max_length)
    if refusal(given) is not None:
        return operations.paged_attend_body(
            q, pool, *tables, max_queries, layout, key_tables, value_tables, scale, softcap, window, sinks
        )
    with torch.cuda.device(pool.device):
        return attended(made, given, machine_of(pool.device), Direct(True))


def runs(made: BlockLayout, pool: torch.Tensor) -> dict[str, str]:
    """Return, by operation on a pool on CUDA, the code that runs it: "a kernel", or "tensor operations" with the reason.

    The operations are "append keys", "append values" and "attend".
    """
    from kvcompile.lowering.paged.append import refusal as not_appended
    from kvcompile.lowering.paged.config import refusal as not_attended

    found, tables, one = {}, made.tables(pool.device), torch.zeros(2, dtype=torch.int32, device=pool.device)
    for role, planes, constant in zip((Role.KEY, Role.VALUE), made.planes(pool), tables, strict=True):
        x = torch.empty(1, made.heads, made.of_role(role)[1].head_dim, dtype=made.dtype, device=pool.device)
        found[f"append {role.value}s"] = not_appended(to_append(made, role, x, planes, one[:1], constant))
    q = torch.empty(1, made.heads, made.head_dim, dtype=made.dtype, device=pool.device)
    found["attend"] = not_attended(to_attend(made, q, pool, (one[:1, None], one[:1], one), 1, tables[0], tables[1], (1.0, 0.0, 0), None))
    return {what: "a kernel" if reason is None else f"tensor operations: {reason}" for what, reason in found.items()}


operations.LIBRARY.impl("paged_append", append_on_cuda, "CUDA")
operations.LIBRARY.impl("paged_attend", attend_on_cuda, "CUDA")
