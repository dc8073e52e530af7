// An elastic::State consists of these parts. Programs do not use them by themselves.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "sirtaki/export.h"
#include "sirtaki/objects.h"

namespace sirtaki::detail {

class ElasticAttempts;

// A copy of a part in memory.
struct ElasticCopy {
  // Makes it. What that returns puts it in the place of the last one, and does not throw.
  std::function<std::function<void()>()> save;
  std::function<void()> restore;  // brings it back
};

// ElasticShards are what a part does of which each rank has a shard: the state of a sharded optimizer.
struct ElasticShards {
  std::function<std::string()> save;  // this rank's; empty: no step has cut the state, it is whole
  std::function<void(const std::string&)> restore;  // what save() has given in this generation
  // Makes this rank's shard of those of all ranks of an earlier generation: add() is called for each,
  // between begin() and finish().
  std::function<void()> begin;
  std::function<void(const std::string&)> add;
  std::function<void()> finish;
};

// A part of an elastic::State. A function that has nothing to do is empty.
struct ElasticPart {
  std::string name;    // kind and name: value "epoch"
  std::string type;    // of a value; the ranks compare both
  ElasticCopy commit;  // of all of it
  ElasticCopy step;  // without what only an optimizer's steps change: its parameters and its state
  std::function<std::vector<at::Tensor>()> tensors;  // that a GPU may still work on
  // What sync() gives all ranks of the root's: these tensors, into which the root's are written, and what
  // `save` writes, which `load` takes on the others. `given` is called on the root when they have it.
  std::function<std::vector<at::Tensor>()> in_place;
  SaveTo save;
  LoadFrom load;
  std::function<void()> given;
  std::function<std::vector<std::string>()>
      describe;                 // what the ranks compare before, besides the name
  std::function<void()> leave;  // drops what belongs to a job that is over
  std::function<void()> renew;  // makes that again in the job that was joined. Collective
  ElasticShards shards;         // save is empty: each rank has all of it
};

SIRTAKI_API std::string ElasticName(const char* kind, const std::string& name);
SIRTAKI_API std::string ElasticType(const std::type_info& type);

template <class Copy>
std::function<void()> ElasticKeep(const std::shared_ptr<Copy>& kept, Copy copy) {
  return [kept, next = std::make_shared<Copy>(std::move(copy))] { std::swap(*kept, *next); };
}

// Numbers and texts are copied as they are.
template <class T>
ElasticCopy ElasticPlainCopy(T& value) {
  const auto kept = std::make_shared<T>(value);
  return {[&value, kept] { return ElasticKeep(kept, value); }, [&value, kept] { value = *kept; }};
}
template <class T>
ElasticPart ElasticPlainPart(const std::string& name, T& value) {
  ElasticPart part;
  part.name = ElasticName("value", name);
  part.type = ElasticType(typeid(T));
  part.commit = ElasticPlainCopy(value);
  part.step = ElasticPlainCopy(value);
  if constexpr (std::is_same_v<T, std::string>) {
    part.save = [&value](const WriteBytes& write) { write(value.data(), value.size()); };
    part.load = [&value](const ReadBytes& read, const std::function<std::size_t()>& size) {
      value.resize(size());
      read(0, value.data(), value.size());
    };
  } else {
    part.save = [&value](const WriteBytes& write) { write(&value, sizeof value); };
    part.load = [&value](const ReadBytes& read, const std::function<std::size_t()>& /*size*/) {
      read(0, &value, sizeof value);
    };
  }
  return part;
}

// Puts what was saved on the root in the place of the value.
template <class T>
void ElasticTake(T& value, const ReadBytes& read, const std::function<std::size_t()>& size) {
  T received = Target<T>::Same(value);
  Load(received, read, size);
  value = std::move(received);
}
// The root's device may be none of this rank's: each tensor comes to that of the one in its place.
SIRTAKI_API void ElasticTake(std::vector<at::Tensor>& value, const ReadBytes& read,
                             const std::function<std::size_t()>& size);
SIRTAKI_API void ElasticTake(c10::IValue& value, const ReadBytes& read,
                             const std::function<std::size_t()>& size);

// Everything else is kept as torch::save writes it: a copy may have tensors in common with it.
template <class T>
ElasticCopy ElasticSavedCopy(T& value) {
  const auto kept = std::make_shared<std::string>();
  const auto save = [&value, kept] {
    std::string bytes;
    Saver(value)([&bytes](const void* from, std::size_t size) {
      bytes.append(static_cast<const char*>(from), size);
      return size;
    });
    return ElasticKeep(kept, std::move(bytes));
  };
  const auto restore = [&value, kept] {
    T loaded = Target<T>::Same(value);
    const auto read = [kept](std::uint64_t offset, void* to, std::size_t size) {
      if (offset > kept->size() || size > kept->size() - offset) return std::size_t{0};
      std::memcpy(to, kept->data() + offset, size);
      return size;
    };
    Load(loaded, read, [kept] { return kept->size(); });
    value = std::move(loaded);
  };
  return {save, restore};
}
template <class T>
ElasticPart ElasticSavedPart(const std::string& name, T& value) {
  static_assert(archives::IsSaveable<T>::value,
                "State takes numbers, texts, tensors and what torch::save takes");
  ElasticPart part;
  part.name = ElasticName("value", name);
  part.type = ElasticType(typeid(T));
  part.commit = ElasticSavedCopy(value);
  part.step = ElasticSavedCopy(value);
  part.save = Saver(value);
  part.load = [&value](const ReadBytes& read, const std::function<std::size_t()>& size) {
    ElasticTake(value, read, size);
  };
  return part;
}
SIRTAKI_API ElasticPart ElasticTensorPart(const std::string& name, at::Tensor& value);

}  // namespace sirtaki::detail
