"""Symbolic sizes and strides stand whole in the kernels' text: ``b * 1 + s0`` is not ``b * (1 + s0)``.

An additive bias over a growing cache was read at the wrong places on a GPU, and right everywhere else.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
from test_triton_attend import config_of

from kvcompile import schemes
from kvcompile.lowering.codegen.template_sizes import whole
from kvcompile.lowering.decode import offline
from kvcompile.lowering.decode.config import Bias, ExtraOperands, Masks, Tile
from kvcompile.lowering.decode.offline import Operand
from kvcompile.lowering.prefill import offline as prefill_offline
from kvcompile.lowering.prefill.config import PrefillConfig
from kvcompile.types import Role, SlotSpec

SUM = "1 + s0"
BARE = re.compile(r".*(?:(?<!\()1 \+ s0|1 \+ s0(?!\))).*")


def _decode_text(scheme: str, queries: int) -> str:
    """The decode kernel's text with sums for strides, without its signature."""
    windowed = scheme.startswith("kivi")
    beside = ExtraOperands(exact_newest=windowed, base_per_batch=windowed, rotary_dim=64, rope_per_batch=True)
    config = config_of(scheme, masks=MASKS, beside=beside, one_query=queries == 1)
    operands = _symbolic(offline.operands_for(config, 3, queries))
    return offline.render(config, operands, offline.output_for(config, 3, queries)).split("):", 1)[1]


def _symbolic(operands: dict[str, Operand]) -> dict[str, Operand]:
    """The operands with sums for all outer strides and for what may be any size."""
    found = {}
    for name, operand in operands.items():
        size = tuple(SUM if isinstance(extent, str) else extent for extent in operand.size)
        stride = tuple(SUM if index < len(operand.stride) - 1 else step for index, step in enumerate(operand.stride))
        found[name] = dataclasses.replace(operand, size=size, stride=stride)
    return found


def test_whole() -> None:
    assert [whole(text) for text in (64, "ks0", "1 + ks0", "4*ks0", -1)] == ["64", "ks0", "(1 + ks0)", "(4*ks0)", "(-1)"]


MASKS = Masks(True, True, Bias.ADDED, True, True, True, True, True, True, True)


@pytest.mark.parametrize("scheme", ["dense", "int8", "int4(group=32)", "kivi(bits=2)"])
@pytest.mark.parametrize("queries", [1, 3])
def test_decode(scheme: str, queries: int) -> None:
    text = _decode_text(scheme, queries)
    assert SUM in text
    assert BARE.findall(text) == []


@pytest.mark.parametrize("mutant", [str, lambda text: "7" if SUM in str(text) else str(text)], ids=["bare-sum", "stale-stride"])
def test_a_mutant_of_strides_is_seen(mutant: Callable[[object], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stride that is a sum without parentheses, or the number that it was at the first step."""
    monkeypatch.setattr("kvcompile.lowering.codegen.template_sizes.whole", mutant)
    text = _decode_text("int4(group=32)", 1)
    assert SUM not in text or BARE.findall(text)


@pytest.mark.parametrize("scheme", ["dense", "int8", "int4(group=32)", "kivi(bits=2)"])
def test_prefill(scheme: str) -> None:
    own = [schemes.parse(scheme).for_role(role) for role in Role]
    words = [made.format(SlotSpec(8, 128, torch.bfloat16, role)).word_dtype for made, role in zip(own, Role, strict=True)]
    config = PrefillConfig(
        own[0].spec(), own[1].spec(), 128, 128, 8, 4, torch.bfloat16, *words, 0.088, splits=2,
        tile=Tile(64, 128, False, 8, 2), masks=MASKS,
    )
    operands = _symbolic(prefill_offline.operands_for(config, 3, 40))
    text = prefill_offline.render(config, operands, prefill_offline.output_for(config, 3, 40)).split("):", 1)[1]
    assert SUM in text
    assert BARE.findall(text) == []
