#include "sirtaki/rank_zero_first.h"

#include <exception>

#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki::detail {
namespace {

// A turn of one rank, and the exception that it has thrown.
struct Turn {
  std::exception_ptr thrown;
  std::string error;  // its text

  void Take(const std::function<void()>& run) {
    try {
      run();
    } catch (...) {
      thrown = std::current_exception();
      error = TextOfCurrent();
    }
  }
};

// Waits for all ranks. A rank that has thrown throws its own exception, the others one about it.
void Agree(const std::string& what, const std::string& scope, const Turn& turn,
           const std::shared_ptr<SessionState>& session) {
  try {
    AgreeOnList(what, {scope}, turn.error, session);
  } catch (...) {
    if (turn.thrown) std::rethrow_exception(turn.thrown);
    throw;
  }
}

}  // namespace

void RunRankZeroFirst(const std::function<void()>& run, const RankZeroFirstOptions& options) {
  const auto state = CurrentSession();
  ThrowIfError(state->Check());
  const session::Topology& topology = state->topology();
  const bool per_host = options.scope() == FirstScope::Host;
  const bool first = per_host ? topology.local_rank == 0 : topology.rank == 0;
  const std::string scope = per_host ? "the first rank of each host" : "rank 0";
  const std::string name =
      options.name().empty() ? "run_rank_zero_first" : "run_rank_zero_first/" + options.name();

  Turn turn;
  if (first) turn.Take(run);
  Agree(name + "/first", scope, turn, state);
  if (!first) turn.Take(run);
  Agree(name + "/others", scope, turn, state);
}

}  // namespace sirtaki::detail
