// The kernel table of one ISA path. Compiled once per path, like the kernels it names.
#include "kernels.h"

#define HR_STRINGIFY2(x) #x
#define HR_STRINGIFY(x) HR_STRINGIFY2(x)
#define HR_JOIN2(a, b) a##b
#define HR_JOIN(a, b) HR_JOIN2(a, b)

// A path may take all but what multiplies bf16 from another (HR_BASE).
#ifndef HR_BASE
#define HR_BASE HR_ISA
#endif

namespace headrace {
namespace HR_ISA {
void dense_matmul(const MatmulArgs&, int, int, int, int);
void attention(const AttentionArgs&);
void merge_partitions(const AttentionArgs&, int);
int64_t multiply(MultiplyKind, int64_t);
}  // namespace HR_ISA
namespace HR_BASE {
void quant_matmul(const MatmulArgs&, int, int, int, int);
void norm(const NormArgs&, int, int);
void quantise(const float*, size_t, uint8_t*, int, int, int);
void glu(const float*, size_t, int, int, float*, size_t, uint8_t*, int, int, int);
void rope(const RopeArgs&, int, int);
void attention_int8(const AttentionArgs&);
void embed(const WeightFormat&, const uint8_t*, int, int, const int32_t*, float, bool, float*, size_t, int,
           int);
void pool(const PoolArgs&);
void softcap(float*, size_t, float);
void sample_row(float*, int32_t, const SamplingRow&, void*, SampledRow*);
float read_lines(const uint8_t*, size_t);
}  // namespace HR_BASE

const Kernels& HR_JOIN(HR_ISA, _kernels)() {
  static const Kernels table{HR_STRINGIFY(HR_ISA),
                             4,
                             HR_BASE::quant_matmul,
                             HR_ISA::dense_matmul,
                             HR_BASE::norm,
                             HR_BASE::quantise,
                             HR_BASE::glu,
                             HR_BASE::rope,
                             HR_ISA::attention,
                             HR_BASE::attention_int8,
                             HR_ISA::merge_partitions,
                             HR_BASE::embed,
                             HR_BASE::pool,
                             HR_BASE::softcap,
                             HR_BASE::sample_row,
                             HR_BASE::read_lines,
                             HR_ISA::multiply};
  return table;
}

}  // namespace headrace
