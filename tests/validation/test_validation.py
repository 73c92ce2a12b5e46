"""Every rewrite is validated: attentions that mean something else stay as they are, and so do sites that the compiler reads wrongly."""

from __future__ import annotations

import copy
import dataclasses
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
import transformers
from e2e_models import Attention, Buffered, by_position, inputs, visible
from hostile_modules import HOSTILE, Hostile, Parts
from paged_models import PAGED_CASES

import kvcompile
from kvcompile import compilation
from kvcompile.passes.graph.dynamo import Mod
from kvcompile.passes.graph.worlds import holds
from kvcompile.passes.match.sites import LimitKind, Site, Stage
from kvcompile.validation.equivalence import SiteOutcome, Verdict
from kvcompile.validation.sizes import LONG, _smaller

CHUNKS = (5, 1, 3)


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


def run(module: torch.nn.Module, chunks: tuple[int, ...] = CHUNKS, **options: Any) -> tuple[float, kvcompile.Report]:
    """The largest difference from the module itself (NaN where both are NaN counts as none), and the report."""
    module = module.eval()
    plain, given = copy.deepcopy(module), inputs(module, chunks)
    owner = kvcompile.backend("dense", inner="eager", **options)
    with torch.no_grad():
        expected = by_position(plain, plain, given)
        found = by_position(module, torch.compile(module, backend=owner, fullgraph=True), given)
    errors = [torch.where(a.isnan() & b.isnan(), 0.0, (a - b).abs()).max() for a, b in zip(expected, found, strict=True)]
    return float(torch.stack(errors).max()), owner.report()


@pytest.mark.parametrize("name", HOSTILE)
def test_what_means_something_else_is_right(name: str) -> None:
    torch.manual_seed(0)
    error, _ = run(Hostile(HOSTILE[name]))
    assert error < 1e-5


def test_without_validation_some_are_wrong() -> None:
    """The list above would pass by itself if the matcher refused all of it."""
    torch.manual_seed(0)
    error, report = run(Hostile(HOSTILE["negative-cap"]), validate=False)
    assert report.sites and not error < 1e-5


def test_a_refusal_names_reason_seed_and_line() -> None:
    _, report = run(Hostile(HOSTILE["negative-cap"]))
    refusal = report.refusals[0]
    assert refusal.stage is Stage.VALIDATE
    assert "differs by" in refusal.reason
    assert "seed 20" in refusal.reason
    assert "hostile_modules.py" in refusal.line


def test_the_plain_one_is_rewritten() -> None:
    torch.manual_seed(0)
    error, report = run(Hostile(Parts(), kv=2))
    assert error < 1e-5
    assert report.sites == 3 and not report.refusals
    assert not any(graph.unvalidated for graph in report.graphs)


