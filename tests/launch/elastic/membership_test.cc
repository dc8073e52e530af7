#include "launch/elastic/membership.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "launch/base/shell_text.h"

namespace sirtaki::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::string Numbers(const std::vector<WorkerId>& workers) {
  std::string text;
  for (const WorkerId worker : workers) text += (text.empty() ? "" : ",") + std::to_string(worker);
  return text;
}

std::string Text(const ElasticOrder& order) {
  return std::visit(
      [](const auto& one) -> std::string {
        using Kind = std::decay_t<decltype(one)>;
        if constexpr (std::is_same_v<Kind, StartWorker>) {
          return "start " + std::to_string(one.worker) + " on " + one.host + ":" +
                 std::to_string(one.slot);
        } else if constexpr (std::is_same_v<Kind, EndWorker>) {
          return "kill " + std::to_string(one.worker) + ": " + one.why;
        } else if constexpr (std::is_same_v<Kind, AnnounceChange>) {
          return "announce in " + std::to_string(one.generation) + ": " + one.why +
                 (one.leaving.empty() ? "" : ", leaving: " + Numbers(one.leaving));
        } else if constexpr (std::is_same_v<Kind, EndGeneration>) {
          return "end " + std::to_string(one.generation) + " for " + Numbers(one.to) + ": " +
                 one.why;
        } else if constexpr (std::is_same_v<Kind, BeginGeneration>) {
          return "begin " + std::to_string(one.generation) + " with " + Numbers(one.members);
        } else {
          return "end of the job, " + std::to_string(one.code) + ": " + one.why;
        }
      },
      order);
}

// Plays a script. A line is a time in seconds, a word, and what it is about:
//   hosts a:2,b:1        ready 0,1       ready 0 lost 2      ready 0 fault (nobody knows whose)
//   joined 0,1 1 (the generation)
//   heard 1 1            knows 1 1 (of the change)   stopped 1 1
//   cannot 0,1 1 (go on from what the generation has)      cannot 0,1 1 2 (because of 2)
//   finished 0      failed 1            gone 1      wait      tell (what is waited for)
//   slots (are logged from now on)
// Gives the orders, each with its time.
std::string Played(ElasticLimits limits, const std::string& script) {
  const core::TimePoint start = core::TimePoint() + std::chrono::hours(1);
  Membership membership(limits);
  std::ostringstream log;
  core::TimePoint now = start;
  std::map<WorkerId, int> generations;
  bool logs_slots = false;
  const auto take = [&] {
    for (const ElasticOrder& order : membership.TakeOrders(now)) {
      const auto* const begin = std::get_if<BeginGeneration>(&order);
      for (const WorkerId id : begin != nullptr ? begin->members : std::vector<WorkerId>()) {
        generations[id] = begin->generation;
      }
      log << std::chrono::duration<double>(now - start).count() << " " << Text(order);
      if (logs_slots && begin != nullptr) log << " in slots " << Numbers(begin->slots);
      log << "\n";
    }
  };
  std::istringstream lines(script);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    double time = 0;
    std::string word;
    std::string about;
    std::string more;
    std::string last;
    words >> time >> word >> about >> more >> last;
    const auto then = start + milliseconds(static_cast<int>(time * 1000));
    while (membership.NextTime() <= then) {
      now = membership.NextTime();
      take();
    }
    now = then;
    if (word == "hosts") {
      std::vector<HostSlots> hosts;
      for (const auto one : Split(about, ',')) {
        const std::string name(one.substr(0, one.find(':')));
        hosts.push_back({name, std::stoi(std::string(one.substr(one.find(':') + 1)))});
      }
      membership.TakeHosts(hosts, now);
    }
    if (word == "hosts") about.clear();
    if (word == "slots") logs_slots = true;
    std::vector<WorkerId> suspects;
    if (more == "lost") suspects.push_back(std::stoi(last));
    for (const std::string_view one : Split(about, ',')) {
      if (one.empty()) continue;
      const int id = std::stoi(std::string(one));
      const bool has_failed = more == "fault";
      if (word == "ready") membership.NoteReady(id, generations[id], suspects, now, has_failed);
      if (word == "heard") {
        membership.NoteHeard(id, std::stoi(more), Membership::Heard::kOver);
      }
      if (word == "stopped") membership.NoteStopped(id, std::stoi(more));
      if (word == "state") membership.NoteState(id);
      if (word == "knows") {
        membership.NoteHeard(id, std::stoi(more), Membership::Heard::kChange);
      }
      if (word == "cannot") {
        std::optional<WorkerId> because_of;
        if (!last.empty()) because_of = std::stoi(last);
        membership.NoteCannotGoOn(id, std::stoi(more), "shards are lost", because_of, now);
      }
      if (word == "joined") membership.NoteJoined(id, std::stoi(more));
      if (word == "finished") membership.NoteEnd(id, WorkerEnd::kFinished, "exit code 0", now);
      if (word == "failed") {
        membership.NoteEnd(id, WorkerEnd::kFailed, "died of SIGKILL", now, id + 3);
      }
      if (word == "gone") membership.NoteEnd(id, WorkerEnd::kLost, "no answer", now);
    }
    take();
    if (word == "tell") {
      const Membership::Wait wait = membership.WaitsFor();
      const auto time_of = [&](core::TimePoint at) {
        return std::chrono::duration<double>(at - start).count();
      };
      log << time_of(now) << " waits for " << wait.what;
      if (wait.until != core::TimePoint::max()) log << " until " << time_of(wait.until);
      for (const auto& host : membership.HostsLeftOut(now)) {
        log << "; " << host.host << " is left out";
        if (host.until != core::TimePoint::max()) log << " until " << time_of(host.until);
        log << ": " << host.why;
      }
      log << "\n";
    }
  }
  return log.str();
}

ElasticLimits Limits(int least, int most) {
  ElasticLimits limits;
  limits.min_ranks = least;
  limits.max_ranks = most;
  limits.timeout = seconds(60);
  limits.orphan_time = seconds(10);
  return limits;
}

TEST(MembershipTest, TheFirstGenerationWaitsForAllThatAreStarted) {
  EXPECT_EQ(Played(Limits(2, 4), R"(0 hosts a:2,b:2
    2 ready 3,0
    3 ready 1
    4 ready 2
    5 joined 0,1,2,3 1
    9 finished 0,1,2
    10 finished 3)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
0 start 2 on b:0
0 start 3 on b:1
4 begin 1 with 0,1,2,3
10 end of the job, 0: 
)");
}

