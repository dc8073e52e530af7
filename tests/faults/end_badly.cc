// end_badly WHAT VICTIM [--sirtaki-…]: reduces on every rank, as a training does, until rank VICTIM
// ends.
//
//   waits    nothing ends it: somebody else does
//   stops    nothing ends it: somebody else stops it
//   throws   an exception that nobody catches
//   exits    std::exit(3)
//   handles  its handler of SIGTERM calls std::exit(4), within a call
//   leaves   its handler does so within shutdown(), which waits for the others
//   vanishes it ends with 0, and says good-bye to nobody
//   absent   it submits nothing any more, and goes on for ever; the others end with 0 after the error
//
// Each rank prints "rank R has begun" after its first steps. One that meets an error of Sirtaki's
// prints it to standard error and ends some seconds later, with code 1: the victim is to be the
// first to end. Where it is stopped, and so does not, it is a second.
#include <pthread.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/config/config.h"
#include "session/session.h"
#include "tests/support/session_calls.h"

namespace {

using sirtaki::core::OpKind;
using sirtaki::core::Status;
using sirtaki::session::Session;

constexpr int kFirstSteps = 20;
constexpr int kVictimsStep = kFirstSteps + 1;

// Large ones and small ones.
Status Step(Session& session, int step) {
  for (const std::size_t count : {std::size_t{1} << 20, std::size_t{16}}) {
    sirtaki::tests::Vector vector(OpKind::kAllReduce,
                                  "step" + std::to_string(step % 8) + "/" + std::to_string(count),
                                  std::vector<float>(count, 1.0F));
    if (Status status = vector.Run(session); !status.ok()) return status;
  }
  return Status::Ok();
}

int Fail(const Status& status, std::chrono::seconds later) {
  if (const auto session = sirtaki::session::DefaultSession()) session->NoteSeen(status);
  std::fprintf(stderr, "end_badly: %s\n", status.ToString().c_str());
  std::this_thread::sleep_for(later);
  return EXIT_FAILURE;
}

// The handler ends the program while the main thread is in `call`, which no other rank ends.
void ExitWithin(const std::function<void()>& call) {
  struct sigaction exits {};
  exits.sa_handler = [](int /*signal*/) { std::exit(4); };
  sigaction(SIGTERM, &exits, nullptr);
  const pthread_t caller = pthread_self();
  std::thread([caller] {
    // Until the call waits, which nobody can be asked for. A signal before that ends the program, too.
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    pthread_kill(caller, SIGTERM);
  }).detach();
  call();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fputs("usage: end_badly WHAT VICTIM [--sirtaki-option=value]...\n", stderr);
    return 2;
  }
  const std::string what = argv[1];
  const int victim = std::atoi(argv[2]);
  const bool forgives = what == "absent";
  const std::chrono::seconds later(what == "stops" ? 1 : 20);
  sirtaki::session::StartOptions options;
  options.parsed = sirtaki::core::ParseConfig(std::vector<std::string>(argv + 3, argv + argc),
                                              options.environment, {}, &options.config, nullptr);
  std::shared_ptr<Session> session;
  if (const Status status = Session::CreateOfProcess(options, &session); !status.ok()) {
    return Fail(status, later);
  }
  sirtaki::session::SetDefaultSession(session);
  const int rank = session->topology().rank;
  for (int step = 0;; ++step) {
    if (step == kFirstSteps) {
      std::printf("rank %d has begun\n", rank);
      std::fflush(stdout);
    }
    if (step == kVictimsStep && rank == victim) {
      if (what == "throws") throw std::runtime_error("this sample cannot be read");
      if (what == "exits") std::exit(3);
      if (what == "leaves")
        ExitWithin([&] { static_cast<void>(session->Shutdown("it is tired")); });
      if (what == "handles") {
        sirtaki::tests::Vector lone(OpKind::kAllReduce, "lone", std::vector<float>(16, 1.0F));
        ExitWithin([&] { static_cast<void>(lone.Run(*session)); });
      }
      if (what == "vanishes") std::_Exit(0);
      while (what == "absent") std::this_thread::sleep_for(std::chrono::seconds(1));
    }
    if (const Status status = Step(*session, step); !status.ok()) {
      if (!forgives) return Fail(status, later);
      session->NoteSeen(status);
      return EXIT_SUCCESS;
    }
  }
}
