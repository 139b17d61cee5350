// The loops of limits.cpp, on threads and against the clock.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "isa.h"
#include "pool.h"

namespace nb = nanobind;

namespace headrace {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kLargePage = size_t{1} << 21;

// Every thread repeats `work` until the time is over; what all of them did, per second.
template <class Work>
double rate(int threads, double seconds, const Work& work) {
  if (threads < 1 || threads > 256) throw std::invalid_argument("threads: 1 to 256");
  if (!(seconds > 0 && seconds <= 60)) throw std::invalid_argument("seconds: more than 0, at most 60");
  Pool pool(threads);
  std::atomic<int64_t> done{0};
  double elapsed = 0;
  for (const double part : {seconds / 4, seconds}) {  // the first warms caches, pages and clocks
    done.store(0);
    const auto start = Clock::now();
    const auto end = start + std::chrono::duration<double>(part);
    const std::function<void(int)> loop = [&](int thread) {
      int64_t mine = 0;
      do {
        mine += work(thread);
      } while (Clock::now() < end);
      done.fetch_add(mine);
    };
    pool.run(loop);
    elapsed = std::chrono::duration<double>(Clock::now() - start).count();
  }
  return static_cast<double>(done.load()) / elapsed;
}

double measure_read(const std::string& isa, int threads, size_t bytes, double seconds) {
  const Kernels& kernels = kernels_for(isa);
  const size_t lines = bytes / 64;
  if (threads < 1 || lines < static_cast<size_t>(threads) * 64 || bytes > size_t{1} << 36)
    throw std::invalid_argument("bytes: at least 4096 for each thread, at most 64 GiB");
  nb::gil_scoped_release release;
  // In large pages, as weights and KV lie where the system grants them: a ceiling must not be below what is
  // reached there. Every page is written, or all of them would be one page of zeros.
  const size_t size = (bytes + kLargePage - 1) / kLargePage * kLargePage;
  const std::unique_ptr<uint8_t, decltype(&std::free)> buffer(
      static_cast<uint8_t*>(std::aligned_alloc(kLargePage, size)), &std::free);
  if (!buffer) throw std::bad_alloc();
  uint8_t* const first = buffer.get();
#ifdef __linux__
  madvise(first, size, MADV_HUGEPAGE);  // a wish: without it, the pages are small
#endif
  for (size_t i = 0; i < size; ++i) first[i] = static_cast<uint8_t>(i * 31);
  return rate(threads, seconds, [&](int thread) {
    const size_t begin = lines * static_cast<size_t>(thread) / static_cast<size_t>(threads);
    const size_t end = lines * (static_cast<size_t>(thread) + 1) / static_cast<size_t>(threads);
    kernels.read_lines(first + 64 * begin, end - begin);  // through a pointer: never optimised away
    return static_cast<int64_t>(64 * (end - begin));
  });
}

double measure_multiply(const std::string& isa, int threads, const std::string& kind, double seconds) {
  const Kernels& kernels = kernels_for(isa);
  MultiplyKind what;
  if (kind == "int8") {
    what = MultiplyKind::kInt8;
  } else if (kind == "bf16") {
    what = MultiplyKind::kBf16;
  } else if (kind == "float32") {
    what = MultiplyKind::kFloat;
  } else if (kind == "vector int8") {
    what = MultiplyKind::kVectorInt8;
  } else {
    throw std::invalid_argument("kind: int8, bf16, float32 or vector int8");
  }
  nb::gil_scoped_release release;
  return rate(threads, seconds, [&](int) { return kernels.multiply(what, 4096); });
}

}  // namespace

void bind_limits(nb::module_& m) {
  m.def("measure_read", &measure_read, nb::arg("isa"), nb::kw_only(), nb::arg("threads"), nb::arg("bytes"),
        nb::arg("seconds"), "Bytes a second that threads read, each its part of one buffer again and again.");
  m.def("measure_multiply", &measure_multiply, nb::arg("isa"), nb::kw_only(), nb::arg("threads"),
        nb::arg("kind"), nb::arg("seconds"),
        "Multiply-accumulates a second of threads that only multiply: int8, bf16, float32, or int8 in vector "
        "registers.");
}

}  // namespace headrace
