// The kernel table: one per ISA path, chosen at run time. Argument structs are plain views; nothing here owns
// memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sampler.h"

namespace headrace {

// Packed weight formats. A tile row is 16 output rows x all inputs. Codes lie in tiles of 16 x 32 inputs; a
// tile is followed by its scales.
//   u4:  4 x 64 bytes; register j, lane n, byte b holds code[n][4j+b] (low nibble) and code[n][16+4j+b]
//   (high) u8:  8 x 64 bytes; register j, lane n, byte b holds code[n][4j+b]
// then 16 scales per 32 (or per 16: two rows) inputs, then as many minimums, or bytes of zero points, when
// the format has them. Where a scale is of a whole row (group 0), 16 floats end the tile row instead.
//   bf16: [k / 2, rounded up][16][2] per tile row, no scales; f32: [k][16].
//   f8:  float8 e4m3, [k][16], then 16 floats: 256 times the scales of the rows.
struct WeightFormat {
  enum Kind : int32_t { kU4 = 0, kU8 = 1, kBf16 = 2, kF32 = 3, kF8 = 4 };
  enum Offsets : int32_t { kNone = 0, kMinimum = 1, kZeroPoints = 2 };
  int32_t kind;
  int32_t scale_bytes;  // 2 (f16) or 4 (f32; always of a whole row's); 0 without scales
  int32_t offsets;      // beside the scales, of each group
  int32_t group;        // inputs that share a scale: 32, 16, or 0 for a whole row's
  int32_t zero_point;   // subtracted from every code, exactly, in integers

  bool dense() const { return kind >= kBf16; }  // multiplied with activations that are not quantised
  size_t tile_bytes() const {                   // 16 outputs x 32 inputs
    if (dense()) return static_cast<size_t>(16) * 32 * (kind == kF32 ? 4 : kind == kBf16 ? 2 : 1);
    const size_t codes = kind == kU4 ? 256 : 512;
    if (group == 0) return codes;
    const size_t scales = static_cast<size_t>(16) * scale_bytes;
    const size_t beside = offsets == kMinimum ? scales : offsets == kZeroPoints ? 16 : 0;
    return codes + (scales + beside) * (32 / group);
  }
  size_t row_bytes(int k) const {  // a tile row; k padded to 32 unless dense
    const size_t row_scales = group == 0 && scale_bytes ? 64 : 0;
    const size_t inputs = static_cast<size_t>(kind == kBf16 ? (k + 1) / 2 * 2 : k);
    return tile_bytes() * inputs / 32 + row_scales;
  }
  size_t matrix_bytes(int64_t n, int k) const { return static_cast<size_t>((n + 15) / 16) * row_bytes(k); }
};

// Quantised activations, one row: int8 q[K], int8 fine[K], float scale[K/32], float scaled_sum[K/32], int32
// sum[K/16], uint8 wide[K/32]. K is padded to a multiple of 32 with zeros.
//
// A group's value is scale * q. The few groups whose step would dominate the row's rounding error (outlier
// channels) are wide: scale * (kWide * q + fine), sixteen bits in two bytes; elsewhere `fine` is zero.
// Sums are those of the whole integer.
struct QuantRow {
  static constexpr int kWide = 254;
  static size_t fine_offset(int k) { return static_cast<size_t>(k); }
  static size_t scale_offset(int k) { return 2 * static_cast<size_t>(k); }
  static size_t scaled_sum_offset(int k) { return scale_offset(k) + static_cast<size_t>(k) / 8; }
  static size_t sum_offset(int k) { return scaled_sum_offset(k) + static_cast<size_t>(k) / 8; }
  static size_t wide_offset(int k) { return sum_offset(k) + static_cast<size_t>(k) / 4; }
  static size_t wide_words(int k) { return (static_cast<size_t>(k) / 32 + 63) / 64; }
  static size_t bytes(int k) { return (wide_offset(k) + 8 * wide_words(k) + 63) / 64 * 64; }
};

struct MatmulArgs {
  WeightFormat format;
  const uint8_t* weights;
  const uint8_t* input;  // QuantRow rows, or float rows for dense formats
  size_t input_stride;   // bytes
  float* output;
  size_t output_stride;  // floats
  const float* bias;     // [n] or null
  int32_t n;             // outputs
  int32_t k;             // inputs, multiple of 32 (dense: exact)
  int32_t add;           // 1 = add to what output holds (the residual stream)
  // matmul_scratch_floats(format, k). Its first number is zero in a thread's first call for a product; what
  // is made of rows may be left there for the next.
  float* scratch;
};

constexpr int kRowBlock = 48;  // rows, at most: they stay in cache while weights stream past
inline size_t matmul_row_floats(int k) { return static_cast<size_t>(kRowBlock) * ((k + 15) / 16 * 16); }
// bf16 and float8: rows, and behind them four tile rows of float8 as bf16. Codes: as matmul_amx.cpp lays it
// out.
inline size_t matmul_scratch_floats(const WeightFormat& format, int k) {
  if (format.kind == WeightFormat::kF32) return 0;
  if (format.dense()) return matmul_row_floats(k) + 64 * static_cast<size_t>(k + 1) / 2;
  return 12 * static_cast<size_t>(k) + 4 * QuantRow::bytes(k) + 512;
}

struct NormArgs {
  const float* input;
  size_t input_stride;  // floats
  const float* weight;
  const float* bias;      // [width] or null
  const int32_t* gather;  // input row of each output row, or null
  float* output;
  size_t output_stride;
  uint8_t* quantised;  // QuantRow rows, or null
  int32_t width;
  int32_t layer_norm;  // 0 = RMS
  int32_t add;         // 1 = output += norm (post-norms)
  float eps;
};

enum class KvFormat : int32_t { kBf16 = 0, kInt8 = 1 };

// A layer's keys and values. Each KV head has its keys of all blocks side by side, and behind all keys its
// values likewise, so that a context of neighbouring blocks is two stretches of memory: processors fetch
// ahead along those, and hardly across pieces that lie apart.
//
// A block of 16 slots, bf16: K as [head_dim / 2][16 slots][2]; V as [8 pairs of slots][head_dim][2].
//
// int8: K, rotated (rope says how), as [head_dim / 4, rounded up][16 slots][4], each byte 128 too large; V as
// [4 fours of slots][head_dim][4]; each with the float scales of its slots behind it. A scale belongs to one
// slot and is fixed when that slot is written.
inline size_t int8_key_codes(int head_dim) { return static_cast<size_t>(16) * ((head_dim + 3) / 4 * 4); }
inline size_t int8_value_codes(int head_dim) { return static_cast<size_t>(16) * head_dim; }
inline size_t kv_key_bytes(KvFormat format, int head_dim) {
  return format == KvFormat::kBf16 ? static_cast<size_t>(32) * head_dim
                                   : int8_key_codes(head_dim) + 16 * sizeof(float);
}
inline size_t kv_value_bytes(KvFormat format, int head_dim) {
  return format == KvFormat::kBf16 ? static_cast<size_t>(32) * head_dim
                                   : int8_value_codes(head_dim) + 16 * sizeof(float);
}
inline size_t kv_head_bytes(KvFormat format, int head_dim) {
  return kv_key_bytes(format, head_dim) + kv_value_bytes(format, head_dim);
}
template <class Byte>
struct KvLayer {
  Byte* base;
  int64_t blocks;  // of the pool
  int32_t kv_heads, head_dim;
  KvFormat format;

