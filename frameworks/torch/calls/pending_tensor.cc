#include "frameworks/torch/calls/pending_tensor.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {

namespace {

core::WorkPtr MakeWork(const at::Tensor& tensor) {
  if (IsOnGpu(tensor)) return std::make_shared<ops::cuda::DeviceWork>();
  return std::make_shared<core::Work>();
}

// Gives the work the memory of one tensor of the call. `gpu`: where it is; null: on the host.
CallMemory GiveMemoryTo(const core::WorkPtr& work, const TensorCall& call, std::size_t index,
                        const CallMembers& members, const std::shared_ptr<session::Gpu>& gpu) {
  if (gpu != nullptr) ops::cuda::AsDeviceWork(*work).device = gpu->device();
  CallMemory memory = GiveMemory(call, index, members, *work);
  if (gpu != nullptr) {
    memory.on_gpu = OnGpu{.gpu = gpu,
                          .work = std::static_pointer_cast<ops::cuda::DeviceWork>(work),
                          .caller = nullptr,
                          .end = nullptr};
  }
  return memory;
}

std::vector<CallMemory> GiveAllMemory(const TensorCall& call, const CallMembers& members,
                                      const CallGpus& gpus, const core::WorkPtr& work) {
  std::vector<CallMemory> memory;
  for (std::size_t i = 0; i < call.count(); ++i) {
    if (!call.grouped) {
      memory.push_back(GiveMemoryTo(work, call, i, members, gpus[i]));
      continue;
    }
    const core::WorkPtr part = MakeWork(call.at(i));
    part->request.asked = work->request.signature()->parts[i];
    memory.push_back(GiveMemoryTo(part, call, i, members, gpus[i]));
    work->parts.push_back(part);
  }
  return memory;
}

}  // namespace

std::shared_ptr<PendingTensor> PendingTensor::Start(TensorCall call,
                                                    std::shared_ptr<SessionState> session) {
  ThrowIfError(session->Check());
  CheckName(call);
  const CallMembers members = MembersOf(call.process_set, session);
  const core::WorkPtr work = call.grouped ? std::make_shared<core::Work>() : MakeWork(call.tensor);
  core::Request& request = work->request;
  request.key = call.name.empty() ? core::Key::Unnamed(members.set, 0)
                                  : core::Key::Named(members.set, call.name);
  CallGpus gpus;
  request.asked = MakeSignature(call, members, *session, &gpus, &request.invalid);
  // What is wrong from here on is for the peers to learn, and for this rank with them.
  if (request.invalid.empty()) request.invalid = CheckStreams(gpus).message();
  std::vector<CallMemory> memory;
  if (request.invalid.empty()) {
    try {
      memory = GiveAllMemory(call, members, gpus, work);
    } catch (const std::exception& error) {
      request.invalid = WhyNoMemory(error);
    }
  }
  if (request.invalid.empty()) request.invalid = NoteReadyOnGpus(memory).message();
  if (!request.invalid.empty()) work->parts.clear();
  work->deadline = DeadlineAfter(call.timeout);
  return StartWork(std::move(call.name), work, std::move(memory), call.will_wait,
                   std::move(session));
}

std::shared_ptr<PendingTensor> PendingTensor::StartWork(std::string name, const core::WorkPtr& work,
                                                        std::vector<CallMemory> memory,
                                                        bool will_wait,
                                                        std::shared_ptr<SessionState> session) {
  struct Made final : PendingTensor {};  // for make_shared: the constructor is private
  const auto pending = std::make_shared<Made>();
  pending->session_ = std::move(session);
  pending->kind_ = work->request.signature()->kind;
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
  // A handle on a GPU is done when the work was launched; what an abort ends has garbage for a
  // result.
  const auto on_gpu = [](const CallMemory& memory) { return memory.on_gpu.has_value(); };
  if (std::any_of(memory_.begin(), memory_.end(), on_gpu)) ThrowIfError(session_->Check());
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
  const bool ok = handle_->status().ok();
  // Each time: another thread, or the same one later, may use the results in another stream.
  if (ok) AwaitOnGpus(memory_);
  if (finished_) return;
  if (ok) Settle(memory_);
  finished_ = true;
  if (!ok) memory_.clear();
  handle_->Observe();
}

}  // namespace sirtaki::detail
