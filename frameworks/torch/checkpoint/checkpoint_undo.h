// What a checkpoint's parts were before it was loaded, for when the load fails on some rank. Of one
// rank; nothing here is collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "frameworks/torch/checkpoint/scheduler_position.h"
#include "sirtaki/checkpoint.h"

namespace sirtaki::detail {

// Brings optimizers back to what they were when it was made, unless Keep() is called.
class OptimizerUndo {
 public:
  explicit OptimizerUndo(const CheckpointParts& parts);  // takes their state away
  ~OptimizerUndo();
  OptimizerUndo(const OptimizerUndo&) = delete;
  OptimizerUndo& operator=(const OptimizerUndo&) = delete;
  void Keep();

 private:
  struct Before;
  std::vector<Before> before_;
};

// The same for all other parts, whose values stay where they are.
class SmallPartsUndo {
 public:
  explicit SmallPartsUndo(const CheckpointParts& parts);  // throws what an object's save() throws
  ~SmallPartsUndo();
  SmallPartsUndo(const SmallPartsUndo&) = delete;
  SmallPartsUndo& operator=(const SmallPartsUndo&) = delete;
  void Keep() { parts_ = nullptr; }

 private:
  void Restore() const;

  const CheckpointParts* parts_;
  std::vector<SchedulerPosition> schedulers_;
  std::vector<std::variant<std::int64_t, double, std::string, at::Tensor>> values_;
  std::vector<std::string> objects_;  // their archives
  std::vector<at::Tensor> generator_states_;
};

}  // namespace sirtaki::detail
