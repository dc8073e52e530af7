// An optimizer as a checkpoint has it, without its class: what LibTorch's optimizers write.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace sirtaki::detail {

using Items = std::vector<std::pair<std::string, c10::IValue>>;  // by name, in the file's order
Items ItemsOf(torch::serialize::InputArchive& archive);

// A Piece is what one rank has saved of the parameter that stands at a place in the groups. A
// parameter may stand at several places; its state is at the first one.
struct Piece {
  std::size_t place = 0;
  std::size_t first_place = 0;
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::map<std::string, c10::IValue> state;
};

// A SavedOptimizer is made of the archives of all ranks that have shards of it, or of the one
// archive of an optimizer that is not sharded. What throws throws std::runtime_error or what
// LibTorch throws.
class SavedOptimizer {
 public:
  struct Parameter {
    std::string text;  // "parameter 0 of group 0, float32 [3, 4]"
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
    std::int64_t numel = 1;
    std::size_t first_place = 0;
    std::map<std::string, c10::IValue> state;  // empty: none
  };
  struct Group {
    std::string kind;  // the class of its options
    std::vector<std::size_t> places;
    Items options;
  };

  // `lines`: what optimizer_parameters has of it.
  explicit SavedOptimizer(const std::vector<std::string>& lines);

  // Takes one rank's archive, and returns what that has. `keep`: false: tensors are looked at, and
  // the states of the parameters stay without them; of shards that an optimizer's own kind of save()
  // has written only the ranges are looked at.
  std::vector<Piece> Add(torch::serialize::InputArchive& archive, bool keep = true);
  // Throws if what was added is not all of each parameter, once.
  void Finish() const;
  // Writes what Optimizer::save() of the whole would write, as LoadOptimizer() reads it.
  void Write(torch::serialize::OutputArchive& archive) const;

  const std::vector<Group>& groups() const { return groups_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  // Adam for torch::optim::AdamOptions. Empty: not one of LibTorch's whose state has a value, or an
  // element for each of the parameter's.
  std::string Kind() const;

 private:
  std::vector<Piece> ReadPieces(torch::serialize::InputArchive& archive, bool keep);
  void Merge(const Piece& piece, bool keep);

  std::vector<Group> groups_;
  std::vector<Parameter> parameters_;                                       // by place
  std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>> ranges_;  // by place; their ends
  std::vector<std::int64_t> with_state_;                                    // by place; elements
};

}  // namespace sirtaki::detail
