// From a row of logits to a token: what the sampler is asked and what it answers.
// The meaning of every field is that of SamplingTable and StepResult in src/headrace/backend/batch.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

struct SamplingRow {
  float temperature;
  int32_t top_k;
  float top_p, min_p, presence, frequency, repetition;
  uint64_t seed;
  uint32_t choice, position;
  int32_t num_logprobs;
  const int32_t* seen_ids;
  const int32_t* seen_counts;
  int32_t seen_n;
  const int32_t* bias_ids;
  const float* bias_values;
  int32_t bias_n;
  const uint32_t* mask;  // null = all allowed
};

// The arrays of a SamplingTable, for all its rows.
struct SamplingArrays {
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p, *presence, *frequency, *repetition;
  const uint64_t* seed;
  const uint32_t *choice, *position;
  const int32_t* num_logprobs;
  const int32_t *seen_start, *seen_ids, *seen_counts;
  const int32_t *bias_start, *bias_ids;
  const float* bias_values;
  const int32_t* mask_row;
  const uint32_t* masks;
  size_t mask_words;  // per row of masks

  SamplingRow row(int i) const {
    const int32_t seen = seen_start[i], bias = bias_start[i];
    return {temperature[i],
            top_k[i],
            top_p[i],
            min_p[i],
            presence[i],
            frequency[i],
            repetition[i],
            seed[i],
            choice[i],
            position[i],
            num_logprobs[i],
            seen_ids + seen,
            seen_counts + seen,
            seen_start[i + 1] - seen,
            bias_ids + bias,
            bias_values + bias,
            bias_start[i + 1] - bias,
            mask_row[i] < 0 ? nullptr : masks + static_cast<size_t>(mask_row[i]) * mask_words};
  }
};

// A failed row's token is 0, its logprobs are NaN and its top ids -1.
struct SampledRow {
  int32_t token_id;
  float logprob;  // NaN unless num_logprobs >= 0
  bool failed;
  int32_t* top_ids;  // [num_logprobs], the caller's, as top_logprobs; -1 and NaN beyond the vocabulary
  float* top_logprobs;
};

// Bytes of scratch, aligned as a double, that a thread needs for rows of a vocabulary; sample_row allocates nothing.
size_t sampler_workspace_bytes(int32_t vocab);

// void sample_row(float* logits, int32_t vocab, const SamplingRow& row, void* workspace, SampledRow* out)
// is in the kernel table, one for each ISA path. It overwrites `logits` ([vocab]) where bias, penalties, mask and top-k
// say so. A row fails, alone, when a raw logit is NaN or +inf, when bias and penalties make one so or name an id outside
// the vocabulary, or when no token is left. num_logprobs below 0 = none. Thread-safe; reads no state but its arguments.

}  // namespace headrace
