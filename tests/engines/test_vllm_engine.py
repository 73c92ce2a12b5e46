"""vLLM's engine, really started on a CPU, with and without the plugin: ``make engines``, in an environment of its own.

Each process starts a few engines one behind the other (``engine_run``), as a start takes seconds and the import many.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import coded_caches
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from kvcompile.schemes.pairs import parse_pair
from kvcompile.serving.block_layout import BlockLayout

pytest.importorskip("vllm", reason="needs vLLM in an environment of its own: make engines")

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 1,
}
SHARED = list(range(1, 81))
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], list(range(20, 60)), [3] * 33, [*SHARED, 5], [*SHARED, 9], [11] * 120]
LONG = [[9] * 30, [5] * 40, [4] * 20]
NEW, MEMORY = 12, 8 << 20
SCHEMES = ("int8", "fp8", "int4", "nf4", "gauss", "int4(rotate=k)", "k=int8,v=int4")
BASE: dict[str, Any] = {"prompts": PROMPTS, "new": NEW, "rounds": 2}
CODES: dict[str, dict[str, Any]] = {
    "dense": {"scheme": "dense", **BASE},
    **{scheme: {"scheme": scheme, **BASE} for scheme in SCHEMES},
    "chunks of 1": {"scheme": "int4", "prompts": PROMPTS, "new": NEW, "settings": {"long_prefill_token_threshold": 1}},
    "chunks of 7": {"scheme": "int4", "prompts": PROMPTS, "new": NEW, "settings": {"long_prefill_token_threshold": 7}},
    "no sharing": {"scheme": "int4", **BASE, "settings": {"enable_prefix_caching": False}},
    "pages of 128": {"scheme": "int4", **BASE, "settings": {"block_size": 128}},
    "few blocks": {
        "scheme": "int4", "prompts": LONG, "new": 40,
        "settings": {"block_size": 16, "max_model_len": 96, "num_gpu_blocks_override": 10, "max_num_batched_tokens": 32},
    },
    "compiled": {"scheme": "int8", **BASE, "settings": {"enforce_eager": False}},
    "bfloat16": {"scheme": "int4", "prompts": PROMPTS[:2], "new": 2, "settings": {"dtype": "bfloat16"}},
    "kivi": {"scheme": "kivi", **BASE},
    "unknown": {"scheme": "int5", **BASE},
    "fp8 cache": {"scheme": "int4", **BASE, "settings": {"kv_cache_dtype": "fp8"}},
    # Last: a start behind it fails inside of the engine.
    "speculative": {
        "scheme": "int4", **BASE,
        "settings": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
    },
}


def started(folder: Path, model: str, requests: list[dict[str, Any]], scheme: str | None = None) -> list[dict[str, Any]]:
    """What engines give for some requests, in a process of their own."""
    asked = folder / f"requests-{model}-{scheme}.json"
    asked.write_text(json.dumps(requests))
    environment = {name: value for name, value in os.environ.items() if name != "KVCOMPILE_SCHEME"}
    environment |= {"KVCOMPILE_SCHEME": scheme} if scheme else {}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "engine_run.py"), str(folder / model), str(asked)], env=environment, cwd=folder,
        capture_output=True, text=True, check=False, timeout=580,
    )
    found = [json.loads(line.removeprefix("FOUND ")) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(found) == len(requests), done.stdout[-3000:] + done.stderr[-3000:]
    (folder / f"log-{model}-{scheme}").write_text(done.stdout + done.stderr)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models."""
    place: Path = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(place / "llama")
    torch.manual_seed(1)
    MistralForCausalLM(MistralConfig(**SIZES, sliding_window=20)).save_pretrained(place / "mistral")
    return place


@pytest.fixture(scope="module")
def stock(folder: Path) -> dict[str, Any]:
    """What vLLM's own backend gives."""
    return started(folder, "llama", [{"scheme": None, **BASE}])[0]


@pytest.fixture(scope="module")
def codes(folder: Path) -> dict[str, dict[str, Any]]:
    """What engines over codes give, by the name of the case."""
    return dict(zip(CODES, started(folder, "llama", list(CODES.values()), "dense"), strict=True))


