#include "frameworks/torch/tensors/compression.h"

namespace sirtaki::detail {

std::optional<core::DType> WireType(Compression compression, CompressionScope scope,
                                    const core::Topology& topology, at::ScalarType type) {
  if (type != at::kFloat && type != at::kDouble) return std::nullopt;
  // Some rank is elsewhere for all ranks or for none.
  const bool one_host = topology.local_size == topology.size;
  if (scope == CompressionScope::BetweenHosts && one_host) return std::nullopt;
  switch (compression) {
    case Compression::None:
      return std::nullopt;
    case Compression::F16:
      return core::DType::kF16;
    case Compression::BF16:
      return core::DType::kBF16;
  }
  return std::nullopt;
}

}  // namespace sirtaki::detail
