#include "session/base/host_group_setup.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "core/base/rank_ranges.h"
#include "core/protocol/tree.h"

namespace sirtaki::session {

using core::Status;
using core::StatusCode;

namespace {

core::RankRanges RanksOfThisHost(const Topology& topology) {
  core::RankRanges ranks;
  const int here = topology.host_of_rank[static_cast<std::size_t>(topology.rank)];
  for (int rank = 0; rank < topology.size; ++rank) {
    if (topology.host_of_rank[static_cast<std::size_t>(rank)] == here) ranks.Add(rank);
  }
  return ranks;
}

// Says what may come to this rank from other hosts: messages, if a neighbour in the tree is there.
ops::shm::Beyond BroughtFromBeyond(const Topology& topology, int tree_arity, bool reaches_all) {
  const core::RankRanges here = RanksOfThisHost(topology);
  const core::Tree::Node node = core::Tree(topology.host_of_rank, tree_arity).NodeOf(topology.rank);
  const auto beyond = [&here](int rank) { return !here.Contains(rank); };
  if ((node.parent >= 0 && beyond(node.parent)) ||
      std::any_of(node.children.begin(), node.children.end(), beyond)) {
    return ops::shm::Beyond::kMessages;
  }
  return reaches_all && here.Count() < topology.size ? ops::shm::Beyond::kFaults
                                                     : ops::shm::Beyond::kNone;
}

// Each rank says this: a byte for whether it went well, then its announcement or what went wrong.
std::string Told(const Status& status, std::string text) {
  return (status.ok() ? '+' : '-') + (status.ok() ? std::move(text) : status.message());
}

// The first failure among these ranks.
Status FailureOf(const core::RankRanges& ranks, const std::vector<std::string>& told) {
  for (const int rank : ranks.ToVector()) {
    const std::string& said = told[static_cast<std::size_t>(rank)];
    if (said.empty() || said.front() != '+') {
      return {StatusCode::kUnsupported,
              "rank " + std::to_string(rank) + ": " + said.substr(said.empty() ? 0 : 1)};
    }
  }
  return Status::Ok();
}

}  // namespace

Status HostGroup::Meet(Medium& medium, const ConnectOptions& options, core::TimePoint deadline,
                       ops::shm::LocalGroupOptions group_options,
                       std::unique_ptr<HostGroup>* parts) {
  std::unique_ptr<HostGroup> made(new HostGroup());
  const Topology& topology = medium.topology();
  const core::RankRanges here = RanksOfThisHost(topology);
  const auto world = core::RankRanges::Span(0, topology.size - 1);
  std::vector<std::string> told;
  if (options.config.shared_memory != core::SharedMemoryMode::kOff) {
    std::string announcement;
    Status mine = ops::shm::LocalGroup::Make(group_options, &made->group_, &announcement);
    Status met = medium.Exchange(Told(mine, std::move(announcement)), deadline, &told);
    if (!met.ok()) return met;
    mine = FailureOf(here, told);
    if (mine.ok()) {
      std::vector<std::string> announcements;
      for (const int rank : here.ToVector()) {
        announcements.push_back(told[static_cast<std::size_t>(rank)].substr(1));
      }
      mine = made->group_->Join(here, announcements);
    }
    if (met = medium.Exchange(Told(mine, {}), deadline, &told); !met.ok()) return met;
    if (options.config.shared_memory == core::SharedMemoryMode::kRequired) {
      if (Status all = FailureOf(world, told); !all.ok()) return all;
    }
    if (Status group = FailureOf(here, told); !group.ok()) {
      made->group_.reset();
      if (topology.local_rank == 0 && here.Count() > 1) {
        SIRTAKI_LOG(kWarning, "the ranks of host " + topology.host +
                                  " cannot share memory, and are as those of different hosts: " +
                                  group.message());
      }
    }
  }
  made->shares_.assign(topology.host_names.size(),
                       options.config.shared_memory != core::SharedMemoryMode::kOff);
  for (int rank = 0; rank < topology.size; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    if (!told.empty() && !FailureOf({rank}, told).ok()) {
      made->shares_[static_cast<std::size_t>(topology.host_of_rank[index])] = false;
    }
  }
  if (made->group_ != nullptr && made->group_->size() == 1) made->group_.reset();
  *parts = std::move(made);
  return Status::Ok();
}

Status HostGroup::Assemble(const Topology& topology, const ConnectOptions& options,
                           core::TimePoint deadline, core::Transport& transport,
                           ops::Backend& backend) {
  medium_transport_ = &transport;
  const auto world = core::RankRanges::Span(0, topology.size - 1);
  if (group_ != nullptr) {
    if (options.config.transport == core::TransportMode::kAuto) {
      shm_transport_ = std::make_unique<ops::shm::Transport>(
          *group_, transport,
          BroughtFromBeyond(topology, options.config.tree_arity, transport.ReachesAll()));
    }
    ops::shm::BackendOptions shm;
    shm.spin = options.spin;
    shm.verify = options.config.verify_transfers;
    shm.chunk_bytes = options.config.chunk_bytes;
    shm.rings = shm_transport_ != nullptr;
    shm_backend_ = std::make_unique<ops::shm::Backend>(*group_, shm);
  }
  // The hierarchy's stage is shared memory that carries no digests.
  if (options.config.hierarchy != core::HierarchyMode::kOff && !options.config.verify_transfers) {
    ops::HierarchyOptions hierarchy;
    hierarchy.rank = topology.rank;
    hierarchy.host_of_rank = topology.host_of_rank;
    hierarchy.shares = shares_;
    hierarchy.spin = options.spin;
    hierarchy.chunk_bytes = options.config.chunk_bytes;
    hierarchy.start_by = deadline;
    hierarchy_ = std::make_unique<ops::Hierarchy>(backend, std::move(hierarchy));
    if (Status all = hierarchy_->AddSet(core::kWorldSet, world); !all.ok()) return all;
  }
  selecting_ =
      std::make_unique<ops::BackendSelection>(backend, shm_backend_.get(), world, hierarchy_.get());
  one_host_ = topology.host_names.size() == 1;
  return Status::Ok();
}

std::string HostGroup::description() const {
  if (one_host_) return {};
  const bool by_hosts =
      hierarchy_ != nullptr && hierarchy_->Covers({core::kWorldSet, fusion::Lane::kLarge});
  return std::string("all-reduce between hosts: ") + (by_hosts ? "hierarchical" : "flat");
}

}  // namespace sirtaki::session
