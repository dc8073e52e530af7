#include "sirtaki/session.h"

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <torch/serialize/archive.h>
#include <torch/version.h>

#include <stdlib.h>  // NOLINT(modernize-deprecated-headers): on_exit is glibc's

#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/environment.h"
#include "core/base/log.h"
#include "core/config/config.h"
#include "core/machine/fork_guard.h"
#include "frameworks/torch/calls/early_call.h"
#include "frameworks/torch/calls/tensor_call.h"
#include "frameworks/torch/session/session_state.h"
#include "frameworks/torch/session/set_membership.h"
#include "frameworks/torch/tensors/cpu_allocator.h"
#include "frameworks/torch/tensors/throw.h"
#include "session/elastic/elastic_worker.h"
#include "session/session.h"
#include "sirtaki/detail/elastic_calls.h"
#include "sirtaki/detail/mpi_calls.h"
#include "sirtaki/error.h"

namespace sirtaki {
namespace {

// The process's own session, as LibTorch's side sees it.
struct Own {
  std::mutex starting;       // held through init and shutdown
  int fork_generation = -1;  // of the first init; -1: there was none
  std::mutex mutex;          // held for moments, guards what follows
  std::shared_ptr<detail::SessionState> state;
  core::ProgramOptions options;  // those that init was given
  std::vector<std::vector<int>> process_sets;
  std::vector<std::string> flags;   // and the flags of ours in its argv
  std::optional<int> communicator;  // of MPI; nothing: all that the launcher has started
  bool was_shut_down = false;
};

Own& TheOwn() {
  static Own* own = new Own();  // never destroyed: calls may come while the process exits
  return *own;
}

std::shared_ptr<detail::SessionState> OwnState() {
  Own& own = TheOwn();
  const std::lock_guard<std::mutex> lock(own.mutex);
  return own.state;
}

// Zero: LibTorch's own choice, or the program's.
int WantedThreads(const session::Session& session, const core::EnvironmentView& env) {
  const int threads = session.config().intra_op_threads;
  if (threads > 0) return threads;
  // Alone on its host a rank may have all cores, which is LibTorch's own default.
  if (session.topology().local_size == 1) return 0;
  return env.Find("OMP_NUM_THREADS") || env.Find("MKL_NUM_THREADS") ? 0 : session.cores_per_rank();
}

// Sets the number of LibTorch's threads, for one caller at a time. A session that leaves the choice to
// LibTorch gets the number from before an earlier one's, if the program has not set another since.
void SetIntraOpThreads(const session::Session& session, const core::EnvironmentView& env) {
  static int before = 0;
  static int was_set = 0;  // 0: nothing
  const int threads = WantedThreads(session, env);
  const int now = at::get_num_threads();
  if (now != was_set) before = now;  // the program's own
  was_set = threads;
  if (threads > 0 || now != before) at::set_num_threads(threads > 0 ? threads : before);
  SIRTAKI_LOG(kInfo, "LibTorch " << TORCH_VERSION << " computes with "
                                 << (threads == 0 ? std::string("as many threads as it chooses")
                                                  : std::to_string(threads) +
                                                        (threads == 1 ? " thread" : " threads"))
                                 << " in this rank");
}

void TakeTensorsFromPool(session::Session& session) {
  const bool wanted = session.config().allocator == core::AllocatorMode::kOn;
  if (detail::TakeCpuTensorsFrom(detail::PoolForTensors(session).get(), wanted)) return;
  core::Log(wanted ? core::LogLevel::kWarning : core::LogLevel::kInfo,
            "the program's own allocator of CPU tensors stays in use");
}

// True if the process is initialised already and these options say nothing new.
bool AlreadyInitialized(const InitOptions& options, const std::vector<std::string>& flags,
                        std::optional<int> communicator) {
  Own& own = TheOwn();
  const std::lock_guard<std::mutex> lock(own.mutex);
  if (!own.state) return false;
  detail::ThrowIfError(own.state->gone() ? own.state->Check() : core::Status::Ok());
  const bool says_nothing =
      options.values().empty() && options.process_sets().empty() && flags.empty();
  const bool says_the_same = options.values() == own.options &&
                             options.process_sets() == own.process_sets && flags == own.flags;
  if (!says_nothing && !says_the_same) {
    detail::ThrowInvalid(
        "init() was called again with other options than the first time: "
        "call shutdown() first");
  }
  if (communicator && communicator != own.communicator) {
    detail::ThrowInvalid(
        "init() was called again with another communicator than the first time: call shutdown() "
        "first");
  }
  return true;
}

void LogIfFailed(const std::string& error) {
  if (!error.empty()) SIRTAKI_LOG(kError, "save_checkpoint, written behind: " << error);
}

// A program may end, by exit() or from main(), while a checkpoint is written: as in shutdown() each
// rank writes its part before it leaves the job, if its disk takes no longer than the others may wait,
// so that rank 0 finds all parts when the others have left, and publishes the whole behind that. After
// a fault, also one that comes meanwhile, nobody waits for that, and the session ends first. A program
// that ends with a code tells the others first, which do not wait for its disk.
// A forked child has nothing to end, and may have been forked while a lock was held.
void WriteSave(int code, void* /*unused*/) {
  if (code != 0 || core::ForkGeneration() != TheOwn().fork_generation) return;
  const auto state = OwnState();
  if (const auto save = state ? state->save() : nullptr) save->WaitForOwn();
}
void EndSave(int /*code*/, void* /*unused*/) {
  if (core::ForkGeneration() != TheOwn().fork_generation) return;
  const auto state = OwnState();
  if (const auto save = state ? state->TakeSave() : nullptr) LogIfFailed(save->End());
}

// Whether an init() that has failed may go well with other ranks: in an elastic job some may have been
// lost meanwhile. After that many in a row it is something else.
bool MayPass(const Error& error, int* failed) {
  constexpr int kMost = 10;
  const bool is_of_program =
      error.code() == ErrorCode::InvalidArgument || error.code() == ErrorCode::Mismatch;
  return detail::IsElastic() && !is_of_program && ++*failed < kMost;
}

// LibTorch's first kernels, backward pass and archive take tens of milliseconds. An elastic job has them
// made while the others still train: once this rank has asked for a place, they wait for it.
void WarmUp() {
  const at::Tensor weight = at::full({64, 64}, 0.5).requires_grad_();
  at::mm(weight, weight).relu().sum().backward();
  torch::serialize::OutputArchive saved;
  saved.write("weight", weight);
  std::string bytes;
  saved.save_to([&bytes](const void* from, std::size_t size) {
    bytes.append(static_cast<const char*>(from), size);
    return size;
  });
  torch::serialize::InputArchive loaded;
  loaded.load_from(bytes.data(), bytes.size());
}

// `args`: the arguments behind the program's name. Returns which of them are ours.
std::vector<bool> Start(const InitOptions& options, const std::vector<std::string>& args,
                        std::optional<int> communicator = std::nullopt) {
  session::StartOptions start;
  start.communicator = communicator;
  std::vector<bool> ours;
  start.parsed = core::ParseConfig(args, start.environment, options.values(), &start.config, &ours);
  std::vector<std::string> flags;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if (ours[i]) flags.push_back(args[i]);
  }
  Own& own = TheOwn();
  const std::lock_guard<std::mutex> starting(own.starting);
  if (AlreadyInitialized(options, flags, communicator)) {
    detail::ThrowIfError(start.parsed);
    return ours;
  }
  if (detail::IsElastic() && own.fork_generation < 0) WarmUp();
  std::shared_ptr<session::Session> session;
  std::shared_ptr<detail::SessionState> state;
  for (int failed = 0; !state;) {
    detail::ThrowIfError(session::Session::CreateOfProcess(start, &session));
    SetIntraOpThreads(*session, start.environment);
    TakeTensorsFromPool(*session);
    state = std::make_shared<detail::SessionState>(session);
    try {
      detail::AddInitialSets(
          options.process_sets(),
          std::chrono::ceil<std::chrono::milliseconds>(session->config().start_timeout), state);
    } catch (const Error& error) {  // on every rank
      (void)session->Shutdown("init() has failed");
      if (!MayPass(error, &failed)) throw;
      state = nullptr;
    }
  }
  // What is registered last runs first: the session ends between these two.
  const bool is_first = std::exchange(own.fork_generation, core::ForkGeneration()) < 0;
  if (is_first) on_exit(&EndSave, nullptr);
  session::SetDefaultSession(session);
  if (is_first) on_exit(&WriteSave, nullptr);
  const std::lock_guard<std::mutex> lock(own.mutex);
  own.state = state;
  own.options = options.values();
  own.process_sets = options.process_sets();
  own.flags = std::move(flags);
  own.communicator = communicator;
  return ours;
}

// After the end of the session too the process knows who it was; before init nobody does.
template <class Value>
Value OfTopology(Value session::Topology::*member) {
  return detail::AliveSession()->topology().*member;
}

}  // namespace

