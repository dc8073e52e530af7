// MPI's error codes as Status, and waiting for a request with a deadline. For the files of mpi/
// only.
#pragma once

#include <mpi.h>

#include "core/base/status.h"
#include "core/base/types.h"

namespace sirtaki::mpi {

// `call` names the MPI function: "MPI_Isend to rank 3". The text is the call's name and MPI's own
// words.
core::Status Check(int code, const char* call);

// How to wait where nobody can be woken: look all the time at first, then sleep for a part of the
// time waited so far, so that a long wait costs next to nothing and a short one is hardly longer
// for it.
class CoolingSleep {
 public:
  CoolingSleep() : since_(core::Clock::now()) {}
  void Pause();

 private:
  core::TimePoint since_;
};

// Tests the request until it is complete. kTimedOut at `deadline`: the request is then still
// active, and what it refers to must stay where it is for the life of the process.
core::Status WaitUntil(MPI_Request* request, core::TimePoint deadline, const char* call);

}  // namespace sirtaki::mpi