TEST(MembershipTest, OneThatCannotBeStartedIsNotWaitedForLongerThanTheTimeout) {
  EXPECT_EQ(Played(Limits(2, 3), R"(0 hosts a:2,b:1
    1 ready 0,1
    70 wait)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
0 start 2 on b:0
60 kill 2: its program has not called init() within --elastic-timeout (60 s)
60 begin 1 with 0,1
)");
}

TEST(MembershipTest, SurvivorsGoOnAndTheHostGetsANewWorkerAfterAWhile) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:2,b:1
    1 ready 0,1,2
    2 joined 0,1,2 1
    5 failed 1
    5.1 ready 0
    5.2 ready 2
    5.3 joined 0,2 2
    8 ready 3
    8.1 ready 0,2
    8.2 joined 0,2,3 3)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
0 start 2 on b:0
1 begin 1 with 0,1,2
5 end 1 for 0,2: worker 1 on host a: died of SIGKILL
5.2 begin 2 with 0,2
6 start 3 on a:1
8 announce in 2: 1 worker comes
8.1 begin 3 with 0,3,2
)");
}

// The state lies in worker 0 alone until another one has taken it.
TEST(MembershipTest, TheOnlyOneWithTheStateStaysThoughItsHostIsListedNoMore) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:1
    1 ready 0
    1.1 joined 0 1
    1.2 state 0
    3 hosts b:1
    4 ready 1
    4.1 ready 0
    4.2 joined 0 2
    4.3 ready 1 lost 0
    4.4 ready 0
    4.5 joined 0,1 3
    4.6 state 1
    5 ready 0,1)"),
            R"(0 start 0 on a:0
1 begin 1 with 0
3 start 1 on b:0
4 announce in 1: 1 worker comes
4.1 begin 2 with 0,1
4.3 end 2 for 0: worker 1 on host b has asked for another group
4.4 begin 3 with 0,1
4.6 announce in 3: a worker's place on host a is listed no more, leaving: 0
5 kill 0: its place is listed no more
5 begin 4 with 1
)");
}

TEST(MembershipTest, WhereNobodyWithTheStateIsLeftTheJobEnds) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:2
    1 ready 0,1
    1.1 joined 0,1 1
    1.2 state 0,1
    2 hosts a:3
    3 ready 2
    4 failed 0,1)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
1 begin 1 with 0,1
2 start 2 on a:2
3 announce in 1: 1 worker comes
4 end 1 for 1: worker 0 on host a: died of SIGKILL
4 end of the job, 3: nobody is left who has trained, and the workers that are there would begin again from nothing; the first that ended: worker 0 on host a: died of SIGKILL; what was trained is lost: start the job again, and it goes on from the program's own checkpoint, if it has one
)");
}

// The hosts are lost and not the processes alone, and those that come later have nothing.
TEST(MembershipTest, WhereAllHostsThatHaveTrainedAreLostTheJobEndsAsWell) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:1,b:1
    1 ready 0,1
    1.1 joined 0,1 1
    1.2 state 0,1
    4 gone 1
    5 gone 0
    40 wait)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
1 begin 1 with 0,1
4 end 1 for 0: worker 1 on host b: no answer
5 end of the job, 1: all workers have failed; the first that ended: worker 0 on host a: no answer; what was trained is lost: start the job again, and it goes on from the program's own checkpoint, if it has one
)");
}

TEST(MembershipTest, ThoseThatAreStartingAreWaitedForWhereTheOthersFailBeforeTheyTrain) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:1,b:2
    1 ready 0
    2 failed 0
    12 ready 1,2
    12.5 ready 3)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
0 start 2 on b:1
12 start 3 on a:0
12.5 begin 1 with 1,2,3
)");
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:1,b:2
    1 ready 0
    2 failed 0
    12 failed 1
    70 wait)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
0 start 2 on b:1
60 kill 2: its program has not called init() within --elastic-timeout (60 s)
60 end of the job, 3: all workers have failed; the first that ended: worker 0 on host a: died of SIGKILL
)");
}

TEST(MembershipTest, AProgramThatDoesNotLeaveItsGenerationIsSaidToBeBusyAndNotSilent) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:1,b:1
    1 ready 0,1
    2 joined 0,1 1
    5 ready 0
    5.1 heard 1 1
    66 wait)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
1 begin 1 with 0,1
5 end 1 for 1: worker 0 on host a has asked for another group
65 kill 1: its program has not left generation 1 within --elastic-timeout (60 s): it hangs in its own code, or keeps the error that tells it
65 begin 2 with 0
)");
}

TEST(MembershipTest, TellsWhatItWaitsForAndWhichHostsAreLeftOut) {
  ElasticLimits limits = Limits(2, 3);
  limits.cooldown_least = seconds(30);
  EXPECT_EQ(Played(limits, R"(0 hosts a:1,b:2
    1 ready 0,1
    5 tell
    6 ready 2
    7 tell
    8 joined 0,1,2 1
    9 tell
    10 failed 1,2
    11 tell
    12 ready 0
    13 tell)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
0 start 2 on b:1
5 waits for worker 2 on host b, whose program has not called init() until 60
6 begin 1 with 0,1,2
7 waits for worker 0 on host a and 2 more to join generation 1 until 66
9 waits for 
10 end 1 for 0,2: worker 1 on host b: died of SIGKILL
11 waits for worker 0 on host a to leave generation 1 until 15; b is left out until 40: workers have failed there (--blacklist-cooldown-range)
13 waits for 1 more worker (--min-np 2) until 70; b is left out until 40: workers have failed there (--blacklist-cooldown-range)
)");
}

TEST(MembershipTest, AHostWhoseWorkersWereLostIsLeftOutUntilTheyHaveEnded) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:1,b:1
    1 ready 0,1
    2 joined 0,1 1
    3 gone 1
    4 ready 0
    5 joined 0 2
    6 tell
    13.5 tell)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
1 begin 1 with 0,1
3 end 1 for 0: worker 1 on host b: no answer
4 begin 2 with 0
6 waits for ; b is left out until 13: workers that were lost there may run until then
13 start 2 on b:0
13.5 waits for 
)");
}

// A worker that comes before the last of the others has ended would train from nothing.
TEST(MembershipTest, TheJobEndsWhereAMemberSaysThatNobodyCanGoOn) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:1,b:1
    1 ready 0,1
    1.1 joined 0,1 1
    1.2 state 0,1
    2 failed 1
    2.1 ready 0
    3.1 ready 2
    3.2 joined 0 2
    3.3 cannot 0 2
    3.4 ready 2
    3.5 failed 0
    9 wait)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