  Byte* keys(int head, int64_t block) const {
    return base + (head * blocks + block) * static_cast<int64_t>(kv_key_bytes(format, head_dim));
  }
  Byte* values(int head, int64_t block) const {
    const auto all_keys = kv_heads * blocks * static_cast<int64_t>(kv_key_bytes(format, head_dim));
    return base + all_keys + (head * blocks + block) * static_cast<int64_t>(kv_value_bytes(format, head_dim));
  }
};

struct RopeArgs {  // q/k norm, rotation, scaling of q, and the KV write, for one projected row
  float* qkv;
  size_t stride;  // floats
  int32_t q_offset, k_offset, v_offset;
  int32_t heads, kv_heads, head_dim, rope_dim;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
  float eps;
  float scale;
  const float* angles;  // per token: cos[rope_dim/2], sin[rope_dim/2]; null = no rotation
  KvLayer<uint8_t> kv;  // int8: q is left rotated as K is
  const int32_t* slots;
};

struct AttentionUnit {  // rows of one sequence that one attention call handles
  int32_t sequence, row_begin, row_end;
};

// The blocks that a thread's next units will read, in that order. A sequence's blocks lie where there was
// room, so processors do not see what comes next; asked for some blocks ahead, they are there when they are
// needed. Only units of few query vectors wait for memory.
struct KvAhead {
  KvLayer<const uint8_t> kv;
  const AttentionUnit* units;
  int count;  // of units
  const int32_t* positions;
  const int32_t* block_tables;  // [sequences, table_width]
  int32_t table_width, window, most_rows;
  int unit, end;             // of heads times units: all of the first head's first
  int block = 0, last = -1;  // of the unit's context

