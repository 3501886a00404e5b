// Streams, events and memory of the emulated devices, without PyTorch.
//
// Kernels run when they are launched, after everything that is queued on their stream. Copies that a GPU
// makes asynchronously are queued, and run as late as the program's synchronisation allows: when a kernel
// follows on the same stream, when another stream's work follows that waits for them, or when the host waits.
// So a missing synchronisation shows in the numbers. The other direction, a copy that another stream's kernel
// should have preceded, is found by vector clocks: every block of memory knows its last accesses, and an
// access by a stream that has not waited for them is an error.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace hostcuda {

using Clock = std::vector<uint64_t>;  // per stream: the number of its operations that are known to be over
void merge(Clock& into, const Clock& other);

struct Event {  // one recording
  int stream;
  uint64_t position;  // the event is over when its stream has run this many tasks
  Clock clock;
  double seconds = 0;  // time of completion
};

struct Stream {
  int device;
  int64_t id;
  Clock clock;
  std::deque<std::function<void()>> queue;
  uint64_t enqueued = 0, finished = 0;
};

struct Access {
  int stream = -1;
  uint64_t time = 0;
  const std::string* operation = nullptr;
};

// A piece of device memory. A freed block keeps its accesses, because the next tensor gets its memory.
struct Block {
  char* memory = nullptr;
  size_t capacity = 0, requested = 0;
  size_t skipped = 0;          // bytes before the tensor's own, in memory of another process
  int device = 0, stream = 0;  // of the allocation
  bool imported = false;       // of another process
  Access last_write;
  std::map<int, Access> last_reads;
  std::vector<int> recorded;                     // streams of record_stream
  std::vector<std::pair<int, uint64_t>> queued;  // copies that touch it: streams, and their positions there
};

struct MemoryStats {
  int64_t allocated = 0, allocated_peak = 0, requested = 0, requested_peak = 0, cached = 0, reserved_peak = 0;
  int64_t allocations = 0, frees = 0, total = 0;
};

int device_count();
int current_device();
int set_current_device(int device);  // returns the previous one; throws for a device that is not there
int check_device(int device);        // -1 means the current device
int64_t current_stream_id(int device);
int64_t set_current_stream(int device, int64_t id);
int64_t new_stream(int device);
int stream_index(int device, int64_t id);  // its index in clocks
int current_stream(int device);            // likewise

void drain(int stream);  // run what is queued on a stream
void enqueue(int stream, std::function<void()> task, std::initializer_list<Block*> touched = {});
std::shared_ptr<Event> record(int stream);
void block(int stream, const Event& event);  // the stream's further work waits for the event
bool is_over(const Event& event);            // without side effects
bool query_event(const Event& event);        // lets one queued task run, so that polling ends
bool query_stream(int stream);
void synchronize_event(const Event& event);
void synchronize_stream(int stream);
void synchronize_device(int device);

// A launch: the stream has seen what the host has waited for. Returns the time of the operation.
uint64_t launch(int stream);
void access(Block* block, bool write, int stream, uint64_t time, const std::string* operation);
bool find_races(bool find);  // returns what was set before
const std::string* interned(const std::string& name);

Block* allocate(int device, size_t bytes);
void release(Block* block);
void record_stream(Block* block, int stream);
void empty_cache();
MemoryStats& stats(int device);
std::pair<int, size_t> locate(const Block* block);  // file descriptor and offset in it
Block* import_block(int device, const std::string& path, size_t offset, size_t bytes);
bool owns(int device, const void* pointer);
Block* block_at(const void* data);  // the live block whose tensor begins there

std::recursive_mutex& lock();
double now();
}  // namespace hostcuda
