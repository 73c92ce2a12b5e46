"""Files of caches: a saved cache goes on as the one that was saved, in any process, or is refused with what differs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from e2e_models import FirstRows, IndexCopyAttribute, cache_of, llama, prompt
from learned_tables import llama_paths, random_tables
from safetensors import safe_open
from safetensors.torch import save_file
from static_scales import random_scales
from transformers import DynamicCache, EncoderDecoderCache, QuantizedCache

import kvcompile
from kvcompile.errors import CacheUnfit
from kvcompile.files.tensor_file import DIGEST, digest
from kvcompile.persistence.token_hashes import hashes
from kvcompile.schemes import BY_NAME, SCHEMES, Int8, parse

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

ROWS = 2
TABLES, SCALES = random_tables(llama_paths(1), groups=2), random_scales(llama_paths(1))
TEXTS = [scheme.name for scheme in SCHEMES if scheme.name not in {"beyond", "int8-static", "fp8-static"}]
TEXTS += ["beyond(trained=False)", "kivi(rotate=kv)", "int4(sinks=4)", "nf4(window=32)", "squat(pre_rope=True)"]


class Talk:
    """A compiled model with a filled cache of 60 tokens, two of them from decode steps."""

    def __init__(self, scheme: Any = "int8", kind: str = "static", rows: int = ROWS, **settings: Any) -> None:
        self.model = llama(layers=1, head_dim=64)
        self.backend = kvcompile.backend(scheme, **{"inner": "eager", "strict": True, **settings})
        self.call = torch.compile(self.model, backend=self.backend)
        self.cache = cache_of(self.model, kind, capacity=192)
        parts = [prompt(rows, 58, 1), prompt(rows, 1, 2), prompt(rows, 1, 3)]
        self.ids = torch.cat(parts, 1)
        for part in parts:
            self.step(self.cache, part)

    def step(self, cache: Any, ids: torch.Tensor) -> torch.Tensor:
        """Logits of a call."""
        with torch.no_grad():
            return self.call(ids, past_key_values=cache).logits

    def say(self, cache: Any) -> torch.Tensor:
        """Logits of six decode steps, which cross a page and a block."""
        return torch.cat([self.step(cache, prompt(self.ids.shape[0], 1, index)) for index in range(6)])

    def save(self, path: Path) -> Path:
        """Save the cache with all that is known of it."""
        kvcompile.save_cache(self.cache, path, tokens=self.ids, model=self.model)
        return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A place for a file."""
    return tmp_path / "cache.safetensors"


def tensors(cache: Any) -> list[torch.Tensor]:
    """Keys and values of a cache of transformers."""
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


# --- there and back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "kind"), [
    *((text, ("static", "dynamic")[index % 2]) for index, text in enumerate(TEXTS)), ("kivi", "dynamic"),
    (TABLES, "static"), (SCALES, "dynamic"), ("k=int8,v=kivi", "static"),
], ids=lambda value: value if isinstance(value, str) else value.name)
def test_a_loaded_cache_goes_on_as_the_saved_one(scheme: Any, kind: str, file: Path) -> None:
    talk = Talk(scheme, kind)
    talk.save(file)
    graphs = len(talk.backend.graphs)
    back = kvcompile.load_cache(file, tokens=talk.ids, model=talk.model, scheme=talk.backend)
    assert [repr(x) for x in tensors(back)] == [repr(x) for x in tensors(talk.cache)]
    for ours, theirs in zip(tensors(back), tensors(talk.cache), strict=True):
        (one,), (other,) = ours._kv.stores.values(), theirs._kv.stores.values()
        assert one.spec == other.spec and one.nbytes == other.nbytes and len(one.planes) == len(other.planes)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one.planes, other.planes, strict=True))
    expected = talk.say(talk.cache)
    assert torch.equal(talk.say(back), expected) and expected.isfinite().all()
    assert len(talk.backend.graphs) == graphs and not talk.backend.report().stayed_dense


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_pickles_need_no_trick(kind: str, tmp_path: Path) -> None:
    """``torch.load`` as it is by default reads a cache of transformers too."""
    talk = Talk("kivi", kind)
    torch.save({"cache": talk.cache}, tmp_path / "cache.pt")
    back = torch.load(tmp_path / "cache.pt")["cache"]
    assert type(back) is type(talk.cache) and [repr(x) for x in tensors(back)] == [repr(x) for x in tensors(talk.cache)]
    assert torch.equal(talk.say(back), talk.say(talk.cache))


