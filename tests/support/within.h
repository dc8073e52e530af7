// Waiting for an event that nothing announces.
#pragma once

#include <chrono>
#include <functional>
#include <thread>

namespace sirtaki::tests {

// Looks until `done` says so; false when `limit` is over before.
inline bool Within(std::chrono::seconds limit, const std::function<bool()>& done) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace sirtaki::tests
