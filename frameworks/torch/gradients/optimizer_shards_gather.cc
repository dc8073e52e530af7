// After a step the ranks get each other's shards here, or wait for them where parameters are common.
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/base/digest.h"
#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/gradients/optimizer_shards.h"
#include "frameworks/torch/state/sharded_state.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {
namespace {

// A parameter of fewer bytes travels with others of its type and place: an exchange of its own would
// take longer than two copies.
constexpr std::size_t kSmallBytes = std::size_t{32} << 10;

// The digest tells a list of parameters from others.
at::Tensor DigestOf(const std::vector<std::size_t>& numbers) {
  const std::uint64_t digest = core::Digest(numbers.data(), numbers.size() * sizeof(numbers[0]));
  return at::tensor({static_cast<std::int64_t>(digest), static_cast<std::int64_t>(numbers.size())},
                    at::kLong);
}

bool AllRowsAreEqual(const at::Tensor& rows) { return rows.eq(rows[0]).all().item<bool>(); }

}  // namespace

// Ranks that have stepped other parameters than these have another list, which is a Mismatch; one that
// has none comes with an empty tensor, so that nobody waits for it.
void OptimizerShards::Gather(std::vector<Shards*> stepped, const std::string& error) {
  TensorCall call = OwnCall(core::OpKind::kAllGather, {}, "#the shards of the " + what_, set_);
  std::map<std::pair<at::ScalarType, std::string>, SmallParameters> small;
  call.derived_name = true;
  call.grouped = true;
  std::vector<std::size_t> common;  // numbers of parameters
  if (!error.empty()) {
    call.invalid = "the step of the optimizer has thrown: " + error;
    stepped.clear();
  }
  for (const Shards* const shards : stepped) {
    if (shards->place.memory) {
      common.push_back(shards->number);
      continue;
    }
    const at::Tensor whole = FlatLike(shards->parameter, shards->parameter);
    if (whole.nbytes() < kSmallBytes) {
      small[{whole.scalar_type(), whole.device().str()}].push_back({whole, shards->cuts});
      continue;
    }
    call.group.push_back(
        whole.narrow(0, shards->cuts[self()], shards->cuts[self() + 1] - shards->cuts[self()]));
    call.into.push_back(whole);
  }
  for (const auto& [kind, parameters] : small) Pack(parameters, &call);
  if (common_.on()) {
    call.group.push_back(DigestOf(common));
    call.into.push_back(at::empty({2 * set_.size()}, at::kLong));
  } else if (stepped.empty()) {
    call.group.push_back(at::empty({0}));
    call.into.push_back(call.group.front());
  }
  const std::vector<at::Tensor> into = call.into;
  const auto gathered = PendingTensor::Start(std::move(call), set_.session);
  const std::vector<at::Tensor> results = gathered->Results();
  for (std::size_t i = 0; i < into.size(); ++i) {
    if (results[i].numel() == into[i].numel()) continue;
    ThrowInvalid(
        "step() of a sharded optimizer: " +
            (gathered->joined() >= 0 ? "rank " + std::to_string(gathered->joined()) + " has joined"
                                     : "the shards of a parameter do not fit") +
            ", and the ranks have different parameters now: broadcast_parameters() makes them "
            "equal",
        core::Origin{gathered->joined(), "", ""});
  }
  if (common_.on() && !AllRowsAreEqual(into.back().view({set_.size(), 2}))) {
    ThrowStatus(core::Status(
        core::StatusCode::kMismatch,
        "step() of a sharded optimizer: the ranks have gradients of different parameters, and "
        "have different parameters now: broadcast_parameters() makes them equal"));
  }
  std::size_t packed = into.size() - small.size() - (common_.on() ? 1 : 0);
  for (const auto& [kind, parameters] : small) Unpack(parameters, into[packed++]);
  for (const Shards* const shards : stepped) NoteOverwritten(shards->parameter);
}

// What this rank has of all of them goes into one tensor, and what all ranks have into another.
void OptimizerShards::Pack(const SmallParameters& parameters, TensorCall* call) const {
  std::vector<at::Tensor> mine;
  std::int64_t elements = 0;
  for (const auto& [whole, cuts] : parameters) {
    mine.push_back(whole.narrow(0, cuts[self()], cuts[self() + 1] - cuts[self()]));
    elements += whole.numel();
  }
  call->group.push_back(at::cat(mine));
  call->into.push_back(at::empty({elements}, mine.front().options()));
}

// Rank by rank, and of each the parameters in their order.
void OptimizerShards::Unpack(const SmallParameters& parameters, const at::Tensor& packed) const {
  std::vector<at::Tensor> into;
  std::vector<at::Tensor> from;
  std::int64_t at = 0;
  for (std::size_t rank = 0; rank < elements_.size(); ++rank) {
    for (const auto& [whole, cuts] : parameters) {
      const std::int64_t count = cuts[rank + 1] - cuts[rank];
      if (count == 0) continue;
      if (rank != self()) {
        into.push_back(whole.narrow(0, cuts[rank], count));
        from.push_back(packed.narrow(0, at, count));
      }
      at += count;
    }
  }
  // A GPU does this in few launches.
  if (!into.empty()) at::_foreach_copy_(into, from);
}

}  // namespace sirtaki::detail
