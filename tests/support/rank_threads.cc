#include "tests/support/rank_threads.h"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace sirtaki::tests {

namespace {

struct Progress {
  std::mutex mutex;
  std::condition_variable ended;
  std::vector<bool> done;
  std::vector<std::string> notes;
  std::vector<std::string> errors;
  int left = 0;
  std::chrono::steady_clock::time_point noted = std::chrono::steady_clock::now();
};

thread_local Progress* current_progress = nullptr;
thread_local int current_rank = -1;

void RunRank(const std::function<void(int)>& body, int rank, Progress& progress) {
  current_progress = &progress;
  current_rank = rank;
  std::string error;
  {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, "rank " + std::to_string(rank));
    try {
      body(rank);
    } catch (const std::exception& thrown) {
      error = std::string("threw: ") + thrown.what();
    } catch (...) {
      error = "threw something that is no std::exception";
    }
  }
  const std::lock_guard<std::mutex> lock(progress.mutex);
  progress.errors[static_cast<std::size_t>(rank)] = std::move(error);
  progress.done[static_cast<std::size_t>(rank)] = true;
  --progress.left;
  progress.ended.notify_all();
}

[[noreturn]] void ReportHang(const Progress& progress, std::chrono::seconds limit) {
  const ::testing::TestInfo* test = ::testing::UnitTest::GetInstance()->current_test_info();
  std::fprintf(stderr, "%s.%s hangs: nothing new for %lld s:\n",
               test ? test->test_suite_name() : "?", test ? test->name() : "?",
               static_cast<long long>(limit.count()));
  for (std::size_t rank = 0; rank < progress.done.size(); ++rank) {
    if (progress.done[rank]) continue;
    std::fprintf(stderr, "  rank %zu: %s\n", rank,
                 progress.notes[rank].empty() ? "(no note)" : progress.notes[rank].c_str());
  }
  std::abort();
}

}  // namespace

void RankThreads::Run(int size, const std::function<void(int)>& body, std::chrono::seconds limit) {
  Progress progress;
  const auto count = static_cast<std::size_t>(size);
  progress.done.resize(count);
  progress.notes.resize(count);
  progress.errors.resize(count);
  progress.left = size;
  std::vector<std::thread> threads;
  threads.reserve(count);
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&body, rank, &progress] { RunRank(body, rank, progress); });
  }
  {
    std::unique_lock<std::mutex> lock(progress.mutex);
    while (!progress.ended.wait_until(lock, progress.noted + limit,
                                      [&] { return progress.left == 0; })) {
      if (std::chrono::steady_clock::now() >= progress.noted + limit) ReportHang(progress, limit);
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < size; ++rank) {
    const std::string& error = progress.errors[static_cast<std::size_t>(rank)];
    if (!error.empty()) ADD_FAILURE() << "rank " << rank << " " << error;
  }
}

void RankThreads::Note(std::string what) {
  if (current_progress == nullptr) return;
  const std::lock_guard<std::mutex> lock(current_progress->mutex);
  current_progress->noted = std::chrono::steady_clock::now();
  current_progress->notes[static_cast<std::size_t>(current_rank)] = std::move(what);
}

}  // namespace sirtaki::tests