1 begin 1 with 0,1
2 end 1 for 0: worker 1 on host b: died of SIGKILL
2.1 begin 2 with 0
3 start 2 on b:0
3.2 announce in 2: 1 worker comes
3.3 end of the job, 1: the training cannot go on: worker 0 on host a: shards are lost
)");
}

TEST(MembershipTest, OneThatComesAndCannotTakeTheStateIsDropped) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:2
    1 ready 0,1
    2 joined 0,1 1
    2 state 0,1
    5 hosts a:2,b:1
    6 ready 2
    6.5 knows 0,1 1
    7 ready 0,1
    8 joined 0,1,2 2
    9 cannot 0 2 2
    9 cannot 1,2 2 2
    9.1 ready 0,1
    9.2 failed 2
    9.3 cannot 0 2 2
    9.9 wait
    10.2 ready 3)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
1 begin 1 with 0,1
5 start 2 on b:0
6 announce in 1: 1 worker comes
7 begin 2 with 0,1,2
9 kill 2: it cannot take the state of the others: shards are lost
9 end 2 for 0,1: worker 2 on host b: it cannot take the state of the others: shards are lost
9.1 begin 3 with 0,1
10 start 3 on b:0
)");
}

// Nobody has the state, or the one that cannot take it has one of its own.
TEST(MembershipTest, WhereOneThatCannotGoOnIsNoNewcomerTheJobEnds) {
  for (const std::string have_state : {"", "2 state 0,1\n"}) {
    const std::string log = Played(
        Limits(1, 2), "0 hosts a:2\n1 ready 0,1\n2 joined 0,1 1\n" + have_state + "3 cannot 0 1 1");
    EXPECT_EQ(log.substr(log.find("\n3 ")),
              "\n3 end of the job, 1: the training cannot go on: worker 0 on host a: shards are "
              "lost\n");
  }
}

TEST(MembershipTest, OneThatIsNoMemberAnyMoreCannotEndTheJob) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:1,b:1
    1 ready 0,1
    1.1 joined 0,1 1
    2 ready 0
    2.1 cannot 0 1
    2.2 ready 1
    2.3 cannot 1 1
    2.4 joined 0,1 2)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
1 begin 1 with 0,1
2 end 1 for 1: worker 0 on host a has asked for another group
2.2 begin 2 with 0,1
)");
}

// Its host lets ssh through, and nothing else.
TEST(MembershipTest, AWorkerWithWhichNoGroupBeginsIsDropped) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:1
    1 ready 0
    1.1 joined 0 1
    3 hosts a:1,b:1
    4 ready 1
    4.1 ready 0
    34 ready 0,1
    64 ready 0,1
    64.1 failed 1
    64.2 joined 0 4)"),
            R"(0 start 0 on a:0
1 begin 1 with 0
3 start 1 on b:0
4 announce in 1: 1 worker comes
4.1 begin 2 with 0,1
34 end 2 for 1: worker 0 on host a has asked for another group
34 begin 3 with 0,1
64 end 3 for 1: worker 0 on host a has asked for another group
64 kill 1: no group begins with it: its host may let ssh through and no other connection
64 begin 4 with 0
)");
}

// sirtakirun reaches both hosts, and they do not reach each other any more.
TEST(MembershipTest, OfTwoHostsThatDoNotReachEachOtherOneGoesOn) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:1,b:1
    1 ready 0,1
    1.1 joined 0,1 1
    1.2 state 0,1
    2 ready 0 lost 1
    2.1 ready 1 lost 0
    22 ready 0 lost 1
    22 ready 1 lost 0
    42 ready 0 lost 1
    42 ready 1 lost 0
    42.1 failed 1
    42.2 joined 0 4
    43 wait)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
1 begin 1 with 0,1
2 end 1 for 1: worker 0 on host a has asked for another group
2.1 begin 2 with 0,1
22 end 2 for 1: worker 0 on host a has asked for another group
22 begin 3 with 0,1
42 end 3 for 1: worker 0 on host a has asked for another group
42 kill 1: no group begins with it: its host and host a do not reach each other; look at the network between them
42 begin 4 with 0
43 start 2 on b:0
)");
}

// Rank 0 has joined all the while, since both others reach it.
TEST(MembershipTest, TheHostThatMostOthersDoNotReachGoes) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:1,b:1,c:1
    1 ready 0,1,2
    1.1 joined 0,1,2 1
    2 ready 0 lost 1
    2 ready 2 lost 1
    2 ready 1 lost 0
    2.1 joined 0 2
    22 ready 0 lost 1
    22 ready 2 lost 1
    22 ready 1 lost 0
    22.1 joined 0 3
    42 ready 0 lost 1
    42 ready 2 lost 1
    42 ready 1 lost 0
    42.1 joined 0,2 4)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
0 start 2 on c:0
1 begin 1 with 0,1,2
2 end 1 for 1,2: worker 0 on host a has asked for another group
2 begin 2 with 0,1,2
22 end 2 for 1,2: worker 0 on host a has asked for another group
22 begin 3 with 0,1,2
42 end 3 for 1,2: worker 0 on host a has asked for another group
42 kill 1: no group begins with it: its host and host a, c do not reach each other; look at the network between them
42 begin 4 with 0,2
)");
}

TEST(MembershipTest, WhereNobodyNamesTheOtherTheYoungerGoes) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:1,b:1
    1 ready 0,1
    1.1 joined 0,1 1
    2 ready 0,1
    3 ready 0,1
    4 ready 0,1
    5 ready 0,1
    6 ready 0,1
    6.1 joined 0 6)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
1 begin 1 with 0,1
2 end 1 for 1: worker 0 on host a has asked for another group
2 begin 2 with 0,1
3 end 2 for 1: worker 0 on host a has asked for another group
3 begin 3 with 0,1
4 end 3 for 1: worker 0 on host a has asked for another group
4 begin 4 with 0,1
5 end 4 for 1: worker 0 on host a has asked for another group
5 begin 5 with 0,1
6 end 5 for 1: worker 0 on host a has asked for another group
6 kill 1: no group begins with it: its host and the others do not reach each other; look at the network between them
6 begin 6 with 0
)");
}

