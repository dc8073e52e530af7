// One membership in a job: what lies between init and shutdown on one rank. The place where the
// parts are put together: transport, backend, lanes, negotiator, queue, engine. Free of LibTorch.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "core/base/environment.h"
#include "core/base/rank_ranges.h"
#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "core/base/topology.h"
#include "core/base/types.h"
#include "core/config/config.h"
#include "core/engine/executor.h"
#include "core/engine/work.h"
#include "core/protocol/limits.h"
#include "core/threads/doorbell.h"
#include "core/threads/gate.h"
#include "core/trace/flight_record.h"
#include "core/trace/observer.h"
#include "session/base/set_table.h"

namespace sirtaki::session {

using core::Topology;

class Devices;
class Gpu;
struct GpuLibraries;

// A rank starts with these: the outcome of core::ParseConfig. Its failure is not returned where it
// happened but told to the others, so that all ranks refuse to start for the same reason.
struct StartOptions {
  core::Status parsed;
  core::Config config;
  core::EnvironmentView environment = core::EnvironmentView::OfProcess();
  // Over MPI: the ranks of the job, as MPI's Fortran handle of a communicator; none: all.
  std::optional<int> communicator = std::nullopt;
  // The observer is told of the rank's calls and groups; null: to one of the session's own. In a
  // world of one rank there is nothing to tell.
  core::trace::ObserverPtr observer = nullptr;
  // Sees every batch of agreed work as it is started, under the engine's token: must neither block
  // nor call the session. Not called in a world of one rank.
  std::function<void(const core::RunBatch& batch)> on_start;
  // These libraries work with GPUs; null: those of the process.
  std::shared_ptr<const GpuLibraries> gpus = nullptr;
};

class InprocWorld;
class Medium;
class SessionObservability;

// Thread-safe. After Shutdown calls fail with kNotInitialized, and so they do in a forked child,
// saying which of the two it was.
class Session {
 public:
  // Joins the job of the launcher, over the medium that the options choose. Collective over the
  // world, on the thread that calls init. Errors, the same on every rank where the medium allows:
  // what any rank found wrong with its options, options that differ, and those of the medium.
  // kNotInitialized in a forked child whose parent had called it.
  static core::Status CreateOfProcess(const StartOptions& options,
                                      std::shared_ptr<Session>* session);

  // The same over MPI: errors of mpi::Environment::Start and mpi::Communicators::Make. Where there is
  // no MPI: a job of one rank, or kUnsupported if a launcher has started several.
  static core::Status CreateMpi(const StartOptions& options, std::shared_ptr<Session>* session);
  // The same over TCP: errors of tcp::FindPlace and tcp::Meeting.
  static core::Status CreateTcp(const StartOptions& options, std::shared_ptr<Session>* session);

  // The same in an elastic job, over TCP: waits for a place in a generation, and where that fails for one
  // that others have caused, for the next. Errors: those of ElasticWorker::Ask, and of CreateTcp.
  static core::Status CreateElastic(const StartOptions& options, std::shared_ptr<Session>* session);

  // The families of MPIs that there are modules for.
  static std::vector<std::string> MpiModules();

  // Joins a world of threads. Collective over the world.
  static core::Status CreateInproc(std::shared_ptr<InprocWorld> world, int rank,
                                   const StartOptions& options, std::shared_ptr<Session>* session);

  // The destructor does Shutdown("the session was dropped") if that was not called; in a forked
  // child nothing is ended.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // ---- also after the end ----
  const Topology& topology() const { return topology_; }
  const core::Config& config() const { return config_; }  // as agreed
  int cores_per_rank() const { return cores_per_rank_; }  // this rank's share of the host's, >= 1
  const std::string& description() const { return description_; }  // the line that init logs

  // Ok while calls are accepted. Otherwise why not: kNotInitialized, or the fault.
  core::Status Check() const;
  bool is_alive() const;       // not shut down, not in a forked child; a fault does not matter
  core::Status fault() const;  // the group's fault; ok while there is none

  // ---- work ----

  // The GPU of CUDA's `index`, on which the program has a tensor. Errors: kUnsupported, or those of
  // CUDA: why tensors there cannot take part.
  core::Status FindGpu(int index, std::shared_ptr<Gpu>* gpu);

  // Accepts work; makes its handle if it has none. Errors, with which the handle is completed as
  // well: those of Check, kDuplicateName. `will_wait`: the caller goes on to Wait. In a world of
  // one rank the work is done when this returns. Work on a GPU is an ops::cuda::DeviceWork of what
  // FindGpu gives, and its slot is in the signature.
  core::Status Submit(const core::WorkPtr& work, bool will_wait);

