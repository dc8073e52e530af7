// Collectives that the library makes for its own purposes.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "frameworks/torch/calls/pending.h"
#include "frameworks/torch/calls/tensor_call.h"
#include "frameworks/torch/session/session_set.h"

namespace sirtaki::detail {

// Returns a call of the set whose caller goes on to wait at once. An empty name: matched by call order.
TensorCall OwnCall(core::OpKind kind, const at::Tensor& tensor, const std::string& name,
                   const SessionSet& set);

// These submit a call and wait for it, and throw what the public forms throw. `timeout`: as theirs; 0:
// none.
at::Tensor AllGatherBlocking(const at::Tensor& tensor, const std::string& name,
                             const SessionSet& set, std::chrono::milliseconds timeout = {});
void BroadcastInPlaceBlocking(const at::Tensor& tensor, int root_rank, const std::string& name,
                              const SessionSet& set);

// AwaitAll waits for all calls before it throws the first error, which `error` is if there is one, so
// that no rank leaves another waiting.
void AwaitAll(const std::vector<std::shared_ptr<Pending>>& calls,
              std::exception_ptr error = nullptr);

// PendingBroadcasts are broadcasts in place that are under way at once.
class PendingBroadcasts {
 public:
  void Start(const at::Tensor& tensor, int root_rank, const std::string& name,
             const SessionSet& set);
  void Wait() { AwaitAll(std::exchange(pending_, {})); }

 private:
  std::vector<std::shared_ptr<Pending>> pending_;
};

// The key of the part of a call that has several: an unnamed call's parts are all unnamed.
std::string PartName(const std::string& name, const std::string& part);

// Bytes as a uint8 tensor that shares and keeps them.
at::Tensor AsTensor(const std::shared_ptr<std::string>& bytes);

}  // namespace sirtaki::detail
