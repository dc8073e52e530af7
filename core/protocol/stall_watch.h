// Watches over what takes too long (18): asks the ranks that miss a key what they do, warns, and fails
// what waits longer than the limit; the same for what runs and does not end, and for a shutdown. Pure,
// as the negotiator, which tells it of its keys. Of one node of the tree: a seat asks, others pass
// questions on.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/protocol/message.h"
#include "core/protocol/set_state.h"
#include "core/protocol/tree.h"

namespace sirtaki::core {

struct StallOptions {
  int rank = 0;
  Duration stall_warning = std::chrono::seconds(60);  // agreed; zero: never
  Duration stall_limit = std::chrono::minutes(30);    // agreed; zero: never
  Duration ping_interval = std::chrono::seconds(2);   // agreed
  Duration peer_timeout = std::chrono::seconds(10);   // agreed
  // Says what this rank did last, for the answer to a stall query.
  std::function<std::string()> activity = [] { return std::string("no activity known"); };
  // The key before whose end this rank submits nothing, if there is one.
  std::function<std::optional<Key>()> waits_for = [] { return std::nullopt; };
};

// A warning is for the log of the seat (18).
struct StallWarning {
  Key key;                 // of those that wait, the one that has waited longest
  bool agreed = false;     // it is decided and goes on for too long
  std::string kind;        // of a call without a name: "barrier"
  std::size_t others = 0;  // more keys that wait for some of the same ranks
  Duration waited{};
  RankRanges missing;                    // have not submitted it
  std::vector<RankActivity> activities;  // of some of them
  RankRanges silent;                     // did not even answer
  RankRanges leaving;                    // not empty: no key, these wait in shutdown for `missing`
};
// `"w" and 8 others have waited 60 s; not submitted by rank 1; rank 1: last submitted "v" 61 s ago`
std::string StallText(const StallWarning& warning);
// The brief text is for where there is little room: `waits for rank 1: "w"`
std::string StallBrief(const StallWarning& warning);
// `"w" did not finish within its time-out of 5 s`
std::string TimeOutText(const Key& key, Duration limit);

class StallWatch {
 public:
  // The surroundings are what a watch needs of the node that it watches for.
  class Surroundings {
   public:
    virtual SetState* FindSet(SetNumber set) = 0;  // null: it does not matter to this node
    virtual const RankRanges& left() const = 0;    // ranks that have left
    virtual void SendNow(int to, MessageBody body) = 0;
    virtual void Report(StalledItem item) = 0;  // to the parent
    virtual void Fail(StatusCode code, const std::string& text, const std::string& tensor) = 0;
    virtual bool faulted() const = 0;  // it has failed: nothing is to be done any more

   protected:
    ~Surroundings() = default;
  };

  // `node` and `around` must outlive the watch.
  StallWatch(StallOptions options, const Tree::Node& node, int world_size, Surroundings& around);

  // A wait has begun, or goes on.
  void NoteWait(const PendingKey& pending);
  // The time of a call, `limit`, is over, whose key is not decided.
  void NoteTimeOut(SetState& set, PendingKey& pending, Duration limit, TimePoint now);
  // Messages come from neighbours. Precondition: the message is of this set.
  void Receive(SetState& set, const StalledItem& stalled, TimePoint now);
  void Receive(SetState& set, const QueryMessage& asked, TimePoint now);
  void Receive(SetState& set, int child, AnswerMessage answer, TimePoint now);
  void Forget(SetNumber set);

  // Does what is due. `running`: the oldest first; without a key nobody is asked about it.
  void Step(std::map<SetNumber, SetState>& sets, const std::vector<RunningOperation>& running,
            TimePoint now);
  // When Step is due; TimePoint::max() if never.
  TimePoint next() const { return next_; }

  std::vector<StallWarning> TakeWarnings() { return std::exchange(warnings_, {}); }
  bool asks() const { return !queries_.empty(); }  // a question of the parent is not answered

 private:
  void Due(TimePoint at);
  // When a wait reaches stall_limit, which is not zero.
  TimePoint LimitOf(TimePoint since) const;

  // A question passed on for the parent (18).
  struct PassedQuery {
    TimePoint deadline{};
    std::vector<int> awaited;
    AnswerMessage answer;
  };

  // The oldest operation that runs here (18).
  struct OldestRunning {
    Key key;
    TimePoint submitted{};
    TimePoint since{};  // when it became the oldest
    std::optional<TimePoint> overdue_since;
    std::optional<TimePoint> next_warning;
  };
  // The seat's question about it, and the answers so far.
  struct RunningInquiry {
    TimePoint deadline{};
    std::vector<int> awaited;
    std::vector<RankActivity> activities;
  };

  // ---- stall_watch.cc: late ranks ----
  void CheckStalls(SetState& set, TimePoint now);
  void ReportStalls(SetState& set, Duration first, TimePoint now);  // to the seat
  void Inquire(SetState& set, const std::vector<PendingKey*>& waiting, TimePoint now);
  void StartInquiry(SetState& set, PendingKey& pending, bool fault_after, TimePoint now);
  bool FinishInquiry(SetState& set, PendingKey& pending, const std::vector<PendingKey*>& waiting,
                     TimePoint now);
  void FinishQueries(TimePoint now);
  void CheckLeaving(TimePoint now);
  int RankOf(int child) const { return node_.children[static_cast<std::size_t>(child)]; }

  // ---- stall_watch_circle.cc: ranks that wait for each other ----
  RankActivity Activity();  // of this rank
  void NoteHeldUp(SetState& set, PendingKey& pending, const StalledKey::Inquiry& inquiry);
  void RaiseCircle(const SetState& set, const Key& key);

  // ---- stall_watch_running.cc: what is agreed on and does not end ----
  void CheckRunning(const std::vector<RunningOperation>& local, TimePoint now);
  bool LimitRunning(TimePoint now);
  void InquireRunning(SetState& set, TimePoint now);
  void FinishRunningInquiry(TimePoint now);

  const StallOptions options_;
  const Tree::Node& node_;
  const int world_size_;
  Surroundings& around_;

  std::uint64_t questions_ = 0;  // that this seat has asked
  std::vector<PassedQuery> queries_;
  std::optional<OldestRunning> oldest_running_;
  std::optional<RunningInquiry> running_inquiry_;  // only while there is an oldest
  // The root's: since when somebody waits for the others' leaving.
  std::optional<TimePoint> first_left_;
  std::optional<TimePoint> next_leaving_warning_;
  std::vector<StallWarning> warnings_;
  TimePoint next_ = TimePoint::max();
  TimePoint stepped_{};  // when Step came last
  TimePoint resumed_{};  // when Step came much too late last
};

}  // namespace sirtaki::core
