#include "pool.h"

namespace headrace {
namespace {
// About 100 microseconds: long enough to bridge the gap between two decode steps, short enough to cost
// nothing idle.
constexpr int kIdleSpins = 3000;
}  // namespace

Pool::Pool(int threads) {
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { serve(i); });
  } catch (...) {  // fewer threads than asked for is an error, but not one that leaves threads behind
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      epoch_.fetch_add(1, std::memory_order_release);  // outside the lock, a worker could miss it and sleep
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
    throw;
  }
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    epoch_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run(const std::function<void(int)>& work) {
  if (workers_.empty()) return work(0);
  work_ = &work;
  running_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  bool notify;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    epoch_.fetch_add(1, std::memory_order_release);
    notify = sleeping_ > 0;
  }
  if (notify) wake_.notify_all();
  work(0);
  for (int spins = 0; running_.load(std::memory_order_acquire) > 0; ++spins) {
    if (spins < 4096) {
      cpu_relax();
    } else {
      std::this_thread::yield();
    }
  }
}

void Pool::serve(int index) {
  unsigned seen = 0;
  for (;;) {
    for (int spins = 0; spins < kIdleSpins && epoch_.load(std::memory_order_acquire) == seen; ++spins)
      cpu_relax();
    if (epoch_.load(std::memory_order_acquire) == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      ++sleeping_;
      wake_.wait(lock, [&] { return epoch_.load(std::memory_order_acquire) != seen; });
      --sleeping_;
    }
    seen = epoch_.load(std::memory_order_acquire);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (stop_) return;
    }
    (*work_)(index);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace headrace
