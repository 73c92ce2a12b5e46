"""C++ text: float vectors of the machine's width, and a scheme's ``unpack`` printed on vectors of words.

Inductor compiles with -fno-tree-loop-vectorize and -ffp-contract=off, so a scalar loop over the codes
would stay scalar and a * b + c would stay two instructions. The kernel therefore spells its vectors with
the compilers' vector extension (GCC and Clang): N lanes, N = at::vec's, whatever the instruction set.
The scheme's expression comes from the same trace of ``unpack`` as the scalar one of ``expressions``.

``vf`` N floats; ``lanes<T>`` N numbers of type T; ``Side`` one encoded slot: how many words, which groups.
Words that are float16 or bfloat16 are loaded as floats, which is exact.
"""

from __future__ import annotations

import torch

from kvcompile.lowering.codegen.expressions import CPP_TYPES, _Cpp, _expression
from kvcompile.types import KernelFormat


class CppVectors(_Cpp):
    """How casts and literals are spelled on vectors: no promotion to int, so nothing to narrow."""

    def cast(self, text: str, source: torch.dtype, to: torch.dtype) -> str:
        """A value of another dtype, lane by lane."""
        return text if source == to else f"lanes_cast<{_lane(to)}>({text})"

    def bitcast(self, text: str, source: torch.dtype, to: torch.dtype) -> str:
        """Print a cast of bits to another dtype."""
        return f"lanes_bits<{_lane(to)}>({text})"

    def narrow(self, text: str, to: torch.dtype) -> str:
        """Nothing: lanes keep their width."""
        return text

    def e4m3(self, text: str) -> str:
        """Bytes as e4m3 floats."""
        return f"lanes_e4m3({text})"


def _lane(dtype: torch.dtype) -> str:
    """The lane type of a dtype: 16-bit floats live in float lanes."""
    return "float" if dtype.is_floating_point else CPP_TYPES[dtype]


def side_source(name: str, fmt: KernelFormat, words: int, row_step: int, scale_dtype: torch.dtype | None, exact_bfloat16: bool) -> str:
    """The C++ struct of one encoded slot: ``words`` stored per token, ``row_step`` apart (0: known at run time)."""
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
  static constexpr bool token_scale = scaled && group == parts * words;
  static constexpr bool group_scale = scaled && !token_scale;
  static constexpr int64_t groups = parts * words / group;
  static constexpr int64_t vecs = (words + N - 1) / N, row = parts * vecs * N;
  template <int P> static inline vf unpack(word_lanes<Word> word) {{
    {branches}
  }}
}};
"""


VECTORS = r"""
constexpr int64_t N = at::vec::Vectorized<float>::size();
template <typename T> struct lanes_of { typedef T type __attribute__((vector_size(N * sizeof(T)))); };
template <typename T> using lanes = typename lanes_of<T>::type;
using vf = lanes<float>;
using vi = lanes<int32_t>;
template <typename W> constexpr bool is_half_float = std::is_same_v<W, at::Half> || std::is_same_v<W, at::BFloat16>;
template <typename W> using word_lanes = lanes<std::conditional_t<is_half_float<W>, float, W>>;

// Bytes to floats go through integers, by intrinsics: GCC folds the two conversions into one that it then
// does lane by lane.
static inline vi widen(lanes<int8_t> x) {
#if defined(CPU_CAPABILITY_AVX512)
  return (vi)_mm512_cvtepi8_epi32((__m128i)x);
#elif defined(CPU_CAPABILITY_AVX2)
  return (vi)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)x));
#else
  return __builtin_convertvector(x, vi);
#endif
}
static inline vi widen(lanes<uint8_t> x) {
#if defined(CPU_CAPABILITY_AVX512)
  return (vi)_mm512_cvtepu8_epi32((__m128i)x);
#elif defined(CPU_CAPABILITY_AVX2)
  return (vi)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)x));
#else
  return __builtin_convertvector(x, vi);
