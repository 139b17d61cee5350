// Sampling one row of logits: bias, penalties, mask, temperature, min-p, top-k, top-p, and one uniform of Philox.
//
// Weights come from one vector exp, and their sums are in double, in sixteen lanes over blocks at fixed places: a row's
// token depends on that row alone. Templates of the standard library are instantiated with local types only: an
// instance shared between ISA paths could be the one that was compiled for a newer CPU.
#include "sampler.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <type_traits>

#include "philox.h"
#include "select.h"

namespace headrace {
namespace HR_ISA {
namespace {

constexpr int kBlock = 1024;  // floats; the unit of maxima and partial sums

HR_INLINE int blocks_of(int n) { return (n + kBlock - 1) / kBlock; }
HR_INLINE int end_of(int block, int n) { return n - block * kBlock < kBlock ? n : (block + 1) * kBlock; }

struct Workspace {
  float* weights;  // [vocab], padded to whole vectors
  int32_t* ids;    // [vocab + 32], as the two below
  int32_t* pool;
  float* saved;   // raw logits, at the ids that bias and penalties touch
  float* maxima;  // [blocks][16]: of each block of logits, by lane
  double* sums;   // [blocks]
  double* bins;   // [kBins * kBinCopies]

  // Lays the arrays out in `memory` (may be null, to count only); returns the bytes they take.
  size_t place(void* memory, int vocab) {
    const size_t width = static_cast<size_t>(vocab) + 32;
    const size_t blocks = static_cast<size_t>(blocks_of(vocab));
    uintptr_t next = reinterpret_cast<uintptr_t>(memory);
    const auto take = [&next](auto*& array, size_t count) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(next);
      next += (count * sizeof *array + 63) / 64 * 64;
    };
    take(weights, width);
    take(ids, width);
    take(pool, width);
    take(saved, width);
    take(maxima, blocks * kLanes);
    take(sums, blocks);
    take(bins, static_cast<size_t>(kBins) * kBinCopies);
    return next - reinterpret_cast<uintptr_t>(memory);
  }
};

// The largest logit, with the lane maxima of every block on the way; NaN where the row holds NaN or +inf.
float scan(const float* logits, int vocab, float* maxima) {
  const Vec infinity = set1(INFINITY), one = set1(1.0f);
  Vec largest = set1(-INFINITY), bad = zero();
  for (int block = 0; block < blocks_of(vocab); ++block) {
    const int end = end_of(block, vocab);
    int i = block * kBlock;
    Vec even = set1(-INFINITY), odd = even, bad_odd = zero();
    for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
      const Vec a = load(logits + i), b = load(logits + i + kLanes);
      even = max(a, even);
      odd = max(b, odd);
      bad = select_less(a, infinity, bad, one);
      bad_odd = select_less(b, infinity, bad_odd, one);
    }
    for (; i < end; i += kLanes) {
      const Vec a = end - i < kLanes ? load_some(logits + i, end - i, -INFINITY) : load(logits + i);
      even = max(a, even);
      bad = select_less(a, infinity, bad, one);
    }
    even = max(even, odd);
    bad = max(bad, bad_odd);
    store(maxima + block * kLanes, even);
    largest = max(largest, even);
  }
  return reduce_max(bad) > 0.0f ? NAN : reduce_max(largest);
}

// The lowest id whose logit is `value`, the row's largest.
int32_t first_at(const float* logits, int vocab, const float* maxima, float value) {
  int block = 0;
  while (lanes_at_least(load(maxima + block * kLanes), set1(value)) == 0) ++block;
  int32_t id = block * kBlock;
  for (; id + kLanes <= vocab; id += kLanes) {
    const uint32_t bits = lanes_at_least(load(logits + id), set1(value));
    if (bits != 0) return id + __builtin_ctz(bits);
  }
  while (logits[id] != value) ++id;
  return id;
}

// weights = exp((logit - largest) * inverse), 0 where the exponent is below `floor`; `sums` gets the
// weights' sum of each block. Returns their total.
double weigh(const float* logits, int n, float largest, float inverse, float floor, float* weights, double* sums) {
  const Vec top = set1(largest), factor = set1(inverse), least = set1(floor);
  double all = 0.0;
  for (int block = 0; block < blocks_of(n); ++block) {
    const int end = end_of(block, n);
    DoubleSum sum{};
    for (int i = block * kBlock; i < end; i += kLanes) {
      const Vec x = end - i < kLanes ? load_some(logits + i, end - i, -INFINITY) : load(logits + i);
      const Vec exponent = mul(sub(x, top), factor);
      const Vec weight = select_less(exponent, least, zero(), exp(exponent));
      store(weights + i, weight);
      accumulate(sum, weight);
    }
    sums[block] = total(sum);
    all += sums[block];
  }
  return all;
}

double sum_weights(const float* weights, int n, double* sums) {
  double all = 0.0;
  for (int block = 0; block < blocks_of(n); ++block) {
    const int end = end_of(block, n);
    DoubleSum sum{};
    for (int i = block * kBlock; i < end; i += kLanes)
      accumulate(sum, end - i < kLanes ? load_some(weights + i, end - i, 0.0f) : load(weights + i));
    sums[block] = total(sum);
    all += sums[block];
  }
  return all;
}

// The first index whose cumulative weight exceeds `target`; the last one with a weight, when rounding leaves none.
int pick(const float* weights, int n, const double* sums, double target) {
  double before = 0.0;
  int block = 0, last_block = 0;
  for (; block < blocks_of(n); ++block) {
    if (sums[block] > 0.0) last_block = block;
    if (before + sums[block] > target) break;
    before += sums[block];
  }
  if (block == blocks_of(n)) {
    block = last_block;
    target = DBL_MAX;
  }
  int last = 0;
  for (int i = block * kBlock; i < end_of(block, n); ++i) {
    if (weights[i] > 0.0f) last = i;
    before += static_cast<double>(weights[i]);
    if (before > target) return i;
  }
  return last;
}

bool all_inside(const int32_t* ids, int n, int vocab) {
  for (int i = 0; i < n; ++i) {
    if (ids[i] < 0 || ids[i] >= vocab) return false;
  }
  return true;
}

// Bias, penalties and mask, in place. False when an id is outside the vocabulary or a logit is no longer below +inf.
bool process(float* logits, int vocab, const SamplingRow& row, float* saved) {
  if (!all_inside(row.bias_ids, row.bias_n, vocab) || !all_inside(row.seen_ids, row.seen_n, vocab)) return false;
  for (int i = 0; i < row.bias_n; ++i) saved[row.bias_ids[i]] = logits[row.bias_ids[i]];
  for (int i = 0; i < row.seen_n; ++i) saved[row.seen_ids[i]] = logits[row.seen_ids[i]];

  for (int i = 0; i < row.bias_n; ++i) logits[row.bias_ids[i]] += row.bias_values[i];
  for (int i = 0; i < row.seen_n; ++i) {
    float x = logits[row.seen_ids[i]];
    x = x > 0.0f ? x / row.repetition : x * row.repetition;
    x -= row.frequency * static_cast<float>(row.seen_counts[i]);
    x -= row.seen_counts[i] > 0 ? row.presence : 0.0f;
    logits[row.seen_ids[i]] = x;
  }
  bool below = true;
  for (int i = 0; i < row.bias_n; ++i) below = below && logits[row.bias_ids[i]] < INFINITY;
  for (int i = 0; i < row.seen_n; ++i) below = below && logits[row.seen_ids[i]] < INFINITY;
  if (!below) return false;

  for (int base = 0; row.mask != nullptr && base < vocab; base += 32) {
    const uint32_t banned = ~row.mask[base / 32];
    if (banned == 0) continue;
    const int end = vocab - base < 32 ? vocab - base : 32;
    for (int i = 0; i < end; ++i) logits[base + i] = (banned >> i & 1u) != 0 ? -INFINITY : logits[base + i];
  }
  return true;
}

double mass_at_least(const float* weights, int n, float bound) {
  const Vec least = set1(bound);
  DoubleSum even{}, odd{};
  int i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const Vec a = load(weights + i), b = load(weights + i + kLanes);
    accumulate(even, select_less(a, least, zero(), a));
    accumulate(odd, select_less(b, least, zero(), b));
  }
  for (; i < n; i += kLanes) {
    const Vec a = load_some(weights + i, n - i, 0.0f);
    accumulate(even, select_less(a, least, zero(), a));
  }
  return total(even) + total(odd);
}

