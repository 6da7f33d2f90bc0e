// Streams and events of the simulated accelerator, the check for races, and copies that are done late.
//
// An operation is computed at once. What a real device would leave open is checked with vector clocks: an operation
// may touch memory only if its stream knows that all earlier operations on that memory are done.
#include "machine.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>

namespace simulated {

void Clock::advance(StreamIndex stream, uint64_t tick) {
  if (stream >= ticks_.size())
    ticks_.resize(stream + 1);
  ticks_[stream] = std::max(ticks_[stream], tick);
}

void Clock::join(const Clock& other) {
  for (StreamIndex i = 0; i < other.ticks_.size(); ++i)
    advance(i, other.ticks_[i]);
}

bool Clock::covers(const Clock& other) const {
  for (StreamIndex i = 0; i < other.ticks_.size(); ++i)
    if (other.ticks_[i] > of(i))
      return false;
  return true;
}

namespace {

struct Operation {
  StreamIndex stream = 0;
  uint64_t tick = 0; // 0: none
  const char* name = "";
};

// What was last done with the addresses from a key of the map to before `end`.
struct Cell {
  uintptr_t end = 0;
  Operation write;
  std::vector<Operation> reads; // since then, at most one for each stream
};

struct StreamState {
  Clock clock;
  DeviceIndex device = 0;
  uint64_t asked = 0; // the tick at which the host asked in vain whether all is done
};

struct Kept {
  LateCopy copy;
  Operation operation;
};

struct Event {
  Clock clock;
  bool is_asked = false;
  std::chrono::steady_clock::time_point time;
};

struct Schedule {
  std::mutex mutex;
  std::vector<StreamState> streams;
  Clock host; // what the host has waited for, with any of its threads
  std::map<uintptr_t, Cell> cells;
  std::vector<Kept> late; // in the order of their begin
};

Schedule& schedule() {
  static auto* made = [] {
    auto* fresh = new Schedule; // never deleted: other threads may outlive the end of main
    fresh->streams.resize(num_devices());
    for (DeviceIndex i = 0; i < num_devices(); ++i)
      fresh->streams[i].device = i;
    return fresh;
  }();
  return *made;
}

std::string described(StreamIndex stream) {
  std::ostringstream text;
  auto device = static_cast<int>(schedule().streams[stream].device);
  if (stream < static_cast<StreamIndex>(num_devices()))
    text << "the default stream of simulated:" << device;
  else
    text << "stream " << stream << " of simulated:" << device;
  return text.str();
}

void check_order(const Operation& now, bool is_write, const Operation& before, const char* was, const char* what) {
  auto& clock = schedule().streams[now.stream].clock;
  TORCH_CHECK(
      clock.of(before.stream) >= before.tick,
      "simulated race: ", now.name, " in ", described(now.stream), is_write ? " writes " : " reads ", what, " that ",
      before.name, " in ", described(before.stream), was, ", and nothing orders the two: let ", described(now.stream),
      " wait for an event that is recorded in ", described(before.stream), " after ", before.name);
}

// Makes `at` the begin of a cell, if a cell contains it.
void split(uintptr_t at) {
  auto& cells = schedule().cells;
  auto next = cells.upper_bound(at);
  if (next == cells.begin())
    return;
  auto found = std::prev(next);
  if (found->first == at || found->second.end <= at)
    return;
  Cell rest = found->second;
  found->second.end = at;
  cells.emplace(at, std::move(rest));
}

void check(const Operation& now, const Access& access) {
  auto& cells = schedule().cells;
  auto cell = cells.upper_bound(access.range.begin);
  if (cell != cells.begin() && std::prev(cell)->second.end > access.range.begin)
    --cell;
  for (; cell != cells.end() && cell->first < access.range.end; ++cell) {
    if (cell->second.write.tick)
      check_order(now, access.is_write, cell->second.write, " wrote", "memory");
    if (access.is_write)
      for (const auto& read : cell->second.reads)
        check_order(now, true, read, " read", "memory");
  }
}

void record_write(const Operation& now, const Range& range) {
  auto& cells = schedule().cells;
  split(range.begin);
  split(range.end);
  cells.erase(cells.lower_bound(range.begin), cells.lower_bound(range.end));
  cells[range.begin] = Cell{range.end, now, {}};
}

void record_read(const Operation& now, const Range& range) {
  auto& cells = schedule().cells;
  split(range.begin);
  split(range.end);
  auto at = range.begin;
  for (auto cell = cells.lower_bound(at); at < range.end; ++cell) {
    auto gap = cell == cells.end() ? range.end : std::min(cell->first, range.end);
    if (at < gap)
      cell = cells.emplace(at, Cell{gap, {}, {}}).first;
    auto& reads = cell->second.reads;
    std::erase_if(reads, [&](const Operation& read) { return read.stream == now.stream; });
    reads.push_back(now);
    at = cell->second.end;
  }
}

bool conflicts(const LateCopy& copy, const Access& host) {
  return copy.host.overlaps(host.range) && (copy.is_to_host || host.is_write);
}

// Does the late copies that `is_due` names, and those before them that they depend on. What they held is let go
// by the caller, who then has no lock: to free memory may need Python's.
template <class IsDue>
void finish(std::vector<Kept>& done, const IsDue& is_due) {
  auto& late = schedule().late;
  std::vector<bool> due(late.size());
  for (size_t i = late.size(); i-- > 0;) {
    due[i] = due[i] || is_due(late[i]);
    for (size_t j = 0; due[i] && j < i; ++j)
      due[j] = due[j] || conflicts(late[j].copy, {late[i].copy.host, late[i].copy.is_to_host});
  }
  std::vector<Kept> left;
  auto num_before = done.size();
  for (size_t i = 0; i < due.size(); ++i)
    (due[i] ? done : left).push_back(std::move(late[i]));
  late = std::move(left);
  std::exception_ptr error;
  for (size_t i = num_before; i < done.size(); ++i) {
    try {
      done[i].copy.finish();
    } catch (...) {
      error = error ? error : std::current_exception();
    }
  }
  if (error)
    std::rethrow_exception(error);
}

void wait_on_host(std::vector<Kept>& done, const Clock& clock) {
  schedule().host.join(clock);
  finish(done, [&](const Kept& it) { return clock.of(it.operation.stream) >= it.operation.tick; });
}

StreamState& state_of(const c10::Stream& stream) {
  auto index = index_of(stream);
  TORCH_CHECK(index < schedule().streams.size(), "simulated has no stream ", index);
  return schedule().streams[index];
}

thread_local std::vector<c10::StreamId> current_ids;

} // namespace

StreamIndex index_of(const c10::Stream& stream) {
  return stream.id() == 0 ? stream.device_index() : stream.id();
}

c10::Stream new_stream(DeviceIndex device) {
  std::lock_guard lock(schedule().mutex);
  auto id = static_cast<c10::StreamId>(schedule().streams.size());
  schedule().streams.push_back(StreamState{{}, device, 0});
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), id);
}

