"""Printed unpack expressions in Triton's interpreter equal eager ``unpack``, and in C++ where the process flushes subnormals."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Iterator

import pytest
import torch
from interpreted import interpreted
from registry import CHOSEN, SCHEMES

from kvcompile import schemes
from kvcompile.lowering.codegen import expressions
from kvcompile.testing.expressions import compare, formats, printed_expressions_equal_unpack, words_of
from kvcompile.types import KernelFormat, Role, SlotSpec

CODED = [cls.name for cls in SCHEMES if formats(cls())]
TOGETHER = (tuple(CODED), *((cls.name,) for cls in CHOSEN if cls.name in CODED))
"""All of them in one process, and those of ``--scheme`` each in one of its own."""


@pytest.fixture
def flushing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Subnormals flushed to zero during the test, as a library that was compiled with -ffast-math leaves them."""
    flush = torch.set_flush_denormal
    flush(True)
    monkeypatch.setattr(torch, "set_flush_denormal", lambda on: None)
    yield
    flush(False)


@pytest.mark.parametrize("name", CODED)
def test_cpp_equals_eager_where_subnormals_are_flushed(flushing: None, name: str) -> None:
    printed_expressions_equal_unpack(schemes.make(name))


def compare_in_triton(folder: pathlib.Path, names: tuple[str, ...]) -> None:
    """A kernel of every part of every scheme, for one program of all words."""
    lines, cases = ["import triton", "import triton.language as tl"], []
    for name in names:
        for fmt in formats(schemes.make(name)):
            for part in range(fmt.parts):
                lines += [
                    "@triton.jit", f"def unpack_{len(cases)}(W, O, N: tl.constexpr):", "    i = tl.arange(0, N)", "    w = tl.load(W + i)",
                    f"    tl.store(O + i, {expressions.triton_expression(fmt, part, 'w')})",
                ]
                cases.append((name, fmt, part))
    (folder / "kernels.py").write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location("kernels", folder / "kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for index, (name, fmt, part) in enumerate(cases):
        words = words_of(fmt)
        out = torch.full((len(words),), float("nan"))
        getattr(module, f"unpack_{index}")[(1,)](words, out, len(words))
        compare(fmt, part, words, out, f"the Triton that is printed of {name}")


@pytest.mark.parametrize("names", TOGETHER, ids=lambda names: names[0] if len(names) == 1 else "all")
def test_triton_equals_eager(tmp_path: pathlib.Path, names: tuple[str, ...]) -> None:
    interpreted(compare_in_triton, tmp_path, names)


def test_dense_passes_words_through() -> None:
    fmt = schemes.make("dense").format(SlotSpec(1, 64, torch.bfloat16, Role.KEY))
    assert expressions.triton_expression(fmt, 0, "w") == "w.to(tl.float32)"
    assert expressions.cpp_expression(fmt, 0, "w") == "static_cast<float>(w)"


@pytest.mark.parametrize(
    ("unpack", "found"),
    [
        (lambda words, part: torch.sin(words.to(torch.float32)), "sin"),
        (lambda words, part: words.view(torch.float8_e5m2).to(torch.float32), "float8_e5m2"),
        (lambda words, part: words.new_zeros(int(words.sum())), "traced"),
    ],
)
def test_unprintable_operation_is_named(unpack: object, found: str) -> None:
    fmt = KernelFormat(torch.uint8, 1, 64, True, unpack)
    with pytest.raises(expressions.UnprintableUnpack, match=found):
        expressions.triton_expression(fmt, 0, "w")
