// The operations of the simulated accelerator: torch's CPU kernels, run over the shadow of the devices' memory.
#include "machine.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace at::autocast {
TORCH_API Tensor cached_cast(ScalarType to, const Tensor& value, DeviceType device); // ATen/autocast_mode.h is large
TORCH_API ScalarType get_autocast_dtype(DeviceType device);
} // namespace at::autocast

namespace simulated {
namespace {

using at::Tensor;
using c10::Storage;
using c10::TensorImpl;
using Names = std::unordered_set<std::string_view>;

// The host waits for none of these, though they return a number or a bool.
const Names kAboutShapes = {"aten::is_set_to", "aten::_fused_sdp_choice", "aten::_has_same_storage_numel"};

// CUDA's kernels, too, take these tensors from the host.
const Names kTakesHostTensors = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_pack_padded_sequence", "aten::_amp_update_scale_"};

bool is_on_device(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

Range range_of(const Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0)
    return {};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i)
    last += (tensor.size(i) - 1) * tensor.stride(i);
  auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
  return {begin, begin + (last + 1) * tensor.itemsize()};
}

Tensor tensor_in(Storage storage, const Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj())
    made._set_conj(true);
  if (like.is_neg())
    made._set_neg(true);
  return made;
}

Storage on_host(void* address, size_t num_bytes) {
  c10::DataPtr pointer(address, c10::Device(c10::DeviceType::CPU));
  return {Storage::use_byte_size_t(), num_bytes, std::move(pointer), c10::GetAllocator(c10::DeviceType::CPU), true};
}

// A CPU tensor over the shadow of what `tensor` has.
Tensor shadow_tensor(const Tensor& tensor) {
  const auto& storage = tensor.storage();
  return tensor_in(on_host(shadow_of(storage.data()), storage.nbytes()), tensor, c10::DispatchKey::CPU);
}

struct OnDevice {
  explicit OnDevice(DeviceIndex device) : before(exchange_device(device)) {}
  ~OnDevice() {
    exchange_device(before);
  }
  DeviceIndex before;
};

// The tensors of one call, on the device and as the CPU's kernel has them.
class Call {
 public:
  Call(const c10::OperatorHandle& op) : name_(op.schema().name().c_str()) {}

  Tensor host(const Tensor& tensor, bool is_write) {
    if (!is_on_device(tensor)) {
      auto is_strange = tensor.defined() && tensor.device().is_cpu() && (tensor.dim() > 0 || is_write);
      strange_ = is_strange && !kTakesHostTensors.contains(name_) ? tensor : strange_;
      return tensor;
    }
    check_device(tensor.device().index());
    if (!kAboutShapes.contains(name_))
      accesses_.push_back({range_of(tensor), is_write});
    auto* impl = tensor.unsafeGetTensorImpl();
    for (const auto& [device, host] : tensors_)
      if (device.unsafeGetTensorImpl() == impl)
        return host;
    const auto& storage = tensor.storage();
    auto& shadow = shadows_[storage.unsafeGetStorageImpl()];
    if (!shadow)
      shadow = on_host(shadow_of(storage.data()), storage.nbytes());
    devices_.emplace(shadow.unsafeGetStorageImpl(), storage);
    tensors_.emplace_back(tensor, tensor_in(shadow, tensor, c10::DispatchKey::CPU));
    return tensors_.back().second;
  }

  void check_device(DeviceIndex index) {
    TORCH_CHECK(
        device_ < 0 || device_ == index, "Expected all tensors to be on the same device, but ", name_, " got tensors on simulated:",
        static_cast<int>(device_), " and on simulated:", static_cast<int>(index));
    device_ = index;
  }

  void begin() {
    TORCH_CHECK(
        !strange_.defined() || device_ < 0, "Expected all tensors to be on the same device, but ", name_,
        " got tensors on simulated:", static_cast<int>(device_), " and on cpu");
    begin_operation(stream(), name_, accesses_);
  }

  c10::Stream stream() const {
    return current_stream(device());
  }

  DeviceIndex device() const {
    return device_ < 0 ? current_device() : device_;
  }

  // Brings what the kernel has made to the device. Nothing is copied before the memory is known to be free.
  void end(std::vector<Tensor>& results) {
    OnDevice guard(device());
    std::vector<std::pair<Storage, Storage>> made; // on the host and on the device
    for (auto& [device, host] : tensors_)
      follow_changes(device, host, made);
    for (auto& result : results)
      result = on_device(result, made);
    std::vector<Access> writes;
    for (const auto& [host, device] : made) {
      auto begin = reinterpret_cast<uintptr_t>(device.data());
      writes.push_back({{begin, begin + device.nbytes()}, true});
    }
    if (!writes.empty())
      begin_operation(stream(), name_, writes);
    for (const auto& [host, device] : made)
      if (host.nbytes())
        std::memcpy(shadow_of(device.data()), host.data(), host.nbytes());
  }

