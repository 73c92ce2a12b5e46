"""Every stage of ``dump`` on a tiny Llama, kernels compiled offline, and what cannot be dumped."""

from __future__ import annotations

import re

import pytest
import torch
from versions import OLD_TRANSFORMERS

import kvcompile
from kvcompile.backend import Backend
from kvcompile.errors import NothingToDump
from kvcompile.explain import described, observe
from kvcompile.lowering.decode.offline import OfflineCompilation
from kvcompile.lowering.site_kernel import PrefillSite, SiteKernel
from kvcompile.passes.rewrite.rewritten import Variant
from kvcompile.report import GraphReport, Report
from kvcompile.tools.cli.dump import Dump, DumpStage
from kvcompile.tools.cli.targets import CacheKind, TargetOptions, resolve


def seen(kind: CacheKind, scheme: str) -> Backend:
    torch._dynamo.reset()
    target = resolve("hf:llama", TargetOptions(cache=kind))
    owner = kvcompile.backend(scheme, inner="eager")
    observe(target.model, target.inputs, owner)
    return owner


@pytest.fixture(scope="module")
def dynamic() -> Backend:
    return seen(CacheKind.DYNAMIC, "int4")


@pytest.fixture(scope="module")
def static() -> Backend:
    return seen(CacheKind.STATIC, "int8")


def test_captured_shows_the_cache_by_its_name(dynamic: Backend) -> None:
    text = Dump(dynamic).text(DumpStage.CAPTURED)
    assert "past_key_values.layers[0].keys" in text
    assert "self.model.layers.0.self_attn.q_proj.weight" in text
    assert "torch.ops.aten.scaled_dot_product_attention" in text
    assert "kvcompile" not in text, "no frame of ours stands for a line of the model"
    assert "site-packages" not in text


def test_normalised_names_every_part_of_a_site(dynamic: Backend) -> None:
    text = Dump(dynamic).text(DumpStage.NORMALISED)
    assert len(re.findall(r"^site \d: model\.layers\.\d\.self_attn$", text, re.MULTILINE)) == 2
    assert "H = 4 query heads over K = 2 kv heads, G = 2, D = 64, S = 1 new tokens" in text
    assert re.search(r"q +%\w+ +\[B, H, S, D\] = bfloat16\[1, 4, 1, 64\]", text)
    assert "spelled as cat" in text
    # transformers before 5.23 compares with how many tokens it counted before the call, which T is one more than.
    assert re.search(r"mask +t <= s\d+$" if OLD_TRANSFORMERS else r"mask +t <= T - 1$", text, re.MULTILINE)


def test_normalised_prefill_is_causal_by_index(dynamic: Backend) -> None:
    assert re.search(r"mask +t <= s$", Dump(dynamic, 0).text(DumpStage.NORMALISED), re.MULTILINE)


def test_rewritten_has_append_and_attend_and_no_cache(dynamic: Backend) -> None:
    text = Dump(dynamic).text(DumpStage.REWRITTEN)
    assert text.count("torch.ops.kvcompile.append.default(") == 4
    assert text.count("torch.ops.kvcompile.attend.default(") == 2
    assert "scaled_dot_product_attention.default" not in text
    assert re.search(r'kv0_key_codes: "u8\[s\d+, 1, 2, 64, 32\]"', text), "planes have types"


def test_a_variant_that_no_call_needed_is_made_for_the_dump(static: Backend) -> None:
    made = static.records[1].variants
    assert made is not None and Variant.PAST in made and Variant.FRESH not in made
    text = Dump(static, 1, Variant.FRESH).text(DumpStage.REWRITTEN)
    assert "into an empty cache" in text
    assert "attend.default(" not in text


def test_triton_source_is_one_kernel_for_equal_sites(dynamic: Backend) -> None:
    text = Dump(dynamic).text(DumpStage.TRITON)
    assert text.count("@triton.jit") == 1
    assert "# attend of model.layers.0.self_attn, model.layers.1.self_attn" in text
    assert "# keys int4, values int4" in text
    compile(text, "kernel", "exec")


