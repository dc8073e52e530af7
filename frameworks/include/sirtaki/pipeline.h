// A Pipeline cuts a model into stages, runs each of them on one rank, and divides each batch into
// micro-batches, so that the ranks work on different micro-batches at the same time:
//
//   const auto grid = sirtaki::mesh({{"data", -1}, {"pipe", 2}});
//   sirtaki::Pipeline model(net, torch::nn::CrossEntropyLoss(),  // net: a torch::nn::Sequential
//                           sirtaki::PipelineOptions().mesh(grid).micro_batches(8));
//   auto optimizer = sirtaki::DistributedOptimizer(
//       torch::optim::SGD(model.parameters(), 0.1), model.named_parameters(),
//       model.optimizer_options());
//   for (auto& batch : loader) {
//     optimizer.zero_grad();
//     const double loss = model.train_batch(batch.data, batch.target);
//     optimizer.step();
//   }
//
// docs/model-parallel.md has the schedules, and what is checked before one runs.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "sirtaki/detail/pipeline_core.h"
#include "sirtaki/export.h"
#include "sirtaki/mesh.h"
#include "sirtaki/optimizer_options.h"
#include "sirtaki/process_set.h"

namespace sirtaki {

// A skip connection hands one tensor from a stage to a later one. The stage `from` returns it behind its other
// tensors, one for each name; the stage `to` gets it behind its other inputs, in the order of the option.
struct PipelineSkip {
  std::string name;
  int from = 0;
  int to = 0;
};

// The options are the same on all ranks of a row; if they differ, all of these throw `Mismatch`.
struct SIRTAKI_API PipelineOptions {
  using Ties = std::vector<std::vector<std::string>>;

  // A batch is cut into that many equal parts along dimension 0.
  TORCH_ARG(int, micro_batches) = 1;
  // "gpipe", "1f1b", "interleaved_1f1b", or the text of a schedule of one's own, which has "rank 0:".
  TORCH_ARG(std::string, schedule) = "1f1b";
  // The ranks of this set have the stages, in ascending order. Default: all ranks of the job.
  TORCH_ARG(ProcessSet, process_set);
  // How layers are cut into stages: "uniform" by their number, "parameters" by the number of these, "time" by
  // their time on the first rank with `sample`. Empty: each factory makes a stage; a Sequential is "uniform".
  TORCH_ARG(std::string, partition);
  TORCH_ARG(at::Tensor, sample);           // the inputs of a micro-batch, for "time"
  TORCH_ARG(int, stages_per_rank) = 1;     // of layers that are cut
  TORCH_ARG(std::vector<int>, placing);    // each stage's place in the row; empty: stage % ranks
  TORCH_ARG(std::vector<int>, recompute);  // stages that keep their inputs alone, as by recompute()
  TORCH_ARG(std::vector<PipelineSkip>, skips);
  // Parameters that several stages have, by the names of named_parameters(): {{"0.weight", "5.weight"}}.
  // They begin alike, and their gradients are summed over the stages before the step.
  TORCH_ARG(Ties, ties);
  // If a message is not there in this time, the job fails with TimedOut, and the text names stage,
  // micro-batch and what is missing. Positive.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::minutes(30);
  // The name tells several pipelines of a program apart, in messages.
  TORCH_ARG(std::string, name) = "pipeline";

 public:
  // Stages lie along one axis of the mesh, copies of the pipeline along another one. An axis `data`
  // that the mesh does not have means one copy.
  PipelineOptions& mesh(const Mesh& mesh, const std::string& pipe = "pipe",
                        const std::string& data = "data");

