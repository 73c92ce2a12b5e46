"""The prefill kernel without Inductor and without a device, rendered as in ``decode.offline``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvcompile.lowering.codegen.expressions import TRITON_TYPES
from kvcompile.lowering.decode.offline import KernelSignature, Operand, compile_rendered, named_sizes, template
from kvcompile.lowering.prefill.config import PrefillConfig, slots
from kvcompile.lowering.prefill.template import SOURCE


def operands_for(config: PrefillConfig, batch: int = 1, queries: int = 512, recent_rows: int = 544) -> dict[str, Operand]:
    """Return the operands of a store with ``PAGES`` pages, by name; strings in sizes and strides are run-time arguments.

    All are contiguous but for the mask KEEP, whose row length is an argument too.
    """
    key, value = config.slots
    heads = config.kv_heads * config.group
    pages, rows = ("PAGES", config.page_rows) if config.paged else (1, queries)

    def plane(width: int, dtype: torch.dtype, block: int = 1) -> Operand:
        return Operand.contiguous((pages, batch, config.kv_heads, rows // block, width), dtype)

    def words(slot: object, dim: int) -> int:
        return slot.words * 2 if slot.scaled else dim  # type: ignore[attr-defined]

    every = {
        "Q": Operand.contiguous((batch, heads, queries, config.key_dim), torch.float16 if key.scaled else config.dtype),
        "Q_RAW": Operand.contiguous((batch, heads, queries, config.key_dim), config.dtype),
        "Q_SCALES": Operand.contiguous((batch, heads, queries), torch.float32),
        "HI": Operand.contiguous((batch if config.masks.hi_per_batch else 1, queries), torch.int64),
        "K_WORDS": plane(words(key, config.key_dim), config.key_word), "V_WORDS": plane(words(value, config.value_dim), config.value_word),
        "K_SCALES": plane(key.scales, torch.float16, key.block), "V_SCALES": plane(value.scales, torch.float16, value.block),
        "K_ZEROS": plane(key.scales, torch.float16, key.block), "V_ZEROS": plane(value.scales, torch.float16, value.block),
        "LO": Operand.contiguous((batch if config.masks.lo_per_batch else 1, queries), torch.int64),
        "KEEP": Operand((batch, "TOKENS"), ("TOKENS", 1), torch.bool),
        "RECENT_K": Operand.contiguous((batch, config.kv_heads, recent_rows, config.key_dim), config.dtype),
        "RECENT_V": Operand.contiguous((batch, config.kv_heads, recent_rows, config.value_dim), config.dtype),
        "BASE": Operand.contiguous((batch if config.base_per_batch else 1,), torch.int64),
        "SINKS": Operand.contiguous((heads,), torch.float32),
    }
    return {name: every[name] for name in config.operands}


def output_for(config: PrefillConfig, batch: int, queries: int) -> Operand:
    """Return the kernel's output: the result, or partial sums with their maxima and totals."""
    heads = config.kv_heads * config.group
    if config.direct:
        return Operand.contiguous((batch, heads, queries, config.value_dim), config.dtype)
    return Operand.contiguous((config.splits, batch, heads, queries, config.value_dim + 2), torch.float32)


def render(config: PrefillConfig, operands: Mapping[str, Operand], out: Operand) -> str:
    """Return a standalone ``@triton.jit`` module; arguments are the operands, the output, then named sizes."""
    named = named_sizes((*operands.values(), out)) + (["CAPACITY", "FIRST"] if config.chunk else [])
    made = KernelSignature(operands, named, config.options())

    def store_output(indices: Sequence[str], value: str, mask: str, val_shape: object = None) -> str:
        del val_shape
        return f"tl.store(OUT + ({place(indices)}), ({value}).to({TRITON_TYPES[out.dtype]}), mask={mask})"

    def load_output(indices: Sequence[str], mask: str, other: str) -> str:
        return f"tl.load(OUT + ({place(indices)}), mask={mask}, other={other})"

    def place(indices: Sequence[str]) -> str:
        # The outermost offset may exceed 32 bits, and its index is a program number.
        outer, *inner = (f"({index}) * {step}" for index, step in zip(indices, out.stride, strict=True))
        return " + ".join([f"({indices[0]}).to(tl.int64) * {out.stride[0]}" if config.chunk else outer, *inner])

    text = template(SOURCE).render(
        slots=slots, def_kernel=made.def_kernel, size=made.size, stride=made.stride, store_output=store_output, load_output=load_output,
        **config.options(),
    )
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"


def prefill_source(config: PrefillConfig, batch: int = 1, queries: int = 512) -> str:
    """Return the source of ``config``'s kernel over a contiguous store of any number of pages.

    ``batch``, ``queries``: batch rows and new tokens.
    """
    return render(config, operands_for(config, batch, queries), output_for(config, batch, queries))


def compile_offline(source: str, config: PrefillConfig, arch: str = "sm_90", batch: int = 1, queries: int = 512) -> dict[str, str | bytes]:
    """Return ``ttgir``, ``ptx`` and ``cubin`` of a rendered source; needs no device.

    Raises OfflineCompilation for an unknown architecture.
    """
    return compile_rendered(source, operands_for(config, batch, queries), output_for(config, batch, queries), config.tile, arch)
