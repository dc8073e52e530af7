// The protocol's invariants in seeded random schedules: overlapping sets, random delivery, small id
// tables, late, stopped, joining and leaving ranks, faults, mismatches. A failure prints its seed;
// SIRTAKI_TEST_SEED runs that one again.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <sstream>

#include "tests/support/negotiation_sim.h"
#include "tests/support/order_cycle.h"
#include "tests/support/test_scale.h"

namespace sirtaki::tests {
namespace {

using core::AgreedId;
using core::Key;
using core::RankRanges;
using core::SetNumber;

enum class Trouble { kNone, kLeaves, kStops, kFaults };

// One use of a key that the members of a set go through.
struct Use {
  SetNumber set = 0;
  bool named = true;
  std::string name;
  core::SignaturePtr signature;
  int odd_rank = -1;  // this member asks for something else
  bool odd_is_invalid = false;
  std::set<int> skipped_by;    // members that join instead
  std::map<int, bool> absent;  // by rank
  bool with_absent = false;
};

class Schedule {
 public:
  explicit Schedule(std::uint64_t seed) : random_(seed) {
    Build();
    sim_->on_batch = [this](int rank, const core::DecidedBatch& batch) { Executed(rank, batch); };
    sim_->on_send = [this](int from, int to, const core::MessageBody& body) {
      Sent(from, to, body);
    };
  }

  // Empty if every invariant held.
  std::string Run() {
    for (int round = 0; round < 20000 && !Done(); ++round) Act();
    Finish();
    return problems_.str();
  }

 private:
  int Below(int n) { return static_cast<int>(random_() % static_cast<std::uint64_t>(n)); }
  bool Chance(int percent) { return Below(100) < percent; }

  void Build() {
    SimOptions options;
    const int size = 2 + Below(7);
    options.host_of_rank.clear();
    const int hosts = 1 + Below(size);
    for (int r = 0; r < size; ++r) options.host_of_rank.push_back(Below(hosts));
    options.arity = 1 + Below(3);
    for (SetNumber s = 1; s <= static_cast<SetNumber>(Below(4)); ++s) {
      RankRanges members;
      for (int r = 0; r < size; ++r) {
        if (Chance(50)) members.Add(r);
      }
      if (!members.empty()) options.sets[s] = members;
    }
    options.negotiator.id_capacity = static_cast<std::size_t>(Chance(60) ? 1 + Below(6) : 1000);
    options.negotiator.stall_warning = std::chrono::milliseconds(Chance(50) ? 20 : 60000);
    options.negotiator.stall_limit = std::chrono::hours(10);
    options.negotiator.ping_interval = std::chrono::milliseconds(20);
    options.negotiator.peer_timeout = std::chrono::milliseconds(200);
    sim_ = std::make_unique<NegotiationSim>(options);
    ranks_.resize(static_cast<std::size_t>(size));

    joins_ = Chance(30);
    const int kinds = Below(8);
    trouble_ = kinds == 0   ? Trouble::kStops
               : kinds == 1 ? Trouble::kFaults
               : kinds <= 3 ? Trouble::kLeaves
                            : Trouble::kNone;
    troubled_ = Below(size);
    trouble_at_ = 1 + Below(60);
    late_ = Chance(30) ? Below(size) : -1;
    for (const auto& [number, members] : sim_->sets()) AddUses(number, members);
    for (int r = 0; r < size; ++r) MakeProgram(r);
  }

  void AddUses(SetNumber number, const RankRanges& members) {
    const int names = 1 + Below(5);
    for (int i = 0, count = 1 + Below(12); i < count; ++i) {
      Use use;
      use.set = number;
      use.named = Chance(70);
      use.name = "t" + std::to_string(Below(names));
      use.signature = AllReduceOf({1 + Below(3)});
      if (Chance(10)) {
        const std::vector<int> list = members.ToVector();
        use.odd_rank = list[static_cast<std::size_t>(Below(static_cast<int>(list.size())))];
        use.odd_is_invalid = members.Count() == 1 || Chance(50);
      }
      use.with_absent = Chance(30);
      const std::vector<int> list = members.ToVector();
      for (const int r : list) use.absent[r] = Chance(60);
      uses_.push_back(std::move(use));
    }
  }

