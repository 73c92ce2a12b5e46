"""When the Gluon kernel is chosen, what takes its place when it is not, and how a compiled graph calls it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from e2e_models import IndexCopyAttribute
from launched import run_launch
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import kvcompile
from kvcompile.errors import BadSetting
from kvcompile.lowering import attend_kernels
from kvcompile.lowering.attend_kernels import DECODE, GLUON, KERNELS, AttendFacts, choose
from kvcompile.lowering.compile import gluon_choice
from kvcompile.lowering.gluon import eligibility, launch, lower
from kvcompile.lowering.gluon.eligibility import GluonSettings, SingleTokenFacts, choosing, single_token_facts
from kvcompile.settings import Gluon, Settings
from kvcompile.types import Role, SlotSpec

pytestmark = [pytest.mark.usefixtures("one_thread", "fresh_dynamo")]

ONE = SingleTokenFacts(4, 0.0, (9, 0), True)


def facts(scheme: str = "int4", dim: int = 128, **changes: Any) -> AttendFacts:
    """An attention of one token that the kernel knows, but for ``changes``."""
    slots = tuple((scheme, SlotSpec(8, dim, torch.bfloat16, role)) for role in Role)
    return AttendFacts(**{"device": "cuda", "slots": slots, "dtype": torch.bfloat16, "one": ONE, **changes})


@pytest.mark.parametrize("scheme", ["int4", "kivi", "int4(group=64)"])
def test_it_is_chosen_where_it_was_measured(scheme: str) -> None:
    assert choose(facts(scheme, exact_newest=scheme == "kivi")) == (GLUON, None)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (facts("int8"), "not measured to be faster"), (facts("kivi(bits=4)"), "not measured to be faster"),
        (facts(dim=64), "heads of 64"), (facts(dtype=torch.float32), "float32"), (facts(rope=True), "RoPE"),
        (facts(bias=True), "a mask operand"), (facts(page_rows=1), "pages of 1"), (facts(page_rows=128), "pages of 128"),
        (facts(one=dataclasses.replace(ONE, group=16)), "16 query heads"), (facts(one=dataclasses.replace(ONE, softcap=20.0)), "a softcap"),
        (facts(one=dataclasses.replace(ONE, capability=(8, 0))), "capability 8.0"),
        (facts(one=dataclasses.replace(ONE, capability=(7, 5), measured=False)), "capability 7.5"),
        (facts(one=dataclasses.replace(ONE, capability=None)), "capability none"),
        (facts(exact_first=True), "first tokens"), (facts("normed", exact_newest=True), "norms of tokens"),
    ],
)
def test_gaps_leave_it_to_the_template(given: AttendFacts, found: str) -> None:
    kernel, why = choose(given)
    assert kernel is DECODE and why is not None and found in why and why.startswith("not in Gluon: ")


@pytest.mark.parametrize(
    "given", [facts("int8"), facts("fp8"), facts("kivi(bits=4)", exact_newest=True), facts("int8", dim=64), facts(dim=256)]
)
def test_what_did_not_win_is_chosen_on_demand(given: AttendFacts) -> None:
    kernel, why = choose(given)
    assert kernel is DECODE and why is not None and "not measured to be faster" in why
    assert choose(dataclasses.replace(given, one=dataclasses.replace(ONE, measured=False))) == (GLUON, None)


@pytest.mark.parametrize("scheme", ["nf4", "normed", "int8-static", "dense"])
def test_what_it_cannot_compute_is_never_chosen(scheme: str) -> None:
    given = facts(scheme, exact_newest=scheme == "normed", one=dataclasses.replace(ONE, measured=False))
    assert choose(given)[0] is DECODE


def test_a_triton_without_it_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligibility, "available", lambda: False)
    assert choose(facts()) == (DECODE, "not in Gluon: this Triton has none")


def test_the_setting_decides_whether_it_is_asked() -> None:
    asked = {
        (setting, replayed): GluonSettings(setting, replayed).open for setting in Gluon for replayed in (False, True)
    }
    assert asked == {
        (Gluon.MEASURED, False): False, (Gluon.MEASURED, True): True, (Gluon.ALWAYS, False): True, (Gluon.ALWAYS, True): True,
        (Gluon.NEVER, False): False, (Gluon.NEVER, True): False,
    }
    assert single_token_facts(4, 0.0) is None
    with choosing(GluonSettings(Gluon.ALWAYS)):
        found = single_token_facts(4, 5.0)
    assert found is not None and (found.group, found.softcap, found.measured) == (4, 5.0, False)
    assert single_token_facts(4, 0.0) is None
    with pytest.raises(BadSetting, match="'measured' or 'always' or 'never'"):
        kvcompile.backend("int4", gluon="yes")


def test_cuda_graphs_are_found_in_modes_and_options() -> None:
    plain = Settings()
    assert gluon_choice(plain, "reduce-overhead", None).replayed and not gluon_choice(plain, None, None).replayed
    assert gluon_choice(plain, None, {"triton.cudagraphs": True}).replayed
    assert not gluon_choice(plain, "reduce-overhead", None, replayed=False).replayed
    assert gluon_choice(Settings(mode="max-autotune", gluon=Gluon.NEVER), None, None) == GluonSettings(Gluon.NEVER, True)


def test_a_kernel_that_does_not_compile_is_the_templates(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    lower.compiles.cache_clear()
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    def fails(*operands: Any, **options: Any) -> Any:
        raise ImportError("mma_v2")

    monkeypatch.setattr(launch, "device_of", lambda device: launch.Device(132, overlaps=True))
    monkeypatch.setattr(launch, "launches", fails)
    assert not lower.compiles((1,) * 13, "cuda:0")
    assert "the Triton template takes its place" in caplog.text and "mma_v2" in caplog.text
    lower.compiles.cache_clear()


def test_a_module_from_the_cache_finds_the_operations_that_it_calls() -> None:
    """In a process that lowers nothing."""
    look = (
        "from kvcompile.lowering import inductor; inductor.install(); import torch;"
        "print([torch.ops.kvcompile.attend_gluon.default, torch.ops.kvcompile.attend_chunks.default])"
    )
    done = subprocess.run([sys.executable, "-c", look], check=False, capture_output=True, text=True)
    assert done.returncode == 0 and "attend_gluon" in done.stdout, done.stderr


@pytest.fixture
def in_numpy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let the kernel be a CPU's: its PTX runs in numpy. Yields the number of splits of each call."""
    calls: list[int] = []

    def run(*args: Any) -> torch.Tensor:
        operands, kept = launch.given_to(args)
        assert (kept is None) == (operands.keep is None), "a graph counts what its mask keeps"
        out, found = launch.launches(operands, launch.Device(132, overlaps=True), most=3, kept=kept)
        for each in found:
            run_launch(each)
        calls.append(found[0].grid[0])
        return out

    mine = dataclasses.replace(GLUON, device="cpu", one=False, gap=lambda facts: None)
    monkeypatch.setattr(attend_kernels, "KERNELS", (mine, *KERNELS))
    monkeypatch.setattr(lower, "compiles", lambda forms, device: True)
    library = torch.library.Library("kvcompile", "IMPL")
    library.impl("attend_gluon", run, "CPU")
    yield calls
    library._destroy()


