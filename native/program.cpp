#include "program.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>

namespace headrace {
namespace {

constexpr int kRowBlock = 96;  // rows of activations that stay in cache while weights stream past

[[noreturn]] void reject(const std::string& what) { throw std::invalid_argument(what); }

int64_t matmul_bytes(const WeightFormat& f, int64_t n, int64_t k) {
  const int64_t tiles = (n + 15) / 16;
  if (f.dense()) return tiles * 16 * k * (f.kind == WeightFormat::kF32 ? 4 : 2);
  return tiles * (k / 32) * static_cast<int64_t>(f.tile_bytes());
}

void check_format(const WeightFormat& f) {
  if (f.kind < WeightFormat::kU4 || f.kind > WeightFormat::kF32) reject("unknown weight format");
  if (f.dense()) return;
  if ((f.scale_bytes != 2 && f.scale_bytes != 4) || (f.group != 16 && f.group != 32))
    reject("malformed weight format");
  if (f.kind == WeightFormat::kU4 && f.group != 32) reject("4-bit codes come in groups of 32");
  if (f.zero_point < 0 || f.zero_point > 255) reject("zero point outside of 0..255");
}

}  // namespace

Program::Program(std::vector<Instruction> instructions, Limits limits, const Kernels& kernels, int threads)
    : instructions_(std::move(instructions)),
      limits_(std::move(limits)),
      kernels_(kernels),
      pool_(threads),
      barrier_(threads),
      claims_(new Claim[instructions_.size()]) {
  int largest_head = 16;
  for (const Instruction& in : instructions_) {
    if (in.op < 0 || in.op >= kOpCount) reject("unknown instruction");
    if (in.kv_group < 0 || in.kv_group >= limits_.kv_groups)
      reject("instruction names a KV group that is not there");
    if (in.op == kMatmul || in.op == kEmbed) check_format(in.format);
    if (in.op == kMatmul && !in.format.dense() && in.i1 % 32 != 0)
      reject("quantised inputs must be padded to 32");
    if (in.op == kAttention || in.op == kRope) {
      if (in.heads < 1 || in.kv_heads < 1 || in.head_dim < 1 || in.heads % in.kv_heads != 0)
        reject("malformed heads");
      if (in.head_dim % 2 != 0) reject("an odd head_dim");
      if (in.heads / in.kv_heads > kMaxQueryVectors) reject("more than 64 query heads per KV head");
      const int64_t part = in.kv_offset + int64_t{4} * 16 * in.kv_heads * in.head_dim;
      if (in.kv_offset < 0 || part > limits_.block_bytes[in.kv_group])
        reject("layer lies outside of its KV block");
      largest_head = std::max(largest_head, (in.head_dim + 15) / 16 * 16);
    }
    if (in.op == kAttention) {
      const int rows = attention_rows_per_unit(in.heads / in.kv_heads);
      if (std::find(unit_rows_.begin(), unit_rows_.end(), rows) == unit_rows_.end())
        unit_rows_.push_back(rows);
    }
  }
  units_.resize(unit_rows_.size());
  for (auto& units : units_) units.reserve(static_cast<size_t>(limits_.max_tokens));
  for (int t = 0; t < threads; ++t) {
    scratch_.emplace_back(attention_scratch_floats(largest_head));
    sampler_.emplace_back(sampler_workspace_bytes(limits_.vocab) + 64);
  }
  profile_.assign(kOpCount, 0.0);
}

void Program::bind(std::vector<uint8_t*> bases, std::vector<int64_t> sizes) {
  if (bases.size() != sizes.size() || bases.size() != static_cast<size_t>(kKv + limits_.kv_groups))
    reject("bases: expected weights, scratch and one per KV group");
  const auto check = [&](const Operand& o, int64_t bytes, const char* what) {
    if (o.base < 0) return;
    if (o.base >= kKv || o.offset < 0 || bytes < 0 || o.offset > sizes[o.base] ||
        bytes > sizes[o.base] - o.offset)
      reject(std::string("operand outside of its base: ") + what);
  };
  for (const Instruction& in : instructions_) {
    const int64_t rows = in.logit_rows ? limits_.max_logit_rows : limits_.max_tokens;
    const int64_t out_rows = in.op == kPool ? limits_.max_sequences : rows;
    const auto require = [&](const Operand& o, const char* what) {
      if (o.base < 0) reject(std::string("missing operand: ") + what);
    };
    if (in.op != kSoftcap && in.op != kRope && in.op != kEmbed && in.op != kAngles) require(in.in, "in");
    if (in.op != kSample) require(in.out, "out");
    if (in.op == kEmbed || in.op == kAngles || in.op == kNorm || in.op == kMatmul)
      require(in.weight, "weight");
    check(in.in, in.in_stride * (in.op == kNorm && in.i2 ? int64_t{limits_.max_tokens} : rows), "in");
    check(in.out, in.out_stride * out_rows, "out");
    if (in.op == kPool && int64_t{in.i0} * 4 > std::min(in.in_stride, in.out_stride))
      reject("pooled rows are wider than their buffers");
    if (in.op == kEmbed)
      check(in.weight, matmul_bytes(in.format, in.i2 ? limits_.max_positions : limits_.vocab, in.i1),
            "embedding");
    if (in.op == kMatmul) {
      check(in.weight, matmul_bytes(in.format, in.i0, in.i1), "matrix");
      check(in.weight2, int64_t{in.i0} * 4, "bias");
    }
    if (in.op == kNorm) {
      check(in.weight, int64_t{in.i0} * 4, "norm");
      check(in.weight2, int64_t{in.i0} * 4, "norm bias");
    }
    if (in.op == kAngles) check(in.weight, int64_t{in.i0} * 4, "frequencies");
    if (in.op == kRope) {
      check(in.weight, int64_t{in.head_dim} * 4, "q norm");
      check(in.weight2, int64_t{in.head_dim} * 4, "k norm");
    }
    if (in.op == kNorm || in.op == kGlu)
      check(in.out2, static_cast<int64_t>(QuantRow::bytes((in.i0 + 31) / 32 * 32)) * rows, "quantised");
  }
  bases_ = std::move(bases);
  sizes_ = std::move(sizes);
}

void Program::check_batch(const BatchView& b) const {
  if (bases_.empty()) reject("the program has no bases bound");
  if (b.tokens < 1 || b.tokens > limits_.max_tokens) reject("batch: number of tokens outside of the limits");
  if (b.sequences < 1 || b.sequences > limits_.max_sequences)
    reject("batch: number of sequences outside of the limits");
  if (b.logit_rows < 0 || b.logit_rows > limits_.max_logit_rows) reject("batch: too many logit rows");
  if (b.query_start[0] != 0 || b.query_start[b.sequences] != b.tokens)
    reject("batch: query_start does not cover the tokens");
  for (int i = 0; i < b.tokens; ++i) {
    if (b.token_ids[i] < 0 || b.token_ids[i] >= limits_.vocab)
      reject("batch: token id outside of the vocabulary");
    if (b.positions[i] < 0 || b.positions[i] >= limits_.max_positions)
      reject("batch: position outside of the context");
  }
  for (int i = 0; i < b.logit_rows; ++i)
    if (b.logit_row_ids[i] < 0 || b.logit_row_ids[i] >= b.tokens)
      reject("batch: logit row is not one of the tokens");
  for (int g = 0; g < limits_.kv_groups; ++g) {
    const int64_t blocks =
        (sizes_[kKv + g] - 64) / limits_.block_bytes[g];  // 64 spare bytes: vector loads may overrun
    for (int i = 0; i < b.tokens; ++i)
      if (b.slot_mapping[g][i] < 0 || b.slot_mapping[g][i] >= blocks * 16)
        reject("batch: slot outside of the KV pool");
    for (int s = 0; s < b.sequences; ++s) {
      const int begin = b.query_start[s], end = b.query_start[s + 1];
      if (begin >= end) reject("batch: a sequence without tokens");
      for (int i = begin + 1; i < end; ++i)
        if (b.positions[i] != b.positions[i - 1] + 1)
          reject("batch: positions of a sequence must be consecutive");
      const int needed = b.positions[end - 1] / 16 + 1;
      if (needed > b.table_widths[g]) reject("batch: block table is too short for its positions");
      const int32_t* table = b.block_tables[g] + static_cast<size_t>(s) * b.table_widths[g];
      for (int i = 0; i < needed; ++i)
        if (table[i] < 0 || table[i] >= blocks) reject("batch: block outside of the KV pool");
    }
  }
  const SamplingArrays& t = b.sampling;
  if (b.logit_rows > 0) {
    if (t.seen_start[0] != 0 || t.bias_start[0] != 0) reject("batch: sampling table offsets must start at 0");
    for (int i = 0; i < b.logit_rows; ++i) {
      if (t.seen_start[i + 1] < t.seen_start[i] || t.bias_start[i + 1] < t.bias_start[i])
        reject("batch: sampling table offsets must ascend");
      for (int j = t.seen_start[i]; j < t.seen_start[i + 1]; ++j)
        if (t.seen_ids[j] < 0 || t.seen_ids[j] >= limits_.vocab)
          reject("batch: seen id outside of the vocabulary");
      for (int j = t.bias_start[i]; j < t.bias_start[i + 1]; ++j)
        if (t.bias_ids[j] < 0 || t.bias_ids[j] >= limits_.vocab)
          reject("batch: bias id outside of the vocabulary");
    }
  }
}

void Program::plan_units(const BatchView& b) {
  for (size_t i = 0; i < units_.size(); ++i) {
    units_[i].clear();
    for (int s = 0; s < b.sequences; ++s)
      for (int row = b.query_start[s]; row < b.query_start[s + 1]; row += unit_rows_[i])
        units_[i].push_back({s, row, std::min(row + unit_rows_[i], b.query_start[s + 1])});
  }
}

void Program::run(const BatchView& batch, const ResultView& result) {
  check_batch(batch);
  plan_units(batch);
  for (size_t i = 0; i < instructions_.size(); ++i) claims_[i].next.store(0, std::memory_order_relaxed);
  const std::function<void(int)> work = [&](int thread) { execute(thread, batch, result); };
  pool_.run(work);
}

void Program::execute(int thread, const BatchView& batch, const ResultView& result) {
  using Clock = std::chrono::steady_clock;
  const bool timed = profiling_ && thread == 0;
  for (size_t i = 0; i < instructions_.size(); ++i) {
    const Clock::time_point start = timed ? Clock::now() : Clock::time_point();
    step(instructions_[i], i, thread, batch, result);
    if (instructions_[i].barrier) barrier_.wait();
    if (timed) profile_[instructions_[i].op] += std::chrono::duration<double>(Clock::now() - start).count();
  }
}

std::vector<double> Program::take_profile() {
  std::vector<double> out(kOpCount, 0.0);
  out.swap(profile_);
  return out;
}

void Program::step(const Instruction& in, size_t index, int thread, const BatchView& b,
                   const ResultView& result) {
  const int rows = in.logit_rows ? b.logit_rows : b.tokens;
  const int threads = pool_.threads();
  const int begin = static_cast<int>(static_cast<int64_t>(rows) * thread / threads);
  const int end = static_cast<int>(static_cast<int64_t>(rows) * (thread + 1) / threads);
  const auto floats = [&](const Operand& o) { return reinterpret_cast<float*>(at(o)); };
  Claim& claim = claims_[index];
  switch (in.op) {
    case kEmbed:
      return kernels_.embed(in.format, at(in.weight), in.i0, in.i1, in.i2 ? b.positions : b.token_ids, in.f0,
                            in.i3 != 0, floats(in.out), in.out_stride / 4, begin, end);
    case kAngles: {
      const double* frequencies = reinterpret_cast<const double*>(at(in.weight));
      const int half = in.i0 / 2;
      for (int row = begin; row < end; ++row) {
        float* out = floats(in.out) + static_cast<size_t>(row) * in.i0;
        for (int i = 0; i < half; ++i) {
          const double angle = b.positions[row] * frequencies[i];
          out[i] = static_cast<float>(std::cos(angle) * in.f0);
          out[half + i] = static_cast<float>(std::sin(angle) * in.f0);
        }
      }
      return;
    }
    case kNorm: {
      NormArgs a{};
      a.input = floats(in.in);
      a.input_stride = in.in_stride / 4;
      a.weight = floats(in.weight);
      a.bias = floats(in.weight2);
      a.gather = in.i2 ? b.logit_row_ids : nullptr;
      a.output = floats(in.out);
      a.output_stride = in.out_stride / 4;
      a.quantised = at(in.out2);
      a.width = in.i0;
      a.layer_norm = in.i1;
      a.add = in.i3;
      a.eps = in.f0;
      return kernels_.norm(a, begin, end);
    }
    case kQuantise:
      return kernels_.quantise(floats(in.in), in.in_stride / 4, at(in.out), in.i0, begin, end);
    case kMatmul:
      return matmul(in, claim, rows);
    case kRope: {
      RopeArgs a{};
      a.qkv = floats(in.out);
      a.stride = in.out_stride / 4;
      a.q_offset = in.q_offset;
      a.k_offset = in.k_offset;
      a.v_offset = in.v_offset;
      a.heads = in.heads;
      a.kv_heads = in.kv_heads;
      a.head_dim = in.head_dim;
      a.rope_dim = in.i0;
      a.q_norm = floats(in.weight);
      a.k_norm = floats(in.weight2);
      a.eps = in.f1;
      a.scale = in.f0;
      a.angles = floats(in.in);
      a.kv = reinterpret_cast<uint16_t*>(bases_[kKv + in.kv_group] + in.kv_offset);
      a.block_stride = static_cast<size_t>(limits_.block_bytes[in.kv_group]) / 2;
      a.slots = b.slot_mapping[in.kv_group];
      return kernels_.rope(a, begin, end);
    }
    case kAttention:
      return attention(in, claim, thread, b);
    case kGlu:
      return kernels_.glu(floats(in.in), in.in_stride / 4, in.i1, in.i2, floats(in.out), in.out_stride / 4,
                          at(in.out2), in.i0, begin, end);
    case kSoftcap:
      for (int row = begin; row < end; ++row)
        kernels_.softcap(floats(in.out) + static_cast<size_t>(row) * (in.out_stride / 4),
                         static_cast<size_t>(in.i0), in.f0);
      return;
    case kSample:
      return sample(in, claim, thread, b, result);
    case kPool:
      return pool(in, claim, b);
    default:
      return;
  }
}

void Program::matmul(const Instruction& in, Claim& claim, int rows) {
  MatmulArgs a{};
  a.format = in.format;
  a.weights = at(in.weight);
  a.input = at(in.in);
  a.input_stride = static_cast<size_t>(in.in_stride);
  a.output = reinterpret_cast<float*>(at(in.out));
  a.output_stride = static_cast<size_t>(in.out_stride) / 4;
  a.bias = reinterpret_cast<const float*>(at(in.weight2));
  a.n = in.i0;
  a.k = in.i1;
  a.add = in.i2;
  const int tiles = (in.i0 + 15) / 16;
  const int chunk = std::clamp(tiles / (pool_.threads() * 6) / 4 * 4, 4, 64);
  const int chunks = (tiles + chunk - 1) / chunk;
  const int blocks = (rows + kRowBlock - 1) / kRowBlock;
  for (int u; (u = claim.next.fetch_add(1, std::memory_order_relaxed)) < chunks * blocks;) {
    const int tile = u % chunks * chunk, row = u / chunks * kRowBlock;
    kernels_.matmul(a, tile, std::min(tile + chunk, tiles), row, std::min(row + kRowBlock, rows));
  }
}

void Program::attention(const Instruction& in, Claim& claim, int thread, const BatchView& b) {
  const int rows = attention_rows_per_unit(in.heads / in.kv_heads);
  const size_t which =
      static_cast<size_t>(std::find(unit_rows_.begin(), unit_rows_.end(), rows) - unit_rows_.begin());
  const std::vector<Unit>& units = units_[which];
  AttentionArgs a{};
  a.q = reinterpret_cast<const float*>(at(in.in)) + in.q_offset;
  a.q_stride = static_cast<size_t>(in.in_stride) / 4;
  a.output = reinterpret_cast<float*>(at(in.out));
  a.output_stride = static_cast<size_t>(in.out_stride) / 4;
  a.kv = reinterpret_cast<const uint16_t*>(bases_[kKv + in.kv_group] + in.kv_offset);
  a.block_stride = static_cast<size_t>(limits_.block_bytes[in.kv_group]) / 2;
  a.positions = b.positions;
  a.heads = in.heads;
  a.kv_heads = in.kv_heads;
  a.head_dim = in.head_dim;
  a.window = in.window;
  a.softcap = in.f0;
  a.scratch = scratch_[static_cast<size_t>(thread)].data();
  const int total = static_cast<int>(units.size()) * in.kv_heads;
  for (int u; (u = claim.next.fetch_add(1, std::memory_order_relaxed)) < total;) {
    const Unit& unit = units[static_cast<size_t>(u / in.kv_heads)];
    a.block_table =
        b.block_tables[in.kv_group] + static_cast<size_t>(unit.sequence) * b.table_widths[in.kv_group];
    a.row_begin = unit.row_begin;
    a.row_end = unit.row_end;
    a.kv_head = u % in.kv_heads;
    a.length = in.i0 ? b.positions[b.query_start[unit.sequence + 1] - 1] + 1 : 0;
    kernels_.attention(a);
  }
}

void Program::pool(const Instruction& in, Claim& claim, const BatchView& b) {
  PoolArgs a{};
  a.input = reinterpret_cast<const float*>(at(in.in));
  a.input_stride = static_cast<size_t>(in.in_stride) / 4;
  a.width = in.i0;
  a.mean = in.i1;
  a.normalise = in.i2;
  for (int s; (s = claim.next.fetch_add(1, std::memory_order_relaxed)) < b.sequences;) {
    a.row_begin = b.query_start[s];
    a.row_end = b.query_start[s + 1];
    a.output = reinterpret_cast<float*>(at(in.out) + static_cast<size_t>(s) * in.out_stride);
    kernels_.pool(a);
  }
}

void Program::sample(const Instruction& in, Claim& claim, int thread, const BatchView& b,
                     const ResultView& result) {
  uint8_t* raw = sampler_[static_cast<size_t>(thread)].data();
  void* workspace = raw + (64 - reinterpret_cast<uintptr_t>(raw) % 64) % 64;
  for (int row; (row = claim.next.fetch_add(1, std::memory_order_relaxed)) < b.logit_rows;) {
    float* logits = reinterpret_cast<float*>(at(in.in) + static_cast<size_t>(row) * in.in_stride);
    const size_t top = static_cast<size_t>(row) * result.top_width;
    SampledRow out{0, NAN, false, result.top_ids + top, result.top_logprobs + top};
    kernels_.sample_row(logits, limits_.vocab, b.sampling.row(row), workspace, &out);
    result.token_ids[row] = out.token_id;
    result.logprobs[row] = out.logprob;
    result.failed[row] = out.failed;
  }
}

}  // namespace headrace
