"""Law of printed expressions: the C++ printed from a format's ``unpack`` gives the values of ``unpack``."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from kvcompile.lowering.codegen import expressions
from kvcompile.schemes import Scheme
from kvcompile.testing.laws import LeftOut, Over, law, unlike
from kvcompile.testing.samples import fitting
from kvcompile.types import KernelFormat, Role

FLAGS = ("-std=c++17", "-O3", "-ffast-math", "-fno-finite-math-only", "-shared", "-fPIC")
"""Flags as hostile as Inductor's."""


SAMPLED = 4096
"""Words that are tried where there are more than 256."""


def formats(scheme: Scheme) -> tuple[KernelFormat, ...]:
    """Return the kernel formats of keys and of values, those with codes only, each with words of one number (``_whole``)."""
    found = (made.format(fitting(made)) for made in dict.fromkeys(scheme.for_role(role) for role in Role))
    return tuple(_whole(fmt) for fmt in found if fmt.coded)


def _whole(fmt: KernelFormat) -> KernelFormat:
    """Return the format with words assembled from their segments, so that a word is one number, as ``unpack`` takes it."""
    return fmt if fmt.segments == 1 else dataclasses.replace(fmt, word_dtype=fmt.whole_dtype, segments=1)


def words_of(fmt: KernelFormat) -> torch.Tensor:
    """Return words to compare, in the format's dtype [n]: all 256 words of one byte, or SAMPLED random words of more bytes."""
    size = fmt.word_dtype.itemsize
    if size == 1:
        return torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8).view(fmt.word_dtype)
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (SAMPLED * size,), dtype=torch.int32, device="cpu", generator=generator)
    return data.to(torch.uint8).view(fmt.word_dtype)


def cpp_source(formats: Sequence[KernelFormat]) -> str:
    """Return C++ source with a function for every part of every format, ``unpack_<format>_<part>``, over an array of words."""
    lines = ["#include <cstdint>", expressions.CPP_PRELUDE]
    for index, fmt in enumerate(formats):
        word, count = expressions.CPP_TYPES[fmt.word_dtype], words_of(fmt).numel()
        lines += [
            f'extern "C" void unpack_{index}_{part}(const {word}* w, float* out) {{ for (int i = 0; i < {count}; ++i) '
            f"out[i] = {expressions.cpp_expression(fmt, part, 'w[i]')}; }}" for part in range(fmt.parts)
        ]
    return "\n".join(lines)


def compare(fmt: KernelFormat, part: int, words: torch.Tensor, out: torch.Tensor, what: str) -> None:
    """Check that ``out``, results of the code ``what`` for ``words``, equals ``unpack``, except for words that unpack to NaN.

    Raises Unlike.
    """
    eager = fmt.unpack(words, part)
    finite = eager.isfinite()
    if not int(finite.sum()) >= len(words) - 2:
        unlike("numbers for all words but two", f"{int(finite.sum())} of {len(words)}")
    differs = ((out != eager) & finite).nonzero()
    if len(differs):
        at = int(differs[0])
        unlike(f"{float(eager[at])} for the word {int(words[at])} in part {part}, as unpack gives", f"{float(out[at])} of {what}")


def compiled(source: str) -> ctypes.CDLL:
    """Return the library that ``source``, C++, compiles to, loaded. Raises LeftOut without a compiler, Unlike if it does not compile."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        raise LeftOut("no C++ compiler was found")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "unpack.cpp").write_text(source)
        done = subprocess.run([compiler, *FLAGS, "unpack.cpp", "-o", "unpack.so"], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            unlike("an expression that compiles", done.stderr[-1000:])
        library = ctypes.CDLL(str(Path(folder, "unpack.so")))
    # Loading it may have told this thread to flush subnormals.
    torch.set_flush_denormal(False)
    return library


@law(Over.DEFAULT, "write `unpack` with >> << & | ^ + - *, .to and .view alone, the same whatever tensor it is given")
def printed_expressions_equal_unpack(scheme: Scheme) -> None:
    """Check that C++ printed from ``unpack`` returns the values of ``unpack`` for all tried words, and that Triton can be printed.

    Raises Unlike, or LeftOut without a C++ compiler.
    """
    found = formats(scheme)
    for fmt in found:
        for part in range(fmt.parts):
            expressions.triton_expression(fmt, part, "w")
    if not found:
        return
    library = compiled(cpp_source(found))
    for index, fmt in enumerate(found):
        for part in range(fmt.parts):
            words = words_of(fmt)
            out = torch.full((len(words),), float("nan"), device="cpu")
            getattr(library, f"unpack_{index}_{part}")(ctypes.c_void_p(words.data_ptr()), ctypes.c_void_p(out.data_ptr()))
            compare(fmt, part, words, out, "the printed C++")
