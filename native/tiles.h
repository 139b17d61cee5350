// Intel AMX: eight registers of up to 16 rows of 64 bytes, multiplied as small matrices. A thread has them
// from Tiles' construction to its end; the shapes are fixed in between.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace headrace {
namespace HR_ISA {
namespace {

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
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
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
