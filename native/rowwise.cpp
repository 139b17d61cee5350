// Kernels that work on each row by itself: norms, quantisation, gated units, rotation with the KV write, soft
// caps.
#include "kernels.h"
#include "simd.h"

namespace headrace {
namespace HR_ISA {
namespace {

// A group is wide when its squared step is over kWideShare times the mean over the row's groups.
constexpr float kWideShare = 2.0f;
// Groups of nothing larger count as zeros: 127 / x must not overflow.
constexpr float kSmallest = 1e-35f;

// One row to int8 per group of 32 (step = max|x| / 127, round to nearest even), with the sums that zero
// points and minimums need. A non-finite input makes the group's scale NaN, so that it is seen in the logits
// and not hidden.
HR_INLINE void quantise_row(const float* x, int width, uint8_t* out) {
  const int padded = (width + 31) / 32 * 32, groups = padded / 32;
  int8_t* q = reinterpret_cast<int8_t*>(out);
  int8_t* fine = q + QuantRow::fine_offset(padded);
  float* scales = reinterpret_cast<float*>(out + QuantRow::scale_offset(padded));
  float* scaled_sums = reinterpret_cast<float*>(out + QuantRow::scaled_sum_offset(padded));
  int32_t* sums = reinterpret_cast<int32_t*>(out + QuantRow::sum_offset(padded));
  uint64_t* wide = reinterpret_cast<uint64_t*>(out + QuantRow::wide_offset(padded));
  std::memset(wide, 0, 8 * QuantRow::wide_words(padded));
  std::memset(fine, 0, static_cast<size_t>(padded));
  float tail[32] = {};
  for (int i = 0; i < width % 32; ++i) tail[i] = x[width / 32 * 32 + i];
  const auto group = [&](int g) { return 32 * g + 32 <= width ? x + 32 * g : tail; };
  float squares = 0.0f;
  for (int g = 0; g < groups; ++g) {
    const Vec a = load(group(g)), b = load(group(g) + 16);
    // As integers, magnitudes are in order, infinity and NaN above all numbers.
    const int32_t bits = reduce_max(max(magnitude_bits(a), magnitude_bits(b)));
    std::memcpy(&scales[g], &bits, 4);
    squares += scales[g] * scales[g];
  }
  const float limit = kWideShare * squares / static_cast<float>(groups);
  for (int base = 0; base < groups; base += 16) {  // divisions by sixteen
    const int count = groups - base < 16 ? groups - base : 16;
    float largest[16] = {}, inverse[16], step[16];
    std::memcpy(largest, scales + base, static_cast<size_t>(count) * sizeof(float));
    const Vec all = load(largest), smallest = set1(kSmallest), full = set1(127.0f);
    store(inverse, select_less(smallest, all, div(full, all), zero()));
    store(step, add(select_less(smallest, all, div(all, full), zero()), sub(all, all)));  // NaN unless finite
    for (int i = 0; i < count; ++i) {
      const int g = base + i;
      const Vec ya = mul(load(group(g)), set1(inverse[i])), yb = mul(load(group(g) + 16), set1(inverse[i]));
      const IVec qa = round_to_int(ya), qb = round_to_int(yb);
      int32_t first = store_s8(q + 32 * g, qa), second = store_s8(q + 32 * g + 16, qb);
      float scale = step[i];
      if (largest[i] * largest[i] > limit) {
        wide[g / 64] |= uint64_t{1} << (g % 64);
        const Vec steps = set1(static_cast<float>(QuantRow::kWide));
        first = QuantRow::kWide * first +
                store_s8(fine + 32 * g, round_to_int(mul(sub(ya, to_float(qa)), steps)));
        second = QuantRow::kWide * second +
                 store_s8(fine + 32 * g + 16, round_to_int(mul(sub(yb, to_float(qb)), steps)));
        scale /= static_cast<float>(QuantRow::kWide);
      }
      scales[g] = scale;
      sums[2 * g] = first;
      sums[2 * g + 1] = second;
      scaled_sums[g] = scale * static_cast<float>(first + second);
    }
  }
}

// Sum over a row in sixteen lanes, then the fixed fold; the tail goes through lane-wise zeros.
template <class Term>
HR_INLINE float sum_row(const float* x, int width, Term term) {
  Vec acc = zero();
  int i = 0;
  for (; i + 16 <= width; i += 16) acc = term(acc, load(x + i));
  if (i < width) {
    float tail[16] = {};
    for (int j = 0; i + j < width; ++j) tail[j] = x[i + j];
    acc = keep_lanes(term(acc, load(tail)), 0, width - i, acc);
  }
  return reduce_add(acc);
}

// `out` may be `x`: post-layernorm normalises the residual stream where it lies.
HR_INLINE void norm_row(const float* x, const float* weight, const float* bias, int width, bool layer,
                        float eps, float* out, bool accumulate) {
  float mean = 0.0f;
  if (layer) mean = sum_row(x, width, [](Vec acc, Vec v) { return add(acc, v); }) / static_cast<float>(width);
  const Vec m = set1(mean);
  const float squares = sum_row(x, width, [m](Vec acc, Vec v) {
    const Vec d = sub(v, m);
    return fma(d, d, acc);
  });
  const float factor = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
  const Vec f = set1(factor);
  int i = 0;
  for (; i + 16 <= width; i += 16) {
    Vec y = mul(mul(sub(load(x + i), m), f), load(weight + i));
    if (bias) y = add(y, load(bias + i));
    if (accumulate) y = add(y, load(out + i));
    store(out + i, y);
  }
  for (; i < width; ++i) {
    float y = (x[i] - mean) * factor * weight[i];
    if (bias) y += bias[i];
    out[i] = accumulate ? out[i] + y : y;
  }
}

// Within 3e-7. Abramowitz & Stegun, Handbook of Mathematical Functions, 7.1.26.
HR_INLINE Vec erf(Vec x) {
  const Vec size = abs(x);
  const Vec t = div(set1(1.0f), fma(size, set1(0.3275911f), set1(1.0f)));
  Vec p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  const Vec y = sub(set1(1.0f), mul(mul(p, t), exp(sub(zero(), mul(x, x)))));
  return select_less(x, zero(), sub(zero(), y), y);
}

HR_INLINE Vec activate(Vec x, int kind) {
  if (kind == 0) return div(x, add(set1(1.0f), exp(sub(zero(), x))));  // silu
  if (kind == 2) return mul(mul(set1(0.5f), x), add(set1(1.0f), erf(mul(x, set1(0.70710678118654752f)))));
  const Vec inner = mul(set1(0.7978845608028654f), fma(mul(mul(x, x), x), set1(0.044715f), x));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));  // gelu, tanh form
}

}  // namespace

