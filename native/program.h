// A recorded step: instructions whose operands are offsets from a table of bases, so that weights, scratch
// and KV can move or be resized by binding new bases. Running it calls no Python and allocates nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace headrace {

constexpr int kMaxThreads = 256;

enum Base : int32_t { kWeights = 0, kScratch = 1, kKv = 2 };  // kKv + g: KV group g

enum Op : int32_t {
  kEmbed = 0,   // weight: table; out: rows; format, i0 = width, i1 = padded, i2 = by position, i3 = add
  kAngles = 1,  // weight: double frequencies[i0 / 2]; out: rows of cos, sin; i0 = rope dim; f0 = factor
  kNorm = 2,    // in, weight, weight2 = bias, out, out2 = quantised; i0 = width, i1 = layer norm, i2 = gather
                // logit rows, i3 = add
  kQuantise = 3,   // in, out; i0 = width
  kMatmul = 4,     // in, weight, out, weight2 = bias; format, i0 = n, i1 = k (padded), i2 = add
  kRope = 5,       // out = projected q, k, v (in place), weight = q norm, weight2 = k norm, in = angles, kv;
                   // i0 = rope dim, i1 = KV format
  kAttention = 6,  // in = q, out; kv; i0 = the whole sequence, which is in this step, instead of causal;
                   // i1 = KV format
  kGlu = 7,        // in, out, out2 = quantised; i0 = width, i1 = up offset (0: no up), i2 = activation
  kSoftcap = 8,    // out; i0 = width; f0 = cap
  kSample = 9,     // in = logits
  kPool = 10,      // in, out: one row per sequence; i0 = width, i1 = mean, i2 = normalise
  kReorder = 11,   // in, weight: int32 order[i0], out[i] = in[order[i]]; i0 = width
  kOpCount = 12
};

struct Operand {
  int32_t base = -1;  // -1 = absent
  int32_t unused = 0;
  int64_t offset = 0;  // bytes
};

struct Instruction {  // mirrored by headrace/backend/cpu/instruction.py, sizes compared when the module loads
  int32_t op = 0;
  int32_t logit_rows = 0;  // 0 = one row per token, 1 = one row per logit row
  int32_t barrier = 1;     // 1 = all threads finish it before the next instruction starts
  int32_t kv_group = 0;
  Operand in, out, out2, weight, weight2;
  int64_t in_stride = 0;   // bytes between rows of in
  int64_t out_stride = 0;  // bytes between rows of out
  int64_t kv_offset = 0;   // bytes that a block's parts of the layers before take
  WeightFormat format{};
  int32_t i0 = 0, i1 = 0, i2 = 0, i3 = 0;
  int32_t heads = 0, kv_heads = 0, head_dim = 0, window = 0;
  int32_t q_offset = 0, k_offset = 0, v_offset = 0;  // floats
  float f0 = 0, f1 = 0;
  int32_t unused = 0;
};

struct Limits {
  int32_t max_tokens, max_sequences, max_logit_rows, max_positions, vocab, kv_groups;
  std::vector<int64_t> block_bytes;  // per KV group
};

struct BatchView {
  int32_t tokens, sequences, logit_rows;
  const int32_t* token_ids;
  const int32_t* positions;
  const int32_t* query_start;
  const int32_t* context_len;
  const int32_t* logit_row_ids;
  std::vector<const int32_t*> slot_mapping;  // per group
  std::vector<const int32_t*> block_tables;
  std::vector<int32_t> table_widths;
  SamplingArrays sampling;
};

struct ResultView {
  int32_t* token_ids;
  float* logprobs;
  int32_t* top_ids;  // [logit_rows, top_width]
  float* top_logprobs;
  int32_t top_width;
  uint8_t* failed;
};

