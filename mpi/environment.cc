#include "mpi/environment.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "core/base/log.h"
#include "core/machine/cgroup.h"
#include "core/machine/start_notice.h"
#include "mpi/check.h"
#include "mpi/environment_impl.h"
#include "mpi/exchange.h"
#include "mpi/gate.h"

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
    MPI_Finalize();
  } else {
    SIRTAKI_LOG(kWarning, "MPI_Finalize is skipped: " << why);
  }
}

std::string LibraryName() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING + 1> text{};
  int length = 0;
  static_cast<void>(InMpi("MPI_Get_library_version",
                          [&] { return MPI_Get_library_version(text.data(), &length); }));
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

const char* ThreadLevelName(int level) {
  switch (level) {
    case MPI_THREAD_MULTIPLE:
      return "MPI_THREAD_MULTIPLE";
    case MPI_THREAD_SERIALIZED:
      return "MPI_THREAD_SERIALIZED";
    case MPI_THREAD_FUNNELED:
      return "MPI_THREAD_FUNNELED";
    default:
      return "MPI_THREAD_SINGLE";
  }
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
  Status status = InMpi("MPI_Initialized", [&] { return MPI_Initialized(initialized); });
  if (!status.ok()) return status;
  return InMpi("MPI_Finalized", [&] { return MPI_Finalized(finalized); });
}

// Initialises MPI if nobody did, and says what threads may do then.
Status InitializeMpi(const core::EnvironmentView& variables, int* level, bool* by_us) {
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
    status = InMpi("MPI_Init_thread",
                   [&] { return MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, level); });
    core::TellStart(variables, core::StartNotice::kIsThrough);
    if (!status.ok()) return status;
    state.initialized_by_process = getpid();
    state.initialized_by_thread = std::this_thread::get_id();
    std::atexit(FinalizeAtExit);
  }
  *by_us = state.initialized_by_process != 0;
  return InMpi("MPI_Query_thread", [&] { return MPI_Query_thread(level); });
}

Status CheckThreading(int level, bool by_us) {
  if (level >= MPI_THREAD_SERIALIZED) return Status::Ok();
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
  int level = MPI_THREAD_SINGLE;
  if (!entry.ok() || MPI_T_init_thread(MPI_THREAD_SERIALIZED, &level) != MPI_SUCCESS) return false;
  int index = 0;
  const bool is_there = MPI_T_cvar_get_index("pml_ob1_priority", &index) == MPI_SUCCESS;
  MPI_T_finalize();
  return is_there;
}

// Whether this thread may call MPI, if only for as long as the start takes.
bool MayCallMpi(int level) {
  int is_main = 0;
  return level >= MPI_THREAD_SERIALIZED ||
         (InMpi("MPI_Is_thread_main", [&] { return MPI_Is_thread_main(&is_main); }).ok() &&
          is_main != 0);
}

// The number of ranks that a launcher says it started. The first variable that is there counts: a
// launcher inside another's job (mpirun within an allocation of Slurm) sees the outer one's, too.
Status CheckLauncher(const EnvironmentOptions& options, int size) {
  if (size != 1) return Status::Ok();
  for (const char* name :
       {"OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "PALS_NRANKS",
        "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"}) {
    const std::optional<std::string> value = options.variables.Find(name);
    if (!value) continue;
    int told = 0;
    std::from_chars(value->data(), value->data() + value->size(), told);
    if (told <= 1) return Status::Ok();
    return {StatusCode::kInvalidArgument,
            "a launcher started " + *value + " ranks (" + name + "=" + *value + "), but MPI (" +
                LibraryName() +
                ") sees this one alone: start the program with sirtakirun, or with the mpirun that "
                "belongs to the MPI it is linked with, and neither with another MPI's nor with "
                "torchrun, which starts no ranks of MPI"};
  }
  return Status::Ok();
}

// The communicator of the job, which the program may have given.
Status FindWorld(const EnvironmentOptions& options, MPI_Comm* world) {
  *world = MPI_COMM_WORLD;
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
  *world = MPI_Comm_f2c(*options.communicator);
  if (*world == MPI_COMM_NULL) {
    return {StatusCode::kInvalidArgument,
            "init() was given MPI_COMM_NULL: only the ranks of the communicator may call it"};
  }
  int between_groups = 0;
  status =
      InMpi("MPI_Comm_test_inter", [&] { return MPI_Comm_test_inter(*world, &between_groups); });
  if (status.ok() && between_groups != 0) {
    return {StatusCode::kInvalidArgument,
            "init() was given an inter-communicator; it needs an intra-communicator"};
  }
  return status;
}

}  // namespace

