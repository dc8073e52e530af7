// Reduce-scatter: every member gets its rows from all others and reduces them, in the order of the
// members; or the backend reduces them on their way, in an order of its own. An all-reduce of which
// each member keeps a part only is one as well.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "ops/base/bytes.h"
#include "ops/base/kernels.h"
#include "ops/groups/exchange_slices.h"
#include "ops/groups/reduction_terms.h"
#include "ops/groups/run_makers.h"

namespace sirtaki::ops {
namespace {

using core::DType;
using core::ReduceOp;

// The shares of all members are windowed alike: in each round every member gets the next window of
// its own share. Small tensors are packed, large ones are sent from where they lie. Who has joined
// gives nothing and gets nothing.
class ReduceScatterRun : public GroupRun {
 public:
  explicit ReduceScatterRun(const RunContext& context)
      : GroupRun(context), op_(task()->signature().reduction) {
    const core::Signature& signature = task()->signature();
    const DType element = ElementsOf(signature).dtype;
    moved_ = element;
    // Half types would cross twice as wide.
    by_backend_ = members() > 1 && static_cast<std::int64_t>(active().size()) == members() &&
                  !core::IsHalf(element) &&
                  HasReduction(Combining(op_), fusion::AccumulationType(element, op_)) &&
                  rootless_.ReducesParts(channel());
    if (by_backend_ || ScalesBeforeFilling(signature)) {
      moved_ = fusion::AccumulationType(element, op_);
      load_.factor = signature.prescale;
    } else {
      before_.factor = signature.prescale;
    }
    after_.factor = signature.postscale;
    if (op_ == ReduceOp::kAverage) after_.divisor = members();

    fusion::Cutting cutting = context.cutting;
    const auto takers = std::max<std::int64_t>(1, static_cast<std::int64_t>(active().size()));
    // The backend moves several chunks at once, and needs as many.
    cutting.chunk_bytes =
        WindowBytes((by_backend_ ? kChunksAtOnce : 1) * cutting.chunk_bytes, takers);
    // A factor that is applied on loading leaves nothing that could be sent as it lies.
    cutting.direct_bytes =
        load_.identity() ? cutting.direct_bytes / takers : std::numeric_limits<std::int64_t>::max();
    shares_.reserve(active().size());
    for (const std::int64_t m : active()) {
      if (m == self()) own_ = shares_.size();
      shares_.push_back(FuseShare(m, cutting));
      window_bytes_ = std::max(window_bytes_, shares_.back().staging_bytes());
      rounds_ = std::max(rounds_, shares_.back().windows().size());
    }
  }

 private:
  fusion::FusedVector FuseShare(std::int64_t member, const fusion::Cutting& cutting) const {
    const DType element = ElementsOf(task()->signature()).dtype;
    std::vector<fusion::Piece> pieces;
    pieces.reserve(task()->items.size());
    for (const GroupItem& item : task()->items) {
      const Part share = ops::ShareOf(item, members(), member);
      fusion::Piece piece{.count = share.count};
      if (const void* input = ReducedInput(item); input != nullptr) {
        piece.input = static_cast<const std::byte*>(input) + share.begin * BytesOf(element);
      }
      if (member == self() && item.work != nullptr) {
        piece.output = AllKeepParts(item) ? item.work->kept->memory : item.work->output;
      }
      pieces.push_back(piece);
    }
    return {element, moved_, std::move(pieces), cutting, IdentityOf(op_, moved_)};
  }

  bool Next() override {
    // The members' parts of this one's window come in order; behind them what is packed for others.
    auto* const parts = static_cast<std::byte*>(staging_.Reserve(
        (by_backend_ ? 1 : 2) * static_cast<std::int64_t>(shares_.size()) * window_bytes_));
    if (by_backend_) return NextByBackend(parts);
    if (round_ > 0) Reduce(parts);
    if (round_ == rounds_) return End();
    trace_.Pack();
    slices_.Clear();
    if (!task()->joined()) {
      for (std::size_t i = 0; i < shares_.size(); ++i) {
        if (i != own_) Give(i, parts);
      }
      TakeOwn(parts);
    }
    ++round_;
    // The others' windows are of no concern to a member of a set of one.
    if (members() > 1) Begin([&] { return slices_.Exchange(backend_, channel()); });
    return true;
  }

