"""Policies by layer: what is left out, what is misspelled, what matches nothing, and what the report says where nothing was compiled."""

from __future__ import annotations

import contextlib
import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_layers import Buffered, visible
from e2e_models import Probed, cache_of, inputs, llama
from torch import nn

import kvcompile
from kvcompile import errors


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


def decode(model: Any, call: Any, counts: tuple[int, ...] = (6, 1, 1)) -> list[torch.Tensor]:
    """Logits of a prompt and steps of a model with a static cache."""
    cache, random = cache_of(model, "static"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        return [call(torch.randint(0, 60, (1, n), generator=random), past_key_values=cache).logits.clone() for n in counts]


def test_a_layer_can_be_left_out() -> None:
    model = llama(layers=2)
    backend = kvcompile.backend({"*": "int8", "model.layers.1.*": None}, inner="eager", strict=True)
    expected = decode(model, copy.deepcopy(model))
    found = decode(model, torch.compile(model, backend=backend))
    assert all((a - b).norm() <= 5e-2 * a.norm() for a, b in zip(expected, found, strict=True))
    assert all([site.path for site in graph.sites] == ["model.layers.0.self_attn"] for graph in backend.graphs)
    assert backend.graphs[0].left_out == ("model.layers.1.self_attn",) and not backend.report().refusals
    assert "1 left out by the policy" in str(backend.report())


def test_what_is_refused_can_be_left_out_too() -> None:
    module = Probed()
    with torch.no_grad():
        torch.compile(module, backend=kvcompile.backend({"*": None}, inner="eager", strict=True))(inputs(module)[0], torch.arange(7))


def test_all_left_out_is_the_model_itself() -> None:
    model = llama(layers=1)
    backend = kvcompile.backend({"*": None}, inner="eager")
    expected = decode(model, copy.deepcopy(model))
    found = decode(model, torch.compile(model, backend=backend))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(expected, found, strict=True))
    assert not backend.report().sites and not backend.report().allocated


@pytest.mark.parametrize("text", ["k=kivi(bits=4,window=64),v=kivi", " v = kivi , k=kivi(bits=4,window=64)"])
def test_a_text_has_a_scheme_for_keys_and_one_for_values(text: str) -> None:
    from kvcompile.passes.plan.policy import pair_of, policy_of
    from kvcompile.report import short_pair
    from kvcompile.tools.cli.arguments import split

    pair = pair_of({"k": "kivi(bits=4,window=64)", "v": "kivi"})
    assert pair_of(text) == pair and policy_of(text) == policy_of({"k": pair.k, "v": pair.v})
    assert policy_of({"*": "int8", "model.layers.0.*": text}).of("model.layers.0.self_attn") == pair
    assert short_pair(pair) == "k=kivi(bits=4,window=64),v=kivi" and short_pair(pair_of("int8")) == "int8"
    assert split(f"int8,{short_pair(pair)},v=int4,k=int8,int4") == ["int8", short_pair(pair), "v=int4,k=int8", "int4"]


def test_named_pairs_are_those_of_their_texts() -> None:
    from kvcompile.passes.plan.policy import pair_of

    assert pair_of("k8v4") == pair_of(" K8V4 ") == pair_of("k=int8,v=int4")
    assert pair_of("k4v2") == pair_of("k=kivi(bits=4),v=kivi")
    model = llama(layers=1)
    backend = kvcompile.backend({"*": "k8v4"}, inner="eager", strict=True)
    decode(model, torch.compile(model, backend=backend))
    assert all(site.scheme == "keys int8, values int4" for graph in backend.graphs for site in graph.sites) and backend.graphs[0].sites


@pytest.mark.parametrize(("policy", "error", "says"), [
    ({0: "int8"}, errors.LayerByNumber, r"model\.layers\.0\.\*"),
    ({"*": "int4", 3: None}, errors.LayerByNumber, "found 3"),
    ({"keys": "int8", "values": "int4"}, errors.UnknownKeyOrValue, "did you mean 'k'"),
    ({"key": "int8", "v": "int4"}, errors.UnknownKeyOrValue, "did you mean 'k'"),
    ({"K": "int8", "V": "int4"}, errors.UnknownKeyOrValue, "keys 'k' and one for the values 'v'"),
    ({"k": "int8"}, errors.UnknownKeyOrValue, "keys 'k' and one for the values 'v'"),
    ({"model.layers.0.*": {"k": "int8", "vals": "int4"}}, errors.UnknownKeyOrValue, "did you mean 'v'"),
    ({"*": {"key": "int8", "value": "int4"}}, errors.UnknownKeyOrValue, "did you mean 'k'"),
    ("keys=int8,v=int4", errors.UnknownKeyOrValue, "did you mean 'k'"),
    ("k=int8", errors.UnknownKeyOrValue, "keys 'k' and one for the values 'v'"),
    ("k=int8,k=int4", errors.UnknownKeyOrValue, "keys 'k' and one for the values 'v'"),
    ("k=int8,v=int5", errors.UnknownScheme, "did you mean 'int"),
    ({"*": "k=int8,int4"}, errors.UnknownKeyOrValue, "keys 'k' and one for the values 'v'"),
])
def test_what_cannot_be_meant_is_refused_at_once(policy: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        kvcompile.backend(policy)


@pytest.mark.parametrize("make", [
    lambda model: model, lambda model: model.forward, lambda model: lambda *a, **k: model(*a, **k),
], ids=["model", "forward", "function"])
@pytest.mark.parametrize("policy", [
    {"*": "int8", "model.layer.0.*": "dense"}, {"*": "int8", "model.layers.77.*": None}, {"*": "int8", "*.77.*": "int4", "*.0.*": None},
], ids=["misspelled", "beyond", "beside another"])
def test_an_entry_that_matches_no_module_is_an_error(policy: dict[str, Any], make: Any) -> None:
    model = llama(layers=1)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        decode(model, torch.compile(make(model), backend=kvcompile.backend(policy, inner="eager")))
    assert isinstance(caught.value.inner_exception, errors.EntryUnmatched)
    assert repr([*policy][1]) in str(caught.value) and "layers.0.self_attn" in str(caught.value)


def test_an_error_in_the_policy_stays_one() -> None:
    model = llama(layers=1)
    compiled = torch.compile(model, backend=kvcompile.backend({"*": "int8", "model.layer.0.*": "dense"}, inner="eager"))
    for _ in range(2):
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"model\.layer\.0"):
            decode(model, compiled)


