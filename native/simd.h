// Sixteen float lanes, written once per ISA path; every kernel file is compiled once for each path inside
// namespace headrace::HR_ISA. The packed layouts are sixteen wide everywhere, so no kernel knows the register
// size.
//
// Integer dot products are exact and agree bitwise between the paths. Float results agree between row counts,
// thread counts and tilings of one path, not between paths: the portable path has no fused multiply-add.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(HR_PATH_AVX512) || defined(HR_PATH_AVX2)
#include <immintrin.h>
#endif

// Before a loop over an array of vectors: unrolled, the array lives in registers; not unrolled, in memory.
#define HR_UNROLL _Pragma("GCC unroll 16")
#define HR_INLINE static inline __attribute__((always_inline))

namespace headrace {
namespace HR_ISA {

#if defined(HR_PATH_AVX512) || defined(HR_PATH_AVX2)
struct Half {  // the lower and the upper eight lanes
  __m256 lo, hi;
};
struct IHalf {
  __m256i lo, hi;
};
HR_INLINE int32_t store_and_sum(int8_t* p, __m128i bytes) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  const __m128i eights =  // unsigned sums of eight: 128 too much in every byte
      _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
  return _mm_cvtsi128_si32(_mm_add_epi32(eights, _mm_shuffle_epi32(eights, 0x4e))) - 16 * 128;
}
#endif

#if defined(HR_PATH_AVX512)

struct Vec {
  __m512 v;
};
struct IVec {
  __m512i v;
};
struct Bytes {  // 64 bytes: 16 lanes of 4
  __m512i v;
};

HR_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
HR_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
HR_INLINE Vec set1(float x) { return {_mm512_set1_ps(x)}; }
HR_INLINE Vec zero() { return {_mm512_setzero_ps()}; }
HR_INLINE Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
HR_INLINE Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
HR_INLINE Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
HR_INLINE Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
HR_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// As x86: the second operand where either is NaN.
HR_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
HR_INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
HR_INLINE Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
// a where x < y, else b
HR_INLINE Vec select_less(Vec x, Vec y, Vec a, Vec b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ), b.v, a.v)};
}
// Keeps lanes first <= lane < last, puts `other` elsewhere.
HR_INLINE Vec keep_lanes(Vec a, int first, int last, Vec other) {
  const uint32_t below_last = last >= 16 ? 0xffffu : (last <= 0 ? 0u : (1u << last) - 1u);
  const uint32_t below_first = first >= 16 ? 0xffffu : (first <= 0 ? 0u : (1u << first) - 1u);
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(below_last & ~below_first), other.v, a.v)};
}
HR_INLINE Vec load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Of float8 e4m3 numbers, each divided by 256 (the difference of the exponents' biases): as float16 they have
// their sign, a zero, and their other bits behind it. Its NaN comes out as a number.
HR_INLINE Vec load_f8(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i kept = _mm256_set1_epi16(static_cast<int16_t>(0xbfff));
  return {_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), kept))};
}
HR_INLINE Vec load_u8(const uint8_t* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(raw))};
}
HR_INLINE IVec izero() { return {_mm512_setzero_si512()}; }
HR_INLINE IVec iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
HR_INLINE IVec add(IVec a, IVec b) { return {_mm512_add_epi32(a.v, b.v)}; }
HR_INLINE IVec mul(IVec a, IVec b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
HR_INLINE Vec to_float(IVec a) { return {_mm512_cvtepi32_ps(a.v)}; }
HR_INLINE IVec round_to_int(Vec a) { return {_mm512_cvtps_epi32(a.v)}; }
HR_INLINE Vec scale_by_power_of_two(Vec a, IVec n) {
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(n.v, 23)))};
}
// Saturated to 8 bits; the sum of what was stored.
HR_INLINE int32_t store_s8(int8_t* p, IVec a) { return store_and_sum(p, _mm512_cvtsepi32_epi8(a.v)); }
HR_INLINE Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE Bytes low_nibbles(Bytes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(0x0f))}; }
HR_INLINE Bytes high_nibbles(Bytes a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(0x0f))};
}
// Adds to each lane the dot product of its 4 unsigned bytes with the 4 signed bytes at x; two products must
// fit 16 bits.
HR_INLINE IVec dot_u4(IVec acc, Bytes w, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(four))};
}
// The same of any bytes.
HR_INLINE IVec dot_u8(IVec acc, Bytes w, const int8_t* x) { return dot_u4(acc, w, x); }
// Adds to each lane the dot product of its 4 signed bytes with the 4 bytes at x, which are not negative.
HR_INLINE IVec dot_s8(IVec acc, Bytes v, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return {_mm512_dpbusd_epi32(acc.v, _mm512_set1_epi32(four), v.v)};
}
HR_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
HR_INLINE IVec magnitude_bits(Vec a) {
  return {_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff))};
}
HR_INLINE IVec max(IVec a, IVec b) { return {_mm512_max_epi32(a.v, b.v)}; }
HR_INLINE Half fold(Vec a) {
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
  return {_mm512_castps512_ps256(a.v), high};
}
HR_INLINE IHalf fold(IVec a) { return {_mm512_castsi512_si256(a.v), _mm512_extracti64x4_epi64(a.v, 1)}; }

