// The all-reduce of a sparse tensor: a grouped all-gather of what each rank has, added up at the
// end.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "frameworks/torch/calls/pending.h"
#include "frameworks/torch/session/session_state.h"
#include "sirtaki/reductions.h"

namespace sirtaki::detail {

// Submits; throws Error if the call is refused here. `round`: as TensorCall's.
std::shared_ptr<Pending> StartSparse(const at::Tensor& tensor, const AllreduceOptions& options,
                                     bool will_wait, const std::shared_ptr<SessionState>& session,
                                     std::uint32_t round = 0);

}  // namespace sirtaki::detail
