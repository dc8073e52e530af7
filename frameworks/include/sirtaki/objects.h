// These functions broadcast and gather whole objects: bytes, and what torch::save takes.
//
//   const std::string settings = sirtaki::broadcast_object(sirtaki::rank() == 0 ? Read() : "", 0);
//   const std::vector<at::Tensor> worst = sirtaki::allgather_object(my_worst_sample);
//
// A std::string is bytes and travels as it is; so does what converts to one, "text" for instance.
// Everything else goes through torch::save and torch::load: at::Tensor, std::vector<at::Tensor>,
// modules (std::shared_ptr or holder), your own types with operator<< for
// torch::serialize::OutputArchive and operator>> for InputArchive, and besides c10::IValue with
// what it holds: numbers, strings, lists, tuples, dictionaries, tensors. Other types do not
// compile. For an optimizer there is broadcast_optimizer_state.
//
// All are collective, over all ranks or those of a process set. Ranks may give objects of different
// sizes, of more than 2 GiB too. Calls without a name are matched by the order in which the ranks
// make them; a name may be used again as soon as the call has returned. All ranks throw
// InvalidArgument if an object cannot be saved or loaded on one rank; Mismatch if their roots
// differ, or some ranks make another kind of call.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/serialize.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "sirtaki/export.h"
#include "sirtaki/process_set.h"
#include "sirtaki/session.h"

namespace sirtaki {

// Returns the bytes of `root_rank`; those of the others are not used.
SIRTAKI_API std::string broadcast_object(const std::string& bytes, int root_rank,
                                         const std::string& name = "",
                                         const ProcessSet& process_set = {});

// Returns the bytes of all ranks (of the set), in their order.
SIRTAKI_API std::vector<std::string> allgather_object(const std::string& bytes,
                                                      const std::string& name = "",
                                                      const ProcessSet& process_set = {});

namespace detail {

// What torch::save and torch::load do with an archive's bytes.
using WriteBytes = std::function<std::size_t(const void* from, std::size_t bytes)>;
using ReadBytes = std::function<std::size_t(std::uint64_t offset, void* to, std::size_t bytes)>;
using SaveTo = std::function<void(const WriteBytes& write)>;
using LoadFrom =
    std::function<void(const ReadBytes& read, const std::function<std::size_t()>& size)>;

SIRTAKI_API void BroadcastSaved(const SaveTo& save, const LoadFrom& load, int root_rank,
                                const std::string& name, const ProcessSet& process_set);
// Calls `load` once for each rank, in their order.
SIRTAKI_API void AllgatherSaved(const SaveTo& save, const LoadFrom& load, const std::string& name,
                                const ProcessSet& process_set);

namespace archives {

using torch::operator<<;  // for tensors: no argument-dependent look-up finds these
using torch::operator>>;

template <class T, class = void>
struct IsSaveable : std::false_type {};
template <class T>
struct IsSaveable<
    T, std::void_t<decltype(std::declval<torch::serialize::OutputArchive&>()
                            << std::declval<const T&>()),
                   decltype(std::declval<torch::serialize::InputArchive&>() >> std::declval<T&>())>>
    : std::bool_constant<std::is_copy_constructible<T>::value> {};
template <>
struct IsSaveable<std::vector<at::Tensor>> : std::true_type {};
template <>
struct IsSaveable<c10::IValue> : std::true_type {};

}  // namespace archives

template <class T>
SaveTo Saver(const T& value) {
  return [&value](const WriteBytes& write) { torch::save(value, write); };
}
inline SaveTo Saver(const c10::IValue& value) {
  return [&value](const WriteBytes& write) {
    torch::serialize::OutputArchive archive;
    archive.write("value", value);
    archive.save_to(write);
  };
}

template <class T>
void Load(T& value, const ReadBytes& read, const std::function<std::size_t()>& size) {
  torch::load(value, read, size);
}
inline void Load(c10::IValue& value, const ReadBytes& read,
                 const std::function<std::size_t()>& size) {
  torch::serialize::InputArchive archive;
  archive.load_from(read, size);
  archive.read("value", value);
}

// What loading writes into: of a module the pattern decides how it is made up, so a broadcast
// overwrites that very module, and an all-gather copies of it.
template <class T, class = void>
struct Target {
  static T Same(const T&) { return T(); }
  static T Copy(const T&) { return T(); }
};
template <class Module>
struct Target<std::shared_ptr<Module>,
              std::enable_if_t<std::is_base_of<torch::nn::Module, Module>::value>> {
  using Pointer = std::shared_ptr<Module>;
  static Pointer Same(const Pointer& module) { return module; }
  static Pointer Copy(const Pointer& module) {
    if (!module) throw std::invalid_argument("the module on this rank is a null pointer");
    return std::dynamic_pointer_cast<Module>(module->clone());
  }
};
template <class Holder>
struct Target<Holder, std::enable_if_t<torch::detail::is_module_holder<Holder>::value>> {
  using Pointer = std::shared_ptr<typename Holder::ContainedType>;
  static Holder Same(const Holder& holder) { return holder; }
  static Holder Copy(const Holder& holder) {
    return Holder(Target<Pointer>::Copy(holder.is_empty() ? nullptr : holder.ptr()));
  }
};

template <class T>
using EnableIfNotBytes = std::enable_if_t<!std::is_convertible<const T&, std::string>::value, int>;

}  // namespace detail

// Returns the object of `root_rank`; the root gets its own back. The objects of the others are not
// used and may be undefined or empty. But a module is overwritten in place and returned, so each
// rank gives one of the same structure (broadcast_parameters compares shapes, this does not). Large
// tensors go through two small buffers: no rank has a second copy of them.
template <class T, detail::EnableIfNotBytes<T> = 0>
T broadcast_object(const T& value, int root_rank, const std::string& name = "",
                   const ProcessSet& process_set = {}) {
  static_assert(detail::archives::IsSaveable<T>::value,
                "broadcast_object takes bytes in a std::string and what torch::save takes");
  if (sirtaki::rank() == root_rank) {
    detail::BroadcastSaved(detail::Saver(value), nullptr, root_rank, name, process_set);
    return value;
  }
  T received = detail::Target<T>::Same(value);
  detail::BroadcastSaved(
      nullptr,
      [&received](const auto& read, const auto& size) { detail::Load(received, read, size); },
      root_rank, name, process_set);
  return received;
}

// Returns the objects of all ranks, in their order; this rank's is a copy too. Modules must support
// clone(), as torch::nn::Cloneable and LibTorch's own modules do.
template <class T, detail::EnableIfNotBytes<T> = 0>
std::vector<T> allgather_object(const T& value, const std::string& name = "",
                                const ProcessSet& process_set = {}) {
  static_assert(detail::archives::IsSaveable<T>::value,
                "allgather_object takes bytes in a std::string and what torch::save takes");
  std::vector<T> objects;
  detail::AllgatherSaved(
      detail::Saver(value),
      [&](const auto& read, const auto& size) {
        T object = detail::Target<T>::Copy(value);
        detail::Load(object, read, size);
        objects.push_back(std::move(object));
      },
      name, process_set);
  return objects;
}

}  // namespace sirtaki
