// What a Pipeline rests on. Programs do not use it by itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sirtaki/detail/gradient_reducer.h"
#include "sirtaki/export.h"
#include "sirtaki/optimizer_options.h"
#include "sirtaki/process_set.h"

namespace torch::nn {
class Module;
}
namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace sirtaki {

struct PipelineOptions;
struct PipelineReport;

namespace detail {

// A PipelineCore is a pipeline whose stages are functions with named parameters; it knows no modules,
// and whoever has them makes one. One thread uses it. Functions are called on that thread, in backward() for a GPU
// also on autograd's.
class SIRTAKI_API PipelineCore {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Function = std::function<Tensors(const Tensors&)>;
  using Loss = std::function<at::Tensor(const Tensors& outputs, const Tensors& targets)>;
  struct Stage {
    Function forward;
    NamedTensors parameters;  // "N.rest": N is the number of a layer, or of the stage
  };

  // The first layer of each stage; each of them without a partition. `layers`: how many this rank
  // has. `weigh` is called on the first rank of the row alone, and gives a weight for each. Copies
  // of the pipeline are cut alike. Collective over the row, and the first ranks of rows, before
  // anything else of a pipeline; throws on all of these what throws on one, Mismatch if ranks have
  // different names, partitions or numbers of layers.
  static std::vector<int> Cut(const PipelineOptions& options, int layers,
                              const std::function<std::vector<double>()>& weigh);

  // `begins`: the first layer of each stage; or 0, 1, … for as many stages. `make` is called for each
  // stage of this rank, ascending. Collective over the row: compares options, schedule and ties, and
  // throws on all ranks of it what throws on one.
  PipelineCore(const PipelineOptions& options, std::vector<int> begins,
               const std::function<Stage(int stage)>& make, Loss loss);
  ~PipelineCore();

  // See Pipeline. The first stage's rank gives the inputs and the last one's the targets; others may
  // give nothing. What throws on one rank ends the job, as abort() does: others wait for it.
  double TrainBatch(const Tensors& inputs, const Tensors& targets);
  double EvaluateBatch(const Tensors& inputs, const Tensors& targets, Tensors* outputs = nullptr);
  double ClipGradNorm(const std::vector<torch::optim::Optimizer*>& optimizers, double max_norm,
                      double norm_type, bool error_if_nonfinite);
  // This rank's parameters are other tensors from now on, under the names that the stages gave them. Not
  // collective. Throws InvalidArgument if names, types or shapes differ.
  void Replace(const NamedTensors& parameters);

  // See Pipeline::save_full and its like. `module`: has the layers of this rank.
  void SaveFull(const torch::nn::Module& module, torch::serialize::OutputArchive& archive,
                int root_rank) const;
  void SaveFullOptimizer(torch::optim::Optimizer& optimizer,
                         torch::serialize::OutputArchive& archive, int root_rank) const;
  void LoadFullOptimizer(torch::optim::Optimizer& optimizer,
                         torch::serialize::InputArchive& archive) const;

  // The rows of ranks that train a model together with this rank's parameters of it, each once, in one
  // order on all ranks. Without parameters: of the pipelines of which this rank has none. Not collective.
  static std::vector<ProcessSet> RowsOf(const Tensors& parameters);
  // "of stage 1 of the pipeline …" of a parameter of it, the same on all ranks that have the parameter; empty
  // of others, and where one rank has all stages.
  static std::string StageTextOf(const at::Tensor& parameter);

  const std::vector<int>& stages() const;  // of this rank, ascending
  bool is_first() const;                   // this rank has the first stage
  bool is_last() const;
  DistributedOptimizerOptions optimizer_options() const;
  PipelineReport report() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace detail

}  // namespace sirtaki