def test_layers_that_stay_dense_are_saved_as_they_are(file: Path) -> None:
    talk = Talk({"*": "int8"}, "static")
    layers = talk.cache.layers
    layers[0].values = kvcompile.decoded(layers[0].values)
    talk.save(file)
    back = kvcompile.load_cache(file, tokens=talk.ids, model=talk.model).layers[0]
    assert type(back.values) is torch.Tensor and torch.equal(back.values, layers[0].values)
    assert back.values.untyped_storage().nbytes() == back.values.nbytes and back.values.untyped_storage().resizable()


def test_tuples_lists_and_dicts(file: Path) -> None:
    talk = Talk()
    keys, values = tensors(talk.cache)
    given = {"pairs": [(keys, values)], 3: keys, "at": 60, "none": None, "dtype": torch.float16, "size": torch.Size([2]), "x": [True, 0.5]}
    kvcompile.save_cache(given, file)
    back = kvcompile.load_cache(file, device="cpu")
    assert back["pairs"][0][0] is back[3] and repr(back[3]) == repr(keys) and repr(back["pairs"][0][1]) == repr(values)
    assert type(back["pairs"][0]) is tuple and {key: back[key] for key in ("at", "none", "dtype", "x")} == {
        key: given[key] for key in ("at", "none", "dtype", "x")
    }
    kvcompile.save_cache(keys, file)
    assert torch.equal(kvcompile.decoded(kvcompile.load_cache(file)), kvcompile.decoded(keys))


def test_buffers_of_a_module(file: Path) -> None:
    """As a dict; its positions are the caller's own."""
    module = IndexCopyAttribute(dim=32)
    call = torch.compile(module, backend=kvcompile.backend("int8", inner="eager", strict=True))
    x = torch.randn(module.batch, 11, module.width)
    with torch.no_grad():
        call(x[:, :9], torch.arange(9))
        call(x[:, 9:10], torch.tensor([9]))
        with pytest.raises(CacheUnfit, match=r"found a module \(IndexCopyAttribute\), whose counters .* at its top"):
            kvcompile.save_cache(module, file)
        kvcompile.save_cache({"k": module.k_cache, "v": module.v_cache}, file, model=module)
        expected = call(x[:, 10:], torch.tensor([10]))
        back = kvcompile.load_cache(file, model=module)
        module.k_cache, module.v_cache = back["k"], back["v"]
        assert torch.equal(call(x[:, 10:], torch.tensor([10])), expected)


def test_forks_are_saved_each_by_itself(file: Path) -> None:
    """Their shared planes are written twice: the format holds no tensors that share memory."""
    talk = Talk()
    kvcompile.save_cache([talk.cache, kvcompile.fork(talk.cache)], file)
    one, other = kvcompile.load_cache(file)
    expected = talk.say(talk.cache)
    assert torch.equal(talk.say(one), expected) and torch.equal(talk.say(other), expected)


def test_a_cache_with_an_encoder_s_tokens(file: Path) -> None:
    """Its two parts hold different numbers of tokens, which no one ``tokens=`` can be compared with."""
    talk = Talk()
    cache = EncoderDecoderCache(talk.cache, Talk("int8", "dynamic").cache)
    cache.is_updated[0] = True
    kvcompile.save_cache(cache, file)
    back = kvcompile.load_cache(file)
    assert type(back) is EncoderDecoderCache and back.is_updated == {0: True} and type(back.cross_attention_cache) is DynamicCache
    assert torch.equal(talk.say(back.self_attention_cache), talk.say(talk.cache))
    with pytest.raises(CacheUnfit, match=r"one number of tokens.*\(2, 60\), \(2, 66\)"):
        kvcompile.save_cache(cache, file, tokens=talk.ids)


