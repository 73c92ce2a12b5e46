"""``certify=`` over schemes without originals, in compiled models: the same outputs, and every step within what it reports of itself."""

from __future__ import annotations

import copy
import gc
import io
import math
from typing import Any

import pytest
import torch
from e2e_models import cache_of, llama, prompt
from latent_models import LATENT_CASES
from paged_models import PAGED_CASES
from sliding_models import SLIDING_CASES
from test_read_only_caches import Decoder, drive
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import kvcompile
from kvcompile.errors import BadSetting, NoOriginals, NotBounded, NotReported
from kvcompile.lowering import compile as compiling
from kvcompile.lowering.certificate import report_op as report_site
from kvcompile.lowering.certificate.report import report_step
from kvcompile.lowering.certificate.summary import Telemetry, quantiles
from kvcompile.lowering.certificate.telemetry import added_up
from kvcompile.lowering.ops.operands import AttendOperands
from kvcompile.lowering.ops.operations import attend_body
from kvcompile.passes.plan.policy import policy_of
from kvcompile.runtime.store.live_caches import MOST_KEPT, LiveCaches
from kvcompile.runtime.store.state import CacheState
from kvcompile.runtime.store.telemetry import TelemetryPlane
from kvcompile.schemes import parse
from kvcompile.schemes.certificate.policy import Certify, Figure
from kvcompile.schemes.certificate.telemetry import COLUMNS, TELEMETRY_PLANE
from kvcompile.types import PAGE

pytestmark = [pytest.mark.usefixtures("one_thread", "fresh_dynamo"), pytest.mark.compile]

B, D, CAPACITY = 2, 32, 192
REPORT = Certify(fallback="report")  # type: ignore[arg-type]
SCHEMES = (
    "int8", "int4", "fp8", "kivi", "int8(window=16)", "nf4(window=16)", "kivi(bits=4,group=16)",
    {"k": "kivi", "v": "int8"}, {"k": "int8", "v": "int4"},
    "squat(lam=0,subblock=16)", "squat(subblock=16,rank=4)", "squat(bits=4,subblock=8,subspace=row)",
)


class Layer(nn.Module):
    """Attention of ``heads`` over ``kv`` heads of a static cache; rows are padded up to ``first``."""

    def __init__(self, heads: int = 4, kv: int = 2, first: tuple[int, ...] = (0, 0)) -> None:
        super().__init__()
        self.split = [heads, kv, kv]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.qkv = nn.Linear(64, sum(self.split) * D)
        self.padded = any(first)
        self.register_buffer("first", torch.tensor(first))
        self.register_buffer("keys", torch.zeros(B, kv, CAPACITY, D))
        self.register_buffer("values", torch.zeros(B, kv, CAPACITY, D))

    def project(self, x: torch.Tensor) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (-1, D)).transpose(1, 2).split(self.split, 1)
        return q * 3, k, v

    def mask(self, pos: torch.Tensor) -> torch.Tensor:
        t = torch.arange(CAPACITY)
        seen = t <= pos[:, None]
        return seen & (t >= self.first[:, None])[:, None, None] if self.padded else seen

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        self.keys.index_copy_(2, pos, k)
        self.values.index_copy_(2, pos, v)
        return sdpa(q, self.keys, self.values, attn_mask=self.mask(pos), enable_gqa=True)


class Exact:
    """What the layer's attention is over the original keys and values, in float64."""

    def __init__(self, layer: Layer, x: torch.Tensor) -> None:
        self.layer = layer
        with torch.no_grad():
            self.q, self.k, self.v = layer.project(x)

    def __call__(self, at: int, count: int) -> torch.Tensor:
        end, pos = at + count, torch.arange(at, at + count)
        q, k, v = (x[:, :, :end].double() for x in (self.q, self.k, self.v))
        out = sdpa(q[:, :, at:], k, v, attn_mask=self.layer.mask(pos)[..., :end], enable_gqa=True)
        return out.nan_to_num()  # padding, which sees nothing


def tokens(count: int) -> torch.Tensor:
    """Inputs of ``count`` tokens."""
    return torch.randn(B, count, 64, generator=torch.Generator().manual_seed(5))


