#include "program.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <stdexcept>

namespace headrace {
namespace {

constexpr int kFewRows = 16;  // so few that a matrix takes longer to read than to multiply
constexpr size_t kWarmBytes = 8192;
constexpr size_t kAheadBytes = size_t{1} << 18;  // of a second-level cache
constexpr int kFewUnits = 8;  // of attention, for each thread: with more, all threads are busy to the end
constexpr int kBlocksAhead = 4;
constexpr size_t kStateFloats = size_t{1} << 20;  // for the states of partitions

struct Range {
  int begin, end;
};

// What is thread's of count things.
Range share(int count, int thread, int threads) {
  const int64_t all = count;
  return {static_cast<int>(all * thread / threads), static_cast<int>(all * (thread + 1) / threads)};
}

// Whether an instruction takes every token's row by itself.
bool by_row(const Instruction& in) {
  switch (in.op) {
    case kEmbed:
    case kAngles:
    case kNorm:
    case kQuantise:
    case kReorder:
    case kMatmul:
    case kRope:
    case kGlu:
    case kSoftcap:
      return !in.logit_rows;
    default:
      return false;
  }
}

}  // namespace

Program::Program(std::vector<Instruction> instructions, Limits limits, const Kernels& kernels, int threads)
    : instructions_(std::move(instructions)),
      limits_(checked(std::move(limits), threads)),
      kernels_(kernels),
      pool_(threads),
      barrier_(threads),
      claims_(new Claim[instructions_.size() * static_cast<size_t>(threads)]),
      partition_states_(new float[kStateFloats]),
      partitions_ended_(new Claim[static_cast<size_t>(kFewUnits * threads)]) {
  int largest_head = 16;
  size_t scratch_floats = 0;
  for (const Instruction& in : instructions_) {
    check_instruction(in);
    if (in.op == kAttention || in.op == kRope)
      largest_head = std::max(largest_head, (in.head_dim + 15) / 16 * 16);
    if (in.op == kAttention) {
      const int rows = attention_rows_per_unit(in.heads / in.kv_heads);
      if (std::find(unit_rows_.begin(), unit_rows_.end(), rows) == unit_rows_.end())
        unit_rows_.push_back(rows);
    }
    if (in.op == kMatmul) scratch_floats = std::max(scratch_floats, matmul_scratch_floats(in.format, in.i1));
  }
  units_.resize(unit_rows_.size());
  for (auto& units : units_) units.reserve(static_cast<size_t>(limits_.max_tokens));
  for (int t = 0; t < threads; ++t) {
    scratch_.emplace_back(std::max(scratch_floats, attention_scratch_floats(largest_head)));
    sampler_.emplace_back(sampler_workspace_bytes(limits_.vocab) + 64);
  }
  profile_.assign(instructions_.size(), 0.0);
  next_matmul_.assign(instructions_.size(), instructions_.size());
  row_run_.assign(instructions_.size(), 0);
  for (size_t i = instructions_.size(); i-- > 0;) {
    const bool more = i + 1 < instructions_.size();
    if (more) next_matmul_[i] = instructions_[i + 1].op == kMatmul ? i + 1 : next_matmul_[i + 1];
    if (by_row(instructions_[i])) row_run_[i] = more ? row_run_[i + 1] + 1 : 1;
  }
}

void Program::bind(std::vector<uint8_t*> bases, std::vector<int64_t> sizes) {
  if (bases.size() != sizes.size() || bases.size() != static_cast<size_t>(kKv + limits_.kv_groups))
    throw std::invalid_argument("bases: expected weights, scratch and one per KV group");
  for (const uint8_t* base : bases)
    if (reinterpret_cast<uintptr_t>(base) % 8 != 0)
      throw std::invalid_argument("bases: must be aligned to 8 bytes");
  for (const Instruction& in : instructions_) check_operands(in, sizes);
  bases_ = std::move(bases);
  sizes_ = std::move(sizes);
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
  const size_t claims = instructions_.size() * static_cast<size_t>(pool_.threads());
  for (size_t i = 0; i < claims; ++i) claims_[i].next.store(0, std::memory_order_relaxed);
  const auto work = [&](int thread) { execute(thread, batch, result); };
  pool_.run(std::cref(work));  // three captures would not fit into a std::function without allocating
}

void Program::execute(int thread, const BatchView& batch, const ResultView& result) {
  using Clock = std::chrono::steady_clock;
  const bool timed = profiling_ && thread == 0;
  const bool many = batch.tokens >= pool_.threads() * kRowBlock;
  Ahead ahead{0, nullptr, nullptr};
  Clock::time_point start = timed ? Clock::now() : Clock::time_point();
  const auto time = [&](size_t i) {
    if (!timed) return;
    const Clock::time_point now = Clock::now();
    profile_[i] += std::chrono::duration<double>(now - start).count();
    start = now;
  };
  for (size_t i = 0; i < instructions_.size(); ++i) {
    if (many && row_run_[i]) {
      run_rows(i, thread, batch, time);
      i += row_run_[i] - 1;
    } else {
      step(instructions_[i], i, thread, batch, result);
    }
    if (instructions_[i].barrier) {
      if (next_matmul_[i] != ahead.matmul) ahead = weights_ahead(next_matmul_[i], thread, batch);
      if (next_matmul_[i] == i + 1) ahead.ask(kWarmBytes);
      barrier_.wait([&ahead] { return ahead.ask(4 * 64); });
    }
    time(i);
  }
}

// Instructions that take every row by itself, one block of rows after the other through all of them: what one
// leaves is still in the second cache when the next reads it, and threads need not meet in between. Every
// thread has rows of its own; whoever is done first helps the others.
template <class Time>
void Program::run_rows(size_t first, int thread, const BatchView& b, Time time) {
  const int threads = pool_.threads();
  for (int i = 0; i < threads; ++i) {
    const int owner = (thread + i) % threads;
    const Range mine = share(b.tokens, owner, threads);
    std::atomic<int32_t>& next =
        claims_[first * static_cast<size_t>(threads) + static_cast<size_t>(owner)].next;
    for (int row; (row = mine.begin + kRowBlock * next.fetch_add(1, std::memory_order_relaxed)) < mine.end;) {
      const int end = std::min(row + kRowBlock, mine.end);
      for (size_t j = first; j < first + row_run_[first]; ++j) {
        const Instruction& in = instructions_[j];
        if (in.op == kMatmul) {
          kernels_.matmul(matmul_args(in, thread), 0, (in.i0 + 15) / 16, row, end);
        } else {
          rows_of(in, row, end, b);
        }
        time(j);
      }
    }
  }
}

std::vector<double> Program::take_profile() {
  std::vector<double> out(instructions_.size(), 0.0);
  out.swap(profile_);
  return out;
}

void Program::step(const Instruction& in, size_t index, int thread, const BatchView& b,
                   const ResultView& result) {
  const int rows = in.logit_rows ? b.logit_rows : b.tokens;
  const int threads = pool_.threads();
  Claim* claims = &claims_[index * static_cast<size_t>(threads)];
  switch (in.op) {
    case kMatmul:
      return matmul(in, claims, thread, rows);
    case kAttention:
      return attention(in, claims, thread, b);
    case kSample:
      return sample(in, *claims, thread, b, result);
    case kPool:
      return pool(in, *claims, b);
    default:
      const auto [begin, end] = share(rows, thread, threads);
      return rows_of(in, begin, end, b);
  }
}

// All but matmuls of those that take every row by itself: rows [begin, end).
void Program::rows_of(const Instruction& in, int begin, int end, const BatchView& b) {
  const auto floats = [&](const Operand& o) { return reinterpret_cast<float*>(at(o)); };
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
    case kReorder: {
      const int32_t* order = reinterpret_cast<const int32_t*>(at(in.weight));
      for (int row = begin; row < end; ++row) {
        const float* from = floats(in.in) + static_cast<size_t>(row) * (in.in_stride / 4);
        float* out = floats(in.out) + static_cast<size_t>(row) * (in.out_stride / 4);
        // weights are never trusted as indices
        for (int i = 0; i < in.i0; ++i)
          out[i] = from[std::min(static_cast<uint32_t>(order[i]), static_cast<uint32_t>(in.i0 - 1))];
      }
      return;
    }
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
      a.kv = {layer_kv(in), blocks(in.kv_group), in.kv_heads, in.head_dim, static_cast<KvFormat>(in.i1)};
      a.slots = b.slot_mapping[in.kv_group];
      return kernels_.rope(a, begin, end);
    }
    case kGlu:
      return kernels_.glu(floats(in.in), in.in_stride / 4, in.i1, in.i2, floats(in.out), in.out_stride / 4,
                          at(in.out2), in.i0, begin, end);
    case kSoftcap:
      for (int row = begin; row < end; ++row)
        kernels_.softcap(floats(in.out) + static_cast<size_t>(row) * (in.out_stride / 4),
                         static_cast<size_t>(in.i0), in.f0);
      return;
    default:
      return;
  }
}