  // To the next unit at or behind `from` that waits for memory.
  void go(int from) {
    for (unit = from; unit < end; ++unit) {
      const AttentionUnit& u = units[unit % count];
      if (u.row_end - u.row_begin > most_rows) continue;
      const int first = positions[u.row_begin];
      block = (window > 0 && first >= window ? first - window + 1 : 0) / 16;
      last = positions[u.row_end - 1] / 16;
      return;
    }
  }
  void ask(int blocks) {
    for (; blocks > 0 && unit < end; --blocks) {
      const int64_t id =
          block_tables[static_cast<size_t>(units[unit % count].sequence) * table_width + block];
      const int head = unit / count;
      const uint8_t *keys = kv.keys(head, id), *values = kv.values(head, id);
      for (size_t i = 0; i < kv_key_bytes(kv.format, kv.head_dim); i += 64)
        __builtin_prefetch(keys + i, 0, 2);
      for (size_t i = 0; i < kv_value_bytes(kv.format, kv.head_dim); i += 64)
        __builtin_prefetch(values + i, 0, 2);
      if (++block > last) go(unit + 1);
    }
  }
};

struct AttentionArgs {
  const float* q;
  size_t q_stride;  // floats
  float* output;
  size_t output_stride;
  KvLayer<const uint8_t> kv;
  const int32_t* block_table;  // of this sequence
  const int32_t* positions;    // of the rows below
  int32_t row_begin, row_end;  // token rows, all of one sequence
  int32_t heads, kv_heads, head_dim, kv_head;
  int32_t window;  // 0 = all
  int32_t length;  // 0 = causal; else every row sees positions [0, length)
  float softcap;   // 0 = none
  float* scratch;  // attention_scratch_floats(...)
  // Where what one partition of the context gives is left for merge_partitions, and which: or null for all of
  // the context at once, with the same bits.
  float* state;
  int32_t partition;
  KvAhead* ahead;  // or null
};

struct PoolArgs {  // one sequence's rows to one vector
  const float* input;
  size_t input_stride;  // floats
  int32_t row_begin, row_end;
  float* output;
  int32_t width;
  int32_t mean;       // 0 = the first row
  int32_t normalise;  // 1 = to length one
};

// Query vectors that one attention unit keeps in flight: rows x heads per kv head, at most.
constexpr int kMaxQueryVectors = 64;
constexpr int kVectors = 4;  // query vectors computed together
inline int attention_rows_per_unit(int group) { return group >= 16 ? 1 : 16 / group; }
constexpr int kAttentionPartition = 512;  // positions that are summed by themselves, and merged in order
// Of a partition's state. head_dim: rounded up to a multiple of 16, as below.
inline size_t attention_state_floats(int vectors, int head_dim) {
  return static_cast<size_t>(vectors) * static_cast<size_t>(head_dim + 2);
}
inline size_t attention_scratch_floats(int head_dim) {
  return static_cast<size_t>(kMaxQueryVectors) * (3 * static_cast<size_t>(head_dim) + 4);
}

enum class MultiplyKind : int32_t { kInt8 = 0, kBf16 = 1, kFloat = 2, kVectorInt8 = 3 };

struct Kernels {
  const char* name;
  int tile_run;  // tile rows that quant_matmul takes together where rows are many
  void (*quant_matmul)(const MatmulArgs&, int tile_begin, int tile_end, int row_begin, int row_end);
  void (*dense_matmul)(const MatmulArgs&, int tile_begin, int tile_end, int row_begin, int row_end);
  void (*norm)(const NormArgs&, int row_begin, int row_end);
  void (*quantise)(const float* input, size_t stride, uint8_t* output, int width, int row_begin, int row_end);
  // activation(gate) * up over [rows, width]; gate at input, up at input + up_offset (0: no up, just
  // activation(gate))
  void (*glu)(const float* input, size_t stride, int up_offset, int activation, float* output,
              size_t output_stride, uint8_t* quantised, int width, int row_begin, int row_end);
  void (*rope)(const RopeArgs&, int row_begin, int row_end);
  void (*attention)(const AttentionArgs&);                    // over bf16
  void (*attention_int8)(const AttentionArgs&);               // over int8
  void (*merge_partitions)(const AttentionArgs&, int count);  // the states of `count` of them, in order
  void (*embed)(const WeightFormat&, const uint8_t* weights, int k, int padded_k, const int32_t* ids,
                float scale, bool add, float* output, size_t stride, int row_begin, int row_end);
  void (*pool)(const PoolArgs&);
  void (*softcap)(float* x, size_t count, float cap);
  void (*sample_row)(float* logits, int32_t vocab, const SamplingRow& row, void* workspace, SampledRow* out);
  float (*read_lines)(const uint8_t* p, size_t lines);
  int64_t (*multiply)(MultiplyKind kind, int64_t rounds);

  void matmul(const MatmulArgs& a, int tile_begin, int tile_end, int row_begin, int row_end) const {
    (a.format.dense() ? dense_matmul : quant_matmul)(a, tile_begin, tile_end, row_begin, row_end);
  }
};

const Kernels& portable_kernels();
#if defined(HR_X86)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_bf16_kernels();  // avx512 with bf16 dot products
#if defined(HR_AMX)
const Kernels& avx512_amx_kernels();  // avx512_bf16 with matrix registers
#endif
#endif

}  // namespace headrace