class ManyRows(torch.nn.Module):
    """16 query heads over one kv head: with 64 new tokens a thousand rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(1, 1, 2048, 64, dtype=torch.float16))
        self.register_buffer("v", torch.zeros(1, 1, 2048, 64, dtype=torch.float16))

    def forward(self, q: torch.Tensor, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        self.k[:, :, pos] = x
        self.v[:, :, pos] = x
        mask = torch.arange(2048) <= pos[:, None]
        return torch.nn.functional.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask, enable_gqa=True)


def dump_of_rows(tokens: int) -> Dump:
    """The dump of a step of so many new tokens of 16 query heads, over a filled cache."""
    torch._dynamo.reset()
    owner = kvcompile.backend("int4", inner="eager")
    q, x = torch.randn(1, 16, tokens, 64, dtype=torch.float16), torch.randn(1, 1, tokens, 64, dtype=torch.float16)
    observe(ManyRows(), (q, x, torch.arange(tokens)), owner)
    return Dump(owner, variant=Variant.PAST)


@pytest.mark.compile
@pytest.mark.parametrize(("tokens", "kind"), [(4, SiteKernel), (5, PrefillSite)])
def test_many_rows_are_the_kernel_that_inductor_makes(tokens: int, kind: type) -> None:
    """From 65 rows of a kv head on it is another template."""
    dump = dump_of_rows(tokens)
    assert "@triton.jit" in dump.text(DumpStage.TRITON)
    (kernel, _), = dump.kernels("sm_90")
    assert type(kernel) is kind and kernel.queries == tokens
    assert [re.findall(r"\.entry (\w+)", str(made["ptx"])) for made in kernel.compiled("sm_90")] == [["kvcompile_attend"]]


def test_very_many_rows_are_two_kernels() -> None:
    dump = dump_of_rows(64)
    text = dump.text(DumpStage.TRITON)
    assert re.findall(r"def (kvcompile_\w+)", text) == ["kvcompile_decode", "kvcompile_attend"]
    assert "# 32768 tokens at a time: decoded by the first kernel, attended to by the second" in text
    found = dump.kernels("sm_90")[0][0].compiled("sm_90")
    assert [re.findall(r"\.entry (\w+)", made["ptx"]) for made in found] == [["kvcompile_decode"], ["kvcompile_attend"]]


def test_splits_follow_the_architecture(dynamic: Backend) -> None:
    splits = {arch: Dump(dynamic).kernels(arch)[0][0].config.splits for arch in ("sm_80", "sm_90", "sm_100")}
    assert 1 < splits["sm_80"] <= splits["sm_90"] <= splits["sm_100"]


@pytest.mark.compile
def test_ptx_needs_no_device(dynamic: Backend) -> None:
    text = Dump(dynamic).text(DumpStage.PTX, "sm_90")
    assert ".target sm_90a" in text
    assert ".entry kvcompile_attend" in text


@pytest.mark.compile
def test_sass_needs_no_device(static: Backend) -> None:
    assert "EXIT" in Dump(static).text(DumpStage.SASS, "sm_80")


class Cached(torch.nn.Module):
    """One attention over a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(1, 2, 32, 64))
        self.register_buffer("v", torch.zeros(1, 2, 32, 64))

    def forward(self, q: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        self.k[:, :, pos] = q
        self.v[:, :, pos] = q
        return torch.nn.functional.scaled_dot_product_attention(q, self.k, self.v, attn_mask=torch.arange(32) <= pos[:, None])


@pytest.mark.compile
def test_inductor_module_has_our_kernel(fresh_dynamo: None) -> None:
    owner = kvcompile.backend("int8", inner="eager")
    observe(Cached(), (torch.randn(1, 2, 1, 64), torch.tensor([0])), owner)
    text = Dump(owner).text(DumpStage.INDUCTOR)
    assert "kvcompile::attend, keys int8" in text
    assert "async_compile" in text


def test_a_graph_with_a_filled_cache_has_no_fresh_variant(dynamic: Backend) -> None:
    with pytest.raises(NothingToDump, match="expected the variant past of graph 1, found fresh"):
        Dump(dynamic, 1, Variant.FRESH).text(DumpStage.REWRITTEN)


def test_a_prefill_by_flash_attention_has_no_attend_kernel(dynamic: Backend) -> None:
    with pytest.raises(NothingToDump, match="expected an attend kernel, found graph 0 into an empty cache: 2 x scaled_dot"):
        Dump(dynamic, 0).text(DumpStage.TRITON)


def test_a_graph_that_is_not_there(dynamic: Backend) -> None:
    with pytest.raises(NothingToDump, match=r"expected a graph among 0\.\.1, found 7"):
        Dump(dynamic, 7)


def test_nothing_compiled() -> None:
    with pytest.raises(NothingToDump, match="no graph at all"):
        Dump(kvcompile.backend("int4"))


def test_an_unknown_architecture(dynamic: Backend) -> None:
    with pytest.raises(OfflineCompilation, match="sm_80, sm_90, sm_100, found sm_42"):
        Dump(dynamic).text(DumpStage.PTX, "sm_42")


def test_explained_bytes_are_those_of_the_asked_length(dynamic: Backend) -> None:
    site = described(dynamic, 6400).graphs[1].sites[0]
    assert site.bytes_before == 2 * 6400 * 2 * 64 * 2
    assert site.bytes_after == 2 * 6400 * 2 * (32 + 2 * 2)


def test_report_reads_well_when_narrow(dynamic: Backend) -> None:
    text = str(described(dynamic, 4096))
    assert "graph 1 (1 new token a call): 2 attentions rewritten, 2 validated" in text
    assert "and 1 more like it" in text
    assert "over a filled cache: 2 x attend" in text
    assert "granularity" not in text


def test_an_empty_report_is_a_report() -> None:
    assert "no graph was compiled" in str(Report(graphs=[]))
    assert "graph 0: 0 attentions rewritten" in str(Report(graphs=[GraphReport(0)]))
