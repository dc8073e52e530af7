// What programs on GPUs share that call CUDA and NCCL by our tables.
#pragma once

#include <stdexcept>

#include "core/base/status.h"

namespace sirtaki::benchmarks {

inline constexpr int kSkipped = 77;  // the exit code where there is no GPU

inline void Require(const core::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

}  // namespace sirtaki::benchmarks