struct Pairs {  // 16 lanes of two bf16
  __m512i v;
};
HR_INLINE Pairs load_pairs(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE void store_pairs(uint16_t* p, Pairs a) { _mm512_storeu_si512(p, a.v); }
// Of numbers that bf16 holds exactly.
HR_INLINE Pairs join_pairs(Vec even, Vec odd) {
  const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even.v), 16);
  return {_mm512_or_si512(low, _mm512_and_si512(_mm512_castps_si512(odd.v), high))};
}
HR_INLINE Pairs keep_half(Pairs a, uint32_t mask) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int32_t>(mask)))};
}
#if defined(HR_BF16)
using Factor = uint16_t;  // bf16
HR_INLINE Vec dot_pairs(Vec acc, Pairs a, const Factor* two) {
  int32_t both;
  std::memcpy(&both, two, 4);
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)_mm512_set1_epi32(both))};
}
// Stores what dot_pairs multiplies with, and returns its value.
HR_INLINE Vec store_factors(Factor* p, Vec a) {
  const __m256i narrow = (__m256i)_mm512_cvtneps_pbh(a.v);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16))};
}
#else
HR_INLINE Vec even_half(Pairs a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
HR_INLINE Vec odd_half(Pairs a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))))};
}
#endif

#elif defined(HR_PATH_AVX2)

struct Vec {
  __m256 lo, hi;
};
struct IVec {
  __m256i lo, hi;
};
struct Bytes {
  __m256i lo, hi;
};

