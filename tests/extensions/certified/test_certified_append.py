"""The append kernel of certified planes in Triton's interpreter against the body that it stands for, and compiled offline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted import interpreted
from test_triton_append import assert_same, fuse

from kvcompile import schemes
from kvcompile.extensions.certified.scheme import BLOCK
from kvcompile.lowering.host.launches import KernelLaunch, Recorder
from kvcompile.lowering.host.triton_api import POINTERS
from kvcompile.lowering.ops import append_window as windows
from kvcompile.types import PAGE, Role, SlotSpec

KV, DIM, BATCH = 2, 64, 2


def stores(text: str, dtype: torch.dtype, pages: int) -> list[list[torch.Tensor]]:
    """The planes that an append of keys, and of values, is given."""
    made = []
    for role in Role:
        layout = schemes.parse(text).for_role(role).layout(SlotSpec(KV, DIM, dtype, role))
        made.append([torch.full(plane.shape(pages, BATCH, KV), 3, dtype=plane.dtype) for plane in layout.planes[: layout.written]])
    return made


def assert_noted(found: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    """Notes are equal but for one unit in the last place."""
    assert torch.equal(found.isnan(), wanted.isnan()), what
    assert ((found - wanted).abs() <= wanted.abs() * 2.0**-23).logical_or(wanted.isnan()).all(), what


def tokens(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Random tokens, some of them awkward: no range in a block, a range that vanishes beside its magnitude, NaN, infinity."""
    x = torch.randn(BATCH, KV, count, DIM, generator=torch.Generator().manual_seed(seed)) * 3 + torch.arange(DIM)
    x[0, 0, :, 3] = 5
    x[0, 0, :, 4] = 1000 + x[0, 0, :, 4] * 1e-5
    x[0, 0, -2] = 0
    x[1, 1, -1, 5], x[0, 1, -1, 6] = float("nan"), float("inf")
    return x.to(dtype)


def compare(text: str, dtype: torch.dtype, before: int, pages: int) -> None:
    """Single tokens across a block's end, one out of order, and with few pages beyond the store: every plane and result."""
    from kvcompile.extensions.certified import append as certified_append
    from kvcompile.lowering.append.window_token import WindowSlot

    fuse()
    halves = [schemes.parse(text).for_role(role).spec() for role in Role]
    x = tokens(before, before + 3, dtype)
    for origin, rows in ((None, 1), (torch.tensor([0, 3]), 2)):
        wanted = stores(text, dtype, pages)
        for planes, half in zip(wanted, halves, strict=True):
            windows.append_window_body(x[:, :, :before], planes, torch.arange(before).expand(rows, -1), origin, half)
        found = [[plane.clone() for plane in planes] for planes in wanted]
        alone = [plane.clone() for plane in wanted[1]]
        for at in (*range(before, before + 3), before + 9):
            pos, new = torch.full((rows, 1), at), x[:, :, min(at, before + 2)].unsqueeze(2)
            slots = [WindowSlot(new, planes, pos, origin, half) for planes, half in zip(found, halves, strict=True)]
            assert all(certified_append.fits(slot) for slot in slots)
            used = [slot.used for slot in slots]
            exact_newest = certified_append.append_certified(slots)
            certified_append.append_certified([slots[1]._replace(planes=alone)])
            for index, half in enumerate(halves):
                expected = windows.append_window_body(new, wanted[index], pos, origin, half)
                what = (half, dtype, at, rows)
                noted = next(at for at, plane in enumerate(found[index]) if plane.shape[3:] == (PAGE // BLOCK, 2))
                others = [at for at in range(len(found[index])) if at != noted]
                assert_same(
                    (*(found[index][at] for at in others), exact_newest[index], used[index]),
                    (*(wanted[index][at] for at in others), *expected), what,
                )
                assert_noted(found[index][noted], wanted[index][noted], what)
            assert_same(alone, found[1], "values alone")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("text", "dtype", "before", "pages"), [
    ("certified", torch.float32, 45, 2), ("certified(tier2=host)", torch.float16, 63, 3), ("certified(group=32)", torch.float32, 126, 2),
    ("certified", torch.bfloat16, 17, 2), ("certified(values=full)", torch.float16, 45, 2),
])
def test_the_kernel_is_the_body(text: str, dtype: torch.dtype, before: int, pages: int) -> None:
    pytest.importorskip("triton")
    interpreted(compare, text, dtype, before, pages)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("text", ["certified(values=full)", "certified(tier2=host)"])
def test_the_kernel_compiles_offline(text: str, capability: int) -> None:
    triton: Any = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvcompile.extensions.certified import append as certified_append
    from kvcompile.lowering.append.window_token import WindowSlot

    recorder, x, pos = Recorder(), torch.zeros(BATCH, KV, 1, DIM, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64)
    certified_append.append_certified([
        WindowSlot(x, planes, pos, None, schemes.parse(text).for_role(role).spec())
        for planes, role in zip(stores(text, torch.bfloat16, 2), Role, strict=True)
    ], recorder)
    (launch,) = recorder.steps
    assert isinstance(launch, KernelLaunch)
    constants = {parameter.name for parameter in launch.kernel.params if parameter.is_constexpr}
    signature = {
        name: "constexpr" if name in constants else POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "i32"
        for name, value in launch.arguments.items()
    }
    fixed = {(index,): launch.arguments[name] for index, name in enumerate(launch.arguments) if name in constants}
    source = ASTSource(launch.kernel, signature, constexprs=fixed)
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4}).asm["cubin"]
