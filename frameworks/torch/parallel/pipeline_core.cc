#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros_like.h>
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
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "parallel/schedule_text.h"
#include "sirtaki/pipeline.h"

namespace sirtaki {

namespace detail {
namespace {

using parallel::At;
using parallel::Tie;

[[noreturn]] void RefuseUse(const std::string& why) { ThrowInvalid(why); }

// TiedHere is a tied parameter as this rank has it.
struct TiedHere {
  std::vector<at::Tensor> parameters;  // each once
  bool counts = false;  // this rank has the first stage of the tie, which clipping counts
  std::vector<at::Tensor> before;  // gradients that were there before the batch
};

// Gradients of tied parameters are handed to an optimizer's reduction when they are summed, and not
// when a backward pass has written them.
class HeldGates {
 public:
  HeldGates(const std::vector<TiedHere>& ties, GradientRegistry& registry) {
    for (const TiedHere& tie : ties) {
      for (const at::Tensor& parameter : tie.parameters) {
        auto gradient = registry.OfParameter(parameter.unsafeGetTensorImpl());
        if (gradient == nullptr) continue;
        gradient->gate().Hold();
        held_.push_back(std::move(gradient));
      }
    }
  }
  ~HeldGates() {
    for (const auto& gradient : held_) gradient->gate().Release();
  }
  HeldGates(const HeldGates&) = delete;
  HeldGates& operator=(const HeldGates&) = delete;

 private:
  std::vector<std::shared_ptr<ParameterGradient>> held_;
};

}  // namespace

class PipelineCore::Impl {
 public:
  Impl(const PipelineOptions& options, std::vector<int> begins,
       const std::function<Stage(int stage)>& make, PipelineLoss::Function loss)
      : options_(options),
        plan_(options, std::move(begins)),
        stages_(plan_.shape().StagesOf(plan_.row().place)),
        run_(plan_, MakeStages(make), std::move(loss), options) {
    FindTies();
    BeginAlike();
    std::set<const void*> known;
    for (const auto& [name, parameter] : parameters_) known.insert(parameter.unsafeGetTensorImpl());
    plan_.row().set.session->pipelines().SetParameters(&plan_, plan_.row().set.process_set,
                                                       std::move(known));
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
        session->session().Abort("the pipeline " + core::Quoted(options_.name()) + ": " +
                                 (activity.empty() ? "" : activity + ": ") + TextOfCurrent());
      }
      throw;
    }
  }

