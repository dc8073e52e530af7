// All-reduce and reduce to a root. The latter differs in where the result goes only.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "ops/base/bytes.h"
#include "ops/base/kernels.h"
#include "ops/groups/exchange_slices.h"
#include "ops/groups/reduction_terms.h"
#include "ops/groups/run_makers.h"

namespace sirtaki::ops {
namespace {

using core::DType;
using core::OpKind;
using core::ReduceOp;

fusion::FusedVector FuseReduced(const GroupTask& task, DType moved,
                                const fusion::Cutting& cutting) {
  return {ElementsOf(task.signature()).dtype, moved, ReducedPieces(task), cutting,
          IdentityOf(task.signature().reduction, moved)};
}

// Where the factors are applied. Tensors that are compressed on the way are multiplied by prescale
// before they are rounded, so that it can bring them into the range of the wire type, and by
// postscale after they are widened again: in their own precision, both. The average is divided
// before it is rounded. Nothing is rounded but what travels.
struct Factors {
  fusion::Scale load;
  fusion::Scale result;  // of what was combined, before it is rounded
  fusion::Scale store;
};

Factors FactorsOf(const GroupTask& task, bool compressed) {
  const core::Signature& signature = task.signature();
  Factors factors;
  if (signature.reduction == ReduceOp::kAverage) factors.result.divisor = task.members->Count();
  factors.load.factor = signature.prescale;
  (compressed ? factors.store : factors.result).factor = signature.postscale;
  return factors;
}

// Each window is reduced by the backend, in a type that has the reduction. What is compressed is
// rounded as if it had travelled so, but travels as float32: the small lane's tensors, where one
// short operation is worth more than half the bytes.
class WindowReduceRun : public GroupRun {
 public:
  explicit WindowReduceRun(const RunContext& context)
      : GroupRun(context),
        op_(Combining(task()->signature().reduction)),
        compressed_(WireType(*task()) ? task()->signature().wire : std::nullopt),
        vector_(FuseReduced(*task(),
                            compressed_
                                ? DType::kF32
                                : fusion::AccumulationType(ElementsOf(task()->signature()).dtype,
                                                           task()->signature().reduction),
                            WindowsOf(context))),
        factors_(FactorsOf(*task(), compressed_.has_value())),
        to_root_(task()->signature().kind == OpKind::kReduce) {
    const bool own_type = vector_.moved() == ElementsOf(task()->signature()).dtype;
    if (!to_root_ && !compressed_ && own_type && !factors_.result.identity() &&
        backend_.ScalesReduced(channel())) {
      std::swap(by_backend_, factors_.result);
    }
  }

 private:
  bool Next() override {
    void* const staging = staging_.Reserve(vector_.staging_bytes());
    if (next_ > 0) Store(vector_.windows()[next_ - 1], staging);
    if (next_ == vector_.windows().size()) return false;
    const fusion::Window& window = vector_.windows()[next_++];
    trace_.Pack();
    void* const memory = vector_.Load(window, staging, factors_.load);
    if (compressed_) {
      fusion::RoundThrough(*compressed_, static_cast<float*>(memory), window.count, {});
    }
    if (to_root_) {
      Begin([&] {
        return backend_.Reduce(channel(), memory, window.count, vector_.moved(), op_,
                               static_cast<int>(root()));
      });
    } else {
      BeginRootless([&] {
        Rootless& reducer = by_backend_.identity() ? rootless_ : backend_;
        return reducer.AllReduce(channel(), memory, window.count, vector_.moved(), op_,
                                 by_backend_);
      });
    }
    return true;
  }

  fusion::Cutting WindowsOf(const RunContext& context) {
    fusion::Cutting cutting = context.cutting;
    if (channel().lane == fusion::Lane::kLarge) {
      cutting.chunk_bytes = backend_.WindowBytes(channel(), cutting.chunk_bytes);
    }
    return cutting;
  }

  void Store(const fusion::Window& window, void* staging) {
    if (to_root_ && !is_root()) return;
    trace_.Unpack();
    if (!compressed_) return vector_.Store(window, staging, factors_.result);
    fusion::RoundThrough(*compressed_, static_cast<float*>(vector_.Memory(window, staging)),
                         window.count, factors_.result);
    vector_.Store(window, staging, factors_.store);
  }

