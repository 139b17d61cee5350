// Threads that run one function together, and the barrier between their instructions.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace headrace {

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins briefly, then yields: on an over-committed host the thread that everyone waits for must get the core.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  // idle: called again and again meanwhile; false when it has nothing to do.
  template <class Idle>
  void wait(Idle idle) {
    if (threads_ == 1) return;
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (idle()) continue;
      if (spins < 4096) {
        cpu_relax();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  const int threads_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};  // wraps
};

// A fixed team: run(f) calls f(0) on the caller and f(1) … f(n - 1) on the workers, and returns when all are
// done.
class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }
  void run(const std::function<void(int)>& work);

 private:
  void serve(int index);

  std::vector<std::thread> workers_;
  const std::function<void(int)>* work_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
  int sleeping_ = 0;  // guarded by mutex_
  bool stop_ = false;
  alignas(64) std::atomic<unsigned> epoch_{0};
  alignas(64) std::atomic<int> running_{0};
};

}  // namespace headrace
