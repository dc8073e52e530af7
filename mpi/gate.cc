#include "mpi/gate.h"

#include <atomic>
#include <string>

#include "mpi/environment.h"

namespace sirtaki::mpi {
namespace {

using core::Status;
using core::StatusCode;

// Looks are counted, not time: the process may have been stopped. Together they are no shorter than
// the least after which an engine is called stuck, as the fault may be an earlier session's.
constexpr int kLooksAfterFault = 100;

// A thread has given up, so the others look once only, until one gets in again.
std::atomic<bool> given_up{false};

Status Entered() {
  if (given_up.load(std::memory_order_relaxed)) given_up = false;
  return Status::Ok();
}

}  // namespace

core::Gate& Gate() {
  static core::Gate& gate = *new core::Gate;  // MPI is called while the process exits
  return gate;
}

Status Enter(const char* call, core::Duration look) {
  core::Gate& gate = Gate();
  if (gate.TryLock(call)) return Entered();
  if (gate.IsHeldByThisThread()) {
    return {StatusCode::kInvalidArgument,
            std::string(call) + ": this thread is in " + gate.Holder() +
                ", which keeps every other call out of MPI: destroy the MpiGate first"};
  }
  int looks = 0;
  do {
    if (gate.LockUntil(call, core::Clock::now() + look)) return Entered();
    if (Environment::HasFault()) ++looks;
  } while (looks < kLooksAfterFault && !given_up);
  given_up = true;
  return {StatusCode::kBackend, std::string(call) + ": another thread does not come out of " +
                                    gate.Holder() + ", after a fault: end the process"};
}

bool IsOver() {
  int finalized = 0;
  return !InMpi("MPI_Finalized", [&] { return MPI_Finalized(&finalized); }).ok() || finalized != 0;
}

}  // namespace sirtaki::mpi
