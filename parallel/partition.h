// Layers are divided among the stages of a pipeline. Pure.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/base/status.h"

namespace sirtaki::parallel {

// What is to be the same in all stages as nearly as it can.
enum class PartitionKind : std::uint8_t {
  kUniform,     // the number of layers
  kParameters,  // the number of parameters
  kTime,        // the time of a micro-batch, measured
};
inline constexpr std::string_view kPartitionNames[] = {"uniform", "parameters", "time"};

// Fails with kInvalidArgument and a text that names what is allowed.
core::Status ParsePartitionKind(std::string_view text, PartitionKind* kind);

// Cuts layers of these weights, in their order, into stages of at least one layer, such that the
// heaviest stage is as light as it can be: `begins` has the first layer of each stage, and the
// number of layers at its end. Weights that are all the same are a uniform partition. Fails with
// kInvalidArgument if there are fewer layers than stages, or a weight is negative or no number.
core::Status CutLayers(const std::vector<double>& weights, int stages, std::vector<int>* begins);

}  // namespace sirtaki::parallel
