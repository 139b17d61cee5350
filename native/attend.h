// Grouped-query attention, causal or over the whole sequence, over paged KV, with an online softmax (Milakov
// & Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135): what all KV formats share.
//
// A KV block holds 16 slots and K is stored transposed, so sixteen scores are the sixteen lanes of one
// accumulator and nothing is summed across lanes but the softmax denominator. Contexts are cut at absolute
// positions (tiles of 128, partitions of 512 that start afresh and are merged in order), so a row's bits
// depend neither on the rows computed beside it nor on the way the prompt was chunked.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "simd.h"

namespace headrace {
namespace HR_ISA {
namespace {

constexpr int kTile = 128;
constexpr int kPartition = kAttentionPartition;
constexpr int kTileBlocks = kTile / 16;

struct Tile {  // one KV head's keys and values of some blocks in a row
  const uint8_t* keys[kTileBlocks];
  const uint8_t* values[kTileBlocks];
  int blocks;
  bool near;       // in a cache, as far as one can tell
  KvAhead* ahead;  // or null

  void ask_ahead(int count) const {
    if (ahead) ahead->ask(count);
  }
};

struct State {  // of each query vector: running maximum, denominator, weighted sum of V
  float* largest;
  float* total;
  float* acc;
};

// e^x of x <= 0 within 3e-6 of its value, which is far below what rounding a weight to its format does; about
// 1e-38 below -87. NaN stays NaN. A polynomial of degree four for 2^f, |f| <= 1/2, fitted for the least
// relative error.
HR_INLINE Vec weight_of(Vec x) {
  const Vec y = max(set1(-126.0f), mul(x, set1(1.44269504f)));  // operand order lets NaN through
  const IVec n = round_to_int(y);
  const Vec f = sub(y, to_float(n));
  Vec p = fma(set1(0x1.3997b6p-7f), f, set1(0x1.ca144p-5f));
  p = fma(p, f, set1(0x1.ec06dcp-3f));
  p = fma(p, f, set1(0x1.62e0dcp-1f));
  p = fma(p, f, set1(0x1.ffffe8p-1f));
  return scale_by_power_of_two(p, n);
}

// Caps a tile's scores, hides those outside of [begin, end), and returns the largest so far.
HR_INLINE float cap_and_mask(float* scores, int begin, int end, float softcap, float before) {
  const Vec masked = set1(-INFINITY);
  Vec top = masked;
  if (softcap != 0.0f) {
    for (int b = 0; b < kTileBlocks; ++b)
      store(scores + 16 * b, mul(set1(softcap), tanh(div(load(scores + 16 * b), set1(softcap)))));
  }
  if (begin == 0 && end == kTile) {
    for (int b = 0; b < kTileBlocks; ++b) top = max(top, load(scores + 16 * b));
  } else {
    for (int b = 0; b < kTileBlocks; ++b) {
      const Vec x = keep_lanes(load(scores + 16 * b), begin - 16 * b, end - 16 * b, masked);
      store(scores + 16 * b, x);
      top = max(top, x);
    }
  }
  const float in_tile = reduce_max(top);
  return before > in_tile ? before : in_tile;
}

// Takes a tile's largest score and the sum of its weights into a vector's state.
HR_INLINE void fold_tile(State s, int vector, float largest, float total, int padded) {
  const float before = s.largest[vector];
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

HR_INLINE int vectors_of(const AttentionArgs& a) {
  return (a.row_end - a.row_begin) * (a.heads / a.kv_heads);
}

HR_INLINE State state_at(float* at, int vectors) { return {at, at + vectors, at + 2 * vectors}; }

// The rows' outputs, of what they have seen.
HR_INLINE void write_output(const AttentionArgs& a, State whole) {
  const int group = a.heads / a.kv_heads, padded = (a.head_dim + 15) / 16 * 16;
  for (int v = 0; v < vectors_of(a); ++v) {
    const int row = a.row_begin + v / group;
    float* out = a.output + static_cast<size_t>(row) * a.output_stride +
                 static_cast<size_t>(a.kv_head * group + v % group) * a.head_dim;
    const float* acc = whole.acc + static_cast<size_t>(v) * padded;
    for (int d = 0; d < a.head_dim; ++d) out[d] = acc[d] / whole.total[v];
  }
}

// attend_tile<count> of a Format that has it for each count.
template <class Format>
HR_INLINE void attend_few(const typename Format::Query* q, int count, const Tile& kv, const int* begin,
                          const int* end, float softcap, State s, int first_vector, int head_dim) {
  const auto attend_some = [&](auto size) {
    Format::template attend_tile<size.value>(q, kv, begin, end, softcap, s, first_vector, head_dim);
  };
  if (count == 1) attend_some(std::integral_constant<int, 1>());
  if (count == 2) attend_some(std::integral_constant<int, 2>());
  if (count == 3) attend_some(std::integral_constant<int, 3>());
  if (count == 4) attend_some(std::integral_constant<int, 4>());
}

// Format: a KV format's Query, what it makes of a query vector; prepare, which does; and attend_some for up
// to kTogether of them.
template <class Format>
HR_INLINE void attend(const AttentionArgs& a) {
  const int group = a.heads / a.kv_heads;
  const int vectors = vectors_of(a);
  const int padded = (a.head_dim + 15) / 16 * 16;
  float* scratch = a.scratch;
  typename Format::Query q[kMaxQueryVectors];
  int first[kMaxQueryVectors], last[kMaxQueryVectors];  // absolute positions seen, last inclusive
  int lowest = a.length > 0 ? 0 : a.positions[a.row_begin], highest = 0;
  for (int v = 0; v < vectors; ++v) {
    const int row = a.row_begin + v / group;
    const float* vector = a.q + static_cast<size_t>(row) * a.q_stride +
                          static_cast<size_t>(a.kv_head * group + v % group) * a.head_dim;
    q[v] = Format::prepare(vector, a.head_dim, scratch + static_cast<size_t>(v) * padded);
    last[v] = a.length > 0 ? a.length - 1 : a.positions[row];
    first[v] = a.window > 0 && last[v] >= a.window ? last[v] - a.window + 1 : 0;
    lowest = first[v] < lowest ? first[v] : lowest;
    highest = last[v] > highest ? last[v] : highest;
  }
  scratch += static_cast<size_t>(kMaxQueryVectors) * padded;
  const auto attend_partition = [&](int partition, State part) {
    clear(part, vectors, padded);
    for (int tile = partition; tile < partition + kPartition && tile <= highest; tile += kTile) {
      if (tile + kTile <= lowest) continue;
      Tile kv;
      const int remaining = (highest - tile) / 16 + 1;
      kv.blocks = remaining < kTileBlocks ? remaining : kTileBlocks;
      kv.ahead = vectors > kVectors ? nullptr : a.ahead;
      kv.near = vectors > kVectors || kv.ahead;
      for (int b = 0; b < kv.blocks; ++b) {
        const int32_t block = a.block_table[tile / 16 + b];
        kv.keys[b] = a.kv.keys(a.kv_head, block);
        kv.values[b] = a.kv.values(a.kv_head, block);
      }
      for (int v = 0; v < vectors; v += Format::kTogether) {
        int begin[Format::kTogether], end[Format::kTogether];
        const int count = vectors - v < Format::kTogether ? vectors - v : Format::kTogether;
        for (int i = 0; i < count; ++i) {
          begin[i] = first[v + i] > tile ? first[v + i] - tile : 0;
          end[i] = last[v + i] - tile + 1 < kTile ? last[v + i] - tile + 1 : kTile;
        }
        Format::attend_some(q + v, count, kv, begin, end, a.softcap, part, v, a.head_dim);
      }
    }
  };
  if (a.state) return attend_partition(a.partition * kPartition, state_at(a.state, vectors));
  const State whole = state_at(scratch, vectors);
  const State part = state_at(scratch + attention_state_floats(vectors, padded), vectors);
  clear(whole, vectors, padded);
  for (int partition = lowest / kPartition * kPartition; partition <= highest; partition += kPartition) {
    attend_partition(partition, part);
    merge(whole, part, vectors, padded);
  }
  write_output(a, whole);
}

}  // namespace
}  // namespace HR_ISA
}  // namespace headrace
