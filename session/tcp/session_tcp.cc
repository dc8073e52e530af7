// Sessions over TCP: the composition of tcp/.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/hmac.h"
#include "core/base/log.h"
#include "core/machine/cgroup.h"
#include "core/trace/trace_files.h"
#include "session/base/medium.h"
#include "session/base/wire_parts.h"
#include "session/elastic/elastic_worker.h"
#include "session/session.h"
#include "tcp/meeting.h"
#include "tcp/place.h"
#include "tcp/port.h"
#include "tcp/transport.h"

namespace sirtaki::session {

using core::Status;
using core::StatusCode;

namespace {

std::string HostName() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "localhost";
}

class TcpMedium final : public Medium {
 public:
  TcpMedium(const tcp::Place& place, std::unique_ptr<tcp::Meeting> meeting)
      : place_(place), meeting_(std::move(meeting)) {
    topology_.rank = place.rank;
    topology_.size = place.size;
  }

  // Ranks share a host as those of MPI do: if they have the same name for it and run on the same
  // kernel.
  Status FindTopology(core::TimePoint deadline) {
    const std::string kernel = core::ReadFile("/proc/sys/kernel/random/boot_id").value_or("");
    std::vector<std::string> told;
    const std::string mine = std::to_string(place_.slot) + '\n' + HostName() + '\n' + kernel;
    Status status = meeting_->Exchange(mine, deadline, &told);
    if (!status.ok()) return status;
    std::map<std::string, int> lowest;
    std::vector<core::Place> places;
    for (const std::string& one : told) {
      const int rank = static_cast<int>(places.size());
      const std::string line = one.substr(one.find('\n') + 1);
      places.push_back({line.substr(0, line.find('\n')),
                        lowest.try_emplace(line, rank).first->second, std::atoi(one.c_str())});
    }
    topology_ = core::BuildTopology(place_.rank, places);
    return Status::Ok();
  }

  const Topology& topology() const override { return topology_; }
  std::string description() const override {
    const std::string own = "TCP, met at " + place_.address + ":" + std::to_string(place_.port);
    return parts_ ? parts_->Description(own) : own;
  }

  Status Exchange(const std::string& mine, core::TimePoint deadline,
                  std::vector<std::string>* all) override {
    return meeting_->Exchange(mine, deadline, all);
  }

  Status Connect(const ConnectOptions& options, core::TimePoint deadline) override {
    std::vector<std::string> hosts;
    for (const int host : topology_.host_of_rank) {
      hosts.push_back(topology_.host_names[static_cast<std::size_t>(host)]);
    }
    std::vector<tcp::Lines> lines;
    Status status = meeting_->Connect(hosts, deadline, &lines);
    if (!status.ok()) return status;
    std::vector<tcp::Line> control;
    std::vector<tcp::Line> urgent;
    std::vector<tcp::Line> bulk;
    for (tcp::Lines& one : lines) {
      control.push_back(std::move(one.control));
      urgent.push_back(std::move(one.urgent));
      bulk.push_back(std::move(one.bulk));
    }
    auto transport = std::make_unique<tcp::Transport>(topology_.rank, std::move(control), hosts);
    transport_ = transport.get();
    return WireParts::Make(
        *this, options, deadline, std::move(transport),
        std::make_unique<tcp::Port>(
            topology_.rank, std::move(urgent), std::move(bulk), hosts,
            tcp::Patience{options.config.ping_interval, options.config.peer_timeout}),
        &parts_);
  }

  void EndStart() override { meeting_.reset(); }

  core::Transport& transport() override { return parts_->transport(); }
  ops::Backends& backend() override { return parts_->backend(); }
  Status Meet(core::SetNumber set, const core::RankRanges& members, char mine,
              const std::function<Status()>& patience, std::string* all) override {
    return WireParts::Meet(parts_.get(), set, members, mine, patience, all);
  }
  std::function<Status()> PeerCheck() const override {
    return parts_ ? parts_->PeerCheck() : nullptr;
  }
  void NoteFault() override {}
  void NoteOrderlyEnd() override {
    if (parts_) transport_->SayFarewell();
  }
  Status BeforeEnd(std::function<void()> /*shutdown*/) override { return Status::Ok(); }

