#include "launch/reports/generations.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/trace/timeline.h"
#include "launch/reports/merge_generations.h"

namespace sirtaki::launch {
namespace {

using core::TimePoint;
using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;
using NoteKind = GenerationNote::Kind;

TimePoint AtMs(int ms) { return TimePoint(milliseconds(ms)); }

class GenerationsTest : public testing::Test {
 protected:
  GenerationsTest() {
    std::string folder = testing::TempDir() + "generations.XXXXXX";
    folder_ = mkdtemp(folder.data());
  }
  ~GenerationsTest() override { std::filesystem::remove_all(folder_); }

  void Write(const GenerationNote& note) const { WriteLine(ToLine(note)); }
  void WriteLine(const std::string& line) const {
    std::ofstream(folder_ + "/" + std::string(kGenerationsFile), std::ios::app) << line << "\n";
  }
  // Four ranks on two hosts; worker 3 is killed after 2 s, and worker 4 comes.
  void WriteJob() const {
    Write({NoteKind::kDecided, 1, AtMs(1000), "a", {0, 1, 2, 3}, {"a", "a", "b", "b"}, ""});
    Write({NoteKind::kJoined, 1, AtMs(1020), "a", {}, {}, ""});
    Write({NoteKind::kTrains, 1, AtMs(1030), "a", {}, {}, ""});
    Write({NoteKind::kLeft, 1, AtMs(3029), "b", {3}, {}, "died of SIGKILL"});
    Write({NoteKind::kLeft, 1, AtMs(3031), "b", {2}, {}, "is lost: no route to host"});
    Write({NoteKind::kOver, 1, AtMs(3030), "a", {}, {}, "worker 3 on host b: died of SIGKILL"});
    Write({NoteKind::kDecided, 2, AtMs(3040), "a", {0, 1, 2}, {"a", "a", "b"}, ""});
    Write({NoteKind::kJoined, 2, AtMs(3055), "a", {}, {}, ""});
    Write({NoteKind::kTrains, 2, AtMs(3060), "a", {}, {}, ""});
    Write({NoteKind::kOver, 2, AtMs(5060), "a", {}, {}, "1 worker comes"});
    Write({NoteKind::kDecided, 3, AtMs(5061), "a", {0, 1, 2, 4}, {"a", "a", "b", "b"}, ""});
    Write({NoteKind::kJoined, 3, AtMs(5070), "a", {}, {}, ""});
  }
  std::vector<Generation> Read() const {
    std::vector<Generation> generations;
    const core::Status status = ReadGenerations(folder_, &generations);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return generations;
  }
  // The timeline of a rank, whose clock is `zero` at time 0, with a mark at this time of its clock.
  void WriteTimeline(int generation, int rank, const std::string& host, TimePoint zero,
                     TimePoint mark, const std::string& session) const {
    const std::string folder = folder_ + "/generation-" + std::to_string(generation);
    std::filesystem::create_directories(folder);
    core::trace::TimelineFile file;
    const core::trace::TimelineIdentity identity{rank, host, {}, zero, session};
    ASSERT_TRUE(file.Open(folder + "/rank-" + std::to_string(rank) + ".json", identity, 0).ok());
    core::trace::Event event;
    event.begin = event.end = mark;
    event.SetText("here");
    ASSERT_TRUE(file.Append(std::vector<core::trace::Event>{event}).ok());
  }
  nlohmann::json Merged() {
    const GenerationsTimeline timeline = TimelineOf(folder_, Read(), &notes_);
    const std::string output = folder_ + "/timeline.json";
    const core::Status status = MergeTimelines(timeline.parts, timeline.objects, output);
    EXPECT_TRUE(status.ok()) << status.ToString();
    std::ifstream file(output);
    return nlohmann::json::parse(file);
  }

