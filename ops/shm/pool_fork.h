// Shared memory becomes a forked child's own. Shared mappings are not copied on write, so
// that a child (a worker of a data loader, a program's own) would see and change its parent's
// tensors. So fork() takes a copy of what is in use, in the thread that calls it, and in the child
// that copy lies where the shared memory was. vfork(), posix_spawn() and system() run none of this.
#pragma once

namespace sirtaki::ops::shm {

// KeptApart is what a forked child gets a copy of.
class KeptApart {
 public:
  virtual void BeforeFork() = 0;
  virtual void AfterForkInParent() = 0;
  // Calls the system alone: other threads of the parent may have held any lock.
  virtual void AfterForkInChild() = 0;

 protected:
  ~KeptApart() = default;
};

// The memory is kept apart in forked children from now on. Thread-safe, both.
void AddToFork(KeptApart& memory);
void RemoveFromFork(KeptApart& memory);

// WarnOfFork says in the parent that there was no room for a copy.
void WarnOfFork();

}  // namespace sirtaki::ops::shm
