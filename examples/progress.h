// What the user sees of a training run, from rank 0 only: a bar, and a line an epoch.
#pragma once

#include <sirtaki/torch.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <string>

namespace examples {

class Progress {
 public:
  explicit Progress(std::int64_t epochs) : epochs_(epochs), speaks_(sirtaki::rank() == 0) {
    // The terminal that mpirun gives its ranks has no width.
    winsize window{};
    bar_ = isatty(STDOUT_FILENO) && ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 &&
           window.ws_col >= 60;
  }

  void step(std::int64_t epoch, std::int64_t step, std::int64_t steps) {
    if (!speaks_ || !bar_) return;
    constexpr int kWidth = 40;
    const int done = static_cast<int>(kWidth * step / steps);
    std::printf("\repoch %3lld/%lld [%s%s]", static_cast<long long>(epoch),
                static_cast<long long>(epochs_), std::string(done, '=').c_str(),
                std::string(kWidth - done, ' ').c_str());
    std::fflush(stdout);
  }

  void epoch(std::int64_t epoch, const std::string& result) {
    if (!speaks_) return;
    std::printf("%sepoch %3lld/%lld: %s%s\n", bar_ ? "\r" : "", static_cast<long long>(epoch),
                static_cast<long long>(epochs_), result.c_str(), bar_ ? "            " : "");
    std::fflush(stdout);
  }

 private:
  const std::int64_t epochs_;
  const bool speaks_;
  bool bar_ = false;
};

}  // namespace examples