namespace detail {

void InitOn(int communicator, const InitOptions& options) { Start(options, {}, communicator); }

void InitAgain() {
  InitOptions options;
  std::vector<std::string> flags;
  std::optional<int> communicator;
  {
    Own& own = TheOwn();
    const std::lock_guard<std::mutex> lock(own.mutex);
    for (const auto& [name, value] : own.options) options.set(name, value);
    for (const std::vector<int>& ranks : own.process_sets) options.process_set(ranks);
    flags = own.flags;
    communicator = own.communicator;
  }
  Start(options, flags, communicator);
}

int MakeCommunicator(const ProcessSet& set, std::chrono::milliseconds timeout) {
  const auto state = CurrentSession();
  ThrowIfError(state->Check());
  const CallMembers members = MembersOf(set, state);
  int handle = 0;
  ThrowIfError(state->session().MakeCommunicator(members.set, DeadlineOf(timeout), &handle));
  return handle;
}

void PauseMpi(std::chrono::milliseconds timeout) {
  const auto state = CurrentSession();
  ThrowIfError(state->Check());
  ThrowIfError(state->session().PauseMedium(DeadlineOf(timeout)));
}

void ResumeMpi(std::chrono::milliseconds timeout) {
  const auto state = CurrentSession();
  ThrowIfError(state->session().ResumeMedium(DeadlineOf(timeout)));
}

void* LockMpi() SIRTAKI_NO_THREAD_SAFETY_ANALYSIS {
  core::Gate* gate = nullptr;
  ThrowIfError(CurrentSession()->session().EnterMedium(&gate));
  return gate;
}

void UnlockMpi(void* gate) noexcept SIRTAKI_NO_THREAD_SAFETY_ANALYSIS {
  if (gate != nullptr) static_cast<core::Gate*>(gate)->Unlock();
}

bool IsElastic() { return session::ElasticWorker::IsOne(core::EnvironmentView::OfProcess()); }
int ElasticGeneration() { return session::ElasticWorker::OfProcess().generation(); }
void TellElasticState(int root) { session::ElasticWorker::OfProcess().TellHasState(root); }
void TellElasticCannotGoOn(const std::string& why, int rank) {
  session::ElasticWorker::OfProcess().TellCannotGoOn(why, rank);
}
void CheckJob() { ThrowIfError(CurrentSession()->Check()); }
bool IsDeferred() { return IsElastic() && !session::ElasticWorker::OfProcess().has_begun(); }
bool IsEarlyCall(const SessionState& session) {
  static std::atomic<bool> may_call{false};  // for good
  if (may_call.load(std::memory_order_relaxed)) return false;
  if (IsDeferred()) return OwnState().get() == &session;
  may_call.store(true, std::memory_order_relaxed);
  return false;
}
void RefuseEarlyCall(const std::string& what) {
  ThrowInvalid(
      what +
      " came too early: in an elastic job collective calls belong into the function given to "
      "elastic.run(), in C++ elastic::run(): a worker that comes later would make them alone; "
      "run() itself gives all ranks the same parameters and optimizers' state");
}
std::string ElasticChange() { return session::ElasticWorker::OfProcess().WhyChange(); }

std::vector<std::string> MpiModules() { return session::Session::MpiModules(); }

std::shared_ptr<SessionState> StateOf(std::shared_ptr<SessionState> given) {
  if (given) return given;
  Own& own = TheOwn();
  const std::lock_guard<std::mutex> lock(own.mutex);
  if (own.state) return own.state;
  ThrowStatus(core::Status(
      core::StatusCode::kNotInitialized,
      own.was_shut_down ? "called after sirtaki::shutdown()" : "call sirtaki::init() first"));
}

std::shared_ptr<SessionState> AliveSession() {
  auto state = CurrentSession();
  if (state->gone()) ThrowIfError(state->Check());
  return state;
}

}  // namespace detail

