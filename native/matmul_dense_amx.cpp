// Matrices of bf16 and float8 on AMX, for any number of rows: what matrix registers sum, and in which order,
// vector registers cannot repeat. A tile row lies as the second operand of a product of matrices wants it.
#include "matmul_dense.h"
#include "tiles.h"

namespace headrace {
namespace avx512_bf16 {
void dense_matmul(const MatmulArgs&, int, int, int, int);
}

namespace HR_ISA {
namespace {

constexpr int kTileRows = 16, kTileBlocks = kRowBlock / kTileRows;
constexpr int kInputs = 32;  // of one product
constexpr int kRun = 4;      // tile rows of float8 that are widened together

// Tile registers: 0 ... 5 sums, of tile row 0 and of tile row 1; 6 rows; 7 weights.
template <int Blocks>
HR_INLINE void multiply_tile(const Factor* x, size_t stride, const uint8_t* w, bool second) {
  load_tile<7>(w, 64);
  const auto add = [&](auto block, auto first_sum) {
    if constexpr (block.value < Blocks) {
      load_tile<6>(x + block.value * kTileRows * (stride / sizeof(Factor)), stride);
      add_bf16<first_sum.value + block.value, 6, 7>();
    }
  };
  using std::integral_constant;
  const auto all = [&](auto first_sum) {
    add(integral_constant<int, 0>(), first_sum);
    add(integral_constant<int, 1>(), first_sum);
    add(integral_constant<int, 2>(), first_sum);
  };
  if (second) {
    all(integral_constant<int, 3>());
  } else {
    all(integral_constant<int, 0>());
  }
}

// One or two tile rows, tile_stride apart, for all rows.
template <int Blocks>
void multiply_rows(const MatmulArgs& a, const uint8_t* w, size_t tile_stride, int count, Rows x, int tile,
                   int row, int row_end) {
  const size_t stride = x.stride * sizeof(Factor);
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  zero_tile<4>();
  zero_tile<5>();
  int k = 0;
  for (; k + kInputs <= a.k; k += kInputs) {
    for (int t = 0; t < count; ++t) {
      const uint8_t* at = w + t * tile_stride + 32 * k;
      for (int i = 0; i < 1024; i += 64) __builtin_prefetch(at + 4096 + i, 0, 2);
      multiply_tile<Blocks>(x.first + k, stride, at, t == 1);
    }
  }
  if (k < a.k) {  // rows have zeros behind their end, weights have other weights
    alignas(64) uint8_t rest[2][1024] = {};
    for (int t = 0; t < count; ++t) {
      std::memcpy(rest[t], w + t * tile_stride + 32 * k, pair_row_bytes(a.k) - 32 * k);
      multiply_tile<Blocks>(x.first + k, stride, rest[t], t == 1);
    }
  }
  alignas(64) float sums[2 * kTileBlocks][kTileRows * 16];
  store_tile<0>(sums[0], 64);
  if constexpr (Blocks > 1) store_tile<1>(sums[1], 64);
  if constexpr (Blocks > 2) store_tile<2>(sums[2], 64);
  if (count > 1) {
    store_tile<3>(sums[3], 64);
    if constexpr (Blocks > 1) store_tile<4>(sums[4], 64);
    if constexpr (Blocks > 2) store_tile<5>(sums[5], 64);
  }
  for (int t = 0; t < count; ++t) {
    const bool float8 = a.format.kind == WeightFormat::kF8;
    const Vec scale = float8 ? float8_scale(a, tile + t) : zero();
    for (int r = row; r < row_end; ++r) {
      const int at = r - row;
      const Vec sum = load(sums[kTileBlocks * t + at / kTileRows] + at % kTileRows * 16);
      finish(a, float8 ? mul(sum, scale) : sum, r, tile + t);
    }
  }
}

}  // namespace

void dense_matmul(const MatmulArgs& a, int tile_begin, int tile_end, int row_begin, int row_end) {
  if (a.format.kind == WeightFormat::kF32)
    return avx512_bf16::dense_matmul(a, tile_begin, tile_end, row_begin, row_end);
  const int rows = row_end - row_begin, together = rows < kTileRows ? rows : kTileRows;
  const TileShape sums{together, 64}, x_rows{together, 64}, weights{kTileRows, 64};
  const Tiles tiles({sums, sums, sums, sums, sums, sums, x_rows, weights});
  const bool float8 = a.format.kind == WeightFormat::kF8;
  const Rows x = rows_of(a, row_begin, row_end, reinterpret_cast<Factor*>(a.scratch));
  uint16_t* wide = reinterpret_cast<uint16_t*>(a.scratch + matmul_row_floats(a.k));
  const size_t stride = float8 ? pair_row_bytes(a.k) : a.format.row_bytes(a.k);
  for (int run = tile_begin; run < tile_end; run += kRun) {
    const int run_end = run + kRun < tile_end ? run + kRun : tile_end;
    const uint8_t* w = a.weights + static_cast<size_t>(run) * stride;
    if (float8) {
      widen_float8(a, run, run_end, wide);
      w = reinterpret_cast<const uint8_t*>(wide);
    }
    for (int tile = run; tile < run_end; tile += 2, w += 2 * stride) {
      const int count = run_end - tile < 2 ? 1 : 2;
      const int blocks = (rows + kTileRows - 1) / kTileRows;
      if (blocks == 1) multiply_rows<1>(a, w, stride, count, x, tile, row_begin, row_end);
      if (blocks == 2) multiply_rows<2>(a, w, stride, count, x, tile, row_begin, row_end);
      if (blocks == 3) multiply_rows<3>(a, w, stride, count, x, tile, row_begin, row_end);
    }
  }
}

}  // namespace HR_ISA
}  // namespace headrace
