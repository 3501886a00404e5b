#include "streams.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace hostcuda {
namespace {
constexpr size_t kArena = size_t{256} << 30;  // addresses, not memory

struct Device {
  int file = -1;
  char* base = nullptr;
  size_t used = 0;
  std::map<std::pair<int, size_t>, std::vector<Block*>>
      free;  // (stream, capacity) -> blocks, the latest last
  std::vector<std::pair<Block*, std::vector<std::pair<int, uint64_t>>>> in_use_elsewhere;  // freed, recorded
  MemoryStats stats;
  int64_t streams = 1;  // 0 is the default stream
};

int64_t from_environment(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atoll(value) : otherwise;
}

// HOSTCUDA_DEVICES, or fewer by CUDA_VISIBLE_DEVICES: the numbers before the first one without a device count.
// Which of the devices they name does not matter, as each process has its devices to itself.
int64_t visible_devices() {
  const int64_t there = from_environment("HOSTCUDA_DEVICES", 1);
  const char* chosen = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!chosen) return there;
  int64_t count = 0;
  for (const char* at = chosen; *at; ++at) {
    char* end = nullptr;
    const int64_t device = std::strtoll(at, &end, 10);
    if (end == at || device < 0 || device >= there) break;
    ++count;
    if (*(at = end) != ',') break;
  }
  return count;
}

struct State {
  std::recursive_mutex lock;
  std::vector<Device> devices;
  std::vector<std::unique_ptr<Stream>> streams;
  std::map<std::pair<int, int64_t>, int> index;
  std::unordered_set<std::string> names;
  std::unordered_map<const void*, Block*> live;  // by the address of the tensor's first byte
  Clock host;                                    // what the host has waited for
  bool find_races = from_environment("HOSTCUDA_RACES", 1);
  State() : devices(visible_devices()) {
    for (auto& device : devices) device.stats.total = from_environment("HOSTCUDA_MEMORY_MIB", 80 << 10) << 20;
  }
};
State& state() {
  static auto* state = new State;  // outlives tensors that are freed at exit
  return *state;
}
using Guard = std::lock_guard<std::recursive_mutex>;

thread_local int device_of_thread = 0;
thread_local std::map<int, int64_t> streams_of_thread;

uint64_t at(const Clock& clock, int stream) {
  return static_cast<size_t>(stream) < clock.size() ? clock[stream] : 0;
}

Stream& stream_at(int stream) { return *state().streams[stream]; }

void run_one(Stream& stream) {
  auto task = std::move(stream.queue.front());
  stream.queue.pop_front();
  task();
  ++stream.finished;
}

void drain_to(int index, uint64_t position) {
  auto& stream = stream_at(index);
  while (stream.finished < position && !stream.queue.empty()) run_one(stream);
}

size_t rounded(size_t bytes) {
  size_t step = 512;
  while (step * 8 < bytes) step *= 2;
  return std::max<size_t>(1, (bytes + step - 1) / step) * step;
}

void open_arena(Device& device) {
  if (device.base) return;
  device.file = memfd_create("hostcuda", MFD_CLOEXEC);
  if (device.file < 0 || ftruncate(device.file, kArena))
    throw std::runtime_error("hostcuda: memfd_create failed");
  void* base = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, device.file, 0);
  if (base == MAP_FAILED) throw std::runtime_error("hostcuda: mmap failed");
  device.base = static_cast<char*>(base);
}

void forget(Block* block) {
  block->last_write = {};
  block->last_reads.clear();
  block->recorded.clear();
}

void collect(Device& device) {  // blocks whose other streams are done
  auto& waiting = device.in_use_elsewhere;
  waiting.erase(
      std::remove_if(waiting.begin(), waiting.end(),
                     [&](auto& entry) {
                       for (auto& [stream, position] : entry.second)
                         if (stream_at(stream).finished < position) return false;
                       forget(entry.first);
                       device.free[{entry.first->stream, entry.first->capacity}].push_back(entry.first);
                       return true;
                     }),
      waiting.end());
}

void check(const Access& before, const char* did, const char* does, int stream,
           const std::string* operation) {
  auto& clock = stream_at(stream).clock;
  if (before.stream < 0 || before.stream == stream || at(clock, before.stream) >= before.time) return;
  auto name = [](int index) {
    return "stream " + std::to_string(stream_at(index).id) +
           " of cuda:" + std::to_string(stream_at(index).device);
  };
  throw std::runtime_error(
      "[hostcuda] race: " + *operation + " on " + name(stream) + " " + does + " memory that " +
      *before.operation + " on " + name(before.stream) + " " + did +
      ", and has not waited for it (wait_stream, wait_event, synchronize, record_stream)");
}
}  // namespace

