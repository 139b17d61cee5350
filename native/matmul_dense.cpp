// Matrices of numbers: float32 times float32; bf16 and float8 times bf16 where the path multiplies that, or
// times float32.
#include "matmul_dense.h"

namespace headrace {
namespace HR_ISA {
namespace {

// float32 weights: MR rows against NT tile rows of 16 outputs.
template <int MR, int NT>
HR_INLINE void float_rows(const MatmulArgs& a, int tile, int row) {
  const size_t tile_stride = a.format.row_bytes(a.k) / sizeof(float);
  const float* w = reinterpret_cast<const float*>(a.weights) + static_cast<size_t>(tile) * tile_stride;
  const float* x[MR];
  Vec acc[MR][NT];
  HR_UNROLL for (int r = 0; r < MR; ++r) {
    x[r] = reinterpret_cast<const float*>(a.input + static_cast<size_t>(row + r) * a.input_stride);
    HR_UNROLL for (int t = 0; t < NT; ++t) acc[r][t] = zero();
  }
  for (int k = 0; k < a.k; ++k, w += 16) {
    Vec weights[NT];
    HR_UNROLL for (int t = 0; t < NT; ++t) weights[t] = load(w + t * tile_stride);
    HR_UNROLL for (int r = 0; r < MR; ++r) {
      const Vec xs = set1(x[r][k]);
      HR_UNROLL for (int t = 0; t < NT; ++t) acc[r][t] = fma(weights[t], xs, acc[r][t]);
    }
  }
  HR_UNROLL for (int r = 0; r < MR; ++r) HR_UNROLL for (int t = 0; t < NT; ++t)
      finish(a, acc[r][t], row + r, tile + t);
}

template <int NT>
HR_INLINE void float_tiles(const MatmulArgs& a, int tile, int row_begin, int row_end) {
  int row = row_begin;
  for (; row + 4 <= row_end; row += 4) float_rows<4, NT>(a, tile, row);
  for (; row < row_end; ++row) float_rows<1, NT>(a, tile, row);
}

void float_matmul(const MatmulArgs& a, int tile_begin, int tile_end, int row_begin, int row_end) {
  int tile = tile_begin;
  for (; tile + 4 <= tile_end; tile += 4) float_tiles<4>(a, tile, row_begin, row_end);
  for (; tile < tile_end; ++tile) float_tiles<1>(a, tile, row_begin, row_end);
}

// MR rows against NT tile rows, which lie tile_stride apart from w on.
template <bool Float8, int MR, int NT>
__attribute__((noinline)) void pair_rows(const MatmulArgs& a, const uint8_t* w, size_t tile_stride, Rows x,
                                         int tile, int row) {
  Vec acc[MR][NT];
  HR_UNROLL for (int r = 0; r < MR; ++r) HR_UNROLL for (int t = 0; t < NT; ++t) acc[r][t] = zero();
  for (int k = 0; k < a.k; k += 2) {
    Pairs pairs[NT];
    HR_UNROLL for (int t = 0; t < NT; ++t) pairs[t] = pairs_at<Float8>(w + t * tile_stride, k, a.k);
    HR_UNROLL for (int r = 0; r < MR; ++r) HR_UNROLL for (int t = 0; t < NT; ++t) acc[r][t] =
        dot_pairs(acc[r][t], pairs[t], x.first + r * x.stride + k);
  }
  HR_UNROLL for (int t = 0; t < NT; ++t) {
    if (a.format.kind == WeightFormat::kF8) {
      const Vec scale = float8_scale(a, tile + t);
      HR_UNROLL for (int r = 0; r < MR; ++r) acc[r][t] = mul(acc[r][t], scale);
    }
    HR_UNROLL for (int r = 0; r < MR; ++r) finish(a, acc[r][t], row + r, tile + t);
  }
}

template <bool Float8, int MR, int NT>
HR_INLINE void pair_tiles(const MatmulArgs& a, const uint8_t* w, size_t tile_stride, Rows x, int tile,
                          int tile_end, int row) {
  for (; tile + NT <= tile_end; tile += NT, w += NT * tile_stride)
    pair_rows<Float8, MR, NT>(a, w, tile_stride, x, tile, row);
  for (; tile < tile_end; ++tile, w += tile_stride) pair_rows<Float8, MR, 1>(a, w, tile_stride, x, tile, row);
}

#if defined(HR_BF16)
constexpr int kManyRows = 12, kManyTiles = 2;  // 24 accumulators of 32 registers
#else
constexpr int kManyRows = 4, kManyTiles = 4;
#endif
constexpr int kRun = 4;         // tile rows that stay in the second cache while all rows pass over them
constexpr int kWidenFrom = 12;  // rows of float8 that share its pairs; not tuned

template <bool Float8>
HR_INLINE void pass_rows(const MatmulArgs& a, const uint8_t* w, size_t tile_stride, Rows x, int tile,
                         int tile_end, int row, int row_end) {
  for (; row + kManyRows <= row_end; row += kManyRows, x.first += kManyRows * x.stride)
    pair_tiles<Float8, kManyRows, kManyTiles>(a, w, tile_stride, x, tile, tile_end, row);
  const auto pass = [&](auto rows) {
    pair_tiles<Float8, rows.value, 4>(a, w, tile_stride, x, tile, tile_end, row);
    row += rows.value;
    x.first += rows.value * x.stride;
  };
  while (row + 4 <= row_end) pass(std::integral_constant<int, 4>());
  if constexpr (kManyRows > 4) {  // other paths compile too long
    if (row + 3 == row_end) pass(std::integral_constant<int, 3>());
    if (row + 2 == row_end) pass(std::integral_constant<int, 2>());
  }
  while (row < row_end) pass(std::integral_constant<int, 1>());
}

template <bool Float8>
void pair_matmul(const MatmulArgs& a, int tile_begin, int tile_end, int row_begin, int row_end) {
  const size_t tile_stride = a.format.row_bytes(a.k), wide_stride = pair_row_bytes(a.k);
  const Rows x = rows_of(a, row_begin, row_end, reinterpret_cast<Factor*>(a.scratch));
  uint16_t* wide = reinterpret_cast<uint16_t*>(a.scratch + matmul_row_floats(a.k));
  for (int run = tile_begin; run < tile_end; run += kRun) {
    const int run_end = run + kRun < tile_end ? run + kRun : tile_end;
    const uint8_t* w = a.weights + static_cast<size_t>(run) * tile_stride;
    if (!Float8 || row_end - row_begin < kWidenFrom) {
      pass_rows<Float8>(a, w, tile_stride, x, run, run_end, row_begin, row_end);
      continue;
    }
    widen_float8(a, run, run_end, wide);
    pass_rows<false>(a, reinterpret_cast<const uint8_t*>(wide), wide_stride, x, run, run_end, row_begin,
                     row_end);
  }
}

}  // namespace

void dense_matmul(const MatmulArgs& a, int tile_begin, int tile_end, int row_begin, int row_end) {
  switch (a.format.kind) {
    case WeightFormat::kBf16:
      return pair_matmul<false>(a, tile_begin, tile_end, row_begin, row_end);
    case WeightFormat::kF8:
      return pair_matmul<true>(a, tile_begin, tile_end, row_begin, row_end);
    default:
      return float_matmul(a, tile_begin, tile_end, row_begin, row_end);
  }
}

}  // namespace HR_ISA
}  // namespace headrace
