"""Tables on CUDA: append and attention kernels in compiled graphs, decode steps, and compiled gradients, beside their definitions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from e2e_layers import cache_of, llama
from learned_tables import llama_paths, random_table, random_tables
from test_gpu_append import compiled
from test_gpu_attend import assert_equals_eager
from test_gpu_attend import compiled as compiled_attend
from test_triton_append import assert_same
from test_triton_append_rows import BATCH, PAGES, positions, tokens
from test_triton_append_thresholds import CASES, stores, thresholds
from test_triton_attend import Case

import kvcompile
from kvcompile.extensions.beyond.learning.quantizer import QuantizerConfig, table_gradients
from kvcompile.lowering.decode.config import Bias
from kvcompile.lowering.ops import operations as ops
from kvcompile.schemes import parse
from kvcompile.types import Role, SlotSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def attentions() -> list[Case]:
    """Every number of bits and group, heads of all sizes, few and many rows, masks, and tables on one side only."""
    found = []
    for text in ("beyond", "beyond(bits=2)", "beyond(bits=3)", "beyond(bits=5)", "nf4"):
        base = Case(text, text, dtype=torch.bfloat16, K=2, D=128, Dv=128, T=1000, splits=1)
        found += [
            base, dataclasses.replace(base, T=65, G=7, B=3), dataclasses.replace(base, S=3, B=2, lo=True, keep=True),
            dataclasses.replace(base, D=64, Dv=64, G=1, dtype=torch.float16), dataclasses.replace(base, D=256, Dv=256, G=2, T=300),
        ]
    base = found[0]
    changes: tuple[dict[str, object], ...] = (
        {"key": "beyond(group=64)", "value": "beyond(group=128)"}, {"key": "beyond(group=128)", "value": "beyond(group=64)", "G": 8},
        {"key": "beyond(group=64)", "value": "beyond(group=64)", "D": 256, "Dv": 256, "G": 2, "T": 300},
        {"D": 96, "Dv": 96, "T": 200}, {"D": 80, "Dv": 80, "T": 200}, {"value": "int4"}, {"key": "kivi", "exact_newest": 40},
        {"key": "int8", "value": "nf4"}, {"S": 8, "T": 300}, {"S": 15, "T": 300}, {"S": 70, "T": 500}, {"outlier": True},
        {"magnitude": 1e-4}, {"T": 9000, "sinks": True}, {"bias": Bias.ADDED, "S": 3, "softcap": 20.0}, {"dtype": torch.float32, "T": 200},
        {"key": "beyond(scale_dtype=bfloat16)", "value": "nf4(scale_dtype=float32)", "T": 200},
    )
    return [*found, *(dataclasses.replace(base, **change) for change in changes)]  # type: ignore[arg-type]


@pytest.mark.parametrize("case", attentions(), ids=str)
def test_attention_is_its_body(case: Case) -> None:
    assert_equals_eager(case, compiled_attend())


@pytest.mark.parametrize("count", [1, 77])
@pytest.mark.parametrize(("text", "dim", "dtype"), [
    *CASES, ("beyond(scale_dtype=bfloat16)", 64, torch.bfloat16), ("beyond", 80, torch.float16),
])
def test_append_is_its_body(text: str, dim: int, dtype: torch.dtype, count: int) -> None:
    scheme = parse(text)
    groups = scheme.layout(SlotSpec(1, dim, dtype, Role.KEY)).planes[-1].rows
    x, pos = tokens(1, dim, dtype).cuda()[:, :, -count:], positions(BATCH).cuda()[:, -count:]
    pos = torch.where(pos == PAGES * 64 - 1, PAGES * 64, pos)
    table = thresholds(scheme.bits, groups, 3).cuda()  # type: ignore[attr-defined]
    wanted, found = ([plane.cuda() for plane in stores(text, dim, dtype)] for _ in range(2))
    ops.append_body(x, wanted, pos, scheme.spec(), None, [table])

    def run(x: torch.Tensor, pos: torch.Tensor, table: torch.Tensor, *planes: torch.Tensor) -> list[torch.Tensor]:
        ops.append(x, list(planes), pos, scheme.spec(), None, [table])
        return []

    arguments = [x, pos, table, *found]
    compiled(run, arguments)(*arguments)
    assert_same(found, wanted, (text, dim, count))


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_steps_are_those_of_eager_bodies(bits: int) -> None:
    """A prompt, single tokens and several, with tables of each layer's own."""
    scheme = random_tables(llama_paths(2), bits=bits)
    found = []
    for inner in ("eager", "inductor"):
        torch._dynamo.reset()
        model = llama(head_dim=32).cuda()
        run, cache = torch.compile(model, backend=kvcompile.backend(scheme, inner=inner, strict=True)), cache_of(model, "static", 128)
        words = torch.randint(1, 64, (2, 75), generator=torch.Generator().manual_seed(1)).cuda()
        with torch.no_grad():
            found.append(torch.cat([run(part, past_key_values=cache).logits for part in words.split((70, 1, 3, 1), 1)], 1))
    assert (found[0] - found[1]).norm() <= 0.01 * found[0].norm()


@pytest.mark.parametrize("bits", [2, 4, 5])
def test_compiled_gradients_are_those_of_tensor_code(bits: int) -> None:
    x, grad = (torch.randn(2, 2, 300, 64, generator=torch.Generator().manual_seed(at)).cuda().bfloat16() for at in range(2))
    table = random_table(bits, 2, 2, 0)
    levels, edges = table.levels.cuda(), table.thresholds.cuda()
    rule = QuantizerConfig(bits, torch.float16, 0.009 * (2**bits - 1))
    found = torch.ops.kvcompile.table_gradients(grad, x, levels, edges, bits, torch.float16, rule.window)
    for mine, wanted in zip(found, table_gradients(grad, x, levels, edges, rule), strict=True):
        assert mine.is_contiguous() and torch.allclose(mine, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
    scheme = parse(f"beyond(bits={bits},trained=True)").spec()
    mapped = torch.ops.kvcompile.level_mapped(x, levels, edges, bits, torch.float16)
    # A product and a sum may be one instruction; codes are those of eager code.
    torch.testing.assert_close(mapped, ops.read_back_body(x, [levels[None, None]], [edges[None, None]], scheme))
