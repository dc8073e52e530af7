#include "launch/elastic/elastic_job.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/rank_ranges.h"
#include "core/base/text.h"
#include "core/machine/elastic_notice.h"
#include "launch/base/loop.h"
#include "launch/base/rank_messages.h"
#include "launch/elastic/discovery.h"
#include "launch/elastic/elastic_options.h"
#include "launch/elastic/job_news.h"
#include "launch/elastic/membership_texts.h"
#include "launch/elastic/starters.h"
#include "launch/job/connections.h"
#include "launch/job/course.h"
#include "launch/job/failure_judgement.h"
#include "launch/job/job_output.h"
#include "launch/job/leftovers.h"
#include "launch/plan/routes.h"

namespace sirtaki::launch {

using core::Clock;
using core::ElasticNotice;
using core::Status;
using core::StatusCode;
using core::TimePoint;
using Kind = core::ElasticNotice::Kind;

namespace {

// Connections that have not proven that they are workers'.
constexpr std::size_t kMostGreeters = 256;
// The time for workers to end when they are told to: they kill their programs after 3 s.
constexpr auto kEndTime = std::chrono::seconds(6);

class ElasticJob {
 public:
  ElasticJob(const Plan& plan, const LaunchOptions& options, const ThisMachine& machine,
             const core::EnvironmentView& env, const ElasticLimits& limits)
      : plan_(plan),
        options_(options),
        machine_(machine),
        env_(env),
        membership_(limits),
        connections_(
            &loop_, kMostGreeters,
            [this](Connection* from, const RankMessage& message) { return Take(from, message); },
            [this](Connection* connection, const Status& why) { Drop(connection, why); }),
        output_(&loop_),
        news_(options, env, &output_),
        discovery_(&loop_, options.host_discovery_script, options.slots_per_host,
                   std::chrono::seconds(options.discovery_interval),
                   [this](const std::string& text) { news_.Say(text); }),
        starters_(&loop_, &output_, plan, machine) {}

  Status Start() {
    RaiseFileLimit();
    Status status = output_.Open(options_, 0, /*again=*/false, env_);
    if (!status.ok()) return status;
    loop_.TakeSignals(Loop::UserSignals::kTaken, [this](int signal) { TakeSignal(signal); });
    variables_ = plan_.environment;
    status = connections_.OpenFor(plan_, plan_.placement.local, &variables_);
    if (std::string folder = CurrentFolder(); !folder.empty())
      variables_.emplace_back(kFolderVariable, std::move(folder));
    membership_.TakeHosts(SlotsOfEach(plan_.placement.hosts), Clock::now());
    return status;
  }

  int Run() {
    for (Settle(); !IsOver(); Settle()) loop_.Run(NextTime());
    EndOrphans("ssh");
    if (!why_.empty()) news_.Say(why_);
    output_.WriteLast(signalled_at_ ? Clock::now() + std::chrono::seconds(1) : TimePoint::max());
    return code_ == 0 && output_.failed() ? 1 : code_;
  }

 private:
  struct Worker {
    std::string host;  // as it is listed
    Connection* connection = nullptr;
    HelloMessage hello;
    std::string address;  // by which its host reached us
    bool doomed = false;  // it is to be killed as soon as it comes
  };

  // A reader who takes his time gets what workers have said, unless somebody wants an end.
  bool waits_for_reader() const { return is_ending() && workers_.empty() && !signalled_at_; }
  bool IsOver() const {
    if (!is_ending()) return false;
    const bool all_ended = workers_.empty() && !output_.HasWaiting(Stream::kOutput) &&
                           !output_.HasWaiting(Stream::kError);
    return all_ended || (!waits_for_reader() && Clock::now() >= end_by_);
  }
  TimePoint NextTime() const {
    const TimePoint next = connections_.NextTime();
    if (waits_for_reader()) return next;
    if (is_ending()) return std::min(next, end_by_);
    return std::min({next, membership_.NextTime(), discovery_.NextTime(), news_.NextTime()});
  }
  bool is_ending() const { return end_by_ != TimePoint::max(); }