@pytest.mark.compile
def test_a_compiled_model_calls_it(in_numpy: list[int]) -> None:
    """Decode through Inductor, over codes and newest tokens; planes grow, splits with them, and nothing is compiled anew."""
    torch.manual_seed(0)
    model = IndexCopyAttribute(batch=1, heads=2, kv=1, dim=128, capacity=640).to(torch.bfloat16)
    twin = copy.deepcopy(model)
    owner = kvcompile.backend("kivi", strict=True, reserve=128)
    run = torch.compile(model, backend=owner, fullgraph=True)
    reference = torch.compile(twin, backend=kvcompile.backend("kivi", strict=True, inner="eager"), fullgraph=True)

    def step(at: int) -> None:
        x, where = torch.randn(1, 1, 256).to(torch.bfloat16), torch.arange(at, at + 1)
        found, wanted = run(x, where), reference(x, where)
        torch.testing.assert_close(found, wanted, atol=3e-2, rtol=3e-2)

    with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
        prompt = torch.randn(1, 126, 256).to(torch.bfloat16)
        for each in (model, twin):
            each(prompt, torch.arange(126))
        _, code = run_and_get_code(lambda: step(126))
        assert "torch.ops.kvcompile.attend_gluon.default(" in "\n".join(code)
        graphs = len(owner.graphs)
        for at in range(127, 131):
            step(at)
    assert len(owner.graphs) == graphs and len(in_numpy) == 5
    # One split of codes for every 128 tokens of room, and one of newest tokens.
    assert in_numpy[0] == 2 and in_numpy[-1] > 2


@pytest.mark.compile
def test_layers_share_the_counts_of_their_mask(in_numpy: list[int]) -> None:
    """Rows with padding on their left, of which one has more than a program's tokens, beside the definition."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=128,
        vocab_size=64,
    )
    model = transformers.LlamaForCausalLM(config).eval().to(torch.bfloat16)
    tokens, mask = torch.randint(0, 64, (2, 300)), torch.ones(2, 303, dtype=torch.int64)
    mask[0, :5] = mask[1, :260] = 0

    def steps(inner: str) -> tuple[list[torch.Tensor], str]:
        torch._dynamo.reset()
        cache = transformers.StaticCache(config, max_cache_len=320)
        run = torch.compile(model, backend=kvcompile.backend("int4", strict=True, inner=inner), fullgraph=True)
        model(tokens, past_key_values=cache, attention_mask=mask[:, :300])

        def step(at: int) -> torch.Tensor:
            return run(tokens[:, at : at + 1], past_key_values=cache, attention_mask=mask[:, : 301 + at]).logits

        first, code = run_and_get_code(step, 0)
        return [first, step(1)], "\n".join(code)

    with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
        found, code = steps("inductor")
        wanted, _ = steps("eager")
    torch.testing.assert_close(found, wanted, atol=3e-2, rtol=3e-2)
    assert len(in_numpy) == 4
    calls = [line for line in code.splitlines() if "torch.ops.kvcompile.attend_gluon.default(" in line]
    assert len(calls) == 2
    assert len({line.rsplit(",", 1)[1] for line in calls}) == 1
