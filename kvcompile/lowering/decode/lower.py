"""Inductor's lowering of ``kvcompile::attend`` on CUDA: a Triton template with choices, then a merge.

The template writes partial results into one float32 buffer [splits, B, H, S, Dv + 2] (sums, then the maximum
and the total of each split); the merge by log-sum-exp is made of Inductor's own lowerings, so it fuses with
its users. One buffer, since second outputs through ``mutated_inputs`` were seen to give NaN when
autotuned. With a single split and values in one block, the template writes the result itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import sympy
import torch

from kvcompile import schemes
from kvcompile.lowering.decode.config import AttendConfig, Bias, ExtraOperands, Masks, plane_names, plans
from kvcompile.lowering.decode.template import GLOBALS, LOG2E, SOURCE
from kvcompile.lowering.decode.tiles import choose_tiles, folds, ragged_splits, splits_for, writes_directly
from kvcompile.lowering.host.buffers import equals, examples, hint, multiple, pairs_of_rows, realize, static, varies
from kvcompile.lowering.host.inductor_api import SymbolicGridFn, TritonTemplate, autotuned, ir, lowerings
from kvcompile.lowering.host.inductor_entry import config as inductor_config
from kvcompile.lowering.host.kept_tokens import kept_tokens
from kvcompile.lowering.host.triton_api import lays_out_as_known
from kvcompile.lowering.ops.kept_tokens import RUN
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.types import Role, SlotSpec

aten, prims = torch.ops.aten, torch.ops.prims

@SymbolicGridFn
def attend_grid(batch: Any, kv_heads: Any, rows: Any, meta: dict[str, Any], *, cdiv: Callable[[Any, Any], Any]) -> tuple:
    """Return the grid: (tiles of rows, batch times kv heads, splits)."""
    return (cdiv(rows, meta["BLOCK_R"] // meta.get("COPIES", 1)), batch * kv_heads, meta["SPLITS"])


attend_template = TritonTemplate(name="kvcompile_attend", grid=attend_grid, source=SOURCE)
# The template calls ``plans`` while it is rendered.
attend_template.template.globals |= {**GLOBALS, "plans": plans}


def lower_decode(operands: AttendOperands[Any]) -> Any:
    """Return the result of ``attend`` as a TensorBox."""
    q, keys = operands.q, operands.keys
    page_rows = static(keys[0].get_size()[3])
    paged = not equals(keys[0].get_size()[0], 1)
    H, K, D, Dv = (static(x) for x in (q.get_size()[1], keys[0].get_size()[2], q.get_size()[3], operands.value_dim))
    nodes, config = _nodes_and_config(operands, H, K, D, Dv, page_rows if paged else 1, paged)
    B, _, S, _ = nodes["Q"].get_size()
    rows_hint = hint(S) * (H // K)
    device = q.get_device()
    properties: Any = torch.cuda.get_device_properties(device)
    configs = choose_tiles(
        config, rows_hint, page_rows if paged else None, bool(inductor_config.max_autotune), properties.shared_memory_per_block_optin
    )
    tokens_hint = hint(keys[0].get_size()[0]) * page_rows
    splits = splits_for(configs[0], rows_hint, hint(B) * K, properties.multi_processor_count, tokens_hint)
    splits, shares = ragged_splits(configs[0], splits, hint(B))
    direct = writes_directly(configs[0], splits) and not operands.log_sums
    size = [B, H, S, Dv] if direct else [splits, B, H, S, Dv + 2]
    layout = ir.FixedLayout(
        device, q.get_dtype() if direct else torch.float32, size, list(ir.FlexibleLayout.contiguous_strides(size))
    )
    if any("KEPT" in tiled.operands for tiled in configs):
        nodes["KEPT"] = realize(kept_tokens(nodes["KEEP"], RUN))
    choices: list[Any] = []
    for tiled in configs:
        config = tiled.with_splits(splits, direct, shares)
        inputs = [nodes[name] for name in config.operands]
        attend_template.maybe_append_choice(
            choices, input_nodes=inputs, layout=layout, call_sizes=[B, sympy.Integer(K), S * (H // K)],
            num_warps=config.tile.num_warps, num_stages=config.tile.num_stages, **config.options(),
        )
    # Time with every position in use, so that choices differ by their work.
    in_use = {"HI": tokens_hint - 1, "LO": 0, "KEEP": 1, "KEPT": RUN, "BASE": tokens_hint - 1, "EARLY_AT": 0}
    partial = autotuned("kvcompile_attend", choices, inputs, layout, examples(config.operands, in_use))
    return partial if direct else merge(partial, nodes.get("SINKS"), Dv, None if operands.log_sums else q.get_dtype())


def _nodes_and_config(
    operands: AttendOperands[Any], H: int, K: int, D: int, Dv: int, page_rows: int, paged: bool
) -> tuple[dict[str, Any], AttendConfig]:
    """Return every operand that the template may read, realized, by name, and the kernel before tiles and splits are chosen."""
    q, keys, values, exact_newest, rope = operands.q, operands.keys, operands.values, operands.exact_newest, operands.rope
    nodes = {
        "Q": q, "HI": operands.hi, "LO": operands.lo, "KEEP": operands.keep, "BIAS": operands.bias, "SINKS": operands.sinks,
        "BASE": operands.base, "EARLY_AT": operands.exact_first_at,
    }
    exact_first = operands.exact_first or ()
    nodes |= dict(zip(("EARLY_K", "EARLY_V"), exact_first, strict=False))
    nodes |= dict(zip(("RECENT_K", "RECENT_V"), exact_newest or (), strict=False)) | dict(zip(("COS", "SIN"), rope or (), strict=False))
    formats = []
    for letter, planes, spelled, role, dim in (
        ("K", keys, operands.key_scheme, Role.KEY, D), ("V", values, operands.value_scheme, Role.VALUE, Dv),
    ):
        fmt = schemes.parse(spelled).format(SlotSpec(K, dim, planes[0].get_dtype(), role))
        formats.append(fmt)
        nodes |= plane_names(letter, planes, fmt)
    nodes = {name: realize(node) for name, node in nodes.items() if node is not None}
    packs = [_scale_pack(nodes, letter) for letter in "KV"]
    beside = ExtraOperands(
        bool(exact_newest), exact_newest is not None and not equals(nodes["BASE"].get_size()[0], 1),
        static(nodes["COS"].get_size()[2]) if rope else 0, bool(operands.interleaved),
        rope is not None and not equals(nodes["COS"].get_size()[0], 1),
        static(nodes["EARLY_K"].get_size()[3]) if exact_first else 0, "EARLY_AT" in nodes,
    )
    config = AttendConfig(
        operands.key_scheme, operands.value_scheme, D, Dv, K, H // K, q.get_dtype(), keys[0].get_dtype(), values[0].get_dtype(),
        float(operands.scale), float(operands.softcap), equals(nodes["Q"].get_size()[2], 1), _masks(operands), beside, page_rows, paged,
        wide_keys=multiple(nodes["K_WORDS"], 2), wide_values=multiple(nodes["V_WORDS"], 2),
        key_scale_pack=packs[0], value_scale_pack=packs[1],
        key_generic=not formats[0].symmetric and not (_looks_up(nodes, "K") if formats[0].levels else _paired(nodes)),
        value_generic=not formats[1].symmetric and not (_looks_up(nodes, "V") if formats[1].levels else _half(nodes, "V")),
        packed=torch.version.hip is None,  # Packed unpacking is PTX.
        norm_pairs=_in_pairs(nodes, "K_NORMS"), key_scale_pairs=_in_pairs(nodes, "K_SCALES"),
        value_scale_pairs=_in_pairs(nodes, "V_SCALES"),
    )
    return nodes, config


def merge(partial: Any, sinks: Any, value_dim: int, dtype: torch.dtype | None, more: tuple[Any, Any, Any] | None = None) -> Any:
    """Merge splits [Z, B, H, S, Dv + 2] into [B, H, S, Dv] by log-sum-exp, in Inductor's own operations.

    ``dtype``: the result's; None for float32 with each query's log-sum as one more channel.

    ``more``: sums [B, H, S, Dv], maxima and totals [B, H, S, 1] over tokens that are in no split; None without.

    Maxima and totals are broadcast to all channels first, so that the three reductions over Z have one shape
    and become one kernel. More splits than ``ONE_PASS`` are folded onto each other elementwise, since Inductor
    keeps only that many rows of an outer reduction in registers and would read everything twice. Empty splits
    are -inf and 0; a row without visible tokens gives zeros; NaN stays.
    """
    do = _Lowered()
    splits = int(partial.get_size()[0])
    fold = folds(splits)
    assert splits % fold == 0, f"{splits} splits do not fold onto {fold} equal parts"
    parts = [do(aten.slice.Tensor, partial, 0, i * (splits // fold), (i + 1) * (splits // fold)) for i in range(fold)]
    shape = [splits // fold, *partial.get_size()[1:-1], value_dim]

    def column(part: Any, at: int) -> Any:
        return do(aten.expand, do(aten.slice.Tensor, part, 4, at, at + 1), shape)

    def summed(terms: list) -> Any:
        return do(aten.sum, functools.reduce(lambda x, y: do(aten.add, x, y), terms), [0])

    tops = [column(part, value_dim) for part in parts]
    top = do(aten.amax, functools.reduce(lambda x, y: do(aten.maximum, x, y), tops), [0], True)
    if more is not None:
        top = do(aten.maximum, top, do(aten.unsqueeze, more[1], 0))
    if sinks is not None:
        sink = do(aten.mul, do(prims.convert_element_type, do(aten.reshape, sinks, [1, 1, -1, 1, 1]), torch.float32), LOG2E)
        top = do(aten.maximum, top, sink)
    top = do(aten.where, do(aten.eq, top, float("-inf")), 0.0, top)
    weights = [do(aten.exp2, do(aten.sub, each, top)) for each in tops]
    total = summed([do(aten.mul, column(part, value_dim + 1), weight) for part, weight in zip(parts, weights, strict=True)])
    result = summed([
        do(aten.mul, do(aten.slice.Tensor, part, 4, 0, value_dim), weight) for part, weight in zip(parts, weights, strict=True)
    ])
    if more is not None:
        weight = do(aten.exp2, do(aten.sub, more[1], do(aten.squeeze, top, 0)))
        result, total = (do(aten.add, x, do(aten.mul, y, weight)) for x, y in ((result, more[0]), (total, more[2])))
    if sinks is not None:
        total = do(aten.add, total, do(aten.exp2, do(aten.squeeze, do(aten.sub, sink, top), 0)))
    result = do(aten.where, do(aten.eq, total, 0.0), 0.0, do(aten.div, result, total))
    if dtype is None:
        first = [do(aten.slice.Tensor, do(aten.expand, item, total.get_size()), 3, 0, 1) for item in (do(aten.squeeze, top, 0), total)]
        log_sums = do(aten.mul, do(aten.add, first[0], do(aten.log2, first[1])), 1 / LOG2E)
        # Inductor's ``cat`` reads a list of tensors from the node that is being lowered, which is ``attend`` here.
        return do(aten.add, do(aten.constant_pad_nd, result, [0, 1], 0.0), do(aten.constant_pad_nd, log_sums, [value_dim, 0], 0.0))
    return do(prims.convert_element_type, result, dtype)


class _Lowered:
    """Calls Inductor's lowering of an operator."""

    def __call__(self, op: Any, *args: Any) -> Any:
        return lowerings[op](*args)


