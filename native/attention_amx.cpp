// Attention over keys and values in bf16 on AMX: up to sixteen query vectors at once. A block's keys lie as
// the second operand of a product of matrices wants them, and so do its values, eight pairs of slots.
#include "attend_bf16.h"
#include "tiles.h"

namespace headrace {
namespace avx512_bf16 {
void attention(const AttentionArgs&);
}

namespace HR_ISA {
namespace {

constexpr int kTileVectors = 16;
constexpr int kBlockPairs = 8;
constexpr int kMostHeadDim = 256;

// Tile registers: 0 ... 3 sums; 4 and 5 a factor and what it is multiplied with, 32 along the sum; 6 and 7
// the same of 16.
HR_INLINE TileShape shape_of(int tile, int vectors) {
  if (tile < 4 || tile == 4) return {vectors, 64};
  return tile == 5 ? TileShape{16, 64} : tile == 6 ? TileShape{vectors, 32} : TileShape{kBlockPairs, 64};
}

// Adds to the scores of 1 or 4 blocks what the features from q on give; keys lie `at` bytes into their
// blocks.
template <int NB, int X, int W>
HR_INLINE void add_scores(const Factor* q, size_t stride, const uint8_t* const* keys, int at) {
  load_tile<X>(q, stride);
  load_tile<W>(keys[0] + at, 64);
  add_bf16<0, X, W>();
  if constexpr (NB == 4) {
    load_tile<W>(keys[1] + at, 64);
    add_bf16<1, X, W>();
    load_tile<W>(keys[2] + at, 64);
    add_bf16<2, X, W>();
    load_tile<W>(keys[3] + at, 64);
    add_bf16<3, X, W>();
  }
}

// The scores of 16 slots for each of 1 or 4 blocks: [vectors][kTile] from scores on.
template <int NB>
HR_INLINE void score_blocks(const Factor* q, size_t stride, const uint8_t* const* keys, int head_dim,
                            float* scores) {
  constexpr size_t kRow = kTile * sizeof(float);
  zero_tile<0>();
  if constexpr (NB == 4) {
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
  }
  int d = 0;
  for (; d + 32 <= head_dim; d += 32) add_scores<NB, 4, 5>(q + d, stride, keys, 32 * d);
  if (d < head_dim) add_scores<NB, 6, 7>(q + d, stride, keys, 32 * d);
  store_tile<0>(scores, kRow);
  if constexpr (NB == 4) {
    store_tile<1>(scores + 16, kRow);
    store_tile<2>(scores + 32, kRow);
    store_tile<3>(scores + 48, kRow);
  }
}

// A block's keys or values, for the second cache.
HR_INLINE void ask_for(const uint8_t* p, int head_dim) {
  for (int i = 0; i < 32 * head_dim; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// Adds weighted values of blocks [from, to), 16 slots at a time, to features [d, d + 16 NT) of all vectors.
template <int NT>
HR_INLINE void weigh_values(float* acc, size_t acc_stride, const Factor (*weights)[kTile],
                            const uint8_t* const* values, size_t value_stride, int d, int from, int to) {
  load_tile<0>(acc + d, acc_stride);
  if constexpr (NT > 1) {
    load_tile<1>(acc + d + 16, acc_stride);
    load_tile<2>(acc + d + 32, acc_stride);
    load_tile<3>(acc + d + 48, acc_stride);
  }
  for (int b = from; b < to; ++b) {
    const uint8_t* v = values[b] + d * 4;
    load_tile<6>(weights[0] + 16 * b, kTile * sizeof(Factor));
    load_tile<7>(v, value_stride);
    add_bf16<0, 6, 7>();
    if constexpr (NT > 1) {
      load_tile<7>(v + 64, value_stride);
      add_bf16<1, 6, 7>();
      load_tile<7>(v + 128, value_stride);
      add_bf16<2, 6, 7>();
      load_tile<7>(v + 192, value_stride);
      add_bf16<3, 6, 7>();
    }
  }
  store_tile<0>(acc + d, acc_stride);
  if constexpr (NT > 1) {
    store_tile<1>(acc + d + 16, acc_stride);
    store_tile<2>(acc + d + 32, acc_stride);
    store_tile<3>(acc + d + 48, acc_stride);
  }
}

HR_INLINE void weigh(float* acc, const Factor (*weights)[kTile], const uint8_t* const* values, int head_dim,
                     int from, int to) {
  const size_t acc_stride = static_cast<size_t>(head_dim) * sizeof(float),
               value_stride = 4 * static_cast<size_t>(head_dim);
  int d = 0;
  for (; d + 64 <= head_dim; d += 64)
    weigh_values<4>(acc, acc_stride, weights, values, value_stride, d, from, to);
  for (; d < head_dim; d += 16) weigh_values<1>(acc, acc_stride, weights, values, value_stride, d, from, to);
}

// A block's values with zeros for all slots but [begin, end), which are counted from the block on.
HR_INLINE void copy_seen(const uint8_t* values, int head_dim, int begin, int end, uint8_t* out) {
  for (int pair = 0; pair < kBlockPairs; ++pair) {
    const int t = 2 * pair;
    const uint32_t mask =
        (t >= begin && t < end ? kEvenHalf : 0) | (t + 1 >= begin && t + 1 < end ? kOddHalf : 0);
    const uint16_t* from =
        reinterpret_cast<const uint16_t*>(values) + static_cast<size_t>(pair) * 2 * head_dim;
    uint16_t* to = reinterpret_cast<uint16_t*>(out) + static_cast<size_t>(pair) * 2 * head_dim;
    for (int d = 0; d < head_dim; d += 16) store_pairs(to + 2 * d, keep_half(load_pairs(from + 2 * d), mask));
  }
}

HR_INLINE bool all_finite(const uint8_t* values, int head_dim) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __mmask32 found = 0;
  for (int i = 0; i < kBlockPairs * head_dim * 4; i += 64) {
    const __m512i pairs = _mm512_loadu_si512(values + i);
    found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(pairs, exponent), exponent);
  }
  return found == 0;
}

struct Amx {
  static constexpr int kTogether = kTileVectors;
  using Query = const Factor*;

