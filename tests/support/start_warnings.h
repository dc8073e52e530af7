// What the start over MPI warns of.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "core/base/log.h"
#include "mpi/environment.h"
#include "tests/support/mpi_interpose.h"

namespace sirtaki::tests {

// The warnings on this rank of a start that sees it on this host, under an MPI with or without ob1.
inline std::vector<std::string> WarningsOfAStart(const std::string& host, bool has_ob1) {
  std::vector<std::string> warnings;
  core::SetLogSink([&](core::LogLevel level, const std::string& line) {
    if (level == core::LogLevel::kWarning) warnings.push_back(line);
  });
  PretendHost(host);
  PretendOb1(has_ob1);
  std::unique_ptr<mpi::Environment> environment;
  const core::Status status =
      mpi::Environment::Start({}, core::Clock::now() + std::chrono::seconds(30), &environment);
  EXPECT_TRUE(status.ok()) << status.ToString();
  PretendHost("");
  core::SetLogSink(nullptr);
  return warnings;
}

}  // namespace sirtaki::tests