// Two hosts do not reach each other, and the worker of one is dropped.
const std::string kApart = R"(0 hosts a:1,b:1
    1 ready 0,1
    1.1 joined 0,1 1
    2 ready 0 lost 1
    2 ready 1 lost 0
    22 ready 0 lost 1
    22 ready 1 lost 0
    42 ready 0 lost 1
    42 ready 1 lost 0
    42.1 failed 1
)";
const std::string kApartOrders = R"(0 start 0 on a:0
0 start 1 on b:0
1 begin 1 with 0,1
2 end 1 for 1: worker 0 on host a has asked for another group
2 begin 2 with 0,1
22 end 2 for 1: worker 0 on host a has asked for another group
22 begin 3 with 0,1
42 end 3 for 1: worker 0 on host a has asked for another group
42 kill 1: no group begins with it: its host and host a do not reach each other; look at the network between them
43 start 2 on b:0
)";

TEST(MembershipTest, WhereTooFewReachEachOtherTheJobEndsWithinTheTimeout) {
  EXPECT_EQ(Played(Limits(2, 2), kApart + R"(    43.5 ready 2
    63.5 ready 0 lost 2
    63.5 ready 2 lost 0
    80 wait)"),
            kApartOrders + R"(43.5 begin 4 with 0,2
63.5 end 4 for 2: worker 0 on host a has asked for another group
63.5 end of the job, 1: no group of at least 2 workers has come together for 60 s; the last that ended: worker 1 on host b: no group begins with it: its host and host a do not reach each other; look at the network between them (--min-np, --elastic-timeout)
)");
}

TEST(MembershipTest, WhereHostsDoNotReachEachOtherTheTimeThatIsToldIsTheOneAtWhichTheJobEnds) {
  EXPECT_EQ(Played(Limits(2, 2), kApart + R"(    43 tell
    70 wait)"),
            kApartOrders +
                R"(43 waits for worker 2 on host b, whose program has not called init() until 62
62 end of the job, 1: only 1 of at least 2 workers are there after 60 s; the last that ended: worker 1 on host b: no group begins with it: its host and host a do not reach each other; look at the network between them (--min-np, --elastic-timeout)
)");
}

// Nobody else misses one that is stopped and alone.
TEST(MembershipTest, AMemberThatDoesNotHearOfAChangeIsStopped) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:1
    1 ready 0
    2 joined 0 1
    3 hosts a:1,b:1
    4 ready 1
    12 wait
    12.1 failed 0
    20 wait)"),
            R"(0 start 0 on a:0
1 begin 1 with 0
3 start 1 on b:0
4 announce in 1: 1 worker comes
9 kill 0: it does not answer: it is stopped, or its host hangs
9 begin 2 with 1
12.1 start 2 on a:0
)");
}

TEST(MembershipTest, AMemberThatKnowsOfAChangeHasItsTime) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:1
    1 ready 0
    2 joined 0 1
    3 hosts a:1,b:1
    4 ready 1
    4.1 knows 0 1
    30 ready 0)"),
            R"(0 start 0 on a:0
1 begin 1 with 0
3 start 1 on b:0
4 announce in 1: 1 worker comes
30 begin 2 with 0,1
)");
}

// A worker with a lower number may have come later, and not have the state yet.
TEST(MembershipTest, TheOneThatHasTrainedLongestIsRank0) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:1,b:2
    1 ready 0,1,2
    2 joined 0,1,2 1
    3 failed 1,2
    3.1 ready 0
    3.2 joined 0 2
    5 ready 4
    5.1 wait
    6 ready 0
    6.1 joined 0,4 3
    7 ready 3
    7.1 ready 0,4
    7.2 failed 0
    7.3 ready 3,4)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
0 start 2 on b:1
1 begin 1 with 0,1,2
3 end 1 for 0,2: worker 1 on host b: died of SIGKILL
3.1 begin 2 with 0
4 start 3 on b:0
4 start 4 on b:1
5.3 announce in 2: 1 worker comes
6 begin 3 with 0,4
7 announce in 3: 1 worker comes
7.1 begin 4 with 0,4,3
7.2 end 4 for 3,4: worker 0 on host a: died of SIGKILL
7.3 begin 5 with 4,3
)");
}

TEST(MembershipTest, AMemberThatOthersHaveLostIsKilledBeforeItsHostsMemoryIsUsedAgain) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:2,b:1
    1 ready 0,1,2
    2 joined 0,1,2 1
    5 ready 0 lost 1
    5.1 ready 2 lost 1
    6.5 failed 1
    6.55 wait)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
0 start 2 on b:0
1 begin 1 with 0,1,2
5 end 1 for 1,2: worker 0 on host a has asked for another group
5.6 kill 1: it does not answer: it is stopped, or its host hangs
6.5 begin 2 with 0,2
)");
}

TEST(MembershipTest, TheOthersOnTheHostOfOneThatIsLostAnswerAtOnceOrAreLostToo) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:1,b:2
    1 ready 0,1,2
    2 joined 0,1,2 1
    5 ready 0 lost 1
    6.1 wait)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
0 start 2 on b:1
1 begin 1 with 0,1,2
5 end 1 for 1,2: worker 0 on host a has asked for another group
5.6 kill 1: it does not answer: it is stopped, or its host hangs
5.6 kill 2: it does not answer: it is stopped, or its host hangs
5.6 begin 2 with 0
)");
}

TEST(MembershipTest, AMemberThatIsStoppedIsKilledAtOnceIfOthersHaveLostIt) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:2,b:1
    1 ready 0,1,2
    2 joined 0,1,2 1
    4 stopped 2 1
    5 ready 0 lost 1
    5.1 stopped 1,2 1
    5.2 failed 1
    11 wait)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
0 start 2 on b:0
1 begin 1 with 0,1,2
5 end 1 for 1,2: worker 0 on host a has asked for another group
5.1 kill 1: it is stopped
6.1 start 3 on a:1
10 kill 2: it is stopped
10 begin 2 with 0
)");
}

TEST(MembershipTest, AMemberThatIsBusyIsWaitedFor) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:3
    1 ready 0,1,2
    2 joined 0,1,2 1
    5 ready 0 lost 1
    5.1 heard 1 1
    9 ready 1
    12 wait)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
0 start 2 on a:2
1 begin 1 with 0,1,2
5 end 1 for 1,2: worker 0 on host a has asked for another group
10 kill 2: it does not answer: it is stopped, or its host hangs
)");
}

TEST(MembershipTest, AnEvictedMemberOfAnotherHostIsNotWaitedFor) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:2,b:1
    1 ready 0,1,2
    2 joined 0,1,2 1
    5 ready 0,1 lost 2
    6 wait)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
