"""The backend by its name: Dynamo finds it through the package's entry point, and options are the arguments of ``kvcompile.backend``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_models import cache_of, llama, prompt
from installed_metadata import installed
from torch._dynamo.exc import BackendCompilerFailed

import kvcompile
from benchmarks.accept.ten_lines import save_checkpoint
from kvcompile import errors


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, one_thread: None, fresh_dynamo: None) -> Iterator[None]:
    with installed(tmp_path / "site"):
        yield


def steps(run: Any, cache: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [run(prompt(3, count, index), past_key_values=cache).logits for index, count in enumerate((5, 1, 1))]


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="kvcompile", options=options or None)


def test_dynamo_lists_it() -> None:
    assert "kvcompile" in torch._dynamo.list_backends()


@pytest.mark.compile
def test_the_name_is_the_backend() -> None:
    """By Inductor, a static cache, a prompt and steps: equal numbers, and the same report."""
    model, backend = llama(layers=1), kvcompile.backend(scheme="int4(group=16)")
    expected = steps(torch.compile(model, backend=backend), cache_of(model, "static"))
    torch._dynamo.reset()
    cache = cache_of(model, "static")
    found = steps(compiled(model, scheme="int4(group=16)"), cache)
    assert all(torch.equal(mine, their) for mine, their in zip(found, expected, strict=True))
    assert isinstance(cache.layers[0].keys, kvcompile.CompressedCache)
    report = kvcompile.named_backends()[-1].report()
    assert report.sites == backend.report().sites > 0 and not report.refusals and "int4" in str(report)


def test_without_options_it_is_the_default() -> None:
    model = llama(layers=1)
    steps(compiled(model, inner="eager"), cache_of(model, "dynamic"))
    (made,) = kvcompile.named_backends()
    assert made.policy == kvcompile.backend().policy
    assert torch._dynamo.lookup_backend("kvcompile").__name__ == "compile_graph"


def test_every_argument_is_an_option() -> None:
    """Each with a value that is not its default, as ``kvcompile.backend`` itself takes it."""
    options = {
        "scheme": {"k": "int8", "v": "int4(group=16)"}, "inner": "eager", "strict": True, "mode": "default",
        "options": {"max_autotune": False}, "reserve": 64, "certify": kvcompile.Certify(fallback="report"), "validate": "where possible",
        "fold": True, "gluon": "never",
    }
    assert options.keys() == inspect.signature(kvcompile.backend).parameters.keys()
    model = llama(layers=1)
    steps(compiled(model, **options), cache_of(model, "static"))
    (made,), same = kvcompile.named_backends(), kvcompile.backend(**options)
    assert made.settings == same.settings and made.policy == same.policy and made.memory.growth == same.memory.growth


@pytest.mark.parametrize(("options", "error", "says"), [
    ({"scheme": "int5"}, errors.UnknownScheme, "did you mean"),
    ({"scheme": "int4(bits=5)"}, errors.UnknownOption, "bits"),
    ({"inner": "gcc"}, errors.BadSetting, "inductor"),
    ({"schema": "int4"}, errors.UnknownSetting, "did you mean 'scheme'"),
    ({"max_autotune": True}, errors.UnknownSetting, "options of Inductor"),
])
def test_a_wrong_option(options: dict[str, Any], error: type[Exception], says: str) -> None:
    """The error of ``kvcompile.backend``, at the first call: torch.compile gives options to a backend with its first graph."""
    model = llama(layers=1)
    with pytest.raises(BackendCompilerFailed, match=says) as caught:
        steps(compiled(model, **options), cache_of(model, "static"))
    assert isinstance(caught.value.inner_exception, error)
    assert not kvcompile.named_backends()


def test_equal_options_share_a_backend_and_others_do_not() -> None:
    one, two = llama(layers=1), llama(layers=1)
    for model, scheme in ((one, "int8"), (two, "int8"), (two, "fp8")):
        steps(compiled(model.forward, scheme=scheme, inner="eager"), cache_of(model, "dynamic"))
    eight, other = kvcompile.named_backends()
    assert eight.policy == kvcompile.backend("int8").policy and other.policy == kvcompile.backend("fp8").policy
    torch._dynamo.reset()
    assert kvcompile.named_backends() == ()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "model")
    return tmp_path / "model"


def configuration(**options: Any) -> Any:
    """A compile configuration of generate(); on a CPU generate compiles nothing unless a private switch says so."""
    from transformers import CompileConfig

    made = CompileConfig(backend="kvcompile", mode=None, options=options)
    made._compile_all_devices = True
    return made


@pytest.mark.compile
def test_generate_by_a_compile_config(checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = torch.arange(1, 12)[None]
    said = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(ids, **said, disable_compile=True)
    for _ in range(2):
        found = model.generate(ids, **said, compile_config=configuration(scheme="dense"))
        assert torch.equal(found, expected)
    (made,) = kvcompile.named_backends()
    report = made.report()
    assert report.sites == 2 and not report.refusals
    assert report.allocated, "no cache was compressed"


@pytest.mark.compile
def test_a_pipeline_by_a_compile_config(checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    said = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    expected = pipeline("text-generation", model=model, tokenizer=tokenizer)("The KV cache is", **said, disable_compile=True)
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    found = write("The KV cache is", **said, compile_config=configuration(scheme="dense"))
    assert found == expected
    (made,) = kvcompile.named_backends()
    assert made.report().sites == 2 and not made.report().refusals