Status DuplicateUntil(MPI_Comm comm, TimePoint deadline, MPI_Comm* duplicate) {
  struct Pending {
    MPI_Comm comm = MPI_COMM_NULL;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  auto pending = std::make_unique<Pending>();
  Status status = InMpi("MPI_Comm_idup",
                        [&] { return MPI_Comm_idup(comm, &pending->comm, &pending->request); });
  if (status.ok()) status = WaitUntil(&pending->request, deadline, "MPI_Comm_idup");
  if (status.ok()) {
    *duplicate = pending->comm;
    return InMpi("MPI_Comm_set_errhandler",
                 [&] { return MPI_Comm_set_errhandler(*duplicate, MPI_ERRORS_RETURN); });
  }
  Environment::NoteFault();
  static_cast<void>(pending.release());  // MPI may still write to it
  return status;
}

Environment::Environment(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) { ++State().open; }

Environment::~Environment() {
  if (IsFinalized()) return;
  const Entry entry("MPI_Comm_free");
  if (!entry.ok()) {
    impl_->before_finalize = nullptr;
    static_cast<void>(impl_.release());  // MPI's attribute refers to it
    return;
  }
  if (impl_->before_finalize_key != MPI_KEYVAL_INVALID) {  // local, so also after a fault
    impl_->before_finalize = nullptr;
    MPI_Comm_delete_attr(MPI_COMM_SELF, impl_->before_finalize_key);
    MPI_Comm_free_keyval(&impl_->before_finalize_key);
  }
  if (!HasFault() && impl_->control != MPI_COMM_NULL) MPI_Comm_free(&impl_->control);
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
  MPI_Comm world = MPI_COMM_NULL;
  if (Status status = FindWorld(options, &world); !status.ok()) return status;
  int level = MPI_THREAD_SINGLE;
  bool by_us = false;
  const TimePoint begun = core::Clock::now();
  Status status = InitializeMpi(options.variables, &level, &by_us);
  if (!status.ok()) return status;
  // MPI's own initialisation waits for every rank, and its time is not ours to limit.
  if (deadline != TimePoint::max()) deadline += core::Clock::now() - begun;

  std::unique_ptr<Environment> made(new Environment(std::make_unique<Impl>()));
  int started = 0;
  {
    const Entry entry("MPI_Comm_size");
    if (!entry.ok()) return entry.status();
    MPI_Comm_rank(world, &made->topology_.rank);
    MPI_Comm_size(world, &made->topology_.size);
    MPI_Comm_size(MPI_COMM_WORLD, &started);
  }
  made->of_all_ = made->topology_.size == started;
  status = options.communicator ? Status::Ok() : CheckLauncher(options, made->topology_.size);
  if (!status.ok()) return status;  // alone, so there is nobody to tell
  const Status threading = CheckThreading(level, by_us);
  if (!threading.ok() && !MayCallMpi(level)) return threading;
  made->description_ = LibraryName() + ", " + ThreadLevelName(level);
  made->description_ += InterfacesText(options.variables);
  made->description_ += by_us ? ", initialised by sirtaki" : ", initialised by the program";

  status = DuplicateUntil(world, deadline, &made->impl_->control);
  if (status.ok()) status = made->AgreeOnThreading(threading, deadline);
  if (status.ok()) status = made->FindTopology(deadline);
  if (!status.ok()) return status;
  const bool may_race =
      !by_us && level == MPI_THREAD_MULTIPLE && made->topology_.host_names.size() > 1;
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
  std::array<char, MPI_MAX_PROCESSOR_NAME + 1> name{};
  int length = 0;
  Status status =
      InMpi("MPI_Get_processor_name", [&] { return MPI_Get_processor_name(name.data(), &length); });
  if (!status.ok()) return status;
  const std::string host(name.data(), static_cast<std::size_t>(length));
  const std::string kernel = core::ReadFile("/proc/sys/kernel/random/boot_id").value_or("");
  std::vector<std::string> told;  // the host's name, a line's end, the kernel
  status = Exchange(host + '\n' + kernel, deadline, &told);
  if (!status.ok()) return status;
  std::map<std::string, int> lowest;
  std::vector<core::Place> places;
  for (const std::string& place : told) {
    const int rank = static_cast<int>(places.size());
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
  const Status status = ExchangeOn(impl_->control, topology_.size, deadline, *buffers);
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
  if (of_all_) State().all_are_there.store(true);
}

Status Environment::BeforeFinalize(std::function<void()> shutdown) {
  impl_->before_finalize = std::move(shutdown);
  if (impl_->before_finalize_key != MPI_KEYVAL_INVALID) return Status::Ok();
  // MPI_Finalize frees MPI_COMM_SELF before anything else, which deletes its attributes
  // (MPI 3.1, 8.7.1).
  const auto deleted = [](MPI_Comm, int, void* value, void*) {
    auto* impl = static_cast<Impl*>(value);
    if (!impl->before_finalize) return MPI_SUCCESS;  // the environment removes it itself
    const std::function<void()> run = std::move(impl->before_finalize);
    impl->before_finalize_key = MPI_KEYVAL_INVALID;
    run();  // may destroy the environment
    return MPI_SUCCESS;
  };
  Status status = InMpi("MPI_Comm_create_keyval", [&] {
    return MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, deleted, &impl_->before_finalize_key,
                                  nullptr);
  });
  if (!status.ok()) return status;
  return InMpi("MPI_Comm_set_attr", [&] {
    return MPI_Comm_set_attr(MPI_COMM_SELF, impl_->before_finalize_key, impl_.get());
  });
}

}  // namespace sirtaki::mpi
