// Which kernel path this CPU can run, asked at run time.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

#if defined(HR_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace headrace {

#if defined(HR_AMX)
// Whether there are matrix registers, and the kernel lets this process have them: it must be asked, once,
// because they make signal frames larger.
inline bool may_use_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool may = [] {
    unsigned a, b, c, d;
    const bool has = __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 24 & 1 && d >> 25 & 1 && d >> 22 & 1;
    return has && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return may;
}
#endif

// Best first; "portable" is always there.
inline std::vector<std::string> supported_isas() {
  std::vector<std::string> out;
#if defined(HR_X86)
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
#if defined(HR_AMX)
  if (bf16 && may_use_amx()) out.push_back("avx512_amx");
#endif
  if (bf16) out.push_back("avx512_bf16");
  if (avx512) out.push_back("avx512");
  if (avx2) out.push_back("avx2");
#endif
  out.push_back("portable");
  return out;
}

// Throws std::invalid_argument for a path that this CPU or build does not have. "" = the best.
inline const Kernels& kernels_for(const std::string& isa) {
  const std::vector<std::string> have = supported_isas();
  const std::string want = isa.empty() ? have.front() : isa;
  for (const std::string& name : have) {
    if (name != want) continue;
#if defined(HR_X86)
#if defined(HR_AMX)
    if (name == "avx512_amx") return avx512_amx_kernels();
#endif
    if (name == "avx512_bf16") return avx512_bf16_kernels();
    if (name == "avx512") return avx512_kernels();
    if (name == "avx2") return avx2_kernels();
#endif
    return portable_kernels();
  }
  std::string known;
  for (const std::string& name : have) known += (known.empty() ? "" : ", ") + name;
  throw std::invalid_argument("kernel path '" + want + "' cannot run here; this machine has: " + known);
}

}  // namespace headrace
