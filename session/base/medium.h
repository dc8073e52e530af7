// A medium is what a session stands on: the way its ranks start together, send messages and move
// data. One for MPI (session_mpi.cc), one for TCP (session_tcp.cc), one for threads of a process
// (inproc_world.cc).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/base/rank_ranges.h"
#include "core/base/status.h"
#include "core/base/topology.h"
#include "core/base/types.h"
#include "core/config/config.h"
#include "core/protocol/transport.h"
#include "core/threads/gate.h"
#include "ops/base/backend.h"

namespace sirtaki::session {

using core::Topology;

// The ranks have agreed on these before they connect.
struct ConnectOptions {
  core::Config config;
  bool spin = true;  // short waits keep their core
};

// The session owns its medium, and destroys it after everything that uses it.
class Medium {
 public:
  virtual ~Medium() = default;

  virtual const Topology& topology() const = 0;
  virtual std::string description() const = 0;  // "Open MPI v4.1.4, MPI_THREAD_MULTIPLE"
  // ---- at the start, on the thread that calls init ----

  // Every rank gives a string and gets all of them, by rank. Collective over the world.
  virtual core::Status Exchange(const std::string& mine, core::TimePoint deadline,
                                std::vector<std::string>* all) = 0;
  // Makes the transport and the backend. Collective; not called in a world of one rank.
  virtual core::Status Connect(const ConnectOptions& options, core::TimePoint deadline) = 0;

  // The start is over, well: nothing is exchanged any more.
  virtual void EndStart() {}

  // ---- after Connect ----
  virtual core::Transport& transport() = 0;
  virtual ops::Backends& backend() = 0;

  // Returns when all these ranks have called it, with what each has said, in their order. Uses
  // nothing of the engine, which goes on. Errors: that of `patience`, which is asked again and again;
  // what the backend was stopped with. Without MPI there is nothing to meet for.
  virtual core::Status Meet(core::SetNumber /*set*/, const core::RankRanges& members, char mine,
                            const std::function<core::Status()>& /*patience*/, std::string* all) {
    all->assign(static_cast<std::size_t>(members.Count()), mine);
    return core::Status::Ok();
  }
  // Gives what tells whether the process of another rank has ended: kPeerLost, naming it. Null: that
  // of none is seen from here. The medium must outlive it.
  virtual std::function<core::Status()> PeerCheck() const { return nullptr; }
  // Where one thread at a time may call the medium: gives its gate, and what takes that for the
  // program, which unlocks it; null where any number may. The medium may be gone when it is called.
  // Its errors: those of mpi::Enter.
  virtual std::function<core::Status()> EntryOfGate(core::Gate** gate) {
    *gate = nullptr;
    return [] { return core::Status::Ok(); };
  }
  // Names the call of the thread that has the gate, for texts; empty: nobody has it.
  virtual std::string GateHolder() const { return {}; }
  // A communicator of MPI for the program, of these ranks; collective over them, who have met. It
  // blocks, so nothing else may be in the medium.
  virtual core::Status MakeCommunicator(core::SetNumber /*set*/,
                                        const core::RankRanges& /*members*/,
                                        int* /*fortran_handle*/) {
    return {core::StatusCode::kUnsupported, "this session does not run over MPI"};
  }

  // The group has failed. Thread-safe, never blocks.
  virtual void NoteFault() = 0;
  // All ranks have left the session, without a fault.
  virtual void NoteOrderlyEnd() = 0;
  // `shutdown` is called if the medium is about to end before the session does.
  virtual core::Status BeforeEnd(std::function<void()> shutdown) = 0;
};

}  // namespace sirtaki::session
