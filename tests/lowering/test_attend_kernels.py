"""Which kernel an attention gets is said by what chooses it: the report, ``explain`` and Inductor's lowering agree."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from e2e_models import IndexCopyAttribute
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import kvcompile
from kvcompile.explain import explain
from kvcompile.lowering import attend_kernels, inductor
from kvcompile.lowering.attend_kernels import (
    CPP,
    DECODE,
    EAGER,
    KERNELS,
    PREFILL,
    AttendFacts,
    AttendKernel,
    choose,
    kernel_lines,
    kernels_for,
)
from kvcompile.lowering.decode.lower import _Lowered, merge
from kvcompile.lowering.decode.template import LOG2E
from kvcompile.lowering.host.inductor_api import lowerings
from kvcompile.lowering.ops import operations as ops
from kvcompile.lowering.ops.operands import AttendOperands, attend_operands, named, names_of
from kvcompile.lowering.prefill.lower import lower_first
from kvcompile.passes.rewrite.rewritten import Variant
from kvcompile.schemes import SCHEMES, Scheme, parse
from kvcompile.types import Role, SlotSpec

aten = torch.ops.aten

pytestmark = [pytest.mark.usefixtures("one_thread", "fresh_dynamo")]

EXPECTED = {
    "dense": (CPP, None), "int8": (CPP, None), "nf4": (CPP, None), "beyond": (CPP, None), "fp8-static": (CPP, None),
    "beyond(bits=3)": (EAGER, "words of several bytes (beyond)"), "kivi": (EAGER, "scales of several tokens (kivi)"),
    "gauss": (CPP, None), "gauss(bits=2)": (CPP, None), "gauss(bits=3)": (EAGER, "words of several bytes (gauss)"),
    "squat(subblock=16,rank=8)": (EAGER, "scales of several tokens (squat)"),
}


def module() -> IndexCopyAttribute:
    """An attention over two buffers, 64 channels a head."""
    torch.manual_seed(0)
    return IndexCopyAttribute(batch=1, heads=2, kv=2, dim=64, capacity=96)


def step(run: Any, at: int) -> Any:
    """One call with one token."""
    with torch.no_grad():
        return run(torch.ones(1, 1, 128), torch.arange(at, at + 1))


@pytest.mark.compile
@pytest.mark.parametrize("scheme", EXPECTED)
def test_what_is_said_is_what_inductor_emits(scheme: str) -> None:
    kernel, why = EXPECTED[scheme]
    with inductor_config.patch(force_disable_caches=True):
        fresh = kvcompile.backend(scheme, strict=True)
        filled = module()
        with torch.no_grad():
            filled(torch.randn(1, 5, 128), torch.arange(5))
        _, code = run_and_get_code(lambda: step(torch.compile(filled, backend=fresh, fullgraph=True), 5))
    emitted = "\n".join(code)
    called = "torch.ops.kvcompile.attend.default(" in emitted
    assert called == (kernel is EAGER)
    said = f"1 x attend ({kernel.name}{': ' + why if why else ''})"
    assert f"over a filled cache: {said}" in fresh.report().graphs[-1].kernels[-1]
    assert said in " ".join(str(fresh.report()).split())
    told = explain(module(), (torch.randn(1, 1, 128), torch.arange(1)), scheme)
    assert any(said in line for graph in told.graphs for line in graph.kernels)


@pytest.mark.parametrize(("tokens", "kernel"), [(1, DECODE), (40, DECODE), (70, PREFILL)])
def test_rows_of_queries_choose_the_template_that_explain_names(tokens: int, kernel: Any) -> None:
    """Of a graph that reads a filled cache; on CUDA, where Inductor has a template for few rows and one for many."""
    owner, filled = kvcompile.backend("int8", inner="eager", strict=True), module()
    with torch.no_grad():
        filled(torch.randn(1, 5, 128), torch.arange(5))
        torch.compile(filled, backend=owner, dynamic=False)(torch.randn(1, tokens, 128), torch.arange(5, 5 + tokens))
    variants = owner.records[-1].variants
    assert variants is not None
    said = kernel_lines(variants.rewritten(Variant.PAST).module.graph, "cuda", {}, 1)
    assert f"1 x attend ({kernel.name})" in said


def test_other_compilers_run_eager_bodies_and_say_so() -> None:
    owner = kvcompile.backend("int8", inner="eager", strict=True)
    step(torch.compile(module(), backend=owner, fullgraph=True), 0)
    assert "1 x attend (eager body)" in str(owner.report().graphs[-1].kernels)


@pytest.mark.parametrize("cls", SCHEMES, ids=lambda cls: cls.name)
@pytest.mark.parametrize("device", ["cuda", "cpu", "xpu"])
def test_every_scheme_gets_a_kernel_or_a_reason(cls: type[Scheme], device: str) -> None:
    for scheme in cls.variants():
        slots = tuple((scheme.for_role(role).spec(), SlotSpec(2, 128, torch.float32, role)) for role in Role)
        facts = AttendFacts(device, slots, exact_newest=bool(scheme.window))
        kernel, why = choose(facts)
        assert kernel.device in {None, device} and kernel in KERNELS
        gaps = [earlier.gap(facts) for earlier in KERNELS[: KERNELS.index(kernel)] if earlier.serves(facts)]
        assert None not in gaps and why == (gaps[-1] if gaps else None)
        assert kernel is not EAGER or why or device == "xpu"


@pytest.mark.parametrize(
    ("device", "given", "found"),
    [
        ("cuda", {"extra_key_planes": True}, "keys in two planes"), ("cuda", {"dtype": torch.float64}, "queries in torch.float64"),
        ("cuda", {"page_rows": 48}, "pages of 48 tokens"), ("cpu", {"exact_newest": True}, "newest tokens in full precision"),
        ("cpu", {"exact_first": True}, "first tokens in full precision"),
        ("cpu", {"rope": True}, "keys stored before RoPE"), ("cpu", {"extra_key_planes": True}, "keys in two planes"),
    ],
)
def test_gaps(device: str, given: dict[str, Any], found: str) -> None:
    slots = tuple(("int8", SlotSpec(2, 64, torch.float32, role)) for role in Role)
    kernel, why = choose(AttendFacts(device, slots, **given))
    assert kernel is EAGER and why is not None and found in why
    assert choose(AttendFacts(device, slots)) == (DECODE if device == "cuda" else CPP, None)


def test_many_rows_are_a_kernels_own_business() -> None:
    """What that kernel does not know, and what has strides that it does not, is the other template's."""
    slots = tuple(("int8", SlotSpec(2, 64, torch.float32, role)) for role in Role)
    many = AttendFacts("cuda", slots, rows=512)
    assert list(kernels_for(many)) == [(PREFILL, None), (DECODE, None), (EAGER, None)]
    assert choose(dataclasses.replace(many, rope=True)) == (DECODE, "keys stored before RoPE")
    assert choose(dataclasses.replace(many, bias=True)) == (DECODE, "a mask operand of its own")
    assert choose(dataclasses.replace(many, exact_first=True)) == (PREFILL, None)
    assert choose(dataclasses.replace(many, device="cpu")) == (CPP, None)


