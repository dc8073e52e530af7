// The CUDA of FakeGpus: its runtime, and the driver's contexts.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "tests/support/fake_gpus_state.h"

namespace sirtaki::tests {
namespace {

using ops::cuda::ContextHandle;
using ops::cuda::CopyKind;
using ops::cuda::Error;
using ops::cuda::EventHandle;
using ops::cuda::StreamHandle;

// What the driver and the runtime keep for a thread.
thread_local std::vector<int> pushed_contexts;
thread_local int set_device = -1;
thread_local int capture_mode = 0;  // global; another one: a thread of ours

// The last error, which nobody may leave to whatever the thread does next.
struct KeptError {
  KeptError() = default;
  ~KeptError() { CheckNoFakeError("the end of a thread"); }
  KeptError(const KeptError&) = delete;
  KeptError& operator=(const KeptError&) = delete;
  Error error = Error::kSuccess;
};
thread_local KeptError kept_error;

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

Error Allocate(const char* function, FakeMemory kind, void** memory, std::size_t bytes) {
  FakeGpus::State& s = TheFakeGpus();
  std::unique_lock<std::mutex> lock(s.mutex);
  const Error error = Begin(s, function);
  if (error != Error::kSuccess) return error;
  if (IsForbidden(s)) return kCaptureForbids;
  if (kind == FakeMemory::kPinned) s.AwaitDevice(lock, std::max(0, Current()), function);
  return s.Allocate(kind, bytes, memory);
}

Error Deallocate(const char* function, FakeMemory kind, void* memory) {
  FakeGpus::State& s = TheFakeGpus();
  std::unique_lock<std::mutex> lock(s.mutex);
  const Error error = Begin(s, function);
  if (error == Error::kSuccess) s.Free(lock, function, kind, memory);
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
  const Error error = Begin(s, "cudaStreamDestroy");
  if (error != Error::kSuccess) return error;
  s.Run();
  if (!s.StreamOf(stream).queue.empty()) FailAsMisuse("cudaStreamDestroy of a stream with work");
  s.streams.erase(stream);
  return error;
}

Error WaitEvent(StreamHandle stream, EventHandle event, unsigned) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  FakeStream& to = s.StreamOf(stream);
  FakeEvent& of = s.EventOf(event);
  const Error error =
      Begin(s, "cudaStreamWaitEvent", Name(" stream ", to.number) + Name(" event ", of.number));
  if (error != Error::kSuccess) return error;
  s.Put(to, "cudaStreamWaitEvent", [kept = s.events.at(event), place = of.recorded] {
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
  made->device = std::max(0, Current());
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
  if (!to.IsOf(of.device)) return kFakeInvalidHandle;
  s.Put(to, "cudaEventRecord", [kept = s.events.at(event), place = ++of.recorded] {
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
  constexpr std::size_t kOneIsLateIn = 3;
  const bool is_late = s.seed != 0 && s.Random(kOneIsLateIn) == 0;
  return of.reached >= of.recorded && !is_late ? Error::kSuccess : Error::kNotReady;
}

Error DestroyEvent(EventHandle event) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  Begin(s, "cudaEventDestroy");
  s.contexts.insert(std::max(0, Current()));
  s.events.erase(event);
  return Error::kSuccess;
}

// A copy of the host's memory lets the host go on where that is pinned: for other memory the call
// waits for the stream, as a lane must not.
Error CopyAsync(void* to, const void* from, std::size_t bytes, CopyKind kind, StreamHandle stream) {
  FakeGpus::State& s = TheFakeGpus();
  std::unique_lock<std::mutex> lock(s.mutex);
  const Error error = Begin(s, "cudaMemcpyAsync");
  if (error != Error::kSuccess) return error;
  const void* const of_host = kind == CopyKind::kHostToDevice ? from : to;
  const bool waits = kind != CopyKind::kDeviceToDevice &&
                     s.FindMemory(FakeMemory::kPinned, {of_host, bytes}) == nullptr;
  if (waits && capture_mode != 0) {
    FailAsMisuse("cudaMemcpyAsync on a thread of ours with memory of the host that is not pinned");
  }
  const auto run = [=] {
    std::memmove(to, from, bytes);
    return true;
  };
  FakeStream& into = s.StreamOf(stream);
  s.Put(into, "cudaMemcpyAsync", {run, {{to, bytes}, {from, bytes}}});
  if (waits) s.AwaitStream(lock, into, "cudaMemcpyAsync");
  return error;
}

Error SetAsync(void* memory, int value, std::size_t bytes, StreamHandle stream) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const Error error = Begin(s, "cudaMemsetAsync");
  if (error != Error::kSuccess) return error;
  const auto run = [=] {
    std::memset(memory, value, bytes);
    return true;
  };
  s.Put(s.StreamOf(stream), "cudaMemsetAsync", {run, {{memory, bytes}}});
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

Error Malloc(void** memory, std::size_t bytes) {
  return Allocate("cudaMalloc", FakeMemory::kPlain, memory, bytes);
}
Error HostAlloc(void** memory, std::size_t bytes, unsigned) {
  return Allocate("cudaHostAlloc", FakeMemory::kPinned, memory, bytes);
}
Error Free(void* memory) { return Deallocate("cudaFree", FakeMemory::kPlain, memory); }
Error FreeHost(void* memory) { return Deallocate("cudaFreeHost", FakeMemory::kPinned, memory); }

Error LastError() {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  s.Log("cudaGetLastError");
  return std::exchange(kept_error.error, Error::kSuccess);
}

// A function of the runtime, whose error stays with the thread.
template <auto function, typename... Arguments>
Error Keeping(Arguments... arguments) {
  const Error error = function(arguments...);
  if (error != Error::kSuccess && error != Error::kDeinitialized) kept_error.error = error;
  return error;
}

}  // namespace

int FakeCurrentDevice() { return Current(); }

void KeepFakeError(Error error) { kept_error.error = error; }

void CheckNoFakeError(const std::string& who) {
  if (kept_error.error == Error::kSuccess) return;
  FailAsMisuse(who + " finds error " + std::to_string(static_cast<int>(kept_error.error)) +
               ", which a call of CUDA before it has left behind");
}

void ForgetFakeThread() {
  set_device = -1;
  capture_mode = 0;
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
  api->SetDevice = Keeping<SetDevice>;
  api->GetErrorName = [](Error) { return "cudaErrorFake"; };
  api->GetErrorString = [](Error error) {
    return error == Error::kMemoryAllocation ? "out of memory" : "a fake error";
  };
  api->GetLastError = LastError;
  api->DeviceGetStreamPriorityRange = [](int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return Error::kSuccess;
  };
  api->StreamCreateWithPriority = Keeping<CreateStream>;
  api->StreamDestroy = Keeping<DestroyStream>;
  api->StreamWaitEvent = Keeping<WaitEvent>;
  api->StreamIsCapturing = Keeping<IsCapturing>;
  api->ThreadExchangeStreamCaptureMode = [](int* mode) {
    std::swap(*mode, capture_mode);
    return Error::kSuccess;
  };
  api->EventCreateWithFlags = Keeping<CreateEvent>;
  api->EventRecord = Keeping<RecordEvent>;
  api->EventQuery = Keeping<QueryEvent>;
  api->EventDestroy = Keeping<DestroyEvent>;
  api->MemcpyAsync = Keeping<CopyAsync>;
  api->MemsetAsync = Keeping<SetAsync>;
  api->Malloc = Keeping<Malloc>;
  api->Free = Keeping<Free>;
  api->HostAlloc = Keeping<HostAlloc>;
  api->FreeHost = Keeping<FreeHost>;
  api->DriverGetVersion = [](int* version) {
    *version = 13000;
    return Error::kSuccess;
  };
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

}  // namespace sirtaki::tests
