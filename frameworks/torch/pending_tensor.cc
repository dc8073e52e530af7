#include "frameworks/torch/pending_tensor.h"

#include <exception>
#include <utility>

#include "frameworks/torch/tensor_bridge.h"
#include "frameworks/torch/throw.h"

namespace sirtaki::detail {

namespace {

std::vector<CallMemory> GiveAllMemory(const TensorCall& call, const CallMembers& members,
                                      core::Work& work) {
  std::vector<CallMemory> memory;
  for (std::size_t i = 0; i < call.count(); ++i) {
    if (!call.grouped) {
      memory.push_back(GiveMemory(call, i, members, work));
      continue;
    }
    auto part = std::make_shared<core::Work>();
    part->request.signature = work.request.signature->parts[i];
    memory.push_back(GiveMemory(call, i, members, *part));
    work.parts.push_back(std::move(part));
  }
  return memory;
}

}  // namespace

std::shared_ptr<PendingTensor> PendingTensor::Start(TensorCall call,
                                                    std::shared_ptr<SessionState> session) {
  ThrowIfError(session->Check());
  CheckName(call);
  const CallMembers members = MembersOf(call.process_set, session);
  auto work = std::make_shared<core::Work>();
  core::Request& request = work->request;
  request.key = call.name.empty() ? core::Key::Unnamed(members.set, 0)
                                  : core::Key::Named(members.set, call.name);
  request.signature = MakeSignature(call, members, &request.invalid);
  std::vector<CallMemory> memory;
  if (request.invalid.empty()) {
    try {
      memory = GiveAllMemory(call, members, *work);
    } catch (const std::exception& error) {
      // For the peers to learn it, and this rank with them.
      work->parts.clear();
      request.invalid = WhyNoMemory(error);
    }
  }
  work->deadline = DeadlineAfter(call.timeout);
  return StartWork(std::move(call.name), work, std::move(memory), call.will_wait,
                   std::move(session));
}

std::shared_ptr<PendingTensor> PendingTensor::StartWork(std::string name, const core::WorkPtr& work,
                                                        std::vector<CallMemory> memory,
                                                        bool will_wait,
                                                        std::shared_ptr<SessionState> session) {
  std::shared_ptr<PendingTensor> pending(new PendingTensor());
  pending->session_ = std::move(session);
  pending->kind_ = work->request.signature->kind;
  pending->name_ = std::move(name);
  pending->memory_ = std::move(memory);
  ThrowIfError(pending->session_->Submit(work, will_wait));
  pending->handle_ = work->handle;
  pending->call_number_ = work->request.key.number;
  return pending;
}

PendingTensor::~PendingTensor() {
  if (handle_) handle_->Observe();
}

void PendingTensor::CheckSession() const {
  if (session_->gone()) {
    const bool message = kind_ == core::OpKind::kSend || kind_ == core::OpKind::kReceive;
    ThrowStatus(core::Status(core::StatusCode::kNotInitialized,
                             (message ? name_ : DescribeCall(kind_, name_)) +
                                 ": its session was shut down before the handle was used"));
  }
}

bool PendingTensor::Poll() {
  CheckSession();
  if (!handle_->done()) return false;
  Finish();
  return true;
}

void PendingTensor::WaitForEnd() {
  CheckSession();
  if (!handle_->done()) {
    const core::Status waited = session_->Wait(*handle_);
    if (!handle_->done()) ThrowIfError(waited);  // in a forked child
  }
  Finish();
  ThrowIfError(handle_->status());
}

std::vector<at::Tensor> PendingTensor::Results() {
  WaitForEnd();
  std::vector<at::Tensor> results;
  for (const CallMemory& memory : memory_) results.push_back(memory.result);
  if (results.empty()) results.emplace_back();
  return results;
}

std::vector<std::vector<std::int64_t>> PendingTensor::ReceivedRows() {
  WaitForEnd();
  std::vector<std::vector<std::int64_t>> rows;
  for (const CallMemory& memory : memory_) {
    rows.push_back(memory.arriving ? memory.arriving->rows : std::vector<std::int64_t>());
  }
  if (rows.empty()) rows.emplace_back();
  return rows;
}

at::Tensor PendingTensor::Synchronize() { return Results().front(); }

void PendingTensor::Finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (finished_) return;
  finished_ = true;
  if (handle_->status().ok()) {
    for (CallMemory& memory : memory_) memory.Settle();
  }
  handle_->Observe();
}

}  // namespace sirtaki::detail
