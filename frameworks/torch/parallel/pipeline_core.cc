#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/tensor.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/text.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/gradients/clip_grad.h"
#include "frameworks/torch/gradients/parameter_gradient.h"
#include "frameworks/torch/parallel/pipeline_plan.h"
#include "frameworks/torch/parallel/pipeline_run.h"
#include "frameworks/torch/parallel/pipeline_state.h"
#include "frameworks/torch/parallel/pipeline_ties.h"
#include "frameworks/torch/state/optimizer_archive.h"
#include "frameworks/torch/state/tensor_split.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "parallel/schedule_text.h"
#include "sirtaki/pipeline.h"

namespace sirtaki {

namespace detail {
namespace {

using parallel::At;
using parallel::Tie;

}  // namespace

class PipelineCore::Impl {
 public:
  Impl(const PipelineOptions& options, std::vector<int> begins,
       const std::function<Stage(int stage)>& make, PipelineLoss::Function loss)
      : options_(options),
        plan_(options, std::move(begins)),
        stages_(plan_.shape().StagesOf(plan_.row().place)),
        run_(plan_, MakeStages(make), std::move(loss), options) {
    ties_.Find(options_, parameters_);
    Register();
  }

  // Replaces this rank's parameters; the ranks do not communicate.
  void Replace(const NamedTensors& parameters) {
    if (parameters.size() != parameters_.size()) {
      ThrowInvalid("the pipeline " + core::Quoted(options_.name()) + " has " +
                   std::to_string(parameters.size()) + " parameters now, and had " +
                   std::to_string(parameters_.size()) + " when it was made; make it again");
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& [name, now] = parameters[i];
      const auto& [known, before] = parameters_[i];
      if (name == known && TypeAndShape(now) == TypeAndShape(before)) continue;
      ThrowInvalid("the parameter " + core::Quoted(name) + " of the pipeline " +
                   core::Quoted(options_.name()) + " is " + TypeAndShape(now) +
                   " now, in place of " + core::Quoted(known) + ", " + TypeAndShape(before) +
                   "; make the pipeline again");
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& now = parameters[i].second;
      at::Tensor& before = parameters_[i].second;
      if (now.is_same(before)) continue;
      ties_.Replace(before, now);
      run_.Replace(before, now);
      before = now;
    }
    Register();
  }

  double Batch(bool training, const Tensors& inputs, const Tensors& targets, Tensors* outputs) {
    const auto& session = plan_.row().set.session;
    if (session->gone()) {
      ThrowStatus(core::Status(core::StatusCode::kNotInitialized,
                               "the session of the pipeline " + core::Quoted(options_.name()) +
                                   " was shut down; make a new one after init()"));
    }
    const SessionScope scope(session);
    parallel::ScheduleTrace::Batch traced(run_.trace(), training);
    try {
      const double loss =
          training ? Train(inputs, targets) : RunBatch(false, inputs, targets, outputs);
      traced.Complete();
      return loss;
    } catch (...) {
      const std::string activity = run_.trace().Activity();
      run_.messages().Forget();
      // The others wait for this rank.
      if (!plan_.is_alone() && session->Check().ok()) {
        const std::string who = "the pipeline " + core::Quoted(options_.name()) + ": ";
        std::string text = TextOfCurrent();
        if (text.starts_with(who)) text.erase(0, who.size());
        session->session().Abort(who + (activity.empty() ? "" : activity + ": ") + text);
      }
      throw;
    }
  }

  double Clip(const std::vector<torch::optim::Optimizer*>& optimizers, double max_norm,
              double norm_type, bool error_if_nonfinite) {
    const SessionScope scope(plan_.row().set.session);
    bool told = plan_.is_alone();
    try {
      if (optimizers.empty()) ThrowInvalid("clip_grad_norm_ is given no optimizer");
      for (torch::optim::Optimizer* optimizer : optimizers) CheckClip(*optimizer, norm_type);
      CheckDistinct(optimizers);
      CheckMaxNorm(max_norm);
      CountsGradient counts;
      if (!ties_.empty()) {
        counts = [this](const at::Tensor& parameter) { return ties_.Counts(parameter); };
      }
      // The norms of all optimizers are known before one scales its gradients.
      std::vector<double> norms;
      for (torch::optim::Optimizer* optimizer : optimizers) {
        norms.push_back(NormOfGradients(*optimizer, norm_type, counts));
      }
      double total =
          at::linalg_vector_norm(at::tensor(norms, at::kDouble), norm_type).item<double>();
      if (!plan_.is_alone()) {
        told = true;
        total = at::linalg_vector_norm(ShareNorm(total, ""), norm_type).item<double>();
      }
      for (torch::optim::Optimizer* optimizer : optimizers) {
        ScaleGradients(*optimizer, max_norm, total, error_if_nonfinite);
      }
      return total;
    } catch (...) {
      // The others wait for this rank's norm.
      if (!told) TellError(TextOfCurrent());
      throw;
    }
  }

