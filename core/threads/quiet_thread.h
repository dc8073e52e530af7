// A thread that signals leave alone: their handlers run on the program's threads, some of which
// wait there for what this one does. Signals of the thread's own faults are not blocked: blocked, they
// would end the process without the program's handler.
#pragma once

#include <pthread.h>
#include <signal.h>  // NOLINT(modernize-deprecated-headers): sigfillset is POSIX's

#include <thread>
#include <utility>

namespace sirtaki::core {

// Throws what std::thread's constructor does.
template <typename Body>
std::thread StartQuietThread(Body body) {
  class Blocked {
   public:
    Blocked() {
      sigset_t all;
      sigfillset(&all);
      for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) {
        sigdelset(&all, fault);
      }
      pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~Blocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    Blocked(const Blocked&) = delete;
    Blocked& operator=(const Blocked&) = delete;

   private:
    sigset_t before_{};
  };
  const Blocked blocked;  // a new thread has its maker's mask
  return std::thread(std::move(body));
}

}  // namespace sirtaki::core
