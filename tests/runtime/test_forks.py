"""Forks: caches that share their memory until one of them is written, and then go on as copies do."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from e2e_models import IndexCopyAttribute, cache_of, llama, prompt

import kvcompile
from kvcompile.errors import CacheUnfit, WindowPassed
from kvcompile.runtime.call.bound import BoundGraph
from kvcompile.runtime.store.store import Store
from kvcompile.types import PAGE

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

ROWS = 2
SCHEMES = (
    "dense", "int8", "int4(sinks=4)", "nf4(window=32)", "kivi", "kivi(rotate=kv)", "squat", "squat(pre_rope=True)", "normed", "gauss",
    "certified", "smartkv", "beyond(trained=False)", "k=int8,v=kivi",
)


class Talk:
    """A compiled model with a filled cache of 60 tokens, two of them from decode steps."""

    def __init__(self, scheme: Any = "int8", kind: str = "static", **settings: Any) -> None:
        self.model = llama(layers=1, head_dim=64)
        self.backend = kvcompile.backend(scheme, **{"inner": "eager", "strict": True, "reserve": PAGE, **settings})
        self.call = torch.compile(self.model, backend=self.backend)
        self.cache = cache_of(self.model, kind, capacity=192)
        self.step(self.cache, prompt(ROWS, 58, 1))
        self.say(self.cache, 2, 2)

    def step(self, cache: Any, ids: torch.Tensor) -> torch.Tensor:
        """Logits of a call."""
        with torch.no_grad():
            return self.call(ids, past_key_values=cache).logits

    def say(self, cache: Any, count: int, seed: int) -> list[torch.Tensor]:
        """Logits of ``count`` decode steps."""
        return [self.step(cache, prompt(ROWS, 1, 100 * seed + index)) for index in range(count)]


def stores(cache: Any) -> list[Store]:
    """The stores behind a cache of transformers."""
    return [store for layer in cache.layers for x in (layer.keys, layer.values) for store in x._kv.stores.values()]


def values(cache: Any) -> list[torch.Tensor]:
    """What a cache holds, decoded."""
    return [kvcompile.decoded(x) for layer in cache.layers for x in (layer.keys, layer.values)]


def shared(one: Any, other: Any) -> int:
    """How many planes that are not constant two caches share."""
    pairs = zip(stores(one), stores(other), strict=True)
    return sum(a is b and not spec.constant for x, y in pairs for (a, spec), b in zip(x.described(), y.planes, strict=True))


def constant(one: Any, other: Any) -> tuple[int, int]:
    """How many constant planes two caches share, and how many there are."""
    pairs = [(a is b) for x, y in zip(stores(one), stores(other), strict=True)
             for (a, spec), b in zip(x.described(), y.planes, strict=True) if spec.constant]
    return sum(pairs), len(pairs)


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal bit for bit."""
    return len(ours) == len(theirs) > 0 and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


TURNS = [("static", "fork"), ("dynamic", "parent"), ("dynamic", "fork"), ("static", "parent")]


@pytest.mark.parametrize(("scheme", "kind", "first"), [
    *((scheme, *TURNS[index % len(TURNS)]) for index, scheme in enumerate(SCHEMES)),
    *(("kivi(group=32,window=32)", *turn) for turn in TURNS),
])
def test_both_go_on_with_tokens_of_their_own(scheme: str, kind: str, first: str) -> None:
    """As copies do that share nothing; and nothing that one of them writes is seen by the other. They cross a page and a block."""
    talk = Talk(scheme, kind)
    graphs, before = len(talk.backend.graphs), values(talk.cache)
    one, other = copy.deepcopy(talk.cache), copy.deepcopy(talk.cache)
    expected = {"fork": talk.say(one, 6, 3), "parent": talk.say(other, 6, 4)}
    fork = kvcompile.fork(talk.cache)
    caches = {"fork": (fork, 3), "parent": (talk.cache, 4)}
    assert shared(fork, talk.cache) == sum(not plane.constant for store in stores(fork) for plane in store.spec.layout.planes)
    second = "parent" if first == "fork" else "fork"
    assert same(talk.say(caches[first][0], 6, caches[first][1]), expected[first])
    assert not shared(fork, talk.cache) and same(values(caches[second][0]), before)
    assert same(talk.say(caches[second][0], 6, caches[second][1]), expected[second])
    assert same(values(fork), values(one)) and same(values(talk.cache), values(other))
    assert len(talk.backend.graphs) == graphs


