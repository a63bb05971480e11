// The device `hpu` over host memory, as a backend of torch for DispatchKey::HPU.
//
// A tensor on it has the device hpu:0. Operators run the CPU's kernels on the same memory: the fallback replaces each
// tensor by a CPU tensor over its storage, and gives results the device again. It refuses tensors of two devices, and
// notes each operator for which a card's host would wait. int64 has 32 bits where the bridge gives it no more, and
// there is no float64.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <set>

namespace {

using at::IValue;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;

const Device kHpu(DeviceType::HPU, 0);
const Device kCpu(DeviceType::CPU);

// ---------------------------------------------------------------------------------------------------------------------
// Memory

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    return {data, data, &c10::free_cpu, kHpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

// Host memory that the device could copy from and to without the host.
struct PinnedMemory final : c10::Allocator {
  static std::mutex mutex;
  static std::set<const void*> all;

  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    std::lock_guard<std::mutex> lock(mutex);
    all.insert(data);
    return {data, data, &release, kCpu};
  }
  static void release(void* data) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      all.erase(data);
    }
    c10::free_cpu(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  static bool holds(const void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    return all.count(data) > 0;
  }
};
std::mutex PinnedMemory::mutex;
std::set<const void*> PinnedMemory::all;

Memory memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(DeviceType::HPU, &memory);

void drop(void* storage) { delete static_cast<Storage*>(storage); }

// A storage over the memory of another, which it keeps alive.
Storage over(const Storage& other, Device device) {
  return Storage(
      Storage::use_byte_size_t(),
      other.nbytes(),
      c10::DataPtr(other.mutable_data(), new Storage(other), &drop, device),
      c10::GetAllocator(device.type()),
      /*resizable=*/true);
}

// ---------------------------------------------------------------------------------------------------------------------
// One device a process, without streams: all that was launched is done

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::HPU; }
  Device exchangeDevice(Device) const override { return kHpu; }
  Device getDevice() const override { return kHpu; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::Stream getStream(Device) const override { return c10::Stream(c10::Stream::DEFAULT, kHpu); }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  void record(void**, const c10::Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(HPU, Guard);

} // namespace

namespace at {

struct HPUHooks final : HPUHooksInterface {
  explicit HPUHooks(HPUHooksArgs) {}
  void init() const override {}
  bool hasHPU() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return kHpu; }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};
REGISTER_HPU_HOOKS(HPUHooks);

} // namespace at

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Notes, which Python keeps

void note(const char* kind, const std::string& operator_name) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("habana_stand_in::note", "");
  torch::jit::Stack stack{IValue(kind), IValue(operator_name)};
  op.callBoxed(stack);
}

// ---------------------------------------------------------------------------------------------------------------------
// Types that the device lacks

bool is_set(const char* variable, bool otherwise) {
  const char* value = std::getenv(variable);
  return value == nullptr ? otherwise : std::string(value) != "0" && std::string(value) != "false";
}

// Whether int64 is held and computed as int32, as on Gaudi 2 and 3: unless PT_ENABLE_INT64_SUPPORT=1 in lazy mode, if it
// is 0 in eager mode (IsInt64Supported in common/{lazy,eager}/utils.cpp and scripts/env_flags.yaml of the bridge 1.19).
bool narrows() { return !is_set("PT_ENABLE_INT64_SUPPORT", !is_set("PT_HPU_LAZY_MODE", true)); }

// The low 32 bits with their sign, as the bridge's copies convert (habana_eager/ops/copy_from.cpp). What a kernel has
// computed in 64 bits from such numbers ends with the 32 bits that int32 would have.
void narrow(const Tensor& on_cpu) {
  if (on_cpu.defined() && on_cpu.scalar_type() == at::kLong && on_cpu.numel() > 0 && narrows()) {
    on_cpu.copy_(on_cpu.to(at::kInt));
  }
}

// The bridge calls it double and holds float32, without a word (getInternalDtype in habana_kernels/kernel_utils.cpp,
// backend/habana_operator.cpp): whoever asks for it gets other numbers than on any other device. So it is refused here.
void refuse_float64(at::ScalarType type) {
  TORCH_CHECK(type != at::kDouble, "hpu has no float64: the bridge would compute it in float32");
}

// ---------------------------------------------------------------------------------------------------------------------
// CPU tensors over the device's memory

class Aliases {
 public:
  Tensor of(const Tensor& tensor) {
    for (auto& [original, alias] : tensors_) {
      if (original.is_same(tensor)) {
        return alias;
      }
    }
    auto impl = c10::make_intrusive<c10::TensorImpl>(
        storage_of(tensor.storage()), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      impl->set_wrapped_number(true);
    }
    Tensor alias(std::move(impl));
    alias._set_conj(tensor.is_conj());
    alias._set_neg(tensor.is_neg());
    tensors_.emplace_back(tensor, alias);
    return alias;
  }