  const ReduceOp op_;
  const std::optional<DType> compressed_;
  const fusion::FusedVector vector_;
  Factors factors_;
  fusion::Scale by_backend_;  // the scale of the result, where the backend applies it
  const bool to_root_;
  std::size_t next_ = 0;  // window
};

// Elements travel as 16 bits, twice: each member gets everybody's part of its own chunk of the
// window, reduces it in float32 in the order of the members, rounds the result once, and gives it
// to all, or to the root. Everyone takes what was gathered, so all have the same bits.
//
// Half tensors are not rounded before they travel: their prescale waits until they are widened.
class HalfReduceRun : public GroupRun {
 public:
  HalfReduceRun(const RunContext& context, DType wire)
      : GroupRun(context),
        op_(task()->signature().reduction),
        vector_(FuseReduced(*task(), wire, {.chunk_bytes = context.cutting.chunk_bytes})),
        factors_(FactorsOf(*task(), task()->signature().wire.has_value())),
        to_root_(task()->signature().kind == OpKind::kReduce) {
    if (!task()->signature().wire) std::swap(factors_.load, widen_);
    for (const fusion::Window& window : vector_.windows()) {
      staging_bytes_ = std::max(staging_bytes_, 2 * members() * ChunkBytes(window));
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
      if (!to_root_ || is_root()) {
        trace_.Unpack();
        vector_.Store(*window, whole, factors_.store);
      }
      if (++window_ == vector_.windows().size()) return false;
      window = &vector_.windows()[window_];
      step_ = Step::kExchange;
    }
    const std::int64_t chunk = ChunkBytes(*window);
    std::byte* const parts = whole + members() * chunk;
    if (step_ == Step::kExchange) {
      trace_.Pack();
      vector_.Load(*window, whole, factors_.load);
      const std::int64_t filling = members() * chunk / kElementBytes - window->count;
      FillIdentity(op_, vector_.moved(), whole + window->count * kElementBytes, filling);
      slices_.GiveParts(whole, parts, chunk, self(), members());
      Begin([&] { return slices_.Exchange(backend_, channel()); });
      step_ = Step::kGather;
    } else {
      trace_.Reduce();
      ReduceParts(op_, vector_.moved(), parts, members(), chunk / kElementBytes, widen_,
                  factors_.result);
      if (to_root_) {
        BeginGatherToRoot(parts, whole, chunk);
      } else {
        Begin([&] { return backend_.AllGather(channel(), parts, whole, chunk); });
      }
      step_ = Step::kStore;
    }
    return true;
  }

  void BeginGatherToRoot(const std::byte* reduced, std::byte* whole, std::int64_t chunk) {
    slices_.Clear();
    if (!is_root()) slices_.Send(root(), reduced, chunk);
    for (std::int64_t m = 0; is_root() && m < members(); ++m) {
      if (m == self()) {
        Copy(whole + m * chunk, reduced, chunk);
      } else {
        slices_.Receive(m, whole + m * chunk, chunk);
      }
    }
    Begin([&] { return slices_.Exchange(backend_, channel()); });
  }

  std::int64_t ChunkBytes(const fusion::Window& window) const {
    return ((window.count - 1) / members() + 1) * kElementBytes;
  }

  static constexpr std::int64_t kElementBytes = 2;

  const ReduceOp op_;
  const fusion::FusedVector vector_;
  Factors factors_;
  const bool to_root_;
  fusion::Scale widen_;
  Slices slices_;
  std::int64_t staging_bytes_ = 0;
  std::size_t window_ = 0;
  Step step_ = Step::kExchange;
};

// The backend reduces the tensors where they lie, scales and rounds them on the way.
class SegmentsReduceRun : public GroupRun {
 public:
  SegmentsReduceRun(const RunContext& context, const SegmentReduction& how)
      : GroupRun(context), how_(how) {}

 private:
  bool Next() override {
    if (begun_) return false;
    begun_ = true;
    BeginRootless(
        [&] { return rootless_.AllReduceSegments(channel(), ReducedPieces(*task()), how_); });
    return true;
  }

  const SegmentReduction how_;
  bool begun_ = false;
};

SegmentReduction ReductionOf(const GroupTask& task) {
  const Factors factors = FactorsOf(task, /*compressed=*/false);
  return {.dtype = ElementsOf(task.signature()).dtype,
          .op = task.signature().reduction,
          .before = factors.load,
          .after = factors.result};
}

}  // namespace

std::unique_ptr<GroupRun> MakeReduceRun(const RunContext& context) {
  const GroupTask& task = *context.task;
  // What is rounded on its way has the bits of the whole.
  if (OnlyPartsAreKept(task) && !WireType(task) &&
      task.route.rootless->ReducesParts(task.channel)) {
    return MakeReduceScatterRun(context);
  }
  const SegmentReduction how = ReductionOf(task);
  if (!task.signature().wire && task.route.rootless->ReducesSegments(how)) {
    return std::make_unique<SegmentsReduceRun>(context, how);
  }
  const std::optional<DType> wire = WireType(task);
  // A tensor that is scaled when it is loaded would be rounded there as well.
  if (wire && task.channel.lane == fusion::Lane::kLarge && !ScalesBeforeFilling(task.signature())) {
    return std::make_unique<HalfReduceRun>(context, *wire);
  }
  return std::make_unique<WindowReduceRun>(context);
}

}  // namespace sirtaki::ops
