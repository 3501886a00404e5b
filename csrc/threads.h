// Work that is cut into equal parts, one per thread.
#pragma once
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace megarl {

// Calls body(first, last) for parts of [0, total) that cover it, at most num_threads at a time, none below min_part but the only one.
template <typename Body>
void share(int64_t total, int64_t min_part, int num_threads, const Body& body) {
  struct Threads : std::vector<std::thread> {
    ~Threads() {
      for (std::thread& thread : *this) thread.join();
    }
  };
  if (num_threads < 1) throw std::invalid_argument("num_threads (" + std::to_string(num_threads) + ") must be >= 1");
  const int64_t parts = std::clamp<int64_t>(total / min_part, 1, num_threads);
  const auto bound = [=](int64_t part) { return total / parts * part + total % parts * part / parts; };
  Threads threads;
  for (int64_t part = 1; part < parts; ++part) threads.emplace_back([&body, bound, part] { body(bound(part), bound(part + 1)); });
  body(int64_t{0}, bound(1));
}

}  // namespace megarl
