// Matrices of bf16 and float8: what vector and matrix registers share.
#pragma once

#include <type_traits>

#include "matmul.h"

namespace headrace {
namespace HR_ISA {
namespace {

// Rows as dot_pairs takes them, the next one `stride` further on.
struct Rows {
  const Factor* first;
  size_t stride;
};

// They are the input itself, or made of it in `scratch`.
HR_INLINE Rows rows_of(const MatmulArgs& a, int row_begin, int row_end, Factor* scratch) {
  const uint8_t* input = a.input + static_cast<size_t>(row_begin) * a.input_stride;
  if constexpr (std::is_same_v<Factor, float>) {
    if (a.k % 2 == 0) return {reinterpret_cast<const Factor*>(input), a.input_stride / sizeof(float)};
  }
  constexpr int kWhole = 64 / sizeof(Factor);  // zeros follow up to a multiple of it
  const size_t stride = static_cast<size_t>(a.k + kWhole - 1) / kWhole * kWhole;
  for (int row = row_begin; row < row_end; ++row, input += a.input_stride) {
    const float* x = reinterpret_cast<const float*>(input);
    Factor* out = scratch + static_cast<size_t>(row - row_begin) * stride;
    for (int i = 0; i < static_cast<int>(stride); i += 16) {
      if (i + 16 <= a.k) {
        store_factors(out + i, load(x + i));
        continue;
      }
      float tail[16] = {};
      if (i < a.k) std::memcpy(tail, x + i, static_cast<size_t>(a.k - i) * sizeof(float));
      store_factors(out + i, load(tail));
    }
  }
  return {scratch, stride};
}

// Weights of inputs k and k + 1. Of float8 the second one may not be there: its factor is zero, but what lies
// there could be NaN.
template <bool Float8>
HR_INLINE Pairs pairs_at(const uint8_t* w, int k, int inputs) {
  if constexpr (!Float8) return load_pairs(reinterpret_cast<const uint16_t*>(w) + 16 * k);
  return join_pairs(load_f8(w + 16 * k), k + 1 < inputs ? load_f8(w + 16 * k + 16) : zero());
}

// Of a tile row of bf16.
HR_INLINE size_t pair_row_bytes(int k) { return static_cast<size_t>(k + 1) / 2 * 64; }

// Tile rows of float8 as bf16.
HR_INLINE void widen_float8(const MatmulArgs& a, int tile_begin, int tile_end, uint16_t* out) {
  const uint8_t* w = a.weights + static_cast<size_t>(tile_begin) * a.format.row_bytes(a.k);
  for (int tile = tile_begin; tile < tile_end;
       ++tile, w += a.format.row_bytes(a.k), out += pair_row_bytes(a.k) / 2)
    for (int k = 0; k < a.k; k += 2) store_pairs(out + 16 * k, pairs_at<true>(w, k, a.k));
}

// What the outputs of a tile row of float8 are multiplied with.
HR_INLINE Vec float8_scale(const MatmulArgs& a, int tile) {
  const uint8_t* end = a.weights + static_cast<size_t>(tile + 1) * a.format.row_bytes(a.k);
  return load(reinterpret_cast<const float*>(end) - 16);
}

}  // namespace
}  // namespace HR_ISA
}  // namespace headrace