void norm(const NormArgs& a, int row_begin, int row_end) {
  for (int row = row_begin; row < row_end; ++row) {
    const int source = a.gather ? a.gather[row] : row;
    const float* x = a.input + static_cast<size_t>(source) * a.input_stride;
    float* out = a.output + static_cast<size_t>(row) * a.output_stride;
    norm_row(x, a.weight, a.bias, a.width, a.layer_norm != 0, a.eps, out, a.add != 0);
    if (a.quantised) {
      const int padded = (a.width + 31) / 32 * 32;
      quantise_row(out, a.width, a.quantised + static_cast<size_t>(row) * QuantRow::bytes(padded));
    }
  }
}

void quantise(const float* input, size_t stride, uint8_t* output, int width, int row_begin, int row_end) {
  const size_t bytes = QuantRow::bytes((width + 31) / 32 * 32);
  for (int row = row_begin; row < row_end; ++row)
    quantise_row(input + static_cast<size_t>(row) * stride, width, output + static_cast<size_t>(row) * bytes);
}

void glu(const float* input, size_t stride, int up_offset, int activation, float* output,
         size_t output_stride, uint8_t* quantised, int width, int row_begin, int row_end) {
  const size_t bytes = QuantRow::bytes((width + 31) / 32 * 32);
  for (int row = row_begin; row < row_end; ++row) {
    const float* gate = input + static_cast<size_t>(row) * stride;
    const float* up = gate + up_offset;
    float* out = output + static_cast<size_t>(row) * output_stride;
    int i = 0;
    for (; i + 16 <= width; i += 16) {
      const Vec y = activate(load(gate + i), activation);
      store(out + i, up_offset == 0 ? y : mul(y, load(up + i)));
    }
    if (i < width) {
      float g[16] = {}, u[16] = {}, y[16];
      for (int j = 0; i + j < width; ++j) {
        g[j] = gate[i + j];
        u[j] = up[i + j];
      }
      const Vec activated = activate(load(g), activation);
      store(y, up_offset == 0 ? activated : mul(activated, load(u)));
      for (int j = 0; i + j < width; ++j) out[i + j] = y[j];
    }
    if (quantised) quantise_row(out, width, quantised + static_cast<size_t>(row) * bytes);
  }
}

