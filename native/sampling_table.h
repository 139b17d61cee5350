// Reading a SamplingTable (src/headrace/backend/batch.py) as the sampler's plain arrays.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

#include "sampler.h"

namespace headrace {

template <class T>
using Column = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

// A column without conversion: a converted copy would be gone before the sampler reads it.
template <class T>
const T* sampling_column(const nanobind::object& table, const char* name, size_t entries) {
  Column<T> column;
  if (!nanobind::try_cast(table.attr(name), column, false) || column.shape(0) != entries)
    throw std::invalid_argument(std::string("sampling table: ") + name + " must be a contiguous array of " +
                                std::to_string(entries) + " entries of the type that SamplingTable names");
  return column.data();
}

// Views into the table's arrays, which must outlive them. Throws std::invalid_argument where lengths, offsets or mask
// rows do not fit `rows` rows of `vocab` logits. (Ids outside the vocabulary fail their row when it is sampled.)
inline SamplingArrays sampling_arrays(const nanobind::object& table, size_t rows, size_t vocab) {
  SamplingArrays s{};
  s.temperature = sampling_column<float>(table, "temperature", rows);
  s.top_k = sampling_column<int32_t>(table, "top_k", rows);
  s.top_p = sampling_column<float>(table, "top_p", rows);
  s.min_p = sampling_column<float>(table, "min_p", rows);
  s.presence = sampling_column<float>(table, "presence_penalty", rows);
  s.frequency = sampling_column<float>(table, "frequency_penalty", rows);
  s.repetition = sampling_column<float>(table, "repetition_penalty", rows);
  s.seed = sampling_column<uint64_t>(table, "seed", rows);
  s.choice = sampling_column<uint32_t>(table, "choice", rows);
  s.position = sampling_column<uint32_t>(table, "position", rows);
  s.num_logprobs = sampling_column<int32_t>(table, "num_logprobs", rows);
  s.mask_row = sampling_column<int32_t>(table, "mask_row", rows);
  s.seen_start = sampling_column<int32_t>(table, "seen_start", rows + 1);
  s.bias_start = sampling_column<int32_t>(table, "bias_start", rows + 1);

  const auto entries = [rows](const int32_t* start, const char* name) {
    bool ascending = start[0] == 0;
    for (size_t i = 0; i < rows; ++i) ascending = ascending && start[i] <= start[i + 1];
    if (!ascending) throw std::invalid_argument(std::string("sampling table: ") + name + " must ascend from 0");
    return static_cast<size_t>(start[rows]);
  };
  const size_t seen = entries(s.seen_start, "seen_start"), bias = entries(s.bias_start, "bias_start");
  s.seen_ids = sampling_column<int32_t>(table, "seen_ids", seen);
  s.seen_counts = sampling_column<int32_t>(table, "seen_counts", seen);
  s.bias_ids = sampling_column<int32_t>(table, "bias_ids", bias);
  s.bias_values = sampling_column<float>(table, "bias_values", bias);

  nanobind::ndarray<const uint32_t, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu> masks;
  if (!nanobind::try_cast(table.attr("masks"), masks, false))
    throw std::invalid_argument("sampling table: masks must be a contiguous uint32 array of two dimensions");
  s.masks = masks.data();
  s.mask_words = masks.shape(1);
  for (size_t i = 0; i < rows; ++i) {
    if (s.mask_row[i] < 0) continue;
    if (static_cast<size_t>(s.mask_row[i]) >= masks.shape(0) || s.mask_words != (vocab + 31) / 32)
      throw std::invalid_argument("sampling table: mask_row names no row of masks, or its width is not the vocabulary's");
  }
  return s;
}

}  // namespace headrace
