// Engines of several ranks in one process, in rounds, on a clock that the test moves: nothing here
// sleeps or runs on its own.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/engine/engine.h"
#include "core/protocol/inproc_hub.h"
#include "core/protocol/tree.h"

namespace sirtaki::core {

// Completes everything when told to, or at once.
class FakeExecutor final : public Executor {
 public:
  void Start(RunBatch batch, TimePoint now) override {
    for (RunItem& item : batch.items) {
      started.push_back(item.key.ToString());
      planned_by.push_back(batch.limits.fusion_bytes);
      since = now;
      running.push_back(std::move(item));
    }
    if (at_once) Finish();
  }
  void AddSet(SetNumber set, const RankRanges&, WorkPtr work, TimePoint) override {
    added.push_back(set);
    if (work) work->handle->Complete(Status::Ok());
  }
  void RemoveSet(SetNumber set, WorkPtr work, TimePoint) override {
    removed.push_back(set);
    if (work) work->handle->Complete(Status::Ok());
  }
  void StartP2p(WorkPtr work, TimePoint) override { messages.push_back(std::move(work)); }
  bool Step() override { return false; }
  bool NeedsStepping() const override { return needs_stepping && !running.empty(); }
  bool NeedsPolling() const override { return NeedsStepping() && !rings; }
  bool Idle() const override { return is_idle ? is_idle() : running.empty(); }
  std::vector<RunningOperation> Running() const override {
    std::vector<RunningOperation> result;
    for (const RunItem& item : running)
      result.push_back({item.key.set, item.key.ToString(), since});
    return result;
  }
  void Abandon(const Status& why) override {
    if (on_abandon) on_abandon();
    abandoned = why;
    for (const RunItem& item : running) {
      if (item.work) item.work->handle->Complete(why);
    }
    running.clear();
  }

  void Finish() {
    for (const RunItem& item : running) {
      if (item.work) item.work->handle->Complete(Status::Ok());
    }
    running.clear();
  }

  bool at_once = true;
  std::function<bool()> is_idle;  // instead of what runs
  std::function<void()> on_abandon;
  bool needs_stepping = false;
  bool rings = false;
  TimePoint since{};
  std::vector<SetNumber> added;
  std::vector<SetNumber> removed;
  std::vector<WorkPtr> messages;
  std::vector<RunItem> running;
  std::vector<std::string> started;
  std::vector<std::int64_t> planned_by;
  Status abandoned;
};

// The transport is silent as MPI: an arrival rings nothing.
class SilentTransport final : public Transport {
 public:
  explicit SilentTransport(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}
  void Send(int rank, Bytes bytes) override { inner_->Send(rank, std::move(bytes)); }
  std::optional<Incoming> TryReceive() override {
    if (before_receive) before_receive();
    return inner_->TryReceive();
  }
  bool Flush() override { return flushed; }
  Status health() const override { return inner_->health(); }
  std::uint64_t ArmDoorbell() override { return inner_->ArmDoorbell(); }
  bool WaitUntil(std::uint64_t ticket, TimePoint deadline) override {
    return inner_->WaitUntil(ticket, deadline);
  }
  void Wake() override { inner_->Wake(); }
  bool ArrivalsRing() const override { return rings; }

  bool rings = true;
  bool flushed = true;
  std::function<void()> before_receive;

 private:
  std::unique_ptr<Transport> inner_;
};

struct Rank {
  std::unique_ptr<SilentTransport> transport;
  std::unique_ptr<Negotiator> negotiator;
  TensorQueue queue;
  FakeExecutor executor;
  std::unique_ptr<Engine> engine;
  std::vector<Status> faults_heard;
  trace::ObserverPtr observer;
  std::function<void()> on_start;
  std::function<void()> on_fault;
  std::uint64_t step = 1;
  Status peers;  // what a look at the others' processes finds
  int looks = 0;
};

class World {
 public:
  // Each rank is a host of its own, so that arity 1 makes a chain 0 - 1 - 2. With a limit time is
  // real: the engines may have threads.
  explicit World(int size, int arity = 8, Duration stuck_limit = {}, bool observed = false,
                 Duration sits_after = {})
      : hub(size) {
    std::vector<int> hosts;
    for (int rank = 0; rank < size; ++rank) hosts.push_back(rank);
    const Tree tree(hosts, arity);
    for (int rank = 0; rank < size; ++rank) {
      ranks.push_back(std::make_unique<Rank>());
      Rank& r = *ranks.back();
      r.transport = std::make_unique<SilentTransport>(hub.Connect(rank));
      NegotiatorOptions negotiation;
      negotiation.rank = rank;
      negotiation.host = "host" + std::to_string(rank);
      negotiation.sets = {{kWorldSet, RankRanges::Span(0, size - 1)}};
      r.negotiator = std::make_unique<Negotiator>(std::move(negotiation), tree);
      EngineOptions options;
      options.session = 7;
      options.rank = rank;
      options.host = "host" + std::to_string(rank);
      options.stuck_limit = stuck_limit;
      options.sits_after = sits_after;
      if (stuck_limit == Duration::zero()) options.now = [this] { return now; };
      if (observed) r.observer = std::make_shared<trace::Observer>();
      options.observer = r.observer;
      options.on_start = [&r](const RunBatch&) {
        if (r.on_start) r.on_start();
      };
      options.step = [&r] { return r.step; };
      options.check_peers = [&r] {
        ++r.looks;
        return r.peers;
      };
      options.in_words = [](const std::string& text) {
        const std::size_t at = text.find("bucket 3 of arena 1");
        return at == std::string::npos ? text : std::string(text).replace(at, 19, "\"c.bias\"");
      };
      options.on_fault = [&r](const Status& cause) {
        r.faults_heard.push_back(cause);
        if (r.on_fault) r.on_fault();
      };
      r.engine = std::make_unique<Engine>(std::move(options), *r.transport, *r.negotiator, r.queue,
                                          r.executor);
    }
  }

  Rank& operator[](int rank) { return *ranks[static_cast<std::size_t>(rank)]; }

  // Rounds on all ranks until nothing moves any more.
  void Settle() {
    for (int i = 0; i < 1000; ++i) {
      bool moved = false;
      for (const auto& rank : ranks) moved |= rank->engine->RunOnce();
      if (!moved) return;
    }
    FAIL() << "the ranks do not come to rest";
  }

  WorkPtr Submit(int rank, const std::string& name, std::int64_t elements = 4,
                 Duration timeout = Duration::max()) {
    auto signature = std::make_shared<Signature>();
    signature->shape = {elements};
    auto work = std::make_shared<Work>();
    work->request = {Key::Named(kWorldSet, name), std::move(signature), {}, {}};
    if (timeout != Duration::max()) work->deadline = now + timeout;
    const Status accepted = (*this)[rank].engine->Submit(work, false);
    EXPECT_TRUE(accepted.ok()) << accepted.ToString();
    return work;
  }

  TimePoint now{std::chrono::seconds(1000)};
  InprocHub hub;
  std::vector<std::unique_ptr<Rank>> ranks;
};

}  // namespace sirtaki::core
