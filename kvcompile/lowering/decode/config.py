"""One attend kernel as data: what it computes (fixed by the site) and how (the choices that are tuned).

The same values become the constants of the template whether Inductor renders it or ``offline`` does.
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
"""The least score in base-2 units."""


class Bias(enum.IntEnum):
    """Kinds of mask operand; the numbers are the template's."""

    NONE = 0
    ADDED = 1
    BOOLEAN = 2
    REPLACING = 3
    ADDED_OR_REPLACING = 4
    """A bias that is minus infinity where a number takes the place of the score."""


@dataclasses.dataclass(frozen=True)
class Masks:
    """Which optional operands are there, and which of their axes are broadcast (size 1)."""

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
    """The score of a token for which a mask is False, or a bias minus infinity, where ``bias`` is a kind that replaces."""


@dataclasses.dataclass(frozen=True)
class ExtraOperands:
    """Operands beside the planes: newest and first tokens in full precision, angles that keys are rotated by.

    ``exact_first``: how many first tokens, and ``exact_first_at`` whether a plane says where they begin.
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
        """Whether there are tokens that are not encoded, which are a split of their own."""
        return self.exact_newest or self.exact_first > 0


@dataclasses.dataclass(frozen=True)
class Tile:
    """How the work is cut: tokens and rows a tile, warps, pipeline stages, which side tokens lie on.

    ``copies``: 2 where a tile holds each row twice, PICKED keys by queries in two columns; half as many rows are a tile's then.
    ``picked``: of how many scales PAIRED values are picked in registers instead.
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
        """Different rows of a tile."""
        return self.block_r // self.copies


