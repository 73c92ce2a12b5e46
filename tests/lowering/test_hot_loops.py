"""No kernel of one warp waits in its hot loop for a load: what a tile needs comes while tiles before it are computed.

Copies of fewer than four bytes a thread are not asynchronous, so a plane with one float16 a token stops every tile for as long as memory
takes, and no result tells: ``normed`` took 1.27 of ``kivi``'s time for it. Where a program has four warps, as for ``int8``, others run
meanwhile, and such copies cost more than they save.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import pytest
import torch
from hopper import compiled_for_hopper
from test_smartkv_kernels import recorded as recorded_smartkv
from test_table_kernel import BASE, chosen

from kvcompile import schemes
from kvcompile.lowering.decode import offline
from kvcompile.lowering.decode.config import Masks
from kvcompile.lowering.prefill import offline as prefill
from kvcompile.lowering.prefill.config import PrefillConfig
from kvcompile.lowering.prefill.tiles import choose_tiles
from kvcompile.lowering.site_kernel import SHARED_MEMORY
from kvcompile.schemes import Smartkv
from kvcompile.types import PAGE, Role, SlotSpec

pytestmark = pytest.mark.compile

LOAD = re.compile(r" tt\.load .* : (tensor<\S+)")


def loops(ttgir: str) -> Iterator[list[str]]:
    """The lines of each loop's body."""
    lines = ttgir.splitlines()
    depth = [len(line) - len(line.lstrip()) for line in lines]
    for first, line in enumerate(lines):
        if " scf.for " in line:
            last = next(at for at in range(first + 1, len(lines)) if depth[at] == depth[first] and lines[at].strip().startswith("}"))
            yield lines[first:last]


def waits(body: list[str]) -> list[str]:
    """Return the types of the tensors that a loop loads into registers, without its asynchronous copies."""
    return [found[1] for found in map(LOAD.search, body) if found]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("scheme", ["dense", "int4", "int4(group=64)", "kivi", "kivi(bits=4)", "normed", "nf4", "beyond"])
def test_no_load_of_a_whole_tile_is_waited_for(scheme: str, dim: int) -> None:
    """The first loop is that of tiles which every row sees whole, where there are two."""
    case = dataclasses.replace(BASE, key=scheme, value=scheme, D=dim, Dv=dim, G=4)
    config = chosen(case)
    made = offline.compile_offline(offline.attend_source(config), config)
    hot = next(loops(str(made["ttgir"])))
    assert any("async_copy_global_to_local" in line for line in hot)
    assert not waits(hot)


@pytest.mark.parametrize("scheme", ["dense", "int8", "int4"])
def test_padding_leaves_the_prompts_hot_loop_as_it_is(scheme: str) -> None:
    """Masked, values pass through registers on their way to the tensor cores: a padded prompt of 32K tokens took 1.9 times as long."""
    fmt = schemes.parse(scheme).format(SlotSpec(8, 128, torch.bfloat16, Role.KEY))

    def hot_loop(masks: Masks) -> list[str]:
        base = PrefillConfig(
            scheme, scheme, 128, 128, 8, 4, torch.bfloat16, fmt.word_dtype, fmt.word_dtype, 128**-0.5, 0.0, masks, PAGE,
        )
        (config,) = choose_tiles(base, 2048, SHARED_MEMORY["sm_90"], tuned=False)
        made = prefill.compile_offline(prefill.prefill_source(config, 1, 512), config)
        return next(body for body in loops(str(made["ttgir"])) if any("dot" in line for line in body))

    plain, padded = (hot_loop(Masks(keep=keep, keep_per_batch=keep)) for keep in (False, True))
    assert len(padded) == len(plain)
    assert not waits(padded)


def test_smartkv_uses_no_scale_in_the_tile_that_loads_it() -> None:
    """Scales of buckets, which begin anywhere, come into registers a tile ahead; no other load is there."""
    launch = recorded_smartkv(Smartkv(keys="4", values="4"), BASE.dtype, 128)[0]
    hot, *others = loops(str(compiled_for_hopper(launch, aligned=True).asm["ttgir"]))
    assert others
    assert [re.findall(r"x(f\d+|!tt.ptr<f\d+>)", kind) for kind in waits(hot)] == [["!tt.ptr<f16>"]] * 2
    loaded = [line.split("=")[0].strip() for line in hot if LOAD.search(line)]
    uses = [line for line in hot for name in loaded if re.search(rf"{re.escape(name)}\b(?! =)", line)]
    assert uses and all(line.strip().startswith("scf.yield") for line in uses), uses
