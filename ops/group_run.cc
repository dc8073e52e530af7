#include "ops/group_run.h"

#include <exception>
#include <new>
#include <utility>

namespace sirtaki::ops {
namespace {

using core::StatusCode;

std::int64_t ElementBytes(const core::Signature& signature) {
  return static_cast<std::int64_t>(core::SizeOf(signature.dtype));
}

bool AllAbsent(const std::vector<bool>& absent) {
  for (const bool bit : absent) {
    if (!bit) return false;
  }
  return !absent.empty();
}

// This rank's part of an all-reduce: nothing to give if it has joined or has no gradient this time,
// and nowhere to put the result if it has joined.
fusion::Piece ReducedPiece(const core::RunItem& item) {
  fusion::Piece piece{.count = item.signature->ElementCount()};
  if (item.work == nullptr) return piece;
  if (!AllAbsent(item.work->request.absent)) piece.input = item.work->input;
  piece.output = item.work->output;
  return piece;
}

fusion::Piece BroadcastPiece(const core::RunItem& item) {
  fusion::Piece piece{.count = item.signature->ElementCount()};
  if (item.work == nullptr) return piece;
  piece.input = item.work->input;
  piece.output = item.work->output;
  return piece;
}

template <typename Function>
fusion::FusedVector FuseItems(const GroupTask& task, core::DType moved,
                              const fusion::Cutting& cutting, Function piece_of) {
  std::vector<fusion::Piece> pieces;
  pieces.reserve(task.items.size());
  for (const core::RunItem& item : task.items) pieces.push_back(piece_of(item));
  return {task.signature().dtype, moved, std::move(pieces), cutting};
}

class AllReduceRun : public GroupRun {
 public:
  AllReduceRun(const GroupTaskPtr& group, Backend& backend, Staging& staging,
               const fusion::Cutting& cutting, const std::atomic<bool>& stop)
      : GroupRun(group, backend, staging, stop),
        vector_(FuseItems(
            *group,
            fusion::AccumulationType(group->signature().dtype, group->signature().reduction),
            cutting, ReducedPiece)),
        before_{.factor = group->signature().prescale},
        after_{.factor = group->signature().postscale} {
    if (group->signature().reduction == core::ReduceOp::kAverage) {
      after_.divisor = group->members.Count();
    }
  }

 private:
  bool Next() override {
    void* const staging = staging_.Reserve(vector_.staging_bytes());
    if (next_ > 0) vector_.Store(vector_.windows()[next_ - 1], staging, after_);
    if (next_ == vector_.windows().size()) return false;
    const fusion::Window& window = vector_.windows()[next_++];
    void* const memory = vector_.Load(window, staging, before_);
    Begin(backend_.AllReduceSum(task()->channel, memory, window.count, vector_.moved()));
    return true;
  }

  const fusion::FusedVector vector_;
  const fusion::Scale before_;
  fusion::Scale after_;
  std::size_t next_ = 0;  // window
};

class BroadcastRun : public GroupRun {
 public:
  BroadcastRun(const GroupTaskPtr& group, Backend& backend, Staging& staging,
               const fusion::Cutting& cutting, const std::atomic<bool>& stop)
      : GroupRun(group, backend, staging, stop),
        vector_(FuseItems(*group, group->signature().dtype, cutting, BroadcastPiece)),
        root_(static_cast<int>(group->members.IndexOf(group->signature().root))),
        is_root_(group->rank == group->signature().root) {
    for (const core::RunItem& item : group->items) {
      if (item.work == nullptr) {
        has_joined_ = true;
      } else if (item.work->input != item.work->output) {
        in_place_ = false;
      }
    }
  }

 private:
  bool Next() override {
    if (root_ < 0) return Fail(StatusCode::kInvalidArgument, "the root is not a member of the set");
    if (is_root_ && has_joined_) return Fail(StatusCode::kUnsupported, "the root has joined");
    void* const staging = staging_.Reserve(vector_.staging_bytes());
    // The root's own tensors are written only where the result goes elsewhere.
    if (next_ > 0 && !(is_root_ && in_place_)) vector_.Store(vector_.windows()[next_ - 1], staging);
    if (next_ == vector_.windows().size()) return false;
    const fusion::Window& window = vector_.windows()[next_++];
    void* const memory = is_root_ ? vector_.Load(window, staging) : vector_.Memory(window, staging);
    Begin(backend_.Broadcast(task()->channel, memory,
                             window.count * ElementBytes(task()->signature()), root_));
    return true;
  }

  const fusion::FusedVector vector_;
  const int root_;  // index among the members
  const bool is_root_;
  bool has_joined_ = false;
  bool in_place_ = true;
  std::size_t next_ = 0;  // window
};

// First one exchange of everybody's rows of all tensors, then each tensor straight into its output.
class AllGatherRun : public GroupRun {
 public:
  AllGatherRun(const GroupTaskPtr& group, Backend& backend, Staging& staging,
               const std::atomic<bool>& stop)
      : GroupRun(group, backend, staging, stop),
        members_(static_cast<std::size_t>(group->members.Count())) {}