def test_an_entry_that_matches_modules_without_a_cache_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = llama(layers=1)
    backend = kvcompile.backend({"*": "int8", "model.layers.0.mlp*": "dense", "model.layers.0.*": "int4"}, inner="eager")
    with caplog.at_level(logging.WARNING, "kvcompile"):
        decode(model, torch.compile(model, backend=backend))
    said = [item.getMessage() for item in caplog.records if "matches none" in item.getMessage()]
    assert len(said) == 1 and "'model.layers.0.mlp*'" in said[0] and "model.layers.0.self_attn" in said[0]
    assert backend.report().unmatched == ("model.layers.0.mlp*",)
    assert "'model.layers.0.mlp*' matches none" in " ".join(str(backend.report()).split())


class Layer(Buffered):
    """Causal attention over buffers."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads_first(x)
        self.k_cache.index_copy_(2, pos, k)
        self.v_cache.index_copy_(2, pos, v)
        return self.close(F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=visible(pos, self.capacity)))


class Broken(nn.Module):
    """Two layers with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(batch=1), Layer(batch=1)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        x = self.first(x, pos)
        torch._dynamo.graph_break()
        return self.second(x, pos)


def test_an_entry_for_a_later_graph_is_not_told_too_early(caplog: pytest.LogCaptureFixture) -> None:
    """The second layer's entry matches nothing in the first graph."""
    module, backend = Broken(), kvcompile.backend({"*": "int8", "second": "dense"}, inner="eager")
    compiled = torch.compile(module, backend=backend)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "kvcompile"):
        compiled(torch.randn(1, 5, 64), torch.arange(5))
        compiled(torch.randn(1, 1, 64), torch.arange(5, 6))
    assert [site.scheme for graph in backend.graphs[:2] for site in graph.sites] == ["int8", "dense"]
    assert not [item for item in caplog.records if "matches none" in item.getMessage()]


class Drafting(Broken):
    """Two layers, of which drafts run the first alone."""

    def forward(self, x: torch.Tensor, pos: torch.Tensor, drafts: bool = False) -> torch.Tensor:
        x = self.first(x, pos)
        return x if drafts else self.second(x, pos)


def test_an_entry_for_a_module_that_was_not_reached_yet_is_no_error() -> None:
    module, backend = Drafting(), kvcompile.backend({"*": "int8", "second": "dense"}, inner="eager")
    compiled = torch.compile(module, backend=backend)
    with torch.no_grad():
        for drafts in (True, False):
            compiled(torch.randn(1, 5, 64), torch.arange(5), drafts)
            compiled(torch.randn(1, 1, 64), torch.arange(5, 6), drafts)
    assert [site.scheme for site in backend.graphs[-1].sites] == ["int8", "dense"]


class Open(nn.Module):
    """A layer whose graph breaks before its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Layer(batch=1)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.attention(x, pos)


class Loop(nn.Module):
    """Layers that each break their own graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Open() for _ in range(2))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, pos)
        return x


def test_frames_that_were_broken_know_the_model_that_calls_them() -> None:
    """Their sites have no path of the whole model, and its entries reach none of them: only one that is no module's is surely wrong."""
    for entry in ("layers.1.*", "layers.2.*"):
        compiled = torch.compile(Loop(), backend=kvcompile.backend({"*": "int8", entry: "dense"}, inner="eager"))
        wrong = pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"layers\.2")
        with torch.no_grad(), wrong if entry == "layers.2.*" else contextlib.nullcontext():
            compiled(torch.randn(1, 5, 64), torch.arange(5))
            compiled(torch.randn(1, 1, 64), torch.arange(5, 6))


def test_equal_refusals_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    module, backend = Probed(), kvcompile.backend("int8", inner="eager")
    compiled = torch.compile(module, backend=backend)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "kvcompile"):
        compiled(inputs(module)[0], torch.arange(7))
        compiled(inputs(module)[0][:, :1], torch.arange(7, 8))
    assert len(backend.graphs) > 1 and len(backend.report().refusals) > 1
    said = [item.getMessage() for item in caplog.records if "leaves an attention" in item.getMessage()]
    assert said and len(said) == len(set(said))


def test_a_backend_that_compiled_nothing_says_what_to_write() -> None:
    model, backend = llama(layers=1), kvcompile.backend("int8", inner="eager")
    torch.compile(model, backend=backend).generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, do_sample=False)
    assert "model.forward = torch.compile(model.forward, backend=b)" in " ".join(str(backend.report()).split())
