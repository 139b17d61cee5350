// Attention over keys and values in int8, one scale per slot and head: both products are sums of integers,
// exact in every path and in any order. Queries and weights are made integers of two bytes for it, so that
// what is rounded in memory stays the only rounding that counts.
#include "attend.h"

namespace headrace {
namespace HR_ISA {
namespace {

constexpr float kSmallest = 1e-35f;  // nothing larger counts as zeros: 127 / x must not overflow
// A query is scale * (126 * coarse + fine), both in -63 ... 63: two products with unsigned bytes then fit 16
// bits.
constexpr float kQueryDigit = 63.0f, kFineKeys = 126.0f;
constexpr float kFineValues = 127.0f;  // a weight is step * (127 * coarse + fine), both in 0 ... 127

struct Int8Query {
  const int8_t* coarse;  // [head_dim, zeros up to a multiple of 16]
  const int8_t* fine;
  float scale;
  int32_t coarse_start, fine_start;  // take back the 128 that keys are stored with
};

// A tile's softmax weights, each times its value's scale. What a vector does not see weighs 0.
struct Weights {
  alignas(64) int8_t coarse[kTile];
  alignas(64) int8_t fine[kTile];
  float step;
};

template <int NQ, int NB>
HR_INLINE void score_blocks(const Int8Query* q, const uint8_t* const* keys, int head_dim,
                            float (*scores)[kTile], int first_block) {
  IVec coarse[NQ][NB], fine[NQ][NB];
  HR_UNROLL for (int i = 0; i < NQ; ++i) HR_UNROLL for (int b = 0; b < NB; ++b) {
    coarse[i][b] = iset1(q[i].coarse_start);
    fine[i][b] = iset1(q[i].fine_start);
  }
  for (int d = 0; d < head_dim; d += 4) {
    HR_UNROLL for (int b = 0; b < NB; ++b) {
      const Bytes k = load_bytes(keys[first_block + b] + static_cast<size_t>(16) * d);
      HR_UNROLL for (int i = 0; i < NQ; ++i) {
        coarse[i][b] = dot_u4(coarse[i][b], k, q[i].coarse + d);
        fine[i][b] = dot_u4(fine[i][b], k, q[i].fine + d);
      }
    }
  }
  HR_UNROLL for (int b = 0; b < NB; ++b) {
    const Vec scale = load(reinterpret_cast<const float*>(keys[first_block + b] + int8_key_codes(head_dim)));
    HR_UNROLL for (int i = 0; i < NQ; ++i) {
      const Vec sum = fma(to_float(coarse[i][b]), set1(kFineKeys), to_float(fine[i][b]));
      store(scores[i] + 16 * (first_block + b), mul(mul(sum, set1(q[i].scale)), scale));
    }
  }
}

// Turns one vector's scores into weights and folds them into its state. [begin, end) is what it may see.
HR_INLINE void soften(float* scores, const uint8_t* const* values, int blocks, int head_dim, Weights& weights,
                      int begin, int end, float softcap, State s, int vector, int padded) {
  std::memset(&weights, 0, sizeof weights);
  if (begin >= end) return;
  const float largest = cap_and_mask(scores, begin, end, softcap, s.largest[vector]);
  const Vec shift = set1(largest);
  Vec sum = zero();
  IVec top_bits = izero();  // as integers, magnitudes are in order, NaN above all
  for (int b = 0; b < blocks; ++b) {
    const Vec p = exp(sub(load(scores + 16 * b), shift));
    sum = add(sum, p);
    // The scale of a slot that is not seen may be anything, and 0 * NaN is NaN.
    const Vec scaled =
        keep_lanes(mul(p, load(reinterpret_cast<const float*>(values[b] + int8_value_codes(head_dim)))),
                   begin - 16 * b, end - 16 * b, zero());
    store(scores + 16 * b, scaled);
    top_bits = max(top_bits, magnitude_bits(scaled));
  }
  fold_tile(s, vector, largest, reduce_add(sum), padded);
  const int32_t bits = reduce_max(top_bits);
  float top;
  std::memcpy(&top, &bits, sizeof top);
  const bool counts = top > kSmallest;
  const Vec inverse = set1(counts ? 127.0f / top : 0.0f), half = set1(0.5f), fine = set1(kFineValues);
  for (int b = 0; b < blocks; ++b) {
    const Vec y = mul(load(scores + 16 * b), inverse);
    const IVec whole = round_to_int(sub(y, half));  // at most y: the rest is not negative
    store_s8(weights.coarse + 16 * b, whole);
    store_s8(weights.fine + 16 * b, round_to_int(mul(sub(y, to_float(whole)), fine)));
  }
  weights.step = (counts ? top / 127.0f / kFineValues : 0.0f) + (top - top);  // NaN unless finite
}

// Adds the weighted V of slots [begin, end) of a tile; whole fours, the others weigh nothing.
template <int NQ, int DC>
HR_INLINE void weigh_values(float* const* acc, const Weights* weights, const uint8_t* const* values,
                            int head_dim, int d, int begin, int end) {
  IVec coarse[NQ][DC], fine[NQ][DC];
  HR_UNROLL for (int i = 0; i < NQ; ++i) HR_UNROLL for (int c = 0; c < DC; ++c) coarse[i][c] = fine[i][c] =
      izero();
  for (int t = begin & ~3; t < end; t += 4) {
    const uint8_t* row = values[t / 16] + (static_cast<size_t>(t % 16) * head_dim + 4 * d);
    HR_UNROLL for (int c = 0; c < DC; ++c) {
      const Bytes v = load_bytes(row + 64 * c);
      HR_UNROLL for (int i = 0; i < NQ; ++i) {
        coarse[i][c] = dot_s8(coarse[i][c], v, weights[i].coarse + t);
        fine[i][c] = dot_s8(fine[i][c], v, weights[i].fine + t);
      }
    }
  }
  HR_UNROLL for (int i = 0; i < NQ; ++i) {
    const Vec step = set1(weights[i].step), steps = set1(kFineValues);
    HR_UNROLL for (int c = 0; c < DC; ++c) {
      float* out = acc[i] + d + 16 * c;
      store(out, fma(fma(to_float(coarse[i][c]), steps, to_float(fine[i][c])), step, load(out)));
    }
  }
}

struct Int8 {
  static constexpr KvFormat kFormat = KvFormat::kInt8;
  using Query = Int8Query;

