// What a session writes of its rank: flight records, timelines, metrics, the table at the end.
#include "session/session_observability.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <latch>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "core/base/log.h"
#include "core/trace/trace_files.h"
#include "session/inproc/inproc_world.h"
#include "session/session.h"
#include "tests/support/rank_threads.h"
#include "tests/support/session_calls.h"
#include "tests/support/within.h"

namespace sirtaki::session {
namespace {

namespace fs = std::filesystem;
using core::Clock;
using core::OpKind;
using core::Status;
using core::trace::FlightRecord;
using core::trace::Metric;
using nlohmann::json;
using std::chrono::seconds;
using tests::RankThreads;
using tests::Vector;

std::string TextOf(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

class SessionObservabilityTest : public testing::Test {
 protected:
  SessionObservabilityTest() {
    std::string folder = testing::TempDir() + "observation.XXXXXX";
    folder_ = mkdtemp(folder.data());
  }
  ~SessionObservabilityTest() override { fs::remove_all(folder_); }

  std::shared_ptr<Session> Start(const std::shared_ptr<InprocWorld>& world, int rank,
                                 const std::function<void(core::Config&)>& change) {
    std::shared_ptr<Session> session;
    const Status status =
        Session::CreateInproc(world, rank, tests::SessionOptions(change), &session);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return session;
  }
  void WithRecords(core::Config& config) const { config.flight_records = folder_; }

  FlightRecord Record(int rank) const {
    FlightRecord record;
    const std::string path = core::trace::FlightRecordPath(folder_, rank);
    const Status status = core::trace::FlightRecordFromJson(TextOf(path), &record);
    EXPECT_TRUE(status.ok()) << path << ": " << status.ToString();
    return record;
  }
  bool HasRecord(int rank) const {
    return fs::exists(core::trace::FlightRecordPath(folder_, rank));
  }

  std::string folder_;
};

TEST_F(SessionObservabilityTest, AFaultLeavesARecordOnEveryRank) {
  const auto world = std::make_shared<InprocWorld>(2);
  std::latch submitted(1);
  RankThreads::Run(2, [&](int rank) {
    const auto session = Start(world, rank, [&](core::Config& config) { WithRecords(config); });
    Vector late(OpKind::kAllReduce, "late", {1.0F});
    if (rank == 0) {
      ASSERT_TRUE(late.Submit(*session).ok());
      submitted.count_down();
    } else {
      submitted.wait();
      session->Abort("enough");
    }
    // Before the end of the session, which would write what is missing.
    EXPECT_TRUE(tests::Within(seconds(30), [&] { return HasRecord(rank); }));
    EXPECT_FALSE(session->Shutdown("done").ok());
  });
  const FlightRecord zero = Record(0);
  EXPECT_EQ(zero.why, "the group has failed");
  EXPECT_EQ(zero.fault.message(), "enough");
  EXPECT_EQ(zero.fault.origin().rank, 1);
  ASSERT_EQ(zero.pending.size(), 1U);
  EXPECT_EQ(zero.pending[0].key, "\"late\"");
  EXPECT_TRUE(Record(1).pending.empty());
  EXPECT_EQ(Record(1).session, zero.session);
}

TEST_F(SessionObservabilityTest, Sigusr1LeavesRecordsAndTheRunGoesOn) {
  const auto world = std::make_shared<InprocWorld>(2);
  RankThreads::Run(2, [&](int rank) {
    const auto session = Start(world, rank, [&](core::Config& config) { WithRecords(config); });
    Vector first(OpKind::kAllReduce, "first", {1.0F});
    ASSERT_TRUE(first.Run(*session).ok());
    if (rank == 0) {
      ASSERT_EQ(kill(getpid(), SIGUSR1), 0);
    }
    EXPECT_TRUE(tests::Within(seconds(30), [&] { return HasRecord(0) && HasRecord(1); }));
    Vector second(OpKind::kAllReduce, "second", {1.0F});
    EXPECT_TRUE(second.Run(*session).ok());
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
  EXPECT_EQ(Record(1).why, "SIGUSR1");
  EXPECT_TRUE(Record(1).fault.ok());
  EXPECT_EQ(Record(1).sets[0].submitted, 1U);
}

TEST_F(SessionObservabilityTest, WhoWaitsInShutdownSaysSo) {
  const auto world = std::make_shared<InprocWorld>(2);
  RankThreads::Run(2, [&](int rank) {
    const auto session = Start(world, rank, [&](core::Config& config) { WithRecords(config); });
    // A rank hears of no signal that comes before its session has started.
    Vector started(OpKind::kAllReduce, "started", {1.0F});
    ASSERT_TRUE(started.Run(*session).ok());
    if (rank == 1) {
      EXPECT_TRUE(tests::Within(seconds(30), [&] {
        fs::remove(core::trace::FlightRecordPath(folder_, 0));
        return kill(getpid(), SIGUSR1) == 0 &&
               tests::Within(seconds(30), [&] { return HasRecord(0) && HasRecord(1); }) &&
               Record(0).leaving.has_value();
      }));
      EXPECT_FALSE(Record(1).leaving.has_value());
    }
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
  const FlightRecord zero = Record(0);
  ASSERT_TRUE(zero.leaving.has_value());
  EXPECT_LE(*zero.leaving, zero.now);
  EXPECT_EQ(zero.events.back().kind, core::trace::EventKind::kLeave);
  EXPECT_EQ(zero.events.back().begin, *zero.leaving);
}

TEST_F(SessionObservabilityTest, TheRecordOfAnEarlierRunIsSetAside) {
  const std::string path = core::trace::FlightRecordPath(folder_, 0);
  std::ofstream(path) << "of an earlier run";
  const auto session = Start(std::make_shared<InprocWorld>(1), 0,
                             [&](core::Config& config) { WithRecords(config); });
  EXPECT_FALSE(fs::exists(path));
  EXPECT_EQ(TextOf(folder_ + "/previous/flight-0.json"), "of an earlier run");
  EXPECT_TRUE(session->Shutdown("done").ok());
}

TEST_F(SessionObservabilityTest, TimelinesOfARunTellThatTheyAreOfIt) {
  const auto session_of = [](const json& lines) {
    return lines.at(0)["args"].value("session", "");
  };
  std::vector<std::string> runs;
  for (int run = 0; run < 2; ++run) {
    const auto world = std::make_shared<InprocWorld>(2);
    RankThreads::Run(2, [&](int rank) {
      const auto session =
          Start(world, rank, [&](core::Config& config) { config.timeline = folder_; });
      EXPECT_TRUE(session->Shutdown("done").ok());
    });
    runs.push_back(session_of(json::parse(TextOf(folder_ + "/rank-0.json"))));
    EXPECT_EQ(session_of(json::parse(TextOf(folder_ + "/rank-1.json"))), runs.back());
  }
  EXPECT_NE(runs[0], runs[1]);
  EXPECT_NE(runs[0], "");
}

TEST_F(SessionObservabilityTest, ALoneRankLeavesARecordAndATimeline) {
  const std::string traces = folder_ + "/traces";
  const auto session = Start(std::make_shared<InprocWorld>(1), 0, [&](core::Config& config) {
    WithRecords(config);
    config.timeline = traces;
  });
  session->observation().Mark("here", Clock::now(), Clock::now());
  ASSERT_EQ(kill(getpid(), SIGUSR1), 0);
  EXPECT_TRUE(tests::Within(seconds(30), [&] { return HasRecord(0); }));
  EXPECT_EQ(Record(0).events.back().text(), "here");
  session->Abort("enough");
  EXPECT_FALSE(session->Shutdown("done").ok());
  const json lines = json::parse(TextOf(traces + "/rank-0.json"));
  EXPECT_EQ(lines.back()["name"], "here");
}

TEST_F(SessionObservabilityTest, RanksThatAreThreadsLeaveNoneUnlessTheyAreTold) {
  const fs::path before = fs::current_path();
  fs::current_path(folder_);
  const auto session = Start(std::make_shared<InprocWorld>(1), 0, nullptr);
  session->Abort("enough");
  EXPECT_FALSE(session->Shutdown("done").ok());
  EXPECT_TRUE(fs::is_empty(folder_));
  fs::current_path(before);
}

// The rank is a process, with the records of the current folder.
TEST_F(SessionObservabilityTest, ARankAloneLeavesARecordOnlyIfItIsAsked) {
  const fs::path before = fs::current_path();
  fs::current_path(folder_);
  for (const int size : {1, 2}) {
    SessionObservability::Options options;
    options.topology.size = size;
    options.describe = [](const std::string& why) {
      FlightRecord record;
      record.why = why;
      return record;
    };
    SessionObservability observation(std::make_shared<core::trace::Observer>(), options);
    observation.Begin();
    observation.NoteFault();
    if (size == 1) {
      observation.End();
      EXPECT_TRUE(fs::is_empty(folder_));
    } else {
      EXPECT_TRUE(tests::Within(seconds(30), [] { return fs::exists("sirtaki-records"); }));
      observation.End();
      EXPECT_TRUE(fs::exists("sirtaki-records/flight-0.json"));
    }
  }
  fs::current_path(before);
}

TEST_F(SessionObservabilityTest, RecordsOfAFaultAreAnnouncedOnce) {
  struct sigaction former {};
  struct sigaction before {};
  former.sa_handler = [](int) {};  // the program goes on after SIGTERM
  ASSERT_EQ(sigaction(SIGTERM, &former, &before), 0);
  std::vector<std::string> lines;
  core::SetLogSink([&](core::LogLevel, const std::string& line) {
    if (line.find("wrote the flight record") != std::string::npos) lines.push_back(line);
  });
  const auto session = Start(std::make_shared<InprocWorld>(1), 0,
                             [&](core::Config& config) { WithRecords(config); });
  session->Abort("enough");
  session->observation().NoteFault();
  EXPECT_TRUE(tests::Within(seconds(30), [&] { return HasRecord(0); }));
  ASSERT_EQ(kill(getpid(), SIGTERM), 0);
  EXPECT_TRUE(tests::Within(seconds(30), [&] { return Record(0).why == "SIGTERM"; }));
  EXPECT_FALSE(session->Shutdown("done").ok());
  core::SetLogSink(nullptr);
  sigaction(SIGTERM, &before, nullptr);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_NE(lines[0].find("(the group has failed)"), std::string::npos) << lines[0];
}

TEST_F(SessionObservabilityTest, TimelinesHaveOneTimeZero) {
  const auto world = std::make_shared<InprocWorld>(2);
  std::array<core::TimePoint, 2> submitted{};
  RankThreads::Run(2, [&](int rank) {
    const auto session =
        Start(world, rank, [&](core::Config& config) { config.timeline = folder_; });
    Vector vector(OpKind::kAllReduce, "w", {1.0F});
    ASSERT_TRUE(vector.Submit(*session, /*will_wait=*/true).ok());
    submitted[static_cast<std::size_t>(rank)] = vector.work().submitted;
    ASSERT_TRUE(vector.Synchronize(*session).ok());
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
  std::array<double, 2> told{};
  for (int rank = 0; rank < 2; ++rank) {
    for (const json& line : json::parse(TextOf(core::trace::TimelinePath(folder_, rank)))) {
      if (line.value("cat", "") != "negotiate" || line["ph"] != "b") continue;
      EXPECT_EQ(line["name"], "\"w\"");
      told[static_cast<std::size_t>(rank)] = line["ts"].get<double>();
    }
  }
  const std::chrono::duration<double, std::micro> apart = submitted[1] - submitted[0];
  EXPECT_NEAR(told[1] - told[0], apart.count(), 0.01);
}

TEST_F(SessionObservabilityTest, ATimelineIsStartedAndStoppedWhileTheSessionRuns) {
  const auto session = Start(std::make_shared<InprocWorld>(1), 0, nullptr);
  SessionObservability& observation = session->observation();
  const auto mark = [&](const char* text) { observation.Mark(text, Clock::now(), Clock::now()); };
  mark("before");
  ASSERT_TRUE(observation.StartTimeline(folder_ + "/one.json").ok());
  EXPECT_EQ(observation.StartTimeline(folder_ + "/two.json").code(),
            core::StatusCode::kInvalidArgument);
  EXPECT_FALSE(observation.StartTimeline(folder_ + "/one.json").ok());
  EXPECT_TRUE(fs::exists(folder_ + "/one.json"));  // a start that is refused moves nothing
  mark("within");
  observation.StopTimeline();
  mark("after");
  const std::string text = TextOf(folder_ + "/one.json");
  EXPECT_TRUE(json::accept(text));
  EXPECT_EQ(text.find("before"), std::string::npos);
  EXPECT_NE(text.find("within"), std::string::npos);
  EXPECT_EQ(text.find("after"), std::string::npos);
  EXPECT_FALSE(observation.StartTimeline(folder_ + "/one.json/x").ok());
  EXPECT_TRUE(observation.StartTimeline(folder_ + "/two.json").ok());  // ended by the session
  EXPECT_TRUE(session->Shutdown("done").ok());
  EXPECT_TRUE(json::accept(TextOf(folder_ + "/two.json")));
}

TEST_F(SessionObservabilityTest, WhatABucketHoldsIsToldAlsoWhenItHasGone) {
  const auto session = Start(std::make_shared<InprocWorld>(1), 0, nullptr);
  SessionObservability& observation = session->observation();
  const std::string first = "bucket 0 of arena 1";
  const std::string second = "bucket 1 of arena 1";
  auto names = std::make_shared<const BucketNames>(BucketNames{
      {first, R"(the gradients of "w", "b" and 3 more)"}, {second, R"(the gradient of "v")"}});
  observation.NoteBuckets(names);
  EXPECT_EQ(observation.KeyText(first),
            R"(bucket 0 of arena 1 (the gradients of "w", "b" and 3 more))");
  EXPECT_EQ(observation.KeyText(second), R"(bucket 1 of arena 1 (the gradient of "v"))");
  EXPECT_EQ(observation.KeyText("bucket 1 of arena 10"), "bucket 1 of arena 10");
  EXPECT_EQ(observation.InWords("bucket 0 of arena 1 has waited 60 s; not submitted by rank 1; "
                                "rank 1: last submitted bucket 1 of arena 1 61 s ago"),
            R"(the gradients of "w", "b" and 3 more have waited 60 s; not submitted by rank 1; )"
            R"(rank 1: last submitted the gradient of "v" 61 s ago)");
  EXPECT_EQ(observation.InWords("bucket 1 of arena 1 has waited"),
            R"(the gradient of "v" has waited)");
  for (const char* const other :
       {"bucket 1 of arena 10 has waited", "bucket 1 of arena 1, layout 2",
        "bucket 1 of arena 1, layout 1 since join 2", "a bucket of water",
        "bucket 1 of arena 1 of process set 2"}) {
    EXPECT_EQ(observation.InWords(other), other);
  }
  EXPECT_EQ(observation.KeyText(R"("w")"), R"("w")");
  std::vector<core::trace::Event> events;
  std::uint64_t lost = 0;
  observation.observer()->recorder.Read(0, /*to_the_end=*/true, &events, &lost);
  EXPECT_EQ(std::count_if(events.begin(), events.end(),
                          [](const auto& event) {
                            return event.text() == R"(bucket 1 of arena 1 holds "v")";
                          }),
            1);
  names.reset();
  EXPECT_EQ(observation.KeyText(second), R"(bucket 1 of arena 1 (the gradient of "v"))");
  EXPECT_TRUE(session->Shutdown("done").ok());
}

TEST_F(SessionObservabilityTest, EachRankHasItsFileOfMetrics) {
  const auto world = std::make_shared<InprocWorld>(2);
  RankThreads::Run(2, [&](int rank) {
    const auto session = Start(world, rank, [&](core::Config& config) {
      config.metrics_file = folder_ + "/m.csv";
      config.metrics_interval = seconds(3600);
    });
    for (int i = 0; i < 3; ++i) {
      Vector vector(OpKind::kAllReduce, "w", {1.0F, 2.0F});
      ASSERT_TRUE(vector.Run(*session).ok());
    }
    EXPECT_TRUE(session->Shutdown("done").ok());
    EXPECT_EQ(session->observation().observer()->metrics.Read().Count(Metric::kBytes), 24);
  });
  EXPECT_NE(TextOf(folder_ + "/m.1.csv").find(",1,0,0,0,"), std::string::npos);
}

TEST_F(SessionObservabilityTest, TheTableAtTheEndIsOfAllRanks) {
  const auto world = std::make_shared<InprocWorld>(3);
  testing::internal::CaptureStderr();
  RankThreads::Run(3, [&](int rank) {
    const auto session = Start(world, rank, [&](core::Config& config) { config.summary = true; });
    Vector vector(OpKind::kAllReduce, "w", {1.0F});
    ASSERT_TRUE(vector.Run(*session).ok());
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(text.find("sirtaki: what the ranks have done\nrank "), 0U) << text;
  for (const char* line : {"\n   0 ", "\n   1 ", "\n   2 "}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << text;
  }
}

// One rank has no more batches: the others learn it, and do not wait for each other's tables.
TEST_F(SessionObservabilityTest, WithATableARankMayStillLeaveEarly) {
  const auto world = std::make_shared<InprocWorld>(2);
  testing::internal::CaptureStderr();
  RankThreads::Run(2, [&](int rank) {
    const auto session = Start(world, rank, [&](core::Config& config) { config.summary = true; });
    if (rank == 0) {
      Vector vector(OpKind::kAllReduce, "w", {1.0F});
      const Status status = vector.Run(*session);
      EXPECT_NE(status.message().find("rank 1 has shut down"), std::string::npos)
          << status.ToString();
    }
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
  testing::internal::GetCapturedStderr();
}

TEST_F(SessionObservabilityTest, PathsLeadWhereTheyDidAtTheStart) {
  const fs::path before = fs::current_path();
  fs::current_path(folder_);
  const auto session = Start(std::make_shared<InprocWorld>(1), 0, [](core::Config& config) {
    config.flight_records = "records";
    config.metrics_file = "m.csv";
    config.metrics_interval = seconds(3600);
  });
  fs::create_directory("elsewhere");
  fs::current_path("elsewhere");
  session->Abort("enough");
  EXPECT_FALSE(session->Shutdown("done").ok());
  EXPECT_TRUE(fs::is_empty(fs::current_path()));
  fs::current_path(before);
  EXPECT_TRUE(fs::exists(folder_ + "/records/flight-0.json"));
  EXPECT_TRUE(fs::exists(folder_ + "/m.0.csv"));
}

TEST_F(SessionObservabilityTest, NoTimelineBeginsAfterTheEnd) {
  const auto session = Start(std::make_shared<InprocWorld>(1), 0, nullptr);
  EXPECT_TRUE(session->Shutdown("done").ok());
  EXPECT_EQ(session->observation().StartTimeline(folder_ + "/late.json").code(),
            core::StatusCode::kNotInitialized);
  EXPECT_FALSE(fs::exists(folder_ + "/late.json"));
}

TEST_F(SessionObservabilityTest, ARankThatHasLeftDoesNotKeepTheOthersFromEnding) {
  const auto world = std::make_shared<InprocWorld>(2);
  testing::internal::CaptureStderr();
  RankThreads::Run(2, [&](int rank) {
    const auto session = Start(world, rank, [&](core::Config& config) { config.summary = true; });
    if (rank == 1) session->Abort("enough");
    EXPECT_FALSE(session->Shutdown("done").ok());
  });
  EXPECT_EQ(testing::internal::GetCapturedStderr().find("what the ranks"), std::string::npos);
}

TEST_F(SessionObservabilityTest, AFolderThatCannotBeMadeIsAWarning) {
  std::ofstream(folder_ + "/file") << "x";
  testing::internal::CaptureStderr();
  const auto session = Start(std::make_shared<InprocWorld>(1), 0, [&](core::Config& config) {
    config.timeline = folder_ + "/file/traces";
    config.metrics_file = folder_ + "/file/m.csv";
  });
  EXPECT_TRUE(session->Shutdown("done").ok());
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find(folder_ + "/file/traces\" cannot be made: Not a directory"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find(folder_ + "/file\" cannot be made: Not a directory"), std::string::npos)
      << text;
}

}  // namespace
}  // namespace sirtaki::session