def test_tokens_may_be_more_than_the_cache_holds(file: Path) -> None:
    """As what ``generate`` returns, and as the next request's."""
    talk = Talk()
    more = torch.cat([talk.ids, prompt(ROWS, 3, 9)], 1)
    kvcompile.save_cache(talk.cache, file, tokens=more[:, :61].to(torch.int32))
    kvcompile.load_cache(file, tokens=more)
    kvcompile.load_cache(file, tokens=talk.ids.tolist())


def test_the_file_names_what_it_holds(file: Path) -> None:
    talk = Talk("kivi", "dynamic")
    talk.save(file)
    with safe_open(str(file), "pt") as opened:
        metadata, names = opened.metadata(), set(opened.keys())
    assert {"layers.0.keys/0/codes", "layers.0.keys/0/window", "layers.0.values/0/scales"} <= names
    assert json.loads(metadata["caches"])["layers.0.keys"]["parts"][0]["scheme"] == parse("kivi").for_role(
        next(iter(tensors(talk.cache)[0]._kv.stores.values())).spec.slot.role
    ).spec()
    assert json.loads(metadata["tokens"]) == {"length": 60, "rows": list(hashes(talk.ids))}
    assert not [name for name in metadata if str(talk.ids[0, 0].item()) == metadata[name]] and len(metadata["fingerprint"]) == 32


# --- two processes ----------------------------------------------------------------------------------------

PROGRAM = """
import sys, torch, kvcompile
from e2e_models import llama, cache_of, prompt

role, kind, scheme, file = sys.argv[1:]
torch.set_num_threads(1)
model, ids = llama(layers=1, head_dim=64), prompt(2, 70, 1)
backend = kvcompile.backend(scheme, strict=True)
call = torch.compile(model, backend=backend)


def step(ids, cache):
    with torch.no_grad():
        return call(ids, past_key_values=cache).logits[:, -1:].argmax(-1)


if role != "decode":
    cache = cache_of(model, kind, capacity=128)
    last = step(ids, cache)
    if role == "prefill":
        kvcompile.save_cache(cache, file, tokens=ids, model=model)
if role == "decode":
    cache, last = kvcompile.load_cache(file, tokens=ids, model=model, scheme=backend), torch.tensor(eval(input()))
said = [last]
for _ in range(0 if role == "prefill" else 24):
    said.append(step(said[-1], cache))
print(torch.cat(said, 1).tolist(), len(backend.graphs), type(cache.layers[0].keys).__name__)
"""


def run(*words: str, given: str = "") -> tuple[list[list[int]], int, str]:
    """Run the program in a process of its own; the tokens that it said, its graphs, and the class of its keys."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said, graphs, kind = done.stdout.strip().rpartition("]]")[0] + "]]", *done.stdout.split()[-2:]
    return json.loads(said), int(graphs), kind


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize(("scheme", "kind"), [("int8", "dynamic"), ("kivi", "static")])
def test_one_process_reads_the_prompt_and_another_answers(
    scheme: str, kind: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled by Inductor in both: the answer is the one of a single process, and the second compiles one graph, the step's."""
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    whole, graphs, _ = run("both", kind, scheme, str(file))
    first, one, _ = run("prefill", kind, scheme, str(file))
    said, other, cls = run("decode", kind, scheme, str(file), given=str(first))
    assert said == whole and [len(row) for row in said] == [25, 25] and cls == "CompressedCache"
    assert (graphs, one, other) == (2, 1, 1)


# --- what cannot be saved ---------------------------------------------------------------------------------


def test_a_cache_that_is_not_compressed_is_refused(file: Path) -> None:
    with pytest.raises(CacheUnfit, match="expected a cache with compressed tensors, found 2 dense tensors; call the compiled model"):
        kvcompile.save_cache([torch.zeros(1), torch.zeros(2)], file)
    assert not file.exists()


@dataclasses.dataclass(frozen=True)
class Unregistered(Int8):
    """Int8 under a name that no registry has."""

    name: ClassVar[str] = "int8-of-nobody"


