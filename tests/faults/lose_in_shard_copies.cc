// lose_in_shard_copies PLACE [--sirtaki-…]: four workers of an elastic job keep copies of shards, and nothing
// else, until some kill themselves while copies are exchanged. sirtakirun starts no others in their place.
//
//   keep     rank 1 of the first generation as the ranks give their shards to partners
//   receive  rank 1 as in `keep`, and then the last rank of the second generation as shards are given to all
//
// Each rank prints "rank R is process P" in each generation, and "rank R of N goes on from PLACE of M ranks"
// when it has the shards that the M ranks had at that place, to the byte. Exit code 0: so it was, and the
// ranks that are left have kept more of them.
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/config.h"
#include "frameworks/torch/session/session_scope.h"
#include "frameworks/torch/session/session_state.h"
#include "session/session.h"
#include "sirtaki/collectives.h"
#include "sirtaki/detail/elastic_calls.h"
#include "sirtaki/detail/shard_copies.h"
#include "sirtaki/error.h"
#include "sirtaki/session.h"
#include "tests/faults/told.h"

namespace sirtaki::tests {
namespace {

using detail::ShardCopies;
using session::Session;

constexpr std::int64_t kVictimsPlace = 5;
constexpr std::int64_t kMore = 5;  // places, after the losses
constexpr std::size_t kShardBytes = 300'000;

[[noreturn]] void Refuse(const std::string& why) {
  Say("WRONG: " + why);
  std::_Exit(2);
}

// The place where this rank kills itself: when a call begins that has this name.
struct Loss {
  void NoteStart(const core::RunBatch& batch) const {
    if (!armed) return;
    for (const core::RunItem& item : batch.items) {
      if (item.key.name.text().find(call) == std::string::npos) continue;
      kill(getpid(), SIGKILL);
      for (;;) pause();
    }
  }
  void Arm(const std::string& name) {
    call = name;
    armed = true;
  }

  std::string call;
  std::atomic<bool> armed{false};
};

ShardCopies::Shards ShardsAt(std::int64_t place, int of_rank) {
  const std::string text = "shard " + std::to_string(of_rank) + " at " + std::to_string(place);
  ShardCopies::Shards shards = {text + "; ", text};
  while (shards.front().size() < kShardBytes) shards.front() += shards.front();
  return shards;
}

// What is left of all ranks keeps shards again and again.
class Training {
 public:
  explicit Training(bool loses_twice) : loses_twice_(loses_twice) {}

  // Returns when enough was kept after the last loss.
  void Run(Loss& loss) {
    const int generation = detail::ElasticGeneration();
    const int last = loses_twice_ ? 3 : 2;
    if (loses_twice_ && generation == 2 && rank() == size() - 1) loss.Arm("elastic shards/bytes");
    const ShardCopies::Boundary boundary = copies_.Agree(place_);
    for (int shard = 0; shard < boundary.shards; ++shard) {
      if (copies_.Receive(shard) != ShardsAt(boundary.place, shard)) {
        Refuse("shard " + std::to_string(shard) + " has other bytes");
      }
    }
    place_ = boundary.place;
    copies_.Keep(place_, ShardsAt(place_, rank()), /*to_partner=*/true);
    Say("rank " + std::to_string(rank()) + " of " + std::to_string(size()) + " goes on from " +
        std::to_string(place_) + " of " + std::to_string(boundary.shards) + " ranks");
    const std::int64_t end = generation < last ? 2 * kVictimsPlace : place_ + kMore;
    while (place_ < end) {
      if (generation == 1 && rank() == 1 && place_ + 1 == kVictimsPlace) {
        loss.Arm("copies of shards");
      }
      copies_.Keep(place_ + 1, ShardsAt(place_ + 1, rank()), /*to_partner=*/true);
      ++place_;
    }
    if (generation < last) Refuse("nobody was lost");
    barrier();
  }

 private:
  const bool loses_twice_;
  ShardCopies copies_;
  std::int64_t place_ = 0;
};

int Run(int argc, char** argv) {
  const std::string_view place = argc < 2 ? "" : argv[1];
  if (place != "keep" && place != "receive") Refuse("usage: lose_in_shard_copies keep|receive");
  Training training(place == "receive");
  for (;;) {
    Loss loss;
    session::StartOptions options;
    options.parsed = core::ParseConfig(std::vector<std::string>(argv + 2, argv + argc),
                                       options.environment, {}, &options.config, nullptr);
    options.on_start = [&loss](const core::RunBatch& batch) { loss.NoteStart(batch); };
    std::shared_ptr<Session> session;
    if (const core::Status status = Session::CreateOfProcess(options, &session); !status.ok()) {
      Refuse("init: " + status.ToString());
    }
    Say("rank " + std::to_string(session->topology().rank) + " is process " +
        std::to_string(getpid()));
    const detail::SessionScope scope(std::make_shared<detail::SessionState>(session));
    try {
      training.Run(loss);
      return session->Shutdown("done").ok() ? 0 : 1;
    } catch (const Error& error) {
      const bool is_lost =
          error.code() == ErrorCode::PeerLost || error.code() == ErrorCode::Aborted;
      if (!is_lost) Refuse(error.what());
    }
    static_cast<void>(session->Shutdown("a rank is lost"));
  }
}

}  // namespace
}  // namespace sirtaki::tests

int main(int argc, char** argv) { return sirtaki::tests::Run(argc, argv); }
