// What only moves: broadcast and the all-gather of equal shapes, all tensors of a group in one
// group of NCCL's; and the kinds whose rows only the ranks know, which are told first.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "ops/base/bytes.h"
#include "ops/groups/row_counts.h"
#include "ops/nccl/group_launch.h"

namespace sirtaki::ops::nccl {
namespace {

using core::DType;
using core::OpKind;
using core::Status;
using core::StatusCode;
using cuda::CopySegment;

bool Failed(Result result) { return result != Result::kSuccess && result != Result::kInProgress; }

std::int64_t MovedBytes(const GroupItem& item) {
  return item.signature->ElementCount() * BytesOf(item.signature->dtype);
}

Status CopyBytes(const LaunchContext& context, const std::vector<CopySegment>& segments) {
  return context.kernels.Copy(DType::kU8, DType::kU8, segments, {}, {}, context.stream.handle());
}

// Each tensor of a group has memory of its own, as what a group of NCCL's starts runs together.
std::int64_t ScratchOf(const GroupItem& item) {
  constexpr std::int64_t kMoveAlignment = 16;
  return (MovedBytes(item) + kMoveAlignment - 1) / kMoveAlignment * kMoveAlignment;
}

// Calls call(item, scratch) for each item that has bytes, as one group. `scratch`: the bytes that
// the items before it have. It gives the first bad result.
template <typename Function>
Status ForEachInGroup(const LaunchContext& context, const GroupTask& task, const char* function,
                      Function call) {
  return context.communicator.RunGroup(
      function,
      [&](CommHandle comm) {
        std::int64_t scratch = 0;
        for (const GroupItem& item : task.items) {
          if (MovedBytes(item) == 0) continue;
          const Result result = call(comm, item, scratch);
          if (Failed(result)) return result;
          scratch += ScratchOf(item);
        }
        return Result::kSuccess;
      },
      context.patience);
}

std::int64_t LargestScratch(const GroupTask& task) {
  std::int64_t largest = 0;
  for (const GroupItem& item : task.items) largest = std::max(largest, ScratchOf(item));
  return largest;
}

std::int64_t SumOfScratch(const GroupTask& task) {
  std::int64_t sum = 0;
  for (const GroupItem& item : task.items) sum += ScratchOf(item);
  return sum;
}

bool Joined(const GroupTask& task) { return task.items.front().work == nullptr; }

}  // namespace

Status LaunchBroadcast(const LaunchContext& context, const GroupTask& task) {
  const std::int64_t root = task.members->IndexOf(task.signature().root);
  // A rank that has joined drops what comes.
  std::byte* scratch = nullptr;
  if (Joined(task)) {
    Status status = context.staging.Reserve(SumOfScratch(task), &scratch);
    if (!status.ok()) return status;
  }
  return ForEachInGroup(context, task, "ncclBroadcast",
                        [&](CommHandle comm, const GroupItem& item, std::int64_t before) {
                          void* to = scratch == nullptr ? nullptr : scratch + before;
                          const void* from = to;
                          if (item.work != nullptr) {
                            from = item.work->input;
                            to = item.work->output;
                            if (root == context.communicator.rank() && to == nullptr)
                              to = const_cast<void*>(from);
                          }
                          return context.communicator.api().Broadcast(
                              from, to, static_cast<std::size_t>(MovedBytes(item)),
                              DataType::kUint8, static_cast<int>(root), comm,
                              context.stream.handle());
                        });
}

Status LaunchAllGatherInto(const LaunchContext& context, const GroupTask& task) {
  // A rank that has joined gives zeros, the same for all, and drops what comes.
  std::byte* scratch = nullptr;
  const std::int64_t members = context.communicator.size();
  const std::int64_t largest = LargestScratch(task);
  if (Joined(task) && largest > 0) {
    Status status = context.staging.Reserve(largest + members * SumOfScratch(task), &scratch);
    if (!status.ok()) return status;
    const cuda::Api& cuda = context.stream.device().api();
    status = cuda::Check(
        cuda,
        cuda.MemsetAsync(scratch, 0, static_cast<std::size_t>(largest), context.stream.handle()),
        "cudaMemsetAsync");
    if (!status.ok()) return status;
  }
  return ForEachInGroup(context, task, "ncclAllGather",
                        [&](CommHandle comm, const GroupItem& item, std::int64_t before) {
                          const void* from = nullptr;
                          void* to = nullptr;
                          if (item.work != nullptr) {
                            from = item.work->input;
                            to = item.work->output;
                          } else {
                            from = scratch;
                            to = scratch + largest + members * before;
                          }
                          return context.communicator.api().AllGather(
                              from, to, static_cast<std::size_t>(MovedBytes(item)),
                              DataType::kUint8, comm, context.stream.handle());
                        });
}

namespace {

// Rows by member, of each tensor.
using RowTable = std::vector<std::vector<std::int64_t>>;

class Exchange {
 public:
  Exchange(const LaunchContext& context, const GroupTask& task)
      : context_(context),
        task_(task),
        kind_(task.signature().kind),
        tensors_(task.items.size()),
        members_(static_cast<std::size_t>(context.communicator.size())),
        self_(static_cast<std::size_t>(context.communicator.rank())),
        root_(static_cast<std::size_t>(
            core::HasRoot(kind_) ? task.members->IndexOf(task.signature().root) : 0)),
        giving_(tensors_, std::vector<std::int64_t>(members_, 0)),
        getting_(giving_) {}

