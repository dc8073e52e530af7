// Broadcast and the two all-gathers, whose results are the same on all members.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ops/groups/exchange_slices.h"
#include "ops/groups/row_exchange.h"
#include "ops/groups/run_makers.h"

namespace sirtaki::ops {
namespace {

using core::StatusCode;

std::vector<fusion::Piece> PiecesOf(const GroupTask& task) {
  std::vector<fusion::Piece> pieces;
  pieces.reserve(task.items.size());
  for (const GroupItem& item : task.items) {
    fusion::Piece piece{.count = item.signature->ElementCount()};
    if (item.work != nullptr) {
      piece.input = item.work->input;
      piece.output = item.work->output;
    }
    pieces.push_back(piece);
  }
  return pieces;
}

class BroadcastRun : public GroupRun {
 public:
  explicit BroadcastRun(const RunContext& context)
      : GroupRun(context),
        vector_(task()->signature().dtype, task()->signature().dtype, PiecesOf(*task()),
                context.cutting) {
    for (const GroupItem& item : task()->items) {
      in_place_ &= item.work == nullptr || item.work->input == item.work->output;
    }
  }

 private:
  bool Next() override {
    void* const staging = staging_.Reserve(vector_.staging_bytes());
    // The root's own tensors are written only where the result goes elsewhere.
    if (next_ > 0 && !(is_root() && in_place_)) {
      trace_.Unpack();
      vector_.Store(vector_.windows()[next_ - 1], staging);
    }
    if (next_ == vector_.windows().size()) return false;
    const fusion::Window& window = vector_.windows()[next_++];
    if (is_root()) trace_.Pack();
    void* const memory =
        is_root() ? vector_.Load(window, staging) : vector_.Memory(window, staging);
    Begin([&] {
      return backend_.Broadcast(channel(), memory, window.count * BytesOf(vector_.moved()),
                                static_cast<int>(root()));
    });
    return true;
  }

  const fusion::FusedVector vector_;
  bool in_place_ = true;
  std::size_t next_ = 0;  // window
};

// First one exchange of everybody's rows of all tensors, then each tensor straight into its output.
// Nobody has joined.
class AllGatherRun : public GroupRun {
 public:
  explicit AllGatherRun(const RunContext& context) : GroupRun(context) {}

 private:
  bool Next() override {
    if (all_rows_.empty()) return ExchangeRows();
    while (next_ < task()->items.size()) {
      bool started = false;
      if (!Gather(next_++, &started)) return false;
      if (started) return true;
    }
    return false;
  }

  bool ExchangeRows() {
    const std::size_t tensors = task()->items.size();
    for (const GroupItem& item : task()->items) own_rows_.push_back(item.work->rows);
    all_rows_.resize(tensors * static_cast<std::size_t>(members()));
    Begin([&] {
      return backend_.AllGather(channel(), own_rows_.data(), all_rows_.data(),
                                static_cast<std::int64_t>(tensors * sizeof(std::int64_t)));
    });
    return true;
  }

  // False after a failure. Nothing is started where nobody has a byte, which all see alike.
  bool Gather(std::size_t index, bool* started) {
    const GroupItem& item = task()->items[index];
    const std::int64_t row_bytes = item.signature->Bytes();
    std::vector<std::int64_t> rows(static_cast<std::size_t>(members()));
    for (std::size_t m = 0; m < rows.size(); ++m) {
      rows[m] = all_rows_[m * task()->items.size() + index];
    }
    std::int64_t total = 0;
    if (!TotalBytes(rows, row_bytes, &total))
      return Fail(StatusCode::kBackend, WrongRows(task()->KeyOf(item), rows));
    void* const output = item.work->allocate_output(rows);
    if (total == 0) return true;
    if (output == nullptr) return Fail(StatusCode::kBackend, NoMemoryFor(task()->KeyOf(item)));
    *started = true;
    bytes_.clear();
    for (const std::int64_t r : rows) bytes_.push_back(r * row_bytes);
    BeginRootless(
        [&] { return rootless_.AllGatherV(channel(), item.work->input, output, bytes_); });
    return true;
  }

