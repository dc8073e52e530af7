// The changes that a step of an optimizer makes are combined over the ranks by Adasum.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "frameworks/torch/session/session_set.h"

namespace sirtaki::detail {

class Pending;

// One step, on one thread.
class StepDeltas {
 public:
  explicit StepDeltas(SessionSet set) : set_(std::move(set)) {}

  // Before the step: keeps a copy of the parameter. `key`: of its reduction.
  void Remember(const std::string& key, const at::Tensor& parameter);

  // After it. Each parameter becomes what it was plus the combination of what all ranks' steps have
  // added to it. Collective; throws the first error, and the parameters are then what they were,
  // or, after a group's fault, undefined.
  void Combine();

  // The parameters become what they were.
  void TakeBack();

 private:
  struct Entry {
    std::string key;
    at::Tensor parameter;  // a step may give it other memory
    at::Tensor start;
  };
  std::shared_ptr<Pending> Submit(const Entry& entry) const;

  const SessionSet set_;
  std::vector<Entry> entries_;
};

}  // namespace sirtaki::detail