c10::Stream current_stream(DeviceIndex device) {
  current_ids.resize(num_devices());
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), current_ids.at(device));
}

c10::Stream exchange_stream(const c10::Stream& stream) {
  auto before = current_stream(stream.device_index());
  current_ids.at(stream.device_index()) = stream.id();
  return before;
}

void begin_operation(const c10::Stream& stream, const char* name, const std::vector<Access>& accesses) {
  TORCH_CHECK(!is_in_bad_fork(), "Cannot re-initialize simulated in forked subprocess: use the device first after the fork");
  std::vector<Kept> done;
  std::lock_guard lock(schedule().mutex);
  auto& clock = state_of(stream).clock;
  clock.join(schedule().host);
  Operation now{index_of(stream), clock.of(index_of(stream)) + 1, name};
  clock.advance(now.stream, now.tick);
  for (const auto& access : accesses)
    check(now, access);
  finish(done, [&](const Kept& it) {
    return !it.copy.is_to_host && std::any_of(accesses.begin(), accesses.end(), [&](const Access& access) {
      return access.range.overlaps(it.copy.device);
    });
  });
  for (const auto& access : accesses)
    if (!access.is_write && !access.range.empty())
      record_read(now, access.range);
  for (const auto& access : accesses)
    if (access.is_write && !access.range.empty())
      record_write(now, access.range);
}

void follow_late_copies(const c10::Stream& stream, const char* name, const Access& host) {
  std::vector<Kept> done;
  std::lock_guard lock(schedule().mutex);
  Operation now{index_of(stream), 0, name};
  for (const auto& it : schedule().late)
    if (conflicts(it.copy, host))
      check_order(now, host.is_write, it.operation, it.copy.is_to_host ? " writes" : " reads", "the host's memory");
  finish(done, [&](const Kept& it) { return conflicts(it.copy, host); });
}

