// Members give each other parts of different sizes in a gather, a scatter, an all-to-all, and an
// all-gather while some have joined. The rows of all tensors are told first, in one operation, then
// all tensors move in another one.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ops/base/bytes.h"
#include "ops/groups/row_exchange.h"
#include "ops/groups/run_makers.h"

namespace sirtaki::ops {
namespace {

using core::OpKind;

class ExchangeRun : public GroupRun {
 public:
  explicit ExchangeRun(const RunContext& context) : GroupRun(context) {}

 private:
  enum class Step : std::uint8_t { kTell, kMove, kOver };

  bool Next() override {
    if (step_ == Step::kOver) return false;
    if (step_ == Step::kTell) {
      step_ = Step::kMove;
      rows_.emplace(*task());
      TellRows();
      return true;
    }
    step_ = Step::kOver;
    trace_.Pack();
    slices_.Clear();
    const core::Status status = rows_->Place(
        [](const void* from, void* to, std::int64_t bytes) { Copy(to, from, bytes); }, &slices_);
    if (!status.ok()) return Fail(status.code(), status.message());
    if (members() > 1) Begin([&] { return slices_.Exchange(backend_, channel()); });
    return true;
  }

  void TellRows() {
    const std::vector<std::int64_t>& own = rows_->own();
    std::int64_t* const told = rows_->told().data();
    const auto bytes = static_cast<std::int64_t>(own.size() * sizeof(std::int64_t));
    if (rows_->kind() == OpKind::kScatter) {
      std::copy(own.begin(), own.end(), told);
      Begin([&] { return backend_.Broadcast(channel(), told, bytes, static_cast<int>(root())); });
    } else if (rows_->kind() == OpKind::kAllToAll) {
      slices_.GiveParts(own.data(), told, bytes / members(), self(), members());
      Begin([&] { return slices_.Exchange(backend_, channel()); });
    } else {
      Begin([&] { return backend_.AllGather(channel(), own.data(), told, bytes); });
    }
  }

  std::optional<RowExchange> rows_;
  Slices slices_;
  Step step_ = Step::kTell;
};

}  // namespace

std::unique_ptr<GroupRun> MakeExchangeRun(const RunContext& context) {
  return std::make_unique<ExchangeRun>(context);
}

}  // namespace sirtaki::ops