  double Clip(torch::optim::Optimizer& optimizer, double max_norm, double norm_type,
              bool error_if_nonfinite) {
    const SessionScope scope(plan_.row().set.session);
    bool told = plan_.is_alone();
    try {
      CheckClip(optimizer, norm_type);
      ClipWithOthers others;
      if (!ties_.empty()) {
        others.counts = [this](const at::Tensor& parameter) { return CountsIt(parameter); };
      }
      others.combine = [&](double norm) {
        if (plan_.is_alone()) return norm;
        told = true;
        return at::linalg_vector_norm(ShareNorm(norm, ""), norm_type).item<double>();
      };
      return ClipGradients(optimizer, max_norm, norm_type, error_if_nonfinite, others);
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
  void CheckClip(torch::optim::Optimizer& optimizer, double norm_type) const {
    if (dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr) {
      RefuseUse(
          "LBFGS cannot train a pipeline: its step looks at all parameters at once, which no rank "
          "has; use an optimizer that works element by element");
    }
    if (!(norm_type > 0)) {
      RefuseUse("clip_grad_norm_: norm_type is " + std::to_string(norm_type) +
                "; in a pipeline it has to be above 0");
    }
    GradientReducer* const reducer = ReducerOf(optimizer);
    if (reducer != nullptr && !ties_.empty() && reducer->gradient_shards().has_value()) {
      ThrowStatus(core::Status(core::StatusCode::kUnsupported,
                               "clip_grad_norm_: gradients of tied parameters cannot be counted "
                               "once with Shard::Gradients; use Shard::OptimizerState"));
    }
  }
  // Whether clipping counts the gradient of the parameter here. A tied one counts once.
  bool CountsIt(const at::Tensor& parameter) const {
    return std::none_of(ties_.begin(), ties_.end(), [&](const TiedHere& tie) {
      const auto found =
          std::find_if(tie.parameters.begin(), tie.parameters.end(),
                       [&](const at::Tensor& tied) { return tied.is_same(parameter); });
      if (found == tie.parameters.end()) return false;
      return !tie.counts || found != tie.parameters.begin();
    });
  }

  std::vector<Stage> MakeStages(const std::function<Stage(int stage)>& make) {
    std::vector<Stage> made;
    std::string error;
    try {
      for (const int stage : stages_) {
        made.push_back(make(stage));
        if (!made.back().forward) RefuseUse("stage " + std::to_string(stage) + " has no function");
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

  // What this rank has of each tie; the ranks that have it have the same type and shape of it.
  void FindTies() {
    std::string error;
    std::vector<std::string> texts;
    for (std::size_t i = 0; i < options_.ties().size(); ++i) {
      TiedHere& tie = ties_.emplace_back();
      texts.emplace_back();
      for (std::size_t j = 0; j < options_.ties()[i].size(); ++j) {
        const std::string& name = options_.ties()[i][j];
        const int stage = plan_.shape().ties[i].stages[j];
        if (plan_.RankOf(stage) != plan_.row().set.rank()) continue;
        const auto found = std::find_if(parameters_.begin(), parameters_.end(),
                                        [&](const auto& named) { return named.first == name; });
        if (found == parameters_.end()) {
          error = "there is no parameter " + core::Quoted(name) + " in stage " +
                  std::to_string(stage) +
                  ", where it is to be tied; use the names of "
                  "named_parameters()";
          break;
        }
        const auto is_it = [&](const at::Tensor& of) { return of.is_same(found->second); };
        for (std::size_t k = 0; k < i; ++k) {
          const std::vector<at::Tensor>& others = ties_[k].parameters;
          if (std::none_of(others.begin(), others.end(), is_it)) continue;
          error = "the parameter " + core::Quoted(name) +
                  " is tied twice, under several names; name all parameters that are one in a "
                  "single tie";
        }
        std::vector<at::Tensor>& known = tie.parameters;
        std::erase_if(known, is_it);
        const std::vector<int>& tied = plan_.shape().ties[i].stages;
        const bool is_first = stage == *std::min_element(tied.begin(), tied.end());
        known.insert(is_first ? known.begin() : known.end(), found->second);
        tie.counts |= is_first;
        const std::string text = TypeAndShape(found->second);
        if (!texts[i].empty() && texts[i] != text) error = Differing(name, texts[i], text);
        texts[i] = text;
      }
    }
    const std::string what = "the tied parameters of the pipeline " + core::Quoted(options_.name());
    const auto all = ExchangeLists(what, texts, error, plan_.row().set, options_.timeout());
    for (std::size_t i = 0; i < texts.size(); ++i) {
      std::string known = texts[i];
      for (const auto& of_rank : all) {
        if (of_rank[i].empty()) continue;
        if (!known.empty() && known != of_rank[i]) {
          RefuseUse(what + ": " + Differing(plan_.shape().ties[i].name, known, of_rank[i]));
        }
        known = of_rank[i];
      }
    }
  }

  static std::string Differing(const std::string& name, const std::string& one,
                               const std::string& other) {
    return "the tied parameter " + core::Quoted(name) + " is " + one + " and " + other +
           "; give it one type and shape in all its stages";
  }

  // The first stage's values are everybody's.
  void BeginAlike() {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < ties_.size(); ++i) {
      const Tie& tie = plan_.shape().ties[i];
      TiedHere& here = ties_[i];
      if (here.parameters.empty()) continue;
      const int first = *std::min_element(tie.stages.begin(), tie.stages.end());
      const std::string what = "the tied parameter " + core::Quoted(tie.name);
      if (here.counts) {
        for (const int place : plan_.shape().RanksOf(tie)) {
          const int stage = FirstOn(place, tie);
          if (place == plan_.row().place) continue;
          run_.messages().SendOne(here.parameters.front().detach(), stage, plan_.TagOfTie(i),
                                  what + " is sent to " + StageText(plan_, stage));
        }
      } else {
        const at::Tensor value =
            at::empty_like(here.parameters.front(), at::MemoryFormat::Contiguous);
        run_.messages().ReceiveOne(value, first, plan_.TagOfTie(i),
                                   "waits for " + what + " from " + StageText(plan_, first));
        here.parameters.front().copy_(value);
      }
      for (const at::Tensor& parameter : here.parameters) {
        if (!parameter.is_same(here.parameters.front())) parameter.copy_(here.parameters.front());
      }
    }
    run_.messages().Finish();
  }

  // The first stage of a tie that the rank at this place has.
  int FirstOn(int place, const Tie& tie) const {
    int first = -1;
    for (const int stage : tie.stages) {
      if (plan_.shape().RankOf(stage) == place && (first < 0 || stage < first)) first = stage;
    }
    return first;
  }

  double Train(const Tensors& inputs, const Tensors& targets) {
    CheckOptimizer();
    const HeldGates held(ties_, plan_.row().set.session->gradients());
    for (TiedHere& tie : ties_) {
      tie.before.clear();
      for (at::Tensor& parameter : tie.parameters) {
        tie.before.push_back(std::exchange(parameter.mutable_grad(), at::Tensor()));
      }
    }
    double loss = 0;
    try {
      loss = RunBatch(true, inputs, targets, nullptr);
    } catch (...) {
      PutBack();
      throw;
    }
    // Those that one rank alone has, in several stages.
    for (std::size_t i = 0; i < ties_.size(); ++i) {
      if (plan_.shape().RanksOf(plan_.shape().ties[i]).size() == 1) ReduceTied(i);
    }
    return loss;
  }

  // The gradients of before a batch that has thrown.
  void PutBack() {
    for (TiedHere& tie : ties_) {
      for (std::size_t i = 0; i < tie.parameters.size(); ++i) {
        if (tie.before[i].defined()) {
          tie.parameters[i].mutable_grad() = std::exchange(tie.before[i], at::Tensor());
        }
      }
    }
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
      RefuseUse("the optimizer of " + core::Quoted(name) + " averages " +
                (rule.at_backward ? "at the end of each backward()" : "in step()") + " after " +
                std::to_string(rule.passes) + " backward passes, and the pipeline runs " +
                std::to_string(plan_.shape().micro_batches) +
                " micro-batches; give the optimizer the optimizer_options() of the pipeline");
    }
  }

  double RunBatch(bool training, const Tensors& inputs, const Tensors& targets, Tensors* outputs) {
    const double mean =
        run_.Run(training, inputs, targets, outputs, [this](const std::string& name) {
          const auto& ties = plan_.shape().ties;
          const auto tie = std::find_if(ties.begin(), ties.end(),
                                        [&](const Tie& of) { return of.name == name; });
          ReduceTied(static_cast<std::size_t>(tie - ties.begin()));
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

  // Sums the gradients of a tied parameter over its ranks, in the order of these everywhere.
  void ReduceTied(std::size_t index) {
    const at::NoGradGuard no_grad;
    const Tie& tie = plan_.shape().ties[index];
    TiedHere& here = ties_[index];
    if (here.parameters.empty()) return;
    at::Tensor own;
    for (at::Tensor& parameter : here.parameters) {
      const at::Tensor gradient = std::exchange(parameter.mutable_grad(), at::Tensor());
      if (!gradient.defined()) continue;
      const at::Tensor dense = gradient.is_sparse() ? gradient.to_dense() : gradient;
      own = own.defined() ? own.add_(dense) : dense.contiguous();
    }
    if (!own.defined()) {
      own = at::zeros_like(here.parameters.front(), at::MemoryFormat::Contiguous);
    }
    const std::vector<int> places = plan_.shape().RanksOf(tie);
    const int own_stage = FirstOn(plan_.row().place, tie);
    const std::string what = "the gradient of the tied parameter " + core::Quoted(tie.name);
    for (const int place : places) {
      if (place == plan_.row().place) continue;
      const int stage = FirstOn(place, tie);
      run_.messages().SendOne(own, stage, plan_.TagOfTie(index),
                              StageText(plan_, own_stage) + " waits until " +
                                  StageText(plan_, stage) + " takes " + what);
    }
    at::Tensor sum;
    for (const int place : places) {
      at::Tensor part = own;
      if (place != plan_.row().place) {
        const int stage = FirstOn(place, tie);
        part = at::empty_like(own);
        run_.messages().ReceiveOne(part, stage, plan_.TagOfTie(index),
                                   StageText(plan_, own_stage) + " waits for " + what + " from " +
                                       StageText(plan_, stage));
      }
      if (sum.defined()) {
        sum.add_(part);
      } else {
        sum = part.is_same(own) ? own.clone() : part;  // its own is on its way
      }
    }
    for (std::size_t i = 0; i < here.parameters.size(); ++i) {
      at::Tensor& parameter = here.parameters[i];
      if (!parameter.requires_grad()) continue;
      at::Tensor& before = here.before[i];
      parameter.mutable_grad() =
          before.defined() ? std::exchange(before, at::Tensor()).add_(sum) : sum.clone();
    }
  }

  const PipelineOptions options_;
  const PipelinePlan plan_;
  const std::vector<int> stages_;
  NamedTensors parameters_;
  PipelineRun run_;
  std::vector<TiedHere> ties_;
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

double PipelineCore::ClipGradNorm(torch::optim::Optimizer& optimizer, double max_norm,
                                  double norm_type, bool error_if_nonfinite) {
  return impl_->Clip(optimizer, max_norm, norm_type, error_if_nonfinite);
}

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

const std::vector<int>& PipelineCore::stages() const { return impl_->stages(); }
bool PipelineCore::is_first() const { return impl_->stages().front() == 0; }
bool PipelineCore::is_last() const {
  return impl_->stages().back() == impl_->plan().shape().stages - 1;
}

DistributedOptimizerOptions PipelineCore::optimizer_options() const {
  const PipelineOptions& options = impl_->options();
  if (!options.has_data_set) {
    RefuseUse("the pipeline " + core::Quoted(options.name()) +
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
