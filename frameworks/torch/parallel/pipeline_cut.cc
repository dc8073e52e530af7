// Layers are cut into stages, on all ranks and in all copies of the pipeline alike.
#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "core/base/text.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/parallel/pipeline_plan.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "parallel/partition.h"
#include "sirtaki/detail/elastic_calls.h"
#include "sirtaki/pipeline.h"

namespace sirtaki {

PipelineOptions& PipelineOptions::mesh(const Mesh& mesh, const std::string& pipe,
                                       const std::string& data) {
  row = mesh.ranks(pipe);
  other_sets.clear();
  process_set(mesh.set(pipe));
  for (const MeshAxis& axis : mesh.axes()) {
    if (axis.name != pipe && axis.size > 1) other_sets.push_back(mesh.set(axis.name));
    if (axis.name != data) continue;
    data_set = mesh.set(data);
    has_data_set = true;
  }
  return *this;
}

namespace detail {
namespace {

// How the first rank of the row cuts the layers, and its copies; an error comes first.
std::vector<std::string> CutHere(const PipelineOptions& options, const std::string& what,
                                 const std::function<std::vector<double>()>& weigh,
                                 parallel::PartitionKind kind, int stages) {
  std::vector<std::string> cut = {""};
  try {
    std::vector<int> begins;
    ThrowIfError(parallel::CutLayers(weigh(), stages, &begins));
    for (const int begin : begins) cut.push_back(std::to_string(begin));
  } catch (...) {
    cut = {TextOfCurrent()};
  }
  // Copies measure different times. Each of them takes the same one of those that there are.
  for (const ProcessSet& set : options.other_sets) {
    if (kind != parallel::PartitionKind::kTime) break;
    const auto all =
        ExchangeLists(what, cut, "", SessionSet(AliveSession(), set), options.timeout());
    if (!all.empty()) cut = *std::max_element(all.begin(), all.end());
  }
  return cut;
}

}  // namespace

std::vector<int> PipelineCore::Cut(const PipelineOptions& options, int layers,
                                   const std::function<std::vector<double>()>& weigh) {
  if (IsDeferred()) {
    ThrowStatus(
        core::Status(core::StatusCode::kUnsupported,
                     "a Pipeline cannot be made before elastic::run(): its stages would have "
                     "to move when ranks come and go"));
  }
  const PipelineRow row(options);
  // Names of calls have that of the pipeline, and there are others without a partition.
  AgreeOnList("a pipeline",
              {"its name is " + core::Quoted(options.name()),
               "its partition is " + core::Quoted(options.partition()),
               std::to_string(options.stages_per_rank()) + " stages a rank",
               std::to_string(layers) + " layers or stages"},
              "", row.set, options.timeout());
  std::vector<int> begins(parallel::At(layers));
  std::iota(begins.begin(), begins.end(), 0);
  if (options.partition().empty()) return begins;
  parallel::PartitionKind kind{};
  ThrowIfError(parallel::ParsePartitionKind(options.partition(), &kind));
  if (options.stages_per_rank() < 1) {
    ThrowInvalid("a pipeline has at least one stage a rank, not " +
                 std::to_string(options.stages_per_rank()));
  }
  const int stages = static_cast<int>(row.ranks.size()) * options.stages_per_rank();
  const std::string what = "the layers of the pipeline " + core::Quoted(options.name());
  std::vector<std::string> cut;
  if (row.place == 0) cut = CutHere(options, what, weigh, kind, stages);
  const std::string error = cut.empty() ? "" : cut.front();
  const auto all = ExchangeLists(what, cut, error, row.set, options.timeout());
  if (!all.empty()) {
    const auto& of_set = row.set.ranks();
    cut = all[parallel::At(static_cast<int>(
        std::find(of_set.begin(), of_set.end(), row.ranks.front()) - of_set.begin()))];
  }
  begins.clear();
  for (int i = 0; i < stages; ++i) begins.push_back(std::stoi(cut[parallel::At(i) + 1]));
  return begins;
}

}  // namespace detail
}  // namespace sirtaki
