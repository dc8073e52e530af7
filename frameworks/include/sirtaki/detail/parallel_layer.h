// What the split layers of C++ and Python are made of.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sirtaki/export.h"
#include "sirtaki/process_set.h"

namespace sirtaki {

namespace detail {

struct ParallelCalls;

// A ParallelLayer is what the ranks of a split layer have agreed on, and its calls. A cheap, copyable reference.
class SIRTAKI_API ParallelLayer {
 public:
  struct Size {
    const char* what;  // "out_features"
    std::int64_t size;
    std::int64_t blocks;
    std::int64_t unit;
  };

  ParallelLayer() = default;
  // `kind`: the class; `options`: what has to be the same on all ranks. Collective, and throws as
  // the layers' constructors.
  ParallelLayer(const std::string& kind, const std::string& name, const ProcessSet& process_set,
                const Size& size, std::vector<std::string> options);

  // The same for a copy of the module, whose calls are its own. Not collective, but all ranks make it.
  ParallelLayer Anew() const;

  int ranks() const;
  int index() const;  // of this rank among them
  // The part of a whole tensor that this rank has, in new memory.
  at::Tensor Part(const at::Tensor& whole, std::int64_t dim) const;
  // What every rank has whole, as the first rank has it: with biases of their own the ranks would not
  // compute the same. In the memory of `whole`, which is a tensor of the layer's own. Collective.
  at::Tensor Common(const at::Tensor& whole) const;
  // Says that the parameter is such a part. Dimension 0 or 1.
  void Mark(const at::Tensor& parameter, std::int64_t dim) const;

  at::Tensor Column(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                    bool gather_output) const;
  at::Tensor Row(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                 bool input_is_parallel) const;
  // `padding_idx`: -1: none.
  at::Tensor Embed(const at::Tensor& ids, const at::Tensor& weight, std::int64_t padding_idx) const;
  // `reduction`: at::Reduction's.
  at::Tensor CrossEntropy(const at::Tensor& logits, const at::Tensor& target,
                          std::int64_t ignore_index, double label_smoothing,
                          std::int64_t reduction) const;

 private:
  explicit ParallelLayer(std::shared_ptr<const ParallelCalls> calls) : calls_(std::move(calls)) {}

  std::shared_ptr<const ParallelCalls> calls_;
};

// The set over which the parameter is split; nothing: it is whole, or the set is one rank.
SIRTAKI_API std::optional<ProcessSet> SplitSetOf(const at::Tensor& parameter);
// The shape of the whole parameter.
SIRTAKI_API std::vector<std::int64_t> WholeShapeOf(const at::Tensor& parameter);
// This rank's part of the whole, in new memory. Precondition: the parameter is split.
SIRTAKI_API at::Tensor PartFor(const at::Tensor& parameter, const at::Tensor& whole);

}  // namespace detail

}  // namespace sirtaki
