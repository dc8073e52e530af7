// Whether the gradient of a parameter is sparse: what a rank that has none cannot know.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "frameworks/torch/calls/pending.h"
#include "frameworks/torch/session/session_set.h"

namespace sirtaki::detail {

// kRoundInStep stands in the place of a number for what step() submits itself because no backward()
// has.
constexpr std::uint32_t kRoundInStep = 1U << 20;
// kRoundAfterThrow stands in the place of a number for the average after a backward() that has thrown
// without the other ranks' knowing.
constexpr std::uint32_t kRoundAfterThrow = 1U << 21;

// A form says what one rank has, after a reduction in which the ranks did not fit.
struct GradientForm {
  bool present = false;
  std::int64_t sparse_dims = 0;  // of the gradient; 0: it is dense
  bool reduced_as_sparse = false;
  std::uint32_t round = 0;  // which average of its step it was; 0: nobody counts
};

// Asks what the other ranks have. Collective, with DecideForm for what it gives.
std::shared_ptr<Pending> AskForForms(const std::string& key, const GradientForm& mine,
                                     const SessionSet& set);
// Returns by how many sparse dimensions the ranks that have the gradient want it reduced; 0: as a
// dense one. Nothing if all of them had reduced it in the same way: something else is wrong. Throws
// Mismatch on every rank if it is sparse on some and dense on others, or if they were not at the
// same average of their step, or, `of_module`, after a forward().
std::optional<std::int64_t> DecideForm(const std::string& name, const std::string& key,
                                       const at::Tensor& forms, bool of_module);

}  // namespace sirtaki::detail