namespace {

HR_INLINE void write_bf16(uint8_t* key_block, uint8_t* value_block, int slot, const float* k, const float* v,
                          int head_dim) {
  constexpr int kPart = 32;  // features, rounded together and then stored one by one
  uint16_t* keys = reinterpret_cast<uint16_t*>(key_block) + slot * 2;
  uint16_t* values =
      reinterpret_cast<uint16_t*>(value_block) + static_cast<size_t>(slot / 2) * head_dim * 2 + slot % 2;
  const auto write = [&](int first, int count) {
    uint16_t key[kPart], value[kPart];
    for (int i = 0; i < count; ++i) key[i] = float_to_bf16(k[first + i]);
    for (int i = 0; i < count; ++i) value[i] = float_to_bf16(v[first + i]);
    for (int i = 0; i < count; i += 2) std::memcpy(keys + (first + i) * 16, key + i, 4);
    for (int i = 0; i < count; ++i) values[(first + i) * 2] = value[i];
  };
  int d = 0;
  for (; d + kPart <= head_dim; d += kPart) write(d, kPart);
  if (d < head_dim) write(d, head_dim - d);
}

// One stage of the fast Walsh-Hadamard transform: sums and differences of values HALF apart.
template <int HALF>
HR_INLINE void sums_and_differences(float* x, int width) {
  for (int i = 0; i < width; i += 2 * HALF) {
    for (int j = i; j < i + HALF; ++j) {
      const float a = x[j], b = x[j + HALF];
      x[j] = a + b;
      x[j + HALF] = a - b;
    }
  }
}

// Rotates a head by the Walsh-Hadamard matrix, in place, in blocks of the largest power of two that divides
// its width; not normalised, so that twice gives the block's width times the vector. A product of two vectors
// that are both rotated is what it was, and a key's outlying features no longer set the step of all others:
// on SmolLM2 that takes three quarters off what keys in int8 cost. (QuaRot, arXiv 2404.00456, rotates keys
// for this.)
HR_INLINE void rotate(float* x, int width, int block) {
  sums_and_differences<1>(x, width);  // widths are even
  if (block >= 4) sums_and_differences<2>(x, width);
  if (block >= 8) sums_and_differences<4>(x, width);
  if (block >= 16) sums_and_differences<8>(x, width);
  for (int half = 16; half < block; half *= 2) {
    for (int i = 0; i < width; i += 2 * half) {
      for (int j = i; j < i + half; j += 16) {
        const Vec a = load(x + j), b = load(x + j + half);
        store(x + j, add(a, b));
        store(x + j + half, sub(a, b));
      }
    }
  }
}

// One vector to int8 by its largest magnitude, handed to put(d, integer); the scale, NaN if a value is not
// finite.
template <class Put>
HR_INLINE float quantise_vector(const float* x, int width, Put put) {
  float tail[16] = {};
  for (int i = 0; i < width % 16; ++i) tail[i] = x[width / 16 * 16 + i];
  const auto part = [&](int d) { return load(d + 16 <= width ? x + d : tail); };
  IVec top_bits = izero();
  for (int d = 0; d < width; d += 16) top_bits = max(top_bits, magnitude_bits(part(d)));
  const int32_t bits = reduce_max(top_bits);
  float top;
  std::memcpy(&top, &bits, sizeof top);
  const Vec inverse = set1(top > kSmallest ? 127.0f / top : 0.0f);
  for (int d = 0; d < width; d += 16) {
    int8_t q[16];
    store_s8(q, round_to_int(mul(part(d), inverse)));
    for (int i = 0; i < 16 && d + i < width; ++i) put(d + i, q[i]);
  }
  return (top > kSmallest ? top / 127.0f : 0.0f) + (top - top);
}

HR_INLINE void write_int8(uint8_t* keys, uint8_t* values, int slot, const float* k, const float* v,
                          int head_dim) {
  float* key_scales = reinterpret_cast<float*>(keys + int8_key_codes(head_dim));
  float* value_scales = reinterpret_cast<float*>(values + int8_value_codes(head_dim));
  key_scales[slot] = quantise_vector(k, head_dim, [&](int d, int8_t q) {
    keys[d / 4 * 64 + slot * 4 + d % 4] = static_cast<uint8_t>(q + 128);
  });
  value_scales[slot] = quantise_vector(v, head_dim, [&](int d, int8_t q) {
    values[(static_cast<size_t>(slot / 4) * head_dim + d) * 4 + slot % 4] = static_cast<uint8_t>(q);
  });
}

}  // namespace

