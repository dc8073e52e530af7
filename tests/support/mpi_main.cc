#include "tests/support/mpi_main.h"

#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

namespace sirtaki::tests {
namespace {

constexpr int kSkipped = 77;  // to ctest

// For the tests' own agreements: a test may leave a collective over the world unfinished.
MPI_Comm private_world = MPI_COMM_WORLD;

bool MpiRuns() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

// The launcher's word, for texts: it is there before and after MPI.
std::string RankName() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}) {
    if (const char* value = std::getenv(name)) return value;
  }
  return "0";
}

std::chrono::seconds SecondsFrom(const char* variable, int otherwise) {
  const char* value = std::getenv(variable);
  const int seconds = value != nullptr ? std::atoi(value) : 0;
  return std::chrono::seconds(seconds > 0 ? seconds : otherwise);
}

// For one test.
std::chrono::seconds Patience() { return SecondsFrom("SIRTAKI_TEST_WATCHDOG", 150); }

// For all of them: mpirun.sh, which ends the ranks without a word, comes later.
std::chrono::seconds WholePatience() {
  return std::max(SecondsFrom("SIRTAKI_TEST_SECONDS", 280) - std::chrono::seconds(10),
                  std::chrono::seconds(5));
}

// Ends the process if what goes on takes too long, after saying what it is. Lives as long as the
// process: the end of that is watched, too.
class Watchdog {
 public:
  Watchdog() : patience_(Patience()) {
    std::thread([this] { Run(); }).detach();
  }

  void Watch(const std::string& what) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      what_ = what;
      begun_ = std::chrono::steady_clock::now();
      deadline_ = std::min(begun_ + patience_, last_);
    }
    changed_.notify_all();
  }

 private:
  static long long SecondsSince(std::chrono::steady_clock::time_point then) {
    const auto since = std::chrono::steady_clock::now() - then;
    return std::chrono::duration_cast<std::chrono::seconds>(since).count();
  }

  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (std::chrono::steady_clock::now() >= deadline_) {
        std::fprintf(stderr, "[rank %s] HANGS: %s has been running for %lld s\n",
                     RankName().c_str(), what_.c_str(), SecondsSince(begun_));
        std::fflush(nullptr);
        std::this_thread::sleep_for(std::chrono::seconds(1));  // the other ranks say theirs
        std::_Exit(1);
      }
      changed_.wait_until(lock, deadline_);
    }
  }

  const std::chrono::seconds patience_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string what_ = "the start of the program";
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  const std::chrono::steady_clock::time_point last_ = begun_ + WholePatience();
  std::chrono::steady_clock::time_point deadline_ = std::min(begun_ + patience_, last_);
};

class WatchEachTest : public testing::EmptyTestEventListener {
 public:
  explicit WatchEachTest(Watchdog& watchdog) : watchdog_(watchdog) {}
  void OnTestStart(const testing::TestInfo& test) override {
    watchdog_.Watch(std::string(test.test_suite_name()) + "." + test.name());
  }
  void OnTestEnd(const testing::TestInfo& test) override {
    watchdog_.Watch(std::string("what comes after ") + test.test_suite_name() + "." + test.name());
  }

 private:
  Watchdog& watchdog_;
};

// What all ranks but one print.
class FailurePrinter : public testing::EmptyTestEventListener {
 public:
  void OnTestStart(const testing::TestInfo& test) override {
    test_ = std::string(test.test_suite_name()) + "." + test.name();
  }
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::printf("[rank %s] %s\n%s:%d: Failure\n%s\n", RankName().c_str(), test_.c_str(),
                result.file_name() != nullptr ? result.file_name() : "unknown file",
                result.line_number(), result.message());
    std::fflush(stdout);
  }

 private:
  std::string test_;  // GoogleTest must not be asked for it while it reports a result
};

int Level(MpiStart start) {
  if (start == MpiStart::kMultiple) return MPI_THREAD_MULTIPLE;
  return start == MpiStart::kSerialized ? MPI_THREAD_SERIALIZED : MPI_THREAD_FUNNELED;
}

}  // namespace

__attribute__((weak)) MpiStart WantedMpiStart() { return MpiStart::kMultiple; }

// Asked once: the library may be in MPI.
int WorldRank() {
  static const int rank = [] {
    int found = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &found);
    return found;
  }();
  return rank;
}

int WorldSize() {
  static const int size = [] {
    int found = 1;
    MPI_Comm_size(MPI_COMM_WORLD, &found);
    return found;
  }();
  return size;
}

bool TrueOnAllRanks(bool mine) {
  int all = mine ? 1 : 0;
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Iallreduce(MPI_IN_PLACE, &all, 1, MPI_INT, MPI_MIN, private_world, &request);
  for (int done = 0; done == 0;) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    // Not a busy wait: the rank that is waited for may need this core.
    if (done == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return all != 0;
}

int Main(int argc, char** argv) {
  Watchdog& watchdog = *new Watchdog;
  const MpiStart start = WantedMpiStart();
  int provided = MPI_THREAD_MULTIPLE;
  if (start != MpiStart::kNone) {
    MPI_Init_thread(&argc, &argv, Level(start), &provided);
    MPI_Comm_dup(MPI_COMM_WORLD, &private_world);
  }
  const bool skipped = start != MpiStart::kNone && provided < Level(start);
  if (skipped) std::printf("SKIPPED: this MPI offers thread level %d only\n", provided);

  testing::InitGoogleTest(&argc, argv);
  testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
  const bool first = RankName() == "0";
  if (!first) {
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailurePrinter);
  }
  listeners.Append(new WatchEachTest(watchdog));
  const bool mine = skipped || RUN_ALL_TESTS() == 0;

  bool all = mine;
  if (MpiRuns()) {
    watchdog.Watch("the verdict of all ranks");
    all = TrueOnAllRanks(mine);
    if (first && mine && !all) std::printf("[  FAILED  ] on another rank\n");
    watchdog.Watch("MPI_Finalize");
    if (start != MpiStart::kNone) MPI_Finalize();
  }
  watchdog.Watch("the exit of the process");
  if (!all) return 1;
  const testing::UnitTest& tests = *testing::UnitTest::GetInstance();
  const bool nothing_ran = tests.successful_test_count() == 0;
  return skipped || nothing_ran ? kSkipped : 0;
}

}  // namespace sirtaki::tests

int main(int argc, char** argv) { return sirtaki::tests::Main(argc, argv); }