Program::Tiles Program::tiles_of(const Instruction& in) const {
  const int tiles = (in.i0 + 15) / 16, run = kernels_.tile_run;
  const int chunk = std::clamp(tiles / (pool_.threads() * 6) / run * run, run, 64);
  return {chunk, (tiles + chunk - 1) / chunk};
}

// While few rows leave a thread waiting for the others, it asks for the weights that it will read next.
Program::Ahead Program::weights_ahead(size_t index, int thread, const BatchView& b) const {
  if (index == instructions_.size()) return {index, nullptr, nullptr};
  const Instruction& in = instructions_[index];
  if ((in.logit_rows ? b.logit_rows : b.tokens) > kFewRows || in.format.dense())
    return {index, nullptr, nullptr};
  const Tiles tiles = tiles_of(in);
  const size_t row = in.format.row_bytes(in.i1);
  const Range chunks = share(tiles.chunks, thread, pool_.threads());
  const size_t chunk = row * static_cast<size_t>(tiles.chunk);
  const size_t bytes = std::min(kAheadBytes, chunk * static_cast<size_t>(chunks.end - chunks.begin));
  const uint8_t* weights = at(in.weight) + chunk * static_cast<size_t>(chunks.begin);
  return {index, weights, weights + bytes};
}

bool Program::Ahead::ask(size_t bytes) {
  if (next == end) return false;
  for (size_t i = 0; i < bytes && next < end; i += 64, next += 64) __builtin_prefetch(next, 0, 2);
  return true;
}