  // The windows of all members follow each other.
  bool NextByBackend(std::byte* parts) {
    const std::int64_t size = BytesOf(moved_);
    if (round_ > 0 && round_ <= shares_[own_].windows().size()) {
      std::byte* own = parts;
      for (std::size_t i = 0; i < own_; ++i) own += counts_[i] * size;
      trace_.Unpack();
      shares_[own_].StoreFrom(shares_[own_].windows()[round_ - 1], own, after_);
    }
    if (round_ == rounds_) return End();
    trace_.Pack();
    counts_.clear();
    std::byte* next = parts;
    for (const fusion::FusedVector& share : shares_) {
      const bool has_window = round_ < share.windows().size();
      counts_.push_back(has_window ? share.windows()[round_].count : 0);
      if (has_window) share.LoadInto(share.windows()[round_], next, load_);
      next += counts_.back() * size;
    }
    ++round_;
    BeginRootless(
        [&] { return rootless_.ReduceScatter(channel(), parts, counts_, moved_, Combining(op_)); });
    return true;
  }

  bool End() {
    for (const GroupItem& item : task()->items) {
      if (AllKeepParts(item)) item.work->kept->is_there = true;
    }
    return false;
  }

  void Give(std::size_t taker, std::byte* parts) {
    const fusion::FusedVector& share = shares_[taker];
    if (round_ >= share.windows().size()) return;
    const fusion::Window& window = share.windows()[round_];
    const void* memory = share.Source(window);
    if (memory == nullptr) {
      std::byte* const packed =
          parts + static_cast<std::int64_t>(shares_.size() + taker) * window_bytes_;
      share.LoadInto(window, packed, load_);
      memory = packed;
    }
    slices_.Send(active()[taker], memory, window.count * BytesOf(moved_));
  }

  void TakeOwn(std::byte* parts) {
    const fusion::FusedVector& share = shares_[own_];
    if (round_ >= share.windows().size()) return;
    const fusion::Window& window = share.windows()[round_];
    const std::int64_t bytes = window.count * BytesOf(moved_);
    for (std::size_t i = 0; i < shares_.size(); ++i) {
      std::byte* const part = parts + static_cast<std::int64_t>(i) * bytes;
      if (i == own_) {
        share.LoadInto(window, part, load_);
      } else {
        slices_.Receive(active()[i], part, bytes);
      }
    }
  }

  // Reduces what the last round has brought.
  void Reduce(std::byte* parts) {
    if (task()->joined()) return;
    const fusion::FusedVector& share = shares_[own_];
    if (round_ > share.windows().size()) return;
    const fusion::Window& window = share.windows()[round_ - 1];
    trace_.Reduce();
    ReduceParts(op_, moved_, parts, static_cast<std::int64_t>(shares_.size()), window.count,
                before_, after_);
    trace_.Unpack();
    share.StoreFrom(window, parts);
  }

  static constexpr std::int64_t kChunksAtOnce = 8;

  const ReduceOp op_;
  bool by_backend_ = false;
  std::vector<std::int64_t> counts_;  // of the round, by member
  DType moved_ = DType::kF32;
  fusion::Scale load_;
  fusion::Scale before_;
  fusion::Scale after_;
  std::vector<fusion::FusedVector> shares_;  // by position among the active members
  std::size_t own_ = 0;                      // this rank's position
  std::int64_t window_bytes_ = 0;            // of the largest window of any share
  std::size_t rounds_ = 0;
  std::size_t round_ = 0;
  Slices slices_;
};

}  // namespace

std::unique_ptr<GroupRun> MakeReduceScatterRun(const RunContext& context) {
  return std::make_unique<ReduceScatterRun>(context);
}

}  // namespace sirtaki::ops