  // Give the originals what a kernel has changed in their aliases: sizes, and memory if they have grown.
  void hand_back() {
    for (auto& [original, alias] : storages_) {
      if (alias.data() != original.data()) {
        original.set_data_ptr(c10::DataPtr(alias.mutable_data(), new Storage(alias), &drop, kHpu));
      }
      original.set_nbytes(alias.nbytes());
    }
    for (auto& [original, alias] : tensors_) {
      if (original.sizes() != alias.sizes() || original.strides() != alias.strides() ||
          original.storage_offset() != alias.storage_offset()) {
        original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
      }
    }
  }

  // The result of a kernel, on the device.
  Tensor result(const Tensor& tensor) {
    if (!tensor.defined() || tensor.device() != kCpu) {
      return tensor;
    }
    for (auto& [original, alias] : tensors_) {
      if (alias.is_same(tensor)) {
        return original;
      }
    }
    Storage storage;
    for (auto& [original, alias] : storages_) {
      if (alias.unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) {
        storage = original;
      }
    }
    refuse_float64(tensor.scalar_type());
    if (!storage) {
      narrow(tensor);
      storage = over(tensor.storage(), kHpu);
    }
    auto impl = c10::make_intrusive<c10::TensorImpl>(
        std::move(storage), DispatchKeySet(DispatchKey::HPU), tensor.dtype());
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    Tensor wrapped(std::move(impl));
    wrapped._set_conj(tensor.is_conj());
    wrapped._set_neg(tensor.is_neg());
    return wrapped;
  }

 private:
  Storage storage_of(const Storage& storage) {
    for (auto& [original, alias] : storages_) {
      if (original.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) {
        return alias;
      }
    }
    storages_.emplace_back(storage, over(storage, kCpu));
    return storages_.back().second;
  }

  std::vector<std::pair<Tensor, Tensor>> tensors_;
  std::vector<std::pair<Storage, Storage>> storages_;
};

// ---------------------------------------------------------------------------------------------------------------------
// Operators of the device itself

Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  refuse_float64(c10::dtype_or_default(dtype));
  return at::detail::empty_generic(
      size, &memory, DispatchKeySet(DispatchKey::HPU), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device>,
    std::optional<bool>) {
  refuse_float64(c10::dtype_or_default(dtype));
  return at::detail::empty_strided_generic(
      size, stride, &memory, DispatchKeySet(DispatchKey::HPU), c10::dtype_or_default(dtype));
}

// The views of torch count 8 bytes for an int64 of which the bridge holds 4, so such a view finds other numbers.
Tensor view_dtype(const Tensor& self, at::ScalarType type) {
  refuse_float64(type);
  TORCH_CHECK(
      self.scalar_type() == type || !narrows() || (self.scalar_type() != at::kLong && type != at::kLong),
      "hpu holds int64 as int32: its bits cannot be viewed as another type");
  return at::native::view_dtype(self, type);
}

Tensor& set_to_empty(Tensor& self) {
  return at::native::set_storage_cpu_(self, Storage(Storage::use_byte_size_t(), 0, &memory, true), 0, {0}, {});
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  const bool reads = to.device() == kCpu, writes = self.device() == kCpu;
  if (reads && self.numel() > 0) {
    note(non_blocking && to.is_pinned() ? "read_behind" : "host_read", "copy_");
  } else if (writes && self.numel() > 0) {
    note(non_blocking ? "write_behind" : "host_write", "copy_");
  }
  Aliases aliases;
  Tensor target = reads ? to : aliases.of(to);
  Tensor source = writes ? self : aliases.of(self);
  if (writes && self.scalar_type() == at::kDouble) {
    source = self.to(at::kFloat);  // types are converted on the device, from what it holds
  } else if (writes && self.scalar_type() == at::kLong && narrows()) {
    source = self.to(at::kInt);
  }
  target.copy_(source);
  if (!reads) {
    narrow(target);
  }
  return to;
}

c10::Scalar local_scalar_dense(const Tensor& self) {
  note("host_read", "_local_scalar_dense");
  Aliases aliases;
  return at::_local_scalar_dense(aliases.of(self));
}

void record_stream(Tensor&, c10::Stream) {}

// ---------------------------------------------------------------------------------------------------------------------
// All others

void check_devices(const c10::FunctionSchema& schema, c10::ArrayRef<IValue> arguments) {
  bool on_hpu = false, draws_on_cpu = false;
  std::string elsewhere;
  const auto look = [&](const Tensor& tensor, bool written) {
    if (!tensor.defined()) {
      return;
    }
    on_hpu |= tensor.device() == kHpu;
    if (tensor.device() != kHpu && (written || tensor.dim() > 0)) {
      elsewhere = tensor.device().str();
    }
  };
  const std::function<void(const IValue&, bool)> visit = [&](const IValue& value, bool written) {
    if (value.isTensor()) {
      look(value.toTensor(), written);
    } else if (value.isGenerator()) {
      draws_on_cpu = true;
    } else if (value.isDevice()) {
      on_hpu |= value.toDevice().type() == DeviceType::HPU;
    } else if (value.isList()) {
      for (const IValue& each : value.toListRef()) {
        visit(each, written);
      }
    }
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    visit(arguments[i], alias != nullptr && alias->isWrite());
  }
  TORCH_CHECK(
      !on_hpu || elsewhere.empty(),
      "Expected all tensors to be on the same device, but found at least two devices, ", kHpu, " and ", elsewhere,
      "! (in ", schema.operator_name().name, ")");
  TORCH_CHECK(!on_hpu || !draws_on_cpu, "Expected a 'hpu' device type for generator but found 'cpu'");
}

