"""``kvcompile::paged_attend`` on CUDA: one kernel attends over items of tokens, another merges the items; neither waits for the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton

from kvcompile.lowering.codegen.template_files import joined
from kvcompile.lowering.decode import template as decode
from kvcompile.lowering.decode.config import plans
from kvcompile.lowering.decode.offline import KERNEL, KernelSignature, Operand, load_module, template
from kvcompile.lowering.decode.site import Machine
from kvcompile.lowering.host.launches import Launcher
from kvcompile.lowering.paged.config import Cut, PagedAttend, PagedConfig, cut_for, paged_config, query_rows
from kvcompile.lowering.paged.merge import merge_items
from kvcompile.lowering.paged.residency import Multiprocessor, resident

SOURCE = decode.OPENING + joined(__file__, "program") + decode.SUMS
NAMED = ("BLOCKS", "MAX_QUERIES", "PAGES", "REQUESTS", "TABLE_ROW", "TARGET")
"""Arguments that are numbers; a new value of one does not compile the kernel again."""
FEW_COLUMNS = 32
"""Channels per program of the merge, if there are so few queries that programs of whole heads would leave multiprocessors idle."""


class PagedSignature(KernelSignature):
    """The signature of the paged kernel, as the template queries it; its module imports the functions that divide tokens into items."""

    def def_kernel(self, *names: str) -> str:
        """Return the module's text down to the function's body."""
        imported = "from kvcompile.lowering.paged.splits import first_tile, request_of, tile_of_queries, tiles_of_an_item\n\n\n@triton.jit"
        text = super().def_kernel(*names).replace("\n\n\n@triton.jit", f"\n{imported}(do_not_specialize={list(self.named)})", 1)
        return text


def operands_of(given: PagedAttend) -> dict[str, torch.Tensor]:
    """Return the tensors that the kernel may read, by the template's names."""
    return {
        "Q": given.q, "LENGTHS": given.lengths, "QUERY_START": given.query_start, "BLOCK_TABLE": given.block_table, **given.planes,
    }


def sizes_of(name: str, tensor: torch.Tensor) -> Operand:
    """Return an operand's sizes, strides and dtype; sizes that differ between calls are names, which become run-time arguments."""
    if name == "Q":
        strides = (0, tensor.stride(1), tensor.stride(0), tensor.stride(2))
        return Operand((1, tensor.shape[1], "MAX_QUERIES", tensor.shape[2]), strides, tensor.dtype)
    if name == "BLOCK_TABLE":
        return Operand(("REQUESTS", "PAGES"), ("TABLE_ROW", 1), tensor.dtype)
    if name in {"LENGTHS", "QUERY_START"}:
        return Operand(("REQUESTS",), (1,), tensor.dtype)
    if name.endswith(("_TABLE", "_STATIC")):
        return Operand.of(tensor)
    return Operand(("BLOCKS", 1, *tensor.shape[2:]), (tensor.stride(0), 0, *tensor.stride()[2:]), tensor.dtype)


def paged_source(config: PagedConfig, operands: Mapping[str, Operand]) -> str:
    """Return the source text of a complete module with the kernel that ``config`` describes."""
    made = PagedSignature(operands, NAMED, config.options())

    def store_output(indices: Sequence[str], value: str, mask: str, indent_width: int = 4, val_shape: object = None) -> str:
        del indent_width, val_shape
        _, _, head, query, channel = indices
        return f"tl.store(OUT + out_at + {query} * OUT_ROW + {head} * {config.value_dim + 2} + {channel}, {value}, mask={mask})"

    text = template(SOURCE).render(
        plans=plans, def_kernel=made.def_kernel, size=made.size, stride=made.stride, store_output=store_output, **config.options(),
    )
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"


