// Reductions share these terms: what an element is, what a rank gives, what stands for a rank that
// gives nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/base/types.h"
#include "core/protocol/request.h"
#include "fusion/pack.h"
#include "ops/base/bytes.h"
#include "ops/groups/group_task.h"

namespace sirtaki::ops {

// Reductions take complex numbers as twice as many of their parts.
struct Elements {
  core::DType dtype = core::DType::kF32;  // of one
  std::int64_t of_each = 1;               // how many one element of the tensor is
};
Elements ElementsOf(const core::Signature& signature);

// The identity adds nothing to a reduction; it is an element of the type.
fusion::Identity IdentityOf(core::ReduceOp op, core::DType dtype);

// KeepsResult says whether the result is this rank's: that of a reduce is the root's alone.
inline bool KeepsResult(const GroupTask& task) {
  return task.signature().kind != core::OpKind::kReduce || task.rank == task.signature().root;
}

// The 16-bit type that the elements are rounded to on their way, by their own type or by request.
// None for a set of one: nothing travels, so nothing is rounded.
std::optional<core::DType> WireType(const GroupTask& task);

// Whether each member keeps a part of this all-reduce, and nobody needs the whole. The same on all
// members that have not joined.
bool AllKeepParts(const GroupItem& item);
// Whether each member gets its part of all of them, and nothing else. All members know that alike, as
// somebody who has joined is silent.
bool OnlyPartsAreKept(const GroupTask& task);
// The elements that a member gets of a tensor that is reduced and scattered: of some rows, or of the
// part that it keeps.
Part ShareOf(const GroupItem& item, std::int64_t members, std::int64_t member);

// This rank gives this to a reduction: null if it has joined or has no gradient this time.
const void* ReducedInput(const GroupItem& item);

// The tensors of a reduction, as this rank sees them.
std::vector<fusion::Piece> ReducedPieces(const GroupTask& task);

// Whether prescale has to be applied before what is absent is filled in: of the operations whose
// identity is not zero a scaled identity is none.
bool ScalesBeforeFilling(const core::Signature& signature);

}  // namespace sirtaki::ops
