#include "ops/shm/backend.h"

#include <deque>
#include <string>
#include <utility>

#include "ops/base/finished.h"
#include "ops/base/kernels.h"
#include "ops/shm/operations.h"

namespace sirtaki::ops::shm {

using core::Status;
using core::StatusCode;

namespace {

std::unique_ptr<Completion> Refused(StatusCode code, std::string text) {
  return Finished::With({code, std::move(text)});
}

std::byte* At(void* memory, std::int64_t offset) {
  return static_cast<std::byte*>(memory) + offset;
}

// An operation of the large lane, from its beginning to its end.
template <typename Make>
Status RunThrough(SharedChannel& channel, bool spin, const Make& make) {
  Turn turn(channel);
  Steps steps = make(turn);
  for (steps.Resume(); !steps.done(); steps.Resume()) {
    if (Status status = channel.Block(steps.wait(), spin); !status.ok()) return status;
  }
  turn.Finish();
  return channel.IsVoid() ? channel.AwaitFault() : steps.status();
}

}  // namespace

// The operations of a small lane that are under way, oldest first: what one of them needs of this
// rank, whichever is polled, all get.
class Backend::Queue {
 public:
  explicit Queue(std::unique_ptr<SharedChannel> channel) : channel_(std::move(channel)) {}

  SharedChannel& channel() { return *channel_; }
  void Advance();
  void Add(Operation* operation) { operations_.push_back(operation); }
  void Remove(Operation* operation) { std::erase(operations_, operation); }

