// The Python face of the native engine: headrace.backend.cpu._native.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "isa.h"
#include "program.h"
#include "sampling_table.h"

namespace nb = nanobind;

namespace headrace {

void bind_sampler(nb::module_&);
void bind_kernels(nb::module_&);
void bind_limits(nb::module_&);

namespace {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Table = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using OutTable = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void expect(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("batch: wrong length of ") + what);
}

template <class A>
auto rows(const A& array, size_t count, const char* what) {
  expect(array.shape(0) == count, what);
  return array.data();
}

// Owns the arrays behind the bases, so that they outlive every step.
class BoundProgram {
 public:
  BoundProgram(nb::bytes instructions, int max_tokens, int max_sequences, int max_logit_rows,
               int max_positions, int vocab, std::vector<int64_t> block_bytes, const std::string& isa,
               int threads)
      : program_(unpack(instructions),
                 Limits{max_tokens, max_sequences, max_logit_rows, max_positions, vocab,
                        static_cast<int32_t>(block_bytes.size()), block_bytes},
                 kernels_for(isa), threads) {}

  void bind(std::vector<nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>> bases) {
    std::vector<uint8_t*> pointers;
    std::vector<int64_t> sizes;
    for (const auto& base : bases) {
      // Weights are only read; scratch and KV are the caller's writable arrays.
      pointers.push_back(const_cast<uint8_t*>(base.data()));
      sizes.push_back(static_cast<int64_t>(base.shape(0)));
    }
    program_.bind(std::move(pointers), std::move(sizes));
    bases_ = std::move(bases);
  }

  void run(Array<int32_t> token_ids, Array<int32_t> positions, Array<int32_t> query_start,
           Array<int32_t> context_len, nb::tuple slot_mapping, nb::tuple block_tables,
           Array<int32_t> logit_rows, nb::object sampling, Out<int32_t> out_ids, Out<float> out_logprobs,
           OutTable<int32_t> out_top_ids, OutTable<float> out_top_logprobs, Out<uint8_t> out_failed) {
    unpack(slot_mapping, slot_mapping_, "slot_mapping");
    unpack(block_tables, block_tables_, "block_tables");
    BatchView& b = batch_;
    b.slot_mapping.clear();
    b.block_tables.clear();
    b.table_widths.clear();
    const size_t n = token_ids.shape(0), m = logit_rows.shape(0);
    expect(query_start.shape(0) >= 2, "query_start");
    const size_t r = query_start.shape(0) - 1;
    b.tokens = static_cast<int32_t>(n);
    b.sequences = static_cast<int32_t>(r);
    b.logit_rows = static_cast<int32_t>(m);
    b.token_ids = token_ids.data();
    b.positions = rows(positions, n, "positions");
    b.query_start = query_start.data();
    for (size_t i = 0; i < r; ++i)
      expect(query_start.data()[i] >= 0 && query_start.data()[i] <= query_start.data()[i + 1],
             "query_start's steps");
    b.context_len = rows(context_len, r, "context_len");
    b.logit_row_ids = logit_rows.data();
    expect(slot_mapping.size() + kKv == bases_.size() && block_tables.size() == slot_mapping.size(),
           "KV groups");
    for (size_t g = 0; g < slot_mapping.size(); ++g) {
      b.slot_mapping.push_back(rows(slot_mapping_[g], n, "slot_mapping"));
      b.block_tables.push_back(rows(block_tables_[g], r, "block_tables"));
      b.table_widths.push_back(static_cast<int32_t>(block_tables_[g].shape(1)));
    }
    b.sampling = sampling_arrays(sampling, m, vocab());
    expect(out_ids.shape(0) == m && out_logprobs.shape(0) == m && out_failed.shape(0) == m &&
               out_top_ids.shape(0) == m && out_top_logprobs.shape(0) == m &&
               out_top_ids.shape(1) == out_top_logprobs.shape(1),
           "results");
    ResultView result{out_ids.data(),
                      out_logprobs.data(),
                      out_top_ids.data(),
                      out_top_logprobs.data(),
                      static_cast<int32_t>(out_top_ids.shape(1)),
                      out_failed.data()};
    for (size_t i = 0; i < m; ++i)
      expect(b.sampling.num_logprobs[i] <= result.top_width, "top_ids (num_logprobs is larger)");
    nb::gil_scoped_release release;
    program_.run(b, result);
  }

