#include "ops/inproc/inproc_backend.h"

#include <cstddef>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/check.h"
#include "core/base/thread_annotations.h"
#include "ops/base/finished.h"
#include "ops/base/kernels.h"
#include "ops/inproc/mailboxes.h"
#include "ops/inproc/meeting.h"

namespace sirtaki::ops {
namespace {

using Call = Deposit::Call;
using MeetingKey = std::tuple<core::SetNumber, fusion::Lane, std::uint64_t>;

// A process set, and which of its members have added it and not removed it.
struct Members {
  core::RankRanges all;
  core::RankRanges present;
};

}  // namespace

struct InprocWorld::Shared {
  Shared(int world_size, InprocOptions world_options)
      : size(world_size),
        options(world_options),
        connected(static_cast<std::size_t>(world_size), false) {}

  void Abort(const core::Status& why) SIRTAKI_EXCLUDES(mutex);

  const int size;
  const InprocOptions options;
  core::Mutex mutex;
  core::CondVar changed;
  std::vector<bool> connected SIRTAKI_GUARDED_BY(mutex);
  core::Status aborted SIRTAKI_GUARDED_BY(mutex);
  std::map<core::SetNumber, Members> sets SIRTAKI_GUARDED_BY(mutex);
  // Those for which not all members have arrived.
  std::map<MeetingKey, std::shared_ptr<Meeting>> meetings SIRTAKI_GUARDED_BY(mutex);
  const std::shared_ptr<Mailboxes> mailboxes = std::make_shared<Mailboxes>();
};

void InprocWorld::Shared::Abort(const core::Status& why) {
  core::Status reason;
  {
    core::MutexLock lock(mutex);
    if (!aborted.ok()) return;
    reason = aborted = why.ok() ? core::Status(core::StatusCode::kAborted, "aborted") : why;
    for (auto& [key, meeting] : meetings) meeting->Fail(aborted);
    meetings.clear();
    changed.NotifyAll();
  }
  mailboxes->Abort(reason);
}

class InprocBackend : public Backend {
 public:
  InprocBackend(std::shared_ptr<InprocWorld::Shared> shared, int rank)
      : shared_(std::move(shared)), rank_(rank) {}

  std::string_view name() const override { return "in-process"; }

  core::Status AddSet(core::SetNumber set, const core::RankRanges& members) override;
  core::Status RemoveSet(core::SetNumber set) override;

  std::unique_ptr<Completion> AllReduce(Channel channel, void* buffer, std::int64_t count,
                                        core::DType dtype, core::ReduceOp op) override {
    return MeetToReduce(
        channel,
        {.call = Call::kAllReduce, .output = buffer, .count = count, .dtype = dtype, .op = op});
  }

  std::unique_ptr<Completion> Reduce(Channel channel, void* buffer, std::int64_t count,
                                     core::DType dtype, core::ReduceOp op, int root) override {
    return MeetToReduce(channel, {.call = Call::kReduce,
                                  .output = buffer,
                                  .count = count,
                                  .dtype = dtype,
                                  .op = op,
                                  .root = root});
  }

  std::unique_ptr<Completion> Broadcast(Channel channel, void* buffer, std::int64_t bytes,
                                        int root) override {
    return Meet(channel,
                {.call = Call::kBroadcast, .output = buffer, .count = bytes, .root = root});
  }

  std::unique_ptr<Completion> AllGather(Channel channel, const void* input, void* output,
                                        std::int64_t bytes) override {
    return Meet(channel,
                {.call = Call::kAllGather, .input = input, .output = output, .count = bytes});
  }

  std::unique_ptr<Completion> AllGatherV(Channel channel, const void* input, void* output,
                                         std::span<const std::int64_t> bytes) override {
    return Meet(channel, {.call = Call::kAllGatherV,
                          .input = input,
                          .output = output,
                          .bytes = {bytes.begin(), bytes.end()}});
  }

  std::unique_ptr<Completion> Exchange(Channel channel, std::span<const OutgoingSlice> outgoing,
                                       std::span<const IncomingSlice> incoming) override {
    return Meet(channel, {.call = Call::kExchange,
                          .outgoing = {outgoing.begin(), outgoing.end()},
                          .incoming = {incoming.begin(), incoming.end()}});
  }

  std::unique_ptr<Completion> SendMessage(int to, int tag, const void* memory,
                                          std::int64_t bytes) override {
    const core::Status status = CheckMessage("send", to, tag, bytes);
    if (!status.ok()) return Finished::With(status);
    return Mailboxes::Send(shared_->mailboxes, rank_, to, tag, memory, bytes);
  }

