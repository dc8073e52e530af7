#include "frameworks/torch/state/archive_broadcast.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <optional>
#include <stdexcept>
#include <utility>

#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/state/chunk_stream.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "sirtaki/detail/gradient_reducer.h"

namespace sirtaki::detail {
namespace {

// What is smaller may as well be in the skeleton.
constexpr std::size_t kSmallestHole = 4096;

// True if these bytes are the name of a tensor's record, "archive/data/12". LibTorch writes it, up
// to a few bytes to align what follows, and the tensor's memory. Where it is taken for something
// else, or something else for it, the archive arrives all the same, through more memory.
bool NamesATensor(const void* from, std::size_t bytes) {
  constexpr std::size_t kLongestName = 256;
  if (bytes > kLongestName) return false;
  const std::string name(static_cast<const char*>(from), bytes);
  const std::size_t digits = name.find_last_not_of("0123456789") + 1;
  return digits < name.size() && digits >= 6 && name.compare(digits - 6, 6, "/data/") == 0;
}

// Where the archive is read from on the ranks that load it.
class Reader {
 public:
  Reader(const Skeleton& skeleton, ChunkStream& stream) : skeleton_(skeleton), stream_(stream) {
    std::uint64_t before = 0;
    for (const Hole& hole : skeleton.holes) {
      filled_before_.push_back(before);
      before += hole.bytes;
    }
  }

  // Passes by what was not read.
  void Finish() {
    for (; next_ < skeleton_.holes.size(); ++next_) {
      stream_.Receive(nullptr, skeleton_.holes[next_].bytes);
    }
  }

  // Called through C code: throws nothing, and gives 0 if it cannot.
  std::size_t Read(std::uint64_t offset, void* to, std::size_t bytes) noexcept {
    try {
      if (offset > skeleton_.total || bytes > skeleton_.total - offset) return 0;
      auto* target = static_cast<char*>(to);
      for (std::size_t done = 0; done < bytes;) {
        done += ReadPart(offset + done, target + done, bytes - done);
      }
      return bytes;
    } catch (...) {
      error_ = TextOfCurrent();
      return 0;
    }
  }

  const std::string& error() const { return error_; }

 private:
  // Up to the next border between skeleton and hole. Returns how much.
  std::size_t ReadPart(std::uint64_t offset, char* to, std::size_t bytes) {
    const auto& holes = skeleton_.holes;
    const auto hole =
        std::upper_bound(holes.begin(), holes.end(), offset,
                         [](std::uint64_t at, const Hole& one) { return at < one.end(); });
    const auto index = static_cast<std::size_t>(hole - holes.begin());
    if (hole != holes.end() && hole->offset <= offset) {
      const std::size_t part = std::min<std::uint64_t>(bytes, hole->end() - offset);
      ReadHole(index, offset - hole->offset, to, part);
      return part;
    }
    const bool last = hole == holes.end();
    const std::uint64_t until = last ? skeleton_.total : hole->offset;
    const std::uint64_t filled =
        last ? skeleton_.total - skeleton_.bytes.size() : filled_before_[index];
    const std::size_t part = std::min<std::uint64_t>(bytes, until - offset);
    std::memcpy(to, skeleton_.bytes.data() + (offset - filled), part);
    return part;
  }

  // Archives are read as they were written, each hole at once and once: then the bytes go straight
  // to where they are wanted. Whatever else a reader does is served from copies.
  void ReadHole(std::size_t index, std::uint64_t from, char* to, std::size_t bytes) {
    if (index == next_ && bytes == skeleton_.holes[index].bytes) {
      stream_.Receive(to, bytes);
      ++next_;
      return;
    }
    while (next_ <= index) KeepNext();
    const auto kept = kept_.find(index);
    if (kept == kept_.end()) {
      throw std::runtime_error("the archive was read in an order that is not supported");
    }
    std::memcpy(to, static_cast<const char*>(kept->second.const_data_ptr()) + from, bytes);
  }

  void KeepNext() {
    const std::uint64_t bytes = skeleton_.holes[next_].bytes;
    at::Tensor copy = at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
    stream_.Receive(copy.mutable_data_ptr(), bytes);
    kept_.emplace(next_++, std::move(copy));
  }

