// The inside of FakeGpus, for its files.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/fake_gpus.h"

namespace sirtaki::tests {

struct FakeComm;
struct FakeModule;  // fake_kernels.cc

// CUDA's numbers of errors that the product has no name for.
inline constexpr auto kFakeInvalidContext = static_cast<ops::cuda::Error>(201);
inline constexpr auto kFakeInvalidHandle = static_cast<ops::cuda::Error>(400);

// Ends the process: the real libraries would hang, crash, or give wrong numbers some day.
[[noreturn]] void FailAsMisuse(const std::string& text);

// Memory that a call reads or writes.
struct FakeRange {
  const void* begin = nullptr;
  std::size_t bytes = 0;
  bool Overlaps(const FakeRange& other) const;
};
using FakeRanges = std::vector<FakeRange>;

// What stands in a stream.
struct FakeOperation {
  template <typename Run>
  FakeOperation(Run what, FakeRanges used = {},  // NOLINT(*-explicit-*)
                const FakeComm* its_comm = nullptr)
      : run(std::move(what)), uses(std::move(used)), comm(its_comm) {}

  std::function<bool()> run;  // true when it is over; false: not yet, look again
  FakeRanges uses;
  const FakeComm* comm;      // whose kernel it is, which `run` keeps; null: no kernel of NCCL's
  std::uint64_t number = 0;  // in the order of all that was put into streams
};

enum class FakeMemory { kPlain, kOfNccl, kPinned };
struct FakeAllocation {
  FakeMemory kind = FakeMemory::kPlain;
  std::size_t bytes = 0;
  int device = 0;
};

struct FakeStream {
  // A stream that has none yet becomes of this device.
  bool IsOf(int wanted) {
    if (device < 0) device = wanted;
    return device == wanted;
  }

  int number = 0;
  int device = -1;
  bool capturing = false;
  std::deque<FakeOperation> queue;
};

struct FakeEvent {
  int number = 0;
  int device = 0;
  std::uint64_t recorded = 0;  // how often
  std::uint64_t reached = 0;
};

// One member's part of a collective, when its stream comes to it.
struct FakePart {
  const void* input = nullptr;
  void* output = nullptr;
};

struct FakeMeeting {
  std::string what;  // that all members must have asked for
  std::map<int, FakePart> parts;
  bool done = false;
};

struct FakeWindow {
  std::size_t bytes = 0;
  std::set<int> ranks;  // that have come
};

// A message whose send its stream has come to, and which stands there until its receive has taken it.
struct FakeMail {
  FakeRange from;
  bool is_sent = false;
  bool is_taken = false;
};

struct FakeGroup {  // all ranks of a unique id
  // Whether two ranks of a host have the same device.
  bool HasDeviceTwice(int hosts) const;

  int size = 0;
  std::map<int, int> ranks;  // that have joined, with their devices
  std::map<std::uint64_t, FakeMeeting> meetings;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<FakeMail>>> mail;  // by sender, receiver
  std::map<std::uint64_t, FakeWindow> windows;
  // These ranks have called: NCCL connects them at their first message, and at their first
  // collective by an algorithm, for which its function and its size stand here.
  std::map<std::string, std::set<int>> collectives;
  std::set<std::pair<int, int>> sends;  // by sender, receiver
  std::set<std::pair<int, int>> receives;
  std::vector<std::shared_ptr<FakeGroup>> splits;  // of it, in their order
};

// A kernel of NCCL's that is not in its stream yet.
struct FakeLaunch {
  FakeStream* stream = nullptr;
  int to = -1;            // whom it sends to
  int from = -1;          // whom it receives from; neither: a collective
  std::string algorithm;  // of a collective
  FakeRanges uses;
  std::function<bool(FakeComm&)> run;
};

struct FakeComm {
  int rank = 0;
  int size = 0;
  int device = 0;  // the one that was its thread's when it was made
  std::shared_ptr<FakeGroup> group;
  std::uint64_t calls = 0;  // collectives
  bool blocking = false;    // a call of it returns when it is over
  bool aborted = false;
  // The communicator is told to abort, and what it shares its resources with.
  std::shared_ptr<bool> told = std::make_shared<bool>(false);
  bool shares = false;                     // its resources, with what is split from it
  std::size_t splits = 0;                  // that are over
  ops::nccl::CommHandle* split = nullptr;  // where the one goes that is being made
  std::shared_ptr<FakeComm> child;
  std::weak_ptr<FakeComm> parent;
  ops::nccl::Result error = ops::nccl::Result::kSuccess;  // that it tells whoever asks
  bool finalized = false;
  bool busy = false;    // until its owner is told that the last call is over
  int in_progress = 0;  // answers left
  std::vector<FakeLaunch> launches;