  static Query prepare(const float* vector, int head_dim, float* scratch) {
    return prepare_factors(vector, head_dim, scratch);
  }

  static void attend_some(const Query* q, int count, const Tile& kv, const int* begin, const int* end,
                          float softcap, State s, int first_vector, int head_dim) {
    alignas(64) float scores[kTileVectors][kTile];
    alignas(64) Factor weights[kTileVectors][kTile];
    const size_t query_stride = static_cast<size_t>(head_dim) * sizeof(float);
    int b = 0;
    for (; kv.near && b + 4 <= kv.blocks; b += 4) {
      kv.ask_ahead(4);
      score_blocks<4>(q[0], query_stride, kv.keys + b, head_dim, scores[0] + 16 * b);
    }
    for (; b < kv.blocks; ++b) {
      kv.ask_ahead(1);
      if (!kv.near) ask_for(kv.values[b], head_dim);
      score_blocks<1>(q[0], query_stride, kv.keys + b, head_dim, scores[0] + 16 * b);
    }
    for (; b < kTileBlocks; ++b)
      for (int i = 0; i < count; ++i) store(scores[i] + 16 * b, zero());
    // What any of the vectors sees, and what all of them see.
    int from = kTile, to = 0, all_from = 0, all_to = kTile;
    for (int i = 0; i < count; ++i) {
      if (begin[i] >= end[i]) {
        std::memset(weights[i], 0, sizeof weights[i]);
        all_to = 0;
        continue;
      }
      soften(scores[i], weights[i], begin[i], end[i], softcap, s, first_vector + i, head_dim);
      // what it does not see weighs nearly nothing so far
      std::memset(weights[i], 0, static_cast<size_t>(begin[i]) * sizeof(Factor));
      std::memset(weights[i] + end[i], 0, static_cast<size_t>(kTile - end[i]) * sizeof(Factor));
      from = begin[i] < from ? begin[i] : from;
      to = end[i] > to ? end[i] : to;
      all_from = begin[i] > all_from ? begin[i] : all_from;
      all_to = end[i] < all_to ? end[i] : all_to;
    }
    if (from >= to) return;
    // Nobody sees what lies beyond [from, to), which may be anything: it is left out. What only some see is
    // multiplied with zeros for the others, which is nothing unless it is infinite or NaN.
    alignas(64) uint8_t edges[2][kBlockPairs * kMostHeadDim * 4];
    const uint8_t* values[kTileBlocks];
    const int first = from / 16, last = (to + 15) / 16;
    bool finite = true;
    for (b = first; b < last; ++b) {
      values[b] = kv.values[b];
      if (16 * b < from || 16 * b + 16 > to) {
        uint8_t* edge = edges[b == first ? 0 : 1];
        copy_seen(kv.values[b], head_dim, from - 16 * b, to - 16 * b, edge);
        values[b] = edge;
      }
      if (16 * b < all_from || 16 * b + 16 > all_to) finite = finite && all_finite(values[b], head_dim);
    }
    float* acc = s.acc + static_cast<size_t>(first_vector) * head_dim;
    if (finite) {
      weigh(acc, weights, values, head_dim, first, last);
    } else {
      weigh_each(acc, weights, kv.values, head_dim, begin, end, count);
    }
  }

  // Every vector by itself, with zeros for what it does not see.
  static __attribute__((noinline)) void weigh_each(float* acc, const Factor (*weights)[kTile],
                                                   const uint8_t* const* all, int head_dim, const int* begin,
                                                   const int* end, int count) {
    alignas(64) float sums[kTileVectors * kMostHeadDim];
    alignas(64) uint8_t edges[2][kBlockPairs * kMostHeadDim * 4];
    const size_t row = static_cast<size_t>(head_dim) * sizeof(float);
    for (int i = 0; i < count; ++i) {
      if (begin[i] >= end[i]) continue;
      std::memcpy(sums, acc, static_cast<size_t>(count) * row);
      const uint8_t* values[kTileBlocks];
      const int first = begin[i] / 16, last = (end[i] + 15) / 16;
      for (int b = first; b < last; ++b) {
        values[b] = all[b];
        if (16 * b >= begin[i] && 16 * b + 16 <= end[i]) continue;
        uint8_t* edge = edges[b == first ? 0 : 1];
        copy_seen(all[b], head_dim, begin[i] - 16 * b, end[i] - 16 * b, edge);
        values[b] = edge;
      }
      weigh(sums, weights, values, head_dim, first, last);
      std::memcpy(acc + static_cast<size_t>(i) * head_dim, sums + static_cast<size_t>(i) * head_dim, row);
    }
  }
};

}  // namespace

void attention(const AttentionArgs& a) {
  const int vectors = vectors_of(a);
  // A matter of the model's shape, so that all of its rows go the same way.
  if (a.heads / a.kv_heads > kTileVectors || a.head_dim % 16 != 0 || a.head_dim > kMostHeadDim)
    return avx512_bf16::attention(a);
  const Tiles tiles({shape_of(0, vectors), shape_of(1, vectors), shape_of(2, vectors), shape_of(3, vectors),
                     shape_of(4, vectors), shape_of(5, vectors), shape_of(6, vectors), shape_of(7, vectors)});
  attend<Amx>(a);
}

}  // namespace HR_ISA
}  // namespace headrace
