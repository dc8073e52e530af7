// begin_anew VICTIM ROUNDS [--sirtaki-…]: ROUNDS times reduces on every rank until rank VICTIM ends
// the job by an error, leaves it and joins it anew, as a training does that goes on from its last
// commit. Then once more, without an error. Each rank prints "rank R is through" and ends with 0.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/config/config.h"
#include "session/session.h"
#include "tests/support/session_calls.h"

namespace {

using sirtaki::core::OpKind;
using sirtaki::core::Status;
using sirtaki::core::StatusCode;
using sirtaki::session::Session;

// A large one and a small one.
Status Step(Session& session) {
  for (const std::size_t count : {std::size_t{1} << 20, std::size_t{16}}) {
    sirtaki::tests::Vector vector(OpKind::kAllReduce, "step/" + std::to_string(count),
                                  std::vector<float>(count, 1.0F));
    if (Status status = vector.Run(session); !status.ok()) return status;
    if (vector.values().back() != static_cast<float>(session.topology().size)) {
      std::puts("WRONG");
    }
  }
  return Status::Ok();
}

Status Join(char** first, char** last, std::shared_ptr<Session>* session) {
  sirtaki::session::StartOptions options;
  options.parsed =
      sirtaki::core::ParseConfig({first, last}, options.environment, {}, &options.config, nullptr);
  return Session::CreateOfProcess(options, session);
}

int Fail(const char* what, const Status& status) {
  std::printf("%s: %s\n", what, status.ToString().c_str());
  return EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fputs("usage: begin_anew VICTIM ROUNDS [--sirtaki-option=value]...\n", stderr);
    return 2;
  }
  const int victim = std::atoi(argv[1]);
  const int rounds = std::atoi(argv[2]);
  int rank = 0;
  for (int round = 0; round <= rounds; ++round) {
    std::shared_ptr<Session> session;
    if (const Status status = Join(argv + 3, argv + argc, &session); !status.ok()) {
      return Fail("cannot join", status);
    }
    rank = session->topology().rank;
    if (round == rounds) {
      if (const Status status = Step(*session); !status.ok()) return Fail("WRONG", status);
      if (const Status status = session->Shutdown("it is done"); !status.ok()) {
        return Fail("WRONG", status);
      }
      break;
    }
    std::atomic<int> steps{0};
    std::thread killjoy;
    if (rank == victim) {
      // While this rank is in the step that follows: a little later in each round.
      killjoy = std::thread([&session, &steps, round] {
        for (int seen = steps; seen < 3 + 2 * round; seen = steps) steps.wait(seen);
        session->Abort("round " + std::to_string(round) + " is over");
      });
    }
    Status status;
    while (status.ok()) {
      status = Step(*session);
      ++steps;
      steps.notify_all();
    }
    steps = std::numeric_limits<int>::max();  // whatever has ended it
    steps.notify_all();
    if (killjoy.joinable()) killjoy.join();
    if (status.code() != StatusCode::kAborted) return Fail("WRONG", status);
    static_cast<void>(session->Shutdown("it failed"));
  }
  std::printf("rank %d is through\n", rank);
  return EXIT_SUCCESS;
}