  // Whether all ranks have come to the split that this one is in, which is over by this.
  bool HasSplit(FakeGpus::State& s);
  void GiveSplit(FakeGpus::State& s);
  // What was called is in progress until its peers have called it, too.
  void Call(FakeLaunch launch);
  bool IsConnected() const;

  // ---- fake_nccl_registration.cc ----
  // Whether the window that it has asked for last is there, which it learns by this.
  bool HasWindow(FakeGpus::Windows made);
  bool HasRegistered(const void* memory, bool as_window = false) const;
  bool HasRegistered(const FakeRange& any_of) const;
  std::uint64_t windows = 0;  // that are there, or null
  bool waits_for_window = false;
  void** window = nullptr;
  FakeRange window_memory;
  std::uint64_t registrations = 0;
  std::map<void*, FakeRange> registered;  // by handle, or window
  std::set<void*> windows_made;           // those of them that are or were windows
};

struct FakeGpus::State {
  // With the lock.
  bool Fails(const std::string& function, int* error);
  void Log(std::string line) { calls.push_back(std::move(line)); }
  FakeStream& StreamOf(ops::cuda::StreamHandle handle);
  FakeEvent& EventOf(ops::cuda::EventHandle handle);
  const std::shared_ptr<FakeComm>& FindComm(ops::nccl::CommHandle handle) const;
  // Waits until the stream is through with all that is in it now, without the lock.
  void AwaitStream(std::unique_lock<std::mutex>& held_lock, FakeStream& stream,
                   const std::string& function);
  // PutByProgram is Put for a program, which finds what errors others have left.
  void PutByProgram(FakeStream& stream, const std::string& what, FakeOperation operation);
  // What a function of CUDA's or a program puts into a stream. Nothing may go there while NCCL is
  // still launching: where it ends up would be chance.
  void Put(FakeStream& stream, const std::string& function, FakeOperation operation);
  void CheckNotLaunching(const FakeStream& stream, const std::string& function,
                         const FakeComm* except = nullptr);
  // Null: it is in no memory of this kind.
  const FakeAllocation* FindMemory(FakeMemory kind, const FakeRange& range) const;
  void Enqueue(FakeStream& stream, FakeOperation operation);
  ops::cuda::Error Allocate(FakeMemory kind, std::size_t bytes, void** memory);
  // Waits for the memory's device and gives it back. What is in use cannot go.
  void Free(std::unique_lock<std::mutex>& held_lock, const std::string& function, FakeMemory kind,
            void* memory);
  // The devices go on until this one is through with all that is in its streams now. Lets go of the
  // lock meanwhile.
  void AwaitDevice(std::unique_lock<std::mutex>& held_lock, int device,
                   const std::string& function);
  // Random gives a number below this that follows from the seed; 0 without one.
  std::size_t Random(std::size_t below);
  std::vector<FakeStream*> AllStreams();
  // All that can run now, or by the seed a part of it.
  // `held_too`: the devices go on while somebody waits for them.
  void Run(bool held_too = false);
  void RunToTheEnd();

