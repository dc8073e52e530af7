#include "session/inproc/inproc_world.h"

#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "core/base/rank_ranges.h"
#include "core/base/thread_annotations.h"
#include "ops/inproc/inproc_backend.h"
#include "session/base/host_group_setup.h"
#include "session/base/process_pool.h"

namespace sirtaki::session {

using core::Status;

namespace {

Topology TopologyOf(int rank, const std::vector<int>& host_of_rank) {
  std::vector<core::Place> places;
  std::map<int, int> lowest;  // rank by host
  for (std::size_t other = 0; other < host_of_rank.size(); ++other) {
    const int host = host_of_rank[other];
    const int first = lowest.try_emplace(host, static_cast<int>(other)).first->second;
    places.push_back({"inproc" + std::to_string(host), first});
  }
  return core::BuildTopology(rank, places);
}

}  // namespace

// Where the ranks exchange strings, and what they share, by the number of the session.
struct InprocWorld::Meetings {
  struct Table {
    std::vector<std::optional<std::string>> told;
    int left = 0;  // ranks that have read it
  };

  core::Mutex mutex;
  core::CondVar changed;
  std::vector<int> sessions SIRTAKI_GUARDED_BY(mutex);  // begun, by rank
  Sharing sharing SIRTAKI_GUARDED_BY(mutex) = Sharing::kNone;
  std::map<std::pair<int, int>, Table> tables SIRTAKI_GUARDED_BY(mutex);  // by session and step
  std::map<int, std::weak_ptr<ops::InprocWorld>> data SIRTAKI_GUARDED_BY(mutex);  // by session
};

class InprocWorld::InprocMedium final : public Medium {
 public:
  InprocMedium(std::shared_ptr<InprocWorld> world, int rank, int session, Sharing sharing,
               std::shared_ptr<ops::InprocWorld> data)
      : world_(std::move(world)),
        data_(std::move(data)),
        session_(session),
        sharing_(sharing),
        topology_(TopologyOf(rank, world_->host_of_rank_)) {}

  const Topology& topology() const override { return topology_; }
  std::string description() const override {
    const std::string shared = shared_ ? shared_->description() : "";
    return "in-process" + (shared.empty() ? "" : "; " + shared);
  }

  Status Exchange(const std::string& mine, core::TimePoint deadline,
                  std::vector<std::string>* all) override {
    Meetings& meetings = *world_->meetings_;
    const std::pair<int, int> place{session_, step_++};
    core::MutexLock lock(meetings.mutex);
    Meetings::Table& table = meetings.tables[place];
    table.told.resize(static_cast<std::size_t>(topology_.size));
    table.told[static_cast<std::size_t>(topology_.rank)] = mine;
    meetings.changed.NotifyAll();
    core::RankRanges missing;
    do {
      missing.Clear();
      for (int rank = 0; rank < topology_.size; ++rank) {
        if (!table.told[static_cast<std::size_t>(rank)]) missing.Add(rank);
      }
    } while (!missing.empty() && meetings.changed.WaitUntil(meetings.mutex, deadline));
    if (!missing.empty()) {
      return {core::StatusCode::kTimedOut,
              "not every rank has started in time; missing: " + missing.ToString()};
    }
    all->clear();
    for (const std::optional<std::string>& told : table.told) all->push_back(*told);
    if (++table.left == topology_.size) meetings.tables.erase(place);
    return Status::Ok();
  }

  Status Connect(const ConnectOptions& options, core::TimePoint deadline) override {
    transport_ = world_->hub_.Connect(topology_.rank);
    backend_ = data_->Connect(topology_.rank);
    if (sharing_ == Sharing::kNone) return Status::Ok();
    ops::shm::LocalGroupOptions group;
    group.rank = topology_.rank;
    group.threads_share_all = sharing_ == Sharing::kDirect;
    if (sharing_ == Sharing::kPooled)
      group.pool = PoolOfProcess(options.config, topology_.local_size);
    Status status = HostGroup::Meet(*this, options, deadline, std::move(group), &shared_);
    if (!status.ok()) return status;
    return shared_->Assemble(topology_, options, deadline, *transport_, *backend_);
  }

  core::Transport& transport() override { return shared_ ? shared_->transport() : *transport_; }
  ops::Backends& backend() override {
    if (shared_) return shared_->backend();
    return *backend_;
  }
  std::function<Status()> PeerCheck() const override {
    return shared_ ? shared_->PeerCheck() : nullptr;
  }
  void NoteFault() override {}
  void NoteOrderlyEnd() override {}
  Status BeforeEnd(std::function<void()> /*shutdown*/) override { return Status::Ok(); }

 private:
  const std::shared_ptr<InprocWorld> world_;
  const std::shared_ptr<ops::InprocWorld> data_;
  const int session_;
  const Sharing sharing_;
  int step_ = 0;
  const Topology topology_;
  std::unique_ptr<core::Transport> transport_;
  std::unique_ptr<ops::Backend> backend_;
  std::unique_ptr<HostGroup> shared_;
};

InprocWorld::InprocWorld(int size, std::vector<int> host_of_rank)
    : hub_(size),
      host_of_rank_(host_of_rank.empty() ? std::vector<int>(static_cast<std::size_t>(size), 0)
                                         : std::move(host_of_rank)),
      meetings_(std::make_unique<Meetings>()) {
  core::MutexLock lock(meetings_->mutex);
  meetings_->sessions.resize(static_cast<std::size_t>(size));
}

InprocWorld::~InprocWorld() = default;

void InprocWorld::Share(Sharing sharing) {
  core::MutexLock lock(meetings_->mutex);
  meetings_->sharing = sharing;
}

std::unique_ptr<Medium> InprocWorld::Join(int rank) {
  core::MutexLock lock(meetings_->mutex);
  const int session = meetings_->sessions[static_cast<std::size_t>(rank)]++;
  std::weak_ptr<ops::InprocWorld>& shared = meetings_->data[session];
  std::shared_ptr<ops::InprocWorld> data = shared.lock();
  if (!data) {
    shared = data = std::make_shared<ops::InprocWorld>(
        size(), ops::wire::WireOptions{.host_of_rank = host_of_rank_});
  }
  return std::make_unique<InprocMedium>(shared_from_this(), rank, session, meetings_->sharing,
                                        std::move(data));
}

}  // namespace sirtaki::session
