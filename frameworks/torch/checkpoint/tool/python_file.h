// What Python's torch.load(weights_only=True) reads.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "frameworks/torch/checkpoint/tool/saved_optimizer.h"

namespace sirtaki::detail {

// A PythonFile is a dict of the parts of a checkpoint, by their names. Parts of different kinds that
// have one name are called by both: "model a", "optimizer a".
class PythonFile {
 public:
  void Add(const std::string& kind, const std::string& name, const c10::IValue& value);
  void Write(const std::string& path) const;  // throws std::runtime_error

 private:
  struct Part {
    std::string kind;
    std::string name;
    c10::IValue value;
  };
  std::vector<Part> parts_;
};

// The state dict of Python's optimizer of the same name. Precondition: it has a Kind().
c10::IValue PythonStateOf(const SavedOptimizer& optimizer);

}  // namespace sirtaki::detail
