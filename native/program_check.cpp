// What a program refuses: malformed instructions, operands that reach outside of their bases, batches outside
// of the limits. What passes can leave no memory that it was given, whatever its numbers mean.
#include <algorithm>
#include <stdexcept>

#include "program.h"

namespace headrace {
namespace {

constexpr int32_t kWidestInt8Head = 1 << 14;  // sums of its products fit 32 bits
constexpr int32_t kWidest = 1 << 26;          // of any matrix, row or offset into one: products fit 64 bits

[[noreturn]] void reject(const std::string& what) { throw std::invalid_argument(what); }

void require(bool ok, const char* what) {
  if (!ok) reject(what);
}

bool is_width(int32_t x) { return x >= 1 && x <= kWidest; }
bool is_offset(int32_t x) { return x >= 0 && x <= kWidest; }
int32_t padded(int32_t k) { return (k + 31) / 32 * 32; }
int64_t quant_row_bytes(int32_t width) { return static_cast<int64_t>(QuantRow::bytes(padded(width))); }

void check_format(const WeightFormat& f) {
  require(f.kind >= WeightFormat::kU4 && f.kind <= WeightFormat::kF8, "unknown weight format");
  if (f.dense()) {
    const bool scaled = f.kind == WeightFormat::kF8;
    return require(f.scale_bytes == (scaled ? 4 : 0) && f.group == 0 && f.offsets == WeightFormat::kNone,
                   "malformed weight format");
  }
  require(f.scale_bytes == 2 || f.scale_bytes == 4, "malformed weight format");
  require(f.group == 16 || f.group == 32 ||
              (f.group == 0 && f.scale_bytes == 4 && f.offsets == WeightFormat::kNone),
          "malformed groups of a weight format");
  require(f.offsets >= WeightFormat::kNone && f.offsets <= WeightFormat::kZeroPoints,
          "unknown offsets of a weight format");
  require(f.zero_point >= 0 && f.zero_point <= 255, "zero point outside of 0..255");
}

void check_heads(const Instruction& in, int64_t block_bytes) {
  require(is_width(in.heads) && is_width(in.kv_heads) && is_width(in.head_dim) &&
              in.heads % in.kv_heads == 0 && in.head_dim % 2 == 0 &&
              int64_t{in.heads} * in.head_dim <= kWidest,
          "malformed heads");
  require(in.heads / in.kv_heads <= kMaxQueryVectors, "more than 64 query heads per KV head");
  const auto format = static_cast<KvFormat>(in.i1);
  require(format == KvFormat::kBf16 || format == KvFormat::kInt8, "unknown KV format");
  require(format != KvFormat::kInt8 || in.head_dim <= kWidestInt8Head, "head too wide for KV in int8");
  const int64_t part = in.kv_heads * static_cast<int64_t>(kv_head_bytes(format, in.head_dim));
  require(
      in.kv_offset >= 0 && in.kv_offset % 4 == 0 && part <= block_bytes && in.kv_offset <= block_bytes - part,
      "layer lies outside of its KV block");
}

}  // namespace

Limits Program::checked(Limits limits, int threads) {
  require(threads >= 1 && threads <= kMaxThreads, "threads outside of 1..256");
  require(is_width(limits.max_tokens) && is_width(limits.max_sequences) && is_width(limits.max_logit_rows) &&
              is_width(limits.vocab) && limits.max_positions >= 1,
          "limits must be positive, and sensible");
  require(limits.kv_groups >= 1, "a program needs a KV group");
  for (const int64_t bytes : limits.block_bytes)
    require(bytes >= 64 && bytes % 4 == 0 && bytes <= INT32_MAX, "malformed size of a KV block");
  return limits;
}

void Program::check_instruction(const Instruction& in) const {
  require(in.op >= 0 && in.op < kOpCount, "unknown instruction");
  require(in.kv_group >= 0 && in.kv_group < limits_.kv_groups,
          "instruction names a KV group that is not there");
  const bool per_token =
      in.op == kEmbed || in.op == kAngles || in.op == kRope || in.op == kAttention || in.op == kPool;
  require(!per_token || !in.logit_rows, "instruction works on tokens, not on logit rows");
  const bool has_width = in.op != kRope && in.op != kAttention && in.op != kSample;
  require(!has_width || is_width(in.i0), "width outside of 1..2^26");
  switch (in.op) {
    case kEmbed:
      check_format(in.format);
      return require(in.i1 == (in.format.dense() ? in.i0 : padded(in.i0)), "malformed embedding width");
    case kAngles:
      return require(in.i0 % 2 == 0, "angles come in pairs");
    case kNorm:
      return require(!in.i2 || in.logit_rows, "only logit rows are gathered");
    case kMatmul:
      check_format(in.format);
      return require(is_width(in.i1) && (in.format.dense() || in.i1 % 32 == 0),
                     "quantised inputs must be padded to 32");
    case kRope:
      check_heads(in, limits_.block_bytes[in.kv_group]);
      require(is_offset(in.q_offset) && is_offset(in.k_offset) && is_offset(in.v_offset),
              "malformed offsets of q, k, v");
      return require(in.i0 >= 0 && in.i0 % 2 == 0 && in.i0 <= in.head_dim, "malformed rotation width");
    case kAttention:
      check_heads(in, limits_.block_bytes[in.kv_group]);
      return require(is_offset(in.q_offset), "malformed offsets of q, k, v");
    case kGlu:
      require(in.i2 >= 0 && in.i2 <= 2, "unknown activation");
      return require(is_offset(in.i1), "malformed offset of the second half");
    case kSample:
      return require(in.logit_rows != 0, "only logit rows are sampled");
    default:
      return;
  }
}

void Program::check_operands(const Instruction& in, const std::vector<int64_t>& sizes) const {
  const int64_t rows = in.logit_rows ? limits_.max_logit_rows : limits_.max_tokens;
  const int64_t width = int64_t{in.i0} * 4;
  const auto span = [&](const Operand& o, int64_t count, int64_t stride, int64_t bytes, const char* what) {
    if (o.base < 0) return;
    const auto outside = [&] { reject(std::string("operand outside of its base: ") + what); };
    if (o.base >= kKv || o.offset < 0 || o.offset % 4 != 0 || stride < 0 || stride % 4 != 0) outside();
    int64_t left = sizes[o.base];
    if (count > 1 && stride > left / (count - 1)) outside();
    left -= (count - 1) * stride;
    if (bytes > left || o.offset > left - bytes) outside();
  };
  const auto flat = [&](const Operand& o, int64_t bytes, const char* what) { span(o, 1, 0, bytes, what); };
  const auto written = [&](const Operand& o, int64_t count, int64_t stride, int64_t bytes, const char* what) {
    if (o.base >= 0 && o.base != kScratch) reject(std::string("operand is not in scratch: ") + what);
    if (count > 1 && stride < bytes) reject(std::string("operand's rows overlap: ") + what);
    span(o, count, stride, bytes, what);
  };
  // Rows of integers hold words of 64 bits.
  const auto quantised = [&](const Operand& o) {
    if (o.base < 0) return;
    if (o.offset % 8 != 0) reject("quantised rows are not aligned");
    written(o, rows, quant_row_bytes(in.i0), quant_row_bytes(in.i0), "quantised");
  };
  const auto matrix_bytes = [&](int64_t n) { return static_cast<int64_t>(in.format.matrix_bytes(n, in.i1)); };
  const auto present = [](const Operand& o, const char* what) {
    if (o.base < 0) reject(std::string("missing operand: ") + what);
  };
  const bool reads = in.op == kNorm || in.op == kQuantise || in.op == kMatmul || in.op == kAttention ||
                     in.op == kGlu || in.op == kSample || in.op == kPool || in.op == kReorder;
  if (reads) present(in.in, "in");
  if (in.op != kSample) present(in.out, "out");
  if (in.op == kEmbed || in.op == kAngles || in.op == kNorm || in.op == kMatmul || in.op == kReorder)
    present(in.weight, "weight");

  switch (in.op) {
    case kEmbed:
      flat(in.weight, matrix_bytes(in.i2 ? limits_.max_positions : limits_.vocab), "embedding");
      return written(in.out, rows, in.out_stride, width, "out");
    case kAngles:
      require(in.weight.offset % 8 == 0, "frequencies are not aligned");
      flat(in.weight, width, "frequencies");
      return written(in.out, rows, width, width, "out");
    case kNorm:
      span(in.in, in.i2 ? limits_.max_tokens : rows, in.in_stride, width, "in");
      flat(in.weight, width, "norm");
      flat(in.weight2, width, "norm bias");
      quantised(in.out2);
      return written(in.out, rows, in.out_stride, width, "out");
    case kQuantise:
      span(in.in, rows, in.in_stride, width, "in");
      return quantised(in.out);
    case kMatmul:
      require(in.format.dense() || (in.in.offset % 8 == 0 && in.in_stride % 8 == 0),
              "quantised rows are not aligned");
      span(in.in, rows, in.in_stride, in.format.dense() ? int64_t{in.i1} * 4 : quant_row_bytes(in.i1), "in");
      flat(in.weight, matrix_bytes(in.i0), "matrix");
      flat(in.weight2, width, "bias");
      return written(in.out, rows, in.out_stride, width, "out");
    case kRope: {
      const int64_t q = in.q_offset + int64_t{in.heads} * in.head_dim;
      const int64_t kv = std::max(in.k_offset, in.v_offset) + int64_t{in.kv_heads} * in.head_dim;
      span(in.in, rows, width, width, "angles");
      flat(in.weight, int64_t{in.head_dim} * 4, "q norm");
      flat(in.weight2, int64_t{in.head_dim} * 4, "k norm");
      return written(in.out, rows, in.out_stride, std::max(q, kv) * 4, "out");
    }
    case kAttention: {
      const int64_t heads = int64_t{in.heads} * in.head_dim;
      span(in.in, rows, in.in_stride, (in.q_offset + heads) * 4, "in");
      return written(in.out, rows, in.out_stride, heads * 4, "out");
    }
    case kGlu:
      span(in.in, rows, in.in_stride, width + int64_t{in.i1} * 4, "in");
      quantised(in.out2);
      return written(in.out, rows, in.out_stride, width, "out");
    case kSoftcap:
      return written(in.out, rows, in.out_stride, width, "out");
    case kPool:
      span(in.in, rows, in.in_stride, width, "in");
      return written(in.out, limits_.max_sequences, in.out_stride, width, "out");
    case kReorder:
      span(in.in, rows, in.in_stride, width, "in");
      flat(in.weight, width, "order");
      return written(in.out, rows, in.out_stride, width, "out");
    case kSample:  // overwrites the logits where bias, penalties and masks say so
      return written(in.in, rows, in.in_stride, int64_t{limits_.vocab} * 4, "logits");
    default:
      return;
  }
}

void Program::check_batch(const BatchView& b) const {
  require(!bases_.empty(), "the program has no bases bound");
  require(b.tokens >= 1 && b.tokens <= limits_.max_tokens, "batch: number of tokens outside of the limits");
  require(b.sequences >= 1 && b.sequences <= limits_.max_sequences,
          "batch: number of sequences outside of the limits");
  require(b.logit_rows >= 0 && b.logit_rows <= limits_.max_logit_rows, "batch: too many logit rows");
  require(b.query_start[0] == 0 && b.query_start[b.sequences] == b.tokens,
          "batch: query_start does not cover the tokens");
  for (int i = 0; i < b.tokens; ++i) {
    require(b.token_ids[i] >= 0 && b.token_ids[i] < limits_.vocab,
            "batch: token id outside of the vocabulary");
    require(b.positions[i] >= 0 && b.positions[i] < limits_.max_positions,
            "batch: position outside of the context");
  }
  for (int i = 0; i < b.logit_rows; ++i)
    require(b.logit_row_ids[i] >= 0 && b.logit_row_ids[i] < b.tokens,
            "batch: logit row is not one of the tokens");
  for (int s = 0; s < b.sequences; ++s) {
    const int begin = b.query_start[s], end = b.query_start[s + 1];
    require(begin < end, "batch: a sequence without tokens");
    for (int i = begin + 1; i < end; ++i)
      require(b.positions[i] == b.positions[i - 1] + 1, "batch: positions of a sequence must be consecutive");
    require(b.context_len[s] == b.positions[end - 1] + 1,
            "batch: context_len is not what the sequence's positions end at");
  }
  for (int g = 0; g < limits_.kv_groups; ++g) {
    // 64 spare bytes: vector loads may overrun
    const int64_t blocks = this->blocks(g);
    for (int i = 0; i < b.tokens; ++i)
      require(b.slot_mapping[g][i] >= 0 && b.slot_mapping[g][i] < blocks * 16,
              "batch: slot outside of the KV pool");
    for (int s = 0; s < b.sequences; ++s) {
      const int needed = b.positions[b.query_start[s + 1] - 1] / 16 + 1;
      require(needed <= b.table_widths[g], "batch: block table is too short for its positions");
      const int32_t* table = b.block_tables[g] + static_cast<size_t>(s) * b.table_widths[g];
      for (int i = 0; i < needed; ++i)
        require(table[i] >= 0 && table[i] < blocks, "batch: block outside of the KV pool");
    }
  }
}

}  // namespace headrace
