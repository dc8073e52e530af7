// These parts end with a session. For the files that make up session::Session only.
#pragma once

#include <atomic>
#include <memory>

#include "core/engine/engine.h"
#include "core/engine/handle_hooks.h"
#include "core/engine/tensor_queue.h"
#include "core/protocol/negotiator.h"
#include "ops/lanes.h"
#include "session/base/medium.h"
#include "session/session.h"
#include "session/single/single_process_p2p.h"

namespace sirtaki::session {

// Impl has no engine in a world of one rank.
struct Session::Impl {
  ~Impl();

  std::shared_ptr<Medium> medium;  // the lanes', too, for a thread that is stuck in it
  core::TensorQueue queue;
  std::shared_ptr<core::HandleHooks> hooks;  // of a world of one rank
  SingleProcessP2p messages;                 // the same
  std::unique_ptr<core::Negotiator> negotiator;
  std::unique_ptr<ops::Lanes> lanes;
  std::unique_ptr<core::Engine> engine;
};

// An Inside marks that its thread is in a member function of the session: what runs on top of that, in
// a callback or a signal's handler, must not wait for it to end.
class Session::Inside {
 public:
  explicit Inside(const Session& session) : session_(session), outer_(Innermost()) {
    Innermost() = this;
  }
  ~Inside() { Innermost() = outer_; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

  static bool Of(const Session& session) {
    const Inside* inside = Innermost();
    while (inside != nullptr && &inside->session_ != &session) inside = inside->outer_;
    return inside != nullptr;
  }

 private:
  static const Inside*& Innermost() {
    thread_local const Inside* innermost = nullptr;
    return innermost;
  }

  const Session& session_;
  const Inside* const outer_;
};

// A Call keeps the parts alive while it uses them.
class Session::Call {
 public:
  explicit Call(const Session& session) : session_(session) {
    session_.calls_.fetch_add(1, std::memory_order_seq_cst);
    state_ = session_.state_.load(std::memory_order_seq_cst);
  }
  ~Call() {
    const bool is_last = session_.calls_.fetch_sub(1, std::memory_order_seq_cst) == 1;
    if (is_last && session_.state_.load(std::memory_order_seq_cst) == State::kGone) {
      session_.calls_over_.Ring();
    }
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  bool has_impl() const { return state_ != State::kGone; }
  // Null: the session is gone, or its world has one rank.
  core::Engine* engine() const { return has_impl() ? session_.impl_->engine.get() : nullptr; }

 private:
  const Session& session_;
  const Inside inside_{session_};
  State state_;
};

}  // namespace sirtaki::session
