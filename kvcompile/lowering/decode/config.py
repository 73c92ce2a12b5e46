"""One attend kernel as data: the computation, fixed by the site, and the tuned choices (tiles, splits).

The values become the template's constants, whether Inductor renders it or ``offline`` does.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import torch

from kvcompile.lowering.decode.slot_plan import TemplateSlot, slot_plan
from kvcompile.lowering.decode.template import LOG2E
from kvcompile.types import PAGE, KernelFormat, Role

LOWEST_FLOAT32 = torch.finfo(torch.float32).min
"""Least finite score, in base-2 units."""


class Bias(enum.IntEnum):
    """Kinds of mask operand, numbered as in the template."""

    NONE = 0
    ADDED = 1
    BOOLEAN = 2
    REPLACING = 3
    ADDED_OR_REPLACING = 4
    """Added to the scores; minus infinity replaces the score by ``Masks.fill``."""


@dataclasses.dataclass(frozen=True)
class Masks:
    """The optional mask operands that are given, and their axes that are not broadcast (size above 1)."""

    lo: bool = False
    keep: bool = False
    bias: Bias = Bias.NONE
    sinks: bool = False
    hi_per_batch: bool = True
    lo_per_batch: bool = True
    keep_per_batch: bool = True
    bias_per_batch: bool = True
    bias_per_head: bool = True
    bias_per_query: bool = True
    fill: float = 0.0
    """Score of a token that the bias excludes (False, or minus infinity), if ``bias`` is a replacing kind."""


@dataclasses.dataclass(frozen=True)
class ExtraOperands:
    """The operands that a site has besides planes and masks: newest and first tokens in full precision, and the angles of RoPE.

    ``exact_first``: number of first tokens; ``exact_first_at``: whether a plane gives their position.
    """

    exact_newest: bool = False
    base_per_batch: bool = True
    rotary_dim: int = 0
    interleaved: bool = False
    rope_per_batch: bool = True
    exact_first: int = 0
    exact_first_at: bool = False

    @property
    def tail(self) -> bool:
        """Whether first or newest tokens are given in full precision; one more split attends to them."""
        return self.exact_newest or self.exact_first > 0


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tile sizes: tokens and rows, warps, pipeline stages, and whether tokens are the MMA's tall side.

    ``copies``: 2 if each query row takes two columns of a tile, as for PICKED keys, whose queries are split in two parts; else 1.
    ``picked``: number of scales whose PAIRED values are looked up in registers instead of shared memory.
    """

    block_t: int = PAGE
    block_r: int = 8
    tokens_first: bool = True
    num_warps: int = 1
    num_stages: int = 2
    copies: int = 1
    picked: int = 0

    @property
    def rows(self) -> int:
        """Number of distinct query rows in a tile."""
        return self.block_r // self.copies


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """The fields that kernels for few query rows and for many have in common: the attention, its tiles and splits."""

    key_scheme: str
    value_scheme: str
    key_dim: int
    value_dim: int
    kv_heads: int
    group: int
    dtype: torch.dtype
    key_word: torch.dtype
    value_word: torch.dtype
    scale: float
    softcap: float = 0.0
    masks: Masks = Masks()
    page_rows: int = PAGE
    paged: bool = True
    splits: int = 1
    packed: bool = True
    tile: Tile = Tile()

    def shared_options(self) -> dict[str, object]:
        """Return the constants that both templates have. Strings are quoted, since each constant is also printed as a constexpr."""
        masks, tile = self.masks, self.tile
        return {
            "KEY_SCHEME": repr(self.key_scheme), "VALUE_SCHEME": repr(self.value_scheme),
            "KEY_DIM": self.key_dim, "VALUE_DIM": self.value_dim,
            "KEY_WORD": quoted(self.key_word), "VALUE_WORD": quoted(self.value_word), "QUERY": quoted(self.dtype),
            "PACKED": int(self.packed), "KV_HEADS": self.kv_heads, "GROUP": self.group,
            "PAGE_ROWS": self.page_rows, "PAGED": int(self.paged),
            # Without a softcap, scores are in base-2 units from the start.
            "QK_SCALE": self.scale * (1.0 if self.softcap > 0 else LOG2E), "SOFTCAP": self.softcap, "LOG2E": LOG2E,
            "SPLITS": self.splits, "HAS_LO": int(masks.lo), "HAS_KEEP": int(masks.keep), "HAS_SINKS": int(masks.sinks),
            "HI_B": int(masks.hi_per_batch), "LO_B": int(masks.lo_per_batch), "KEEP_B": int(masks.keep_per_batch),
            "BLOCK_T": tile.block_t, "BLOCK_R": tile.block_r,
        }


