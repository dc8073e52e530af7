#include "ops/group_run.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <utility>

#include "ops/kernels.h"

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

// The 16-bit type that the elements are rounded to on their way, by their own type or by request.
// None for a set of one: nothing travels, so nothing is rounded.
std::optional<core::DType> WireType(const GroupTask& task) {
  const core::Signature& signature = task.signature();
  if (signature.kind != core::OpKind::kAllReduce || task.members.Count() == 1) return std::nullopt;
  if (signature.wire) return signature.wire;
  const bool half = signature.dtype == core::DType::kF16 || signature.dtype == core::DType::kBF16;
  return half ? std::optional(signature.dtype) : std::nullopt;
}

// Where the factors of an all-reduce are applied. Tensors that are compressed on the way are
// multiplied by prescale before they are rounded, so that it can bring them into the range of the
// wire type, and by postscale after they are widened again: in their own precision, both. The
// average is divided before it is rounded. Nothing is rounded but what travels.
struct Factors {
  fusion::Scale load;
  fusion::Scale sum;  // of what was added up, before it is rounded
  fusion::Scale store;
};

Factors FactorsOf(const GroupTask& task, bool compressed) {
  const core::Signature& signature = task.signature();
  Factors factors;
  if (signature.reduction == core::ReduceOp::kAverage) factors.sum.divisor = task.members.Count();
  factors.load.factor = signature.prescale;
  (compressed ? factors.store : factors.sum).factor = signature.postscale;
  return factors;
}

// Each window is summed by the backend, in a type that has a sum. What is compressed is rounded
// as if it had travelled so, but travels as float32: the small lane's tensors, where one short
// operation is worth more than half the bytes.
class AllReduceRun : public GroupRun {
 public:
  AllReduceRun(const GroupTaskPtr& group, Backend& backend, Staging& staging,
               const fusion::Cutting& cutting, const std::atomic<bool>& stop)
      : GroupRun(group, backend, staging, stop),
        compressed_(WireType(*group) ? group->signature().wire : std::nullopt),
        vector_(FuseItems(*group,
                          compressed_ ? core::DType::kF32
                                      : fusion::AccumulationType(group->signature().dtype,
                                                                 group->signature().reduction),
                          cutting, ReducedPiece)),
        factors_(FactorsOf(*group, compressed_.has_value())) {}

 private:
  bool Next() override {
    void* const staging = staging_.Reserve(vector_.staging_bytes());
    if (next_ > 0) Store(vector_.windows()[next_ - 1], staging);
    if (next_ == vector_.windows().size()) return false;
    const fusion::Window& window = vector_.windows()[next_++];
    void* const memory = vector_.Load(window, staging, factors_.load);
    if (compressed_) RoundThrough(memory, window.count, {});
    Begin(backend_.AllReduce(task()->channel, memory, window.count, vector_.moved(),
                             core::ReduceOp::kSum));
    return true;
  }

  void Store(const fusion::Window& window, void* staging) const {
    if (!compressed_) return vector_.Store(window, staging, factors_.sum);
    RoundThrough(vector_.Memory(window, staging), window.count, factors_.sum);
    vector_.Store(window, staging, factors_.store);
  }

  void RoundThrough(void* memory, std::int64_t count, fusion::Scale scale) const {
    fusion::RoundThrough(*compressed_, static_cast<float*>(memory), count, scale);
  }

  const std::optional<core::DType> compressed_;
  const fusion::FusedVector vector_;
  const Factors factors_;
  std::size_t next_ = 0;  // window
};

// Elements travel as 16 bits, twice: each member gets everybody's part of its own chunk of the
// window, reduces it in float32 in the order of the members, rounds the result once, and gives it
// to all. Everyone takes what was gathered, so all have the same bits.
//
// Half tensors are not rounded before they travel: their prescale waits until they are widened.
class HalfReduceRun : public GroupRun {
 public:
  HalfReduceRun(const GroupTaskPtr& group, core::DType wire, Backend& backend, Staging& staging,
                const fusion::Cutting& cutting, const std::atomic<bool>& stop)
      : GroupRun(group, backend, staging, stop),
        vector_(FuseItems(*group, wire, {.chunk_bytes = cutting.chunk_bytes}, ReducedPiece)),
        members_(group->members.Count()),
        factors_(FactorsOf(*group, group->signature().wire.has_value())) {
    if (!group->signature().wire) std::swap(factors_.load, widen_);
    for (const fusion::Window& window : vector_.windows()) {
      staging_bytes_ = std::max(staging_bytes_, 2 * members_ * ChunkBytes(window));
    }
  }

 private:
  enum class Step : std::uint8_t { kExchange, kGather, kStore };

  bool Next() override {
    if (vector_.windows().empty()) return false;
    // The window, filled up to a chunk for each member; behind it what the others give.
    auto* const whole = static_cast<std::byte*>(staging_.Reserve(staging_bytes_));
    const fusion::Window* window = &vector_.windows()[window_];
    if (step_ == Step::kStore) {
      vector_.Store(*window, whole, factors_.store);
      if (++window_ == vector_.windows().size()) return false;
      window = &vector_.windows()[window_];
      step_ = Step::kExchange;
    }
    const std::int64_t chunk = ChunkBytes(*window);
    std::byte* const parts = whole + members_ * chunk;
    if (step_ == Step::kExchange) {
      vector_.Load(*window, whole, factors_.load);
      const std::int64_t filled = window->count * kElementBytes;
      std::memset(whole + filled, 0, static_cast<std::size_t>(members_ * chunk - filled));
      Begin(backend_.AllToAll(task()->channel, whole, parts, chunk));
      step_ = Step::kGather;
    } else {
      ReduceParts(core::ReduceOp::kSum, vector_.moved(), parts, members_, chunk / kElementBytes,
                  widen_, factors_.sum);
      Begin(backend_.AllGather(task()->channel, parts, whole, chunk));
      step_ = Step::kStore;
    }
    return true;
  }

  std::int64_t ChunkBytes(const fusion::Window& window) const {
    return ((window.count - 1) / members_ + 1) * kElementBytes;
  }

  static constexpr std::int64_t kElementBytes = 2;

  const fusion::FusedVector vector_;
  const std::int64_t members_;
  Factors factors_;
  fusion::Scale widen_;
  std::int64_t staging_bytes_ = 0;
  std::size_t window_ = 0;
  Step step_ = Step::kExchange;
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
    case core::OpKind::kAllReduce: {
      const std::optional<core::DType> wire = WireType(*task);
      if (wire && task->channel.lane == fusion::Lane::kLarge) {
        return std::make_unique<HalfReduceRun>(task, *wire, backend, staging, cutting, stop);
      }
      return std::make_unique<AllReduceRun>(task, backend, staging, cutting, stop);
    }
    case core::OpKind::kBroadcast:
      return std::make_unique<BroadcastRun>(task, backend, staging, cutting, stop);
    case core::OpKind::kAllGather:
      return std::make_unique<AllGatherRun>(task, backend, staging, stop);
    default:
      break;
  }
  return nullptr;
}

}  // namespace sirtaki::ops
