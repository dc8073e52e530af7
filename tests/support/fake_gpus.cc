#include "tests/support/fake_gpus.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "tests/support/fake_gpus_state.h"

namespace sirtaki::tests {
namespace {

using ops::cuda::ContextHandle;
using ops::cuda::CopyKind;
using ops::cuda::Error;
using ops::cuda::EventHandle;
using ops::cuda::StreamHandle;

FakeGpus::State* the_state = nullptr;

// What the driver and the runtime keep for a thread.
thread_local std::vector<int> pushed_contexts;
thread_local int set_device = -1;
thread_local int capture_mode = 0;  // global

constexpr int kDevices = 128;
constexpr auto kCaptureForbids = static_cast<Error>(900);
char context_numbers[kDevices];  // a context is the address of its device's

int Current() { return pushed_contexts.empty() ? set_device : pushed_contexts.back(); }

using Lock = std::lock_guard<std::mutex>;

std::string Name(const char* what, int number) { return what + std::to_string(number); }

// Logs the call; the error that a test wants of it.
Error Begin(FakeGpus::State& s, const std::string& function, const std::string& rest = "") {
  s.Log(function + rest);
  if (s.unloaded) return Error::kDeinitialized;
  int error = 0;
  return s.Fails(function, &error) ? static_cast<Error>(error) : Error::kSuccess;
}

// While a stream is captured, a thread may make no call that could wait, unless it has said that
// others' captures are none of its business.
bool IsForbidden(FakeGpus::State& s) {
  return capture_mode == 0 &&
         std::any_of(s.streams.begin(), s.streams.end(),
                     [](const auto& stream) { return stream.second->capturing; });
}

Error Allocate(const char* function, void** memory, std::size_t bytes) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const Error error = Begin(s, function);
  if (error != Error::kSuccess) return error;
  if (IsForbidden(s)) return kCaptureForbids;
  const bool of_device = function != std::string("cudaHostAlloc");
  if (of_device && s.full.count(Current()) > 0) return Error::kMemoryAllocation;
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(*memory, 0xCD, bytes);
  s.allocations.insert(*memory);
  return Error::kSuccess;
}

Error Deallocate(const char* function, void* memory) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const Error error = Begin(s, function);
  if (s.allocations.erase(memory) == 1) std::free(memory);
  return error;
}

Error SetDevice(int device) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const Error error = Begin(s, "cudaSetDevice", Name(" ", device));
  if (error != Error::kSuccess) return error;
  set_device = device;
  s.contexts.insert(device);
  return Error::kSuccess;
}

Error CreateStream(StreamHandle* stream, unsigned, int priority) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const Error error = Begin(s, "cudaStreamCreateWithPriority", Name(" ", priority));
  if (error != Error::kSuccess) return error;
  auto made = std::make_unique<FakeStream>();
  made->number = s.next_number++;
  made->device = Current();
  s.contexts.insert(Current());
  *stream = reinterpret_cast<StreamHandle>(made.get());
  s.streams[*stream] = std::move(made);
  return Error::kSuccess;
}

Error DestroyStream(StreamHandle stream) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  Begin(s, "cudaStreamDestroy");
  s.streams.erase(stream);
  return Error::kSuccess;
}

Error WaitEvent(StreamHandle stream, EventHandle event, unsigned) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  FakeStream& to = s.StreamOf(stream);
  FakeEvent& of = s.EventOf(event);
  const Error error =
      Begin(s, "cudaStreamWaitEvent", Name(" stream ", to.number) + Name(" event ", of.number));
  if (error != Error::kSuccess) return error;
  to.queue.push_back([kept = s.events.at(event), place = of.recorded] {
    return kept->reached >= place;  // it may be destroyed before, as CUDA's may
  });
  return Error::kSuccess;
}

Error IsCapturing(StreamHandle stream, int* capture) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const Error error = Begin(s, "cudaStreamIsCapturing");
  *capture = s.StreamOf(stream).capturing ? 1 : 0;
  return error;
}