def test_a_scheme_that_no_other_process_finds_is_refused_by_name(file: Path) -> None:
    kvcompile.register(Unregistered)
    try:
        talk = Talk("int8-of-nobody")
    finally:
        del BY_NAME["int8-of-nobody"]
        parse.cache_clear()
    with pytest.raises(CacheUnfit, match=r"found int8-of-nobody\(.* at layers\.0\.keys, whose class Unregistered is not registered"):
        talk.save(file)


class Strange:
    """A cache of somebody's."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache


def _itself(keys: Any) -> list[Any]:
    given: list[Any] = [keys]
    given.append(given)
    return given


@pytest.mark.parametrize(("given", "found"), [
    (lambda keys: Strange(keys), r"test_cache_files\.Strange at its top"),
    (lambda keys: {"a": [keys, Strange(1)]}, r"test_cache_files\.Strange at a\.1"),
    (lambda keys: {"a": [keys, {(1, 2): 3}]}, r"a dict with other keys than numbers and texts at a\.1"),
    (_itself, r"one that holds itself at 1"),
    (lambda keys: [keys, keys[0, 0]], r"a decoded view of a compressed cache at 1"),
    (lambda keys: QuantizedCache, r"transformers\.cache_utils\.QuantizedCache at its top"),
], ids=["object", "inner object", "keys", "circle", "view", "quantized"])
def test_other_objects_are_refused(given: Callable[[Any], Any], found: str, file: Path) -> None:
    keys = tensors(Talk().cache)[0]
    with pytest.raises(CacheUnfit, match=f"found .*{found}; give the tensors of the cache"):
        kvcompile.save_cache(given(keys), file)


@pytest.mark.parametrize(("tokens", "found"), [
    (lambda ids: ids[:, :59], r"found \[2, 59\]"), (lambda ids: ids[:1], r"found \[1, 60\]"),
    (lambda ids: ids.float(), "found torch.float32"),
    (lambda ids: ids[None], r"found torch.int64 \[1, 2, 60\]"),
], ids=["short", "rows", "floats", "dims"])
def test_tokens_that_cannot_be_the_cache_s_are_refused(tokens: Callable[[torch.Tensor], Any], found: str, file: Path) -> None:
    talk = Talk()
    with pytest.raises(CacheUnfit, match=found):
        kvcompile.save_cache(talk.cache, file, tokens=tokens(talk.ids))


def test_a_cache_whose_rows_hold_different_numbers_of_tokens_is_refused(file: Path) -> None:
    """Where a window counts them; without one their codes are joined."""
    for scheme in ("int8", "int8(window=16)"):
        module = FirstRows(dim=32, batch=4)
        call = torch.compile(module, backend=kvcompile.backend(scheme, inner="eager", strict=True))
        with torch.no_grad():
            call(torch.randn(4, 9, module.width), 0)
            call(torch.randn(2, 1, module.width), 9)
        buffers = {name: buffer for name, buffer in module.named_buffers() if isinstance(buffer, kvcompile.CompressedCache)}
        assert buffers
        if scheme == "int8":
            kvcompile.save_cache(buffers, file)
            back = kvcompile.load_cache(file)
            assert all(torch.equal(kvcompile.decoded(back[name]), kvcompile.decoded(buffers[name])) for name in buffers)
        else:
            expected = "expected a cache whose rows were all in its last call, found .*, some of whose rows were not; save the rows"
            with pytest.raises(CacheUnfit, match=expected):
                kvcompile.save_cache(buffers, file)
        torch._dynamo.reset()


# --- what is not loaded -----------------------------------------------------------------------------------


def test_the_model_must_be_the_one_that_was_named(file: Path) -> None:
    talk = Talk()
    talk.save(file)
    with pytest.raises(CacheUnfit, match=r"for this model \(fingerprint [0-9a-f]{32}\), found .*cache.safetensors for another one"):
        kvcompile.load_cache(file, tokens=talk.ids, model=llama(layers=1, head_dim=64, seed=1))
    with pytest.raises(CacheUnfit, match=r"expected model=, as .* has the fingerprint [0-9a-f]{32} of a model, found none; pass the model"):
        kvcompile.load_cache(file, tokens=talk.ids)
    kvcompile.save_cache(talk.cache, file)
    with pytest.raises(CacheUnfit, match="expected the fingerprint of a model in .*found none; pass model= to kvcompile.save_cache too"):
        kvcompile.load_cache(file, model=talk.model)


def test_the_tokens_must_be_those_of_the_cache(file: Path) -> None:
    talk = Talk()
    kvcompile.save_cache(talk.cache, file, tokens=talk.ids)
    other = talk.ids.clone()
    other[1, 3] += 1
    expected = "expected the 60 tokens of 2 rows that .*cache.safetensors was saved with, and maybe more behind them, found "
    for given, found in ((other, "other tokens in row 1;"), (talk.ids[:, :9], "9 tokens a row"), (talk.ids[:1], "1 rows"), (None, "none;")):
        with pytest.raises(CacheUnfit, match=expected + found):
            kvcompile.load_cache(file, tokens=given)
    kvcompile.save_cache(talk.cache, file)
    with pytest.raises(CacheUnfit, match="expected hashes of tokens in .*found none; pass tokens= to kvcompile.save_cache too"):
        kvcompile.load_cache(file, tokens=talk.ids)


@pytest.mark.parametrize("scheme", [TABLES, SCALES], ids=["tables", "scales"])
def test_tables_and_scales_come_from_the_caller(scheme: Any, file: Path) -> None:
    """The text alone does not bring them; others than those of the cache are refused."""
    talk = Talk(scheme)
    kvcompile.save_cache(talk.cache, file)
    with pytest.raises(CacheUnfit, match=r"expected the scheme .* for layers\.0\.keys in .*cache.safetensors, found .*; pass scheme= as"):
        kvcompile.load_cache(file)
    other = random_tables(llama_paths(1), groups=2, seed=7) if scheme is TABLES else random_scales(llama_paths(1), seed=7)
    with pytest.raises(CacheUnfit, match=r"expected the scheme .* with .*, found .* with .*; pass scheme= as"):
        kvcompile.load_cache(file, scheme=other)
    assert torch.equal(talk.say(kvcompile.load_cache(file, scheme=scheme)), talk.say(talk.cache))


@pytest.mark.parametrize(("scheme", "found"), [
    ("int4", r"found int4\("), ({"*": None}, "found a policy that leaves it dense"), ({"model.layers.9.*": "int8"}, "found a policy that"),
], ids=["other", "left out", "no entry"])
def test_the_scheme_must_be_the_backend_s(scheme: Any, found: str, file: Path) -> None:
    kvcompile.save_cache(Talk().cache, file)
    with pytest.raises(CacheUnfit, match=rf"expected the scheme int8\(.* for layers\.0\.keys in .*, {found}"):
        kvcompile.load_cache(file, scheme=scheme)


def test_a_package_of_another_version_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kvcompile.save_cache(Talk().cache, file)
    held = importlib.metadata.version("transformers")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.0.1")
    with pytest.raises(CacheUnfit, match=rf"expected transformers {held}, whose objects .* holds, found transformers 4\.0\.1; install"):
        kvcompile.load_cache(file)


def rewritten(file: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None], sign: bool = True) -> None:
    """Change a file's tensors and metadata, with the digest of what it holds then unless not ``sign``."""
    with safe_open(str(file), "pt") as opened:
        found, metadata = {name: opened.get_tensor(name).clone() for name in opened.keys()}, dict(opened.metadata())  # noqa: SIM118
    parts = {name: json.loads(metadata[name]) for name in ("caches", "tree", "tensors", "packages", "tokens", "sites")}
    change(found, parts)
    metadata.update({name: json.dumps(value) for name, value in parts.items()})
    metadata[DIGEST] = digest(found, metadata) if sign else metadata[DIGEST]
    save_file(found, str(file), metadata)


