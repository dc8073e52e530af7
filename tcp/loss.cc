#include "tcp/loss.h"

#include <system_error>
#include <utility>

namespace sirtaki::tcp {

void Loss::Note(core::Status why) {
  if (noted()) return;
  counts_at_ = core::Clock::now() + kGrace;
  status_ = std::move(why);
}

void Loss::Note(int rank, const std::string& host, int error) {
  const std::string why = error == 0 || error == EPIPE
                              ? "was closed"
                              : "failed: " + std::system_category().message(error);
  Note({core::StatusCode::kPeerLost,
        "rank " + std::to_string(rank) + " is lost: its connection from host " + host + " " + why,
        {rank, host, {}}});
}

}  // namespace sirtaki::tcp