void rope(const RopeArgs& a, int row_begin, int row_end) {
  const int half = a.rope_dim / 2;
  const bool int8 = a.kv.format == KvFormat::kInt8;
  const int block_width = a.head_dim & -a.head_dim;
  const auto head = [&](float* x, const float* weight, const float* angles, float scale) {
    if (weight) norm_row(x, weight, nullptr, a.head_dim, false, a.eps, x, false);
    if (angles) {
      const float* cosine = angles;
      const float* sine = angles + half;
      int i = 0;
      for (; i + 16 <= half; i += 16) {
        const Vec first = load(x + i), second = load(x + half + i), c = load(cosine + i), s = load(sine + i);
        store(x + i, sub(mul(first, c), mul(second, s)));
        store(x + half + i, add(mul(second, c), mul(first, s)));
      }
      for (; i < half; ++i) {
        const float first = x[i], second = x[half + i];
        x[i] = first * cosine[i] - second * sine[i];
        x[half + i] = second * cosine[i] + first * sine[i];
      }
    }
    if (scale != 1.0f)
      for (int i = 0; i < a.head_dim; ++i) x[i] *= scale;
  };
  for (int row = row_begin; row < row_end; ++row) {
    float* x = a.qkv + static_cast<size_t>(row) * a.stride;
    const float* angles = a.angles ? a.angles + static_cast<size_t>(row) * a.rope_dim : nullptr;
    for (int h = 0; h < a.heads; ++h) {
      float* q = x + a.q_offset + h * a.head_dim;
      head(q, a.q_norm, angles, a.scale);
      if (!int8) continue;
      rotate(q, a.head_dim, block_width);
      for (int i = 0; i < a.head_dim; ++i) q[i] *= 1.0f / static_cast<float>(block_width);  // exact
    }
    const int32_t slot = a.slots[row];
    for (int h = 0; h < a.kv_heads; ++h) {
      float* k = x + a.k_offset + h * a.head_dim;
      const float* v = x + a.v_offset + h * a.head_dim;
      head(k, a.k_norm, angles, 1.0f);
      uint8_t *keys = a.kv.keys(h, slot / 16), *values = a.kv.values(h, slot / 16);
      if (int8) {
        rotate(k, a.head_dim, block_width);
        write_int8(keys, values, slot % 16, k, v, a.head_dim);
      } else {
        write_bf16(keys, values, slot % 16, k, v, a.head_dim);
      }
    }
  }
}

// Rows are summed one after the other, so a vector depends on nothing but its own sequence.
void pool(const PoolArgs& a) {
  const float* first = a.input + static_cast<size_t>(a.row_begin) * a.input_stride;
  std::memcpy(a.output, first, static_cast<size_t>(a.width) * sizeof(float));
  if (a.mean) {
    for (int row = a.row_begin + 1; row < a.row_end; ++row) {
      const float* x = a.input + static_cast<size_t>(row) * a.input_stride;
      for (int i = 0; i < a.width; ++i) a.output[i] += x[i];
    }
    const float count = static_cast<float>(a.row_end - a.row_begin);
    for (int i = 0; i < a.width; ++i) a.output[i] /= count;
  }
  if (!a.normalise) return;
  const float length = std::sqrt(sum_row(a.output, a.width, [](Vec acc, Vec v) { return fma(v, v, acc); }));
  const float divisor = length < 1e-12f ? 1e-12f : length;  // NaN stays NaN
  for (int i = 0; i < a.width; ++i) a.output[i] /= divisor;
}

void softcap(float* x, size_t count, float cap) {
  const Vec c = set1(cap);
  size_t i = 0;
  for (; i + 16 <= count; i += 16) store(x + i, mul(c, tanh(div(load(x + i), c))));
  if (i < count) {
    float t[16] = {};
    for (size_t j = 0; i + j < count; ++j) t[j] = x[i + j];
    store(t, mul(c, tanh(div(load(t), c))));
    for (size_t j = 0; i + j < count; ++j) x[i + j] = t[j];
  }
}

}  // namespace HR_ISA
}  // namespace headrace