std::recursive_mutex& lock() { return state().lock; }

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void merge(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

int device_count() { return static_cast<int>(state().devices.size()); }
int current_device() { return device_of_thread; }

int check_device(int device) {
  if (device == -1) return device_of_thread;
  if (device < 0 || device >= device_count())
    throw std::runtime_error("CUDA error: invalid device ordinal (" + std::to_string(device) + " of " +
                             std::to_string(device_count()) + ")");
  return device;
}

int set_current_device(int device) { return std::exchange(device_of_thread, check_device(device)); }

int64_t current_stream_id(int device) {
  auto found = streams_of_thread.find(device);
  return found == streams_of_thread.end() ? 0 : found->second;
}

int64_t set_current_stream(int device, int64_t id) {
  return std::exchange(streams_of_thread[check_device(device)], id);
}

int64_t new_stream(int device) {
  Guard guard(lock());
  return state().devices[check_device(device)].streams++;
}

int stream_index(int device, int64_t id) {
  Guard guard(lock());
  auto [found, is_new] = state().index.try_emplace({device, id}, static_cast<int>(state().streams.size()));
  if (is_new) state().streams.push_back(std::make_unique<Stream>(Stream{device, id, {}, {}, 0, 0}));
  return found->second;
}

int current_stream(int device) { return stream_index(device, current_stream_id(device)); }

void drain(int stream) {
  Guard guard(lock());
  drain_to(stream, stream_at(stream).enqueued);
}

void enqueue(int stream, std::function<void()> task, std::initializer_list<Block*> touched) {
  Guard guard(lock());
  stream_at(stream).queue.push_back(std::move(task));
  const uint64_t position = ++stream_at(stream).enqueued;
  for (Block* block : touched)
    if (block) block->queued.emplace_back(stream, position);
}

static bool has_queued_copies(Block* block) {
  auto& queued = block->queued;
  queued.erase(std::remove_if(queued.begin(), queued.end(),
                              [](auto& copy) { return stream_at(copy.first).finished >= copy.second; }),
               queued.end());
  return !queued.empty();
}

std::shared_ptr<Event> record(int index) {
  Guard guard(lock());
  auto& stream = stream_at(index);
  launch(index);
  auto event = std::make_shared<Event>(Event{index, stream.finished, stream.clock, now()});
  if (!stream.queue.empty()) {
    event->position = stream.enqueued + 1;
    enqueue(index, [event] { event->seconds = now(); });
  }
  return event;
}

bool is_over(const Event& event) {
  Guard guard(lock());
  return stream_at(event.stream).finished >= event.position;
}

void block(int index, const Event& event) {
  Guard guard(lock());
  merge(stream_at(index).clock, event.clock);
  if (!is_over(event))
    enqueue(index, [stream = event.stream, position = event.position] { drain_to(stream, position); });
}

bool query_event(const Event& event) {
  Guard guard(lock());
  if (is_over(event)) {
    merge(state().host, event.clock);
    return true;
  }
  run_one(stream_at(event.stream));
  return false;
}

bool query_stream(int index) {
  Guard guard(lock());
  auto& stream = stream_at(index);
  if (stream.queue.empty()) {
    merge(state().host, stream.clock);
    return true;
  }
  run_one(stream);
  return false;
}

void synchronize_event(const Event& event) {
  Guard guard(lock());
  drain_to(event.stream, event.position);
  merge(state().host, event.clock);
}

void synchronize_stream(int index) {
  Guard guard(lock());
  drain(index);
  merge(state().host, stream_at(index).clock);
}

void synchronize_device(int device) {
  Guard guard(lock());
  for (size_t index = 0; index < state().streams.size(); ++index)
    if (stream_at(index).device == device) synchronize_stream(index);
}

uint64_t launch(int index) {
  Guard guard(lock());
  auto& clock = stream_at(index).clock;
  merge(clock, state().host);
  if (clock.size() <= static_cast<size_t>(index)) clock.resize(index + 1);
  return ++clock[index];
}

void access(Block* block, bool write, int stream, uint64_t time, const std::string* operation) {
  Guard guard(lock());
  if (!block || !state().find_races) return;
  const char* does = write ? "writes" : "reads";
  check(block->last_write, "wrote", does, stream, operation);
  if (write) {
    for (auto& [reader, read] : block->last_reads) check(read, "read", does, stream, operation);
    block->last_reads.clear();
    block->last_write = {stream, time, operation};
  } else {
    block->last_reads[stream] = {stream, time, operation};
  }
}

bool find_races(bool find) { return std::exchange(state().find_races, find); }

const std::string* interned(const std::string& name) {
  Guard guard(lock());
  return &*state().names.insert(name).first;
}

Block* allocate(int index, size_t bytes) {
  Guard guard(lock());
  auto& device = state().devices[check_device(index)];
  open_arena(device);
  collect(device);
  const int stream = current_stream(index);
  const size_t capacity = rounded(bytes);
  auto& stats = device.stats;
  auto& free = device.free[{stream, capacity}];
  Block* block = nullptr;
  if (!free.empty()) {
    block = free.back();
    free.pop_back();
    stats.cached -= capacity;
  } else {
    if (stats.allocated + stats.cached + static_cast<int64_t>(capacity) > stats.total) empty_cache();
    if (stats.allocated + static_cast<int64_t>(capacity) > stats.total) return nullptr;
    block = new Block;
    block->memory = device.base + device.used;
    block->capacity = capacity;
    block->device = index;
    device.used += capacity;
    if (device.used > kArena) throw std::runtime_error("hostcuda: out of addresses");
  }
  block->stream = stream;
  block->requested = bytes;
  stats.allocated += capacity;
  stats.requested += bytes;
  stats.allocated_peak = std::max(stats.allocated_peak, stats.allocated);
  stats.requested_peak = std::max(stats.requested_peak, stats.requested);
  stats.reserved_peak = std::max(stats.reserved_peak, stats.allocated + stats.cached);
  ++stats.allocations;
  static const std::string* operation = interned("the allocation of a tensor");
  // What the stream has waited for reads or writes the memory before its next owner does.
  if (has_queued_copies(block)) drain(stream);
  access(block, true, stream, launch(stream), operation);
  std::memset(block->memory, 0xff, bytes);  // NaN: memory that was never written is seen
  state().live[block->memory] = block;
  return block;
}

void release(Block* block) {
  Guard guard(lock());
  state().live.erase(block->memory + block->skipped);
  if (block->imported) {
    munmap(block->memory, block->capacity);
    delete block;
    return;
  }
  auto& device = state().devices[block->device];
  device.stats.allocated -= block->capacity;
  device.stats.requested -= block->requested;
  device.stats.cached += block->capacity;
  ++device.stats.frees;
  std::vector<std::pair<int, uint64_t>> until;
  for (int stream : block->recorded) until.emplace_back(stream, stream_at(stream).enqueued);
  block->recorded.clear();
  if (until.empty())
    device.free[{block->stream, block->capacity}].push_back(block);
  else
    device.in_use_elsewhere.emplace_back(block, std::move(until));
}

void record_stream(Block* block, int stream) {
  Guard guard(lock());
  auto& recorded = block->recorded;
  if (stream != block->stream && std::find(recorded.begin(), recorded.end(), stream) == recorded.end())
    recorded.push_back(stream);
}

void empty_cache() {
  Guard guard(lock());
  for (size_t index = 0; index < state().devices.size(); ++index) {
    auto& device = state().devices[index];
    if (!device.base) continue;
    synchronize_device(index);  // as cudaFree does
    collect(device);
    for (auto& [key, blocks] : device.free) {
      for (Block* block : blocks) forget(block);
    }
    // A block's addresses stay its own, so that what still points there finds nobody else's memory. Blocks of
    // one capacity are of no stream any more.
    std::map<size_t, std::vector<Block*>> loose;
    for (auto& [key, blocks] : device.free)
      for (Block* block : blocks) loose[key.second].push_back(block);
    device.free.clear();
    for (auto& [capacity, blocks] : loose)
      for (Block* block : blocks) {
        const size_t page = 4096, begin = (reinterpret_cast<size_t>(block->memory) + page - 1) / page * page;
        const size_t end = (reinterpret_cast<size_t>(block->memory) + capacity) / page * page;
        if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_REMOVE);
        delete block;
      }
    device.stats.cached = 0;
  }
}

