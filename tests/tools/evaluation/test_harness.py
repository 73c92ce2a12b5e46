"""The adapter to lm-evaluation-harness, held to what its base class documents; lm_eval itself is not needed here.

The stand-in has the abstract methods of ``lm_eval.api.model.LM``, and requests with ``args``, as the harness passes them.
"""

from __future__ import annotations

import abc
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvcompile.errors import BadEvaluation
from kvcompile.tools.cli.subjects import tokenizer_of
from kvcompile.tools.cli.targets import TargetOptions, resolve, static_cache
from kvcompile.tools.evaluation.harness import harness_model, windows


class StandIn(abc.ABC):
    """The harness's base class, in kind."""

    def __init__(self) -> None:
        self._rank, self._world_size, self.cache_hook = 0, 1, None

    @property
    def device(self) -> str:
        """A property without a setter in 0.4.13: an adapter cannot have an attribute of this name."""
        return "cpu"

    @abc.abstractmethod
    def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]: ...

    @abc.abstractmethod
    def loglikelihood_rolling(self, requests: Any) -> list[float]: ...

    @abc.abstractmethod
    def generate_until(self, requests: Any) -> list[str]: ...


def asked(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def parts(checkpoint: Path) -> tuple[Any, Any]:
    return resolve(str(checkpoint), TargetOptions(dtype=torch.float32)).model, tokenizer_of(str(checkpoint))


@pytest.fixture
def make(parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, one_thread: None, fresh_dynamo: None) -> Any:
    module = ModuleType("lm_eval.api.model")
    module.LM = StandIn  # type: ignore[attr-defined]
    for name, held in (("lm_eval", ModuleType("lm_eval")), ("lm_eval.api", ModuleType("lm_eval.api")), ("lm_eval.api.model", module)):
        monkeypatch.setitem(sys.modules, name, held)
    model, tokenizer = parts
    settings = {"cache": lambda tokens: static_cache(model, tokens), "max_length": 64, "inner": "eager"}
    return lambda scheme, **more: harness_model(model, tokenizer, scheme, **{**settings, **more})


def test_likelihoods_are_those_of_a_plain_forward_pass(make: Any, parts: tuple[Any, Any]) -> None:
    model, tokenizer = parts
    lm = make("dense")
    assert isinstance(lm, StandIn) and (lm._rank, lm._world_size) == (0, 1)
    pairs = [("the number of value is", " a note"), ("all words ", "seen"), ("", "recall the code"), ("code", "")]
    found = lm.loglikelihood([asked(*pair) for pair in pairs])
    for (context, continuation), (total, greedy) in zip(pairs[:3], found, strict=False):
        whole = tokenizer.encode(context + continuation, add_special_tokens=False)
        first = tokenizer.encode(context.rstrip(), add_special_tokens=False)
        prefix = [] if first else [tokenizer.bos_token_id]
        ids = torch.tensor([[*prefix, *whole]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)
        start = len(first) + len(prefix)
        targets = ids[0, start:]
        assert total == pytest.approx(float(logits[start - 1 : -1].gather(1, targets[:, None]).sum()), abs=1e-4)
        assert greedy == bool((logits[start - 1 : -1].argmax(-1) == targets).all())
    assert found[3] == (0.0, True)
    assert lm.backend.report().sites >= 4, "decoded through the rewritten cache"


def test_a_scheme_changes_them_a_little(make: Any) -> None:
    request = [asked("the number of value is seen and the code of all is trace", " common words")]
    exact, coarse = make("dense").loglikelihood(request)[0][0], make("int4").loglikelihood(request)[0][0]
    assert exact != coarse == pytest.approx(exact, abs=0.5)


def test_answers_stop_where_they_should(make: Any, parts: tuple[Any, Any]) -> None:
    model, tokenizer = parts
    lm = make("dense")
    (whole,) = lm.generate_until([asked("the note of", {"until": [], "max_gen_toks": 9})])
    ids = torch.tensor([tokenizer.encode("the note of", add_special_tokens=False)])
    with torch.no_grad():
        for _ in range(9):
            ids = torch.cat((ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    assert whole == tokenizer.decode(ids[0, -9:], skip_special_tokens=True)
    stop = whole[len(whole) // 2 :][:2]
    assert lm.generate_until([asked("the note of", {"until": stop, "max_gen_toks": 9})]) == [whole[: whole.index(stop)]]
    with pytest.raises(BadEvaluation, match=r"do_sample.*greedily"):
        lm.generate_until([asked("the", {"do_sample": True})])


def test_rolling_likelihood_predicts_every_token_once(make: Any, book: Path, parts: tuple[Any, Any]) -> None:
    lm, (model, tokenizer) = make("dense", max_length=16), parts
    text = book.read_text()[:120]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) > 20
    expected = 0.0
    with torch.no_grad():
        for context, part in windows(tokens, tokenizer.bos_token_id, 16):
            ids = torch.tensor([[*context, *part]])
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0].double().log_softmax(-1)[len(context) - 1 :]
            expected += float(logits.gather(1, torch.tensor(part)[:, None]).sum())
    assert lm.loglikelihood_rolling([asked(text)]) == [pytest.approx(expected, abs=1e-3)]


def test_windows_are_those_that_the_harness_documents() -> None:
    found = list(windows(list(range(10)), -1, 4))
    assert found == [([-1], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])]
    assert [([*context, *part][:-1]) for context, part in found] == [[-1, 0, 1, 2], [3, 4, 5, 6], [5, 6, 7, 8]]
    assert list(windows([], -1, 4)) == []


def test_contexts_of_many_lengths_do_not_compile_many_graphs(make: Any) -> None:
    lm = make("int8")
    lm.loglikelihood([asked("the note " * count + "of", " a value") for count in (1, 2, 3, 5, 8)])
    assert len(lm.backend.report().graphs) <= 4


def test_long_contexts_lose_their_beginning_and_long_continuations_are_refused(make: Any) -> None:
    lm = make("dense", max_length=12)
    near, far = (lm.loglikelihood([asked("seen " * count + "note of all the code is", " a")])[0][0] for count in (20, 40))
    assert near == pytest.approx(far, abs=1e-6)
    with pytest.raises(BadEvaluation, match=r"max_length.*larger one"):
        lm.loglikelihood([asked("the", " code" * 30)])


def test_without_what_it_needs(parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    model, tokenizer = parts
    with pytest.raises(BadEvaluation, match=r"max_length.*pass it"):
        make("int8", max_length=1)
    bare = SimpleNamespace(bos_token_id=None, eos_token_id=None)
    with pytest.raises(BadEvaluation, match="bos_token"):
        harness_model(model, bare, "int8", cache=lambda tokens: None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(BadEvaluation, match=r"pip install 'kvcompile\[lm-eval\]'"):
        harness_model(model, tokenizer, "int8", cache=lambda tokens: None)
