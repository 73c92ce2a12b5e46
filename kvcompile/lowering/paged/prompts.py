"""Attention of requests with long prompts over blocks: their codes are decoded once into a scratch, over which flash attention runs.

The kernel of steps decodes a tile of codes again for every 16 or 64 rows of queries; from a hundred queries on that costs more than the
products. Requests with fewer queries than ``PromptPlan.least`` go through the kernel of steps, in the same call.

    places     a request with a long prompt gets the next of ``PromptPlan.places`` places, found by the device; no more can be long, since
               all requests together have as many queries as the call
    scratch    ``PromptPlan.room`` tokens a place: the bound of a request's length that the host knows. ``PromptPlan.heads`` kv heads at
               a time, so that it has at most ``MOST_SCRATCH`` bytes

Decoded tokens are rounded to the queries' dtype, as a dense cache holds them; the kernel of steps keeps them in float32. Nothing waits for
the device.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels: operands are pointers and constants in capitals.

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kvcompile.lowering.decode.site import Machine
from kvcompile.lowering.host.launches import Launcher
from kvcompile.lowering.paged import decode_rows
from kvcompile.lowering.paged.attend import attend_by_kernels
from kvcompile.lowering.paged.config import PagedAttend
from kvcompile.lowering.paged.merge import LOG_2E, request_of_query
from kvcompile.lowering.paged.splits import WIDTH
from kvcompile.lowering.prefill.decode_chunk import TOKENS
from kvcompile.types import Role

LEAST = 128
"""Queries of a request from which on its codes are decoded into the scratch."""
MOST_SCRATCH = 1 << 29
"""Most bytes of the scratch."""
WIDEST = 256
"""Most channels of a head that flash attention takes."""
OLDEST = (8, 0)
"""The first CUDA capability that has it."""
MERGED_HEADS = 32
"""Heads of a program that takes results over."""


@dataclasses.dataclass(frozen=True)
class PromptPlan:
    """How a call with long prompts is run: the fewest queries of a long one, places, tokens of a place, kv heads at a time, slots.

    ``least`` is 1 if the kernel of steps has nothing to do. ``most``: tokens that a request may have, at most ``room``.
    """

    least: int
    places: int
    room: int
    most: int
    heads: int
    slots: tuple[decode_rows.Decoded, decode_rows.Decoded]


@dataclasses.dataclass(frozen=True)
class PromptPlaces:
    """The requests at the places of a call's scratch, and the places of its requests, as tensors int32.

    By place: ``requests`` and ``lengths`` (0: nobody is there); ``firsts``, the first token that a window shows; ``wrong`` (1: of blocks
    that the pool does not have). By request: ``place`` (-1: it is not long); ``used``, its tokens in the scratch, and ``others``, its
    tokens for the kernel of steps, one of which is 0. By request and one more: ``queries`` and ``keys``, its first row of the queries and
    of the scratch.
    """

    requests: torch.Tensor
    lengths: torch.Tensor
    firsts: torch.Tensor
    wrong: torch.Tensor
    place: torch.Tensor
    used: torch.Tensor
    others: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor


@functools.lru_cache(maxsize=16)
def flashes(device: torch.device) -> bool:
    """Return whether torch's flash attention runs on the device."""
    built = torch.backends.cuda.is_flash_attention_available()
    return device.type == "cuda" and built and torch.cuda.get_device_capability(device) >= OLDEST


Flash = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PromptPlaces, PagedAttend, PromptPlan], tuple[torch.Tensor, torch.Tensor]]
"""Attention of q [T, H, D] over the scratch; gives results [T, H, Dv] and log-sums [H, T], of requests at a place alone."""


