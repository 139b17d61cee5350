// What this machine can do at most: how fast threads read memory, and how fast they multiply and accumulate.
// The loops use the kernels' own lanes, so that a kernel's share of the limit is a share of its path's limit.
#include "kernels.h"
#include "simd.h"

namespace headrace {
namespace HR_ISA {
namespace {

// Enough independent sums to hide the latency of any multiply-add.
#if defined(HR_PATH_AVX512)
constexpr int kSums = 16;  // as many as HR_UNROLL unrolls
#else
constexpr int kSums = 6;
#endif

// The compiler must not know what it holds, or it would compute the loop itself.
template <class T>
HR_INLINE void forget(T& x) {
  asm volatile("" : "+m"(x));
}

}  // namespace

// The largest float in each lane of the 64-byte lines at p, so that every one of them is read. (Adding would
// be slow where the bytes happen to be subnormal numbers.)
float read_lines(const uint8_t* p, size_t lines) {
  Vec found[4] = {zero(), zero(), zero(), zero()};
  const float* x = reinterpret_cast<const float*>(p);
  size_t i = 0;
  for (; i + 4 <= lines; i += 4) {
    HR_UNROLL for (int j = 0; j < 4; ++j) {
      prefetch(p + 64 * (i + j) + 2048);
      found[j] = max(load(x + 16 * (i + j)), found[j]);
    }
  }
  for (; i < lines; ++i) found[0] = max(load(x + 16 * i), found[0]);
  return reduce_max(max(max(found[0], found[1]), max(found[2], found[3])));
}

// `rounds` of dot products, one operand from the first-level cache; the number of multiply-accumulates done.
int64_t multiply(MultiplyKind kind, int64_t rounds) {
  alignas(64) uint8_t data[64 * kSums] = {};
  float steps[64] = {};
  forget(data);
  forget(steps);
  Vec sums[kSums];
  HR_UNROLL for (int i = 0; i < kSums; ++i) sums[i] = zero();
  int64_t lanes = 16;
  if (kind == MultiplyKind::kInt8 || kind == MultiplyKind::kVectorInt8) {
    IVec dots[kSums];
    HR_UNROLL for (int i = 0; i < kSums; ++i) dots[i] = izero();
    for (int64_t round = 0; round < rounds; ++round) {
      const int8_t* x = reinterpret_cast<const int8_t*>(steps + round % 64);
      HR_UNROLL for (int i = 0; i < kSums; ++i) dots[i] = dot_u4(dots[i], load_bytes(data + 64 * i), x);
    }
    HR_UNROLL for (int i = 0; i < kSums; ++i) sums[i] = to_float(dots[i]);
    lanes = 64;
  } else if (kind == MultiplyKind::kBf16) {
    const Factor* x = reinterpret_cast<const Factor*>(steps);
    for (int64_t round = 0; round < rounds; ++round) {
      HR_UNROLL for (int i = 0; i < kSums; ++i) sums[i] = dot_pairs(
          sums[i], load_pairs(reinterpret_cast<const uint16_t*>(data + 64 * i)), x + 2 * (round % 32));
    }
    lanes = 32;
  } else {
    for (int64_t round = 0; round < rounds; ++round) {
      const Vec x = set1(steps[round % 64]);
      HR_UNROLL for (int i = 0; i < kSums; ++i) sums[i] =
          fma(load(reinterpret_cast<const float*>(data + 64 * i)), x, sums[i]);
    }
  }
  Vec all = sums[0];
  HR_UNROLL for (int i = 1; i < kSums; ++i) all = add(all, sums[i]);
  forget(all);
  return rounds * kSums * lanes;
}

}  // namespace HR_ISA
}  // namespace headrace
