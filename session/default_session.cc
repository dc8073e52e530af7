#include <cstdlib>
#include <memory>
#include <string>

#include "core/base/thread_annotations.h"
#include "core/machine/fork_guard.h"
#include "core/machine/start_notice.h"
#include "session/session.h"

namespace sirtaki::session {

namespace {

struct Holder {
  core::Mutex mutex;
  std::shared_ptr<Session> session SIRTAKI_GUARDED_BY(mutex);
  bool registered SIRTAKI_GUARDED_BY(mutex) = false;
  int fork_generation = 0;  // of the process that has registered
};

Holder& TheHolder() {
  static Holder& holder = *new Holder;  // never destroyed: calls may come while the process exits
  return holder;
}

// The others wait for a rank that ends well. One that ends with a code has failed: they are told,
// and it does not wait for them, so that it is the first to end.
void EndWithProgram(int code, void* /*unused*/) {
  // The holder's lock may be another thread's of the parent.
  if (core::ForkGeneration() != TheHolder().fork_generation) return;
  const auto last = DefaultSession();
  if (!last) return;
  const std::string why =
      std::string(core::kProgramExited) + (code == 0 ? "" : " with code " + std::to_string(code));
  if (code != 0 && last->is_alive() && last->Check().ok() && last->topology().size > 1) {
    last->Abort(why);
    last->NoteSeen(last->fault());  // what the code is due to the program knows
  }
  last->ShutdownAndLog(why);
}

}  // namespace

std::shared_ptr<Session> DefaultSession() {
  Holder& holder = TheHolder();
  core::MutexLock lock(holder.mutex);
  return holder.session;
}

void SetDefaultSession(std::shared_ptr<Session> session) {
  Holder& holder = TheHolder();
  core::MutexLock lock(holder.mutex);
  holder.session.swap(session);
  if (!holder.session || holder.registered) return;
  // Registered after the medium has registered its own end, so it runs before that. Of glibc:
  // atexit does not tell the code.
  holder.fork_generation = core::ForkGeneration();
  holder.registered = on_exit(&EndWithProgram, nullptr) == 0;
}

}  // namespace sirtaki::session
