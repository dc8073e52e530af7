// A host group is what ranks of a host share, over any medium: the local group, the transport and
// the backend that use it where it reaches, and the medium's own where it does not.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/protocol/transport.h"
#include "ops/base/backend.h"
#include "ops/between_hosts/backend_selection.h"
#include "ops/between_hosts/hierarchy.h"
#include "ops/shm/backend.h"
#include "ops/shm/local_group.h"
#include "ops/shm/transport.h"
#include "session/base/medium.h"

namespace sirtaki::session {

// A medium owns its host group, which is destroyed before what it was given.
class HostGroup {
 public:
  // Collective over the world, by `medium`'s Exchange: the ranks of each host meet in shared
  // memory. `pool`: of this process; may be null. Where ranks of a host cannot share memory all of
  // them do without, and the lowest of them says so once; kUnsupported on every rank if it is
  // required.
  static core::Status Meet(Medium& medium, const ConnectOptions& options, core::TimePoint deadline,
                           ops::shm::LocalGroupOptions group, std::unique_ptr<HostGroup>* parts);

  // Puts the parts together. Collective, called once, after Meet. `transport`, `backend`: the
  // medium's own.
  core::Status Assemble(const Topology& topology, const ConnectOptions& options,
                        core::TimePoint deadline, core::Transport& transport,
                        ops::Backend& backend);

  core::Transport& transport() { return shm_transport_ ? *shm_transport_ : *medium_transport_; }
  ops::Backends& backend() { return *selecting_; }
  // Gives what Medium::PeerCheck gives, for this host's ranks.
  std::function<core::Status()> PeerCheck() const {
    if (group_ == nullptr || !group_->SeesProcesses()) return nullptr;
    return [group = group_.get()] { return group->CheckPeers(); };
  }
  // The description goes into the line that init logs; empty if the ranks are on one host.
  std::string description() const;

 private:
  HostGroup() = default;

  std::vector<bool> shares_;  // by host: its ranks share memory
  core::Transport* medium_transport_ = nullptr;
  // The parts are in the order in which they are made; the last ends first.
  std::unique_ptr<ops::shm::LocalGroup> group_;  // null: this host's ranks share no memory
  std::unique_ptr<core::Transport> shm_transport_;
  std::unique_ptr<ops::shm::Backend> shm_backend_;
  std::unique_ptr<ops::Hierarchy> hierarchy_;  // null: it is off
  std::unique_ptr<ops::BackendSelection> selecting_;
  bool one_host_ = true;
};

}  // namespace sirtaki::session