  std::unique_ptr<Completion> ReceiveMessage(int from, int tag, void* memory,
                                             std::int64_t bytes) override {
    const core::Status status = CheckMessage("receive", from, tag, bytes);
    if (!status.ok()) return Finished::With(status);
    return Mailboxes::Receive(shared_->mailboxes, from, rank_, tag, memory, bytes);
  }

  void Abort(const core::Status& why) override { shared_->Abort(why); }

 private:
  class Pending;

  std::unique_ptr<Completion> Meet(Channel channel, Deposit deposit);
  std::unique_ptr<Completion> MeetToReduce(Channel channel, Deposit deposit);
  core::Status CheckMessage(const char* what, int peer, int tag, std::int64_t bytes) const;
  // Adds the deposit to its meeting; an error if the arguments are wrong whatever the others bring.
  // Fills in `*meeting`, and says by `*complete` that all members are there and the caller carries
  // it out.
  core::Status Arrive(Channel channel, Deposit deposit, std::shared_ptr<Meeting>* meeting,
                      bool* complete) SIRTAKI_REQUIRES(shared_->mutex);

  const std::shared_ptr<InprocWorld::Shared> shared_;
  const int rank_;
  std::map<std::pair<core::SetNumber, fusion::Lane>, std::uint64_t> next_
      SIRTAKI_GUARDED_BY(shared_->mutex);
};

class InprocBackend::Pending : public Completion {
 public:
  Pending(std::shared_ptr<InprocWorld::Shared> shared, std::shared_ptr<Meeting> meeting)
      : shared_(std::move(shared)), meeting_(std::move(meeting)) {}

  // What was deposited is not read or written after this.
  ~Pending() override {
    core::MutexLock lock(shared_->mutex);
    meeting_->Fail({core::StatusCode::kAborted, "a member has withdrawn from the operation"});
    while (meeting_->state != Meeting::State::kDone) shared_->changed.Wait(shared_->mutex);
  }

  bool Poll() override {
    core::MutexLock lock(shared_->mutex);
    return meeting_->state == Meeting::State::kDone;
  }

  core::Status status() const override {
    core::MutexLock lock(shared_->mutex);
    return meeting_->status;
  }

  void Wait() {
    core::MutexLock lock(shared_->mutex);
    while (meeting_->state != Meeting::State::kDone) shared_->changed.Wait(shared_->mutex);
  }