 private:
  // The parts are in the order in which they are made; the last ends first.
  const tcp::Place place_;
  std::unique_ptr<tcp::Meeting> meeting_;  // until the start is over
  Topology topology_;
  tcp::Transport* transport_ = nullptr;  // of the parts
  std::unique_ptr<WireParts> parts_;
};

}  // namespace

namespace {

Status CheckStart(const StartOptions& options) {
  core::ConfigureLog({options.config.log_level, options.config.log_time, {}});
  if (!options.communicator) return Status::Ok();
  return {
      StatusCode::kUnsupported,
      "init() was given a communicator, but the option medium is tcp: without MPI there is none"};
}

// The ranks of the place meet, and learn who is on which host.
Status MakeMedium(tcp::Place place, const StartOptions& options, tcp::MeetingTerms terms,
                  std::unique_ptr<Medium>* medium) {
  const core::TimePoint deadline = core::Clock::now() + options.config.start_timeout;
  if (terms.listens) {
    terms.listens = [&place, tell = std::move(terms.listens)](int port) {
      place.port = port;
      tell(port);
    };
  }
  std::unique_ptr<tcp::Meeting> meeting;
  Status status = tcp::Meeting::Begin(place, deadline, &meeting, std::move(terms));
  if (!status.ok()) return status;
  auto made = std::make_unique<TcpMedium>(place, std::move(meeting));
  status = made->FindTopology(deadline);
  if (!status.ok()) return status;
  const Topology& topology = made->topology();
  core::ConfigureLog(
      {options.config.log_level, options.config.log_time, {topology.rank, topology.host}});
  *medium = std::move(made);
  return Status::Ok();
}

// A start that has failed for such a reason may go well with other ranks.
bool MayPass(const Status& status) {
  constexpr std::array kCodes = {StatusCode::kPeerLost, StatusCode::kTimedOut, StatusCode::kAborted,
                                 StatusCode::kShutDown, StatusCode::kBackend};
  return std::ranges::find(kCodes, status.code()) != kCodes.end();
}

// Others that end while they come are mostly the reason, and a process is not told so. After that many in
// a row it is something else.
constexpr int kMostFailedStarts = 10;

}  // namespace

Status Session::CreateTcp(const StartOptions& options, std::shared_ptr<Session>* session) {
  if (Status status = CheckFork(); !status.ok()) return status;
  if (Status status = CheckStart(options); !status.ok()) return status;
  tcp::Place place;
  if (Status status = tcp::FindPlace(options.environment, &place); !status.ok()) return status;
  std::unique_ptr<Medium> medium;
  if (Status status = MakeMedium(place, options, {}, &medium); !status.ok()) return status;
  return Create(std::move(medium), options, /*is_process=*/true, session);
}

Status Session::CreateElastic(const StartOptions& options, std::shared_ptr<Session>* session) {
  if (Status status = CheckFork(); !status.ok()) return status;
  if (Status status = CheckStart(options); !status.ok()) return status;
  ElasticWorker& worker = ElasticWorker::OfProcess();
  std::string secret;
  Status status = tcp::FindSecret(options.environment, &secret);
  if (!status.ok()) return status;
  for (int failed = 0;;) {
    ElasticWorker::Place place;
    status = worker.Ask(options.environment, &place);
    if (!status.ok()) return status;
    // A worker that is in another generation, or comes too late to one, is a stranger.
    const std::string about = "generation:" + std::to_string(place.generation);
    const tcp::Place at{place.rank,
                        place.size,
                        place.address,
                        place.port,
                        core::HexText(core::HmacSha256(secret, about)),
                        place.slot};
    StartOptions own = options;
    own.config.timeline =
        core::trace::TimelineOfGeneration(options.config.timeline, place.generation);
    own.config.metrics_file =
        core::trace::MetricsOfGeneration(options.config.metrics_file, place.generation);
    std::unique_ptr<Medium> medium;
    status = MakeMedium(
        at, own,
        {[&worker](int port) { worker.TellListens(port); }, [&worker] { return worker.WhyOver(); }},
        &medium);
    if (status.ok()) status = Create(std::move(medium), own, /*is_process=*/true, session);
    if (status.ok()) {
      worker.Enter(*session);
      return status;
    }
    if (!MayPass(status)) return status;
    if (worker.WhyOver().empty() && ++failed == kMostFailedStarts) return status;
    SIRTAKI_LOG(kInfo, about + " did not begin here: " + status.ToString());
    worker.NoteFailedStart(status);
  }
}

}  // namespace sirtaki::session