  static Query prepare(const float* vector, int head_dim, float* scratch) {
    const int padded = (head_dim + 15) / 16 * 16;
    int8_t* coarse = reinterpret_cast<int8_t*>(scratch);
    int8_t* fine = coarse + padded;
    float tail[16] = {};
    for (int i = 0; i < head_dim % 16; ++i) tail[i] = vector[head_dim / 16 * 16 + i];
    const auto part = [&](int d) { return load(d + 16 <= head_dim ? vector + d : tail); };
    IVec top_bits = izero();
    for (int d = 0; d < head_dim; d += 16) top_bits = max(top_bits, magnitude_bits(part(d)));
    const int32_t bits = reduce_max(top_bits);
    float top;
    std::memcpy(&top, &bits, sizeof top);
    const bool counts = top > kSmallest;
    const Vec inverse = set1(counts ? kQueryDigit / top : 0.0f), steps = set1(kFineKeys);
    int32_t coarse_sum = 0, fine_sum = 0;
    for (int d = 0; d < head_dim; d += 16) {
      const Vec y = mul(part(d), inverse);
      const IVec whole = round_to_int(y);
      coarse_sum += store_s8(coarse + d, whole);
      fine_sum += store_s8(fine + d, round_to_int(mul(sub(y, to_float(whole)), steps)));
    }
    const float scale = (counts ? top / kQueryDigit / kFineKeys : 0.0f) + (top - top);  // NaN unless finite
    return {coarse, fine, scale, -128 * coarse_sum, -128 * fine_sum};
  }

  static constexpr int kTogether = kVectors;

  HR_INLINE void attend_some(const Query* q, int count, const Tile& kv, const int* begin, const int* end,
                             float softcap, State s, int first_vector, int head_dim) {
    attend_few<Int8>(q, count, kv, begin, end, softcap, s, first_vector, head_dim);
  }

  template <int NQ>
  HR_INLINE void attend_tile(const Query* q, const Tile& kv, const int* begin, const int* end, float softcap,
                             State s, int first_vector, int head_dim) {
    const int blocks = kv.blocks;
    // As many accumulators as there are registers for.
    constexpr int NB = NQ <= 2 ? 4 : 2, DC = NQ <= 2 ? 4 : 2;
    const int padded = (head_dim + 15) / 16 * 16;
    alignas(64) float scores[NQ][kTile];
    Weights weights[NQ];
    int b = 0;
    for (; kv.near && b + NB <= blocks; b += NB) {
      kv.ask_ahead(NB);
      score_blocks<NQ, NB>(q, kv.keys, head_dim, scores, b);
    }
    for (; b < blocks; ++b) {
      kv.ask_ahead(1);
      score_blocks<NQ, 1>(q, kv.keys, head_dim, scores, b);
    }
    for (; b < kTileBlocks; ++b)
      for (int i = 0; i < NQ; ++i) store(scores[i] + 16 * b, zero());
    int from = kTile, to = 0;
    float* acc[NQ];
    for (int i = 0; i < NQ; ++i) {
      soften(scores[i], kv.values, blocks, head_dim, weights[i], begin[i], end[i], softcap, s,
             first_vector + i, padded);
      acc[i] = s.acc + static_cast<size_t>(first_vector + i) * padded;
      if (begin[i] >= end[i]) continue;
      from = begin[i] < from ? begin[i] : from;
      to = end[i] > to ? end[i] : to;
    }
    int d = 0;
    for (; d + 16 * DC <= padded; d += 16 * DC)
      weigh_values<NQ, DC>(acc, weights, kv.values, head_dim, d, from, to);
    for (; d < padded; d += 16) weigh_values<NQ, 1>(acc, weights, kv.values, head_dim, d, from, to);
  }
};

}  // namespace

void attention_int8(const AttentionArgs& a) { attend<Int8>(a); }

}  // namespace HR_ISA
}  // namespace headrace