  void Settle() {
    const TimePoint now = Clock::now();
    if (!is_ending()) {
      discovery_.CheckTimes(now);
      for (auto orders = membership_.TakeOrders(now); !orders.empty();
           orders = membership_.TakeOrders(now)) {
        CarryOut(std::move(orders));
      }
    }
    if (is_ending()) {
      news_.TellWaits({}, {}, now);
    } else {
      news_.TellWaits(membership_.WaitsFor(), membership_.HostsLeftOut(now), now);
    }
    for (const auto& [worker, bytes] : output_.TakeWritten()) Send(worker, WrittenMessage{bytes});
    connections_.CheckTimes(now);
    output_.WriteWhenReady();
    starters_.Ask();
  }

  // ---- orders ----

  void CarryOut(std::vector<ElasticOrder> orders) {
    // Workers that follow each other on one host are started together.
    std::vector<StartWorker> together;
    const auto start = [&] {
      if (!together.empty()) StartTogether(together);
      together.clear();
    };
    for (const ElasticOrder& order : orders) {
      const auto* const one = std::get_if<StartWorker>(&order);
      const bool follows = one != nullptr && !together.empty() &&
                           together.back().host == one->host &&
                           together.back().worker + 1 == one->worker;
      if (!follows) start();
      if (one != nullptr) {
        together.push_back(*one);
      } else {
        std::visit([this](const auto& other) { Do(other); }, order);
      }
    }
    start();
  }

  void StartTogether(const std::vector<StartWorker>& orders) {
    const std::string& host = orders.front().host;
    for (const StartWorker& order : orders) {
      workers_[order.worker].host = host;
      const Status added = output_.AddRank();
      if (!added.ok() && membership_.generation() == 0) return End(2, added.message());
      if (!added.ok()) news_.Say(added.message());
    }
    const Starters::Batch batch{orders.front().worker, static_cast<int>(orders.size())};
    // The first ones are told with their generation.
    if (membership_.generation() > 0) {
      const auto numbers = core::RankRanges::Span(batch.first, batch.first + batch.count - 1);
      news_.Say("host " + host + ": " +
                (batch.count == 1 ? "starting worker " : "starting workers ") + numbers.ToString());
    }
    const Status status = starters_.Start(host, batch, variables_);
    if (!status.ok()) NoteNotStarted(batch, status.message());
  }

  void Do(const StartWorker& /*order*/) {}  // see CarryOut
  void Do(const EndWorker& order) {
    Worker& worker = workers_[order.worker];
    worker.doomed = true;
    news_.TellLeft({order.worker, worker.host}, "is ended: " + order.why, Clock::now());
    Send(order.worker, SignalMessage{SIGKILL});
    if (worker.connection == nullptr) EndStarterOf(order.worker);
  }
  // What starts it may hang, as an ssh to a host whose file system does not answer.
  void EndStarterOf(WorkerId id) {
    starters_.Kill(id, [this](WorkerId other) {
      const auto found = workers_.find(other);
      return found != workers_.end() && !found->second.doomed;
    });
  }
  void Do(const AnnounceChange& order) {
    news_.Say("generation " + std::to_string(order.generation) + " is to change: " + order.why);
    change_ = order;
    core::RankRanges leaving;
    for (std::size_t rank = 0; rank < members_.size(); ++rank) {
      const auto at = std::ranges::find(order.leaving, members_[rank].worker);
      if (at != order.leaving.end()) leaving.Add(static_cast<int>(rank));
    }
    for (const WorkerId member : membership_.Members()) {
      Tell(member, {.kind = Kind::kChange,
                    .generation = order.generation,
                    .text = order.why,
                    .ranks = leaving});
    }
  }
  void Do(const EndGeneration& order) {
    news_.TellOver(order.generation, order.why, Clock::now());
    // Members that have no place yet ask all the while, and have nothing to leave.
    const auto waiting = std::exchange(beginning_, {}).members;
    for (const WorkerId member : order.to) {
      const auto at = std::ranges::find(waiting, member);
      if (at == waiting.end() || at == waiting.begin()) {
        Tell(member, {.kind = Kind::kOver, .generation = order.generation, .text = order.why});
      } else {
        membership_.NoteReady(member, order.generation, {}, Clock::now());
      }
    }
  }
  void Do(const BeginGeneration& order) {
    members_.clear();
    for (const WorkerId id : order.members) members_.push_back({id, workers_.at(id).host});
    news_.TellDecided(order.generation, members_, Clock::now());
    left_to_join_ = left_to_train_ = order.members.size();
    beginning_ = order;
    const int size = static_cast<int>(order.members.size());
    Tell(order.members.front(), {.kind = Kind::kPlace,
                                 .generation = order.generation,
                                 .size = size,
                                 .text = AddressOfFirst(order.members),
                                 .ranks = {order.slots.front()}});
  }
  void Do(const EndJob& order) { End(order.code, order.why); }