float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// Sets to 0 the weights beyond the shortest head of the logits' order that holds `share` (above 0, below 1) of `all`,
// the weights' sum. Returns the sum of what is left.
double cut_by_mass(const float* logits, float* weights, int n, double share, double all, const Workspace& space) {
  const double target = share * all;
  // Bisects for the weight at the cut while many might be near it. Positive floats order as their bits do. Weights below
  // (1 - share) / n of all are together less than what may be left out (0.99 covers rounding): a lower end to start from.
  uint32_t low = bits_of(std::fmax(static_cast<float>(0.99 * (1.0 - share) * all / n), FLT_MIN));
  uint32_t high = bits_of(2.0f);
  double held = all, ahead = 0.0;  // by the weights of at least `low` and `high`
  for (int pass = 0; pass < 8 && high - low > 1 && held - ahead > 1024.0 * static_cast<double>(float_of(low)); ++pass) {
    const uint32_t middle = low + (high - low) / 2;
    const double mass = mass_at_least(weights, n, float_of(middle));
    if (mass < target) {
      high = middle;
      ahead = mass;
    } else {
      low = middle;
      held = mass;
    }
  }
  const int near = indices_between(weights, n, float_of(low), float_of(high), space.pool);
  const auto mass = [weights](int32_t i) { return static_cast<double>(weights[i]); };
  const int32_t last = find_cut(logits, space.pool, near, ahead, target, mass, space.bins);

  const Vec edge = set1(logits[last]);
  int i = 0;
  for (; i + kLanes <= last + 1; i += kLanes) {  // up to the last one's id, its equals stay
    const Vec w = load(weights + i);
    store(weights + i, select_less(load(logits + i), edge, zero(), w));
  }
  for (; i <= last; ++i) weights[i] = logits[i] < logits[last] ? 0.0f : weights[i];
  for (; i < n && i % kLanes != 0; ++i) weights[i] = logits[i] > logits[last] ? weights[i] : 0.0f;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec w = load(weights + i);
    store(weights + i, select_less(edge, load(logits + i), w, zero()));
  }
  for (; i < n; ++i) weights[i] = logits[i] > logits[last] ? weights[i] : 0.0f;
  return sum_weights(weights, n, space.sums);
}

