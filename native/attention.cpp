// Grouped-query attention, causal or over the whole sequence, over paged KV, with an online softmax (Milakov
// & Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135).
//
// A KV block holds 16 slots and K is stored transposed, so sixteen scores are the sixteen lanes of one
// accumulator and nothing is summed across lanes but the softmax denominator. Contexts are cut at absolute
// positions (tiles of 128, partitions of 512 that start afresh and are merged in order), so a row's bits
// depend neither on the rows computed beside it nor on the way the prompt was chunked.
#include "kernels.h"
#include "simd.h"

namespace headrace {
namespace HR_ISA {
namespace {

constexpr int kTile = 128;
constexpr int kPartition = 512;
constexpr int kTileBlocks = kTile / 16;
constexpr int kVectors = 4;  // query vectors computed together

struct State {  // of each query vector: running maximum, denominator, weighted sum of V
  float* largest;
  float* total;
  float* acc;
};

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

// Turns one vector's scores into weights and folds them into its state. [begin, end) is what it may see.
HR_INLINE void soften(float* scores, Factor* weights, int begin, int end, float softcap, State s, int vector,
                      int padded) {
  if (begin >= end) return;
  const Vec masked = set1(-INFINITY);
  Vec top = masked;
  for (int b = 0; b < kTileBlocks; ++b) {
    Vec x = load(scores + 16 * b);
    if (softcap != 0.0f) x = mul(set1(softcap), tanh(div(x, set1(softcap))));
    x = keep_lanes(x, begin - 16 * b, end - 16 * b, masked);
    store(scores + 16 * b, x);
    top = max(top, x);
  }
  const float before = s.largest[vector];
  const float in_tile = reduce_max(top);
  const float largest = before > in_tile ? before : in_tile;
  const Vec shift = set1(largest);
  Vec sum = zero();
  for (int b = 0; b < kTileBlocks; ++b) {
    // The denominator sums the weights as they are applied, rounded where the path rounds them.
    sum = add(sum, store_factors(weights + 16 * b, exp(sub(load(scores + 16 * b), shift))));
  }
  float total = reduce_add(sum);
  if (before != largest && s.total[vector] > 0.0f) {
    float t[16];
    store(t, exp(set1(before - largest)));
    float* acc = s.acc + static_cast<size_t>(vector) * padded;
    for (int d = 0; d < padded; d += 16) store(acc + d, mul(load(acc + d), set1(t[0])));
    total += s.total[vector] * t[0];
  } else {
    total += s.total[vector];
  }
  s.largest[vector] = largest;
  s.total[vector] = total;
}

template <int NQ>
HR_INLINE void attend_tile(const Factor* const* q, const uint16_t* const* keys, const uint16_t* const* values,
                           int blocks, const int* begin, const int* end, float softcap, State s,
                           int first_vector, int head_dim, int padded) {
  alignas(64) float scores[NQ][kTile];
  alignas(64) Factor weights[NQ][kTile];
  int b = 0;
  for (; b + 4 <= blocks; b += 4) score_blocks<NQ, 4>(q, keys, head_dim, scores, b);
  for (; b < blocks; ++b) score_blocks<NQ, 1>(q, keys, head_dim, scores, b);
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

HR_INLINE void clear(State s, int vectors, int padded) {
  for (int i = 0; i < vectors; ++i) {
    s.largest[i] = -INFINITY;
    s.total[i] = 0.0f;
  }
  std::memset(s.acc, 0, static_cast<size_t>(vectors) * padded * sizeof(float));
}

HR_INLINE void merge(State into, State from, int vectors, int padded) {
  for (int i = 0; i < vectors; ++i) {
    if (from.total[i] == 0.0f) continue;  // saw nothing (NaN is not skipped)
    float* a = into.acc + static_cast<size_t>(i) * padded;
    const float* b = from.acc + static_cast<size_t>(i) * padded;
    if (into.total[i] == 0.0f) {
      std::memcpy(a, b, static_cast<size_t>(padded) * sizeof(float));
      into.largest[i] = from.largest[i];
      into.total[i] = from.total[i];
      continue;
    }
    const float largest = into.largest[i] > from.largest[i] ? into.largest[i] : from.largest[i];
    float t[16], u[16];
    store(t, exp(set1(into.largest[i] - largest)));
    store(u, exp(set1(from.largest[i] - largest)));
    for (int d = 0; d < padded; d += 16)
      store(a + d, add(mul(load(a + d), set1(t[0])), mul(load(b + d), set1(u[0]))));
    into.total[i] = into.total[i] * t[0] + from.total[i] * u[0];
    into.largest[i] = largest;
  }
}

}  // namespace

void attention(const AttentionArgs& a) {
  const int group = a.heads / a.kv_heads;
  const int rows = a.row_end - a.row_begin;
  const int vectors = rows * group;
  const int padded = (a.head_dim + 15) / 16 * 16;
  float* scratch = a.scratch;
  const Factor* q[kMaxQueryVectors];
  int first[kMaxQueryVectors], last[kMaxQueryVectors];  // absolute positions seen, last inclusive
  int lowest = a.length > 0 ? 0 : a.positions[a.row_begin], highest = 0;
  for (int v = 0; v < vectors; ++v) {
    const int row = a.row_begin + v / group;
    const float* vector = a.q + static_cast<size_t>(row) * a.q_stride +
                          static_cast<size_t>(a.kv_head * group + v % group) * a.head_dim;
    Factor* factors = reinterpret_cast<Factor*>(scratch) + static_cast<size_t>(v) * padded;
    int d = 0;
    for (; d + 16 <= a.head_dim; d += 16) store_factors(factors + d, load(vector + d));
    if (d < a.head_dim) {
      float tail[16] = {};
      std::memcpy(tail, vector + d, static_cast<size_t>(a.head_dim - d) * sizeof(float));
      store_factors(factors + d, load(tail));
    }
    q[v] = factors;
    last[v] = a.length > 0 ? a.length - 1 : a.positions[row];
    first[v] = a.window > 0 && last[v] >= a.window ? last[v] - a.window + 1 : 0;
    lowest = first[v] < lowest ? first[v] : lowest;
    highest = last[v] > highest ? last[v] : highest;
  }
  scratch += static_cast<size_t>(kMaxQueryVectors) * padded;
  const auto state = [&]() {
    State s{scratch, scratch + kMaxQueryVectors, scratch + 2 * kMaxQueryVectors};
    scratch += static_cast<size_t>(kMaxQueryVectors) * (padded + 2);
    return s;
  };
  const State whole = state(), part = state();
  clear(whole, vectors, padded);
  for (int partition = lowest / kPartition * kPartition; partition <= highest; partition += kPartition) {
    clear(part, vectors, padded);
    for (int tile = partition; tile < partition + kPartition && tile <= highest; tile += kTile) {
      if (tile + kTile <= lowest) continue;
      const uint16_t* keys[kTileBlocks];
      const uint16_t* values[kTileBlocks];
      const int remaining = (highest - tile) / 16 + 1;
      const int blocks = remaining < kTileBlocks ? remaining : kTileBlocks;
      for (int b = 0; b < blocks; ++b) {
        const size_t block = static_cast<size_t>(a.block_table[tile / 16 + b]);
        keys[b] = a.kv + block * a.block_stride + static_cast<size_t>(a.kv_head) * 32 * a.head_dim;
        values[b] = keys[b] + static_cast<size_t>(16) * a.head_dim;
      }
      for (int v = 0; v < vectors; v += kVectors) {
        int begin[kVectors], end[kVectors];
        const int count = vectors - v < kVectors ? vectors - v : kVectors;
        for (int i = 0; i < count; ++i) {
          begin[i] = first[v + i] > tile ? first[v + i] - tile : 0;
          end[i] = last[v + i] - tile + 1 < kTile ? last[v + i] - tile + 1 : kTile;
        }
        switch (count) {
          case 1:
            attend_tile<1>(q + v, keys, values, blocks, begin, end, a.softcap, part, v, a.head_dim, padded);
            break;
          case 2:
            attend_tile<2>(q + v, keys, values, blocks, begin, end, a.softcap, part, v, a.head_dim, padded);
            break;
          case 3:
            attend_tile<3>(q + v, keys, values, blocks, begin, end, a.softcap, part, v, a.head_dim, padded);
            break;
          default:
            attend_tile<4>(q + v, keys, values, blocks, begin, end, a.softcap, part, v, a.head_dim, padded);
        }
      }
    }
    merge(whole, part, vectors, padded);
  }
  for (int v = 0; v < vectors; ++v) {
    const int row = a.row_begin + v / group;
    float* out = a.output + static_cast<size_t>(row) * a.output_stride +
                 static_cast<size_t>(a.kv_head * group + v % group) * a.head_dim;
    const float* acc = whole.acc + static_cast<size_t>(v) * padded;
    for (int d = 0; d < a.head_dim; ++d) out[d] = acc[d] / whole.total[v];
  }
}

}  // namespace HR_ISA
}  // namespace headrace