MemoryStats& stats(int device) { return state().devices[check_device(device)].stats; }

std::pair<int, size_t> locate(const Block* block) {
  auto& device = state().devices[block->device];
  return {device.file, block->memory - device.base};
}

Block* import_block(int device, const std::string& path, size_t offset, size_t bytes) {
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) throw std::runtime_error("CUDA error: invalid resource handle (" + path + ")");
  const size_t page = 4096, start = offset / page * page, length = offset - start + bytes;
  void* memory = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, start);
  close(file);
  if (memory == MAP_FAILED) throw std::runtime_error("CUDA error: mapping of buffer object failed");
  auto* block = new Block;
  block->memory = static_cast<char*>(memory);
  block->skipped = offset - start;
  block->capacity = length;
  block->requested = bytes;
  block->device = check_device(device);
  block->stream = current_stream(block->device);
  block->imported = true;
  Guard guard(lock());
  state().live[block->memory + block->skipped] = block;
  return block;
}

Block* block_at(const void* data) {
  Guard guard(lock());
  auto found = state().live.find(data);
  return found == state().live.end() ? nullptr : found->second;
}

bool owns(int device, const void* pointer) {
  auto& of = state().devices[device];
  return of.base && pointer >= of.base && pointer < of.base + kArena;
}
}  // namespace hostcuda
