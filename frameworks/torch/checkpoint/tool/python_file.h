// What Python's torch.load(weights_only=True) reads.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace sirtaki::detail {

// A dict of any types: lists and dicts of one type are classes of TorchScript in a pickle.
c10::impl::GenericDict AnyDict();

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

}  // namespace sirtaki::detail
