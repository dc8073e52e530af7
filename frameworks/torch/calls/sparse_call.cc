#include "frameworks/torch/calls/sparse_call.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/base/text.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/calls/call_forms.h"
#include "frameworks/torch/calls/call_memory.h"
#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/session/set_membership.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {
namespace {

// These parts are gathered of each rank.
enum Part : std::size_t { kDescription, kIndices, kValues, kPartCount };

struct SparseSum {
  AllreduceOptions options;
  std::vector<std::int64_t> sizes;
  at::ScalarType type = at::kFloat;
  core::RankRanges members;
};

// Each rank compares this text of all: they must agree on it, and no all-gather tells it.
std::string DescribeSparse(const at::Tensor& tensor, const AllreduceOptions& options) {
  std::ostringstream text;
  text.precision(17);
  text << (options.op() == ReduceOp::Average ? "average" : "sum") << " of sparse "
       << TypeAndShape(tensor) << " with " << tensor.sparse_dim() << " sparse dimensions";
  if (options.prescale() != 1.0) text << ", prescale " << options.prescale();
  if (options.postscale() != 1.0) text << ", postscale " << options.postscale();
  return text.str();
}

std::string WhyInvalid(const at::Tensor& tensor, const AllreduceOptions& options) {
  if (!tensor.defined()) return "the tensor is undefined";
  if (!tensor.is_sparse()) {
    std::ostringstream why;
    why << "the tensor has layout " << tensor.layout()
        << "; sparse_allreduce takes sparse COO tensors";
    return why.str();
  }
  if (std::string why = WhyNotMovable(tensor._values()); !why.empty()) return why;
  if (options.op() != ReduceOp::Sum && options.op() != ReduceOp::Average) {
    return "sparse tensors can be summed and averaged only";
  }
  const auto dtype = DTypeOf(tensor.scalar_type());
  if (!dtype || !core::IsDefined(core::ReduceOp::kSum, *dtype)) {
    return "the sparse tensor has type " + std::string(c10::toString(tensor.scalar_type())) +
           ", which cannot be summed";
  }
  if (options.compression() != Compression::None) return "sparse tensors cannot be compressed";
  const bool scaled = options.prescale() != 1.0 || options.postscale() != 1.0;
  if (scaled && !core::IsFloating(*dtype)) {
    return "prescale and postscale other than 1 need a floating point type, not " +
           std::string(core::DTypeName(*dtype));
  }
  return {};
}

// The parts of this rank, all with as many rows as it likes. On a GPU those of an element are added
// up at the end only: how many that leaves is nothing that the host could wait for in a hook.
std::vector<at::Tensor> PartsOf(const at::Tensor& tensor, const AllreduceOptions& options) {
  std::vector<at::Tensor> parts(kPartCount);
  const at::Tensor whole = IsOnGpu(tensor) ? tensor.detach() : tensor.detach().coalesce();
  parts[kDescription] = AsTensor(std::make_shared<std::string>(DescribeSparse(whole, options)));
  parts[kIndices] = whole._indices().t().contiguous();
  parts[kValues] = whole._values();
  return parts;
}

class PendingSparse : public Pending {
 public:
  // `gpu`: where the sum is; null: on the host.
  PendingSparse(std::shared_ptr<PendingTensor> gathered, SparseSum sum,
                std::shared_ptr<session::Gpu> gpu)
      : gathered_(std::move(gathered)), sum_(std::move(sum)), gpu_(std::move(gpu)) {}

  bool Poll() override { return gathered_->Poll(); }
  void Then(std::function<void()> next) override { gathered_->Then(std::move(next)); }
  void Abort(const std::string& why) override { gathered_->Abort(why); }
  int joined() const override { return gathered_->joined(); }

  std::vector<at::Tensor> Results() override {
    const std::vector<at::Tensor> parts = gathered_->Results();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (result_.defined()) {
      AwaitOnGpus(made_);  // another stream may have made it
    } else {
      at::NoGradGuard no_grad;
      CheckAgreement(parts[kDescription], gathered_->ReceivedRows()[kDescription]);
      result_ = AddUp(parts);
      if (gpu_ != nullptr) made_ = NoteMade({result_._indices(), result_._values()}, gpu_);
    }
    return {result_};
  }

  std::vector<std::vector<std::int64_t>> ReceivedRows() override {
    return {gathered_->ReceivedRows()[kValues]};
  }

