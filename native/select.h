// Finding the head of a row's order (logit descending, id ascending) without sorting it.
// Included by the sampler, once per ISA path.
#pragma once

#include "lanes.h"

namespace headrace {
namespace HR_ISA {

// Indices of the values that are at least `bound`, ascending, into ids ([n + 16]). Returns how many.
HR_INLINE int indices_at_least(const float* values, int n, float bound, int32_t* ids) {
  const Vec least = set1(bound);
  int count = 0, i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const uint32_t bits = lanes_at_least(load(values + i), least);
    if (bits != 0) count += append_lanes(ids + count, i, bits);
  }
  for (; i < n; ++i) {
    if (values[i] >= bound) ids[count++] = i;
  }
  return count;
}

// An integer that orders as the float does; -0 and +0 are equal.
HR_INLINE uint32_t order_key(float x) {
  x += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// The last member of a head.
struct Cut {
  uint32_t key;
  int32_t id;
};

HR_INLINE bool within(const Cut& cut, float logit, int32_t id) {
  const uint32_t key = order_key(logit);
  return key > cut.key || (key == cut.key && id <= cut.id);
}

constexpr int kBins = 512;
constexpr int kBinCopies = 4;  // interleaved, so that equal neighbours do not wait for each other's addition

// The shortest head whose mass reaches `target` (all, when rounding keeps it below). ids[n] ascend, n > 0. mass(j), that
// of ids[j], is not negative, does not grow along the order and is positive at its start. Scratch: pool [n], bins
// [kBins * kBinCopies].
// A histogram over the keys' range picks the bin that holds the cut; repeat within that bin until its keys are equal.
// Linear time: every round narrows the range at least 256-fold, so that five rounds are the most.
template <class Mass>
HR_INLINE Cut find_cut(const float* logits, const int32_t* ids, int n, double target, Mass mass, int32_t* pool,
                       double* bins) {
  for (int j = 0; j < n; ++j) pool[j] = j;
  double above = 0.0;  // mass of everything ahead of the pool
  for (;;) {
    uint32_t low = ~0u, high = 0;
    for (int e = 0; e < n; ++e) {
      const uint32_t key = order_key(logits[ids[pool[e]]]);
      low = key < low ? key : low;
      high = key > high ? key : high;
    }
    if (low == high) {
      int e = 0;
      while (e < n - 1 && (above += mass(pool[e])) < target) ++e;
      return {high, ids[pool[e]]};
    }
    const int width = 32 - __builtin_clz(high - low);
    const int shift = width > 9 ? width - 9 : 0;
    std::memset(bins, 0, sizeof(double) * kBins * kBinCopies);
    for (int e = 0; e < n; ++e) {
      const uint32_t bin = (high - order_key(logits[ids[pool[e]]])) >> shift;
      bins[bin * kBinCopies + static_cast<uint32_t>(e % kBinCopies)] += mass(pool[e]);
    }
    uint32_t chosen = 0;
    double reached = above;
    for (uint32_t bin = 0; bin < kBins && (bin == 0 || reached < target); ++bin) {
      const double* copy = bins + bin * kBinCopies;
      const double held = (copy[0] + copy[1]) + (copy[2] + copy[3]);
      if (held > 0.0) {
        chosen = bin;
        above = reached;
        reached += held;
      }
    }
    int kept = 0;
    for (int e = 0; e < n; ++e) {
      const int32_t j = pool[e];
      if ((high - order_key(logits[ids[j]])) >> shift == chosen) pool[kept++] = j;
    }
    n = kept;
  }
}

// The ids of the k largest of `n` logits (equal ones: lower ids first), ascending, into ids ([n + 32]); returns min(k, n),
// k > 0. `maxima` holds those of `parts` disjoint parts of the row: the k-th largest of them bounds the k-th largest
// logit from below, so that few logits are left to choose from. Scratch as in find_cut, with room for `parts` too.
HR_INLINE int largest(const float* logits, int n, int k, const float* maxima, int parts, int32_t* ids, int32_t* pool,
                      double* bins) {
  const auto one = [](int) { return 1.0; };
  float bound = -INFINITY;
  if (k <= parts) {
    for (int part = 0; part < parts; ++part) ids[part] = part;
    bound = maxima[find_cut(maxima, ids, parts, k, one, pool, bins).id];
  }
  const int found = indices_at_least(logits, n, bound, ids);
  if (found <= k) return found;
  const Cut cut = find_cut(logits, ids, found, k, one, pool, bins);
  int kept = 0;
  for (int j = 0; j < found; ++j) {
    if (within(cut, logits[ids[j]], ids[j])) ids[kept++] = ids[j];
  }
  return kept;
}

}  // namespace HR_ISA
}  // namespace headrace