def _in_pairs(nodes: dict[str, Any], name: str) -> bool:
    """Return whether an operand is given and its numbers of two neighbouring tokens may be loaded as one word."""
    return name in nodes and pairs_of_rows(nodes[name])


def _half(nodes: dict[str, Any], letter: str) -> list[Any]:
    """Return a slot's scales and zero points if all are float16, as packed decoding needs them; otherwise an empty list."""
    found = [nodes[name] for name in (f"{letter}_SCALES", f"{letter}_ZEROS") if name in nodes]
    return found if all(node.get_dtype() == torch.float16 for node in found) else []


def _looks_up(nodes: dict[str, Any], letter: str) -> bool:
    """Return whether assembly may look up a slot's levels. Not with first tokens: that was never run, so elements are decoded."""
    return bool(_half(nodes, letter)) and "EARLY_K" not in nodes and lays_out_as_known()


def _paired(nodes: dict[str, Any]) -> bool:
    """Return whether neighbouring key scales can be loaded as one word, as folding them into the queries needs."""
    found = _half(nodes, "K")
    return bool(found) and all(multiple(node, 2) for node in found)


def _scale_pack(nodes: dict[str, Any], letter: str) -> int:
    """Return how many scales of a token are loaded as one word: all if they fill 32 or 64 bits, otherwise 1."""
    found = _half(nodes, letter)
    if not found:
        return 1
    scales = found[0].get_size()[-1]
    fits = equals(scales, 2) or equals(scales, 4)
    return int(scales) if fits and all(multiple(node, int(scales)) for node in found) else 1


def _masks(operands: AttendOperands[Any]) -> Masks:
    hi, lo, keep, bias = operands.hi, operands.lo, operands.keep, operands.bias
    kind = Bias.NONE if bias is None else Bias.BOOLEAN if bias.get_dtype() == torch.bool else Bias.ADDED
    if operands.fill is not None:
        kind = Bias.REPLACING if kind is Bias.BOOLEAN else Bias.ADDED_OR_REPLACING
    return Masks(
        lo is not None, keep is not None, kind, operands.sinks is not None, varies(hi, 0), varies(lo, 0), varies(keep, 0),
        varies(bias, 0), varies(bias, 1), varies(bias, 2), float(operands.fill or 0.0),
    )