  // Drives or sleeps until the handle is done, and gives its status; kTimedOut at `deadline`. The end
  // of the session completes every handle; one that it has not completes here, with the fault or
  // kNotInitialized.
  core::Status Wait(core::HandleState& handle, core::TimePoint deadline = core::TimePoint::max());

  // The calling thread makes calls to this session, though it is in none now.
  void NoteCaller();

  // Says that this rank submits nothing more to the set until every member has said so or has left
  // the job; `handle` completes then, with the rank that came last as its value, or fails naming
  // who has left. Errors as Submit's; kInvalidArgument if this rank has joined already.
  core::Status Join(core::SetNumber set, core::TimePoint deadline, core::HandlePtr* handle);

  // ---- process sets ----
  // The world is 0. Those of this host's ranks and of the ranks with this local rank exist from the
  // start.
  core::SetNumber local_set() const { return sets_.local(); }
  core::SetNumber cross_set() const { return sets_.cross(); }
  // Nothing if there is no such set (any more).
  std::optional<core::RankRanges> MembersOf(core::SetNumber set) const {
    return sets_.MembersOf(set);
  }
  // Collective over the world, in the same order on all ranks; the ranks must agree on `members`.
  // Errors: kInvalidArgument (no members, or one that is no rank), kMismatch, kTimedOut at
  // `deadline` (the group's fault), those of Submit.
  core::Status AddSet(const core::RankRanges& members, core::TimePoint deadline,
                      core::SetNumber* set);
  // Calls that are pending in the set fail with kInvalidArgument. Errors: the set is the world,
  // local or cross or does not exist; and as AddSet's.
  core::Status RemoveSet(core::SetNumber set, core::TimePoint deadline);

  // A communicator of MPI, of the set's ranks in ascending order, as a Fortran handle; the program
  // frees it. Collective over the set, in the same order on all its ranks if there are several.
  // Errors: kUnsupported without MPI, kTimedOut at `deadline` (the group's fault), those of Submit.
  core::Status MakeCommunicator(core::SetNumber set, core::TimePoint deadline, int* fortran_handle);

  // PauseMedium and ResumeMedium: nothing here is in the medium between the two. What is submitted
  // meanwhile waits; a call that would wait, on the thread that has paused, is an error. Collective
  // over the world. Errors: kInvalidArgument, on all ranks, where it is paused already, or not, a
  // rank has joined, or operations of another thread do not end; kTimedOut at `deadline` (the
  // group's fault); those of Submit.
  core::Status PauseMedium(core::TimePoint deadline);
  core::Status ResumeMedium(core::TimePoint deadline);
  // The calling thread has the medium for itself until it unlocks `gate`, for calls that do not
  // block; null: any number of threads may call it. Errors: kInvalidArgument if the thread has it
  // already, kBackend if another thread does not come out of the medium.
  core::Status EnterMedium(core::Gate** gate) const;

  // The limits are as the options say, until they are changed.
  using Limits = core::Limits;
  Limits limits() const;
  // Changes them on all ranks, those that have joined too, at one place of the order. Collective
  // over the world; the ranks must agree on `limits`. Errors: kInvalidArgument if they are not allowed,
  // kMismatch, those of Submit.
  core::Status SetLimits(const Limits& limits);

  // Memory that this rank's backend reduces without a copy, and that may outlive the session.
  // Throws std::bad_alloc.
  std::shared_ptr<void> AllocateShared(std::int64_t bytes);
  // Whether it reduces this memory, which may be anybody's, as well as that.
  bool IsShared(const void* memory) const;
  // Says whether only memory of a pool is reduced so: without one all memory is, also this object's.
  bool HasPool() const { return !IsShared(this); }

  // Every pending and later call, here and elsewhere, fails with kAborted and this reason.
  void Abort(const std::string& reason);

  // Leaves the job: waits until every rank has called it and what is under way is finished, or
  // until a fault. Idempotent; a second caller waits for the first. Returns the fault if there was
  // one. Called on top of a call of this session's (by a callback, or by a signal's handler that ends
  // the program) it aborts the job in place of waiting for that call, whose thread it has.
  core::Status Shutdown(const std::string& why);
  // ShutdownAndLog is for a caller who cannot return the fault: logs it, as a warning if nobody has
  // seen it yet, else for debugging only.
  void ShutdownAndLog(const std::string& why);
  // The record says what this rank waits for, runs and did last, for a file. Of an engine that is
  // busy for longer than `patience` (it is, while its callbacks run) the record says what it lacks.
  // Times are this rank's own.
  core::trace::FlightRecord Describe(std::string why, core::Duration patience) const;

