#include <cstdlib>
#include <utility>

#include "core/thread_annotations.h"
#include "frameworks/session.h"

namespace sirtaki::frameworks {

namespace {

struct Holder {
  core::Mutex mutex;
  std::shared_ptr<Session> session SIRTAKI_GUARDED_BY(mutex);
  bool registered SIRTAKI_GUARDED_BY(mutex) = false;
};

Holder& TheHolder() {
  static Holder& holder = *new Holder;  // never destroyed: calls may come while the process exits
  return holder;
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
  // Registered after the medium has registered its own end, so it runs before that.
  holder.registered = std::atexit([] {
                        if (const auto last = DefaultSession()) {
                          last->ShutdownAndLog("the program exited");
                        }
                      }) == 0;
}

}  // namespace sirtaki::frameworks
