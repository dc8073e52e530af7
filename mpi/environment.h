// MPI as this process has it: who initialised it, how many threads may call it, which ranks share a
// host.
//
// MPI is initialised here if nobody did so before. Then MPI_Finalize runs at the exit of the
// process, on the thread that initialised it, unless a session failed or is still open: a finalize
// that waits for a dead peer would hang. Where a later session of all processes has ended in order
// none of them is dead, so it runs all the same. If the program initialised MPI, finalizing it is
// the program's affair.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/environment.h"
#include "core/base/status.h"
#include "core/base/topology.h"
#include "core/base/types.h"
#include "core/config/config.h"
#include "mpi/api.h"

namespace sirtaki::mpi {

struct EnvironmentOptions {
  // They tell how many ranks a launcher believes to have started.
  core::EnvironmentView variables;
  core::MpiChoice mpi_family = core::MpiChoice::kAuto;

  // The ranks of the job, as MPI's Fortran handle of an intra-communicator of the program; none:
  // all processes that MPI has started.
  std::optional<int> communicator = std::nullopt;
};

// What a launcher says that it has started: a variable, and its value, which is above 1.
struct LaunchedRanks {
  std::string variable;
  std::string count;
  std::string ToString() const { return variable + "=" + count; }
};
std::optional<LaunchedRanks> RanksOfLauncher(const core::EnvironmentView& variables);

// One start of the library over MPI, from init to shutdown. Keeps a communicator of its own for
// what has to be agreed at the start. Destroyed by its owner after everything that communicates (on
// any thread that may call MPI).
class Environment {
 public:
  // Collective over the world (all ranks of the communicator), on the thread that calls init.
  // Errors:
  //   kNotInitialized   MPI was finalized already
  //   kUnsupported      MPI allows too few threads on some rank; the text says what to call there.
  //                     Every rank gets it, but where MPI may not be called from this thread
  //   kInvalidArgument  a launcher started several ranks, but MPI sees one; the communicator is
  //                     none, or one between two groups, or MPI is not initialised
  //   kTimedOut         not every rank came before `deadline`, which moves on by the time of MPI's own
  //                     initialisation
  //   kBackend          an MPI call failed
  static core::Status Start(const EnvironmentOptions& options, core::TimePoint deadline,
                            std::unique_ptr<Environment>* environment);
  ~Environment();
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

  const core::Topology& topology() const { return topology_; }

  // The text for the line that init logs: "Open MPI v4.1.4, MPI_THREAD_MULTIPLE, initialised by the
  // program".
  const std::string& description() const { return description_; }

  // Every rank gives a string and gets all of them, by rank. Collective over the world; not while
  // another thread is in it. Errors: kTimedOut, kBackend; afterwards the environment is of no use.
  core::Status Exchange(const std::string& mine, core::TimePoint deadline,
                        std::vector<std::string>* all);

  // A group has failed: communicators are not freed but left behind, for the rest of the process,
  // and MPI will not be finalized unless NoteOrderlyEnd follows. Thread-safe.
  static void NoteFault();
  // All ranks have left, and everything that they had started has ended: a fault of an earlier session
  // counts no more. Thread-safe.
  void NoteOrderlyEnd() const;
  static bool HasFault();

  // `shutdown` runs at the beginning of MPI_Finalize if this environment still exists then, on the
  // thread that finalizes: for programs that finalize MPI without shutting the library down.
  core::Status BeforeFinalize(std::function<void()> shutdown);

 private:
  friend class Communicators;
  // MPI's attribute refers to an AtFinalize, so it stays where it is.
  struct AtFinalize {
    std::optional<int> key;
    std::function<void()> shutdown;
  };
  Environment();
  core::Status AgreeOnThreading(const core::Status& mine, core::TimePoint deadline);
  core::Status FindTopology(core::TimePoint deadline);

  Comm control_;  // for Exchange
  std::unique_ptr<AtFinalize> at_finalize_ = std::make_unique<AtFinalize>();
  core::Topology topology_;
  bool of_all_ = false;  // that MPI has started
  std::string description_;
};

}  // namespace sirtaki::mpi