def compiled(scheme: object, certify: Certify | None, inner: str = "eager", **sizes: Any) -> tuple[kvcompile.Backend, Layer, Any]:
    """A backend, a layer, and the layer compiled with it."""
    backend = kvcompile.backend(scheme=scheme, certify=certify, inner=inner, strict=True)
    layer = Layer(**sizes)
    return backend, layer, torch.compile(layer, backend=backend, fullgraph=True)


def told(layer: Layer) -> torch.Tensor:
    """The telemetry of a layer's cache, float64 [B, K, columns]; zeros before it has any."""
    stores = getattr(layer.keys, "_kv", None)
    planes = [
        plane for store in stores.stores.values() for plane, spec in zip(store.planes, store.spec.layout.planes, strict=True)
        if spec.name == "telemetry"
    ] if stores is not None else []
    return planes[0][0, :, :, 0].clone() if planes else torch.zeros(B, layer.split[1], TELEMETRY_PLANE.width, dtype=torch.float64)


def column(of: torch.Tensor, name: str) -> torch.Tensor:
    """One accumulator, [B, K]."""
    return of[..., COLUMNS.index(name)]


def outputs(layer: Any, x: torch.Tensor, counts: tuple[int, ...]) -> list[torch.Tensor]:
    """The layer's results, ``counts`` new tokens a call."""
    out, at = [], 0
    with torch.no_grad():
        for count in counts:
            out.append(layer(x[:, at : at + count], torch.arange(at, at + count)))
            at += count
    return out