  // Where the others reach rank 0: if it is on this machine, where one of them has reached us.
  std::string AddressOfFirst(const std::vector<WorkerId>& members) const {
    const Worker& first = workers_.at(members.front());
    if (!IsThisMachine(first.host, machine_)) return first.address;
    for (const WorkerId member : members) {
      const auto found = workers_.find(member);  // it may have ended meanwhile
      if (found == workers_.end() || found->second.connection == nullptr) continue;
      if (IsThisMachine(found->second.host, machine_)) continue;
      const std::string own = found->second.connection->link.own_end();
      return own.substr(0, own.rfind(':'));
    }
    return first.address;
  }

  // ---- what workers say ----

  // False if the message does not come from a worker of ours.
  bool Take(Connection* connection, const RankMessage& message) {
    if (const auto* hello = std::get_if<HelloMessage>(&message)) return Greet(connection, *hello);
    const WorkerId worker = connection->rank;
    if (worker < 0 || !workers_.contains(worker)) return false;
    if (const auto* output = std::get_if<OutputMessage>(&message)) {
      output_.Append(worker, output->stream, output->bytes);
    } else if (const auto* end = std::get_if<EndMessage>(&message)) {
      const bool well = end->kind == EndKind::kExited && end->value == 0;
      int code = 0;
      const std::string how = news_.HowItEnded({worker, workers_.at(worker).host}, *end, &code);
      NoteEnd(worker, well ? WorkerEnd::kFinished : WorkerEnd::kFailed, how, code);
    } else if (const auto* elastic = std::get_if<ElasticMessage>(&message)) {
      const auto notice = core::DecodeElasticNotice(elastic->notice);
      if (!notice) return false;
      Hear(worker, *notice);
    }
    return true;
  }

  bool Greet(Connection* connection, const HelloMessage& hello) {
    const auto found = workers_.find(hello.rank);
    if (connection->rank >= 0 || found == workers_.end() || found->second.connection != nullptr) {
      return false;
    }
    connection->rank = hello.rank;
    Worker& worker = found->second;
    worker.connection = connection;
    worker.hello = hello;
    worker.address = connection->link.other_address();
    if (is_ending()) {
      Send(hello.rank, StopMessage{});
    } else if (worker.doomed) {
      Send(hello.rank, SignalMessage{SIGKILL});
    } else {
      const auto host = std::ranges::find(plan_.placement.hosts, worker.host, &Host::name);
      const bool is_listed = host != plan_.placement.hosts.end();
      Send(hello.rank, GoMessage{"", 0, is_listed ? DevicesText(*host) : ""});
    }
    return true;
  }

