#include "frameworks/torch/gradients/gradient_form.h"

#include <ATen/ops/empty.h>

#include <map>
#include <utility>

#include "core/base/text.h"
#include "core/protocol/mismatch.h"
#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {
namespace {

enum FormField : std::int64_t {
  kRank,
  kPresent,
  kSparseDims,
  kReducedAsSparse,
  kRound,
  kFormFieldCount
};

std::string RoundText(std::int64_t round, bool of_module) {
  if (round == kRoundInStep) return "in step()";
  if (round == kRoundAfterThrow) return "after a backward() that has thrown";
  return "by backward() number " + std::to_string(round) +
         (of_module ? " after forward()" : " of the step");
}

// Ranks that are at other places of their program would average what does not belong together.
[[noreturn]] void ThrowOtherRounds(const std::string& name, const std::string& key,
                                   const std::map<std::int64_t, core::RankRanges>& rounds,
                                   bool of_module) {
  std::string text;
  for (const auto& [round, ranks] : rounds) {
    text +=
        (text.empty() ? "" : ", ") + RoundText(round, of_module) + " on " + core::RanksText(ranks);
  }
  if (rounds.count(kRoundAfterThrow) != 0) {
    text +=
        ": the others had all gradients of it, and may have made a step that this rank has not "
        "made; broadcast_parameters() and broadcast_optimizer_state() from one of them make the "
        "ranks equal";
  } else if (of_module) {
    text +=
        ": all ranks call backward() equally often after a forward(), the inner ones too; let the "
        "others add up in no_sync()";
  } else if (rounds.count(kRoundInStep) != 0) {
    text +=
        ": a rank whose backward() reaches no parameter of the optimizer calls the optimizer's "
        "synchronize() right after it, before anything else, and no_sync() is alike on all ranks; "
        "or average in step(), by average_at";
  } else {
    text +=
        ": all ranks call backward() equally often before step(), the inner ones too; let the "
        "others add up in no_sync() or by backward_passes_per_step; or average in step(), by "
        "average_at";
  }
  ThrowStatus(core::Status(core::StatusCode::kMismatch,
                           "the gradient of " + core::Quoted(name) + " is averaged " + text,
                           core::Origin{rounds.rbegin()->second.First(), "", key}));
}

}  // namespace

std::shared_ptr<Pending> AskForForms(const std::string& key, const GradientForm& mine,
                                     const SessionSet& set) {
  const at::Tensor row = at::empty({1, kFormFieldCount}, at::kLong);
  auto* told = row.mutable_data_ptr<std::int64_t>();
  told[kRank] = set.rank();
  told[kPresent] = mine.present ? 1 : 0;
  told[kSparseDims] = mine.sparse_dims;
  told[kReducedAsSparse] = mine.reduced_as_sparse ? 1 : 0;
  told[kRound] = mine.round;
  TensorCall call = OwnCall(core::OpKind::kAllGather, row, "#what the ranks have of " + key, set);
  call.derived_name = true;
  return PendingTensor::Start(std::move(call), set.session);
}

std::optional<std::int64_t> DecideForm(const std::string& name, const std::string& key,
                                       const at::Tensor& forms, bool of_module) {
  core::RankRanges sparse;
  core::RankRanges dense;
  std::map<std::int64_t, core::RankRanges> rounds;
  std::int64_t dims = 0;
  bool alike = true;
  const auto* const first = forms.const_data_ptr<std::int64_t>();
  const auto* of_rank = first;
  for (std::int64_t i = 0; i < forms.size(0); ++i, of_rank += kFormFieldCount) {
    const int rank = static_cast<int>(of_rank[kRank]);
    alike &= of_rank[kReducedAsSparse] == first[kReducedAsSparse];
    rounds[of_rank[kRound]].Add(rank);
    if (of_rank[kPresent] == 0) continue;
    const bool is_sparse = of_rank[kSparseDims] > 0;
    (is_sparse ? sparse : dense).Add(rank);
    if (is_sparse && dims == 0) dims = of_rank[kSparseDims];
  }
  if (rounds.size() > 1) ThrowOtherRounds(name, key, rounds, of_module);
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