HR_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HR_INLINE void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
HR_INLINE Vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
HR_INLINE Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
HR_INLINE Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
HR_INLINE Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
HR_INLINE Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
HR_INLINE Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
HR_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
HR_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
HR_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
HR_INLINE Vec abs(Vec a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
HR_INLINE Vec select_less(Vec x, Vec y, Vec a, Vec b) {
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(x.lo, y.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(x.hi, y.hi, _CMP_LT_OQ))};
}
HR_INLINE __m256 lanes_between(int first, int last, int offset) {
  const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(offset));
  const __m256i from = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(first - 1));
  const __m256i to = _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane);
  return _mm256_castsi256_ps(_mm256_and_si256(from, to));
}
HR_INLINE Vec keep_lanes(Vec a, int first, int last, Vec other) {
  return {_mm256_blendv_ps(other.lo, a.lo, lanes_between(first, last, 0)),
          _mm256_blendv_ps(other.hi, a.hi, lanes_between(first, last, 8))};
}
HR_INLINE Vec load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
HR_INLINE __m256 expand_f8(const uint8_t* p) {
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_cvtph_ps(
      _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<int16_t>(0xbfff))));
}
HR_INLINE Vec load_f8(const uint8_t* p) { return {expand_f8(p), expand_f8(p + 8)}; }
HR_INLINE __m256 expand_u8(const uint8_t* p) {
  const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(raw));
}
HR_INLINE Vec load_u8(const uint8_t* p) { return {expand_u8(p), expand_u8(p + 8)}; }
HR_INLINE IVec izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
HR_INLINE IVec iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
HR_INLINE IVec add(IVec a, IVec b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
HR_INLINE IVec mul(IVec a, IVec b) {
  return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
HR_INLINE Vec to_float(IVec a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
HR_INLINE IVec round_to_int(Vec a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
HR_INLINE Vec scale_by_power_of_two(Vec a, IVec n) {
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.lo), _mm256_slli_epi32(n.lo, 23))),
          _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.hi), _mm256_slli_epi32(n.hi, 23)))};
}
HR_INLINE int32_t store_s8(int8_t* p, IVec a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  return store_and_sum(p, bytes);
}
HR_INLINE Bytes load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
HR_INLINE Bytes low_nibbles(Bytes a) {
  const __m256i mask = _mm256_set1_epi8(0x0f);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
HR_INLINE Bytes high_nibbles(Bytes a) {
  const __m256i mask = _mm256_set1_epi8(0x0f);
  return {_mm256_and_si256(_mm256_srli_epi16(a.lo, 4), mask),
          _mm256_and_si256(_mm256_srli_epi16(a.hi, 4), mask)};
}
HR_INLINE __m256i dot_u4_half(__m256i acc, __m256i w, __m256i x) {
  // At most 2 * 15 * 127: no saturation in the 16-bit sums.
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
HR_INLINE IVec dot_u4(IVec acc, Bytes w, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  const __m256i xs = _mm256_set1_epi32(four);
  return {dot_u4_half(acc.lo, w.lo, xs), dot_u4_half(acc.hi, w.hi, xs)};
}
HR_INLINE __m256i dot_u8_half(__m256i acc, __m256i w, __m256i x) {
  // 8-bit codes would saturate maddubs: low and high nibbles are multiplied apart and joined exactly.
  const __m256i mask = _mm256_set1_epi8(0x0f);
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256i low = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_and_si256(w, mask), x), ones);
  const __m256i high =
      _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(w, 4), mask), x), ones);
  return _mm256_add_epi32(acc, _mm256_add_epi32(low, _mm256_slli_epi32(high, 4)));
}
HR_INLINE IVec dot_u8(IVec acc, Bytes w, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  const __m256i xs = _mm256_set1_epi32(four);
  return {dot_u8_half(acc.lo, w.lo, xs), dot_u8_half(acc.hi, w.hi, xs)};
}
HR_INLINE IVec dot_s8(IVec acc, Bytes v, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  const __m256i xs = _mm256_set1_epi32(four);
  // At most 2 * 128 * 127: no saturation here either.
  return {dot_u4_half(acc.lo, xs, v.lo), dot_u4_half(acc.hi, xs, v.hi)};
}
HR_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
HR_INLINE IVec magnitude_bits(Vec a) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  return {_mm256_and_si256(_mm256_castps_si256(a.lo), mask),
          _mm256_and_si256(_mm256_castps_si256(a.hi), mask)};
}
HR_INLINE IVec max(IVec a, IVec b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
HR_INLINE Half fold(Vec a) { return {a.lo, a.hi}; }
HR_INLINE IHalf fold(IVec a) { return {a.lo, a.hi}; }

struct Pairs {
  __m256i lo, hi;
};
HR_INLINE Pairs load_pairs(const uint16_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16))};
}
HR_INLINE void store_pairs(uint16_t* p, Pairs a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), a.hi);
}
// Of numbers that bf16 holds exactly.
HR_INLINE Pairs join_pairs(Vec even, Vec odd) {
  const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
  const auto join = [&](__m256 a, __m256 b) {
    const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(a), 16);
    return _mm256_or_si256(low, _mm256_and_si256(_mm256_castps_si256(b), high));
  };
  return {join(even.lo, odd.lo), join(even.hi, odd.hi)};
}
HR_INLINE Pairs keep_half(Pairs a, uint32_t mask) {
  const __m256i m = _mm256_set1_epi32(static_cast<int32_t>(mask));
  return {_mm256_and_si256(a.lo, m), _mm256_and_si256(a.hi, m)};
}
HR_INLINE Vec even_half(Pairs a) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(a.lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(a.hi, 16))};
}
HR_INLINE Vec odd_half(Pairs a) {
  const Pairs odd = keep_half(a, 0xffff0000u);
  return {_mm256_castsi256_ps(odd.lo), _mm256_castsi256_ps(odd.hi)};
}

