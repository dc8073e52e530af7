#include "ops/groups/reduction_terms.h"

#include <algorithm>
#include <vector>

#include "ops/base/kernels.h"

namespace sirtaki::ops {

Elements ElementsOf(const core::Signature& signature) {
  return {core::PartType(signature.dtype), core::IsComplex(signature.dtype) ? 2 : 1};
}

fusion::Identity IdentityOf(core::ReduceOp op, core::DType dtype) {
  fusion::Identity identity;
  FillIdentity(op, dtype, identity.bytes.data(), 1);
  return identity;
}

const void* ReducedInput(const GroupItem& item) {
  if (item.work == nullptr) return nullptr;
  return core::AllAbsent(item.work->request.absent) ? nullptr : item.work->input;
}

std::vector<fusion::Piece> ReducedPieces(const GroupTask& task) {
  const bool keeps = KeepsResult(task);
  const std::int64_t of_each = ElementsOf(task.signature()).of_each;
  std::vector<fusion::Piece> pieces;
  pieces.reserve(task.items.size());
  for (const GroupItem& item : task.items) {
    pieces.push_back(
        {.input = ReducedInput(item),
         .output = keeps && item.work != nullptr ? item.work->output : nullptr,
         .count = item.signature->ElementCount() * of_each,
         .kept = item.work != nullptr && item.work->kept ? &*item.work->kept : nullptr});
  }
  return pieces;
}

std::optional<core::DType> WireType(const GroupTask& task) {
  const core::Signature& signature = task.signature();
  if (task.members->Count() == 1) return std::nullopt;
  if (signature.wire) return signature.wire;
  return core::IsHalf(signature.dtype) ? std::optional(signature.dtype) : std::nullopt;
}

bool OnlyPartsAreKept(const GroupTask& task) {
  return task.silent.empty() && std::all_of(task.items.begin(), task.items.end(), AllKeepParts);
}

bool AllKeepParts(const GroupItem& item) {
  return item.work != nullptr && item.work->kept && item.work->kept->cuts;
}

Part ShareOf(const GroupItem& item, std::int64_t members, std::int64_t member) {
  if (AllKeepParts(item)) {
    const std::int64_t of_each = ElementsOf(*item.signature).of_each;
    const std::int64_t* const cut = item.work->kept->cuts->data() + member;
    return {cut[0] * of_each, (cut[1] - cut[0]) * of_each};
  }
  const std::vector<std::int64_t>& shape = item.signature->shape;
  const std::int64_t rows = shape.empty() ? 0 : shape.front();
  if (rows == 0) return {};
  const std::int64_t row =
      item.signature->ElementCount() / rows * ElementsOf(*item.signature).of_each;
  return {core::FirstRowOf(rows, members, member) * row, core::RowsOf(rows, members, member) * row};
}

bool ScalesBeforeFilling(const core::Signature& signature) {
  const core::ReduceOp op = signature.reduction;
  return signature.prescale != 1.0 && op != core::ReduceOp::kSum &&
         op != core::ReduceOp::kAverage && op != core::ReduceOp::kAdasum;
}

}  // namespace sirtaki::ops
