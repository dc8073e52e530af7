#include "ops/groups/runs.h"

#include <algorithm>

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

const void* ReducedInput(const core::RunItem& item) {
  if (item.work == nullptr) return nullptr;
  const std::vector<bool>& absent = item.work->request.absent;
  const bool all_absent =
      !absent.empty() && std::find(absent.begin(), absent.end(), false) == absent.end();
  return all_absent ? nullptr : item.work->input;
}

std::int64_t WindowBytes(std::int64_t chunk_bytes, std::int64_t members) {
  constexpr std::int64_t kWorthAMessage = std::int64_t{32} << 10;
  return std::min(chunk_bytes, std::max(chunk_bytes / members, kWorthAMessage));
}

bool ScalesBeforeFilling(const core::Signature& signature) {
  const core::ReduceOp op = signature.reduction;
  return signature.prescale != 1.0 && (op == core::ReduceOp::kMin || op == core::ReduceOp::kMax ||
                                       op == core::ReduceOp::kProduct);
}

void Slices::Clear() {
  outgoing_.clear();
  incoming_.clear();
}

void Slices::Send(std::int64_t member, const void* memory, std::int64_t bytes) {
  if (bytes > 0) outgoing_.push_back({static_cast<int>(member), memory, bytes});
}

void Slices::Receive(std::int64_t member, void* memory, std::int64_t bytes) {
  if (bytes > 0) incoming_.push_back({static_cast<int>(member), memory, bytes});
}

bool TotalBytes(const std::vector<std::int64_t>& rows, std::int64_t row_bytes,
                std::int64_t* total) {
  *total = 0;
  for (const std::int64_t r : rows) {
    std::int64_t bytes = 0;
    if (r < 0 || __builtin_mul_overflow(r, row_bytes, &bytes) ||
        __builtin_add_overflow(*total, bytes, total)) {
      return false;
    }
  }
  return true;
}

std::string WrongRows(const core::RunItem& item, const std::vector<std::int64_t>& rows) {
  std::string text = "the numbers of rows for " + item.key.ToString() + " are impossible:";
  for (std::size_t m = 0; m < rows.size(); ++m) {
    text +=
        (m == 0 ? " " : ", ") + std::to_string(rows[m]) + " rows of member " + std::to_string(m);
  }
  return text;
}

std::string NoMemoryFor(const core::RunItem& item) {
  return "out of memory for the result of " + item.key.ToString();
}

}  // namespace sirtaki::ops