0 start 2 on b:0
1 begin 1 with 0,1,2
5 end 1 for 1,2: worker 0 on host a has asked for another group
5.6 kill 2: it does not answer: it is stopped, or its host hangs
5.6 begin 2 with 0,1
)");
}

TEST(MembershipTest, ALossBeforeAllHaveJoinedEndsTheGeneration) {
  EXPECT_EQ(Played(Limits(2, 3), R"(0 hosts a:3
    1 ready 0,1,2
    1.1 joined 0,1 1
    1.2 failed 2
    1.3 ready 0,1)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
0 start 2 on a:2
1 begin 1 with 0,1,2
1.2 end 1 for 0,1: worker 2 on host a: died of SIGKILL
1.3 begin 2 with 0,1
)");
}

TEST(MembershipTest, AMemberThatDoesNotJoinIsKilled) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:2
    1 ready 0,1
    2 joined 0 1
    61.5 ready 0
    62 failed 1)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
1 begin 1 with 0,1
61 kill 1: it has not come to the others in time
61 end 1 for 0: worker 1 on host a: it has not come to the others in time
62 start 2 on a:1
62 begin 2 with 0
)");
}

TEST(MembershipTest, AHostThatIsListedNoMoreIsLeftBetweenTwoSteps) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:2,b:1
    1 ready 0,1,2
    2 joined 0,1,2 1
    5 hosts a:2
    6 ready 0,1,2)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
0 start 2 on b:0
1 begin 1 with 0,1,2
5 announce in 1: a worker's place on host b is listed no more, leaving: 2
6 kill 2: its place is listed no more
6 begin 2 with 0,1
)");
}

TEST(MembershipTest, AHostIsNotLeftWhereTooFewWouldStay) {
  EXPECT_EQ(Played(Limits(2, 3), R"(0 hosts a:1,b:1
    1 ready 0,1
    2 joined 0,1 1
    5 hosts a:1
    6 hosts a:1,c:1
    9 ready 2)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
1 begin 1 with 0,1
6 start 2 on c:0
9 announce in 1: a worker's place on host b is listed no more, leaving: 1
)");
}

TEST(MembershipTest, AWorkerThatItsHostHasLostMayStillRunForAWhile) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:2,b:1
    1 ready 0,1,2
    2 joined 0,1,2 1
    5 gone 1
    5.1 ready 0,2
    16 wait)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
0 start 2 on b:0
1 begin 1 with 0,1,2
5 end 1 for 0,2: worker 1 on host a: no answer
15 start 3 on a:1
15 begin 2 with 0,2
)");
}

TEST(MembershipTest, WhoHasTheStateStaysUntilAnotherOneHasItToo) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:1
    1 ready 0
    1.1 joined 0 1
    2 hosts c:1
    3 ready 1
    4 ready 0
    5 joined 0,1 2
    6 ready 0
    6.1 ready 1
    6.5 failed 0)"),
            R"(0 start 0 on a:0
1 begin 1 with 0
2 start 1 on c:0
3 announce in 1: 1 worker comes
4 begin 2 with 0,1
5 announce in 2: a worker's place on host a is listed no more, leaving: 0
6.1 kill 0: its place is listed no more
6.1 begin 3 with 1
)");
}

TEST(MembershipTest, FewerPlacesOnAHostAreLeftToo) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:3
    1 ready 0,1,2
    1.1 joined 0,1,2 1
    2 hosts a:2
    3 ready 0,1,2)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
0 start 2 on a:2
1 begin 1 with 0,1,2
2 announce in 1: a worker's place on host a is listed no more, leaving: 2
3 kill 2: its place is listed no more
3 begin 2 with 0,1
)");
}

TEST(MembershipTest, AnAnnouncedChangeIsToldAsAnEndToThoseThatDoNotFollow) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:2
    1 ready 0
    1.1 failed 1
    1.1 wait
    2 joined 0 1
    3 ready 2
    4 ready 0
    5 joined 0,2 2
    6 hosts a:1
    6.1 knows 0,2 2
    7 ready 0
    17 failed 2)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
1.1 begin 1 with 0
2.1 start 2 on a:1
3 announce in 1: 1 worker comes
4 begin 2 with 0,2
6 announce in 2: a worker's place on host a is listed no more, leaving: 2
12 end 2 for 2: a change was announced, and others have left
17 kill 2: it does not answer: it is stopped, or its host hangs
17 begin 3 with 0
)");
}

TEST(MembershipTest, AProgramThatFailsEverywhereEndsTheJob) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:2
    1 failed 0
    1.5 failed 1)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
1.5 end of the job, 3: all workers have failed; the first that ended: worker 0 on host a: died of SIGKILL
)");
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:2
    1 ready 0,1
    2 failed 0,1)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
1 begin 1 with 0,1
2 end 1 for 1: worker 0 on host a: died of SIGKILL
2 end of the job, 3: all workers have failed; the first that ended: worker 0 on host a: died of SIGKILL
)");
}

TEST(MembershipTest, AHostThatIsGoneIsOneFailureHoweverManyPlacesItHas) {
  EXPECT_EQ(Played(Limits(1, 5), R"(0 hosts a:1,b:4
    1 ready 0,1,2,3,4
    2 failed 1,2,3,4
    3.5 wait)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
0 start 2 on b:1
0 start 3 on b:2
0 start 4 on b:3
1 begin 1 with 0,1,2,3,4
2 end 1 for 0,2,3,4: worker 1 on host b: died of SIGKILL
3 start 5 on b:0
3 start 6 on b:1
3 start 7 on b:2
3 start 8 on b:3
)");
}

TEST(MembershipTest, WhereNobodyJoinsTheOneThatDoesNotAnswerIsKilled) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:3
    1 ready 0,1,2
    61.5 ready 0,1
    66.5 failed 2)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
0 start 2 on a:2
1 begin 1 with 0,1,2
61 end 1 for 0,1,2: worker 0 on host a: it has not come to the others in time
66 kill 2: it does not answer: it is stopped, or its host hangs
66.5 begin 2 with 0,1
)");
}

TEST(MembershipTest, OneThatIsKilledAndDoesNotEndEndsTheJob) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:2
    1 ready 0,1
    2 joined 0,1 1
    3 ready 0 lost 1
    70 wait)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
1 begin 1 with 0,1
3 end 1 for 1: worker 0 on host a has asked for another group
3.6 kill 1: it does not answer: it is stopped, or its host hangs
63.6 end of the job, 1: worker 1 on host a was killed, and its host has not told of its end: look at that host
)");
}

