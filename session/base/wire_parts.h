// The wire parts are what a medium makes of its transport and its port: the backend over the port,
// and the host group beside it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "core/base/rank_ranges.h"
#include "core/base/status.h"
#include "core/base/types.h"
#include "core/protocol/transport.h"
#include "ops/base/backend.h"
#include "ops/wire/port.h"
#include "ops/wire/verifying_port.h"
#include "ops/wire/wire_backend.h"
#include "session/base/host_group_setup.h"
#include "session/base/medium.h"

namespace sirtaki::session {

// A medium owns its wire parts, and destroys them before what their transport and port rest on.
class WireParts {
 public:
  // Collective over the world, by `medium`'s Exchange. Errors: those of HostGroup's.
  static core::Status Make(Medium& medium, const ConnectOptions& options, core::TimePoint deadline,
                           std::unique_ptr<core::Transport> transport,
                           std::unique_ptr<ops::wire::Port> port,
                           std::unique_ptr<WireParts>* parts);

  core::Transport& transport() { return shared_->transport(); }
  ops::Backends& backend() { return shared_->backend(); }
  std::function<core::Status()> PeerCheck() const { return shared_->PeerCheck(); }
  // The text goes into the line that init logs, behind `medium`'s own.
  std::string Description(std::string medium) const;
  // As Medium::Meet. `parts`: null in a world of one rank.
  static core::Status Meet(WireParts* parts, core::SetNumber set, const core::RankRanges& members,
                           char mine, const std::function<core::Status()>& patience,
                           std::string* all);

 private:
  WireParts() = default;

  // The parts are in the order in which they are made; the last ends first.
  std::unique_ptr<core::Transport> transport_;
  std::unique_ptr<ops::wire::Port> port_;
  std::unique_ptr<ops::wire::VerifyingPort> verifying_;
  std::unique_ptr<ops::wire::WireBackend> backend_;
  std::unique_ptr<HostGroup> shared_;
};

}  // namespace sirtaki::session
