// Matrices of integer codes: 8-bit activations times 4-bit or 8-bit weights.
#include "matmul.h"

#include <type_traits>

namespace headrace {
namespace HR_ISA {
namespace {

HR_INLINE float row_scale_of(const uint8_t* scales, int lane) {
  return reinterpret_cast<const float*>(scales)[lane];
}

constexpr int kAhead = 8;  // tiles

template <int Bits>
HR_INLINE IVec dot_codes(IVec acc, Bytes w, const int8_t* x) {
  return Bits == 4 ? dot_u4(acc, w, x) : dot_u8(acc, w, x);
}

// One 32-input tile's code register j (of 8), or the part of it that belongs to register j.
template <int Bits>
HR_INLINE Bytes tile_codes(const uint8_t* w, int j) {
  if constexpr (Bits == 8) return load_bytes(w + 64 * j);
  const Bytes both = load_bytes(w + 64 * (j % 4));
  return j < 4 ? low_nibbles(both) : high_nibbles(both);
}

// Quantised weights: MR rows against 16 outputs. Rows are interleaved inside a group, so that each code
// register is made once and the dot products' latencies overlap.
//
// ahead: so many bytes further on weights are asked for, which nobody has read yet; 0 = none.
template <int Bits, bool F32, int Offsets, int Group, int MR>
HR_INLINE void quant_rows(const MatmulArgs& a, int tile, int row, size_t ahead) {
  constexpr bool kMin = Offsets == WeightFormat::kMinimum, kZeros = Offsets == WeightFormat::kZeroPoints;
  constexpr bool kSame = Offsets == WeightFormat::kNone;  // one zero point for all
  constexpr int kCodes = Bits == 4 ? 256 : 512;
  constexpr int kParts = Group == 16 ? 2 : 1;  // scale rows per tile
  constexpr int kScaleRow = Group == 0 ? 0 : 16 * (F32 ? 4 : 2);
  constexpr int kBeside = kMin ? kScaleRow : kZeros ? 16 : 0;
  constexpr size_t kTile = kCodes + static_cast<size_t>(kScaleRow + kBeside) * kParts;
  constexpr int kRegisters = 8 / kParts;  // code registers per scale row
  const int groups = a.k / 32;
  const size_t scale_at = QuantRow::scale_offset(a.k);
  const size_t scaled_sum_at = QuantRow::scaled_sum_offset(a.k);
  const size_t sum_at = QuantRow::sum_offset(a.k);
  const size_t fine_at = QuantRow::fine_offset(a.k);
  const size_t wide_at = QuantRow::wide_offset(a.k);
  const int32_t zero_point = a.format.zero_point;
  const Vec all_below = set1(-static_cast<float>(zero_point));
  const size_t tile_row = a.format.row_bytes(a.k);
  const uint8_t* w = a.weights + static_cast<size_t>(tile) * tile_row;
  const uint8_t* x = a.input + static_cast<size_t>(row) * a.input_stride;
  const size_t stride = a.input_stride;
  Vec acc[MR];
  HR_UNROLL for (int r = 0; r < MR; ++r) acc[r] = zero();
  uint64_t any_wide = 0;
  for (int g = 0; g < groups; ++g, w += kTile, any_wide >>= 1) {
    if (g % 64 == 0) {
      any_wide = 0;
      HR_UNROLL for (int r = 0; r < MR; ++r) any_wide |=
          reinterpret_cast<const uint64_t*>(x + r * stride + wide_at)[g / 64];
    }
    if (ahead) {
      for (size_t line = 0; line < kTile; line += 64) prefetch(w + ahead + line);
    }
    const int8_t* q = reinterpret_cast<const int8_t*>(x) + g * 32;
    for (int part = 0; part < kParts; ++part) {
      const int from = part * kRegisters, to = from + kRegisters;
      IVec dot[MR];
      HR_UNROLL for (int r = 0; r < MR; ++r) dot[r] = izero();
      HR_UNROLL for (int j = from; j < to; ++j) {
        const Bytes codes = tile_codes<Bits>(w, j);
        HR_UNROLL for (int r = 0; r < MR; ++r) dot[r] =
            dot_codes<Bits>(dot[r], codes, q + r * stride + 4 * j);
      }
      if (any_wide & 1) {  // 254 q + fine in the rows whose group is wide
        HR_UNROLL for (int r = 0; r < MR; ++r) {
          const uint64_t word = reinterpret_cast<const uint64_t*>(x + r * stride + wide_at)[g / 64];
          if (!(word >> (g % 64) & 1)) continue;
          dot[r] = mul(dot[r], iset1(QuantRow::kWide));
          HR_UNROLL for (int j = from; j < to; ++j) dot[r] =
              dot_codes<Bits>(dot[r], tile_codes<Bits>(w, j), q + r * stride + fine_at + 4 * j);
        }
      }
      const uint8_t *scales = w + kCodes, *beside = scales + kScaleRow * kParts;
      const Vec scale = Group == 0 ? zero() : load_scales(scales, part, F32);
      const Vec minimum = kMin ? load_scales(beside, part, F32) : zero();
      const Vec below = kZeros ? sub(zero(), load_u8(beside + 16 * part)) : zero();  // less the zero points
      HR_UNROLL for (int r = 0; r < MR; ++r) {
        const float step = reinterpret_cast<const float*>(x + r * stride + scale_at)[g];
        const int32_t* sums = reinterpret_cast<const int32_t*>(x + r * stride + sum_at) + g * 2;
        const int32_t sum = kParts == 1 ? sums[0] + sums[1] : sums[part];
        float scaled_sum = 0.0f;
        if constexpr (kMin) {
          scaled_sum = kParts == 1 ? reinterpret_cast<const float*>(x + r * stride + scaled_sum_at)[g]
                                   : step * static_cast<float>(sum);
        }
        // Of 4-bit codes these integers are exact as floats, and cheaper; of bytes they may be too large.
        if constexpr (kSame && Bits == 8) dot[r] = add(dot[r], iset1(-zero_point * sum));
        Vec value = to_float(dot[r]);
        if constexpr (kSame && Bits == 4) value = fma(all_below, set1(static_cast<float>(sum)), value);
        if constexpr (kZeros) value = fma(below, set1(static_cast<float>(sum)), value);
        if constexpr (Group != 0) value = mul(value, scale);
        acc[r] = fma(value, set1(step), acc[r]);
        if constexpr (kMin) acc[r] = fma(minimum, set1(scaled_sum), acc[r]);
      }
    }
  }
  if constexpr (Group == 0) {
    const Vec scale = load(reinterpret_cast<const float*>(w));
    HR_UNROLL for (int r = 0; r < MR; ++r) acc[r] = mul(acc[r], scale);
  }
  HR_UNROLL for (int r = 0; r < MR; ++r) finish(a, acc[r], row + r, tile);
}

// Rows that are computed together: a dot product and an accumulator for each, 24 of 32 registers. Bytes need
// no unpacking: there eight rows are as fast as twelve, and leave fewer behind.
#if defined(HR_PATH_AVX512)
template <int Bits>
constexpr int kManyRows = Bits == 4 ? 12 : 8;
#else
template <int Bits>
constexpr int kManyRows = 4;
#endif
constexpr int kRun = 4;  // tile rows that pass while some rows stay in the first cache

// Weights come from memory once, whatever the number of rows: a run of tile rows stays near for all of them.
// The first of them to read it asks for it a little ahead; the last of many asks for the next run.
template <int Bits, bool F32, int Offsets, int Group>
void matmul_of(const MatmulArgs& a, int tile_begin, int tile_end, int row_begin, int row_end) {
  constexpr int kMany = kManyRows<Bits>;
  const size_t soon = kAhead * a.format.tile_bytes(), next_run = kRun * a.format.row_bytes(a.k);
  for (int run = tile_begin; run < tile_end; run += kRun) {
    const int run_end = run + kRun < tile_end ? run + kRun : tile_end;
    int row = row_begin;
    for (; row + kMany <= row_end; row += kMany) {
      const bool last = row + 2 * kMany > row_end && run_end < tile_end;
      const size_t ahead = row == row_begin ? soon : last ? next_run : 0;
      for (int tile = run; tile < run_end; ++tile)
        quant_rows<Bits, F32, Offsets, Group, kMany>(a, tile, row, ahead);
    }
    const auto pass = [&](auto rows) {
      for (int tile = run; tile < run_end; ++tile)
        quant_rows<Bits, F32, Offsets, Group, rows.value>(a, tile, row, row == row_begin ? soon : 0);
      row += rows.value;
    };
    while (row + 4 <= row_end) pass(std::integral_constant<int, 4>());
    if constexpr (kMany > 4) {  // other paths compile too long
      if (row + 3 == row_end) pass(std::integral_constant<int, 3>());
      if (row + 2 == row_end) pass(std::integral_constant<int, 2>());
    }
    while (row < row_end) pass(std::integral_constant<int, 1>());
  }
}

template <int Bits, bool F32, int Offsets, int Group>
struct Codes {
  static constexpr auto kRun = matmul_of<Bits, F32, Offsets, Group>;
};

}  // namespace

void quant_matmul(const MatmulArgs& a, int tile_begin, int tile_end, int row_begin, int row_end) {
  kernel_of<Codes>(a.format)(a, tile_begin, tile_end, row_begin, row_end);
}

// Rows of an embedding table, dequantised from its packed tiles (a tied head shares them); `add` adds them to
// what output holds.
void embed(const WeightFormat& f, const uint8_t* weights, int k, int padded_k, const int32_t* ids,
           float scale, bool add, float* output, size_t stride, int row_begin, int row_end) {
  for (int row = row_begin; row < row_end; ++row) {
    const int id = ids[row];
    const int lane = id % 16;
    float* out = output + static_cast<size_t>(row) * stride;
    if (f.dense()) {
      const size_t step = f.tile_bytes() / 32;
      const uint8_t* w = weights + static_cast<size_t>(id / 16) * f.row_bytes(k);
      const float row_scale = f.kind == WeightFormat::kF8 ? row_scale_of(w + k * step, lane) : 1.0f;
      for (int i = 0; i < k; ++i, w += step) {
        float x, t[16];
        if (f.kind == WeightFormat::kF32) {
          x = reinterpret_cast<const float*>(w)[lane];
        } else if (f.kind == WeightFormat::kF8) {
          store(t, load_f8(w));
          x = t[lane] * row_scale;
        } else {
          const uint16_t* pairs = reinterpret_cast<const uint16_t*>(w - i % 2 * step);
          const uint32_t bits = static_cast<uint32_t>(pairs[2 * lane + i % 2]) << 16;
          std::memcpy(&x, &bits, 4);
        }
        out[i] = add ? out[i] + x * scale : x * scale;
      }
      continue;
    }
    const size_t tile_bytes = f.tile_bytes();
    const int parts = f.group == 16 ? 2 : 1;
    const int codes_bytes = f.kind == WeightFormat::kU4 ? 256 : 512;
    const uint8_t* w = weights + static_cast<size_t>(id / 16) * f.row_bytes(padded_k);
    const float row_scale = f.group == 0 ? row_scale_of(w + padded_k / 32 * tile_bytes, lane) : 0.0f;
    for (int base = 0; base < k; base += 32, w += tile_bytes) {
      float scales[2] = {row_scale, row_scale}, minimums[2] = {0.0f, 0.0f}, t[16];
      int zero_points[2] = {f.zero_point, f.zero_point};
      for (int part = 0; part < parts && f.group != 0; ++part) {
        store(t, load_scales(w + codes_bytes, part, f.scale_bytes == 4));
        scales[part] = t[lane];
        const uint8_t* beside = w + codes_bytes + 16 * f.scale_bytes * parts;
        if (f.offsets == WeightFormat::kMinimum) {
          store(t, load_scales(beside, part, f.scale_bytes == 4));
          minimums[part] = t[lane];
          zero_points[part] = 0;
        }
        if (f.offsets == WeightFormat::kZeroPoints) zero_points[part] = beside[16 * part + lane];
      }
      const int count = k - base < 32 ? k - base : 32;
      for (int i = 0; i < count; ++i) {
        int code;
        if (f.kind == WeightFormat::kU4) {
          const int j = i % 16;
          const uint8_t both = w[64 * (j / 4) + 4 * lane + j % 4];
          code = i < 16 ? both & 0x0f : both >> 4;
        } else {
          code = w[64 * (i / 4) + 4 * lane + i % 4];
        }
        const int part = parts == 1 ? 0 : i / 16;
        const float value = static_cast<float>(code - zero_points[part]) * scales[part];
        const float x = (value + minimums[part]) * scale;
        out[base + i] = add ? out[base + i] + x : x;
      }
    }
  }
}

}  // namespace HR_ISA
}  // namespace headrace
