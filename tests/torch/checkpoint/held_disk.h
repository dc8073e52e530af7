// A disk that is slow, or hangs. A program includes this in one file: from then on its fsync(), also
// that of the library, is the one below, which waits for nothing but this.
#pragma once

#include <unistd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

namespace sirtaki::tests {

// While it lives, a thread that brings a file whose path ends with `end` to the disk waits there: until
// Release(), or for `delay`; `passed` others go on before it. One at a time in a process. A temporary
// file of a checkpoint has its path here without the number of its save.
class HeldDisk {
 public:
  using Delay = std::chrono::milliseconds;

  explicit HeldDisk(std::string end, Delay delay = Delay::max(), int passed = 0) {
    const std::lock_guard<std::mutex> lock(the().mutex);
    the().end = std::move(end);
    the().passed = passed;
    the().delay = delay;
    the().on_sync = nullptr;
    the().held = 0;
    the().holds = true;
  }
  ~HeldDisk() { Release(); }
  HeldDisk(const HeldDisk&) = delete;
  HeldDisk& operator=(const HeldDisk&) = delete;

  // In place of a wait.
  void Do(std::function<void()> on_sync) {
    const std::lock_guard<std::mutex> lock(the().mutex);
    the().on_sync = std::move(on_sync);
  }
  // Waits until a thread has come there.
  void Await() {
    std::unique_lock<std::mutex> lock(the().mutex);
    the().changed.wait(lock, [] { return the().held > 0; });
  }
  // A thread that waits there goes on waiting, and one that comes from now on does not wait.
  void LetOthersPass() {
    const std::lock_guard<std::mutex> lock(the().mutex);
    the().passed = std::numeric_limits<int>::max();
  }
  void Hold() {
    const std::lock_guard<std::mutex> lock(the().mutex);
    the().holds = true;
  }
  void Release() {
    const std::lock_guard<std::mutex> lock(the().mutex);
    the().holds = false;
    the().changed.notify_all();
  }

  static void Sync(int file) {
    const std::string link = "/proc/self/fd/" + std::to_string(file);
    std::array<char, 4096> path{};
    const ssize_t length = readlink(link.c_str(), path.data(), path.size());
    State& state = the();
    std::unique_lock<std::mutex> lock(state.mutex);
    std::string name(path.data(), static_cast<std::size_t>(length < 0 ? 0 : length));
    constexpr std::size_t kNumber = sizeof(".0123456789abcdef.tmp") - 1;
    constexpr std::size_t kEnd = sizeof(".tmp") - 1;
    if (name.ends_with(".tmp") && name.size() > kNumber) {
      name.erase(name.size() - kNumber, kNumber - kEnd);
    }
    if (!state.holds || !name.ends_with(state.end) || state.passed-- > 0) return;
    ++state.held;
    state.changed.notify_all();
    if (state.on_sync) return state.on_sync();
    const auto released = [&state] { return !state.holds; };
    if (state.delay == Delay::max()) {
      state.changed.wait(lock, released);
    } else {
      state.changed.wait_for(lock, state.delay, released);
    }
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::string end;
    Delay delay = Delay::max();
    std::function<void()> on_sync;
    int passed = 0;  // threads that are still to go on
    int held = 0;    // threads that have come there
    bool holds = false;
  };
  static State& the() {
    static State* const state = new State;  // threads may be left behind in it
    return *state;
  }
};

}  // namespace sirtaki::tests

extern "C" __attribute__((visibility("default"))) int fsync(int file) {
  sirtaki::tests::HeldDisk::Sync(file);
  return 0;
}
