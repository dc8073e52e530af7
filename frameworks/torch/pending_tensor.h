// One collective that was submitted for a tensor: what a public Handle refers to.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "core/request.h"
#include "core/work.h"
#include "frameworks/torch/session_state.h"

namespace sirtaki::detail {

// What a caller asks for. The tensor may be anything: what is wrong with it is told to the peers.
struct TensorCall {
  core::OpKind kind = core::OpKind::kAllReduce;
  at::Tensor tensor;
  std::string name;  // empty: matched by call order
  // Not empty: why this rank cannot take part, whatever the tensor is. All ranks throw
  // invalid_argument with this text; nothing is moved.
  std::string invalid;
  bool in_place = false;
  bool will_wait = false;  // the caller goes on to Synchronize at once
  core::ReduceOp reduction = core::ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  std::optional<core::DType> wire = std::nullopt;  // all-reduce: what it travels as; see WireType
  int root = -1;
  std::chrono::milliseconds timeout{0};
  std::string invalid;  // what the caller knows to be wrong with it; told to the peers
};

// Thread-safe. Its destruction gives the name free; the operation itself goes on.
class PendingTensor {
 public:
  // Submits; throws Error if the call is refused here.
  static std::shared_ptr<PendingTensor> Start(TensorCall call,
                                              std::shared_ptr<SessionState> session);
  ~PendingTensor();
  PendingTensor(const PendingTensor&) = delete;
  PendingTensor& operator=(const PendingTensor&) = delete;

  bool Poll();
  at::Tensor Synchronize();

 private:
  // Where an all-gather's output appears; made on the lane's thread, before the handle completes.
  struct Gathered {
    at::Tensor tensor;
  };

  PendingTensor() = default;
  static core::Signature MakeSignature(const TensorCall& call, int size, std::string* invalid);
  void GiveMemory(const TensorCall& call, core::Work& work);
  // Why it could not, for the peers to learn it (and this rank with them); empty if it could.
  std::string TryGiveMemory(const TensorCall& call, core::Work& work);
  void CheckSession() const;
  void Finish();

  std::shared_ptr<SessionState> session_;
  std::string what_;  // `all-reduce "w"`
  core::HandlePtr handle_;
  std::shared_ptr<Gathered> gathered_;
  std::mutex mutex_;
  bool finished_ = false;
  at::Tensor result_;  // what Synchronize returns
  at::Tensor moved_;   // what the operation writes; differs from result_ if that does not lie flat
};

}  // namespace sirtaki::detail