 private:
  using Made = std::vector<std::pair<Storage, Storage>>;

  // What an ``out=`` has become.
  void follow_changes(const Tensor& device, const Tensor& host, Made& made) {
    const auto& storage = device.storage();
    if (host.storage().data() != shadow_of(storage.data())) {
      auto num_bytes = host.storage().nbytes();
      storage.set_data_ptr_noswap(device_allocator()->allocate(num_bytes));
      storage.set_nbytes(num_bytes);
      made.emplace_back(host.storage(), storage);
    }
    if (host.sizes() != device.sizes() || host.strides() != device.strides())
      device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

  Tensor on_device(const Tensor& result, Made& made) {
    if (!result.defined() || !result.device().is_cpu())
      return result;
    for (const auto& [device, host] : tensors_)
      if (host.unsafeGetTensorImpl() == result.unsafeGetTensorImpl())
        return device;
    auto& storage = devices_[result.storage().unsafeGetStorageImpl()];
    if (!storage) {
      auto num_bytes = result.storage().nbytes();
      auto pointer = device_allocator()->allocate(num_bytes);
      storage = Storage(Storage::use_byte_size_t(), num_bytes, std::move(pointer), device_allocator(), true);
      made.emplace_back(result.storage(), storage);
    }
    return tensor_in(storage, result, c10::DispatchKey::PrivateUse1);
  }

  const char* name_;
  DeviceIndex device_ = -1;
  std::vector<Access> accesses_;
  std::vector<std::pair<Tensor, Tensor>> tensors_; // on the device and on the host
  std::unordered_map<c10::StorageImpl*, Storage> shadows_, devices_;
  Tensor strange_; // on the CPU, where one on the device is needed
};

bool is_written(const c10::Argument& argument) {
  const auto* alias = argument.alias_info();
  if (!alias)
    return false;
  auto is_write = alias->isWrite();
  for (const auto& inner : alias->containedTypes())
    is_write |= inner.isWrite();
  return is_write;
}

bool takes_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>())
    type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

// Gives the kernel the CPU's tensor, device or generator that stands for `value`.
void make_host_value(Call& call, const c10::Argument& argument, c10::IValue& value) {
  auto is_write = is_written(argument);
  if (value.isTensor()) {
    value = call.host(value.toTensor(), is_write);
  } else if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& it : value.toTensorVector())
      made.push_back(call.host(it, is_write));
    value = made;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& it : value.toOptionalTensorVector())
      made.push_back(it ? std::optional(call.host(*it, is_write)) : it);
    value = made;
  } else if (value.isDevice() && value.toDevice().type() == kDevice) {
    auto device = value.toDevice();
    call.check_device(device.has_index() ? device.index() : current_device());
    value = c10::Device(c10::DeviceType::CPU);
  }
}

void make_host_generator(const Call& call, c10::IValue& value) {
  auto generator = value.isNone() ? default_generator(call.device()) : value.toGenerator();
  TORCH_CHECK(
      generator.device().type() == kDevice, "Expected a 'simulated' device type for generator but found '",
      generator.device().type(), "'");
  value = numbers_of(generator);
}

// Puts the device's results in the place of the kernel's; whether the host has to know a value to return it.
bool make_device_results(Call& call, const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  std::vector<Tensor> results;
  auto has_value = op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  auto values = torch::jit::last(stack, op.schema().returns().size());
  for (const auto& value : values) {
    if (value.isTensor())
      results.push_back(value.toTensor());
    else if (value.isTensorList())
      for (const Tensor& it : value.toTensorVector())
        results.push_back(it);
    else
      has_value = true;
  }
  call.end(results);
  auto next = results.begin();
  for (auto i = stack.size() - values.size(); i < stack.size(); ++i) {
    if (stack[i].isTensor()) {
      stack[i] = *next++;
    } else if (stack[i].isTensorList()) {
      c10::List<Tensor> list;
      for (size_t j = stack[i].toTensorVector().size(); j > 0; --j)
        list.push_back(*next++);
      stack[i] = list;
    }
  }
  return has_value && !kAboutShapes.contains(op.schema().name());
}