TEST(MembershipTest, OneThatDoesNotEndOnAHostThatNobodyNeedsEndsNothing) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:2,b:1
    1 ready 0,1,2
    2 joined 0,1,2 1
    5 ready 0,1 lost 2
    7 joined 0,1 2
    8 tell
    500 tell
    501 failed 2
    501.1 tell)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
0 start 2 on b:0
1 begin 1 with 0,1,2
5 end 1 for 1,2: worker 0 on host a has asked for another group
5.6 kill 2: it does not answer: it is stopped, or its host hangs
5.6 begin 2 with 0,1
8 waits for ; b is left out: worker 2 on host b was killed, and its host has not told of its end: look at that host
500 waits for ; b is left out: worker 2 on host b was killed, and its host has not told of its end: look at that host
501 start 3 on b:0
501.1 waits for 
)");
}

TEST(MembershipTest, ANewcomerThatNeitherComesNorEndsEndsNothing) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:1,b:1
    1 ready 0
    61 joined 0 1
    500 wait)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
60 kill 1: its program has not called init() within --elastic-timeout (60 s)
60 begin 1 with 0
)");
}

TEST(MembershipTest, TheOthersGoOnWithoutTheHostOfOneThatDoesNotEnd) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:1,b:2
    1 ready 0,1,2
    2 joined 0,1,2 1
    3 state 0,1,2
    5 ready 0,2 lost 1
    66 failed 2
    67 joined 0 2
    500 failed 1)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
0 start 2 on b:1
1 begin 1 with 0,1,2
5 end 1 for 1,2: worker 0 on host a has asked for another group
5.6 kill 1: it does not answer: it is stopped, or its host hangs
65.6 kill 2: the others go on without its host: worker 1 on host b was killed, and its host has not told of its end: look at that host
65.6 begin 2 with 0
500 start 3 on b:0
500 start 4 on b:1
)");
}

// The one on host a has no state, or is not enough.
TEST(MembershipTest, WhereTheOthersCannotGoOnWithoutItsHostTheJobEnds) {
  for (const auto& [least, has_state] : {std::pair(1, "1,2"), std::pair(2, "0,1,2")}) {
    const std::string log =
        Played(Limits(least, 3), std::string("0 hosts a:1,b:2\n1 ready 0,1,2\n") +
                                     "2 joined 0,1,2 1\n3 state " + has_state +
                                     "\n5 ready 0,2 lost 1\n70 wait");
    EXPECT_EQ(log.substr(log.find("5.6 kill")),
              R"(5.6 kill 1: it does not answer: it is stopped, or its host hangs
65.6 end of the job, 1: worker 1 on host b was killed, and its host has not told of its end: look at that host
)");
  }
}

TEST(MembershipTest, NobodyIsTakenInBesideOneThatDoesNotEnd) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:1
    1 ready 0
    2 joined 0 1
    5 hosts a:1,b:1
    10 hosts a:1,b:2
    66 ready 2
    500 failed 1)"),
            R"(0 start 0 on a:0
1 begin 1 with 0
5 start 1 on b:0
10 start 2 on b:1
65 kill 1: its program has not called init() within --elastic-timeout (60 s)
500 start 3 on b:0
500 announce in 1: 1 worker comes
)");
}

TEST(MembershipTest, AProgramThatHasEndedDoesNotWaitForOneThatDoesNot) {
  for (const auto& [finish, end] : {std::pair("8", "15.6"), std::pair("50", "50")}) {
    const std::string log = Played(Limits(1, 3), R"(0 hosts a:2,b:1
    1 ready 0,1,2
    2 joined 0,1,2 1
    5 ready 0,1 lost 2
    7 joined 0,1 2
    )" + std::string(finish) + " finished 0,1\n80 wait");
    EXPECT_EQ(log.substr(log.find("5.6 begin")),
              "5.6 begin 2 with 0,1\n" + std::string(end) +
                  " end of the job, 0: worker 2 on host b was killed, and its host has not told of "
                  "its end: look at that host\n");
  }
}

TEST(MembershipTest, OneThatIsStoppedWhileOthersFinishIsKilled) {
  EXPECT_EQ(Played(Limits(1, 3), R"(0 hosts a:3
    1 ready 0,1,2
    2 joined 0,1,2 1
    3 ready 0 lost 2
    3.1 finished 1
    3.2 failed 0
    4.1 failed 2)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
0 start 2 on a:2
1 begin 1 with 0,1,2
3 end 1 for 1,2: worker 0 on host a has asked for another group
3.1 kill 0: the program has ended elsewhere
3.6 kill 2: it does not answer: it is stopped, or its host hangs
4.1 end of the job, 1: worker 1 on host a has ended with exit code 0 while worker 0 on host a went on, which has lost its group by that: let all ranks end at the same place
)");
}

TEST(MembershipTest, TooFewWaitForOthersAndThenTheJobEnds) {
  EXPECT_EQ(Played(Limits(2, 2), R"(0 hosts a:1,b:1
    1 ready 0,1
    2 joined 0,1 1
    5 failed 1
    5.1 ready 0
    6.5 failed 2
    66 wait)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
1 begin 1 with 0,1
5 end 1 for 0: worker 1 on host b: died of SIGKILL
6 start 2 on b:0
8.5 start 3 on b:0
65 end of the job, 1: only 1 of at least 2 workers are there after 60 s; the last that ended: worker 2 on host b: died of SIGKILL (--min-np, --elastic-timeout)
)");
}

TEST(MembershipTest, ThereAreAtMostAsManyResetsAsAllowed) {
  ElasticLimits limits = Limits(1, 3);
  limits.resets = 1;
  EXPECT_EQ(Played(limits, R"(0 hosts a:3
    1 ready 0,1,2
    2 failed 1
    2 ready 0,2
    2.5 failed 2
    2.6 ready 0)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
0 start 2 on a:2
1 begin 1 with 0,1,2
2 end 1 for 0,2: worker 1 on host a: died of SIGKILL
2 begin 2 with 0,2
2.5 end 2 for 0: worker 2 on host a: died of SIGKILL
2.6 end of the job, 1: the workers have changed 2 times, which --reset-limit 1 does not allow; the last that ended: worker 2 on host a: died of SIGKILL
)");
}

