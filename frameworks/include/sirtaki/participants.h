// Participants say which ranks take part in a helper.
#pragma once

#include <utility>

#include "sirtaki/export.h"
#include "sirtaki/process_set.h"
#include "sirtaki/session.h"

namespace sirtaki {

// Participants are all ranks of a session, or those of a process set: either converts to
// Participants, and a default-constructed one is all ranks of the process's own session.
//
//   sirtaki::broadcast_parameters(*model, 0);       // to all
//   sirtaki::broadcast_parameters(*model, 2, set);  // to the ranks of the set; 2 is one of them
//
// A rank that is not in the set throws invalid_argument at once, and nothing happens. Roots are
// ranks of the job, as everywhere, and the names of calls are the set's own.
class SIRTAKI_API Participants {
 public:
  Participants() = default;
  // NOLINTBEGIN(google-explicit-constructor): either is given as it is
  Participants(Session session) : session_(std::move(session)) {}
  Participants(const ProcessSet& process_set);
  // NOLINTEND(google-explicit-constructor)

  const Session& session() const { return session_; }
  const ProcessSet& process_set() const { return process_set_; }

 private:
  Session session_;
  ProcessSet process_set_;
};

}  // namespace sirtaki