  // Each rank goes through its lines (the uses of one name, the unnamed calls of a set) in order,
  // and takes the lines as chance will have it.
  void MakeProgram(int rank) {
    Rank& r = ranks_[static_cast<std::size_t>(rank)];
    // Who joins early skips all uses of a set from some point on. (Skipping by line could make two
    // ranks wait for each other's join.)
    std::map<SetNumber, std::size_t> stops_at;
    for (const auto& [number, members] : sim_->sets()) {
      stops_at[number] = joins_ && Chance(50)
                             ? static_cast<std::size_t>(Below(static_cast<int>(uses_.size())))
                             : uses_.size();
    }
    for (std::size_t u = 0; u < uses_.size(); ++u) {
      Use& use = uses_[u];
      if (!sim_->sets().at(use.set).Contains(rank)) continue;
      if (u < stops_at[use.set]) {
        r.lines[{use.set, use.named ? use.name : std::string()}].push_back(u);
      } else {
        use.skipped_by.insert(rank);
        use.odd_rank = -1;  // alone, an odd request would not be odd
      }
    }
    for (const auto& [number, members] : sim_->sets()) {
      if (joins_ && members.Contains(rank)) r.to_join.insert(number);
    }
  }

  bool Submit(int rank) {
    Rank& r = ranks_[static_cast<std::size_t>(rank)];
    if (sim_->node(rank).faulted() || sim_->stopped(rank) || r.left) return false;
    std::erase_if(r.lines, [](const auto& entry) { return entry.second.empty(); });
    if (r.lines.empty() || Chance(20)) return JoinNext(rank);
    auto line = std::next(r.lines.begin(), Below(static_cast<int>(r.lines.size())));
    const std::size_t u = line->second.front();
    const Use& use = uses_[u];
    const Key key =
        use.named ? Key::Named(use.set, use.name) : Key::Unnamed(use.set, r.calls[use.set]);
    if (r.in_flight.contains(key.ToString())) return false;
    line->second.erase(line->second.begin());
    if (!use.named) ++r.calls[use.set];
    core::Request request = RequestOf(key, use.signature);
    if (use.odd_rank == rank) {
      if (use.odd_is_invalid) {
        request.invalid = "it is odd";
      } else {
        request.asked = AllReduceOf({7, 7});
      }
    }
    if (use.with_absent) request.absent = {use.absent.at(rank)};
    r.in_flight[key.ToString()] = u;
    submitted_[u].insert(rank);
    std::vector<core::Request> requests;
    requests.push_back(std::move(request));
    for (const auto& request : requests) sim_->node(rank).Submit(request, sim_->now());
    return true;
  }

  bool JoinNext(int rank) {
    Rank& r = ranks_[static_cast<std::size_t>(rank)];
    // A set of which this rank has nothing left to submit.
    const auto next = std::find_if(r.to_join.begin(), r.to_join.end(), [&](SetNumber candidate) {
      return std::none_of(r.lines.begin(), r.lines.end(),
                          [&](const auto& line) { return line.first.first == candidate; });
    });
    if (next == r.to_join.end()) return false;
    const SetNumber set = *next;
    r.to_join.erase(next);
    r.joined.insert(set);
    sim_->node(rank).Join(set, sim_->now());
    return true;
  }

  void Act() {
    sim_->Advance(std::chrono::microseconds(Below(150)));
    ++acts_;
    if (acts_ == trouble_at_) MakeTrouble();
    const int what = Below(10);
    if (what < 5) {
      const auto busy = sim_->BusyLinks();
      if (!busy.empty())
        return sim_->Deliver(busy[static_cast<std::size_t>(Below(static_cast<int>(busy.size())))]);
    }
    const int rank = Below(sim_->size());
    if (what < 8) {
      if (rank == late_ && acts_ < 1500) return;
      for (int i = 1 + Below(4); i > 0 && Submit(rank); --i) {
      }
    }
    if (Chance(70)) sim_->Pump(rank);
  }

  void MakeTrouble() {
    if (trouble_ == Trouble::kStops) sim_->Stop(troubled_);
    if (trouble_ == Trouble::kFaults) {
      sim_->node(troubled_).RaiseFault(core::StatusCode::kAborted, "on purpose", "");
    }
    if (trouble_ == Trouble::kLeaves) {
      ranks_[static_cast<std::size_t>(troubled_)].left = true;
      sim_->node(troubled_).Leave("it was told to", sim_->now());
    }
  }

  bool Done() {
    for (int rank = 0; rank < sim_->size(); ++rank) {
      const Rank& r = ranks_[static_cast<std::size_t>(rank)];
      if (sim_->node(rank).faulted() || sim_->stopped(rank) || r.left) continue;
      for (const auto& [name, line] : r.lines) {
        if (!line.empty()) return false;
      }
      if (!r.in_flight.empty() || !r.to_join.empty()) return false;
    }
    return acts_ > trouble_at_;
  }

