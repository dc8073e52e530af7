// What becomes of shared pools when the process forks. Shared mappings are not copied on write, so
// that a child (a worker of a data loader, a program's own) would see and change its parent's
// tensors. So fork() takes a copy of the blocks in use, in the thread that calls it, and in the
// child that copy lies where the shared memory was. vfork(), posix_spawn() and system() run none of
// this.
#pragma once

namespace sirtaki::ops::shm {

class Pool;

// The pool is kept apart in forked children from now on. Thread-safe, both.
void AddToFork(Pool& pool);
void RemoveFromFork(Pool& pool);

}  // namespace sirtaki::ops::shm
