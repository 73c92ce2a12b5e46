"""C++ text of ``kvcompile::attend``: the numeric core, the same for every scheme.

One task is (batch row, kv head, block of queries, split of the tokens). Its rows are the queries of the
block times the G heads that share the kv head, so that a tile of TILE tokens is decoded to float scratch
(cache sized, once) for all of them: keys -> scores -> online softmax -> values into the same scratch ->
weighted sums. A scale of a whole token never touches the tile: it multiplies the scores (keys) or the
weights (values); a scale of a group is applied while decoding. Tokens no row of the block attends to are
neither decoded nor multiplied, so what lies there (NaN, garbage) cannot matter.

Rows [M] = query-in-block * G + g;  row floats of a side: ``Side::row`` (parts planar, padded to N lanes).
"""

from __future__ import annotations

BLOCKS = r"""
// 16 dot products of R rows and 16 / R tokens at once: enough chains to hide the latency of an FMA, and
// 16 sums across lanes that fold into one vector.
static inline void fold16(const vf* acc, float* out) {
#if defined(CPU_CAPABILITY_AVX512)
  __m512 w[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 a = (__m512)acc[4 * i], b = (__m512)acc[4 * i + 1], c = (__m512)acc[4 * i + 2], d = (__m512)acc[4 * i + 3];
    const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    w[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  }
  const __m512 x = _mm512_add_ps(_mm512_shuffle_f32x4(w[0], w[1], 0x88), _mm512_shuffle_f32x4(w[0], w[1], 0xdd));
  const __m512 y = _mm512_add_ps(_mm512_shuffle_f32x4(w[2], w[3], 0x88), _mm512_shuffle_f32x4(w[2], w[3], 0xdd));
  _mm512_storeu_ps(out, _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd)));
#elif defined(CPU_CAPABILITY_AVX2)
#pragma GCC unroll 2
  for (int i = 0; i < 16; i += 8) {
    const __m256 ab = _mm256_hadd_ps((__m256)acc[i], (__m256)acc[i + 1]), cd = _mm256_hadd_ps((__m256)acc[i + 2], (__m256)acc[i + 3]);
    const __m256 ef = _mm256_hadd_ps((__m256)acc[i + 4], (__m256)acc[i + 5]), gh = _mm256_hadd_ps((__m256)acc[i + 6], (__m256)acc[i + 7]);
    const __m256 low = _mm256_hadd_ps(ab, cd), high = _mm256_hadd_ps(ef, gh);
    _mm256_storeu_ps(out + i, _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)));
  }
#else
  for (int i = 0; i < 16; ++i) out[i] = vsum_across(acc[i]);
#endif
}
template <int R> static inline void dot_rows(const float* q, const float* k, float* scores, int tokens) {
  constexpr int T = 16 / R;
  for (int t0 = 0; t0 < tokens; t0 += T) {
    vf acc[16] = {};
    for (int64_t d = 0; d < Key::row; d += N) {
      vf key[T];
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) key[t] = vload(k + (t0 + t) * Key::row + d);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vf query = vload(q + r * Key::row + d);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) acc[r * T + t] = vfma(query, key[t], acc[r * T + t]);
      }
    }
    alignas(64) float folded[16];
    fold16(acc, folded);
    for (int r = 0; r < R; ++r) __builtin_memcpy(scores + r * TILE + t0, folded + r * T, T * sizeof(float));
  }
}
static inline void dot(const float* q, const float* k, float* scores, int64_t rows, int tokens) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) dot_rows<4>(q + r * Key::row, k, scores + r * TILE, tokens);
  for (; r + 2 <= rows; r += 2) dot_rows<2>(q + r * Key::row, k, scores + r * TILE, tokens);
  for (; r < rows; ++r) dot_rows<1>(q + r * Key::row, k, scores + r * TILE, tokens);
}
// acc [R][vectors] += weights [R][tokens] x values [tokens][vectors]
template <int R, int V> static inline int64_t mix_block(const float* weights, const float* v, float* acc, int tokens, int64_t d) {
  for (; d + V * N <= Value::row; d += V * N) {
    // From zero: a tile's sum and then the sum of tiles lose less than one long chain.
    vf sum[R][V] = {};
    for (int t = 0; t < tokens; ++t) {
      vf value[V];
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) value[j] = vload(v + t * Value::row + d + j * N);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const vf weight = vset(weights[r * TILE + t]);
#pragma GCC unroll 8
        for (int j = 0; j < V; ++j) sum[r][j] = vfma(weight, value[j], sum[r][j]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) vadd(acc + r * Value::row + d + j * N, sum[r][j]);
  }
  return d;
}
template <int R> static inline void mix_rows(const float* weights, const float* v, float* acc, int tokens) {
  int64_t d = 0;
  if constexpr (R <= 2) d = mix_block<R, 8>(weights, v, acc, tokens, d);
  d = mix_block<R, 4>(weights, v, acc, tokens, d);
  d = mix_block<R, 2>(weights, v, acc, tokens, d);
  mix_block<R, 1>(weights, v, acc, tokens, d);
}
static inline void mix(const float* weights, const float* v, float* acc, int64_t rows, int tokens) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) mix_rows<4>(weights + r * TILE, v, acc + r * Value::row, tokens);
  for (; r + 2 <= rows; r += 2) mix_rows<2>(weights + r * TILE, v, acc + r * Value::row, tokens);
  for (; r < rows; ++r) mix_rows<1>(weights + r * TILE, v, acc + r * Value::row, tokens);
}
"""
"""Products of a block of rows with a decoded tile; needs VECTORS, Key, Value and TILE."""

