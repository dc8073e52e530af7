#include "mpi/environment.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

#include "core/base/log.h"
#include "core/machine/cgroup.h"
#include "core/machine/start_notice.h"
#include "mpi/check.h"
#include "mpi/gate.h"
#include "mpi/library.h"

namespace sirtaki::mpi {
namespace {

using core::Status;
using core::StatusCode;
using core::TimePoint;

// MPI exists once in a process, so what has to be known about it at exit does, too.
struct ProcessState {
  std::timed_mutex start_mutex;      // one Start at a time
  pid_t initialized_by_process = 0;  // 0: not by us
  std::thread::id initialized_by_thread;
  std::atomic<bool> fault{false};
  std::atomic<bool> all_are_there{true};  // as far as is known: after a fault it is not
  std::atomic<int> open{0};  // environments that exist, also where a call does not return
};

ProcessState& State() {
  static ProcessState* const state = new ProcessState;  // outlives everything that runs at exit
  return *state;
}

// Registered by the first Start that initialises MPI, so it runs after whatever was registered
// later.
void FinalizeAtExit() {
  const ProcessState& state = State();
  if (getpid() != state.initialized_by_process) return;  // a forked child: MPI is its parent's
  if (!state.all_are_there.load() || IsFinalized()) return;
  const char* why = nullptr;
  if (std::this_thread::get_id() != state.initialized_by_thread) {
    why = "the process exits on another thread than the one that initialised MPI";
  } else if (state.open.load() != 0) {
    why = "the library was not shut down, or a fault has left a thread in a call";
  }
  if (why == nullptr) {
    TheApi().Finalize();
  } else {
    SIRTAKI_LOG(kWarning, "MPI_Finalize is skipped: " << why);
  }
}

std::string LibraryName() {
  std::array<char, 1024> text{};
  static_cast<void>(InMpi("MPI_Get_library_version",
                          [&] { return TheApi().GetLibraryVersion(text.data(), text.size()); }));
  std::string name(text.data());
  // Open MPI: "Open MPI v4.1.4, package: …".
  // MPICH:    "MPICH Version:      4.0.2\nMPICH Release date: …".
  name.resize(std::min(name.find_first_of(",\n"), name.size()));
  std::string tidy;
  for (const char c : name) {
    const char next = c == '\t' ? ' ' : c;
    if (next == ' ' && (tidy.empty() || tidy.back() == ' ')) continue;
    if (next != '\0') tidy.push_back(next);
  }
  return tidy;
}

const char* ThreadLevelName(ThreadLevel level) {
  switch (level) {
    case ThreadLevel::kMultiple:
      return "MPI_THREAD_MULTIPLE";
    case ThreadLevel::kSerialized:
      return "MPI_THREAD_SERIALIZED";
    case ThreadLevel::kFunneled:
      return "MPI_THREAD_FUNNELED";
    case ThreadLevel::kSingle:
      break;
  }
  return "MPI_THREAD_SINGLE";
}

// MPI may have been told which networks it may use.
std::string InterfacesText(const core::EnvironmentView& variables) {
  std::string text;
  for (const char* name : {"OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude",
                           "UCX_NET_DEVICES", "FI_TCP_IFACE"}) {
    const std::optional<std::string> value = variables.Find(name);
    if (value) text += std::string(", ") + name + "=" + *value;
  }
  return text;
}

Status AskMpi(int* initialized, int* finalized) {
  Status status = InMpi("MPI_Initialized", [&] { return TheApi().Initialized(initialized); });
  if (!status.ok()) return status;
  return InMpi("MPI_Finalized", [&] { return TheApi().Finalized(finalized); });
}

// Initialises MPI if nobody did, and says what threads may do then.
Status InitializeMpi(const core::EnvironmentView& variables, ThreadLevel* level, bool* by_us) {
  int initialized = 0;
  int finalized = 0;
  Status status = AskMpi(&initialized, &finalized);
  if (!status.ok()) return status;
  ProcessState& state = State();
  if (finalized != 0) {
    return {
        StatusCode::kNotInitialized,
        "MPI was finalized already (MPI_Finalize was called) and cannot be started again in this "
        "process: call init() before MPI_Finalize"};
  }
  if (initialized == 0) {
    core::TellStart(variables, core::StartNotice::kBegins);
    status = InMpi("MPI_Init_thread", [&] { return TheApi().InitThread(level); });
    core::TellStart(variables, core::StartNotice::kIsThrough);
    if (!status.ok()) return status;
    state.initialized_by_process = getpid();
    state.initialized_by_thread = std::this_thread::get_id();
    std::atexit(FinalizeAtExit);
  }
  *by_us = state.initialized_by_process != 0;
  return InMpi("MPI_Query_thread", [&] { return TheApi().QueryThread(level); });
}

Status CheckThreading(ThreadLevel level, bool by_us) {
  if (level >= ThreadLevel::kSerialized) return Status::Ok();
  const std::string have = ThreadLevelName(level);
  return {StatusCode::kUnsupported,
          "a background thread has to call MPI, which needs MPI_THREAD_SERIALIZED at least; " +
              (by_us ? LibraryName() + " offers only " + have +
                           ": use an MPI that is built with threads"
                     : "the program initialised MPI with " + have +
                           ": call MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided) "
                           "instead of MPI_Init, or let init() initialise MPI")};
}

// Whether Open MPI's messages go through its component ob1: a component that is not chosen is
// closed, and its variables are gone.
bool IsOb1Chosen() {
  const Entry entry("MPI_T_init_thread");
  return entry.ok() && TheApi().HasVariable("pml_ob1_priority");
}

// Whether this thread may call MPI, if only for as long as the start takes.
bool MayCallMpi(ThreadLevel level) {
  int is_main = 0;
  return level >= ThreadLevel::kSerialized ||
         (InMpi("MPI_Is_thread_main", [&] { return TheApi().IsThreadMain(&is_main); }).ok() &&
          is_main != 0);
}

Status CheckLauncher(const EnvironmentOptions& options, int size) {
  const auto told = size == 1 ? RanksOfLauncher(options.variables) : std::nullopt;
  if (!told) return Status::Ok();
  return {StatusCode::kInvalidArgument,
          "a launcher started " + told->count + " ranks (" + told->ToString() + "), but MPI (" +
              LibraryName() +
              ") sees this one alone: start the program with sirtakirun, or with the mpirun that "
              "belongs to the MPI it is linked with, and neither with another MPI's nor with "
              "torchrun, which starts no ranks of MPI"};
}

// The communicator of the job, which the program may have given.
Status FindWorld(const EnvironmentOptions& options, Comm* world) {
  *world = TheApi().World();
  if (!options.communicator) return Status::Ok();
  int initialized = 0;
  int finalized = 0;
  Status status = AskMpi(&initialized, &finalized);
  if (!status.ok()) return status;
  if (initialized == 0) {
    return {
        StatusCode::kInvalidArgument,
        "init() was given a communicator, but MPI is not initialised: call MPI_Init_thread first"};
  }
  if (finalized != 0) return Status::Ok();  // InitializeMpi says so
  *world = TheApi().FromNumber(*options.communicator);
  if (world->is_null()) {
    return {StatusCode::kInvalidArgument,
            "init() was given MPI_COMM_NULL: only the ranks of the communicator may call it"};
  }
  int between_groups = 0;
  status =
      InMpi("MPI_Comm_test_inter", [&] { return TheApi().CommTestInter(*world, &between_groups); });
  if (status.ok() && between_groups != 0) {
    return {StatusCode::kInvalidArgument,
            "init() was given an inter-communicator; it needs an intra-communicator"};
  }
  return status;
}

// An exchange works on its buffers. On the heap, since a time-out leaves it to MPI for good.
struct ExchangeBuffers {
  std::string mine;
  std::uint64_t my_size = 0;
  std::vector<std::uint64_t> sizes;
  std::vector<int> counts;
  std::vector<int> displacements;
  std::vector<char> all;
  Request request;
};

// Gives `x.mine` and fills in the rest: the string of rank i is at displacements[i] of `x.all`.
// Collective. Errors: kTimedOut at the deadline, kBackend.
Status ExchangeOn(Comm comm, int size, TimePoint deadline, ExchangeBuffers& x) {
  const auto ranks = static_cast<std::size_t>(size);
  x.my_size = x.mine.size();
  x.sizes.resize(ranks);
  Status status = InMpi("MPI_Iallgather", [&] {
    return TheApi().IallgatherSizes(&x.my_size, x.sizes.data(), comm, &x.request);
  });
  if (status.ok()) status = WaitUntil(&x.request, deadline, "MPI_Iallgather");
  if (!status.ok()) return status;

  const std::uint64_t total = std::accumulate(x.sizes.begin(), x.sizes.end(), std::uint64_t{0});
  if (total > static_cast<std::uint64_t>(std::numeric_limits<int>::max())) {
    return {StatusCode::kUnsupported,
            "what the ranks exchange at the start is longer than 2 GiB together"};
  }
  int displacement = 0;
  for (const std::uint64_t bytes : x.sizes) {
    x.counts.push_back(static_cast<int>(bytes));
    x.displacements.push_back(displacement);
    displacement += static_cast<int>(bytes);
  }
  x.all.resize(total);
  status = InMpi("MPI_Iallgatherv", [&] {
    return TheApi().IallgathervBytes(x.mine.data(), static_cast<int>(x.my_size), x.all.data(),
                                     x.counts.data(), x.displacements.data(), comm, &x.request);
  });
  if (status.ok()) status = WaitUntil(&x.request, deadline, "MPI_Iallgatherv");
  return status;
}

}  // namespace

// The first variable that is there counts: a launcher inside another's job (mpirun within an
// allocation of Slurm) sees the outer one's, too.
std::optional<LaunchedRanks> RanksOfLauncher(const core::EnvironmentView& variables) {
  for (const char* name :
       {"OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "PALS_NRANKS",
        "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"}) {
    const std::optional<std::string> value = variables.Find(name);
    if (!value) continue;
    int count = 0;
    std::from_chars(value->data(), value->data() + value->size(), count);
    if (count <= 1) return std::nullopt;
    return LaunchedRanks{name, *value};
  }
  return std::nullopt;
}

Status DuplicateUntil(Comm comm, TimePoint deadline, Comm* duplicate) {
  struct Pending {
    Comm comm;
    Request request;
  };
  auto pending = std::make_unique<Pending>();
  Status status = InMpi("MPI_Comm_idup",
                        [&] { return TheApi().CommIdup(comm, &pending->comm, &pending->request); });
  if (status.ok()) status = WaitUntil(&pending->request, deadline, "MPI_Comm_idup");
  if (status.ok()) {
    *duplicate = pending->comm;
    return InMpi("MPI_Comm_set_errhandler", [&] { return TheApi().ReturnErrors(*duplicate); });
  }
  Environment::NoteFault();
  static_cast<void>(pending.release());  // MPI may still write to it
  return status;
}

Environment::Environment() { ++State().open; }

Environment::~Environment() {
  if (IsFinalized()) return;
  const Entry entry("MPI_Comm_free");
  if (!entry.ok()) {
    at_finalize_->shutdown = nullptr;
    static_cast<void>(at_finalize_.release());  // MPI's attribute refers to it
    return;
  }
  if (at_finalize_->key) {  // local, so also after a fault
    at_finalize_->shutdown = nullptr;
    TheApi().CancelAtFinalize(*at_finalize_->key);
  }
  if (!HasFault() && !control_.is_null()) TheApi().CommFree(&control_);
  --State().open;  // last: the exit finalizes MPI when there is none
}

Status Environment::Start(const EnvironmentOptions& options, TimePoint deadline,
                          std::unique_ptr<Environment>* environment) {
  const std::unique_lock<std::timed_mutex> lock(State().start_mutex, deadline);
  if (!lock.owns_lock()) {
    return {StatusCode::kTimedOut,
            "another thread's init() has not ended within start_timeout: it waits for other ranks, "
            "or within MPI's own initialisation"};
  }
  if (Status status = OpenMpi(options.mpi_family, options.variables); !status.ok()) return status;
  Comm world;
  if (Status status = FindWorld(options, &world); !status.ok()) return status;
  ThreadLevel level = ThreadLevel::kSingle;
  bool by_us = false;
  const TimePoint begun = core::Clock::now();
  Status status = InitializeMpi(options.variables, &level, &by_us);
  if (!status.ok()) return status;
  // MPI's own initialisation waits for every rank, and its time is not ours to limit.
  if (deadline != TimePoint::max()) deadline += core::Clock::now() - begun;

  std::unique_ptr<Environment> made(new Environment());
  int started = 0;
  {
    const Entry entry("MPI_Comm_size");
    if (!entry.ok()) return entry.status();
    TheApi().CommRank(world, &made->topology_.rank);
    TheApi().CommSize(world, &made->topology_.size);
    TheApi().CommSize(TheApi().World(), &started);
  }
  made->of_all_ = made->topology_.size == started;
  status = options.communicator ? Status::Ok() : CheckLauncher(options, made->topology_.size);
  if (!status.ok()) return status;  // alone, so there is nobody to tell
  const Status threading = CheckThreading(level, by_us);
  if (!threading.ok() && !MayCallMpi(level)) return threading;
  made->description_ = LibraryName();
  if (!WhyThisMpi().empty()) made->description_ += " (" + WhyThisMpi() + ")";
  made->description_ += std::string(", ") + ThreadLevelName(level);
  made->description_ += InterfacesText(options.variables);
  made->description_ += by_us ? ", initialised by sirtaki" : ", initialised by the program";

  status = DuplicateUntil(world, deadline, &made->control_);
  if (status.ok()) status = made->AgreeOnThreading(threading, deadline);
  if (status.ok()) status = made->FindTopology(deadline);
  if (!status.ok()) return status;
  const bool may_race =
      !by_us && level == ThreadLevel::kMultiple && made->topology_.host_names.size() > 1;
  if (may_race && made->topology_.rank == 0 && IsOb1Chosen()) {
    SIRTAKI_LOG(
        kWarning,
        "the program initialised MPI with MPI_THREAD_MULTIPLE. MPI calls that it makes while "
        "the library works can lose data under Open MPI's ob1 between hosts; make them "
        "between pause_mpi() and resume_mpi(), or under an MpiGate (docs/mpi.md)");
  }
  *environment = std::move(made);
  return Status::Ok();
}

// The first exchange, so that a rank that is refused does not leave the others waiting.
Status Environment::AgreeOnThreading(const Status& mine, TimePoint deadline) {
  std::vector<std::string> told;  // what is wrong on each rank; empty: nothing
  if (Status status = Exchange(mine.message(), deadline, &told); !status.ok()) return status;
  std::vector<Status> statuses;
  for (const std::string& text : told) {
    statuses.push_back(text.empty() ? Status::Ok() : Status(StatusCode::kUnsupported, text));
  }
  return core::FirstFailure(statuses);
}

// Ranks share a host if they have the same name for it and run on the same kernel: neither tells
// by itself, as hosts may be called alike, and containers of one kernel need not share anything.
Status Environment::FindTopology(TimePoint deadline) {
  std::array<char, 1024> name{};
  Status status = InMpi("MPI_Get_processor_name",
                        [&] { return TheApi().GetProcessorName(name.data(), name.size()); });
  if (!status.ok()) return status;
  const std::string host = name.data();
  const std::string kernel = core::ReadFile("/proc/sys/kernel/random/boot_id").value_or("");
  std::vector<std::string> told;  // the MPI, the host's name, the kernel, a line each
  status = Exchange(LibraryName() + '\n' + host + '\n' + kernel, deadline, &told);
  if (!status.ok()) return status;
  std::map<std::string, int> lowest;
  std::vector<core::Place> places;
  const auto mpi_of = [&told](std::size_t rank) {
    return told[rank].substr(0, told[rank].find('\n'));
  };
  for (const std::string& line : told) {
    const int rank = static_cast<int>(places.size());
    const std::string mpi = mpi_of(places.size());
    if (topology_.rank == 0 && mpi != mpi_of(0)) {
      SIRTAKI_LOG(kWarning, "rank " << rank << " has " << mpi << ", and rank 0 " << mpi_of(0)
                                    << ": install the same MPI on all hosts");
    }
    const std::string place = line.substr(mpi.size() + 1);
    places.push_back(
        {place.substr(0, place.find('\n')), lowest.try_emplace(place, rank).first->second});
  }
  topology_ = core::BuildTopology(topology_.rank, places);
  return Status::Ok();
}

Status Environment::Exchange(const std::string& mine, TimePoint deadline,
                             std::vector<std::string>* all) {
  auto buffers = std::make_unique<ExchangeBuffers>();
  buffers->mine = mine;
  const Status status = ExchangeOn(control_, topology_.size, deadline, *buffers);
  if (!status.ok()) {
    NoteFault();
    static_cast<void>(buffers.release());  // MPI may still read and write it
    return status;
  }
  all->clear();
  for (std::size_t i = 0; i < buffers->sizes.size(); ++i) {
    all->emplace_back(buffers->all.data() + buffers->displacements[i], buffers->sizes[i]);
  }
  return Status::Ok();
}

void Environment::NoteFault() {
  State().fault.store(true);
  State().all_are_there.store(false);
}
bool Environment::HasFault() { return State().fault.load(); }

void Environment::NoteOrderlyEnd() const {
  if (!of_all_) return;
  State().fault.store(false);
  State().all_are_there.store(true);
}

Status Environment::BeforeFinalize(std::function<void()> shutdown) {
  at_finalize_->shutdown = std::move(shutdown);
  if (at_finalize_->key) return Status::Ok();
  const auto run = [](void* value) {
    auto* at_finalize = static_cast<AtFinalize*>(value);
    const std::function<void()> before = std::move(at_finalize->shutdown);
    at_finalize->key.reset();
    if (before) before();  // may destroy the environment
  };
  int key = 0;
  Status status = InMpi("MPI_Comm_set_attr",
                        [&] { return TheApi().AtFinalize(run, at_finalize_.get(), &key); });
  if (status.ok()) at_finalize_->key = key;
  return status;
}

}  // namespace sirtaki::mpi
