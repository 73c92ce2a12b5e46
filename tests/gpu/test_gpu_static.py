"""Static scales on CUDA: the append kernel in a compiled graph, decode steps and many rows, beside their definitions."""

from __future__ import annotations

import pytest
import torch
from e2e_layers import cache_of, llama
from learned_tables import llama_paths
from static_scales import random_scales
from test_gpu_append import compiled
from test_triton_append import assert_same
from test_triton_append_rows import BATCH, PAGES, positions, tokens
from test_triton_append_static import CASES, scales, stores

import kvcompile
from kvcompile.lowering.ops import operations as ops
from kvcompile.schemes import parse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("count", [1, 77])
@pytest.mark.parametrize(("text", "dim", "dtype"), CASES)
def test_append_is_its_body(text: str, dim: int, dtype: torch.dtype, count: int) -> None:
    scheme = parse(text)
    x, pos = tokens(1, dim, dtype).cuda()[:, :, -count:], positions(BATCH).cuda()[:, -count:]
    pos = torch.where(pos == PAGES * 64 - 1, PAGES * 64, pos)
    given = scales(3).cuda()
    wanted, found = ([plane.cuda() for plane in stores(text, dim, dtype)] for _ in range(2))
    ops.append_body(x, wanted, pos, scheme.spec(), None, [given])

    def run(x: torch.Tensor, pos: torch.Tensor, given: torch.Tensor, *planes: torch.Tensor) -> list[torch.Tensor]:
        ops.append(x, list(planes), pos, scheme.spec(), None, [given])
        return []

    arguments = [x, pos, given, *found]
    compiled(run, arguments)(*arguments)
    assert_same(found, wanted, (text, dim, count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_steps_are_those_of_eager_bodies(name: str, dtype: torch.dtype) -> None:
    """A prompt, single tokens and many behind it, with scales of each layer's own."""
    scheme = random_scales(llama_paths(2), name, amax=6.0)
    found = []
    for inner in ("eager", "inductor"):
        torch._dynamo.reset()
        model = llama(head_dim=32).to("cuda", dtype)
        run, cache = torch.compile(model, backend=kvcompile.backend(scheme, inner=inner, strict=True)), cache_of(model, "static", 256)
        words = torch.randint(1, 64, (2, 145), generator=torch.Generator().manual_seed(1)).cuda()
        with torch.no_grad():
            found.append(torch.cat([run(part, past_key_values=cache).logits.float() for part in words.split((70, 1, 73, 1), 1)], 1))
    assert (found[0] - found[1]).norm() <= 0.01 * found[0].norm()
