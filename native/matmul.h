// output[r, n] (+)= sum_k input[r, k] * w[n, k] (+ bias[n]).
//
// Every output element is one lane of one accumulator, summed over K in ascending order, so its bits do not
// depend on how many rows are computed together, on the tiling, or on who computes it.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace headrace {
namespace HR_ISA {
namespace {

// The last outputs of a matrix whose n is no multiple of sixteen.
__attribute__((noinline)) void finish_some(const MatmulArgs& a, Vec acc, float* out, int first) {
  float t[16];
  store(t, acc);
  for (int i = first; i < a.n; ++i, ++out) {
    float x = t[i - first];
    if (a.bias) x += a.bias[i];
    *out = a.add ? *out + x : x;
  }
}

HR_INLINE void finish(const MatmulArgs& a, Vec acc, int row, int tile) {
  float* out = a.output + static_cast<size_t>(row) * a.output_stride + static_cast<size_t>(tile) * 16;
  if (a.n < tile * 16 + 16) return finish_some(a, acc, out, tile * 16);
  if (a.bias) acc = add(acc, load(a.bias + tile * 16));
  if (a.add) acc = add(acc, load(out));
  store(out, acc);
}

HR_INLINE Vec load_scales(const uint8_t* p, int row, bool f32) {
  return f32 ? load(reinterpret_cast<const float*>(p) + 16 * row)
             : load_f16(reinterpret_cast<const uint16_t*>(p) + 16 * row);
}

using Matmul = void (*)(const MatmulArgs&, int tile_begin, int tile_end, int row_begin, int row_end);

template <template <int Bits, bool F32, int Offsets, int Group> class Kernel, int Bits, bool F32, int Group>
constexpr Matmul kByOffsets[3] = {Kernel<Bits, F32, WeightFormat::kNone, Group>::kRun,
                                  Kernel<Bits, F32, WeightFormat::kMinimum, Group>::kRun,
                                  Kernel<Bits, F32, WeightFormat::kZeroPoints, Group>::kRun};

template <template <int, bool, int, int> class Kernel, int Bits>
Matmul kernel_of_bits(const WeightFormat& f) {
  const bool wide = f.scale_bytes == 4;
  if (f.group == 32)
    return (wide ? kByOffsets<Kernel, Bits, true, 32> : kByOffsets<Kernel, Bits, false, 32>)[f.offsets];
  if (f.group == 16)
    return (wide ? kByOffsets<Kernel, Bits, true, 16> : kByOffsets<Kernel, Bits, false, 16>)[f.offsets];
  return Kernel<Bits, true, WeightFormat::kNone, 0>::kRun;
}

// The kernel that was made for a format of integer codes.
template <template <int, bool, int, int> class Kernel>
Matmul kernel_of(const WeightFormat& f) {
  return f.kind == WeightFormat::kU4 ? kernel_of_bits<Kernel, 4>(f) : kernel_of_bits<Kernel, 8>(f);
}

}  // namespace
}  // namespace HR_ISA
}  // namespace headrace