// Runs any operation on the CPU.
void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  auto first = stack->size() - arguments.size();
  Call call(op);
  auto is_random = false;
  for (size_t i = 0; i < arguments.size(); ++i)
    make_host_value(call, arguments[i], (*stack)[first + i]);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (takes_generator(arguments[i])) {
      make_host_generator(call, (*stack)[first + i]);
      is_random = true;
    }
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_random || !op.hasTag(at::Tag::nondeterministic_seeded), op.schema().name(),
      " would draw numbers from the CPU's generator: simulated has none to give it");
  call.begin();
  {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  if (make_device_results(call, op, *stack))
    synchronize_stream(call.stream());
}

c10::OperatorHandle operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle& /*op*/, torch::jit::Stack* stack) {
  fall_back(operator_of("aten::convolution"), stack);
}

void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto gradient = stack->end() - op.schema().arguments().size();
  auto num_outputs = gradient->toTensor().size(1);
  stack->insert(gradient + 3, c10::IValue(std::vector<int64_t>{num_outputs})); // the bias's sizes
  fall_back(operator_of("aten::convolution_backward"), stack);
}

// Memory and shapes.

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> /*pin*/, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      layout.value_or(at::kStrided) == at::kStrided, "simulated has no tensors of the layout ", *layout);
  OnDevice guard(device && device->has_index() ? device->index() : current_device());
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, device_allocator(), keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device, std::optional<bool> /*pin*/) {
  OnDevice guard(device && device->has_index() ? device->index() : current_device());
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), keys, c10::dtype_or_default(dtype));
}

void grow(const Tensor& tensor) {
  auto impl = tensor.unsafeGetTensorImpl();
  auto num_bytes = tensor.numel() == 0
      ? 0
      : at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), tensor.itemsize(), impl->storage_offset());
  if (num_bytes > tensor.storage().nbytes())
    resize_storage(tensor.storage(), num_bytes);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() != size) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    grow(self);
  }
  if (format)
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_with_shape_(Tensor& self, Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(source.device().type() == kDevice, "a simulated tensor cannot have memory of ", source.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr)
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  grow(self);
  return self;
}

Tensor& set_storage_(Tensor& self, Storage source) {
  auto size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_with_shape_(self, std::move(source), 0, {size}, {});
}

Tensor& set_tensor_(Tensor& self, const Tensor& source) {
  return set_with_shape_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing_(Tensor& self) {
  auto pointer = c10::DataPtr(nullptr, self.device());
  Storage storage(Storage::use_byte_size_t(), 0, std::move(pointer), device_allocator(), true);
  return set_with_shape_(self, std::move(storage), 0, {0}, {});
}

void record_stream_of(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data(), stream);
}

bool is_shallow_copy_allowed(const Tensor& self, const Tensor& from) {
  auto is_dense = [](const Tensor& it) { return it.layout() == at::kStrided; };
  return self.key_set() == from.key_set() || (is_dense(self) && is_dense(from));
}

// Copies.

Tensor bytes_like(const Tensor& tensor) {
  auto made = at::empty(tensor.sizes(), tensor.options());
  auto value = tensor.is_floating_point() || tensor.is_complex() ? 0xFF : 0xA5; // the first is a NaN of any type
  if (made.nbytes())
    std::memset(made.mutable_data_ptr(), value, made.nbytes());
  return made;
}

bool has_bytes(const Tensor& tensor, const Tensor& expected) {
  return expected.nbytes() == 0 ||
      std::memcmp(tensor.contiguous().const_data_ptr(), expected.const_data_ptr(), expected.nbytes()) == 0;
}

Tensor host_alias(const Tensor& tensor) {
  return tensor_in(tensor.storage(), tensor, c10::DispatchKey::CPU);
}

void copy_to_host(const Tensor& from, const Tensor& to, bool is_late) {
  auto stream = current_stream(from.device().index());
  begin_operation(stream, "a copy to the host", {{range_of(from), false}});
  follow_late_copies(stream, "a copy to the host", {range_of(to), true});
  auto value = shadow_tensor(from);
  auto target = host_alias(to);
  if (!is_late) {
    synchronize_stream(stream);
    target.copy_(value);
    return;
  }
  auto snapshot = at::empty(to.sizes(), to.options().pinned_memory(false)).copy_(value);
  auto poison = bytes_like(target);
  target.copy_(poison);
  LateCopy copy{range_of(to), range_of(from), true, to.storage(), {}};
  copy.finish = [=] {
    TORCH_CHECK(
        has_bytes(target, poison), "simulated race: the host wrote where a copy from the device with non_blocking=True was "
        "to write: synchronize with its stream first");
    target.copy_(snapshot);
  };
  keep_late_copy(stream, std::move(copy));
}

