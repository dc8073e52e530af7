#include "core/machine/fork_guard.h"

#include <pthread.h>

#include <atomic>

namespace sirtaki::core {

namespace {

std::atomic<int> generation{0};  // constant-initialised, so usable at any time

}  // namespace

int ForkGeneration() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);
  return generation.load(std::memory_order_relaxed);
}

}  // namespace sirtaki::core