Error CreateEvent(EventHandle* event, unsigned) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const Error error = Begin(s, "cudaEventCreateWithFlags", Name(" device ", Current()));
  if (error != Error::kSuccess) return error;
  s.contexts.insert(std::max(0, Current()));  // CUDA takes the first one where none is chosen
  auto made = std::make_shared<FakeEvent>();
  made->number = s.next_number++;
  *event = reinterpret_cast<EventHandle>(made.get());
  s.events[*event] = std::move(made);
  return Error::kSuccess;
}

Error RecordEvent(EventHandle event, StreamHandle stream) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  FakeStream& to = s.StreamOf(stream);
  FakeEvent& of = s.EventOf(event);
  const Error error =
      Begin(s, "cudaEventRecord", Name(" event ", of.number) + Name(" stream ", to.number));
  if (error != Error::kSuccess) return error;
  to.queue.push_back([kept = s.events.at(event), place = ++of.recorded] {
    if (kept->reached < place) kept->reached = place;
    return true;
  });
  return Error::kSuccess;
}

Error QueryEvent(EventHandle event) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  int error = 0;
  if (s.unloaded) return Error::kDeinitialized;
  if (s.Fails("cudaEventQuery", &error)) return static_cast<Error>(error);
  if (IsForbidden(s)) return kCaptureForbids;
  s.Run();
  const FakeEvent& of = s.EventOf(event);
  return of.reached >= of.recorded ? Error::kSuccess : Error::kNotReady;
}

Error DestroyEvent(EventHandle event) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  Begin(s, "cudaEventDestroy");
  s.contexts.insert(std::max(0, Current()));
  s.events.erase(event);
  return Error::kSuccess;
}

Error CopyAsync(void* to, const void* from, std::size_t bytes, CopyKind, StreamHandle stream) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const Error error = Begin(s, "cudaMemcpyAsync");
  if (error != Error::kSuccess) return error;
  s.StreamOf(stream).queue.push_back([=] {
    std::memmove(to, from, bytes);
    return true;
  });
  return Error::kSuccess;
}

Error SetAsync(void* memory, int value, std::size_t bytes, StreamHandle stream) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const Error error = Begin(s, "cudaMemsetAsync");
  if (error != Error::kSuccess) return error;
  s.StreamOf(stream).queue.push_back([=] {
    std::memset(memory, value, bytes);
    return true;
  });
  return Error::kSuccess;
}

Error RetainContext(ContextHandle* context, int device) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const Error error = Begin(s, "cuDevicePrimaryCtxRetain", Name(" ", device));
  if (error != Error::kSuccess) return error;
  s.contexts.insert(device);
  *context = reinterpret_cast<ContextHandle>(&context_numbers[device]);
  return Error::kSuccess;
}

Error PushContext(ContextHandle context) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const Error error = Begin(s, "cuCtxPushCurrent");
  if (error != Error::kSuccess) return error;
  pushed_contexts.push_back(static_cast<int>(reinterpret_cast<char*>(context) - context_numbers));
  return Error::kSuccess;
}

Error PopContext(ContextHandle*) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  pushed_contexts.pop_back();
  return Begin(s, "cuCtxPopCurrent");
}

}  // namespace

FakeGpus::State* FindFakeGpus() { return the_state; }

int FakeCurrentDevice() { return Current(); }

FakeGpus::State& TheFakeGpus() {
  if (the_state == nullptr) std::abort();
  return *the_state;
}