def through_a_file(caches: Any) -> Any:
    """What ``torch.load`` makes of caches that ``torch.save`` wrote."""
    file = io.BytesIO()
    torch.save(caches, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("through", [lambda caches: pickle.loads(pickle.dumps(caches)), through_a_file], ids=["pickle", "torch.save"])
@pytest.mark.parametrize("scheme", ["int8", "kivi(group=32,window=32)"])
def test_forks_in_one_file_are_forks_again(scheme: str, through: Any) -> None:
    """A file has the planes once, and so has the memory of who loads it, until one of them is written."""
    talk = Talk(scheme)
    one, other, again = copy.deepcopy(talk.cache), copy.deepcopy(talk.cache), copy.deepcopy(talk.cache)
    expected = [talk.say(cache, 3, seed) for cache, seed in ((one, 3), (other, 4), (again, 5))]
    caches = through((talk.cache, kvcompile.fork(talk.cache), kvcompile.fork(talk.cache)))
    assert shared(caches[0], caches[1]) == shared(caches[1], caches[2]) > 0
    found: list[list[torch.Tensor]] = [[], [], []]
    for index in range(3):
        for steps, cache, seed in zip(found, caches, (3, 4, 5), strict=True):
            steps.append(talk.step(cache, prompt(ROWS, 1, 100 * seed + index)))
    assert all(same(mine, want) for mine, want in zip(found, expected, strict=True))


@pytest.mark.parametrize("scheme", ["gauss", "beyond(trained=False)"])
def test_constant_planes_stay_shared(scheme: str) -> None:
    """No call writes them."""
    talk = Talk(scheme)
    fork = kvcompile.fork(talk.cache)
    for cache in (fork, talk.cache):
        talk.say(cache, 1, 1)
    count, every = constant(fork, talk.cache)
    assert count == every > 0 and not shared(fork, talk.cache) and talk.backend.report().shared > 0


def test_memory_is_counted_once_until_a_fork_is_written() -> None:
    talk = Talk()
    alone = talk.backend.report()
    forks = [kvcompile.fork(talk.cache) for _ in range(3)]
    report = talk.backend.report()
    assert report.allocated == alone.allocated > 0 and report.announced == alone.announced and report.peak == alone.peak
    assert report.dense == 4 * alone.dense and report.shared == 3 * alone.allocated and "shared until they are written" in str(report)
    talk.say(forks[0], 1, 1)
    report = talk.backend.report()
    assert report.allocated == report.announced == report.peak == 2 * alone.allocated and report.shared == 2 * alone.allocated
    del talk.cache, forks[1:]
    gc.collect()
    report = talk.backend.report()
    assert report.allocated == alone.allocated and not report.shared and "shared" not in str(report)


def test_the_last_one_writes_in_place() -> None:
    talk = Talk()
    planes = [plane for store in stores(talk.cache) for plane in store.planes]
    fork = kvcompile.fork(talk.cache)
    del talk.cache
    gc.collect()
    talk.say(fork, 1, 1)
    assert all(a is b for a, b in zip(planes, (plane for store in stores(fork) for plane in store.planes), strict=True))


def test_a_fork_that_needs_more_pages_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages that it allocates are its copy."""
    talk = Talk()
    talk.say(talk.cache, 2 * PAGE - 60, 5)
    fork, copied = kvcompile.fork(talk.cache), list[int]()
    plain = Store.copied
    monkeypatch.setattr(Store, "copied", lambda store, index: copied.append(index) or plain(store, index))
    talk.say(fork, 1, 1)
    assert not copied and not shared(fork, talk.cache) and stores(fork)[0].pages == 3 and stores(talk.cache)[0].pages == 2


def test_forks_of_forks() -> None:
    talk = Talk("kivi(group=32,window=32)", "dynamic")
    first = kvcompile.fork(talk.cache)
    second = kvcompile.fork(first)
    third = kvcompile.fork(second)
    expected = [copy.deepcopy(talk.cache) for _ in range(4)]
    for index, cache in enumerate((second, talk.cache, third, first)):
        assert same(talk.say(cache, 5, index), talk.say(expected[index], 5, index))
    assert same(values(third), values(expected[2])) and same(values(talk.cache), values(expected[1]))


def _reset(talk: Talk, cache: Any) -> None:
    cache.reset()
    talk.step(cache, prompt(ROWS, 9, 7))


def _crop(talk: Talk, cache: Any) -> None:
    cache.crop(-3)
    talk.say(cache, 2, 7)


def _write(talk: Talk, cache: Any) -> None:
    for layer in cache.layers:
        layer.keys[:, :, 58:60] = 1.0
        layer.values[:, :, 59].zero_()


def _reorder(talk: Talk, cache: Any) -> None:
    cache.reorder_cache(torch.tensor([1, 1]))
    talk.say(cache, 2, 7)


def _grow_uncompiled(talk: Talk, cache: Any) -> None:
    with torch.no_grad():
        talk.model(prompt(ROWS, 3, 7), past_key_values=cache)


CHANGES = (_reset, _crop, _write, _reorder, _grow_uncompiled)


@pytest.mark.parametrize("scheme", ["int8", "kivi(group=32,window=32)", "certified", "smartkv"])
def test_what_one_of_them_does_the_other_does_not_see(scheme: str) -> None:
    talk = Talk(scheme, "dynamic")
    before = values(talk.cache)
    for change in CHANGES:
        for of in (0, 1):
            plain, parent = copy.deepcopy(talk.cache), copy.deepcopy(talk.cache)
            pair = [parent, kvcompile.fork(parent)]
            change(talk, pair[of])
            change(talk, plain)
            assert same(values(pair[of]), values(plain)) and not same(values(pair[of]), before), change
            assert same(values(pair[1 - of]), before), change


def test_a_step_that_fails_in_a_fork_leaves_both_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes back first: the window that it refilled is undone in the fork's own planes, and a repeated step gives what it should."""
    talk = Talk("kivi(group=32,window=32)")
    talk.cache.layers[0].cumulative_length.sub_(5)
    fork, before = kvcompile.fork(talk.cache), values(talk.cache)
    expected = talk.say(copy.deepcopy(talk.cache), 1, 3)
    counter = fork.layers[0].cumulative_length.clone()

    def fails(*args: Any) -> Any:
        raise RuntimeError("in the middle of a step")

    graphs = [item for item in gc.get_objects() if type(item) is BoundGraph and item.states.live is talk.backend.memory.live]
    for item in graphs:
        monkeypatch.setattr(item, "variants", {key: (rewritten, fails) for key, (rewritten, _) in item.variants.items()})
    with pytest.raises(RuntimeError, match="in the middle"):
        talk.say(fork, 1, 3)
    monkeypatch.undo()
    assert graphs and same(values(talk.cache), before) and same(values(fork), before)
    fork.layers[0].cumulative_length.copy_(counter)
    assert same(talk.say(fork, 1, 3), expected)


def test_a_rollback_that_a_window_has_lost_is_refused_in_a_fork_too() -> None:
    talk = Talk("kivi(group=32,window=32)", "dynamic")
    fork, before = kvcompile.fork(talk.cache), values(talk.cache)
    fork.crop(-41)
    with pytest.raises(WindowPassed):
        talk.say(fork, 1, 1)
    assert same(values(talk.cache), before)


def test_calls_that_only_read_go_on_sharing() -> None:
    """The keys and values of cross-attention."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=64, d_model=64, d_kv=32, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    backend = kvcompile.backend("int8", inner="eager")
    call = torch.compile(model.decoder, backend=backend)
    cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    with torch.no_grad():
        heard = model.encoder(prompt(ROWS, 20)).last_hidden_state
        for count in (3, 1):
            call(input_ids=prompt(ROWS, count), encoder_hidden_states=heard, past_key_values=cache)
        fork = kvcompile.fork(cache)
        for held in (fork, cache):
            call(input_ids=prompt(ROWS, 1, 5), encoder_hidden_states=heard, past_key_values=held)
    assert not shared(fork.self_attention_cache, cache.self_attention_cache)
    assert shared(fork.cross_attention_cache, cache.cross_attention_cache) == sum(
        len(store.planes) for store in stores(cache.cross_attention_cache)
    ) > 0


def test_telemetry_of_a_fork_is_its_own() -> None:
    """A fork begins with its parent's numbers, which are not counted twice; its own stay counted when it is gone."""
    talk = Talk("certified")
    steps = talk.backend.telemetry()["head_steps"]
    fork = kvcompile.fork(talk.cache)
    assert steps and talk.backend.telemetry()["head_steps"] == steps
    talk.say(fork, 3, 1)
    one = (talk.backend.telemetry()["head_steps"] - steps) // 3
    talk.say(talk.cache, 1, 1)
    assert one and talk.backend.telemetry()["head_steps"] == steps + 4 * one
    del fork
    gc.collect()
    assert talk.backend.telemetry()["head_steps"] == steps + 4 * one


def test_dense_tensors_are_copied_and_a_module_is_refused() -> None:
    given = {"k": torch.ones(2), "at": [3]}
    made = kvcompile.fork(given)
    made["k"].zero_()
    made["at"].append(4)
    assert given["k"].tolist() == [1.0, 1.0] and given["at"] == [3]
    with pytest.raises(CacheUnfit, match=r"found a module \(Linear\).*kvcompile\.fork\(\[module\.k, module\.v\]\)"):
        kvcompile.fork(torch.nn.Linear(2, 2))


def test_buffers_of_a_module() -> None:
    """A list of them is forked, and set before each conversation's calls."""
    module = IndexCopyAttribute(dim=32)
    backend = kvcompile.backend("int8", inner="eager", strict=True)
    call = torch.compile(module, backend=backend)

    def step(start: int, count: int, seed: int) -> torch.Tensor:
        x = torch.randn(module.batch, count, module.width, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            return call(x, torch.arange(start, start + count))

    step(0, 9, 0)
    step(9, 1, 1)
    own = [module.k_cache, module.v_cache]
    fork, plain = kvcompile.fork(own), copy.deepcopy(own)
    module.k_cache, module.v_cache = plain
    expected = step(10, 1, 2)
    module.k_cache, module.v_cache = fork
    assert torch.equal(step(10, 1, 2), expected)
    module.k_cache, module.v_cache = own
    other = step(10, 1, 3)
    module.k_cache, module.v_cache = fork
    assert torch.equal(kvcompile.decoded(fork[0]), kvcompile.decoded(plain[0])) and not torch.equal(other, expected)


