#include "ops/nccl/arena.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace sirtaki::ops::nccl {

using core::Status;
using core::StatusCode;

namespace {

// How long the last one to go waits for the device where no lane could.
constexpr auto kArenaFreeLimit = std::chrono::seconds(1);
constexpr auto kPause = std::chrono::microseconds(100);

std::size_t ArenaSize(std::int64_t bytes) { return static_cast<std::size_t>(bytes); }

}  // namespace

// ---- ArenaFrees ----

bool ArenaFrees::FreeIfReached(const Leaving& leaving) {
  const cuda::Device::Scope scope(*leaving.device);
  if (!scope.status().ok()) return false;
  for (const cuda::EventPtr& event : leaving.behind) {
    bool reached = false;
    if (!event->Poll(&reached).ok() || !reached) return false;
  }
  leaving.block.Free(*leaving.api, leaving.device->api());
  return true;
}

bool ArenaFrees::Add(Leaving leaving) {
  core::MutexLock lock(mutex_);
  if (!closed_) leaving_.push_back(std::move(leaving));
  return !closed_;
}

bool ArenaFrees::Free() {
  std::vector<Leaving> all;
  {
    core::MutexLock lock(mutex_);
    all.swap(leaving_);
  }
  std::erase_if(all, FreeIfReached);
  core::MutexLock lock(mutex_);
  for (Leaving& left : all) leaving_.push_back(std::move(left));
  return leaving_.empty();
}

void ArenaFrees::Close() {
  core::MutexLock lock(mutex_);
  closed_ = true;
  leaving_.clear();
}

// ---- Arena ----

Arena::Arena(std::shared_ptr<cuda::Device> device, std::shared_ptr<const Api> api,
             std::shared_ptr<ArenaFrees> frees, std::int64_t bytes)
    : device_(std::move(device)),
      api_(std::move(api)),
      frees_(std::move(frees)),
      bytes_(bytes),
      events_(device_) {}

std::shared_ptr<Arena> Arena::Make(std::shared_ptr<cuda::Device> device,
                                   std::shared_ptr<const Api> api,
                                   std::shared_ptr<ArenaFrees> frees, std::int64_t bytes) {
  ArenaPtr arena(new Arena(std::move(device), std::move(api), std::move(frees), bytes));
  const cuda::Api& cuda = arena->device_->api();
  GpuBlock block;
  if (!block.TakeFromNccl(*arena->api_, cuda, bytes) &&
      !cuda::Check(cuda, cuda.Malloc(&block.memory, ArenaSize(bytes)), "cudaMalloc").ok()) {
    return nullptr;
  }
  arena->block_ = block;
  arena->device_->AddArena(block.memory, bytes);
  return arena;
}

bool Arena::MarkReaders(std::vector<cuda::EventPtr>* behind) {
  const cuda::Device::Scope scope(*device_);
  const cuda::Api& cuda = device_->api();
  if (!scope.status().ok()) return false;
  for (const cuda::StreamHandle stream : readers()) {
    int capture = cuda::kCaptureNone;
    const cuda::Error error = cuda.StreamIsCapturing(stream, &capture);
    if (!cuda::Check(cuda, error, "cudaStreamIsCapturing").ok() || capture != cuda::kCaptureNone) {
      return false;
    }
    cuda::EventPtr event;
    if (!events_.Mark(stream, &event).ok()) return false;
    behind->push_back(std::move(event));
  }
  return true;
}

Arena::~Arena() {
  if (block_.memory == nullptr) return;
  device_->RemoveArena(block_.memory);
  ArenaFrees::Leaving leaving{block_, api_, device_, {}};
  if (!MarkReaders(&leaving.behind) || frees_->Add(leaving)) return;
  const core::TimePoint limit = core::Clock::now() + kArenaFreeLimit;
  while (!ArenaFrees::FreeIfReached(leaving) && core::Clock::now() < limit) {
    std::this_thread::sleep_for(kPause);
  }
}