  void Hear(WorkerId worker, const ElasticNotice& notice) {
    const TimePoint now = Clock::now();
    switch (notice.kind) {
      case Kind::kAsks:
        return TakeAsking(worker, notice, now);
      case Kind::kListens:
        return TellPlaces(worker, notice);
      case Kind::kJoined:
        membership_.NoteJoined(worker, notice.generation);
        if (notice.generation == membership_.generation() && --left_to_join_ == 0) {
          news_.TellJoined(notice.generation, now);
        }
        return;
      case Kind::kHasHeard:
        return membership_.NoteHeard(worker, notice.generation, Membership::Heard::kOver);
      case Kind::kIsStopped:
        return membership_.NoteStopped(worker, notice.generation);
      case Kind::kKnows:
        return membership_.NoteHeard(worker, notice.generation, Membership::Heard::kChange);
      case Kind::kHasState:
        membership_.NoteState(worker);
        if (notice.generation == membership_.generation() && --left_to_train_ == 0) {
          const WorkerId newest = MemberOf(notice.rank - 1).value_or(members_[0].worker);
          news_.TellTrains(notice.generation, newest, now);
        }
        return;
      case Kind::kCannotGoOn:
        return membership_.NoteCannotGoOn(worker, notice.generation, notice.text,
                                          MemberOf(notice.rank - 1), now);
      case Kind::kPlace:
      case Kind::kOver:
      case Kind::kChange:
        return;  // no program says so
    }
  }

  void TakeAsking(WorkerId worker, const ElasticNotice& notice, TimePoint now) {
    const bool leaves = notice.generation > 0 && notice.generation == membership_.generation();
    std::vector<WorkerId> suspects;
    for (std::size_t rank = 0; leaves && rank < members_.size(); ++rank) {
      if (notice.ranks.Contains(static_cast<int>(rank))) suspects.push_back(members_[rank].worker);
    }
    if (leaves) {
      news_.NoteFailure(now);
      // With no text nothing has failed, or its program alone knows what.
      if (!notice.text.empty()) {
        news_.TellOver(notice.generation, FailureName(worker, notice) + ": " + notice.text, now);
      } else if (change_.generation == notice.generation) {  // the first that leaves for it
        news_.NoteOver(notice.generation, std::exchange(change_, {}).why, now);
      }
    }
    membership_.NoteReady(worker, notice.generation, suspects, now, leaves && !notice.text.empty());
  }

  std::optional<WorkerId> MemberOf(int rank) const {
    if (rank < 0 || rank >= std::ssize(members_)) return std::nullopt;
    return members_[static_cast<std::size_t>(rank)].worker;
  }

  // The worker with which the failure began, as far as the one that asks knows.
  std::string FailureName(WorkerId asking, const ElasticNotice& notice) const {
    const std::string name = NameOf(asking, workers_.at(asking).host);
    const bool has_lost = !notice.ranks.empty();
    const auto rank = static_cast<std::size_t>(has_lost ? notice.ranks.First() : notice.rank - 1);
    if (rank >= members_.size()) return name;  // also where none is named
    const std::string other = NameOf(members_[rank].worker, members_[rank].host);
    return has_lost ? name + " has lost " + other : other;
  }

  void TellPlaces(WorkerId worker, const ElasticNotice& notice) {
    if (notice.generation != beginning_.generation || beginning_.members.empty() ||
        worker != beginning_.members.front()) {
      return;
    }
    const auto members = std::exchange(beginning_.members, {});
    const std::string address = AddressOfFirst(members);
    for (std::size_t rank = 1; rank < members.size(); ++rank) {
      Tell(members[rank], {.kind = Kind::kPlace,
                           .generation = notice.generation,
                           .rank = static_cast<int>(rank),
                           .size = static_cast<int>(members.size()),
                           .port = notice.port,
                           .text = address,
                           .ranks = {beginning_.slots[rank]}});
    }
  }

  void Drop(Connection* connection, const Status& why) {
    const auto found = workers_.find(connection->rank);
    if (found == workers_.end() || found->second.connection != connection) return;
    const char* const closed =
        "its connection has closed: sirtakirun's process there was killed, or the host has gone "
        "down";
    NoteEnd(connection->rank, WorkerEnd::kLost, why.ok() ? closed : why.message());
  }

  void NoteEnd(WorkerId id, WorkerEnd how, const std::string& why, int code = 1) {
    const auto found = workers_.find(id);
    if (found == workers_.end()) return;
    output_.Finish(id);
    if (!is_ending() && how != WorkerEnd::kFinished && !found->second.doomed) {
      news_.TellLeft({id, found->second.host}, (how == WorkerEnd::kLost ? "is lost: " : "") + why,
                     Clock::now());
    }
    workers_.erase(found);
    membership_.NoteEnd(id, how, why, Clock::now(), code);
  }

