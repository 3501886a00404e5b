// Runs of neighbouring elements on the host, as fast as memory.
#pragma once
#include <cstdint>

namespace megarl {

// `count` elements from src to dst; `mode` as in rect.h.
void convert_run(int64_t mode, const char* src, char* dst, int64_t count);

// The same past the caches (non-temporal stores): what nobody reads soon, and is large, is written without being read first.
// Call stream_fence() before another thread is told that it is there.
void stream_run(int64_t mode, const char* src, char* dst, int64_t count);
void stream_fence();

}  // namespace megarl
