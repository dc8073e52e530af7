// A test looks from a forked child at what its process has.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

namespace sirtaki::tests {

// Runs `child` in a forked process, with `parent` while it runs: the child begins when the parent
// is done. Gives what the child returned, or the negative
// number of the signal that ended it.
inline int InChild(
    const std::function<int()>& child, const std::function<void()>& parent = [] {}) {
  int go[2];
  EXPECT_EQ(pipe2(go, O_CLOEXEC), 0);
  const pid_t process = fork();
  if (process == 0) {
    alarm(60);
    close(go[1]);
    char byte = 0;
    static_cast<void>(!read(go[0], &byte, 1));  // ends when the parent closes its end
    _exit(child());
  }
  close(go[0]);
  parent();
  close(go[1]);
  int status = 0;
  EXPECT_EQ(waitpid(process, &status, 0), process);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace sirtaki::tests