  void NoteNotStarted(const Starters::Batch& batch, const std::string& why) {
    for (WorkerId id = batch.first; id < batch.first + batch.count; ++id) {
      const auto found = workers_.find(id);
      if (found == workers_.end() || found->second.connection != nullptr) continue;
      NoteEnd(id, WorkerEnd::kFailed, why);
    }
  }

  // ---- this process ----

  void TakeSignal(int signal) {
    if (signal == SIGCHLD) return CheckChildren();
    if (signal == SIGUSR1 || signal == SIGUSR2) {
      for (const auto& [id, worker] : workers_) Send(id, SignalMessage{signal});
      return;
    }
    const TimePoint now = Clock::now();
    if (signalled_at_ && now < *signalled_at_ + kAskedOnce) return;
    if (!signalled_at_) signalled_at_ = now;
    if (is_ending()) {
      end_by_ = now;
      return output_.Discard();
    }
    End(128 + signal, "ended by " + SignalName(signal));
  }

  void CheckChildren() {
    if (const auto hosts = discovery_.TakeHosts(Clock::now()); hosts && !is_ending()) {
      if (hosts->empty() && std::exchange(has_hosts_, false)) {
        news_.Say(
            "--host-discovery-script names no host any more: the workers stay until it names "
            "others, and none is started");
      }
      has_hosts_ = !hosts->empty();
      membership_.TakeHosts(SlotsOfEach(*hosts), Clock::now());
    }
    for (const auto& [batch, end] : starters_.TakeEnded()) {
      NoteNotStarted(batch, "was not started: what starts it " + EndText(end));
    }
  }

  void End(int code, const std::string& why) {
    if (is_ending()) return;
    code_ = code;
    why_ = why;
    news_.NoteEnd(membership_.generation(), why, Clock::now());
    end_by_ = Clock::now() + kEndTime;
    AdoptOrphans();
    output_.FinishLauncher();
    for (const auto& [id, worker] : workers_) Send(id, StopMessage{});
    // Workers that have not come yet are not going to.
    std::erase_if(workers_, [](const auto& one) { return one.second.connection == nullptr; });
  }

  void Tell(WorkerId worker, const ElasticNotice& notice) {
    Send(worker, ElasticMessage{core::Encode(notice)});
  }
  void Send(WorkerId id, const RankMessage& message) {
    const auto found = workers_.find(id);
    if (found == workers_.end() || found->second.connection == nullptr) return;
    found->second.connection->link.Send(Encode(message));
  }

  const Plan& plan_;
  const LaunchOptions& options_;
  const ThisMachine& machine_;
  const core::EnvironmentView& env_;
  Loop loop_;
  Membership membership_;
  std::vector<std::pair<std::string, std::string>> variables_;  // for what starts workers
  std::map<WorkerId, Worker> workers_;
  std::vector<Generation::Member> members_;  // of the generation, by rank
  std::size_t left_to_join_ = 0;
  std::size_t left_to_train_ = 0;
  AnnounceChange change_;      // the last, until a worker leaves for it
  BeginGeneration beginning_;  // the generation whose rank 0 has to say where it listens
  Connections connections_;
  JobOutput output_;
  JobNews news_;
  Discovery discovery_;
  Starters starters_;
  TimePoint end_by_ = TimePoint::max();  // max: the job goes on
  bool has_hosts_ = true;                // the script has named some
  std::optional<TimePoint> signalled_at_;
  int code_ = 0;
  std::string why_;
};

}  // namespace

int RunElasticJob(const Plan& plan, const LaunchOptions& options, const ThisMachine& machine,
                  const core::EnvironmentView& env, const ElasticLimits& limits) {
  ElasticJob job(plan, options, machine, env, limits);
  const Status status = job.Start();
  if (!status.ok()) {
    std::fprintf(stderr, "sirtakirun: %s\n", status.message().c_str());
    return 2;
  }
  return job.Run();
}

}  // namespace sirtaki::launch
