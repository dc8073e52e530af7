#include "session/base/wire_parts.h"

#include <utility>

#include "session/base/process_pool.h"

namespace sirtaki::session {

using core::Status;

Status WireParts::Make(Medium& medium, const ConnectOptions& options, core::TimePoint deadline,
                       std::unique_ptr<core::Transport> transport,
                       std::unique_ptr<ops::wire::Port> port, std::unique_ptr<WireParts>* parts) {
  const Topology& topology = medium.topology();
  std::unique_ptr<WireParts> made(new WireParts());
  made->transport_ = std::move(transport);
  made->port_ = std::move(port);
  ops::shm::LocalGroupOptions group;
  group.rank = topology.rank;
  group.pool = PoolOfProcess(options.config, topology.local_size);
  Status status = HostGroup::Meet(medium, options, deadline, std::move(group), &made->shared_);
  if (!status.ok()) return status;
  ops::wire::WireOptions wire;
  wire.host_of_rank = topology.host_of_rank;
  ops::wire::Port* used = made->port_.get();
  if (options.config.verify_transfers) {
    made->verifying_ = std::make_unique<ops::wire::VerifyingPort>(*used);
    used = made->verifying_.get();
  }
  made->backend_ = std::make_unique<ops::wire::WireBackend>(*used, std::move(wire));
  status = made->shared_->Assemble(topology, options, deadline, *made->transport_, *made->backend_);
  if (status.ok()) *parts = std::move(made);
  return status;
}

std::string WireParts::Description(std::string medium) const {
  const std::string shared = shared_->description();
  return shared.empty() ? medium : medium + "; " + shared;
}

Status WireParts::Meet(WireParts* parts, core::SetNumber set, const core::RankRanges& members,
                       char mine, const std::function<Status()>& patience, std::string* all) {
  all->assign(1, mine);
  if (parts == nullptr || members.Count() < 2) return Status::Ok();
  return parts->backend_->Meet(set, members, mine, patience, all);
}

}  // namespace sirtaki::session
