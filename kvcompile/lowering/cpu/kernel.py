"""C++ text of ``kvcompile::attend``: one task, that is masks and the online softmax over its tiles.

See ``source`` for the terms and ``run`` for how tasks are made.
"""

from __future__ import annotations

ATTEND = r"""
struct Problem {
  const Q* q; Q* out;
  int64_t q_batch, q_head, q_query, q_width;
  Slot<Key> keys; Slot<Value> values;
  int64_t batch, queries, pages, rows_per_page;
  const int64_t* hi; int64_t hi_batch, hi_query;
  const int64_t* lo; int64_t lo_batch, lo_query;
  const bool* keep; int64_t keep_batch, keep_token, keep_tokens;
  const Bias* bias; int64_t bias_batch, bias_head, bias_query, bias_token, bias_tokens;
  const Sink* sinks; int64_t sinks_head;
};
// What one thread works in; everything is sized by the block, nothing by the context.
struct Scratch {
  std::unique_ptr<float[]> memory;
  float *q, *tile, *scores, *acc, *top, *total, *bias, *scales;
  int64_t *from, *until;
  Pairs pairs;
  static float* aligned(float* p) { return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + 63) & ~uintptr_t(63)); }
  explicit Scratch(int64_t rows, int64_t block) : pairs(rows) {
    const int64_t scale_floats = TILE * std::max(Key::groups, Value::groups) + N;
    const int64_t tile_floats = TILE * std::max(Key::row, Value::row);
    memory.reset(new float[rows * (Key::row + Value::row + TILE + 1 + N) + tile_floats + scale_floats + TILE + 4 * block + 16 * 12]);
    float* next = aligned(memory.get());
    auto take = [&](int64_t floats) { float* p = next; next = aligned(next + floats); return p; };
    q = take(rows * Key::row);
    tile = take(tile_floats);
    scores = take(rows * TILE);
    acc = take(rows * Value::row);
    top = take(rows);
    total = take(rows * N);
    bias = take(TILE);
    scales = take(scale_floats);
    from = reinterpret_cast<int64_t*>(take(2 * block));
    until = reinterpret_cast<int64_t*>(take(2 * block));
    // Rows of the tile beyond the last token are multiplied too; their scores are masked afterwards.
    std::fill(tile, tile + tile_floats, 0.0f);
  }
};
struct Task { int64_t b, head, query, queries, first, last; };

// Which tokens each query of the block may see at all; the union is [first, last).
static inline void ranges(const Problem& p, Task& task, int64_t* from, int64_t* until) {
  int64_t tokens = p.pages * p.rows_per_page;
  if constexpr (HAS_KEEP) tokens = std::min(tokens, p.keep_tokens);
  if constexpr (HAS_BIAS) tokens = std::min(tokens, p.bias_tokens);
  task.first = tokens;
  task.last = 0;
  for (int64_t s = 0; s < task.queries; ++s) {
    until[s] = std::min(p.hi[task.b * p.hi_batch + (task.query + s) * p.hi_query] + 1, tokens);
    from[s] = p.lo ? std::max<int64_t>(p.lo[task.b * p.lo_batch + (task.query + s) * p.lo_query], 0) : 0;
    if (from[s] < until[s]) {
      task.first = std::min(task.first, from[s]);
      task.last = std::max(task.last, until[s]);
    }
  }
}
// Additive mask of one query and head for tokens t0 .. t0 + tokens: its bias, -inf where bool says no.
static inline void load_bias(const Problem& p, int64_t b, int64_t head, int64_t query, int64_t t0, int tokens, float* out) {
  const Bias* row = p.bias + b * p.bias_batch + head * p.bias_head + query * p.bias_query + t0 * p.bias_token;
  if constexpr (std::is_same_v<Bias, bool>) {
    for (int t = 0; t < tokens; ++t) out[t] = row[t * p.bias_token] ? 0.0f : -INFINITY;
  } else {
    for (int t = 0; t < tokens; t += N) vstore(out + t, load_floats(row + t * p.bias_token, tokens - t, p.bias_token));
  }
}
// Scores of one tile -> weights, with the row's running maximum and total. ``used`` collects attended tokens.
static inline void soften(const Problem& p, const Task& task, Scratch& s, int64_t rows, int64_t t0, int tokens, int32_t* used) {
  alignas(64) float keep[TILE];
  if constexpr (HAS_KEEP)
    for (int t = 0; t < tokens; ++t) keep[t] = p.keep[task.b * p.keep_batch + (t0 + t) * p.keep_token] ? 1.0f : 0.0f;
  vf lane;
  for (int64_t i = 0; i < N; ++i) lane[i] = static_cast<float>(i);
  vi seen[TILE / N] = {};
  const vf nothing = vset(-INFINITY);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t query = r / G, g = r % G;
    float* score = s.scores + r * TILE;
    if (HAS_BIAS && (g == 0 || p.bias_head != 0)) load_bias(p, task.b, task.head * G + g, task.query + query, t0, tokens, s.bias);
    const vf low = vset(static_cast<float>(std::clamp<int64_t>(s.from[query] - t0, 0, TILE)));
    const vf high = vset(static_cast<float>(std::clamp<int64_t>(s.until[query] - t0, 0, tokens)));
    vf x[TILE / N];
    vf most = nothing;
#pragma GCC unroll 16
    for (int64_t j = 0; j < TILE / N; ++j) {
      x[j] = vload(score + j * N) * vset(SCALE);
      if constexpr (Key::token_scale) x[j] *= vload(s.scales + j * N);
      if constexpr (SOFTCAP > 0) x[j] = from_at(to_at(x[j] * vset(1.0f / SOFTCAP)).tanh()) * vset(SOFTCAP);
      const vf at = lane + static_cast<float>(j * N);
      vi seen_here = (at >= low) & (at < high);
      if constexpr (HAS_BIAS) {
        const vf bias = vload(s.bias + j * N);
        x[j] += bias;
        seen_here &= bias != nothing;
      }
      if constexpr (HAS_KEEP) seen_here &= vload(keep + j * N) != vf{};
      x[j] = seen_here ? x[j] : nothing;
      seen[j] |= seen_here;
      most = (x[j] > most) | (x[j] != x[j]) ? x[j] : most;
    }
    const float before = s.top[r];
    const float tile_top = vmax_across(most);
    const float top = before > tile_top ? before : tile_top;
    if (!(top == before)) {
      const float shrink = before == -INFINITY ? 0.0f : std::exp(before - top);
      const vf factor = vset(shrink);
      vstore(s.total + r * N, vload(s.total + r * N) * factor);
      for (int64_t d = 0; d < Value::row; d += N) vstore(s.acc + r * Value::row + d, vload(s.acc + r * Value::row + d) * factor);
      s.top[r] = top;
    }
    const vf base = vset(top == -INFINITY ? 0.0f : top);
    vf sum{};
#pragma GCC unroll 16
    for (int64_t j = 0; j < TILE / N; ++j) {
      const vf weight = vexp(x[j] - base);
      sum += weight;
      vstore(score + j * N, weight);
    }
    vadd(s.total + r * N, sum);
  }
  for (int64_t j = 0; j < TILE / N; ++j) __builtin_memcpy(used + j * N, &seen[j], sizeof(vi));
}
static inline void load_queries(const Problem& p, const Task& task, float* out, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    const Q* q = p.q + task.b * p.q_batch + (task.head * G + r % G) * p.q_head + (task.query + r / G) * p.q_query;
    for (int64_t part = 0; part < Key::parts; ++part)
      for (int64_t v = 0; v < Key::vecs; ++v)
        vstore(out + r * Key::row + (part * Key::vecs + v) * N,
               load_floats(q + (part * Key::words + v * N) * p.q_width, Key::words - v * N, p.q_width));
  }
}
// Calls f with the number of rows (1 .. FEW) as a constant.
template <typename F> static inline void few_rows(int64_t rows, const F& f) {
  if (rows == 1) f(std::integral_constant<int, 1>());
  else if (rows == 2) f(std::integral_constant<int, 2>());
  else if (rows == 3) f(std::integral_constant<int, 3>());
  else f(std::integral_constant<int, 4>());
}
// One task from its first to its last token; leaves sums in s.acc, s.top, s.total.
static void attend_block(const Problem& p, const Task& task, Scratch& s) {
  const int64_t rows = task.queries * G;
  const bool few = rows <= FEW, matrix = use_matrix(rows);
  load_queries(p, task, s.q, rows);
  if (matrix) at::vec::convert(s.q, s.pairs.q.get(), rows * Key::row);
  std::fill(s.acc, s.acc + rows * Value::row, 0.0f);
  std::fill(s.total, s.total + rows * N, 0.0f);
  std::fill(s.top, s.top + rows, -INFINITY);
  alignas(64) int32_t used[TILE];
  for (int64_t t0 = task.first; t0 < task.last;) {
    const int64_t page = t0 / p.rows_per_page, row = t0 % p.rows_per_page;
    const int tokens = static_cast<int>(std::min({task.last - t0, p.rows_per_page - row, static_cast<int64_t>(TILE) - row % TILE}));
    const Span span{page, task.b, task.head, row, tokens};
    const int64_t next = std::min(t0 + tokens, task.last - 1);
    const Span after{next / p.rows_per_page, task.b, task.head, next % p.rows_per_page, 0};
    const Ahead<Key> keys_ahead{p.keys.words_at(after), p.keys.word_row()};
    const Ahead<Value> values_ahead{p.values.words_at(span), p.values.word_row()};
    load_scales(p.keys, span, s.scales);
    if (matrix) {
      dot_matrix(p.keys, span, rows, s.scales, s.tile, s.pairs, s.scores);
    } else if (few && p.keys.word.width == 1) {
      few_rows(rows, [&](auto r) { dot_fused<r.value>(p.keys, span, s.scales, s.q, s.scores, values_ahead); });
    } else {
      decode(p.keys, span, nullptr, s.scales, s.tile);
      dot(s.q, s.tile, s.scores, rows, tokens);
    }
    soften(p, task, s, rows, t0, tokens, used);
    load_scales(p.values, span, s.scales);
    if constexpr (Value::token_scale)
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t j = 0; j < TILE; j += N) vstore(s.scores + r * TILE + j, vload(s.scores + r * TILE + j) * vload(s.scales + j));
    if (matrix) {
      mix_matrix(p.values, span, rows, used, s.scales, s.tile, s.scores, s.pairs, s.acc);
    } else if (few && p.values.word.width == 1) {
      few_rows(rows, [&](auto r) { mix_fused<r.value>(p.values, span, used, s.scales, s.scores, s.acc, keys_ahead); });
    } else {
      decode(p.values, span, used, s.scales, s.tile);
      mix(s.scores, s.tile, s.acc, rows, tokens);
    }
    t0 += tokens;
  }
  if (matrix) at::native::cpublas::brgemm_release();
}
// acc / total with the sink's mass, in the result's dtype; a row that saw nothing gives zeros.
static inline void finish_row(const Problem& p, int64_t b, int64_t h, int64_t query, const float* acc, float top, float total) {
  float factor = 1.0f;
  if (p.sinks) {
    const float sink = static_cast<float>(p.sinks[h * p.sinks_head]);
    const float above = top < sink ? sink : top;
    factor = top == -INFINITY ? 0.0f : std::exp(top - above);
    total = total * factor + (sink == -INFINITY ? 0.0f : std::exp(sink - above));
  }
  const vf inverse = vset(total == 0.0f ? 0.0f : factor / total);
  alignas(64) float line[Value::parts * Value::words + N];
  for (int64_t part = 0; part < Value::parts; ++part)
    for (int64_t v = 0; v < Value::vecs; ++v)
      vstore(line + part * Value::words + v * N, vload(acc + (part * Value::vecs + v) * N) * inverse);
  Q* out = p.out + ((b * K * G + h) * p.queries + query) * (Value::parts * Value::words);
  if constexpr (std::is_same_v<Q, float>) __builtin_memcpy(out, line, sizeof(float) * Value::parts * Value::words);
  else at::vec::convert(line, out, Value::parts * Value::words);
}
"""
"""One task; needs VECTORS, Key, Value, BLOCKS and DECODE."""
