// A SessionScope says which session the calls of a thread belong to: tests run ranks as threads.
#pragma once

#include <memory>

namespace sirtaki::detail {

class SessionState;

// A scope holds for the thread that makes it, from its construction to its end; scopes may be
// nested. Without one a thread's calls belong to the process's own session. Threads that run a
// program's code on behalf of another thread, and objects that are used later, keep what Given()
// was.
class SessionScope {
 public:
  // Null: the process's own session.
  explicit SessionScope(std::shared_ptr<SessionState> session);
  ~SessionScope();
  SessionScope(const SessionScope&) = delete;
  SessionScope& operator=(const SessionScope&) = delete;

  // Returns the session of this thread's innermost scope; null: the process's own.
  static std::shared_ptr<SessionState> Given();

 private:
  const std::shared_ptr<SessionState> session_;
  const SessionScope* const outer_;
};

// Returns the session that is given, or the process's own. Throws NotInitialized if there is none.
std::shared_ptr<SessionState> StateOf(std::shared_ptr<SessionState> given);

// Returns the session that this thread's calls belong to. Throws NotInitialized if there is none.
inline std::shared_ptr<SessionState> CurrentSession() { return StateOf(SessionScope::Given()); }

// Returns the same. Throws also if it was shut down, or in a forked child; not after a fault.
std::shared_ptr<SessionState> AliveSession();

// Joins a job after shutdown(), with all that the last init() was given. Collective; throws what
// init() throws.
void InitAgain();

}  // namespace sirtaki::detail
