#include "session/record_keeper.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/thread_annotations.h"
#include "core/threads/quiet_thread.h"

namespace sirtaki::session {

struct RecordKeeper::Entry {
  Write write;
  core::Duration patience;
  std::atomic<const char*> asked{nullptr};  // why
  const char* signal = nullptr;             // the keeper's, under its lock: the signal that asks
};

namespace {

using EntryPtr = std::shared_ptr<RecordKeeper::Entry>;

// How long a signal that ends the process waits for the records. A launcher that ends its ranks
// gives them longer, and what holds the writer up may be what the signal has interrupted.
constexpr int kPatienceMs = 3000;
constexpr int kLookMs = 5;

struct Watched {
  int signal;
  const char* name;
};
constexpr std::array<Watched, 3> kSignals = {
    {{SIGUSR1, "SIGUSR1"}, {SIGTERM, "SIGTERM"}, {SIGABRT, "SIGABRT"}}};

// Handlers see this state, which is never destroyed, and constant while they are set.
struct Shared {
  pid_t process = 0;
  pthread_t thread{};
  int wake = -1;  // an eventfd: something was asked for
  std::atomic<bool> runs{false};
  std::array<std::atomic<bool>, kSignals.size()> asked{};
  std::atomic<std::uint32_t> signals{0};  // how many have asked,
  std::atomic<std::uint32_t> served{0};   // and how many of them have what they asked for
  std::array<struct sigaction, kSignals.size()> before{};
  // The former handler was for one signal (SA_RESETHAND), which has come.
  std::array<std::atomic<bool>, kSignals.size()> spent{};
};
Shared& TheShared() {
  static Shared& shared = *new Shared;
  return shared;
}

// Async-signal-safe.
void Ring(int descriptor) {
  const std::uint64_t one = 1;
  (void)!write(descriptor, &one, sizeof one);
}
// Sleeps until something was asked for. False: the program has closed the descriptor.
bool Drain(int descriptor) {
  std::uint64_t count = 0;
  return read(descriptor, &count, sizeof count) > 0 || errno == EINTR;
}

bool IsHandler(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 ||
         (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN);
}

// The former handler is called as if ours had not been there. Without one SIGUSR1 ends nothing: it asks
// for records, and what a rank has forked to load its data has none.
void CallFormer(std::size_t index, int signal, siginfo_t* info, void* context) {
  const struct sigaction& before = TheShared().before[index];
  const bool once = IsHandler(before) && (before.sa_flags & SA_RESETHAND) != 0;
  if (IsHandler(before) && !(once && TheShared().spent[index].exchange(true))) {
    if ((before.sa_flags & SA_SIGINFO) != 0) return before.sa_sigaction(signal, info, context);
    return before.sa_handler(signal);
  }
  if (!once && before.sa_handler == SIG_IGN) return;
  if (signal == SIGUSR1) return;
  struct sigaction standard {};
  standard.sa_handler = SIG_DFL;
  sigaction(signal, &standard, nullptr);
  (void)raise(signal);  // delivered when the handler has returned
}

void OnSignal(int signal, siginfo_t* info, void* context) {
  const int saved = errno;
  Shared& shared = TheShared();
  std::size_t index = 0;
  while (kSignals[index].signal != signal) ++index;
  const bool is_child = getpid() != shared.process;
  if (!is_child && shared.runs && pthread_equal(pthread_self(), shared.thread) == 0) {
    shared.asked[index] = true;
    const std::uint32_t number = ++shared.signals;
    Ring(shared.wake);
    for (int waited = 0; signal != SIGUSR1 && waited < kPatienceMs; waited += kLookMs) {
      if (static_cast<std::int32_t>(shared.served - number) >= 0) break;
      (void)poll(nullptr, 0, kLookMs);
    }
  }
  CallFormer(index, signal, info, context);
  errno = saved;
}

// The thread and what is registered. Never destroyed; both come and go with the registrations.
class Keeper {
 public:
  void Add(EntryPtr entry) SIRTAKI_EXCLUDES(control_, mutex_) {
    core::MutexLock control(control_);
    bool first = false;
    {
      core::MutexLock lock(mutex_);
      first = entries_.empty();
      entries_.push_back(std::move(entry));
    }
    if (first) Begin();
  }

  // False: the record is still written, by a thread that stays.
  bool Remove(const EntryPtr& entry) SIRTAKI_EXCLUDES(control_, mutex_) {
    core::MutexLock control(control_);
    bool is_written = false;
    bool last = false;
    {
      core::MutexLock lock(mutex_);
      if (std::find(entries_.begin(), entries_.end(), entry) == entries_.end()) return true;
      if (!TheShared().runs) WriteAsked();
      const auto is_awaited = [&]() SIRTAKI_REQUIRES(mutex_) {
        return writes_ == entry || (IsAsked(*entry) && (TheShared().runs || writes_ != nullptr));
      };
      const core::TimePoint limit = core::Clock::now() + entry->patience;
      while (is_awaited() && changed_.WaitUntil(mutex_, limit)) {
      }
      std::erase(entries_, entry);
      last = entries_.empty() && writes_ == nullptr;
      is_written = writes_ != entry;
    }
    if (last) End();
    return is_written;
  }