#else  // portable

struct Vec {
  float v[16];
};
struct IVec {
  int32_t v[16];
};
struct Bytes {
  uint8_t v[64];
};

#define HR_LANES for (int i = 0; i < 16; ++i)

HR_INLINE Vec load(const float* p) {
  Vec r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
HR_INLINE void store(float* p, Vec a) { std::memcpy(p, a.v, sizeof a.v); }
HR_INLINE Vec set1(float x) {
  Vec r;
  HR_LANES r.v[i] = x;
  return r;
}
HR_INLINE Vec zero() { return set1(0.0f); }
HR_INLINE Vec add(Vec a, Vec b) {
  HR_LANES a.v[i] += b.v[i];
  return a;
}
HR_INLINE Vec sub(Vec a, Vec b) {
  HR_LANES a.v[i] -= b.v[i];
  return a;
}
HR_INLINE Vec mul(Vec a, Vec b) {
  HR_LANES a.v[i] *= b.v[i];
  return a;
}
HR_INLINE Vec div(Vec a, Vec b) {
  HR_LANES a.v[i] /= b.v[i];
  return a;
}
HR_INLINE Vec fma(Vec a, Vec b, Vec c) {
  HR_LANES c.v[i] = a.v[i] * b.v[i] + c.v[i];
  return c;
}
HR_INLINE Vec max(Vec a, Vec b) {
  HR_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
HR_INLINE Vec min(Vec a, Vec b) {
  HR_LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}
HR_INLINE Vec abs(Vec a) {
  HR_LANES a.v[i] = std::fabs(a.v[i]);
  return a;
}
HR_INLINE Vec select_less(Vec x, Vec y, Vec a, Vec b) {
  HR_LANES b.v[i] = x.v[i] < y.v[i] ? a.v[i] : b.v[i];
  return b;
}
HR_INLINE Vec keep_lanes(Vec a, int first, int last, Vec other) {
  HR_LANES a.v[i] = (i >= first && i < last) ? a.v[i] : other.v[i];
  return a;
}
HR_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 0x1fu;
  const uint32_t mantissa = h & 0x3ffu;
  uint32_t bits;
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  } else if (exponent == 31) {
    bits = sign | 0x7f800000u | (mantissa << 13);
  } else {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  }
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
HR_INLINE Vec load_f16(const uint16_t* p) {
  Vec r;
  HR_LANES r.v[i] = half_to_float(p[i]);
  return r;
}
HR_INLINE Vec load_f8(const uint8_t* p) {
  Vec r;
  HR_LANES r.v[i] = half_to_float(static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7));
  return r;
}
HR_INLINE Vec load_u8(const uint8_t* p) {
  Vec r;
  HR_LANES r.v[i] = static_cast<float>(p[i]);
  return r;
}
HR_INLINE IVec iset1(int32_t x) {
  IVec r;
  HR_LANES r.v[i] = x;
  return r;
}
HR_INLINE IVec izero() { return iset1(0); }
HR_INLINE IVec add(IVec a, IVec b) {
  HR_LANES a.v[i] += b.v[i];
  return a;
}
HR_INLINE IVec mul(IVec a, IVec b) {
  HR_LANES a.v[i] *= b.v[i];
  return a;
}
HR_INLINE Vec to_float(IVec a) {
  Vec r;
  HR_LANES r.v[i] = static_cast<float>(a.v[i]);
  return r;
}
HR_INLINE IVec round_to_int(Vec a) {
  // Adding and subtracting 1.5 * 2^23 rounds to nearest even; the clamp keeps it in range (NaN becomes low).
  IVec r;
  HR_LANES {
    float x = a.v[i] > -4194304.0f ? a.v[i] : -4194304.0f;
    x = x < 4194304.0f ? x : 4194304.0f;
    r.v[i] = static_cast<int32_t>((x + 12582912.0f) - 12582912.0f);
  }
  return r;
}
HR_INLINE Vec scale_by_power_of_two(Vec a, IVec n) {
  HR_LANES {
    uint32_t bits;
    std::memcpy(&bits, &a.v[i], 4);
    bits += static_cast<uint32_t>(n.v[i]) << 23;
    std::memcpy(&a.v[i], &bits, 4);
  }
  return a;
}
HR_INLINE int32_t store_s8(int8_t* p, IVec a) {
  int32_t sum = 0;
  HR_LANES {
    const int32_t x = a.v[i] < -128 ? -128 : (a.v[i] > 127 ? 127 : a.v[i]);
    p[i] = static_cast<int8_t>(x);
    sum += x;
  }
  return sum;
}
HR_INLINE Bytes load_bytes(const uint8_t* p) {
  Bytes r;
  std::memcpy(r.v, p, 64);
  return r;
}
HR_INLINE Bytes low_nibbles(Bytes a) {
  for (int i = 0; i < 64; ++i) a.v[i] &= 0x0f;
  return a;
}
HR_INLINE Bytes high_nibbles(Bytes a) {
  for (int i = 0; i < 64; ++i) a.v[i] >>= 4;
  return a;
}
HR_INLINE IVec dot_u8(IVec acc, const Bytes& w, const int8_t* x) {
  const int32_t x0 = x[0], x1 = x[1], x2 = x[2], x3 = x[3];
  HR_LANES acc.v[i] += w.v[4 * i] * x0 + w.v[4 * i + 1] * x1 + w.v[4 * i + 2] * x2 + w.v[4 * i + 3] * x3;
  return acc;
}
HR_INLINE IVec dot_u4(IVec acc, const Bytes& w, const int8_t* x) { return dot_u8(acc, w, x); }
HR_INLINE IVec dot_s8(IVec acc, const Bytes& v, const int8_t* x) {
  const int32_t x0 = x[0], x1 = x[1], x2 = x[2], x3 = x[3];
  HR_LANES {
    int8_t four[4];
    std::memcpy(four, v.v + 4 * i, 4);
    acc.v[i] += four[0] * x0 + four[1] * x1 + four[2] * x2 + four[3] * x3;
  }
  return acc;
}
HR_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
HR_INLINE IVec magnitude_bits(Vec a) {
  IVec r;
  std::memcpy(r.v, a.v, sizeof r.v);
  HR_LANES r.v[i] &= 0x7fffffff;
  return r;
}
HR_INLINE IVec max(IVec a, IVec b) {
  HR_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}

