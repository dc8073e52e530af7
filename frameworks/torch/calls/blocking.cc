#include "frameworks/torch/calls/blocking.h"

#include <ATen/ops/from_blob.h>

#include <cstdint>
#include <utility>

#include "frameworks/torch/calls/pending_tensor.h"

namespace sirtaki::detail {

TensorCall OwnCall(core::OpKind kind, const at::Tensor& tensor, const std::string& name,
                   const SessionSet& set) {
  TensorCall call;
  call.kind = kind;
  call.tensor = tensor;
  call.name = name;
  call.process_set = set.process_set;
  call.will_wait = true;
  return call;
}

at::Tensor AllGatherBlocking(const at::Tensor& tensor, const std::string& name,
                             const SessionSet& set, std::chrono::milliseconds timeout) {
  TensorCall call = OwnCall(core::OpKind::kAllGather, tensor, name, set);
  call.timeout = timeout;
  return PendingTensor::Start(std::move(call), set.session)->Synchronize();
}

namespace {

TensorCall BroadcastInPlace(const at::Tensor& tensor, int root_rank, const std::string& name,
                            const SessionSet& set) {
  TensorCall call = OwnCall(core::OpKind::kBroadcast, tensor, name, set);
  call.in_place = true;
  call.root = root_rank;
  return call;
}

}  // namespace

void BroadcastInPlaceBlocking(const at::Tensor& tensor, int root_rank, const std::string& name,
                              const SessionSet& set) {
  PendingTensor::Start(BroadcastInPlace(tensor, root_rank, name, set), set.session)->Synchronize();
}

void PendingBroadcasts::Start(const at::Tensor& tensor, int root_rank, const std::string& name,
                              const SessionSet& set) {
  TensorCall call = BroadcastInPlace(tensor, root_rank, name, set);
  call.will_wait = false;
  pending_.push_back(PendingTensor::Start(std::move(call), set.session));
}

void AwaitAll(const std::vector<std::shared_ptr<Pending>>& calls, std::exception_ptr error) {
  for (const auto& call : calls) {
    try {
      call->Synchronize();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

std::string PartName(const std::string& name, const std::string& part) {
  return name.empty() ? name : name + "/" + part;
}

at::Tensor AsTensor(const std::shared_ptr<std::string>& bytes) {
  return at::from_blob(
      bytes->data(), {static_cast<std::int64_t>(bytes->size())}, [bytes](void*) {}, at::kByte);
}

}  // namespace sirtaki::detail
