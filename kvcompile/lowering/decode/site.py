"""One attention as the decode template takes it: operands by name, kernel, tiles and splits; for Inductor's lowering and for ``dump``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvcompile import schemes
from kvcompile.lowering.decode.config import AttendConfig, Bias, ExtraOperands, Masks, plane_names
from kvcompile.lowering.decode.tiles import choose_tiles, ragged_splits, splits_for, writes_directly
from kvcompile.lowering.host.triton_api import lays_out_as_known
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.sizes import Sizes
from kvcompile.types import KernelFormat, Role, SlotSpec


@dataclass(frozen=True)
class Machine:
    """A device: its number of multiprocessors, and the bytes of shared memory that one program may use."""

    multiprocessors: int
    shared_memory: int

    @staticmethod
    def of(device: torch.device) -> Machine:
        """Return the sizes of a CUDA device."""
        properties: Any = torch.cuda.get_device_properties(device)
        return Machine(properties.multi_processor_count, properties.shared_memory_per_block_optin)


def formats_of(given: AttendOperands[Any], sizes: Sizes) -> tuple[KernelFormat, KernelFormat]:
    """Return (kernel format of the keys, kernel format of the values) of the planes that an attention reads."""
    heads = sizes.static(sizes.shape(given.keys[0])[2])

    def of(text: str, planes: Any, dim: Any, role: Role) -> KernelFormat:
        return schemes.parse(text).format(SlotSpec(heads, sizes.static(dim), sizes.dtype(planes[0]), role))

    key = of(given.key_scheme, given.keys, sizes.shape(given.q)[3], Role.KEY)
    return key, of(given.value_scheme, given.values, given.value_dim, Role.VALUE)


def nodes_of(given: AttendOperands[Any], sizes: Sizes) -> dict[str, Any]:
    """Return {name in the template: operand} for every operand of an attention that the decode template may read."""
    nodes = {
        "Q": given.q, "HI": given.hi, "LO": given.lo, "KEEP": given.keep, "BIAS": given.bias, "SINKS": given.sinks,
        "BASE": given.base, "EARLY_AT": given.exact_first_at,
    }
    pairs = {("EARLY_K", "EARLY_V"): given.exact_first, ("RECENT_K", "RECENT_V"): given.exact_newest, ("COS", "SIN"): given.rope}
    for names, pair in pairs.items():
        nodes |= dict(zip(names, pair or (), strict=False))
    for letter, planes, fmt in zip("KV", (given.keys, given.values), formats_of(given, sizes), strict=True):
        nodes |= plane_names(letter, planes, fmt)
    return {name: node for name, node in nodes.items() if node is not None}


def config_of(given: AttendOperands[Any], nodes: dict[str, Any], sizes: Sizes) -> AttendConfig:
    """Return the configuration of the decode template for an attention, before its tile and splits are chosen.

    ``nodes``: the operands of ``nodes_of``, with fixed strides.
    """
    shape, static, equals, varies = sizes.shape, sizes.static, sizes.equals, sizes.varies
    (_, heads, queries, dim), (pages, _, kv, page_rows, _) = shape(given.q), shape(given.keys[0])
    paged, kv = not equals(pages, 1), static(kv)
    formats = formats_of(given, sizes)
    halves = [_half(nodes, letter, sizes) for letter in "KV"]
    # Assembly was never run with first tokens: then elements are decoded.
    looks_up = "EARLY_K" not in nodes
    paired = [bool(halves[0]) and all(sizes.multiple(node, 2) for node in halves[0]), bool(halves[1])]
    whole = [
        fmt.symmetric or (bool(half) and looks_up and lays_out_as_known() if fmt.levels else pairs)
        for fmt, half, pairs in zip(formats, halves, paired, strict=True)
    ]
    beside = ExtraOperands(
        bool(given.exact_newest), bool(given.exact_newest) and varies(nodes["BASE"]), static(shape(nodes["COS"])[2]) if given.rope else 0,
        bool(given.interleaved), varies(nodes.get("COS")), static(shape(nodes["EARLY_K"])[3]) if given.exact_first else 0,
        "EARLY_AT" in nodes,
    )
    by_two = {name: name in nodes and sizes.pairs_of_rows(nodes[name]) for name in ("K_NORMS", "K_SCALES", "V_SCALES")}
    return AttendConfig(
        given.key_scheme, given.value_scheme, static(dim), static(given.value_dim), kv, static(heads) // kv, sizes.dtype(given.q),
        sizes.dtype(given.keys[0]), sizes.dtype(given.values[0]), float(given.scale), float(given.softcap),
        masks_of(given, sizes), static(page_rows) if paged else 1, paged, one_query=equals(queries, 1), beside=beside,
        wide_keys=sizes.multiple(nodes["K_WORDS"], 2), wide_values=sizes.multiple(nodes["V_WORDS"], 2),
        key_scale_pack=_scale_pack(halves[0], sizes), value_scale_pack=_scale_pack(halves[1], sizes),
        key_generic=not whole[0], value_generic=not whole[1],
        packed=torch.version.hip is None,  # Packed unpacking is PTX.
        norm_pairs=by_two["K_NORMS"], key_scale_pairs=by_two["K_SCALES"], value_scale_pairs=by_two["V_SCALES"],
    )


def cut(config: AttendConfig, given: AttendOperands[Any], machine: Machine, sizes: Sizes, tuned: bool = False) -> list[AttendConfig]:
    """Return ``config`` with each tile to try, and with the number of splits, best first; only the best one unless ``tuned``."""
    (batch, _, queries, _), (pages, _, _, page_rows, _) = map(sizes.shape, (given.q, given.keys[0]))
    batch, rows = sizes.hint(batch), sizes.hint(queries) * config.group
    # One page may be this call's own tokens, whose number changes between calls: the kernel reads it, and a guard would fix it.
    page_rows = sizes.static(page_rows) if config.paged else sizes.hint(page_rows)
    tiled = choose_tiles(config, rows, page_rows if config.paged else None, tuned, machine.shared_memory)
    splits = splits_for(tiled[0], rows, batch * config.kv_heads, machine.multiprocessors, sizes.hint(pages) * page_rows)
    splits, shares = ragged_splits(tiled[0], splits, batch)
    direct = writes_directly(tiled[0], splits) and not given.log_sums
    return [each.with_splits(splits, direct, shares) for each in tiled]


def masks_of(given: AttendOperands[Any], sizes: Sizes) -> Masks:
    """Return the mask operands of an attention: for each whether there is one, and whether it varies along its axes or is broadcast."""
    hi, lo, keep, bias, varies = given.hi, given.lo, given.keep, given.bias, sizes.varies
    kind = Bias.NONE if bias is None else Bias.BOOLEAN if sizes.dtype(bias) == torch.bool else Bias.ADDED
    if given.fill is not None:
        kind = Bias.REPLACING if kind is Bias.BOOLEAN else Bias.ADDED_OR_REPLACING
    return Masks(
        lo is not None, keep is not None, kind, given.sinks is not None, varies(hi, 0), varies(lo, 0), varies(keep, 0),
        varies(bias, 0), varies(bias, 1), varies(bias, 2), float(given.fill or 0.0),
    )


def _half(nodes: dict[str, Any], letter: str, sizes: Sizes) -> list[Any]:
    """Return the scale and zero-point planes of slot ``letter`` (K or V) if all are float16, as packed decoding needs; otherwise []."""
    found = [nodes[name] for name in (f"{letter}_SCALES", f"{letter}_ZEROS") if name in nodes]
    return found if all(sizes.dtype(node) == torch.float16 for node in found) else []


def _scale_pack(found: list[Any], sizes: Sizes) -> int:
    """Return how many scales of a token are loaded as one word: all of them if they are 2 or 4 aligned float16 numbers, otherwise 1.

    ``found``: the planes that ``_half`` returns.
    """
    packs = (count for count in (2, 4) if found and sizes.equals(sizes.shape(found[0])[-1], count))
    return next((count for count in packs if all(sizes.multiple(node, count) for node in found)), 1)
