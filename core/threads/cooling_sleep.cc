#include "core/threads/cooling_sleep.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace sirtaki::core {
namespace {

constexpr auto kYield = std::chrono::microseconds(50);
constexpr Duration kShortest = std::chrono::microseconds(20);
constexpr int kShare = 20;  // of the time waited

}  // namespace

void CoolingSleep::Pause() {
  const Duration waited = Clock::now() - since_;
  if (waited < kYield) {
    std::this_thread::yield();
    return;
  }
  std::this_thread::sleep_for(std::clamp(waited / kShare, kShortest, longest_));
}

}  // namespace sirtaki::core
