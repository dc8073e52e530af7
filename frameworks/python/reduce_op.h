// The numbers by which Python names operations and compressions.
#pragma once

#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "sirtaki/compression.h"
#include "sirtaki/reductions.h"

namespace sirtaki::python {

// Those of Horovod as far as it has them; sirtaki.torch.mpi_ops.ReduceOp says the same.
inline ReduceOp OpOf(int number) {
  constexpr std::array kOps = {ReduceOp::Average, ReduceOp::Sum,   ReduceOp::Adasum,
                               ReduceOp::Min,     ReduceOp::Max,   ReduceOp::Product,
                               ReduceOp::BitAnd,  ReduceOp::BitOr, ReduceOp::BitXor};
  if (number < 0 || static_cast<std::size_t>(number) >= kOps.size()) {
    throw std::invalid_argument("op is " + std::to_string(number) +
                                "; allowed are Average, Sum, Adasum, Min, Max, Product, BitAnd, "
                                "BitOr and BitXor of sirtaki.torch");
  }
  return kOps[static_cast<std::size_t>(number)];
}

inline Compression CompressionOf(int number) {
  switch (number) {
    case 0:
      return Compression::None;
    case 1:
      return Compression::F16;
    case 2:
      return Compression::BF16;
    default:
      throw std::invalid_argument("unknown compression " + std::to_string(number));
  }
}

inline CompressionScope ScopeOf(bool everywhere) {
  return everywhere ? CompressionScope::Everywhere : CompressionScope::BetweenHosts;
}

}  // namespace sirtaki::python
