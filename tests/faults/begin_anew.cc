// begin_anew VICTIM ROUNDS [--sirtaki-…]: ROUNDS times reduces on every rank until rank VICTIM ends
// the job by an error, leaves it and joins it anew, as a training does that goes on from its last
// commit. Then once more, without an error. Each rank prints "rank R is through" and ends with 0. From
// the sixth round on a round must leave nothing behind: "rank R keeps …" says what it has left; and over
// TCP what has only served the start is gone after it.
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
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

// Begins to receive from rank 0 what that does not send, which is no fault of earlier rounds.
void Receive(Session& session, float* into) {
  const auto work = std::make_shared<sirtaki::core::Work>();
  work->request.key = sirtaki::core::Key::Named(sirtaki::core::kWorldSet, "#1: a message");
  work->request.asked = std::make_shared<const sirtaki::core::Signature>(
      sirtaki::core::Signature{.kind = OpKind::kReceive, .shape = {1}});
  work->peer = 0;
  work->input = work->output = into;
  if (!session.Submit(work, /*will_wait=*/false).ok()) std::puts("WRONG");
}

Status Join(char** first, char** last, std::shared_ptr<Session>* session) {
  sirtaki::session::StartOptions options;
  options.parsed =
      sirtaki::core::ParseConfig({first, last}, options.environment, {}, &options.config, nullptr);
  return Session::CreateOfProcess(options, session);
}

// A process has these of the system.
struct Holdings {
  std::int64_t descriptors = 0;
  std::int64_t threads = 0;
  std::int64_t mappings = 0;
  std::int64_t resident_bytes = 0;
};

std::int64_t EntriesOf(const char* folder) {
  const std::filesystem::directory_iterator entries(folder);
  return std::distance(begin(entries), end(entries));
}

Holdings Count() {
  Holdings now;
  now.descriptors = EntriesOf("/proc/self/fd");
  now.threads = EntriesOf("/proc/self/task");
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) ++now.mappings;
  std::ifstream statm("/proc/self/statm");
  std::int64_t pages = 0;
  statm >> pages >> pages;
  now.resident_bytes = pages * sysconf(_SC_PAGESIZE);
  return now;
}

int Sockets() {
  int sockets = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the iterator's own is
    const std::string what = std::filesystem::read_symlink(entry.path(), gone).string();
    sockets += what.rfind("socket:", 0) == 0 ? 1 : 0;
  }
  return sockets;
}

// More than a few of each have been left by the rounds.
bool IsMore(const Holdings& now, const Holdings& before) {
  return now.descriptors > before.descriptors + 4 || now.threads > before.threads + 2 ||
         now.mappings > before.mappings + 32 ||
         now.resident_bytes > before.resident_bytes + (std::int64_t{48} << 20);
}

std::string Text(const Holdings& of) {
  return std::to_string(of.descriptors) + " descriptors, " + std::to_string(of.threads) +
         " threads, " + std::to_string(of.mappings) + " mappings, " +
         std::to_string(of.resident_bytes >> 20) + " MiB";
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
  constexpr int kSettled = 5;   // rounds, after which nothing grows any more
  const int given = Sockets();  // by whoever has started this process
  int rank = 0;
  float never = 0;
  Holdings before;
  for (int round = 0; round <= rounds; ++round) {
    std::shared_ptr<Session> session;
    if (const Status status = Join(argv + 3, argv + argc, &session); !status.ok()) {
      return Fail("cannot join", status);
    }
    rank = session->topology().rank;
    if (round == kSettled) before = Count();
    const int lines = 3 * (session->topology().size - 1);
    if (const int own = Sockets() - given;
        own > lines && session->description().find("TCP, met at") != std::string::npos) {
      std::printf("rank %d keeps %d sockets, and needs %d\n", rank, own, lines);
    }
    if (round == rounds) {
      const Holdings now = Count();
      std::printf("rank %d has %s\n", rank, Text(now).c_str());
      if (round > kSettled && IsMore(now, before)) {
        std::printf("rank %d keeps what it has not had in round %d: %s\n", rank, kSettled,
                    Text(before).c_str());
      }
      if (const Status status = Step(*session); !status.ok()) return Fail("WRONG", status);
      if (rank == victim) Receive(*session, &never);
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
        for (int seen = steps; seen < 3 + 2 * (round % 6); seen = steps) steps.wait(seen);
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