def plan_of(given: PagedAttend, packed: bool) -> PromptPlan | None:
    """Return how the call is run, None if all of it goes through the kernel of steps; depends on sizes alone.

    ``packed``: codes may be unpacked by inline PTX.
    """
    dtype, dim = given.q.dtype, given.q.shape[2]
    fits = dtype in {torch.float16, torch.bfloat16} and dim == given.value_dim and dim % 8 == 0 and dim <= WIDEST
    if given.max_queries < LEAST or given.q.shape[0] < LEAST or not fits or given.softcap:
        return None
    key = decode_rows.decoded_slot(given.key_scheme, Role.KEY, dim, given.keys[0].dtype, dtype, packed)
    value = decode_rows.decoded_slot(given.value_scheme, Role.VALUE, dim, given.values[0].dtype, dtype, packed)
    if key is None or value is None:
        return None
    capacity = given.block_table.shape[1] * given.page
    most = min(given.max_length, capacity) if given.max_length else capacity
    room = -(-most // TOKENS) * TOKENS
    (tokens, *_), requests = given.q.shape, given.block_table.shape[0]
    head = room * 2 * dim * dtype.itemsize
    # If those beside the longest have enough queries for most to be long, all are taken for long, and the kernel of steps need not run.
    whole = 2 * (tokens - given.max_queries) >= LEAST * (requests - 1) and requests * head <= MOST_SCRATCH
    least = 1 if whole else LEAST
    while (places := min(requests, tokens // least)) * head > MOST_SCRATCH:
        least *= 2
        if least > min(given.max_queries, tokens):
            return None
    return PromptPlan(least, places, room, most, min(given.kv_heads, MOST_SCRATCH // (places * head)), (key, value))


@triton.jit(do_not_specialize=["requests", "places", "ROOM", "MOST", "LEAST", "WINDOW"])
def place_requests(
    LENGTHS, QUERY_START, REQUESTS, PLACE_LENGTHS, FIRSTS, PLACE, USED, OTHERS, QUERIES, KEYS, requests, places, ROOM, MOST, LEAST, WINDOW,
):
    """Write ``PromptPlaces``; one program. A request with LEAST queries or more is long."""
    seen = 0
    i = tl.arange(0, WIDTH)
    for at in tl.range(0, places, WIDTH, num_stages=1):
        tl.store(REQUESTS + at + i, -1, mask=at + i < places)
        tl.store(PLACE_LENGTHS + at + i, 0, mask=at + i < places)
    tl.debug_barrier()
    for at in tl.range(0, requests, WIDTH, num_stages=1):
        row = at + i
        there = row < requests
        first = tl.load(QUERY_START + row, mask=there, other=0).to(tl.int32)
        count = tl.load(QUERY_START + row + 1, mask=there, other=0).to(tl.int32) - first
        length = tl.load(LENGTHS + row, mask=there, other=0).to(tl.int32)
        long = there & (count >= LEAST)
        place = tl.cumsum(long.to(tl.int32), 0) - 1 + seen
        # More than queries allow only where rows overlap: those have no place, and give NaN beyond the queries of the kernel of steps.
        long &= place < places
        seen += tl.sum(long.to(tl.int32), 0)
        held = tl.where(long, tl.maximum(tl.minimum(length, MOST), 0), 0)
        begin = tl.where(WINDOW > 0, tl.maximum(length - count - (WINDOW - 1), 0), 0)
        tl.store(REQUESTS + place, row, mask=long)
        tl.store(PLACE_LENGTHS + place, held, mask=long)
        tl.store(FIRSTS + place, begin, mask=long)
        tl.store(PLACE + row, tl.where(long, place, -1), mask=there)
        tl.store(USED + row, held, mask=there)
        tl.store(OTHERS + row, tl.where(long, 0, length), mask=there)
        tl.store(QUERIES + row, first, mask=there)
        tl.store(KEYS + row, tl.where(long, place * ROOM, 0), mask=there)
    tl.store(QUERIES + requests, tl.load(QUERY_START + requests).to(tl.int32))
    tl.store(KEYS + requests, places * ROOM)


@triton.jit(do_not_specialize=["MAX_QUERIES", "MOST", "requests", "first_head"])
def take_prompts(
    FROM, LOGS, SINKS, LENGTHS, QUERY_START, PLACE, WRONG, OUT, LSE, from_t, from_h, logs_h, MAX_QUERIES, MOST, requests, first_head, some,
    HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr,
):
    """Take the results FROM [T, some, Dv] and LOGS [some, T] of queries of long prompts into OUT [T, HEADS, Dv] and LSE [T, HEADS].

    Grid: queries, blocks of ROWS query heads of FROM, which are those of OUT from ``first_head`` on. Sinks join here. Writes NaN for a
    query beyond MAX_QUERIES of its request, and for requests that are longer than MOST or have blocks that the pool does not have.
    """
    query = tl.program_id(0)
    request = request_of_query(query, QUERY_START, requests)
    there = (request < requests) & (query >= tl.load(QUERY_START))
    place = tl.load(PLACE + request, mask=there, other=-1)
    if place < 0:
        return
    first = tl.load(QUERY_START + request).to(tl.int32)
    at, count = query - first, tl.load(QUERY_START + request + 1).to(tl.int32) - first
    length = tl.load(LENGTHS + request).to(tl.int32)
    spoiled = (at >= MAX_QUERIES) | (length > MOST) | (tl.load(WRONG + place) != 0)
    head, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (head < some)[:, None] & (column < DIM)[None, :]
    log = tl.load(LOGS + head.to(tl.int64) * logs_h + query, mask=head < some, other=0.0)
    # Flash attention gives inf for a query that sees no token, and for one whose scores are NaN, with zeros for a result.
    sees = length - count + at >= 0
    log = tl.where(sees, tl.where(log == float("inf"), float("nan"), log), float("-inf"))
    share = tl.where(sees, tl.where(log == log, 1.0, log), 0.0)
    if HAS_SINKS:
        sink = tl.load(SINKS + first_head + head, mask=head < some, other=0.0).to(tl.float32)
        top = tl.maximum(sink, log)
        safe = tl.where(top == float("-inf"), 0.0, top)
        own = tl.exp2((log - safe) * LOG_2E)
        whole = own + tl.exp2((sink - safe) * LOG_2E)
        share = tl.where(sees, own / tl.where(whole == 0.0, 1.0, whole), 0.0)
        log = tl.where(whole == 0.0, float("-inf"), safe + tl.log2(whole) / LOG_2E)
    given = tl.load(FROM + query.to(tl.int64) * from_t + (head * from_h)[:, None] + column[None, :], mask=inside, other=0.0)
    result = tl.where((share == 0.0)[:, None], 0.0, given.to(tl.float32) * share[:, None])
    to = query.to(tl.int64) * HEADS + first_head + head
    tl.store(
        OUT + (to * DIM)[:, None] + column[None, :], tl.where(spoiled, float("nan"), result).to(OUT.dtype.element_ty), mask=inside
    )
    tl.store(LSE + to, tl.where(spoiled, float("nan"), log), mask=head < some)


def flash(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: PromptPlaces, given: PagedAttend, plan: PromptPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results [T, H, Dv] and log-sums [H, T] of q [T, H, D] over scratches [rows, K, D], by torch's flash attention."""
    window = given.window - 1 if given.window else None
    out, logs, *_ = torch.ops.aten._flash_attention_forward(
        q, keys, values, places.queries, places.keys, given.max_queries, plan.room, 0.0, True, False, scale=given.scale,
        window_size_left=window, window_size_right=0 if given.window else None, seqused_k=places.used,
    )
    return out, logs


def placed(given: PagedAttend, plan: PromptPlan, launcher: Launcher) -> PromptPlaces:
    """Assign each long prompt of the call a place of the scratch, by a kernel on the device; return the requests and their places."""
    rows, device = given.block_table.shape[0], given.q.device

    def numbers(count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, device=device)

    made = PromptPlaces(
        requests=numbers(plan.places), lengths=numbers(plan.places), firsts=numbers(plan.places),
        wrong=torch.zeros(plan.places, dtype=torch.int32, device=device), place=numbers(rows), used=numbers(rows), others=numbers(rows),
        queries=numbers(rows + 1), keys=numbers(rows + 1),
    )
    launcher.kernel(
        place_requests, (1,), given.lengths, given.query_start, made.requests, made.lengths, made.firsts, made.place, made.used,
        made.others, made.queries, made.keys, rows, plan.places, plan.room, plan.most, plan.least, given.window, warps=4,
    )
    return made


def attend_with_prompts(
    given: PagedAttend, plan: PromptPlan, machine: Machine, launcher: Launcher, flashed: Flash = flash
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results [T, H, Dv] and log-sums [T, H]: long prompts by ``flashed`` over their scratch, others by the kernel of steps."""
    places = placed(given, plan, launcher)
    if plan.least == 1:
        tokens, heads, _ = given.q.shape
        # Queries in no row see nothing.
        lse = given.q.new_full((tokens, heads), float("-inf"), dtype=torch.float32)
        results = given.q.new_zeros(tokens, heads, given.value_dim), lse
    else:
        # Those of long prompts are written over, whatever they are.
        others = dataclasses.replace(given, lengths=places.others, max_queries=plan.least - 1)
        results = attend_by_kernels(others, machine, launcher)
    take_over(given, plan, places, results, launcher, flashed)
    return results


def _loadable(q: torch.Tensor) -> bool:
    """Return whether flash attention takes queries as they lie: contiguous channels, rows and heads at multiples of 16 bytes."""
    return q.stride(2) == 1 and not q.data_ptr() % 16 and all(step * q.itemsize % 16 == 0 for step in q.stride()[:2])


def take_over(
    given: PagedAttend, plan: PromptPlan, places: PromptPlaces, results: tuple[torch.Tensor, torch.Tensor], launcher: Launcher,
    flashed: Flash,
) -> None:
    """Write results and log-sums of all queries of long prompts into ``results``, [T, H, Dv] and [T, H]; others stay as they are."""
    out, lse = results
    queries = given.q if _loadable(given.q) else given.q.contiguous()
    (tokens, heads, dim), group, sinks = given.q.shape, given.q.shape[1] // given.kv_heads, given.sinks
    planes = ([*given.keys, *given.key_tables], [*given.values, *given.value_tables])
    read, steps = decode_rows.operands_of(plan.slots, planes)
    kernel = decode_rows.kernel_of(plan.slots, given.q.dtype, given.page)
    for first in range(0, given.kv_heads, plan.heads):
        some = min(plan.heads, given.kv_heads - first)
        keys, values = given.q.new_empty(2, plan.places * plan.room, some, dim).unbind()
        numbers = (given.block_table.stride(0), given.keys[0].shape[0], plan.room, first, some)
        launcher.kernel(
            kernel, (plan.places * (plan.room // TOKENS), some, 2), *read, given.block_table, places.lengths, places.firsts,
            places.requests, places.wrong, keys, values, *steps, *numbers, warps=decode_rows.WARPS,
        )
        q = queries[:, first * group : (first + some) * group]
        attended, logs = flashed(q, keys, values, places, given, plan)
        rows = min(MERGED_HEADS, triton.next_power_of_2(some * group))
        launcher.kernel(
            take_prompts, (tokens, -(-some * group // rows)), attended, logs, lse if sinks is None else sinks.contiguous(), given.lengths,
            given.query_start, places.place, places.wrong, out, lse, attended.stride(0), attended.stride(1), logs.stride(0),
            given.max_queries, plan.most, given.block_table.shape[0], first * group, some * group, warps=4, HEADS=heads, DIM=dim,
            COLUMNS=triton.next_power_of_2(dim), ROWS=rows, HAS_SINKS=int(sinks is not None),
        )
