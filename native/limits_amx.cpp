// What matrix registers multiply at most: four sums in flight, factors already in registers.
#include "kernels.h"
#include "tiles.h"

namespace headrace {
namespace avx512_bf16 {
int64_t multiply(MultiplyKind, int64_t);
}

namespace HR_ISA {

int64_t multiply(MultiplyKind kind, int64_t rounds) {
  if (kind != MultiplyKind::kInt8 && kind != MultiplyKind::kBf16) return avx512_bf16::multiply(kind, rounds);
  const TileShape whole{16, 64};
  const Tiles tiles({whole, whole, whole, whole, whole, whole, whole, whole});
  if (kind == MultiplyKind::kInt8) {
    for (int64_t round = 0; round < rounds; ++round) {
      add_s8_u8<0, 4, 6>();
      add_s8_u8<1, 4, 7>();
      add_s8_u8<2, 5, 6>();
      add_s8_u8<3, 5, 7>();
    }
    return rounds * 4 * 16 * 16 * 64;
  }
  for (int64_t round = 0; round < rounds; ++round) {
    add_bf16<0, 4, 6>();
    add_bf16<1, 4, 7>();
    add_bf16<2, 5, 6>();
    add_bf16<3, 5, 7>();
  }
  return rounds * 4 * 16 * 16 * 32;
}

}  // namespace HR_ISA
}  // namespace headrace