 private:
  void Begin() SIRTAKI_REQUIRES(control_) {
    Shared& shared = TheShared();
    if (thread_.joinable()) {  // it stayed
      if (shared.runs) return;
      End();
    }
    if (shared.wake < 0) shared.wake = eventfd(0, EFD_CLOEXEC);
    if (shared.wake < 0) return;  // no descriptor is left: only the end of a session writes
    shared.process = getpid();
    shared.runs = true;
    // The thread that writes must not be the one that waits for it.
    try {
      thread_ = core::StartQuietThread([this] { Run(); });
    } catch (const std::system_error&) {  // no thread is left: as above
      shared.runs = false;
      return;
    }
    shared.thread = thread_.native_handle();
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      struct sigaction now {};
      sigaction(kSignals[i].signal, nullptr, &now);
      if (overruled_[i] && IsHandler(now)) continue;
      shared.before[i] = now;
      shared.spent[i] = false;
      struct sigaction ours {};
      ours.sa_sigaction = &OnSignal;
      ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
      // What the program's handler was set with goes on: calls that it interrupts, signals that may
      // interrupt it.
      if (IsHandler(now)) {
        ours.sa_flags |= now.sa_flags & (SA_RESTART | SA_NODEFER);
        ours.sa_mask = now.sa_mask;
      } else {
        ours.sa_flags |= SA_RESTART;
        sigfillset(&ours.sa_mask);
      }
      sigaction(kSignals[i].signal, &ours, nullptr);
    }
  }

  void End() SIRTAKI_REQUIRES(control_) {
    Shared& shared = TheShared();
    if (!thread_.joinable()) return;
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      struct sigaction now {};
      sigaction(kSignals[i].signal, nullptr, &now);
      overruled_[i] = (now.sa_flags & SA_SIGINFO) == 0 || now.sa_sigaction != &OnSignal;
      if (!overruled_[i]) sigaction(kSignals[i].signal, &shared.before[i], nullptr);
    }
    shared.runs = false;
    Ring(shared.wake);
    thread_.join();
    thread_ = {};
  }

  void Run() SIRTAKI_EXCLUDES(mutex_) {
    pthread_setname_np(pthread_self(), "sirtaki-records");
    Shared& shared = TheShared();
    while (shared.runs && Drain(shared.wake)) {
      const std::uint32_t signals = shared.signals;
      for (std::size_t i = 0; i < kSignals.size(); ++i) {
        if (!shared.asked[i].exchange(false)) continue;
        core::MutexLock lock(mutex_);
        for (const EntryPtr& entry : entries_) entry->signal = kSignals[i].name;
        WriteAsked();
      }
      {
        core::MutexLock lock(mutex_);
        WriteAsked();
      }
      shared.served = signals;
    }
    core::MutexLock lock(mutex_);
    shared.runs = false;
    WriteAsked();
    changed_.NotifyAll();
  }

  static bool IsAsked(const RecordKeeper::Entry& entry) {
    return entry.signal != nullptr || entry.asked != nullptr;
  }

  // Writes without the lock, as a file system may hang. Whoever writes already goes on with all.
  void WriteAsked() SIRTAKI_REQUIRES(mutex_) {
    while (writes_ == nullptr) {
      const auto place = std::find_if(entries_.begin(), entries_.end(),
                                      [](const EntryPtr& entry) { return IsAsked(*entry); });
      if (place == entries_.end()) return;
      const EntryPtr entry = writes_ = *place;
      const char* why = std::exchange(entry->signal, nullptr);
      if (why == nullptr) why = entry->asked.exchange(nullptr);
      mutex_.Unlock();
      try {
        entry->write(why);
      } catch (const std::exception&) {  // memory is too short even to say so
      }
      mutex_.Lock();
      writes_ = nullptr;
      changed_.NotifyAll();
    }
  }

  core::Mutex control_;  // held while the thread comes and goes
  std::thread thread_ SIRTAKI_GUARDED_BY(control_);
  // The program has set a handler after ours, which may go on to ours: it stays, and ours is not
  // set before it again.
  std::array<bool, kSignals.size()> overruled_ SIRTAKI_GUARDED_BY(control_){};
  core::Mutex mutex_;
  core::CondVar changed_;  // a record was written
  std::vector<EntryPtr> entries_ SIRTAKI_GUARDED_BY(mutex_);
  EntryPtr writes_ SIRTAKI_GUARDED_BY(mutex_);  // the one that is written
};

Keeper& TheKeeper() {
  static Keeper& keeper = *new Keeper;
  return keeper;
}

}  // namespace

bool RecordKeeper::Registration::End() { return TheKeeper().Remove(entry_); }

void RecordKeeper::Registration::Ask(const char* why) {
  entry_->asked.store(why);
  Ring(TheShared().wake);
}

std::unique_ptr<RecordKeeper::Registration> RecordKeeper::Register(Write write,
                                                                   core::Duration patience) {
  auto entry = std::make_shared<Entry>();
  entry->write = std::move(write);
  entry->patience = patience;
  TheKeeper().Add(entry);
  return std::unique_ptr<Registration>(new Registration(std::move(entry)));
}

}  // namespace sirtaki::session
