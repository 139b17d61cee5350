// Intel AMX: eight registers of up to 16 rows of 64 bytes, multiplied as small matrices. A thread has them
// from Tiles' construction to its end; the shapes are fixed in between.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd.h"

namespace headrace {
namespace HR_ISA {
namespace {

// The compiler's own functions for these do not tell it which memory they read, so it may leave out what was
// stored there for them.
template <int To>
HR_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(To));
}
// Rows from p on, `stride` bytes apart.
template <int To>
HR_INLINE void load_tile(const void* p, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(To) : "memory");
}
template <int From>
HR_INLINE void store_tile(void* p, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(From) : "memory");
}
// To[m][n] += sum over k of X[m][k] * W[k / 4][n][k % 4]: signed bytes times unsigned ones.
template <int To, int X, int W>
HR_INLINE void add_s8_u8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(To), "i"(X), "i"(W));
}
// To[m][n] += sum over k of X[m][k] * W[k / 2][n][k % 2], of bf16.
template <int To, int X, int W>
HR_INLINE void add_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(To), "i"(X), "i"(W));
}

struct TileShape {
  int rows, bytes;  // of a row
};

class Tiles {
 public:
  explicit Tiles(const TileShape (&shapes)[8]) {
    alignas(64) Config config{};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = static_cast<uint8_t>(shapes[i].rows);
      config.row_bytes[i] = static_cast<uint16_t>(shapes[i].bytes);
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Tiles() { asm volatile("tilerelease" ::: "memory"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(Config) == 64, "as the processor reads it");
};

}  // namespace
}  // namespace HR_ISA
}  // namespace headrace
