// The ranks of a host have the parameters of a sharded optimizer once, in place of once each, since
// its steps write each element on one rank alone. Between steps, and where the ranks had other numbers
// to begin with, a rank may have numbers of its own, as in copies. The next step takes them over where
// they lie in this rank's shard, and lets go of the rest, as the gather of separate parameters does.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "frameworks/torch/session/session_set.h"
#include "ops/shm/common_memory.h"

namespace sirtaki::detail {

// A place tells where a parameter lies that is common.
struct CommonPlace {
  std::shared_ptr<ops::shm::CommonMemory> memory;  // null: each rank has its own copy
  std::int64_t begin = 0;                          // in the memory
  at::Tensor own;              // the memory that the parameter has between steps,
  at::Tensor common;           // and that of the step
  const void* seen = nullptr;  // where the parameter lay when the ranks last met
};

// A candidate is a parameter as CommonParameters takes it.
struct CommonCandidate {
  at::Tensor parameter;
  CommonPlace* place = nullptr;
  std::int64_t shard_begin = 0;  // this rank's, in elements
  std::int64_t shard_count = 0;
  bool is_stepped = false;  // by this step
};

// Used by the thread that uses the optimizer.
class CommonParameters {
 public:
  // `wanted`: the option share_parameters.
  CommonParameters(SessionSet set, const std::string& what, bool wanted);

  // Waits for all ranks, whose reads of their parameters are over then, and puts what is to be common
  // where all have it. The candidates are those of all ranks, in the same order. `error`: why this
  // rank makes no step; all ranks throw it. `in_step`: otherwise the first step asks again for what
  // cannot be common yet. Collective.
  void Meet(const std::vector<CommonCandidate>& candidates, const std::string& error, bool in_step);
  // Whether some parameters are common, or may be after Meet. The same on all ranks.
  bool on() const { return on_; }
  // Whether Meet looks at taking the parameter, which has this place, into common memory.
  bool WouldMove(const at::Tensor& parameter, const CommonPlace& place) const {
    return on_ && !place.memory && parameter.const_data_ptr() != place.seen;
  }
  // Lets go of what this rank has written, or has brought, where all have the same there.
  static void LetGoOfEqual(const std::vector<CommonCandidate>& candidates);
  // Brings what this rank has written in its shards of the parameters of the step to where all see it,
  // and lets go of the rest. To be called between Meet and the gather: before the base's step, and
  // after it for what that has written to the program's view of the parameters. A parameter without
  // a gradient keeps what was written to it, as it does where each rank has a copy.
  static void TakeWritten(const std::vector<CommonCandidate>& candidates);

 private:
  using Positions = std::vector<std::size_t>;  // in the candidates

  // Asks the ranks which candidates have got another place since they last met. `*adopted` lie on all
  // ranks where they can be taken from; of `*left` that is not so.
  void Ask(const std::vector<CommonCandidate>& candidates, const std::string& error,
           Positions* adopted, Positions* left) const;
  // Makes these common, or none of them where the ranks cannot see each other's memory.
  void Adopt(const std::vector<CommonCandidate>& candidates, const Positions& adopted);
  // `fill`: what the first rank puts there before the others look.
  std::shared_ptr<ops::shm::CommonMemory> MakeMemory(
      std::int64_t bytes, const std::function<void(std::byte* memory)>& fill);

  const SessionSet set_;
  const std::string name_;   // of its calls
  bool on_;                  // the same on all ranks
  bool has_common_ = false;  // or has had: parameters that have left may come back
};

}  // namespace sirtaki::detail
