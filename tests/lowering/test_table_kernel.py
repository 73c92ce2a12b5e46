"""The decode kernel over tables as Triton compiles it for sm_90, its PTX run in numpy, against ``attend_body`` in float64.

Assembly relies on what rows and columns of a block a thread has, which the interpreter does not know.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import ptx
import pytest
import torch
from test_triton_attend import Case, check, config_of, operands, run_kernel

from kvcompile import schemes
from kvcompile.lowering.decode import offline
from kvcompile.lowering.decode.config import AttendConfig, Bias, Masks, Tile
from kvcompile.lowering.decode.tiles import UNASKED, choose_tiles, declared
from kvcompile.lowering.host.triton_api import POINTERS, built_for
from kvcompile.lowering.site_kernel import SHARED_MEMORY
from kvcompile.types import PAGE, Role, SlotSpec

pytestmark = pytest.mark.compile

BASE = Case("beyond", "beyond", dtype=torch.bfloat16, D=128, Dv=128, T=100, splits=1)


def chosen(case: Case) -> AttendConfig:
    """What is chosen for a case's schemes, heads and rows without tuning."""
    slots = ((case.key, case.D, Role.KEY), (case.value, case.Dv, Role.VALUE))
    scales = [dim // schemes.parse(text).format(SlotSpec(8, dim, case.dtype, role)).group for text, dim, role in slots]
    packs = [count if count in {2, 4} else 1 for count in scales]
    base = config_of(
        case.key, value_scheme=case.value, key_dim=case.D, value_dim=case.Dv, dtype=case.dtype, key_scale_pack=packs[0],
        value_scale_pack=packs[1], group=case.G, one_query=case.S == 1, masks=Masks(lo=case.lo, keep=case.keep, bias=case.bias),
    )
    return choose_tiles(base, case.S * case.G, PAGE, tuned=False, shared_memory=SHARED_MEMORY["sm_90"])[0]


def launcher(tile: Tile) -> Callable[[Any, tuple, list[torch.Tensor]], None]:
    """A function that compiles a kernel of pointers alone for sm_90 and runs it on a grid; the last tensor is its output."""

    def launch(kernel: Any, grid: tuple, tensors: list[torch.Tensor]) -> None:
        names = kernel.arg_names
        signature = {name: POINTERS[tensor.dtype] for name, tensor in zip(names, tensors, strict=True)}
        made = built_for(kernel, signature, names, 90, tile.num_warps, tile.num_stages)
        memory = ptx.Memory(dict(zip(names, tensors, strict=True)))
        program = ptx.translate(made.asm["ptx"])
        ptx.run(program, made.metadata.shared, tile.num_warps, grid, memory, [memory.address(name) for name in names])
        tensors[-1].copy_(memory.read(names[-1], tensors[-1]))

    return launch


CASES = [
    dataclasses.replace(BASE, B=3), dataclasses.replace(BASE, S=8, lo=True, keep=True),
    dataclasses.replace(BASE, key="beyond(bits=3)", value="beyond(bits=5)", G=2, exact_newest=20, splits=2),
    dataclasses.replace(BASE, key="beyond(group=64)", value="beyond(group=64)", D=256, Dv=256, G=2, T=40),
    # Tiles of 16 tokens, whose masks are bytes.
    dataclasses.replace(BASE, key="nf4", value="nf4", D=256, Dv=256, G=2, T=40, keep=True),
    # Two of them are a run whose kept tokens are counted, and the last token cuts one.
    dataclasses.replace(BASE, key="nf4", value="nf4", D=256, Dv=256, G=2, T=60, keep=True),
    dataclasses.replace(BASE, key="nf4", value="nf4", D=256, Dv=256, G=2, T=170, splits=3, keep=True),
    dataclasses.replace(BASE, key="nf4", value="nf4", D=256, Dv=256, G=2, T=40, bias=Bias.BOOLEAN),
]
CASES += [
    # One norm a token, without zero points; a head of channels that are no power of two, whose last words are padded.
    dataclasses.replace(BASE, key="gauss", value="gauss", B=2),
    dataclasses.replace(BASE, key="gauss(bits=3)", value="gauss(bits=2)", keep=True, S=5),
    dataclasses.replace(BASE, key="gauss", value="nf4(granularity=token)", D=80, Dv=96, T=50),
]
BESIDE = [
    # Beside what is decoded element by element, and keys that are rotated in the kernel.
    dataclasses.replace(BASE, key="nf4", value="beyond(bits=3)", D=256, Dv=64, G=2),
    dataclasses.replace(BASE, key="int8", value="int8", D=80, Dv=80, S=2, G=2, rotary=32),
]


@pytest.mark.parametrize("case", CASES + BESIDE, ids=str)
def test_ptx_is_the_body(case: Case) -> None:
    config = chosen(case)
    key, value = config.plans
    assert (bool(key.picked and value.paired)) == (case in CASES)
    case = dataclasses.replace(case, tile=config.tile)
    args = operands(case)
    failure = check(case, run_kernel(case, args, launcher(case.tile), packed=True), args)
    assert failure is None, failure


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("bits", [2, 4, 5])
def test_declared_shared_memory_is_counted(bits: int, dim: int) -> None:
    """A launch does not know of it: all must fit what needs no asking, or levels are not looked up."""
    for rows in (2, 16, 64):
        scheme = f"beyond(bits={bits})"
        base = config_of(scheme, key_dim=dim, value_dim=dim, one_query=rows == 2)
        (config,) = choose_tiles(base, rows, PAGE, tuned=False, shared_memory=SHARED_MEMORY["sm_90"])
        sizes = re.findall(r"\.b8 \w+\[(\d+)\]", offline.attend_source(config))
        assert bool(sizes) == config.plans[0].picked
        assert sum(-(-int(size) // 16) * 16 for size in sizes) <= declared(config, config.tile) <= UNASKED


def test_levels_are_not_looked_up_beyond_what_a_launch_may_have() -> None:
    base = config_of("beyond(bits=5)", key_dim=256, value_dim=256)
    (config,) = choose_tiles(base, 2, PAGE, tuned=False, shared_memory=SHARED_MEMORY["sm_90"])
    assert all(plan.elements for plan in config.plans)
    assert declared(base, Tile(16, 8, True, 1, 2, 2)) > UNASKED // 2