def emulated(folder: Path, text: str, prompts: list[list[int]] = PROMPTS, new: int = NEW) -> list[list[int]]:
    """The tokens of each prompt alone, with a cache of decoded codes."""
    model = LlamaForCausalLM.from_pretrained(folder / "llama").eval()
    return [tokens for tokens, _ in coded_caches.emulated(model, text, prompts, new)]


def test_dense_gives_the_tokens_of_stock(folder: Path, stock: dict[str, Any], codes: dict[str, dict[str, Any]]) -> None:
    assert codes["dense"]["tokens"] == stock["tokens"] == [emulated(folder, "dense")] * 2
    assert codes["dense"]["blocks"] == stock["blocks"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_give_the_tokens_of_an_emulation(folder: Path, codes: dict[str, dict[str, Any]], scheme: str) -> None:
    assert codes[scheme]["tokens"] == [emulated(folder, scheme)] * 2


@pytest.mark.parametrize("scheme", ["dense", *SCHEMES])
def test_the_engine_allocates_the_bytes_of_codes(codes: dict[str, dict[str, Any]], scheme: str) -> None:
    keys, values = parse_pair(scheme)
    layout = BlockLayout.of(keys, 2, 32, values=values, page=32, dtype=torch.float32)
    assert codes[scheme]["blocks"] == MEMORY // (2 * layout.block_bytes)


@pytest.mark.parametrize("case", ["chunks of 1", "chunks of 7", "no sharing", "pages of 128"])
def test_the_engine_may_cut_prompts_and_pages_as_it_likes(folder: Path, codes: dict[str, dict[str, Any]], case: str) -> None:
    want = emulated(folder, "int4")
    assert all(tokens == want for tokens in codes[case]["tokens"])


def test_blocks_are_shared_between_requests(codes: dict[str, dict[str, Any]]) -> None:
    assert codes["int4"]["shared"] >= 64 + sum(len(prompt) // 32 * 32 for prompt in PROMPTS if len(prompt) > 64)
    assert codes["no sharing"]["shared"] == 0


def test_requests_that_lose_their_blocks(folder: Path, codes: dict[str, dict[str, Any]]) -> None:
    assert codes["few blocks"]["preempted"] and codes["few blocks"]["tokens"] == [emulated(folder, "int4", LONG, 40)]


def test_the_compiled_engine(folder: Path, codes: dict[str, dict[str, Any]]) -> None:
    assert codes["compiled"]["tokens"] == [emulated(folder, "int8")] * 2


def test_sixteen_bits(codes: dict[str, dict[str, Any]]) -> None:
    layout = BlockLayout.of("int4", 2, 32, page=32, dtype=torch.bfloat16)
    assert codes["bfloat16"]["blocks"] == MEMORY // (2 * layout.block_bytes) and len(codes["bfloat16"]["tokens"][0][0]) == 2


@pytest.mark.parametrize(("case", "expected"), [
    ("kivi", "NotPaged"), ("fp8 cache", "--kv-cache-dtype auto, found fp8"), ("speculative", "no speculative decoding"),
    ("unknown", "UnknownScheme"),
])
def test_what_is_refused(codes: dict[str, dict[str, Any]], case: str, expected: str) -> None:
    assert expected in codes[case]["error"], codes[case]


def test_windows(folder: Path) -> None:
    (want,), found = started(folder, "mistral", [{"scheme": None, **BASE}]), started(
        folder, "mistral", [{"scheme": "dense", **BASE}, {"scheme": "int4", **BASE}], "dense"
    )
    assert found[0]["tokens"] == want["tokens"] != found[1]["tokens"]


def test_a_start_says_what_a_token_takes(folder: Path, codes: dict[str, dict[str, Any]]) -> None:
    log = (folder / "log-llama-dense").read_text()
    tokens = codes["int4"]["blocks"] * 32
    assert f"144 bytes a token in 2 layers, {tokens:,} tokens in 8 MiB (float32: {tokens * 144 // 1024:,})" in log