  std::vector<int> row;  // the ranks of the stages in their order; empty: those of process_set
  ProcessSet data_set;   // the ranks with the same stages and other data
  bool has_data_set = false;
  std::vector<ProcessSet> other_sets;  // of the mesh, along its axes except that of the stages
};

// A report says what is known of a pipeline's schedule, and of the batches on this rank.
struct PipelineReport {
  std::string schedule;      // as a text
  std::string picture;       // drawn with passes of equal times
  double bubble = 0;         // the mean share of the time that ranks wait, with such passes
  int peak_activations = 0;  // micro-batches that this rank keeps at most, as the checker says
  int most_kept = 0;         // that it has kept in the last training batch
  double waited = 0;         // the share of the time of training batches, except the first, that
                             // this rank has waited; on a GPU passes are launched, and run later
};

// The loss takes the output of the last stage and the target of a micro-batch, or lists of these, and
// gives a mean over the micro-batch.
class PipelineLoss {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Function = std::function<at::Tensor(const Tensors& outputs, const Tensors& targets)>;

  template <class F, class = std::enable_if_t<!std::is_same_v<std::decay_t<F>, PipelineLoss>>>
  PipelineLoss(F loss) {  // NOLINT(google-explicit-constructor): a lambda or a module is a loss
    if constexpr (std::is_invocable_r_v<at::Tensor, F&, const at::Tensor&, const at::Tensor&>) {
      function_ = [loss](const Tensors& outputs, const Tensors& targets) mutable {
        return loss(outputs.front(), targets.front());
      };
    } else {
      function_ = std::move(loss);
    }
  }
  const Function& function() const { return function_; }

 private:
  Function function_;
};

namespace detail {
template <class M, class = std::vector<at::Tensor>>
struct TakesTensorLists : std::false_type {};
template <class M>
struct TakesTensorLists<M, decltype(std::declval<M&>().forward(
                               std::declval<const std::vector<at::Tensor>&>()))> : std::true_type {
};
}  // namespace detail

// A PipelineStage is a stage or a layer: a module whose forward() takes a tensor and returns one, or takes a
// `const std::vector<at::Tensor>&` and returns such a list; or any function, with the module that has
// its parameters.
class PipelineStage {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Function = std::function<Tensors(const Tensors&)>;

  PipelineStage(Function forward, std::shared_ptr<torch::nn::Module> module)
      : forward_(std::move(forward)), module_(std::move(module)) {}
  template <class M>
  PipelineStage(const std::shared_ptr<M>& module) : module_(module) {  // NOLINT: see PipelineLoss
    if constexpr (detail::TakesTensorLists<M>::value) {
      forward_ = [module](const Tensors& inputs) { return module->forward(inputs); };
    } else {
      forward_ = [module](const Tensors& inputs) {
        return Tensors{module->forward(inputs.front())};
      };
    }
  }
  template <class M>
  PipelineStage(const torch::nn::ModuleHolder<M>& module)  // NOLINT: likewise
      : PipelineStage(module.ptr()) {}
  explicit PipelineStage(const torch::nn::AnyModule& module) : module_(module.ptr()) {
    forward_ = [module = torch::nn::AnyModule(module)](const Tensors& inputs) mutable {
      return Tensors{module.forward<at::Tensor>(inputs.front())};
    };
  }

  const Function& forward() const { return forward_; }
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }

 private:
  Function forward_;
  std::shared_ptr<torch::nn::Module> module_;
};

using PipelineFactory = std::function<PipelineStage()>;

// A Pipeline is a module with the layers of this rank alone, under their numbers in the unsplit model, as a
// Sequential names layers without names: parameters(), train(), eval(), to() and saving work as ever. The
// constructor and the functions that run or clip are collective over the row of ranks that have the stages.
// LBFGS cannot train a pipeline, since it looks at all parameters at once: a plain one's step is not found.
class SIRTAKI_API Pipeline : public torch::nn::Module {
 public:
  using Tensors = std::vector<at::Tensor>;

  // Cuts the layers of the model into stages.
  Pipeline(const torch::nn::Sequential& model, const PipelineLoss& loss,
           const PipelineOptions& options);
  // Each factory makes a stage, or with `partition` a layer, and is called on its rank alone.
  Pipeline(const std::vector<PipelineFactory>& factories, const PipelineLoss& loss,
           const PipelineOptions& options);

