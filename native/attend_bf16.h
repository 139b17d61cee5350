// Attention over keys and values in bf16: what vector and matrix registers share.
#pragma once

#include "attend.h"

namespace headrace {
namespace HR_ISA {
namespace {

// A query vector as what is multiplied with keys: [head_dim, zeros up to a multiple of 16].
HR_INLINE const Factor* prepare_factors(const float* vector, int head_dim, float* scratch) {
  Factor* factors = reinterpret_cast<Factor*>(scratch);
  int d = 0;
  for (; d + 16 <= head_dim; d += 16) store_factors(factors + d, load(vector + d));
  if (d < head_dim) {
    float tail[16] = {};
    std::memcpy(tail, vector + d, static_cast<size_t>(head_dim - d) * sizeof(float));
    store_factors(factors + d, load(tail));
  }
  return factors;
}

// Turns one vector's scores into weights and folds them into its state. [begin, end) is what it may see.
HR_INLINE void soften(float* scores, Factor* weights, int begin, int end, float softcap, State s, int vector,
                      int padded) {
  if (begin >= end) return;
  const float largest = cap_and_mask(scores, begin, end, softcap, s.largest[vector]);
  const Vec shift = set1(largest);
  Vec sum = zero();
  for (int b = 0; b < kTileBlocks; ++b) {
    // The denominator sums the weights as they are applied, rounded where the path rounds them.
    sum = add(sum, store_factors(weights + 16 * b, weight_of(sub(load(scores + 16 * b), shift))));
  }
  fold_tile(s, vector, largest, reduce_add(sum), padded);
}

}  // namespace
}  // namespace HR_ISA
}  // namespace headrace
