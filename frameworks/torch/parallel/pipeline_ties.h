// Parameters that several stages of a pipeline have in common. They begin alike, and their gradients are
// summed over the stages.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "frameworks/torch/gradients/parameter_gradient.h"
#include "frameworks/torch/parallel/pipeline_messages.h"
#include "frameworks/torch/parallel/pipeline_plan.h"
#include "sirtaki/pipeline.h"

namespace sirtaki::detail {

// The pipeline's core has it, and uses it on its thread.
class PipelineTies {
 public:
  // Both outlive it.
  PipelineTies(const PipelinePlan& plan, PipelineMessages& messages)
      : plan_(plan), messages_(messages) {}

  // Finds what this rank has of each tie, and gives all ranks the values of the first stage. `parameters`:
  // of this rank. Collective over the row; throws InvalidArgument on all its ranks if one lacks a
  // parameter, or types or shapes differ.
  void Find(const PipelineOptions& options, const NamedTensors& parameters);
  void Replace(const at::Tensor& before, const at::Tensor& now);

  // Whether there are none, on any rank.
  bool empty() const { return here_.empty(); }
  // Whether clipping counts the gradient of the parameter here. A tied one counts once.
  bool Counts(const at::Tensor& parameter) const;

  // Within this scope gradients are handed to an optimizer's reduction when they are summed, and not when a
  // backward pass has written them.
  class HeldGates {
   public:
    explicit HeldGates(const PipelineTies& ties);
    ~HeldGates();
    HeldGates(const HeldGates&) = delete;
    HeldGates& operator=(const HeldGates&) = delete;

   private:
    std::vector<std::shared_ptr<ParameterGradient>> held_;
  };

  void SetAside();  // the gradients of before the batch, to which those of the batch are added
  void PutBack();   // of a batch that has thrown
  // Sums the gradients of a tie over its ranks, in the order of these everywhere.
  void Sum(std::size_t index);

 private:
  using Tie = parallel::Tie;
  // A tied parameter as this rank has it.
  struct Here {
    std::vector<at::Tensor> parameters;  // each once
    bool counts = false;  // this rank has the first stage of the tie, which clipping counts
    std::vector<at::Tensor> before;  // gradients that were there before the batch
  };

  void BeginAlike();
  int FirstOn(int place, const Tie& tie) const;

  const PipelinePlan& plan_;
  PipelineMessages& messages_;
  std::vector<Here> here_;
};

}  // namespace sirtaki::detail
