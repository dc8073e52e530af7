#include "frameworks/torch/session/session_scope.h"

#include <utility>

namespace sirtaki::detail {
namespace {

thread_local const SessionScope* innermost = nullptr;

}  // namespace

SessionScope::SessionScope(std::shared_ptr<SessionState> session)
    : session_(std::move(session)), outer_(std::exchange(innermost, this)) {}

SessionScope::~SessionScope() { innermost = outer_; }

std::shared_ptr<SessionState> SessionScope::Given() {
  return innermost == nullptr ? nullptr : innermost->session_;
}

}  // namespace sirtaki::detail
