// Philox4x32-10: random words from a 64-bit key and a 128-bit counter, without state.
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11 (the Random123 library).
#pragma once

#include <cstdint>

namespace headrace {

struct PhiloxWords {
  uint32_t word[4];
};

static inline PhiloxWords philox4x32(uint64_t key, PhiloxWords counter) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  uint32_t* c = counter.word;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c[2];
    counter = {{static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
                static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)}};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

// The number in [0, 1) that decides one token: 53 bits, first word most significant.
static inline double philox_uniform(uint64_t seed, uint32_t choice, uint32_t position) {
  const PhiloxWords random = philox4x32(seed, {{choice, position, 0, 0}});
  const uint64_t bits = (uint64_t{random.word[0]} << 32) | random.word[1];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace headrace
