// The sampler by itself, for the tests that hold it against the numpy one and for measuring it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "isa.h"
#include "philox.h"
#include "sampling_table.h"

namespace nb = nanobind;

namespace headrace {
namespace {

template <class T>
nb::ndarray<nb::numpy, T> owned(std::vector<T> values, std::initializer_list<size_t> shape) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(kept->data(), shape, owner);
}

nb::tuple sample(nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> logits, const nb::object& table,
                 const std::string& isa) {
  const size_t m = logits.shape(0), vocab = logits.shape(1);
  if (vocab == 0 || vocab > INT32_MAX / 2) throw std::invalid_argument("sample: a vocabulary needs at least one token");
  const SamplingArrays arrays = sampling_arrays(table, m, vocab);
  const Kernels& kernels = kernels_for(isa);
  size_t width = 0;
  for (size_t i = 0; i < m; ++i) width = std::max(width, static_cast<size_t>(std::max(0, arrays.num_logprobs[i])));

  std::vector<int32_t> token_ids(m), top_ids(m * width, -1);
  std::vector<float> logprobs(m), top_logprobs(m * width, NAN);
  std::vector<uint8_t> failed(m);
  {
    nb::gil_scoped_release release;
    std::vector<double> workspace(sampler_workspace_bytes(static_cast<int32_t>(vocab)) / sizeof(double));
    for (size_t i = 0; i < m; ++i) {
      SampledRow out{0, NAN, false, top_ids.data() + i * width, top_logprobs.data() + i * width};
      kernels.sample_row(logits.data() + i * vocab, static_cast<int32_t>(vocab), arrays.row(static_cast<int>(i)),
                         workspace.data(), &out);
      token_ids[i] = out.token_id;
      logprobs[i] = out.logprob;
      failed[i] = out.failed;
    }
  }
  return nb::make_tuple(owned(std::move(token_ids), {m}), owned(std::move(logprobs), {m}),
                        owned(std::move(top_ids), {m, width}), owned(std::move(top_logprobs), {m, width}),
                        owned(std::move(failed), {m}));
}

}  // namespace

void bind_sampler(nb::module_& m) {
  m.def("sample", &sample, nb::arg("logits").noconvert(), nb::arg("table"), nb::kw_only(), nb::arg("isa") = "",
        "Samples every row of float32 logits [m, vocab], overwriting them where bias, penalties, mask and top-k say so.\n"
        "Returns token_ids, logprobs, top_ids, top_logprobs and failed (uint8), shaped as StepResult's.");
  m.def(
      "philox4x32",
      [](uint64_t key, std::array<uint32_t, 4> counter) {
        const PhiloxWords w = philox4x32(key, {{counter[0], counter[1], counter[2], counter[3]}});
        return nb::make_tuple(w.word[0], w.word[1], w.word[2], w.word[3]);
      },
      nb::arg("key"), nb::arg("counter"), "Four words of Philox4x32-10.");
}

}  // namespace headrace
