#include "ops/inproc/inproc_backend.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/thread_annotations.h"
#include "ops/finished.h"
#include "ops/kernels.h"

namespace sirtaki::ops {
namespace {

enum class Call : std::uint8_t { kAllReduce, kBroadcast, kAllGather, kAllGatherV, kAllToAll };

// What a member brings to a meeting.
struct Deposit {
  Call call = Call::kAllReduce;
  const void* input = nullptr;  // gathers and all-to-all
  void* output = nullptr;       // the buffer of all-reduce and broadcast
  std::int64_t count = 0;  // elements of all-reduce; bytes of broadcast, all-gather and all-to-all
  core::DType dtype = core::DType::kU8;
  int root = -1;
  std::vector<std::int64_t> bytes = {};  // all-gather-v

  bool AgreesWith(const Deposit& other) const {
    return call == other.call && count == other.count && dtype == other.dtype &&
           root == other.root && bytes == other.bytes;
  }

  std::string ToString() const {
    switch (call) {
      case Call::kAllReduce:
        return "all-reduce of " + std::to_string(count) + " " + std::string(core::DTypeName(dtype));
      case Call::kBroadcast:
        return "broadcast of " + std::to_string(count) + " bytes from member " +
               std::to_string(root);
      case Call::kAllGather:
        return "all-gather of " + std::to_string(count) + " bytes each";
      case Call::kAllGatherV: {
        std::string text = "all-gather of bytes [";
        for (std::size_t i = 0; i < bytes.size(); ++i) {
          text += (i == 0 ? "" : ", ") + std::to_string(bytes[i]);
        }
        return text + "]";
      }
      case Call::kAllToAll:
        return "all-to-all of parts of " + std::to_string(count) + " bytes";
    }
    return "unknown call";
  }
};

void Copy(void* to, const void* from, std::int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

std::byte* Part(void* base, std::size_t index, std::int64_t bytes) {
  return static_cast<std::byte*>(base) + static_cast<std::int64_t>(index) * bytes;
}

const std::byte* Part(const void* base, std::size_t index, std::int64_t bytes) {
  return static_cast<const std::byte*>(base) + static_cast<std::int64_t>(index) * bytes;
}

// Sums in the order of the ranks, block by block so that the sum is still in the cache when it is
// copied.
void CarryOutAllReduce(const std::vector<Deposit>& members) {
  constexpr std::int64_t kBlock = 4096;
  const Deposit& first = members.front();
  const auto element = static_cast<std::int64_t>(core::SizeOf(first.dtype));
  const auto at = [&](const Deposit& member, std::int64_t i) {
    return static_cast<std::byte*>(member.output) + i * element;
  };
  for (std::int64_t i = 0; i < first.count; i += kBlock) {
    const std::int64_t n = std::min(kBlock, first.count - i);
    for (std::size_t m = 1; m < members.size(); ++m) {
      ReduceInto(core::ReduceOp::kSum, first.dtype, at(first, i), at(members[m], i), n);
    }
    for (std::size_t m = 1; m < members.size(); ++m) {
      Copy(at(members[m], i), at(first, i), n * element);
    }
  }
}

void CarryOut(const std::vector<Deposit>& members) {
  const Deposit& first = members.front();
  switch (first.call) {
    case Call::kAllReduce:
      return CarryOutAllReduce(members);
    case Call::kBroadcast:
      for (const Deposit& member : members) {
        Copy(member.output, members[static_cast<std::size_t>(first.root)].output, first.count);
      }
      return;
    case Call::kAllGather:
    case Call::kAllGatherV:
      for (const Deposit& receiver : members) {
        auto* to = static_cast<std::byte*>(receiver.output);
        for (std::size_t m = 0; m < members.size(); ++m) {
          const std::int64_t bytes = first.call == Call::kAllGather ? first.count : first.bytes[m];
          Copy(to, members[m].input, bytes);
          if (bytes > 0) to += bytes;
        }
      }
      return;
    case Call::kAllToAll:
      for (std::size_t to = 0; to < members.size(); ++to) {
        for (std::size_t from = 0; from < members.size(); ++from) {
          Copy(Part(members[to].output, from, first.count),
               Part(members[from].input, to, first.count), first.count);
        }
      }
      return;
  }
}

// One operation for which members arrive. Guarded by the world's mutex, but while it is being
// carried out: then its deposits belong to the member who does that.
struct Meeting {
  enum class State : std::uint8_t { kGathering, kMoving, kDone };

  State state = State::kGathering;
  core::Status status;
  std::vector<Deposit> deposits;  // by member
  std::size_t arrived = 0;
  int first_rank = -1;  // who arrived first, and as which member
  std::size_t first = 0;

  void Fail(const core::Status& why) {
    if (state != State::kGathering) return;
    state = State::kDone;
    status = why;
  }
};

using MeetingKey = std::tuple<core::SetNumber, fusion::Lane, std::uint64_t>;

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
  std::map<core::SetNumber, core::RankRanges> sets SIRTAKI_GUARDED_BY(mutex);
  // Those for which not all members have arrived.
  std::map<MeetingKey, std::shared_ptr<Meeting>> meetings SIRTAKI_GUARDED_BY(mutex);
};

void InprocWorld::Shared::Abort(const core::Status& why) {
  core::MutexLock lock(mutex);
  if (!aborted.ok()) return;
  aborted = why.ok() ? core::Status(core::StatusCode::kAborted, "aborted") : why;
  for (auto& [key, meeting] : meetings) meeting->Fail(aborted);
  meetings.clear();
  changed.NotifyAll();
}

class InprocBackend : public Backend {
 public:
  InprocBackend(std::shared_ptr<InprocWorld::Shared> shared, int rank)
      : shared_(std::move(shared)), rank_(rank) {}