@dataclasses.dataclass(frozen=True)
class AttendConfig:
    """A complete description of one rendered kernel; hashable.

    ``shares``: into how many of its ``splits`` a row of average length is cut, where rows of a batch may differ in length; 0 where
    every row is cut into all of them.
    """

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
    one_query: bool = True
    masks: Masks = Masks()
    beside: ExtraOperands = ExtraOperands()
    page_rows: int = PAGE
    paged: bool = True
    splits: int = 1
    shares: int = 0
    direct: bool = False
    wide_keys: bool = True
    wide_values: bool = True
    packed: bool = True
    norm_pairs: bool = True
    key_scale_pairs: bool = True
    value_scale_pairs: bool = True
    key_scale_pack: int = 1
    value_scale_pack: int = 1
    key_generic: bool = False
    value_generic: bool = False
    tile: Tile = Tile()

    def options(self) -> dict[str, object]:
        """The template's constants. Strings are quoted: each one is also printed as a constexpr."""
        masks, tile, beside = self.masks, self.tile, self.beside
        pairs = self.paged and 2 <= tile.block_t <= self.page_rows
        return {
            "KEY_SCHEME": repr(self.key_scheme), "VALUE_SCHEME": repr(self.value_scheme),
            "KEY_DIM": self.key_dim, "VALUE_DIM": self.value_dim,
            "KEY_WORD": _quoted(self.key_word), "VALUE_WORD": _quoted(self.value_word), "QUERY": _quoted(self.dtype),
            "WIDE_KEYS": int(self.wide_keys), "WIDE_VALUES": int(self.wide_values), "PACKED": int(self.packed),
            # Keys that are rotated are wanted as values.
            "KEY_GENERIC": int(self.key_generic or beside.rotary_dim > 0), "VALUE_GENERIC": int(self.value_generic),
            "KEY_SCALE_PACK": self.key_scale_pack, "VALUE_SCALE_PACK": self.value_scale_pack,
            "KV_HEADS": self.kv_heads, "GROUP": self.group, "PAGE_ROWS": self.page_rows, "PAGED": int(self.paged),
            # Without a cap, scores are in base-2 units from the start.
            "QK_SCALE": self.scale * (1.0 if self.softcap > 0 else LOG2E), "SOFTCAP": self.softcap, "LOG2E": LOG2E,
            "ONE_QUERY": int(self.one_query), "SPLITS": self.splits, "SHARES": self.shares, "DIRECT": int(self.direct),
            "HAS_LO": int(masks.lo), "HAS_KEEP": int(masks.keep), "BIAS_KIND": int(masks.bias), "HAS_SINKS": int(masks.sinks),
            "HI_B": int(masks.hi_per_batch), "LO_B": int(masks.lo_per_batch), "KEEP_B": int(masks.keep_per_batch),
            "BIAS_B": int(masks.bias_per_batch), "BIAS_H": int(masks.bias_per_head), "BIAS_S": int(masks.bias_per_query),
            "HAS_RECENT": int(beside.exact_newest), "BASE_B": int(beside.base_per_batch), "ROTARY_DIM": beside.rotary_dim,
            "EARLY": beside.exact_first, "EARLY_MOVED": int(beside.exact_first_at), "HAS_TAIL": int(beside.tail),
            "INTERLEAVED": int(beside.interleaved), "ROTATION_B": int(beside.rope_per_batch),
            "NORM_PAIRS": int(self.norm_pairs and pairs),
            # Where warps share a tile, others run while one waits: int8 at 131,072 tokens took 0.109 ms so, and 0.099 otherwise (H100).
            "KEY_SCALE_PAIRS": int(self.key_scale_pairs and pairs and tile.num_warps == 1),
            "VALUE_SCALE_PAIRS": int(self.value_scale_pairs and pairs and tile.num_warps == 1),
            # A tile of tokens that are not encoded takes many registers, and what one split takes all have to.
            "BLOCK_N": min(tile.block_t, 16 * tile.num_warps),
            "BLOCK_T": tile.block_t, "BLOCK_R": tile.block_r, "TOKENS_FIRST": int(tile.tokens_first),
            "PICKED_SCALES": tile.picked, "COPIES": tile.copies, "TALL": tile.block_t if tile.tokens_first else 0,
            **({"FILL": max(masks.fill * LOG2E, LOWEST_FLOAT32)} if masks.bias in {Bias.REPLACING, Bias.ADDED_OR_REPLACING} else {}),
        }

    def with_splits(self, splits: int, direct: bool, shares: int = 0) -> AttendConfig:
        """Return the kernel cut into ``splits``; ``direct`` writes the finished result."""
        return dataclasses.replace(self, splits=splits, direct=direct, shares=shares)

    @property
    def plans(self) -> tuple[TemplateSlot, TemplateSlot]:
        """The plans of the key and the value slot."""
        options = self.options()
        return plans(*(options[name] for name in PLAN_OPTIONS))  # type: ignore[arg-type]

    @property
    def fold_block(self) -> int:
        """The tokens that one fold of key scales into the queries may serve; 0 where none is folded."""
        key = dataclasses.replace(self, tile=dataclasses.replace(self.tile, block_t=16, tokens_first=True)).plans[0]
        return key.token_block if key.folded else 0

    @property
    def operands(self) -> tuple[str, ...]:
        """The template's inputs, in order."""
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
    """The planes that a kernel reads, by the template's names; ``letter`` is K or V."""
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
    """Both slots' plans from the template's constants; the template calls this while it is rendered."""
    dtype = _dtype(query)
    key = slot_plan(
        key_scheme.strip("'"), Role.KEY, key_dim, _dtype(key_word), dtype, bool(wide_keys), bool(packed), bool(key_generic),
        tall,
    )
    value = slot_plan(
        value_scheme.strip("'"), Role.VALUE, value_dim, _dtype(value_word), dtype, bool(wide_values), bool(packed), bool(value_generic),
        tall,
    )
    return key, value


def _quoted(dtype: torch.dtype) -> str:
    return repr(str(dtype).removeprefix("torch."))


def _dtype(text: str) -> torch.dtype:
    return getattr(torch, text.strip("'"))