DECODE = r"""
// A plane [page][batch][head][row][width] by strides, in elements.
struct Strides { int64_t page, batch, head, row, width; };
// Neighboring tokens of one page: rows row .. row + tokens.
struct Span { int64_t page, batch, head, row; int tokens; };
template <class Side> struct Slot {
  const typename Side::Word* words;
  const typename Side::Scale* scales;
  Strides word, scale;
  // A constant where the layout says so: addresses of neighboring tokens then cost nothing.
  int64_t word_row() const { return Side::row_step > 0 ? Side::row_step : word.row; }
  const typename Side::Word* words_at(const Span& at) const {
    return words + at.page * word.page + at.batch * word.batch + at.head * word.head + at.row * word.row;
  }
  const typename Side::Scale* scales_at(const Span& at) const {
    return scales + at.page * scale.page + at.batch * scale.batch + at.head * scale.head + at.row * scale.row;
  }
};
// The scales of rows row .. row + tokens of one page as floats, [tokens][groups].
template <class Side> static inline void load_scales(
    const Slot<Side>& slot, const Span& span, float* out) {
  if constexpr (!Side::scaled) return;
  const auto* scales = slot.scales_at(span);
  if ((Side::groups == 1 || slot.scale.width == 1) && slot.scale.row == Side::groups) {
    const int64_t count = span.tokens * Side::groups;
    for (int64_t i = 0; i < count; i += N) vstore(out + i, load_floats(scales + i, count - i, 1));
    return;
  }
  for (int t = 0; t < span.tokens; ++t)
    for (int64_t i = 0; i < Side::groups; ++i)
      out[t * Side::groups + i] = static_cast<float>(scales[t * slot.scale.row + i * slot.scale.width]);
}
// What N channels from channel c on are multiplied with; ``scales`` a token's.
template <class Side> static inline vf group_scale(const float* scales, int64_t c) {
  if constexpr (Side::group % N == 0 && (Side::parts == 1 || Side::words % Side::group == 0)) {
    return vset(scales[c / Side::group]);
  } else {
    float lane[N];
    for (int64_t i = 0; i < N; ++i) lane[i] = scales[std::min(c + i, Side::parts * Side::words - 1) / Side::group];
    return vload(lane);
  }
}
template <class Side, int P = 0> static inline void decode_row(
    const typename Side::Word* words, int64_t word_step, const float* scales, float* out) {
#pragma GCC unroll 16
  for (int64_t v = 0; v < Side::vecs; ++v) {
    vf x = Side::template unpack<P>(load_words(words + v * N * word_step, Side::words - v * N, word_step));
    if constexpr (Side::group_scale) x *= group_scale<Side>(scales, P * Side::words + v * N);
    vstore(out + (P * Side::vecs + v) * N, x);
  }
  if constexpr (P + 1 < Side::parts) decode_row<Side, P + 1>(words, word_step, scales, out);
}
// Rows row .. row + tokens of one page into out [tokens][Side::row]; ``used`` skips rows.
template <class Side, bool CONTIGUOUS> static inline void decode_rows(
    const Slot<Side>& slot, const Span& span, const int32_t* used, const float* scales, float* out) {
  const auto* words = slot.words_at(span);
  const int64_t step = CONTIGUOUS ? 1 : slot.word.width;
  for (int t = 0; t < span.tokens; ++t) {
    if (used != nullptr && used[t] == 0)
      for (int64_t d = 0; d < Side::row; d += N) vstore(out + t * Side::row + d, vf{});
    else
      decode_row<Side>(words + t * slot.word_row(), step, scales + t * Side::groups, out + t * Side::row);
  }
}
template <class Side> static inline void decode(
    const Slot<Side>& slot, const Span& span, const int32_t* used, const float* scales, float* out) {
  if (slot.word.width == 1) decode_rows<Side, true>(slot, span, used, scales, out);
  else decode_rows<Side, false>(slot, span, used, scales, out);
}
"""
"""From planes to a tile of floats; needs VECTORS."""

