// RANKS: 1 2
// What a program learns of its own run, over real sessions.
#include "sirtaki/observability.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>

#include "sirtaki/torch.h"

namespace sirtaki {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class ObservabilityTest : public testing::Test {
 protected:
  ObservabilityTest() {
    init();
    std::string folder = testing::TempDir() + "observability.XXXXXX";
    folder_ = mkdtemp(folder.data());
  }
  ~ObservabilityTest() override { fs::remove_all(folder_); }

  json Lines() const {
    std::ifstream file(folder_ + "/traces/rank-" + std::to_string(rank()) + ".json");
    return json::parse(file);
  }
  static int Count(const json& lines, const std::string& category) {
    int count = 0;
    for (const json& line : lines) {
      count += line.value("cat", "") == category && line["ph"] != "e" && line["ph"] != "E" ? 1 : 0;
    }
    return count;
  }

  std::string folder_;
};

TEST_F(ObservabilityTest, StepsAreCountedAndDrawn) {
  torch::nn::Linear model(4, 2);
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
  auto optimizer = DistributedOptimizer(std::move(sgd), model->named_parameters());
  const Metrics before = metrics();
  start_timeline(folder_ + "/traces");
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    model->forward(torch::ones({2, 4})).sum().backward();
    optimizer.step();
  }
  stop_timeline();
  const Metrics after = metrics();
  EXPECT_EQ(after.steps - before.steps, 3);
  EXPECT_GT(after.step_seconds, before.step_seconds);
  EXPECT_EQ(after.timed_steps, after.steps - 1);
  EXPECT_EQ(after.last_step.steps, 1);
  EXPECT_GT(after.last_step.step_seconds, 0);
  EXPECT_LT(after.last_step.step_seconds, after.step_seconds);
  const json lines = Lines();
  EXPECT_EQ(Count(lines, "step"), 3);
  if (size() == 1) return;
  EXPECT_GT(after.backward_seconds, before.backward_seconds);
  EXPECT_GT(after.wait_seconds, before.wait_seconds);
  EXPECT_GE(after.last_step.bytes, 10 * 4);
  EXPECT_LT(after.last_step.bytes, after.bytes);
  EXPECT_GT(after.transfer_seconds, 0);
  EXPECT_LE(after.exposed_seconds + after.agreement_seconds, after.wait_seconds + 1e-9);
  EXPECT_LT(after.wait_seconds, after.session_seconds);
  EXPECT_GE(after.overlap.value(), 0);
  EXPECT_LE(after.last_step.overlap.value(), 1);
  EXPECT_GE(after.fusion_efficiency.value(), 0);
  EXPECT_GE(after.bytes - before.bytes, 3 * 10 * 4);
  EXPECT_EQ(Count(lines, "negotiate"), after.calls - before.calls);
  EXPECT_EQ(Count(lines, "finish"), after.groups - before.groups);
}

TEST_F(ObservabilityTest, MarksStandInTheTimeline) {
  start_timeline(folder_ + "/traces");
  mark("a \"moment\"");
  {
    const MarkedSpan outer("outer");
    const MarkedSpan inner("inner");
  }
  stop_timeline();
  json outer;
  json inner;
  int moments = 0;
  for (const json& line : Lines()) {
    if (line["name"] == "outer") outer = line;
    if (line["name"] == "inner") inner = line;
    if (line["name"] == "a \"moment\"") ++moments;
  }
  EXPECT_EQ(moments, 1);
  EXPECT_LE(outer.at("ts"), inner.at("ts"));
  EXPECT_GE(outer["ts"].get<double>() + outer["dur"].get<double>() + 0.0015,
            inner["ts"].get<double>() + inner["dur"].get<double>());
}

TEST_F(ObservabilityTest, WhatCannotBeWrittenIsAnError) {
  start_timeline(folder_ + "/traces");
  try {
    start_timeline(folder_ + "/others");
    ADD_FAILURE() << "a second timeline";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    EXPECT_NE(std::string(error.what()).find("is being written already"), std::string::npos);
  }
  stop_timeline();
  stop_timeline();
  std::ofstream(folder_ + "/file") << "x";
  EXPECT_THROW(start_timeline(folder_ + "/file/traces"), std::runtime_error);
  EXPECT_THROW(start_timeline(""), Error);
}

TEST_F(ObservabilityTest, WithoutASessionMarksDoNothingAndTheRestThrows) {
  const MarkedSpan over_the_end("span");
  shutdown();
  mark("nobody sees it");
  EXPECT_THROW(metrics(), Error);
  EXPECT_THROW(start_timeline(folder_), Error);
  EXPECT_THROW(stop_timeline(), Error);
  init();
  EXPECT_EQ(metrics().steps, 0);
}

}  // namespace
}  // namespace sirtaki