def _bits(found: dict[str, torch.Tensor], parts: dict[str, Any]) -> None:
    found["layers.0.keys/0/codes"].view(-1)[0] += 1


def _plane_gone(found: dict[str, torch.Tensor], parts: dict[str, Any]) -> None:
    del found["layers.0.keys/0/scales"]


def _plane_dtype(found: dict[str, torch.Tensor], parts: dict[str, Any]) -> None:
    found["layers.0.keys/0/scales"] = found["layers.0.keys/0/scales"].float()


def _pages(found: dict[str, torch.Tensor], parts: dict[str, Any]) -> None:
    found["layers.0.keys/0/scales"] = found["layers.0.keys/0/scales"][:1].clone()


def _length(found: dict[str, torch.Tensor], parts: dict[str, Any]) -> None:
    parts["caches"]["layers.0.keys"]["length"] = 10_000


def _layout(found: dict[str, torch.Tensor], parts: dict[str, Any]) -> None:
    parts["caches"]["layers.0.keys"]["parts"][0]["layout"]["planes"][1]["tally"] = True


def _scheme(found: dict[str, torch.Tensor], parts: dict[str, Any]) -> None:
    parts["caches"]["layers.0.keys"]["parts"][0]["scheme"] = "int9"


def _other_class(found: dict[str, torch.Tensor], parts: dict[str, Any]) -> None:
    parts["tree"]["object"] = "subprocess:Popen"


