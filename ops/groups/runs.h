// How GroupRun::Make gets its runs, and what several of them share.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/types.h"
#include "fusion/convert.h"
#include "fusion/pack.h"
#include "ops/groups/group_run.h"

namespace sirtaki::ops {

std::unique_ptr<GroupRun> MakeReduceRun(const RunContext& context);  // all-reduce, reduce
std::unique_ptr<GroupRun> MakeReduceScatterRun(const RunContext& context);
std::unique_ptr<GroupRun> MakeAdasumRun(const RunContext& context);
std::unique_ptr<GroupRun> MakeBroadcastRun(const RunContext& context);
std::unique_ptr<GroupRun> MakeAllGatherRun(const RunContext& context);
std::unique_ptr<GroupRun> MakeAllGatherIntoRun(const RunContext& context);
std::unique_ptr<GroupRun> MakeGatherRun(const RunContext& context);
std::unique_ptr<GroupRun> MakeScatterRun(const RunContext& context);
std::unique_ptr<GroupRun> MakeAllToAllRun(const RunContext& context);

// Reductions take complex numbers as twice as many of their parts.
struct Elements {
  core::DType dtype = core::DType::kF32;  // of one
  std::int64_t of_each = 1;               // how many one element of the tensor is
};
Elements ElementsOf(const core::Signature& signature);

// What adds nothing to a reduction, as an element of the type.
fusion::Identity IdentityOf(core::ReduceOp op, core::DType dtype);

// What this rank gives to a reduction: null if it has joined or has no gradient this time.
const void* ReducedInput(const core::RunItem& item);

// Bytes of a window of each of several members' parts that are staged side by side: together a
// chunk, but with many members no less than is worth a message.
std::int64_t WindowBytes(std::int64_t chunk_bytes, std::int64_t members);

// Whether prescale has to be applied before what is absent is filled in: of the operations whose
// identity is not zero a scaled identity is none.
bool ScalesBeforeFilling(const core::Signature& signature);

// What is given to and taken from the others in one Exchange. Keeps its memory from one to the
// next.
class Slices {
 public:
  void Clear();
  // Nothing is noted where there is not a byte.
  void Send(std::int64_t member, const void* memory, std::int64_t bytes);
  void Receive(std::int64_t member, void* memory, std::int64_t bytes);

  std::unique_ptr<Completion> Exchange(Backend& backend, Channel channel) const {
    return backend.Exchange(channel, outgoing_, incoming_);
  }

 private:
  std::vector<OutgoingSlice> outgoing_;
  std::vector<IncomingSlice> incoming_;
};

// The sum of `rows`, each not negative, times `row_bytes`; false if that is not so or does not fit.
bool TotalBytes(const std::vector<std::int64_t>& rows, std::int64_t row_bytes, std::int64_t* total);
// The text of that; and of an allocate_output that gives nothing.
std::string WrongRows(const core::RunItem& item, const std::vector<std::int64_t>& rows);
std::string NoMemoryFor(const core::RunItem& item);

}  // namespace sirtaki::ops
