#include "mpi/gate.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <string>

#include "mpi/environment.h"
#include "mpi/library.h"

namespace sirtaki::mpi {
namespace {

using core::Status;
using core::StatusCode;

// Looks are counted, not time: the process may have been stopped.
constexpr int kLooksAfterFault = 100;
std::atomic<int> most_looks{std::numeric_limits<int>::max()};  // without a fault

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
  int after_fault = 0;
  for (int looks = 0; after_fault < kLooksAfterFault && looks < most_looks && !given_up; ++looks) {
    if (gate.LockUntil(call, core::Clock::now() + look)) return Entered();
    if (Environment::HasFault()) ++after_fault;
  }
  given_up = true;
  return {StatusCode::kBackend,
          std::string(call) + ": another thread does not come out of " + gate.Holder() +
              (after_fault > 0 ? ", after a fault: end the process"
                               : ": a program must not wait while it has an MpiGate")};
}

void LimitWaits(core::Duration limit) {
  most_looks = static_cast<int>(std::min<core::Duration::rep>(
      std::max<core::Duration::rep>(limit / kLook, 2 * kLooksAfterFault),
      std::numeric_limits<int>::max()));
}

bool IsFinalized() {
  int finalized = 0;
  static_cast<void>(InMpi("MPI_Finalized", [&] { return TheApi().Finalized(&finalized); }));
  return finalized != 0;
}

}  // namespace sirtaki::mpi