def _other_name(found: dict[str, torch.Tensor], parts: dict[str, Any]) -> None:
    parts["tree"]["attributes"]["layers"]["list"][0]["attributes"]["keys"] = {"tensor": "nowhere"}


def _sites(found: dict[str, torch.Tensor], parts: dict[str, Any]) -> None:
    parts["sites"] = ["another"]


def _device(found: dict[str, torch.Tensor], parts: dict[str, Any]) -> None:
    parts["caches"]["layers.0.keys"]["device"] = "cuda:99"


def _hashes(found: dict[str, torch.Tensor], parts: dict[str, Any]) -> None:
    parts["tokens"] = {"length": 1}


@pytest.mark.parametrize(("change", "found"), [
    (_plane_gone, r"expected a tensor in layers\.0\.keys/0/scales, found none"),
    (_plane_dtype, r"expected torch\.float16 \[any, 2, 2, 64, 1\] in layers\.0\.keys/0/scales, found torch\.float32"),
    (_pages, r"expected planes of one number of pages in layers\.0\.keys/0, found \[1, \d+\]"),
    (_length, r"expected planes of 10000 tokens in layers\.0\.keys, found planes of \d+"),
    (_layout, r"expected the plane PlaneSpec\(name='scales'.* in layers\.0\.keys, found PlaneSpec\("),
    (_scheme, r"expected the scheme int8\(.* found expected one of the schemes"),
    (_other_class, r"expected a class of transformers\.cache_utils in tree, found subprocess:Popen"),
    (_other_name, r"expected a value that save_cache writes in tree.*keys, found \{'tensor': 'nowhere'\}"),
    (_sites, r"expected the tensors \['another'\] in caches"),
    (_device, r"expected the device cuda:99, to load .*cache\.safetensors to, found .*; pass device= with one"),
    (_hashes, r"expected TokenHashes or NoneType in tokens, found \{'length': 1\}"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_file_that_contradicts_itself_is_refused(change: Callable[..., None], found: str, file: Path) -> None:
    kvcompile.save_cache(Talk().cache, file)
    rewritten(file, change)
    with pytest.raises(CacheUnfit, match=found):
        kvcompile.load_cache(file)
    if change is _device:
        kvcompile.load_cache(file, device="cpu")


def test_a_file_of_which_a_bit_or_the_end_is_lost_is_refused(file: Path) -> None:
    kvcompile.save_cache(Talk().cache, file)
    whole = file.read_bytes()
    rewritten(file, _bits, sign=False)
    with pytest.raises(CacheUnfit, match=r"cannot be read \(expected what was written into it.*run the prompt again and call kvcompile"):
        kvcompile.load_cache(file)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CacheUnfit, match=r"expected a whole file of a compressed cache, found .*cache.safetensors, which cannot be read"):
        kvcompile.load_cache(file)
    save_file({"a": torch.zeros(1)}, str(file))
    with pytest.raises(CacheUnfit, match=r"expected a file of a compressed cache \(kvcompile-cache-1\), found .* without that mark"):
        kvcompile.load_cache(file)
    with pytest.raises(CacheUnfit, match="FileNotFoundError"):
        kvcompile.load_cache(file.with_name("none"))