 private:
  void CheckAgreement(const at::Tensor& descriptions, const std::vector<std::int64_t>& lengths);
  at::Tensor AddUp(const std::vector<at::Tensor>& parts) const;

  const std::shared_ptr<PendingTensor> gathered_;
  const SparseSum sum_;
  const std::shared_ptr<session::Gpu> gpu_;
  std::mutex mutex_;
  at::Tensor result_;
  CallMemories made_;  // of its parts, on a GPU
};

void PendingSparse::CheckAgreement(const at::Tensor& descriptions,
                                   const std::vector<std::int64_t>& lengths) {
  const auto* text = reinterpret_cast<const char*>(descriptions.const_data_ptr<std::uint8_t>());
  const std::vector<int> members = sum_.members.ToVector();
  std::vector<std::string> said;
  std::vector<int> ranks;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] == 0) continue;  // it has joined
    said.emplace_back(text, static_cast<std::size_t>(lengths[i]));
    ranks.push_back(members[i]);
    text += lengths[i];
  }
  const auto same = [&said](const std::string& one) { return one == said.front(); };
  if (std::all_of(said.begin(), said.end(), same)) return;
  const std::string call = sum_.options.name().empty()
                               ? "all-reduce"
                               : "all-reduce " + core::Quoted(sum_.options.name());
  ThrowStatus(core::Status(core::StatusCode::kMismatch, call + ": " + GroupsText(said, ranks),
                           core::Origin{-1, {}, sum_.options.name()}));
}

// Wider than the tensor's type, so that it is rounded, or wraps, once.
at::ScalarType AddingType(at::ScalarType type, bool average) {
  if (type == at::kHalf || type == at::kBFloat16) return at::kFloat;
  return average && at::isIntegralType(type, /*includeBool=*/false) ? at::kLong : type;
}

// The indices are some rank's, so that there is nothing to check, for which a GPU would be waited
// for. Whoever adds them up waits for it once, to know how many remain.
at::Tensor PendingSparse::AddUp(const std::vector<at::Tensor>& parts) const {
  at::Tensor values =
      parts[kValues].to(AddingType(sum_.type, sum_.options.op() == ReduceOp::Average));
  if (sum_.options.prescale() != 1.0) values = values * sum_.options.prescale();
  at::Tensor sum =
      at::_sparse_coo_tensor_unsafe(parts[kIndices].t().contiguous(), values, sum_.sizes)
          .coalesce();
  values = sum.values();
  if (sum_.options.op() == ReduceOp::Average) {
    const std::int64_t count = sum_.members.Count();
    values = at::isIntegralType(values.scalar_type(), /*includeBool=*/false)
                 ? values.div(count, "trunc")
                 : values / count;
  }
  if (sum_.options.postscale() != 1.0) values = values * sum_.options.postscale();
  sum = at::_sparse_coo_tensor_unsafe(sum.indices(), values.to(sum_.type), sum_.sizes);
  return sum._coalesced_(true);
}

}  // namespace

std::shared_ptr<Pending> StartSparse(const at::Tensor& tensor, const AllreduceOptions& options,
                                     bool will_wait, const std::shared_ptr<SessionState>& session,
                                     std::uint32_t round) {
  at::NoGradGuard no_grad;
  TensorCall call = CallOf(core::OpKind::kAllGather, options, Form::kNew);
  call.grouped = true;
  call.will_wait = will_wait;
  call.round = round;
  call.invalid = WhyInvalid(tensor, options);
  // Ranks take slots alike, whatever is wrong with the call.
  std::shared_ptr<session::Gpu> gpu;
  const core::Status usable = FindUsableGpu(tensor, *session, &gpu);
  if (call.invalid.empty()) call.invalid = usable.message();
  SparseSum sum;
  if (call.invalid.empty()) {
    try {
      call.group = PartsOf(tensor, options);
    } catch (const std::exception& error) {
      call.invalid = WhyNoMemory(error);
    }
    sum.sizes = tensor.sizes().vec();
    sum.type = tensor.scalar_type();
  }
  sum.options = options;
  sum.members = MembersOf(options.process_set(), session).ranks;
  return std::make_shared<PendingSparse>(PendingTensor::Start(std::move(call), session),
                                         std::move(sum), std::move(gpu));
}

}  // namespace sirtaki::detail
