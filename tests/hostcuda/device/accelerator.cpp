// PyTorch's answer to "which accelerator was this build made for?". A library that is loaded before PyTorch,
// with its names visible to all, takes the place of PyTorch's own function.
#include <cstdint>
#include <optional>

namespace c10 {
enum class DeviceType : int8_t { CUDA = 1 };
}
namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
bool isAccelerator(c10::DeviceType type) { return type == c10::DeviceType::CUDA; }
}  // namespace at::accelerator
