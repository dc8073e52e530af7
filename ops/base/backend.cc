#include "ops/base/backend.h"

#include "ops/base/finished.h"

namespace sirtaki::ops {

std::unique_ptr<Completion> Rootless::AllReduceSegments(Channel /*channel*/,
                                                        std::span<const Segment> /*segments*/,
                                                        const SegmentReduction& /*how*/) {
  return Finished::With({core::StatusCode::kUnsupported,
                         std::string(name()) + " does not reduce tensors where they lie"});
}

std::unique_ptr<Completion> Rootless::ReduceScatter(Channel /*channel*/, void* /*buffer*/,
                                                    std::span<const std::int64_t> /*counts*/,
                                                    core::DType /*dtype*/, core::ReduceOp /*op*/) {
  return Finished::With({core::StatusCode::kUnsupported,
                         std::string(name()) + " does not reduce parts on their way"});
}

}  // namespace sirtaki::ops
