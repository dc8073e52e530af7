#include "tcp/line.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "core/base/thread_annotations.h"

namespace sirtaki::tcp {

namespace {

// The descriptors of all lines. A fork waits until nobody changes them.
struct Known {
  static Known& Get() {
    static Known& known = *[] {
      auto* made = new Known;
      pthread_atfork([] { Get().mutex.Lock(); }, [] { Get().mutex.Unlock(); },
                     [] {
                       for (const int fd : Get().fds) close(fd);
                       Get().fds.clear();
                       Get().mutex.Unlock();
                     });
      return made;
    }();
    return known;
  }

  core::Mutex mutex;
  std::vector<int> fds;
};

}  // namespace

Line::Line(core::Descriptor fd) {
  if (!fd.valid()) return;
  Known& known = Known::Get();
  core::MutexLock lock(known.mutex);
  known.fds.push_back(fd.get());
  fd_ = fd.Release();
}

// In a child the number may be another file's.
void Line::Close() {
  if (!valid()) return;
  Known& known = Known::Get();
  core::MutexLock lock(known.mutex);
  const auto found = std::ranges::find(known.fds, std::exchange(fd_, -1));
  if (found == known.fds.end()) return;
  close(*found);
  known.fds.erase(found);
}

}  // namespace sirtaki::tcp
