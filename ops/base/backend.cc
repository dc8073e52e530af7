#include "ops/base/backend.h"

#include "ops/base/finished.h"

namespace sirtaki::ops {

std::unique_ptr<Completion> Backend::AllReduceSegments(Channel /*channel*/,
                                                       std::span<const Segment> /*segments*/,
                                                       const SegmentReduction& /*how*/) {
  return Finished::With({core::StatusCode::kUnsupported,
                         std::string(name()) + " does not reduce tensors where they lie"});
}

}  // namespace sirtaki::ops