void copy_from_host(const Tensor& from, const Tensor& to, bool is_non_blocking) {
  auto stream = current_stream(to.device().index());
  begin_operation(stream, "a copy from the host", {{range_of(to), true}});
  auto source = host_alias(from);
  auto target = shadow_tensor(to);
  if (!is_non_blocking || !is_pinned(from.storage().data())) {
    follow_late_copies(stream, "a copy from the host", {range_of(from), false});
    if (!is_non_blocking)
      synchronize_stream(stream);
    target.copy_(source);
    return;
  }
  auto is_known = !is_result_of_late_copy(range_of(from));
  auto before = is_known ? at::empty(from.sizes(), from.options().pinned_memory(false)).copy_(source) : Tensor();
  LateCopy copy{range_of(from), range_of(to), false, from.storage(), {}};
  copy.finish = [=] {
    target.copy_(source);
    TORCH_CHECK(
        !is_known || has_bytes(source, before), "simulated race: the host changed the source of a copy to the device with "
        "non_blocking=True before it was done: synchronize with its stream first");
  };
  keep_late_copy(stream, std::move(copy));
}

void copy_on_devices(const Tensor& from, const Tensor& to) {
  auto reading = current_stream(from.device().index()), writing = current_stream(to.device().index());
  if (reading != writing)
    wait_for_stream(reading, writing);
  begin_operation(reading, "a copy", {{range_of(from), false}, {range_of(to), true}});
  shadow_tensor(to).copy_(shadow_tensor(from));
  if (reading != writing)
    wait_for_stream(writing, reading);
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool is_non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_python(c10::DispatchKeySet(c10::DispatchKey::Python));
  auto from = self.sizes() == to.sizes() ? self : self.expand(to.sizes());
  if (!is_on_device(from))
    copy_from_host(from, to, is_non_blocking);
  else if (!is_on_device(to))
    copy_to_host(from, to, is_non_blocking);
  else
    copy_on_devices(from, to);
  return to;
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> is_training) {
  auto is_kept = at::empty_like(input, input.options().dtype(at::kBool));
  if (!is_training.value_or(true))
    return {input.clone(), is_kept.fill_(1)};
  is_kept.bernoulli_(1 - p);
  return {input.mul(is_kept).mul_(p == 1 ? 0.0 : 1 / (1 - p)), is_kept};
}

// Autocast.

template <bool is_lower>
void cast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastPrivateUse1);
  auto dtype = is_lower ? at::autocast::get_autocast_dtype(kDevice) : at::kFloat;
  for (auto i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = at::autocast::cached_cast(dtype, value.toTensor(), kDevice);
    } else if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& it : value.toTensorVector())
        made.push_back(at::autocast::cached_cast(dtype, it, kDevice));
      value = made;
    }
  }
  op.callBoxed(stack);
}

} // namespace

void resize_storage(const c10::Storage& storage, size_t num_bytes) {
  OnDevice guard(storage.device().index());
  auto made = device_allocator()->allocate(num_bytes);
  auto num_kept = std::min(num_bytes, storage.nbytes());
  if (num_kept > 0) {
    auto from = reinterpret_cast<uintptr_t>(storage.data()), to = reinterpret_cast<uintptr_t>(made.get());
    begin_operation(
        current_stream(storage.device().index()), "a new size", {{{from, from + num_kept}, false}, {{to, to + num_kept}, true}});
    std::memcpy(shadow_of(made.get()), shadow_of(storage.data()), num_kept);
  }
  storage.set_data_ptr_noswap(std::move(made));
  storage.set_nbytes(num_bytes);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_with_shape_);
  library.impl("set_.source_Storage", &set_storage_);
  library.impl("set_.source_Tensor", &set_tensor_);
  library.impl("set_", &set_nothing_);
  library.impl("record_stream", &record_stream_of);
  library.impl("_copy_from", &copy_from);
  library.impl("_has_compatible_shallow_copy_type", &is_shallow_copy_allowed);
  library.impl("native_dropout", &native_dropout);
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// torch would resolve these bits by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (const char* name :
       {"conv1d", "conv2d", "conv3d", "convolution", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linear", "addbmm",
        "baddbmm", "bmm", "prelu", "scaled_dot_product_attention"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast<true>>());
  for (const char* name :
       {"exp", "log", "pow.Tensor_Scalar", "rsqrt", "softplus", "layer_norm", "group_norm", "nll_loss", "mse_loss", "l1_loss",
        "smooth_l1_loss", "kl_div", "binary_cross_entropy_with_logits", "cosine_similarity", "logsumexp", "softmax.int",
        "log_softmax.int", "sum", "sum.dim_IntList", "prod", "cumsum", "norm.Scalar"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast<false>>());
}

} // namespace simulated