MatmulArgs Program::matmul_args(const Instruction& in, int thread) {
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
  a.scratch = scratch_[static_cast<size_t>(thread)].data();
  a.scratch[0] = 0.0f;
  return a;
}

// Every thread has a run of tiles of its own, so that it reads one stretch of memory. Whoever is done first
// helps the others.
void Program::matmul(const Instruction& in, Claim* claims, int thread, int rows) {
  const MatmulArgs a = matmul_args(in, thread);
  const Tiles tiles = tiles_of(in);
  const int last = (in.i0 + 15) / 16, threads = pool_.threads();
  const int blocks = (rows + kRowBlock - 1) / kRowBlock;
  for (int i = 0; i < threads; ++i) {
    const int owner = (thread + i) % threads;
    const Range chunks = share(tiles.chunks, owner, threads);
    const int count = chunks.end - chunks.begin;
    std::atomic<int32_t>& next = claims[owner].next;
    for (int u; (u = next.fetch_add(1, std::memory_order_relaxed)) < count * blocks;) {
      const int tile = (chunks.begin + u % count) * tiles.chunk;
      const int row = u / count * kRowBlock;
      kernels_.matmul(a, tile, std::min(tile + tiles.chunk, last), row, std::min(row + kRowBlock, rows));
    }
  }
}

uint8_t* Program::layer_kv(const Instruction& in) const {
  return bases_[kKv + in.kv_group] + in.kv_offset * blocks(in.kv_group);
}

