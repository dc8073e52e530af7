#include "tests/support/fake_gpus.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "tests/support/fake_gpus_state.h"

namespace sirtaki::tests {
namespace {

using ops::cuda::Error;
using ops::cuda::EventHandle;
using ops::cuda::StreamHandle;
using Lock = std::lock_guard<std::mutex>;

FakeGpus::State* the_state = nullptr;

}  // namespace

void FailAsMisuse(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::abort();
}

FakeGpus::State* FindFakeGpus() { return the_state; }

FakeGpus::State& TheFakeGpus() {
  if (the_state == nullptr) std::abort();
  return *the_state;
}

bool FakeRange::Overlaps(const FakeRange& other) const {
  const auto* a = static_cast<const std::byte*>(begin);
  const auto* b = static_cast<const std::byte*>(other.begin);
  const std::less<> before;
  return bytes > 0 && other.bytes > 0 && before(a, b + other.bytes) && before(b, a + bytes);
}

// ---- State ----

bool FakeGpus::State::Fails(const std::string& function, int* error) {
  const auto found = failures.find(function);
  if (found == failures.end()) return false;
  if (found->second.first-- > 0) return false;
  *error = found->second.second;
  failures.erase(found);
  return true;
}

FakeStream& FakeGpus::State::StreamOf(StreamHandle handle) {
  if (handle != nullptr) return *streams.at(handle);
  const int device = std::max(0, FakeCurrentDevice());
  FakeStream& stream = default_streams[device];
  stream.device = device;
  return stream;
}
FakeEvent& FakeGpus::State::EventOf(EventHandle handle) { return *events.at(handle); }

void FakeGpus::State::CheckNotLaunching(const FakeStream& stream, const std::string& function,
                                        const FakeComm* except) {
  for (const auto& [handle, comm] : comms) {
    if (comm.get() == except) continue;
    for (const FakeLaunch& launch : comm->launches) {
      if (launch.stream != &stream) continue;
      FailAsMisuse(function + " goes to stream " + std::to_string(stream.number) +
                   ", into which NCCL is still launching");
    }
  }
}

void FakeGpus::State::Put(FakeStream& stream, const std::string& function,
                          FakeOperation operation) {
  CheckNotLaunching(stream, function);
  Enqueue(stream, std::move(operation));
}

void FakeGpus::State::PutByProgram(FakeStream& stream, const std::string& what,
                                   FakeOperation operation) {
  CheckNoFakeError(what);
  Put(stream, what, std::move(operation));
}

void FakeGpus::State::AwaitStream(std::unique_lock<std::mutex>& held_lock, FakeStream& stream,
                                  const std::string& function) {
  const std::uint64_t last = operations;
  const auto begun = std::chrono::steady_clock::now();
  for (;;) {
    Run();
    if (stream.queue.empty() || stream.queue.front().number > last) return;
    if (std::chrono::steady_clock::now() - begun > wait_limit) {
      FailAsMisuse(function + " would deadlock: stream " + std::to_string(stream.number) +
                   " stands still");
    }
    held_lock.unlock();
    std::this_thread::yield();
    held_lock.lock();
  }
}

void FakeGpus::State::Enqueue(FakeStream& stream, FakeOperation operation) {
  operation.number = ++operations;
  stream.queue.push_back(std::move(operation));
}

Error FakeGpus::State::Allocate(FakeMemory kind, std::size_t bytes, void** memory) {
  const int device = std::max(0, FakeCurrentDevice());
  if (kind != FakeMemory::kPinned && full.count(device) > 0) return Error::kMemoryAllocation;
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(*memory, 0xCD, bytes);
  allocations[*memory] = {kind, bytes, device};
  return Error::kSuccess;
}

const FakeAllocation* FakeGpus::State::FindMemory(FakeMemory kind, const FakeRange& range) const {
  for (const auto& [memory, allocation] : allocations) {
    if (allocation.kind != kind) continue;
    const auto offset =
        reinterpret_cast<std::uintptr_t>(range.begin) - reinterpret_cast<std::uintptr_t>(memory);
    if (offset < allocation.bytes && range.bytes <= allocation.bytes - offset) return &allocation;
  }
  return nullptr;
}

void FakeGpus::State::Free(std::unique_lock<std::mutex>& held_lock, const std::string& function,
                           FakeMemory kind, void* memory) {
  const auto found = allocations.find(memory);
  if (found == allocations.end() || found->second.kind != kind) {
    FailAsMisuse(function + " of memory that is not its own");
  }
  const FakeRange range{memory, found->second.bytes};
  const auto check = [&](const FakeStream& stream, const FakeRanges& uses) {
    if (std::any_of(uses.begin(), uses.end(),
                    [&range](const FakeRange& used) { return used.Overlaps(range); })) {
      FailAsMisuse(function + " of memory that work in stream " + std::to_string(stream.number) +
                   " uses");
    }
  };
  for (const FakeStream* const stream : AllStreams()) {
    for (const FakeOperation& one : stream->queue) check(*stream, one.uses);
  }
  for (const auto& [handle, comm] : comms) {
    for (const FakeLaunch& launch : comm->launches) check(*launch.stream, launch.uses);
    if (comm->HasRegistered(range)) FailAsMisuse(function + " of memory that is registered");
  }
  AwaitDevice(held_lock, found->second.device, function);
  allocations.erase(memory);
  std::free(memory);
}

void FakeGpus::State::AwaitDevice(std::unique_lock<std::mutex>& held_lock, int device,
                                  const std::string& function) {
  const std::uint64_t last = operations;
  const auto begun = std::chrono::steady_clock::now();
  for (;;) {
    Run(/*held_too=*/true);
    const std::vector<FakeStream*> all = AllStreams();
    const auto busy = std::find_if(all.begin(), all.end(), [&](const FakeStream* stream) {
      const auto& queue = stream->queue;
      return stream->device == device && !queue.empty() && queue.front().number <= last;
    });
    if (busy == all.end()) return;
    if (std::chrono::steady_clock::now() - begun > wait_limit) {
      const bool is_nccl = (*busy)->queue.front().comm != nullptr;
      FailAsMisuse(function + " would deadlock: it waits for device " + std::to_string(device) +
                   ", and stream " + std::to_string((*busy)->number) + " there stands still at " +
                   (is_nccl ? "a kernel of NCCL's" : "other work"));
    }
    held_lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    held_lock.lock();
  }
}

std::size_t FakeGpus::State::Random(std::size_t below) {
  if (seed == 0) return 0;
  seed ^= seed << 13U;
  seed ^= seed >> 7U;
  seed ^= seed << 17U;
  return static_cast<std::size_t>(seed >> 11U) % below;
}

std::vector<FakeStream*> FakeGpus::State::AllStreams() {
  std::vector<FakeStream*> all;
  for (auto& [handle, stream] : streams) all.push_back(stream.get());
  for (auto& [device, stream] : default_streams) all.push_back(&stream);
  std::stable_sort(all.begin(), all.end(),
                   [](const auto* a, const auto* b) { return a->number < b->number; });
  return all;
}

void FakeGpus::State::Run(bool held_too) {
  constexpr std::size_t kOneStopsIn = 8;
  if (held && !held_too) return;
  for (bool moved = true; moved;) {
    moved = false;
    for (std::vector<FakeStream*> open = AllStreams(); !open.empty();) {
      if (seed != 0 && Random(kOneStopsIn) == 0) return;
      const auto next = open.begin() + static_cast<std::ptrdiff_t>(Random(open.size()));
      auto& queue = (*next)->queue;
      if (!queue.empty() && queue.front().run()) {
        queue.pop_front();
        moved = true;
      } else {
        open.erase(next);
      }
    }
    moved |= std::exchange(has_sent, false);
  }
}

void FakeGpus::State::RunToTheEnd() {
  const std::uint64_t kept = std::exchange(seed, 0);
  Run();
  seed = kept;
}

// ---- FakeGpus ----

FakeGpus::FakeGpus() : state_(std::make_unique<State>()) {
  the_state = state_.get();
  FillFakeCuda(&state_->cuda);
  FillFakeNccl(&state_->nccl);
}

FakeGpus::~FakeGpus() {
  // Aborts that a lane has left behind end first: what holds the devices has let go of them by now.
  while (aborting() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  for (const auto& [memory, allocation] : state_->allocations) std::free(memory);
  the_state = nullptr;
  CheckNoFakeError("the test");
  ForgetFakeThread();
}

const ops::cuda::Api& FakeGpus::cuda() const { return state_->cuda; }
ops::nccl::Api& FakeGpus::nccl() { return state_->nccl; }

void FakeGpus::SetSeed(std::uint64_t seed) {
  const Lock lock(state_->mutex);
  state_->seed = seed * 0x9E3779B97F4A7C15U;  // neighbours begin far from each other
}

void FakeGpus::Hold() {
  const Lock lock(state_->mutex);
  state_->held = true;
}

void FakeGpus::Release() {
  const Lock lock(state_->mutex);
  state_->held = false;
}

void FakeGpus::FailNext(const std::string& function, int error, int skip) {
  const Lock lock(state_->mutex);
  state_->failures[function] = {skip, error};
}

void FakeGpus::AnswerInProgress(int times) {
  const Lock lock(state_->mutex);
  state_->answers = times;
}

void FakeGpus::SetAsyncError(int rank, ops::nccl::Result error) {
  const Lock lock(state_->mutex);
  state_->async_errors[rank] = error;
}

void FakeGpus::LimitWaits(std::chrono::milliseconds limit) {
  const Lock lock(state_->mutex);
  state_->wait_limit = limit;
}

void FakeGpus::SetLastNcclError(const std::string& text) {
  const Lock lock(state_->mutex);
  state_->last_nccl_error = text;
}

void FakeGpus::SetCapturing(StreamHandle stream, bool capturing) {
  const Lock lock(state_->mutex);
  state_->StreamOf(stream).capturing = capturing;
}

void FakeGpus::SetFull(int device, bool full) {
  const Lock lock(state_->mutex);
  if (full) {
    state_->full.insert(device);
  } else {
    state_->full.erase(device);
  }
}

void FakeGpus::SetWindows(Windows windows) {
  const Lock lock(state_->mutex);
  state_->windows = windows;
}

void FakeGpus::SetHosts(int hosts) {
  const Lock lock(state_->mutex);
  state_->hosts = hosts;
}

void FakeGpus::Unload() {
  const Lock lock(state_->mutex);
  state_->unloaded = true;
}

std::vector<std::string> FakeGpus::calls() const { return calls(""); }

std::vector<std::string> FakeGpus::calls(const std::string& beginning) const {
  const Lock lock(state_->mutex);
  std::vector<std::string> found;
  for (const std::string& call : state_->calls) {
    if (call.starts_with(beginning)) found.push_back(call);
  }
  return found;
}

void FakeGpus::Forget() {
  const Lock lock(state_->mutex);
  state_->calls.clear();
}

std::set<int> FakeGpus::devices_with_context() const {
  const Lock lock(state_->mutex);
  return state_->contexts;
}

int FakeGpus::current_device() const { return FakeCurrentDevice(); }

int FakeGpus::NumberOf(StreamHandle stream) const {
  const Lock lock(state_->mutex);
  return state_->StreamOf(stream).number;
}

int FakeGpus::aborting() const {
  const Lock lock(state_->mutex);
  return state_->aborting;
}

int FakeGpus::live_streams() const {
  const Lock lock(state_->mutex);
  return static_cast<int>(state_->streams.size());
}

int FakeGpus::live_events() const {
  const Lock lock(state_->mutex);
  return static_cast<int>(state_->events.size());
}

int FakeGpus::live_communicators() const {
  const Lock lock(state_->mutex);
  return static_cast<int>(state_->comms.size());
}

int FakeGpus::live_allocations() const {
  const Lock lock(state_->mutex);
  return static_cast<int>(state_->allocations.size());
}

StreamHandle FakeGpus::MakeStream(int device) {
  const Lock lock(state_->mutex);
  auto made = std::make_unique<FakeStream>();
  made->number = state_->next_number++;
  made->device = device;
  auto* const handle = reinterpret_cast<StreamHandle>(made.get());
  state_->streams[handle] = std::move(made);
  return handle;
}

void FakeGpus::PutWrite(StreamHandle stream, void* memory, int value, std::size_t bytes) {
  const Lock lock(state_->mutex);
  state_->PutByProgram(state_->StreamOf(stream), "a program's work", [=] {
    std::memset(memory, value, bytes);
    return true;
  });
}

void FakeGpus::PutCopy(StreamHandle stream, void* to, const void* from, std::size_t bytes) {
  const Lock lock(state_->mutex);
  state_->PutByProgram(state_->StreamOf(stream), "a program's work", [=] {
    std::memmove(to, from, bytes);
    return true;
  });
}

void FakeGpus::AwaitStream(StreamHandle stream) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->AwaitStream(lock, state_->StreamOf(stream), "a program's wait");
}

void FakeGpus::PutGate(StreamHandle stream, const std::atomic<bool>& open) {
  const Lock lock(state_->mutex);
  state_->PutByProgram(state_->StreamOf(stream), "a program's work",
                       [&open] { return open.load(); });
}

void FakeGpus::RunDevices() {
  const Lock lock(state_->mutex);
  state_->RunToTheEnd();
}

}  // namespace sirtaki::tests
