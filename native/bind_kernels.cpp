// Single kernels, for the tests that hold each of them against the float32 oracle.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <vector>

#include "isa.h"

namespace nb = nanobind;

namespace headrace {
namespace {

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using OutMatrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

int padded(int k) { return (k + 31) / 32 * 32; }

void expect(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

WeightFormat make_format(int kind, int scale_bytes, int offsets, int group, int zero_point) {
  return {kind, scale_bytes, offsets, group, zero_point};
}

void quantise(const std::string& isa, Matrix<float> x, OutMatrix<uint8_t> out) {
  const int rows = static_cast<int>(x.shape(0)), k = static_cast<int>(x.shape(1));
  expect(out.shape(0) == x.shape(0) && out.shape(1) == QuantRow::bytes(padded(k)),
         "quantise: wrong output shape");
  kernels_for(isa).quantise(x.data(), static_cast<size_t>(k), out.data(), k, 0, rows);
}

// input: QuantRow bytes for quantised formats, the bytes of float32 rows for dense ones.
void matmul(const std::string& isa, WeightFormat format, Vector<uint8_t> weights, Matrix<uint8_t> input,
            OutMatrix<float> out, int k, bool accumulate) {
  MatmulArgs a{};
  a.format = format;
  a.weights = weights.data();
  a.input = input.data();
  a.input_stride = input.shape(1);
  a.output = out.data();
  a.output_stride = out.shape(1);
  a.n = static_cast<int>(out.shape(1));
  a.k = format.dense() ? k : padded(k);
  a.add = accumulate;
  std::vector<float> scratch(matmul_scratch_floats(format, a.k));
  a.scratch = scratch.data();
  const int tiles = (a.n + 15) / 16;
  const size_t bytes = format.matrix_bytes(a.n, a.k);
  const size_t row_bytes = format.dense() ? static_cast<size_t>(k) * 4 : QuantRow::bytes(a.k);
  expect(weights.shape(0) >= bytes, "matmul: too few weight bytes");
  expect(input.shape(0) == out.shape(0) && input.shape(1) == row_bytes, "matmul: wrong input shape");
  nb::gil_scoped_release release;
  const int rows = static_cast<int>(out.shape(0));
  for (int row = 0; row < rows; row += kRowBlock)
    kernels_for(isa).matmul(a, 0, tiles, row, row + kRowBlock < rows ? row + kRowBlock : rows);
}

void norm(const std::string& isa, Matrix<float> x, Vector<float> weight, float eps, bool layer,
          OutMatrix<float> out, std::optional<Vector<float>> bias) {
  expect(x.shape(0) == out.shape(0) && x.shape(1) == out.shape(1) && weight.shape(0) == x.shape(1),
         "norm: shapes differ");
  expect(!bias || bias->shape(0) == x.shape(1), "norm: the bias is not as wide as the rows");
  NormArgs a{};
  a.input = x.data();
  a.input_stride = x.shape(1);
  a.weight = weight.data();
  a.bias = bias ? bias->data() : nullptr;
  a.output = out.data();
  a.output_stride = out.shape(1);
  a.width = static_cast<int32_t>(x.shape(1));
  a.layer_norm = layer;
  a.eps = eps;
  kernels_for(isa).norm(a, 0, static_cast<int>(x.shape(0)));
}

void glu(const std::string& isa, Matrix<float> gate_up, int activation, OutMatrix<float> out) {
  expect(gate_up.shape(0) == out.shape(0) && gate_up.shape(1) == 2 * out.shape(1), "glu: shapes differ");
  const int width = static_cast<int>(out.shape(1));
  kernels_for(isa).glu(gate_up.data(), gate_up.shape(1), width, activation, out.data(), out.shape(1), nullptr,
                       width, 0, static_cast<int>(out.shape(0)));
}

// activation(x), the feed-forward without a gate.
void activate(const std::string& isa, Matrix<float> x, int activation, OutMatrix<float> out) {
  expect(x.shape(0) == out.shape(0) && x.shape(1) == out.shape(1), "activate: shapes differ");
  kernels_for(isa).glu(x.data(), x.shape(1), 0, activation, out.data(), out.shape(1), nullptr,
                       static_cast<int>(out.shape(1)), 0, static_cast<int>(out.shape(0)));
}

// Rows query_start[s] ... query_start[s + 1] of x to row s of out.
void pool(const std::string& isa, Matrix<float> x, Vector<int32_t> query_start, bool mean, bool normalise,
          OutMatrix<float> out) {
  expect(x.shape(1) == out.shape(1) && query_start.shape(0) == out.shape(0) + 1, "pool: shapes differ");
  PoolArgs a{};
  a.input = x.data();
  a.input_stride = x.shape(1);
  a.width = static_cast<int32_t>(x.shape(1));
  a.mean = mean;
  a.normalise = normalise;
  for (size_t s = 0; s < out.shape(0); ++s) {
    a.row_begin = query_start.data()[s];
    a.row_end = query_start.data()[s + 1];
    expect(a.row_begin >= 0 && a.row_begin < a.row_end && static_cast<size_t>(a.row_end) <= x.shape(0),
           "pool: rows");
    a.output = out.data() + s * out.shape(1);
    kernels_for(isa).pool(a);
  }
}

void embed(const std::string& isa, WeightFormat format, Vector<uint8_t> weights, Vector<int32_t> ids,
           int vocab, float scale, OutMatrix<float> out) {
  const int k = static_cast<int>(out.shape(1));
  const size_t bytes = format.matrix_bytes(vocab, format.dense() ? k : padded(k));
  expect(weights.shape(0) >= bytes && ids.shape(0) == out.shape(0), "embed: shapes differ");
  for (size_t i = 0; i < ids.shape(0); ++i)
    expect(ids.data()[i] >= 0 && ids.data()[i] < vocab, "embed: id out of range");
  kernels_for(isa).embed(format, weights.data(), k, padded(k), ids.data(), scale, false, out.data(),
                         out.shape(1), 0, static_cast<int>(out.shape(0)));
}

void softcap(const std::string& isa, OutMatrix<float> x, float cap) {
  kernels_for(isa).softcap(x.data(), x.shape(0) * x.shape(1), cap);
}

// Writes k and v of one projected row [q | k | v] per token into the pool and rotates q in place.
void rope(const std::string& isa, OutMatrix<float> qkv, int heads, int kv_heads, Matrix<float> angles,
          float scale, nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> kv,
          Vector<int32_t> slots, bool int8) {
  expect(heads >= 1 && kv_heads >= 1, "rope: no heads");
  const int head_dim = static_cast<int>(qkv.shape(1)) / (heads + 2 * kv_heads);
  expect(static_cast<size_t>(head_dim) * (heads + 2 * kv_heads) == qkv.shape(1),
         "rope: width is not whole heads");
  expect(angles.shape(0) == qkv.shape(0) && slots.shape(0) == qkv.shape(0), "rope: shapes differ");
  expect(angles.shape(1) % 2 == 0 && static_cast<int>(angles.shape(1)) <= head_dim, "rope: too many angles");
  RopeArgs a{};
  a.qkv = qkv.data();
  a.stride = qkv.shape(1);
  a.k_offset = heads * head_dim;
  a.v_offset = (heads + kv_heads) * head_dim;
  a.heads = heads;
  a.kv_heads = kv_heads;
  a.head_dim = head_dim;
  a.rope_dim = static_cast<int32_t>(angles.shape(1));
  a.scale = scale;
  a.angles = angles.data();
  const KvFormat format = int8 ? KvFormat::kInt8 : KvFormat::kBf16;
  const size_t block = kv_heads * kv_head_bytes(format, head_dim);
  a.kv = {kv.data(), static_cast<int64_t>(kv.shape(0) / block), kv_heads, head_dim, format};
  a.slots = slots.data();
  for (size_t i = 0; i < slots.shape(0); ++i)
    expect(slots.data()[i] >= 0 && (static_cast<size_t>(slots.data()[i]) / 16 + 1) * block <= kv.shape(0),
           "rope: slot outside of the pool");
  kernels_for(isa).rope(a, 0, static_cast<int>(qkv.shape(0)));
}

void attention(const std::string& isa, Matrix<float> q, int heads, int kv_heads, Vector<uint8_t> kv,
               Vector<int32_t> table, Vector<int32_t> positions, int window, float cap, OutMatrix<float> out,
               int length, bool int8) {
  expect(heads >= 1 && kv_heads >= 1 && heads % kv_heads == 0 && heads / kv_heads <= kMaxQueryVectors,
         "attention: heads");
  const int head_dim = static_cast<int>(q.shape(1)) / heads;
  const KvFormat format = int8 ? KvFormat::kInt8 : KvFormat::kBf16;
  const size_t block = kv_heads * kv_head_bytes(format, head_dim);
  expect(q.shape(0) == out.shape(0) && q.shape(1) == out.shape(1) && positions.shape(0) == q.shape(0),
         "attention: shapes");
  for (size_t i = 0; i < table.shape(0); ++i)
    expect(table.data()[i] >= 0 && (static_cast<size_t>(table.data()[i]) + 1) * block + 64 <= kv.shape(0),
           "attention: block");
  for (size_t i = 0; i < positions.shape(0); ++i)
    expect(positions.data()[i] >= 0 && static_cast<size_t>(positions.data()[i]) / 16 < table.shape(0),
           "attention: position");
  expect(length >= 0 && static_cast<size_t>(length) <= 16 * table.shape(0), "attention: length");
  std::vector<float> scratch(attention_scratch_floats((head_dim + 15) / 16 * 16));
  AttentionArgs a{};
  a.q = q.data();
  a.q_stride = q.shape(1);
  a.output = out.data();
  a.output_stride = out.shape(1);
  a.kv = {kv.data(), static_cast<int64_t>((kv.shape(0) - 64) / block), kv_heads, head_dim, format};
  a.block_table = table.data();
  a.positions = positions.data();
  a.heads = heads;
  a.kv_heads = kv_heads;
  a.head_dim = head_dim;
  a.window = window;
  a.length = length;
  a.softcap = cap;
  a.scratch = scratch.data();
  const int rows = attention_rows_per_unit(heads / kv_heads), n = static_cast<int>(q.shape(0));
  for (a.kv_head = 0; a.kv_head < kv_heads; ++a.kv_head)
    for (int row = 0; row < n; row += rows) {
      a.row_begin = row;
      a.row_end = row + rows < n ? row + rows : n;
      int8 ? kernels_for(isa).attention_int8(a) : kernels_for(isa).attention(a);
    }
}

}  // namespace

void bind_kernels(nb::module_& m) {
  nb::class_<WeightFormat>(m, "WeightFormat", "How a matrix is packed; see native/kernels.h.")
      .def("__init__",
           [](WeightFormat* self, int kind, int scale_bytes, int offsets, int group, int zero_point) {
             new (self) WeightFormat(make_format(kind, scale_bytes, offsets, group, zero_point));
           })
      .def("tile_bytes", &WeightFormat::tile_bytes)
      .def("matrix_bytes", &WeightFormat::matrix_bytes);
  m.def("quantise", &quantise);
  m.def("matmul", &matmul);
  m.def("norm", &norm, nb::arg("isa"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("layer"),
        nb::arg("out"), nb::arg("bias").none() = nb::none());
  m.def("glu", &glu);
  m.def("activate", &activate);
  m.def("pool", &pool);
  m.def("embed", &embed);
  m.def("softcap", &softcap);
  m.def("rope", &rope, nb::arg("isa"), nb::arg("qkv"), nb::arg("heads"), nb::arg("kv_heads"),
        nb::arg("angles"), nb::arg("scale"), nb::arg("kv"), nb::arg("slots"), nb::arg("int8") = false);
  m.def("attention", &attention, nb::arg("isa"), nb::arg("q"), nb::arg("heads"), nb::arg("kv_heads"),
        nb::arg("kv"), nb::arg("table"), nb::arg("positions"), nb::arg("window"), nb::arg("cap"),
        nb::arg("out"), nb::arg("length") = 0,  // of the whole sequence, or 0 for causal
        nb::arg("int8") = false);
}

}  // namespace headrace
