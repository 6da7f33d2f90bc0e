// The memory of the simulated accelerator. Each device's is mapped twice: where tensors have it, the host may not
// touch it; the shadow, a constant distance away, is known to the operations alone.
#include "machine.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace simulated {
namespace {

constexpr size_t kSmallestBlock = 512;
constexpr size_t kArenaPerMemory = 16; // a block has a power of two of bytes, and keeps its address for ever
constexpr size_t kLargeBlock = 8 << 20; // the host gets the pages of free blocks from here on back

size_t total_bytes() {
  static const size_t bytes = [] {
    const char* text = std::getenv("SIMULATED_MEMORY_BYTES");
    return text ? std::strtoull(text, nullptr, 10) : size_t{4} << 30;
  }();
  return bytes;
}

struct Block {
  size_t num_bytes = 0; // a power of two
  StreamIndex owner = 0;
  std::set<StreamIndex> users; // other streams, that the allocator was told of
};

struct FreeBlock {
  uintptr_t begin = 0;
  Clock used; // until all of it is done, the block must not be given away
};

struct Arena {
  int file = -1;
  uintptr_t begin = 0, shadow = 0;
  size_t num_used = 0; // bytes that ever were in a block
  c10::CachingDeviceAllocator::DeviceStats stats;
};

struct Memory {
  std::mutex mutex;
  std::vector<Arena> arenas;
  std::map<uintptr_t, Block> blocks;
  std::map<std::pair<StreamIndex, size_t>, std::vector<FreeBlock>> pools;
  std::map<uintptr_t, size_t> pinned;
};

std::atomic<bool> is_mapped{false}, is_forked{false};

Memory& memory() {
  static auto* made = new Memory; // never deleted: tensors may outlive the end of main
  return *made;
}

Arena mapped_arena() {
  Arena arena;
  auto num_bytes = total_bytes() * kArenaPerMemory;
  arena.file = memfd_create("simulated-accelerator", MFD_CLOEXEC);
  TORCH_CHECK(arena.file >= 0 && ftruncate(arena.file, num_bytes) == 0, "no file for the simulated memory");
  auto* shown = mmap(nullptr, num_bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, arena.file, 0);
  auto* shadow = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, arena.file, 0);
  TORCH_CHECK(shown != MAP_FAILED && shadow != MAP_FAILED, "no addresses for the simulated memory");
  arena.begin = reinterpret_cast<uintptr_t>(shown);
  arena.shadow = reinterpret_cast<uintptr_t>(shadow);
  return arena;
}

struct sigaction before_us;

// Says what happened, and leaves the rest to those before us; it may be called at any place of the program.
void tell_of_host(int signal, siginfo_t* info, void* context) {
  constexpr char text[] = "simulated fault: the host touched memory of a device\n";
  auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (const auto& arena : memory().arenas)
    if (address >= arena.begin && address < arena.begin + total_bytes() * kArenaPerMemory)
      (void)!write(STDERR_FILENO, text, sizeof(text) - 1);
  if (before_us.sa_flags & SA_SIGINFO)
    before_us.sa_sigaction(signal, info, context);
  else if (before_us.sa_handler != SIG_DFL && before_us.sa_handler != SIG_IGN)
    before_us.sa_handler(signal);
  else
    sigaction(signal, &before_us, nullptr);
}

void watch_host() {
  struct sigaction telling = {};
  telling.sa_sigaction = &tell_of_host;
  telling.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &telling, &before_us);
}

// The caller holds the lock.
std::vector<Arena>& arenas() {
  auto& found = memory().arenas;
  if (found.empty()) {
    TORCH_CHECK(!is_forked, "simulated memory of the parent process cannot be used after a fork");
    for (DeviceIndex i = 0; i < num_devices(); ++i)
      found.push_back(mapped_arena());
    pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
    watch_host();
    is_mapped = true;
  }
  return found;
}

Arena* arena_of(uintptr_t address) {
  for (auto& arena : memory().arenas)
    if (address >= arena.begin && address < arena.begin + total_bytes() * kArenaPerMemory)
      return &arena;
  return nullptr;
}

