#include "ops/nccl/set_communicators.h"

#include <cstddef>
#include <utility>

#include "ops/base/keep_forever.h"

namespace sirtaki::ops::nccl {

using core::Status;

namespace {

// The memory is what staging has at least. NCCL may reduce as much by another algorithm than 4 bytes.
constexpr std::int64_t kConnectedBytes = std::int64_t{1} << 20;

}  // namespace

Status SetCommunicators::Make(core::SetNumber set, const Rendezvous& rendezvous,
                              const core::RankRanges& members, int rank, const Making& making) {
  if (Status verdict = Judge(rendezvous.all, members); !verdict.ok()) {
    refused_.insert_or_assign(set, std::move(verdict));
    return Status::Ok();
  }
  Parts parts;
  Status status =
      Communicator::Init(all_, rendezvous.all.front().id, static_cast<int>(members.Count()),
                         static_cast<int>(members.IndexOf(rank)), making.patience,
                         &parts.communicator, making.choices);
  if (!status.ok()) return status;
  parts.staging = std::make_unique<DeviceMemory>(cuda_, *parts.communicator);
  parts.arenas = std::make_unique<Arenas>(frees_);
  Parts& kept = parts_[set];
  kept = std::move(parts);
  status = Connect(kept, making);
  if (!status.ok() || making.direct == nullptr || kept.communicator->size() == 1) return status;
  status = kept.communicator->MakeDirect(making.direct, making.patience);
  // It finds the connections there, but its hosts wait for each other once more.
  return status.ok() ? Connect(kept, making) : status;
}

// The first all-reduce by an algorithm connects the members, for which their hosts wait for each
// other: here they come together, and a bucket that NCCL reduces by one of these algorithms waits for
// no host. What is added up is nobody's. Memory for groups as they usually are is taken, too, which
// waits for nothing where this is the first set of a lane.
Status SetCommunicators::Connect(Parts& parts, const Making& making) {
  std::byte* memory = nullptr;
  Status status = parts.staging->Reserve(making.usual_bytes, &memory);
  if (!status.ok() && making.usual_bytes > kConnectedBytes) {
    status = parts.staging->Reserve(kConnectedBytes, &memory);
  }
  if (parts.communicator->size() == 1) return status;
  for (const std::size_t count : {std::size_t{1}, std::size_t{kConnectedBytes / 4}}) {
    if (!status.ok()) return status;
    status = parts.communicator->RunTogether(
        "ncclAllReduce",
        [&](CommHandle comm) {
          return parts.communicator->api().AllReduce(memory, memory, count, DataType::kFloat32,
                                                     RedOp::kSum, comm, making.stream.handle());
        },
        making.patience);
  }
  return status;
}

Status SetCommunicators::WhyRefused(core::SetNumber set) const {
  const auto found = refused_.find(set);
  return found != refused_.end() ? found->second : Status::Ok();
}

SetCommunicators::Parts* SetCommunicators::Find(core::SetNumber set) {
  const auto found = parts_.find(set);
  return found != parts_.end() ? &found->second : nullptr;
}

Status SetCommunicators::Remove(core::SetNumber set, const Patience& patience) {
  refused_.erase(set);
  const auto found = parts_.find(set);
  if (found == parts_.end()) return Status::Ok();  // it never used this device
  Status status = End(found->second, patience);
  parts_.erase(found);
  return status;
}

Status SetCommunicators::End(Parts& parts, const Patience& patience) {
  Status status = parts.arenas->RemoveAll(*parts.communicator, patience);
  parts.staging.reset();
  return status.ok() ? parts.communicator->Finalize(patience) : status;
}

Status SetCommunicators::CheckAsync() {
  for (auto& [set, parts] : parts_) {
    if (Status status = parts.communicator->CheckAsync(); !status.ok()) return status;
  }
  return Status::Ok();
}

Status SetCommunicators::FinalizeAll(const Patience& patience) {
  Status first;
  for (auto& [set, parts] : parts_) {
    Status status = End(parts, patience);
    if (first.ok()) first = std::move(status);
  }
  parts_.clear();
  return first;
}

void SetCommunicators::LeaveArenas() {
  for (auto& [set, parts] : parts_) parts.staging.reset();
  LeaveAll();
}

void SetCommunicators::LeaveAll() {
  for (auto& [set, parts] : parts_) KeepForever(std::make_shared<Parts>(std::move(parts)));
  parts_.clear();
}

}  // namespace sirtaki::ops::nccl
