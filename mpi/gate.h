// The gate keeps the process to one thread in MPI at a time. Every MPI call of the library passes
// it, whatever thread level MPI has: Open MPI's ob1 can complete a receive with MPI_SUCCESS and
// without its data while another thread makes progress. It is held for calls that cannot block,
// never across a wait. The exceptions: MPI_Finalize, which calls the program back, and two calls that
// block: MPI's initialisation, and the making of a communicator for the program.
//
// A call that should not block may do so all the same when a peer has died, and a program may keep
// its MpiGate. The threads that wait for the gate then give up: after a fault when 10 s have gone by,
// without one after LimitWaits.
#pragma once

#include <chrono>

#include "core/base/status.h"
#include "core/base/types.h"
#include "core/threads/gate.h"
#include "mpi/check.h"

namespace sirtaki::mpi {

core::Gate& Gate();

// How long a thread that waits for the gate looks before it asks again whether there was a fault.
inline constexpr auto kLook = std::chrono::milliseconds(100);

// Takes the gate for a call of this name, a literal. Errors, with both names: kInvalidArgument if
// this thread has it already; kBackend if another thread has not come out for a hundred looks after a
// fault, or for those of LimitWaits.
core::Status Enter(const char* call, core::Duration look = kLook) SIRTAKI_NO_THREAD_SAFETY_ANALYSIS;

// An Entry keeps its thread in MPI for as long as it lives, if ok().
class Entry {
 public:
  explicit Entry(const char* call) : status_(Enter(call)) {}
  ~Entry() SIRTAKI_NO_THREAD_SAFETY_ANALYSIS {
    if (ok()) Gate().Unlock();
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  bool ok() const { return status_.ok(); }
  const core::Status& status() const { return status_; }

 private:
  const core::Status status_;
};

// Makes one call, with its name and MPI's words if it fails.
template <typename Call>
core::Status InMpi(const char* name, const Call& call) {
  const Entry entry(name);
  return entry.ok() ? Check(call(), name) : entry.status();
}

// How long a thread waits for the gate without a fault: at least twice as long as after one. Without
// limit until it is set.
void LimitWaits(core::Duration limit);

// False too if another thread does not come out of MPI.
bool IsFinalized();

}  // namespace sirtaki::mpi
