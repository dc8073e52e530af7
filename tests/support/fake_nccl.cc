// The NCCL of FakeGpus: communicators, groups and memory.
#include <algorithm>
#include <list>
#include <thread>

#include "tests/support/fake_gpus_state.h"

namespace sirtaki::tests {
namespace {

using ops::nccl::CommHandle;
using ops::nccl::Config;
using ops::nccl::Result;
using ops::nccl::UniqueId;

using Lock = std::lock_guard<std::mutex>;

// What a thread has called since it opened its group.
struct OpenGroup {
  int depth = 0;
  std::vector<std::pair<CommHandle, FakeLaunch>> launches;
  std::vector<FakeRange> read;
  std::vector<FakeRange> written;
};
thread_local OpenGroup open_group;

Result BeginNccl(FakeGpus::State& s, const std::string& function, const std::string& rest = "") {
  s.Log(function + rest);
  int error = 0;
  return s.Fails(function, &error) ? static_cast<Result>(error) : Result::kSuccess;
}

// True: something of the communicator is still in a stream. With the lock.
bool IsInStreams(FakeGpus::State& s, const FakeComm& comm) {
  const std::vector<FakeStream*> all = s.AllStreams();
  return std::any_of(all.begin(), all.end(), [&comm](const FakeStream* stream) {
    return std::any_of(stream->queue.begin(), stream->queue.end(),
                       [&comm](const FakeOperation& one) { return one.comm == &comm; });
  });
}

// What a group has in one stream is one kernel: none of its parts waits for another one.
void LaunchAll(FakeGpus::State& s, const std::shared_ptr<FakeComm>& comm) {
  struct Kernel {
    std::vector<std::function<bool(FakeComm&)>> parts;
    FakeRanges uses;
  };
  std::map<FakeStream*, Kernel> kernels;
  for (FakeLaunch& launch : comm->launches) {
    Kernel& kernel = kernels[launch.stream];
    kernel.parts.push_back(std::move(launch.run));
    kernel.uses.insert(kernel.uses.end(), launch.uses.begin(), launch.uses.end());
  }
  for (auto& [stream, kernel] : kernels) {
    s.Enqueue(*stream, {[comm, parts = std::move(kernel.parts)]() mutable {
                          if (comm->aborted || *comm->told) return true;
                          std::erase_if(parts, [&comm](const auto& part) { return part(*comm); });
                          return parts.empty();
                        },
                        std::move(kernel.uses), comm.get()});
  }
  comm->launches.clear();
}

// What was called is in its stream when it is no longer in progress; what was finalized has left
// it.
Result Advance(FakeGpus::State& s, const std::shared_ptr<FakeComm>& comm) {
  if (comm->in_progress != 0) return Result::kInProgress;
  if (static_cast<int>(comm->group->ranks.size()) < comm->size || !comm->IsConnected() ||
      !comm->HasWindow(s.windows) || !comm->HasSplit(s)) {
    return Result::kInProgress;
  }
  if (comm->group->HasDeviceTwice(s.hosts)) return comm->error = Result::kInvalidUsage;
  if (comm->finalized) {
    s.Run(/*held_too=*/true);
    if (IsInStreams(s, *comm)) return Result::kInProgress;
  }
  LaunchAll(s, comm);
  comm->busy = false;
  return Result::kSuccess;
}

// A call of a communicator that blocks returns when it is over, or when it is told to abort.
Result End(std::unique_lock<std::mutex>& lock, FakeGpus::State& s,
           const std::shared_ptr<FakeComm>& comm, Result result) {
  while (comm->blocking && result == Result::kInProgress) {
    if (*comm->told) return Result::kInternalError;
    if (comm->error != Result::kSuccess) return comm->error;
    lock.unlock();  // the peers come, and whoever aborts
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    lock.lock();
    if (comm->in_progress > 0) --comm->in_progress;
    result = Advance(s, comm);
  }
  return result;
}

Result Begin(FakeGpus::State& s, const std::shared_ptr<FakeComm>& comm) {
  comm->in_progress = s.answers;
  comm->busy = true;
  return Advance(s, comm);
}

Result InitRank(CommHandle* handle, int size, UniqueId id, int rank, Config* config) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const Result result =
      BeginNccl(s, "ncclCommInitRankConfig",
                " rank " + std::to_string(rank) + " blocking " + std::to_string(config->blocking));
  if (result != Result::kSuccess) return result;
  auto comm = std::make_shared<FakeComm>();
  comm->rank = rank;
  comm->device = std::max(0, FakeCurrentDevice());
  comm->size = size;
  comm->shares = config->split_share == 1;
  std::shared_ptr<FakeGroup>& group = s.groups[std::string(id.bytes.begin(), id.bytes.end())];
  if (group == nullptr) {
    group = std::make_shared<FakeGroup>();
    group->size = size;
  }
  if (static_cast<int>(group->ranks.size()) == group->size || group->ranks.count(rank) > 0) {
    FailAsMisuse("a unique id makes one communicator, and rank " + std::to_string(rank) +
                 " comes to it again");
  }
  group->ranks[rank] = comm->device;
  comm->group = group;
  comm->in_progress = s.answers;
  comm->busy = true;
  *handle = reinterpret_cast<CommHandle>(comm.get());
  s.comms[*handle] = std::move(comm);
  return Result::kInProgress;
}

// All ranks say the same color, and the keys are their ranks.
Result Split(CommHandle handle, int color, int key, CommHandle* made, Config* config) {
  FakeNcclCall call(handle);
  FakeComm& comm = *call.comm;
  const Result result =
      call.Begin("ncclCommSplit", " blocking " + std::to_string(config->blocking));
  if (result != Result::kSuccess) return result;
  if (color != 0 || key != comm.rank) FailAsMisuse("ncclCommSplit like this is not played here");
  *made = nullptr;
  std::vector<std::shared_ptr<FakeGroup>>& groups = comm.group->splits;
  if (groups.size() == comm.splits) {
    groups.push_back(std::make_shared<FakeGroup>());
    groups.back()->size = comm.size;
  }
  auto child = std::make_shared<FakeComm>();
  child->rank = comm.rank;
  child->device = comm.device;
  child->size = comm.size;
  child->blocking = config->blocking != 0;
  child->group = groups[comm.splits];
  child->group->ranks[comm.rank] = comm.device;
  child->parent = call.comm;
  if (comm.shares) child->told = comm.told;
  comm.child = std::move(child);
  comm.split = made;
  return call.End(Begin(call.s, call.comm));
}

Result AsyncError(CommHandle handle, Result* error) {
  FakeNcclCall call(handle);
  int wanted = 0;
  if (call.s.Fails("ncclCommGetAsyncError", &wanted)) return static_cast<Result>(wanted);
  FakeComm& comm = *call.comm;
  const auto set = call.s.async_errors.find(comm.rank);
  if (set != call.s.async_errors.end()) {
    *error = set->second;
  } else if (comm.error != Result::kSuccess) {
    *error = comm.error;
  } else if (comm.in_progress != 0) {
    if (comm.in_progress > 0) --comm.in_progress;
    *error = Result::kInProgress;
  } else {
    *error = Advance(call.s, call.comm);
  }
  return Result::kSuccess;
}

Result Finalize(CommHandle handle) {
  FakeNcclCall call(handle);
  const Result result = call.Begin("ncclCommFinalize");
  if (result != Result::kSuccess) return result;
  call.comm->finalized = true;
  call.comm->in_progress = call.s.answers;
  call.comm->busy = true;
  return call.End(Result::kInProgress);
}

Result Destroy(CommHandle handle) {
  FakeNcclCall call(handle);
  if (!call.comm->finalized) FailAsMisuse("ncclCommDestroy without ncclCommFinalize");
  if (call.comm->busy) FailAsMisuse("ncclCommDestroy before ncclCommFinalize is over");
  call.s.comms.erase(handle);
  return BeginNccl(call.s, "ncclCommDestroy", " rank " + std::to_string(call.comm->rank));
}

// Tells the kernels to end, waits for the thread that launches, and frees.
Result Abort(CommHandle handle) {
  FakeNcclCall call(handle);
  if (open_group.depth > 0) FailAsMisuse("ncclCommAbort in a group is not played here");
  FakeGpus::State& s = call.s;
  const Result result = BeginNccl(s, "ncclCommAbort", " rank " + std::to_string(call.comm->rank));
  // The thread's device is chosen again afterwards: the first one if none was.
  s.contexts.insert(std::max(0, FakeCurrentDevice()));
  call.comm->aborted = true;
  *call.comm->told = true;
  for (const auto& [one, comm] : s.comms) {
    if (comm->told != call.comm->told) continue;
    for (auto& [number, meeting] : comm->group->meetings) {
      if (!meeting.done) meeting.parts.erase(comm->rank);
    }
    // What it has sent and nobody has taken lies in memory that may be freed.
    for (auto& [way, mail] : comm->group->mail) {
      if (way.first == comm->rank) mail.clear();
    }
  }
  if (call.comm->IsConnected()) LaunchAll(s, call.comm);
  call.comm->launches.clear();
  if (call.comm->split != nullptr) call.comm->GiveSplit(s);  // which is to be aborted as well
  s.comms.erase(handle);
  ++s.aborting;
  s.AwaitDevice(call.lock, call.comm->device, "ncclCommAbort");
  --s.aborting;
  return result;
}

Result GroupStart() {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  ++open_group.depth;
  return BeginNccl(s, "ncclGroupStart");
}

Result GroupEnd() {
  FakeGpus::State& s = TheFakeGpus();
  std::list<FakeVisit> visits;
  for (const auto& [handle, launch] : open_group.launches) visits.emplace_back(handle);
  std::unique_lock<std::mutex> lock(s.mutex);
  const Result result = BeginNccl(s, "ncclGroupEnd");
  if (--open_group.depth > 0) return result;
  auto launches = std::move(open_group.launches);
  open_group = {};
  if (result != Result::kSuccess) return result;
  // A group starts all of it together: what it receives waits for none of what it sends.
  std::set<std::shared_ptr<FakeComm>> comms;
  for (const bool sends : {true, false}) {
    for (auto& [handle, launch] : launches) {
      if ((launch.to >= 0) != sends) continue;
      const std::shared_ptr<FakeComm>& comm = s.FindComm(handle);
      s.CheckNotLaunching(*launch.stream, "ncclGroupEnd", comm.get());
      comm->Call(std::move(launch));
      comms.insert(comm);
    }
  }
  Result worst = Result::kSuccess;
  for (const std::shared_ptr<FakeComm>& comm : comms) {
    const Result one = End(lock, s, comm, Begin(s, comm));
    if (one != Result::kSuccess) worst = one;
  }
  return worst;
}

Result MemAlloc(void** memory, std::size_t bytes) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  if (BeginNccl(s, "ncclMemAlloc") == Result::kSuccess &&
      s.Allocate(FakeMemory::kOfNccl, bytes, memory) == ops::cuda::Error::kSuccess) {
    return Result::kSuccess;
  }
  KeepFakeError(ops::cuda::Error::kMemoryAllocation);
  return Result::kUnhandledCudaError;
}

