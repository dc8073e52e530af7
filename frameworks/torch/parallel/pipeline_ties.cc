#include "frameworks/torch/parallel/pipeline_ties.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/base/text.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {
namespace {

std::string Differing(const std::string& name, const std::string& one, const std::string& other) {
  return "the tied parameter " + core::Quoted(name) + " is " + one + " and " + other +
         "; give it one type and shape in all its stages";
}

}  // namespace

PipelineTies::HeldGates::HeldGates(const PipelineTies& ties) {
  GradientRegistry& registry = ties.plan_.row().set.session->gradients();
  for (const Here& tie : ties.here_) {
    for (const at::Tensor& parameter : tie.parameters) {
      auto gradient = registry.OfParameter(parameter.unsafeGetTensorImpl());
      if (gradient == nullptr) continue;
      gradient->gate().Hold();
      held_.push_back(std::move(gradient));
    }
  }
}

PipelineTies::HeldGates::~HeldGates() {
  for (const auto& gradient : held_) gradient->gate().Release();
}

void PipelineTies::Replace(const at::Tensor& before, const at::Tensor& now) {
  for (Here& tie : here_) {
    for (at::Tensor& tied : tie.parameters) {
      if (tied.is_same(before)) tied = now;
    }
  }
}

void PipelineTies::SetAside() {
  for (Here& tie : here_) {
    tie.before.clear();
    for (at::Tensor& parameter : tie.parameters) {
      tie.before.push_back(std::exchange(parameter.mutable_grad(), at::Tensor()));
    }
  }
}

// What this rank has of each tie; the ranks that have it have the same type and shape of it.
void PipelineTies::Find(const PipelineOptions& options, const NamedTensors& parameters) {
  std::string error;
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < options.ties().size(); ++i) {
    Here& tie = here_.emplace_back();
    texts.emplace_back();
    for (std::size_t j = 0; j < options.ties()[i].size(); ++j) {
      const std::string& name = options.ties()[i][j];
      const int stage = plan_.shape().ties[i].stages[j];
      if (plan_.RankOf(stage) != plan_.row().set.rank()) continue;
      const auto found = std::find_if(parameters.begin(), parameters.end(),
                                      [&](const auto& named) { return named.first == name; });
      if (found == parameters.end()) {
        error = "there is no parameter " + core::Quoted(name) + " in stage " +
                std::to_string(stage) +
                ", where it is to be tied; use the names of "
                "named_parameters()";
        break;
      }
      const auto is_it = [&](const at::Tensor& of) { return of.is_same(found->second); };
      for (std::size_t k = 0; k < i; ++k) {
        const std::vector<at::Tensor>& others = here_[k].parameters;
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
  const std::string what = "the tied parameters of the pipeline " + core::Quoted(options.name());
  const auto all = ExchangeLists(what, texts, error, plan_.row().set, options.timeout());
  for (std::size_t i = 0; i < texts.size(); ++i) {
    std::string known = texts[i];
    for (const auto& of_rank : all) {
      if (of_rank[i].empty()) continue;
      if (!known.empty() && known != of_rank[i]) {
        ThrowInvalid(what + ": " + Differing(plan_.shape().ties[i].name, known, of_rank[i]));
      }
      known = of_rank[i];
    }
  }
  BeginAlike();
}

// The first stage's values are everybody's.
void PipelineTies::BeginAlike() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < here_.size(); ++i) {
    const Tie& tie = plan_.shape().ties[i];
    Here& here = here_[i];
    if (here.parameters.empty()) continue;
    const int first = *std::min_element(tie.stages.begin(), tie.stages.end());
    const std::string what = "the tied parameter " + core::Quoted(tie.name);
    if (here.counts) {
      for (const int place : plan_.shape().RanksOf(tie)) {
        const int stage = FirstOn(place, tie);
        if (place == plan_.row().place) continue;
        messages_.SendOne(here.parameters.front().detach(), stage, plan_.TagOfTie(i),
                          what + " is sent to " + StageText(plan_, stage));
      }
    } else {
      const at::Tensor value =
          at::empty_like(here.parameters.front(), at::MemoryFormat::Contiguous);
      messages_.ReceiveOne(value, first, plan_.TagOfTie(i),
                           "waits for " + what + " from " + StageText(plan_, first));
      here.parameters.front().copy_(value);
    }
    for (const at::Tensor& parameter : here.parameters) {
      if (!parameter.is_same(here.parameters.front())) parameter.copy_(here.parameters.front());
    }
  }
  messages_.Finish();
}

// The first stage of a tie that the rank at this place has.
int PipelineTies::FirstOn(int place, const Tie& tie) const {
  int first = -1;
  for (const int stage : tie.stages) {
    if (plan_.shape().RankOf(stage) == place && (first < 0 || stage < first)) first = stage;
  }
  return first;
}

// Sums the gradients of a tied parameter over its ranks, in the order of these everywhere.
void PipelineTies::Sum(std::size_t index) {
  const at::NoGradGuard no_grad;
  const Tie& tie = plan_.shape().ties[index];
  Here& here = here_[index];
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
    messages_.SendOne(
        own, stage, plan_.TagOfTie(index),
        StageText(plan_, own_stage) + " waits until " + StageText(plan_, stage) + " takes " + what);
  }
  at::Tensor sum;
  for (const int place : places) {
    at::Tensor part = own;
    if (place != plan_.row().place) {
      const int stage = FirstOn(place, tie);
      part = at::empty_like(own);
      messages_.ReceiveOne(
          part, stage, plan_.TagOfTie(index),
          StageText(plan_, own_stage) + " waits for " + what + " from " + StageText(plan_, stage));
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

// Whether clipping counts the gradient of the parameter here. A tied one counts once.
bool PipelineTies::Counts(const at::Tensor& parameter) const {
  return std::none_of(here_.begin(), here_.end(), [&](const Here& tie) {
    const auto found =
        std::find_if(tie.parameters.begin(), tie.parameters.end(),
                     [&](const at::Tensor& tied) { return tied.is_same(parameter); });
    if (found == tie.parameters.end()) return false;
    return !tie.counts || found != tie.parameters.begin();
  });
}

// The gradients of before a batch that has thrown.
void PipelineTies::PutBack() {
  for (Here& tie : here_) {
    for (std::size_t i = 0; i < tie.parameters.size(); ++i) {
      if (tie.before[i].defined()) {
        tie.parameters[i].mutable_grad() = std::exchange(tie.before[i], at::Tensor());
      }
    }
  }
}

}  // namespace sirtaki::detail