  // Runs all micro-batches forward and backward and adds to the gradients those of the whole batch's mean
  // loss, which it returns on every rank of the row. The rank of the first stage gives the inputs and that of
  // the last one the target, of as many rows; other ranks may give nothing. Shapes and types that stages hand
  // on are those of the first micro-batch for ever. An error on one rank, of a stage too, ends the job.
  double train_batch(const at::Tensor& input = {}, const at::Tensor& target = {});
  double train_batch(const Tensors& inputs, const Tensors& targets);
  // Runs them forward alone. On its rank `outputs` gets the last stage's, numbers stacked. NaN without target.
  double evaluate_batch(const at::Tensor& input = {}, const at::Tensor& target = {});
  double evaluate_batch(const Tensors& inputs, const Tensors& targets, Tensors* outputs = nullptr);

  // Does what the function of the same name does for the whole model; a tied parameter counts once. A rank
  // may have several optimizers, as many on all ranks. Collective over all copies of the pipeline if one is a
  // DistributedOptimizer. Throws InvalidArgument for a norm_type that is not above 0, Unsupported for ties
  // with Shard::Gradients.
  double clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                         double norm_type = 2.0, bool error_if_nonfinite = false);
  double clip_grad_norm_(const std::vector<torch::optim::Optimizer*>& optimizers, double max_norm,
                         double norm_type = 2.0, bool error_if_nonfinite = false);

  // Saves what torch::save() of the unsplit model would: torch::load() gives it to that, and load_full() to
  // a pipeline of any number of stages.
  //   torch::serialize::OutputArchive archive;
  //   pipeline.save_full(archive, 0);
  //   if (sirtaki::rank() == 0) archive.save_to("model.pt");
  // `root_rank`: the rank of the job that gets it, -1: all ranks of the row do. Collective over the row, and
  // over the sets of layers that are split over ranks, which are saved whole.
  void save_full(torch::serialize::OutputArchive& archive, int root_rank = -1) const;
  // Loads this rank's layers from the unsplit model's archive. Not collective. Throws InvalidArgument, and
  // changes nothing, if one is not there or has another shape.
  void load_full(torch::serialize::InputArchive& archive);
  // The same of the stages' optimizers, as if the unsplit model had one with the same groups, whose
  // parameters come in the order of the model, a tied one in each of its places. Both are collective over the
  // row, and over all copies if the state is in shards. Throw on all ranks of the row: Mismatch if stages have
  // other groups or options; InvalidArgument for LBFGS, parameters of others or of split layers, and a state
  // that does not fit, which leaves the optimizer as it was.
  void save_full_optimizer(torch::optim::Optimizer& optimizer,
                           torch::serialize::OutputArchive& archive, int root_rank = -1) const;
  void load_full_optimizer(torch::optim::Optimizer& optimizer,
                           torch::serialize::InputArchive& archive);

  // Throws Unsupported: a copy would be another pipeline, which all ranks make.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;

  // For a DistributedOptimizer that averages over the copies of the pipeline: once for each batch, while its
  // last micro-batch runs backward; train_batch() refuses others. Throws InvalidArgument without a mesh.
  DistributedOptimizerOptions optimizer_options() const { return core_->optimizer_options(); }
  const std::vector<int>& stages() const { return core_->stages(); }
  bool is_first() const { return core_->is_first(); }
  bool is_last() const { return core_->is_last(); }
  PipelineReport report() const { return core_->report(); }

 private:
  // The names of parameters that are one and the same in several layers.
  using Twins = std::vector<std::vector<std::string>>;
  Pipeline(const std::vector<PipelineFactory>& factories, const Twins& twins,
           const PipelineLoss& loss, const PipelineOptions& options);

  std::unique_ptr<detail::PipelineCore> core_;
};

}  // namespace sirtaki
