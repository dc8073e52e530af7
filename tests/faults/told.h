// What programs whose ranks are lost print, and how the ranks that are left wait for each other.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>

namespace sirtaki::tests {

inline void Say(const std::string& line) {
  std::fputs((line + "\n").c_str(), stdout);
  std::fflush(stdout);
}

// The first rank to end may take the job along. So each adds a byte to the file of
// SIRTAKI_TEST_TOLD, and waits until that has `count`: 12 seconds at most, or one second without
// such a file.
inline void AwaitTheOthers(std::uintmax_t count) {
  using std::chrono::steady_clock;
  const char* const told = std::getenv("SIRTAKI_TEST_TOLD");
  if (told == nullptr) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    return;
  }
  std::ofstream(told, std::ios::app) << '.';
  const steady_clock::time_point limit = steady_clock::now() + std::chrono::seconds(12);
  std::error_code none;
  while (std::filesystem::file_size(told, none) < count && steady_clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

}  // namespace sirtaki::tests