  void SaveFull(const torch::nn::Module& module, torch::serialize::OutputArchive& archive,
                int root_rank) const {
    const SessionScope scope(plan_.row().set.session);
    SaveFullModel(CallOf("save_full"), module, root_rank, archive);
  }
  void SaveFullOptimizer(torch::optim::Optimizer& optimizer,
                         torch::serialize::OutputArchive& archive, int root_rank) const {
    const SessionScope scope(plan_.row().set.session);
    detail::SaveFullOptimizer(CallOf("save_full_optimizer"), parameters_, optimizer, root_rank,
                              archive);
  }
  void LoadFullOptimizer(torch::optim::Optimizer& optimizer,
                         torch::serialize::InputArchive& archive) const {
    const SessionScope scope(plan_.row().set.session);
    detail::LoadFullOptimizer(CallOf("load_full_optimizer"), parameters_, options_.ties(),
                              optimizer, archive);
  }

  const PipelineOptions& options() const { return options_; }
  const std::vector<int>& stages() const { return stages_; }
  const PipelinePlan& plan() const { return plan_; }
  const PipelineRun& run() const { return run_; }

 private:
  StateCall CallOf(const std::string& function) const {
    return {function + " of the pipeline " + core::Quoted(options_.name()), plan_.row().set,
            options_.timeout()};
  }
  // A gradient of two optimizers would be counted and scaled twice.
  static void CheckDistinct(const std::vector<torch::optim::Optimizer*>& optimizers) {
    std::set<const void*> seen;
    for (const torch::optim::Optimizer* const optimizer : optimizers) {
      for (const at::Tensor& parameter : DistinctParametersOf(*optimizer)) {
        if (seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
        ThrowInvalid("clip_grad_norm_ is given two optimizers of one parameter, " +
                     TypeAndShape(parameter) + ": give it one of them");
      }
    }
  }
  void CheckClip(torch::optim::Optimizer& optimizer, double norm_type) const {
    if (dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr) {
      ThrowInvalid(
          "LBFGS cannot train a pipeline: its step looks at all parameters at once, which no rank "
          "has; use an optimizer that works element by element");
    }
    if (!(norm_type > 0)) {
      ThrowInvalid("clip_grad_norm_: norm_type is " + std::to_string(norm_type) +
                   "; in a pipeline it has to be above 0");
    }
    GradientReducer* const reducer = ReducerOf(optimizer);
    if (reducer != nullptr && !ties_.empty() && reducer->gradient_shards().has_value()) {
      ThrowStatus(core::Status(core::StatusCode::kUnsupported,
                               "clip_grad_norm_: gradients of tied parameters cannot be counted "
                               "once with Shard::Gradients; use Shard::OptimizerState"));
    }
  }
  void Register() {
    if (plan_.is_alone()) return;
    std::set<const void*> known;
    for (const auto& [name, parameter] : parameters_) {
      known.insert(parameter.unsafeGetTensorImpl());
      MarkStage(parameter, stage_text_);
    }
    plan_.row().set.session->pipelines().SetParameters(&plan_, plan_.row().set.process_set,
                                                       std::move(known));
  }
  std::string TextOfStages() const {
    std::string text = stages_.size() == 1 ? "of stage" : "of stages";
    for (const int stage : stages_) text += " " + std::to_string(stage);
    return text + " of the pipeline " + core::Quoted(options_.name()) +
           ", whose mesh and optimizer_options() have the set of ranks with the same";
  }

  std::vector<Stage> MakeStages(const std::function<Stage(int stage)>& make) {
    std::vector<Stage> made;
    std::string error;
    try {
      for (const int stage : stages_) {
        made.push_back(make(stage));
        if (!made.back().forward)
          ThrowInvalid("stage " + std::to_string(stage) + " has no function");
        for (const auto& parameter : made.back().parameters) parameters_.push_back(parameter);
      }
    } catch (...) {
      error = TextOfCurrent();
    }
    AgreeOnErrors("the stages of the pipeline " + core::Quoted(options_.name()), error,
                  plan_.row().set);
    return made;
  }

  // The norms of all ranks. Throws on all what one gives as its error.
  at::Tensor ShareNorm(double norm, const std::string& error) const {
    at::Tensor own = at::full({1, 2}, norm, at::kDouble);
    own.mutable_data_ptr<double>()[1] = error.empty() ? 0 : 1;
    const at::Tensor all = AllGatherBlocking(own, "sirtaki/pipeline/clip_grad_norm_",
                                             plan_.row().set, options_.timeout());
    if (all.select(1, 1).sum().item<double>() > 0) {
      AgreeOnList("clip_grad_norm_ of the pipeline " + core::Quoted(options_.name()), {}, error,
                  plan_.row().set, options_.timeout());
    }
    return all.select(1, 0);
  }
  void TellError(const std::string& error) const {
    if (!plan_.row().set.session->Check().ok()) return;
    try {
      ShareNorm(0, error);
    } catch (const std::exception&) {
      // This rank throws its own error, whatever the others do.
      return;
    }
  }

  double Train(const Tensors& inputs, const Tensors& targets) {
    CheckOptimizer();
    const PipelineTies::HeldGates held(ties_);
    ties_.SetAside();
    double loss = 0;
    try {
      loss = RunBatch(true, inputs, targets, nullptr);
    } catch (...) {
      ties_.PutBack();
      throw;
    }
    // Those that one rank alone has, in several stages.
    for (std::size_t i = 0; i < plan_.shape().ties.size(); ++i) {
      if (plan_.shape().RanksOf(plan_.shape().ties[i]).size() == 1) ties_.Sum(i);
    }
    return loss;
  }

  // A gradient that is averaged over copies of the pipeline is so once in a batch, behind its last
  // micro-batch, and no pass waits for that.
  void CheckOptimizer() const {
    for (const auto& [name, parameter] : parameters_) {
      const auto gradient =
          plan_.row().set.session->gradients().OfParameter(parameter.unsafeGetTensorImpl());
      if (gradient == nullptr || gradient->rule().of_steps()) continue;
      const GradientRule& rule = gradient->rule();
      if (!rule.at_backward && rule.passes == plan_.shape().micro_batches) continue;
      ThrowInvalid(
          "the optimizer of " + core::Quoted(name) + " averages " +
          (rule.at_backward ? "at the end of each backward()" : "in step()") + " after " +
          std::to_string(rule.passes) + " backward passes, and the pipeline runs " +
          std::to_string(plan_.shape().micro_batches) +
          " micro-batches; give the optimizer the optimizer_options() of the pipeline, and for "
          "several batches a step call train_batch() within no_sync() for all but the last");
    }
  }

  double RunBatch(bool training, const Tensors& inputs, const Tensors& targets, Tensors* outputs) {
    const double mean =
        run_.Run(training, inputs, targets, outputs, [this](const std::string& name) {
          const auto& ties = plan_.shape().ties;
          const auto tie = std::find_if(ties.begin(), ties.end(),
                                        [&](const Tie& of) { return of.name == name; });
          ties_.Sum(static_cast<std::size_t>(tie - ties.begin()));
        });
    return ShareLoss(mean);
  }

  double ShareLoss(double mean) {
    const int last = plan_.shape().stages - 1;
    const int owner = plan_.shape().RankOf(last);
    at::Tensor loss = at::full({1}, mean, at::kDouble);
    if (owner == plan_.row().place) {
      for (int place = 0; place < plan_.shape().ranks; ++place) {
        if (place == owner) continue;
        const int stage = plan_.shape().StagesOf(place).front();
        run_.messages().SendOne(loss, stage, plan_.TagOfLoss(),
                                "the loss is sent to " + StageText(plan_, stage));
      }
    } else {
      run_.messages().ReceiveOne(
          loss, last, plan_.TagOfLoss(),
          StageText(plan_, stages_.front()) + " waits for the loss from " + StageText(plan_, last));
    }
    run_.messages().Finish();
    return loss.item<double>();
  }

  const PipelineOptions options_;
  const PipelinePlan plan_;
  const std::vector<int> stages_;
  const std::shared_ptr<const std::string> stage_text_ =
      std::make_shared<const std::string>(TextOfStages());
  NamedTensors parameters_;
  PipelineRun run_;
  PipelineTies ties_{plan_, run_.messages()};
};

PipelineCore::PipelineCore(const PipelineOptions& options, std::vector<int> begins,
                           const std::function<Stage(int stage)>& make, PipelineLoss::Function loss)
    : impl_(std::make_unique<Impl>(options, std::move(begins), make, std::move(loss))) {}

PipelineCore::~PipelineCore() = default;

double PipelineCore::TrainBatch(const Tensors& inputs, const Tensors& targets) {
  return impl_->Batch(true, inputs, targets, nullptr);
}

double PipelineCore::EvaluateBatch(const Tensors& inputs, const Tensors& targets,
                                   Tensors* outputs) {
  return impl_->Batch(false, inputs, targets, outputs);
}

double PipelineCore::ClipGradNorm(const std::vector<torch::optim::Optimizer*>& optimizers,
                                  double max_norm, double norm_type, bool error_if_nonfinite) {
  return impl_->Clip(optimizers, max_norm, norm_type, error_if_nonfinite);
}

void PipelineCore::Replace(const NamedTensors& parameters) { impl_->Replace(parameters); }

void PipelineCore::SaveFull(const torch::nn::Module& module,
                            torch::serialize::OutputArchive& archive, int root_rank) const {
  impl_->SaveFull(module, archive, root_rank);
}

void PipelineCore::SaveFullOptimizer(torch::optim::Optimizer& optimizer,
                                     torch::serialize::OutputArchive& archive,
                                     int root_rank) const {
  impl_->SaveFullOptimizer(optimizer, archive, root_rank);
}

void PipelineCore::LoadFullOptimizer(torch::optim::Optimizer& optimizer,
                                     torch::serialize::InputArchive& archive) const {
  impl_->LoadFullOptimizer(optimizer, archive);
}

std::vector<ProcessSet> PipelineCore::RowsOf(const Tensors& parameters) {
  std::vector<const void*> known;
  for (const at::Tensor& parameter : parameters) known.push_back(parameter.unsafeGetTensorImpl());
  return CurrentSession()->pipelines().RowsOf(known);
}

std::string PipelineCore::StageTextOf(const at::Tensor& parameter) {
  return detail::StageTextOf(parameter);
}

const std::vector<int>& PipelineCore::stages() const { return impl_->stages(); }
bool PipelineCore::is_first() const { return impl_->stages().front() == 0; }
bool PipelineCore::is_last() const {
  return impl_->stages().back() == impl_->plan().shape().stages - 1;
}

DistributedOptimizerOptions PipelineCore::optimizer_options() const {
  const PipelineOptions& options = impl_->options();
  if (!options.has_data_set) {
    ThrowInvalid(
        "the pipeline " + core::Quoted(options.name()) +
        " has no copies to average over: give PipelineOptions a mesh with an axis \"data\", "
        "or use the optimizer as it is");
  }
  return DistributedOptimizerOptions()
      .process_set(options.data_set)
      .backward_passes_per_step(options.micro_batches())
      .average_at(Average::Step);
}

PipelineReport PipelineCore::report() const {
  const PipelinePlan& plan = impl_->plan();
  PipelineReport report;
  report.schedule = parallel::Text(plan.schedule());
  report.picture = parallel::Draw(plan.schedule(), plan.facts(), 1);
  report.bubble = plan.facts().bubble;
  report.peak_activations = plan.facts().peak_activations[At(plan.row().place)];
  report.most_kept = impl_->run().most_kept();
  report.waited = impl_->run().trace().WaitedShare();
  return report;
}

}  // namespace detail
}  // namespace sirtaki