 private:
  const std::shared_ptr<InprocWorld::Shared> shared_;
  const std::shared_ptr<Meeting> meeting_;
};

core::Status InprocBackend::AddSet(core::SetNumber set, const core::RankRanges& members) {
  core::MutexLock lock(shared_->mutex);
  if (!shared_->aborted.ok()) return shared_->aborted;
  const auto found = shared_->sets.find(set);
  if (found != shared_->sets.end() && !(found->second.all == members)) {
    return {core::StatusCode::kMismatch, "set " + std::to_string(set) + " has the members " +
                                             found->second.all.ToString() + ", not " +
                                             members.ToString()};
  }
  if (!members.Contains(rank_)) return core::Status::Ok();
  Members& added = shared_->sets[set];
  added.all = members;
  added.present.Add(rank_);
  return core::Status::Ok();
}

core::Status InprocBackend::RemoveSet(core::SetNumber set) {
  core::MutexLock lock(shared_->mutex);
  if (!shared_->aborted.ok()) return shared_->aborted;
  for (const fusion::Lane lane : {fusion::Lane::kSmall, fusion::Lane::kLarge}) {
    next_.erase({set, lane});
  }
  const auto found = shared_->sets.find(set);
  if (found == shared_->sets.end()) return core::Status::Ok();
  // The others may still be at work in it.
  found->second.present.Remove({rank_});
  if (found->second.present.empty()) shared_->sets.erase(found);
  return core::Status::Ok();
}

core::Status InprocBackend::Arrive(Channel channel, Deposit deposit,
                                   std::shared_ptr<Meeting>* meeting, bool* complete) {
  if (!shared_->aborted.ok()) return shared_->aborted;
  const auto set = shared_->sets.find(channel.set);
  if (set == shared_->sets.end() || !set->second.present.Contains(rank_)) {
    return {core::StatusCode::kInvalidArgument,
            "rank " + std::to_string(rank_) + " is not in set " + std::to_string(channel.set)};
  }
  const core::RankRanges& ranks = set->second.all;
  const auto index = static_cast<std::size_t>(ranks.IndexOf(rank_));
  const auto members = static_cast<std::size_t>(ranks.Count());
  if (!deposit.IsPossible(index, members)) {
    return {core::StatusCode::kInvalidArgument,
            deposit.ToString() + " is impossible among " + std::to_string(members) + " members"};
  }

  const std::uint64_t number = next_[{channel.set, channel.lane}]++;
  const MeetingKey key{channel.set, channel.lane, number};
  std::shared_ptr<Meeting>& slot = shared_->meetings[key];
  if (slot == nullptr) {
    slot = std::make_shared<Meeting>();
    slot->members = ranks;
    slot->deposits.resize(members);
    slot->first_rank = rank_;
    slot->first = index;
  }
  *meeting = slot;
  const Deposit& first = slot->deposits[slot->first];
  if (slot->arrived > 0 && !deposit.AgreesWith(first)) {
    slot->Fail({core::StatusCode::kBackend,
                "members disagree: rank " + std::to_string(slot->first_rank) + " called " +
                    first.ToString() + ", rank " + std::to_string(rank_) + " called " +
                    deposit.ToString() + " (operation " + std::to_string(number) + " of set " +
                    std::to_string(channel.set) + ")"});
    shared_->changed.NotifyAll();
  }
  (*meeting)->deposits[index] = std::move(deposit);
  if (++(*meeting)->arrived == members) {
    shared_->meetings.erase(key);
    if ((*meeting)->state == Meeting::State::kGathering) {
      (*meeting)->state = Meeting::State::kMoving;
      *complete = true;
    }
  }
  return core::Status::Ok();
}

std::unique_ptr<Completion> InprocBackend::Meet(Channel channel, Deposit deposit) {
  std::shared_ptr<Meeting> meeting;
  bool complete = false;
  {
    core::MutexLock lock(shared_->mutex);
    const core::Status status = Arrive(channel, std::move(deposit), &meeting, &complete);
    if (!status.ok()) return Finished::With(status);
  }
  if (complete) {
    // Everyone else waits for it, and nobody leaves while it moves: the deposits are ours.
    const core::Status status = CarryOut(meeting->deposits, meeting->members);
    core::MutexLock lock(shared_->mutex);
    meeting->status = status;
    meeting->state = Meeting::State::kDone;
    shared_->changed.NotifyAll();
  }
  auto pending = std::make_unique<Pending>(shared_, std::move(meeting));
  if (channel.lane == fusion::Lane::kLarge && shared_->options.large_lane_blocks) pending->Wait();
  return pending;
}

std::unique_ptr<Completion> InprocBackend::MeetToReduce(Channel channel, Deposit deposit) {
  if (!HasReduction(deposit.op, deposit.dtype)) {
    return Finished::With(
        {core::StatusCode::kUnsupported, "no " + std::string(core::ReduceOpName(deposit.op)) +
                                             " of " + std::string(core::DTypeName(deposit.dtype))});
  }
  return Meet(channel, std::move(deposit));
}

core::Status InprocBackend::CheckMessage(const char* what, int peer, int tag,
                                         std::int64_t bytes) const {
  if (peer >= 0 && peer < shared_->size && tag >= 0 && tag <= kMaxTag && bytes >= 0) {
    return core::Status::Ok();
  }
  return {core::StatusCode::kInvalidArgument,
          "rank " + std::to_string(rank_) + " of " + std::to_string(shared_->size) + " cannot " +
              what + " " + std::to_string(bytes) + " bytes: rank " + std::to_string(peer) +
              ", tag " + std::to_string(tag)};
}

InprocWorld::InprocWorld(int size, InprocOptions options)
    : shared_(std::make_shared<Shared>(size, options)) {
  SIRTAKI_CHECK(size >= 1, "a world has members");
  core::MutexLock lock(shared_->mutex);
  const core::RankRanges world = core::RankRanges::Span(0, size - 1);
  shared_->sets.emplace(core::kWorldSet, Members{.all = world, .present = world});
}

InprocWorld::~InprocWorld() = default;

int InprocWorld::size() const { return shared_->size; }

std::unique_ptr<Backend> InprocWorld::Connect(int rank) {
  SIRTAKI_CHECK(rank >= 0 && rank < shared_->size, "a rank of this world");
  core::MutexLock lock(shared_->mutex);
  SIRTAKI_CHECK(!shared_->connected[static_cast<std::size_t>(rank)], "each rank connects once");
  shared_->connected[static_cast<std::size_t>(rank)] = true;
  return std::make_unique<InprocBackend>(shared_, rank);
}

void InprocWorld::Abort(const core::Status& why) { shared_->Abort(why); }

}  // namespace sirtaki::ops