def holds(scheme: object, inner: str, counts: tuple[int, ...], **sizes: Any) -> tuple[kvcompile.Backend, Layer]:
    """Assert that reporting changes no bit, and that every step over codes is within the bounds that it added; what was compiled."""
    x = tokens(sum(counts))
    plain = outputs(compiled(scheme, None, inner, **sizes)[2], x, counts)
    torch._dynamo.reset()
    backend, layer, run = compiled(scheme, REPORT, inner, **sizes)
    exact, at, nearest = Exact(Layer(**sizes), x), 0, 0.0
    heads, kv, _ = layer.split
    for call, (count, same) in enumerate(zip(counts, plain, strict=True)):
        before = told(layer)
        with torch.no_grad():
            found = run(x[:, at : at + count], torch.arange(at, at + count))
        added = told(layer) - before
        assert torch.equal(found, same)
        if call or layer.padded:
            error = torch.linalg.vector_norm(found.double() - exact(at, count), dim=-1).unflatten(1, (kv, -1)).sum((2, 3))
            bound = sum(column(added, f"sum_{name}") for name in ("key", "value", "arithmetic"))
            assert isinstance(bound, torch.Tensor)
            assert torch.isfinite(bound).all() and (bound > 0).all() and (error <= bound).all()
            nearest = max(nearest, float((error / bound).max()))
            assert (column(added, "steps") == 1).all() and (column(added, "head_steps") == heads // kv * count).all()
        else:
            assert not added.any(), "the first call reads its new tokens as they are"
        at += count
    assert nearest > 0.01, "bounds that nothing comes near prove little"
    return backend, layer


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_head_step_is_within_what_it_reports(scheme: object) -> None:
    """As many kv heads as heads: what a step adds is the bound of one head-step."""
    backend, _ = holds(scheme, "eager", (90, *[1] * 12), kv=4)
    found = backend.telemetry()
    assert found["head_steps"] == found["rung_plain"] == 12 * B * 4
    assert found["most_key"] == found["most_candidate_key"] > 0 and found["most_value"] > 0 and found["most_delta"] > 0
    assert not any(found[name] for name in ("blocks", "keys", "values", "explored", "cause_budget", "cause_not_finite"))
    report = backend.report()
    assert report.allocated == report.announced > 0
    assert "reads all keys and values a second time" in " ".join(str(report).split())


@pytest.mark.parametrize("scheme", ["int4", "kivi"])
def test_grouped_heads_padded_rows_and_many_tokens_a_call(scheme: str) -> None:
    backend, _ = holds(scheme, "eager", (70, 5, 1, 1, 17, 1), first=(0, 9))
    assert backend.telemetry()["head_steps"] == 95 * B * 4, "with such a mask the first call reads codes, too"


def test_a_head_without_loss_reports_what_rounding_can_do() -> None:
    x = tokens(80)
    backend, layer, run = compiled("dense", REPORT)
    outputs(run, x, (70, *[1] * 10))
    found = backend.telemetry()
    assert found["most_value"] < 1e-30 and found["most_key"] < 1e-9 and 0 < found["most_arithmetic"] < 1e-5
    assert layer.split[1] == 2 and found["head_steps"] == 10 * B * 4


def test_what_is_beyond_a_budget_is_counted() -> None:
    x, counts = tokens(80), (70, *[1] * 10)
    _, reported, run = compiled("int4", REPORT)
    outputs(run, x, counts)
    torch._dynamo.reset()
    mean = float(column(told(reported), "sum_value").sum() / column(told(reported), "head_steps").sum())
    shares = {}
    for budget in (0.0, mean, math.inf):
        backend, layer, run = compiled("int4", Certify(value_budget=budget, fallback="report"))  # type: ignore[arg-type]
        outputs(run, x, counts)
        found = backend.telemetry()
        shares[budget] = found["cause_budget"] / found["head_steps"]
        assert found["cause_not_finite"] == 0 and column(told(layer), "rung_plain").sum() == found["head_steps"]
        assert ("for budget" in str(found)) == (budget < math.inf)
        torch._dynamo.reset()
    assert shares[0.0] == 1 and 0 < shares[mean] < 1 and shares[math.inf] == 0


def test_a_value_that_is_no_number_is_no_bound() -> None:
    x = tokens(80)
    x[1, 40] = math.nan
    backend, layer, run = compiled("int8", REPORT)
    outputs(run, x, (70, 1, 1))
    found = backend.telemetry()
    assert found["cause_not_finite"] == 2 * 4, "one row of two"
    assert (column(told(layer), "sum_key")[1] == math.inf).all() and torch.isfinite(column(told(layer), "sum_key")[0]).all()


def within(layer: Layer, before: torch.Tensor, error: torch.Tensor) -> bool:
    """Whether errors [B, H, S] are within the bounds that were added since ``before``, by kv head."""
    added = told(layer) - before
    bound = sum(column(added, f"sum_{name}") for name in ("key", "value", "arithmetic"))
    return bool((error.unflatten(1, (layer.split[1], -1)).sum((2, 3)) <= bound).all())


@pytest.mark.parametrize(
    "scheme", ["kivi(bits=4,window=64)", "int4(window=64)", "kivi(group=16,window=64)", {"k": "int8", "v": "kivi(window=64)"}], ids=str
)
def test_what_a_rollback_put_back_from_codes_is_no_original(scheme: object) -> None:
    """A buffer of 102 tokens goes back to 64: of the window's 64 tokens 38 are what codes stand for."""
    x = tokens(102)
    _, layer, run = compiled(scheme, REPORT, kv=4)
    exact = Exact(Layer(kv=4), x)
    with torch.no_grad():
        run(x, torch.arange(102))
        for at in range(64, 100):
            before = told(layer)
            found = run(x[:, at : at + 1], torch.arange(at, at + 1))
            assert within(layer, before, torch.linalg.vector_norm(found.double() - exact(at, 1), dim=-1)), f"at {at}"
    (keys,) = layer.keys._kv.stores.values()
    refilled = next(plane for plane, spec in zip(keys.planes, keys.spec.layout.planes, strict=True) if spec.name == "refilled")
    assert (refilled == 102 - 64).all()


def test_one_head_records_what_a_rollback_put_back() -> None:
    x = tokens(102)
    _, layer, run = compiled("kivi(bits=4,window=64)", REPORT, kv=1)
    with torch.no_grad():
        run(x, torch.arange(102))
        run(x[:, 64:65], torch.arange(64, 65))
    (keys,) = layer.keys._kv.stores.values()
    refilled = next(plane for plane, spec in zip(keys.planes, keys.spec.layout.planes, strict=True) if spec.name == "refilled")
    assert (refilled == 102 - 64).all()


def test_a_cropped_cache_reports_what_it_put_back() -> None:
    """``DynamicCache.crop``, in bfloat16: what is put back from codes is rounded to the cache's dtype once more."""
    torch.manual_seed(0)
    model = llama(layers=1).to(torch.bfloat16)
    attended: list[torch.Tensor] = []
    backend = kvcompile.backend("kivi(bits=4,window=64,group=16)", certify=REPORT, inner="eager", strict=True)
    run = torch.compile(model, backend=backend)
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, args: attended.append(args[0]))
    cache, plain = cache_of(model, "dynamic"), cache_of(model, "dynamic")
    ids = prompt(2, 110)
    for at, count in ((0, 102), *((at, 1) for at in range(64, 84))):
        if at == 64:
            cache.crop(-38)
            plain.crop(-38)
        before = backend.telemetry()
        attended.clear()
        with torch.no_grad():
            run(ids[:, at : at + count], past_key_values=cache)
            model(ids[:, at : at + count], past_key_values=plain)
        after = backend.telemetry()
        if at:
            apart = torch.linalg.vector_norm((attended[0].double() - attended[-1].double()).unflatten(-1, (4, -1)), dim=-1)
            bound = sum(after[name] - before[name] for name in ("sum_key", "sum_value", "sum_arithmetic"))
            # The plain model rounds its result as well.
            assert 0 < float(apart.sum()) <= bound + 2.0**-7 * float(attended[-1].double().abs().sum())


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "inner"), [("int8", "inductor"), ("kivi", "aot_eager")])
def test_compilers_make_the_same(scheme: str, inner: str) -> None:
    holds(scheme, inner, (70, 1, 1, 1))