class Program {
 public:
  // Throws std::invalid_argument when the limits or an instruction are malformed.
  Program(std::vector<Instruction> instructions, Limits limits, const Kernels& kernels, int threads);
  // Throws std::invalid_argument when an operand would reach outside its base.
  void bind(std::vector<uint8_t*> bases, std::vector<int64_t> sizes);
  // Throws std::invalid_argument when the batch points outside the limits; nothing has run then.
  void run(const BatchView& batch, const ResultView& result);
  int threads() const { return pool_.threads(); }
  int vocab() const { return limits_.vocab; }
  const Kernels& kernels() const { return kernels_; }
  // Seconds spent in each instruction since the last call, on the calling thread, barriers included; zeros
  // unless enabled.
  void set_profiling(bool on) { profiling_ = on; }
  std::vector<double> take_profile();

 private:
  using Unit = AttentionUnit;
  struct Tiles {  // how a matrix is divided: chunks of so many tiles
    int chunk, chunks;
  };
  struct Partitions {  // of the context that a unit sees
    int first, count;
    size_t state_floats;
  };
  struct Ahead {  // weights of a matmul that a thread will read, not asked for yet; whole cache lines
    size_t matmul;
    const uint8_t *next, *end;
    bool ask(size_t bytes);
  };
  struct alignas(64) Claim {
    std::atomic<int32_t> next{0};
  };

  // program_check.cpp; all throw std::invalid_argument.
  static Limits checked(Limits limits, int threads);
  void check_instruction(const Instruction& in) const;
  void check_operands(const Instruction& in, const std::vector<int64_t>& sizes) const;
  void check_batch(const BatchView& batch) const;
  void plan_units(const BatchView& batch);
  Tiles tiles_of(const Instruction& in) const;
  void execute(int thread, const BatchView& batch, const ResultView& result);
  void step(const Instruction& in, size_t index, int thread, const BatchView& batch,
            const ResultView& result);
  template <class Time>
  void run_rows(size_t first, int thread, const BatchView& batch, Time time);
  void rows_of(const Instruction& in, int begin, int end, const BatchView& batch);
  MatmulArgs matmul_args(const Instruction& in, int thread);
  void matmul(const Instruction& in, Claim* claims, int thread, int rows);
  Ahead weights_ahead(size_t index, int thread, const BatchView& batch) const;
  void attention(const Instruction& in, Claim* claims, int thread, const BatchView& batch);
  Partitions partitions(const Instruction& in, const Unit& unit, const BatchView& batch) const;
  bool splits(const Instruction& in, const std::vector<Unit>& units, const BatchView& batch) const;
  void pool(const Instruction& in, Claim& claim, const BatchView& batch);
  void sample(const Instruction& in, Claim& claim, int thread, const BatchView& batch,
              const ResultView& result);
  int64_t blocks(int group) const { return (sizes_[kKv + group] - 64) / limits_.block_bytes[group]; }
  uint8_t* layer_kv(const Instruction& in) const;
  uint8_t* at(const Operand& o) const { return o.base < 0 ? nullptr : bases_[o.base] + o.offset; }

  std::vector<Instruction> instructions_;
  Limits limits_;
  const Kernels& kernels_;
  Pool pool_;
  Barrier barrier_;
  std::vector<uint8_t*> bases_;
  std::vector<int64_t> sizes_;
  std::unique_ptr<Claim[]> claims_;            // per instruction, one a thread; only matmuls use them all
  std::unique_ptr<float[]> partition_states_;  // when contexts are split between threads
  std::unique_ptr<Claim[]> partitions_ended_;  // of each unit and head; zero between instructions
  std::vector<std::vector<Unit>> units_;       // per distinct rows-per-unit
  std::vector<int> unit_rows_;                 // rows-per-unit of units_[i]
  std::vector<std::vector<float>> scratch_;    // per thread, of one kernel call
  std::vector<std::vector<uint8_t>> sampler_;  // per thread
  std::vector<size_t> next_matmul_;            // behind each instruction; their number if there is none
  std::vector<size_t> row_run_;                // so many instructions from each on take rows by themselves
  bool profiling_ = false;
  std::vector<double> profile_;
};

}  // namespace headrace
