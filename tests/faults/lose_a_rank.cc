// lose_a_rank WHAT VICTIM [--sirtaki-…]: all-reduces on every rank until rank VICTIM is lost.
//
//   killed         the victim kills itself between two calls
//   stopped        the victim stops itself between two calls
//   killed-large   … while large all-reduces are under way
//   stopped-large  … while large all-reduces are under way
//   killed-small   … while small all-reduces are under way
//   stopped-small  … while small all-reduces are under way
//   absent         the victim lives but submits nothing from the 6th step on
//   exits          the victim ends without a word between two calls
//   killed-paused  the victim kills itself after pause_mpi(), and the others call resume_mpi()
//   swaps          the victim makes two calls in the other order
//   nobody-large   large all-reduces without a victim, until something else ends the job
//
// Each rank prints "rank R is process P" first. The others print "rank R after T ms: ERROR" and end
// with code 3 when all that can have told their error.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/config/config.h"
#include "session/session.h"
#include "tests/faults/told.h"
#include "tests/support/session_calls.h"

namespace {

using sirtaki::core::Clock;
using sirtaki::core::OpKind;
using sirtaki::core::Status;
using sirtaki::session::Session;
using sirtaki::tests::AwaitTheOthers;
using sirtaki::tests::Say;
using sirtaki::tests::Vector;
using std::chrono::duration_cast;
using std::chrono::milliseconds;

constexpr int kVictimsStep = 5;

[[noreturn]] void Usage() {
  std::fputs("usage: lose_a_rank WHAT VICTIM [--sirtaki-option=value]...\n", stderr);
  std::exit(2);
}

void Vanish(const std::string& what) {
  if (what == "exits") std::_Exit(0);
  std::raise(what.rfind("killed", 0) == 0 ? SIGKILL : SIGSTOP);
}

// Runs until an all-reduce fails.
int Survive(Session& session, const std::string& what, int victim) {
  const int rank = session.topology().rank;
  const bool is_large = what.find("-large") != std::string::npos;
  const bool is_sudden = is_large || what.find("-small") != std::string::npos;
  const std::size_t count = is_large ? std::size_t{4} << 20 : 16;
  if (is_sudden && rank == victim) {
    std::thread([what] {
      std::this_thread::sleep_for(milliseconds(300));
      Vanish(what);
    }).detach();
  }
  Clock::time_point last = Clock::now();
  for (int step = 0;; ++step) {
    Status status;
    if (what == "killed-paused" && step == kVictimsStep) {
      status = session.PauseMedium(Clock::time_point::max());
      if (rank == victim) Vanish(what);
      if (status.ok()) status = session.ResumeMedium(Clock::time_point::max());
    }
    if (rank == victim && step == kVictimsStep && !is_sudden && what != "swaps") {
      if (what != "absent") Vanish(what);
      while (session.fault().ok()) std::this_thread::sleep_for(milliseconds(5));
      Say("victim " + std::to_string(rank) + ": " + session.fault().ToString());
      return 3;
    }
    const bool swaps = what == "swaps" && rank == victim && step / 2 == kVictimsStep / 2 + 1;
    Vector vector(OpKind::kAllReduce, "step" + std::to_string((swaps ? step ^ 1 : step) % 8),
                  std::vector<float>(count, 1.0F));
    if (status.ok()) status = vector.Run(session);
    const auto now = Clock::now();
    if (!status.ok()) {
      Say("rank " + std::to_string(rank) + " after " +
          std::to_string(duration_cast<milliseconds>(now - last).count()) +
          " ms: " + status.ToString());
      return 3;
    }
    if (vector.values().back() != static_cast<float>(session.topology().size)) {
      Say("rank " + std::to_string(rank) + ": WRONG SUM in step " + std::to_string(step));
      return 4;
    }
    last = now;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) Usage();
  const std::string what = argv[1];
  const int victim = std::atoi(argv[2]);
  sirtaki::session::StartOptions options;
  options.parsed = sirtaki::core::ParseConfig(std::vector<std::string>(argv + 3, argv + argc),
                                              options.environment, {}, &options.config, nullptr);
  std::shared_ptr<Session> session;
  if (const Status status = Session::CreateOfProcess(options, &session); !status.ok()) {
    Say("init: " + status.ToString());
    return 2;
  }
  sirtaki::session::SetDefaultSession(session);
  Say("rank " + std::to_string(session->topology().rank) + " is process " +
      std::to_string(getpid()));
  const int code = Survive(*session, what, victim);
  if (session->Shutdown("done").ok()) Say("a shutdown without a fault");
  const bool all = what == "absent" || what == "swaps";
  AwaitTheOthers(static_cast<std::uintmax_t>(session->topology().size - (all ? 0 : 1)));
  return code;
}