@dataclasses.dataclass(frozen=True)
class AttendConfig(KernelConfig):
    """A complete description of one rendered decode kernel; hashable.

    ``shares``: number of ``splits`` that a row of average length uses, if rows of a batch may differ in length; 0 if every row uses
    all splits.
    """

    one_query: bool = True
    beside: ExtraOperands = ExtraOperands()
    shares: int = 0
    direct: bool = False
    wide_keys: bool = True
    wide_values: bool = True
    norm_pairs: bool = True
    key_scale_pairs: bool = True
    value_scale_pairs: bool = True
    key_scale_pack: int = 1
    value_scale_pack: int = 1
    key_generic: bool = False
    value_generic: bool = False

    def options(self) -> dict[str, object]:
        """Return the template's constants."""
        masks, tile, beside = self.masks, self.tile, self.beside
        pairs = self.paged and 2 <= tile.block_t <= self.page_rows
        return {
            **self.shared_options(), "WIDE_KEYS": int(self.wide_keys), "WIDE_VALUES": int(self.wide_values),
            # RoPE needs decoded keys.
            "KEY_GENERIC": int(self.key_generic or beside.rotary_dim > 0), "VALUE_GENERIC": int(self.value_generic),
            "KEY_SCALE_PACK": self.key_scale_pack, "VALUE_SCALE_PACK": self.value_scale_pack,
            "ONE_QUERY": int(self.one_query), "SHARES": self.shares, "DIRECT": int(self.direct), "BIAS_KIND": int(masks.bias),
            "BIAS_B": int(masks.bias_per_batch), "BIAS_H": int(masks.bias_per_head), "BIAS_S": int(masks.bias_per_query),
            "HAS_RECENT": int(beside.exact_newest), "BASE_B": int(beside.base_per_batch), "ROTARY_DIM": beside.rotary_dim,
            "EARLY": beside.exact_first, "EARLY_MOVED": int(beside.exact_first_at), "HAS_TAIL": int(beside.tail),
            "INTERLEAVED": int(beside.interleaved), "ROTATION_B": int(beside.rope_per_batch),
            "NORM_PAIRS": int(self.norm_pairs and pairs),
            # Not if warps share a tile, since others run while one waits: int8 at 131,072 tokens took 0.109 ms so, 0.099 otherwise (H100).
            "KEY_SCALE_PAIRS": int(self.key_scale_pairs and pairs and tile.num_warps == 1),
            "VALUE_SCALE_PAIRS": int(self.value_scale_pairs and pairs and tile.num_warps == 1),
            # A tile of full-precision tokens takes many registers, and all splits get as many as the one that needs most.
            "BLOCK_N": min(tile.block_t, 16 * tile.num_warps), "TOKENS_FIRST": int(tile.tokens_first),
            "PICKED_SCALES": tile.picked, "COPIES": tile.copies, "TALL": tile.block_t if tile.tokens_first else 0,
            **({"FILL": max(masks.fill * LOG2E, LOWEST_FLOAT32)} if masks.bias in {Bias.REPLACING, Bias.ADDED_OR_REPLACING} else {}),
        }

    def with_splits(self, splits: int, direct: bool, shares: int = 0) -> AttendConfig:
        """Return this kernel with ``splits`` splits of the tokens; ``shares``: see the class.

        ``direct``: whether the kernel writes the finished result, instead of partial sums.
        """
        return dataclasses.replace(self, splits=splits, direct=direct, shares=shares)

    @property
    def plans(self) -> tuple[TemplateSlot, TemplateSlot]:
        """Plans of the key and the value slot."""
        options = self.options()
        return plans(*(options[name] for name in PLAN_OPTIONS))  # type: ignore[arg-type]

    @property
    def fold_block(self) -> int:
        """The number of tokens that share the key scales by which queries are multiplied; 0 if scales are not folded into queries."""
        key = dataclasses.replace(self, tile=dataclasses.replace(self.tile, block_t=16, tokens_first=True)).plans[0]
        return key.token_block if key.folded else 0

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the tensors that the decode template with this configuration reads, in the order in which it takes them."""
        key, value = self.plans
        beside, rotated = self.beside, self.beside.rotary_dim > 0
        present = (
            (True, "Q"), (True, "HI"), (True, "K_WORDS"), (True, "V_WORDS"), (key.scaled, "K_SCALES"), (value.scaled, "V_SCALES"),
            (key.zeros, "K_ZEROS"), (value.zeros, "V_ZEROS"), (key.levels > 0, "K_TABLE"), (value.levels > 0, "V_TABLE"),
            (key.static, "K_STATIC"), (value.static, "V_STATIC"), (key.norms, "K_NORMS"),
            (self.masks.lo, "LO"), (self.masks.keep, "KEEP"), (self.masks.keep and value.clear(self.masks.lo, self.masks.bias), "KEPT"),
            (self.masks.bias is not Bias.NONE, "BIAS"),
            (self.direct and self.masks.sinks, "SINKS"), (beside.exact_newest, "RECENT_K"), (beside.exact_newest, "RECENT_V"),
            (beside.exact_newest, "BASE"), (beside.exact_first > 0, "EARLY_K"), (beside.exact_first > 0, "EARLY_V"),
            (beside.exact_first_at, "EARLY_AT"),
            (rotated, "COS"), (rotated, "SIN"),
        )
        return tuple(name for there, name in present if there)


def plane_names(letter: str, planes: Sequence[Any], fmt: KernelFormat) -> dict[str, Any]:
    """Return {name in the template: plane} for the planes of one slot that a kernel reads; ``letter``: K or V."""
    present = (
        (True, "WORDS"), (fmt.scaled, "SCALES"), (fmt.zeros, "ZEROS"), (fmt.norms, "NORMS"), (fmt.levels > 0, "TABLE"),
        (fmt.static, "STATIC"),
    )
    return dict(zip((f"{letter}_{name}" for there, name in present if there), planes, strict=False))


PLAN_OPTIONS = (
    "KEY_SCHEME", "VALUE_SCHEME", "KEY_DIM", "VALUE_DIM", "KEY_WORD", "VALUE_WORD", "QUERY", "WIDE_KEYS", "WIDE_VALUES", "PACKED",
    "KEY_GENERIC", "VALUE_GENERIC", "TALL",
)


def plans(
    key_scheme: str, value_scheme: str, key_dim: int, value_dim: int, key_word: str, value_word: str, query: str,
    wide_keys: int, wide_values: int, packed: int, key_generic: int = 0, value_generic: int = 0,
    tall: int = 16,
) -> tuple[TemplateSlot, TemplateSlot]:
    """Return (plan of the keys' slot, plan of the values' slot) from the decode template's constants.

    The template calls this while it is rendered, so dtypes are quoted names, and flags are ints.
    """
    dtype = named_dtype(query)
    key, value = (
        slot_plan(text.strip("'"), role, dim, named_dtype(word), dtype, bool(wide), bool(packed), bool(generic), tall)
        for text, role, dim, word, wide, generic in (
            (key_scheme, Role.KEY, key_dim, key_word, wide_keys, key_generic),
            (value_scheme, Role.VALUE, value_dim, value_word, wide_values, value_generic),
        )
    )
    return key, value


def quoted(dtype: torch.dtype) -> str:
    """Return a dtype's name as a quoted template constant."""
    return repr(str(dtype).removeprefix("torch."))


def named_dtype(text: str) -> torch.dtype:
    """Return the dtype of a quoted template constant; the inverse of ``quoted``."""
    return getattr(torch, text.strip("'"))