Result MemFree(void* memory) {
  FakeGpus::State& s = TheFakeGpus();
  std::unique_lock<std::mutex> lock(s.mutex);
  const Result result = BeginNccl(s, "ncclMemFree");
  if (result == Result::kSuccess) s.Free(lock, "ncclMemFree", FakeMemory::kOfNccl, memory);
  return result;
}

Result GetUniqueId(UniqueId* id) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const Result result = BeginNccl(s, "ncclGetUniqueId");
  const std::string text = "id " + std::to_string(s.next_number++);
  std::copy(text.begin(), text.end(), id->bytes.begin());
  return result;
}

const char* LastError(CommHandle) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  thread_local std::string text;  // read without the lock
  text = s.last_nccl_error;
  return text.c_str();
}

}  // namespace

// The calls of a group run together: what one of them writes is no other's. A collective has its
// input and its output from its rank alone, apart from each other or exactly in place.
bool ClaimsFakeRanges(const FakeRange& read, const FakeRange& written, bool in_place) {
  if (!in_place && read.Overlaps(written)) return false;
  if (open_group.depth == 0) return true;
  for (const FakeRange& other : open_group.written) {
    if (other.Overlaps(read) || other.Overlaps(written)) return false;
  }
  for (const FakeRange& other : open_group.read) {
    if (other.Overlaps(written)) return false;
  }
  open_group.read.push_back(read);
  open_group.written.push_back(written);
  return true;
}

