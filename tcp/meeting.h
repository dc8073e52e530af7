// The ranks of a job meet at rank 0, which listens at MASTER_ADDR, and tell each other what has to be
// agreed on at the start: where each of them listens, and what sessions exchange.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/base/types.h"
#include "tcp/line.h"
#include "tcp/place.h"

namespace sirtaki::tcp {

// Terms are what a meeting may be told besides.
struct MeetingTerms {
  // Rank 0 listens there; called if its place has port 0, which is any.
  std::function<void(int port)> listens;
  // Asked again and again; what is not empty ends the meeting as kAborted, with that as its text.
  std::function<std::string()> why_over;
};

// Not thread-safe: it belongs to the thread that starts the session, which destroys it when nothing is
// left to exchange.
class Meeting {
 public:
  // Returns when all ranks have met. Errors, each with what to do:
  //   kBackend   rank 0 cannot listen at its port
  //   kTimedOut  not all have come by then: rank 0 names who is missing, the others why they do not
  //              reach it
  //   kMismatch  two processes say that they are the same rank, or that the job has another size
  //   kProtocol  what listens there is not rank 0 of this job
  //   kAborted   its terms ended it; so may later calls
  static core::Status Begin(const Place& place, core::TimePoint deadline,
                            std::unique_ptr<Meeting>* meeting, MeetingTerms terms = {});
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  // Every rank gives a string and gets all of them, by rank. Errors: kPeerLost naming the rank,
  // kTimedOut; after one the meeting is over.
  core::Status Exchange(const std::string& mine, core::TimePoint deadline,
                        std::vector<std::string>* all);

  // Connects each rank with each. `hosts`: their names, by rank, for texts. `lines`: by rank; this
  // rank has none to itself. Collective. Errors: kPeerLost naming both ends, kTimedOut, kBackend.
  core::Status Connect(const std::vector<std::string>& hosts, core::TimePoint deadline,
                       std::vector<Lines>* lines);

 private:
  struct Impl;
  explicit Meeting(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace sirtaki::tcp
