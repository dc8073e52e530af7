// Runs N threads as the ranks of a job.
//
//   RankThreads::Run(4, [&](int rank) { ... EXPECT_EQ(...); });
//
// Failures and exceptions are reported with their rank. A run that does not end within `limit` of
// what a rank noted last names the test and the ranks that hang, with their notes, and aborts the
// process: a thread cannot be killed.
#pragma once

#include <chrono>
#include <functional>
#include <string>

namespace sirtaki::tests {

class RankThreads {
 public:
  static void Run(int size, const std::function<void(int rank)>& body,
                  std::chrono::seconds limit = std::chrono::seconds(240));

  // By a rank's thread: what it is about to do, for the watchdog's report.
  static void Note(std::string what);
};

}  // namespace sirtaki::tests