bool is_result_of_late_copy(const Range& host) {
  std::lock_guard lock(schedule().mutex);
  return std::any_of(schedule().late.begin(), schedule().late.end(), [&](const Kept& it) {
    return it.copy.is_to_host && it.copy.host.overlaps(host);
  });
}

void keep_late_copy(const c10::Stream& stream, LateCopy copy) {
  std::lock_guard lock(schedule().mutex);
  const char* name = copy.is_to_host ? "a copy to the host" : "a copy from the host";
  Operation now{index_of(stream), state_of(stream).clock.of(index_of(stream)), name};
  for (const auto& it : schedule().late)
    if (conflicts(it.copy, {copy.host, copy.is_to_host}))
      check_order(now, copy.is_to_host, it.operation, it.copy.is_to_host ? " writes" : " reads", "the host's memory");
  schedule().late.push_back({std::move(copy), now});
}

void wait_for_stream(const c10::Stream& waiting, const c10::Stream& awaited) {
  std::lock_guard lock(schedule().mutex);
  state_of(waiting).clock.join(state_of(awaited).clock);
}

void synchronize_stream(const c10::Stream& stream) {
  std::vector<Kept> done;
  std::lock_guard lock(schedule().mutex);
  wait_on_host(done, Clock(state_of(stream).clock));
}

void synchronize_device(DeviceIndex device) {
  std::vector<Kept> done;
  std::lock_guard lock(schedule().mutex);
  Clock all;
  for (const auto& state : schedule().streams)
    if (state.device == device)
      all.join(state.clock);
  wait_on_host(done, all);
}

// What asks again and again must not ask for ever, and what asks once must be ready for a "no".
bool query_stream(const c10::Stream& stream) {
  std::vector<Kept> done;
  std::lock_guard lock(schedule().mutex);
  auto& state = state_of(stream);
  if (schedule().host.covers(state.clock))
    return true;
  auto tick = state.clock.of(index_of(stream));
  if (std::exchange(state.asked, tick) != tick)
    return false;
  wait_on_host(done, Clock(state.clock));
  return true;
}

void record_event(void** event, const c10::Stream& stream) {
  std::lock_guard lock(schedule().mutex);
  auto*& made = reinterpret_cast<Event*&>(*event);
  made = made ? made : new Event;
  auto& clock = state_of(stream).clock;
  clock.join(schedule().host);
  *made = Event{clock, false, std::chrono::steady_clock::now()};
}

void wait_for_event(void* event, const c10::Stream& waiting) {
  if (!event)
    return;
  std::lock_guard lock(schedule().mutex);
  state_of(waiting).clock.join(static_cast<Event*>(event)->clock);
}

void synchronize_event(void* event) {
  if (!event)
    return;
  std::vector<Kept> done;
  std::lock_guard lock(schedule().mutex);
  wait_on_host(done, static_cast<Event*>(event)->clock);
}

bool query_event(void* event) {
  if (!event)
    return true;
  std::vector<Kept> done;
  std::lock_guard lock(schedule().mutex);
  auto* asked = static_cast<Event*>(event);
  if (schedule().host.covers(asked->clock))
    return true;
  if (!std::exchange(asked->is_asked, true))
    return false;
  wait_on_host(done, asked->clock);
  return true;
}

double milliseconds_between(void* from, void* to) {
  std::lock_guard lock(schedule().mutex);
  auto *first = static_cast<Event*>(from), *last = static_cast<Event*>(to);
  TORCH_CHECK(first && last, "both events must be recorded before their distance in time is asked for");
  auto is_done = schedule().host.covers(first->clock) && schedule().host.covers(last->clock);
  TORCH_CHECK(is_done, "both events must be done before their distance in time is asked for: synchronize first");
  return std::chrono::duration<double, std::milli>(last->time - first->time).count();
}

void destroy_event(void* event) noexcept {
  delete static_cast<Event*>(event);
}

uint64_t tick_of(StreamIndex stream) {
  std::lock_guard lock(schedule().mutex);
  return schedule().streams.at(stream).clock.of(stream);
}

bool is_known_done(const Clock& clock, StreamIndex stream) {
  std::lock_guard lock(schedule().mutex);
  return schedule().host.covers(clock) || schedule().streams.at(stream).clock.covers(clock);
}

} // namespace simulated