  std::string_view name() const override { return "in-process"; }

  core::Status AddSet(core::SetNumber set, const core::RankRanges& members) override;
  core::Status RemoveSet(core::SetNumber) override { return core::Status::Ok(); }

  std::unique_ptr<Completion> AllReduce(Channel channel, void* buffer, std::int64_t count,
                                        core::DType dtype, core::ReduceOp op) override {
    if (!HasReduction(op, dtype)) {
      return Finished::With(
          {core::StatusCode::kUnsupported, "no sum of " + std::string(core::DTypeName(dtype))});
    }
    return Meet(channel,
                {.call = Call::kAllReduce, .output = buffer, .count = count, .dtype = dtype});
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

  std::unique_ptr<Completion> AllToAll(Channel channel, const void* input, void* output,
                                       std::int64_t bytes) override {
    return Meet(channel,
                {.call = Call::kAllToAll, .input = input, .output = output, .count = bytes});
  }

  std::unique_ptr<Completion> Reduce(Channel, void*, std::int64_t, core::DType, core::ReduceOp,
                                     int) override {
    return Finished::With({core::StatusCode::kUnsupported, "reduce"});
  }
  std::unique_ptr<Completion> Exchange(Channel, std::span<const OutgoingSlice>,
                                       std::span<const IncomingSlice>) override {
    return Finished::With({core::StatusCode::kUnsupported, "exchange"});
  }
  std::unique_ptr<Completion> SendMessage(int, int, const void*, std::int64_t) override {
    return Finished::With({core::StatusCode::kUnsupported, "send"});
  }
  std::unique_ptr<Completion> ReceiveMessage(int, int, void*, std::int64_t) override {
    return Finished::With({core::StatusCode::kUnsupported, "receive"});
  }

  void Abort(const core::Status& why) override { shared_->Abort(why); }

 private:
  class Pending;

  std::unique_ptr<Completion> Meet(Channel channel, Deposit deposit);
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
  const auto [found, inserted] = shared_->sets.emplace(set, members);
  if (!inserted && !(found->second == members)) {
    return {core::StatusCode::kMismatch, "set " + std::to_string(set) + " has the members " +
                                             found->second.ToString() + ", not " +
                                             members.ToString()};
  }
  return core::Status::Ok();
}

core::Status InprocBackend::Arrive(Channel channel, Deposit deposit,
                                   std::shared_ptr<Meeting>* meeting, bool* complete) {
  if (!shared_->aborted.ok()) return shared_->aborted;
  const auto set = shared_->sets.find(channel.set);
  const std::int64_t index = set == shared_->sets.end() ? -1 : set->second.IndexOf(rank_);
  if (index < 0) {
    return {core::StatusCode::kInvalidArgument,
            "rank " + std::to_string(rank_) + " is not in set " + std::to_string(channel.set)};
  }
  const auto members = static_cast<std::size_t>(set->second.Count());
  const auto negative = [](std::int64_t bytes) { return bytes < 0; };
  const bool wrong_root = deposit.call == Call::kBroadcast &&
                          (deposit.root < 0 || static_cast<std::size_t>(deposit.root) >= members);
  const bool wrong_sizes = deposit.call == Call::kAllGatherV && deposit.bytes.size() != members;
  if (wrong_root || wrong_sizes || negative(deposit.count) ||
      std::any_of(deposit.bytes.begin(), deposit.bytes.end(), negative)) {
    return {core::StatusCode::kInvalidArgument,
            deposit.ToString() + " is impossible among " + std::to_string(members) + " members"};
  }

  const std::uint64_t number = next_[{channel.set, channel.lane}]++;
  const MeetingKey key{channel.set, channel.lane, number};
  std::shared_ptr<Meeting>& slot = shared_->meetings[key];
  if (slot == nullptr) {
    slot = std::make_shared<Meeting>();
    slot->deposits.resize(members);
    slot->first_rank = rank_;
    slot->first = static_cast<std::size_t>(index);
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
  (*meeting)->deposits[static_cast<std::size_t>(index)] = std::move(deposit);
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
    CarryOut(meeting->deposits);
    core::MutexLock lock(shared_->mutex);
    meeting->state = Meeting::State::kDone;
    shared_->changed.NotifyAll();
  }
  auto pending = std::make_unique<Pending>(shared_, std::move(meeting));
  if (channel.lane == fusion::Lane::kLarge && shared_->options.large_lane_blocks) pending->Wait();
  return pending;
}

InprocWorld::InprocWorld(int size, InprocOptions options)
    : shared_(std::make_shared<Shared>(size, options)) {
  SIRTAKI_CHECK(size >= 1, "a world has members");
  core::MutexLock lock(shared_->mutex);
  shared_->sets.emplace(core::kWorldSet, core::RankRanges::Span(0, size - 1));
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