bool FakeGroup::HasDeviceTwice(int hosts) const {
  std::set<std::pair<int, int>> seen;
  return std::any_of(ranks.begin(), ranks.end(), [&](const auto& rank) {
    return !seen.insert({rank.first % hosts, rank.second}).second;
  });
}

// ---- FakeComm ----

void FakeComm::Call(FakeLaunch launch) {
  if (launch.to >= 0) {
    group->sends.insert({rank, launch.to});
  } else if (launch.from >= 0) {
    group->receives.insert({launch.from, rank});
  } else {
    group->collectives[launch.algorithm].insert(rank);
  }
  launches.push_back(std::move(launch));
}

bool FakeComm::HasSplit(FakeGpus::State& s) {
  if (split == nullptr) return true;
  if (static_cast<int>(group->splits[splits]->ranks.size()) < size) return false;
  GiveSplit(s);
  return true;
}

void FakeComm::GiveSplit(FakeGpus::State& s) {
  ++splits;
  *std::exchange(split, nullptr) = reinterpret_cast<CommHandle>(child.get());
  s.comms[reinterpret_cast<CommHandle>(child.get())] = child;
}

bool FakeComm::IsConnected() const {
  return std::all_of(launches.begin(), launches.end(), [this](const FakeLaunch& launch) {
    if (launch.to >= 0) return group->receives.count({rank, launch.to}) > 0;
    if (launch.from >= 0) return group->sends.count({launch.from, rank}) > 0;
    return static_cast<int>(group->collectives[launch.algorithm].size()) == size;
  });
}

