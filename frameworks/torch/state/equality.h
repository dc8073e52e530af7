// Whether all ranks hold the same tensors, bit by bit.
#pragma once

#include <string>

#include "frameworks/torch/session/session_set.h"
#include "sirtaki/optimizer.h"

namespace sirtaki::detail {

// Throws on every rank of the set if the ranks' tensors differ; see check_parameters. `what`, the
// name of the check, is the same on every rank and not in flight. Collective.
void CheckEqual(const std::string& what, const NamedTensors& tensors, const SessionSet& set);

}  // namespace sirtaki::detail