void init() { init(InitOptions()); }

void init(const InitOptions& options) { Start(options, {}); }

void init(int& argc, char** argv) { init(argc, argv, InitOptions()); }

void init(int& argc, char** argv, const InitOptions& options) {
  std::vector<std::string> args;
  for (int i = 1; i < argc; ++i) args.emplace_back(argv[i]);
  const std::vector<bool> ours = Start(options, args);
  // The pointers of the arguments that stay move up.
  int kept = 1;
  for (int i = 1; i < argc; ++i) {
    if (!ours[static_cast<std::size_t>(i - 1)]) argv[kept++] = argv[i];
  }
  argc = kept;
  argv[argc] = nullptr;
}

void shutdown() noexcept {
  try {
    Own& own = TheOwn();
    const std::lock_guard<std::mutex> starting(own.starting);
    const auto state = OwnState();
    if (!state) return;
    const auto save = state->TakeSave();
    if (save) save->WaitForOwn();
    // Calls of other threads fail with the session's own words while it ends.
    state->session().ShutdownAndLog("shutdown() was called");
    if (save) LogIfFailed(save->End());
    session::SetDefaultSession(nullptr);
    const std::lock_guard<std::mutex> lock(own.mutex);
    own.state.reset();
    own.was_shut_down = true;
  } catch (const std::exception& error) {
    core::Log(core::LogLevel::kError, error.what());
  }
}

bool is_initialized() noexcept {
  const auto state = OwnState();
  return state && !state->gone();
}

int rank() { return OfTopology(&session::Topology::rank); }

int size() { return OfTopology(&session::Topology::size); }

int local_rank() { return OfTopology(&session::Topology::local_rank); }

int local_size() { return OfTopology(&session::Topology::local_size); }

int cross_rank() { return OfTopology(&session::Topology::cross_rank); }

int cross_size() { return OfTopology(&session::Topology::cross_size); }

bool is_homogeneous() { return OfTopology(&session::Topology::homogeneous); }

void abort(const std::string& reason) { detail::CurrentSession()->session().Abort(reason); }

}  // namespace sirtaki
