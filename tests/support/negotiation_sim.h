// N negotiators on one thread, joined by FIFO links that the test empties in the order it likes, on
// a clock that it moves. Messages pass through the wire format. No engine, no collectives: what a
// rank would execute is written down.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/protocol/negotiator.h"
#include "core/protocol/wire.h"

namespace sirtaki::tests {

struct SimOptions {
  std::vector<int> host_of_rank{0, 0};
  int arity = 8;
  std::map<core::SetNumber, core::RankRanges> sets;  // besides the world
  core::NegotiatorOptions negotiator;                // rank and sets are filled in
};

class NegotiationSim {
 public:
  using Link = std::pair<int, int>;  // from, to

  explicit NegotiationSim(SimOptions options)
      : options_(std::move(options)), tree_(options_.host_of_rank, options_.arity) {
    options_.sets[core::kWorldSet] = core::RankRanges::Span(0, size() - 1);
    for (int rank = 0; rank < size(); ++rank) {
      core::NegotiatorOptions own = options_.negotiator;
      own.rank = rank;
      own.host = "host" + std::to_string(options_.host_of_rank[static_cast<std::size_t>(rank)]);
      own.sets = options_.sets;
      own.activity = [rank] { return "activity of rank " + std::to_string(rank); };
      own.waits_for = [this, rank] {
        const auto found = waits_for.find(rank);
        return found == waits_for.end() ? std::nullopt : std::optional<core::Key>(found->second);
      };
      own.unix_us = [this] {
        return std::chrono::duration_cast<std::chrono::microseconds>(now_.time_since_epoch())
            .count();
      };
      nodes_.push_back(std::make_unique<core::Negotiator>(std::move(own), tree_));
      local_.emplace_back();
    }
  }

  int size() const { return static_cast<int>(options_.host_of_rank.size()); }
  core::Negotiator& node(int rank) { return *nodes_[static_cast<std::size_t>(rank)]; }
  core::Negotiator::LocalState& local(int rank) { return local_[static_cast<std::size_t>(rank)]; }
  const core::Tree& tree() const { return tree_; }
  const std::map<core::SetNumber, core::RankRanges>& sets() const { return options_.sets; }
  core::TimePoint now() const { return now_; }
  void Advance(core::Duration by) { now_ += by; }

  // Called for each batch a rank takes, each message put on a link, and each warning.
  std::function<void(int rank, const core::DecidedBatch&)> on_batch = [](int, const auto&) {};
  std::function<void(int from, int to, const core::MessageBody&)> on_send = [](int, int,
                                                                               const auto&) {};
  std::function<void(int rank, const core::StallWarning&)> on_warning = [](int, const auto&) {};

  // The key that a rank waits for, submitting nothing else.
  std::map<int, core::Key> waits_for;

  // A stopped rank neither steps nor receives.
  void Stop(int rank) { stopped_.insert(rank); }
  bool stopped(int rank) const { return stopped_.contains(rank); }

  // One round of the engine of this rank, without receiving.
  void Pump(int rank) {
    if (stopped(rank)) return;
    core::Negotiator& n = node(rank);
    n.Step(local(rank), now_);
    core::Negotiator::Ready ready = n.TakeReady();
    for (const core::DecidedBatch& batch : ready.batches) on_batch(rank, batch);
    for (core::Outgoing& out : ready.outgoing) {
      on_send(rank, out.to, out.body);
      links_[{rank, out.to}].push_back(core::Encode({1, std::move(out.body)}));
      ++messages_;
    }
    for (const core::StallWarning& warning : ready.warnings) on_warning(rank, warning);
  }

  std::vector<Link> BusyLinks() const {
    std::vector<Link> busy;
    for (const auto& [link, queue] : links_) {
      if (!queue.empty() && !stopped(link.second)) busy.push_back(link);
    }
    return busy;
  }

  // Takes the first message of a link to its end and pumps there.
  void Deliver(const Link& link) {
    core::Bytes bytes = std::move(links_.at(link).front());
    links_.at(link).pop_front();
    core::Message message;
    const core::Status status = core::Decode(bytes, &message);
    if (!status.ok()) throw std::runtime_error("the wire format: " + status.ToString());
    node(link.second).Receive(link.first, std::move(message.body), now_);
    Pump(link.second);
  }

  // Until no message is under way and nobody has anything to say at this time.
  void Settle() {
    for (;;) {
      const std::uint64_t before = messages_;
      for (int rank = 0; rank < size(); ++rank) Pump(rank);
      const std::vector<Link> busy = BusyLinks();
      for (const Link& link : busy) {
        while (!links_.at(link).empty()) Deliver(link);
      }
      if (busy.empty() && messages_ == before) return;
    }
  }

  // Moves the clock in steps, settling at each.
  void Run(core::Duration how_long, core::Duration step) {
    for (const core::TimePoint end = now_ + how_long; now_ < end;) {
      now_ += step;
      Settle();
    }
  }

  std::uint64_t messages() const { return messages_; }

 private:
  SimOptions options_;
  core::Tree tree_;
  core::TimePoint now_{std::chrono::hours(1)};
  std::vector<std::unique_ptr<core::Negotiator>> nodes_;
  std::vector<core::Negotiator::LocalState> local_;
  std::map<Link, std::deque<core::Bytes>> links_;
  std::set<int> stopped_;
  std::uint64_t messages_ = 0;
};

inline core::SignaturePtr AllReduceOf(std::vector<std::int64_t> shape,
                                      core::DType dtype = core::DType::kF32) {
  core::Signature signature;
  signature.kind = core::OpKind::kAllReduce;
  signature.dtype = dtype;
  signature.shape = std::move(shape);
  return std::make_shared<const core::Signature>(std::move(signature));
}

inline core::Request RequestOf(core::Key key, core::Asked asked) {
  core::Request request;
  request.key = std::move(key);
  request.asked = std::move(asked);
  return request;
}

}  // namespace sirtaki::tests
