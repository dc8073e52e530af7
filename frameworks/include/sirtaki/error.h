// Error is the one exception type of the library. Each of its codes says what happened and what it
// means for the job:
//
//   the caller's fault   InvalidArgument, DuplicateName, NotInitialized, Unsupported: nothing
//                        happened; the job goes on. An argument that only one rank got wrong is
//                        told to its peers too: they throw the same InvalidArgument, which names
//                        that rank, instead of waiting for it.
//   a tensor's fault     Mismatch: the ranks asked for different things under one name. Thrown on
//                        every rank that takes part, with what each group of ranks asked for. The
//                        name may be used again at once; the job goes on.
//   a group's fault      PeerLost, TimedOut, Aborted, Backend, Protocol, and Mismatch where ranks
//                        wait for each other: every pending and later call on every rank throws
//                        with the first cause (see origin()). Only shutdown() and ending the
//                        process are left to do.
//   ShutDown             a rank that had to take part has called shutdown() or ended.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

#include "sirtaki/export.h"

namespace sirtaki {

enum class ErrorCode : unsigned char {
  InvalidArgument = 1,  // this rank passed an argument that is wrong whatever the others do
  Mismatch,             // the ranks asked for different things under one name, or wait for each
                        // other in different calls
  NotInitialized,  // the call came before init() or after shutdown(), or used an object, except a
                   // process set, that was made before shutdown()
  DuplicateName,   // the name is in flight on this rank
  ShutDown,        // a rank that had to take part has left
  PeerLost,        // a rank does not answer, or its connection failed
  TimedOut,        // a wait passed its limit
  Aborted,         // a program called abort(reason), or ended with a code other than 0
  Backend,         // MPI, CUDA or NCCL failed, or memory ran out
  Protocol,        // a peer sent a message that no correct peer sends
  Unsupported,     // the library knows it, but this build or version cannot do it
};

// Returns the code as a text: "mismatch", "peer lost", …
SIRTAKI_API const char* error_code_name(ErrorCode code) noexcept;

// ErrorOrigin says where an error began. A field that is not known is -1 or empty.
//
//   rank    of an InvalidArgument the first rank that gave one, of a ShutDown the first that has
//           left, of a PeerLost the one that is lost, of another fault of the group the rank that
//           saw it first (of a TimedOut not the one that is late: what() names that). -1 for a
//           tensor's Mismatch, since nobody can tell which of the ranks is right.
//   host    the host of that rank, for a group's fault, if it is known.
//   tensor  the name as the program gave it: `w`, not `"w"`, and neither escaped nor shortened as
//           in what(). An optimizer's gradients are named `gradient/NAME`, `gradient#2/NAME` for
//           the second optimizer, `gradient:OPTIMIZER/NAME` for one that has a name, and with
//           Adasum `delta` for `gradient`; a call without a name is `unnamed call #7`.
struct ErrorOrigin {
  int rank = -1;
  std::string host;
  std::string tensor;
};

// An Error has a code, an origin and a text: what() is a whole sentence that names the tensor, the
// ranks and the reason.
class SIRTAKI_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message, ErrorOrigin origin = {});
  Error(const Error&) noexcept;
  Error& operator=(const Error&) noexcept;
  ~Error() override;

  ErrorCode code() const noexcept { return code_; }
  const ErrorOrigin& origin() const noexcept { return *origin_; }

 private:
  ErrorCode code_;
  std::shared_ptr<const ErrorOrigin> origin_;  // shared, so that copying cannot throw
};

}  // namespace sirtaki
