// A caller asks for a TensorCall, which becomes a request.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/types.h"
#include "core/protocol/request.h"
#include "frameworks/torch/session/set_membership.h"
#include "sirtaki/process_set.h"

namespace sirtaki::session {
class Gpu;
}

namespace sirtaki::detail {

class SessionState;

// The tensors may be anything: what is wrong with them is told to the peers.
struct TensorCall {
  core::OpKind kind = core::OpKind::kAllReduce;
  at::Tensor tensor;  // of a call that is not grouped
  bool grouped = false;
  std::vector<at::Tensor> group;  // of a grouped one
  std::string name;               // empty: matched by call order
  bool derived_name = false;      // the library's own: may be of a form that users must not give
  ProcessSet process_set;
  // Says, if it is not empty, why this rank cannot take part, whatever the tensor is. All ranks
  // throw InvalidArgument with this text; nothing is moved.
  std::string invalid;
  bool in_place = false;
  bool will_wait = false;  // the caller goes on to wait at once
  core::ReduceOp reduction = core::ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  // All-reduce: what its float32 and float64 tensors travel as; see WireType.
  std::optional<core::DType> wire = std::nullopt;
  int root = -1;
  // A grouped call says here which average of its step the gradient is; 0: it is none, or nobody counts.
  std::uint32_t round = 0;
  // All-to-all, and scatter at the root: rows for each member. One list for each tensor, or one for
  // all of them, or none: equal parts.
  std::vector<std::vector<std::int64_t>> splits;
  // All-gather: where the result of each tensor goes, flat memory for all rows. None: new memory,
  // which the result is in as well if the ranks give another number of rows.
  std::vector<at::Tensor> into;
  std::chrono::milliseconds timeout{0};

  std::size_t count() const;
  const at::Tensor& at(std::size_t index) const { return grouped ? group[index] : tensor; }
  // Empty: equal parts.
  const std::vector<std::int64_t>& SplitsOf(std::size_t index) const;
};

// Where a call's tensors are; null: on the host, or nowhere that can be used.
using CallGpus = c10::SmallVector<std::shared_ptr<session::Gpu>, 1>;

// Fills in what the ranks must agree on, under which key. `request->invalid` is set to why this
// rank's arguments are wrong, whatever the others'; to nothing if they are not, and `*gpus` is
// complete.
void FillIn(const TensorCall& call, const CallMembers& members, SessionState& session,
            core::Request* request, CallGpus* gpus);

// Throws if no request could carry the name, or if it is one of the library's.
void CheckName(const TensorCall& call);

// `all-reduce "w"`, for texts.
std::string DescribeCall(core::OpKind kind, const std::string& name);

// Returns when a call that begins now and has this time-out, which is not negative, is too late; 0
// and very long ones: never.
core::TimePoint DeadlineAfter(std::chrono::milliseconds timeout);
// Returns the same for a time-out that may be negative, and then throws InvalidArgument.
core::TimePoint DeadlineOf(std::chrono::milliseconds timeout);
std::string NegativeTimeoutText(std::chrono::milliseconds timeout);

}  // namespace sirtaki::detail