void FillFakeCuda(ops::cuda::Api* api) {
  api->RuntimeGetVersion = [](int* version) {
    *version = 13000;
    return Error::kSuccess;
  };
  api->GetDeviceCount = [](int* count) {
    *count = kDevices;
    return Error::kSuccess;
  };
  api->SetDevice = SetDevice;
  api->DeviceGetPCIBusId = [](char* text, int size, int device) {
    const std::string id = "0000:" + std::to_string(10 + device) + ":00.0";
    std::strncpy(text, id.c_str(), static_cast<std::size_t>(size));
    return Error::kSuccess;
  };
  api->GetErrorName = [](Error) { return "cudaErrorFake"; };
  api->GetErrorString = [](Error error) {
    return error == Error::kMemoryAllocation ? "out of memory" : "a fake error";
  };
  api->GetLastError = [] {
    FakeGpus::State& s = TheFakeGpus();
    const Lock lock(s.mutex);
    return Begin(s, "cudaGetLastError");
  };
  api->DeviceGetStreamPriorityRange = [](int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return Error::kSuccess;
  };
  api->StreamCreateWithPriority = CreateStream;
  api->StreamDestroy = DestroyStream;
  api->StreamWaitEvent = WaitEvent;
  api->StreamIsCapturing = IsCapturing;
  api->ThreadExchangeStreamCaptureMode = [](int* mode) {
    std::swap(*mode, capture_mode);
    return Error::kSuccess;
  };
  api->EventCreateWithFlags = CreateEvent;
  api->EventRecord = RecordEvent;
  api->EventQuery = QueryEvent;
  api->EventDestroy = DestroyEvent;
  api->MemcpyAsync = CopyAsync;
  api->MemsetAsync = SetAsync;
  api->Malloc = [](void** memory, std::size_t bytes) {
    return Allocate("cudaMalloc", memory, bytes);
  };
  api->Free = [](void* memory) { return Deallocate("cudaFree", memory); };
  api->HostAlloc = [](void** memory, std::size_t bytes, unsigned) {
    return Allocate("cudaHostAlloc", memory, bytes);
  };
  api->FreeHost = [](void* memory) { return Deallocate("cudaFreeHost", memory); };
  api->DeviceGet = [](int* device, int ordinal) {
    *device = ordinal;
    return ordinal < kDevices ? Error::kSuccess : static_cast<Error>(101);
  };
  api->DevicePrimaryCtxRetain = RetainContext;
  api->DevicePrimaryCtxRelease = [](int) { return Error::kSuccess; };
  api->CtxPushCurrent = PushContext;
  api->CtxPopCurrent = PopContext;
  FillFakeKernels(api);
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
  const int device = std::max(0, Current());
  FakeStream& stream = default_streams[device];
  stream.device = device;
  return stream;
}
FakeEvent& FakeGpus::State::EventOf(EventHandle handle) { return *events.at(handle); }

void FakeGpus::State::Run(bool held_too) {
  bool moved = !held || held_too;
  const auto advance = [&moved](FakeStream& stream) {
    while (!stream.queue.empty() && stream.queue.front().run()) {
      stream.queue.pop_front();
      moved = true;
    }
  };
  while (moved) {
    moved = false;
    for (auto& [handle, stream] : streams) advance(*stream);
    for (auto& [device, stream] : default_streams) advance(stream);
  }
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
  // A call that is in progress for ever holds its communicator, which holds it.
  for (const auto& [handle, comm] : state_->comms) comm->launch.clear();
  for (void* memory : state_->allocations) std::free(memory);
  the_state = nullptr;
  set_device = -1;
  capture_mode = 0;
}

const ops::cuda::Api& FakeGpus::cuda() const { return state_->cuda; }
ops::nccl::Api& FakeGpus::nccl() { return state_->nccl; }

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

void FakeGpus::SetWindows(bool supported) {
  const Lock lock(state_->mutex);
  state_->windows = supported;
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

int FakeGpus::current_device() const { return Current(); }

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

StreamHandle FakeGpus::MakeStream() {
  const Lock lock(state_->mutex);
  auto made = std::make_unique<FakeStream>();
  made->number = state_->next_number++;
  auto* const handle = reinterpret_cast<StreamHandle>(made.get());
  state_->streams[handle] = std::move(made);
  return handle;
}

void FakeGpus::PutWrite(StreamHandle stream, void* memory, int value, std::size_t bytes) {
  const Lock lock(state_->mutex);
  state_->StreamOf(stream).queue.push_back([=] {
    std::memset(memory, value, bytes);
    return true;
  });
}

void FakeGpus::PutGate(StreamHandle stream, const std::atomic<bool>& open) {
  const Lock lock(state_->mutex);
  state_->StreamOf(stream).queue.push_back([&open] { return open.load(); });
}

void FakeGpus::RunDevices() {
  const Lock lock(state_->mutex);
  state_->Run();
}

}  // namespace sirtaki::tests