struct Choice {
  int32_t id;
  float logit;
};

// A token of the processed logits at the row's temperature. Top-k moves the k largest logits to the front.
Choice draw(float* logits, int vocab, float largest_logit, const SamplingRow& row, const Workspace& space) {
  // Within these bounds no product below is infinity times zero.
  const float inverse = 1.0f / std::fmin(std::fmax(row.temperature, 1e-30f), 1e30f);
  const float floor =
      row.min_p > 0.0f ? static_cast<float>(std::fmin(0.0, std::log(static_cast<double>(row.min_p)))) : -INFINITY;
  const bool by_count = row.top_k > 0 && row.top_k < vocab;
  int n = vocab;
  if (by_count) {
    n = largest(logits, vocab, row.top_k, space.maxima, blocks_of(vocab) * kLanes, space.ids, space.pool, space.bins);
    for (int j = 0; j < n; ++j) logits[j] = logits[space.ids[j]];  // ids ascend: none is overwritten before it is read
  }
  double all = weigh(logits, n, largest_logit, inverse, floor, space.weights, space.sums);
  if (row.top_p < 1.0f) {
    const double share = static_cast<double>(std::fmax(row.top_p, FLT_MIN));
    all = cut_by_mass(logits, space.weights, n, share, all, space);
  }
  const double target = philox_uniform(row.seed, row.choice, row.position) * all;
  const int picked = pick(space.weights, n, space.sums, target);
  return {by_count ? space.ids[picked] : picked, logits[picked]};
}