void Program::attention(const Instruction& in, Claim* claims, int thread, const BatchView& b) {
  const int rows = attention_rows_per_unit(in.heads / in.kv_heads);
  const size_t which =
      static_cast<size_t>(std::find(unit_rows_.begin(), unit_rows_.end(), rows) - unit_rows_.begin());
  const std::vector<Unit>& units = units_[which];
  AttentionArgs a{};
  a.q = reinterpret_cast<const float*>(at(in.in)) + in.q_offset;
  a.q_stride = static_cast<size_t>(in.in_stride) / 4;
  a.output = reinterpret_cast<float*>(at(in.out));
  a.output_stride = static_cast<size_t>(in.out_stride) / 4;
  a.kv = {layer_kv(in), blocks(in.kv_group), in.kv_heads, in.head_dim, static_cast<KvFormat>(in.i1)};
  a.positions = b.positions;
  a.heads = in.heads;
  a.kv_heads = in.kv_heads;
  a.head_dim = in.head_dim;
  a.window = in.window;
  a.softcap = in.f0;
  a.scratch = scratch_[static_cast<size_t>(thread)].data();
  const auto take = [&](int u) -> const Unit& {
    const Unit& unit = units[static_cast<size_t>(u) % units.size()];
    a.block_table =
        b.block_tables[in.kv_group] + static_cast<size_t>(unit.sequence) * b.table_widths[in.kv_group];
    a.row_begin = unit.row_begin;
    a.row_end = unit.row_end;
    a.kv_head = u / static_cast<int>(units.size());
    a.length = in.i0 ? b.positions[b.query_start[unit.sequence + 1] - 1] + 1 : 0;
    return unit;
  };
  const auto attend = in.i1 ? kernels_.attention_int8 : kernels_.attention;
  const int total = static_cast<int>(units.size()) * in.kv_heads;
  if (!splits(in, units, b)) {
    const int threads = pool_.threads();
    for (int i = 0; i < threads; ++i) {
      const int owner = (thread + i) % threads;
      const Range mine = share(total, owner, threads);
      KvAhead ahead{a.kv,
                    units.data(),
                    static_cast<int>(units.size()),
                    b.positions,
                    b.block_tables[in.kv_group],
                    b.table_widths[in.kv_group],
                    in.window,
                    kVectors / (in.heads / in.kv_heads),
                    0,
                    mine.end};
      a.ahead = i || in.i0 ? nullptr : &ahead;
      if (a.ahead) {
        ahead.go(mine.begin);
        ahead.ask(kBlocksAhead);
      }
      std::atomic<int32_t>& next = claims[owner].next;
      for (int u; (u = mine.begin + next.fetch_add(1, std::memory_order_relaxed)) < mine.end;) {
        take(u);
        if (ahead.unit < u) ahead.go(u);
        attend(a);
      }
    }
    return;
  }
  a.ahead = nullptr;
  // A piece of work is one partition of a unit's context for one head; who ends a unit's last one merges
  // them.
  int u = 0, begin = 0;                     // a unit and head, and the number of its first piece
  float* states = partition_states_.get();  // its partitions'
  for (;;) {
    const int piece = claims->next.fetch_add(1, std::memory_order_relaxed);
    Partitions seen = partitions(in, take(u), b);
    while (piece >= begin + seen.count) {
      if (++u == total) return;
      begin += seen.count;
      states += static_cast<size_t>(seen.count) * seen.state_floats;
      seen = partitions(in, take(u), b);
    }
    a.partition = seen.first + piece - begin;
    a.state = states + static_cast<size_t>(piece - begin) * seen.state_floats;
    attend(a);
    std::atomic<int32_t>& ended = partitions_ended_[static_cast<size_t>(u)].next;
    if (ended.fetch_add(1, std::memory_order_acq_rel) + 1 < seen.count) continue;
    ended.store(0, std::memory_order_relaxed);
    a.state = states;
    kernels_.merge_partitions(a, seen.count);
  }
}

Program::Partitions Program::partitions(const Instruction& in, const Unit& unit, const BatchView& b) const {
  const int first = b.positions[unit.row_begin], last = b.positions[unit.row_end - 1];
  const int lowest = in.window > 0 && first >= in.window ? first - in.window + 1 : 0;
  const int vectors = (unit.row_end - unit.row_begin) * (in.heads / in.kv_heads);
  const int begin = lowest / kAttentionPartition;
  return {begin, last / kAttentionPartition + 1 - begin,
          attention_state_floats(vectors, (in.head_dim + 15) / 16 * 16)};
}

// Whether there are so few units that threads would wait for the longest, and contexts to be split.
bool Program::splits(const Instruction& in, const std::vector<Unit>& units, const BatchView& b) const {
  if (in.i0 || static_cast<int>(units.size()) * in.kv_heads > kFewUnits * pool_.threads()) return false;
  size_t floats = 0;
  int longest = 0;
  for (const Unit& unit : units) {
    const Partitions seen = partitions(in, unit, b);
    floats += static_cast<size_t>(seen.count * in.kv_heads) * seen.state_floats;
    longest = std::max(longest, seen.count);
  }
  return pool_.threads() > 1 && longest > 1 && floats <= kStateFloats;
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
