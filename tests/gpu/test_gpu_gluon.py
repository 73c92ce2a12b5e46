"""The Gluon kernel on a GPU: beside the definition, and through compiled models, prompt and decode, with and without CUDA graphs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from gpu_llama import gpu_config, gpu_model
from launched import argument
from test_gluon_kernel import CASES, case_of
from test_gpu_attend import moved
from test_triton_attend import Case, check, operands

import kvcompile
from kvcompile.lowering.gluon.eligibility import LEAST_CAPABILITY, MEASURED_ON, available
from kvcompile.lowering.gluon.launch import device_of, launches
from kvcompile.lowering.ops.operands import AttendOperands

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < LEAST_CAPABILITY, reason="needs a CUDA device"
    ),
    pytest.mark.skipif(not available(), reason="needs a Triton with Gluon"),
]

LONG = [
    dataclasses.replace(case, T=T, B=B, K=8)
    for case in (case_of("int4"), case_of("kivi", exact_newest=33), case_of("int8"), case_of("fp8"))
    for T, B in ((1000, 1), (9000, 3), (20000, 2))
]


@pytest.mark.parametrize("case", [*CASES, *LONG], ids=str)
def test_the_operation_equals_the_definition(case: Case) -> None:
    """Twice over: partial sums of the first call are what the second one's memory begins with."""
    args = moved(operands(case))
    for _ in range(2):
        out, found = launches(AttendOperands(**args), device_of(args["q"].device))
        for written in (out, argument(found[0], "SUMS"), argument(found[0], "TOPS")):
            written.fill_(float("nan"))
        for launch in found:
            launch.run()
        failure = check(case, out, args)
        assert failure is None, failure


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return gpu_model(gpu_config())


def logits(model: torch.nn.Module, scheme: str, mode: str, kind: str, gluon: str, hidden: int = 0) -> tuple[torch.Tensor, str]:
    """Logits of a prompt and of decode steps through a compiled model, a second request behind the first, and which kernels it has.

    Once all is compiled, a step that waits for the device raises. ``hidden``: tokens of padding in front of the second row.
    """
    torch._dynamo.reset()
    owner = kvcompile.backend(scheme, strict=True, gluon=gluon)
    compiled = torch.compile(model, backend=owner, fullgraph=True, mode=mode)
    found: list[torch.Tensor] = []
    torch.manual_seed(1)
    for request in range(2):
        cache: Any = transformers.DynamicCache(config=model.config)
        if kind == "static":
            cache = transformers.StaticCache(model.config, max_cache_len=1024)
        mask = torch.ones(2, 270, dtype=torch.int64, device="cuda")
        mask[1, :hidden] = 0
        prompt, tokens = (torch.randint(0, 512, shape, device="cuda") for shape in ((2, 200), (70, 2, 1)))
        with torch.no_grad():
            seen = mask[:, :200] if hidden else None
            found.append(compiled(prompt, past_key_values=cache, attention_mask=seen).logits[:, -1:].float().clone())
            for at, token in enumerate(tokens):
                torch.cuda.set_sync_debug_mode("error" if request and mode == "default" and at > 4 else "default")
                try:
                    seen = mask[:, : 201 + at] if hidden else None
                    found += [compiled(token, past_key_values=cache, attention_mask=seen).logits.float().clone()]
                finally:
                    torch.cuda.set_sync_debug_mode("default")
    return torch.cat(found, 1), str(owner.report())


@pytest.mark.parametrize(
    ("scheme", "mode", "kind", "most"),
    [("int4", "default", "dynamic", 0.05), ("int4", "reduce-overhead", "static", 0.05), ("kivi", "reduce-overhead", "static", 0.1),
     ("int8", "reduce-overhead", "static", 0.02), ("fp8", "reduce-overhead", "static", 0.05)],
)
def test_compiled_models_give_what_the_template_gives(model: torch.nn.Module, scheme: str, mode: str, kind: str, most: float) -> None:
    """With CUDA graphs by default, without on demand. Both attend to codes of keys that bfloat16 rounds differently from layer to layer."""
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    alike = scheme in {"int4", "kivi"} and mode == "reduce-overhead"
    measured = alike and torch.cuda.get_device_capability() == MEASURED_ON
    found, kernels = logits(model, scheme, mode, kind, "measured" if measured else "always")
    wanted, others = logits(model, scheme, mode, kind, "never")
    assert "Gluon kernel for one token" in " ".join(kernels.split()) and "Gluon" not in others
    assert ((found - wanted).norm() / wanted.norm()).nan_to_num(nan=torch.inf).item() < most
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == skips


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize(("scheme", "mode", "most"), [
    ("int4", "reduce-overhead", 0.05), ("int4", "default", 0.05), ("kivi", "reduce-overhead", 0.1),
])
def test_padded_rows_of_compiled_models(model: torch.nn.Module, scheme: str, mode: str, kind: str, most: float) -> None:
    """By the counts of the graph's mask: a row with more padding than a split has tokens, beside one with none."""
    found, kernels = logits(model, scheme, mode, kind, "always", hidden=190)
    wanted, _ = logits(model, scheme, mode, kind, "never", hidden=190)
    assert "Gluon kernel for one token" in " ".join(kernels.split())
    assert ((found - wanted).norm() / wanted.norm()).nan_to_num(nan=torch.inf).item() < most
