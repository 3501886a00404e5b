#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>

namespace hostcuda {
// Makes a communicator over gloo. device: of this rank; peer: the other rank of two, or -1 for the whole
// group.
using Connect = std::function<c10::intrusive_ptr<c10d::Backend>(int device, int peer)>;
c10::intrusive_ptr<c10d::Backend> make_nccl(int rank, int size, Connect connect);
}  // namespace hostcuda
