// Sends and receives as they are submitted.
#pragma once

#include <memory>
#include <string>

#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/session/session_state.h"
#include "sirtaki/messages.h"

namespace sirtaki::detail {

// Throws InvalidArgument if nothing can come of it, whatever the peer does.
void CheckMessage(const P2POp& operation, const MessageOptions& options, SessionState& session);

// Submits. `label`: what records say of it behind peer and tag; empty: nothing. Precondition:
// CheckMessage has passed.
std::shared_ptr<PendingTensor> StartMessage(const P2POp& operation, const MessageOptions& options,
                                            bool will_wait, std::shared_ptr<SessionState> session,
                                            const std::string& label = "");

}  // namespace sirtaki::detail