@pytest.mark.parametrize(("text", "dim", "dtype", "knows"), [
    ("beyond", 128, torch.bfloat16, True), ("beyond(bits=3)", 64, torch.float16, True), ("nf4", 128, torch.bfloat16, True),
    ("gauss", 128, torch.bfloat16, True), ("gauss(bits=3)", 64, torch.float16, True), ("gauss(bits=2)", 256, torch.bfloat16, True),
    ("beyond", 96, torch.bfloat16, False), ("beyond", 128, torch.float32, False),
])
def test_many_rows_over_tables_are_attended_to_by_decoded_chunks(text: str, dim: int, dtype: torch.dtype, knows: bool) -> None:
    slots = tuple((parse(text).spec(), SlotSpec(2, dim, dtype, role)) for role in Role)
    found = choose(AttendFacts("cuda", slots, dtype, rows=512))
    assert found == ((PREFILL, None) if knows else (DECODE, "tables of levels that no chunk is decoded by"))


@pytest.mark.parametrize("pair", [("beyond", "dense"), ("dense", "nf4")])
def test_tables_beside_dense_tokens_are_no_chunks(pair: tuple[str, str]) -> None:
    """The lowering decodes chunks of both halves or of none, and the kernel that is named must be the one that runs."""
    slots = tuple((parse(text).spec(), SlotSpec(2, 128, torch.bfloat16, role)) for text, role in zip(pair, Role, strict=True))
    assert choose(AttendFacts("cuda", slots, torch.bfloat16, rows=512)) == (DECODE, "tables of levels that no chunk is decoded by")


@pytest.mark.parametrize("given", [{}, {"exact_newest": [1, 2], "base": 3}, {"interleaved": True, "extra_key_dim": 4}])
def test_operands_are_those_of_the_schema(given: dict[str, Any]) -> None:
    names = names_of(ops.attend)
    assert [field.name for field in dataclasses.fields(AttendOperands)] == list(names)
    every = {argument.name: argument.default_value for argument in ops.attend._schema.arguments if argument.has_default_value()}
    plain = dict(zip(names, range(100, 113), strict=False))
    made = AttendOperands(**plain, **given)
    assert {name: getattr(made, name) for name in names} == {**plain, **every, **given}
    assert named(ops.attend, made.arguments(), {}).items() >= (plain | given).items()
    assert AttendOperands(*made.arguments()) == made == attend_operands({**plain, **given, "telemetry": 0})


