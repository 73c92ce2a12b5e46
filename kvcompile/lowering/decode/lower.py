"""Inductor's lowering of ``kvcompile::attend`` on CUDA: a Triton template with choices, then a merge.

The template writes partial results into one float32 buffer [splits, B, H, S, Dv + 2] (sums, then the maximum
and the total of each split); the merge by log-sum-exp is made of Inductor's own lowerings, so it fuses with
its users. One buffer, since second outputs through ``mutated_inputs`` were seen to give NaN when
autotuned. With a single split and values in one block, the template writes the result itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from kvcompile.lowering.decode import site
from kvcompile.lowering.decode.config import plans
from kvcompile.lowering.decode.template import GLOBALS, LOG2E, SOURCE
from kvcompile.lowering.decode.tiles import folds
from kvcompile.lowering.host import buffers
from kvcompile.lowering.host.buffers import examples, hint, realize, static
from kvcompile.lowering.host.inductor_api import SymbolicGridFn, TritonTemplate, autotuned, ir, lowerings
from kvcompile.lowering.host.inductor_entry import config as inductor_config
from kvcompile.lowering.host.kept_tokens import kept_tokens
from kvcompile.lowering.ops.kept_tokens import RUN
from kvcompile.lowering.ops.operands import AttendOperands

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
    nodes = {name: realize(node) for name, node in site.nodes_of(operands, buffers).items()}
    device, properties = machine_of(operands.q)
    configs = site.cut(site.config_of(operands, nodes, buffers), operands, properties, buffers, bool(inductor_config.max_autotune))
    config, tokens = configs[0], hint(operands.keys[0].get_size()[0]) * hint(operands.keys[0].get_size()[3])
    if any("KEPT" in tiled.operands for tiled in configs):
        nodes["KEPT"] = realize(kept_tokens(nodes["KEEP"], RUN))
    # Time with every position in use, so that choices differ by their work.
    in_use = {"HI": tokens - 1, "LO": 0, "KEEP": 1, "KEPT": RUN, "BASE": tokens - 1, "EARLY_AT": 0}
    partial = tuned(attend_template, configs, nodes, layout_of(device, operands, config.direct, config.splits), in_use)
    if config.direct:
        return partial
    return merge(partial, nodes.get("SINKS"), config.value_dim, None if operands.log_sums else operands.q.get_dtype())


def machine_of(q: Any) -> tuple[torch.device, site.Machine]:
    """Return (the device of the queries, its multiprocessors and shared memory); the device must be CUDA."""
    device = q.get_device()
    return device, site.Machine.of(device)


def layout_of(device: torch.device, operands: AttendOperands[Any], direct: bool, splits: int) -> Any:
    """Return Inductor's layout of a template's output: if ``direct`` the result [B, H, S, Dv] in q's dtype.

    Otherwise partial sums with their maxima and totals, float32 [splits, B, H, S, Dv + 2].
    """
    B, H, S, _ = operands.q.get_size()
    H, Dv = static(H), static(operands.value_dim)
    size = [B, H, S, Dv] if direct else [splits, B, H, S, Dv + 2]
    dtype = operands.q.get_dtype() if direct else torch.float32
    return ir.FixedLayout(device, dtype, size, list(ir.FlexibleLayout.contiguous_strides(size)))


def tuned(template: Any, configs: Sequence[Any], nodes: dict[str, Any], layout: Any, in_use: dict[str, int]) -> Any:
    """Return the output node of a template with the fastest of ``configs``, timed by Inductor.

    ``nodes``: operands by name; ``layout``: that of the output; ``in_use``: values that fill operands while kernels are timed, by name.
    """
    choices: list[Any] = []
    B, _, S, _ = nodes["Q"].get_size()
    for config in configs:
        inputs = [nodes[name] for name in config.operands]
        template.maybe_append_choice(
            choices, input_nodes=inputs, layout=layout, call_sizes=[B, sympy.Integer(config.kv_heads), S * config.group],
            num_warps=config.tile.num_warps, num_stages=config.tile.num_stages, **config.options(),
        )
    return autotuned(template.name, choices, inputs, layout, examples(config.operands, in_use))


def merge(partial: Any, sinks: Any, value_dim: int, dtype: torch.dtype | None, more: tuple[Any, Any, Any] | None = None) -> Any:
    """Return splits [Z, B, H, S, Dv + 2] merged into [B, H, S, Dv] by log-sum-exp, in Inductor's own operations.

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
