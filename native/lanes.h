// What the sampler needs of the sixteen lanes beyond simd.h: which lanes pass a comparison, and sums in double.
#pragma once

#include "simd.h"

namespace headrace {
namespace HR_ISA {

constexpr int kLanes = 16;

// Bit i set where lane i of a is at least b's.
HR_INLINE uint32_t lanes_at_least(Vec a, Vec b) {
#if defined(HR_PATH_AVX512)
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ);
#elif defined(HR_PATH_AVX2)
  const int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ));
  const int hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
  return static_cast<uint32_t>(lo | hi << 8);
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(a.v[i] >= b.v[i]) << i;
  return bits;
#endif
}

// Writes base + i for every set bit i, ascending; may write 16 entries. Returns how many count.
HR_INLINE int append_lanes(int32_t* ids, int base, uint32_t bits) {
#if defined(HR_PATH_AVX512)
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i all = _mm512_add_epi32(lanes, _mm512_set1_epi32(base));
  _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), all));
  return __builtin_popcount(bits);
#else
  int count = 0;
  for (; bits != 0; bits &= bits - 1) ids[count++] = base + __builtin_ctz(bits);
  return count;
#endif
}

// Sixteen floats from p, of which the first `count` (at most 16) exist; `fill` elsewhere.
HR_INLINE Vec load_some(const float* p, int count, float fill) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? p[i] : fill;
  return load(lanes);
}

// A sum in sixteen double lanes.
struct DoubleSum {
#if defined(HR_PATH_AVX512)
  __m512d part[2];
#elif defined(HR_PATH_AVX2)
  __m256d part[4];
#else
  double part[kLanes];
#endif
};

HR_INLINE void accumulate(DoubleSum& sum, Vec x) {
#if defined(HR_PATH_AVX512)
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.v), 1));
  sum.part[0] = _mm512_add_pd(sum.part[0], _mm512_cvtps_pd(_mm512_castps512_ps256(x.v)));
  sum.part[1] = _mm512_add_pd(sum.part[1], _mm512_cvtps_pd(high));
#elif defined(HR_PATH_AVX2)
  sum.part[0] = _mm256_add_pd(sum.part[0], _mm256_cvtps_pd(_mm256_castps256_ps128(x.lo)));
  sum.part[1] = _mm256_add_pd(sum.part[1], _mm256_cvtps_pd(_mm256_extractf128_ps(x.lo, 1)));
  sum.part[2] = _mm256_add_pd(sum.part[2], _mm256_cvtps_pd(_mm256_castps256_ps128(x.hi)));
  sum.part[3] = _mm256_add_pd(sum.part[3], _mm256_cvtps_pd(_mm256_extractf128_ps(x.hi, 1)));
#else
  for (int i = 0; i < kLanes; ++i) sum.part[i] += static_cast<double>(x.v[i]);
#endif
}

// Folds 16 -> 8 -> 4 -> 2 -> 1, as reduce_add does.
HR_INLINE double total(const DoubleSum& sum) {
  double t[kLanes];
  std::memcpy(t, sum.part, sizeof t);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) t[i] += t[i + width];
  return t[0];
}

}  // namespace HR_ISA
}  // namespace headrace
