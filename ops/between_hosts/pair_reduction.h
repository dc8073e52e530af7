// An all-reduce of two members: each sends all that it has and combines what comes. That is as many
// bytes as any other way takes, in one step, and several may be under way at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/base/status.h"
#include "ops/base/backend.h"

namespace sirtaki::ops {

// Not thread-safe. Both members have the same bits afterwards.
class PairReduction final : public Completion {
 public:
  // Of `count` elements in `memory`, with `scratch` of the same size for what comes. On the small
  // lane of a set of two, whose member `self` is this one: polled, and nobody else's there. Both
  // memories must outlive it, and the medium's use of them if it is destroyed unfinished or has
  // failed. Precondition: HasReduction(op, dtype).
  PairReduction(Backend& medium, core::SetNumber set, int self, std::byte* memory,
                std::byte* scratch, std::int64_t count, core::DType dtype, core::ReduceOp op);

  bool Poll() override;
  core::Status status() const override { return exchange_->status(); }

 private:
  void Combine();

  const int self_;
  std::byte* const memory_;
  std::byte* const scratch_;
  const std::int64_t count_;
  const core::DType dtype_;
  const core::ReduceOp op_;
  std::unique_ptr<Completion> exchange_;
  bool finished_ = false;
};

}  // namespace sirtaki::ops