 private:
  const std::unique_ptr<SharedChannel> channel_;
  std::deque<Operation*> operations_;
};

class Backend::Operation : public Completion {
 public:
  template <typename Make>
  Operation(std::shared_ptr<Queue> queue, Make make)
      : queue_(std::move(queue)), turn_(queue_->channel()), steps_(make(turn_)) {}
  ~Operation() override {
    if (!done_) queue_->Remove(this);
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  bool Poll() override {
    if (!done_) queue_->Advance();
    return done_;
  }
  Status status() const override { return status_; }

  void Begin() {
    queue_->Add(this);
    queue_->Advance();
  }
  // Goes as far as it can. True: it is done.
  bool Step() {
    if (queue_->channel().stop().raised()) {
      status_ = queue_->channel().stop().why();
      return done_ = true;
    }
    if (!steps_.done()) {
      if (begun_ && !queue_->channel().IsOver(steps_.wait())) return false;
      begun_ = true;
      steps_.Resume();
      if (!steps_.done()) return false;
      turn_.Pass();
    }
    // One that moves nothing may be through before those that came first.
    if (!turn_.IsOldest()) return false;
    turn_.Finish();
    status_ = steps_.status();
    return done_ = true;
  }

 private:
  const std::shared_ptr<Queue> queue_;
  Turn turn_;
  Steps steps_;
  bool begun_ = false;
  bool done_ = false;
  Status status_;
};

void Backend::Queue::Advance() {
  // The older may let the younger write; the younger hold up nobody.
  std::erase_if(operations_, [](Operation* operation) { return operation->Step(); });
}

Backend::Backend(LocalGroup& group, const BackendOptions& options)
    : group_(group), options_(options), blocks_(group), made_(blocks_.Make(core::kWorldSet)) {
  core::MutexLock lock(mutex_);
  sets_[core::kWorldSet] = MakeLanes(core::kWorldSet, group.ranks());
}

Backend::~Backend() = default;

bool Backend::Covers(const core::RankRanges& members) const {
  // More would need larger frames than the rings have room for.
  constexpr std::int64_t kMostMembers = 128;
  return members.Count() <= kMostMembers && group_.ranks().ContainsAll(members);
}

Backend::Lanes Backend::MakeLanes(core::SetNumber set, const core::RankRanges& members) {
  std::vector<int> indices;
  for (const int rank : members.ToVector()) indices.push_back(group_.IndexOf(rank));
  Lanes lanes;
  for (const fusion::Lane lane : {fusion::Lane::kSmall, fusion::Lane::kLarge}) {
    ChannelOptions options;
    options.set = set;
    options.lane = lane;
    options.verify = options_.verify;
    options.chunk_bytes = options_.chunk_bytes;
    lanes.Of(lane) = std::make_shared<Queue>(
        std::make_unique<SharedChannel>(group_, blocks_, indices, options, stop_));
  }
  return lanes;
}

Status Backend::AddSet(core::SetNumber set, const core::RankRanges& members) {
  if (stop_->raised()) return stop_->why();
  if (!members.Contains(group_.RankOf(group_.self()))) return Status::Ok();
  Status status = blocks_.Make(set);
  if (!status.ok()) return status;
  const Lanes lanes = MakeLanes(set, members);
  // Once all members have come, nobody looks for the set's blocks any more.
  for (const std::shared_ptr<Queue>& queue : lanes.of_lane) {
    status = queue->channel().Block(queue->channel().Turn(0), options_.spin);
    if (!status.ok()) return status;
  }
  core::MutexLock lock(mutex_);
  sets_[set] = lanes;
  return status;
}

Status Backend::RemoveSet(core::SetNumber set) {
  Lanes lanes;
  {
    core::MutexLock lock(mutex_);
    const auto found = sets_.find(set);
    if (found == sets_.end()) return Status::Ok();
    lanes = found->second;
    sets_.erase(found);
  }
  // A member that has come here has finished its operations and reads nothing of the others' any
  // more.
  SharedChannel& channel = lanes.Of(fusion::Lane::kLarge)->channel();
  const Turn turn(channel);
  const Frame frame = channel.Reserve(1);
  Status status = channel.Block(turn.Comes(), options_.spin);
  if (status.ok()) status = channel.Block(turn.Room(frame), options_.spin);
  if (!status.ok()) return status;
  channel.Publish(frame);
  status = channel.Block(turn.Arrival(frame), options_.spin);
  if (status.ok()) blocks_.Remove(set);
  return status;
}

LetGo Backend::WhenLetGo(Channel channel) const {
  const bool is_seen = channel.lane == fusion::Lane::kLarge && !options_.verify;
  return is_seen ? group_.WhenAllHaveLeft() : LetsGoAtOnce();
}

std::shared_ptr<Backend::Queue> Backend::Find(Channel channel) {
  core::MutexLock lock(mutex_);
  const auto found = sets_.find(channel.set);
  return found == sets_.end() ? nullptr : found->second.Of(channel.lane);
}

template <typename Make>
std::unique_ptr<Completion> Backend::Run(Channel channel, Make make) {
  if (stop_->raised()) return Finished::With(stop_->why());
  if (!made_.ok()) return Finished::With(made_);
  std::shared_ptr<Queue> queue = Find(channel);
  if (queue == nullptr) {
    return Refused(StatusCode::kInvalidArgument,
                   "this rank is not in process set " + std::to_string(channel.set));
  }
  if (channel.lane == fusion::Lane::kLarge) {
    return Finished::With(RunThrough(queue->channel(), options_.spin, make));
  }
  auto operation = std::make_unique<Operation>(std::move(queue), std::move(make));
  operation->Begin();
  return operation;
}

std::unique_ptr<Completion> Backend::ReduceOne(Channel channel, const Segment& segment,
                                               core::DType dtype, core::ReduceOp op,
                                               fusion::Scale after) {
  if (!HasReduction(op, dtype)) {
    return Refused(StatusCode::kUnsupported, std::string(core::ReduceOpName(op)) + " of " +
                                                 std::string(core::DTypeName(dtype)));
  }
  if (segment.count < 0) return Refused(StatusCode::kInvalidArgument, "a negative count");
  SegmentReduction how;
  how.dtype = dtype;
  how.op = op;
  how.after = after;
  return AllReduceSegments(channel, {&segment, 1}, how);
}

std::unique_ptr<Completion> Backend::AllReduce(Channel channel, void* buffer, std::int64_t count,
                                               core::DType dtype, core::ReduceOp op,
                                               fusion::Scale after) {
  return ReduceOne(channel, {buffer, buffer, count}, dtype, op, after);
}

std::unique_ptr<Completion> Backend::Reduce(Channel channel, void* buffer, std::int64_t count,
                                            core::DType dtype, core::ReduceOp op, int root) {
  const std::shared_ptr<Queue> queue = Find(channel);
  const bool is_root = queue != nullptr && queue->channel().self() == root;
  return ReduceOne(channel, {buffer, is_root ? buffer : nullptr, count}, dtype, op);
}

bool Backend::ReducesSegments(const SegmentReduction& how) const {
  return core::IsDefined(how.op, how.dtype) && how.op != core::ReduceOp::kAdasum;
}

std::unique_ptr<Completion> Backend::AllReduceSegments(Channel channel,
                                                       std::span<const Segment> segments,
                                                       const SegmentReduction& how) {
  return Run(channel, [&](Turn& turn) {
    return ReduceSegments(turn, {segments.begin(), segments.end()}, how);
  });
}

std::unique_ptr<Completion> Backend::Broadcast(Channel channel, void* buffer, std::int64_t bytes,
                                               int root) {
  return Run(channel, [&](Turn& turn) {
    std::vector<Gift> gifts(static_cast<std::size_t>(turn.channel().size()));
    gifts[static_cast<std::size_t>(root)] = {bytes,
                                             turn.channel().self() == root ? nullptr : buffer};
    return GiveToAll(turn, buffer, std::move(gifts));
  });
}

std::unique_ptr<Completion> Backend::AllGather(Channel channel, const void* input, void* output,
                                               std::int64_t bytes) {
  return Run(channel, [&](Turn& turn) {
    std::vector<Gift> gifts;
    for (int m = 0; m < turn.channel().size(); ++m) {
      gifts.push_back({bytes, At(output, m * bytes)});
    }
    return GiveToAll(turn, input, std::move(gifts));
  });
}

std::unique_ptr<Completion> Backend::AllGatherV(Channel channel, const void* input, void* output,
                                                std::span<const std::int64_t> bytes) {
  return Run(channel, [&](Turn& turn) {
    std::vector<Gift> gifts;
    std::int64_t begin = 0;
    for (const std::int64_t part : bytes) {
      gifts.push_back({part, At(output, begin)});
      begin += part;
    }
    return GiveToAll(turn, input, std::move(gifts));
  });
}

std::unique_ptr<Completion> Backend::Exchange(Channel channel,
                                              std::span<const OutgoingSlice> outgoing,
                                              std::span<const IncomingSlice> incoming) {
  return Run(channel, [&](Turn& turn) {
    return shm::Exchange(turn, {outgoing.begin(), outgoing.end()},
                         {incoming.begin(), incoming.end()});
  });
}

std::unique_ptr<Completion> Backend::SendMessage(int, int, const void*, std::int64_t) {
  return Refused(StatusCode::kUnsupported, "messages do not go through shared memory");
}
std::unique_ptr<Completion> Backend::ReceiveMessage(int, int, void*, std::int64_t) {
  return Refused(StatusCode::kUnsupported, "messages do not go through shared memory");
}

void Backend::Abort(const Status& why) {
  group_.GiveUp();
  stop_->Raise(why);
}

}  // namespace sirtaki::ops::shm