  std::vector<std::int64_t> own_rows_;  // by tensor
  std::vector<std::int64_t> all_rows_;  // by member, then tensor
  std::vector<std::int64_t> bytes_;     // of the tensor that moves, by member
  std::size_t next_ = 0;                // tensor
};

// Small tensors pass through staging together, large ones go straight into their outputs. A member
// that has joined gives zeros; while there is one, everything is staged, so that it needs no memory
// for what it is not interested in.
class AllGatherIntoRun : public GroupRun {
 public:
  explicit AllGatherIntoRun(const RunContext& context)
      : GroupRun(context), vector_(StagedPart(context.cutting)) {}

 private:
  // The outputs hold a tensor of each member.
  fusion::FusedVector StagedPart(const fusion::Cutting& cutting) {
    const core::DType dtype = task()->signature().dtype;
    const bool may_be_direct = static_cast<std::int64_t>(active().size()) == members();
    std::vector<fusion::Piece> staged;
    for (const fusion::Piece& piece : PiecesOf(*task())) {
      const bool direct = may_be_direct && piece.count > 0 &&
                          piece.count >= cutting.direct_bytes / members() / BytesOf(dtype);
      (direct ? direct_ : staged).push_back(piece);
    }
    // All members' parts are staged at once. A group of the small lane is one operation, however
    // much that is: the plan sends it little.
    const bool small = channel().lane == fusion::Lane::kSmall;
    const std::int64_t chunk =
        small ? cutting.chunk_bytes
              : WindowBytes(std::min(cutting.chunk_bytes, kMostStaged), members());
    return {dtype, dtype, std::move(staged), {.chunk_bytes = chunk}};
  }

  bool Next() override {
    auto* const own =
        static_cast<std::byte*>(staging_.Reserve((members() + 1) * vector_.staging_bytes()));
    std::byte* const all = own + vector_.staging_bytes();
    if (next_ > 0 && next_ <= vector_.windows().size()) {
      const fusion::Window& window = vector_.windows()[next_ - 1];
      trace_.Unpack();
      for (std::int64_t m = 0; m < members(); ++m) {
        vector_.StoreFrom(window, all + m * window.count * BytesOf(vector_.moved()), {}, m);
      }
    }
    const std::size_t next = next_++;
    if (next < vector_.windows().size()) {
      const fusion::Window& window = vector_.windows()[next];
      trace_.Pack();
      vector_.LoadInto(window, own);
      BeginRootless([&] {
        return rootless_.AllGather(channel(), own, all, window.count * BytesOf(vector_.moved()));
      });
      return true;
    }
    const std::size_t direct = next - vector_.windows().size();
    if (direct >= direct_.size()) return false;
    const fusion::Piece& piece = direct_[direct];
    BeginRootless([&] {
      return rootless_.AllGather(channel(), piece.input, piece.output,
                                 piece.count * BytesOf(vector_.moved()));
    });
    return true;
  }

  static constexpr std::int64_t kMostStaged = std::int64_t{1} << 20;

  std::vector<fusion::Piece> direct_;  // filled in by StagedPart
  const fusion::FusedVector vector_;
  std::size_t next_ = 0;  // window, then direct tensor
};

}  // namespace

std::unique_ptr<GroupRun> MakeBroadcastRun(const RunContext& context) {
  return std::make_unique<BroadcastRun>(context);
}

std::unique_ptr<GroupRun> MakeAllGatherRun(const RunContext& context) {
  // A rank that has joined has nowhere to put what the others have, so it is not sent there.
  if (!context.task->silent.empty()) return MakeExchangeRun(context);
  return std::make_unique<AllGatherRun>(context);
}

std::unique_ptr<GroupRun> MakeAllGatherIntoRun(const RunContext& context) {
  return std::make_unique<AllGatherIntoRun>(context);
}

}  // namespace sirtaki::ops
