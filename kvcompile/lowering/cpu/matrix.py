"""C++ text of ``kvcompile::attend`` for many bfloat16 rows (prefill): both products as bfloat16 matrix products.

Used where q is bfloat16, every value that the codes unpack to is a bfloat16 anyway (dense bfloat16, integers
of at most 8 bits, e4m3, with token scales kept apart) and the machine multiplies bfloat16 matrices: then
q . k loses nothing, and only the weights are rounded, as SDPA rounds them. The products are ATen's brgemm,
which wants its second operand in pairs of rows (VNNI): tiles are packed while they are decoded.
"""

from __future__ import annotations

import torch

from kvcompile.types import KernelFormat


def unpacks_to_bfloat16(fmt: KernelFormat) -> bool:
    """Whether every unscaled value is exactly a bfloat16; words of more than a byte are not tried."""
    if not fmt.scaled:
        return fmt.word_dtype == torch.bfloat16
    if fmt.word_dtype.itemsize > 1:
        return False
    words = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fmt.word_dtype)
    values = torch.stack([fmt.unpack(words, part) for part in range(fmt.parts)])
    return torch.equal(values.nan_to_num(), values.nan_to_num().to(torch.bfloat16).to(torch.float32))


MATRIX = r"""
template <class Side> constexpr bool fits_matrix = Side::exact_bfloat16 && !Side::group_scale && Side::row % 2 == 0;
constexpr bool MATRIX = std::is_same_v<Q, at::BFloat16> && fits_matrix<Key> && fits_matrix<Value>;
// Rows from which packing a tile pays, and rows that share one tile then.
constexpr int64_t MATRIX_FEWEST = 32, MATRIX_ROWS = 256;
static inline bool use_matrix(int64_t rows) {
  if constexpr (!MATRIX) return false;
  else return rows >= MATRIX_FEWEST && at::native::cpublas::could_pack(at::kBFloat16);
}
// Bfloat16 operands of one thread; a tile is pairs of rows: (channels / 2, tokens) keys, (tokens / 2, channels) values.
struct Pairs {
  std::unique_ptr<at::BFloat16[]> q, weights;
  std::unique_ptr<uint32_t[]> tile;
  explicit Pairs(int64_t rows) {
    if (!use_matrix(rows)) return;
    q.reset(new at::BFloat16[rows * Key::row]);
    weights.reset(new at::BFloat16[rows * TILE]);
    tile.reset(new uint32_t[TILE * std::max(Key::row, Value::row) / 2]());
  }
};
static inline lanes<uint32_t> bfloat16_bits(vf x) {
  // Exact values only: their upper halves.
  return (lanes<uint32_t>)x >> 16;
}
static void dot_matrix(
    const Slot<Key>& slot, const Span& span, int64_t rows, const float* scales, float* line, Pairs& pairs, float* scores) {
  const auto* words = slot.words_at(span);
  for (int t = 0; t < span.tokens; ++t) {
    decode_row<Key>(words + t * slot.word_row(), slot.word.width, scales, line);
    for (int64_t d = 0; d < Key::row / 2; ++d) {
      uint32_t low, high;
      __builtin_memcpy(&low, line + 2 * d, 4);
      __builtin_memcpy(&high, line + 2 * d + 1, 4);
      pairs.tile[d * TILE + t] = (low >> 16) | (high & 0xffff0000u);
    }
  }
  at::native::cpublas::brgemm(rows, TILE, Key::row, Key::row, TILE, TILE, false, pairs.q.get(),
                              reinterpret_cast<const at::BFloat16*>(pairs.tile.get()), scores);
}
static void mix_matrix(
    const Slot<Value>& slot, const Span& span, int64_t rows, const int32_t* used, const float* scales, float* lines, const float* weights,
    Pairs& pairs, float* acc) {
  at::vec::convert(weights, pairs.weights.get(), rows * TILE);
  const auto* words = slot.words_at(span);
  for (int t = 0; t < TILE; t += 2) {
    for (int i = 0; i < 2; ++i) {
      float* line = lines + i * Value::row;
      if (t + i < span.tokens && used[t + i] != 0) decode_row<Value>(words + (t + i) * slot.word_row(), slot.word.width, scales, line);
      else std::fill(line, line + Value::row, 0.0f);
    }
    for (int64_t d = 0; d < Value::row; d += N) {
      const lanes<uint32_t> pair = bfloat16_bits(vload(lines + d)) | (bfloat16_bits(vload(lines + Value::row + d)) << 16);
      __builtin_memcpy(pairs.tile.get() + t / 2 * Value::row + d, &pair, sizeof(pair));
    }
  }
  at::native::cpublas::brgemm(rows, Value::row, TILE, TILE, Value::row, Value::row, true, pairs.weights.get(),
                              reinterpret_cast<const at::BFloat16*>(pairs.tile.get()), acc);
}
"""
"""Products of many rows; needs BLOCKS, DECODE and Q."""