  const Skeleton& skeleton_;
  ChunkStream& stream_;
  std::vector<std::uint64_t> filled_before_;  // bytes of holes before each hole
  std::size_t next_ = 0;                      // the hole whose bytes come next
  std::map<std::size_t, at::Tensor> kept_;
  std::string error_;
};

// Fixed numbers first, so that the others can make room.
struct Header {
  std::int64_t bytes = 0;  // of the skeleton
  std::int64_t holes = 0;
  std::int64_t total = 0;
};
constexpr auto kHeaderBytes = static_cast<std::int64_t>(sizeof(Header));

std::int64_t PackedBytes(const Header& header) {
  return header.holes * static_cast<std::int64_t>(sizeof(Hole)) + header.bytes;
}

Header BroadcastHeader(const Skeleton& skeleton, int root_rank, const std::string& name,
                       const SessionSet& set) {
  at::Tensor header = at::empty({3}, at::kLong);
  auto* values = header.mutable_data_ptr<std::int64_t>();
  values[0] = static_cast<std::int64_t>(skeleton.bytes.size());
  values[1] = static_cast<std::int64_t>(skeleton.holes.size());
  values[2] = static_cast<std::int64_t>(skeleton.total);
  BroadcastInPlaceBlocking(header, root_rank, name, set);
  return {values[0], values[1], values[2]};
}

// The skeleton's holes and bytes as one row of bytes, and back.
void Pack(const Skeleton& skeleton, const at::Tensor& packed) {
  auto* to = static_cast<char*>(packed.mutable_data_ptr());
  const std::size_t table = skeleton.holes.size() * sizeof(Hole);
  if (table > 0) std::memcpy(to, skeleton.holes.data(), table);
  std::memcpy(to + table, skeleton.bytes.data(), skeleton.bytes.size());
}

Skeleton Unpack(const at::Tensor& packed, const Header& header) {
  Skeleton skeleton;
  const auto* from = static_cast<const char*>(packed.const_data_ptr());
  skeleton.holes.resize(static_cast<std::size_t>(header.holes));
  const std::size_t table = skeleton.holes.size() * sizeof(Hole);
  if (table > 0) std::memcpy(skeleton.holes.data(), from, table);
  skeleton.bytes.assign(from + table, static_cast<std::size_t>(header.bytes));
  skeleton.total = static_cast<std::uint64_t>(header.total);
  return skeleton;
}

// The skeletons of several archives as one row of bytes: the numbers of each, then what Pack makes.
at::Tensor PackAll(const std::vector<Skeleton>& skeletons) {
  std::vector<at::Tensor> rows;
  for (const Skeleton& one : skeletons) {
    const Header header{static_cast<std::int64_t>(one.bytes.size()),
                        static_cast<std::int64_t>(one.holes.size()),
                        static_cast<std::int64_t>(one.total)};
    at::Tensor row = at::empty({PackedBytes(header) + kHeaderBytes}, at::kByte);
    std::memcpy(row.mutable_data_ptr(), &header, sizeof header);
    Pack(one, row.narrow(0, kHeaderBytes, PackedBytes(header)));
    rows.push_back(std::move(row));
  }
  return rows.empty() ? at::empty({0}, at::kByte) : at::cat(rows);
}

std::vector<Skeleton> UnpackAll(const at::Tensor& packed, std::size_t count) {
  std::vector<Skeleton> skeletons;
  std::int64_t at = 0;
  while (skeletons.size() < count) {
    Header header;
    std::memcpy(&header, static_cast<const char*>(packed.const_data_ptr()) + at, sizeof header);
    at += kHeaderBytes;
    skeletons.push_back(Unpack(packed.narrow(0, at, PackedBytes(header)), header));
    at += PackedBytes(header);
  }
  return skeletons;
}

// Fills the stream while the archive writes itself again. Why it could not; empty if it could.
std::string SendHoles(const SaveTo& save, const Skeleton& skeleton, ChunkStream& stream) {
  std::uint64_t offset = 0;
  auto hole = skeleton.holes.begin();
  // What comes behind it has its place, whatever becomes of it.
  const Scope rest([&] {
    for (; hole != skeleton.holes.end(); ++hole) stream.Send(nullptr, hole->bytes);
  });
  try {
    save([&](const void* from, std::size_t bytes) {
      if (hole != skeleton.holes.end() && hole->offset == offset && hole->bytes == bytes) {
        stream.Send(from, bytes);
        ++hole;
      }
      offset += bytes;
      return bytes;
    });
  } catch (...) {
    return "cannot be saved: " + TextOfCurrent();
  }
  const bool same = hole == skeleton.holes.end() && offset == skeleton.total;
  return same ? "" : "cannot be saved: it was changed while it was being saved";
}

std::string LoadHoles(const LoadFrom& load, const Skeleton& skeleton, ChunkStream& stream) {
  Reader reader(skeleton, stream);
  const Scope rest([&reader] { reader.Finish(); });
  try {
    load([&reader](std::uint64_t offset, void* to,
                   std::size_t bytes) { return reader.Read(offset, to, bytes); },
         [&skeleton] { return static_cast<std::size_t>(skeleton.total); });
  } catch (...) {
    return "cannot be loaded: " + (reader.error().empty() ? TextOfCurrent() : reader.error());
  }
  return {};
}

}  // namespace

Skeleton Survey(const SaveTo& save) {
  Skeleton skeleton;
  int writes_since_name = -1;  // -1: it was no tensor's
  save([&](const void* from, std::size_t bytes) {
    constexpr int kMostPadding = 1;
    const bool hole =
        bytes >= kSmallestHole && writes_since_name >= 0 && writes_since_name <= kMostPadding;
    if (hole) {
      skeleton.holes.push_back({skeleton.total, bytes});
    } else {
      skeleton.bytes.append(static_cast<const char*>(from), bytes);
    }
    skeleton.total += bytes;
    if (NamesATensor(from, bytes)) {
      writes_since_name = 0;
    } else if (writes_since_name >= 0) {
      ++writes_since_name;
    }
    return bytes;
  });
  return skeleton;
}

void BroadcastArchive(const SaveTo& save, const LoadFrom& load, int root_rank,
                      const std::string& call, const std::string& name, const SessionSet& set) {
  const bool is_root = set.rank() == root_rank;
  const bool alone = set.size() == 1;
  std::string error;
  Skeleton skeleton;
  if (is_root && !alone) {
    try {
      skeleton = Survey(save);
    } catch (...) {
      error = "cannot be saved: " + TextOfCurrent();
      skeleton = Skeleton();
    }
  }
  const Header header = BroadcastHeader(skeleton, root_rank, name, set);
  if (alone) return;

  at::Tensor packed;
  std::optional<ChunkStream> stream;
  if (error.empty()) {
    try {
      packed = at::empty({PackedBytes(header)}, at::kByte);
      stream.emplace(static_cast<std::uint64_t>(header.total - header.bytes), root_rank,
                     PartName(name, "tensors"), set);
    } catch (const std::exception& failure) {
      error = WhyNoMemory(failure);
    }
  }
  AgreeOnErrors(call, error, set);

  if (is_root) Pack(skeleton, packed);
  BroadcastInPlaceBlocking(packed, root_rank, PartName(name, "skeleton"), set);
  if (!is_root) skeleton = Unpack(packed, header);
  packed = at::Tensor();
  error = is_root ? SendHoles(save, skeleton, *stream) : LoadHoles(load, skeleton, *stream);
  stream->Finish();
  AgreeOnErrors(call, error, set);
}

void BroadcastTogether(const std::vector<SavedPart>& parts, const std::vector<at::Tensor>& tensors,
                       int root_rank, const std::string& call, const SessionSet& set) {
  if (set.size() == 1) return;
  const bool is_root = set.rank() == root_rank;
  const std::string name = "sirtaki/" + call;
  std::string error;
  std::vector<Skeleton> skeletons;
  if (is_root) {
    try {
      for (const SavedPart& part : parts) skeletons.push_back(Survey(part.save));
    } catch (...) {
      error = "cannot be saved: " + TextOfCurrent();
    }
  }
  // The others give nothing, and learn how much the root gives from the call itself: nothing is an error.
  at::Tensor packed = AllGatherBlocking(
      is_root && error.empty() ? at::cat({at::ones({1}, at::kByte), PackAll(skeletons)})
                               : at::empty({0}, at::kByte),
      PartName(name, "skeletons"), set);
  if (packed.numel() == 0) return AgreeOnErrors(call, error, set);
  if (!is_root) skeletons = UnpackAll(packed.narrow(0, 1, packed.numel() - 1), parts.size());
  packed = at::Tensor();

  TakeSlots(tensors, *set.session);
  std::uint64_t bytes = 0;
  for (const Skeleton& one : skeletons) bytes += one.total - one.bytes.size();
  ChunkStream stream(bytes, root_rank, PartName(name, "saved"), set);
  PendingBroadcasts pending;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    pending.Start(tensors[i], root_rank, PartName(name, "tensor " + std::to_string(i)), set);
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    std::string wrong = is_root ? SendHoles(parts[i].save, skeletons[i], stream)
                                : LoadHoles(parts[i].load, skeletons[i], stream);
    if (error.empty()) error = std::move(wrong);
  }
  stream.Finish();
  pending.Wait();
  AgreeOnErrors(call, error, set);
}

}  // namespace sirtaki::detail