  void Executed(int rank, const core::DecidedBatch& batch) {
    Rank& r = ranks_[static_cast<std::size_t>(rank)];
    if (!sim_->sets().at(batch.set).Contains(rank)) Problem() << "rank " << rank << " is no member";
    std::ostringstream content;
    for (std::size_t i = 0; i < batch.entries.size(); ++i) {
      const core::Decided& decided = batch.entries[i];
      r.order.push_back(std::to_string(batch.set) + "." + std::to_string(batch.number) + "." +
                        std::to_string(i));
      if (const auto* run = std::get_if<core::DecidedRun>(&decided)) {
        content << "run " << run->key.ToString() << " " << run->signature->ToString() << " silent "
                << run->silent.ToString() << " absent " << core::AllAbsent(run->absent) << "; ";
        Complete(rank, run->key, run->signature, &run->silent, core::AllAbsent(run->absent), {});
      } else if (const auto* fail = std::get_if<core::DecidedFail>(&decided)) {
        content << "fail " << fail->key.ToString() << " " << fail->why.ToString() << "; ";
        if (fail->why.message().starts_with("join:")) {
          r.joined.erase(batch.set);
        } else {
          Complete(rank, fail->key, nullptr, nullptr, false, fail->why);
        }
      } else {
        content << "joined " << std::get<core::DecidedJoin>(decided).last;
        if (r.joined.erase(batch.set) == 0) Problem() << "JoinDone without a join on rank " << rank;
      }
    }
    const auto [known, first] = contents_.try_emplace({batch.set, batch.number}, content.str());
    if (!first && known->second != content.str()) {
      Problem() << "batch " << batch.number << " of set " << batch.set << " differs on rank "
                << rank << ": " << content.str() << " and " << known->second;
    }
  }

  void Complete(int rank, const Key& key, core::SignaturePtr signature, const RankRanges* silent,
                bool absent_everywhere, const core::Status& why) {
    Rank& r = ranks_[static_cast<std::size_t>(rank)];
    const auto found = r.in_flight.find(key.ToString());
    if (found == r.in_flight.end()) {
      const bool serves = silent != nullptr && silent->Contains(rank);
      const bool fails_elsewhere = silent == nullptr && (r.joined.contains(key.set) || r.left);
      if (!serves && !fails_elsewhere) {
        Problem() << "rank " << rank << " executes " << key.ToString()
                  << " which it did not submit";
      }
      return;
    }
    const std::size_t u = found->second;
    const Use& use = uses_[u];
    r.in_flight.erase(found);
    if (silent == nullptr) {
      const bool expected =
          use.odd_rank >= 0 || trouble_ == Trouble::kLeaves || trouble_ == Trouble::kStops;
      if (!expected) Problem() << key.ToString() << " failed: " << why.ToString();
      return;
    }
    if (use.odd_rank >= 0) {
      Problem() << key.ToString() << " ran although rank " << use.odd_rank
                << " asked for something else";
    }
    if (!(*signature == *use.signature))
      Problem() << key.ToString() << " ran with another signature";
    bool all_absent = use.with_absent;
    for (const int member : sim_->sets().at(use.set).ToVector()) {
      const bool reported = submitted_[u].contains(member);
      if (!reported && !silent->Contains(member)) {
        Problem() << key.ToString() << " ran without rank " << member;
      }
      if (reported && silent->Contains(member))
        Problem() << "rank " << member << " is silent wrongly";
      if (silent->Contains(member) && ranks_[static_cast<std::size_t>(member)].left && !joins_) {
        Problem() << key.ToString() << " ran although rank " << member << " has left";
      }
      if (reported) all_absent = all_absent && use.absent.at(member);
    }
    if (absent_everywhere != all_absent) Problem() << key.ToString() << ": wrong absence";
  }

  void Sent(int from, int to, const core::MessageBody& body) {
    if (const auto* report = std::get_if<core::ReportMessage>(&body)) {
      for (const auto& item : report->items) {
        if (std::holds_alternative<core::ReadyItem>(item)) ++ready_sent_[{from, to}];
      }
    } else if (const auto* stream = std::get_if<core::StreamMessage>(&body)) {
      for (const core::Batch& batch : stream->batches) {
        for (const auto& entry : batch.entries) {
          if (std::holds_alternative<core::RunEntry>(entry) ||
              std::holds_alternative<core::FailEntry>(entry)) {
            ++entries_sent_[{from, to}];
          }
        }
      }
    }
  }