struct Pairs {
  uint32_t v[16];
};
HR_INLINE Pairs load_pairs(const uint16_t* p) {
  Pairs r;
  HR_LANES r.v[i] = static_cast<uint32_t>(p[2 * i]) | static_cast<uint32_t>(p[2 * i + 1]) << 16;
  return r;
}
HR_INLINE void store_pairs(uint16_t* p, Pairs a) {
  HR_LANES {
    p[2 * i] = static_cast<uint16_t>(a.v[i]);
    p[2 * i + 1] = static_cast<uint16_t>(a.v[i] >> 16);
  }
}
// Of numbers that bf16 holds exactly.
HR_INLINE Pairs join_pairs(Vec even, Vec odd) {
  Pairs r;
  HR_LANES {
    uint32_t low, high;
    std::memcpy(&low, &even.v[i], 4);
    std::memcpy(&high, &odd.v[i], 4);
    r.v[i] = low >> 16 | (high & 0xffff0000u);
  }
  return r;
}
HR_INLINE Pairs keep_half(Pairs a, uint32_t mask) {
  HR_LANES a.v[i] &= mask;
  return a;
}
HR_INLINE Vec even_half(Pairs a) {
  Vec r;
  HR_LANES {
    const uint32_t bits = a.v[i] << 16;
    std::memcpy(&r.v[i], &bits, 4);
  }
  return r;
}
HR_INLINE Vec odd_half(Pairs a) {
  Vec r;
  HR_LANES {
    const uint32_t bits = a.v[i] & 0xffff0000u;
    std::memcpy(&r.v[i], &bits, 4);
  }
  return r;
}