  Status Launch() {
    std::vector<std::int64_t> told;
    Status status = TellRows(OwnRows(), &told);
    if (!status.ok()) return status;
    Learn(told);
    for (std::size_t t = 0; t < tensors_ && status.ok(); ++t) status = Place(t);
    if (status.ok()) status = CopyBytes(context_, own_);
    return status.ok() ? Move() : status;
  }

 private:
  struct Slice {
    int member;
    void* memory;
    std::int64_t bytes;
  };

  bool is_root() const { return self_ == root_; }

  // What this rank says. All-gather and gather: its rows, by tensor; all-to-all, and scatter at its
  // root: those for each member, by member and tensor.
  std::vector<std::int64_t> OwnRows() const {
    const bool splits = kind_ == OpKind::kAllToAll || kind_ == OpKind::kScatter;
    std::vector<std::int64_t> rows(tensors_ * (splits ? members_ : 1), 0);
    for (std::size_t t = 0; t < tensors_; ++t) {
      const core::WorkPtr& work = task_.items[t].work;
      if (work == nullptr || (kind_ == OpKind::kScatter && !is_root())) continue;
      if (!splits) rows[t] = work->rows;
      for (std::size_t m = 0; splits && m < members_; ++m) {
        const auto members = static_cast<std::int64_t>(members_);
        const std::int64_t equal = kind_ == OpKind::kScatter
                                       ? core::RowsOf(work->rows, members, static_cast<int>(m))
                                       : work->rows / members;
        rows[m * tensors_ + t] = work->splits.empty() ? equal : work->splits[m];
      }
    }
    return rows;
  }

  // Through the device, for that is where the ranks meet: pages of the host, device, the others,
  // device, pages of the host.
  Status TellRows(const std::vector<std::int64_t>& own, std::vector<std::int64_t>* told) {
    const bool gathers = kind_ == OpKind::kAllGather || kind_ == OpKind::kGather;
    told->resize(gathers ? own.size() * members_ : own.size());
    const std::size_t own_bytes = own.size() * sizeof(std::int64_t);
    const std::size_t told_bytes = told->size() * sizeof(std::int64_t);
    void* host = nullptr;
    Status status = context_.host.Reserve(static_cast<std::int64_t>(own_bytes + told_bytes), &host);
    std::byte* device = nullptr;
    if (status.ok()) {
      status = context_.staging.Reserve(static_cast<std::int64_t>(own_bytes + told_bytes), &device);
    }
    if (!status.ok()) return status;
    std::memcpy(host, own.data(), own_bytes);
    auto* const arrived = static_cast<std::byte*>(host) + own_bytes;

    const cuda::Api& cuda = context_.stream.device().api();
    const cuda::StreamHandle stream = context_.stream.handle();
    status = cuda::Check(
        cuda, cuda.MemcpyAsync(device, host, own_bytes, cuda::CopyKind::kHostToDevice, stream),
        "cudaMemcpyAsync");
    if (status.ok()) status = TellOnDevice(device, device + own_bytes, own_bytes);
    if (status.ok()) {
      status = cuda::Check(cuda,
                           cuda.MemcpyAsync(arrived, device + own_bytes, told_bytes,
                                            cuda::CopyKind::kDeviceToHost, stream),
                           "cudaMemcpyAsync");
    }
    cuda::EventPtr event;
    if (status.ok()) status = context_.events.Take(&event);
    if (status.ok()) status = event->Record(stream);
    if (status.ok()) status = context_.await(*event);
    if (status.ok()) std::memcpy(told->data(), arrived, told_bytes);
    return status;
  }

  Status TellOnDevice(const std::byte* from, std::byte* to, std::size_t bytes) {
    const Api& api = context_.communicator.api();
    const cuda::StreamHandle stream = context_.stream.handle();
    if (kind_ == OpKind::kScatter) {
      return context_.communicator.Run(
          "ncclBroadcast",
          [&](CommHandle comm) {
            return api.Broadcast(from, to, bytes, DataType::kUint8, static_cast<int>(root_), comm,
                                 stream);
          },
          context_.patience);
    }
    if (kind_ != OpKind::kAllToAll) {
      return context_.communicator.Run(
          "ncclAllGather",
          [&](CommHandle comm) {
            return api.AllGather(from, to, bytes, DataType::kUint8, comm, stream);
          },
          context_.patience);
    }
    const std::size_t part = bytes / members_;
    return context_.communicator.RunGroup(
        "ncclSend and ncclRecv",
        [&](CommHandle comm) {
          for (std::size_t m = 0; m < members_; ++m) {
            const int peer = static_cast<int>(m);
            Result result = api.Send(from + m * part, part, DataType::kUint8, peer, comm, stream);
            if (!Failed(result)) {
              result = api.Recv(to + m * part, part, DataType::kUint8, peer, comm, stream);
            }
            if (Failed(result)) return result;
          }
          return Result::kSuccess;
        },
        context_.patience);
  }