@pytest.mark.slow
def test_as_tensor_code_of_the_graph_it_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced for CUDA, here for the CPU: the definition itself, compiled with the rest of the graph."""
    scheme, counts = "int8", (70, 1, 1)
    plain, layer = holds(scheme, "eager", counts)
    expected = plain.telemetry()
    del layer
    torch._dynamo.reset()
    monkeypatch.setitem(compiling.BODIES, report_site.report_site, report_site.report_site_code)
    # Inductor's cache on disk does not know of the change.
    with torch._inductor.config.patch(force_disable_caches=True):
        backend, layer = holds(scheme, "inductor", counts)
    found = backend.telemetry()
    for name, value in expected.values.items():
        # Inductor's projections round differently, and what they round is quantized.
        assert found[name] == pytest.approx(value, rel=0.01) or "arithmetic" in name, name
    assert layer.keys.shape[2] == CAPACITY and found["most_arithmetic"] < 1e-4


def test_a_wrong_result_is_seen_whatever_made_it() -> None:
    """How far an output is from attention over its codes is measured: a kernel that errs is within its certificate too."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 2, tokens, D, generator=generator) for tokens in (1, PAGE, PAGE))
    scheme, hi = parse("int8"), torch.tensor([[60]])
    keys, values = ([x.unsqueeze(0) for x in scheme.encode(part)] for part in (k, v))
    operands = AttendOperands(q, keys, values, hi, None, None, None, None, scheme.spec(), scheme.spec(), 0.2, 0.0, D)
    good = attend_body(operands)
    exact = sdpa(q.double(), k[:, :, :61].double(), v[:, :, :61].double(), scale=0.2)
    for output in (good, good + 0.1, good.to(torch.bfloat16), torch.zeros_like(good)):
        bound, _ = report_step(output, operands)
        assert (torch.linalg.vector_norm(output.double() - exact, dim=-1) <= sum(bound)).all()


@pytest.mark.parametrize(("kind", "scheme"), [("static", "int8"), ("dynamic", "kivi(group=16,window=64)")])
def test_caches_of_a_model_are_cropped_reordered_copied_and_saved_as_before(kind: str, scheme: str) -> None:
    model, found, reports = llama(layers=1), {}, {}
    for certify in (None, REPORT):
        torch._dynamo.reset()
        backend = kvcompile.backend(scheme, certify=certify, inner="eager", strict=True)
        run, cache, rows, out = torch.compile(model, backend=backend, fullgraph=True), cache_of(model, kind), 3, []
        with torch.no_grad():
            for at, count in enumerate((9, 1, 4, 1, 1, 3)):
                out.append(run(prompt(rows, count, seed=at), past_key_values=cache).logits)
                if at == 1 and kind == "dynamic":
                    cache.crop(-1)
                elif at == 2:
                    cache.reorder_cache(torch.tensor([2, 2, 0]))
                elif at == 3 and kind == "dynamic":
                    cache.batch_select_indices(torch.tensor([1, 0]))
                    rows = 2
                elif at == 4:
                    file = io.BytesIO()
                    torch.save(cache, file)
                    file.seek(0)
                    cache = torch.load(file, weights_only=False)
        found[certify], reports[certify] = out, (len(backend.graphs), backend.telemetry()["head_steps"])
    assert all(torch.equal(a, b) for a, b in zip(found[None], found[REPORT], strict=True))
    assert reports[REPORT][0] == reports[None][0], "as many graphs"
    assert reports[REPORT][1] > 0 and reports[None][1] == 0


