#include "frameworks/torch/calls/pending_tensor.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "core/base/recycling.h"
#include "frameworks/torch/calls/early_call.h"
#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {

namespace {

// TensorWork is the work of one tensor, and keeps its storages.
template <class Base>
struct TensorWork final : Base {
  CallStorages storages;
};

struct MadeWork {
  core::WorkPtr work;
  CallStorages* storages;
};

template <class Base>
MadeWork MakeWorkOf() {
  auto work = core::MakeRecycled<TensorWork<Base>>();
  CallStorages* const storages = &work->storages;
  return {std::move(work), storages};
}

MadeWork MakeWork(const at::Tensor& tensor) {
  return IsOnGpu(tensor) ? MakeWorkOf<ops::cuda::DeviceWork>() : MakeWorkOf<core::Work>();
}

// Gives the work the memory of one tensor of the call. `gpu`: where it is; null: on the host.
CallMemory GiveMemoryTo(const MadeWork& made, const TensorCall& call, std::size_t index,
                        const CallMembers& members, const std::shared_ptr<session::Gpu>& gpu) {
  const auto& [work, storages] = made;
  if (gpu != nullptr) ops::cuda::AsDeviceWork(*work).device = gpu->device();
  CallMemory memory = GiveMemory(call, index, members, *work, storages);
  if (gpu != nullptr) {
    memory.on_gpu = OnGpu{.gpu = gpu,
                          .work = std::static_pointer_cast<ops::cuda::DeviceWork>(work),
                          .caller = nullptr,
                          .end = nullptr};
  }
  return memory;
}

// `whole`: the work of the call.
void GiveAllMemory(const TensorCall& call, const CallMembers& members, const CallGpus& gpus,
                   const MadeWork& whole, CallMemories* memory) {
  for (std::size_t i = 0; i < call.count(); ++i) {
    if (!call.grouped) {
      memory->push_back(GiveMemoryTo(whole, call, i, members, gpus[i]));
      continue;
    }
    const MadeWork part = MakeWork(call.at(i));
    part.work->request.asked = whole.work->request.signature()->parts[i];
    memory->push_back(GiveMemoryTo(part, call, i, members, gpus[i]));
    whole.work->parts.push_back(part.work);
  }
}

}  // namespace

std::shared_ptr<PendingTensor> PendingTensor::Start(TensorCall&& call,
                                                    std::shared_ptr<SessionState> session) {
  ThrowIfError(session->Check());
  if (IsEarlyCall(*session)) RefuseEarlyCall(DescribeCall(call.kind, call.name));
  CheckName(call);
  const CallMembers members = MembersOf(call.process_set, session);
  const MadeWork made =
      call.grouped ? MadeWork{std::make_shared<core::Work>(), nullptr} : MakeWork(call.tensor);
  const core::WorkPtr& work = made.work;
  core::Request& request = work->request;
  CallGpus gpus;
  FillIn(call, members, *session, &request, &gpus);
  // The peers, and this rank with them, learn what is wrong from here on.
  const auto note = [&request](const core::Status& status) {
    if (!status.ok()) request.invalid = status.message();
  };
  if (request.invalid.empty()) note(CheckStreams(gpus));
  const std::shared_ptr<PendingTensor> pending = Make();
  CallMemories& memory = pending->memory_;
  if (request.invalid.empty()) {
    try {
      GiveAllMemory(call, members, gpus, made, &memory);
    } catch (const std::exception& error) {
      memory.clear();
      request.invalid = WhyNoMemory(error);
    }
  }
  if (request.invalid.empty()) note(NoteReadyOnGpus(memory));
  if (!request.invalid.empty()) work->parts.clear();
  work->deadline = DeadlineAfter(call.timeout);
  pending->Submit(std::move(call.name), work, call.will_wait, std::move(session));
  return pending;
}

std::shared_ptr<PendingTensor> PendingTensor::StartWork(std::string name, const core::WorkPtr& work,
                                                        CallMemories&& memory, bool will_wait,
                                                        std::shared_ptr<SessionState> session) {
  if (IsEarlyCall(*session)) RefuseEarlyCall(name);
  const std::shared_ptr<PendingTensor> pending = Make();
  pending->memory_ = std::move(memory);
  pending->Submit(std::move(name), work, will_wait, std::move(session));
  return pending;
}

std::shared_ptr<PendingTensor> PendingTensor::Make() {
  struct Made final : PendingTensor {};  // for MakeRecycled: the constructor is private
  return core::MakeRecycled<Made>();
}

void PendingTensor::Submit(std::string&& name, const core::WorkPtr& work, bool will_wait,
                           std::shared_ptr<SessionState> session) {
  session_ = std::move(session);
  kind_ = work->request.signature()->kind;
  name_ = std::move(name);
  ThrowIfError(session_->Submit(work, will_wait));
  handle_ = work->handle;
  call_number_ = work->request.key.number;
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
  results.reserve(std::max<std::size_t>(memory_.size(), 1));
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