template <typename Convert>
IValue converted(const IValue& value, const Convert& convert) {
  if (value.isTensor()) {
    return convert(value.toTensor());
  }
  if (value.isList()) {
    const auto list = value.toListRef();
    if (list.empty() || !(list[0].isTensor() || list[0].isList() || list[0].isNone())) {
      return value;
    }
    c10::impl::GenericList all(value.toList().elementType());
    for (const IValue& each : list) {
      all.push_back(converted(each, convert));
    }
    return all;
  }
  return value;
}

// Masks as indices: the number of their ones is the number of indices. What reads by one calls aten::nonzero itself.
bool has_mask_index(const std::string& name, const IValue& indices) {
  if (name != "aten::index_put_" && name != "aten::_index_put_impl_") {
    return false;
  }
  for (const IValue& each : indices.toListRef()) {
    if (each.isTensor() && each.toTensor().defined() &&
        (each.toTensor().scalar_type() == at::kBool || each.toTensor().scalar_type() == at::kByte)) {
      return true;
    }
  }
  return false;
}

// Operators whose result has a size that the host learns from the device.
const std::set<std::string> kSizedByData{
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount"};

bool reads(const std::string& name, const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  if (name.rfind("aten::", 0) != 0 || name == "aten::_fused_sdp_choice") {  // the latter asks for shapes alone
    return false;
  }
  if (kSizedByData.count(name) || (arguments.size() > 1 && has_mask_index(name, arguments[1]))) {
    return true;
  }
  if (name == "aten::repeat_interleave" && arguments.back().isNone()) {
    return true;
  }
  for (const auto& result : op.schema().returns()) {
    const auto kind = result.type()->kind();
    if (kind == c10::TypeKind::BoolType || kind == c10::TypeKind::IntType || kind == c10::TypeKind::FloatType ||
        kind == c10::TypeKind::NumberType) {
      return true;
    }
  }
  return false;
}

// A group of hccl computes with gloo on CPU tensors.
IValue gloo_of(const IValue& value) {
  const auto group = value.toCustomClass<c10d::ProcessGroup>();
  auto same = c10::make_intrusive<c10d::ProcessGroup>(group->getRank(), group->getSize());
  same->setBackend(DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, group->getBackend(DeviceType::HPU));
  return IValue(std::move(same));
}

// hccl sums bfloat16 and float32; all else is converted to float32 before and back afterwards (allreduce in
// process_group_hccl_base.cpp and process_group_lazy_hccl.cpp), which ends whole numbers above 2^24.
void round_to_float(const Tensor& on_cpu) {
  if (on_cpu.scalar_type() != at::kFloat && on_cpu.scalar_type() != at::kBFloat16) {
    on_cpu.copy_(on_cpu.to(at::kFloat));
  }
}

void fallback(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.operator_name().name;
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  const c10::ArrayRef<IValue> arguments(stack->data() + first, count);
  check_devices(schema, arguments);
  if (reads(name, op, arguments)) {
    note("host_read", name);
  }
  static const auto group_type = c10::getCustomClassType<c10::intrusive_ptr<c10d::ProcessGroup>>();
  Aliases aliases;
  std::vector<Tensor> written;
  bool writes = false;
  const bool sums = name == "c10d::allreduce_";
  const auto alias = [&](const Tensor& tensor) {
    if (!tensor.defined() || tensor.device() != kHpu) {
      return tensor;
    }
    const Tensor on_cpu = aliases.of(tensor);
    if (writes) {
      written.push_back(on_cpu);
    }
    if (sums) {
      round_to_float(on_cpu);
    }
    return on_cpu;
  };
  for (size_t i = first; i < stack->size(); ++i) {
    IValue& argument = (*stack)[i];
    const auto* info = schema.arguments()[i - first].alias_info();
    writes = info != nullptr && info->isWrite();
    if (argument.isDevice() && argument.toDevice().type() == DeviceType::HPU) {
      argument = kCpu;
    } else if (argument.isObject() && *argument.type() == *group_type) {
      argument = gloo_of(argument);
    } else {
      argument = converted(argument, alias);
    }
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  std::for_each(written.begin(), written.end(), narrow);
  aliases.hand_back();
  for (size_t i = first; i < stack->size(); ++i) {
    (*stack)[i] = converted((*stack)[i], [&](const Tensor& tensor) { return aliases.result(tensor); });
  }
}

TORCH_LIBRARY(habana_stand_in, m) {
  m.def("note(str kind, str operator_name) -> ()");
}

TORCH_LIBRARY_IMPL(_, HPU, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("view.dtype", &view_dtype);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_", &set_to_empty);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
}

} // namespace
