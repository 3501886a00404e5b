// A backend that behaves as NCCL's does, over gloo: CUDA tensors only, a communicator per device that is made
// by the first operation and needs all ranks of the group, and work that streams, not the host, wait for.
//
// The communicators are made by Python (install.py), which reports ranks that do not take part.
#include "nccl.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "device.h"

namespace hostcuda {
namespace {
using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using Works = std::vector<c10::intrusive_ptr<Work>>;

// The current stream waits for it; the host only where gloo must be done before a kernel is run.
struct NcclWork final : Work {
  Works parts;
  Tensors kept, averaged;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // (to, from) at the end
  double divisor = 1;
  int device = 0, stream = 0;
  Clock over;
  bool finished = false;

  void finish(std::chrono::milliseconds timeout) {
    if (std::exchange(finished, true)) return;
    for (auto& part : parts) part->wait(timeout);
    at::AutoDispatchBelowADInplaceOrView below;
    for (auto& [to, from] : copies) to.copy_(from);
    for (auto& tensor : averaged) tensor.div_(divisor);
  }
  bool isCompleted() override {
    for (auto& part : parts)
      if (!part->isCompleted()) return false;
    return true;
  }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    finish(timeout);
    std::lock_guard guard(lock());
    block(current_stream(device), Event{stream, 0, over});
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    TORCH_CHECK(false, "hostcuda: futures of collectives are not emulated");
  }
};

class Nccl final : public c10d::Backend {
 public:
  Nccl(int rank, int size, Connect connect) : Backend(rank, size), connect_(std::move(connect)) {
    static int64_t count = 0;
    stream_id_ = --count;  // a group has a stream of its own
  }
  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds) override {}
  void abort() override {}
  void shutdown() override {}