# --- long caches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "refused"), [("", False), ("negative-cap", True), ("window-of-7.5", False), ("softmax-in-float16", True)])
def test_long_caches_are_tried_at_smaller_sizes(name: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of 70,001 places: what is tried has none of that size."""
    largest: list[int] = []
    validation = sys.modules["kvcompile.validation"]
    tried = validation.tried

    def watched(part: Any, examples: Any) -> Any:
        largest.append(max(size for fake in part.captured.fakes if isinstance(fake, torch.Tensor) for size in fake.shape))
        return tried(part, examples)

    monkeypatch.setattr(validation, "tried", watched)
    parts = HOSTILE[name] if name else Parts()
    _, report = run(Hostile(parts, capacity=70_001, batch=1, heads=8, kv=8), chunks=(3, 1))
    assert bool(report.refusals) is refused
    assert largest and max(largest) < 1000
    assert not any(graph.unvalidated for graph in report.graphs)


def test_a_guard_that_divides_by_zero_does_not_hold() -> None:
    """Small sizes in place of the captured ones may divide by zero in a guard: other sizes are tried then."""
    size, other = sympy.symbols("s0 s1", integer=True)
    guard = sympy.Eq(Mod(size, other - 5), 0)
    held = [holds(guard, {size: sympy.Integer(8), other: sympy.Integer(value)}) for value in (5, 8, 9)]
    assert held == [False, False, True]


def test_numbers_become_smaller_in_their_order() -> None:
    number = _smaller({4095, 4096, 131072, LONG})
    small = [number(value) for value in (LONG, 4095, 4096, 131072)]
    assert small == sorted(small) and small[2] - small[1] == 1 and small[3] < 64
    assert number(-4095) == -number(4095) and number(5) == 5


def test_equal_layers_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layers(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Hostile(Parts()) for _ in range(4))

        def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x, pos)
            return x

    validation, count = sys.modules["kvcompile.validation"], []
    tried = validation.tried
    monkeypatch.setattr(validation, "tried", lambda part, examples: count.append(1) or tried(part, examples))
    _, report = run(Layers(), chunks=(1, 1))
    assert report.graphs[0].sites and len(report.graphs[0].sites) == 4
    assert len(count) == 1


def test_equal_layers_over_growing_caches_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's cache has symbolic sizes of its own."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    validation, count = sys.modules["kvcompile.validation"], []
    tried = validation.tried
    monkeypatch.setattr(validation, "tried", lambda part, examples: count.append(1) or tried(part, examples))
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
    )
    model, owner = LlamaForCausalLM(config).eval(), kvcompile.backend("dense", inner="eager")
    compiled, cache = torch.compile(model, backend=owner), DynamicCache(config=config)
    with torch.no_grad():
        for tokens in (6, 1, 1, 1):
            compiled(torch.zeros((1, tokens), dtype=torch.int64), past_key_values=cache)
    assert owner.report().sites == 4 * len(owner.report().graphs)
    assert len(count) == len(owner.report().graphs)


def test_padding_that_sees_nothing_is_noted() -> None:
    class Padded(Buffered):
        """A mask argument with a finite fill: rows of padding are the mean of all values in the module, zeros here."""

        def forward(self, x: torch.Tensor, pos: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            q, k, v = self.heads_first(x)
            k, v = self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)
            seen = visible(pos, self.capacity) & keep[:, None, None]
            return self.close((q @ k.mT * 0.25).masked_fill(~seen, torch.finfo(q.dtype).min).softmax(-1) @ v)

    module = Padded().eval()
    owner = kvcompile.backend("dense", inner="eager")
    keep = torch.ones(2, module.capacity, dtype=torch.bool)
    with torch.no_grad():
        torch.compile(module, backend=owner)(torch.randn(2, 5, 64), torch.arange(5), keep)
    assert owner.report().sites == 1
    assert "see no token" in str(owner.report())


# --- mutants of the compiler --------------------------------------------------------------------------


class Windowed(Attention):
    """Grouped heads, a softcap, a sliding window, a bias and padding: something for every mutant."""

    def __init__(self) -> None:
        super().__init__(kv=2)
        self.register_buffer("k_cache", torch.zeros(self.batch, self.kv, self.capacity, self.dim))
        self.register_buffer("v_cache", torch.zeros(self.batch, self.kv, self.capacity, self.dim))
        self.register_buffer("bias", torch.randn(self.heads, 1, self.capacity))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        k, v = self.k_cache.index_copy_(2, pos, k), self.v_cache.index_copy_(2, pos, v)
        k, v = (item.repeat_interleave(2, 1) for item in (k, v))
        scores = torch.tanh(q @ k.mT * self.dim**-0.5 / 5) * 5 + self.bias
        seen = visible(pos, self.capacity) & (torch.arange(self.capacity) > pos[:, None] - 4)
        return self.close(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v)


def _attention(**changes: Any) -> Callable[[Site], Site]:
    return lambda site: replace(site, attention=replace(site.attention, **changes))


def _bounds(**changes: Any) -> Callable[[Site], Site]:
    return lambda site: replace(site, bounds=replace(site.bounds, **changes))


def _heads(names: dict[str, str]) -> Callable[[Site], Site]:
    """Query heads read other kv heads."""
    def changed(site: Site) -> Site:
        turned = {name: tuple(names.get(role, role) for role in getattr(site.attention, name)) for name in ("q_roles", "out_roles")}
        return replace(site, attention=replace(site.attention, **turned))

    return changed


def _moved(name: str, by: int) -> Callable[[Site], Site]:
    def changed(site: Site) -> Site:
        limit = getattr(site.bounds, name)
        return replace(site, bounds=replace(site.bounds, **{name: replace(limit, offset=limit.offset + by)}))

    return changed


MUTANTS: dict[str, Callable[[Site], Site]] = {
    "drop-the-window": _bounds(lo=None),
    "drop-the-softcap": _attention(softcap=0.0),
    "drop-the-bias": _bounds(carried=()),
    "window-off-by-one": _moved("lo", 1),
    "window-off-by-minus-one": _moved("lo", -1),
    "causal-off-by-one": _moved("hi", -1),
    "sees-the-next-token": _moved("hi", 1),
    "swap-the-order-of-groups": _heads({"H": "GK"}),
    "twice-the-scale": lambda site: replace(site, attention=replace(site.attention, scale=2 * site.attention.scale)),
    "the-scale-a-millionth-off": lambda site: replace(site, attention=replace(site.attention, scale=(1 + 1e-6) * site.attention.scale)),
    "values-are-keys": lambda site: replace(site, value=site.key),
    "limits-from-the-call": lambda site: replace(
        site, bounds=replace(site.bounds, hi=replace(site.bounds.hi, kind=LimitKind.OWN, node=None, roles=()))
    ),
    "everything-is-seen": lambda site: replace(
        site, bounds=replace(site.bounds, lo=None, hi=replace(site.bounds.hi, kind=LimitKind.ALL, node=None, roles=()))
    ),
}
"""Faults of a matcher, as changes of what it found."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_the_matcher_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    match = compilation.match
    monkeypatch.setattr(
        compilation, "match",
        lambda captured: dataclasses.replace(found := match(captured), sites=tuple(MUTANTS[name](site) for site in found.sites)),
    )
    torch.manual_seed(0)
    error, report = run(Windowed(), chunks=(5, 1))
    assert report.refusals and all(refusal.stage is Stage.VALIDATE for refusal in report.refusals)
    assert error < 1e-5


def test_a_misread_pool_is_refused_by_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block table is the caller's: the first step has valid ones, and is compared before any that are made up."""
    match, misread = compilation.match, MUTANTS["twice-the-scale"]
    monkeypatch.setattr(
        compilation, "match",
        lambda captured: dataclasses.replace(found := match(captured), sites=tuple(misread(site) for site in found.sites)),
    )
    owner = kvcompile.backend("dense", inner="eager")
    assert PAGED_CASES[0].error(owner, (9, 1)) <= 1e-5
    assert owner.report().refusals and not owner.report().sites
    assert all(item.stage is Stage.VALIDATE and "the first step" in item.reason for item in owner.report().refusals)


def test_a_trial_that_fails_is_no_verdict_and_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(whole: Any, examples: Any) -> Any:
        raise ZeroDivisionError("by a size")

    monkeypatch.setattr(sys.modules["kvcompile.validation"], "_verdict", fails)
    with caplog.at_level(logging.DEBUG, logger="kvcompile.validation"):
        error, report = run(Windowed(), chunks=(5,))
    assert error < 1e-5 and not report.sites
    assert "validation itself failed with ZeroDivisionError: by a size" in report.refusals[0].reason
    assert any(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in caplog.records), "where it failed, in the log"


@pytest.mark.unvalidated
def test_what_no_sizes_were_found_for_is_compared_by_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where unknown is allowed: what differs in the first step is no unknown."""
    unknown = Verdict(SiteOutcome.UNKNOWN, "no sizes")
    monkeypatch.setattr(sys.modules["kvcompile.validation"], "_apart", lambda whole, examples: unknown)
    error, report = run(Windowed(), chunks=(5,))
    assert error < 1e-5 and "no sizes; its first step is equal" in report.refusals[0].reason
    torch._dynamo.reset()
    error, report = run(Windowed(), chunks=(5,), validate="where possible")
    assert error < 1e-5 and report.sites == 1 and report.graphs[0].unvalidated
    torch._dynamo.reset()
    match, misread = compilation.match, MUTANTS["twice-the-scale"]
    monkeypatch.setattr(
        compilation, "match",
        lambda captured: dataclasses.replace(found := match(captured), sites=tuple(misread(site) for site in found.sites)),
    )
    error, report = run(Windowed(), chunks=(5,), validate="where possible")
    assert error < 1e-5 and not report.sites and "the first step" in report.refusals[0].reason


class Hundredfold(Windowed):
    """Takes the positions times 100."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return super().forward(x, pos // 100)


def _hundredfold(call: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
    starts = [sum(x.shape[1] for x in given[:number]) for number in range(len(given))]
    return [call(x, 100 * torch.arange(start, start + x.shape[1])) for start, x in zip(starts, given, strict=True)]


@pytest.mark.parametrize("mutant", ["", "twice-the-scale"])
def test_an_argument_that_positions_are_computed_from_is_solved_for(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step at a hundred times its position."""
    if mutant:
        match = compilation.match
        monkeypatch.setattr(
            compilation, "match",
            lambda captured: dataclasses.replace(found := match(captured), sites=tuple(MUTANTS[mutant](site) for site in found.sites)),
        )
    torch.manual_seed(0)
    module, owner = Hundredfold().eval(), kvcompile.backend("dense", inner="eager")
    given = inputs(module, (5, 1))
    with torch.no_grad():
        expected = _hundredfold(copy.deepcopy(module), given)
        found = _hundredfold(torch.compile(module, backend=owner), given)
    assert all(float((a - b).abs().max()) < 1e-5 for a, b in zip(expected, found, strict=True))
    report = owner.report()
    if mutant:
        assert [refusal.stage for refusal in report.refusals] == [Stage.VALIDATE] * 2
        assert "different result" in report.refusals[-1].reason
    else:
        assert report.sites == 2 and [graph.validated for graph in report.graphs] == [1, 1]


def test_without_mutants_it_is_rewritten() -> None:
    torch.manual_seed(0)
    error, report = run(Windowed(), chunks=(5, 1))
    assert report.sites == 2 and not report.refusals
    assert error < 1e-5


def test_a_mutant_of_the_rewriter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tokens one row behind their place."""
    from kvcompile.passes.rewrite import positions

    indexed = positions.indexed

    def behind(emit: Any, where: Any) -> Any:
        return emit.call(torch.ops.aten.add.Scalar, indexed(emit, where), 1)

    monkeypatch.setattr(positions, "indexed", behind)
    torch.manual_seed(0)
    _, report = run(Windowed(), chunks=(1, 1))
    assert report.refusals and not report.sites


def test_a_wrong_page_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcompile.lowering.ops import operations as ops

    write = ops.write_rows
    monkeypatch.setattr(ops, "write_rows", lambda plane, rows, pos: write(plane, rows, pos.flip(-1)))
    torch.manual_seed(0)
    _, report = run(Windowed(), chunks=(5, 1))
    assert any(refusal.stage is Stage.VALIDATE for refusal in report.refusals)




@pytest.mark.parametrize("pieces", [(30, 40), (20, 300), (70, 70, 70)], ids=str)
def test_prompts_in_pieces_behind_padding_are_tried(pieces: tuple[int, ...]) -> None:
    """The mask is as long as the cache and the piece together: sizes cannot be chosen one by one."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    owner = kvcompile.backend("int8", inner="eager", strict=True)
    compiled, cache = torch.compile(model, backend=owner), transformers.DynamicCache(config=config)
    mask = torch.ones(2, sum(pieces), dtype=torch.long)
    mask[1, :11] = 0
    end = 0
    with torch.no_grad():
        for piece in (*pieces, 1):
            end += piece
            shown = torch.nn.functional.pad(mask, (0, 1), value=1)[:, :end]
            compiled(torch.randint(0, 64, (2, piece)), attention_mask=shown, past_key_values=cache)
    report = owner.report()
    assert report.sites == len(report.graphs) > 1
    assert not any(graph.unvalidated for graph in report.graphs)
