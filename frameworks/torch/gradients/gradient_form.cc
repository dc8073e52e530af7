#include "frameworks/torch/gradients/gradient_form.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "core/base/text.h"
#include "core/protocol/mismatch.h"
#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {
namespace {

enum FormField : std::int64_t { kRank, kPresent, kSparseDims, kReducedAsSparse, kFormFieldCount };

}  // namespace

std::optional<std::int64_t> AgreeOnForm(const std::string& name, const std::string& key,
                                        const GradientForm& mine, const SessionSet& set) {
  const at::Tensor row = at::empty({1, kFormFieldCount}, at::kLong);
  auto* told = row.mutable_data_ptr<std::int64_t>();
  told[kRank] = set.rank();
  told[kPresent] = mine.present ? 1 : 0;
  told[kSparseDims] = mine.sparse_dims;
  told[kReducedAsSparse] = mine.reduced_as_sparse ? 1 : 0;
  const at::Tensor rows = AllGatherBlocking(row, key + ".form", set);

  core::RankRanges sparse;
  core::RankRanges dense;
  std::int64_t dims = 0;
  bool alike = true;
  const auto* of_rank = rows.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < rows.size(0); ++i, of_rank += kFormFieldCount) {
    alike &= of_rank[kReducedAsSparse] == told[kReducedAsSparse];
    if (of_rank[kPresent] == 0) continue;
    const bool is_sparse = of_rank[kSparseDims] > 0;
    (is_sparse ? sparse : dense).Add(static_cast<int>(of_rank[kRank]));
    if (is_sparse && dims == 0) dims = of_rank[kSparseDims];
  }
  if (alike) return std::nullopt;
  if (!sparse.empty() && !dense.empty()) {
    ThrowStatus(core::Status(core::StatusCode::kMismatch,
                             "the gradient of " + core::Quoted(name) + " is sparse on " +
                                 core::RanksText(sparse) + " and dense on " +
                                 core::RanksText(dense) +
                                 ": it has to be the same on all ranks that have it; "
                                 "sparse_as_dense(true) makes it dense",
                             core::Origin{-1, "", key}));
  }
  return dims;
}

}  // namespace sirtaki::detail