def test_left_padded_prompts_of_a_model() -> None:
    model, found = llama(layers=1), []
    for certify in (None, REPORT):
        torch._dynamo.reset()
        backend = kvcompile.backend("kivi(group=16,window=32)", certify=certify, inner="eager", strict=True)
        run, cache = torch.compile(model, backend=backend), cache_of(model, "static")
        mask = torch.ones(2, 20, dtype=torch.long)
        mask[1, :6] = 0
        with torch.no_grad():
            out = [run(prompt(2, 20), past_key_values=cache, attention_mask=mask).logits]
            for at in range(3):
                mask = torch.cat([mask, mask.new_ones(2, 1)], -1)
                out.append(run(prompt(2, 1, seed=at), past_key_values=cache, attention_mask=mask).logits)
        found.append(out)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    steps = backend.telemetry()
    assert steps["head_steps"] == 3 * 2 * model.config.num_attention_heads and math.isfinite(steps["most_key"])


def test_a_cache_that_is_only_read_reports_too() -> None:
    found, told_of = [], []
    for certify in (None, REPORT):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module, backend = Decoder().eval(), kvcompile.backend("int8", certify=certify, inner="eager", strict=True)
        results, memory = drive(module, torch.compile(module, backend=backend), None)
        found.append(results)
        told_of.append((backend.telemetry()["head_steps"], len(memory.across or ())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    # One, one, one, three and one new token after the first call, over the buffer and across.
    assert told_of == [(0, 2), (2 * 7 * module.batch * module.heads, 2)]


def test_explain_says_what_it_costs() -> None:
    with torch.no_grad():
        text = " ".join(str(kvcompile.explain(Layer(), (tokens(1), torch.tensor([3])), scheme="int8", certify=REPORT)).split())
    assert "1 x report_site (eager body)" in text and "reads all keys and values a second time" in text


def test_what_cannot_be_reported_is_refused_with_the_reason() -> None:
    for scheme in ("int8", {"*": "certified", "lm.0": "int4"}, "dense"):
        with pytest.raises(NoOriginals, match="fallback='report'"):
            kvcompile.backend(scheme=scheme, certify=Certify())
    with pytest.raises(NotBounded, match="smartkv"):
        kvcompile.backend(scheme="smartkv", certify=REPORT)
    with pytest.raises(NotReported, match="before their rotary embedding"):
        kvcompile.backend(scheme="kivi(pre_rope=True)", certify=REPORT)
    with pytest.raises(BadSetting, match="certify"):
        kvcompile.backend(scheme="int8", certify="report")  # type: ignore[arg-type]
    mixed = kvcompile.backend(scheme={"*": "certified", "lm.0": "dense"}, certify=Certify(v_tol=0.5)).policy
    assert [pair.certify for _, pair in mixed.rules] == [None, None] and "v_tol:0.5" in mixed.spec()
    assert kvcompile.backend(scheme="int8", certify=REPORT).policy.spec() != policy_of("int8").spec()


@pytest.mark.parametrize(("case", "reason"), [
    (LATENT_CASES[0], "a cached latent"), (SLIDING_CASES[0], "newest tokens only"), (PAGED_CASES[0], "gathered from a pool"),
], ids=str)
def test_caches_that_hold_something_else_are_refused_with_the_reason(case: Any, reason: str) -> None:
    backend = kvcompile.backend(scheme="int8", certify=REPORT, inner="eager")
    case.error(backend)
    report = backend.report()
    assert not report.sites and report.refusals and all(reason in refusal.reason for refusal in report.refusals)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_what_was_said_outlives_the_cache(kind: str) -> None:
    """``generate`` keeps no cache: its head-steps count all the same, those of beams and copies once."""
    model = llama(layers=2)
    backend = kvcompile.backend("int8", certify=REPORT, inner="eager", strict=True)
    run = torch.compile(model, backend=backend)
    counts = []
    for _ in range(2):
        cache = cache_of(model, kind)
        with torch.no_grad():
            for count in (5, 1, 1, 1):
                run(prompt(2, count), past_key_values=cache)
            cache.reorder_cache(torch.tensor([1, 1]))
            run(prompt(2, 1), past_key_values=cache)
        kept = copy.deepcopy(cache)
        counts.append(backend.telemetry()["head_steps"])
        cache = None
        gc.collect()
        assert backend.telemetry()["head_steps"] == counts[-1]
        del kept
        gc.collect()
        found = backend.telemetry()
        assert found["head_steps"] == counts[-1] and len(backend.memory.live) == 0
    # Four steps over codes, two layers, two rows, four heads.
    assert counts == [4 * 2 * 2 * 4, 2 * 4 * 2 * 2 * 4]
    assert 0 < found["sum_key"] and found["most_key"] <= found["sum_key"] and found["rung_plain"] == counts[-1]


def test_an_emptied_cache_keeps_what_it_said() -> None:
    x = tokens(12)
    backend, layer, run = compiled("int8", REPORT)
    outputs(run, x, (10, 1, 1))
    before = backend.telemetry()["head_steps"]
    layer.keys.zero_(), layer.values.zero_()
    assert backend.telemetry()["head_steps"] == before > 0
    outputs(run, x, (10, 1, 1))
    assert backend.telemetry()["head_steps"] == 2 * before


def test_telemetry_of_heads_adds_up_and_knows_its_layers() -> None:
    """By module path, row and kv head; a copy of a cache says what happened since it was one."""
    model = llama(layers=2)
    backend = kvcompile.backend(scheme="int8", certify=REPORT, inner="eager", strict=True)
    run, cache = torch.compile(model, backend=backend, fullgraph=True), cache_of(model, "dynamic")
    ids = torch.randint(1, 60, (2, 14), generator=torch.Generator().manual_seed(0))
    assert backend.telemetry_of_heads() == []
    with torch.no_grad():
        run(ids[:, :11], past_key_values=cache)
        for at in range(11, 14):
            run(ids[:, at : at + 1].contiguous(), past_key_values=cache)
    heads, whole = backend.telemetry_of_heads(), backend.telemetry()
    paths = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    kv = model.config.num_key_value_heads
    places = [(path, row, head) for path in paths for row in range(2) for head in range(kv)]
    assert [(item.path, item.row, item.head) for item in heads] == places
    assert sum(item.telemetry["head_steps"] for item in heads) == whole["head_steps"] > 0
    assert sum(item.telemetry["sum_key"] for item in heads) == pytest.approx(whole["sum_key"])
    assert max(item.telemetry["most_key"] for item in heads) == whole["most_key"]
    means = sorted(item.telemetry.mean(Figure.KEY) for item in heads)
    assert quantiles(heads, Figure.KEY, (0.0, 1.0)) == pytest.approx((means[0], means[-1]))
    assert means[0] < quantiles(heads, Figure.KEY)[0] < means[-1]
    # A copy begins with what its original held, which it did not do.
    twin = copy.deepcopy(cache)
    again = [item for item in backend.telemetry_of_heads() if item.telemetry["head_steps"]]
    assert len(again) == len(heads) and twin is not None
    assert all(math.isnan(value) for value in quantiles([], Figure.KEY))


def test_many_dead_caches_are_one_sum() -> None:
    ledger = LiveCaches(added_up)
    planes = torch.rand(600, 1, 2, 3, 1, TELEMETRY_PLANE.width, dtype=torch.float64)
    for plane in planes:
        ledger.dead.append(TelemetryPlane(plane, None))
        ledger.add(CacheState({}, {}))
    assert len(ledger.dead) <= MOST_KEPT + 1
    found = Telemetry.of(telling.plane for telling in ledger.telemetry_planes())
    flat = planes[..., 0, :].reshape(-1, TELEMETRY_PLANE.width)
    assert found["head_steps"] == pytest.approx(float(flat[:, COLUMNS.index("head_steps")].sum()))
    assert found["most_key"] == float(flat[:, COLUMNS.index("most_key")].max())
