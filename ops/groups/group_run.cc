#include "ops/groups/group_run.h"

#include <cstddef>
#include <utility>

#include "ops/groups/run_makers.h"

namespace sirtaki::ops {
namespace {

using core::StatusCode;

// A barrier has nothing left to do here: that all members have reached it is decided before.
class BarrierRun : public GroupRun {
 public:
  explicit BarrierRun(const RunContext& context) : GroupRun(context) {}

 private:
  bool Next() override { return false; }
};

class RefusedRun : public GroupRun {
 public:
  RefusedRun(const RunContext& context, core::Status why)
      : GroupRun(context), why_(std::move(why)) {}

 private:
  bool Next() override { return Fail(why_.code(), why_.message()); }

  const core::Status why_;
};

}  // namespace

GroupRun::GroupRun(const RunContext& context)
    : backend_(*context.task->route.backend),
      rootless_(*context.task->route.rootless),
      staging_(context.staging),
      trace_(context.observer, *context.task,
             context.task->channel.lane == fusion::Lane::kSmall ? core::trace::Track::kSmallLane
                                                                : core::trace::Track::kLargeLane),
      task_(context.task),
      stop_(context.stop),
      members_(task_->members->Count()),
      self_(task_->members->IndexOf(task_->rank)),
      root_(task_->members->IndexOf(task_->signature().root)) {
  status_ = Check();
  over_ = !status_.ok();
}

const std::vector<std::int64_t>& GroupRun::active() {
  if (!active_.empty()) return active_;
  const core::RankRanges& silent = task_->silent;
  active_.reserve(static_cast<std::size_t>(members_));
  std::int64_t index = 0;
  for (const core::RankRange& range : task_->members->ranges()) {
    for (int rank = range.first; rank <= range.last; ++rank, ++index) {
      if (silent.empty() || !silent.Contains(rank)) active_.push_back(index);
    }
  }
  return active_;
}

core::Status GroupRun::Check() const {
  if (self_ < 0) {
    return {StatusCode::kInvalidArgument,
            "this rank is not in process set " + std::to_string(task_->channel.set)};
  }
  if (!core::HasRoot(task_->signature().kind)) return core::Status::Ok();
  if (root_ < 0) return {StatusCode::kInvalidArgument, "the root is not a member of the set"};
  if (task_->silent.Contains(task_->signature().root)) {
    return {StatusCode::kUnsupported, "the root has joined"};
  }
  return core::Status::Ok();
}

bool GroupRun::Fail(StatusCode code, std::string text) {
  status_ = core::Status(code, std::move(text));
  return false;
}

Progress GroupRun::Advance() {
  try {
    return AdvanceOrThrow();
  } catch (...) {
    status_ = core::StatusOfException();
    over_ = true;
    Drop();
    return Progress::kOver;
  }
}

Progress GroupRun::AdvanceOrThrow() {
  bool moved = false;
  while (!over_) {
    if (operation_ != nullptr) {
      if (!operation_->Poll()) return moved ? Progress::kMoved : Progress::kWaiting;
      status_ = operation_->status();
      operation_.reset();
      trace_.Pause();
      moved = true;
    }
    if (status_.ok() && stop_.load(std::memory_order_relaxed)) {
      Fail(StatusCode::kAborted, "the lanes were stopped");
    }
    over_ = !status_.ok() || !Next();
    if (over_) Drop();  // what Next has begun before it failed
    if (over_ && status_.ok()) trace_.Finish();
  }
  return Progress::kOver;
}

std::unique_ptr<GroupRun> GroupRun::Make(const RunContext& context) {
  try {
    return MakeOrThrow(context);
  } catch (...) {
    return std::make_unique<RefusedRun>(context, core::StatusOfException());
  }
}

std::unique_ptr<GroupRun> GroupRun::MakeOrThrow(const RunContext& context) {
  switch (context.task->signature().kind) {
    case core::OpKind::kAllReduce:
      if (context.task->signature().reduction == core::ReduceOp::kAdasum)
        return MakeAdasumRun(context);
      return MakeReduceRun(context);
    case core::OpKind::kReduce:
      return MakeReduceRun(context);
    case core::OpKind::kReduceScatter:
      return MakeReduceScatterRun(context);
    case core::OpKind::kBroadcast:
      return MakeBroadcastRun(context);
    case core::OpKind::kAllGather:
      return MakeAllGatherRun(context);
    case core::OpKind::kAllGatherInto:
      return MakeAllGatherIntoRun(context);
    case core::OpKind::kGather:
    case core::OpKind::kScatter:
    case core::OpKind::kAllToAll:
      return MakeExchangeRun(context);
    case core::OpKind::kBarrier:
      return std::make_unique<BarrierRun>(context);
    case core::OpKind::kMakeArena:
    case core::OpKind::kSend:
    case core::OpKind::kReceive:
      break;
  }
  return std::make_unique<RefusedRun>(
      context, core::Status(StatusCode::kProtocol,
                            std::string(core::OpKindName(context.task->signature().kind)) +
                                " has no place in a lane"));
}

}  // namespace sirtaki::ops