// ---- FakeVisit ----

namespace {

// Visitors are counted beside the lock, which makes one thread of many. They outlive every
// FakeGpus, as a call that was left behind does.
struct Visitors {
  std::mutex mutex;
  std::map<CommHandle, std::pair<std::thread::id, int>> all;  // with how many calls of the thread
};
Visitors& TheVisitors() {
  static auto* visitors = new Visitors;
  return *visitors;
}

}  // namespace

FakeVisit::FakeVisit(CommHandle handle) : handle_(handle) {
  Visitors& visitors = TheVisitors();
  const Lock lock(visitors.mutex);
  auto& [thread, calls] = visitors.all[handle];
  if (calls++ == 0) thread = std::this_thread::get_id();
  if (thread != std::this_thread::get_id()) {
    FailAsMisuse("two threads are in calls of NCCL with one communicator");
  }
}

FakeVisit::~FakeVisit() {
  Visitors& visitors = TheVisitors();
  const Lock lock(visitors.mutex);
  const auto found = visitors.all.find(handle_);
  if (--found->second.second == 0) visitors.all.erase(found);
}

// ---- FakeNcclCall ----

FakeNcclCall::FakeNcclCall(CommHandle handle)
    : handle_(handle), visit_(handle), s(TheFakeGpus()), lock(s.mutex) {
  comm = s.FindComm(handle);
}

// "Attempt to use communicator before the previous operation returned ncclSuccess" (init.cc:381).
Result FakeNcclCall::Begin(const std::string& function, const std::string& rest) {
  const Result result = BeginNccl(s, function, " rank " + std::to_string(comm->rank) + rest);
  if (comm->error != Result::kSuccess) return comm->error;
  if (*comm->told) return Result::kInternalError;  // as a call that was under way already
  if (const auto parent = comm->parent.lock(); parent != nullptr && parent->finalized) {
    FailAsMisuse(function + " of a communicator whose parent is finalized");
  }
  const bool is_end = function == "ncclCommFinalize" || function == "ncclCommSplit";
  if (comm->shares && comm->splits > 0 && !is_end) {
    FailAsMisuse(function + " of a communicator beside one that shares its resources");
  }
  const bool takes_none = comm->busy || comm->finalized;
  return takes_none && result == Result::kSuccess ? Result::kInvalidArgument : result;
}

Result FakeNcclCall::Launch(FakeLaunch launch) {
  if (!launch.stream->IsOf(comm->device)) return Result::kUnhandledCudaError;
  if (open_group.depth > 0) {
    open_group.launches.emplace_back(handle_, std::move(launch));
    return Result::kSuccess;
  }
  s.CheckNotLaunching(*launch.stream, "a collective", comm.get());
  comm->Call(std::move(launch));
  return End(tests::Begin(s, comm));
}

Result FakeNcclCall::End(Result result) { return tests::End(lock, s, comm, result); }

const std::shared_ptr<FakeComm>& FakeGpus::State::FindComm(CommHandle handle) const {
  const auto found = comms.find(handle);
  if (found == comms.end()) FailAsMisuse("a call of NCCL with a communicator that is no more");
  return found->second;
}

void FillFakeNccl(ops::nccl::Api* api) {
  api->GetVersion = [](int* version) {
    *version = ops::nccl::kDeclaredVersion;
    return Result::kSuccess;
  };
  api->GetUniqueId = GetUniqueId;
  api->CommInitRankConfig = InitRank;
  api->CommSplit = Split;
  api->CommGetAsyncError = AsyncError;
  api->CommFinalize = Finalize;
  api->CommDestroy = Destroy;
  api->CommAbort = Abort;
  api->GetErrorString = [](Result result) {
    if (result == Result::kInvalidUsage) return "invalid usage";
    return result == Result::kRemoteError ? "remote process exited" : "a fake NCCL error";
  };
  api->GetLastError = LastError;
  api->GroupStart = GroupStart;
  api->GroupEnd = GroupEnd;
  FillFakeCollectives(api);
  FillFakeRegistration(api);
  api->MemAlloc = MemAlloc;
  api->MemFree = MemFree;
}

}  // namespace sirtaki::tests
