// What torch asks of any accelerator: devices, streams through its guard, hooks, and generators.
#include "machine.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>

namespace simulated {
namespace {

thread_local DeviceIndex current = 0;

void check_index(DeviceIndex device) {
  TORCH_CHECK(
      device >= 0 && device < num_devices(), "there is no simulated:", static_cast<int>(device), ", as there are ",
      static_cast<int>(num_devices()), " simulated devices");
}

} // namespace

DeviceIndex num_devices() {
  static const auto number = [] {
    const char* text = std::getenv("SIMULATED_DEVICES");
    return static_cast<DeviceIndex>(std::clamp(text ? std::atoi(text) : 2, 0, 64));
  }();
  return number;
}

DeviceIndex current_device() {
  return current;
}

DeviceIndex exchange_device(DeviceIndex device) {
  check_index(device);
  return std::exchange(current, device);
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDevice;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kDevice, exchange_device(device.index())};
  }
  c10::Device getDevice() const override {
    return {kDevice, current};
  }
  void setDevice(c10::Device device) const override {
    exchange_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.has_index() ? device.index() : current);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {kDevice, device.has_index() ? device.index() : current});
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*is_high*/) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return new_stream(device.has_index() ? device.index() : current);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }
  void destroyEvent(void* event, DeviceIndex /*device*/) const noexcept override {
    destroy_event(event);
  }
  void record(void** event, const c10::Stream& stream, DeviceIndex /*device*/, c10::EventFlag /*flag*/)
      const override {
    record_event(event, stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    wait_for_event(event, stream);
  }
  bool queryEvent(void* event) const override {
    return query_event(event);
  }
  void synchronizeEvent(void* event) const override {
    synchronize_event(event);
  }
  double elapsedTime(void* from, void* to, DeviceIndex /*device*/) const override {
    return milliseconds_between(from, to);
  }
  DeviceIndex deviceCount() const noexcept override {
    return num_devices();
  }
  bool queryStream(const c10::Stream& stream) const override {
    return query_stream(stream);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(stream);
  }
  void synchronizeDevice(DeviceIndex device) const override {
    synchronize_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_stream(pointer.get(), stream);
  }
};

// A generator whose numbers are a CPU generator's, with a state of its own.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex device, at::Generator numbers = at::detail::createCPUGenerator())
      : GeneratorImpl({kDevice, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        numbers_(std::move(numbers)) {}

  void set_current_seed(uint64_t seed) override {
    numbers_.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    numbers_.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return numbers_.get_offset();
  }
  uint64_t current_seed() const override {
    return numbers_.current_seed();
  }
  uint64_t seed() override {
    return numbers_.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    numbers_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return numbers_.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    return new Generator(device_.index(), numbers_.clone());
  }

  at::Generator numbers_;
};

} // namespace

const at::Generator& default_generator(DeviceIndex device) {
  static auto* made = [] {
    auto* fresh = new std::vector<at::Generator>;
    for (DeviceIndex i = 0; i < num_devices(); ++i)
      fresh->push_back(at::make_generator<Generator>(i));
    return fresh;
  }();
  auto index = device < 0 ? current : device;
  check_index(index);
  return (*made)[index];
}

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return num_devices() > 0;
  }
  bool hasPrimaryContext(DeviceIndex /*device*/) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return num_devices();
  }
  void setCurrentDevice(DeviceIndex device) const override {
    exchange_device(device);
  }
  DeviceIndex getCurrentDevice() const override {
    return current;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return exchange_device(device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current : exchange_device(device);
  }
  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  c10::Device getDeviceFromPtr(void* address) const override {
    return {kDevice, device_of(address)};
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_storage(storage, num_bytes);
  }
};

[[maybe_unused]] const bool is_registered = [] {
  c10::SetAllocator(kDevice, device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

} // namespace

at::Generator numbers_of(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->numbers_;
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

TORCH_LIBRARY(simulated, library) {
  library.def("default_generator(int device) -> Generator?", [](int64_t device) {
    return default_generator(static_cast<DeviceIndex>(device));
  });
  library.def("num_devices() -> int", [] { return static_cast<int64_t>(num_devices()); });
  library.def("is_in_bad_fork() -> bool", &is_in_bad_fork);
}

} // namespace simulated