 private:
  bool Next() override {
    if (!exchanged_) return ExchangeRows();
    while (next_ < task()->items.size()) {
      bool started = false;
      if (!Gather(next_++, &started)) return false;
      if (started) return true;
    }
    return false;
  }

  bool ExchangeRows() {
    const std::size_t tensors = task()->items.size();
    for (const core::RunItem& item : task()->items) {
      if (item.work == nullptr) {
        return Fail(StatusCode::kUnsupported, "all-gather with a rank that has joined");
      }
      own_rows_.push_back(item.work->rows);
    }
    all_rows_.resize(tensors * members_);
    exchanged_ = true;
    Begin(backend_.AllGather(task()->channel, own_rows_.data(), all_rows_.data(),
                             static_cast<std::int64_t>(tensors * sizeof(std::int64_t))));
    return true;
  }

  // False after a failure. Nothing is started where nobody has a byte, which all see alike.
  bool Gather(std::size_t index, bool* started) {
    const core::RunItem& item = task()->items[index];
    const std::int64_t row_bytes = item.signature->ElementCount() * ElementBytes(*item.signature);
    std::vector<std::int64_t> rows(members_);
    bytes_.assign(members_, 0);
    std::int64_t total = 0;
    for (std::size_t m = 0; m < members_; ++m) {
      rows[m] = all_rows_[m * task()->items.size() + index];
      if (rows[m] < 0 || __builtin_mul_overflow(rows[m], row_bytes, &bytes_[m]) ||
          __builtin_add_overflow(total, bytes_[m], &total)) {
        return Fail(StatusCode::kBackend, "member " + std::to_string(m) + " says that it has " +
                                              std::to_string(rows[m]) + " rows of " +
                                              item.key.ToString());
      }
    }
    void* const output = item.work->allocate_output(rows);
    if (total == 0) return true;
    if (output == nullptr) {
      return Fail(StatusCode::kBackend,
                  "there is no memory for the result of " + item.key.ToString());
    }
    *started = true;
    Begin(backend_.AllGatherV(task()->channel, item.work->input, output, bytes_));
    return true;
  }

  const std::size_t members_;
  bool exchanged_ = false;
  std::vector<std::int64_t> own_rows_;  // by tensor
  std::vector<std::int64_t> all_rows_;  // by member, then tensor
  std::vector<std::int64_t> bytes_;     // of the tensor that moves, by member
  std::size_t next_ = 0;                // tensor
};

}  // namespace

std::string GroupTask::ToString() const {
  std::string text(core::OpKindName(signature().kind));
  if (items.size() == 1) {
    text += " of " + items.front().key.ToString();
  } else {
    text += " of " + std::to_string(items.size()) + " tensors from " + items.front().key.ToString();
  }
  return text + (channel.lane == fusion::Lane::kSmall ? " (small lane)" : " (large lane)");
}

GroupRun::GroupRun(GroupTaskPtr task, Backend& backend, Staging& staging,
                   const std::atomic<bool>& stop)
    : backend_(backend), staging_(staging), task_(std::move(task)), stop_(stop) {}

bool GroupRun::Fail(StatusCode code, std::string text) {
  status_ = core::Status(code, std::move(text));
  return false;
}

bool GroupRun::NextOrThrown() {
  try {
    return Next();
  } catch (const std::bad_alloc&) {
    return Fail(StatusCode::kBackend, "out of host memory");
  } catch (const std::exception& error) {
    return Fail(StatusCode::kBackend, error.what());
  } catch (...) {
    return Fail(StatusCode::kBackend, "an exception of unknown type");
  }
}

Progress GroupRun::Advance() {
  bool moved = false;
  while (!over_) {
    if (operation_ != nullptr) {
      if (!operation_->Poll()) return moved ? Progress::kMoved : Progress::kWaiting;
      status_ = operation_->status();
      operation_.reset();
      moved = true;
    }
    if (status_.ok() && stop_.load(std::memory_order_relaxed)) {
      Fail(StatusCode::kAborted, "the lanes were stopped");
    }
    over_ = !status_.ok() || !NextOrThrown();
  }
  return Progress::kOver;
}

std::unique_ptr<GroupRun> GroupRun::Make(const GroupTaskPtr& task, Backend& backend,
                                         Staging& staging, const fusion::Cutting& cutting,
                                         const std::atomic<bool>& stop) {
  switch (task->signature().kind) {
    case core::OpKind::kAllReduce:
      return std::make_unique<AllReduceRun>(task, backend, staging, cutting, stop);
    case core::OpKind::kBroadcast:
      return std::make_unique<BroadcastRun>(task, backend, staging, cutting, stop);
    case core::OpKind::kAllGather:
      return std::make_unique<AllGatherRun>(task, backend, staging, stop);
  }
  return nullptr;
}

}  // namespace sirtaki::ops
