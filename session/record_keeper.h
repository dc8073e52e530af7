// A record keeper writes flight records when something goes wrong: its thread sleeps until a fault or
// a signal asks for them. Whoever asks must not block (it holds the engine's token) or may do next to
// nothing (it is a signal's handler); writing needs memory, locks and time.
//
// The signals are SIGUSR1, which asks for records and nothing else; SIGTERM; and SIGABRT, with
// which a check of ours, and a program that leaves an exception uncaught, end. While anything is
// registered their handlers are ours; the handlers before them are called after the records are
// there, or a few seconds have passed. In a forked child nothing is written.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "core/base/types.h"

namespace sirtaki::session {

class RecordKeeper {
 public:
  // `why`, as in "SIGTERM". One at a time, on the keeper's thread, or where no thread is left on the one
  // that ends the registration; may take a second or so.
  using Write = std::function<void(const std::string& why)>;

  struct Entry;  // of record_keeper.cc

  // Thread-safe.
  class Registration {
   public:
    ~Registration() { static_cast<void>(End()); }
    Registration(const Registration&) = delete;
    Registration& operator=(const Registration&) = delete;

    // Ask is for any thread and never blocks; it does nothing after End. `why` outlives the
    // registration.
    void Ask(const char* why);
    // Sees that what was asked for is written before it returns; nothing is written after it. False:
    // a write has not ended in time, and what it uses must stay for ever. Idempotent.
    bool End();

   private:
    friend class RecordKeeper;
    explicit Registration(std::shared_ptr<Entry> entry) : entry_(std::move(entry)) {}
    const std::shared_ptr<Entry> entry_;
  };

  // `patience`: how long End() waits for a write, whose file system may hang.
  static std::unique_ptr<Registration> Register(Write write,
                                                core::Duration patience = std::chrono::seconds(10));
};

}  // namespace sirtaki::session