#undef HR_LANES
#endif

#if !defined(HR_BF16)
using Factor = float;
// acc + a[even] * two[0] + a[odd] * two[1], lane by lane.
HR_INLINE Vec dot_pairs(Vec acc, Pairs a, const Factor* two) {
  return fma(odd_half(a), set1(two[1]), fma(even_half(a), set1(two[0]), acc));
}
// Stores what dot_pairs multiplies with, and returns its value.
HR_INLINE Vec store_factors(Factor* p, Vec a) {
  store(p, a);
  return a;
}
#endif
constexpr uint32_t kEvenHalf = 0x0000ffffu;
constexpr uint32_t kOddHalf = 0xffff0000u;

// Reductions always fold 16 -> 8 -> 4 -> 2 -> 1 in this order, in every path.
#if defined(HR_PATH_AVX512) || defined(HR_PATH_AVX2)
HR_INLINE float reduce_add(Vec a) {
  const Half half = fold(a);
  const __m256 eight = _mm256_add_ps(half.lo, half.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
HR_INLINE float reduce_max(Vec a) {
  const Half half = fold(a);
  const __m256 eight = _mm256_max_ps(half.lo, half.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
HR_INLINE int32_t reduce_max(IVec a) {
  const IHalf half = fold(a);
  const __m256i eight = _mm256_max_epi32(half.lo, half.hi);
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
#else
HR_INLINE float reduce_add(Vec a) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
  return a.v[0];
}
HR_INLINE float reduce_max(Vec a) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
  return a.v[0];
}
HR_INLINE int32_t reduce_max(IVec a) {
  int32_t largest = a.v[0];
  for (int i = 1; i < 16; ++i) largest = a.v[i] > largest ? a.v[i] : largest;
  return largest;
}
#endif

// e^x within 2 ulp for x <= 88; 0 below -87 (so that masked scores weigh exactly nothing). NaN stays NaN.
// Range reduction and minimax polynomial in the manner of Cephes' expf.
HR_INLINE Vec exp(Vec x) {
  const Vec lowest = set1(-87.0f);
  const Vec clamped = max(lowest, min(set1(88.0f), x));  // operand order lets NaN through
  const IVec n = round_to_int(mul(clamped, set1(1.44269504088896341f)));
  const Vec nf = to_float(n);
  Vec r = fma(nf, set1(-0.693359375f), clamped);
  r = fma(nf, set1(2.12194440e-4f), r);
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(mul(p, r), r, add(r, set1(1.0f)));
  return select_less(x, lowest, zero(), scale_by_power_of_two(p, n));
}

// 2 / (1 + e^-2x) - 1 for moderate x, exact limits beyond.
HR_INLINE Vec tanh(Vec x) {
  const Vec t = exp(mul(max(set1(-20.0f), min(set1(20.0f), x)), set1(-2.0f)));
  return div(sub(set1(1.0f), t), add(set1(1.0f), t));
}

// Round to nearest even; NaN stays NaN. Without branches, for compilers to do many at once.
HR_INLINE uint16_t float_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>(((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded) >> 16);
}

}  // namespace HR_ISA
}  // namespace headrace
