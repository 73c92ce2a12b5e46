"""Ten lines: the README's first example, taken from its text and run as it stands on a tiny checkpoint made here."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.accept.outcomes import Outcome, Result

README = Path(__file__).resolve().parents[2] / "README.md"
TEN_LINES = ("readme-default", "readme-reduce-overhead")
COMPILE = "torch.compile(model.forward, backend=backend)"
PROMPT = "The KV cache is"


def example(mode: str | None = None) -> str:
    """Return the README's example, compiled with ``mode``; without a GPU its ``.cuda()`` calls are left out. Raises ValueError."""
    found = re.search(r"## Ten lines\n+```python\n(.*?)```", README.read_text(), re.DOTALL)
    if found is None or COMPILE not in found[1]:
        raise ValueError(f"README.md has no section 'Ten lines' whose example says {COMPILE}")
    source = found[1]
    if mode is not None:
        source = source.replace(COMPILE, COMPILE.replace("backend=backend", f'backend=backend, mode="{mode}"'))
    return source if torch.cuda.is_available() else source.replace(".cuda()", "")


def save_checkpoint(folder: Path) -> None:
    """Write a tiny random Llama and a tokenizer of single characters, as ``from_pretrained`` reads them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {chr(code): code - 32 for code in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel({**words, "[UNK]": 95}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=96, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.06,
    )).to(torch.bfloat16).save_pretrained(folder)


def execute(mode: str | None = None) -> dict[str, Any]:
    """Run the example; return its names, with what it printed as ``printed``."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder))
        names: dict[str, Any] = {"path": folder}
        with contextlib.redirect_stdout(printed):
            exec(compile(example(mode), str(README), "exec"), names)  # noqa: S102 - the README's own example
    return {**names, "printed": printed.getvalue()}


def check(names: dict[str, Any]) -> None:
    """Raise AssertionError unless the example printed 64 new characters and a report of both layers; generate again and compare."""
    from transformers import StaticCache

    lines, report = names["printed"].splitlines(), names["backend"].report()
    assert lines[0].startswith(PROMPT), lines[0]
    assert len(lines[0]) == len(PROMPT) + 64, lines[0]
    assert report.sites, "nothing was rewritten"
    assert not report.refusals, report.refusals
    model, ids = names["model"], names["ids"]
    again = model.generate(ids, past_key_values=StaticCache(model.config, 8192), max_new_tokens=64)
    assert names["tokenizer"].decode(again[0]) == lines[0], "a second request is answered differently"


def run_ten_lines(identifier: str) -> Result:
    """Return the result of the example under the mode that ``identifier`` ends with."""
    started, mode, found = time.perf_counter(), identifier.removeprefix("readme-"), Result(identifier, Outcome.RIGHT, sites=2)
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            check(execute(None if mode == "default" else mode))
    except AssertionError as error:
        found = Result(identifier, Outcome.WRONG, str(error)[:300])
    except Exception as error:
        traceback.print_exc()
        said = str(error).strip().splitlines() or [""]
        found = Result(identifier, Outcome.CRASHED, f"{type(error).__name__}: {said[0]}"[:300])
    finally:
        torch._dynamo.reset()
    return replace(found, seconds=round(time.perf_counter() - started, 1))
