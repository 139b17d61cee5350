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

}  // namespace
}  // namespace HR_ISA
}  // namespace headrace