@functools.lru_cache(maxsize=256)
def kernel_of(config: PagedConfig, operands: tuple[tuple[str, Operand], ...]) -> Any:
    """Return the Triton function of the kernel that ``config`` describes; cached."""
    return getattr(load_module(paged_source(config, dict(operands)), "paged"), KERNEL)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kernel chosen for a call: its configuration and its Triton function."""

    config: PagedConfig
    kernel: Any


_RESIDENT: dict[Any, int] = {}
"""Number of programs that a multiprocessor runs at a time, by kernel, device and alignment of its operands."""
_CHOSEN: dict[Any, Choice] = {}
"""Chosen kernels, by sizes, strides and numbers of the call: a choice takes longer than a launch."""


def chosen(given: PagedAttend, machine: Machine, packed: bool) -> Choice:
    """Return the kernel for the operands ``given`` of a call, on the device ``machine``; ``packed``: by inline PTX.

    Cached by sizes, strides and numbers that do not change from step to step.
    """
    tensors = operands_of(given)
    known = tuple((name, sizes_of(name, tensor)) for name, tensor in tensors.items())
    config_key = (
        known, given.key_scheme, given.value_scheme, given.scale, given.softcap, given.window, given.value_dim, machine, packed,
        given.max_queries == 1, query_rows(given, given.q.shape[1] // given.kv_heads),
    )
    if config_key not in _CHOSEN:
        config = paged_config(given, machine, packed)
        operands = tuple((name, dict(known)[name]) for name in config.operands)
        _CHOSEN[config_key] = Choice(config, kernel_of(config, operands))
    return _CHOSEN[config_key]


@dataclasses.dataclass(frozen=True)
class ItemMerge:
    """The work of one program of the merge: how many channels it writes, and how many items it reads at a time."""

    columns: int
    items: int


def merge_for(cut: Cut, pairs: int, requests: int, config: PagedConfig, machine: Machine) -> ItemMerge:
    """Return the sizes of the merge's programs for ``pairs`` pairs of a query and a head.

    A program reads, at a time, twice as many items as a request of average length has, but at least 4 and at most 64.
    """
    items = min(64, max(4, triton.next_power_of_2(-(-2 * cut.target // requests))))
    columns = FEW_COLUMNS if pairs < 4 * machine.multiprocessors else 128
    return ItemMerge(min(columns, triton.next_power_of_2(config.value_dim)), items)


def resident_of(choice: Choice, operands: Sequence[torch.Tensor], named: Mapping[str, int]) -> int:
    """Return how many programs of the kernel run on one multiprocessor at a time; compiles the kernel at the first call."""
    device, tile = operands[0].device, choice.config.tile
    key = (choice.kernel, device, tuple(operand.data_ptr() % 16 for operand in operands))
    if key not in _RESIDENT:
        parts = torch.empty(16, dtype=torch.float32, device=device)
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        _RESIDENT[key] = resident(choice.kernel, (*operands, parts, *(named[name] for name in NAMED)), options, Multiprocessor.of(device))
    return _RESIDENT[key]


def attend_by_kernels(given: PagedAttend, machine: Machine, launcher: Launcher) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention's results [T, H, Dv] and log-sums [T, H], by kernels; ``config.refusal`` must return None for ``given``."""
    choice = chosen(given, machine, launcher.cuda)
    config, q, tensors = choice.config, given.q, operands_of(given)
    (queries, heads, _), (requests, pages) = q.shape, given.block_table.shape
    named = {
        "BLOCKS": given.keys[0].shape[0], "MAX_QUERIES": given.max_queries, "PAGES": pages, "REQUESTS": requests,
        "TABLE_ROW": given.block_table.stride(0), "TARGET": 1,
    }
    operands = [tensors[name] for name in config.operands]
    cut = cut_for(config, given, machine, resident_of(choice, operands, named) if launcher.cuda and q.is_cuda else None)
    named["TARGET"] = cut.target
    rows = queries if cut.target == 1 else (cut.target + requests) * given.max_queries
    parts = torch.empty(rows, heads, config.value_dim + 2, dtype=torch.float32, device=q.device)
    if cut.target > 1 or config.one_query:
        grid = (cut.tiles, config.kv_heads, cut.target + requests)
    else:
        grid = (-(-queries * config.group // config.tile.rows) + requests, config.kv_heads, 1)
    stages = {"num_stages": config.tile.num_stages} if launcher.cuda else {}
    launcher.kernel(
        choice.kernel, grid, *operands, parts, *(named[name] for name in NAMED),
        warps=config.tile.num_warps, **stages,
    )
    out, lse = q.new_empty(queries, heads, config.value_dim), q.new_empty(queries, heads, dtype=torch.float32)
    sinks, merge = parts if given.sinks is None else given.sinks.contiguous(), merge_for(cut, queries * heads, requests, config, machine)
    launcher.kernel(
        merge_items, (queries, heads, -(-config.value_dim // merge.columns)), parts, sinks, given.lengths, given.query_start, out, lse,
        given.max_queries, cut.target, requests, pages, warps=4, HEADS=heads, DIM=config.value_dim, COLUMNS=merge.columns,
        WINDOW=given.window, BLOCK_T=config.tile.block_t, PAGE_ROWS=given.page, HAS_SINKS=int(given.sinks is not None), ITEMS=merge.items,
    )
    return out, lse
