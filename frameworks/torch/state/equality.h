// Whether all ranks hold the same tensors, bit by bit.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "frameworks/torch/session/session_set.h"

namespace sirtaki::detail {

// Throws on every rank of the set if the ranks' tensors differ; see check_parameters. `what`, the
// name of the check, is the same on every rank and not in flight; names and tensors have the same
// length. Collective.
void CheckEqual(const std::string& what, const std::vector<std::string>& names,
                const std::vector<at::Tensor>& tensors, const SessionSet& set);

}  // namespace sirtaki::detail
