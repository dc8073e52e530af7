// What the compression that a caller chose means for one tensor of this job.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "core/base/topology.h"
#include "core/base/types.h"
#include "sirtaki/compression.h"

namespace sirtaki::detail {

// The type in which an all-reduce of tensors of `type` travels; nothing: as they are. Follows from
// the arguments and from what all ranks know of the job alike, so that all ranks decide alike.
std::optional<core::DType> WireType(Compression compression, CompressionScope scope,
                                    const core::Topology& topology, at::ScalarType type);

}  // namespace sirtaki::detail
