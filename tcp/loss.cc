#include "tcp/loss.h"

#include <system_error>

namespace sirtaki::tcp {

void Loss::Note(int rank, const std::string& host, int error) {
  if (noted()) return;
  counts_at_ = core::Clock::now() + kGrace;
  const std::string why = error == 0 || error == EPIPE
                              ? "was closed"
                              : "failed: " + std::system_category().message(error);
  status_ = {
      core::StatusCode::kPeerLost,
      "rank " + std::to_string(rank) + " is lost: its connection from host " + host + " " + why,
      {rank, host, {}}};
}

}  // namespace sirtaki::tcp