#endif
}
static inline vi widen(lanes<uint16_t> x) {
#if defined(CPU_CAPABILITY_AVX512)
  return (vi)_mm512_cvtepu16_epi32((__m256i)x);
#else
  return __builtin_convertvector(x, vi);
#endif
}
template <typename To, typename From> static inline lanes<To> lanes_cast(From x) {
  constexpr bool bytes = sizeof(From) == N;
  if constexpr (bytes && std::is_same_v<To, float>) return __builtin_convertvector(widen(x), vf);
  else if constexpr (bytes && std::is_same_v<To, int32_t>) return widen(x);
  else return __builtin_convertvector(x, lanes<To>);
}
template <typename To, typename From> static inline lanes<To> lanes_bits(From x) {
  static_assert(sizeof(From) == sizeof(lanes<To>), "bitcast between sizes");
  return (lanes<To>)x;
}
static inline vf vload(const float* p) { vf x; __builtin_memcpy(&x, p, sizeof(x)); return x; }
static inline void vstore(float* p, vf x) { __builtin_memcpy(p, &x, sizeof(x)); }
static inline void vadd(float* p, vf x) { vstore(p, vload(p) + x); }
static inline vf vset(float x) { return x - vf{}; }
static inline vf vfma(vf a, vf b, vf c) {
#if defined(CPU_CAPABILITY_AVX512)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(CPU_CAPABILITY_AVX2)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
static inline at::vec::Vectorized<float> to_at(vf x) {
  float buffer[N];
  vstore(buffer, x);
  return at::vec::Vectorized<float>::loadu(buffer);
}
static inline vf from_at(at::vec::Vectorized<float> x) {
  float buffer[N];
  x.store(buffer);
  return vload(buffer);
}
static inline float vmax_across(vf x) {
  using At = at::vec::Vectorized<float>;
  return at::vec::vec_reduce_all<float>([](At& a, At& b) { return at::vec::maximum(a, b); }, to_at(x));
}
static inline float vsum_across(vf x) {
  using At = at::vec::Vectorized<float>;
  return at::vec::vec_reduce_all<float>([](At& a, At& b) { return a + b; }, to_at(x));
}
// exp of x <= 0 to about 1 unit in the last place; NaN stays, -inf and what float32 cannot hold give 0.
static inline vf vexp(vf x) {
  const vf magic = vset(12582912.0f);
  const vf low = vset(-87.0f);
  const vf clipped = x < low ? low : x;
  const vf shifted = vfma(clipped, vset(1.44269504088896341f), magic);
  const vf n = shifted - magic;
  const vf r = vfma(n, vset(2.12194440e-4f), vfma(n, vset(-0.693359375f), clipped));
  vf y = vfma(vset(1.9875691500e-4f), r, vset(1.3981999507e-3f));
  y = vfma(y, r, vset(8.3334519073e-3f));
  y = vfma(y, r, vset(4.1665795894e-2f));
  y = vfma(y, r, vset(1.6666665459e-1f));
  y = vfma(y, r, vset(5.0000001201e-1f));
  y = vfma(y, r * r, r + vset(1.0f));
  const vi power = ((vi)shifted - (vi)magic + 127) << 23;
  return x < low ? vf{} : y * (vf)power;
}
// N words from contiguous memory; 16-bit floats arrive as floats.
template <typename W> static inline word_lanes<W> load_words(const W* p) {
  if constexpr (std::is_same_v<W, at::BFloat16>) {
    lanes<uint16_t> bits;
    __builtin_memcpy(&bits, p, sizeof(bits));
    return (vf)(widen(bits) << 16);
  } else if constexpr (std::is_same_v<W, at::Half>) {
    at::vec::Vectorized<float> x;
    at::vec::load_fp32_from_fp16(p, x);
    return from_at(x);
  } else {
    lanes<W> words;
    __builtin_memcpy(&words, p, sizeof(words));
    return words;
  }
}
// The first ``count`` of N words, ``step`` elements apart; lanes beyond are words of zero.
template <typename W> static inline word_lanes<W> load_words(const W* p, int64_t count, int64_t step) {
  if (count >= N && step == 1) return load_words<W>(p);
  alignas(64) W buffer[N] = {};
  for (int64_t i = 0; i < std::min(count, N); ++i) buffer[i] = p[i * step];
  return load_words<W>(buffer);
}
template <typename W> static inline vf load_floats(const W* p, int64_t count, int64_t step) {
  return lanes_cast<float>(load_words<W>(p, count, step));
}
// e4m3 through float16, whose bias is larger by 8: exact, and float16 subnormals are never flushed.
static inline vf lanes_e4m3(lanes<uint8_t> word) {
#if defined(CPU_CAPABILITY_AVX512)
  lanes<int16_t> bits = (lanes<int16_t>)_mm256_cvtepi8_epi16((__m128i)word);
#else
  lanes<int16_t> bits = __builtin_convertvector((lanes<int8_t>)word, lanes<int16_t>);
#endif
  bits = (bits << 7) & (int16_t)0xbfff;
  at::Half halves[N];
  __builtin_memcpy(halves, &bits, sizeof(bits));
  return load_words<at::Half>(halves) * 256.0f;
}
"""
"""Vector words; needs <ATen/cpu/vec/vec.h>. Stands before every ``side_source``."""