@pytest.mark.compile
def test_a_kernel_in_front_of_the_others_is_chosen_named_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that adding one takes is its place in the list."""
    lowered: list[AttendOperands[Any]] = []

    def lower(operands: AttendOperands[Any]) -> Any:
        lowered.append(operands)
        return EAGER.lower(operands)

    mine = AttendKernel("my kernel", "cpu", lambda facts: None if facts.slots[0][0].startswith("int8") else "another scheme", lower)
    monkeypatch.setattr(attend_kernels, "KERNELS", (mine, *KERNELS))
    for scheme, said in (("int8", "attend (my kernel)"), ("dense", f"attend ({CPP.name}: another scheme)")):
        owner, filled, plain = kvcompile.backend(scheme, strict=True), module(), module()
        lowered.clear()
        with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
            x = torch.randn(1, 5, 128)
            filled(x, torch.arange(5))
            plain(x, torch.arange(5))
        with inductor_config.patch(force_disable_caches=True):
            found = step(torch.compile(filled, backend=owner), 5)
        torch.testing.assert_close(found, step(plain, 5), atol=2e-2, rtol=0)
        assert said in owner.report().graphs[-1].kernels[-1]
        assert bool(lowered) == (scheme == "int8")


@pytest.mark.compile
def test_inductor_sums_first_tokens_in_operations_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention over nothing but first tokens is those sums alone; the template for many rows adds them to its own."""

    def lower(operands: AttendOperands[Any]) -> Any:
        operands, sums = lower_first(operands)
        assert operands.keep is not None and not operands.exact_first
        nothing = [1, *operands.q.get_size()[:3], operands.value_dim + 2]
        none = lowerings[aten.full](nothing, 0.0, dtype=torch.float32, device=operands.q.get_device())
        return merge(none, None, operands.value_dim, operands.q.get_dtype(), sums)

    mine = AttendKernel("sums", "cpu", lambda facts: None, lower)
    monkeypatch.setattr(attend_kernels, "KERNELS", (mine, *KERNELS))
    owner, filled, plain = kvcompile.backend("int8(sinks=64)", strict=True), module(), module()
    with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
        x = torch.randn(1, 30, 128)
        for one in (filled, plain):
            one(x, torch.arange(30))
        run = torch.compile(filled, backend=owner, dynamic=True)
        for count in (5, 6, 1):
            at = torch.arange(30, 30 + count)
            torch.testing.assert_close(run(x[:, :count], at), plain(x[:, :count], at), atol=1e-5, rtol=0)
    assert "attend (sums)" in owner.report().graphs[-1].kernels[-1]


@pytest.mark.compile
@pytest.mark.parametrize(("sinks", "apart"), [(False, False), (True, False), (False, True), (True, True)])
def test_splits_are_merged_with_their_log_sums(sinks: bool, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial sums as the Triton templates write them: base two, empty splits, and a query that sees nothing.

    ``apart``: the sums over the last tokens are in no split, as those over tokens in full precision are not.
    """
    splits, width = 3, 5
    scores, v = torch.randn(1, 4, 2, splits * 7), torch.randn(1, 4, splits * 7, width)
    scores[:, :, :, 7:14] = float("-inf")
    scores[0, 1, 0] = float("-inf")
    parts = (scores * LOG2E).unflatten(-1, (splits, 7)).movedim(3, 0)
    tops = parts.amax(-1, keepdim=True)
    weights = torch.exp2(parts - tops.masked_fill(tops.isneginf(), 0))
    sums = weights @ v.unflatten(2, (splits, 7)).movedim(2, 0)
    partial = torch.cat((sums, tops, weights.sum(-1, keepdim=True)), -1)
    extra = torch.randn(4) if sinks else None
    whole = scores if extra is None else torch.cat((scores, extra[:, None, None].expand(1, 4, 2, 1)), -1)
    expected = torch.cat((whole.softmax(-1).nan_to_num()[..., : splits * 7] @ v, whole.logsumexp(-1, keepdim=True)), -1)

    def lower(operands: AttendOperands[Any]) -> Any:
        if not apart:
            return merge(operands.bias, operands.sinks, width, None)
        do = _Lowered()
        rest = do(torch.ops.aten.squeeze, do(torch.ops.aten.slice.Tensor, operands.bias, 0, splits - 1, splits), 0)
        more = tuple(do(torch.ops.aten.slice.Tensor, rest, 3, *ends) for ends in ((0, width), (width, width + 1), (width + 1, width + 2)))
        return merge(do(torch.ops.aten.slice.Tensor, operands.bias, 0, 0, splits - 1), operands.sinks, width, None, more)

    monkeypatch.setattr(attend_kernels, "KERNELS", (AttendKernel("merge", "cpu", lambda facts: None, lower),))

    def run(q: torch.Tensor, partial: torch.Tensor, extra: torch.Tensor | None) -> torch.Tensor:
        planes, hi = [q[None]], torch.zeros(1, 2, dtype=torch.int64)
        return ops.attend(q, planes, planes, hi, None, None, partial, extra, "dense", "dense", 1.0, 0.0, width, log_sums=True)

    inductor.install()
    with inductor_config.patch(force_disable_caches=True):
        got = torch.compile(run, fullgraph=True)(torch.randn(1, 4, 2, width), partial, extra)
    torch.testing.assert_close(got, expected)