  // The observation is what is recorded of this rank, and where to: also after the end.
  SessionObservability& observation() const { return *observation_; }

  // A program was given this status: if it is the fault, it has seen it.
  void NoteSeen(const core::Status& status);

 private:
  enum class State : std::uint8_t { kAlive, kLeaving, kGone };
  struct Impl;
  class Inside;
  class Call;

  Session();
  static core::Status CheckFork();  // that no ancestor of this process has made a session
  static core::Status Create(std::unique_ptr<Medium> medium, const StartOptions& options,
                             bool is_process, std::shared_ptr<Session>* session);
  core::Status Start(std::unique_ptr<Medium> medium, const StartOptions& options,
                     core::TimePoint deadline);
  void Build(const StartOptions& options, bool spin);
  core::Status CheckState() const;
  // Run submits work of the session's own and waits for its end.
  core::Status Run(const core::WorkPtr& work);

  // ---- session_sets.cc ----
  core::Status MakeFirstSets(core::TimePoint deadline);
  core::Status ChangeSets(core::Asked change, std::string invalid, core::TimePoint deadline,
                          std::int64_t* value) SIRTAKI_EXCLUDES(set_change_gate_);

  // ---- session_pauses.cc ----
  core::Status Assemble(core::SetNumber set, const std::string& what, core::TimePoint deadline)
      SIRTAKI_REQUIRES(assembly_gate_);
  // `what`: the call that waits here, as users know it. `agrees`: whether this rank does; `against`:
  // the ranks that do not.
  core::Status Meet(core::SetNumber set, const char* what, bool agrees, core::TimePoint deadline,
                    core::RankRanges* against = nullptr);
  core::Status MakeAside(core::SetNumber set, const core::RankRanges& members, int* fortran_handle);
  bool is_paused() const { return paused_by_.load() != std::thread::id(); }
  bool PausedByThisThread() const;

  // ---- session_single.cc ----
  core::Status SubmitSingle(const core::WorkPtr& work);
  void MatchSingle(const core::WorkPtr& work);
  core::Status WaitSingle(core::HandleState& handle, core::TimePoint deadline);
  void FailOverdue(core::TimePoint now);  // if a call has not ended within its time-out
  void FailAlone(const core::Status& why);

  // ---- session_record.cc ----
  // Asks all ranks for their metrics, which come while this one leaves. What that gives prints the
  // table, if they have come.
  std::function<void()> BeginSummary();

  void LeaveAndEnd(const std::string& why);
  void EndFromInside(const std::string& why);  // precondition: the thread has an Inside
  void EndObservation();
  void EndParts();  // precondition: the engine's thread was stopped

  Topology topology_;
  core::Config config_;
  int cores_per_rank_ = 1;
  std::string description_;
  std::uint64_t token_ = 0;  // the same on all ranks of this session
  const int fork_generation_;

  SetTable sets_;
  core::Gate set_change_gate_;  // over a whole change
  std::uint64_t set_changes_ SIRTAKI_GUARDED_BY(set_change_gate_) = 0;
  // Over a whole pause, resumption or making of a communicator.
  core::Gate assembly_gate_;
  std::map<core::SetNumber, std::uint64_t> assemblies_ SIRTAKI_GUARDED_BY(assembly_gate_);
  std::atomic<std::thread::id> paused_by_;  // none: not paused; changes under assembly_gate_

  std::atomic<State> state_{State::kAlive};
  mutable std::atomic<int> calls_{0};  // under way: the parts live as long
  mutable core::Doorbell calls_over_;  // rings when the session is gone and the last has ended
  core::Mutex shutdown_mutex_;         // held by who ends the session
  mutable core::Mutex end_mutex_;
  core::Status end_ SIRTAKI_GUARDED_BY(end_mutex_);  // the fault, for when the parts are gone
  std::atomic<bool> fault_seen_{false};
  bool is_process_ = true;  // this rank; else one of the threads
  std::shared_ptr<SessionObservability> observation_;
  std::unique_ptr<Devices> devices_;
  std::shared_ptr<Impl> impl_;
};

// The process's own session, which public functions use unless they are given another. Thread-safe.
// At the exit of the process it is shut down with "the program exited".
std::shared_ptr<Session> DefaultSession();                 // null if there is none
void SetDefaultSession(std::shared_ptr<Session> session);  // null: none

}  // namespace sirtaki::session