// log of the sum of exp of the raw logits, less the largest of them; and the row's top logprobs.
double raw_logprobs(const float* logits, int vocab, float largest_logit, const SamplingRow& row, const Workspace& space,
                    SampledRow* out) {
  const double log_sum = std::log(weigh(logits, vocab, largest_logit, 1.0f, -INFINITY, space.weights, space.sums));
  if (row.num_logprobs > 0) {
    int32_t* ids = space.ids;
    const int n =
        largest(logits, vocab, row.num_logprobs, space.maxima, blocks_of(vocab) * kLanes, ids, space.pool, space.bins);
    std::sort(ids, ids + n, [logits](int32_t a, int32_t b) {
      return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    });
    for (int j = 0; j < n; ++j) {
      out->top_ids[j] = ids[j];
      out->top_logprobs[j] = static_cast<float>(static_cast<double>(logits[ids[j]]) - largest_logit - log_sum);
    }
  }
  return log_sum;
}

void blank(const SamplingRow& row, SampledRow* out) {
  out->token_id = 0;
  out->logprob = NAN;
  out->failed = true;
  for (int j = 0; j < row.num_logprobs; ++j) {
    out->top_ids[j] = -1;
    out->top_logprobs[j] = NAN;
  }
}

bool touches(const SamplingRow& row, int32_t id) {
  const auto holds = [id](const int32_t* ids, int n) {
    for (int i = 0; i < n; ++i) {
      if (ids[i] == id) return true;
    }
    return false;
  };
  return holds(row.bias_ids, row.bias_n) || holds(row.seen_ids, row.seen_n);
}

}  // namespace

void sample_row(float* logits, int32_t vocab, const SamplingRow& row, void* workspace, SampledRow* out) {
  Workspace space;
  space.place(workspace, vocab);
  blank(row, out);
  const float raw_largest = scan(logits, vocab, space.maxima);
  if (!(raw_largest > -INFINITY)) return;
  double log_sum = 0.0;
  if (row.num_logprobs >= 0) log_sum = raw_logprobs(logits, vocab, raw_largest, row, space, out);

  float largest_logit = raw_largest;
  if (row.bias_n > 0 || row.seen_n > 0 || row.mask != nullptr) {
    if (process(logits, vocab, row, space.saved)) {
      largest_logit = scan(logits, vocab, space.maxima);
    } else {
      largest_logit = NAN;
    }
    if (!(largest_logit > -INFINITY)) {
      blank(row, out);
      return;
    }
  }
  out->failed = false;
  const Choice choice = row.temperature > 0.0f
                            ? draw(logits, vocab, largest_logit, row, space)
                            : Choice{first_at(logits, vocab, space.maxima, largest_logit), largest_logit};
  out->token_id = choice.id;
  if (row.num_logprobs >= 0) {
    const float raw = touches(row, choice.id) ? space.saved[choice.id] : choice.logit;
    out->logprob = static_cast<float>(static_cast<double>(raw) - raw_largest - log_sum);
  }
}

}  // namespace HR_ISA

#if !defined(HR_PATH_AVX512) && !defined(HR_PATH_AVX2)  // the layout is the same in every path: defined once
size_t sampler_workspace_bytes(int32_t vocab) {
  HR_ISA::Workspace space;
  return space.place(nullptr, vocab);
}
#endif

}  // namespace headrace