  std::mutex mutex;
  ops::cuda::Api cuda{};
  ops::nccl::Api nccl{};
  std::uint64_t seed = 0;
  bool held = false;
  bool unloaded = false;
  std::vector<std::string> calls;
  std::map<std::string, std::pair<int, int>> failures;  // function: calls before it, error
  std::map<int, ops::nccl::Result> async_errors;        // by rank
  std::string last_nccl_error;
  int answers = 0;   // that a call is in progress
  int aborting = 0;  // calls that have not returned
  std::chrono::milliseconds wait_limit = std::chrono::seconds(30);
  std::uint64_t operations = 0;  // that were put into streams
  bool has_sent = false;         // a send has come to its turn, for which a receive may be waiting
  int next_number = 1;
  std::map<ops::cuda::StreamHandle, std::unique_ptr<FakeStream>> streams;
  std::map<int, FakeStream> default_streams;  // by device
  std::map<ops::cuda::EventHandle, std::shared_ptr<FakeEvent>> events;
  std::map<ops::cuda::ModuleHandle, std::shared_ptr<FakeModule>> modules;
  std::map<ops::nccl::CommHandle, std::shared_ptr<FakeComm>> comms;
  std::map<std::string, std::shared_ptr<FakeGroup>> groups;  // by unique id
  std::map<void*, FakeAllocation> allocations;
  std::set<int> contexts;
  std::set<int> full;  // devices
  Windows windows = Windows::kSymmetric;
  int hosts = 1;
};

// The one that there is.
FakeGpus::State& TheFakeGpus();
FakeGpus::State* FindFakeGpus();  // null: none

// ---- fake_cuda_calls.cc ----
int FakeCurrentDevice();  // of the calling thread; -1: none chosen
void ForgetFakeThread();  // what CUDA keeps for the calling thread
// The error that CUDA keeps for the calling thread until it is asked for it.
void KeepFakeError(ops::cuda::Error error);
// LibTorch looks for an error after each of its launches, and throws: what we leave behind there
// ends the process.
void CheckNoFakeError(const std::string& who);

void FillFakeCuda(ops::cuda::Api* api);
void FillFakeKernels(ops::cuda::Api* api);  // what launches them
void FillFakeNccl(ops::nccl::Api* api);
void FillFakeCollectives(ops::nccl::Api* api);
void FillFakeRegistration(ops::nccl::Api* api);

// ---- fake_nccl.cc ----

// A thread is in a call of NCCL's with this communicator, alone.
class FakeVisit {
 public:
  explicit FakeVisit(ops::nccl::CommHandle handle);
  ~FakeVisit();
  FakeVisit(const FakeVisit&) = delete;
  FakeVisit& operator=(const FakeVisit&) = delete;

 private:
  const ops::nccl::CommHandle handle_;
};

// A call of NCCL's with a communicator: has the lock while it lives.
class FakeNcclCall {
 public:
  explicit FakeNcclCall(ops::nccl::CommHandle handle);
  FakeNcclCall(const FakeNcclCall&) = delete;
  FakeNcclCall& operator=(const FakeNcclCall&) = delete;

  // Logs the call; the error that a test wants of it, or that the communicator's state gives.
  ops::nccl::Result Begin(const std::string& function, const std::string& rest = "");
  // Now, or at the end of the thread's group.
  ops::nccl::Result Launch(FakeLaunch launch);
  // End gives the result of a call for which NCCL has this one: if the call blocks, when it is over.
  ops::nccl::Result End(ops::nccl::Result result);

  std::shared_ptr<FakeComm> comm;  // goes last: the next one at its address has other visitors

 private:
  const ops::nccl::CommHandle handle_;
  const FakeVisit visit_;

 public:
  FakeGpus::State& s;
  std::unique_lock<std::mutex> lock;
};

// False where this call's own ranges overlap, but for `in_place`, and where a call of the thread's
// open group writes what this one reads or writes, or reads what it writes.
bool ClaimsFakeRanges(const FakeRange& read, const FakeRange& written, bool in_place);

// ---- fake_nccl_reduce.cc ----

// Reduces what the ranks give, one after the other, and rounds as NCCL's ring does.
void FakeReduce(ops::nccl::RedOp op, ops::nccl::DataType type, const std::vector<FakePart>& parts,
                std::size_t count, const std::vector<void*>& outputs);

// The way that NCCL 2.28.9 takes for an all-reduce.
struct FakeAllReduce {
  ops::nccl::RedOp op;
  ops::nccl::DataType type;
  bool in_place;
  bool in_window;   // input and output
  bool registered;  // in a window, or otherwise
  bool nvls;        // the machine has NVLink SHARP
  int hosts;
};
// "symmetric", "nvls", "ring", the last two with ", copied" if NCCL copies to memory of its own.
const char* PathOfAllReduce(const FakeAllReduce& call);
std::size_t FakeSizeOf(ops::nccl::DataType type);

}  // namespace sirtaki::tests
