// Whether the gradient of a parameter is sparse: what a rank that has none cannot know.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "frameworks/torch/session/session_set.h"

namespace sirtaki::detail {

// What one rank has, after a reduction in which the ranks did not fit.
struct GradientForm {
  bool present = false;
  std::int64_t sparse_dims = 0;  // of the gradient; 0: it is dense
  bool reduced_as_sparse = false;
};

// By how many sparse dimensions the ranks that have the gradient want it reduced; 0: as a dense
// one. Nothing if all of them had reduced it in the same way: something else is wrong. Throws
// mismatch on every rank if it is sparse on some and dense on others. Collective.
std::optional<std::int64_t> AgreeOnForm(const std::string& name, const std::string& key,
                                        const GradientForm& mine, const SessionSet& set);

}  // namespace sirtaki::detail
