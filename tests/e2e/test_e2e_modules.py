"""Hand-written cached attentions, end to end: rewritten and right, or refused for the reason that is theirs, and right."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from e2e_models import CASES, Case, by_offset, by_position, inputs
from torch import nn

import kvcompile
from kvcompile.passes.rewrite.rewritten import Variant

BY_NAME = {case.name: case for case in CASES}
REWRITTEN = [case for case in CASES if not case.refused]
REFUSED = [case for case in CASES if case.refused]

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


@pytest.mark.parametrize("case", REWRITTEN, ids=str)
def test_dense_equals_the_module(case: Case) -> None:
    backend = kvcompile.backend("dense", inner="eager", strict=True)
    assert case.error(backend) <= TOLERANCE[torch.float32]
    report = backend.report()
    assert report.sites and not report.refusals


@pytest.mark.parametrize(("name", "scheme"), [
    *((name, "int8") for name in ("tril-mask", "combined-one-write", "concatenated", "transposed-keys")),
    *((name, scheme) for name in ("tril-mask", "concatenated") for scheme in ("fp8", "int4")),
])
def test_schemes_are_near_the_module(name: str, scheme: str) -> None:
    bound = {"int8": 0.01, "fp8": 0.05, "int4": 0.15}[scheme]
    sizes = {"dim": 32}
    error = BY_NAME[name].error(kvcompile.backend(scheme, inner="eager", strict=True), **sizes)
    assert 0 < error <= bound


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refused_for_its_reason_and_right(case: Case) -> None:
    backend = kvcompile.backend("int4", inner="eager")
    assert case.error(backend) == 0.0
    report = backend.report()
    assert report.sites == 0 and report.allocated == 0
    assert any(case.refused in item.reason for item in report.refusals), [str(item) for item in report.refusals]
    assert all("support/models/" in item.line for item in report.refusals)


@pytest.mark.parametrize("name", ["tril-mask", "combined-middle", "per-row", "lists", "flat-bmm", "concatenated", "row-slice"])
def test_one_row(name: str) -> None:
    """With one row the row dim disappears from written values and tells nothing when layouts are read."""
    assert BY_NAME[name].error(kvcompile.backend("dense", inner="eager", strict=True), batch=1) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", ["index-copy-attribute", "combined-two-writes", "flat-bmm", "concatenated-time-first", "transposed-keys"])
def test_dims_of_equal_size(name: str) -> None:
    """Rows, heads and channels of the same number, and a capacity that equals the channels."""
    sizes = {"batch": 4, "heads": 4, "dim": 16, "capacity": 16}
    assert BY_NAME[name].error(kvcompile.backend("dense", inner="eager", strict=True), **sizes) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["tril-mask", "grouped-einsum", "additive"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    assert BY_NAME[name].error(kvcompile.backend("dense", inner="eager", strict=True), dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["tril-mask", "narrow", "concatenated", "per-row"])
def test_no_recompiles_over_300_steps(name: str) -> None:
    backend = kvcompile.backend("int8", inner="eager", strict=True)
    case = BY_NAME[name]
    module = case.make(capacity=400, heads=2, kv=1)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    counts: list[int] = []

    def call(*args: object) -> object:
        result = compiled(*args)
        counts.append(len(backend.graphs))
        return result

    with torch.no_grad():
        results = case.drive(module, call, inputs(module, (7, *[1] * 300)))
    assert counts[4] == counts[-1]
    assert all(torch.isfinite(result).all() for result in results)


def test_the_buffer_is_gone_and_pages_follow_the_length() -> None:
    backend = kvcompile.backend("int8", inner="eager", strict=True, reserve=64)
    case = BY_NAME["tril-mask"]
    module = case.make(capacity=4096)
    with torch.no_grad():
        case.drive(module, torch.compile(module, backend=backend), inputs(module, (30, *[1] * 10)))
    cache = module.k_cache
    assert isinstance(cache, kvcompile.CompressedCache) and cache.shape == (2, 2, 4096, 16)
    with torch._C.DisableTorchFunctionSubclass():
        assert cache.untyped_storage().nbytes() <= 16
    assert max(store.pages for store in cache._kv.stores.values()) <= 2
    report = backend.report()
    assert report.allocated == report.announced < 2 * 2 * 2 * 4096 * 16 * 4 / 20


def test_a_carried_mask_limits_what_is_read() -> None:
    """Where the mask is a tensor over the whole capacity, the last token that each query sees is computed from it."""
    backend = kvcompile.backend("dense", inner="eager", strict=True)
    assert BY_NAME["tril-mask"].error(backend) <= TOLERANCE[torch.float32]
    rewritten = backend.records[-1].variants.rewritten(Variant.PAST).module.graph
    attend = next(node for node in rewritten.nodes if node.target is torch.ops.kvcompile.attend.default)
    limit = attend.args[3]
    assert limit.target is torch.ops.aten.minimum.default


def test_restart_jump_and_step_back() -> None:
    """A caller may write anywhere: start a new prompt over an old one, leave a gap, write the same place again."""
    case = BY_NAME["index-copy-attribute"]
    module = case.make(capacity=1024)
    plain = copy.deepcopy(module)
    compiled = torch.compile(module, backend=kvcompile.backend("dense", inner="eager", strict=True), fullgraph=True)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for start, count in ((0, 7), (7, 1), (0, 5), (5, 1), (700, 1), (701, 4), (699, 1), (300, 1), (1020, 4)):
            x = torch.randn(2, count, module.width, generator=generator)
            pos = torch.arange(start, start + count)
            assert torch.allclose(compiled(x, pos), plain(x, pos), atol=2e-6), (start, count)


def test_a_cache_filled_eagerly_is_adopted() -> None:
    case = BY_NAME["grouped-matmul"]
    module = case.make()
    plain = copy.deepcopy(module)
    backend = kvcompile.backend("dense", inner="eager", strict=True)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    x = inputs(module, (9, 1, 4))
    with torch.no_grad():
        module(x[0], torch.arange(9)), plain(x[0], torch.arange(9))
        for chunk, pos in ((x[1], torch.arange(9, 10)), (x[2], torch.arange(10, 14))):
            assert torch.allclose(compiled(chunk, pos), plain(chunk, pos), atol=2e-6)
    assert isinstance(module.k_cache, kvcompile.CompressedCache)


def test_inference_mode_and_no_grad_mix() -> None:
    case = BY_NAME["concatenated"]
    module = case.make()
    compiled = torch.compile(module, backend=kvcompile.backend("dense", inner="eager"))
    x = inputs(module, (5, 1, 1, 1))
    past, plain_past = None, None
    for index, chunk in enumerate(x):
        with torch.inference_mode(index % 2 == 0), torch.no_grad():
            y, past = compiled(chunk, past)
            z, plain_past = module(chunk, plain_past)
            assert torch.allclose(y, z, atol=2e-6)


def test_a_freed_module_frees_its_stores() -> None:
    backend = kvcompile.backend("int8", inner="eager", strict=True)
    case = BY_NAME["lists"]
    module = case.make()
    with torch.no_grad():
        case.drive(module, torch.compile(module, backend=backend), inputs(module))
    gc.collect()
    # The caches lived in the driver's lists only.
    assert backend.report().allocated == 0


def test_caches_that_are_views_stay_dense() -> None:
    """Memory that belongs to another tensor cannot be freed: the attention is left as it was."""
    case = BY_NAME["lists"]
    module = case.make()
    plain = copy.deepcopy(module)
    one = module.layers[0]
    owner = torch.zeros(2, 2, one.batch, one.kv, one.capacity, one.dim)
    views = [{"k": owner[index, 0], "v": owner[index, 1]} for index in range(2)]
    backend = kvcompile.backend("int8", inner="eager")
    compiled = torch.compile(module, backend=backend)
    x, pos = inputs(module)[0], torch.arange(7)
    with torch.no_grad():
        assert torch.equal(compiled(x, views, pos), plain(x, plain.fresh(), pos))
    assert all("owns" in item.reason for item in backend.report().refusals)
    assert len(backend.report().refusals) == 2


class Several(nn.Module):
    """Ways to write a cache and to spell attention side by side: by tensors of positions, by an int, and grown."""

    def __init__(self) -> None:
        super().__init__()
        self.by_position = nn.ModuleList(BY_NAME[name].make() for name in ("tril-mask", "sinks", "combined-one-write"))
        self.by_offset, self.grown = BY_NAME["narrow"].make(), BY_NAME["concatenated"].make()

    def forward(self, x: torch.Tensor, pos: torch.Tensor, start: int, past: Any) -> Any:
        grown, past = self.grown(x, past)
        return torch.stack([*(module(x, pos) for module in self.by_position), self.by_offset(x, start), grown]), past


@pytest.mark.compile
@torch.no_grad()
def test_inductor() -> None:
    """All in one compilation, as near to the modules as the rewritten graph is when it runs eagerly."""
    module, found = Several().eval(), {}
    given = inputs(module, (7, 4, 1, 1))
    for inner in ("eager", "inductor"):
        torch._dynamo.reset()
        backend = kvcompile.backend("int8", inner=inner, strict=True)
        compiled = torch.compile(copy.deepcopy(module), backend=backend, fullgraph=True)
        past, start, found[inner] = None, 0, []
        for x in given:
            y, past = compiled(x, torch.arange(start, start + x.shape[1]), start, past)
            start += x.shape[1]
            found[inner].append(y)
        assert len(backend.graphs[-1].sites) == 5
    for mine, eager in zip(found["inductor"], found["eager"], strict=True):
        torch.testing.assert_close(mine, eager, atol=1e-3, rtol=0)


def test_state_dict_of_a_compressed_module() -> None:
    """A module's buffers are saved as the dense values that they stand for once they are decoded."""
    case = BY_NAME["index-copy-attribute"]
    module = case.make()
    with torch.no_grad():
        case.drive(module, torch.compile(module, backend=kvcompile.backend("dense", inner="eager")), inputs(module))
    state = module.state_dict()
    assert isinstance(state["k_cache"], torch.Tensor)
    other: nn.Module = case.make()
    other.load_state_dict({name: kvcompile.decoded(value) for name, value in state.items()})
    assert torch.equal(other.k_cache, kvcompile.decoded(module.k_cache))


@pytest.mark.parametrize("case", [case for case in REWRITTEN if case.drive in {by_position, by_offset}], ids=str)
def test_a_window_holds_all_tokens(case: Case) -> None:
    """A scheme that keeps more tokens in its window than come loses nothing, however the cache is written; the prompt is not compiled."""
    backend = kvcompile.backend("kivi(group=16,window=64)", inner="eager")
    module = case.make(dim=16)
    plain = copy.deepcopy(module)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    calls = iter([module] + [compiled] * 8)
    given = inputs(module, (7, 1, 1, 2))
    with torch.no_grad():
        found = case.drive(module, lambda *args: next(calls)(*args), given)
        expected = case.drive(plain, plain, given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE[torch.float32], rtol=0)
