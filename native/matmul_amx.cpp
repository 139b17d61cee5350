// Matrices of integer codes on AMX: sixteen rows of 8-bit activations times sixteen outputs at once. The
// integers are exact, and what is done with them is what matmul.cpp does, in its order, so the bits are those
// of the other AVX-512 paths, and few rows are left to them.
#include "matmul.h"
#include "tiles.h"

namespace headrace {
namespace avx512 {
void quant_matmul(const MatmulArgs&, int, int, int, int);
}

namespace HR_ISA {
namespace {

constexpr int kTileRows = 16;
constexpr int kFewest = 8;  // rows that are worth a tile; fewer are faster without

// What goes with the integers of up to sixteen rows: [step along k][row]. `beside`: what a minimum or a zero
// point is multiplied with, or -zero point * sum as an integer. Missing rows have steps of zero.
struct RowBlock {
  const uint8_t* x;
  size_t stride;
  int row, count;
  float* steps;
  float* beside;
  uint16_t* wide;  // of each group the rows that are
};

template <int Bits, bool F32, int Offsets, int Group>
struct Format {
  static constexpr bool kMin = Offsets == WeightFormat::kMinimum,
                        kZeros = Offsets == WeightFormat::kZeroPoints;
  static constexpr bool kSame = Offsets == WeightFormat::kNone;
  static constexpr int kParts = Group == 16 ? 2 : 1;  // of a tile of 32 inputs, with a scale each
  static constexpr int kInputs = 32 / kParts;
  static constexpr int kCodes = Bits == 4 ? 256 : 512;
  static constexpr int kScaleRow = Group == 0 ? 0 : 16 * (F32 ? 4 : 2);
  static constexpr size_t kTile = kCodes + (kScaleRow + (kMin ? kScaleRow : kZeros ? 16 : 0)) * kParts;
  static constexpr size_t kStride = Bits == 4 ? 512 : kTile;  // of codes as bytes
};

template <class F, int Bits>
void gather(const MatmulArgs& a, const RowBlock& block) {
  const __m512i row = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i rows = _mm512_mullo_epi32(row, _mm512_set1_epi32(static_cast<int32_t>(block.stride)));
  const auto floats = [&](size_t at) { return _mm512_i32gather_ps(rows, block.x + at, 1); };
  const auto ints = [&](size_t at) { return _mm512_i32gather_epi32(rows, block.x + at, 1); };
  const size_t scales = QuantRow::scale_offset(a.k), sums = QuantRow::sum_offset(a.k);
  const size_t scaled_sums = QuantRow::scaled_sum_offset(a.k), wide = QuantRow::wide_offset(a.k);
  for (int s = 0; s < a.k / F::kInputs; ++s) {
    const size_t at = 4 * static_cast<size_t>(s);
    const __m512 step = floats(scales + 4 * static_cast<size_t>(s / F::kParts));
    _mm512_store_ps(block.steps + s * kTileRows, step);
    __m512 beside;
    if constexpr (F::kMin && F::kParts == 1) {
      beside = floats(scaled_sums + at);
    } else {
      __m512i sum = ints(sums + at);
      if constexpr (F::kParts == 1) sum = _mm512_add_epi32(ints(sums + 2 * at), ints(sums + 2 * at + 4));
      beside = _mm512_cvtepi32_ps(sum);
      if constexpr (F::kMin) beside = _mm512_mul_ps(step, beside);
      if constexpr (F::kSame && Bits == 8)
        beside = _mm512_castsi512_ps(_mm512_mullo_epi32(sum, _mm512_set1_epi32(-a.format.zero_point)));
    }
    _mm512_store_ps(block.beside + s * kTileRows, beside);
  }
  for (int g = 0; g < a.k / 32; ++g) {
    const __m512i bit = _mm512_set1_epi32(1 << g % 32);
    block.wide[g] =
        static_cast<uint16_t>(_mm512_test_epi32_mask(ints(wide + 4 * static_cast<size_t>(g / 32)), bit));
  }
}

HR_INLINE IVec load_ints(const int32_t* p) { return {_mm512_load_si512(p)}; }

// A tile row of 4-bit codes as bytes.
void widen(const uint8_t* w, size_t tile_bytes, int groups, uint8_t* out) {
  for (int g = 0; g < groups; ++g, w += tile_bytes, out += 512) {
    for (int j = 0; j < 4; ++j) {
      const Bytes both = load_bytes(w + 64 * j);
      _mm512_store_si512(out + 64 * j, low_nibbles(both).v);
      _mm512_store_si512(out + 64 * (j + 4), high_nibbles(both).v);
    }
  }
}

// 254 q + fine in the rows of a group that are wide: mostly one or two.
template <int Inputs>
__attribute__((noinline)) void add_fine(int32_t* dots, uint32_t wide, const int8_t* fine, size_t stride,
                                        const uint8_t* codes) {
  Bytes all[Inputs / 4];
  HR_UNROLL for (int j = 0; j < Inputs / 4; ++j) all[j] = load_bytes(codes + 64 * j);
  for (; wide; wide &= wide - 1) {
    const int r = __builtin_ctz(wide);
    IVec sum[2] = {mul(load_ints(dots + 16 * r), iset1(QuantRow::kWide)), izero()};
    HR_UNROLL for (int j = 0; j < Inputs / 4; ++j) sum[j % 2] =
        dot_u8(sum[j % 2], all[j], fine + static_cast<size_t>(r) * stride + 4 * j);
    _mm512_store_si512(dots + 16 * r, add(sum[0], sum[1]).v);
  }
}

constexpr int kChunk = 8;  // steps whose products stay in the first cache

// Adds the products of steps [first, first + count) to acc, as floats.
template <int Bits, bool F32, int Offsets, int Group>
__attribute__((noinline)) void add_products(const RowBlock& block, const uint8_t* w, const int32_t* dots,
                                            int first, int count, int32_t zero_point, float* acc_at) {
  using F = Format<Bits, F32, Offsets, Group>;
  const Vec all_below = set1(-static_cast<float>(zero_point));
  const float *step = block.steps + first * kTileRows, *beside = block.beside + first * kTileRows;
  Vec acc[kTileRows];
  HR_UNROLL for (int r = 0; r < kTileRows; ++r) acc[r] = load(acc_at + 16 * r);
  for (int s = first; s < first + count; ++s) {
    const int part = s % F::kParts;
    const uint8_t* scales = w + static_cast<size_t>(s / F::kParts) * F::kTile + F::kCodes;
    const uint8_t* after = scales + F::kScaleRow * F::kParts;
    const Vec scale = Group == 0 ? zero() : load_scales(scales, part, F32);
    const Vec minimum = F::kMin ? load_scales(after, part, F32) : zero();
    const Vec below = F::kZeros ? sub(zero(), load_u8(after + 16 * part)) : zero();
    HR_UNROLL for (int r = 0; r < kTileRows; ++r) {
      IVec ints = load_ints(dots + 16 * r);
      if constexpr (F::kSame && Bits == 8)
        ints = add(ints, iset1(reinterpret_cast<const int32_t*>(beside)[r]));
      Vec value = to_float(ints);
      if constexpr (F::kSame && Bits == 4) value = fma(all_below, set1(beside[r]), value);
      if constexpr (F::kZeros) value = fma(below, set1(beside[r]), value);
      if constexpr (Group != 0) value = mul(value, scale);
      acc[r] = fma(value, set1(step[r]), acc[r]);
      if constexpr (F::kMin) acc[r] = fma(minimum, set1(beside[r]), acc[r]);
    }
    dots += kTileRows * 16;
    step += kTileRows;
    beside += kTileRows;
  }
  HR_UNROLL for (int r = 0; r < kTileRows; ++r) store(acc_at + 16 * r, acc[r]);
}

// The products of steps [first, first + count), each of sixteen rows and sixteen outputs, in dots. codes:
// theirs, as bytes. soon: weights that are asked for meanwhile, so far as a step's; or null.
template <class F>
HR_INLINE void multiply_steps(const RowBlock& block, int k, const uint8_t* codes, int first, int count,
                              const uint8_t* soon, int32_t (*dots)[kTileRows * 16]) {
  const int8_t* q = reinterpret_cast<const int8_t*>(block.x) + first * F::kInputs;
  const size_t stride = block.stride;
  const auto codes_at = [codes](int s) {
    return codes + static_cast<size_t>(s / F::kParts) * F::kStride + s % F::kParts * F::kInputs * 16;
  };
  const auto ask = [soon](int s) {
    if (!soon || s % F::kParts) return;
    const uint8_t* at = soon + static_cast<size_t>(s / F::kParts) * F::kTile;
    HR_UNROLL for (size_t i = 0; i < F::kTile; i += 64) __builtin_prefetch(at + i, 0, 2);
  };
  int s = 0;
  for (; s + 2 <= count; s += 2) {  // two sets of registers in turn
    zero_tile<0>();
    load_tile<2>(q + s * F::kInputs, stride);
    load_tile<4>(codes_at(s), 64);
    add_s8_u8<0, 2, 4>();
    zero_tile<1>();
    load_tile<3>(q + (s + 1) * F::kInputs, stride);
    load_tile<5>(codes_at(s + 1), 64);
    add_s8_u8<1, 3, 5>();
    ask(s);
    ask(s + 1);
    store_tile<0>(dots[s], 64);
    store_tile<1>(dots[s + 1], 64);
  }
  if (s < count) {
    zero_tile<0>();
    load_tile<2>(q + s * F::kInputs, stride);
    load_tile<4>(codes_at(s), 64);
    add_s8_u8<0, 2, 4>();
    ask(s);
    store_tile<0>(dots[s], 64);
  }
  for (s = 0; s < count; ++s) {
    if (const uint32_t wide = block.wide[(first + s) / F::kParts])
      add_fine<F::kInputs>(dots[s], wide, q + QuantRow::fine_offset(k) + s * F::kInputs, stride, codes_at(s));
  }
}

// All row blocks against sixteen outputs. w: the packed tile row. ahead: so many bytes further on weights are
// asked for; 0 = none.
template <int Bits, bool F32, int Offsets, int Group>
void multiply_tile(const MatmulArgs& a, const RowBlock* blocks, int count, const uint8_t* w, int tile,
                   size_t ahead) {
  using F = Format<Bits, F32, Offsets, Group>;
  const int steps = a.k / F::kInputs;
  alignas(64) float acc[kRowBlock / kTileRows][kTileRows * 16];
  alignas(64) int32_t dots[kChunk][kTileRows * 16];
  alignas(64) uint8_t bytes[Bits == 4 ? 512 * kChunk / F::kParts : 64];
  std::memset(acc, 0, static_cast<size_t>(count) * sizeof acc[0]);
  for (int first = 0; first < steps; first += kChunk) {
    const int some = steps - first < kChunk ? steps - first : kChunk;
    const uint8_t* at = w + static_cast<size_t>(first / F::kParts) * F::kTile;
    if constexpr (Bits == 4) widen(at, F::kTile, some / F::kParts, bytes);
    for (int i = 0; i < count; ++i) {
      multiply_steps<F>(blocks[i], a.k, Bits == 4 ? bytes : at, first, some,
                        i || !ahead ? nullptr : at + ahead, dots);
      add_products<Bits, F32, Offsets, Group>(blocks[i], w, dots[0], first, some, a.format.zero_point,
                                              acc[i]);
    }
  }
  const float* scales = reinterpret_cast<const float*>(w + static_cast<size_t>(a.k) / 32 * F::kTile);
  for (int i = 0; i < count; ++i) {
    for (int r = 0; r < blocks[i].count; ++r) {
      const Vec sum = load(acc[i] + 16 * r);
      finish(a, Group == 0 ? mul(sum, load(scales)) : sum, blocks[i].row + r, tile);
    }
  }
}

// What a thread's scratch holds: which rows it was filled for, the row blocks' numbers, and a block that is
// not whole with rows of zeros behind it.
template <int Bits, bool F32, int Offsets, int Group>
void matmul_of(const MatmulArgs& a, int tile_begin, int tile_end, int row_begin, int row_end) {
  using F = Format<Bits, F32, Offsets, Group>;
  const size_t k = static_cast<size_t>(a.k), tile_row = a.format.row_bytes(a.k);
  uint8_t* space = reinterpret_cast<uint8_t*>(a.scratch);
  space += (64 - reinterpret_cast<uintptr_t>(space) % 64) % 64;
  const auto take = [&space](size_t bytes) {
    uint8_t* taken = space;
    space += (bytes + 63) / 64 * 64;
    return taken;
  };
  int32_t* filled_for = reinterpret_cast<int32_t*>(a.scratch);
  take(sizeof *filled_for);
  const bool fill = *filled_for != row_begin + 1;
  *filled_for = row_begin + 1;
  RowBlock blocks[kRowBlock / kTileRows];
  int count = 0, row = row_begin;
  for (; row_end - row >= kFewest; ++count) {
    RowBlock& block = blocks[count];
    block.x = a.input + static_cast<size_t>(row) * a.input_stride;
    block.stride = a.input_stride;
    block.row = row;
    block.count = row_end - row < kTileRows ? row_end - row : kTileRows;
    if (block.count < kTileRows) {
      const size_t row_bytes = QuantRow::bytes(a.k);
      uint8_t* rows = take(kTileRows * row_bytes);
      for (int r = 0; fill && r < kTileRows; ++r) {
        if (r < block.count) {
          std::memcpy(rows + r * row_bytes, block.x + r * block.stride, row_bytes);
        } else {
          std::memset(rows + r * row_bytes, 0, row_bytes);
        }
      }
      block.x = rows;
      block.stride = row_bytes;
    }
    const size_t numbers = k / F::kInputs * kTileRows * sizeof(float);
    block.steps = reinterpret_cast<float*>(take(numbers));
    block.beside = reinterpret_cast<float*>(take(numbers));
    block.wide = reinterpret_cast<uint16_t*>(take(k / 16));
    if (fill) gather<F, Bits>(a, block);
    row += block.count;
  }
  {
    const TileShape sums{kTileRows, 64}, x{kTileRows, F::kInputs}, w_rows{F::kInputs / 4, 64};
    const Tiles tiles({sums, sums, x, x, w_rows, w_rows, {0, 0}, {0, 0}});
    const uint8_t* w = a.weights + static_cast<size_t>(tile_begin) * tile_row;
    const int last = (a.n - 1) / 16;  // of the matrix: who does these tiles mostly does the next
    for (int tile = tile_begin; tile < tile_end; ++tile, w += tile_row)
      multiply_tile<Bits, F32, Offsets, Group>(a, blocks, count, w, tile, tile < last ? tile_row : 0);
  }
  if (row < row_end) avx512::quant_matmul(a, tile_begin, tile_end, row, row_end);
}

template <int Bits, bool F32, int Offsets, int Group>
struct Codes {
  static constexpr auto kRun = matmul_of<Bits, F32, Offsets, Group>;
};

}  // namespace

void quant_matmul(const MatmulArgs& a, int tile_begin, int tile_end, int row_begin, int row_end) {
  if (row_end - row_begin < kFewest) return avx512::quant_matmul(a, tile_begin, tile_end, row_begin, row_end);
  kernel_of<Codes>(a.format)(a, tile_begin, tile_end, row_begin, row_end);
}

}  // namespace HR_ISA
}  // namespace headrace