FUSED = r"""
// Up to FEW rows: codes become floats in registers, next to their use. Key channels from c on, parts planar.
constexpr int FEW = 4;
// Rows that are needed next, asked for while the present ones are used: a page is too short a run for the
// hardware to notice. Values of a tile during its keys, keys of the next tile during its values.
template <class Side> struct Ahead {
  const typename Side::Word* words;
  int64_t step;
  void fetch(int64_t row) const {
    const char* line = reinterpret_cast<const char*>(words + row * step);
    for (size_t i = 0; i < Side::words * sizeof(typename Side::Word); i += 64) __builtin_prefetch(line + i);
  }
};
template <int R, int T, bool TAIL, int P = 0> static inline void dot_fused_part(
    const Slot<Key>& slot, const float* q, const Key::Word* words, const float* scales, int last, vf* acc) {
#pragma GCC unroll 2
  for (int64_t v = 0; v < Key::vecs; ++v) {
    vf key[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      // Beyond the last token the last one is read again; its scores are masked afterwards.
      const int64_t at = TAIL ? std::min(t, last) : t;
      key[t] = Key::unpack<P>(load_words(words + at * slot.word_row() + v * N, Key::words - v * N, 1));
      if constexpr (Key::group_scale)
        key[t] *= group_scale<Key>(scales + at * Key::groups, P * Key::words + v * N);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf query = vload(q + r * Key::row + (P * Key::vecs + v) * N);
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) acc[r * T + t] = vfma(query, key[t], acc[r * T + t]);
    }
  }
  if constexpr (P + 1 < Key::parts) dot_fused_part<R, T, TAIL, P + 1>(slot, q, words, scales, last, acc);
}
template <int R> static void dot_fused(
    const Slot<Key>& slot, const Span& span, const float* scales, const float* q,
    float* scores, const Ahead<Value>& ahead) {
  constexpr int T = R == 1 ? 16 : R == 2 ? 8 : 4;
  for (int t0 = 0; t0 < span.tokens; t0 += T) {
    const auto* words = slot.words_at(span) + t0 * slot.word_row();
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) ahead.fetch(t0 + t);
    vf acc[16] = {};
    if (t0 + T <= span.tokens) dot_fused_part<R, T, false>(slot, q, words, scales + t0 * Key::groups, 0, acc);
    else dot_fused_part<R, T, true>(slot, q, words, scales + t0 * Key::groups, span.tokens - 1 - t0, acc);
    alignas(64) float folded[16];
    fold16(acc, folded);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) __builtin_memcpy(scores + r * TILE + t0, folded + r * T, T * sizeof(float));
  }
}
template <int R, int V, int P> static inline void mix_fused_block(
    const Slot<Value>& slot, const Value::Word* words, const float* scales, int tokens, const int32_t* used,
    const float* weights, float* acc, int64_t v0, const Ahead<Key>& ahead) {
  vf sum[R][V] = {};
  for (int t = 0; t < tokens; ++t) {
    if (P == 0 && v0 == 0) ahead.fetch(t);
    if (used[t] == 0) continue;
    vf value[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) {
      value[j] = Value::unpack<P>(load_words(words + t * slot.word_row() + (v0 + j) * N, Value::words - (v0 + j) * N, 1));
      if constexpr (Value::group_scale)
        value[j] *= group_scale<Value>(scales + t * Value::groups, P * Value::words + (v0 + j) * N);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf weight = vset(weights[r * TILE + t]);
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) sum[r][j] = vfma(weight, value[j], sum[r][j]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) vadd(acc + r * Value::row + (P * Value::vecs + v0 + j) * N, sum[r][j]);
}
template <int R, int P = 0> static inline void mix_fused(
    const Slot<Value>& slot, const Span& span, const int32_t* used,
    const float* scales, const float* weights, float* acc,
    const Ahead<Key>& ahead) {
  const auto* words = slot.words_at(span);
  int64_t v = 0;
  if constexpr (R <= 2)
    for (; v + 8 <= Value::vecs; v += 8) mix_fused_block<R, 8, P>(slot, words, scales, span.tokens, used, weights, acc, v, ahead);
  for (; v + 4 <= Value::vecs; v += 4) mix_fused_block<R, 4, P>(slot, words, scales, span.tokens, used, weights, acc, v, ahead);
  for (; v + 2 <= Value::vecs; v += 2) mix_fused_block<R, 2, P>(slot, words, scales, span.tokens, used, weights, acc, v, ahead);
  for (; v < Value::vecs; ++v) mix_fused_block<R, 1, P>(slot, words, scales, span.tokens, used, weights, acc, v, ahead);
  if constexpr (P + 1 < Value::parts) mix_fused<R, P + 1>(slot, span, used, scales, weights, acc, ahead);
}
"""
"""Products straight from the planes for a few rows; needs BLOCKS and DECODE."""
