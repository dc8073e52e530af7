#include "ops/between_hosts/pair_reduction.h"

#include "ops/base/bytes.h"
#include "ops/base/kernels.h"

namespace sirtaki::ops {

PairReduction::PairReduction(Backend& medium, core::SetNumber set, int self, std::byte* memory,
                             std::byte* scratch, std::int64_t count, core::DType dtype,
                             core::ReduceOp op)
    : self_(self), memory_(memory), scratch_(scratch), count_(count), dtype_(dtype), op_(op) {
  const std::int64_t bytes = count * BytesOf(dtype);
  const OutgoingSlice out{1 - self, memory, bytes};
  const IncomingSlice in{1 - self, scratch, bytes};
  exchange_ = medium.Exchange({set, fusion::Lane::kSmall}, {&out, 1}, {&in, 1});
}

bool PairReduction::Poll() {
  if (finished_) return true;
  if (!exchange_->Poll()) return false;
  finished_ = true;
  if (exchange_->status().ok()) Combine();
  return true;
}

// In the order of the members on both, since the bits of a NaN may depend on it.
void PairReduction::Combine() {
  if (self_ == 0) {
    ReduceInto(op_, dtype_, memory_, scratch_, count_);
    return;
  }
  ReduceInto(op_, dtype_, scratch_, memory_, count_);
  Copy(memory_, scratch_, count_ * BytesOf(dtype_));
}

}  // namespace sirtaki::ops
