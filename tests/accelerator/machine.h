// What the parts of the simulated accelerator know of each other: its streams, its memory and its devices.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace simulated {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

using c10::DeviceIndex;
using StreamIndex = uint64_t;

// A vector clock: how many operations of each stream are known to be done.
class Clock {
 public:
  uint64_t of(StreamIndex stream) const {
    return stream < ticks_.size() ? ticks_[stream] : 0;
  }
  void advance(StreamIndex stream, uint64_t tick);
  void join(const Clock& other);
  bool covers(const Clock& other) const;

 private:
  std::vector<uint64_t> ticks_;
};

// Addresses from `begin` to before `end`.
struct Range {
  uintptr_t begin = 0, end = 0;
  bool empty() const {
    return begin >= end;
  }
  bool overlaps(const Range& other) const {
    return begin < other.end && other.begin < end;
  }
};

struct Access {
  Range range;
  bool is_write = false;
};

// A copy between host and device that is done when something needs it, or when the host waits for it.
struct LateCopy {
  Range host, device;
  bool is_to_host = false;
  c10::Storage held; // the host's memory must stay
  std::function<void()> finish;
};

// schedule.cpp: streams, events and what is ordered before what.

StreamIndex index_of(const c10::Stream& stream);
c10::Stream new_stream(DeviceIndex device);
c10::Stream current_stream(DeviceIndex device);
c10::Stream exchange_stream(const c10::Stream& stream);

// Begins an operation, or raises an error that names the race. `name` must live for ever.
void begin_operation(const c10::Stream& stream, const char* name, const std::vector<Access>& accesses);
// Checks, and does, late copies that an operation of `stream` on the host's memory follows.
void follow_late_copies(const c10::Stream& stream, const char* name, const Access& host);
// Keeps a late copy that the last operation of `stream` began; whether its host memory is the result of another.
bool is_result_of_late_copy(const Range& host);
void keep_late_copy(const c10::Stream& stream, LateCopy copy);

void wait_for_stream(const c10::Stream& waiting, const c10::Stream& awaited);
void synchronize_stream(const c10::Stream& stream);
void synchronize_device(DeviceIndex device);
bool query_stream(const c10::Stream& stream);

void record_event(void** event, const c10::Stream& stream);
void wait_for_event(void* event, const c10::Stream& waiting);
void synchronize_event(void* event);
bool query_event(void* event);
double milliseconds_between(void* from, void* to);
void destroy_event(void* event) noexcept;

// How far `stream` is, and whether `stream`, or the host, knows that all in `clock` is done.
uint64_t tick_of(StreamIndex stream);
bool is_known_done(const Clock& clock, StreamIndex stream);

// memory.cpp: the devices' memory, and pinned memory of the host.

c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
// Where the host finds what a device has at `address`.
void* shadow_of(const void* address);
DeviceIndex device_of(const void* address);
void record_stream(const void* address, const c10::Stream& stream);
bool is_in_bad_fork();

// device.cpp: which devices there are, and which is a thread's current one.

DeviceIndex num_devices();
DeviceIndex current_device();
DeviceIndex exchange_device(DeviceIndex device);
const at::Generator& default_generator(DeviceIndex device);
// The CPU generator inside a device's.
at::Generator numbers_of(const at::Generator& generator);

// operations.cpp: what is computed.

void resize_storage(const c10::Storage& storage, size_t num_bytes);

} // namespace simulated