TEST(MembershipTest, TwoThatLoseEachOtherAgainAndAgainDoNotTrainTogether) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:1,b:1
    1 ready 0,1
    1.5 joined 0,1 1
    2 ready 0 lost 1
    2 ready 1 lost 0
    2.5 joined 0,1 2
    3 ready 0 lost 1
    3 ready 1 lost 0
    3.5 joined 0,1 3
    4 ready 0 lost 1
    4 ready 1 lost 0
    4.1 wait)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
1 begin 1 with 0,1
2 end 1 for 1: worker 0 on host a has asked for another group
2 begin 2 with 0,1
3 end 2 for 1: worker 0 on host a has asked for another group
3 begin 3 with 0,1
4 end 3 for 1: worker 0 on host a has asked for another group
4 kill 1: it and worker 0 on host a have lost each other 3 times
4 begin 4 with 0
)");
}

TEST(MembershipTest, MoreThanTheMostAreSparesAndTakeTheNextPlace) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:1,b:1
    1 ready 0,1
    2 joined 0,1 1
    3 hosts b:1,c:1
    4 ready 2
    4.5 ready 0,1
    5 failed 0)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
1 begin 1 with 0,1
3 start 2 on c:0
3 announce in 1: a worker's place on host a is listed no more, leaving: 0
4.5 kill 0: its place is listed no more
4.5 begin 2 with 1,2
)");
}

TEST(MembershipTest, OneThatAsksAfterAnotherHasFinishedMakesTheJobFail) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:2
    1 ready 0,1
    2 joined 0,1 1
    3 finished 0
    3.1 ready 1 lost 0
    3.2 failed 1)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
1 begin 1 with 0,1
3.1 kill 1: the program has ended elsewhere
3.2 end of the job, 1: worker 0 on host a has ended with exit code 0 while worker 1 on host a went on, which has lost its group by that: let all ranks end at the same place
)");
}

TEST(MembershipTest, OneThatFailsWhereOthersEndWellMakesTheJobFail) {
  for (const bool first : {true, false}) {
    const std::string played = Played(Limits(2, 2), std::string(R"(0 hosts a:2
    1 ready 0,1
    2 joined 0,1 1
    )") + (first ? "3 failed 0\n    4 finished 1\n    5 failed 2"
                 : "3 finished 1\n    4 failed 0"));
    EXPECT_THAT(played,
                testing::HasSubstr("end of the job, 3: worker 0 on host a: died of SIGKILL"));
  }
}

// Others have given copies of shards to it, since nobody has told them that it leaves.
TEST(MembershipTest, OneThatIsListedNoMoreAfterAChangeWasAnnouncedStaysUntilTheNext) {
  EXPECT_EQ(Played(Limits(1, 4), R"(0 hosts a:1,b:1,c:1,d:1
    1 ready 0,1,2,3
    2 joined 0,1,2,3 1
    2.1 state 0,1,2,3
    3 hosts a:1,b:1,d:1
    4 hosts a:1,b:1
    5 ready 0,1,2,3
    6 joined 0,1,3 2
    7 ready 0,1,3)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
0 start 2 on c:0
0 start 3 on d:0
1 begin 1 with 0,1,2,3
3 announce in 1: a worker's place on host c is listed no more, leaving: 2
5 kill 2: its place is listed no more
5 begin 2 with 0,1,3
6 announce in 2: a worker's place on host d is listed no more, leaving: 3
7 kill 3: its place is listed no more
7 begin 3 with 0,1
)");
}

// The one that has failed had its partner on the host that is listed no more.
TEST(MembershipTest, OneThatIsListedNoMoreStaysWhereAnotherOneFailsBeforeItLeaves) {
  EXPECT_EQ(Played(Limits(1, 4), R"(0 hosts a:1,b:1,c:1,d:1
    1 ready 0,1,2,3
    2 joined 0,1,2,3 1
    2.1 state 0,1,2,3
    3 hosts a:1,b:1,d:1
    3.5 failed 3
    3.6 ready 0,1,2
    3.7 joined 0,1,2 2
    4 ready 0,1,2)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
0 start 2 on c:0
0 start 3 on d:0
1 begin 1 with 0,1,2,3
3 announce in 1: a worker's place on host c is listed no more, leaving: 2
3.5 end 1 for 0,1,2: worker 3 on host d: died of SIGKILL
3.6 begin 2 with 0,1,2
3.7 announce in 2: a worker's place on host c is listed no more, leaving: 2
4 kill 2: its place is listed no more
4 begin 3 with 0,1
)");
}

// The same, but it fails when it has left for the change.
TEST(MembershipTest, OneThatIsListedNoMoreStaysWhereAnotherOneFailsBehindTheGeneration) {
  EXPECT_EQ(Played(Limits(1, 4), R"(0 hosts a:1,b:1,c:1,d:1
    1 ready 0,1,2,3
    2 joined 0,1,2,3 1
    2.1 state 0,1,2,3
    3 hosts a:1,b:1,d:1
    3.4 ready 0,2,3
    3.5 failed 3
    3.6 ready 1
    3.7 joined 0,1,2 2
    4 ready 0,1,2)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
0 start 2 on c:0
0 start 3 on d:0
1 begin 1 with 0,1,2,3
3 announce in 1: a worker's place on host c is listed no more, leaving: 2
3.6 begin 2 with 0,1,2
3.7 announce in 2: a worker's place on host c is listed no more, leaving: 2
4 kill 2: its place is listed no more
4 begin 3 with 0,1
)");
}

// Nobody is lost, but the ranks have not come to the commit at which the others get copies of shards.
TEST(MembershipTest, OneThatIsListedNoMoreStaysWhereTheGroupFailsBeforeItLeaves) {
  EXPECT_EQ(Played(Limits(1, 4), R"(0 hosts a:1,b:1,c:1
    1 ready 0,1,2
    2 joined 0,1,2 1
    2.1 state 0,1,2
    3 hosts a:1,b:1
    3.5 ready 1 fault
    3.6 ready 0,2
    3.7 joined 0,1,2 2
    4 ready 0,1,2)"),
            R"(0 start 0 on a:0
0 start 1 on b:0
0 start 2 on c:0
1 begin 1 with 0,1,2
3 announce in 1: a worker's place on host c is listed no more, leaving: 2
3.5 end 1 for 0,2: worker 1 on host b has asked for another group
3.6 begin 2 with 0,1,2
3.7 announce in 2: a worker's place on host c is listed no more, leaving: 2
4 kill 2: its place is listed no more
4 begin 3 with 0,1
)");
}

