// Starting and ending, and who this process is among the others.
//
// Collective here means: every rank has to call it. Everything may be called from any thread.
#pragma once

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "sirtaki/export.h"

namespace sirtaki {

namespace detail {
class SessionState;
}

// One membership in a job: what lies between init() and shutdown(). Every function and object of
// the library takes one as its last argument, and a default-constructed one, the default
// everywhere, means the process's own. Programs have no need of others; tests have, to run N ranks
// as N threads. A cheap, copyable reference.
class SIRTAKI_API Session {
 public:
  Session() = default;
  explicit Session(std::shared_ptr<detail::SessionState> state) : state_(std::move(state)) {}

  // Null: the process's own.
  const std::shared_ptr<detail::SessionState>& state() const { return state_; }

 private:
  std::shared_ptr<detail::SessionState> state_;
};

// Options by the names of docs/configuration.md:
//   sirtaki::init(sirtaki::InitOptions().set("stall_limit", "10min").set("log_level", "debug"));
// They beat the environment. A name or value that is not allowed is refused by init().
class InitOptions {
 public:
  InitOptions& set(std::string option, std::string value) {
    values_.emplace_back(std::move(option), std::move(value));
    return *this;
  }
  InitOptions& set(std::string option, const char* value) {
    return set(std::move(option), std::string(value));
  }
  // Numbers; times in seconds.
  template <class T, std::enable_if_t<std::is_arithmetic<T>::value, int> = 0>
  InitOptions& set(std::string option, T value) {
    if (std::is_same<T, bool>::value) return set(std::move(option), value ? "true" : "false");
    return set(std::move(option), std::to_string(value));
  }

  // Makes a process set of these ranks at the end of init(), as add_process_set would; see
  // initial_process_sets(). All ranks must name the same sets in the same order.
  InitOptions& process_set(std::vector<int> ranks) {
    process_sets_.push_back(std::move(ranks));
    return *this;
  }

  const std::vector<std::pair<std::string, std::string>>& values() const { return values_; }
  const std::vector<std::vector<int>>& process_sets() const { return process_sets_; }

 private:
  std::vector<std::pair<std::string, std::string>> values_;
  std::vector<std::vector<int>> process_sets_;
};

// Joins the job that `mpirun` (or another launcher) has started; without one, a job of one rank.
// Initialises MPI if nobody did. Sets LibTorch's intra-op threads to this rank's share of the
// cores, unless the user chose a number (option `intra_op_threads` or OMP_NUM_THREADS). Collective.
//
// Throws Error on every rank if any rank cannot start: a bad option, different values of an option
// that has to agree, a peer that does not come up in time. Calling it again while initialised does
// nothing, but with other options than the first time it throws invalid_argument. After shutdown()
// it may be called anew.
SIRTAKI_API void init();
SIRTAKI_API void init(const InitOptions& options);

// The same with options from the command line: takes the `--sirtaki-…` arguments out of argv and
// lowers argc, so that the program's own parser does not see them.
SIRTAKI_API void init(int& argc, char** argv);
SIRTAKI_API void init(int& argc, char** argv, const InitOptions& options);

// Leaves the job: waits until all ranks have called it (or ended) and what is under way is
// finished. Collective. Handles and optimizers made before throw not_initialized when used
// afterwards. Does nothing if not initialised; never throws; a fault that no call has thrown is
// logged. Called at exit if it was not before.
SIRTAKI_API void shutdown() noexcept;

SIRTAKI_API bool is_initialized() noexcept;

// Throw not_initialized before init() and after shutdown().
SIRTAKI_API int rank(const Session& session = {});        // of this process, 0 <= rank < size
SIRTAKI_API int size(const Session& session = {});        // ranks in the job
SIRTAKI_API int local_rank(const Session& session = {});  // among the ranks of this host
SIRTAKI_API int local_size(const Session& session = {});
SIRTAKI_API int cross_rank(
    const Session& session = {});  // among the hosts that have this local rank
SIRTAKI_API int cross_size(const Session& session = {});
SIRTAKI_API bool is_homogeneous(const Session& session = {});  // every host has as many ranks

// Ends the job with a reason: every pending and later call, here and on the other ranks, throws
// `aborted` with this text and this rank as its origin. Not collective. It does not wait for the
// other ranks, but for the messages to them to be on their way: mostly a moment, at most 2 s.
SIRTAKI_API void abort(const std::string& reason, const Session& session = {});

}  // namespace sirtaki