  int threads() const { return program_.threads(); }
  std::string isa() const { return program_.kernels().name; }
  void set_profiling(bool on) { program_.set_profiling(on); }
  std::vector<double> take_profile() { return program_.take_profile(); }

 private:
  static std::vector<Instruction> unpack(const nb::bytes& raw) {
    if (raw.size() % sizeof(Instruction) != 0)
      throw std::invalid_argument("instructions: not a whole number of them");
    std::vector<Instruction> out(raw.size() / sizeof(Instruction));
    std::memcpy(out.data(), raw.c_str(), raw.size());
    return out;
  }

  // The arrays of a tuple, which outlives the step, into what is kept: a step takes no memory.
  template <class A>
  static void unpack(const nb::tuple& arrays, std::vector<A>& out, const char* what) {
    out.clear();
    for (nb::handle each : arrays) {
      A array;
      if (!nb::try_cast(each, array, false))
        throw nb::type_error((std::string("batch: ") + what + " must hold int32 arrays").c_str());
      out.push_back(std::move(array));
    }
  }

  size_t vocab() const { return static_cast<size_t>(program_.vocab()); }

  Program program_;
  BatchView batch_{};
  std::vector<Array<int32_t>> slot_mapping_;
  std::vector<Table<int32_t>> block_tables_;
  std::vector<nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>> bases_;
};

}  // namespace
}  // namespace headrace

NB_MODULE(_native, m) {
  using namespace headrace;
  m.doc() = "Native kernels and the program interpreter of the cpu backend.";
  m.attr("INSTRUCTION_BYTES") = sizeof(Instruction);
  m.def("supported_isas", &supported_isas, "Kernel paths that this CPU can run, best first.");
  m.def(
      "quant_row_bytes", [](int k) { return QuantRow::bytes(k); }, nb::arg("k"),
      "Bytes of one quantised row of k inputs.");
  nb::class_<BoundProgram>(m, "Program", "A recorded step; see native/program.h.")
      .def(nb::init<nb::bytes, int, int, int, int, int, std::vector<int64_t>, const std::string&, int>(),
           nb::arg("instructions"), nb::kw_only(), nb::arg("max_tokens"), nb::arg("max_sequences"),
           nb::arg("max_logit_rows"), nb::arg("max_positions"), nb::arg("vocab"), nb::arg("block_bytes"),
           nb::arg("isa"), nb::arg("threads"))
      .def("bind", &BoundProgram::bind, nb::arg("bases").noconvert())
      // A converted copy of an array would be cut to 32 bits, or take the results with it.
      .def("run", &BoundProgram::run, nb::arg("token_ids").noconvert(), nb::arg("positions").noconvert(),
           nb::arg("query_start").noconvert(), nb::arg("context_len").noconvert(),
           nb::arg("slot_mapping").noconvert(), nb::arg("block_tables").noconvert(),
           nb::arg("logit_rows").noconvert(), nb::arg("sampling"), nb::arg("token_id_out").noconvert(),
           nb::arg("logprob_out").noconvert(), nb::arg("top_id_out").noconvert(),
           nb::arg("top_logprob_out").noconvert(), nb::arg("failed_out").noconvert())
      .def("set_profiling", &BoundProgram::set_profiling, nb::arg("on"))
      .def("take_profile", &BoundProgram::take_profile)
      .def_prop_ro("threads", &BoundProgram::threads)
      .def_prop_ro("isa", &BoundProgram::isa);
  bind_sampler(m);
  bind_kernels(m);
  bind_limits(m);
}