void count(Arena& arena, size_t num_bytes, bool is_more) {
  for (auto* stat : {&arena.stats.allocated_bytes, &arena.stats.active_bytes, &arena.stats.requested_bytes}) {
    auto& all = (*stat)[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    is_more ? all.increase(num_bytes) : all.decrease(num_bytes);
  }
}

int64_t num_allocated(Arena& arena) {
  return arena.stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current;
}

// A block that was used before is preferred, and the one that became free last: that finds most faults.
uintptr_t take_block(Arena& arena, StreamIndex stream, size_t num_bytes) {
  auto& pool = memory().pools[{stream, num_bytes}];
  for (auto it = pool.rbegin(); it != pool.rend(); ++it) {
    if (is_known_done(it->used, stream)) {
      auto begin = it->begin;
      pool.erase(std::next(it).base());
      return begin;
    }
  }
  if (arena.num_used + num_bytes > total_bytes() * kArenaPerMemory)
    return 0;
  arena.num_used += num_bytes;
  auto& reserved = arena.stats.reserved_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  reserved.increase(num_bytes);
  return arena.begin + arena.num_used - num_bytes;
}

void free_block(void* address) {
  if (is_forked)
    return;
  std::lock_guard lock(memory().mutex);
  auto begin = reinterpret_cast<uintptr_t>(address);
  auto node = memory().blocks.extract(begin);
  const auto& block = node.mapped();
  FreeBlock freed{begin, {}};
  for (auto user : block.users)
    freed.used.advance(user, tick_of(user));
  auto& arena = *arena_of(begin);
  count(arena, block.num_bytes, false);
  if (block.num_bytes >= kLargeBlock)
    fallocate(arena.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin - arena.begin, block.num_bytes);
  memory().pools[{block.owner, block.num_bytes}].push_back(std::move(freed));
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    auto device = current_device();
    if (num_bytes == 0)
      return {nullptr, c10::Device(kDevice, device)};
    TORCH_CHECK(!is_forked, "Cannot re-initialize simulated in forked subprocess: use the device first after the fork");
    auto stream = index_of(current_stream(device));
    std::lock_guard lock(memory().mutex);
    auto& arena = arenas().at(device);
    auto size = std::max(kSmallestBlock, std::bit_ceil(num_bytes));
    auto begin = num_allocated(arena) + size <= total_bytes() ? take_block(arena, stream, size) : 0;
    TORCH_CHECK_WITH(
        OutOfMemoryError, begin != 0, "simulated:", static_cast<int>(device), " is out of memory: ", num_bytes,
        " bytes were asked for, ", num_allocated(arena), " of ", total_bytes(), " are in use");
    count(arena, size, true);
    memory().blocks[begin] = Block{size, stream, {}};
    auto* pointer = reinterpret_cast<void*>(begin);
    std::memset(reinterpret_cast<void*>(begin - arena.begin + arena.shadow), 0xFF, num_bytes); // nobody may rely on it
    return {pointer, pointer, &free_block, c10::Device(kDevice, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    std::memcpy(shadow_of(to), shadow_of(from), num_bytes);
  }
  bool initialized() override {
    return is_mapped;
  }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    record_stream(pointer.get(), stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard lock(memory().mutex);
    return arenas().at(device).stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    reset(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(DeviceIndex device) override {
    reset(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    std::lock_guard lock(memory().mutex);
    return {total_bytes() - num_allocated(arenas().at(device)), total_bytes()};
  }

 private:
  template <class Reset>
  static void reset(DeviceIndex device, const Reset& reset_stat) {
    std::lock_guard lock(memory().mutex);
    auto& stats = arenas().at(device).stats;
    for (auto* stat :
         {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes, &stats.reserved_bytes})
      reset_stat((*stat)[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)]);
  }
};

void free_pinned(void* address) {
  {
    std::lock_guard lock(memory().mutex);
    memory().pinned.erase(reinterpret_cast<uintptr_t>(address));
  }
  std::free(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    if (num_bytes == 0)
      return {nullptr, c10::Device(c10::DeviceType::CPU)};
    auto* pointer = std::aligned_alloc(64, (num_bytes + 63) / 64 * 64);
    std::lock_guard lock(memory().mutex);
    memory().pinned[reinterpret_cast<uintptr_t>(pointer)] = num_bytes;
    return {pointer, pointer, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }
};

} // namespace

c10::DeviceAllocator* device_allocator() {
  static auto* made = new Allocator;
  return made;
}

c10::Allocator* pinned_allocator() {
  static auto* made = new PinnedAllocator;
  return made;
}

bool is_pinned(const void* address) {
  std::lock_guard lock(memory().mutex);
  auto& pinned = memory().pinned;
  auto next = pinned.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (next == pinned.begin())
    return false;
  auto found = std::prev(next);
  return reinterpret_cast<uintptr_t>(address) < found->first + found->second;
}

void* shadow_of(const void* address) {
  if (address == nullptr)
    return nullptr;
  std::lock_guard lock(memory().mutex);
  auto at = reinterpret_cast<uintptr_t>(address);
  auto* arena = arena_of(at);
  TORCH_CHECK(arena, "a simulated tensor has memory of another device");
  return reinterpret_cast<void*>(at - arena->begin + arena->shadow);
}

DeviceIndex device_of(const void* address) {
  std::lock_guard lock(memory().mutex);
  auto* arena = arena_of(reinterpret_cast<uintptr_t>(address));
  TORCH_CHECK(arena, "this memory is no simulated device's");
  return static_cast<DeviceIndex>(arena - memory().arenas.data());
}

void record_stream(const void* address, const c10::Stream& stream) {
  std::lock_guard lock(memory().mutex);
  auto found = memory().blocks.find(reinterpret_cast<uintptr_t>(address));
  if (found != memory().blocks.end() && found->second.owner != index_of(stream))
    found->second.users.insert(index_of(stream));
}

bool is_in_bad_fork() {
  return is_forked;
}

} // namespace simulated