// The places of all members are listed no more, and those that take over fill --max-np.
TEST(MembershipTest, WhereAllMembersHaveToLeaveOneHandsTheStateOver) {
  EXPECT_EQ(Played(Limits(1, 2), R"(0 hosts a:2
    1 ready 0,1
    2 joined 0,1 1
    2.1 state 0,1
    3 hosts b:2
    4 ready 2,3
    5 ready 0,1
    6 joined 0,2 2
    7 state 2
    8 ready 0,2
    9 joined 2,3 3
    9.1 state 3
    60 wait)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
1 begin 1 with 0,1
3 start 2 on b:0
3 start 3 on b:1
4 announce in 1: a worker's place on host a is listed no more, leaving: 1
5 kill 1: its place is listed no more
5 begin 2 with 0,2
7 announce in 2: a worker's place on host a is listed no more, leaving: 0
8 kill 0: its place is listed no more
8 begin 3 with 2,3
)");
}

// With --min-np and --max-np alike as many stay as are needed.
TEST(MembershipTest, WhereTooFewWouldStayOnlyAsManyAsAreNeededKeepTheirPlaces) {
  EXPECT_EQ(Played(Limits(3, 3), R"(0 hosts a:2,b:1
    1 ready 0,1,2
    2 joined 0,1,2 1
    2.1 state 0,1,2
    3 hosts b:1,c:1
    4 ready 3
    5 ready 0,1,2
    6 joined 0,2,3 2
    6.1 state 0,2,3
    7 hosts b:1,c:2
    8 ready 4
    9 ready 0,2,3)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
0 start 2 on b:0
1 begin 1 with 0,1,2
3 start 3 on c:0
4 announce in 1: a worker's place on host a is listed no more, leaving: 1
5 kill 1: its place is listed no more
5 begin 2 with 0,2,3
7 start 4 on c:1
8 announce in 2: a worker's place on host a is listed no more, leaving: 0
9 kill 0: its place is listed no more
9 begin 3 with 2,3,4
)");
}

// The only place is that of the worker that has the state.
TEST(MembershipTest, WhereOnePlaceIsAllThatMayBeNobodyCanTakeOver) {
  EXPECT_EQ(Played(Limits(1, 1), R"(0 hosts a:1
    1 ready 0
    2 joined 0 1
    2.1 state 0
    3 hosts b:1
    4 ready 1
    5 tell
    60 wait)"),
            R"(0 start 0 on a:0
1 begin 1 with 0
3 start 1 on b:0
5 waits for room for worker 1 on host b: the place of worker 0 on host a is listed no more, but --max-np 1 lets no other worker take the state over from it: --max-np 2 would
)");
}

TEST(MembershipTest, ThoseThatDoNotFitIntoAnAnnouncementLeaveWithTheNext) {
  constexpr int kRanks = 1000;
  const core::TimePoint now = core::TimePoint() + std::chrono::hours(1);
  Membership membership(Limits(1, kRanks));
  std::vector<std::size_t> leaving;
  std::vector<std::size_t> sizes;
  const auto take = [&] {
    std::vector<WorkerId> begun;
    for (const ElasticOrder& order : membership.TakeOrders(now)) {
      const auto* const change = std::get_if<AnnounceChange>(&order);
      const auto* const begin = std::get_if<BeginGeneration>(&order);
      if (change != nullptr) leaving.push_back(change->leaving.size());
      if (begin != nullptr) begun = begin->members;
    }
    if (!begun.empty()) sizes.push_back(begun.size());
    for (const WorkerId id : begun) membership.NoteJoined(id, membership.generation());
  };
  membership.TakeHosts({{"a", kRanks}}, now);
  take();
  for (WorkerId id = 0; id < kRanks; ++id) membership.NoteReady(id, 0, {}, now);
  take();
  membership.TakeHosts({{"a", 100}}, now);
  for (int generation = 1; generation < 4; ++generation) {
    take();
    const std::vector<WorkerId> members = membership.Members();
    for (const WorkerId id : members) membership.NoteReady(id, generation, {}, now);
    take();
    std::set<WorkerId> gone(members.begin(), members.end());
    for (const WorkerId id : membership.Members()) gone.erase(id);
    for (const WorkerId id : gone) {
      membership.NoteEnd(id, WorkerEnd::kFailed, "it was killed", now);
    }
    take();
  }
  EXPECT_EQ(leaving, (std::vector<std::size_t>{400, 400, 100}));
  EXPECT_EQ(sizes, (std::vector<std::size_t>{1000, 600, 200, 100}));
}

// Its local rank in its first generation, by which it chooses its GPU, is that of the one that is lost.
TEST(MembershipTest, OneThatReplacesAnotherTakesItsSlot) {
  EXPECT_EQ(Played(Limits(1, 4), R"(0 hosts a:4
    1 ready 0,1,2,3
    2 joined 0,1,2,3 1
    3 failed 1
    3.1 ready 0,2,3
    3.2 joined 0,2,3 2
    5 ready 4
    5.1 ready 0,2,3)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
0 start 2 on a:2
0 start 3 on a:3
1 begin 1 with 0,1,2,3
3 end 1 for 0,2,3: worker 1 on host a: died of SIGKILL
3.1 begin 2 with 0,2,3
4 start 4 on a:1
5 announce in 2: 1 worker comes
5.1 begin 3 with 0,4,2,3
)");
}

// Rank 0 is nevertheless one that has trained.
TEST(MembershipTest, TheFirstThatComesTakesTheLowestSlotThatIsLost) {
  EXPECT_EQ(Played(Limits(1, 4), R"(0 slots
    0 hosts a:4
    1 ready 0,1,2,3
    2 joined 0,1,2,3 1
    2.1 state 0,1,2,3
    3 failed 0,2
    3.1 ready 1,3
    3.2 joined 1,3 2
    5 ready 5
    6 ready 1,3
    6.1 joined 1,3,5 3
    7 ready 4
    7.1 ready 1,3,5)"),
            R"(0 start 0 on a:0
0 start 1 on a:1
0 start 2 on a:2
0 start 3 on a:3
1 begin 1 with 0,1,2,3 in slots 0,1,2,3
3 end 1 for 1,2,3: worker 0 on host a: died of SIGKILL
3.1 begin 2 with 1,3 in slots 1,3
4 start 4 on a:0
4 start 5 on a:2
5.3 announce in 2: 1 worker comes
6 begin 3 with 1,5,3 in slots 1,0,3
7 announce in 3: 1 worker comes
7.1 begin 4 with 1,5,4,3 in slots 1,0,2,3
)");
}

}  // namespace
}  // namespace sirtaki::launch
