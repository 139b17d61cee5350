// Finding the head of a row's order (logit descending, id ascending) without sorting it.
// Included by the sampler, once per ISA path.
#pragma once

#include "lanes.h"

namespace headrace {
namespace HR_ISA {

// Indices of the values in [bound, beyond), ascending, into indices ([n + 16]). Returns how many.
HR_INLINE int indices_between(const float* values, int n, float bound, float beyond, int32_t* indices) {
  const Vec least = set1(bound), above = set1(beyond);
  int count = 0, i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec x = load(values + i);
    const uint32_t bits = lanes_at_least(x, least) & ~lanes_at_least(x, above);
    if (bits != 0) count += append_lanes(indices + count, i, bits);
  }
  for (; i < n; ++i) {
    if (values[i] >= bound && values[i] < beyond) indices[count++] = i;
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

constexpr int kBins = 512;
constexpr int kBinCopies = 4;  // interleaved, so that equal neighbours do not wait for each other's addition

// The last member of the shortest head whose mass, on top of `ahead`, reaches `target`; the last of all, when rounding
// keeps it below. pool[n]: the indices to choose from, ascending, n > 0; destroyed. mass(index) is not negative, does
// not grow along the order and is positive at its start. bins: [kBins * kBinCopies].
// A histogram over the keys' range picks the bin that holds the cut; repeat within that bin until its keys are equal.
// Linear time: every round narrows the range at least 256-fold, so that five rounds are the most.
template <class Mass>
HR_INLINE int32_t find_cut(const float* values, int32_t* pool, int n, double ahead, double target, Mass mass,
                           double* bins) {
  for (;;) {
    uint32_t low = ~0u, high = 0;
    for (int e = 0; e < n; ++e) {
      const uint32_t key = order_key(values[pool[e]]);
      low = key < low ? key : low;
      high = key > high ? key : high;
    }
    if (low == high) {
      int e = 0;
      while (e < n - 1 && (ahead += mass(pool[e])) < target) ++e;
      return pool[e];
    }
    const int width = 32 - __builtin_clz(high - low);
    const int shift = width > 9 ? width - 9 : 0;
    std::memset(bins, 0, sizeof(double) * kBins * kBinCopies);
    for (int e = 0; e < n; ++e) {
      const uint32_t bin = (high - order_key(values[pool[e]])) >> shift;
      bins[bin * kBinCopies + static_cast<uint32_t>(e % kBinCopies)] += mass(pool[e]);
    }
    uint32_t chosen = 0;
    double reached = ahead;
    for (uint32_t bin = 0; bin < kBins && (bin == 0 || reached < target); ++bin) {
      const double* copy = bins + bin * kBinCopies;
      const double held = (copy[0] + copy[1]) + (copy[2] + copy[3]);
      if (held > 0.0) {
        chosen = bin;
        ahead = reached;
        reached += held;
      }
    }
    int kept = 0;
    for (int e = 0; e < n; ++e) {
      const int32_t index = pool[e];
      pool[kept] = index;  // without a branch: what stays is as good as random
      kept += (high - order_key(values[index])) >> shift == chosen ? 1 : 0;
    }
    n = kept;
  }
}

// The ids of the k largest of `n` logits (equal ones: lower ids first), ascending, into ids ([n + 32]); returns
// min(k, n); k > 0. `maxima` holds those of `parts` disjoint parts of the row: the k-th largest of them bounds the
// k-th largest logit from below, so that few logits are left to choose from. pool: [n + 32].
HR_INLINE int largest(const float* logits, int n, int k, const float* maxima, int parts, int32_t* ids, int32_t* pool,
                      double* bins) {
  const auto one = [](int32_t) { return 1.0; };
  float bound = -INFINITY;
  if (k <= parts) {
    for (int part = 0; part < parts; ++part) pool[part] = part;
    bound = maxima[find_cut(maxima, pool, parts, 0.0, k, one, bins)];
  }
  const int found = indices_between(logits, n, bound, INFINITY, ids);
  if (found <= k) return found;
  std::memcpy(pool, ids, static_cast<size_t>(found) * sizeof *ids);
  const int32_t last = find_cut(logits, pool, found, 0.0, k, one, bins);
  int kept = 0;
  for (int j = 0; j < found; ++j) {
    const int32_t id = ids[j];
    ids[kept] = id;
    kept += logits[id] > logits[last] || (logits[id] == logits[last] && id <= last) ? 1 : 0;
  }
  return kept;
}

}  // namespace HR_ISA
}  // namespace headrace
