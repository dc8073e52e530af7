// Memory that is registered with the NCCL of FakeGpus.
#include <algorithm>
#include <cstdlib>

#include "tests/support/fake_gpus_state.h"

namespace sirtaki::tests {
namespace {

using ops::nccl::CommHandle;
using ops::nccl::Result;

void* HandleOf(std::uint64_t number) { return reinterpret_cast<void*>(number); }

Result Register(CommHandle handle, void* memory, std::size_t bytes, void** made) {
  FakeNcclCall call(handle);
  FakeComm& comm = *call.comm;
  const Result result = call.Begin("ncclCommRegister");
  if (result != Result::kSuccess) return result;
  *made = HandleOf(++comm.registrations);
  comm.registered[*made] = {memory, bytes};
  return Result::kSuccess;
}

Result Deregister(CommHandle handle, void* made) {
  FakeNcclCall call(handle);
  FakeComm& comm = *call.comm;
  const Result result = call.Begin("ncclCommDeregister");
  if (comm.registered.erase(made) != 1) std::abort();
  return result;
}

// A window is made when the last rank has come. Until then the call is in progress, although its
// result, as that of NCCL 2.28, does not say so.
Result RegisterWindow(CommHandle handle, void* memory, std::size_t bytes, void** window,
                      int flags) {
  FakeNcclCall call(handle);
  FakeComm& comm = *call.comm;
  int failure = 0;
  const bool fails = call.s.Fails("ncclCommWindowRegister", &failure);
  const Result result = call.Begin("ncclCommWindowRegister");
  if (result != Result::kSuccess) return result;
  if (flags != ops::nccl::kWindowCollSymmetric || bytes % 4096 != 0 ||
      reinterpret_cast<std::uintptr_t>(memory) % 4096 != 0) {
    return Result::kInvalidArgument;
  }
  comm.busy = true;
  // A window's memory is exported to the other ranks: only NCCL's own can be.
  const bool has_memory = call.s.FindMemory(FakeMemory::kOfNccl, {memory, bytes}) != nullptr;
  const auto in_progress = [&call] {
    return call.comm->blocking ? call.End(Result::kInProgress) : Result::kSuccess;
  };
  if (!has_memory && call.s.windows == FakeGpus::Windows::kSymmetric) {
    comm.error = Result::kUnhandledCudaError;
    return in_progress();
  }
  if (fails) {  // which it tells whoever asks; the others wait for it
    comm.error = static_cast<Result>(failure);
    return in_progress();
  }
  FakeWindow& made = comm.group->windows[comm.windows];
  if (made.ranks.empty()) made.bytes = bytes;
  if (made.bytes != bytes) std::abort();  // real ranks would hang, or worse
  made.ranks.insert(comm.rank);
  comm.waits_for_window = true;
  comm.window = window;
  comm.window_memory = {memory, bytes};
  return in_progress();
}

Result DeregisterWindow(CommHandle handle, void* window) {
  FakeNcclCall call(handle);
  FakeComm& comm = *call.comm;
  const Result result = call.Begin("ncclCommWindowDeregister");
  if (comm.registered.erase(window) != 1) std::abort();
  return result;
}

}  // namespace

bool FakeComm::HasWindow(FakeGpus::Windows made) {
  if (!waits_for_window) return true;
  if (static_cast<int>(group->windows[windows].ranks.size()) < size) return false;
  ++windows;
  waits_for_window = false;
  if (made == FakeGpus::Windows::kNone) return true;  // the pointer stays as it was
  *window = HandleOf(++registrations);
  registered[*window] = window_memory;
  if (made == FakeGpus::Windows::kSymmetric) windows_made.insert(*window);
  return true;
}

bool FakeComm::HasRegistered(const void* memory, bool as_window) const {
  return std::any_of(registered.begin(), registered.end(), [&](const auto& entry) {
    if (as_window && windows_made.count(entry.first) == 0) return false;
    return entry.second.Overlaps({memory, 1});
  });
}

bool FakeComm::HasRegistered(const FakeRange& any_of) const {
  if (waits_for_window && window_memory.Overlaps(any_of)) return true;
  return std::any_of(registered.begin(), registered.end(),
                     [&](const auto& entry) { return entry.second.Overlaps(any_of); });
}

void FillFakeRegistration(ops::nccl::Api* api) {
  api->CommRegister = Register;
  api->CommDeregister = Deregister;
  api->CommWindowRegister = RegisterWindow;
  api->CommWindowDeregister = DeregisterWindow;
}

}  // namespace sirtaki::tests
