"""What the plugin for vLLM decides without vLLM: schemes, bytes, versions, and to stay out of the way."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kvcompile.errors import EngineUnfit, NotPaged, ScalesMissing, SchemeError
from kvcompile.schemes.pairs import parse_pair
from kvcompile.serving.block_layout import BlockLayout
from kvcompile.serving.vllm_plugin import settings
from kvcompile.serving.vllm_plugin.plugin import register
from kvcompile.serving.vllm_plugin.versions import FIRST, LAST, require_known


def test_without_a_scheme_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.VARIABLE, raising=False)
    register()
    monkeypatch.setenv(settings.VARIABLE, "  ")
    register()
    assert "vllm" not in sys.modules


def test_the_entry_point_imports_neither_the_engine_nor_a_kernel() -> None:
    look = "import kvcompile.serving.vllm_plugin.plugin, sys; print(*sys.modules)"
    found = set(subprocess.run([sys.executable, "-c", look], check=True, capture_output=True, text=True).stdout.split())
    assert "kvcompile.serving.vllm_plugin.plugin" in found and not found & {"vllm", "transformers", "triton", "torch._inductor.ir"}


def test_schemes_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("int4", "k=int8,v=int4(group=16)", "v=nf4,k=fp8"):
        monkeypatch.setenv(settings.VARIABLE, text)
        assert settings.schemes() == parse_pair(text)
    monkeypatch.setenv(settings.VARIABLE, "int5")
    with pytest.raises(SchemeError, match="int5"):
        settings.schemes()


def test_versions() -> None:
    for version in ("0.32.0", "0.32.1+cpu", "0.32.0rc1"):
        require_known(version)
    for version in ("0.31.0", "0.33.0", "1.32.0", "dev"):
        with pytest.raises(EngineUnfit, match=r"vLLM 0\.32, found " + version.replace(".", r"\.")):
            require_known(version)
    assert FIRST <= LAST


@pytest.mark.parametrize("text", ["dense", "int8", "fp8", "int4", "nf4", "gauss", "k=int8,v=int4", "int4(scale_dtype=float32)"])
@pytest.mark.parametrize("page", [16, 48, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cell_of_the_engine_holds_a_token(text: str, page: int, dtype: torch.dtype) -> None:
    """The engine gives a head ``page`` cells of so many bytes, in whole elements of its dtype."""
    keys, values = parse_pair(text)
    cell = settings.bytes_of_token(keys, values, 96, 64, dtype)
    layout = BlockLayout.of(keys, 3, 96, values=values, value_dim=64, page=page, dtype=dtype)
    assert cell % dtype.itemsize == 0 and layout.head_bytes <= page * cell < layout.head_bytes + page * dtype.itemsize
    assert page * cell % 16 == 0, "planes of the next head are not aligned"


def test_schemes_that_a_text_cannot_bring() -> None:
    for text, error in (("kivi", NotPaged), ("int8-static(measured=True)", ScalesMissing), ("certified", NotPaged)):
        with pytest.raises(error):
            settings.bytes_of_token(*parse_pair(text), 64, 64, torch.bfloat16)
