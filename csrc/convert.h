// Neighbouring elements on the host, as fast as memory.
#pragma once
#include <cstdint>

namespace megarl {

// `count` elements from src to dst; `mode` without kPack.
void convert_run(int64_t mode, const char* src, char* dst, int64_t count);

}  // namespace megarl
