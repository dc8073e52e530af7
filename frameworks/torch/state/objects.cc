#include "sirtaki/objects.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/state/archive_broadcast.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki {
namespace {

constexpr std::int64_t kNotSaved = -1;  // in the place of a length

std::string CallText(const char* function, const std::string& name) {
  return name.empty() ? std::string(function) : std::string(function) + " \"" + name + "\"";
}

// Bytes and saved objects are told apart by the shape of what goes first, so that a rank that
// passes the one where others pass the other is a mismatch.
enum class Content : std::int64_t { kBytes = 2, kSaved = 3 };

// Gathered is what the ranks of the set have that have not joined.
struct Gathered {
  std::vector<int> ranks;
  std::vector<std::int64_t> lengths;  // of each of them
  at::Tensor bytes;                   // of all, one after the other
};

// `error`: why this rank has no bytes.
Gathered GatherBytes(const std::shared_ptr<std::string>& bytes, Content content,
                     const std::string& error, const std::string& name,
                     const detail::SessionSet& set) {
  const auto columns = static_cast<std::int64_t>(content);
  const at::Tensor header = at::zeros({1, columns}, at::kLong);
  auto* mine = header.mutable_data_ptr<std::int64_t>();
  mine[0] = error.empty() ? static_cast<std::int64_t>(bytes->size()) : kNotSaved;
  mine[1] = set.rank();
  const at::Tensor headers = detail::AllGatherBlocking(header, name, set);
  Gathered gathered;
  const auto* of_rank = headers.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < headers.size(0); ++i, of_rank += columns) {
    gathered.lengths.push_back(of_rank[0]);
    gathered.ranks.push_back(static_cast<int>(of_rank[1]));
  }
  if (std::count(gathered.lengths.begin(), gathered.lengths.end(), kNotSaved) > 0) {
    detail::AgreeOnErrors(CallText("allgather_object", name), error, set);
  }
  gathered.bytes =
      detail::AllGatherBlocking(detail::AsTensor(bytes), detail::PartName(name, "bytes"), set);
  return gathered;
}

}  // namespace

std::string broadcast_object(const std::string& bytes, int root_rank, const std::string& name,
                             const ProcessSet& process_set) {
  const detail::SessionSet set = detail::SetOf(process_set);
  const bool is_root = set.rank() == root_rank;
  at::Tensor header = at::empty({1}, at::kLong);
  auto* length = header.mutable_data_ptr<std::int64_t>();
  *length = is_root ? static_cast<std::int64_t>(bytes.size()) : 0;
  detail::BroadcastInPlaceBlocking(header, root_rank, name, set);
  if (set.size() == 1) return bytes;

  std::string error;
  auto object = std::make_shared<std::string>();
  try {
    if (is_root) {
      *object = bytes;
    } else {
      object->resize(static_cast<std::size_t>(*length));
    }
  } catch (const std::exception& failure) {
    error = detail::WhyNoMemory(failure);
  }
  detail::AgreeOnErrors(CallText("broadcast_object", name), error, set);
  detail::BroadcastInPlaceBlocking(detail::AsTensor(object), root_rank,
                                   detail::PartName(name, "bytes"), set);
  return std::move(*object);
}

std::vector<std::string> allgather_object(const std::string& bytes, const std::string& name,
                                          const ProcessSet& process_set) {
  const Gathered gathered = GatherBytes(std::make_shared<std::string>(bytes), Content::kBytes, "",
                                        name, detail::SetOf(process_set));
  const auto* from = static_cast<const char*>(gathered.bytes.const_data_ptr());
  std::vector<std::string> objects;
  for (const std::int64_t length : gathered.lengths) {
    objects.emplace_back();
    if (length > 0) objects.back().assign(from, static_cast<std::size_t>(length));
    from += length;
  }
  return objects;
}

namespace detail {

void BroadcastSaved(const SaveTo& save, const LoadFrom& load, int root_rank,
                    const std::string& name, const ProcessSet& process_set) {
  BroadcastArchive(save, load, root_rank, CallText("broadcast_object", name), name,
                   SetOf(process_set));
}

void AllgatherSaved(const SaveTo& save, const LoadFrom& load, const std::string& name,
                    const ProcessSet& process_set) {
  const SessionSet set = SetOf(process_set);
  ThrowIfError(set.session->Check());
  auto bytes = std::make_shared<std::string>();
  std::string error;
  try {
    save([&bytes](const void* from, std::size_t size) {
      bytes->append(static_cast<const char*>(from), size);
      return size;
    });
  } catch (...) {
    error = "cannot be saved: " + TextOfCurrent();
  }
  const Gathered gathered =
      GatherBytes(std::exchange(bytes, nullptr), Content::kSaved, error, name, set);
  const auto* from = static_cast<const char*>(gathered.bytes.const_data_ptr());
  for (std::size_t i = 0; i < gathered.lengths.size() && error.empty(); ++i) {
    const auto length = static_cast<std::size_t>(gathered.lengths[i]);
    const auto read = [from, length](std::uint64_t offset, void* to, std::size_t size) {
      if (offset > length || size > length - offset) return std::size_t{0};
      std::memcpy(to, from + offset, size);
      return size;
    };
    try {
      load(read, [length] { return length; });
    } catch (...) {
      error = "the object of rank " + std::to_string(gathered.ranks[i]) +
              " cannot be loaded: " + TextOfCurrent();
    }
    from += length;
  }
  AgreeOnErrors(CallText("allgather_object", name), error, set);
}

}  // namespace detail
}  // namespace sirtaki