  void Finish() {
    const bool must_fault = trouble_ == Trouble::kStops || trouble_ == Trouble::kFaults;
    if (must_fault) {
      // Somebody must be waiting for the loss to be noticed: everybody leaves.
      for (int r = 0; r < sim_->size(); ++r) {
        if (sim_->stopped(r)) continue;
        ranks_[static_cast<std::size_t>(r)].left = true;
        sim_->node(r).Leave("the end", sim_->now());
      }
      sim_->Run(std::chrono::milliseconds(3000), std::chrono::milliseconds(5));
      for (int r = 0; r < sim_->size(); ++r) {
        if (!sim_->stopped(r) && !sim_->node(r).faulted())
          Problem() << "rank " << r << " saw no fault";
      }
      return CheckOrders();
    }
    sim_->Settle();
    for (int r = 0; r < sim_->size(); ++r) {
      Rank& rank = ranks_[static_cast<std::size_t>(r)];
      if (sim_->node(r).faulted()) {
        Problem() << "rank " << r
                  << " has a fault: " << sim_->node(r).cause().ToStatus().ToString();
        return;
      }
      if (!rank.in_flight.empty() && trouble_ != Trouble::kLeaves) {
        Problem() << "rank " << r << " never got " << rank.in_flight.begin()->first;
      }
      if (!rank.joined.empty() && !joins_) Problem() << "rank " << r << " is still joined";
    }
    // What waits for ranks that never submit is failed by their leaving: leave one after the other.
    for (int r = 0; r < sim_->size(); ++r) {
      ranks_[static_cast<std::size_t>(r)].left = true;
      sim_->node(r).Leave("the end", sim_->now());
      if (Chance(50)) sim_->Settle();
    }
    sim_->Settle();
    for (int r = 0; r < sim_->size(); ++r) {
      const Rank& rank = ranks_[static_cast<std::size_t>(r)];
      if (!rank.in_flight.empty())
        Problem() << "rank " << r << " never got " << rank.in_flight.begin()->first;
      if (!rank.joined.empty()) Problem() << "rank " << r << " is still joined at the end";
      if (!sim_->node(r).closed()) Problem() << "rank " << r << " is not closed";
      if (!sim_->node(r).Quiescent()) Problem() << "rank " << r << " keeps state";
    }
    const std::uint64_t before = sim_->messages();
    sim_->Run(std::chrono::milliseconds(500), std::chrono::milliseconds(10));
    if (sim_->messages() != before) Problem() << "messages although nobody waits";
    CheckEdges();
    CheckTables();
    CheckOrders();
  }

  // At most one Ready per use and edge upward, and one entry per use downward.
  void CheckEdges() {
    for (int r = 0; r < sim_->size(); ++r) {
      const core::Tree::Node node = sim_->tree().NodeOf(r);
      for (std::size_t c = 0; c < node.children.size(); ++c) {
        int uses = 0;
        for (const Use& use : uses_)
          uses += sim_->sets().at(use.set).Intersects(node.child_subtrees[c]);
        const int joins = joins_ ? static_cast<int>(sim_->sets().size()) : 0;
        if (ready_sent_[{node.children[c], r}] > uses)
          Problem() << "too many reports to rank " << r;
        if (entries_sent_[{r, node.children[c]}] > uses + joins)
          Problem() << "too many entries from rank " << r;
      }
    }
  }

  void CheckTables() {
    for (const auto& [number, members] : sim_->sets()) {
      const std::vector<AgreedId> first = sim_->node(members.First()).KnownIds(number);
      for (const int r : members.ToVector()) {
        if (sim_->node(r).KnownIds(number) != first)
          Problem() << "the id tables of set " << number << " differ";
      }
    }
  }

  void CheckOrders() {
    std::vector<std::vector<std::string>> orders;
    for (const Rank& r : ranks_) orders.push_back(r.order);
    const std::string cycle = tests::CycleOf(orders);
    if (!cycle.empty()) Problem() << cycle;
  }

  std::ostream& Problem() { return problems_ << "\n  "; }

  struct Rank {
    std::map<std::pair<SetNumber, std::string>, std::vector<std::size_t>> lines;
    std::map<SetNumber, std::uint64_t> calls;
    std::map<std::string, std::size_t> in_flight;
    std::set<SetNumber> to_join;
    std::set<SetNumber> joined;
    bool left = false;
    std::vector<std::string> order;
  };

  std::mt19937_64 random_;
  std::unique_ptr<NegotiationSim> sim_;
  std::vector<Use> uses_;
  std::vector<Rank> ranks_;
  std::map<std::size_t, std::set<int>> submitted_;
  std::map<std::pair<SetNumber, std::uint64_t>, std::string> contents_;
  std::map<NegotiationSim::Link, int> ready_sent_;
  std::map<NegotiationSim::Link, int> entries_sent_;
  bool joins_ = false;
  Trouble trouble_ = Trouble::kNone;
  int troubled_ = 0;
  int trouble_at_ = 0;
  int late_ = -1;
  int acts_ = 0;
  std::ostringstream problems_;
};

TEST(NegotiatorRandomTest, InvariantsHoldInRandomSchedules) {
  const std::uint64_t first = TestSeed();
  const int count = ScaledCount(500, 10000);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t seed = first + static_cast<std::uint64_t>(i);
    const std::string problems = Schedule(seed).Run();
    ASSERT_EQ(problems, "") << "again with SIRTAKI_TEST_SEED=" << seed;
  }
}

}  // namespace
}  // namespace sirtaki::tests