  void startCoalescing() override {
    coalescing_ = c10::make_intrusive<NcclWork>();
    coalescing_->device = current_device();
    communicator(current_device());  // a batch runs on the communicator of the whole group
  }
  c10::intrusive_ptr<Work> endCoalescing() override { return std::exchange(coalescing_, nullptr); }

  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto [gloo, work] = start("broadcast", {}, tensors);
    auto cpu = on_cpu(tensors);
    return done(work, {gloo->broadcast(cpu, options)});
  }
  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto [gloo, work] = start("all_reduce", tensors, tensors);
    auto of_gloo = options;
    auto cpu = on_cpu(tensors);
    average(work, cpu, of_gloo.reduceOp);
    return done(work, {gloo->allreduce(cpu, of_gloo)});
  }
  c10::intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors,
                                               const c10d::AllreduceCoalescedOptions& options) override {
    auto [gloo, work] = start("all_reduce", tensors, tensors);
    c10d::AllreduceOptions of_gloo;
    of_gloo.reduceOp = options.reduceOp;
    auto cpu = on_cpu(tensors);
    average(work, cpu, of_gloo.reduceOp);
    Works parts;
    for (auto& tensor : cpu) {
      Tensors one{tensor};
      parts.push_back(gloo->allreduce(one, of_gloo));
    }
    return done(work, parts);
  }
  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto [gloo, work] = start("reduce", tensors, tensors);
    auto of_gloo = options;
    auto cpu = on_cpu(tensors);
    average(work, cpu, of_gloo.reduceOp);
    return done(work, {gloo->reduce(cpu, of_gloo)});
  }
  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) override {
    auto [gloo, work] = start("all_gather", inputs, flat(outputs));
    auto to = on_cpu(outputs);
    auto from = on_cpu(inputs);
    if (equal_sizes(to[0])) return done(work, {gloo->allgather(to, from, options)});
    Works parts;  // as NCCL does it, one broadcast per rank
    to[0][getRank()].copy_(from[0]);
    for (int root = 0; root < getSize(); ++root) {
      c10d::BroadcastOptions of_gloo;
      of_gloo.rootRank = root;
      Tensors one{to[0][root]};
      parts.push_back(gloo->broadcast(one, of_gloo));
    }
    return done(work, parts);
  }
  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& options) override {
    auto [gloo, work] = start("all_gather_into_tensor", {input}, {output});
    auto to = checked(output), from = checked(input);
    return done(work, {gloo->_allgather_base(to, from, options)});
  }
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& options) override {
    auto [gloo, work] = start("all_gather_into_tensor", inputs, outputs);
    Works parts;
    for (size_t i = 0; i < outputs.size(); ++i) {
      auto to = checked(outputs[i]), from = checked(inputs[i]);
      parts.push_back(gloo->_allgather_base(to, from, options));
    }
    return done(work, parts);
  }
  c10::intrusive_ptr<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    auto [gloo, work] = start("reduce_scatter", flat(inputs), outputs);
    auto of_gloo = options;
    auto to = on_cpu(outputs);
    auto from = on_cpu(inputs);
    average(work, to, of_gloo.reduceOp);
    if (equal_sizes(from[0])) return done(work, {gloo->reduce_scatter(to, from, of_gloo)});
    Works parts;  // as NCCL does it, one reduction per rank
    for (int root = 0; root < getSize(); ++root) {
      c10d::ReduceOptions to_root;
      to_root.rootRank = root;
      to_root.reduceOp = of_gloo.reduceOp;
      Tensors one{from[0][root].clone()};
      parts.push_back(gloo->reduce(one, to_root));
      if (root == getRank()) work->copies.emplace_back(to[0], one[0]);
      work->kept.push_back(one[0]);
    }
    return done(work, parts);
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& options) override {
    auto [gloo, work] = start("reduce_scatter_tensor", {input}, {output});
    auto of_gloo = options;
    auto to = checked(output), from = checked(input);
    average(work, {to}, of_gloo.reduceOp);
    return done(work, {gloo->_reduce_scatter_base(to, from, of_gloo)});
  }
  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    auto [gloo, work] = start("reduce_scatter_tensor", inputs, outputs);
    auto of_gloo = options;
    auto to = on_cpu(outputs), from = on_cpu(inputs);
    average(work, to, of_gloo.reduceOp);
    Works parts;
    for (size_t i = 0; i < to.size(); ++i)
      parts.push_back(gloo->_reduce_scatter_base(to[i], from[i], of_gloo));
    return done(work, parts);
  }
  c10::intrusive_ptr<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::GatherOptions& options) override {
    auto [gloo, work] = start("gather", inputs, flat(outputs));
    auto to = on_cpu(outputs);
    auto from = on_cpu(inputs);
    return done(work, {gloo->gather(to, from, options)});
  }
  c10::intrusive_ptr<Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const c10d::ScatterOptions& options) override {
    auto [gloo, work] = start("scatter", flat(inputs), outputs);
    auto to = on_cpu(outputs);
    auto from = on_cpu(inputs);
    return done(work, {gloo->scatter(to, from, options)});
  }
  c10::intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                         std::vector<int64_t>& output_sizes,
                                         std::vector<int64_t>& input_sizes,
                                         const c10d::AllToAllOptions& options) override {
    auto [gloo, work] = start("all_to_all_single", {input}, {output});
    auto to = checked(output), from = checked(input);
    return done(work, {gloo->alltoall_base(to, from, output_sizes, input_sizes, options)});
  }
  c10::intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    auto [gloo, work] = start("send", tensors, {}, to);
    auto cpu = on_cpu(tensors);
    return done(work, {gloo->send(cpu, peer_rank(to), tag)});
  }
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    auto [gloo, work] = start("recv", {}, tensors, from);
    auto cpu = on_cpu(tensors);
    return done(work, {gloo->recv(cpu, peer_rank(from), tag)});
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    const int device =
        options.device_ids.empty() ? current_device() : static_cast<int>(options.device_ids[0]);
    synchronize_device(device);
    auto of_gloo = options;
    of_gloo.device_ids.clear();
    return communicator(device)->barrier(of_gloo);
  }
  void eagerConnectSingleDevice(at::Device device) override { communicator(device.index()); }

 private:
  using Gloo = c10::intrusive_ptr<c10d::Backend>;

  // Communicators: of the group on a device, and of two ranks for messages outside of a batch.
  Gloo communicator(int device, int peer = -1) {
    auto& gloo = communicators_[{device, peer}];
    if (!gloo) gloo = connect_(device, peer);
    return gloo;
  }
  int peer_rank(int peer) const { return coalescing_ ? peer : peer > getRank() ? 1 : 0; }

  static at::Tensor checked(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.is_cuda(), "Tensors must be CUDA and dense (got one on ", tensor.device(), ")");
    TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    return as_cpu(tensor);
  }
  static Tensors on_cpu(const Tensors& tensors) {
    Tensors cpu;
    for (auto& tensor : tensors) cpu.push_back(checked(tensor));
    return cpu;
  }
  static std::vector<Tensors> on_cpu(const std::vector<Tensors>& lists) {
    std::vector<Tensors> cpu;
    for (auto& tensors : lists) cpu.push_back(on_cpu(tensors));
    return cpu;
  }
  static bool equal_sizes(const Tensors& tensors) {
    for (auto& tensor : tensors)
      if (tensor.sizes() != tensors[0].sizes()) return false;
    return true;
  }
  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors all;
    for (auto& tensors : lists) all.insert(all.end(), tensors.begin(), tensors.end());
    return all;
  }

  // NCCL's stream waits for the current one, then reads and writes.
  std::pair<Gloo, c10::intrusive_ptr<NcclWork>> start(const char* name, const Tensors& reads,
                                                      const Tensors& writes, int peer = -1) {
    const auto& first = reads.empty() ? writes.at(0) : reads.at(0);
    checked(first);
    const int device = first.device().index();
    auto gloo = communicator(device, coalescing_ ? -1 : peer);
    std::lock_guard guard(lock());
    const int own = stream_index(device, stream_id_), current = current_stream(device);
    drain(current);
    block(own, *record(current));
    const uint64_t time = begin(own);
    const auto* operation = interned(name);
    for (auto& tensor : reads) access(block_of(tensor), false, own, time, operation);
    for (auto& tensor : writes) access(block_of(tensor), true, own, time, operation);
    auto work = coalescing_ ? coalescing_ : c10::make_intrusive<NcclWork>();
    work->device = device;
    work->stream = own;
    work->over = record(own)->clock;
    work->kept.insert(work->kept.end(), reads.begin(), reads.end());
    work->kept.insert(work->kept.end(), writes.begin(), writes.end());
    return {gloo, work};
  }
  void average(c10::intrusive_ptr<NcclWork>& work, const Tensors& results, c10d::ReduceOp& op) {
    if (op != c10d::ReduceOp::AVG) return;
    op = c10d::ReduceOp::SUM;
    work->averaged.insert(work->averaged.end(), results.begin(), results.end());
    work->divisor = getSize();
  }
  static c10::intrusive_ptr<Work> done(c10::intrusive_ptr<NcclWork> work, const Works& parts) {
    work->parts.insert(work->parts.end(), parts.begin(), parts.end());
    return work;
  }

  Connect connect_;
  int64_t stream_id_;
  c10::intrusive_ptr<NcclWork> coalescing_;
  std::map<std::pair<int, int>, Gloo> communicators_;
};
}  // namespace

c10::intrusive_ptr<c10d::Backend> make_nccl(int rank, int size, Connect connect) {
  return c10::make_intrusive<Nccl>(rank, size, std::move(connect));
}
}  // namespace hostcuda
