// The kernel table of avx512_bf16 with what AMX multiplies.
#include "kernels.h"

namespace headrace {
namespace avx512_amx {
void quant_matmul(const MatmulArgs&, int, int, int, int);
void dense_matmul(const MatmulArgs&, int, int, int, int);
void attention(const AttentionArgs&);
int64_t multiply(MultiplyKind, int64_t);
}  // namespace avx512_amx

const Kernels& avx512_amx_kernels() {
  static const Kernels table = [] {
    Kernels all = avx512_bf16_kernels();
    all.name = "avx512_amx";
    all.tile_run = 1;
    all.quant_matmul = avx512_amx::quant_matmul;
    all.dense_matmul = avx512_amx::dense_matmul;
    all.attention = avx512_amx::attention;
    all.multiply = avx512_amx::multiply;
    return all;
  }();
  return table;
}

}  // namespace headrace
