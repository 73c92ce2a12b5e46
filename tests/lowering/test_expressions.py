"""Printed unpack expressions equal eager ``unpack`` on all 256 words, in Triton and in C++."""

from __future__ import annotations

import ctypes
import importlib.util
import pathlib
import subprocess
from collections.abc import Iterator

import pytest
import torch
from interpreted import interpreted
from registry import SCHEMES

from kvcompile import schemes
from kvcompile.lowering.codegen import expressions
from kvcompile.types import KernelFormat, Role, SlotSpec

SLOT = SlotSpec(1, 64, torch.float32, Role.KEY)
CODED = [cls.name for cls in SCHEMES if cls().format(SLOT).scaled]


def all_words(fmt: KernelFormat) -> torch.Tensor:
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fmt.word_dtype)


def expected(fmt: KernelFormat, part: int) -> torch.Tensor:
    """Eager values of all words; NaN codes excepted (they only occur under a NaN scale)."""
    return fmt.unpack(all_words(fmt), part)


def parts() -> list[tuple[str, int]]:
    return [(name, part) for name in CODED for part in range(schemes.make(name).format(SLOT).parts)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """One shared object with a function per scheme and part."""
    source = ["#include <cstdint>", expressions.CPP_PRELUDE]
    for name, part in parts():
        fmt = schemes.make(name).format(SLOT)
        word = expressions.CPP_TYPES[fmt.word_dtype]
        source.append(
            f'extern "C" void {name}_{part}(const {word}* w, float* out) {{ for (int i = 0; i < 256; ++i) '
            f"out[i] = {expressions.cpp_expression(fmt, part, 'w[i]')}; }}"
        )
    folder = tmp_path_factory.mktemp("cpp")
    (folder / "unpack.cpp").write_text("\n".join(source))
    # Flags as hostile as Inductor's: -ffast-math may make the process flush subnormals.
    subprocess.run(
        ["g++", "-std=c++17", "-O3", "-ffast-math", "-fno-finite-math-only", "-shared", "-fPIC", "unpack.cpp", "-o", "u.so"],
        cwd=folder, check=True,
    )
    loaded = ctypes.CDLL(str(folder / "u.so"))
    # What loading it did to this process would be done to every test behind it.
    torch.set_flush_denormal(False)
    return loaded


@pytest.fixture
def flushing(library: ctypes.CDLL) -> Iterator[None]:
    """Subnormals flushed to zero during the test, as such a library leaves them."""
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize(("name", "part"), parts())
def test_cpp_equals_eager(library: ctypes.CDLL, flushing: None, name: str, part: int) -> None:
    fmt = schemes.make(name).format(SLOT)
    words, out = all_words(fmt), torch.full((256,), float("nan"))
    getattr(library, f"{name}_{part}")(ctypes.c_void_p(words.data_ptr()), ctypes.c_void_p(out.data_ptr()))
    eager = expected(fmt, part)
    finite = eager.isfinite()
    assert finite.sum() >= 254
    assert torch.equal(out[finite], eager[finite])


def compare_in_triton(folder: pathlib.Path) -> None:
    """A kernel of every scheme and part, for one program of all words."""
    lines = ["import triton", "import triton.language as tl"]
    for name, part in parts():
        fmt = schemes.make(name).format(SLOT)
        lines += [
            "@triton.jit", f"def {name}_{part}(W, O):", "    i = tl.arange(0, 256)", "    w = tl.load(W + i)",
            f"    tl.store(O + i, {expressions.triton_expression(fmt, part, 'w')})",
        ]
    (folder / "kernels.py").write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location("kernels", folder / "kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, part in parts():
        fmt, out = schemes.make(name).format(SLOT), torch.full((256,), float("nan"))
        getattr(module, f"{name}_{part}")[(1,)](all_words(fmt), out)
        eager = expected(fmt, part)
        finite = eager.isfinite()
        assert torch.equal(out[finite], eager[finite]), (name, part)


def test_triton_equals_eager(tmp_path: pathlib.Path) -> None:
    interpreted(compare_in_triton, tmp_path)


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
