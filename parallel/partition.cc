#include "parallel/partition.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <tuple>

#include "parallel/choice.h"

namespace sirtaki::parallel {
namespace {

// How good a cut is: first the heaviest stage, then how even the stages are.
struct Cut {
  double heaviest = std::numeric_limits<double>::infinity();
  double squares = std::numeric_limits<double>::infinity();
  std::size_t last_begin = 0;  // of the last stage
};

// Makes, of the best cuts of the first 0, 1, 2, … layers into some number of stages, those into one more.
std::vector<Cut> AddStage(const std::vector<double>& sums, const std::vector<Cut>& fewer) {
  std::vector<Cut> best(fewer.size());
  for (std::size_t end = 1; end < best.size(); ++end) {
    for (std::size_t begin = end; begin-- > 0;) {
      const double weight = sums[end] - sums[begin];
      // Earlier begins make the last stage heavier still.
      if (weight > best[end].heaviest) break;
      const Cut cut = {std::max(fewer[begin].heaviest, weight),
                       fewer[begin].squares + weight * weight, begin};
      if (std::tie(cut.heaviest, cut.squares) < std::tie(best[end].heaviest, best[end].squares)) {
        best[end] = cut;
      }
    }
  }
  return best;
}

}  // namespace

core::Status ParsePartitionKind(std::string_view text, PartitionKind* kind) {
  return ParseChoice(text, "partition", kPartitionNames, kind);
}

core::Status CutLayers(const std::vector<double>& weights, int stages, std::vector<int>* begins) {
  const std::size_t layers = weights.size();
  if (stages < 1 || layers < static_cast<std::size_t>(stages)) {
    return {core::StatusCode::kInvalidArgument,
            std::to_string(layers) + " layers cannot be cut into " + std::to_string(stages) +
                " stages; " +
                (layers == 0 ? "give at least one layer" : "use 1 to " + std::to_string(layers))};
  }
  std::vector<double> sums = {0};
  for (const double weight : weights) {
    if (!std::isfinite(weight) || weight < 0) {
      return {core::StatusCode::kInvalidArgument, "layer " + std::to_string(sums.size() - 1) +
                                                      " weighs " + std::to_string(weight) +
                                                      "; allowed is 0 and above"};
    }
    sums.push_back(sums.back() + weight);
  }
  std::vector<std::vector<Cut>> best(1, std::vector<Cut>(layers + 1));
  best[0][0] = {0, 0, 0};
  for (int stage = 0; stage < stages; ++stage) best.push_back(AddStage(sums, best.back()));
  begins->assign(static_cast<std::size_t>(stages) + 1, static_cast<int>(layers));
  for (auto stage = static_cast<std::size_t>(stages); stage > 0; --stage) {
    const auto end = static_cast<std::size_t>((*begins)[stage]);
    (*begins)[stage - 1] = static_cast<int>(best[stage][end].last_begin);
  }
  return core::Status::Ok();
}

}  // namespace sirtaki::parallel