  std::string folder_;
  std::vector<std::string> notes_;
};

TEST_F(GenerationsTest, ALineIsReadAsItWasWritten) {
  const GenerationNote note{NoteKind::kLeft, 7, AtMs(12), "a \"b\"", {3}, {}, "died\nof it"};
  EXPECT_EQ(NoteFrom(ToLine(note)), note);
  EXPECT_EQ(NoteFrom("{}"), std::nullopt);
  EXPECT_EQ(NoteFrom(R"({"event":"left","generation":"x","at":1,"host":"a"})"), std::nullopt);
}

TEST_F(GenerationsTest, NoFileIsNoGeneration) { EXPECT_TRUE(Read().empty()); }

TEST_F(GenerationsTest, TellsWhoWasThereHowLongAChangeTookAndWhyItCame) {
  WriteJob();
  WriteLine("{\"event\":\"trains\",\"gener");  // it was written when the machine went down
  EXPECT_EQ(
      GenerationsText(Read()),
      "The elastic job has had 3 generations:\n"
      "  1: 4 ranks: workers 0-1 on host a, 2-3 on host b; it took 20 ms to join, 10 ms to get the "
      "state; over 2 s later: worker 3 on host b: died of SIGKILL\n"
      "     worker 2 on host b is lost: no route to host\n"
      "  2: 3 ranks: workers 0-1 on host a, 2 on host b; it began 25 ms after the one before: "
      "10 ms to leave that, 15 ms to join, 5 ms to get the state; over 2 s later: 1 worker comes\n"
      "  3: 4 ranks: workers 0-1 on host a, 2, 4 on host b; it began 10 ms after the one before: 1 "
      "ms to leave that, 9 ms to join\n");
}

TEST_F(GenerationsTest, WhyAGenerationIsOverIsToldOnce) {
  Write({NoteKind::kDecided, 1, AtMs(1000), "a", {0, 1}, {"a", "b"}, ""});
  Write({NoteKind::kLeft, 1, AtMs(3029), "b", {1}, {}, "is lost: no route to host"});
  Write({NoteKind::kOver, 1, AtMs(3030), "a", {}, {}, "worker 1 on host b: no route to host"});
  EXPECT_EQ(GenerationsText(Read()),
            "The elastic job has had 1 generation:\n"
            "  1: 2 ranks: workers 0 on host a, 1 on host b; over before it had begun: worker 1 on "
            "host b: no route to host\n");
}

TEST_F(GenerationsTest, OfManyTheLastAreTold) {
  for (int number = 1; number <= 30; ++number) {
    Write({NoteKind::kDecided, number, AtMs(number), "a", {0}, {"a"}, ""});
  }
  const std::string text = GenerationsText(Read());
  EXPECT_THAT(text, HasSubstr("30 generations, the last 20 of them:\n  11: 1 rank: "));
  EXPECT_THAT(text, testing::Not(HasSubstr("  10: ")));
}

TEST_F(GenerationsTest, AMergedTimelineHasAProcessForEachWorkerOnOneClock) {
  WriteJob();
  WriteTimeline(1, 0, "a", AtMs(1010), AtMs(1500), "one");
  WriteTimeline(1, 2, "b", AtMs(77010), AtMs(77510), "one");  // b's clock is 76 s ahead
  WriteTimeline(3, 3, "b", AtMs(81064), AtMs(81164), "three");
  WriteTimeline(3, 0, "a", AtMs(5064), AtMs(6000), "three");
  std::map<int, std::string> names;
  std::map<int, std::vector<double>> marks;
  for (const auto& object : Merged()) {
    if (object["name"] == "process_name") names[object["pid"]] = object["args"]["name"];
    if (object["name"] == "here") marks[object["pid"]].push_back(object["ts"]);
  }
  EXPECT_THAT(names,
              ElementsAre(testing::Pair(1, "worker 0 on a"), testing::Pair(3, "worker 2 on b"),
                          testing::Pair(5, "worker 4 on b"), testing::Pair(6, "sirtakirun")));
  // Microseconds since sirtakirun decided the first generation.
  EXPECT_THAT(marks[1], ElementsAre(500'000, 5'000'000));
  EXPECT_THAT(marks[3], ElementsAre(510'000));
  EXPECT_THAT(marks[5], ElementsAre(4'164'000));
}

TEST_F(GenerationsTest, AMergedTimelineShowsTheChanges) {
  WriteJob();
  std::map<std::string, double> bars;
  for (const auto& object : Merged()) {
    if (object["ph"] == "X") bars[object["name"]] = object["dur"];
  }
  EXPECT_EQ(bars["generation 1: 4 ranks: workers 0-1 on host a, 2-3 on host b"], 2'010'000);
  EXPECT_EQ(bars["worker 3 on host b: died of SIGKILL"], 30'000);
  EXPECT_EQ(bars["1 worker comes"], 10'000);
}

TEST_F(GenerationsTest, ATimelineOfAnotherRunIsLeftOut) {
  WriteJob();
  WriteTimeline(2, 0, "a", AtMs(3042), AtMs(3050), "two");
  WriteTimeline(2, 1, "a", AtMs(42), AtMs(50), "of yesterday");
  Merged();
  EXPECT_THAT(notes_, ElementsAre(HasSubstr("rank-1.json was left out")));
}

}  // namespace
}  // namespace sirtaki::launch
