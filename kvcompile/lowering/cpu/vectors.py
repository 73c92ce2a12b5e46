"""C++ text: float vectors of the machine's width, and a scheme's ``unpack`` printed on vectors of words.

Inductor compiles with -fno-tree-loop-vectorize and -ffp-contract=off, so a scalar loop over the codes
would stay scalar and a * b + c would stay two instructions. The kernel therefore writes its vectors with
the compilers' vector extension (GCC and Clang): N lanes, N = at::vec's, for any instruction set.
The scheme's expression comes from the trace of ``unpack`` that ``expressions`` prints for scalars.

``vf`` N floats; ``lanes<T>`` N numbers of type T; ``Side`` one encoded slot: its numbers of words, groups and parts.
Words that are float16 or bfloat16 are loaded as floats, which is exact.
"""

from __future__ import annotations

import torch

from kvcompile.lowering.codegen.expressions import CPP_TYPES, _Cpp, _expression
from kvcompile.types import KernelFormat


class CppVectors(_Cpp):
    """Casts and literals on vectors in C++ syntax: no promotion to int, so no narrowing."""

    def cast(self, text: str, source: torch.dtype, to: torch.dtype) -> str:
        """Return ``text``, an expression of dtype ``source``, converted to dtype ``to`` lane by lane."""
        return text if source == to else f"lanes_cast<{_lane(to)}>({text})"

    def bitcast(self, text: str, source: torch.dtype, to: torch.dtype) -> str:
        """Return ``text``, an expression of dtype ``source``, with its bits reinterpreted as dtype ``to``."""
        return f"lanes_bits<{_lane(to)}>({text})"

    def narrow(self, text: str, to: torch.dtype) -> str:
        """Return ``text`` unchanged: lanes keep their width."""
        return text

    def e4m3(self, text: str) -> str:
        """Return ``text``, an expression of bytes, converted to e4m3 floats."""
        return f"lanes_e4m3({text})"


def _lane(dtype: torch.dtype) -> str:
    """Return the lane type of a dtype: float for all floating dtypes, since 16-bit floats are widened when loaded."""
    return "float" if dtype.is_floating_point else CPP_TYPES[dtype]


def side_source(name: str, fmt: KernelFormat, words: int, row_step: int, scale_dtype: torch.dtype | None, exact_bfloat16: bool) -> str:
    """Return the C++ struct of one encoded slot, by which the kernel decodes a token.

    ``words``: stored words per token; ``row_step``: their distance from token to token (0: known at run time). A scale of a whole token
    without zero points, or of a whole head, is not applied to elements; tables of ``levels`` entries per group are looked up in floats.
    """
    branches = " else ".join(
        f"if constexpr (P == {part}) return {_expression(fmt, part, 'word', CppVectors())};" for part in range(fmt.parts)
    )
    return f"""
struct {name} {{
  using Word = {CPP_TYPES[fmt.word_dtype]};
  using Scale = {CPP_TYPES[scale_dtype or torch.float32]};
  static constexpr int64_t parts = {fmt.parts}, words = {words}, group = {fmt.group}, row_step = {row_step};
  static constexpr bool exact_bfloat16 = {str(exact_bfloat16).lower()};
  static constexpr bool scaled = {str(fmt.scaled).lower()};
  static constexpr bool zeros = {str(fmt.zeros).lower()};
  static constexpr int64_t levels = {fmt.levels};
  static constexpr bool head_scale = {str(fmt.static).lower()};
  static constexpr bool token_scale = scaled && !zeros && group == parts * words;
  static constexpr bool group_scale = scaled && !token_scale;
  static constexpr int64_t groups = parts * words / group;
  static constexpr int64_t vecs = (words + N - 1) / N, row = parts * vecs * N;
  template <int P> static inline vf unpack(word_lanes<Word> word) {{
    {branches}
  }}
}};
"""