  void Learn(const std::vector<std::int64_t>& told) {
    for (std::size_t t = 0; t < tensors_; ++t) {
      const core::WorkPtr& work = task_.items[t].work;
      for (std::size_t m = 0; m < members_; ++m) {
        const std::int64_t rows = told[m * tensors_ + t];
        switch (kind_) {
          case OpKind::kAllGather:
            giving_[t][m] = work == nullptr ? 0 : work->rows;
            getting_[t][m] = rows;
            break;
          case OpKind::kGather:
            if (m == root_ && work != nullptr) giving_[t][m] = work->rows;
            if (is_root()) getting_[t][m] = rows;
            break;
          case OpKind::kScatter:
            if (is_root()) giving_[t][m] = rows;
            if (m == self_) getting_[t][root_] = rows;
            break;
          default:
            getting_[t][m] = rows;
            break;
        }
      }
    }
    if (kind_ != OpKind::kAllToAll) return;
    const std::vector<std::int64_t> given = OwnRows();
    for (std::size_t t = 0; t < tensors_; ++t) {
      for (std::size_t m = 0; m < members_; ++m) giving_[t][m] = given[m * tensors_ + t];
    }
  }

  // The output of a tensor, and what goes where.
  Status Place(std::size_t tensor) {
    const GroupItem& item = task_.items[tensor];
    const std::int64_t row_bytes = MovedBytes(item);
    const std::vector<std::int64_t>& giving = giving_[tensor];
    const std::vector<std::int64_t>& getting = getting_[tensor];
    // An all-gather gives the same rows to each: they are there once.
    const bool gives_once = kind_ == OpKind::kAllGather;
    std::int64_t given = 0;
    std::int64_t got = 0;
    if (!TotalBytes(giving, row_bytes, &given)) {
      return {StatusCode::kBackend, WrongRows(task_.KeyOf(item), giving)};
    }
    if (!TotalBytes(getting, row_bytes, &got)) {
      return {StatusCode::kBackend, WrongRows(task_.KeyOf(item), getting)};
    }
    if (item.work == nullptr) return Status::Ok();
    std::byte* output = nullptr;
    if (kind_ != OpKind::kGather || is_root()) {
      cuda::AsDeviceWork(*item.work).lane_stream = context_.stream.handle();
      output = static_cast<std::byte*>(item.work->allocate_output(getting));
      if (got > 0 && output == nullptr)
        return {StatusCode::kBackend, NoMemoryFor(task_.KeyOf(item))};
    }
    auto* input = static_cast<std::byte*>(const_cast<void*>(item.work->input));
    std::size_t m = 0;
    for (const core::RankRange& range : task_.members->ranges()) {
      for (int rank = range.first; rank <= range.last; ++rank, ++m) {
        const std::int64_t gives = giving[m] * row_bytes;
        const std::int64_t gets = getting[m] * row_bytes;
        if (m == self_) {
          if (gets > 0) own_.push_back({input, output, gets});
        } else if (!task_.silent.Contains(rank)) {
          if (gives > 0) outgoing_.push_back({static_cast<int>(m), input, gives});
          if (gets > 0) incoming_.push_back({static_cast<int>(m), output, gets});
        }
        if (!gives_once && gives > 0) input += gives;
        if (gets > 0) output += gets;
      }
    }
    return Status::Ok();
  }

  Status Move() {
    if (outgoing_.empty() && incoming_.empty()) return Status::Ok();
    const Api& api = context_.communicator.api();
    const cuda::StreamHandle stream = context_.stream.handle();
    return context_.communicator.RunGroup(
        "ncclSend and ncclRecv",
        [&](CommHandle comm) {
          for (const Slice& slice : outgoing_) {
            const Result result = api.Send(slice.memory, static_cast<std::size_t>(slice.bytes),
                                           DataType::kUint8, slice.member, comm, stream);
            if (Failed(result)) return result;
          }
          for (const Slice& slice : incoming_) {
            const Result result = api.Recv(slice.memory, static_cast<std::size_t>(slice.bytes),
                                           DataType::kUint8, slice.member, comm, stream);
            if (Failed(result)) return result;
          }
          return Result::kSuccess;
        },
        context_.patience);
  }

  const LaunchContext& context_;
  const GroupTask& task_;
  const OpKind kind_;
  const std::size_t tensors_;
  const std::size_t members_;
  const std::size_t self_;
  const std::size_t root_;
  RowTable giving_;
  RowTable getting_;
  std::vector<CopySegment> own_;  // from this rank to itself
  std::vector<Slice> outgoing_;
  std::vector<Slice> incoming_;
};

}  // namespace

Status LaunchExchange(const LaunchContext& context, const GroupTask& task) {
  return Exchange(context, task).Launch();
}

}  // namespace sirtaki::ops::nccl
