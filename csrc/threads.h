// Work that threads share.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace megarl {

// Calls body(first, last) for parts of [0, total) that cover it, in up to num_threads threads. Parts are taken as threads get free,
// so one that shares its core with another process does not hold up the rest. Starting a thread takes some 20 us: less than it
// gains where each has min_part or more, so none are kept.
template <typename Body>
void share(int64_t total, int64_t min_part, int num_threads, const Body& body) {
  constexpr int64_t kPartsPerThread = 16;
  struct Threads : std::vector<std::thread> {
    ~Threads() {
      for (std::thread& thread : *this) thread.join();
    }
  };
  if (num_threads < 1) throw std::invalid_argument("num_threads (" + std::to_string(num_threads) + ") must be >= 1");
  const int64_t used = std::clamp<int64_t>(total / min_part, 1, num_threads);
  const int64_t parts = used == 1 ? 1 : std::min(total / min_part, used * kPartsPerThread);
  const auto bound = [=](int64_t part) { return total / parts * part + total % parts * part / parts; };
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t part; (part = next++) < parts;) body(bound(part), bound(part + 1));
  };
  Threads threads;
  for (int64_t i = 1; i < used; ++i) threads.emplace_back(work);
  work();
}

}  // namespace megarl
