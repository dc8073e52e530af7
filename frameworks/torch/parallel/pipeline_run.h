// One rank's instructions of a schedule are carried out: forward and backward passes of its stages,
// and the messages between them.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "frameworks/torch/parallel/pipeline_messages.h"
#include "frameworks/torch/parallel/pipeline_plan.h"
#include "parallel/schedule_trace.h"
#include "sirtaki/pipeline.h"

namespace sirtaki::detail {

class PipelineRun {
 public:
  using Tensors = std::vector<at::Tensor>;

  // The plan outlives it. `stages`: those of this rank, ascending.
  PipelineRun(const PipelinePlan& plan, std::vector<PipelineCore::Stage> stages,
              PipelineLoss::Function loss, const PipelineOptions& options);

  // Carries out all instructions of a batch, which trace() has begun; messages().Finish() is left to
  // do. `reduce_tied` is called where the schedule says so. Throws what a stage throws, and what
  // messages do. Gives the mean of the losses, where the last stage is; elsewhere 0. `outputs`: see
  // Pipeline::evaluate_batch. A batch is evaluated without targets if there are none; its loss is NaN.
  double Run(bool training, const Tensors& inputs, const Tensors& targets, Tensors* outputs,
             const std::function<void(const std::string& tie)>& reduce_tied);

  // This parameter is another tensor from now on.
  void Replace(const at::Tensor& before, const at::Tensor& now);

  PipelineMessages& messages() { return messages_; }
  parallel::ScheduleTrace& trace() { return trace_; }
  const parallel::ScheduleTrace& trace() const { return trace_; }
  int most_kept() const { return most_kept_; }

 private:
  using Edge = parallel::Edge;
  using Instruction = parallel::Instruction;
  using Pass = std::pair<int, int>;  // stage and micro-batch
  // The gradients of a stage's inputs, which its backward pass leaves here.
  using Gradients = std::shared_ptr<Tensors>;
  // What a pass has made for another one, and how often it had been changed in place then.
  struct HandedOver {
    Tensors tensors;
    std::vector<std::int64_t> versions;
  };
  // A stage keeps this of a micro-batch from its forward pass to its backward pass: of its outputs
  // only where they are in autograd's graph, so that their memory is free when nobody else uses it.
  struct Kept;

  void Do(const Instruction& instruction);
  void Forward(const Instruction& pass);
  void Backward(const Instruction& pass);
  Tensors InputsOf(const Instruction& pass, Kept* kept);
  Tensors Call(int stage, const Tensors& inputs) const;
  void HandOn(const Instruction& pass, const Tensors& outputs, Kept* kept);
  void TakeLoss(const Instruction& pass, const Tensors& outputs, Kept* kept);
  Tensors Arriving(const Edge& edge, const Instruction& pass);
  void CutBatch(const Tensors& tensors, const std::string& what, std::vector<Tensors>* parts) const;
  void CheckRows(std::int64_t of_targets) const;
  Tensors TakeOver(const HandedOver& handed, const Instruction& to) const;
  double MeanLoss() const;
  void Reset();

  const PipelinePlan& plan_;
  std::map<int, PipelineCore::Stage> stages_;
  const PipelineLoss::Function loss_;
  parallel::ScheduleTrace trace_;
  PipelineMessages messages_;

  // The batch that is under way has these.
  bool training_ = true;
  std::vector<Tensors> inputs_;  // by micro-batch
  std::vector<Tensors> targets_;
  std::vector<Tensors> outputs_;
  bool wants_outputs_ = false;
  Tensors losses_;
  std::map<Pass, std::shared_ptr<Kept>> kept_;
  // What passes have made, until it is sent or taken by a stage of this rank.
  std::map<std::pair<Edge, int>, HandedOver> activations_;
  std::map<std::pair<Edge, int>, HandedOver> gradients_;
  const std::function<void(const std::string&)>* reduce_tied_ = nullptr;
  int most_kept_ = 0;
};

}  // namespace sirtaki::detail