void Arena::NoteReader(cuda::StreamHandle stream) {
  core::MutexLock lock(mutex_);
  if (std::find(readers_.begin(), readers_.end(), stream) == readers_.end()) {
    readers_.push_back(stream);
  }
}

std::vector<cuda::StreamHandle> Arena::readers() const {
  core::MutexLock lock(mutex_);
  return readers_;
}

// ---- Arenas ----

Status Arenas::Add(ArenaPtr arena, bool registers, Communicator& communicator,
                   const Patience& patience, Form* form) {
  *form = Form::kPlain;
  all_.push_back(std::make_unique<Entry>());
  Entry& entry = *all_.back();
  entry.arena = std::move(arena);
  if (!registers) return Status::Ok();
  const Api& api = communicator.api();
  std::byte* const memory = entry.arena->begin();
  const std::size_t bytes = ArenaSize(entry.arena->bytes());
  if (api.CommWindowRegister != nullptr && api.CommWindowDeregister != nullptr) {
    Status status = MakeWindow(entry, communicator, patience, form);
    if (!status.ok() || entry.window != nullptr) return status;
  }
  if (api.CommRegister == nullptr || api.CommDeregister == nullptr) return Status::Ok();
  Status status = communicator.Run(
      "ncclCommRegister",
      [&](CommHandle comm) { return api.CommRegister(comm, memory, bytes, &entry.handle); },
      patience);
  // One rank's own affair, which it survives.
  if (status.code() == StatusCode::kBackend) return Status::Ok();
  if (entry.handle != nullptr) *form = Form::kRegistered;
  return status;
}

// An error is the communicator's end: of this rank alone or of several, nobody knows.
Status Arenas::MakeWindow(Entry& entry, Communicator& communicator, const Patience& patience,
                          Form* form) {
  const Api& api = communicator.api();
  Status status = communicator.RunTogether(
      "ncclCommWindowRegister",
      [&](CommHandle comm) {
        return api.CommWindowRegister(comm, entry.arena->begin(), ArenaSize(entry.arena->bytes()),
                                      &entry.window, kWindowCollSymmetric);
      },
      patience);
  if (status.code() == StatusCode::kBackend) {
    return {status.code(), status.message() +
                               "; with gradient_arena=plain (SIRTAKI_GRADIENT_ARENA) gradients are "
                               "reduced without registered memory"};
  }
  // A library that has this function gives nothing where it cannot give a window.
  if (status.ok() && entry.window != nullptr) {
    *form = api.WinGetUserPtr != nullptr ? Form::kWindow : Form::kKnown;
  }
  return status;
}

Status Arenas::Deregister(Entry& entry, Communicator& communicator, const Patience& patience) {
  const Api& api = communicator.api();
  if (entry.window != nullptr) {
    void* const window = std::exchange(entry.window, nullptr);
    return communicator.RunTogether(
        "ncclCommWindowDeregister",
        [&](CommHandle comm) { return api.CommWindowDeregister(comm, window); }, patience);
  }
  if (entry.handle == nullptr) return Status::Ok();
  void* const handle = std::exchange(entry.handle, nullptr);
  return communicator.RunTogether(
      "ncclCommDeregister", [&](CommHandle comm) { return api.CommDeregister(comm, handle); },
      patience);
}

Status Arenas::Unregister(Communicator& communicator, const Patience& patience) {
  return Deregister(*all_.back(), communicator, patience);
}

Status Arenas::Remove(std::size_t index, Communicator& communicator, const Patience& patience) {
  const auto place = all_.begin() + static_cast<std::ptrdiff_t>(index);
  Status status = Deregister(**place, communicator, patience);
  if (status.ok()) all_.erase(place);
  return status;
}

Status Arenas::RemoveAll(Communicator& communicator, const Patience& patience) {
  while (!all_.empty()) {
    Status status = Remove(all_.size() - 1, communicator, patience);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

}  // namespace sirtaki::ops::nccl
