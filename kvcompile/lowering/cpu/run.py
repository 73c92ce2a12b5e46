"""C++ text of ``kvcompile::attend``: the tasks of a problem, the merging of splits, and the module.

Threads take tasks from one counter. Where (batch row, kv head, block of queries) are fewer than the threads
can use, the tokens are split too and merged by log-sum-exp.
"""

from __future__ import annotations

RUN = r"""
// Threads take tasks from a common counter, late queries (long, when causal) first.
template <typename F> static void each_task(int64_t tasks, const F& work) {
  std::atomic<int64_t> next{tasks};
  const int64_t workers = std::min<int64_t>(at::get_num_threads(), tasks);
  at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) work(next);
  });
}
static void run(const Problem& p) {
  const int64_t block = std::max<int64_t>(1, std::min(p.queries, (use_matrix(p.queries * G) ? MATRIX_ROWS : MAX_ROWS) / G));
  const int64_t blocks = (p.queries + block - 1) / block;
  const int64_t units = p.batch * K * blocks, rows = block * G;
  if (units == 0) return;
  auto task_of = [&](int64_t unit) {
    const int64_t query = unit / (p.batch * K) * block, rest = unit % (p.batch * K);
    return Task{rest / K, rest % K, query, std::min(block, p.queries - query), 0, 0};
  };
  // Splits only where the units alone would leave threads idle; one split is at least MIN_SPLIT tokens.
  const int64_t threads = at::get_num_threads();
  const int64_t wanted = threads == 1 ? 1 : (3 * threads + units - 1) / units;
  const int64_t splits = std::max<int64_t>(1, std::min(wanted, p.pages * p.rows_per_page / MIN_SPLIT));
  const int64_t record = Value::row + 2;
  std::unique_ptr<float[]> partial(splits > 1 ? new float[units * splits * rows * record] : nullptr);
  each_task(units * splits, [&](std::atomic<int64_t>& next) {
    Scratch s(rows, block);
    for (int64_t id = --next; id >= 0; id = --next) {
      const int64_t unit = id / splits, split = id % splits;
      Task task = task_of(unit);
      ranges(p, task, s.from, s.until);
      if (splits > 1 && task.first < task.last) {
        const int64_t start = task.first / TILE * TILE;
        const int64_t step = ((task.last - start + splits - 1) / splits + TILE - 1) / TILE * TILE;
        task.first = std::max(task.first, start + split * step);
        task.last = std::min(task.last, start + (split + 1) * step);
      }
      attend_block(p, task, s);
      for (int64_t r = 0; r < task.queries * G; ++r) {
        const float total = vsum_across(vload(s.total + r * N));
        if (splits == 1) {
          finish_row(p, task.b, task.head * G + r % G, task.query + r / G, s.acc + r * Value::row, s.top[r], total);
          continue;
        }
        float* kept = partial.get() + (id * rows + r) * record;
        std::copy(s.acc + r * Value::row, s.acc + (r + 1) * Value::row, kept);
        kept[Value::row] = s.top[r];
        kept[Value::row + 1] = total;
      }
    }
  });
  if (splits == 1) return;
  each_task(units, [&](std::atomic<int64_t>& next) {
    alignas(64) float acc[Value::row];
    for (int64_t unit = --next; unit >= 0; unit = --next) {
      const Task task = task_of(unit);
      for (int64_t r = 0; r < task.queries * G; ++r) {
        auto kept = [&](int64_t split) { return partial.get() + ((unit * splits + split) * rows + r) * record; };
        float top = -INFINITY, total = 0.0f;
        for (int64_t i = 0; i < splits; ++i) {
          const float other = kept(i)[Value::row];
          top = top > other ? top : other;
        }
        std::fill(acc, acc + Value::row, 0.0f);
        for (int64_t i = 0; i < splits; ++i) {
          const float* part = kept(i);
          if (part[Value::row + 1] == 0.0f) continue;
          const float factor = std::exp(part[Value::row] - top);
          total += factor * part[Value::row + 1];
          for (int64_t d = 0; d < Value::row; d += N) vstore(acc + d, vfma(vset(factor), vload(part + d), vload(acc + d)));
        }
        finish_row(p, task.b, task.head * G + r % G, task.query + r / G, acc, top, total);
      }
    }
  });
}
"""
"""All tasks and the log-sum-exp merge; needs ATTEND."""

ENTRY = r"""
{{ template.header().getvalue() }}
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
// kvcompile::attend, keys {{ key_scheme }}, values {{ value_scheme }}
namespace {{ kernel.kernel_name }}_attend {
{{ vectors }}
{{ sides }}
using Q = {{ q_type }};
using Bias = {{ bias_type }};
using Sink = {{ sink_type }};
constexpr int TILE = {{ tile }};
constexpr int64_t K = {{ heads }}, G = {{ group }}, MAX_ROWS = {{ max_rows }}, MIN_SPLIT = {{ min_split }};
constexpr bool HAS_BIAS = {{ has_bias }}, HAS_KEEP = {{ has_keep }};
constexpr float SCALE = {{ scale }}, SOFTCAP = {{ softcap }};
{{ blocks }}
{{ decode }}
{{ fused }}
{{ matrix }}
{{ attend }}
{{ run }}
}
extern "C"
{{ definition }}
{
  {{ kernel.maybe_codegen_profile() }}
  {{ kernel.kernel_name }}_attend::Problem p{};
{%- for field, value in fields.items() %}
  p.{{ field }} = {{ value }};
{%- endfor %}
  {{ kernel.kernel_name }}_attend::run(p);
}
"""
"""The module; every jinja variable is filled by ``cpp_attend.AttendTemplate.render``."""
