// One collective that was submitted, for a tensor or a group of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/engine/work.h"
#include "frameworks/torch/calls/call_memory.h"
#include "frameworks/torch/calls/pending.h"
#include "frameworks/torch/calls/tensor_call.h"
#include "frameworks/torch/session/session_state.h"

namespace sirtaki::detail {

// Thread-safe. Its destruction gives the name free; the operation itself goes on.
class PendingTensor : public Pending {
 public:
  // Submits; throws Error if the call is refused here.
  static std::shared_ptr<PendingTensor> Start(TensorCall&& call,
                                              std::shared_ptr<SessionState> session);
  // Starts work that is complete except for its handle. `name`: that of the call, for texts;
  // `memory`: that of its tensors.
  static std::shared_ptr<PendingTensor> StartWork(std::string name, const core::WorkPtr& work,
                                                  CallMemories&& memory, bool will_wait,
                                                  std::shared_ptr<SessionState> session);
  ~PendingTensor() override;
  PendingTensor(const PendingTensor&) = delete;
  PendingTensor& operator=(const PendingTensor&) = delete;

  bool Poll() override;
  std::vector<at::Tensor> Results() override;
  std::vector<std::vector<std::int64_t>> ReceivedRows() override;
  void Then(std::function<void()> next) override { handle_->Then(std::move(next)); }
  void Abort(const std::string& why) override { session_->session().Abort(why); }
  const core::HandlePtr& handle() const { return handle_; }
  int joined() const override { return handle_->joined(); }
  // Returns the number of a call without a name.
  std::uint64_t call_number() const { return call_number_; }

 private:
  PendingTensor() = default;
  static std::shared_ptr<PendingTensor> Make();
  // Submits the work, whose memory is here.
  void Submit(std::string&& name, const core::WorkPtr& work, bool will_wait,
              std::shared_ptr<SessionState> session);
  void CheckSession() const;
  void WaitForEnd();
  void Finish();

  std::shared_ptr<SessionState> session_;
  core::OpKind kind_{};
  std::string name_;
  core::HandlePtr handle_;
  std::uint64_t call_number_ = 0;
  std::mutex mutex_;
  bool finished_ = false;
  CallMemories memory_;  // of each tensor; none of a barrier
};

}  // namespace sirtaki::detail
