// Attention over keys and values in bf16.
#include "attend_bf16.h"

namespace headrace {
namespace HR_ISA {
namespace {

template <int NQ, int NB>
HR_INLINE void score_blocks(const Factor* const* q, const uint16_t* const* keys, int head_dim,
                            float (*scores)[kTile], int first_block) {
  Vec acc[NQ][NB];
  HR_UNROLL for (int i = 0; i < NQ; ++i) HR_UNROLL for (int b = 0; b < NB; ++b) acc[i][b] = zero();
  for (int d = 0; d < head_dim; d += 2) {
    HR_UNROLL for (int b = 0; b < NB; ++b) {
      const Pairs k = load_pairs(keys[first_block + b] + d * 16);
      HR_UNROLL for (int i = 0; i < NQ; ++i) acc[i][b] = dot_pairs(acc[i][b], k, q[i] + d);
    }
  }
  HR_UNROLL for (int i = 0; i < NQ; ++i) HR_UNROLL for (int b = 0; b < NB; ++b)
      store(scores[i] + 16 * (first_block + b), acc[i][b]);
}

// Adds the weighted V of slots [begin, end) of a tile. Where an end falls inside a pair of slots, the other
// slot is cleared: its weight is zero, but it may hold anything, and 0 * NaN is NaN.
template <int NQ, int DC>
HR_INLINE void weigh_values(float* const* acc, const Factor (*p)[kTile], const uint16_t* const* values,
                            int head_dim, int d, int begin, int end) {
  Vec a[NQ][DC];
  HR_UNROLL for (int i = 0; i < NQ; ++i) HR_UNROLL for (int c = 0; c < DC; ++c) a[i][c] =
      load(acc[i] + d + 16 * c);
  for (int t = begin & ~1; t < end; t += 2) {
    const uint16_t* row = values[t / 16] + (static_cast<size_t>(t % 16) * head_dim + 2 * d);
    const uint32_t mask = (t >= begin ? kEvenHalf : 0) | (t + 1 < end ? kOddHalf : 0);
    HR_UNROLL for (int c = 0; c < DC; ++c) {
      Pairs v = load_pairs(row + 32 * c);
      if (mask != (kEvenHalf | kOddHalf)) v = keep_half(v, mask);
      HR_UNROLL for (int i = 0; i < NQ; ++i) a[i][c] = dot_pairs(a[i][c], v, p[i] + t);
    }
  }
  HR_UNROLL for (int i = 0; i < NQ; ++i) HR_UNROLL for (int c = 0; c < DC; ++c)
      store(acc[i] + d + 16 * c, a[i][c]);
}

template <int NQ>
inline void weigh(float* const* acc, const Factor (*p)[kTile], const uint16_t* const* values, int head_dim,
                  int padded, int begin, int end) {
  if (begin >= end) return;
  int d = 0;
  for (; d + 64 <= padded; d += 64) weigh_values<NQ, 4>(acc, p, values, head_dim, d, begin, end);
  for (; d < padded; d += 16) weigh_values<NQ, 1>(acc, p, values, head_dim, d, begin, end);
}

struct Bf16 {
  static constexpr KvFormat kFormat = KvFormat::kBf16;
  using Query = const Factor*;  // [head_dim, zeros up to a multiple of 16]

  static constexpr int kTogether = kVectors;

  static Query prepare(const float* vector, int head_dim, float* scratch) {
    return prepare_factors(vector, head_dim, scratch);
  }

  HR_INLINE void attend_some(const Query* q, int count, const Tile& kv, const int* begin, const int* end,
                             float softcap, State s, int first_vector, int head_dim) {
    attend_few<Bf16>(q, count, kv, begin, end, softcap, s, first_vector, head_dim);
  }

  template <int NQ>
  HR_INLINE void attend_tile(const Query* q, const Tile& kv, const int* begin, const int* end, float softcap,
                             State s, int first_vector, int head_dim) {
    const int padded = (head_dim + 15) / 16 * 16, blocks = kv.blocks;
    const uint16_t* keys[kTileBlocks];
    const uint16_t* values[kTileBlocks];
    for (int b = 0; b < blocks; ++b) {
      keys[b] = reinterpret_cast<const uint16_t*>(kv.keys[b]);
      values[b] = reinterpret_cast<const uint16_t*>(kv.values[b]);
    }
    alignas(64) float scores[NQ][kTile];
    alignas(64) Factor weights[NQ][kTile];
    // Four blocks at once keep the multipliers busy; one after the other they are read from memory sooner.
    int b = 0;
    for (; kv.near && b + 4 <= blocks; b += 4) {
      kv.ask_ahead(4);
      score_blocks<NQ, 4>(q, keys, head_dim, scores, b);
    }
    for (; b < blocks; ++b) {
      kv.ask_ahead(1);
      score_blocks<NQ, 1>(q, keys, head_dim, scores, b);
    }
    for (; b < kTileBlocks; ++b)
      for (int i = 0; i < NQ; ++i) store(scores[i] + 16 * b, zero());
    // Each vector adds the values that it sees and no others, in order: what all of them see together, the
    // edges alone. (A weight of zero would not keep a neighbour's NaN out.) Pairs of slots stay whole.
    int from = 0, to = kTile;
    float* acc[NQ];
    for (int i = 0; i < NQ; ++i) {
      soften(scores[i], weights[i], begin[i], end[i], softcap, s, first_vector + i, padded);
      from = begin[i] > from ? begin[i] : from;
      to = end[i] < to ? end[i] : to;
      acc[i] = s.acc + static_cast<size_t>(first_vector + i) * padded;
    }
    from = (from + 1) & ~1;
    to &= ~1;
    if (from >= to) from = to = kTile;
    for (int i = 0; i < NQ; ++i)
      weigh<1>(acc + i, weights + i, values, head_dim, padded, begin[i], end[i] < from ? end[i] : from);
    weigh<NQ>(acc, weights, values, head_dim, padded, from, to);
    for (int i = 0; i < NQ; ++i)
      weigh<1>(acc + i, weights + i, values, head_dim, padded, begin[i] > to ? begin[i] : to, end[i]);
  }
};

}  // namespace

void attention(const AttentionArgs& a) { attend<Bf16>(a); }

void merge_partitions(const AttentionArgs& a, int count) {
  const int vectors = vectors_of(a), padded = (a.head_dim + 15) / 16 * 16;
  const State whole = state_at(a.scratch, vectors);
  clear(whole, vectors, padded);
  for (int i = 0; i < count; ++i)
    merge(whole, state_at(a.state + i * attention_state_floats(vectors, padded), vectors), vectors, padded);
  write_output(a, whole);
}

}  // namespace HR_ISA
}  // namespace headrace
